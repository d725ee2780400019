"""Checkpoints that no run may go on from: damaged, of different savings, able to run code, or of another model.

A checkpoint with a file that is not as it was saved is kept aside as ``global_stepN.damaged``, all parts together, and
the run goes on from the one before.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightppo import tensor_file
from lightppo.checkpoint.layout import (
    DAMAGED,
    LATEST,
    META,
    download,
    mark_latest,
    part_folder,
    part_of,
    parts_of,
    read_mark,
    step_of,
)
from lightppo.errors import CheckpointError
from lightppo.files import MANIFEST, facts_of, files_in_use, join, local_folder, seal_of
from lightppo.ranks import Ranks
from lightppo.zero3 import find_adapters, find_whole

logger = logging.getLogger(__name__)


# -- one part --------------------------------------------------------------------------------------------------------


def damage(ranks: Ranks, path: Path) -> list[str]:
    """Return what is damaged in a checkpoint, a text per file; nothing if it is as it was saved. Collective.

    Each rank looks at its share of the files.
    """
    damaged = []
    if (path / MANIFEST).is_file() or _is_meant_sealed(path):
        damaged = files_in_use().damage(path, share=ranks.get_rank(), shares=ranks.world_size)
    elif ranks.is_rank_0():
        message = "%s is of an older lightppo: it has no manifest to be checked against"
        logger.info(message, path)
    return sorted({text for texts in ranks.all_gather_object(damaged) for text in texts})


def _is_meant_sealed(folder: Path) -> bool:
    """False for a checkpoint that was saved without a manifest; one whose own file cannot be read counts as sealed."""
    try:
        return bool(json.loads((folder / META).read_text()).get("sealed"))
    except (OSError, ValueError, AttributeError):
        return True


def model_facts(ranks: Ranks, model: Any) -> dict[str, Any]:
    """Return what a checkpoint says of its model: adapters, sums of the weights beside them, towers. Collective."""
    adapters = find_adapters(model)
    whole = find_whole(model)
    of_adapters = {} if adapters is None else adapters.frozen_facts(ranks, model)
    return {
        "adapters": None if adapters is None else str(adapters),
        **of_adapters,
        "towers": None if whole is None else whole.digest,
    }


def check_model(ranks: Ranks, model: Any, path: Path, meta: Mapping[str, Any]) -> None:
    """Raise CheckpointError where a checkpoint does not fit a model, before a weight has changed. Collective."""
    now = model_facts(ranks, model)
    saved = meta.get("adapters")
    adapters = now["adapters"]
    if saved != adapters:
        raise CheckpointError(
            f"{path} was saved with {saved or 'no LoRA adapters'}, this model has {adapters or 'none'}: resume with "
            "the same --lora_rank, --lora_alpha, --target_modules and --load_in_4bit"
        )
    if adapters is not None:
        find_adapters(model).check_frozen(ranks, model, path, meta, now)
    if meta.get("towers") != now["towers"]:  # older versions saved none
        raise CheckpointError(
            f"{path} was trained beside other image or audio towers, or none: give the --pretrain (for a critic, the "
            "--critic_pretrain; of lightppo convert, the --base) that it was trained from, unchanged"
        )
    require_plain(ranks, path)


def require_plain(ranks: Ranks, path: Path) -> None:
    """Raise CheckpointError on all ranks if a file of a checkpoint names anything to run. Collective.

    Each rank looks at its share of the files; tensors are not read.
    """
    refused = []
    for file in sorted(path.rglob("*.pt"))[ranks.get_rank() :: ranks.world_size]:
        try:
            tensor_file.read_deepspeed(file)
        except CheckpointError as error:
            refused.append(str(error))
    of_all_ranks = sorted(text for texts in ranks.all_gather_object(refused) for text in texts)
    if of_all_ranks:
        more = f" ({len(of_all_ranks) - 1} more files are like it)" if len(of_all_ranks) > 1 else ""
        raise CheckpointError(f"{of_all_ranks[0]}{more}")


# -- parts that were not saved together, such as those of two backups --------------------------------------------------


def sums_of_others(root: Path, name: str, tag: str) -> dict[str, str | None]:
    """Return the sums of the parts that were saved before this one, which show later whether a part is another's."""
    parts = {part_of(path): path for path in sorted(root.glob(f"_*/{tag}"))}
    return {part: seal_of(path) for part, path in parts.items() if part != name}


