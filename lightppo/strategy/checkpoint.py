"""Checkpoints of engines, and models in Hugging Face format: written whole or not at all.

``DeepspeedStrategy`` offers these functions as ``save_ckpt``, ``load_ckpt``, ``save_model`` and ``load_model``.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import math
import os
import random
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

from lightppo import tensor_file
from lightppo.errors import CheckpointError, StorageError
from lightppo.plugins.ops import durable
from lightppo.plugins.ops.storage import download, is_url, local_folder, upload
from lightppo.plugins.reshape.checkpoints import FROZEN, deepspeed_classes, load_frozen, load_trained, whole_weights
from lightppo.ranks import Ranks
from lightppo.strategy.zero3 import (
    find_adapters,
    find_hf_model,
    forget_secondary_shard,
    full_state_dict,
    get_engine,
    has_optimizer,
    is_sharded,
    load_full_state_dict,
    unwrap_model,
    zero_stage_of,
)

logger = logging.getLogger(__name__)

LATEST = "latest"
META = "lightppo_checkpoint.json"
_CLIENT_STATE = "client_state.pt"
DAMAGED = ".damaged"
INCOMPLETE = ".incomplete"
_OLD = f".old{INCOMPLETE}"
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
    """Saves weights, optimizer and scheduler to ``save_dir/tag``, marks it as the latest, returns the tag. Collective.

    The directory gets its name once all ranks have written; older checkpoints are removed only then. With a URL, all is
    written to ``storage.local_folder(save_dir)``, then sent.

    Args:
        tag: name of this checkpoint; None is ``global_step{optimizer steps}``.
        max_num: checkpoints to keep, including this one.
        max_mem: GB (1e9 bytes) that all of them may take; the oldest are removed first, this one never.
        client_state: plain values and tensors to get back from ``load_ckpt``; rank 0's is saved.
        protected_tags: never removed.
        facts: plain values that its manifest keeps, see ``durable.manifest``; rank 0's are saved.
    """
    engine = get_engine(model, "saving a checkpoint")
    if max_num < 1:
        raise ValueError(f"--max_ckpt_num must be at least 1, got {max_num}")
    target, save_dir = save_dir, local_folder(save_dir)
    tag = tag or f"global_step{engine.global_steps}"
    staging = save_dir / f"{tag}{INCOMPLETE}"
    ranks.on_rank_0(lambda: _make_room(save_dir, staging), f"prepare {save_dir}")

    adapters = find_adapters(model)
    meta = {"format": _FORMAT, "sealed": True, **_shape(engine)}
    meta["adapters"] = None if adapters is None else str(adapters)
    files = _Files(staging)
    _write_engine(ranks, engine, files, has_adapters=adapters is not None)
    if meta["adapters"]:
        meta["frozen"], meta["in_4bit"] = zip(*ranks.all_gather_object(_frozen_sums(engine.module)))
    known, needed = files.settle(ranks)

    def commit() -> None:
        with _removed_on_failure(staging), durable.explained(save_dir, needed):
            client = durable.write_file(staging / _CLIENT_STATE, partial(torch.save, client_state or {}))
            (staging / META).write_text(json.dumps(meta))
            durable.seal(staging, known | {_CLIENT_STATE: client}, **facts)
        with durable.explained(save_dir):
            _replace(save_dir, tag, staging)
            upload(target, tag, last=META)
            upload(target, LATEST)
            # Only now: the new checkpoint is complete before an old one is removed.
            upload(target, *_rotate(save_dir, keep={tag, *protected_tags}, max_num=max_num, max_mem=max_mem))

    ranks.on_rank_0(commit, f"complete the checkpoint {save_dir / tag}")
    return tag


def _write_engine(ranks: Ranks, engine: Any, files: _Files, has_adapters: bool) -> None:
    """Weights, optimizer and scheduler; under adapters without the frozen weights. Collective."""
    if not has_optimizer(engine):
        # Each rank writes its shards under ZeRO-3; otherwise rank 0 writes everything.
        if zero_stage_of(engine) == 3 or ranks.is_rank_0():
            files.write(_local_tensors(engine), files.folder / FROZEN.format(ranks.get_rank()))
        return
    with _frozen_left_out(engine) if has_adapters else contextlib.nullcontext(), files.of(engine):
        options = {"exclude_frozen_parameters": True} if has_adapters else {}
        engine.save_checkpoint(str(files.folder.parent), tag=files.folder.name, save_latest=False, **options)


@contextlib.contextmanager
def _removed_on_failure(folder: Path) -> Iterator[None]:
    """Room for others, where a disk is full."""
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _replace(save_dir: Path, tag: str, staging: Path) -> None:
    """Give a written checkpoint its name, in place of an older one, and mark it as the latest."""
    replaced = save_dir / f"{tag}{_OLD}"
    if os.path.lexists(save_dir / tag):
        durable.rename(save_dir / tag, replaced)
    durable.rename(staging, save_dir / tag)
    with contextlib.suppress(OSError):  # the next save tries again
        durable.remove(replaced)
    durable.write_text(save_dir / LATEST, tag)


class _Files:
    """What this rank writes of a checkpoint: on disk, with digests. A failure waits until all ranks can share it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.needed = folder, 0
        self.known: dict[str, durable.Digest] = {}
        self.failure: Exception | None = None

    @contextlib.contextmanager
    def of(self, engine: Any) -> Iterator[None]:
        """All that DeepSpeed writes comes here: an error of one rank would leave the others in its barrier."""
        writer, copy_scripts = engine.checkpoint_engine, engine._copy_recovery_script
        writer.save = lambda state_dict, path: self.write(state_dict, Path(path))
        engine._copy_recovery_script = lambda path: self._attempt(partial(copy_scripts, path))
        try:
            yield
        finally:
            del writer.save, engine._copy_recovery_script

    def write(self, state: Any, path: Path) -> None:
        self.needed += _bytes_of(state)
        name, fill = path.relative_to(self.folder).as_posix(), partial(torch.save, state)
        self._attempt(lambda: self.known.update({name: durable.write_file(path, fill)}))

    def _attempt(self, action: Callable[[], Any]) -> None:
        try:
            if self.failure is None:
                action()
        except Exception as error:
            self.failure = error

    def settle(self, ranks: Ranks) -> tuple[dict[str, durable.Digest], int]:
        """Digests of all ranks' files, and their bytes; one error on all ranks if one rank has one. Collective."""
        gathered = ranks.all_gather_object((self.known, self.needed, self.failure is not None))
        needed = sum(size for _, size, _ in gathered)
        if failed := [rank for rank, (*_, has_failed) in enumerate(gathered) if has_failed]:
            if ranks.is_rank_0():
                shutil.rmtree(self.folder, ignore_errors=True)  # room for others, and what is free is said without it
            ranks.barrier()
            text = None
            if self.failure is not None:
                found = durable.problem(self.failure, self.folder.parent, needed)
                text = str(found or f"{self.folder}: {type(self.failure).__name__}: {self.failure}")
            text = ranks.broadcast_object(text, src=failed[0])
            raise StorageError(f"rank {failed[0]}: {text}") from self.failure
        return {name: digest for known, *_ in gathered for name, digest in known.items()}, needed


