"""Checkpoints of another number of ranks or another ZeRO stage: whole tensors out of saved shards, into live ones.

All is copied, nothing computed: weights, masters and moments stay equal to the bit. Not by DeepSpeed's universal
checkpoint (0.19): within stage 3 it gives all groups the weight decay of the first, and it does not lead from stage 3
to the others or back. The layouts of ``pieces_of``, and ``_MASTERS`` and ``_BASE``, are private to DeepSpeed 0.19.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightppo.checkpoint.damage import check_model
from lightppo.checkpoint.layout import frozen_file, model_files, optimizer_files
from lightppo.errors import CheckpointError
from lightppo.ranks import Alone
from lightppo.tensor_file import read_deepspeed
from lightppo.zero3 import (
    find_hf_model,
    forget_secondary_shard,
    full_shape,
    has_optimizer,
    is_sharded,
    shard_of,
    unwrap_model,
    zero_stage_of,
)

# Keys of a rank's optimizer state by stage: fp32 weights, and the state_dict of torch's optimizer.
_MASTERS = {
    1: "single_partition_of_fp32_groups",
    2: "single_partition_of_fp32_groups",
    3: "fp32_flat_groups",
}
_BASE = {1: "base_optimizer_state", 2: "base_optimizer_state", 3: "optimizer_state_dict"}

Shapes = Mapping[str, torch.Size]  # of the parameters in one flat tensor, by name, in order


class Piece(NamedTuple):
    """Elements of a parameter that lie together in a flat tensor of a rank."""

    rank: int
    group: int  # number of the flat tensor
    place: int  # of the first element in it
    start: int  # of the first element in the parameter
    count: int


def pieces_of(stage: int, ranks: int, groups: Sequence[Shapes]) -> dict[str, list[Piece]]:
    """Return where DeepSpeed keeps the elements of each parameter, in their order.

    At stages 1 and 2 a group is one flat tensor, padded to a multiple of 2 × ranks and cut into as many equal parts. At
    stage 3 each parameter is cut into equal parts, which follow each other. At stage 0 every rank has all: ``ranks`` 1.
    """
    pieces: dict[str, list[Piece]] = {}
    for group, shapes in enumerate(groups):
        sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        begin = 0
        length = 2 * math.ceil(sum(sizes.values()) / (2 * ranks))
        for name, size in sizes.items():
            if stage == 3:
                length = math.ceil(size / ranks)
                spans = [
                    (rank, rank * length, min((rank + 1) * length, size)) for rank in range(ranks)
                ]
                pieces[name] = [
                    Piece(r, group, begin, low, high - low) for r, low, high in spans if low < high
                ]
                begin += length
            else:
                touched = range(begin // length, math.ceil((begin + size) / length))
                spans = [
                    (r, max(begin, r * length), min(begin + size, (r + 1) * length))
                    for r in touched
                ]
                pieces[name] = [
                    Piece(r, group, lo - r * length, lo - begin, hi - lo) for r, lo, hi in spans
                ]
                begin += size
    return pieces


class SavedOptimizer:
    """Whole tensors of the saved parameters, one at a time, out of the shards of all ranks.

    Args:
        names: of the trained parameters, in the optimizer's order: a checkpoint of stage 0 has no names.
    """

    def __init__(self, path: Path, meta: Mapping[str, Any], names: Iterable[str]) -> None:
        self.stage = meta["zero_stage"]
        ranks = meta["world_size"]
        self.models = [read_deepspeed(file) for file in model_files(path, meta)]
        self.common = self.models[0]  # what DeepSpeed saves beside the optimizer
        self.loss_scaler = None  # stage 0 and bf16 have none
        if self.stage == 0:
            weights = {name: self.common["module"][name] for name in names}
            groups = [{name: weight.shape} for name, weight in weights.items()]
            ranks = 1
            bases = [self.common["optimizer"]]
            masters = [list(weights.values())]
        else:
            files = optimizer_files(path, meta)
            states = [read_deepspeed(file)["optimizer_state_dict"] for file in files]
            groups = self.common["param_shapes"]
            bases = [state[_BASE[self.stage]] for state in states]
            self.loss_scaler = states[0].get("loss_scaler")
            masters = [state[_MASTERS[self.stage]] for state in states]
        self.param_groups, self.pieces = (
            bases[0]["param_groups"],
            pieces_of(self.stage, ranks, groups),
        )
        self.members = members(self.param_groups, groups)
        keys = [key for group in self.param_groups for key in group["params"]]
        self._masters = masters
        # One of each rank, by flat tensor.
        self._states = [[base["state"].get(key, {}) for key in keys] for base in bases]

    def whole(self, name: str, key: str | None = None) -> Tensor:
        """Return a parameter's fp32 weights, or its part of the optimizer's state ``key``. (elements,)"""
        parts = []
        for rank, group, place, _, count in self.pieces[name]:
            flat = self._masters[rank][group] if key is None else self._states[rank][group][key]
            parts.append(flat.detach().reshape(-1)[place : place + count])
        return torch.cat(parts)

    def state(self, name: str) -> dict[str, Any]:
        """Return the optimizer's state of a parameter: numbers such as the steps; None for what ``whole`` gives."""
        rank, group, *_ = self.pieces[name][0]
        state = self._states[rank][group].items()
        return {
            key: None if isinstance(value, Tensor) and value.dim() else value
            for key, value in state
        }

    def frozen(self, name: str) -> Tensor | None:
        """Return the weights of a parameter without optimizer, flat; None if they were not saved, as under adapters."""
        if self.stage < 3:
            weight = self.common["module"].get(name)
            return None if weight is None else weight.reshape(-1)
        parts = [(model["frozen_param_fragments"] or {}).get(name) for model in self.models]
        return None if parts[0] is None else torch.cat(parts)


