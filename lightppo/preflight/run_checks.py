"""What is looked at while a run is built, beside what a core run must know: files, memory, disks, a dry run."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import chain
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
from lightppo.preflight.dry_run_report import after_step, fewer_rows, logged_rows, rehearse
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
    building.strategy.on_rank_0(lambda: preflight(building.config), "look at files and folders")


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
    rows = building.rows.get("prompt_data", building.rows.get("dataset"))
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
    always_padded = "pretrain_data" in building.rows

    def test() -> None:
        check_padding(building.models, building.strategy, always_padded)
        check_training(building.models, building.strategy)

    once_per_model(building, "padding", test)


def check_decoding_of(building: Building) -> None:
    """Check that the engine decodes with this model as it must. Collective."""
    if building.config.sampling.skip_rollout is None:  # else nothing may be sampled
        parts = (building.rollout_engine, building.actor, building.strategy)
        once_per_model(building, "decoding", lambda: check_decoding(*parts))


# -- what they do ----------------------------------------------------------------------------------------------------


def temporary_folder(strategy: DeepspeedStrategy) -> str:
    """Make a folder that goes with rank 0's process. Collective."""

    def make() -> str:
        folder = tempfile.mkdtemp(prefix="lightppo-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return folder

    return strategy.on_rank_0(make, "make a temporary folder")


def tell_memory(config: PPOConfig, strategy: DeepspeedStrategy) -> None:
    """Print what the run will need; refuses one whose weights and optimizer alone do not fit. Collective.

    A model whose code cannot run without data, as kernels of its own cannot, is not counted, and trains all the same.
    """
    device = strategy.device
    is_gpu = device.type == "cuda"
    machine = Machine(
        strategy.world_size,
        is_gpu,
        ranks_on_node(strategy.world_size),
        device_bytes=torch.cuda.get_device_properties(device).total_memory if is_gpu else None,
        host_bytes=None if is_gpu else host_bytes(),
        library_bytes=library_bytes(ranks_on_node(strategy.world_size)),
    )

    def report() -> str:
        try:
            return "\n".join(check_memory(config, machine))
        except ConfigError:
            raise
        except Exception as error:  # of the model's own code, on a device that holds no data
            return (
                f"note: the memory of this run cannot be computed: {type(error).__name__}: {error}"
            )

    strategy.print(strategy.on_rank_0(report, "compute the memory of this run"))


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
    weight_bytes = 4 if compute_dtype(config) == "float32" else 2
    checkpoint_bytes = 0
    if saves and not checkpoint.disable_ds_ckpt:
        for role, count in parameters.items():
            averaged = role in ("ema", "reference")
            checkpoint_bytes += count * (4 if averaged else weight_bytes + 12)
    if (saves and checkpoint.save_hf_ckpt) or exports:
        if exported is None:
            exported = parameters["actor"]
        checkpoint_bytes += exported * weight_bytes
    # One more than are kept: an old checkpoint goes only when the new one is whole.
    needed = min(
        (checkpoint.max_ckpt_num + 1) * checkpoint_bytes,
        checkpoint.max_ckpt_mem * 1e9 + checkpoint_bytes,
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
        if problem := layout.in_the_way(folder):
            return problem
    return None


# -- the end of a dry run --------------------------------------------------------------------------------------------


class DryRun(Callback):
    """Says what the one step of a dry run has shown."""

    def on_end(self, run: Any, error: BaseException | None) -> None:
        if error is not None:
            return
        cost = "no step"
        if run.strategy.is_rank_0() and not run.only_evaluates:
            for line in after_step(run.config, run.tokenizer):
                run.strategy.print(line)
            cost = _cost(run)
        run.strategy.report_memory(f"dry run: {cost}; nothing is kept; memory of rank 0")
        if state_bytes := _optimizer_bytes(run.strategy):
            run.strategy.print(
                f"later steps need up to {shown_size(state_bytes)} more: they hold Adam's states during their passes; "
                "the first step creates these at its end"
            )


def _optimizer_bytes(strategy: Any) -> int:
    """Return the bytes of this rank's optimizer states where the models run."""
    byte_count = 0
    for engine in strategy.trained_engines:
        optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
        for tensor in chain.from_iterable(state.values() for state in optimizer.state.values()):
            if torch.is_tensor(tensor) and tensor.device.type == strategy.device.type:
                byte_count += tensor.nbytes
    return byte_count


def _cost(run: Any) -> str:
    """Return what the step took."""
    if not isinstance(run.config, PPOConfig):
        loss = next(row["train/loss"] for row in logged_rows(run.config) if "train/loss" in row)
        return f"one step of the {len(run.train_dataloader.dataset)} longest rows, loss {loss:.4f}"
    rollout = run.config.rollout
    seconds = next(row for row in logged_rows(run.config) if "perf/time_step" in row)
    phases = ("rollout", "reward", "experience", "train", "sync")
    parts = ", ".join(f"{phase} {seconds[f'perf/time_{phase}']:.1f}" for phase in phases)
    samples = f"{rollout.rollout_batch_size} prompts × {rollout.n_samples_per_prompt} samples"
    size = f"{samples}, ≤ {rollout.generate_max_len} tokens,"
    return f"one step of {size} took {seconds['perf/time_step']:.1f} s ({parts})"


# -- a resumed run ---------------------------------------------------------------------------------------------------


def check_same_run(resumed: Resumed) -> Iterator[str]:
    """Yield a line for each option that may change, and did; ConfigError for what may not."""
    command = resumed.command
    options = resumed.options
    # Older checkpoints hold values as they were given.
    saved = {name: shown_value(value) for name, value in resumed.saved["config"].items()}
    idle = set(chain.from_iterable(idle_flags(command, options).values()))
    refused, safe = unsafe_changes(saved, options, idle, type(command), resumed.trains)
    refused.pop("save_path", None)  # the same folder may be spelt otherwise, or have been moved
    changes = [f"--{name} {old} → {new}" for name, (old, new) in refused.items()]
    for name, saved_mark in resumed.saved.get("content", {}).items():
        mark = shown_value(saved_mark)
        is_unread = not resumed.trains and name != "pretrain"
        if name in refused or is_unread or resumed.content.get(name, mark) == mark:
            continue
        if name != "save_path":
            changes.append(f"--{name} {options[name]} has other content than it had")
        elif resumed.is_own:  # a path asks for another run that goes on from this one
            changes.append(f"--save_path {saved[name]} → {options[name]}")
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
    reader_of = {name: section.of for name, section in PPOConfig.sections().items()}
    for option in kind.all_options():
        name = option.name
        if name not in saved or saved[name] == now[name] or name in idle:
            continue
        reader = reader_of.get(option.owner)
        if not trains and (reader == "training" or (option.required and now[name] is None)):
            continue
        is_other_model = name.startswith(("critic_", "ref_", "reward_"))
        changes = refused
        if option.resume_safe or (not trains and (reader != "weights" or is_other_model)):
            changes = safe
        changes[name] = (saved[name], now[name])
    return refused, safe
