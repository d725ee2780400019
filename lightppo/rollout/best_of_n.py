"""``--generation_size``: more samples are generated than trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightppo.data.records import Rollout, group_by_prompt
from lightppo.rollout.sampler import RolloutSampler


def best_of_n(
    group: Sequence[Rollout], n: int, tie: Literal["shorter", "longer"] = "shorter"
) -> list[Rollout]:
    """The ``n`` samples with the highest scores, in sampling order; ``tie`` decides between equal scores by length."""
    sign = 1 if tie == "shorter" else -1
    ranked = sorted(
        range(len(group)), key=lambda i: (-group[i].reward, sign * group[i].trained_length, i)
    )
    return [group[i] for i in sorted(ranked[:n])]


@dataclass(kw_only=True)
class BestOfN(RolloutSampler):
    """Keeps the best of the samples of each prompt."""

    group_size: int  # so many are kept
    tie: Literal["shorter", "longer"] = "shorter"  # see best_of_n

    counted = (*RolloutSampler.counted, "not_best")

    def choose(self, scored: list[Rollout], counts: dict[str, float]) -> list[Rollout]:
        best = [
            rollout
            for group in group_by_prompt(scored)
            for rollout in best_of_n(group, self.group_size, self.tie)
        ]
        counts["not_best"] = len(scored) - len(best)
        return best
