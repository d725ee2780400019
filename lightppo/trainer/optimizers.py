"""The optimizer of a model that trains, and its learning rate over the run."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from lightppo.config.options import OptionSet
from lightppo.distributed.deepspeed import DeepspeedStrategy


def with_optimizer(
    model: Any,
    learning_rate: float,
    steps: int,
    config: OptionSet,
    strategy: DeepspeedStrategy,
) -> tuple[Any, Any, Any]:
    """Return (model, optimizer, scheduler) for ``strategy.prepare``; three times ``None`` without a model."""
    if model is None:
        return None, None, None
    training = config.training
    optimizer = strategy.create_optimizer(
        model,
        lr=learning_rate,
        betas=training.adam_betas,
        weight_decay=training.l2,
    )
    warmup = training.lr_warmup_steps
    if warmup is None:
        warmup = math.ceil(steps * training.lr_warmup_ratio)
    rate_share = partial(
        share_of_peak_rate,
        kind=training.lr_scheduler,
        steps=steps,
        warmup=warmup,
        least=training.min_lr_ratio,
    )
    return model, optimizer, LambdaLR(optimizer, rate_share)


def share_of_peak_rate(step: int, kind: str, steps: int, warmup: int, least: float) -> float:
    """Return the learning rate of an optimizer step, counted from 0, as a share of the highest one.

    The warm-up is ``(step + 1) / (warmup + 1)``, so that its first step trains too; behind it the rates are those of
    ``transformers.get_scheduler``, and behind the last step the last one's.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if kind == "constant":
        return 1.0
    if kind == "linear":
        return max(0, steps - step) / max(1, steps - warmup)
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    cosine = 0.5 * (1 + math.cos(math.pi * done))
    if kind == "cosine":
        return cosine
    return cosine * (1 - least) + least
