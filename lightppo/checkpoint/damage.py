"""Checkpoints that no run may go on from: damaged, of different savings, able to run code, or of another model.

A checkpoint with a file that is not as it was saved is kept aside as ``global_stepN.damaged``, all parts together, and
the run goes on from the one before.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightppo import tensor_file
from lightppo.checkpoint.frozen_weights import check_frozen, frozen_facts
from lightppo.checkpoint.layout import (
    DAMAGED,
    LATEST,
    META,
    download,
    mark_latest,
    of_all_ranks,
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


def damage(ranks: Ranks, folder: Path) -> list[str]:
    """Return what is damaged in a checkpoint, a text per file; nothing if it is as it was saved. Collective.

    Each rank looks at its share of the files.
    """
    damaged = []
    if (folder / MANIFEST).is_file() or _is_meant_sealed(folder):
        damaged = files_in_use().damage(folder, share=ranks.get_rank(), shares=ranks.world_size)
    elif ranks.is_rank_0():
        message = "%s is of an older lightppo: it has no manifest to be checked against"
        logger.info(message, folder)
    return of_all_ranks(ranks, damaged)


def _is_meant_sealed(folder: Path) -> bool:
    """Tell whether a checkpoint was saved with a manifest; one whose own file cannot be read counts as such."""
    try:
        return bool(json.loads((folder / META).read_text()).get("sealed"))
    except (OSError, ValueError, AttributeError):
        return True


def model_facts(ranks: Ranks, model: Any) -> dict[str, Any]:
    """Return what a checkpoint says of its model: adapters, sums of the weights beside them, towers. Collective."""
    adapters = find_adapters(model)
    whole_checkpoint = find_whole(model)
    facts: dict[str, Any] = {"adapters": None}
    if adapters is not None:
        facts = {"adapters": str(adapters), **frozen_facts(ranks, model)}
    facts["towers"] = None if whole_checkpoint is None else whole_checkpoint.digest
    return facts


def check_model(ranks: Ranks, model: Any, folder: Path, saved_meta: Mapping[str, Any]) -> None:
    """Raise CheckpointError where a checkpoint does not fit a model, before a weight has changed. Collective."""
    current_facts = model_facts(ranks, model)
    saved_adapters = saved_meta.get("adapters")
    adapters = current_facts["adapters"]
    if saved_adapters != adapters:
        raise CheckpointError(
            f"{folder} was saved with {saved_adapters or 'no LoRA adapters'}, this model has {adapters or 'none'}: resume "
            "with the same --lora_rank, --lora_alpha, --target_modules and --load_in_4bit"
        )
    if adapters is not None:
        check_frozen(ranks, model, folder, saved_meta, current_facts)
    if saved_meta.get("towers") != current_facts["towers"]:  # older versions saved none
        raise CheckpointError(
            f"{folder} was trained beside other image or audio towers, or none: give the --pretrain (for a critic, the "
            "--critic_pretrain; of lightppo convert, the --base) that it was trained from, unchanged"
        )
    require_plain(ranks, folder)


def require_plain(ranks: Ranks, folder: Path) -> None:
    """Raise CheckpointError on all ranks if a file of a checkpoint names anything to run. Collective.

    Each rank looks at its share of the files; tensors are not read.
    """
    refused = []
    for file in sorted(folder.rglob("*.pt"))[ranks.get_rank() :: ranks.world_size]:
        try:
            tensor_file.read_deepspeed(file)
        except CheckpointError as error:
            refused.append(str(error))
    if refused := of_all_ranks(ranks, refused):
        more_note = ""
        if len(refused) > 1:
            more_note = f" ({len(refused) - 1} more files are like it)"
        raise CheckpointError(f"{refused[0]}{more_note}")


# -- parts that were not saved together, such as those of two backups --------------------------------------------------


def sums_of_others(root: Path, name: str, tag: str) -> dict[str, str | None]:
    """Return the sums of the parts that were saved before this one, which show later whether a part is another's."""
    part_paths = sorted(root.glob(f"_*/{tag}"))
    return {part_of(path): seal_of(path) for path in part_paths if part_of(path) != name}