def mixture(root: Path, tag: str, names: Iterable[str]) -> str | None:
    """Return which parts of a checkpoint were not saved together with the others; ``None`` if all were.

    Older versions wrote nothing that shows it: such parts fit together, but not to newer ones.
    """
    folders = {name: Path(part_folder(root, name), tag) for name in names}
    facts = {name: facts_of(folder) for name, folder in folders.items()}
    if not any("run" in of_part for of_part in facts.values()):
        return None
    article = "the"
    odd = _of_another_origin(facts, step_of(tag))
    sums = facts["actor"].get("siblings")
    if not odd and sums is not None:
        odd = _of_another_save(folders, sums)
        article = "of another save, the"
    if not odd:
        return None
    texts = [f"_{name} is {_origin(facts[name], article)}" for name in sorted(odd)]
    texts += [f"_{name} is {_origin(facts[name], 'the')}" for name in folders if name not in odd]
    return "; ".join(texts)


def _of_another_origin(facts: Mapping[str, Mapping[str, Any]], step: int) -> set[str]:
    """Return the parts of another step, or of another run than most parts are; of as many, than the actor is."""
    origins = {name: (of_part.get("run"), of_part.get("step")) for name, of_part in facts.items()}
    # None: of an older version
    fitting = [origin for origin in origins.values() if origin[1] in (step, None)]
    usual = max(fitting, key=fitting.count, default=None)
    other_model = {
        name for name, of_part in facts.items() if of_part.get("part") not in (name, None)
    }
    return other_model | {name for name, origin in origins.items() if origin != usual}


def _of_another_save(folders: Mapping[str, Path], sums: Mapping[str, str]) -> set[str]:
    """Return the parts whose sums the actor does not know; if it knows none of several, it is the actor."""
    others = [name for name in folders if name != "actor"]
    odd = {name for name in others if seal_of(folders[name]) != sums.get(name)}
    return {"actor"} if len(odd) == len(others) > 1 else odd


def _origin(facts: Mapping[str, Any], article: str) -> str:
    if "run" not in facts:
        return "of an older lightppo"
    return f"{article} {facts['part']} of step {facts['step']} of run {facts['run']}"


# -- the checkpoint that a run goes on from ----------------------------------------------------------------------------


def last_undamaged(
    checkpointer: Any, root: str | Path, is_held: bool, before: int | None
) -> str | None:
    """Return the first candidate whose files are as they were saved; those before it are kept aside. Collective.

    ``before``: of those before this step, which are only read: a damaged one is passed over.
    """
    tags = checkpointer.candidates(root, before)
    if tags and before is None and checkpointer.strategy.is_rank_0():
        _report_mark(local_folder(root), tags)
    damaged: dict[str, str] = {}
    whole = None
    for tag in tags:
        if texts := _damage_of_parts(checkpointer, root, tag):
            damaged[tag] = "; ".join(texts)
            continue
        _require_one_save(checkpointer, root, tag, tags)
        whole = tag
        break
    if damaged:
        is_renamed = is_held and whole is not None
        _leave_out(checkpointer, root, damaged, whole, is_renamed, are_read_only=before is not None)
    return whole


