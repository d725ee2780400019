"""How a run's files and folders are read, written, sealed and published: here by pathlib, in local folders.

A plugin may put other :class:`Files` in the place of :class:`PlainFiles`: one that knows URLs, say. It registers them
in :data:`lightppo.plugin.FILES`. Whoever reads or writes a file of a run asks :func:`files_in_use`.

A sealed folder has a manifest, which is written last and makes it whole: the size of every file, its SHA-256 where the
files in use take it, and facts: plain values of the one who sealed it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from lightppo.errors import StagingError, StorageError
from lightppo.plugin import FILES
from lightppo.shown import shown_url

MANIFEST = "lightppo_manifest.json"


class Digest(NamedTuple):
    """What a file holds."""

    size: int
    sha256: str | None  # None: only the size is known


class Files(Protocol):
    """How files and folders of a run are kept. A path may be a URL where these files know URLs."""

    def check(self, url: str, flag: str) -> None:
        """StagingError for a URL that cannot be used; the error names the flag. Nothing is read."""
        ...

    def bring(self, path: str) -> str:
        """The local path of a file or folder that is only read; what is no URL stays as it is."""
        ...

    def local(self, folder: str | os.PathLike[str]) -> Path:
        """Where this process reads and writes a folder of the run: the folder itself, or what stands for its URL."""
        ...

    def fetch(self, folder: str | os.PathLike[str], wanted: Callable[[str], bool]) -> None:
        """Bring what a URL has under the relative names that are ``wanted`` into :meth:`local` of it."""
        ...

    def publish(
        self,
        folder: str | os.PathLike[str],
        *names: str,
        last: str | None = None,
        instead_of: tuple[str, ...] = (),
    ) -> None:
        """Send names in :meth:`local` of a folder to its URL; what is not there any more goes from the URL, too.

        Args:
            last: the file of a sent folder that makes it whole.
            instead_of: patterns of file names; other files at the URL that fit one go.
        """
        ...

    def write(self, path: Path, fill: Callable[[Any], Any]) -> Digest:
        """A new file that ``fill(file)`` writes."""
        ...

    def write_text(self, path: Path, text: str) -> None:
        """The whole text under this name, or what was there before, whenever the process stops."""
        ...

    def rename(self, source: Path, target: Path) -> None:
        """As ``os.replace``."""
        ...

    def remove(self, path: Path) -> None:
        """A file, or a folder with all that is in it; of a link only the link."""
        ...

    def seal(self, folder: Path, known: Mapping[str, Digest] = {}, **facts: Any) -> None:
        """Write the manifest of a folder that is complete.

        Args:
            known: what :meth:`write` returned, on this or another rank, by name below the folder.
            facts: plain values to keep, see :func:`facts_of`.
        """
        ...

    def damage(self, folder: Path, share: int = 0, shares: int = 1) -> list[str]:
        """What is not as it was sealed, a text per file. Only this share of the files is looked at."""
        ...

    def explained(self, folder: Path, needed: int | None = None) -> AbstractContextManager[None]:
        """Inside, an error of the disk, when ``needed`` bytes are written, becomes one that says what to do."""
        ...


def files_in_use() -> Files:
    """The files that were registered last."""
    last = next(reversed(FILES.values()))
    return last.fn()


def local_folder(folder: str | os.PathLike[str]) -> Path:
    """:meth:`Files.local` of the files in use."""
    return files_in_use().local(folder)


def stage_to_local(path: str) -> str:
    """:meth:`Files.bring` of the files in use."""
    return files_in_use().bring(path)


def check_file_url(url: str, flag: str) -> None:
    """:meth:`Files.check` of the files in use."""
    files_in_use().check(url, flag)


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a path is on no file system of this machine; ``file:///folder`` is."""
    text = os.fspath(path)
    return "://" in text and not text.startswith(("file://", "local://"))


def without_scheme(path: str) -> str:
    """A local path that may be written as ``file:///folder``."""
    return path.split("://", 1)[-1]


