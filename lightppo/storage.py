"""Files and folders by URL, through fsspec: read from a copy on this node; written here, then uploaded."""

from __future__ import annotations

import fnmatch
import hashlib
import itertools
import logging
import os
import posixpath
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lightppo.errors import StagingError
from lightppo.redaction import GIVE_WHOLE, is_cut, login_of, shown_url, without_secrets

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "LIGHTPPO_CACHE"
_WAITS = (0.0, 2.0, 10.0)  # seconds before further tries
_TIMES = ("mtime", "LastModified", "created")  # of a change, as file systems name them


def is_url(path: str | os.PathLike[str]) -> bool:
    """Tell whether a path is on no file system of this machine; ``file:///folder`` is."""
    text = os.fspath(path)
    return "://" in text and not text.startswith(("file://", "local://"))


def without_scheme(path: str) -> str:
    """Return a local path that may be written as ``file:///folder``."""
    return path.split("://", 1)[-1]


# -- the cache of this node: copies that can be made again -------------------------------------------------------------


def cache_folder() -> Path:
    """Return where this node keeps copies that can be made again."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "lightppo")


def in_cache(kind: str, key: Any, name: str, cache_dir: str | Path | None = None) -> Path:
    """Return a place in this node's cache."""
    return (
        Path(cache_dir or cache_folder())
        / kind
        / hashlib.sha256(repr(key).encode()).hexdigest()[:24]
        / name
    )


def made_once(
    target: Path, make: Callable[[Path], object], description: str, timeout_s: float = 3600.0
) -> Path:
    """Make a file or folder by the first process that comes, whole or not at all; others wait. It stays."""
    from filelock import FileLock, Timeout

    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        return target
    lock = FileLock(target.parent / ".lock", timeout=timeout_s)
    try:
        with lock.acquire(poll_interval=0.5):
            if not target.exists():
                make(target)
    except Timeout as error:
        waited = f"another process on this node has been at it for over {timeout_s:g} s"
        raise TimeoutError(
            f"{description}: {waited}; see its log (lock {lock.lock_file})"
        ) from error
    return target


# -- read ------------------------------------------------------------------------------------------------------------


def stage_to_local(
    url: str, *, cache_dir: str | Path | None = None, timeout_s: float = 3600.0
) -> str:
    """Return the local path of a file or folder; a URL is first copied to this node's cache, unless an equal copy is there.

    No half copy is ever used, and a remote file that has changed (size, time, etag) is copied again. ``cache_dir`` is
    ``$LIGHTPPO_CACHE`` by default, else ``~/.cache/lightppo``; ``timeout_s`` limits the wait for another process.
    """
    if not is_url(url):
        return without_scheme(url)

    import fsspec

    check_scheme(url)
    try:
        file_system, remote = fsspec.core.url_to_fs(url, **_as_given(url))
        info = file_system.info(remote)
        is_folder = info["type"] == "directory"
        # find() is for folders only: over HTTP, it would read a file in search of links.
        remote_files: dict[str, dict[str, Any]] = (
            file_system.find(remote, detail=True) if is_folder else {remote: info}
        )
    except Exception as error:  # each file system raises its own errors
        raise StagingError(f"{shown_url(url)} cannot be read: {_reason(error)}") from error
    if not remote_files:
        raise StagingError(f"{shown_url(url)} is an empty folder, or does not exist")
    versions = ("ETag", "etag", "md5Hash", *_TIMES)  # the first that the file system knows
    files = [
        (name, info.get("size"), str(next((info[key] for key in versions if info.get(key)), "")))
        for name, info in sorted(remote_files.items())
    ]
    sizes = [size for _, size, _ in files]
    size = None if None in sizes else sum(sizes)
    if "ETag" in info and remote == url:  # another signature of the same content
        files = [(shown_url(name), *facts) for name, *facts in files]
        key = shown_url(url)
    else:
        key = url
    target = in_cache("staged", [key, files], _name_of(remote), cache_dir)
    copy = partial(_copy, file_system, remote, url=url, is_folder=is_folder, size=size)
    return str(made_once(target, copy, url, timeout_s))