def _leave_out(
    checkpointer: Any,
    root: str | Path,
    damaged: Mapping[str, str],
    whole: str | None,
    is_renamed: bool,
    are_read_only: bool,
) -> None:
    """Say that the run goes on from a whole checkpoint before damaged ones; CheckpointError where it may not."""
    strategy = checkpointer.strategy
    if not (is_renamed or are_read_only):
        first, text = next(iter(damaged.items()))
        if whole is None:
            left = "no whole one is left"
        else:
            left = f"the run that owns it would go on from {whole}"
        raise CheckpointError(
            f"{root}/{first} is damaged: {text}; {left}. To start anew, set --resume never"
        )
    if is_renamed:
        strategy.on_rank_0(lambda: _set_aside(root, damaged, whole), f"rename {list(damaged)}")
        names = {name: f"{name} is damaged, kept as {name}{DAMAGED}" for name in damaged}
    else:
        names = {name: f"{name} is damaged" for name in damaged}
    texts = [f"{names[name]}: {text}" for name, text in damaged.items()]
    strategy.print(f"{root}: {'; '.join(texts)}; going on from {whole or 'the start'}")


def _damage_of_parts(checkpointer: Any, root: str | Path, tag: str) -> list[str]:
    """Return what is damaged in any part, a text per file. Collective."""
    texts: list[str] = []
    for name in checkpointer.models:
        part = part_folder(root, name)
        download(checkpointer.strategy, part, tag)
        damaged = damage(checkpointer.strategy, local_folder(part) / tag)
        texts += [f"_{name}: {text}" for text in damaged]
    return texts


def _require_one_save(checkpointer: Any, root: str | Path, tag: str, tags: Sequence[str]) -> None:
    """Raise CheckpointError on all ranks where the parts of a checkpoint were not saved together. Collective."""
    message = None
    if checkpointer.strategy.is_rank_0():
        message = mixture(local_folder(root), tag, checkpointer.models)
    message = checkpointer.strategy.broadcast_object(message)
    if message is not None:
        before = tags[tags.index(tag) + 1 :]
        back = f", or remove {tag} from every part to go on from {before[0]}" if before else ""
        raise CheckpointError(
            f"{root}/{tag} has parts of different checkpoints: {message}. Restore all parts of {tag} from one "
            f"backup{back}; to start anew, set --resume never"
        )


def _set_aside(root: str | Path, tags: Iterable[str], whole: str) -> None:
    """Give damaged checkpoints other names, in all parts; ``latest`` names the whole one."""
    files = files_in_use()
    for part in parts_of(root):
        folder = join(root, part.name)
        for tag in tags:
            if (part / tag).is_dir():
                names = [f"{tag}{DAMAGED}"] + [f"{tag}.{i}{DAMAGED}" for i in range(1, 100)]
                name = next(name for name in names if not (part / name).exists())
                files.rename(part / tag, part / name)
                files.publish(folder, name, tag)
        mark_latest(folder, whole)
    mark_latest(root, whole)


def _report_mark(root: Path, whole: Sequence[str]) -> None:
    """Warn where ``latest`` is not the name of the last whole checkpoint: the first of ``whole`` is taken."""
    marked = read_mark(root)
    if marked != whole[0]:
        logger.warning(
            "%s/%s names %r; the last whole checkpoint is %s", root, LATEST, marked, whole[0]
        )
    elif later := _later(root, marked, whole):
        logger.warning(
            "%s/%s names %s, but the later %s of the same run is whole, too. Going on from %s; to go on from the "
            "other one, stop, and write its name into that file",
            root,
            LATEST,
            marked,
            later,
            marked,
        )


def _later(root: Path, marked: str, whole: Iterable[str]) -> str | None:
    """Return the last checkpoint of the marked one's run that comes after it."""
    facts = {tag: facts_of(Path(part_folder(root), tag)) for tag in whole}
    run = facts[marked].get("run")
    step = facts[marked].get("step")
    if not run:
        return None
    of_run = {tag: saved["step"] for tag, saved in facts.items() if saved.get("run") == run}
    later = [tag for tag in of_run if of_run[tag] > step]
    return max(later, key=of_run.__getitem__, default=None)
