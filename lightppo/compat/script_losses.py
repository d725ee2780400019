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


def _parameters(loss_function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(
            loss_function.forward if isinstance(loss_function, nn.Module) else loss_function
        ).parameters
    except (TypeError, ValueError):  # of built-in functions
        return {}


def _knows_the_step(loss_function: Callable[..., Any]) -> bool:
    """Tell whether a loss takes a ``normalizer``; if its signature does not tell, it does."""
    parameters = _parameters(loss_function)
    return (
        "normalizer" in parameters
        or not parameters
        or any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values())
    )


def _mean_of(
    loss_function: Callable[..., Any],
    name: str,
    tensors: Sequence[Tensor],
    mask: Tensor,
    **keyword_tensors: Any,
) -> Any:
    """Return a loss in the seed's form of the rows with a trained token; a 0 with a gradient if there are none."""
    trained_rows = mask.bool().any(dim=1)
    if not trained_rows.any():
        return zero_where_masked(tensors[0], mask).sum()
    if not trained_rows.all():
        tensors = [tensor[trained_rows] for tensor in tensors]
        mask = mask[trained_rows]
        keyword_tensors = {key: value[trained_rows] for key, value in keyword_tensors.items()}
    loss = loss_function(*tensors, action_mask=mask, **keyword_tensors)
    if not isinstance(loss, Tensor) or loss.dim() > 0:
        raise ConfigError(
            f"{name} returned {type(loss).__name__} instead of a scalar tensor: return the loss alone, or take a "
            "normalizer and return (loss, metrics)"
        )
    return loss


def policy_loss_of(loss_function: Callable[..., Any]) -> Callable[..., tuple[Tensor, Metrics]]:
    """Return ``actor_loss_fn`` as the trainer calls it; one in the seed's form counts by its share of the samples."""
    if _knows_the_step(loss_function):
        return loss_function
    takes_entropy_mask = "entropy_mask" in _parameters(loss_function)

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
        keyword_tensors = {}
        if weights is not None:
            if not takes_entropy_mask or not ((weights == 0) | (weights == 1)).all():
                raise ConfigError(
                    "actor_loss_fn takes no weights of tokens, and the options make such: leave out "
                    "--rollout_correction, --rollout_rejection and --high_entropy_token_ratio, or let it take a "
                    "normalizer and weights"
                )
            keyword_tensors["entropy_mask"] = weights.bool()
        step_share = sample_share(mask, normalizer)
        sample_mean = _mean_of(
            loss_function,
            "actor_loss_fn",
            (log_probs, old_log_probs, advantages),
            mask,
            **keyword_tensors,
        )
        tensors = (
            zero_where_masked(tensor.detach(), mask)
            for tensor in (log_probs, old_log_probs, advantages)
        )
        token_metrics = losses.LossInputs(*tensors, action_mask=mask.bool()).metrics()
        token_metrics.pop("clip_ratio")  # which only the loss knows
        metrics = {
            name: aggregate_loss(tensor, mask, "token-mean", normalizer)
            for name, tensor in token_metrics.items()
        }
        loss_stats = (
            loss_function.get_last_stats()
            if hasattr(loss_function, "get_last_stats") and mask.any()
            else {}
        )
        metrics |= {
            name: torch.as_tensor(value, device=mask.device) * step_share
            for name, value in loss_stats.items()
        }
        return sample_mean * step_share, metrics

    return loss


def value_loss_of(loss_function: Callable[..., Any]) -> Callable[..., tuple[Tensor, Metrics]]:
    """Return ``critic_loss_fn`` as the trainer calls it; see :func:`policy_loss_of`."""
    if _knows_the_step(loss_function):
        return loss_function

    def loss(
        values: Tensor,
        old_values: Tensor,
        returns: Tensor,
        mask: Tensor,
        normalizer: LossNormalizer,
    ) -> tuple[Tensor, Metrics]:
        sample_mean = _mean_of(loss_function, "critic_loss_fn", (values, old_values, returns), mask)
        return sample_mean * sample_share(mask, normalizer), {}

    return loss


class _PretrainLoss(GPTLMLoss):
    """A ``ptx_loss_fn`` in the seed's form, as the trainer calls it: its mean counts by the labelled tokens."""

    def __init__(self, loss_function: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.fn = loss_function

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


def pretrain_loss_of(loss_function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``ptx_loss_fn`` as the trainer calls it."""
    if hasattr(loss_function, "num_tokens"):
        return loss_function
    return _PretrainLoss(loss_function)