def _as_given(url: str) -> dict[str, Any]:
    """Return how to open a URL: one that is quoted already, as a signed one is, is sent to the letter."""
    if url.startswith(("http://", "https://")) and "%" in url:
        return {"encoded": True}
    return {}


def _name_of(remote: str) -> str:
    """Return the name of the copy: of a URL without its query, which may be a signature."""
    path = urlsplit(remote).path if "://" in remote else remote
    return posixpath.basename(path.rstrip("/")) or "root"


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {without_secrets(str(error))}"


def check_scheme(url: str, flag: str = "the URL") -> Any:
    """Return fsspec's class for a URL; StagingError if there is none or its package is not installed. No network."""
    from fsspec import available_protocols, get_filesystem_class

    scheme = url.split("://")[0]
    address = shown_url(url)
    if is_cut(url):
        raise StagingError(f"{flag} {url}: {GIVE_WHOLE}")
    try:
        return get_filesystem_class(scheme)
    except ValueError as error:
        schemes = ", ".join(sorted(available_protocols()))
        raise StagingError(
            f"{flag} {address}: unknown scheme {scheme!r}; known: {schemes}"
        ) from error
    except ImportError as error:
        raise StagingError(f"{flag} {address}: {error}") from error


def is_in_memory(url: str | os.PathLike[str]) -> bool:
    """Tell whether a URL leads into the memory of this process, and ends with it: ``memory://``."""
    from fsspec.implementations.memory import MemoryFileSystem

    return is_url(url) and issubclass(check_scheme(os.fspath(url)), MemoryFileSystem)


def _copy(
    file_system: Any, remote: str, target: Path, url: str, *, is_folder: bool, size: int | None
) -> None:
    """Copy under a temporary name beside the target, check, rename. Only the lock's holder may call this."""
    temporary = target.with_name(f".{target.name}.partial")
    _remove(temporary)  # left by a process that was killed
    logger.info(
        "copying %s (%s bytes) to %s", shown_url(url), "?" if size is None else size, target
    )
    try:
        # get() would take the ? of a query for a pattern.
        if not is_folder and any(sign in remote for sign in "*?["):
            file_system.get_file(remote, str(temporary))
        else:
            file_system.get(remote.rstrip("/"), str(temporary), recursive=is_folder)
        copied_bytes = sum(
            path.stat().st_size for path in (temporary, *temporary.rglob("*")) if path.is_file()
        )
        if size is not None and copied_bytes != size:
            raise OSError(f"got {copied_bytes} bytes of {size}")
    except Exception as error:  # each file system raises its own errors
        _remove(temporary)
        raise StagingError(
            f"copying {shown_url(url)} to {target.parent} failed: {_reason(error)}"
        ) from error
    os.replace(temporary, target)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def content_folder(kind: str, fill: Callable[[Path], object]) -> Path:
    """Return a folder of this node's cache with what ``fill`` writes into one, named by its content: the same at every
    start, for all processes, and never of something else. Nobody may write into it."""
    root = cache_folder() / kind
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=root) as temporary_folder:
            (written := Path(temporary_folder) / "content").mkdir()
            fill(written)
            target = root / _content_key(written)
            if target.exists() and _content_key(target) != target.name:
                _remove(target)  # somebody has changed it
            try:
                written.rename(target)
            except OSError:
                if not target.exists():  # else another process was first
                    raise
    except OSError as error:
        raise StagingError(
            f"{root} cannot be written: {error}; set {CACHE_VARIABLE} to another folder"
        ) from error
    return target


