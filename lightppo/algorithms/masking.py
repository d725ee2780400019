"""Masked statistics, whitening over all ranks, and the aggregation of token losses.

A mask has one meaning everywhere: True (nonzero) = the token counts. Masked positions may hold anything, NaN included;
they never reach a result or a gradient. What needs all ranks takes ``all_reduce_sum``, a function that sums a tensor
over them; this room does not know torch.distributed.

Notation: B sequences, A action positions, m the mask, dp the number of data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightppo.algorithms.entries import LOSS_AGG_MODES

AllReduceSum = Callable[[Tensor], Tensor]


def identity(tensor: Tensor) -> Tensor:
    """The all-reduce of a single process."""
    return tensor


def at_least_float32(tensor: Tensor) -> Tensor:
    """``tensor`` in float32, or unchanged where it is float64."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def require_same_shape(**tensors: Tensor | None) -> None:
    """Refuse tensors that would broadcast against each other unnoticed; ``None`` entries are skipped.

    Raises:
        ValueError: the shapes differ; the message gives each name and shape.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor is not None}
    if len(set(shapes.values())) > 1:
        raise ValueError("shapes must be equal: " + ", ".join(f"{name} {shape}" for name, shape in shapes.items()))


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of the unmasked values; 0 where nothing is unmasked.

    Args:
        values: any shape, any float type.
        mask: same shape, nonzero = counts.
        dim: the dimension to reduce; ``None`` reduces all to a scalar.

    Raises:
        ValueError: shapes differ.
    """
    require_same_shape(values=values, mask=mask)
    mask = mask.bool()
    kept = at_least_float32(values).masked_fill(~mask, 0.0)
    if dim is None:
        return kept.sum() / mask.sum().clamp(min=1)
    return kept.sum(dim) / mask.sum(dim).clamp(min=1)


def masked_var(values: Tensor, mask: Tensor, dim: int | None = None, *, unbiased: bool = False) -> Tensor:
    """Variance of the unmasked values, in two passes; 0 where fewer than two are unmasked.

    Args:
        values: any shape, any float type.
        mask: same shape, nonzero = counts.
        dim: the dimension to reduce; ``None`` reduces all to a scalar.
        unbiased: divide by n - 1 (Bessel) instead of n.

    Raises:
        ValueError: shapes differ.
    """
    mean = masked_mean(values, mask, dim)
    values = at_least_float32(values).masked_fill(~mask.bool(), 0.0)  # NaN times a gradient of 0 is NaN
    deviation = values - (mean if dim is None else mean.unsqueeze(dim))
    variance = masked_mean(deviation.square(), mask, dim)
    if unbiased:
        count = mask.bool().sum() if dim is None else mask.bool().sum(dim)
        variance = variance * count / (count - 1).clamp(min=1)
    return variance


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
    """Normalise to mean 0 and variance 1 over the unmasked tokens of all ranks: (x - mean) / sqrt(var + eps).

    Every rank must call it, also one whose mask is empty. Sums are taken in float64 and the variance in two passes (the
    mean is reduced first), so that a large common offset or equal values leave no rounding noise.

    Args:
        values: (B, A).
        mask: (B, A), nonzero = counts.
        all_reduce_sum: sums a small tensor over all ranks.
        shift_mean: ``False`` adds the mean back, so that only the scale changes.
        divide_std: ``False`` only subtracts the mean (``--no_adv_std_norm``).
        unbiased: divide the variance by n - 1 (Bessel) instead of n.
        eps: added to the variance.

    Returns:
        (B, A), float32 or float64; masked positions are 0. With fewer than two unmasked tokens over all ranks the
        values come back unchanged.

    Raises:
        ValueError: shapes differ.
    """
    require_same_shape(values=values, mask=mask)
    mask = mask.bool()
    values = at_least_float32(values).masked_fill(~mask, 0.0)
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
    """What a loss is divided by: counts over all ranks and all micro batches of ONE optimizer step.

    Attributes:
        tokens: unmasked tokens.
        sequences: rows with at least one unmasked token.
        dp_size: data-parallel ranks whose gradients are averaged.
        scale: constant of ``seq-mean-token-sum-norm``, in tokens: a horizon such as ``generate_max_len``.
    """

    tokens: float
    sequences: float
    dp_size: int = 1
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.tokens < 0 or self.sequences < 0:
            raise ValueError(f"LossNormalizer: counts cannot be negative: {self}")
        if self.dp_size < 1 or not self.scale > 0:
            raise ValueError(f"LossNormalizer: dp_size must be at least 1 and scale above 0: {self}")

    @classmethod
    def from_masks(
        cls,
        masks: Iterable[Tensor],
        *,
        all_reduce_sum: AllReduceSum = identity,
        dp_size: int = 1,
        scale: float = 1.0,
    ) -> LossNormalizer:
        """Count once per optimizer step.

        Every rank must call it, also one that has no micro batch in this step.

        Args:
            masks: the (B, A) masks of this rank's micro batches of the step.
            all_reduce_sum: sums a small tensor over all ranks.
            dp_size: data-parallel ranks.
            scale: see the class.
        """
        counts = torch.zeros(2, dtype=torch.float64)
        for mask in masks:
            trained = mask.bool()
            counts = counts.to(mask.device) + torch.stack([trained.sum(), trained.any(dim=1).sum()])
        tokens, sequences = all_reduce_sum(counts).tolist()
        return cls(tokens=tokens, sequences=sequences, dp_size=dp_size, scale=scale)


