"""What all ranks write of one checkpoint: a failure of one waits until all can share it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightppo.checkpoint import durable
from lightppo.errors import StorageError
from lightppo.ranks import Ranks
from lightppo.zero3 import has_optimizer


class WrittenTogether:
    """What this rank writes into the folder of a checkpoint, and what all have written, once it is settled."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.needed = folder, 0
        self.known: dict[str, durable.Digest] = {}
        self.failure: Exception | None = None

    @contextmanager
    def by(self, engine: Any) -> Iterator[None]:
        """All that DeepSpeed writes comes here: an error of one rank would leave the others in its barrier."""
        if not has_optimizer(engine):  # DeepSpeed writes nothing of it
            yield
            return
        writer, copy_scripts = engine.checkpoint_engine, engine._copy_recovery_script
        writer.save = lambda state_dict, path: self.write(
            Path(path), partial(torch.save, state_dict)
        )
        engine._copy_recovery_script = lambda path: self._attempt(partial(copy_scripts, path))
        try:
            yield
        finally:
            del writer.save, engine._copy_recovery_script

    def write(self, path: Path, fill: Callable[[Any], Any]) -> None:
        self.needed += bytes_of(getattr(fill, "args", ()))
        self._attempt(lambda: self._write(path, fill))

    def _write(self, path: Path, fill: Callable[[Any], Any]) -> None:
        name = path.relative_to(self.folder).as_posix()
        self.known[name] = durable.write_file(path, fill)

    def _attempt(self, action: Callable[[], Any]) -> None:
        try:
            if self.failure is None:
                action()
        except Exception as error:
            self.failure = error

    def settle(self, ranks: Ranks) -> None:
        """All know the files and bytes of all ranks; one error on all ranks if one rank has one. Collective."""
        gathered = ranks.all_gather_object((self.known, self.needed, self.failure is not None))
        self.needed = sum(size for _, size, _ in gathered)
        failed = [rank for rank, (_, _, has_failed) in enumerate(gathered) if has_failed]
        if failed:
            if ranks.is_rank_0():
                # This makes room for others, and the message counts that room as free.
                shutil.rmtree(self.folder, ignore_errors=True)
            ranks.barrier()
            text = ranks.broadcast_object(self._what_failed(), src=failed[0])
            raise StorageError(f"rank {failed[0]}: {text}") from self.failure
        self.known = {name: digest for known, _, _ in gathered for name, digest in known.items()}

    def _what_failed(self) -> str | None:
        if self.failure is None:
            return None
        try:
            with durable.explained(self.folder.parent, self.needed):
                raise self.failure
        except StorageError as error:
            return str(error)
        except Exception as error:
            return f"{self.folder}: {type(error).__name__}: {error}"


def bytes_of(state: Any) -> int:
    """Of the tensors in nested containers."""
    if isinstance(state, torch.Tensor):
        return state.untyped_storage().nbytes()
    if isinstance(state, Mapping):
        state = state.values()
    elif not isinstance(state, list | tuple):
        return 0
    return sum(map(bytes_of, state))
