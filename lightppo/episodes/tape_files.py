"""Files of a tape: a JSON object a line, each with a hash of itself and of the line before.

``tape/step3_rank0of2.jsonl`` holds what rank 0 of 2 was told in step 3, and in the evaluation behind it. Its first
line holds the hash of the last line of the file before. A checkpoint keeps the hash of the last line so far, so an
altered file shows, and the line is named.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightppo.config.cli import exit_on_mistakes
from lightppo.errors import ConfigError, UserError

FOLDER = "tape"
VERSION = 1
HEADER = "tape"  # kind of a file's first entry
_encode = json.JSONEncoder(separators=(",", ":")).encode
_NAME = re.compile(r"step(\d+)_rank(\d+)of(\d+)\.jsonl")
_TAIL = re.compile(rb',"hash":"([0-9a-f]{64})"\}\Z')
# What tells which reply an entry holds, in the order in which it is said.
_KEYS = ("phase", "step", "prompt", "sample", "try", "turn", "place", "tool", "source")

Entry = dict[str, Any]


class TapeError(UserError, RuntimeError):
    """Say that a tape was altered, or does not have the answer to what a run asks."""


@dataclass(frozen=True)
class TapeEnd:
    """Hold the end of a tape, for a checkpoint. Of no records: there is none yet."""

    step: int  # of the file
    records: int  # lines of it, the first one included
    hash: str  # of its last line

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> TapeEnd:
        """Return the head in what a checkpoint keeps, which has more beside it."""
        return cls(state["step"], state["records"], state["hash"])


@dataclass
class TapeFile:
    """Hold the content of one file, whose hashes are right."""

    path: Path
    entries: list[Entry] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)
    size: int = 0  # bytes of the whole lines
    torn: int = 0  # bytes behind them, of a line that was not written to its end

    @property
    def before(self) -> str | None:
        """Return the hash of the last line of the file before."""
        return self.entries[0]["before"] if self.entries else None

    @property
    def head(self) -> TapeEnd:
        return TapeEnd(self.entries[0]["step"], len(self.hashes), self.hashes[-1])


def file_name(step: int, rank: int, ranks: int) -> str:
    return f"step{step}_rank{rank}of{ranks}.jsonl"


def _all_files(folder: Path) -> Iterator[tuple[int, int, int, Path]]:
    """Yield step, rank, number of ranks and path."""
    for path in folder.glob("step*.jsonl"):
        if name_match := _NAME.fullmatch(path.name):
            step, rank, ranks = map(int, name_match.groups())
            yield step, rank, ranks, path


def files_of(folder: Path, rank: int, ranks: int) -> dict[int, Path]:
    """Return a rank's files by step, in order."""
    files = _all_files(folder)
    return dict(sorted((step, path) for step, *writer, path in files if writer == [rank, ranks]))


def numbers_of_ranks(folder: Path) -> set[int]:
    """Return how many ranks have written the tape; several where a run went on with another number."""
    return {ranks for _, _, ranks, _ in _all_files(folder)}


# -- write -----------------------------------------------------------------------------------------------------------


def chained(entries: Iterable[Mapping[str, Any]], previous_hash: str) -> tuple[bytes, list[str]]:
    """Return the lines of entries that follow a line with the hash ``previous_hash``, and their hashes.

    Raises:
        TypeError: JSON cannot hold a value.
    """
    lines = []
    hashes = []
    for entry in entries:
        body = _encode(entry).encode()
        previous_hash = _hash(previous_hash, body)
        hashes.append(previous_hash)
        lines.append(body[:-1] + b',"hash":"' + previous_hash.encode() + b'"}\n')
    return b"".join(lines), hashes


def _hash(previous_hash: str, body: bytes) -> str:
    return hashlib.sha256(previous_hash.encode() + body).hexdigest()


# -- read ------------------------------------------------------------------------------------------------------------


def read_tape_file(path: Path, all_entries: bool = True) -> TapeFile:
    """Return a file whose hashes are checked. A line that a crash tore, at the end, is left out.

    Args:
        all_entries: False: of the entries, only the first one.

    Raises:
        TapeError: it names the line that was altered, and which reply it holds.
    """
    tape_file = TapeFile(path)
    previous_hash = ""
    file_bytes = path.read_bytes()
    lines = file_bytes.split(b"\n")
    tape_file.torn = len(lines.pop())
    for number, line in enumerate(lines, start=1):
        hash_match = _TAIL.search(line)
        body = line[: hash_match.start()] + b"}" if hash_match else line
        if hash_match is None or _hash(previous_hash, body) != hash_match[1].decode():
            raise TapeError(_altered(path, number, line, tape_file.entries))
        previous_hash = hash_match[1].decode()
        if all_entries or not tape_file.entries:
            tape_file.entries.append(json.loads(body))
        tape_file.hashes.append(previous_hash)
    tape_file.size = len(file_bytes) - tape_file.torn
    _check_header(tape_file)
    return tape_file