def members(
    param_groups: Sequence[Mapping[str, Any]], groups: Sequence[Shapes]
) -> dict[str, tuple[int, torch.Size]]:
    """Return each parameter's group in the optimizer, and its shape."""
    numbers = [number for number, group in enumerate(param_groups) for _ in group["params"]]
    return {
        name: (number, torch.Size(shape))
        for number, shapes in zip(numbers, groups, strict=True)
        for name, shape in shapes.items()
    }


def load_reshaped(
    engine: Any, path: Path, meta: Mapping[str, Any], load_lr_scheduler_states: bool = True
) -> None:
    """Load a checkpoint, whose ``meta`` says ranks and stage, into an engine with any others. Collective.

    Each rank reads the files of all saved ranks: the folder must be shared.
    """
    if has_optimizer(engine):
        _load_trained(engine, path, meta, load_lr_scheduler_states)
    else:
        _load_frozen(engine, path, meta)


@torch.no_grad()
def _load_trained(
    engine: Any, path: Path, meta: Mapping[str, Any], load_lr_scheduler_states: bool
) -> None:
    optimizer = engine.optimizer
    stage = zero_stage_of(engine)
    if stage == 3:
        optimizer.checkpoint_event_prologue()
    live = optimizer.state_dict()
    base = live[_BASE[stage]] if stage else live
    if stage:
        groups = engine._get_zero_param_shapes()
    else:
        groups = [
            {engine.param_names[p]: p.shape}
            for group in optimizer.param_groups
            for p in group["params"]
        ]
    saved = SavedOptimizer(path, meta, [name for shapes in groups for name in shapes])
    here = members(base["param_groups"], groups)
    if odd := sorted(
        name for name in here | saved.members if here.get(name) != saved.members.get(name)
    ):
        raise CheckpointError(
            f"{path} holds other trained weights: {len(odd)} differ, first {odd[0]!r}"
        )

    states = _fill(engine, saved, groups)
    keys = [key for group in base["param_groups"] for key in group["params"]]
    loaded = {
        "state": {key: state for key, state in zip(keys, states, strict=True) if state},
        "param_groups": [
            old | {"params": new["params"]}
            for old, new in zip(saved.param_groups, base["param_groups"])
        ],
    }
    # the masters are in place; this brings the optimizer's state, and what DeepSpeed derives from
    # both
    if stage:
        live[_BASE[stage]] = loaded
        live["loss_scaler"] = saved.loss_scaler or live.get("loss_scaler")
        optimizer.load_state_dict([live] * dist.get_world_size(), load_from_fp32_weights=True)
    else:
        optimizer.load_state_dict(loaded)

    common = saved.common
    for name, param in engine.module.named_parameters():
        if name not in here and (weights := saved.frozen(name)) is not None:
            _put(param, weights)
    buffers = dict(engine.module.named_buffers())
    for name in common["buffer_names"]:
        buffers[name].copy_(common["module"][name])
    if load_lr_scheduler_states and engine.lr_scheduler is not None:
        engine.lr_scheduler.load_state_dict(common["lr_scheduler"])
    for name in ("global_steps", "global_samples", "skipped_steps"):
        setattr(engine, name, common[name])
    if stage == 3:
        optimizer.checkpoint_event_epilogue()


def _fill(engine: Any, saved: SavedOptimizer, groups: Sequence[Shapes]) -> list[dict[str, Any]]:
    """Write this rank's parts of the fp32 weights into the engine; return the state of each flat tensor."""
    optimizer = engine.optimizer
    stage = zero_stage_of(engine)
    if stage == 3:
        masters = optimizer.fp32_partitioned_groups_flat
    else:
        masters = [p for group in optimizer.param_groups for p in group["params"]]
    states = []
    for shapes, master in zip(groups, masters, strict=True):
        state, *others = [saved.state(name) for name in shapes]
        if any(other != state for other in others):
            raise CheckpointError(
                "the parameters of one optimizer group have not taken the same number of steps, which only "
                "--zero_stage 0 can hold: resume with it"
            )
        copies = {
            key: torch.zeros_like(master) if value is None else value
            for key, value in state.items()
        }
        states.append(
            {
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in copies.items()
            }
        )
    params = {name: param for param, name in engine.param_names.items()}
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if stage else (1, 0)
    for name, pieces in pieces_of(stage, ranks, groups).items():
        own = [piece for piece in pieces if piece.rank == rank]
        weights = saved.whole(name)
        moments = [key for key, value in saved.state(name).items() if value is None]
        for key in [None, *moments] if own else []:
            whole = weights if key is None else saved.whole(name, key)
            for _, group, place, start, count in own:
                flat = masters[group].data if key is None else states[group][key]
                flat.view(-1)[place : place + count].copy_(whole[start : start + count])
        if not is_sharded(params[name]):  # DeepSpeed derives sharded weights from the masters
            _put(params[name], weights)
    return states