def _bytes_of(state: Any) -> int:
    """Of the tensors in nested containers."""
    if isinstance(state, torch.Tensor):
        return state.untyped_storage().nbytes()
    inside = state.values() if isinstance(state, Mapping) else state if isinstance(state, list | tuple) else ()
    return sum(map(_bytes_of, inside))


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
    """Loads a checkpoint into a model prepared like the saved one, its optimizer and its scheduler. Collective.

    Returns the checkpoint's path, and the ``client_state`` saved with it. ``tag`` None is the latest;
    ``load_module_strict`` refuses weights whose names do not fit; ``checked`` says that :func:`damage` found nothing.
    With ``reshape`` it may be of another number of ranks or another ZeRO stage, optimizer included.
    """
    engine = get_engine(model, "loading a checkpoint")
    source, load_dir = load_dir, local_folder(load_dir)
    if not checked:
        bring(ranks, source, tag)
    tag = tag or latest_tag(load_dir)
    if tag is None:
        raise CheckpointError(f"{load_dir} holds no checkpoint: there is no file {LATEST!r} in it")
    path = load_dir / tag
    if not checked and (path / META).is_file() and (found := damage(ranks, path)):
        raise CheckpointError(f"{path} is damaged: {'; '.join(found)}")
    _require_plain(ranks, path)
    adapters = find_adapters(model)
    meta = _check_fits(ranks, engine, path, load_optimizer_states, None if adapters is None else str(adapters), reshape)
    reshaped = any(meta[key] != value for key, value in _shape(engine).items())
    if not has_optimizer(engine):
        load_frozen(engine, path, meta) if reshaped else _load_without_optimizer(engine, path)
    elif reshaped:
        load_trained(engine, path, meta, load_lr_scheduler_states)
    else:
        with _read_safely(engine):
            loaded, _ = engine.load_checkpoint(
                str(load_dir),
                tag=tag,
                load_module_strict=load_module_strict,
                load_optimizer_states=load_optimizer_states,
                load_lr_scheduler_states=load_lr_scheduler_states,
                custom_load_fn=None if adapters is None else partial(_load_trained, load_module_strict, str(path)),
            )
        if loaded is None:
            raise CheckpointError(f"{path} has no file for rank {ranks.get_rank()}")
    if has_optimizer(engine) and engine.lr_scheduler is not None:
        for group, lr in zip(engine.optimizer.param_groups, engine.lr_scheduler.get_last_lr(), strict=True):
            group["lr"] = lr
    return str(path), read_client_state(path)


