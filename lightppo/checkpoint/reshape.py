"""Checkpoints of another number of ranks or another ZeRO stage: whole tensors out of saved shards, into live ones.

All is copied, nothing computed: weights, masters and moments stay equal to the bit. Not by DeepSpeed's universal
checkpoint (0.19): within stage 3 it gives all groups the weight decay of the first, and it does not lead from stage 3
to the others or back. The layouts of ``pieces_of``, and ``_MASTERS`` and ``_BASE``, are private to DeepSpeed 0.19.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
        part = 2 * math.ceil(sum(sizes.values()) / (2 * ranks))  # elements of a rank
        offset = 0  # of the next parameter: at stage 3 in each rank's tensor, else in the group's
        for name, size in sizes.items():
            if stage == 3:
                part = math.ceil(size / ranks)
            shift = 0 if stage == 3 else offset
            pieces[name] = []
            for rank in range(ranks):
                begin = rank * part - shift
                start = max(begin, 0)
                count = min(begin + part, size) - start
                if count > 0:
                    place = start - begin + offset - shift
                    pieces[name].append(Piece(rank, group, place, start, count))
            offset += part if stage == 3 else size
    return pieces


class SavedOptimizer:
    """Whole tensors of the saved parameters, one at a time, out of the shards of all ranks.

    Args:
        names: of the trained parameters, in the optimizer's order: a checkpoint of stage 0 has no names.
    """

    def __init__(self, folder: Path, saved_meta: Mapping[str, Any], names: Iterable[str]) -> None:
        self.stage = saved_meta["zero_stage"]
        ranks = saved_meta["world_size"]
        self.models = [read_deepspeed(file) for file in model_files(folder, saved_meta)]
        self.common = self.models[0]  # what DeepSpeed saves beside the optimizer
        self.loss_scaler = None  # stage 0 and bf16 have none
        if self.stage == 0:
            module_weights = {name: self.common["module"][name] for name in names}
            groups = [{name: weight.shape} for name, weight in module_weights.items()]
            ranks = 1
            base_states = [self.common["optimizer"]]
            master_weights = [list(module_weights.values())]
        else:
            optimizer_paths = optimizer_files(folder, saved_meta)
            rank_states = [read_deepspeed(file)["optimizer_state_dict"] for file in optimizer_paths]
            groups = self.common["param_shapes"]
            base_states = [state[_BASE[self.stage]] for state in rank_states]
            self.loss_scaler = rank_states[0].get("loss_scaler")
            master_weights = [state[_MASTERS[self.stage]] for state in rank_states]
        self.param_groups = base_states[0]["param_groups"]
        self.pieces = pieces_of(self.stage, ranks, groups)
        self.members = members(self.param_groups, groups)
        state_keys = [key for group in self.param_groups for key in group["params"]]
        self._masters = master_weights
        # One of each rank, by flat tensor.
        self._states = [[base["state"].get(key, {}) for key in state_keys] for base in base_states]

    def whole(self, name: str, key: str | None = None) -> Tensor:
        """Return a parameter's fp32 weights, or its part of the optimizer's state ``key``. (elements,)"""
        parts = []
        for rank, group, place, _, count in self.pieces[name]:
            if key is None:
                flat = self._masters[rank][group]
            else:
                flat = self._states[rank][group][key]
            parts.append(flat.detach().reshape(-1)[place : place + count])
        return torch.cat(parts)

    def state(self, name: str) -> dict[str, Any]:
        """Return the optimizer's state of a parameter: numbers such as the steps; None for what ``whole`` gives."""
        rank, group, *_ = self.pieces[name][0]
        state = dict(self._states[rank][group])
        tensors = [key for key, value in state.items() if isinstance(value, Tensor) and value.dim()]
        return state | dict.fromkeys(tensors)

    def frozen(self, name: str) -> Tensor | None:
        """Return the weights of a parameter without optimizer, flat; None if they were not saved, as under adapters."""
        if self.stage < 3:
            weight = self.common["module"].get(name)
            return None if weight is None else weight.reshape(-1)
        rank_parts = [(model["frozen_param_fragments"] or {}).get(name) for model in self.models]
        return None if rank_parts[0] is None else torch.cat(rank_parts)


def members(
    param_groups: Sequence[Mapping[str, Any]], groups: Sequence[Shapes]
) -> dict[str, tuple[int, torch.Size]]:
    """Return each parameter's group in the optimizer, and its shape."""
    group_numbers = [number for number, group in enumerate(param_groups) for _ in group["params"]]
    return {
        name: (number, torch.Size(shape))
        for number, shapes in zip(group_numbers, groups, strict=True)
        for name, shape in shapes.items()
    }


