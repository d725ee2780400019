"""Files and folders of a run: written so that they outlive a crash of the machine, sealed with sums, and at URLs, too.

A file's data is on disk after ``fsync`` of the file, its name after ``fsync`` of the folder. What is written here has
its data on disk before it gets its name. A sealed folder has a manifest, which is written last and makes it whole: size
and SHA-256 of every file, and facts: plain values of the one who sealed it.

Another package may put its own :class:`Files` in their place, in :data:`lightppo.plugin.FILES`. Whoever reads or writes
a file of a run asks :func:`files_in_use`.
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
from typing import IO, Any, NamedTuple

from lightppo import storage
from lightppo.errors import ConfigError, StorageError
from lightppo.plugin import FILES
from lightppo.storage import is_url, without_scheme

MANIFEST = "lightppo_manifest.json"


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
        self.file = path.open("wb")
        self.hasher = hasher
        self.hash = hashlib.sha256()
        self.size = 0
        self.error = None

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
        """Do nothing: it is on disk at the end."""

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
    """Write a new file by ``fill(file)``; its data is on disk then, its name is not yet.

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
    """Replace a text: the whole one is under this name or what was there before, whenever the machine stops."""
    path = Path(path)
    if path.is_dir():
        raise StorageError(
            f"{path} is a folder, and a file is to be written there: remove or rename the folder"
        )
    temporary = path.with_name(f".{path.name}.tmp")
    write_file(temporary, lambda file: file.write(text.encode()))
    rename(temporary, path)


def rename(source: Path, target: Path) -> None:
    """Rename as ``os.replace`` does; it is on disk when this returns."""
    os.replace(source, target)
    for folder in {source.parent, target.parent}:
        sync_folder(folder)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it; of a link only the link: what it leads to is not ours."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on disk."""
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
        facts: plain values to keep, see :func:`facts_of`.
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
    """Put a file that another library wrote on disk, and return what it holds."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return digest(path)


def digest(path: Path, length: float = math.inf) -> Digest:
    """Return size and sum of a file, or of its first ``length`` bytes."""
    total = hashlib.sha256()
    size = 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(int(min(_CHUNK, length - size))):
            total.update(chunk)
            size += len(chunk)
    return Digest(size, total.hexdigest())


def blocks_of(path: Path, count: int = 16, size: int = 1 << 16) -> Iterator[bytes]:
    """Yield blocks from the beginning to the end of a file: of any length, it takes no time to see that it is another."""
    length = path.stat().st_size
    with path.open("rb") as stream:
        for number in range(count):
            stream.seek(max(0, length - size) * number // (count - 1))
            yield stream.read(size)


def _sum_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read_manifest(folder: Path) -> dict[str, Any]:
    """Return what a manifest says; StorageError where it is missing, or was altered."""
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
        if isinstance(content["files"], list):  # names alone, which older versions could write
            return content
        is_whole = content.pop("sha256") == _sum_of(content)
    except FileNotFoundError:
        raise StorageError(f"{MANIFEST} is missing") from None
    except (ValueError, TypeError, AttributeError, KeyError):
        is_whole = False
    except OSError as error:
        raise StorageError(f"{MANIFEST} cannot be read ({error.strerror})") from error
    if not is_whole:
        raise StorageError(f"{MANIFEST} has other content than was written")
    return content


def manifest(folder: Path) -> dict[str, Any]:
    """Return ``files`` and ``facts`` of a sealed folder; both are empty where there is no whole manifest."""
    try:
        return _read_manifest(folder)
    except StorageError:
        return {"files": {}, "facts": {}}


def seal_of(folder: Path) -> str | None:
    """Return the sum of a sealed folder's manifest, which names its files and its facts; None without a whole one."""
    try:
        return _sum_of(_read_manifest(folder))
    except StorageError:
        return None


def damage(folder: Path, share: int = 0, shares: int = 1) -> list[str]:
    """Return what is damaged in a sealed folder, a text per file: nothing if it is as it was sealed.

    Args:
        share, shares: only this share of the files is looked at.
    """
    try:
        files = _read_manifest(folder)["files"]
    except StorageError as error:
        return [str(error)]
    if isinstance(files, list):
        return []
    written = {name: Digest(*files[name]) for name in files}
    own_share = sorted(written, key=lambda name: (-written[name].size, name))[share::shares]
    with ThreadPoolExecutor(_THREADS) as pool:
        changes = pool.map(lambda name: change(folder, name, written[name]), own_share)
        return [text for text in changes if text is not None]


def change(folder: Path, name: str, written: Digest, grows: bool = False) -> str | None:
    """Return what has happened to a file since it was ``written``; None: nothing, or it ``grows`` and has more."""
    try:
        size = (folder / name).stat().st_size
        if size < written.size or (size > written.size and not grows):
            return f"{name} has {size} bytes, {written.size} were written"
        if written.sha256 is not None and digest(folder / name, written.size) != written:
            return f"{name} has other content than was written"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None


