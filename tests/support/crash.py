"""What a crash of the machine may leave of a folder: every file operation is logged, un-synced data and names are lost.

A file has its data on disk after its ``fsync``, a folder its names after the folder's. Before, a crash leaves of a file
its last synced data, nothing, half or all; of a folder's names any state since its last ``fsync``.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

Names = dict[str, int]  # name in a folder → node


@dataclass
class Moment:
    """The tree after one operation, and what a crash at this moment cannot take."""

    what: str
    folders: dict[int, Names]
    data: dict[int, bytes]
    synced_at: dict[int, int]  # folder → moment of its last fsync, or of its making
    synced_data: dict[int, bytes]


@dataclass
class DiskLog:
    root: Path
    moments: list[Moment] = field(default_factory=list)
    # inode → node; inodes are used again, nodes are not
    nodes: dict[int, int] = field(default_factory=dict)
    last: int = 0

    def note(self, what: str, synced: int | None = None) -> None:
        folders: dict[int, Names] = {}
        data: dict[int, bytes] = {}
        seen: dict[int, int] = {}

        def node_of(path: Path) -> int:
            inode = path.stat().st_ino
            if inode not in self.nodes:
                self.last += 1
                self.nodes[inode] = self.last
            seen[inode] = self.nodes[inode]
            return seen[inode]

        def walk(folder: Path) -> int:
            names: Names = {}
            for path in sorted(folder.iterdir()):
                if path.is_dir():
                    names[path.name] = walk(path)
                else:
                    names[path.name] = node = node_of(path)
                    data[node] = path.read_bytes()
            folders[node := node_of(folder)] = names
            return node

        walk(self.root)
        self.nodes = seen
        first, now = not self.moments, len(self.moments)
        before = None if first else self.moments[-1]
        synced_at = {} if first else dict(before.synced_at)
        synced_data = dict(data) if first else dict(before.synced_data)
        for node in folders:
            synced_at.setdefault(node, now)
        if synced in seen:
            node = seen[synced]
            if node in folders:
                synced_at[node] = now
            else:
                synced_data[node] = data[node]
        self.moments.append(Moment(what, folders, data, synced_at, synced_data))

    def states(self, seed: int = 0) -> Iterator[tuple[str, dict[str, bytes]]]:
        """(what happened last, files that may be found after a crash), each combination once."""
        draw, known = random.Random(seed), set()
        for now, moment in enumerate(self.moments):
            for names in ("lost", "kept", "any", "any"):
                for content in ("lost", "torn", "kept"):
                    state = self._state(now, names, content, draw)
                    key = frozenset((path, hash(data)) for path, data in state.items())
                    if key not in known:
                        known.add(key)
                        yield f"{now}: {moment.what}; names {names}, data {content}", state

    def _state(self, now: int, names: str, content: str, draw: random.Random) -> dict[str, bytes]:
        moment, found = self.moments[now], {}

        def data_of(node: int) -> bytes:
            written = next(
                m.data[node] for m in reversed(self.moments[: now + 1]) if node in m.data
            )
            synced = moment.synced_data.get(node)
            if synced == written or content == "kept":
                return written
            # of a file that has grown
            kept = synced if synced and written.startswith(synced) else b""
            return (
                (synced or b"") if content == "lost" else written[: (len(kept) + len(written)) // 2]
            )

        def walk(folder: int, path: str) -> None:
            first = moment.synced_at.get(folder, now)
            at = {"lost": first, "kept": now, "any": draw.randint(first, now)}[names]
            there = next(
                (
                    self.moments[i].folders[folder]
                    for i in range(at, -1, -1)
                    if folder in self.moments[i].folders
                ),
                {},
            )
            for name, node in there.items():
                if any(node in m.folders for m in self.moments[: now + 1]):
                    walk(node, f"{path}{name}/")
                else:
                    found[f"{path}{name}"] = data_of(node)
            found[f"{path}."] = b""  # the folder itself

        root = next(
            node
            for node in moment.folders
            if all(node not in n.values() for n in moment.folders.values())
        )
        walk(root, "")
        return found


def noted(log: DiskLog, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def done(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        log.note(f"{name} {args[0]}")
        return result

    return done


@contextmanager
def logged(root: Path) -> Iterator[DiskLog]:
    """The log of what is done below ``root``; operations on other files are not in it."""
    log = DiskLog(root)
    log.note("start")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("replace", "rename", "unlink", "remove", "rmdir", "mkdir"):
            patch.setattr(os, name, noted(log, name, getattr(os, name)))

        def fsync(handle, _original=os.fsync):
            log.note("written")
            _original(handle)
            number = handle if isinstance(handle, int) else handle.fileno()
            log.note(
                f"fsync {os.readlink(f'/proc/self/fd/{number}')}", synced=os.fstat(number).st_ino
            )

        patch.setattr(os, "fsync", fsync)
        yield log
        log.note("end")


def lay_out(state: dict[str, bytes], folder: Path, blobs: Path) -> None:
    """Make the files of a state; equal data is one file, so they are to be replaced, never written into."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, data in state.items():
        path = folder / name
        if name.endswith("."):
            path.mkdir(parents=True, exist_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        blob = blobs / f"{hash(data):x}"
        if not blob.exists():
            blob.write_bytes(data)
        os.link(blob, path)