def _content_key(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    pairs = [
        (path.relative_to(folder).as_posix(), hashlib.sha256(path.read_bytes()).hexdigest())
        for path in files
    ]
    return hashlib.sha256(repr(pairs).encode()).hexdigest()[:24]


# -- folders that are written here and uploaded ------------------------------------------------------------------------


_apart: Path | None = None


def read_apart(folder: str | os.PathLike[str]) -> None:
    """Keep folders at URLs in this one from now on: a run of this machine that goes on writes in the cache."""
    global _apart
    _apart = Path(folder)


def _home() -> Path:
    return _apart or cache_folder()


def local_folder(folder: str | os.PathLike[str]) -> Path:
    """Return the folder itself; for a URL the folder of this node's cache that is written in its place."""
    path = os.fspath(folder)
    if not is_url(path):
        return Path(without_scheme(path))
    scheme, _, rest = shown_url(path).partition("://")
    if login := login_of(path):  # which is not shown, and tells folders apart
        rest = f"{hashlib.sha256(login.encode()).hexdigest()[:8]}@{rest.partition('@')[2]}"
    return _home() / "folders" / scheme / posixpath.normpath(f"/{rest}").lstrip("/")


def upload(
    folder: str | os.PathLike[str],
    *names: str,
    last: str | None = None,
    instead_of: tuple[str, ...] = (),
) -> None:
    """Send the named files and folders from ``local_folder(folder)``; what is not there goes from the URL too.

    The file called ``last`` in a folder goes last: without it, the rest does not count. Other files at the URL that fit
    a pattern of ``instead_of`` go. Nothing to do where the folder is no URL.
    """
    if not is_url(folder):
        return

    def send(file_system: Any, root: str) -> None:
        stale = [path for path in (file_system.ls(root, detail=False) if instead_of and _exists(file_system, root) else ())
                 if any(fnmatch.fnmatch(posixpath.basename(path), pattern) for pattern in instead_of)]  # fmt: skip
        for name in (
            *names,
            *(base for path in stale if (base := posixpath.basename(path)) not in names),
        ):
            source = local_folder(folder) / name
            target = f"{root}/{name}"
            if not source.is_file() and _exists(file_system, target):
                file_system.rm(target, recursive=True)
            files = [path for path in (source, *source.rglob("*")) if path.is_file()]
            for is_last in (False, True):
                chosen = [path for path in files if (path.name == last) == is_last]
                if chosen:
                    targets = [target + str(path)[len(str(source)) :] for path in chosen]
                    changed = [path.stat().st_mtime_ns for path in chosen]
                    file_system.put([str(path) for path in chosen], targets)
                    for path, when in zip(chosen, changed):
                        _stamp_sent(path, when)

    _remotely(folder, send, f"; what this run has written is in {local_folder(folder)}")


def download(folder: str | os.PathLike[str], wanted: Callable[[str], bool]) -> None:
    """Bring what the URL has under names (relative) that are wanted into ``local_folder(folder)``, with its times."""
    if not is_url(folder):
        return

    def bring(file_system: Any, root: str) -> None:
        file_system.invalidate_cache()
        if _exists(file_system, root):
            remote_files = {info["name"]: info for info in _files(file_system, root)}
        else:
            remote_files = {}
        names = {path: path[len(root) :].lstrip("/") for path in sorted(remote_files)}
        for path, name in names.items():
            if wanted(name):
                target = local_folder(folder) / name
                target.parent.mkdir(parents=True, exist_ok=True)
                file_system.get_file(path, str(target))
                changed = next(
                    (remote_files[path][key] for key in _TIMES if remote_files[path].get(key)), None
                )
                changed = changed.timestamp() if hasattr(changed, "timestamp") else changed
                if isinstance(changed, (int, float)):
                    os.utime(target, (changed, changed))
                _stamp_sent(target, target.stat().st_mtime_ns)

    _remotely(folder, bring)


def set_unsent_aside(folder: str | os.PathLike[str], *, besides: str) -> Path | None:
    """Clear ``local_folder(folder)`` of files, but for those of the name ``besides``.

    All are moved if an earlier process could not send one, or sent them into its own memory: a whole checkpoint may be
    among them. Returns where to.
    """
    local = local_folder(folder)
    files = [path for path in local.rglob("*") if path.is_file() and path.name != besides]
    base = _home() / "unsent" / local.relative_to(_home() / "folders")
    aside = None
    if not all(map(_is_sent, files)) or (files and is_forgotten(folder)):
        aside = next(
            path
            for number in itertools.count(1)
            if not (path := base.with_name(f"{base.name}.{number}")).exists()
        )
    for path in files:
        if aside is not None:
            (target := aside / path.relative_to(local)).parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
        else:
            path.unlink()
    return aside


def is_forgotten(folder: str | os.PathLike[str]) -> bool:
    """Tell whether nothing is at a URL because it ended with the process that sent it."""
    import fsspec

    if not is_in_memory(folder):
        return False
    file_system, root = fsspec.core.url_to_fs(os.fspath(folder))
    return not file_system.find(root)


def unsent(folder: str | os.PathLike[str], paths: Iterable[Path]) -> list[str]:
    """Return names of the files at and below these paths that have changed since they were last sent; none if no URL."""
    local = local_folder(folder)
    if is_url(folder):
        files = {path for top in paths for path in (top, *top.rglob("*")) if path.is_file()}
    else:
        files = set()
    return sorted(path.relative_to(local).as_posix() for path in files if not _is_sent(path))


def _stamp(path: Path) -> Path:
    """Return the empty file that has the time of the last change that was sent."""
    return _home() / "sent" / path.relative_to(_home() / "folders")


def _is_sent(path: Path) -> bool:
    stamp = _stamp(path)
    return stamp.exists() and stamp.stat().st_mtime_ns == path.stat().st_mtime_ns


def _stamp_sent(path: Path, changed: int) -> None:
    stamp = _stamp(path)
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.touch()
    os.utime(stamp, ns=(changed, changed))


def probe(folder: str | os.PathLike[str]) -> None:
    """Raise StagingError if nothing can be written to the URL."""

    def write(file_system: Any, root: str) -> None:
        file_system.makedirs(root, exist_ok=True)
        file_system.pipe_file(f"{root}/.lightppo", b"")
        file_system.rm(f"{root}/.lightppo")

    if is_url(folder):
        _remotely(folder, write)


def _remotely(
    folder: str | os.PathLike[str], action: Callable[[Any, str], None], hint: str = ""
) -> None:
    """Call ``action`` with the file system of a URL and the path on it; a StagingError if the last try fails too."""
    import fsspec

    file_system_class = check_scheme(url := os.fspath(folder))
    for wait in (*_WAITS, None):
        try:
            file_system, root = fsspec.core.url_to_fs(url)
            return action(file_system, root.rstrip("/"))
        except Exception as error:  # each file system raises its own errors
            if wait is None or isinstance(
                error, (FileNotFoundError, NotADirectoryError, PermissionError)
            ):
                raise StagingError(f"{shown_url(url)}: {_reason(error)}{hint}") from error
            logger.warning("%s: %s; next try in %g s", shown_url(url), _reason(error), wait)
        file_system_class.clear_instance_cache()  # a server ends connections that were idle
        time.sleep(wait)


def _exists(file_system: Any, path: str) -> bool:
    """Tell whether a path is there; ``fs.exists`` says no where the server cannot be reached: runs would begin anew."""
    try:
        file_system.info(path)
    except FileNotFoundError:
        return False
    return True


def _files(file_system: Any, folder: str) -> Iterator[dict[str, Any]]:
    """Yield all files below a folder. ``fs.find`` leaves out what it cannot list."""
    for info in file_system.ls(folder, detail=True):
        if info["type"] != "directory":
            yield info
        elif info["name"].rstrip("/") != folder:
            yield from _files(file_system, info["name"].rstrip("/"))