def _require_plain(ranks: Ranks, path: Path) -> None:
    """No file of a checkpoint names anything to run: one error on all ranks, before a weight has changed. Collective.

    Each rank looks at its share of the files; tensors are not read.
    """
    found = []
    for file in sorted(path.rglob("*.pt"))[ranks.get_rank() :: ranks.world_size]:
        try:
            tensor_file.read(file, deepspeed_classes(), mapped=True)
        except CheckpointError as error:
            found.append(str(error))
    if told := sorted(text for texts in ranks.all_gather_object(found) for text in texts):
        more = f" ({len(told) - 1} more files are like it)" if len(told) > 1 else ""
        raise CheckpointError(f"{told[0]}{more}")


@contextlib.contextmanager
def _read_safely(engine: Any) -> Iterator[None]:
    """DeepSpeed unpickles what a checkpoint holds; inside, it gets its files from our reader."""
    reader, classes = engine.checkpoint_engine, deepspeed_classes()
    reader.load = lambda path, map_location=None: tensor_file.read(path, classes)
    try:
        with tensor_file.others_read_safely(classes):  # at ZeRO-3, weights alone go round the engine's reader
            yield
    finally:
        del reader.load


def read_client_state(path: Path) -> dict[str, Any]:
    """What was saved with the checkpoint in this folder."""
    return tensor_file.read(path / _CLIENT_STATE)


def read_meta(path: Path) -> dict[str, Any]:
    """What a checkpoint says about itself: ranks, ZeRO stage, precision, adapters."""
    if not (path / META).is_file():
        raise CheckpointError(f"{path} is not a checkpoint of lightppo: {META} is missing")
    try:
        meta = dict(json.loads((path / META).read_bytes()))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {META} has other content than was written") from error
    if meta.get("format") != _FORMAT:
        raise CheckpointError(f"{path} has format {meta.get('format')!r}; this version of lightppo reads {_FORMAT}")
    return meta


