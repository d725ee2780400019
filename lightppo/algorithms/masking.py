"""Masked means, whitening over all ranks, and the aggregation of token losses.

In a mask, True (nonzero) = the token counts. Masked positions may hold anything, even NaN; they never reach a result
or a gradient. Every rank must call a function that takes ``all_reduce_sum``, even a rank without tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightppo.algorithms.entries import LOSS_AGG_MODES

AllReduceSum = Callable[[Tensor], Tensor]


def identity(tensor: Tensor) -> Tensor:
    """Return the tensor: the all-reduce of a single process."""
    return tensor


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return ``tensor`` in float32; float64 stays."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def zero_where_masked(tensor: Tensor, mask: Tensor) -> Tensor:
    """Return ``tensor`` in float32 or float64, 0 at masked positions: a NaN there must not become 0 · NaN in a gradient."""
    return at_least_float32(tensor).masked_fill(~mask.bool(), 0.0)


def require_same_shape(**tensors: Tensor | None) -> None:
    """Raise ValueError for tensors that would broadcast against each other unnoticed; ``None`` is skipped."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor is not None}
    if len(set(shapes.values())) > 1:
        texts = (f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"shapes must be equal: {', '.join(texts)}")


def masked_mean(values: Tensor, mask: Tensor | None, dim: int | None = None) -> Tensor:
    """Return the mean over ``dim``, by default over everything, of unmasked values; of all without a mask.

    It is 0 where no value counts. Masked values may be anything.
    """
    if mask is None:
        return values.mean(dim)
    require_same_shape(values=values, mask=mask)
    return zero_where_masked(values, mask).sum(dim) / mask.bool().sum(dim).clamp(min=1)


@torch.no_grad()
def whiten(
    values: Tensor,
    mask: Tensor,
    *,
    all_reduce_sum: AllReduceSum = identity,
    shift_mean: bool = True,
    divide_std: bool = True,
    unbiased: bool = False,
    eps: float = 1e-8,
) -> Tensor:
    """Return (x - mean) / sqrt(var + eps) over the unmasked tokens of all ranks, (B, A); masked positions become 0.

    In float64 and two passes. With fewer than two unmasked tokens, values stay as they are. ``shift_mean=False`` adds
    the mean back, so that only the scale changes; ``unbiased`` divides the variance by n - 1 instead of n.
    """
    require_same_shape(values=values, mask=mask)
    values = zero_where_masked(values, mask)
    mask = mask.bool()
    exact = values.double()
    total, count = all_reduce_sum(torch.stack([exact.sum(), mask.sum().double()])).tolist()
    if count < 2:  # the same on every rank, so all leave here together
        return values
    mean = total / count
    result = (exact - mean).masked_fill(~mask, 0.0)
    if divide_std:
        variance = all_reduce_sum(result.square().sum()) / (count - 1 if unbiased else count)
        result = result * torch.rsqrt(variance + eps)
    if not shift_mean:
        result = (result + mean).masked_fill(~mask, 0.0)
    return result.to(values.dtype)


@dataclass(frozen=True)
class LossNormalizer:
    """The divisor of a loss: counts over all ranks and all micro batches of ONE optimizer step."""

    tokens: float  # unmasked
    sequences: float  # rows with at least one unmasked token
    dp_size: int = 1  # data-parallel ranks, whose gradients are averaged
    # constant of seq-mean-token-sum-norm, in tokens: a horizon such as generate_max_len
    scale: float = 1.0

    @classmethod
    def from_masks(
        cls,
        masks: Iterable[Tensor],
        *,
        all_reduce_sum: AllReduceSum = identity,
        dp_size: int = 1,
        scale: float = 1.0,
    ) -> LossNormalizer:
        """Count the (B, A) masks of this rank's micro batches of a step, and sum over all ranks."""
        counts = torch.zeros(2, dtype=torch.float64)
        for mask in masks:
            trained = mask.bool()
            counts = counts.to(mask.device) + torch.stack([trained.sum(), trained.any(dim=1).sum()])
        tokens, sequences = all_reduce_sum(counts).tolist()
        return cls(tokens=tokens, sequences=sequences, dp_size=dp_size, scale=scale)


@dataclass(frozen=True)
class Aggregation:
    """A way in which token losses become one number; called as :func:`aggregate_loss`, without the mode."""

    unit: Literal["tokens", "sequences"]  # what the sum is divided by the number of
    mean_of_rows: bool = False  # each row is divided by its own number of trained tokens first
    scaled: bool = False  # the sum is divided by the normalizer's scale, too

    def __call__(
        self, token_loss: Tensor, mask: Tensor, normalizer: LossNormalizer | None = None
    ) -> Tensor:
        require_same_shape(token_loss=token_loss, mask=mask)
        mask = mask.bool()
        normalizer = normalizer or LossNormalizer.from_masks([mask])
        losses = zero_where_masked(token_loss, mask)  # (B, A)
        if self.mean_of_rows:
            losses = losses / mask.sum(dim=1, keepdim=True).clamp(min=1)
        count = normalizer.tokens if self.unit == "tokens" else normalizer.sequences
        if self.scaled:
            count = count * normalizer.scale
        if count == 0:
            if mask.any():
                raise ValueError(
                    f"the mask has {int(mask.sum())} tokens but the normalizer counts none: {normalizer}"
                )
            return losses.sum()
        return losses.sum() * (normalizer.dp_size / count)


token_mean = Aggregation("tokens")
"""``token-mean``, which the means of metrics are, too."""
mean_of_sums = Aggregation("sequences")
mean_of_means = Aggregation("sequences", mean_of_rows=True)
mean_of_scaled_sums = Aggregation("sequences", scaled=True)


def aggregate_loss(
    token_loss: Tensor, mask: Tensor, mode: str, normalizer: LossNormalizer | None = None
) -> Tensor:
    """Return a micro batch's share of the loss of the whole optimizer step; 0 with a grad_fn if everything is masked.

    The loss of a step is a sum over all ranks r and micro batches k, divided by a global count N:
    L = 1/N · Σ_r Σ_k S_rk,  S_rk = Σ m·token_loss. From the returned scalars L_rk the engine makes
    1/dp · Σ_r Σ_k ∇L_rk: backward adds up a rank's micro batches, and data parallelism averages over the dp ranks. So
    L_rk = dp · S_rk / N gives exactly ∇L, whatever the micro batches, padding, packing and ranks, if N is counted once
    per step and the engine does not divide by accumulation steps (``managed_gradient_accumulation: false``).

    ============================ =======================================================
    mode                         global loss (rows without a trained token do not count)
    ============================ =======================================================
    ``token-mean``               Σ m·l / tokens
    ``seq-mean-token-sum``       Σ m·l / sequences
    ``seq-mean-token-mean``      Σ_row (Σ m·l / Σ m) / sequences
    ``seq-mean-token-sum-norm``  Σ m·l / (sequences · scale)
    ============================ =======================================================

    Sources: token-mean DAPO (arXiv:2503.14476); seq-mean-token-mean GRPO (arXiv:2402.03300); constant scale Dr. GRPO
    (arXiv:2503.20783). Without a ``normalizer``, this micro batch is the step, on one rank, with scale 1.
    """
    return LOSS_AGG_MODES.find(mode).fn(token_loss, mask, normalizer)
