"""Checkpoints of engines: weights, optimizer and scheduler, written whole or not at all.

``DeepspeedStrategy`` offers these functions as ``save_ckpt`` and ``load_ckpt``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from lightppo import tensor_file
from lightppo.checkpoint.damage import check_model, damage, model_facts
from lightppo.checkpoint.frozen_weights import loader, saved_alone
from lightppo.checkpoint.layout import (
    CLIENT_STATE,
    INCOMPLETE,
    LATEST,
    META,
    OLD,
    download,
    frozen_file,
    is_checkpoint,
    latest_tag,
    list_tags,
    tag_of,
)
from lightppo.checkpoint.reshape import load_reshaped, refuse_other_names
from lightppo.errors import CheckpointError, StorageError
from lightppo.files import Digest, explained, files_in_use, local_folder
from lightppo.ranks import Ranks
from lightppo.zero3 import (
    find_adapters,
    find_engine,
    find_hf_model,
    forget_secondary_shard,
    full_shape,
    get_engine,
    has_optimizer,
    is_sharded,
    own_part,
    unwrap_model,
    zero_stage_of,
)

logger = logging.getLogger(__name__)

_FORMAT = 1


# -- checkpoints -------------------------------------------------------------------------------------------------------


def save_checkpoint(
    ranks: Ranks,
    model: Any,
    save_dir: str | os.PathLike[str],
    tag: str | None = None,
    max_num: int = 3,
    max_mem: float = 1000,
    client_state: dict[str, Any] | None = None,
    protected_tags: Collection[str] = (),
    facts: Mapping[str, Any] = {},
) -> str:
    """Save weights, optimizer and scheduler to ``save_dir/tag``, mark it as the latest, return the tag. Collective.

    The directory gets its name once all ranks have written; older checkpoints are removed only then.

    Args:
        tag: name of this checkpoint; None is ``global_step{optimizer steps}``.
        max_num: checkpoints to keep, including this one.
        max_mem: GB (1e9 bytes) that all of them may take; the oldest are removed first, this one never.
        client_state: plain values and tensors to get back from ``load_ckpt``; rank 0's is saved.
        protected_tags: never removed.
        facts: plain values to seal it with, see :func:`lightppo.files.facts_of`; rank 0's are saved.
    """
    engine = get_engine(model, "saving a checkpoint")
    if max_num < 1:
        raise ValueError(f"--max_ckpt_num must be at least 1, got {max_num}")
    files = files_in_use()
    publish_target = save_dir
    save_dir = local_folder(save_dir)
    tag = tag or tag_of(engine.global_steps)
    staging = save_dir / f"{tag}{INCOMPLETE}"
    ranks.on_rank_0(lambda: _make_room(save_dir, staging), f"prepare {save_dir}")

    meta = {"format": _FORMAT, "sealed": True, **_shape(engine), **model_facts(ranks, model)}
    writer = WrittenTogether(staging)
    with writer.by(engine):
        _write_engine(ranks, model, engine, writer)
        if ranks.is_rank_0():
            writer.write(staging / CLIENT_STATE, partial(torch.save, client_state or {}))
            meta_bytes = json.dumps(meta).encode()
            writer.write(staging / META, lambda file: file.write(meta_bytes))
    writer.settle(ranks)

    def commit() -> None:
        with files.explained(save_dir, writer.needed):
            try:
                files.seal(staging, known=writer.known, **facts)
            except BaseException:
                shutil.rmtree(staging, ignore_errors=True)  # room for others on a full disk
                raise
            _replace(save_dir, tag, staging)
            files.publish(publish_target, tag, last=META)
            files.publish(publish_target, LATEST)
            # Only now: the new checkpoint is complete before an old one is removed.
            removed_tags = _rotate(save_dir, {tag, *protected_tags}, max_num, max_mem)
            files.publish(publish_target, *removed_tags)

    ranks.on_rank_0(commit, f"complete the checkpoint {save_dir / tag}")
    return tag


def _write_engine(ranks: Ranks, model: Any, engine: Any, writer: WrittenTogether) -> None:
    """Write weights, optimizer and scheduler; under adapters without the frozen weights. Collective."""
    folder = writer.folder
    if not has_optimizer(engine):
        # Each rank writes its shards under ZeRO-3; otherwise rank 0 writes everything.
        if zero_stage_of(engine) == 3 or ranks.is_rank_0():
            save_tensors = partial(torch.save, _local_tensors(engine))
            writer.write(frozen_file(folder, ranks.get_rank()), save_tensors)
        return
    save = partial(engine.save_checkpoint, str(folder.parent), tag=folder.name, save_latest=False)
    if find_adapters(model) is None:
        save()
        return
    with saved_alone(engine) as options:
        save(**options)


class WrittenTogether:
    """What all ranks write into the folder of a checkpoint: a failure of one waits until all can share it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.needed = folder, 0  # bytes: of this rank, of all once they are settled
        self.known: dict[str, Digest] = {}
        self.failure: Exception | None = None

    @contextlib.contextmanager
    def by(self, engine: Any) -> Iterator[None]:
        """Take all that DeepSpeed writes inside: an error of one rank would leave the others in its barrier."""
        if not has_optimizer(engine):  # DeepSpeed writes nothing of it
            yield
            return
        file_writer = engine.checkpoint_engine
        copy_scripts = engine._copy_recovery_script
        file_writer.save = lambda state_dict, path: self.write(
            Path(path), partial(torch.save, state_dict)
        )
        engine._copy_recovery_script = lambda path: self._attempt(partial(copy_scripts, path))
        try:
            yield
        finally:
            del file_writer.save, engine._copy_recovery_script

    def write(self, file_path: Path, write_content: Callable[[Any], Any]) -> None:
        """Write a file, unless something has failed before."""
        self.needed += bytes_of(getattr(write_content, "args", ()))
        self._attempt(lambda: self._write(file_path, write_content))

    def _write(self, file_path: Path, write_content: Callable[[Any], Any]) -> None:
        if (digest := files_in_use().write(file_path, write_content)) is not None:
            self.known[file_path.relative_to(self.folder).as_posix()] = digest

    def _attempt(self, action: Callable[[], Any]) -> None:
        try:
            if self.failure is None:
                action()
        except Exception as error:
            self.failure = error

    def settle(self, ranks: Ranks) -> None:
        """Learn the files and bytes of all ranks; one error on all ranks if one rank has one. Collective."""
        rank_results = ranks.all_gather_object((self.known, self.needed, self.failure is not None))
        self.needed = sum(needed_bytes for _, needed_bytes, _ in rank_results)
        failed_ranks = [rank for rank, (_, _, has_failed) in enumerate(rank_results) if has_failed]
        if failed_ranks:
            if ranks.is_rank_0():
                # This makes room for others, and the message counts that room as free.
                shutil.rmtree(self.folder, ignore_errors=True)
            ranks.barrier()
            failure_text = ranks.broadcast_object(self._what_failed(), src=failed_ranks[0])
            raise StorageError(f"rank {failed_ranks[0]}: {failure_text}") from self.failure
        self.known = {
            name: digest
            for rank_digests, _, _ in rank_results
            for name, digest in rank_digests.items()
        }

    def _what_failed(self) -> str | None:
        if self.failure is None:
            return None
        try:
            with explained(self.folder.parent, self.needed):
                raise self.failure
        except StorageError as error:
            return str(error)
        except Exception as error:
            return f"{self.folder}: {type(error).__name__}: {error}"


