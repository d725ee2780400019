"""Layout of a run's checkpoints: the names of folders and files, and which checkpoints are whole. It loads no torch.

ckpt_path/_actor/global_stepN    weights, optimizer, scheduler; its client state is the state of the run
ckpt_path/_critic/global_stepN   likewise _ema, and _reference if it moves
ckpt_path/latest                 the last tag of which every part is whole; each part has such a file, too
ckpt_path/global_stepN_hf        the actor for transformers (--save_hf_ckpt, --hf_save_steps)
ckpt_path/best_hf                the actor of the best evaluation (--best_metric), and best.json

Each part is sealed with facts (:mod:`lightppo.files`): part, step, run.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lightppo.errors import CheckpointError
from lightppo.files import files_in_use, join, local_folder
from lightppo.ranks import Ranks
from lightppo.storage import is_url

LATEST = "latest"
META = "lightppo_checkpoint.json"
CLIENT_STATE = "client_state.pt"
BEST = "best.json"
DAMAGED = ".damaged"
INCOMPLETE = ".incomplete"
OLD = f".old{INCOMPLETE}"  # behind the name of a checkpoint whose place another one takes
REPLACED_NAMES = (
    "_*",
    "global_step*",
    "best_hf",
    LATEST,
)  # what a run replaces or removes in --ckpt_path
_TAG = re.compile(r"global_step\d+")
_EXPORT = re.compile(r"global_step\d+_hf")


# -- names -----------------------------------------------------------------------------------------------------------


def tag_of(step: int) -> str:
    """Return the name of a step's checkpoint."""
    return f"global_step{step}"


def step_of(tag: str) -> int:
    """Return the step of a checkpoint by its name."""
    return int(tag.removeprefix("global_step"))


def part_folder(root: str | os.PathLike[str], name: str = "actor") -> str | Path:
    """Return the folder of a part's checkpoints."""
    return join(root, f"_{name}")


def parts_of(root: str | Path) -> list[Path]:
    """Return the folders of all parts that are there, the actor's first."""
    return sorted(local_folder(root).glob("_*"), key=lambda path: path.name != "_actor")


def part_of(checkpoint: Path) -> str:
    """Return the part that a checkpoint is of."""
    return checkpoint.absolute().parent.name.removeprefix("_")


def beside(checkpoint: Path, name: str = "actor") -> Path:
    """Return where another part of the same checkpoint is."""
    return checkpoint.absolute().parent.parent / f"_{name}" / checkpoint.name


def has_checkpoints(root: Path) -> bool:
    """Tell whether anything is saved below a folder, whole or not."""
    return any((root / "_actor").glob("*/"))


def export_folder(root: str | os.PathLike[str], step: int) -> str | Path:
    """Return the folder of a step's export."""
    return join(root, f"{tag_of(step)}_hf")


def export_of(checkpoint: Path) -> Path:
    """Return the folder of the export that was made with a checkpoint."""
    return checkpoint.parent.parent / f"{checkpoint.name}_hf"


def exports_of(root: Path) -> list[Path]:
    """Return the folders of all steps' exports."""
    return [path for path in root.iterdir() if _EXPORT.fullmatch(path.name)]


def best_folder(root: str | os.PathLike[str]) -> str | Path:
    """Return the folder of the best evaluation's export."""
    return join(root, "best_hf")


def frozen_file(checkpoint: Path, rank: int) -> Path:
    """Return the file with the weights of a model without optimizer; under ZeRO-3 each rank has one."""
    return checkpoint / f"frozen_rank{rank}.pt"


def model_files(checkpoint: Path, saved_meta: Mapping[str, Any]) -> list[Path]:
    """Return DeepSpeed's files with what it saves beside the optimizer."""
    if saved_meta["zero_stage"] < 3:
        return [checkpoint / "mp_rank_00_model_states.pt"]
    ranks = range(saved_meta["world_size"])
    return [checkpoint / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in ranks]


def optimizer_files(checkpoint: Path, saved_meta: Mapping[str, Any]) -> list[Path]:
    """Return DeepSpeed's files with the optimizer, by rank. At stage 0 there are none."""
    file_prefix = "bf16_" if saved_meta["bf16"] else ""
    ranks = range(saved_meta["world_size"])
    return [
        checkpoint / f"{file_prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        for rank in ranks
    ]


# -- which are there -------------------------------------------------------------------------------------------------


