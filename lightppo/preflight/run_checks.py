"""What is looked at while a run is built, beside what a core run must know: files, memory, disks, a dry run."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Container, Iterator, Mapping
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
from lightppo.preflight.budget import Machine, host_bytes, library_bytes
from lightppo.preflight.dry_run_report import after_step, fewer_rows, logged_rows, rehearse
from lightppo.preflight.fitting import check_memory, passes_note, with_fitting_passes
from lightppo.preflight.probes import check_decoding, check_padding, check_training, once_per_model
from lightppo.ranks import ranks_on_node
from lightppo.redaction import shown_value

if TYPE_CHECKING:
    from lightppo.trainer.building import Building


# -- checks, in the order in which a run calls them ------------------------------------------------------------------


def check_files(building: Building) -> None:
    """Check files, folders, first rows and logins, as rank 0 sees them. Collective."""
    has_looked = building.resolved_options.flat() in looked_at
    looked_at.clear()
    if not isinstance(building.config, PPOConfig) or building.strategy.broadcast_object(has_looked):
        return  # the command has
    building.strategy.on_rank_0(lambda: preflight(building.config), "look at files and folders")


def fit_memory(building: Building) -> None:
    """Choose the tokens of a pass by the memory of GPUs, print what memory the run needs, and refuse one that certainly
    does not fit: of a run that has a GPU, or is only tried. Collective.

    A model whose code cannot run without data, as kernels of its own cannot, is not counted, and trains all the same.
    """
    config = building.config
    strategy = building.strategy
    on_gpu = strategy.device.type == "cuda"
    if not isinstance(config, PPOConfig) or not (config.training.dry_run or on_gpu):
        return
    ranks_of_node = ranks_on_node(strategy.world_size)
    limits = {"host_bytes": host_bytes()}
    if on_gpu:
        total_bytes = torch.cuda.get_device_properties(strategy.device).total_memory
        limits = {"device_bytes": strategy.all_reduce(total_bytes, "min")}
    machine = Machine(
        strategy.world_size,
        on_gpu,
        ranks_of_node,
        library_bytes=library_bytes(ranks_of_node),
        **limits,
    )

    def fit() -> tuple[PPOConfig, list[str]]:
        try:
            fitting = with_fitting_passes(building.options, machine)
            return fitting, [
                *check_memory(fitting, machine),
                *passes_note(building.options, fitting),
            ]
        except ConfigError:
            raise
        except Exception as error:  # of the model's own code, on a device that holds no data
            reason = f"{type(error).__name__}: {error}"
            return config, [f"note: the memory of this run cannot be computed: {reason}"]

    building.config, lines = strategy.on_rank_0(fit, "compute the memory of this run")
    building.tell(lines)


def temporary_folder(strategy: DeepspeedStrategy) -> str:
    """Make a folder that goes with rank 0's process. Collective."""
    folder = strategy.on_rank_0(
        lambda: tempfile.mkdtemp(prefix="lightppo-"), "make a temporary folder"
    )
    if strategy.is_rank_0():
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def become_dry_run(building: Building) -> None:
    """Make a small run of one with ``--dry_run``, in a folder that goes at its end. Collective."""
    config = building.config
    strategy = building.strategy
    if not config.training.dry_run:
        return
    folder = temporary_folder(strategy)
    building.keeps_files = False
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
    dataset = building.rows.get("prompt_data", building.rows.get("dataset"))
    if dataset is None:
        return
    if building.keeps_files:
        if shortage := fewer_rows(building.config, dataset):
            yield f"warning: {shortage}"
        return
    rehearse(
        building.resolved_options,
        dataset,
        building.held_out,
        building.reward_source,
        building.strategy,
    )


def check_disk(building: Building) -> None:
    """Check the room for the checkpoints that the run asked for keeps, before the first one is lost to a full disk.

    Trained models have weights, fp32 master weights and two fp32 moments; ``ema`` and ``reference`` fp32 weights.
    """
    config = building.resolved_options
    checkpoint = config.checkpoint
    parameters = dict(building.sizes)
    exported = parameters.pop("export")
    exports = checkpoint.hf_save_steps > 0 or config.evaluation.best_metric
    saves = checkpoint.save_steps > 0 or checkpoint.save_epochs or checkpoint.save_seconds
    weight_bytes = 4 if compute_dtype(config) == "float32" else 2
    checkpoint_bytes = 0
    if saves and not checkpoint.disable_ds_ckpt:
        for part_name, count in parameters.items():
            is_average = part_name in ("ema", "reference")
            checkpoint_bytes += count * (4 if is_average else weight_bytes + 12)
    if (saves and checkpoint.save_hf_ckpt) or exports:
        checkpoint_bytes += exported * weight_bytes
    # One more than are kept: an old checkpoint goes only when the new one is whole.
    needed_bytes = min(
        (checkpoint.max_ckpt_num + 1) * checkpoint_bytes,
        checkpoint.max_ckpt_mem * 1e9 + checkpoint_bytes,
    )
    existing_folder = local_folder(checkpoint.ckpt_path).absolute()
    while not existing_folder.exists():
        existing_folder = existing_folder.parent
    free_bytes = shutil.disk_usage(existing_folder).free
    if free_bytes < needed_bytes:
        raise ConfigError(
            f"--ckpt_path {checkpoint.ckpt_path}: {checkpoint.max_ckpt_num} checkpoints need about "
            f"{shown_size(needed_bytes)}, {shown_size(free_bytes)} are free: lower "
            "--max_ckpt_num or --max_ckpt_mem, or choose another disk"
        )


