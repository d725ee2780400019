"""RolloutSampler: prompts → sampled and scored rollouts, n per prompt, groups whole and on one rank."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from lightppo.data.records import Prompt, Rollout
from lightppo.errors import RewardError
from lightppo.experience.filters import best_of_n, group_by_prompt
from lightppo.rewards.async_scoring import AsyncScorer
from lightppo.rewards.source import RewardSource, describe_sample, score_rollouts
from lightppo.rollout.engine import RolloutEngine, SamplingParams

FAILURE_COUNTS = ("failures", "timeouts")  # what reward sources count of their own tries

logger = logging.getLogger(__name__)


@dataclass
class SampledBatch:
    """Scored rollouts of this rank.

    Attributes:
        rollouts: those to train on.
        left_out: counts of the others, by reason; and of the reward source's failures and time-outs.
        prompt_scores: mean score of each prompt (by ``Prompt.index``) over all of its scored samples.
    """

    rollouts: list[Rollout]
    left_out: dict[str, float] = field(default_factory=dict)
    prompt_scores: dict[int, float] = field(default_factory=dict)


class RolloutSampler:
    """Samples responses and has them scored.

    Args:
        engine: generates.
        reward_source: scores.
        sampling: how to sample; ``n`` is what is sampled per prompt, ``seed`` the seed of the run.
        min_group_size: smallest group the advantage estimator can use.
        greedy_baseline: each prompt is also answered greedily, as ``Rollout.baseline`` of its samples (ReMax).
        dense: the source must give token scores, and only then may it.
        group_size: best of n: so many of the ``n`` samples of a prompt are kept, those with the highest scores.
            ``None``: all.
        tie: which of equal scores best of n keeps.
        check: looks at each scored batch of samples and may refuse it; called on every rank alike.
        scorer: scores what is finished while the engine generates the rest (``--async_rewards``); the engine must
            take ``on_finished``. ``None``: all are scored after generation.
        inspect: looks at each batch of samples before it is scored; called on every rank alike.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        reward_source: RewardSource,
        sampling: SamplingParams,
        min_group_size: int = 1,
        *,
        greedy_baseline: bool = False,
        dense: bool = False,
        group_size: int | None = None,
        tie: Literal["shorter", "longer"] = "shorter",
        check: Callable[[Sequence[Rollout]], None] = lambda rollouts: None,
        scorer: AsyncScorer | None = None,
        inspect: Callable[[Sequence[Rollout]], None] = lambda rollouts: None,
    ) -> None:
        self.engine = engine
        self.reward_source = reward_source
        self.sampling = sampling
        self.min_group_size = min_group_size
        self.greedy_baseline = greedy_baseline
        self.dense = dense
        self.group_size = sampling.n if group_size is None else group_size
        self.tie = tie
        self.check = check
        self.scorer = scorer
        self.inspect = inspect

    def generate(self, prompts: Sequence[Prompt], step: int) -> list[Rollout]:
        """n responses to each prompt. The same seed and step give the same responses."""
        sampling = replace(self.sampling, seed=seed_of_step(self.sampling.seed, step))
        early = {} if self.scorer is None else {"on_finished": self.scorer.submit}
        rollouts = self.engine.generate(list(prompts), sampling, **early)
        self.inspect(rollouts)
        if self.greedy_baseline:
            greedy = self.engine.generate(list(prompts), replace(sampling, n=1, temperature=0.0), **early)
            for i, rollout in enumerate(rollouts):
                rollout.baseline = greedy[i // sampling.n]
        return rollouts

    def score(self, rollouts: list[Rollout]) -> SampledBatch:
        """Score; samples that the source leaves unscored (``None``) leave their group and are counted.

        A group that thereby becomes too small for the estimator, or loses its greedy baseline, is left out as a whole,
        and counted too.

        Raises:
            RewardError: the source failed, or it gave token scores without ``dense``, or none with it; what ``check``
                raises.
        """
        baselines = {id(r.baseline): r.baseline for r in rollouts if r.baseline is not None}
        everything = [*rollouts, *baselines.values()]
        if self.scorer is None:
            score_rollouts(self.reward_source, everything)
        else:
            self.scorer.collect()
        self.check(rollouts)
        # Totals, not means over the samples that stay: those that failed for good are not among them.
        totals = {f"reward/{name}": sum(r.extras.pop(name, 0.0) for r in everything) for name in FAILURE_COUNTS}
        scored = [r for r in rollouts if r.reward is not None]
        self._check_token_scores(scored)
        groups = group_by_prompt(scored)
        best = scored
        if self.group_size < self.sampling.n:
            best = [r for group in groups for r in best_of_n(group, self.group_size, self.tie)]
        sizes = Counter(r.prompt.index for r in best)
        kept = [
            r
            for r in best
            if sizes[r.prompt.index] >= self.min_group_size and (r.baseline is None or r.baseline.reward is not None)
        ]
        left_out = {"unscored": len(rollouts) - len(scored), "small_group": len(best) - len(kept), **totals}
        if self.group_size < self.sampling.n:
            left_out["not_best"] = len(scored) - len(best)
        if left_out["unscored"] or left_out["small_group"]:
            logger.warning(
                "%s left %d of %d samples unscored; %d more left out because too little of their group was scored",
                self.reward_source.name,
                left_out["unscored"],
                len(rollouts),
                left_out["small_group"],
            )
        means = {group[0].prompt.index: sum(r.reward for r in group) / len(group) for group in groups}
        return SampledBatch(kept, left_out, means)

    def _check_token_scores(self, rollouts: Sequence[Rollout]) -> None:
        name = self.reward_source.name
        if not self.dense and any(r.token_rewards is not None for r in rollouts):
            raise RewardError(f"{name} gave token scores: set --use_dense_reward to train on them")
        if self.dense and any(r.token_rewards is None for r in rollouts):
            i = next(i for i, r in enumerate(rollouts) if r.token_rewards is None)
            raise RewardError(
                f"--use_dense_reward: {name} gave no token scores for {describe_sample(rollouts, i)}; a reward "
                "function returns them under the key 'token_scores'"
            )


def seed_of_step(seed: int, step: int) -> int:
    """A seed for each step of a run; steps of one run never share one."""
    return seed * 1_000_000_007 + step
