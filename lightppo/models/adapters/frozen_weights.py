"""Frozen weights, beside which adapters are trained: no checkpoint holds them, only sums by which they are compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightppo.errors import CheckpointError
from lightppo.ranks import Ranks
from lightppo.zero3 import (
    find_engine,
    own_part,
    unwrap_model,
    zero_stage_of,
)


def frozen_facts(ranks: Ranks, model: Any) -> dict[str, Any]:
    """Return what a checkpoint says of the weights beside adapters. Collective."""
    dense, in_4bit = zip(*ranks.all_gather_object(frozen_sums(unwrap_model(model))))
    return {"frozen": dense, "in_4bit": in_4bit}


def check_frozen(
    ranks: Ranks, model: Any, path: Path, meta: Mapping[str, Any], now: Mapping[str, Any]
) -> None:
    """Raise CheckpointError unless the frozen weights, ``now``, are those with which adapters were trained."""
    stage = zero_stage_of(find_engine(model))
    dense = now["frozen"]
    in_4bit = now["in_4bit"]
    saved_dense = meta["frozen"]
    saved_in_4bit = meta.get("in_4bit", in_4bit)
    if (meta["zero_stage"], meta["world_size"]) != (stage, ranks.world_size):
        # The shards are others, so only their totals can be compared.
        saved_dense, saved_in_4bit = _totals(saved_dense, saved_in_4bit, meta["zero_stage"])
        dense, in_4bit = _totals(dense, in_4bit, stage)
    # Another machine's kernels may sum in another order; another model's sums are far off.
    pairs = zip(saved_dense, dense, strict=True)
    are_alike = all(math.isclose(was, is_now, rel_tol=1e-9, abs_tol=1e-9) for was, is_now in pairs)
    if not are_alike or list(saved_in_4bit) != list(in_4bit):
        raise CheckpointError(
            f"{path} holds LoRA adapters of other frozen weights: give the --pretrain (for a critic, the "
            "--critic_pretrain) that they were trained on, unchanged"
        )


def _totals(
    dense: Sequence[float], in_4bit: Sequence[int], stage: int
) -> tuple[list[float], list[int]]:
    """Return sums over the whole model, out of ``frozen_sums`` of each rank."""
    if stage == 3:
        return ([sum(dense)], [sum(in_4bit)])
    return ([dense[0]], [in_4bit[0]])


def frozen_sums(module: torch.nn.Module) -> tuple[float, int]:
    """Return two sums over this rank's frozen weights: dense ones, and 4-bit ones, whose changes would vanish in one sum."""
    frozen = [own_part(weight) for weight in module.parameters() if not weight.requires_grad]
    dense = [weight for weight in frozen if weight.is_floating_point()]
    in_4bit = [weight for weight in frozen if not weight.is_floating_point()]
    of_dense = [torch.linalg.vector_norm(weight, 1, dtype=torch.float64) for weight in dense]
    return sum(map(float, of_dense)), sum(int(weight.sum(dtype=torch.int64)) for weight in in_4bit)


def frozen_names(module: torch.nn.Module) -> set[str]:
    return {
        name
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if not parameter.requires_grad
    }


@contextmanager
def saved_alone(engine: Any) -> Iterator[dict[str, Any]]:
    """DeepSpeed saves no frozen weights inside, with these options.

    Its ``exclude_frozen_parameters`` alone would save a frozen embedding under its tied head's name.
    """
    frozen = frozen_names(engine.module)
    original = engine.module_state_dict
    engine.module_state_dict = lambda *args, **options: {
        name: tensor for name, tensor in original(*args, **options).items() if name not in frozen
    }
    try:
        yield {"exclude_frozen_parameters": True}
    finally:
        del engine.module_state_dict


def loader(strict: bool, source: str) -> Callable[..., None]:
    """Return what loads for DeepSpeed a checkpoint that has no frozen weights."""
    return partial(_load_without_frozen, strict, source)


def _load_without_frozen(
    strict: bool, source: str, src: dict[str, torch.Tensor], dst: torch.nn.Module
) -> None:
    missing, unexpected = dst.load_state_dict(src, strict=False)
    odd = sorted({*missing} - frozen_names(dst) | {*unexpected})
    if strict and odd:
        raise CheckpointError(
            f"{source} holds other adapters: {len(odd)} weights differ, first {odd[0]!r}"
        )