def load_reshaped(
    engine: Any, folder: Path, saved_meta: Mapping[str, Any], load_lr_scheduler_states: bool = True
) -> None:
    """Load a checkpoint, whose ``saved_meta`` says ranks and stage, into an engine with any others. Collective.

    Each rank reads the files of all saved ranks: the folder must be shared.
    """
    if has_optimizer(engine):
        _load_trained(engine, folder, saved_meta, load_lr_scheduler_states)
    else:
        _load_frozen(engine, folder, saved_meta)


@torch.no_grad()
def _load_trained(
    engine: Any, folder: Path, saved_meta: Mapping[str, Any], load_lr_scheduler_states: bool
) -> None:
    optimizer = engine.optimizer
    stage = zero_stage_of(engine)
    if stage == 3:
        optimizer.checkpoint_event_prologue()
    live_state = optimizer.state_dict()
    base_state = live_state[_BASE[stage]] if stage else live_state
    if stage:
        groups = engine._get_zero_param_shapes()
    else:
        groups = [
            {engine.param_names[parameter]: parameter.shape}
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
    saved_optimizer = SavedOptimizer(
        folder, saved_meta, [name for shapes in groups for name in shapes]
    )
    live_members = members(base_state["param_groups"], groups)
    members_of_both = live_members.items() ^ saved_optimizer.members.items()
    if different_names := sorted({name for name, _ in members_of_both}):
        raise CheckpointError(
            f"{folder} holds other trained weights: {len(different_names)} differ, first {different_names[0]!r}"
        )
    flat_states = _fill(engine, saved_optimizer, groups)
    state_keys = [key for group in base_state["param_groups"] for key in group["params"]]
    both_groups = zip(saved_optimizer.param_groups, base_state["param_groups"])
    loaded_state = {
        "state": {key: state for key, state in zip(state_keys, flat_states, strict=True) if state},
        "param_groups": [saved | {"params": live["params"]} for saved, live in both_groups],
    }
    # the masters are in place; this brings the optimizer's state, and what DeepSpeed derives from both
    if stage:
        live_state[_BASE[stage]] = loaded_state
        live_state["loss_scaler"] = saved_optimizer.loss_scaler or live_state.get("loss_scaler")
        optimizer.load_state_dict([live_state] * dist.get_world_size(), load_from_fp32_weights=True)
    else:
        optimizer.load_state_dict(loaded_state)

    common_state = saved_optimizer.common
    for name, param in engine.module.named_parameters():
        if name not in live_members and (weights := saved_optimizer.frozen(name)) is not None:
            _put(param, weights)
    buffers = dict(engine.module.named_buffers())
    for name in common_state["buffer_names"]:
        buffers[name].copy_(common_state["module"][name])
    if load_lr_scheduler_states and engine.lr_scheduler is not None:
        engine.lr_scheduler.load_state_dict(common_state["lr_scheduler"])
    for name in ("global_steps", "global_samples", "skipped_steps"):
        setattr(engine, name, common_state[name])
    if stage == 3:
        optimizer.checkpoint_event_epilogue()


def _fill(
    engine: Any, saved_optimizer: SavedOptimizer, groups: Sequence[Shapes]
) -> list[dict[str, Any]]:
    """Write this rank's parts of the fp32 weights into the engine; return the state of each flat tensor."""
    optimizer = engine.optimizer
    stage = zero_stage_of(engine)
    if stage == 3:
        master_weights = optimizer.fp32_partitioned_groups_flat
    else:
        groups_of_optimizer = optimizer.param_groups
        master_weights = [master for group in groups_of_optimizer for master in group["params"]]
    flat_states = []
    for shapes, master in zip(groups, master_weights, strict=True):
        state, *others = [saved_optimizer.state(name) for name in shapes]
        if any(other != state for other in others):
            raise CheckpointError(
                "the parameters of one optimizer group have not taken the same number of steps, which only "
                "--zero_stage 0 can hold: resume with it"
            )
        flat_states.append(
            {
                key: torch.zeros_like(master) if value is None else copy.deepcopy(value)
                for key, value in state.items()
            }
        )
    parameters = {name: parameter for parameter, name in engine.param_names.items()}
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if stage else (1, 0)
    for name, pieces in pieces_of(stage, ranks, groups).items():
        weights = saved_optimizer.whole(name)
        if own_pieces := [piece for piece in pieces if piece.rank == rank]:
            group = own_pieces[0].group
            _copy_pieces(own_pieces, weights, master_weights[group].data)
            for key, value in saved_optimizer.state(name).items():
                if value is None:
                    moment = saved_optimizer.whole(name, key)
                    _copy_pieces(own_pieces, moment, flat_states[group][key])
        if not is_sharded(parameters[name]):  # DeepSpeed derives sharded weights from the masters
            _put(parameters[name], weights)
    return flat_states


def _copy_pieces(pieces: Iterable[Piece], whole: Tensor, flat: Tensor) -> None:
    for _, _, place, start, count in pieces:
        flat.view(-1)[place : place + count].copy_(whole[start : start + count])


@torch.no_grad()
def _load_frozen(engine: Any, folder: Path, saved_meta: Mapping[str, Any]) -> None:
    """Load as ``_load_trained`` does, for a model without optimizer."""
    tensors = unwrap_model(engine).state_dict(keep_vars=True)
    for name, weights in _frozen_weights(folder, saved_meta, tensors):
        _put(tensors[name], weights)


def _frozen_weights(
    folder: Path, saved_meta: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, elements, perhaps with padding behind them) of a model saved without optimizer."""
    is_sharded_save = saved_meta["zero_stage"] == 3
    ranks = range(saved_meta["world_size"] if is_sharded_save else 1)
    rank_files = [read_deepspeed(frozen_file(folder, rank)) for rank in ranks]
    refuse_other_names(folder, rank_files[0].keys() ^ tensors.keys())
    for name, tensor in tensors.items():
        parts = [file[name].reshape(-1) for file in rank_files]
        is_whole = not is_sharded_save or not isinstance(tensor, nn.Parameter)
        yield name, parts[0] if is_whole else torch.cat(parts)


def refuse_other_names(folder: Path, different_names: Collection[str]) -> None:
    """Raise CheckpointError if names of weights differ between a checkpoint and the model."""
    if different_names:
        raise CheckpointError(
            f"{folder} holds another model: {len(different_names)} weights differ, first {min(different_names)!r}"
        )


def saved_names(folder: Path, saved_meta: Mapping[str, Any]) -> set[str]:
    """Return names of the weights that a checkpoint holds; of tied ones at least one."""
    if not saved_meta["optimizer"]:
        return set(read_deepspeed(frozen_file(folder, 0)))
    saved_state = read_deepspeed(model_files(folder, saved_meta)[0])
    if saved_meta["zero_stage"] < 3:
        return set(saved_state["module"])
    return {name for group_shapes in saved_state["param_shapes"] for name in group_shapes}


@torch.no_grad()
def whole_weights(
    folder: Path, saved_meta: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return what a checkpoint holds, in type and shape of a model's ``tensors``, which are not sharded: the weights of its
    forward. Under adapters these are the trained ones; of tied weights there is at least one."""
    if not saved_meta["optimizer"]:
        weights_by_name = dict(_frozen_weights(folder, saved_meta, tensors))
    elif saved_meta["zero_stage"] < 3:
        weights_by_name = read_deepspeed(model_files(folder, saved_meta)[0])["module"]
    else:
        saved_optimizer = SavedOptimizer(folder, saved_meta, ())
        module_state = saved_optimizer.common["module"]
        buffer_names = saved_optimizer.common["buffer_names"]
        weights_by_name = {name: module_state[name] for name in buffer_names}
        weights_by_name |= {name: saved_optimizer.whole(name) for name in saved_optimizer.members}
        for name in tensors.keys() - weights_by_name.keys():
            if (weights := saved_optimizer.frozen(name)) is not None:
                weights_by_name[name] = weights
    different_names = [
        name
        for name, weights in weights_by_name.items()
        if name not in tensors or tensors[name].numel() > weights.numel()
    ]
    refuse_other_names(folder, different_names)
    return {
        name: weights.reshape(-1)[: tensors[name].numel()]
        .view_as(tensors[name])
        .to(tensors[name].dtype)
        for name, weights in weights_by_name.items()
    }


def load_weights(model: Any, folder: Path, saved_meta: Mapping[str, Any]) -> None:
    """Load the weights of a checkpoint of any ranks and ZeRO stage into a model of this process, without engine.

    Its tensors are replaced by those of the files; under adapters its frozen weights stay.
    """
    module = unwrap_model(model)
    check_model(Alone(), model, folder, saved_meta)
    weights = whole_weights(folder, saved_meta, module.state_dict(keep_vars=True))
    module.load_state_dict(weights, strict=False, assign=True)
    find_hf_model(module)[0].tie_weights()
    current_tensors = module.state_dict(keep_vars=True)
    loaded_tensors = {current_tensors[name] for name in weights}
    named_parameters = module.named_parameters(remove_duplicate=False)
    missing = {name for name, tensor in current_tensors.items() if tensor not in loaded_tensors}
    if saved_meta["adapters"]:
        missing -= {name for name, parameter in named_parameters if not parameter.requires_grad}
    if missing_names := sorted(missing):
        raise CheckpointError(
            f"{folder} holds another model: it has no {missing_names[0]!r} ({len(missing_names)} are missing)"
        )


def _put(tensor: Tensor, weights: Tensor) -> None:
    """Copy whole weights (elements,), perhaps with padding behind them, into a tensor or this rank's shard of it."""
    weights = weights[: full_shape(tensor).numel()]
    if is_sharded(tensor):
        tensor.ds_tensor.data.copy_(shard_of(tensor, weights))
        forget_secondary_shard(tensor)
    else:
        tensor.data.copy_(weights.view(tensor.shape))
