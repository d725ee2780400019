"""``--early_stop_imp_ratio``, ``--early_stop_kl``: optimizer steps that go too far are left out."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightppo.config import PPOConfig
from lightppo.ranks import Ranks
from lightppo.trainer.update import Metrics


def early_stop(config: PPOConfig, ranks: Ranks) -> StepLimits | None:
    """For ``lightppo.plugin.EARLY_STOPS``."""
    limits = {"ratio": config.loss.early_stop_imp_ratio, "approx_kl": config.loss.early_stop_kl}
    given = {name: limit for name, limit in limits.items() if limit is not None}
    return StepLimits(given, ranks) if given else None


class StepLimits:
    """Whether an optimizer step goes too far from the policy that sampled; the same on every rank."""

    def __init__(self, limits: Mapping[str, float], ranks: Ranks) -> None:
        self.limits, self.ranks = limits, ranks  # limits by the names of metrics in train/
        self.sums: Metrics = {}

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        for name in self.limits:
            self.sums[name] = self.sums.get(name, 0.0) + metrics[name].detach().float()

    def reached(self) -> bool:
        sums, self.sums = self.sums, {}
        values = self.ranks.all_reduce(
            torch.stack([sums[name] for name in self.limits]), "mean"
        ).tolist()
        return any(value > limit for value, limit in zip(values, self.limits.values()))