def bytes_of(state: Any) -> int:
    """Return the bytes of the tensors in nested containers."""
    if isinstance(state, torch.Tensor):
        return state.untyped_storage().nbytes()
    if isinstance(state, Mapping):
        state = state.values()
    elif not isinstance(state, list | tuple):
        return 0
    return sum(map(bytes_of, state))


def _replace(save_dir: Path, tag: str, staging_folder: Path) -> None:
    """Give a written checkpoint its name, in place of an older one, and mark it as the latest."""
    files = files_in_use()
    replaced_folder = save_dir / f"{tag}{OLD}"
    if os.path.lexists(save_dir / tag):
        files.rename(save_dir / tag, replaced_folder)
    files.rename(staging_folder, save_dir / tag)
    with contextlib.suppress(OSError):  # the next save tries again
        files.remove(replaced_folder)
    files.write_text(save_dir / LATEST, tag)


def load_checkpoint(
    ranks: Ranks,
    model: Any,
    load_dir: str | os.PathLike[str],
    tag: str | None = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    checked: bool = False,
    reshape: bool = False,
) -> tuple[str, dict[str, Any]]:
    """Load a checkpoint into a model prepared like the saved one, its optimizer and its scheduler. Collective.

    Returns the checkpoint's path, and the ``client_state`` saved with it. ``tag`` None is the latest;
    ``load_module_strict`` refuses weights whose names do not fit; ``checked`` says that :func:`damage` found nothing.
    With ``reshape`` it may be of another number of ranks or another ZeRO stage, optimizer included.
    """
    engine = get_engine(model, "loading a checkpoint")
    source = load_dir
    load_dir = local_folder(load_dir)
    if not checked:
        download(ranks, source, tag)
    tag = tag or latest_tag(load_dir)
    if tag is None:
        raise CheckpointError(f"{load_dir} holds no checkpoint: there is no file {LATEST!r} in it")
    folder = load_dir / tag
    if not checked and is_checkpoint(folder) and (damaged := damage(ranks, folder)):
        raise CheckpointError(f"{folder} is damaged: {'; '.join(damaged)}")
    saved_meta = read_meta(folder)
    _check_shape(engine, folder, saved_meta, load_optimizer_states, reshape)
    check_model(ranks, model, folder, saved_meta)
    settings = _settings_of(engine)
    if any(saved_meta[key] != current_value for key, current_value in _shape(engine).items()):
        load_reshaped(engine, folder, saved_meta, load_lr_scheduler_states)
    elif not has_optimizer(engine):
        _load_without_optimizer(engine, folder)
    else:
        load_function = None
        if find_adapters(model) is not None:
            load_function = loader(load_module_strict, str(folder))
        with _read_safely(engine):
            loaded, _ = engine.load_checkpoint(
                str(load_dir),
                tag=tag,
                load_module_strict=load_module_strict,
                load_optimizer_states=load_optimizer_states,
                load_lr_scheduler_states=load_lr_scheduler_states,
                custom_load_fn=load_function,
            )
        if loaded is None:
            raise CheckpointError(f"{folder} has no file for rank {ranks.get_rank()}")
    for group, values in zip(engine.optimizer.param_groups if settings else (), settings):
        group.update(values)
    if has_optimizer(engine) and engine.lr_scheduler is not None:
        coming_rates = _coming_rates(engine.lr_scheduler)
        for group, lr in zip(engine.optimizer.param_groups, coming_rates, strict=True):
            group["lr"] = lr
    return str(folder), read_client_state(folder)


