"""Losses of a script, as the trainer calls them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightppo.algorithms import losses
from lightppo.algorithms.losses import GPTLMLoss
from lightppo.algorithms.masking import LossNormalizer, aggregate_loss, zero_where_masked
from lightppo.compat.own_steps import sample_share
from lightppo.errors import ConfigError

Metrics = dict[str, Tensor]


def _parameters(fn: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn).parameters
    except (TypeError, ValueError):  # of built-in functions
        return {}


def _knows_the_step(fn: Callable[..., Any]) -> bool:
    """Tell whether a loss takes a ``normalizer``; if its signature does not tell, it does."""
    parameters = _parameters(fn)
    return (
        "normalizer" in parameters
        or not parameters
        or any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    )


def _mean_of(
    fn: Callable[..., Any], name: str, tensors: Sequence[Tensor], mask: Tensor, **named: Any
) -> Any:
    """Return a loss in the seed's form of the rows with a trained token; a 0 with a gradient if there are none."""
    rows = mask.bool().any(dim=1)
    if not rows.any():
        return zero_where_masked(tensors[0], mask).sum()
    if not rows.all():
        tensors = [tensor[rows] for tensor in tensors]
        mask = mask[rows]
        named = {key: value[rows] for key, value in named.items()}
    loss = fn(*tensors, action_mask=mask, **named)
    if not isinstance(loss, Tensor) or loss.dim() > 0:
        raise ConfigError(
            f"{name} returned {type(loss).__name__} instead of a scalar tensor: return the loss alone, or take a "
            "normalizer and return (loss, metrics)"
        )
    return loss


def policy_loss_of(fn: Callable[..., Any]) -> Callable[..., tuple[Tensor, Metrics]]:
    """Return ``actor_loss_fn`` as the trainer calls it; one in the seed's form counts by its share of the samples."""
    if _knows_the_step(fn):
        return fn
    takes_entropy_mask = "entropy_mask" in _parameters(fn)

    def loss(
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        normalizer: LossNormalizer,
        *,
        weights: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, Metrics]:
        named = {}
        if weights is not None:
            if not takes_entropy_mask or not ((weights == 0) | (weights == 1)).all():
                raise ConfigError(
                    "actor_loss_fn takes no weights of tokens, and the options make such: leave out "
                    "--rollout_correction, --rollout_rejection and --high_entropy_token_ratio, or let it take a "
                    "normalizer and weights"
                )
            named["entropy_mask"] = weights.bool()
        share = sample_share(mask, normalizer)
        mean = _mean_of(fn, "actor_loss_fn", (log_probs, old_log_probs, advantages), mask, **named)
        tensors = (
            zero_where_masked(x.detach(), mask) for x in (log_probs, old_log_probs, advantages)
        )
        seen = losses.LossInputs(*tensors, action_mask=mask.bool()).metrics()
        seen.pop("clip_ratio")  # which only the loss knows
        metrics = {
            name: aggregate_loss(x, mask, "token-mean", normalizer) for name, x in seen.items()
        }
        stats = fn.get_last_stats() if hasattr(fn, "get_last_stats") and mask.any() else {}
        metrics |= {
            name: torch.as_tensor(value, device=mask.device) * share
            for name, value in stats.items()
        }
        return mean * share, metrics

    return loss


def value_loss_of(fn: Callable[..., Any]) -> Callable[..., tuple[Tensor, Metrics]]:
    """Return ``critic_loss_fn`` as the trainer calls it; see :func:`policy_loss_of`."""
    if _knows_the_step(fn):
        return fn

    def loss(
        values: Tensor,
        old_values: Tensor,
        returns: Tensor,
        mask: Tensor,
        normalizer: LossNormalizer,
    ) -> tuple[Tensor, Metrics]:
        mean = _mean_of(fn, "critic_loss_fn", (values, old_values, returns), mask)
        return mean * sample_share(mask, normalizer), {}

    return loss


class _PretrainLoss(GPTLMLoss):
    """A ``ptx_loss_fn`` in the seed's form, as the trainer calls it: its mean counts by the labelled tokens."""

    def __init__(self, fn: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.fn = fn

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        normalizer_tokens: float | None = None,
        dp_size: int = 1,
    ) -> Tensor:
        if normalizer_tokens is None:
            return self.fn(logits, labels)
        tokens = self.num_tokens(labels)
        if tokens:
            return self.fn(logits, labels) * (tokens * dp_size / normalizer_tokens)
        return logits.sum() * 0.0


def pretrain_loss_of(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``ptx_loss_fn`` as the trainer calls it."""
    if hasattr(fn, "num_tokens"):
        return fn
    return _PretrainLoss(fn)