def join(folder: str | os.PathLike[str], name: str) -> str | Path:
    """A path inside a folder; a URL stays one."""
    text = os.fspath(folder)
    return f"{text.rstrip('/')}/{name}" if is_url(text) else Path(without_scheme(text)) / name


class PlainFiles:
    """Local folders, by pathlib. A process that is killed leaves old or new names, and no half file under either."""

    def check(self, url: str, flag: str = "the URL") -> None:
        if is_url(url):
            raise StagingError(
                f"{flag} {shown_url(url)}: URLs are read and written by a plugin (lightppo.plugins.ops), which is not "
                "installed: name a local file or folder"
            )

    def bring(self, path: str) -> str:
        self.check(path)
        return without_scheme(path)

    def local(self, folder: str | os.PathLike[str]) -> Path:
        return Path(self.bring(os.fspath(folder)))

    def fetch(self, folder: str | os.PathLike[str], wanted: Callable[[str], bool]) -> None:
        self.check(os.fspath(folder))

    def publish(
        self,
        folder: str | os.PathLike[str],
        *names: str,
        last: str | None = None,
        instead_of: tuple[str, ...] = (),
    ) -> None:
        self.check(os.fspath(folder))

    def write(self, path: Path, fill: Callable[[Any], Any]) -> Digest:
        with path.open("wb") as file:
            fill(file)
        return Digest(path.stat().st_size, None)

    def write_text(self, path: Path, text: str) -> None:
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_bytes(text.encode())
        self.rename(temporary, path)

    def rename(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        if path.is_symlink() or path.is_file():
            path.unlink()
        else:
            shutil.rmtree(path)

    def seal(self, folder: Path, known: Mapping[str, Digest] = {}, **facts: Any) -> None:
        names = names_to_seal(folder, known)
        digests = {name: Digest((folder / name).stat().st_size, None) for name in names}
        self.write_text(folder / MANIFEST, manifest_text(digests, facts))

    def damage(self, folder: Path, share: int = 0, shares: int = 1) -> list[str]:
        try:
            written = read_digests(folder)
        except UnreadableManifestError as error:
            return [str(error)]
        texts = (
            changed_size(folder, name, written[name]) for name in sorted(written)[share::shares]
        )
        return [text for text in texts if text is not None]

    @contextmanager
    def explained(self, folder: Path, needed: int | None = None) -> Iterator[None]:
        yield


# -- manifests -------------------------------------------------------------------------------------------------------


class UnreadableManifestError(StorageError):
    """A manifest is missing, or was altered."""


def names_to_seal(folder: Path, known: Mapping[str, Digest]) -> list[str]:
    """All files of a folder but its manifest. StorageError where one that another rank wrote is not among them."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST]
    names = sorted(path.relative_to(folder).as_posix() for path in files)
    if missing := sorted(known.keys() - set(names)):
        raise StorageError(
            f"{folder}: {missing[0]}, which another rank wrote, is not here: all nodes must share it"
        )
    return names


def manifest_text(digests: Mapping[str, Digest], facts: Mapping[str, Any]) -> str:
    """A manifest, with a sum of its own."""
    content = {"files": dict(digests), "facts": dict(facts)}
    return json.dumps(content | {"sha256": _sum_of(content)}, indent=1)


def _sum_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read_manifest(folder: Path) -> dict[str, Any]:
    """Raises UnreadableManifestError."""
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
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
    """The files of a sealed folder by name. UnreadableManifestError where its manifest is missing or was altered."""
    return {name: Digest(*digest) for name, digest in _read_manifest(folder)["files"].items()}


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


def facts_of(folder: Path) -> dict[str, Any]:
    """What a folder was sealed with; empty where there is no whole manifest."""
    return manifest(folder)["facts"]


def seal_of(folder: Path) -> str | None:
    """The sum of a sealed folder's manifest, which names its files and its facts; None without a whole one."""
    try:
        return _sum_of(_read_manifest(folder))
    except UnreadableManifestError:
        return None