_SETTINGS = ("initial_lr", "betas", "eps", "weight_decay")


def _settings_of(engine: Any) -> list[dict[str, Any]]:
    """Return what this run's options say of the optimizer, by group: a checkpoint brings that of the run that saved."""
    if not has_optimizer(engine):
        return []
    groups = engine.optimizer.param_groups
    return [{key: group[key] for key in _SETTINGS if key in group} for group in groups]


def _coming_rates(scheduler: LRScheduler) -> list[float]:
    """Return the rates of the next step by this run's peak and schedule, which may differ from those of the run that
    saved."""
    if isinstance(scheduler, LambdaLR):  # others may know no step but the one after the last
        groups = scheduler.optimizer.param_groups
        scheduler.base_lrs = [group["initial_lr"] for group in groups]
        schedules = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        scheduler._last_lr = [peak * share(scheduler.last_epoch) for peak, share in schedules]
    return scheduler.get_last_lr()


@contextlib.contextmanager
def _read_safely(engine: Any) -> Iterator[None]:
    """Give DeepSpeed, which unpickles what a checkpoint holds, its files by our reader inside."""
    file_reader = engine.checkpoint_engine
    known_classes = tensor_file.deepspeed_classes()
    file_reader.load = lambda path, map_location=None: tensor_file.read(path, known_classes)
    try:
        # At ZeRO-3, DeepSpeed does not use the engine's reader for weights that are loaded alone.
        with tensor_file.others_read_safely(known_classes):
            yield
    finally:
        del file_reader.load


def read_client_state(path: Path) -> dict[str, Any]:
    """Return what was saved with the checkpoint in this folder."""
    return tensor_file.read(path / CLIENT_STATE)


def read_meta(path: Path) -> dict[str, Any]:
    """Return what a checkpoint says about itself: ranks, ZeRO stage, precision, adapters, towers."""
    try:
        saved_meta = {"fp16": False, **json.loads((path / META).read_bytes())}
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is not a checkpoint of lightppo: {META} is missing"
        ) from error
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path} is damaged: {META} has other content than was written"
        ) from error
    if saved_meta.get("format") != _FORMAT:
        raise CheckpointError(
            f"{path} has format {saved_meta.get('format')!r}; this version of lightppo reads {_FORMAT}"
        )
    return saved_meta