def load_weights(model: Any, path: Path, meta: Mapping[str, Any]) -> None:
    """Loads the weights of a checkpoint of any ranks and ZeRO stage into a model of this process, without engine.

    Its tensors are replaced by those of the files; under adapters its frozen weights stay.
    """
    module = unwrap_model(model)
    if meta["adapters"]:
        _check_frozen(path, meta, [_frozen_sums(module)], 0, changed=True)
    weights = whole_weights(path, meta, module.state_dict(keep_vars=True))
    module.load_state_dict(weights, strict=False, assign=True)
    find_hf_model(module)[0].tie_weights()
    now = module.state_dict(keep_vars=True)
    given = {now[name] for name in weights}
    kept = _frozen_names(module) if meta["adapters"] else set()
    if missing := sorted(name for name, tensor in now.items() if tensor not in given and name not in kept):
        raise CheckpointError(f"{path} holds another model: it has no {missing[0]!r} ({len(missing)} are missing)")


def has_finite_weights(model: Any) -> bool:
    """Of this rank, by their sums: one look at each."""
    weights = [_own_part(p) for p in unwrap_model(model).parameters() if p.is_floating_point()]
    return bool(torch.stack([w.sum(dtype=torch.float32) for w in weights]).isfinite().all())


def bring(ranks: Ranks, source: str | os.PathLike[str], tag: str | None) -> None:
    """A checkpoint at a URL to this node. Collective."""
    if is_url(source):
        marks = (LATEST, f"{tag}/")
        ranks.on_rank_0(lambda: download(source, lambda name: name.startswith(marks)), f"read {source}")


def damage(ranks: Ranks, path: Path) -> list[str]:
    """What is damaged in a checkpoint, a text per file; nothing if it is as it was saved. Collective.

    Each rank reads its share of the files. One of an older lightppo, which has no manifest, is taken as it is.
    """
    found, share = [], ranks.get_rank()
    if not durable.is_sealed(path) and not _meant_sealed(path):
        if ranks.is_rank_0():
            logger.info("%s is of an older lightppo: it has no manifest to be checked against", path)
    else:
        found = durable.check(path, share, ranks.world_size)
    return sorted({text for texts in ranks.all_gather_object(found) for text in texts})


def _meant_sealed(path: Path) -> bool:
    """Whether a checkpoint was saved with a manifest; also one whose own file cannot be read counts."""
    try:
        return bool(json.loads((path / META).read_text()).get("sealed"))
    except (OSError, ValueError, AttributeError):
        return True


def latest_tag(load_dir: str | os.PathLike[str]) -> str | None:
    """The tag to resume from in ``load_dir``; None if there is no checkpoint."""
    load_dir = Path(load_dir)
    if not load_dir.is_dir():
        raise CheckpointError(f"{load_dir} is not a directory")
    if (tag := read_mark(load_dir)) is None:
        return None
    if not (load_dir / tag / META).is_file():
        others = ", ".join(list_tags(load_dir)) or "none"
        raise CheckpointError(
            f"{load_dir / LATEST} names {tag!r}, which is not a whole checkpoint; whole ones here: {others}"
        )
    return tag


