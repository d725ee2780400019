"""The files of a run, kept so that they outlive a crash of the machine, with sums, and at URLs, too."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from lightppo.plugins.ops import durable, storage


class KeptFiles:
    """:class:`lightppo.files.Files` out of ``durable`` and ``storage``."""

    def check(self, url: str, flag: str = "the URL") -> None:
        storage.check_scheme(url, flag)

    def bring(self, path: str) -> str:
        return storage.stage_to_local(path)

    def local(self, folder: str | os.PathLike[str]) -> Path:
        return storage.local_folder(folder)

    def fetch(self, folder: str | os.PathLike[str], wanted: Callable[[str], bool]) -> None:
        storage.download(folder, wanted)

    def publish(
        self,
        folder: str | os.PathLike[str],
        *names: str,
        last: str | None = None,
        instead_of: tuple[str, ...] = (),
    ) -> None:
        storage.upload(folder, *names, last=last, instead_of=instead_of)

    def write(self, path: Path, fill: Callable[[Any], Any]) -> durable.Digest:
        return durable.write_file(path, fill)

    def write_text(self, path: Path, text: str) -> None:
        durable.write_text(path, text)

    def rename(self, source: Path, target: Path) -> None:
        durable.rename(source, target)

    def remove(self, path: Path) -> None:
        durable.remove(path)
        durable.sync_folder(path.parent)

    def seal(self, folder: Path, known: Mapping[str, durable.Digest] = {}, **facts: Any) -> None:
        durable.seal(folder, known, **facts)

    def damage(self, folder: Path, share: int = 0, shares: int = 1) -> list[str]:
        return durable.check(folder, share, shares)

    def explained(self, folder: Path, needed: int | None = None) -> AbstractContextManager[None]:
        return durable.explained(folder, needed)