def _altered(path: Path, number: int, line: bytes, earlier_entries: list[Entry]) -> str:
    try:
        content = described(json.loads(line))
    except (ValueError, TypeError, AttributeError):
        content = "no JSON"
        if earlier_entries:
            content = f"it is no JSON; the line before: {described(earlier_entries[-1])}"
    return (
        f"{path}:{number} was altered, or a line before it is missing: {content}. Restore the file; a run that "
        "goes on can also do without it: move it away. Steps that are done then cannot be replayed; for others, "
        "replies are asked for again"
    )


def _check_header(tape_file: TapeFile) -> None:
    header = tape_file.entries[0] if tape_file.entries else {"kind": HEADER, "version": VERSION}
    if (header.get("kind"), header.get("version")) != (HEADER, VERSION):
        raise TapeError(
            f"{tape_file.path}:1 is not the beginning of a tape of version {VERSION}: it was altered, or "
            "another lightppo wrote it"
        )


def described(entry: Mapping[str, Any]) -> str:
    """Return which reply an entry holds, in words."""
    named_fields = [
        f"{field_name} {entry[field_name]}" for field_name in _KEYS if field_name in entry
    ]
    return f"{entry.get('kind', 'entry')} of {', '.join(named_fields)}"


def check_follows(tape_file: TapeFile, previous_hash: str | None) -> None:
    """Raise TapeError where a file does not begin where the one before ends; None: there is none."""
    if None not in (previous_hash, tape_file.before) and tape_file.before != previous_hash:
        raise TapeError(
            f"{tape_file.path}:1 does not follow the end of the file before: lines of one of them were "
            "altered or are missing"
        )


def check_end(tape_file: TapeFile, head: TapeEnd, checkpoint: str) -> None:
    """Raise TapeError where a file is not as a ``checkpoint`` knows it; it may have more lines by now."""
    if len(tape_file.hashes) < head.records:
        raise TapeError(
            f"{tape_file.path} has {len(tape_file.hashes)} lines, and {checkpoint} knows {head.records}: restore the file"
        )
    if tape_file.hashes[head.records - 1] != head.hash:
        raise TapeError(
            f"{tape_file.path}: one of its first {head.records} lines is not as {checkpoint} knows it: restore the file"
        )


def missing_files(folder: Path, rank: int, ranks: int, last_step: int) -> list[str]:
    """Read a rank's files up to ``last_step``; where files are missing between them, in words.

    Raises:
        TapeError: it names the line that was altered.
    """
    other_steps = {
        step
        for rank_count in numbers_of_ranks(folder) - {ranks}
        for step in files_of(folder, 0, rank_count)
    }
    gaps: list[str] = []
    previous_strip: TapeFile | None = None
    previous_step = -1  # its step
    for step, path in files_of(folder, rank, ranks).items():
        if step > last_step:
            break
        tape_file = read_tape_file(path, all_entries=False)
        if not tape_file.entries:
            continue
        previous_hash = None if previous_strip is None else previous_strip.hashes[-1]
        # Between two numbers of ranks a file begins with the ends of all.
        if tape_file.before not in (None, previous_hash) and not any(
            previous_step < other_step < step for other_step in other_steps
        ):
            if previous_strip is not None and previous_step == step - 1:
                check_follows(tape_file, previous_hash)
            beginning = "" if previous_strip is None else f"behind step {previous_step} and "
            gaps.append(f"{beginning}before step {step}")
        previous_strip = tape_file
        previous_step = step
    return gaps


# -- before a tape plays -------------------------------------------------------------------------------------------------


def look(config: Any, program_name: str) -> None:
    """Look at ``--tape_from`` before anything heavy is imported."""
    if os.environ.get("RANK", "0") == "0":
        with exit_on_mistakes(program_name):
            check_folder(config, int(os.environ.get("WORLD_SIZE", "1")))


def check_folder(config: Any, ranks: int) -> None:
    """Raise ConfigError where ``--tape_from`` names no tape, or one of another number of ranks."""
    run_folder = config.flat().get("tape_from")
    if run_folder is None:
        return
    tape_folder = Path(run_folder).expanduser() / FOLDER
    if not tape_folder.is_dir():
        raise ConfigError(
            f"--tape_from {run_folder}: there is no {tape_folder}: name the --save_path of a run that wrote a tape"
        )
    if ranks not in (written_counts := numbers_of_ranks(tape_folder)):
        rank_counts = " or ".join(map(str, sorted(written_counts))) or "no"
        raise ConfigError(
            f"--tape_from {run_folder}: {rank_counts} ranks wrote its tape, and this run has {ranks}: take as many processes"
        )
