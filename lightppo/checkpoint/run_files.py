"""The files of a run, kept so that they outlive a crash of the machine, with sums, and at URLs, too."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightppo import storage
from lightppo.checkpoint import durable
from lightppo.files import Files

if TYPE_CHECKING:
    from lightppo.distributed.collective_errors import WrittenTogether

logger = logging.getLogger(__name__)


class KeptFiles(Files):
    """:class:`lightppo.files.Files` out of ``durable`` and ``storage``."""

    together: WrittenTogether | None = None  # the checkpoint that is written with this object

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

    def write(self, path: Path, fill: Callable[[Any], Any]) -> None:
        if self.together is None:
            durable.write_file(path, fill)
        else:
            self.together.write(path, fill)

    @contextmanager
    def written_together(self, ranks: Any, engine: Any, folder: Path) -> Iterator[None]:
        from lightppo.distributed.collective_errors import WrittenTogether

        self.together = WrittenTogether(folder)
        with self.together.by(engine):
            yield
        self.together.settle(ranks)

    def write_text(self, path: Path, text: str) -> None:
        durable.write_text(path, text)

    def rename(self, source: Path, target: Path) -> None:
        durable.rename(source, target)

    def remove(self, path: Path) -> None:
        durable.remove(path)
        durable.sync_folder(path.parent)

    def seal(self, folder: Path, **facts: Any) -> None:
        if "part" in facts:  # of a checkpoint
            facts["siblings"] = siblings(folder)
        if self.together is None:
            return durable.seal(folder, **facts)
        try:
            durable.seal(folder, self.together.known, **facts)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)  # room for others, where a disk is full
            raise

    def manifest(self, folder: Path) -> dict[str, Any]:
        return durable.manifest(folder)

    def damage(self, folder: Path, share: int = 0, shares: int = 1) -> list[str]:
        if durable.is_sealed(folder) or meant_sealed(folder):
            return durable.check(folder, share, shares)
        if share == 0:
            told = "%s is of an older lightppo: it has no manifest to be checked against"
            logger.info(told, folder)
        return []

    def explained(self, folder: Path, needed: int | None = None) -> AbstractContextManager[None]:
        if needed is None and self.together is not None:
            needed = self.together.needed
        return durable.explained(folder, needed)


def meant_sealed(folder: Path) -> bool:
    """False for a checkpoint that was saved without a manifest; one whose own file cannot be read counts as sealed."""
    from lightppo.checkpoint.engine_state import META

    try:
        return bool(json.loads((folder / META).read_text()).get("sealed"))
    except (OSError, ValueError, AttributeError):
        return True


def siblings(folder: Path) -> dict[str, str | None]:
    """The sums of the parts that were saved before this one, by which a part of another checkpoint is told."""
    from lightppo.checkpoint.engine_state import INCOMPLETE

    tag = folder.name.removesuffix(INCOMPLETE)
    others = folder.parent.parent.glob(f"_*/{tag}")
    return {
        path.parent.name.removeprefix("_"): durable.seal_of(path)
        for path in sorted(others)
        if path.parent != folder.parent
    }