def has_finite_weights(model: Any) -> bool:
    """Tell whether the weights of this rank are finite, by their sums: one look at each."""
    weights = filter(torch.is_floating_point, unwrap_model(model).parameters())
    sums = [own_part(weight).sum(dtype=torch.float32) for weight in weights]
    return bool(torch.stack(sums).isfinite().all())


def rng_state() -> dict[str, Any]:
    """Return the states of this rank's random generators: Python, NumPy, torch and its CUDA device."""
    algorithm, key_words, *other_values = numpy.random.get_state()
    # A tensor in place of the array, so that it loads with weights_only.
    words = torch.from_numpy(key_words.astype(numpy.int64))
    states = {"numpy": (algorithm, words, *other_values)}
    states |= {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_rng_state(state: dict[str, Any]) -> None:
    """Restore what ``rng_state`` returned on this rank."""
    random.setstate(state["python"])
    algorithm, key_words, *other_values = state["numpy"]
    numpy.random.set_state((algorithm, key_words.numpy().astype(numpy.uint32), *other_values))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])


def _shape(engine: Any) -> dict[str, Any]:
    """Return properties that a run must share with the run that saved."""
    return {
        "world_size": dist.get_world_size(),
        "zero_stage": zero_stage_of(engine),
        "bf16": bool(engine.bfloat16_enabled()),
        "fp16": bool(engine.fp16_enabled()),
        "optimizer": has_optimizer(engine),
    }


def _check_shape(
    engine: Any,
    folder: Path,
    saved_meta: Mapping[str, Any],
    load_optimizer_states: bool,
    reshape: bool,
) -> None:
    """Raise CheckpointError unless a checkpoint can be loaded into an engine of this run."""
    engine_shape = _shape(engine)
    changed_keys = {key for key in engine_shape if saved_meta[key] != engine_shape[key]}
    reshapable = {"world_size", "zero_stage"}
    fixed_keys = changed_keys - (reshapable if reshape else set())
    if fixed_keys:
        reshape_note = ""
        if not reshape and changed_keys <= reshapable:
            reshape_note = "set --reshape_ckpt, "
        listed_keys = [key for key in engine_shape if key in fixed_keys]
        raise CheckpointError(
            f"{folder} was saved with {', '.join(f'{key}={saved_meta[key]}' for key in listed_keys)}, this run has "
            f"{', '.join(f'{key}={engine_shape[key]}' for key in listed_keys)}: {reshape_note}resume with the same "
            "number of processes, --zero_stage and --bf16 or --fp16, or start from its HF export with --pretrain"
        )
    if load_optimizer_states:
        return
    if changed_keys:
        raise CheckpointError(
            f"{folder} has other ranks or another ZeRO stage: its weights load with the optimizer only"
        )
    if engine_shape["zero_stage"] == 3 and latest_tag(folder.parent) != folder.name:
        # DeepSpeed rebuilds ZeRO-3 weights from the marker's tag, whatever tag we ask for.
        raise CheckpointError(
            f"at ZeRO-3 weights alone load from the latest tag only, and {folder.name!r} is not it"
        )


@torch.no_grad()
def _load_without_optimizer(engine: Any, directory: Path) -> None:
    rank = dist.get_rank() if zero_stage_of(engine) == 3 else 0
    saved_tensors = tensor_file.read(frozen_file(directory, rank))
    tensors = unwrap_model(engine).state_dict(keep_vars=True)
    local_tensors = _local_tensors(engine)
    refuse_other_names(directory, saved_tensors.keys() ^ local_tensors.keys())
    for tensor_name, tensor in local_tensors.items():
        tensor.copy_(saved_tensors[tensor_name])
        forget_secondary_shard(tensors[tensor_name])


def _local_tensors(engine: Any) -> dict[str, torch.Tensor]:
    tensors = unwrap_model(engine).state_dict(keep_vars=True)
    return {
        name: tensor.ds_tensor.data if is_sharded(tensor) else tensor.detach()
        for name, tensor in tensors.items()
    }