def check_places(building: Building) -> None:
    """Check that nothing stands where checkpoints are to be written: the first save would fail. Collective."""
    config = building.config
    checkpoint = config.checkpoint
    writes = not (checkpoint.disable_ds_ckpt or config.flat().get("val_only"))
    if not writes or not building.keeps_files or checkpoint.ckpt_path is None:
        return
    part_names = [part_name for part_name in building.sizes if part_name != "export"]

    def look() -> None:
        root = local_folder(checkpoint.ckpt_path)
        for folder in (root, *(Path(layout.part_folder(root, name)) for name in part_names)):
            if os.path.lexists(folder) and not folder.is_dir():
                raise CheckpointError(
                    f"{folder} is no folder, and checkpoints are to be written there: remove it"
                )
            if problem := layout.in_the_way(folder):
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
        loss = next(
            metrics["train/loss"] for metrics in logged_rows(run.config) if "train/loss" in metrics
        )
        return f"one step of the {len(run.train_dataloader.dataset)} longest rows, loss {loss:.4f}"
    rollout = run.config.rollout
    seconds = next(metrics for metrics in logged_rows(run.config) if "perf/time_step" in metrics)
    phases = ("rollout", "reward", "experience", "train", "sync")
    durations = ", ".join(f"{phase} {seconds[f'perf/time_{phase}']:.1f}" for phase in phases)
    samples = f"{rollout.rollout_batch_size} prompts × {rollout.n_samples_per_prompt} samples"
    rollout_size = f"{samples}, ≤ {rollout.generate_max_len} tokens,"
    return f"one step of {rollout_size} took {seconds['perf/time_step']:.1f} s ({durations})"


# -- a resumed run ---------------------------------------------------------------------------------------------------


def check_same_run(resumed: Resumed) -> Iterator[str]:
    """Yield a line for each option that may change, and did; ConfigError for what may not."""
    command = resumed.command
    options = resumed.options
    # Older checkpoints hold values as they were given.
    saved = {
        option_name: shown_value(value) for option_name, value in resumed.saved["config"].items()
    }
    idle = set(chain.from_iterable(idle_flags(command, options).values()))
    refused, safe = unsafe_changes(saved, options, idle, type(command), resumed.trains)
    allowed = set(command.checkpoint.resume_changes)
    safe |= {option_name: refused.pop(option_name) for option_name in allowed & refused.keys()}
    refused.pop("save_path", None)  # the same folder may be spelt otherwise, or have been moved
    changes = [
        f"--{option_name} {previous} → {current}"
        for option_name, (previous, current) in refused.items()
    ]
    for option_name, saved_mark in resumed.saved.get("content", {}).items():
        mark = shown_value(saved_mark)
        is_unread = not resumed.trains and option_name != "pretrain"
        is_known = option_name in refused or option_name in allowed
        if is_known or is_unread or resumed.content.get(option_name, mark) == mark:
            continue
        if option_name != "save_path":
            changes.append(f"--{option_name} {options[option_name]} has other content than it had")
        elif resumed.is_own:  # a path asks for another run that goes on from this one
            changes.append(f"--save_path {saved[option_name]} → {options[option_name]}")
    if changes:
        raise ConfigError(
            f"cannot resume {resumed.where} as another run: {', '.join(changes)}. Set that back, or start anew: with "
            "another --save_path (and --ckpt_path), or with --resume never"
        )
    for option_name, (previous, current) in safe.items():
        yield f"resume: --{option_name} was {previous}, is {current}"


def unsafe_changes(
    saved: Mapping[str, Any],
    current: Mapping[str, Any],
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
    reader_of = {option_name: section.of for option_name, section in PPOConfig.sections().items()}
    for option in kind.all_options():
        option_name = option.name
        if (
            option_name not in saved
            or saved[option_name] == current[option_name]
            or option_name in idle
        ):
            continue
        reader = reader_of.get(option.owner)
        if not trains and (
            reader == "training" or (option.required and current[option_name] is None)
        ):
            continue
        is_other_model = option_name.startswith(("critic_", "ref_", "reward_"))
        changes = refused
        if option.resume_safe or (not trains and (reader != "weights" or is_other_model)):
            changes = safe
        changes[option_name] = (saved[option_name], current[option_name])
    return refused, safe
