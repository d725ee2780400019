"""Files that outlive a crash of the machine, and folders that show when they were altered.

A file's data is on disk after ``fsync`` of the file, its name after ``fsync`` of the folder. What is written here has
its data on disk before it gets its name. A sealed folder has a manifest: size and SHA-256 of every file.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from lightppo.errors import ConfigError, StorageError
from lightppo.files import MANIFEST


class Digest(NamedTuple):
    """What a file holds."""

    size: int
    sha256: str | None  # None: only the size is known


_THREADS = min(8, os.cpu_count() or 1)
_CHUNK = 1 << 22  # bytes read at once; and of a write from which on a thread of its own hashes


# -- write -----------------------------------------------------------------------------------------------------------


class _HashedFile:
    """Hashes what it writes, at the same time.

    After a failure it takes all further data and forgets it: torch's C++ writer would hide the reason, or abort.
    """

    def __init__(self, path: Path, hasher: ThreadPoolExecutor) -> None:
        self.file, self.hasher = path.open("wb"), hasher
        self.hash, self.size, self.error = hashlib.sha256(), 0, None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self.error is None:
            hashing: Future | None = None
            if view.nbytes >= _CHUNK:
                hashing = self.hasher.submit(self.hash.update, view)  # both release Python's lock
            else:
                self.hash.update(view)
            try:
                self.file.write(view)
                self.size += view.nbytes
            except OSError as error:
                self.error = error
            if hashing is not None:
                hashing.result()
        return view.nbytes

    def flush(self) -> None:
        """Nothing: it is on disk at the end."""

    def close(self) -> Digest:
        try:
            if self.error is None:
                self.file.flush()
                os.fsync(self.file.fileno())
        finally:
            with suppress(OSError):  # of a flush that failed before
                self.file.close()
        if self.error is not None:
            raise self.error
        return Digest(self.size, self.hash.hexdigest())


def write_file(path: str | os.PathLike[str], fill: Callable[[Any], Any]) -> Digest:
    """A new file that ``fill(file)`` writes; its data is on disk then, its name is not yet.

    Raises:
        OSError: of a write, also where ``fill`` raised something else because of it.
    """
    with ThreadPoolExecutor(1) as hasher:
        file = _HashedFile(Path(path), hasher)
        try:
            fill(file)
        except BaseException as error:
            file.error = file.error or error
        return file.close()


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """The whole text under this name or what was there before, whenever the machine stops."""
    path = Path(path)
    if path.is_dir():
        raise StorageError(
            f"{path} is a folder, and a file is to be written there: remove or rename the folder"
        )
    temporary = path.with_name(f".{path.name}.tmp")
    write_file(temporary, lambda file: file.write(text.encode()))
    rename(temporary, path)


def rename(source: Path, target: Path) -> None:
    """``os.replace``, on disk when it returns."""
    os.replace(source, target)
    for folder in {source.parent, target.parent}:
        sync_folder(folder)


def remove_folder(folder: Path, aside: Path) -> None:
    """Whole or gone, whenever the machine stops; at worst ``aside`` is left."""
    rename(folder, aside)
    remove(aside)


def remove(path: Path) -> None:
    """A folder with all that is in it, or a file; of a link only the link: what it leads to is not ours."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path)


def sync_folder(folder: Path) -> None:
    """The names in a folder are on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that does not know it
            raise
    finally:
        os.close(handle)


# -- manifests -------------------------------------------------------------------------------------------------------


def seal(folder: Path, known: Mapping[str, Digest] = {}, **facts: Any) -> None:
    """Put all files of a folder on disk, and their manifest beside them, which makes the folder whole.

    Args:
        known: of files that this or another rank wrote with :func:`write_file`, by name below the folder.
        facts: plain values to keep, see :func:`manifest`.
    """
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST]
    names = sorted(path.relative_to(folder).as_posix() for path in files)
    if missing := sorted(known.keys() - set(names)):
        raise StorageError(
            f"{folder}: {missing[0]}, which another rank wrote, is not here: all nodes must share it"
        )
    others = [name for name in names if name not in known]
    with ThreadPoolExecutor(_THREADS) as pool:
        settled = pool.map(lambda name: _settle(folder / name), others)
        digests = dict(known) | dict(zip(others, settled))
    for below in {folder, *((folder / name).parent for name in names)}:
        sync_folder(below)
    content = {"files": {name: digests[name] for name in names}, "facts": facts}
    write_text(folder / MANIFEST, json.dumps(content | {"sha256": _sum_of(content)}, indent=1))


def _settle(path: Path) -> Digest:
    """Of a file that another library wrote: on disk when it returns."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return digest(path)


def digest(path: Path, first: float = math.inf) -> Digest:
    """Of the ``first`` bytes of a file."""
    found, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(int(min(_CHUNK, first - size))):
            found.update(chunk)
            size += len(chunk)
    return Digest(size, found.hexdigest())


class UnreadableManifestError(StorageError):
    """A manifest is missing, or was altered."""


def _sum_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read_manifest(folder: Path) -> dict[str, Any]:
    """Raises UnreadableManifestError."""
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
        if isinstance(content["files"], list):  # names alone, of a core without plugins
            return content
        is_whole = content.pop("sha256") == _sum_of(content)
    except FileNotFoundError:
        raise UnreadableManifestError(f"{MANIFEST} is missing") from None
    except (ValueError, TypeError, AttributeError, KeyError):
        is_whole = False
    except OSError as error:
        raise UnreadableManifestError(f"{MANIFEST} cannot be read ({error.strerror})") from error
    if not is_whole:
        raise UnreadableManifestError(f"{MANIFEST} has other content than was written")
    return content


