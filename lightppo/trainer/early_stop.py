"""Optimizer steps that go too far from the policy that sampled are not taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightppo.ranks import Ranks


class StepLimits:
    """Whether an optimizer step goes too far from the policy that sampled; the same on every rank."""

    def __init__(self, limits: Mapping[str, float], ranks: Ranks) -> None:
        self.limits = limits
        self.ranks = ranks
        self.sums: dict[str, Tensor] = {}

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """Take in a micro batch of the step."""
        for name in self.limits:
            self.sums[name] = self.sums.get(name, 0.0) + metrics[name].detach().float()

    def reached(self) -> bool:
        """Return whether the step exceeds a limit; the next one begins. Collective."""
        sums = self.sums
        self.sums = {}
        if not sums:  # a training step of the user's own
            return False
        values = self.ranks.all_reduce(
            torch.stack([sums[name] for name in self.limits]), "mean"
        ).tolist()
        return any(value > limit for value, limit in zip(values, self.limits.values()))


def early_stop(config: Any, ranks: Ranks) -> StepLimits | None:
    """Return the limits of ``--early_stop_imp_ratio`` and ``--early_stop_kl``, by name; ``None``: there is none."""
    limits = {"ratio": config.loss.early_stop_imp_ratio, "approx_kl": config.loss.early_stop_kl}
    given = {name: limit for name, limit in limits.items() if limit is not None}
    return StepLimits(given, ranks) if given else None