def all_tokens(n: LossNormalizer) -> float:
    return n.tokens


def all_sequences(n: LossNormalizer) -> float:
    return n.sequences


def scaled_sequences(n: LossNormalizer) -> float:
    return n.sequences * n.scale


def aggregate_loss(token_loss: Tensor, mask: Tensor, mode: str, normalizer: LossNormalizer | None = None) -> Tensor:
    """One micro batch's share of the loss of the whole optimizer step.

    The loss of a step is one sum over the tokens (or rows) of all ranks r and micro batches k, divided by a global
    count N:  L = 1/N · Σ_r Σ_k S_rk,  S_rk = Σ m·token_loss of that micro batch. What the training engine makes of the
    returned scalars L_rk is: backward adds the gradients of a rank's micro batches, and data parallelism (DDP, ZeRO)
    averages over the dp ranks: gradient = 1/dp · Σ_r Σ_k ∇L_rk. So L_rk = dp · S_rk / N gives exactly ∇L, whatever the
    micro-batch size, padding, packing or number of ranks. Two things must hold: N is counted once per step
    (:meth:`LossNormalizer.from_masks`), and the engine does not divide by accumulation steps itself
    (``managed_gradient_accumulation: false``).

    ============================ =======================================================
    mode                         global loss (rows without a trained token count nowhere)
    ============================ =======================================================
    ``token-mean``               Σ m·l / tokens
    ``seq-mean-token-sum``       Σ m·l / sequences
    ``seq-mean-token-mean``      Σ_row (Σ m·l / Σ m) / sequences
    ``seq-mean-token-sum-norm``  Σ m·l / (sequences · scale)
    ============================ =======================================================

    Args:
        token_loss: (B, A).
        mask: (B, A), nonzero = trained token.
        mode: one of ``entries.LOSS_AGG_MODES``.
        normalizer: counts of the whole step; ``None`` = this micro batch is the step, on one rank, with scale 1.

    Returns:
        A scalar, float32 or float64. A fully masked micro batch gives an exact 0 that still has a grad_fn, so that
        every rank runs the same backward.

    Raises:
        ValueError: unknown mode, shapes differ, or the normalizer counts nothing while the mask has tokens.

    Sources: token-mean DAPO (arXiv:2503.14476); seq-mean-token-mean GRPO (arXiv:2402.03300); constant scale Dr. GRPO
    (arXiv:2503.20783).
    """
    entry = LOSS_AGG_MODES.find(mode)
    require_same_shape(token_loss=token_loss, mask=mask)
    mask = mask.bool()
    normalizer = normalizer or LossNormalizer.from_masks([mask])
    kept = at_least_float32(token_loss).masked_fill(~mask, 0.0)  # (B, A)
    if entry.mean_of_rows:
        kept = kept / mask.sum(dim=1, keepdim=True).clamp(min=1)
    count = entry.fn(normalizer)
    if count == 0:
        if mask.any():
            raise ValueError(f"the mask has {int(mask.sum())} tokens but the normalizer counts none: {normalizer}")
        return kept.sum()
    return kept.sum() * (normalizer.dp_size / count)