def read_digests(folder: Path) -> dict[str, Digest]:
    """The files of a folder that was sealed with sums. UnreadableManifestError: its manifest is missing or altered."""
    files = _read_manifest(folder)["files"]
    return {} if isinstance(files, list) else {name: Digest(*files[name]) for name in files}


def changed_size(folder: Path, name: str, written: Digest, grows: bool = False) -> str | None:
    """What has happened to a file since it was ``written``, by its size; None: nothing, or it ``grows`` and has."""
    try:
        size = (folder / name).stat().st_size
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    if size < written.size or (size > written.size and not grows):
        return f"{name} has {size} bytes, {written.size} were written"
    return None


def is_sealed(folder: Path) -> bool:
    """Whether a folder has a manifest, whatever is in it."""
    return (folder / MANIFEST).is_file()


def manifest(folder: Path) -> dict[str, Any]:
    """``files`` and ``facts`` of a sealed folder; both empty where there is no whole manifest."""
    try:
        return _read_manifest(folder)
    except UnreadableManifestError:
        return {"files": {}, "facts": {}}


def seal_of(folder: Path) -> str | None:
    """The sum of a sealed folder's manifest, which names its files and its facts; None without a whole one."""
    try:
        return _sum_of(_read_manifest(folder))
    except UnreadableManifestError:
        return None


def check(folder: Path, share: int = 0, shares: int = 1) -> list[str]:
    """What is damaged in a sealed folder, a text per file: nothing if it is as it was sealed.

    Args:
        share, shares: only this share of the files is looked at.
    """
    try:
        files = read_digests(folder)
    except UnreadableManifestError as error:
        return [str(error)]
    mine = sorted(files, key=lambda name: (-files[name].size, name))[share::shares]

    with ThreadPoolExecutor(_THREADS) as pool:
        return [
            text
            for text in pool.map(lambda name: change(folder, name, files[name]), mine)
            if text is not None
        ]


def change(folder: Path, name: str, written: Digest, grows: bool = False) -> str | None:
    """What has happened to a file since it was ``written``; None: nothing, or it ``grows`` and has more at its end."""
    if (text := changed_size(folder, name, written, grows)) is not None:
        return text
    try:
        if written.sha256 is not None and digest(folder / name, written.size) != written:
            return f"{name} has other content than was written"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None


# -- before anything is written --------------------------------------------------------------------------------------


def check_writable(folder: str | os.PathLike[str], flag: str) -> None:
    """Refuses a folder that cannot be made, or written to: makes it, writes a file, and leaves all as it was.

    URLs are not looked at.
    """
    if "://" in os.fspath(folder):
        return
    path = Path(folder).expanduser().absolute()
    there = next(p for p in (path, *path.parents) if os.path.lexists(p))
    if os.path.exists(there) and not there.is_dir():
        raise ConfigError(f"{flag} {folder}: {there} is a file, not a folder: name another one")
    made: list[Path] = []
    times = os.stat(there) if os.path.exists(there) else None
    try:
        for missing in reversed([p for p in (path, *path.parents) if not os.path.exists(p)]):
            missing.mkdir()
            made.append(missing)
        with tempfile.TemporaryFile(dir=path):
            pass
    except FileExistsError:  # made by another process meanwhile
        return
    except OSError as error:
        raise ConfigError(
            f"{flag} {folder}: {there} cannot be written to ({error.strerror}): name another folder"
        ) from error
    finally:
        with suppress(OSError):  # another process may have written into it
            for folder_of_ours in reversed(made):
                folder_of_ours.rmdir()
            if times is not None:
                os.utime(there, ns=(times.st_atime_ns, times.st_mtime_ns))


# -- errors of a disk ------------------------------------------------------------------------------------------------

_FULL, _REFUSED = (errno.ENOSPC, errno.EDQUOT), (errno.EROFS, errno.EACCES, errno.EPERM)


def problem(error: BaseException, folder: Path, needed: int | None = None) -> StorageError | None:
    """What a full or read-only disk means for the user, whichever library said so; ``None`` for another error.

    Args:
        needed: bytes that were to be written.
    """

    # Rust's libraries raise errors of their own, with the system's words in them
    def is_one(number: int) -> bool:
        return getattr(error, "errno", None) == number or os.strerror(number) in str(error)

    if any(map(is_one, _FULL)):
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        need = "" if needed is None else f"{shown_size(needed)} are needed, "
        free = f"{shown_size(shutil.disk_usage(there).free)} are free"
        remedy = "lower --max_ckpt_num, or choose another disk with --ckpt_path (for model and logs --save_path)"
        return StorageError(f"{folder}: the disk is full: {need}{free}: {remedy}")
    if any(map(is_one, _REFUSED)):
        reason = next(os.strerror(number) for number in _REFUSED if is_one(number))
        remedy = "make it writable, or choose another --ckpt_path (for model and logs --save_path)"
        return StorageError(f"{folder}: cannot be written ({reason}): {remedy}")
    return None


def shown_size(count: float) -> str:
    """Such as 1.5 GB, 20.0 MB or 300 bytes: never 0.0 of something."""
    for unit, size in {"GB": 1e9, "MB": 1e6, "kB": 1e3}.items():
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:.0f} bytes"


@contextmanager
def explained(folder: Path, needed: int | None = None) -> Iterator[None]:
    """A disk that is full or read-only is a StorageError that says what to do."""
    try:
        yield
    except StorageError:
        raise
    except Exception as error:
        if (found := problem(error, folder, needed)) is not None:
            raise found from error
        raise
