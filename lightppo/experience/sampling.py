"""RolloutSampler: prompts → sampled and scored rollouts, n per prompt, groups whole and on one rank."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lightppo.data.records import Prompt, Rollout
from lightppo.rewards.source import RewardError, RewardSource, score_rollouts
from lightppo.rollout.engine import RolloutEngine, SamplingParams

logger = logging.getLogger(__name__)


@dataclass
class SampledBatch:
    """Scored rollouts of this rank, and the count of those that were left out, by reason."""

    rollouts: list[Rollout]
    left_out: dict[str, int] = field(default_factory=dict)


class RolloutSampler:
    """Samples responses and has them scored.

    Args:
        engine: generates.
        reward_source: scores.
        sampling: how to sample; ``n`` is the group size, ``seed`` the seed of the run.
        min_group_size: smallest group the advantage estimator can use.
    """

    def __init__(
        self, engine: RolloutEngine, reward_source: RewardSource, sampling: SamplingParams, min_group_size: int = 1
    ) -> None:
        self.engine = engine
        self.reward_source = reward_source
        self.sampling = sampling
        self.min_group_size = min_group_size

    def generate(self, prompts: Sequence[Prompt], step: int) -> list[Rollout]:
        """n responses to each prompt. The same seed and step give the same responses."""
        return self.engine.generate(list(prompts), replace(self.sampling, seed=seed_of_step(self.sampling.seed, step)))

    def score(self, rollouts: list[Rollout]) -> SampledBatch:
        """Score; samples that the source leaves unscored (``None``) leave their group and are counted.

        A group that thereby becomes too small for the estimator is left out as a whole, and counted too.

        Raises:
            RewardError: the source failed, or gave token scores.
        """
        score_rollouts(self.reward_source, rollouts)
        if any(r.token_rewards is not None for r in rollouts):
            raise RewardError(
                f"{self.reward_source.name} gave token scores; only one score per sample can be trained on"
            )
        scored = [r for r in rollouts if r.reward is not None]
        sizes = Counter(r.prompt.index for r in scored)
        kept = [r for r in scored if sizes[r.prompt.index] >= self.min_group_size]
        left_out = {"unscored": len(rollouts) - len(scored), "small_group": len(scored) - len(kept)}
        if len(kept) < len(rollouts):
            logger.warning(
                "%s left %d of %d samples unscored; %d more left out because too little of their group was scored",
                self.reward_source.name,
                left_out["unscored"],
                len(rollouts),
                left_out["small_group"],
            )
        return SampledBatch(kept, left_out)


def seed_of_step(seed: int, step: int) -> int:
    """A seed for each step of a run; steps of one run never share one."""
    return seed * 1_000_000_007 + step
