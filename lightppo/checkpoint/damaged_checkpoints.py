"""Checkpoints with damaged files: they are kept aside, all parts together, and the run goes on from the one before.

A checkpoint with a file that is not as it was saved becomes ``global_stepN.damaged``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from lightppo.checkpoint.engine_state import DAMAGED, LATEST, bring, damage, read_mark
from lightppo.checkpoint.mixed_parts import mixture
from lightppo.checkpoint.run_checkpointer import RunCheckpointer, mark_latest, parts_of
from lightppo.errors import CheckpointError
from lightppo.files import facts_of, files_in_use, join, local_folder

logger = logging.getLogger(__name__)


def last_undamaged(
    checkpointer: RunCheckpointer, root: str | Path, is_held: bool, before: int | None
) -> str | None:
    """The first candidate whose files are as they were saved; those before it are kept aside. Collective.

    ``before``: of those before this step, which are only read: a damaged one is passed over.
    """
    tags = checkpointer.candidates(root, before)
    if tags and before is None and checkpointer.strategy.is_rank_0():
        _tell_of_mark(local_folder(root), tags)
    damaged: dict[str, str] = {}
    whole = None
    for tag in tags:
        if texts := _damage(checkpointer, root, tag):
            damaged[tag] = "; ".join(texts)
            continue
        _require_one_save(checkpointer, root, tag, tags)
        whole = tag
        break
    if damaged:
        _leave_out(
            checkpointer, root, damaged, whole, keep_aside=is_held, are_only_read=before is not None
        )
    return whole


def _leave_out(
    checkpointer: RunCheckpointer,
    root: str | Path,
    damaged: Mapping[str, str],
    whole: str | None,
    *,
    keep_aside: bool,
    are_only_read: bool,
) -> None:
    """Say that the run goes on from a whole checkpoint before damaged ones; CheckpointError where it may not."""
    if keep_aside and whole is not None:
        checkpointer.strategy.on_rank_0(
            lambda: _set_aside(root, damaged, whole), f"rename {list(damaged)}"
        )
        told = "; ".join(
            f"{name} is damaged, kept as {name}{DAMAGED}: {text}" for name, text in damaged.items()
        )
        checkpointer.strategy.print(f"{root}: {told}; going on from {whole}")
    elif are_only_read:
        told = "; ".join(f"{name} is damaged: {text}" for name, text in damaged.items())
        checkpointer.strategy.print(f"{root}: {told}; going on from {whole or 'the start'}")
    else:
        first, text = next(iter(damaged.items()))
        left = (
            "no whole one is left"
            if whole is None
            else f"the run that owns it would go on from {whole}"
        )
        raise CheckpointError(
            f"{root}/{first} is damaged: {text}; {left}. To start anew, set --resume never"
        )


def _damage(checkpointer: RunCheckpointer, root: str | Path, tag: str) -> list[str]:
    """What is damaged in any part, a text per file. Collective."""
    texts: list[str] = []
    for name in checkpointer.models:
        part = join(root, f"_{name}")
        bring(checkpointer.strategy, part, tag)
        texts += [
            f"_{name}: {text}" for text in damage(checkpointer.strategy, local_folder(part) / tag)
        ]
    return texts


def _require_one_save(
    checkpointer: RunCheckpointer, root: str | Path, tag: str, tags: Sequence[str]
) -> None:
    """CheckpointError on all ranks where the parts of a checkpoint were not saved together. Collective."""
    told = None
    if checkpointer.strategy.is_rank_0():
        told = mixture(local_folder(root), tag, checkpointer.models)
    told = checkpointer.strategy.broadcast_object(told)
    if told is not None:
        before = tags[tags.index(tag) + 1 :]
        back = f", or remove {tag} from every part to go on from {before[0]}" if before else ""
        raise CheckpointError(
            f"{root}/{tag} has parts of different checkpoints: {told}. Restore all parts of {tag} from one "
            f"backup{back}; to start anew, set --resume never"
        )


def _set_aside(root: str | Path, tags: Iterable[str], whole: str) -> None:
    """Other names for damaged checkpoints, in all parts; ``latest`` names the whole one."""
    files = files_in_use()
    for part in parts_of(root):
        folder = join(root, part.name)
        for tag in tags:
            if (part / tag).is_dir():
                names = [f"{tag}{DAMAGED}"] + [f"{tag}.{i}{DAMAGED}" for i in range(1, 100)]
                name = next(name for name in names if not (part / name).exists())
                files.rename(part / tag, part / name)
                files.publish(folder, name, tag)
        files.write_text(part / LATEST, whole)
        files.publish(folder, LATEST)
    mark_latest(root, whole)


def _tell_of_mark(root: Path, whole: Sequence[str]) -> None:
    """Where ``latest`` is not the name of the last whole checkpoint: the first of ``whole`` is taken."""
    marked = read_mark(root)
    if marked != whole[0]:
        logger.warning(
            "%s/latest names %r; the last whole checkpoint is %s", root, marked, whole[0]
        )
    elif later := _later(root, marked, whole):
        logger.warning(
            "%s/latest names %s, but the later %s of the same run is whole, too. Going on from %s; to go on from the "
            "other one, stop, and write its name into that file",
            root,
            marked,
            later,
            marked,
        )


def _later(root: Path, marked: str, whole: Iterable[str]) -> str | None:
    """The last checkpoint of the marked one's run that comes after it."""
    facts = {tag: facts_of(root / "_actor" / tag) for tag in whole}
    run, step = facts[marked].get("run"), facts[marked].get("step")
    if not run:
        return None
    of_run = {tag: saved["step"] for tag, saved in facts.items() if saved.get("run") == run}
    later = [tag for tag in of_run if of_run[tag] > step]
    return max(later, key=of_run.__getitem__, default=None)
