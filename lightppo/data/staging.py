"""Remote files by fsspec URL (s3://, gs://, hdfs://, http://, …), copied once per node.

All processes of a node call :func:`stage_to_local`; the first to take the lock copies, the others wait and then find
the finished copy. The lock is ``flock``: the system frees it when its holder dies, so nothing stale can hang a later
run.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightppo.errors import StagingError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "LIGHTPPO_CACHE"
DEFAULT_TIMEOUT_S = 3600.0


def is_url(path: str) -> bool:
    """True for ``scheme://…``."""
    return "://" in path


def cache_root() -> Path:
    """Where copies are kept: ``$LIGHTPPO_CACHE``, else ``~/.cache/lightppo``. It should be a disk of the node."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "lightppo")


def check_scheme(url: str, flag: str = "the URL") -> None:
    """Refuse a URL whose scheme fsspec does not know, or whose package is not installed. No network.

    Raises:
        StagingError: naming the flag, the URL and the package to install.
    """
    from fsspec import available_protocols, get_filesystem_class

    scheme = url.split("://")[0]
    try:
        get_filesystem_class(scheme)
    except ValueError as error:
        known = ", ".join(sorted(available_protocols()))
        raise StagingError(f"{flag} {url}: unknown scheme {scheme!r}; known: {known}") from error
    except ImportError as error:
        raise StagingError(f"{flag} {url}: {error}") from error


def stage_to_local(url: str, *, cache_dir: str | Path | None = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> str:
    """Local path of a file or folder; a URL is copied to this node's cache first, unless an equal copy is there.

    A copy is made under a temporary name, its size checked, and put in place with ``os.replace``: there are no half
    copies. A remote file that changed (by what its file system tells: size, time, etag) is copied anew.

    Args:
        url: fsspec URL. A local path or ``file://`` URL is returned as a path, without a copy.
        cache_dir: where copies go; default :func:`cache_root`.
        timeout_s: seconds to wait for another process of the node that is copying.

    Raises:
        StagingError: unknown scheme, nothing there, a failed or short copy.
        TimeoutError: the other process did not finish in time.
    """
    if not is_url(url):
        return url
    if url.startswith(("file://", "local://")):
        return url.split("://", 1)[1]
    import fsspec
    from filelock import FileLock, Timeout

    check_scheme(url)
    try:
        fs, remote = fsspec.core.url_to_fs(url)
        is_folder, files = _listing(fs, remote)
    except Exception as error:  # each file system raises its own kinds
        raise StagingError(f"{url} cannot be read: {type(error).__name__}: {error}") from error
    if not files:
        raise StagingError(f"{url} is an empty folder, or does not exist")
    key = hashlib.sha256(repr([url, files]).encode()).hexdigest()[:24]
    folder = Path(cache_dir or cache_root()) / "staged" / key
    target = folder / (Path(remote.rstrip("/")).name or "root")
    folder.mkdir(parents=True, exist_ok=True)
    if target.exists():
        return str(target)
    lock = FileLock(folder / ".lock", timeout=timeout_s)
    try:
        with lock:
            if not target.exists():
                sizes = [size for _, size, _ in files]
                total = None if None in sizes else sum(sizes)
                _copy(fs, remote, target, url, is_folder=is_folder, size=total)
    except Timeout as error:
        raise TimeoutError(
            f"{url}: another process on this node has been copying it for over {timeout_s:g} s; "
            f"see its log (lock {lock.lock_file})"
        ) from error
    return str(target)


def _listing(fs: AbstractFileSystem, remote: str) -> tuple[bool, list[tuple[str, int | None, str]]]:
    """Whether it is a folder, and (name, bytes, version) of its files; version is what tells of a change."""
    info = fs.info(remote)
    is_folder = info["type"] == "directory"
    # find() only for folders: over HTTP it would read a file in search of links
    found: dict[str, dict[str, Any]] = fs.find(remote, detail=True) if is_folder else {remote: info}
    return is_folder, [(name, info.get("size"), _version(info)) for name, info in sorted(found.items())]


def _version(info: dict[str, Any]) -> str:
    return str(
        next((info[k] for k in ("ETag", "etag", "md5Hash", "mtime", "LastModified", "created") if info.get(k)), "")
    )


def _copy(fs: AbstractFileSystem, remote: str, target: Path, url: str, *, is_folder: bool, size: int | None) -> None:
    """Copy under a temporary name beside the target, check, rename. Only the holder of the lock comes here."""
    temporary = target.with_name(f".{target.name}.partial")
    _remove(temporary)  # left by a process that was killed
    logger.info("copying %s (%s bytes) to %s", url, "?" if size is None else size, target)
    try:
        fs.get(remote.rstrip("/"), str(temporary), recursive=is_folder)
    except Exception as error:  # each file system raises its own kinds
        _remove(temporary)
        raise StagingError(f"copying {url} to {target.parent} failed: {type(error).__name__}: {error}") from error
    files = [temporary] if temporary.is_file() else [p for p in temporary.rglob("*") if p.is_file()]
    got = sum(p.stat().st_size for p in files)
    if size is not None and got != size:
        _remove(temporary)
        raise StagingError(f"copying {url} gave {got} bytes of {size}; try again")
    os.replace(temporary, target)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