def mixture(root: Path, tag: str, names: Iterable[str]) -> str | None:
    """Return which parts of a checkpoint were not saved together with the others; ``None`` if all were.

    Older versions wrote nothing that shows it: such parts fit together, but not to newer ones.
    """
    part_folders = {name: Path(part_folder(root, name), tag) for name in names}
    part_facts = {name: facts_of(folder) for name, folder in part_folders.items()}
    if not any("run" in saved_facts for saved_facts in part_facts.values()):
        return None
    article = "the"
    odd_parts = _of_another_origin(part_facts, step_of(tag))
    saved_sums = part_facts["actor"].get("siblings")
    if not odd_parts and saved_sums is not None:
        odd_parts = _of_another_save(part_folders, saved_sums)
        article = "of another save, the"
    if not odd_parts:
        return None
    articles = dict.fromkeys(sorted(odd_parts), article)
    articles |= {name: "the" for name in part_folders if name not in odd_parts}
    return "; ".join(
        f"_{name} is {_origin(part_facts[name], article)}" for name, article in articles.items()
    )


def _of_another_origin(facts: Mapping[str, Mapping[str, Any]], step: int) -> set[str]:
    """Return the parts of another step, or of another run than most parts are; of as many, than the actor is."""
    part_origins = {
        name: (saved_facts.get("run"), saved_facts.get("step"))
        for name, saved_facts in facts.items()
    }
    # None: of an older version
    fitting_origins = [origin for origin in part_origins.values() if origin[1] in (step, None)]
    usual_origin = max(fitting_origins, key=fitting_origins.count, default=None)
    misnamed_parts = {
        name for name, saved_facts in facts.items() if saved_facts.get("part") not in (name, None)
    }
    return misnamed_parts | {
        name for name, origin in part_origins.items() if origin != usual_origin
    }


def _of_another_save(folders: Mapping[str, Path], saved_sums: Mapping[str, str]) -> set[str]:
    """Return the parts whose sums the actor does not know; if it knows none of several, it is the actor."""
    other_parts = [name for name in folders if name != "actor"]
    odd_parts = {name for name in other_parts if seal_of(folders[name]) != saved_sums.get(name)}
    if len(odd_parts) == len(other_parts) > 1:
        return {"actor"}
    return odd_parts


def _origin(facts: Mapping[str, Any], article: str) -> str:
    if "run" not in facts:
        return "of an older lightppo"
    return f"{article} {facts['part']} of step {facts['step']} of run {facts['run']}"


# -- the checkpoint that a run goes on from ----------------------------------------------------------------------------


def last_undamaged(
    checkpointer: Any,
    root: str | Path,
    candidate_tags: Sequence[str],
    is_held: bool,
    before: int | None,
) -> str | None:
    """Return the first candidate whose files are as they were saved; those before it are kept aside. Collective.

    ``before``: of those before this step, which are only read: a damaged one is passed over.
    """
    if before is None and checkpointer.strategy.is_rank_0():
        _report_mark(local_folder(root), candidate_tags)
    damaged_tags: dict[str, str] = {}
    whole_tag = None
    for tag in candidate_tags:
        if damage_texts := _damage_of_parts(checkpointer, root, tag):
            damaged_tags[tag] = "; ".join(damage_texts)
            continue
        _require_one_save(checkpointer, root, tag, candidate_tags)
        whole_tag = tag
        break
    if damaged_tags:
        is_renamed = is_held and whole_tag is not None
        if not is_renamed and before is None:
            raise CheckpointError(_why_damaged(root, damaged_tags, whole_tag))
        _leave_out(checkpointer.strategy, root, damaged_tags, whole_tag, is_renamed)
    return whole_tag


def _why_damaged(root: str | Path, damaged_tags: Mapping[str, str], whole_tag: str | None) -> str:
    tag, damage_text = next(iter(damaged_tags.items()))
    remaining_note = "no whole one is left"
    if whole_tag is not None:
        remaining_note = f"the run that owns it would go on from {whole_tag}"
    return f"{root}/{tag} is damaged: {damage_text}; {remaining_note}. To start anew, set --resume never"