def list_tags(save_dir: str | os.PathLike[str]) -> list[str]:
    """Return the tags of the complete checkpoints in a directory, oldest first."""
    checkpoint_folders = [
        path
        for path in Path(save_dir).iterdir()
        if is_checkpoint(path) and path.suffix not in (INCOMPLETE, DAMAGED)
    ]
    return [
        path.name
        for path in sorted(
            checkpoint_folders, key=lambda path: ((path / META).stat().st_mtime_ns, path.name)
        )
    ]


def is_checkpoint(folder: Path) -> bool:
    """Tell whether a folder is one part's checkpoint."""
    return (folder / META).is_file()


def saved_tags(root: Path, name: str) -> list[str]:
    """Return the tags of one part's whole checkpoints of a run, oldest first."""
    part_path = root / f"_{name}"
    if part_path.is_dir():
        return [tag for tag in list_tags(part_path) if _TAG.fullmatch(tag)]
    return []


def latest_tag(load_dir: str | os.PathLike[str]) -> str | None:
    """Return the tag to resume from in ``load_dir``; None if there is no checkpoint."""
    load_dir = Path(load_dir)
    if not load_dir.is_dir():
        raise CheckpointError(f"{load_dir} is not a directory")
    if (tag := read_mark(load_dir)) is None:
        return None
    if not is_checkpoint(load_dir / tag):
        whole_tags = ", ".join(list_tags(load_dir)) or "none"
        raise CheckpointError(
            f"{load_dir / LATEST} names {tag!r}, which is not a whole checkpoint; whole ones here: {whole_tags}"
        )
    return tag


def in_the_way(root: Path) -> str | None:
    """Return what is wrong with ``latest`` in a folder; None where it may be written."""
    if (root / LATEST).is_dir():
        return f"{root / LATEST} is a folder, and must be a file with the name of the last checkpoint: remove it"
    return None


def read_mark(folder: Path) -> str | None:
    """Return what a folder's ``latest`` says, damaged bytes as ``\\xe2``; None without that file."""
    try:
        return (folder / LATEST).read_bytes().decode(errors="backslashreplace").strip()
    except FileNotFoundError:
        return None
    except IsADirectoryError as error:
        raise CheckpointError(in_the_way(folder)) from error
    except OSError as error:
        raise CheckpointError(f"{folder / LATEST} cannot be read ({error.strerror})") from error


def mark_latest(root: str | os.PathLike[str], tag: str) -> None:
    """Write ``latest``."""
    files = files_in_use()
    files.write_text(local_folder(root) / LATEST, tag)
    files.publish(root, LATEST)


def last_shape(root: str) -> tuple[str, Mapping[str, Any]] | None:
    """Return the last tag of a run and what its actor says about itself; None where it cannot be read."""
    try:
        tag = Path(root, LATEST).read_text().strip()
        return tag, json.loads(Path(root, "_actor", tag, META).read_text())
    except (OSError, ValueError):
        return None


def resume_root(resume: str, ckpt_path: str) -> str | Path | None:
    """Return where to look for a checkpoint: ``--ckpt_path`` for auto, the named folder for a path, None for never."""
    if resume == "never":
        return None
    if resume == "auto":
        if is_url(ckpt_path):
            return ckpt_path
        return local_folder(ckpt_path)
    actor_folder = local_folder(resume) / "_actor"
    if not actor_folder.is_dir() or not list_tags(actor_folder):
        raise CheckpointError(no_checkpoints(resume, "a whole one"))
    return resume if is_url(resume) else local_folder(resume)


def no_checkpoints(resume: str, lacking: str) -> str:
    """Return the message about a ``--resume`` that names no folder of checkpoints."""
    return (
        f"--resume {resume}: not a folder of checkpoints (it has no _actor with {lacking} inside); "
        "name the --ckpt_path of the run to go on with, or leave --resume at auto"
    )


# -- of all ranks ----------------------------------------------------------------------------------------------------


def of_all_ranks(ranks: Ranks, texts: Iterable[str]) -> list[str]:
    """Return the different texts of all ranks, sorted. Collective."""
    return sorted(set().union(*ranks.all_gather_object(texts)))


# -- at URLs ---------------------------------------------------------------------------------------------------------


def download_marks(root: str) -> None:
    """Bring from a URL the small files of checkpoints and exports that say which are whole."""
    marks = (LATEST, META, f"_hf/{BEST}", "_hf/config.json")
    files_in_use().fetch(root, lambda name: name.endswith(marks))


def download(ranks: Ranks, source: str | os.PathLike[str], tag: str | None) -> None:
    """Bring a checkpoint at a URL to this node. Collective."""
    if is_url(source):
        marks = (LATEST, f"{tag}/")
        fetch_files = partial(files_in_use().fetch, source, lambda name: name.startswith(marks))
        ranks.on_rank_0(fetch_files, f"read {source}")
