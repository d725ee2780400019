"""How a run's files and folders are read, written, sealed and published: here by pathlib, in local folders.

A plugin may put other :class:`Files` in their place: some that know URLs, say. It registers them in
:data:`lightppo.plugin.FILES`. Whoever reads or writes a file of a run asks :func:`files_in_use`.

A sealed folder has a manifest, which is written last and makes it whole: the names of its files, and facts: plain values
of the one who sealed it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightppo.errors import StagingError
from lightppo.plugin import FILES
from lightppo.redaction import shown_url

MANIFEST = "lightppo_manifest.json"


class Files:
    """How files and folders of a run are kept: here in local folders. A subclass may know URLs, too.

    A process that is killed leaves old or new names, and no half file under either.
    """

    def check(self, url: str, flag: str = "the URL") -> None:
        """StagingError for a URL that cannot be used; the error names the flag. Nothing is read."""
        if is_url(url):
            raise StagingError(
                f"{flag} {shown_url(url)}: URLs are read and written by a plugin (lightppo.plugins.ops), which is not "
                "installed: name a local file or folder"
            )

    def bring(self, path: str) -> str:
        """The local path of a file or folder that is only read; what is no URL stays as it is."""
        self.check(path)
        return without_scheme(path)

    def local(self, folder: str | os.PathLike[str]) -> Path:
        """Where this process reads and writes a folder of the run: the folder itself, or what stands for its URL."""
        return Path(self.bring(os.fspath(folder)))

    def fetch(self, folder: str | os.PathLike[str], wanted: Callable[[str], bool]) -> None:
        """Bring what a URL has under the relative names that are ``wanted`` into :meth:`local` of it."""
        self.check(os.fspath(folder))

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
        self.check(os.fspath(folder))

    def write(self, path: Path, fill: Callable[[Any], Any]) -> None:
        """A new file that ``fill(file)`` writes."""
        with path.open("wb") as file:
            fill(file)

    @contextmanager
    def written_together(self, ranks: Any, engine: Any, folder: Path) -> Iterator[None]:
        """Inside, all ranks write files of a checkpoint into one folder, a DeepSpeed engine some of them. Collective."""
        yield
        ranks.barrier()

    def write_text(self, path: Path, text: str) -> None:
        """The whole text under this name, or what was there before, whenever the process stops."""
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_bytes(text.encode())
        self.rename(temporary, path)

    def rename(self, source: Path, target: Path) -> None:
        """As ``os.replace``."""
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        """A file, or a folder with all that is in it; of a link only the link."""
        if path.is_symlink() or path.is_file():
            path.unlink()
        else:
            shutil.rmtree(path)

    def seal(self, folder: Path, **facts: Any) -> None:
        """Write the manifest of a folder that is complete; ``facts`` are plain values to keep."""
        files = [path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST]
        names = sorted(path.relative_to(folder).as_posix() for path in files)
        self.write_text(folder / MANIFEST, json.dumps({"files": names, "facts": facts}))

    def manifest(self, folder: Path) -> dict[str, Any]:
        """The names of a sealed folder's ``files``, and its ``facts``; both empty where it is not sealed."""
        try:
            return json.loads((folder / MANIFEST).read_bytes())
        except (OSError, ValueError):
            return {"files": [], "facts": {}}

    def damage(self, folder: Path, share: int = 0, shares: int = 1) -> list[str]:
        """What is not as it was sealed, a text per file. Only this share of the files is looked at."""
        return []

    @contextmanager
    def explained(self, folder: Path, needed: int | None = None) -> Iterator[None]:
        """Inside, an error of the disk, when ``needed`` bytes are written, becomes one that says what to do."""
        yield


def files_in_use() -> Files:
    """The files that were registered last."""
    return FILES.last()


def local_folder(folder: str | os.PathLike[str]) -> Path:
    """:meth:`Files.local` of the files in use."""
    return files_in_use().local(folder)


def stage_to_local(path: str) -> str:
    """:meth:`Files.bring` of the files in use."""
    return files_in_use().bring(path)


def check_file_url(url: str, flag: str) -> None:
    """:meth:`Files.check` of the files in use."""
    files_in_use().check(url, flag)


def facts_of(folder: Path) -> dict[str, Any]:
    """What a folder was sealed with; empty where it is not sealed."""
    return files_in_use().manifest(folder)["facts"]


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
