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
    dense_sums, packed_sums = zip(*ranks.all_gather_object(frozen_sums(unwrap_model(model))))
    return {"frozen": dense_sums, "in_4bit": packed_sums}


def check_frozen(
    ranks: Ranks,
    model: Any,
    folder: Path,
    saved_meta: Mapping[str, Any],
    current_facts: Mapping[str, Any],
) -> None:
    """Raise CheckpointError unless the frozen weights, ``current_facts``, are those with which adapters were trained."""
    zero_stage = zero_stage_of(find_engine(model))
    sums = [current_facts["frozen"], current_facts["in_4bit"]]
    saved_sums = [saved_meta["frozen"], saved_meta.get("in_4bit", sums[1])]
    if (saved_meta["zero_stage"], saved_meta["world_size"]) != (zero_stage, ranks.world_size):
        # The shards are others, so only their totals can be compared.
        sums = [_total(of_ranks, zero_stage) for of_ranks in sums]
        saved_sums = [_total(of_ranks, saved_meta["zero_stage"]) for of_ranks in saved_sums]
    # Another machine's kernels may sum in another order; another model's sums are far off.
    close = partial(math.isclose, rel_tol=1e-9, abs_tol=1e-9)
    are_alike = all(close(*pair) for pair in zip(saved_sums[0], sums[0], strict=True))
    if not are_alike or list(saved_sums[1]) != list(sums[1]):
        raise CheckpointError(
            f"{folder} holds LoRA adapters of other frozen weights: give the --pretrain (for a critic, the "
            "--critic_pretrain) that they were trained on, unchanged"
        )


def _total(sums: Sequence[float], zero_stage: int) -> list[float]:
    """Return the sum over the whole model, out of ``frozen_sums`` of each rank."""
    return [sum(sums)] if zero_stage == 3 else [sums[0]]


def frozen_sums(module: torch.nn.Module) -> tuple[float, int]:
    """Return two sums over this rank's frozen weights: dense ones, and 4-bit ones, whose changes would vanish in one sum."""
    dense_sum = 0
    packed_sum = 0
    for weight in module.parameters():
        if weight.requires_grad:
            continue
        part = own_part(weight)
        if part.is_floating_point():
            dense_sum += float(torch.linalg.vector_norm(part, 1, dtype=torch.float64))
        else:
            packed_sum += int(part.sum(dtype=torch.int64))
    return dense_sum, packed_sum


def frozen_names(module: torch.nn.Module) -> set[str]:
    return {
        name
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if not parameter.requires_grad
    }


@contextmanager
def saved_alone(engine: Any) -> Iterator[dict[str, Any]]:
    """Keep frozen weights out of what DeepSpeed saves inside; yield the options for it.

    Its ``exclude_frozen_parameters`` alone would save a frozen embedding under its tied head's name.
    """
    frozen_parameters = frozen_names(engine.module)
    original_state_dict = engine.module_state_dict
    engine.module_state_dict = lambda *arguments, **options: {
        name: tensor
        for name, tensor in original_state_dict(*arguments, **options).items()
        if name not in frozen_parameters
    }
    try:
        yield {"exclude_frozen_parameters": True}
    finally:
        del engine.module_state_dict


def loader(strict: bool, source: str) -> Callable[..., None]:
    """Return what loads for DeepSpeed a checkpoint that has no frozen weights."""

    def load(src: dict[str, torch.Tensor], dst: torch.nn.Module) -> None:
        missing, unexpected = dst.load_state_dict(src, strict=False)
        different_names = sorted({*missing} - frozen_names(dst) | {*unexpected})
        if strict and different_names:
            raise CheckpointError(
                f"{source} holds other adapters: {len(different_names)} weights differ, first {different_names[0]!r}"
            )

    return load
