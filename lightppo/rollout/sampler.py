"""Prompts → sampled and scored groups of rollouts for a training step."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Protocol

from lightppo.data.records import Prompt, Rollout, group_by_prompt, seed_of_step
from lightppo.errors import NonFiniteRewardError, RewardError
from lightppo.ranks import Ranks
from lightppo.rewards.async_scorer import AsyncScorer
from lightppo.rewards.reward_source import RewardSource, describe_sample, score_rollouts
from lightppo.rollout.engine import RolloutEngine, SamplingParams, capabilities_of

logger = logging.getLogger(__name__)


# Reward sources count these themselves, once per sample.
FAILURE_COUNTS = ("reward/failures", "reward/timeouts")


@dataclass
class SampledBatch:
    """Scored rollouts of this rank."""

    rollouts: list[Rollout]  # to train on
    counts: dict[
        str, float
    ]  # of samples, named as in lightppo.metric_names.METRICS without rollout/
    scored: list[Rollout] = field(default_factory=list)  # those that have a score
    # Which score is not finite. Then all samples are here, and none has a score.
    not_finite: str | None = None


@dataclass
class RolloutSampler:
    """Samples responses and has them scored."""

    engine: RolloutEngine
    reward_source: RewardSource
    sampling: SamplingParams  # with n samples per prompt and the seed of the run
    min_group_size: int = 1  # smallest group that the advantage estimator can use
    _: KW_ONLY
    # also answer each prompt greedily, as Rollout.baseline of its samples (ReMax)
    greedy_baseline: bool = False
    dense: bool = False  # the source must give token scores; without it, it must not
    # scores finished samples while the engine, which must take on_finished, generates the rest
    scorer: AsyncScorer | None = None
    # each sees every scored batch, and may raise
    checks: Sequence[Callable[[Sequence[Rollout]], None]] = ()
    timer: Callable[[str], AbstractContextManager] = lambda phase: nullcontext()  # times "greedy"

    # names of SampledBatch.counts
    counted = (
        "unscored",
        "small_group",
        *FAILURE_COUNTS,
        "generated_samples",
        "generated_tokens",
    )

    def score_by(self, source: RewardSource) -> None:
        """Have the next samples scored by another source."""
        if self.scorer is not None:
            self.scorer = self.scorer.with_source(source)
        self.reward_source = source

    def generate(self, prompts: Sequence[Prompt], step: int) -> list[Rollout]:
        """Sample n responses to each prompt; the same seed and step give the same responses."""
        sampling = replace(self.sampling, seed=seed_of_step(self.sampling.seed, step))
        early = {} if self.scorer is None else {"on_finished": self.scorer.submit}
        rollouts = self.engine.generate(list(prompts), sampling, **early)
        if self.greedy_baseline:
            with self.timer("greedy"):
                greedy = self.engine.generate(
                    list(prompts), replace(sampling, n=1, temperature=0.0), **early
                )
            for i, rollout in enumerate(rollouts):
                rollout.baseline = greedy[i // sampling.n]
        return rollouts

    def score(self, rollouts: list[Rollout]) -> SampledBatch:
        """Score the rollouts; samples that the source leaves unscored (``None``) leave their group and are counted.

        A group that becomes too small for the estimator, or whose greedy baseline is unscored, is left out and counted.
        """
        baselines = [rollout.baseline for rollout in rollouts if rollout.baseline is not None]
        # All samples of a prompt share one baseline.
        everything = [*rollouts, *{id(baseline): baseline for baseline in baselines}.values()]
        counts = dict.fromkeys(self.counted, 0)
        counts["generated_samples"] = len(rollouts)
        counts["generated_tokens"] = sum(rollout.trained_length for rollout in rollouts)
        not_finite = None
        try:
            if self.scorer is None:
                score_rollouts(self.reward_source, everything)
            else:
                self.scorer.collect()
        except NonFiniteRewardError as error:
            # Other ranks wait, so nothing is raised here: the step is left out where all ranks meet.
            not_finite = str(error)
            for rollout in everything:
                rollout.reward = math.nan
        for check in self.checks:
            check(rollouts)
        if not_finite is not None:
            return SampledBatch(rollouts, counts, not_finite=not_finite)
        # Totals, not means over the samples that stay, which lack the samples that failed for good.
        for name in FAILURE_COUNTS:
            extra = name.removeprefix("reward/")
            counts[name] = sum(rollout.extras.pop(extra, 0.0) for rollout in everything)
        scored = [rollout for rollout in rollouts if rollout.reward is not None]
        self._check_token_scores(scored)
        chosen = self.choose(scored, counts)
        sizes = Counter(rollout.prompt.index for rollout in chosen)
        chosen_whole = [
            rollout
            for rollout in chosen
            if sizes[rollout.prompt.index] >= self.min_group_size
            and (rollout.baseline is None or rollout.baseline.reward is not None)
        ]
        unscored = len(rollouts) - len(scored)
        small_group = len(chosen) - len(chosen_whole)
        if unscored or small_group:
            text = "%s left %d of %d samples unscored; %d more left out because too little of their group was scored"
            logger.warning(text, self.reward_source.name, unscored, len(rollouts), small_group)
        counts |= {"unscored": unscored, "small_group": small_group}
        return SampledBatch(chosen_whole, counts, scored)

    def choose(self, scored: list[Rollout], counts: dict[str, float]) -> list[Rollout]:
        """Return the samples that may be trained on; a subclass that leaves some out adds to ``counts``."""
        return scored

    def _check_token_scores(self, rollouts: Sequence[Rollout]) -> None:
        name = self.reward_source.name
        given = [rollout.token_rewards is not None for rollout in rollouts]
        if not self.dense and any(given):
            raise RewardError(f"{name} gave token scores: set --use_dense_reward to train on them")
        if self.dense and not all(given):
            sample = describe_sample(rollouts, given.index(False))
            raise RewardError(f"--use_dense_reward: {name} gave no 'token_scores' for {sample}")


class AroundSampling(Protocol):
    """Gives the rollouts of a generation batch of training, those of ``sample()`` for example. Collective."""

    def __call__(
        self, prompts: Sequence[Prompt], step: int, batch: int, sample: Callable[[], list[Rollout]]
    ) -> list[Rollout]: ...


class PromptSource(Protocol):
    """Generation batches of one episode on this rank."""

    exhausted: bool  # no batch is left; the same on every rank

    def take(self) -> list[Prompt]: ...


@dataclass
class CollectedStep:
    """What a step trains on."""

    rollouts: list[Rollout]  # this rank's, in whole groups
    groups: int  # trained on by all ranks, repeated groups included
    # Counts over all ranks, by their names in lightppo.metric_names.METRICS without rollout/.
    counts: dict[str, float]
    scored: list[Rollout]  # all samples of this step and rank that have a score
    # positions in rollouts that are trained on again
    repeated: list[int] = field(default_factory=list)
    surplus: int = 0  # groups of all ranks that wait for the next step
    not_finite: str | None = None  # which score is not, of all ranks: nothing is trained on


@dataclass
class BatchCollector:
    """Train each step on one generation batch."""

    sampler: RolloutSampler
    strategy: Ranks
    _: KW_ONLY
    # Each stands around those before it.
    around: Sequence[AroundSampling] = ()
    # times "rollout" and "reward"
    timer: Callable[[str], AbstractContextManager] = lambda phase: nullcontext()
    why_untrained = "there was none"  # of a run in which no optimizer step was taken

    def collect(self, source: PromptSource, step: int) -> CollectedStep:
        """Collect the groups of one step. Collective.

        Raises:
            RewardError: there is nothing to train on.
        """
        collected = self.select(source, step)
        if capabilities_of(self.sampler.engine).keeps_weights:
            self.sampler.engine.sleep()  # until the next push of weights, or the next rollouts
        return collected

    def select(self, source: PromptSource, step: int) -> CollectedStep:
        """Do what :meth:`collect` does, while the engine is awake. Collective."""
        batch = self.sample(source.take(), step)
        failed = batch.not_finite is not None
        groups = 0 if failed else len(group_by_prompt(batch.rollouts))
        counts = self.strategy.all_reduce(
            batch.counts | {"groups": groups, "failed": failed}, "sum"
        )
        groups = counts.pop("groups")
        failures = counts.pop("failed")
        collected = CollectedStep(batch.rollouts, groups, counts, batch.scored)
        if failures:
            self.leave_out(collected, batch.not_finite)
        elif groups == 0:
            raise nothing_scored(step)
        return collected

    def sample(self, prompts: Sequence[Prompt], step: int, number: int = 0) -> SampledBatch:
        """Sample and score a generation batch of the step. Collective."""
        sample = partial(self.sampler.generate, prompts, step)
        for stand_around in self.around:
            sample = partial(stand_around, prompts, step, number, sample)
        with self.timer("rollout"):
            rollouts = sample()
        with self.timer("reward"):
            return self.sampler.score(rollouts)

    def leave_out(self, collected: CollectedStep, not_finite: str | None) -> None:
        """Train on nothing, as a score is not finite; on this rank it is ``not_finite``. Collective."""
        messages = self.strategy.all_gather_object(not_finite)
        collected.not_finite = "; ".join(
            f"rank {rank}: {text}" for rank, text in enumerate(messages) if text
        )
        collected.groups = 0


def nothing_scored(step: int) -> RewardError:
    return RewardError(
        f"step {step}: none of the samples was scored, so there is nothing to train on"
    )