def read_mark(folder: Path) -> str | None:
    """What a folder's ``latest`` says, damaged bytes as ``\\xe2``; None without that file."""
    marker = folder / LATEST
    try:
        return marker.read_bytes().decode(errors="backslashreplace").strip()
    except FileNotFoundError:
        return None
    except IsADirectoryError as error:
        raise CheckpointError(
            f"{marker} is a folder, and must be a file with the name of the last checkpoint: remove it"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{marker} cannot be read ({error.strerror})") from error


def list_tags(save_dir: str | os.PathLike[str]) -> list[str]:
    """Tags of the complete checkpoints in a directory, oldest first."""
    aside = (INCOMPLETE, DAMAGED)
    found = [path for path in Path(save_dir).iterdir() if (path / META).is_file() and path.suffix not in aside]
    return [path.name for path in sorted(found, key=lambda path: ((path / META).stat().st_mtime_ns, path.name))]


def rng_state() -> dict[str, Any]:
    """States of this rank's random generators: Python, NumPy, torch and its CUDA device."""
    name, keys, *rest = numpy.random.get_state()
    # A tensor in place of the array, so that it loads with weights_only.
    state = {"numpy": (name, torch.from_numpy(keys.astype(numpy.int64)), *rest)}
    state |= {"python": random.getstate(), "torch": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {})


def restore_rng_state(state: dict[str, Any]) -> None:
    """Restores what ``rng_state`` returned on this rank."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    numpy.random.set_state((name, keys.numpy().astype(numpy.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])


def _shape(engine: Any) -> dict[str, Any]:
    """Properties that a run must share with the run that saved."""
    return {
        "world_size": dist.get_world_size(),
        "zero_stage": zero_stage_of(engine),
        "bf16": bool(engine.bfloat16_enabled()),
        "fp16": bool(engine.fp16_enabled()),
        "optimizer": has_optimizer(engine),
    }


def _check_fits(
    ranks: Ranks, engine: Any, path: Path, load_optimizer_states: bool, adapters: str | None, reshape: bool
) -> dict[str, Any]:
    """What the checkpoint says about itself, if it can be loaded here."""
    meta = {"fp16": False} | read_meta(path)
    if (saved := meta.get("adapters")) != adapters:
        raise CheckpointError(
            f"{path} was saved with {saved or 'no LoRA adapters'}, this model has {adapters or 'none'}: resume with "
            "the same --lora_rank, --lora_alpha, --target_modules and --load_in_4bit"
        )
    shape = _shape(engine)
    changed = [key for key in shape if meta[key] != shape[key]]
    if fixed := [key for key in changed if key not in ("world_size", "zero_stage") or not reshape]:
        also = "" if reshape or {"bf16", "fp16", "optimizer"} & {*changed} else "set --reshape_ckpt, "
        raise CheckpointError(
            f"{path} was saved with {', '.join(f'{key}={meta[key]}' for key in fixed)}, this run has "
            f"{', '.join(f'{key}={shape[key]}' for key in fixed)}: {also}resume with the same number of "
            "processes, --zero_stage and --bf16 or --fp16, or start from its HF export with --pretrain"
        )
    if changed and not load_optimizer_states:
        raise CheckpointError(f"{path} has other ranks or another ZeRO stage: its weights load with the optimizer only")
    if not load_optimizer_states and zero_stage_of(engine) == 3 and latest_tag(path.parent) != path.name:
        # DeepSpeed rebuilds ZeRO-3 weights from the marker's tag, whatever tag we ask for.
        raise CheckpointError(f"at ZeRO-3 weights alone load from the latest tag only, and {path.name!r} is not it")
    if adapters:
        sums = ranks.all_gather_object(_frozen_sums(engine.module))
        _check_frozen(path, meta, sums, shape["zero_stage"], bool(changed))
    return meta


def _check_frozen(
    path: Path, meta: Mapping[str, Any], sums: Sequence[tuple[float, int]], stage: int, changed: bool
) -> None:
    """Adapters fit the weights beside which they were trained; ``changed``: shards or ranks are not as they were."""
    frozen, in_4bit = zip(*sums)
    saved, now = (meta["frozen"], meta.get("in_4bit", in_4bit)), (frozen, in_4bit)
    if changed:  # other shards: only their totals compare
        saved, now = _totals(*saved, meta["zero_stage"]), _totals(*now, stage)
    # Another machine's kernels may sum in another order; another model's sums are far off.
    alike = all(math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9) for a, b in zip(saved[0], now[0], strict=True))
    if not alike or list(saved[1]) != list(now[1]):
        raise CheckpointError(
            f"{path} holds LoRA adapters of other frozen weights: give the --pretrain (for a critic, the "
            "--critic_pretrain) that they were trained on, unchanged"
        )


def _totals(dense: Sequence[float], in_4bit: Sequence[int], stage: int) -> tuple[list[float], list[int]]:
    """Sums over the whole model, out of ``_frozen_sums`` of each rank."""
    return ([sum(dense)], [sum(in_4bit)]) if stage == 3 else ([dense[0]], [in_4bit[0]])


def _frozen_sums(module: torch.nn.Module) -> tuple[float, int]:
    """Two sums over this rank's frozen weights: dense ones, and 4-bit ones, whose changes would vanish in one sum."""
    frozen = [_own_part(p) for p in module.parameters() if not p.requires_grad]
    dense = [torch.linalg.vector_norm(p, 1, dtype=torch.float64) for p in frozen if p.is_floating_point()]
    return sum(map(float, dense)), sum(int(p.sum(dtype=torch.int64)) for p in frozen if not p.is_floating_point())


def _own_part(param: torch.nn.Parameter) -> torch.Tensor:
    """This rank's part, without the padding of the last shard, which is never written."""
    if not is_sharded(param):
        return param.detach()
    size = param.ds_tensor.numel()
    left = param.ds_numel - size * dist.get_rank(param.ds_process_group)
    return param.ds_tensor[: max(0, min(size, left))]


def _frozen_names(module: torch.nn.Module) -> set[str]:
    return {name for name, parameter in module.named_parameters(remove_duplicate=False) if not parameter.requires_grad}


@contextlib.contextmanager
def _frozen_left_out(engine: Any) -> Iterator[None]:
    """DeepSpeed's ``exclude_frozen_parameters`` alone would save a frozen embedding under its tied head's name."""
    frozen, original = _frozen_names(engine.module), engine.module_state_dict
    engine.module_state_dict = lambda *args, **options: {
        name: tensor for name, tensor in original(*args, **options).items() if name not in frozen
    }
    try:
        yield
    finally:
        del engine.module_state_dict


def _load_trained(strict: bool, source: str, src: dict[str, torch.Tensor], dst: torch.nn.Module) -> None:
    """Loads a checkpoint that has no frozen weights."""
    missing, unexpected = dst.load_state_dict(src, strict=False)
    odd = sorted({*missing} - _frozen_names(dst) | {*unexpected})
    if strict and odd:
        raise CheckpointError(f"{source} holds other adapters: {len(odd)} weights differ, first {odd[0]!r}")


@torch.no_grad()
def _load_without_optimizer(engine: Any, directory: Path) -> None:
    rank = dist.get_rank() if zero_stage_of(engine) == 3 else 0
    saved = tensor_file.read(directory / FROZEN.format(rank))
    tensors, local = unwrap_model(engine).state_dict(keep_vars=True), _local_tensors(engine)
    if saved.keys() != local.keys():
        odd = sorted(saved.keys() ^ local.keys())
        raise CheckpointError(f"{directory} holds another model: {len(odd)} weights differ, first {odd[0]!r}")
    for name, tensor in local.items():
        tensor.copy_(saved[name])
        forget_secondary_shard(tensors[name])


def _local_tensors(engine: Any) -> dict[str, torch.Tensor]:
    tensors = unwrap_model(engine).state_dict(keep_vars=True)
    return {name: t.ds_tensor.data if is_sharded(t) else t.detach() for name, t in tensors.items()}


def _make_room(save_dir: Path, staging: Path) -> None:
    """A folder for a new checkpoint, without what an interrupted saving left."""
    with durable.explained(save_dir):
        save_dir.mkdir(parents=True, exist_ok=True)
        for leftover in list(save_dir.glob(f"*{INCOMPLETE}")):
            whole = save_dir / leftover.name.removesuffix(_OLD)
            if leftover.name.endswith(_OLD) and not whole.exists():
                durable.rename(leftover, whole)  # the one that was to take its place did not come
                continue
            logger.warning("removing %s, a checkpoint whose saving was interrupted", leftover)
            durable.remove(leftover)
        staging.mkdir()


def _rotate(save_dir: Path, keep: set[str], max_num: int, max_mem: float) -> list[str]:
    """Removes checkpoints, oldest first, until the others are within the limits; returns their tags."""
    tags, gone = list_tags(save_dir), []
    sizes = {tag: sum(f.stat().st_size for f in (save_dir / tag).rglob("*") if f.is_file()) for tag in tags}
    for tag in [tag for tag in tags if tag not in keep]:
        if len(sizes) <= max_num and sum(sizes.values()) <= max_mem * 1e9:
            break
        durable.remove_folder(save_dir / tag, aside=save_dir / f"{tag}{INCOMPLETE}")
        del sizes[tag]
        gone.append(tag)
    return gone


# -- Hugging Face folders ----------------------------------------------------------------------------------------------

ADAPTER = "adapter"  # folder inside the export of a model with adapters
SAVING, REPLACED = ".saving", ".replaced"
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")
_MODEL_CARD = """---
library_name: transformers
tags:
- lightppo
---

# {name}

A `{architecture}` saved by lightppo.

```python
from transformers import {auto_class}

model = {auto_class}.from_pretrained("{name}")
```
"""


def save_model(
    ranks: Ranks,
    model: Any,
    tokenizer: Any | None,
    output_dir: str | os.PathLike[str],
    files: Mapping[str, str] = {},
    **facts: Any,
) -> None:
    """Writes all that transformers reads. A new folder appears complete; in an old one, file by file. Collective.

    With a URL, it is written to ``storage.local_folder(output_dir)``, then sent, the config last.

    Args:
        files: further files, name → text.
        facts: plain values that its manifest keeps, see ``durable.manifest``.
    """
    hf_model, prefix = find_hf_model(model)
    state_dict = full_state_dict(model, ranks.is_rank_0())

    def write() -> None:
        local = local_folder(output_dir)
        with durable.explained(local, _bytes_of(state_dict)):
            names = _write(hf_model, prefix, state_dict, tokenizer, local, files, facts)
        upload(output_dir, *sorted(names, key=lambda name: name == "config.json"), instead_of=_WEIGHT_FILES)

    ranks.on_rank_0(write, f"save {output_dir}")


def _write(
    hf_model: Any,
    prefix: str,
    state_dict: Any,
    tokenizer: Any | None,
    output_dir: Path,
    files: Mapping[str, str],
    facts: Mapping[str, Any],
) -> list[str]:
    """Returns the names of what it has written."""
    state_dict = {name.removeprefix(prefix): tensor for name, tensor in state_dict.items() if name.startswith(prefix)}
    adapters = find_adapters(hf_model)
    whole = state_dict if adapters is None else adapters.merged(state_dict)
    if output_dir.exists() and not output_dir.is_dir():
        raise FileExistsError(f"{output_dir} is a file, not a directory")
    inside = output_dir.is_dir() and any(output_dir.iterdir()) and not _is_export(output_dir)
    # A folder with other things in it (checkpoints, say) is filled file by file; any other appears complete.
    staging = output_dir / SAVING if inside else output_dir.with_name(f".{output_dir.name}{SAVING}")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        with _savable(hf_model):
            hf_model.save_pretrained(str(staging), state_dict=whole)
        if adapters is not None:
            adapters.write(state_dict, staging / ADAPTER)
        if tokenizer is not None:
            tokenizer.save_pretrained(str(staging))
        auto_class = "AutoModelForCausalLM" if hf_model.can_generate() else "AutoModelForSequenceClassification"
        names = {"name": output_dir.name, "architecture": type(hf_model).__name__, "auto_class": auto_class}
        for name, text in {"README.md": _MODEL_CARD.format(**names), **files}.items():
            (staging / name).write_text(text)
        durable.seal(staging, **facts)
        written = [path.name for path in staging.iterdir()]
        if inside:
            _move_files(staging, output_dir)
        else:
            _take_place(staging, output_dir)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return written


def _is_export(folder: Path) -> bool:
    """Whether all that is in a folder is one export."""
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return not folder.is_symlink() and files == {durable.MANIFEST, *durable.manifest(folder)["files"]}


def _take_place(staging: Path, output_dir: Path) -> None:
    replaced = output_dir.with_name(f".{output_dir.name}{REPLACED}")
    if output_dir.is_dir() and any(output_dir.iterdir()):
        shutil.rmtree(replaced, ignore_errors=True)
        durable.rename(output_dir, replaced)
    durable.rename(staging, output_dir)
    shutil.rmtree(replaced, ignore_errors=True)


def clear_exports(root: Path) -> list[str]:
    """Remove exports below ``root`` whose saving was interrupted, and return their names; what they were to take the
    place of is there again."""
    if not root.is_dir():
        return []
    for replaced in root.glob(f".*{REPLACED}"):
        whole = root / replaced.name.removeprefix(".").removesuffix(REPLACED)
        if whole.exists():
            durable.remove(replaced)
        else:
            durable.rename(replaced, whole)
    names = []
    for leftover in root.glob(f".?*{SAVING}"):
        logger.warning("removing %s, an export that was interrupted", leftover)
        shutil.rmtree(leftover)
        names.append(leftover.name.removeprefix(".").removesuffix(SAVING))
    return names


@contextlib.contextmanager
def _savable(hf_model: Any) -> Iterator[None]:
    """Without the progress bar of each save; with ``do_sample`` in the generation config of a model that samples.

    Some hub models have sampling settings without it, which transformers reads but refuses to write.
    """
    from transformers.utils import logging as hf_logging

    shown, original = hf_logging.is_progress_bar_enabled(), getattr(hf_model, "generation_config", None)
    hf_logging.disable_progress_bar()
    try:
        if original is not None:
            original.validate(strict=True)
    except ValueError as error:
        logger.warning("saving the generation config with do_sample=True, since it has sampling settings: %s", error)
        hf_model.generation_config = copy.deepcopy(original)
        hf_model.generation_config.do_sample = True
    try:
        yield
    finally:
        if original is not None:
            hf_model.generation_config = original
        if shown:
            hf_logging.enable_progress_bar()


def _move_files(staging: Path, output_dir: Path) -> None:
    """The manifest goes first and comes last: between, the folder is no whole export."""
    new = {path.name for path in staging.iterdir()}
    (output_dir / durable.MANIFEST).unlink(missing_ok=True)
    durable.sync_folder(output_dir)
    for path in sorted(staging.iterdir(), key=lambda path: path.name == durable.MANIFEST):
        target = output_dir / path.name
        if target.is_dir():
            shutil.rmtree(target)
        if path.name == durable.MANIFEST:
            for pattern in _WEIGHT_FILES:  # shards of an earlier, larger save would be loaded as part of this model
                for old in output_dir.glob(pattern):
                    if old.name not in new:
                        old.unlink()
            durable.sync_folder(output_dir)
        os.replace(path, target)
    durable.sync_folder(output_dir)


def load_model(model: Any, path: str | os.PathLike[str], strict: bool = True) -> None:
    """Loads a weight file or Hugging Face folder into a model and its fp32 masters. Collective if prepared."""
    state_dict = _read_weights(Path(path))
    if state_dict.keys().isdisjoint(unwrap_model(model).state_dict().keys()):
        _, prefix = find_hf_model(model)
        state_dict = {f"{prefix}{name}": tensor for name, tensor in state_dict.items()}
    load_full_state_dict(model, state_dict, strict, str(path))


def _read_weights(path: Path) -> dict[str, torch.Tensor]:
    """All weights of a Hugging Face folder or a weight file, on the CPU."""
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
