"""What is looked at while a run is built, beside what a core run must know: files, memory, disks, a dry run."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightppo.callbacks import Callback
from lightppo.checkpoint import layout
from lightppo.checkpoint.run_checkpointer import Resumed
from lightppo.config import PPOConfig
from lightppo.config.contradictions import idle_flags
from lightppo.config.options import OptionSet
from lightppo.config.rules import compute_dtype
from lightppo.distributed.deepspeed import DeepspeedStrategy
from lightppo.errors import CheckpointError, ConfigError
from lightppo.files import local_folder, shown_size
from lightppo.preflight.before_imports import NOTHING_KEPT, dry_run_config, looked_at, preflight
from lightppo.preflight.budget import Machine, check_memory, host_bytes, library_bytes
from lightppo.preflight.dry_run_report import after_step, fewer_rows, rehearse
from lightppo.preflight.probes import check_decoding, check_padding, check_training, once_per_model
from lightppo.ranks import ranks_on_node
from lightppo.redaction import shown_value

if TYPE_CHECKING:
    from lightppo.trainer.building import Building


# -- checks, in the order in which a run calls them ------------------------------------------------------------------


def check_files(building: Building) -> None:
    """Check files, folders, first rows and logins, as rank 0 sees them. Collective."""
    has_looked = building.asked.flat() in looked_at
    looked_at.clear()
    if not isinstance(building.config, PPOConfig) or building.strategy.broadcast_object(has_looked):
        return  # the command has
    problem = None
    if building.strategy.is_rank_0():
        try:
            preflight(building.config)
        except ConfigError as error:
            problem = str(error)
    if problem := building.strategy.broadcast_object(problem):
        raise ConfigError(problem)


def tell_memory_of(building: Building) -> None:
    """Say what memory a run needs that has a GPU, or is only tried. Collective."""
    config = building.config
    strategy = building.strategy
    if isinstance(config, PPOConfig) and (
        config.training.dry_run or strategy.device.type == "cuda"
    ):
        tell_memory(config, strategy)


def become_dry_run(building: Building) -> None:
    """Make a small run of one with ``--dry_run``, in a folder that goes at its end. Collective."""
    config = building.config
    strategy = building.strategy
    if not config.training.dry_run:
        return
    folder = temporary_folder(strategy)
    building.keeps = False
    if isinstance(config, PPOConfig):
        building.config = dry_run_config(config, strategy.world_size, folder)
        return
    strategy.train_batch_size = strategy.micro_train_batch_size * strategy.world_size
    building.config = config.with_options(
        train_batch_size=strategy.train_batch_size,
        num_epochs=None,
        max_steps=1,
        benchmark_steps=None,
        **NOTHING_KEPT,
        save_path=folder,
        ckpt_path=None,
        log_file=None,
    ).resolved()


def look_at_rows(building: Building) -> Iterator[str]:
    """Yield what a dry run says of rows and scores; else whether there are enough rows for a step. Collective."""
    rows = next(
        (building.rows[name] for name in ("prompt_data", "dataset") if name in building.rows), None
    )
    if rows is None:
        return
    if building.keeps:
        if shortage := fewer_rows(building.config, rows):
            yield f"warning: {shortage}"
        return
    rehearse(building.asked, rows, building.held_out, building.reward_source, building.strategy)


def check_disk(building: Building) -> None:
    """Check the room for the checkpoints of the run that was asked for."""
    sizes = dict(building.sizes)
    exported = sizes.pop("export")
    check_disk_space(building.asked, sizes, exported)


def check_places(building: Building) -> None:
    """Check that nothing stands where checkpoints are to be written: the first save would fail. Collective."""
    config = building.config
    checkpoint = config.checkpoint
    writes = not (checkpoint.disable_ds_ckpt or config.flat().get("val_only"))
    if not writes or not building.keeps or checkpoint.ckpt_path is None:
        return
    parts = [name for name in building.sizes if name != "export"]

    def look() -> None:
        if problem := in_the_way(local_folder(checkpoint.ckpt_path), parts):
            raise CheckpointError(problem)

    building.strategy.on_rank_0(look, "look at --ckpt_path")


def check_padded_batches(building: Building) -> None:
    """Check that padded batches are right, and that training changes no number by itself. Collective."""
    models = building.models
    strategy = building.strategy
    always_padded = "pretrain_data" in building.rows

    def test() -> None:
        check_padding(models, strategy, always_padded=always_padded)
        check_training(models, strategy)

    once_per_model(building, "padding", test)


def check_decoding_of(building: Building) -> None:
    """Check that the engine decodes with this model as it must. Collective."""
    if building.config.sampling.skip_rollout is None:  # else nothing may be sampled
        parts = (building.rollout_engine, building.actor, building.strategy)
        once_per_model(building, "decoding", lambda: check_decoding(*parts))


# -- what they do ----------------------------------------------------------------------------------------------------


def temporary_folder(strategy: DeepspeedStrategy) -> str:
    """Make a folder that goes with rank 0's process. Collective."""
    folder = None
    if strategy.is_rank_0():
        folder = tempfile.mkdtemp(prefix="lightppo-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return strategy.broadcast_object(folder)


def tell_memory(config: PPOConfig, strategy: DeepspeedStrategy) -> None:
    """Print what the run will need; refuses one whose weights and optimizer alone do not fit. Collective.

    A model whose code cannot run without data, as kernels of its own cannot, is not counted, and trains all the same.
    """
    machine = _machine(strategy)
    answer = None
    if strategy.is_rank_0():
        try:
            answer = "\n".join(check_memory(config, machine))
        except ConfigError as error:
            answer = error
        except Exception as error:  # of the model's own code, on a device that holds no data
            answer = (
                f"note: the memory of this run cannot be computed: {type(error).__name__}: {error}"
            )
    if isinstance(answer := strategy.broadcast_object(answer), ConfigError):
        raise answer
    strategy.print(answer)


def _machine(strategy: DeepspeedStrategy) -> Machine:
    """Return the machine of this run."""
    device = strategy.device
    ranks = strategy.world_size
    is_gpu = device.type == "cuda"
    size = torch.cuda.get_device_properties(device).total_memory if is_gpu else None
    per_node = ranks_on_node(ranks)
    limit = None if is_gpu else host_bytes()
    return Machine(ranks, is_gpu, per_node, size, limit, library_bytes(per_node))


def check_disk_space(
    config: OptionSet, parameters: dict[str, int], exported: int | None = None
) -> None:
    """Check the room for the checkpoints that will be kept, before the first one is lost to a full disk.

    Trained models have weights, fp32 master weights and two fp32 moments; ``ema`` and ``reference`` fp32 weights.

    Args:
        parameters: their number per part of a checkpoint (with LoRA those that train).
        exported: their number in an export of the actor; ``None``: as many as in its checkpoint.
    """
    checkpoint = config.checkpoint
    exports = checkpoint.hf_save_steps > 0 or config.evaluation.best_metric
    saves = checkpoint.save_steps > 0 or checkpoint.save_epochs or checkpoint.save_seconds
    weight = 4 if compute_dtype(config) == "float32" else 2
    state = export = 0
    if saves and not checkpoint.disable_ds_ckpt:
        state = sum(
            count * (4 if role in ("ema", "reference") else weight + 12)
            for role, count in parameters.items()
        )
    if (saves and checkpoint.save_hf_ckpt) or exports:
        export = (parameters["actor"] if exported is None else exported) * weight
    # One more than are kept: an old checkpoint goes only when the new one is whole.
    needed = min(
        (checkpoint.max_ckpt_num + 1) * (state + export),
        checkpoint.max_ckpt_mem * 1e9 + state + export,
    )
    folder = local_folder(checkpoint.ckpt_path).absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ConfigError(
            f"--ckpt_path {checkpoint.ckpt_path}: {checkpoint.max_ckpt_num} checkpoints need about "
            f"{shown_size(needed)}, {shown_size(free)} are free: lower "
            "--max_ckpt_num or --max_ckpt_mem, or choose another disk"
        )


def in_the_way(root: Path, names: Iterable[str]) -> str | None:
    """Return what keeps a run from writing its checkpoints here: a file in a folder's place, or the other way round."""
    for folder in (root, *(Path(layout.part_folder(root, name)) for name in names)):
        if os.path.lexists(folder) and not folder.is_dir():
            return f"{folder} is no folder, and checkpoints are to be written there: remove it"
        if (problem := layout.in_the_way(folder)) is not None:
            return problem
    return None


# -- the end of a dry run --------------------------------------------------------------------------------------------


class DryRun(Callback):
    """Says what the one step of a dry run has shown."""

    def on_end(self, run: Any, error: BaseException | None) -> None:
        if error is not None:
            return
        evaluates = run.only_evaluates
        is_told = run.strategy.is_rank_0() and not evaluates
        for line in after_step(run.config, run.tokenizer) if is_told else ():
            run.strategy.print(line)
        took = _cost(run) if is_told else "no step"
        run.strategy.report_memory(f"dry run: {took}; nothing is kept; memory of rank 0")
        if states := _optimizer_bytes(run.strategy):
            run.strategy.print(
                f"later steps need up to {shown_size(states)} more: they hold Adam's states during their passes; "
                "the first step creates these at its end"
            )


def _optimizer_bytes(strategy: Any) -> int:
    """Return the bytes of this rank's optimizer states where the models run."""
    optimizers = [engine.optimizer for engine in strategy.trained_engines]
    states = [getattr(optimizer, "optimizer", optimizer).state for optimizer in optimizers]
    tensors = [
        tensor for state in states for values in state.values() for tensor in values.values()
    ]
    device = strategy.device.type
    return sum(
        tensor.nbytes
        for tensor in tensors
        if torch.is_tensor(tensor) and tensor.device.type == device
    )


def _cost(run: Any) -> str:
    """Return what the step took."""
    if isinstance(run.config, PPOConfig):
        return dry_run_cost(run.config)
    rows = [
        json.loads(row)
        for row in Path(run.config.checkpoint.save_path, "metrics.jsonl").read_text().splitlines()
    ]
    loss = next(row["train/loss"] for row in rows if "train/loss" in row)
    return f"one step of the {len(run.train_dataloader.dataset)} longest rows, loss {loss:.4f}"


def dry_run_cost(config: PPOConfig) -> str:
    """Return what the step of a dry run took."""
    rollout = config.rollout
    rows = map(
        json.loads, Path(config.checkpoint.save_path, "metrics.jsonl").read_text().splitlines()
    )
    times = next(row for row in rows if "perf/time_step" in row)
    names = ("rollout", "reward", "experience", "train", "sync")
    parts = ", ".join(f"{name} {times[f'perf/time_{name}']:.1f}" for name in names)
    samples = f"{rollout.rollout_batch_size} prompts × {rollout.n_samples_per_prompt} samples"
    size = f"{samples}, ≤ {rollout.generate_max_len} tokens,"
    return f"one step of {size} took {times['perf/time_step']:.1f} s ({parts})"


# -- a resumed run ---------------------------------------------------------------------------------------------------


def check_same_run(resumed: Resumed) -> Iterator[str]:
    """Yield a line for each option that may change, and did; ConfigError for what may not."""
    saved = resumed.saved
    options = resumed.options
    content = resumed.content
    # Older checkpoints hold values as they were given.
    as_shown = {name: shown_value(value) for name, value in saved["config"].items()}
    idle: set[str] = set()
    if resumed.command is not None:
        idle = idle.union(*idle_flags(resumed.command, options).values())
    kind = PPOConfig if resumed.command is None else type(resumed.command)
    refused, safe = unsafe_changes(as_shown, options, idle, kind, resumed.trains)
    refused.pop("save_path", None)  # the same folder may be spelt otherwise, or have been moved
    changes = [f"--{name} {old} → {new}" for name, (old, new) in refused.items()]
    marks = {name: shown_value(mark) for name, mark in saved.get("content", {}).items()}
    for name, mark in marks.items():
        is_unread = not resumed.trains and name != "pretrain"
        if name in refused or is_unread or content.get(name, mark) == mark:
            continue
        if name != "save_path":
            changes.append(f"--{name} {options[name]} has other content than it had")
        elif resumed.is_own:  # a path asks for another run that goes on from this one
            changes.append(f"--save_path {as_shown[name]} → {options[name]}")
    if changes:
        raise ConfigError(
            f"cannot resume {resumed.where} as another run: {', '.join(changes)}. Set that back, or start anew: with "
            "another --save_path (and --ckpt_path), or with --resume never"
        )
    for name, (old, new) in safe.items():
        yield f"resume: --{name} was {old}, is {new}"


def unsafe_changes(
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    idle: Container[str] = (),
    kind: type[OptionSet] = PPOConfig,
    trains: bool = True,
) -> tuple[dict[str, tuple], dict[str, tuple]]:
    """Compare a resumed run's options with those it was started with.

    Args:
        idle: options that do nothing in this run.
        kind: the options of the command.
        trains: False: only what makes the weights must be as it was.

    Returns:
        (refused, safe): for each option that changed, (old, new).
    """
    refused = {}
    safe = {}
    read_by = {name: section.of for name, section in PPOConfig.sections().items()}
    for option in kind.all_options():
        unread = not trains and (
            read_by.get(option.owner) == "training"
            or (option.required and now[option.name] is None)
        )
        if (
            option.name not in saved
            or saved[option.name] == now[option.name]
            or unread
            or option.name in idle
        ):
            continue
        other_part = read_by.get(option.owner) != "weights" or option.name.startswith(
            ("critic_", "ref_", "reward_")
        )
        (safe if option.resume_safe or (other_part and not trains) else refused)[option.name] = (
            saved[option.name],
            now[option.name],
        )
    return refused, safe