@torch.no_grad()
def _load_frozen(engine: Any, path: Path, meta: Mapping[str, Any]) -> None:
    """Load as ``_load_trained`` does, for a model without optimizer."""
    tensors = unwrap_model(engine).state_dict(keep_vars=True)
    for name, weights in _frozen_weights(path, meta, tensors):
        _put(tensors[name], weights)


def _frozen_weights(
    path: Path, meta: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, elements, perhaps with padding behind them) of a model saved without optimizer."""
    sharded = meta["zero_stage"] == 3
    ranks = range(meta["world_size"] if sharded else 1)
    files = [read_deepspeed(frozen_file(path, rank)) for rank in ranks]
    if odd := sorted(files[0].keys() ^ tensors.keys()):
        raise CheckpointError(
            f"{path} holds another model: {len(odd)} weights differ, first {odd[0]!r}"
        )
    for name, tensor in tensors.items():
        parts = [file[name].reshape(-1) for file in files]
        yield name, torch.cat(parts) if sharded and isinstance(tensor, nn.Parameter) else parts[0]


def saved_names(path: Path, meta: Mapping[str, Any]) -> set[str]:
    """Return names of the weights that a checkpoint holds; of tied ones at least one."""
    if not meta["optimizer"]:
        return set(read_deepspeed(frozen_file(path, 0)))
    saved = read_deepspeed(model_files(path, meta)[0])
    if meta["zero_stage"] < 3:
        return set(saved["module"])
    return {name for of_group in saved["param_shapes"] for name in of_group}


@torch.no_grad()
def whole_weights(
    path: Path, meta: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return what a checkpoint holds, in type and shape of a model's ``tensors``, which are not sharded: the weights of its
    forward. Under adapters these are the trained ones; of tied weights there is at least one."""
    if not meta["optimizer"]:
        weights_by_name = dict(_frozen_weights(path, meta, tensors))
    elif meta["zero_stage"] < 3:
        weights_by_name = read_deepspeed(model_files(path, meta)[0])["module"]
    else:
        saved = SavedOptimizer(path, meta, ())
        weights_by_name = {
            name: saved.common["module"][name] for name in saved.common["buffer_names"]
        }
        weights_by_name |= {name: saved.whole(name) for name in saved.members}
        frozen = {name: saved.frozen(name) for name in tensors.keys() - weights_by_name.keys()}
        weights_by_name |= {
            name: weights for name, weights in frozen.items() if weights is not None
        }
    fits = {
        name: t.numel() <= weights_by_name[name].numel()
        for name, t in tensors.items()
        if name in weights_by_name
    }
    if odd := sorted(name for name in weights_by_name if not fits.get(name)):
        raise CheckpointError(
            f"{path} holds another model: {len(odd)} weights differ, first {odd[0]!r}"
        )
    return {
        name: w.reshape(-1)[: (t := tensors[name]).numel()].view(t.shape).to(t.dtype)
        for name, w in weights_by_name.items()
    }


def load_weights(model: Any, path: Path, meta: Mapping[str, Any]) -> None:
    """Load the weights of a checkpoint of any ranks and ZeRO stage into a model of this process, without engine.

    Its tensors are replaced by those of the files; under adapters its frozen weights stay.
    """
    module = unwrap_model(model)
    check_model(Alone(), model, path, meta)
    weights = whole_weights(path, meta, module.state_dict(keep_vars=True))
    module.load_state_dict(weights, strict=False, assign=True)
    find_hf_model(module)[0].tie_weights()
    now = module.state_dict(keep_vars=True)
    given = {now[name] for name in weights}
    named = module.named_parameters(remove_duplicate=False)
    frozen = {name for name, parameter in named if not parameter.requires_grad}
    untouched = frozen if meta["adapters"] else set()
    if missing := sorted(
        name for name, tensor in now.items() if tensor not in given and name not in untouched
    ):
        raise CheckpointError(
            f"{path} holds another model: it has no {missing[0]!r} ({len(missing)} are missing)"
        )


def _put(tensor: Tensor, weights: Tensor) -> None:
    """Copy whole weights (elements,), perhaps with padding behind them, into a tensor or this rank's shard of it."""
    weights = weights[: full_shape(tensor).numel()]
    if is_sharded(tensor):
        tensor.ds_tensor.data.copy_(shard_of(tensor, weights))
        forget_secondary_shard(tensor)
    else:
        tensor.data.copy_(weights.view(tensor.shape))