def _make_room(save_dir: Path, staging: Path) -> None:
    """Make a folder for a new checkpoint, without what an interrupted saving left."""
    files = files_in_use()
    with files.explained(save_dir):
        save_dir.mkdir(parents=True, exist_ok=True)
        for leftover in list(save_dir.glob(f"*{INCOMPLETE}")):
            original_folder = save_dir / leftover.name.removesuffix(OLD)
            if leftover.name.endswith(OLD) and not original_folder.exists():
                # the one that was to take its place did not come
                files.rename(leftover, original_folder)
                continue
            logger.warning("removing %s, a checkpoint whose saving was interrupted", leftover)
            files.remove(leftover)
        staging.mkdir()


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint, which is whole or gone whenever the process stops: the next save removes the rest."""
    renamed_folder = folder.with_name(f"{folder.name}{INCOMPLETE}")
    files_in_use().rename(folder, renamed_folder)
    files_in_use().remove(renamed_folder)


def _rotate(save_dir: Path, kept_tags: set[str], max_num: int, max_mem: float) -> list[str]:
    """Remove checkpoints, oldest first, until the others are within the limits; return their tags."""
    removed_tags = []
    tag_sizes = {tag: _size_of(save_dir / tag) for tag in list_tags(save_dir)}
    for tag in [tag for tag in tag_sizes if tag not in kept_tags]:
        if len(tag_sizes) <= max_num and sum(tag_sizes.values()) <= max_mem * 1e9:
            break
        remove_checkpoint(save_dir / tag)
        del tag_sizes[tag]
        removed_tags.append(tag)
    return removed_tags


def _size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


# -- weights out of files into models, which scripts ask for: ``strategy.load_model`` -----------------------------------


def load_model(
    strategy: Any, model: Any, path: str | os.PathLike[str], strict: bool = True
) -> None:
    """Load a weight file or Hugging Face folder into a model and its fp32 masters. Collective if prepared."""
    state_dict = _read_weights(Path(path))
    if state_dict.keys().isdisjoint(unwrap_model(model).state_dict().keys()):
        _, prefix = find_hf_model(model)
        state_dict = {f"{prefix}{name}": tensor for name, tensor in state_dict.items()}
    load_full_state_dict(model, state_dict, strict, str(path))


def _read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Return all weights of a Hugging Face folder or a weight file, on the CPU."""
    from safetensors.torch import load_file

    if not path.exists():
        raise FileNotFoundError(f"no model at {path}")
    files = [path]
    if path.is_dir():
        files = sorted(path.glob("*.safetensors")) or sorted(path.glob("pytorch_model*.bin"))
    if not files:
        raise FileNotFoundError(f"{path} holds no *.safetensors and no pytorch_model*.bin")
    state_dict: dict[str, torch.Tensor] = {}
    for file in files:
        state_dict |= load_file(file) if file.suffix == ".safetensors" else tensor_file.read(file)
    return state_dict


@torch.no_grad()
def load_full_state_dict(
    model: Any, state_dict: dict[str, torch.Tensor], strict: bool, source: str
) -> None:
    """Copy whole parameters into a model, sharded or not, and into the optimizer's fp32 masters. Collective.

    Names are as in ``unwrap_model(model)``; tied parameters need one of theirs. ``source`` is for messages.
    """
    import deepspeed

    module = unwrap_model(model)
    engine = find_engine(model)
    tensors = module.state_dict(keep_vars=True)
    # Of tied names, the first counts.
    given_names = {tensors[name]: name for name in reversed(tensors) if name in state_dict}
    missing_names = [name for name, tensor in tensors.items() if tensor not in given_names]
    unexpected_names = sorted(state_dict.keys() - tensors.keys())
    if strict and (missing_names or unexpected_names):
        raise ValueError(
            f"{source} does not fit {type(module).__name__}: {len(missing_names)} weights missing {missing_names[:3]}, "
            f"{len(unexpected_names)} unexpected {unexpected_names[:3]}"
        )
    for tensor, name in reversed(given_names.items()):
        new_weight = state_dict[name]
        if full_shape(tensor) != new_weight.shape:
            raise ValueError(
                f"{source}: {name!r} is {tuple(new_weight.shape)}, the model's {tuple(full_shape(tensor))}"
            )
        if is_sharded(tensor):
            with deepspeed.zero.GatheredParameters([tensor], modifier_rank=0):
                tensor.data.copy_(new_weight)
            forget_secondary_shard(tensor)
        else:
            tensor.data.copy_(new_weight)
    # Without this the next step would overwrite the loaded weights with the masters of the old ones.
    if engine is not None and hasattr(engine.optimizer, "refresh_fp32_params"):
        engine.optimizer.refresh_fp32_params()