# -- before anything is written --------------------------------------------------------------------------------------


def check_writable(folder: str | os.PathLike[str], flag: str) -> None:
    """Refuse a folder that cannot be made, or written to: makes it, writes a file, and leaves all as it was.

    URLs are not looked at.
    """
    if "://" in os.fspath(folder):
        return
    path = Path(folder).expanduser().absolute()
    existing = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    if os.path.exists(existing) and not existing.is_dir():
        raise ConfigError(f"{flag} {folder}: {existing} is a file, not a folder: name another one")
    new_folders: list[Path] = []
    file_times = os.stat(existing) if os.path.exists(existing) else None
    try:
        missing_folders = [parent for parent in (path, *path.parents) if not os.path.exists(parent)]
        for missing in reversed(missing_folders):
            missing.mkdir()
            new_folders.append(missing)
        with tempfile.TemporaryFile(dir=path):
            pass
    except FileExistsError:  # made by another process meanwhile
        return
    except OSError as error:
        raise ConfigError(
            f"{flag} {folder}: {existing} cannot be written to ({error.strerror}): name another folder"
        ) from error
    finally:
        with suppress(OSError):  # another process may have written into it
            for new_folder in reversed(new_folders):
                new_folder.rmdir()
            if file_times is not None:
                os.utime(existing, ns=(file_times.st_atime_ns, file_times.st_mtime_ns))


# -- errors of a disk ------------------------------------------------------------------------------------------------

_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM)


def is_at(path: Path, file: IO[str]) -> bool:
    """Tell whether an open file is still the one of that name."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


@contextmanager
def explained(folder: Path, needed: int | None = None) -> Iterator[None]:
    """Turn the error of a full or read-only disk, whichever library said so, into a StorageError that says what to do.

    Args:
        needed: bytes that are written inside.
    """
    try:
        yield
    except StorageError:
        raise
    except Exception as error:
        if explanation := _explanation(error, folder, needed):
            raise StorageError(explanation) from error
        raise


def _explanation(error: Exception, folder: Path, needed: int | None) -> str | None:
    """Return what an error says of the disk, and what to do; None: nothing."""
    # Rust's libraries raise errors of their own, with the system's words in them.
    numbers = [
        number
        for number in (*_FULL, *_REFUSED)
        if getattr(error, "errno", None) == number or os.strerror(number) in str(error)
    ]
    if not numbers:
        return None
    if numbers[0] in _FULL:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        need = "" if needed is None else f"{shown_size(needed)} are needed, "
        free = f"{shown_size(shutil.disk_usage(there).free)} are free"
        problem = f"{folder}: the disk is full: {need}{free}"
        remedy = "lower --max_ckpt_num, or choose another disk with --ckpt_path"
    else:
        problem = f"{folder}: cannot be written ({os.strerror(numbers[0])})"
        remedy = "make it writable, or choose another --ckpt_path"
    return f"{problem}: {remedy} (for model and logs --save_path)"


def shown_size(count: float) -> str:
    """Return a text such as 1.5 GB, 20.0 MB or 300 bytes: never 0.0 of something."""
    for unit, size in {"GB": 1e9, "MB": 1e6, "kB": 1e3}.items():
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:.0f} bytes"


# -- the files in use ------------------------------------------------------------------------------------------------


class Files:
    """How files and folders of a run are read, written, sealed and published. A subclass may override each method."""

    check = staticmethod(storage.check_scheme)
    bring = staticmethod(storage.stage_to_local)
    local = staticmethod(storage.local_folder)
    fetch = staticmethod(storage.download)
    publish = staticmethod(storage.upload)
    write = staticmethod(write_file)
    write_text = staticmethod(write_text)
    rename = staticmethod(rename)
    remove = staticmethod(remove)
    seal = staticmethod(seal)
    manifest = staticmethod(manifest)
    damage = staticmethod(damage)
    explained = staticmethod(explained)


def files_in_use() -> Files:
    """Return the files that were registered last."""
    return FILES.last()


def local_folder(folder: str | os.PathLike[str]) -> Path:
    """Return where this process reads and writes a folder of the run: the folder itself, or what stands for its URL."""
    return files_in_use().local(folder)


def stage_to_local(path: str) -> str:
    """Return the local path of a file or folder that is only read; what is no URL stays as it is."""
    return files_in_use().bring(path)


def check_file_url(url: str, flag: str) -> None:
    """Raise StagingError, which names the flag, for a URL that cannot be used. Nothing is read."""
    files_in_use().check(url, flag)


def facts_of(folder: Path) -> dict[str, Any]:
    """Return what a folder was sealed with; nothing where it is not sealed."""
    return files_in_use().manifest(folder)["facts"]


def join(folder: str | os.PathLike[str], name: str) -> str | Path:
    """Return a path inside a folder; a URL stays one."""
    text = os.fspath(folder)
    if is_url(text):
        return f"{text.rstrip('/')}/{name}"
    return Path(without_scheme(text)) / name