def _leave_out(
    strategy: Any,
    root: str | Path,
    damaged_tags: Mapping[str, str],
    whole_tag: str | None,
    is_renamed: bool,
) -> None:
    """Say that the run goes on from a whole checkpoint before damaged ones, which get other names or stay."""
    notes = []
    for tag, damage_text in damaged_tags.items():
        note = f"{tag} is damaged"
        if is_renamed:
            note = f"{tag} is damaged, kept as {tag}{DAMAGED}"
        notes.append(f"{note}: {damage_text}")
    if is_renamed:
        rename = partial(_set_aside, root, damaged_tags, whole_tag)
        strategy.on_rank_0(rename, f"rename {list(damaged_tags)}")
    strategy.print(f"{root}: {'; '.join(notes)}; going on from {whole_tag or 'the start'}")


def _damage_of_parts(checkpointer: Any, root: str | Path, tag: str) -> list[str]:
    """Return what is damaged in any part, a text per file. Collective."""
    damage_texts: list[str] = []
    for name in checkpointer.models:
        part_path = part_folder(root, name)
        download(checkpointer.strategy, part_path, tag)
        part_damage = damage(checkpointer.strategy, local_folder(part_path) / tag)
        damage_texts += [f"_{name}: {damage_text}" for damage_text in part_damage]
    return damage_texts


def _require_one_save(checkpointer: Any, root: str | Path, tag: str, tags: Sequence[str]) -> None:
    """Raise CheckpointError on all ranks where the parts of a checkpoint were not saved together. Collective."""
    message = None
    if checkpointer.strategy.is_rank_0():
        message = mixture(local_folder(root), tag, checkpointer.models)
    message = checkpointer.strategy.broadcast_object(message)
    if message is not None:
        earlier_tags = tags[tags.index(tag) + 1 :]
        removal_note = ""
        if earlier_tags:
            removal_note = f", or remove {tag} from every part to go on from {earlier_tags[0]}"
        raise CheckpointError(
            f"{root}/{tag} has parts of different checkpoints: {message}. Restore all parts of {tag} from one "
            f"backup{removal_note}; to start anew, set --resume never"
        )


def _set_aside(root: str | Path, tags: Iterable[str], whole: str) -> None:
    """Give damaged checkpoints other names, in all parts; ``latest`` names the whole one."""
    files = files_in_use()
    for part_path in parts_of(root):
        folder = join(root, part_path.name)
        for tag in tags:
            if (part_path / tag).is_dir():
                names = [f"{tag}{DAMAGED}"]
                names += [f"{tag}.{number}{DAMAGED}" for number in range(1, 100)]
                new_name = next(name for name in names if not (part_path / name).exists())
                files.rename(part_path / tag, part_path / new_name)
                files.publish(folder, new_name, tag)
        mark_latest(folder, whole)
    mark_latest(root, whole)


def _report_mark(root: Path, whole_tags: Sequence[str]) -> None:
    """Warn where ``latest`` is not the name of the last whole checkpoint: the first of ``whole_tags`` is taken."""
    marked_tag = read_mark(root)
    if marked_tag != whole_tags[0]:
        logger.warning(
            "%s/%s names %r; the last whole checkpoint is %s",
            root,
            LATEST,
            marked_tag,
            whole_tags[0],
        )
    elif later_tag := _later(root, marked_tag, whole_tags):
        logger.warning(
            "%s/%s names %s, but the later %s of the same run is whole, too. Going on from %s; to go on from the "
            "other one, stop, and write its name into that file",
            root,
            LATEST,
            marked_tag,
            later_tag,
            marked_tag,
        )


def _later(root: Path, marked_tag: str, whole: Iterable[str]) -> str | None:
    """Return the last checkpoint of the marked one's run that comes after it."""
    tag_facts = {tag: facts_of(Path(part_folder(root), tag)) for tag in whole}
    run_id = tag_facts[marked_tag].get("run")
    step = tag_facts[marked_tag].get("step")
    if not run_id:
        return None
    steps_by_tag = {
        tag: saved_facts["step"]
        for tag, saved_facts in tag_facts.items()
        if saved_facts.get("run") == run_id
    }
    later_tags = [tag for tag in steps_by_tag if steps_by_tag[tag] > step]
    return max(later_tags, key=steps_by_tag.__getitem__, default=None)
