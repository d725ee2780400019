"""Prompts → sampled and scored groups of rollouts for a training step."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import accumulate, zip_longest
from typing import Any, Literal, Protocol, TypeVar, cast

from torch import Tensor

from lightppo.config import PPOConfig
from lightppo.data.records import (
    Prompt,
    Rollout,
    from_plain,
    group_by_prompt,
    seed_of_step,
    to_plain,
)
from lightppo.distributed.sequence_parallel import SequenceGroup
from lightppo.errors import NonFiniteRewardError, RewardError
from lightppo.ranks import Ranks
from lightppo.rewards.reward_source import (
    AsyncScorer,
    RewardSource,
    WholeGroups,
    describe_sample,
    score_rollouts,
)
from lightppo.rollout.engine import RolloutEngine, SamplingParams, capabilities_of

logger = logging.getLogger(__name__)
T = TypeVar("T")


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
    version: int = 0  # of the weights that sampled it: PPO steps that they had been trained for
    batches: int = 1  # generation batches that it is made of


@dataclass
class RolloutSampler:
    """Sample responses and have them scored."""

    engine: RolloutEngine
    reward_source: RewardSource
    sampling: SamplingParams  # with n samples per prompt and the seed of the run
    min_group_size: int = 1  # smallest group that the advantage estimator can use
    _: KW_ONLY
    # also answer each prompt greedily, as Rollout.baseline of its samples (ReMax)
    greedy_baseline: bool = False
    dense: bool = False  # the source must give token scores; without it, it must not
    # scores the answers to a prompt while the engine, which must take on_finished, generates the rest
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
        prompts = list(prompts)
        sampling = replace(self.sampling, seed=seed_of_step(self.sampling.seed, step))
        options, greedy_options = self._engine_options(prompts)
        rollouts = self.engine.generate(prompts, sampling, **options)
        if self.greedy_baseline:
            with self.timer("greedy"):
                greedy = self.engine.generate(prompts, greedily(sampling), **greedy_options)
            give_baselines(rollouts, greedy, sampling.n)
        return rollouts

    def start(self, prompts: Sequence[Prompt], step: int) -> list[Any]:
        """Begin what :meth:`generate` does, with an engine that samples ahead; return its tickets."""
        prompts = list(prompts)
        sampling = replace(self.sampling, seed=seed_of_step(self.sampling.seed, step))
        options, greedy_options = self._engine_options(prompts)
        tickets = [self.engine.start(prompts, sampling, **options)]
        if self.greedy_baseline:
            tickets.append(self.engine.start(prompts, greedily(sampling), **greedy_options))
        return tickets

    def finish(self, tickets: Sequence[Any]) -> list[Rollout]:
        """Wait for what :meth:`start` began, and return what :meth:`generate` would. Collective."""
        rollouts, *greedy = [self.engine.finish(ticket) for ticket in tickets]
        for greedy_rollouts in greedy:
            give_baselines(rollouts, greedy_rollouts, self.sampling.n)
        return rollouts

    def _engine_options(self, prompts: list[Prompt]) -> list[dict[str, Any]]:
        """Return what the engine's call for the samples, and that for the greedy answers, are given beside sampling."""
        if self.scorer is None:
            return [{}, {}]
        if self.scorer.per_sample:
            return [{"on_finished": self.scorer.submit}] * 2
        # As without a scorer, what compares the answers to a prompt sees the greedy one behind the samples.
        answers = self.sampling.n + self.greedy_baseline
        groups = WholeGroups(prompts, answers, self.scorer.submit)
        return [{"on_finished": partial(groups.add, call)} for call in range(2)]

    def score(self, rollouts: list[Rollout]) -> SampledBatch:
        """Score the rollouts; samples that the source leaves unscored (``None``) leave their group and are counted.

        A group that becomes too small for the estimator, or whose greedy baseline is unscored, is left out and counted.
        """
        baselines = [rollout.baseline for rollout in rollouts if rollout.baseline is not None]
        # All samples of a prompt share one baseline.
        scored_rollouts = [*rollouts, *{id(baseline): baseline for baseline in baselines}.values()]
        counts = dict.fromkeys(self.counted, 0)
        counts["generated_samples"] = len(rollouts)
        counts["generated_tokens"] = sum(rollout.trained_length for rollout in rollouts)
        not_finite = None
        try:
            if self.scorer is None:
                score_rollouts(self.reward_source, scored_rollouts)
            else:
                self.scorer.collect()
        except NonFiniteRewardError as error:
            # Other ranks wait, so nothing is raised here: the step is left out where all ranks meet.
            not_finite = str(error)
            for rollout in scored_rollouts:
                rollout.reward = math.nan
        for check in self.checks:
            check(rollouts)
        if not_finite is not None:
            return SampledBatch(rollouts, counts, not_finite=not_finite)
        # Totals, not means over the samples that stay, which lack the samples that failed for good.
        for count_name in FAILURE_COUNTS:
            extra_name = count_name.removeprefix("reward/")
            counts[count_name] = sum(
                rollout.extras.pop(extra_name, 0.0) for rollout in scored_rollouts
            )
        rollouts_with_score = [rollout for rollout in rollouts if rollout.reward is not None]
        if any((rollout.token_rewards is None) == self.dense for rollout in rollouts_with_score):
            raise self._token_score_error(rollouts_with_score)
        chosen_rollouts = self.choose(rollouts_with_score, counts)
        group_sizes = Counter(rollout.prompt.index for rollout in chosen_rollouts)
        trainable = [
            rollout
            for rollout in chosen_rollouts
            if group_sizes[rollout.prompt.index] >= self.min_group_size
            and (rollout.baseline is None or rollout.baseline.reward is not None)
        ]
        unscored = len(rollouts) - len(rollouts_with_score)
        small_group = len(chosen_rollouts) - len(trainable)
        if unscored or small_group:
            message = "%s left %d of %d samples unscored; %d more left out because too little of their group was scored"
            logger.warning(message, self.reward_source.name, unscored, len(rollouts), small_group)
        counts |= {"unscored": unscored, "small_group": small_group}
        return SampledBatch(trainable, counts, rollouts_with_score)

    def choose(self, scored: list[Rollout], counts: dict[str, float]) -> list[Rollout]:
        """Return the samples that may be trained on; a subclass that leaves some out adds to ``counts``."""
        return scored

    def _token_score_error(self, rollouts: Sequence[Rollout]) -> RewardError:
        source_name = self.reward_source.name
        if not self.dense:
            return RewardError(
                f"{source_name} gave token scores: set --use_dense_reward to train on them"
            )
        has_token_scores = [rollout.token_rewards is not None for rollout in rollouts]
        sample = describe_sample(rollouts, has_token_scores.index(False))
        return RewardError(f"--use_dense_reward: {source_name} gave no 'token_scores' for {sample}")


def greedily(sampling: SamplingParams) -> SamplingParams:
    """Return how the greedy baseline of each prompt is sampled."""
    return replace(sampling, n=1, temperature=0.0)


def give_baselines(
    rollouts: Sequence[Rollout], greedy_rollouts: Sequence[Rollout], group_size: int
) -> None:
    """Give each sample the greedy answer to its prompt; each prompt has ``group_size`` samples."""
    for i, rollout in enumerate(rollouts):
        rollout.baseline = greedy_rollouts[i // group_size]


class AroundSampling(Protocol):
    """Give the rollouts of a generation batch of training, those of ``sample()`` for example. Collective."""

    def __call__(
        self, prompts: Sequence[Prompt], step: int, batch: int, sample: Callable[[], list[Rollout]]
    ) -> list[Rollout]: ...


class PromptSource(Protocol):
    """Generation batches of one episode on this rank."""

    exhausted: bool  # no batch is left; the same on every rank

    def take(self) -> list[Prompt]: ...


@dataclass
class CollectedStep:
    """Hold what a step trains on."""

    rollouts: list[Rollout]  # this rank's, in whole groups
    groups: int  # trained on by all ranks, repeated groups included
    # Counts over all ranks, by their names in lightppo.metric_names.METRICS without rollout/.
    counts: dict[str, float]
    scored: list[Rollout]  # all samples of this step and rank that have a score
    # positions in rollouts that are trained on again
    repeated: list[int] = field(default_factory=list)
    surplus: int = 0  # groups of all ranks that wait for the next step
    not_finite: str | None = None  # which score is not, of all ranks: nothing is trained on


def joined(
    collected: CollectedStep, group: SequenceGroup
) -> tuple[CollectedStep, Callable[[Sequence[T]], list[T]]]:
    """Return the step with the rollouts of all ranks of a sequence group, in their order, which train on them together.

    With it comes what picks this rank's own out of the rows that are trained on. Collective in the group.
    """
    parts = group.gather_object((collected.rollouts, collected.repeated))
    rollouts = [rollout for part, _ in parts for rollout in part]
    starts = [0, *accumulate(len(part) for part, _ in parts)]
    repeats = [
        (rank, start + position)
        for rank, (start, (_, positions)) in enumerate(zip(starts, parts))
        for position in positions
    ]
    is_own = [rank == group.rank for rank, (part, _) in enumerate(parts) for _ in part]
    is_own += [rank == group.rank for rank, _ in repeats]

    def own(rows: Sequence[T]) -> list[T]:
        # From the end, because a full buffer drops its first rows.
        return [row for row, mine in zip(rows[::-1], is_own[::-1]) if mine][::-1]

    repeated = [position for _, position in repeats]
    return replace(collected, rollouts=rollouts, repeated=repeated), own


@dataclass
class PendingBatch:
    """Generation batches that are sampled while a step trains."""

    tickets: list[Any]  # of the engine
    version: int  # of the weights that sample
    batches: int


@dataclass
class BatchCollector:
    """Train each step on one generation batch.

    With ``max_staleness`` 1 it is sampled while the step before trains: :meth:`start` and :meth:`finish` stand around
    that training. The weights do not change in between, so nothing depends on how long anything takes. At the start of
    a run, and where nothing may be sampled ahead, the step samples it itself.
    """

    sampler: RolloutSampler
    strategy: Ranks
    _: KW_ONLY
    # Each stands around those before it.
    around: Sequence[AroundSampling] = ()
    # times "rollout" and "reward"
    timer: Callable[[str], AbstractContextManager] = lambda phase: nullcontext()
    max_staleness: int = 0  # PPO steps between the weights that sample and those that are trained
    # Tells whether a step waits for the rollouts of the next one before it trains: ``around`` compares them with the actor.
    must_wait: Callable[[], bool] = lambda: False
    pending: PendingBatch | None = None
    ahead: SampledBatch | None = None  # this rank's part of what the next step trains on
    why_untrained = "there was none"  # of a run in which no optimizer step was taken

    def collect(self, source: PromptSource, step: int) -> CollectedStep:
        """Collect the groups of one step. Collective.

        Raises:
            RewardError: there is nothing to train on.
        """
        collected = self.select(source, step)
        if self.max_staleness == 0 and capabilities_of(self.sampler.engine).keeps_weights:
            self.sampler.engine.sleep()  # until the next push of weights, or the next rollouts
        return collected

    def select(self, source: PromptSource, step: int) -> CollectedStep:
        """Do what :meth:`collect` does, while the engine is awake. Collective."""
        batch = self.ahead or self.sample(source.take(), step)
        self.ahead = None
        is_not_finite = batch.not_finite is not None
        groups = 0 if is_not_finite else len(group_by_prompt(batch.rollouts))
        counts = self.strategy.all_reduce(
            batch.counts | {"groups": groups, "failed": is_not_finite}, "sum"
        )
        groups = counts.pop("groups")
        failures = counts.pop("failed")
        rollouts = batch.rollouts
        if self.max_staleness > 0:
            staleness = step - 1 - batch.version
            rollouts = as_stale(rollouts) if staleness else rollouts
            counts |= {"stale_groups": groups * (staleness > 0), "staleness": staleness}
        collected = CollectedStep(rollouts, groups, counts, batch.scored)
        if failures:
            self.leave_out(collected, batch.not_finite)
        elif groups == 0:
            raise nothing_scored(step)
        return collected

    def sample(self, prompts: Sequence[Prompt], step: int, number: int = 0) -> SampledBatch:
        """Sample and score a generation batch of the step. Collective."""
        sample = partial(self.sampler.generate, prompts, step)
        with self.timer("rollout"):
            rollouts = self._stand_around(prompts, step, number, sample)
        return self._scored(rollouts, version=step - 1)

    def _stand_around(
        self,
        prompts: Sequence[Prompt],
        step: int,
        number: int,
        sample: Callable[[], list[Rollout]],
    ) -> list[Rollout]:
        for stand_around in self.around:
            sample = partial(stand_around, prompts, step, number, sample)
        return sample()

    def _scored(self, rollouts: list[Rollout], version: int, batches: int = 1) -> SampledBatch:
        for rollout in rollouts:
            rollout.versions = [(version, 0, len(rollout.response_ids))]
        with self.timer("reward"):
            batch = self.sampler.score(rollouts)
        return replace(batch, version=version, batches=batches)

    # -- ahead of the step -------------------------------------------------------------------------------------------

    def start(self, source: PromptSource, step: int, surplus: int) -> None:
        """Begin to sample for the next step, while ``step`` trains. Collective.

        ``surplus``: groups of all ranks that already wait for the next step.
        """
        prompts: list[Prompt] = []
        batches = 0
        while batches < self.batches_ahead(surplus) and not source.exhausted:
            prompts += source.take()
            batches += 1
        if batches:
            tickets = self.sampler.start(prompts, step + 1)
            self.pending = PendingBatch(tickets, step - 1, batches)
            if self.must_wait():
                wait = partial(self.sampler.finish, tickets)
                self._end_pending(partial(self._stand_around, prompts, step + 1, 0, wait))

    def batches_ahead(self, surplus: int) -> int:
        """Return how many generation batches may be sampled ahead and still be trained in the next step."""
        return 1

    def finish(self) -> None:
        """Wait for what :meth:`start` began, and score it. Collective."""
        if self.pending is not None:
            self._end_pending(partial(self.sampler.finish, self.pending.tickets))

    def _end_pending(self, wait: Callable[[], list[Rollout]]) -> None:
        pending = cast(PendingBatch, self.pending)
        with self.timer("rollout"):
            rollouts = wait()
        self.ahead = self._scored(rollouts, pending.version, pending.batches)
        self.pending = None

    def leave_out(self, collected: CollectedStep, not_finite: str | None) -> None:
        """Train on nothing, as a score is not finite; on this rank it is ``not_finite``. Collective."""
        messages = self.strategy.all_gather_object(not_finite)
        collected.not_finite = "; ".join(
            f"rank {rank}: {message}" for rank, message in enumerate(messages) if message
        )
        collected.groups = 0


def as_stale(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Return samples marked as those of an older policy than the step's."""
    return [replace(rollout, stale=True) for rollout in rollouts]


class SamplesAhead:
    """The state of a collector's samples for the next step, for checkpoints; each rank has its own."""

    def __init__(self, collector: BatchCollector) -> None:
        self.collector = collector

    def state_dict(self) -> dict[str, Any] | None:
        """Return this rank's, as plain values; the samples that have no score are in the counts alone."""
        batch = self.collector.ahead
        if batch is None:
            return None
        samples = batch.scored if batch.not_finite is None else batch.rollouts
        trained = {id(rollout) for rollout in batch.rollouts}
        return {
            "version": batch.version,
            "batches": batch.batches,
            "counts": batch.counts,
            "not_finite": batch.not_finite,
            "groups": [
                {"trained": [id(rollout) in trained for rollout in group], **to_plain(group)}
                for group in group_by_prompt(samples)
            ],
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore ``state_dict``."""
        if state is None:
            self.collector.ahead = None
            return
        samples = []
        trained = []
        for values in state["groups"]:
            group = from_plain(values)
            samples += group
            trained += [
                rollout for rollout, is_trained in zip(group, values["trained"]) if is_trained
            ]
        scored = samples if state["not_finite"] is None else []
        numbers = {name: state[name] for name in ("counts", "not_finite", "version", "batches")}
        self.collector.ahead = SampledBatch(trained, scored=scored, **numbers)

    def share_out(
        self, states: Sequence[dict[str, Any] | None], world_size: int
    ) -> list[dict[str, Any] | None]:
        """Return the states of so many ranks, made of those of another number: groups in the order of the data."""
        if states[0] is None:
            return [None] * world_size
        in_order = [
            group
            for row in zip_longest(*(state["groups"] for state in states))
            for group in row
            if group is not None
        ]
        messages = [state["not_finite"] for state in states if state["not_finite"] is not None]
        totals = sum((Counter(state["counts"]) for state in states), Counter())
        counts = {name: totals[name] for name in states[0]["counts"]}
        return [
            states[0]
            | {
                "groups": in_order[rank::world_size],
                "counts": counts if rank == 0 else dict.fromkeys(counts, 0),
                "not_finite": "; ".join(messages) or None,
            }
            for rank in range(world_size)
        ]


def nothing_scored(step: int) -> RewardError:
    return RewardError(
        f"step {step}: none of the samples was scored, so there is nothing to train on"
    )


# Any other name is one of the numbers that the reward source gives beside the score.
FILTER_METRICS: dict[str, Callable[[Rollout], float | None]] = {
    "score": lambda rollout: rollout.reward,
    "acc": lambda rollout: rollout.extras.get("acc", rollout.extras.get("accuracy")),
    "seq_reward": lambda rollout: (
        rollout.reward if rollout.token_rewards is None else sum(rollout.token_rewards)
    ),
}

EQUAL, LOW, HIGH, UNMEASURED = REASONS = (
    "rejected_equal",
    "rejected_low",
    "rejected_high",
    "rejected_unmeasured",
)


@dataclass
class GroupFilter:
    """Keep groups that can teach something: their samples differ in the metric, or their mean lies within ``limits``.

    ``limits`` themselves are excluded. Source: DAPO, arXiv:2503.14476, equation 11: 0 < number correct < group size.
    """

    # score, acc (accuracy), seq_reward (sum of token scores, if any), seq_final_reward (after shaping, before KL), or a
    # name in Rollout.extras
    metric: str = "score"
    limits: tuple[float, float] | None = None
    # (rollouts) → shaped scores (B,), for seq_final_reward.
    final_scores: Callable[[Sequence[Rollout]], Tensor] | None = None

    def __call__(self, group: Sequence[Rollout]) -> str | None:
        """Return why the scored samples of a prompt, at least one, are not trained on; ``None``: they are."""
        if self.metric == "seq_final_reward":
            values = self.final_scores(group).tolist()
        else:
            number_of = FILTER_METRICS.get(
                self.metric, lambda rollout: rollout.extras.get(self.metric)
            )
            values = [number_of(rollout) for rollout in group]
        if any(value is None for value in values):
            return UNMEASURED
        if self.limits is None:
            # Not by the standard deviation: for equal values, rounding may put it above 0.
            return EQUAL if min(values) == max(values) else None
        lower_limit, upper_limit = self.limits
        mean_value = sum(values) / len(values)
        if mean_value <= lower_limit:
            return LOW
        if mean_value >= upper_limit:
            return HIGH
        return None


@dataclass
class StepCounts:
    """Count what happened to the samples of this step on this rank."""

    batches: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    scored: list[Rollout] = field(default_factory=list)
    names: set[str] = field(default_factory=set)  # of the reward source's metrics
    not_finite: str | None = None  # which score is not
    lost: list[Rollout] = field(default_factory=list)  # sampled with it


@dataclass
class GroupCollector(BatchCollector):
    """Sample until a step has its groups.

    Accepted groups that a step does not need are the surplus, which the next step trains on first; save it with
    :meth:`state_dict`. An episode ends when its prompts and its surplus are used up; its last step may be short or even
    empty.

    Source: dynamic sampling of DAPO, arXiv:2503.14476, section 3.2.
    """

    _: KW_ONLY
    groups_per_step: int  # prompts to train on per step, over all ranks
    groups_per_batch: int = 0  # prompts of a generation batch, over all ranks; 0: groups_per_step
    group_filter: GroupFilter | None = None  # None: accept every scored group
    max_batches: int = 1  # most generation batches per step; 0: no limit
    # If these give too few groups: train on those that there are, stop, or train on some of them twice.
    on_exhausted: Literal["train_short", "raise", "reuse"] = "train_short"
    # (step that sampled it, samples of one prompt): accepted groups of this rank that wait for training
    surplus: list[tuple[int, list[Rollout]]] = field(default_factory=list)
    why_untrained = "every group was rejected: widen --filter_range, or take other prompts"

    def select(self, source: PromptSource, step: int) -> CollectedStep:
        """See :meth:`collect`; RewardError also where no sample has the filter's metric, or on ``"raise"``."""
        step_counts = StepCounts()
        while True:
            if self.ahead is not None:
                self._generate(source, step, step_counts)
            available, due, exhausted, judged_groups, not_finite = self._agree(
                source, step_counts, step
            )
            available_groups = sum(available)
            if not_finite:
                return self._finish(step, step_counts, 0, [], available_groups)
            limit_reached = self.max_batches > 0 and step_counts.batches >= self.max_batches
            if available_groups >= self.groups_per_step or exhausted or limit_reached:
                break
            self._generate(source, step, step_counts)
        missing_groups = self.groups_per_step - available_groups
        repeats = [0] * len(available)  # of each rank
        # on_exhausted does not apply at the end of an episode, nor without a filter.
        if missing_groups > 0 and not exhausted and self.group_filter is not None:
            message = (
                f"step {step}: {available_groups} of {self.groups_per_step} groups accepted after {step_counts.batches} "
                f"generation batches (--max_num_gen_batches); {judged_groups} were sampled"
            )
            if self.on_exhausted == "raise":
                raise RewardError(
                    f"{message}: raise the limit, widen --filter_range or choose another --on_exhausted"
                )
            message += f"; --on_exhausted {self.on_exhausted}"
            if self.on_exhausted == "reuse" and available_groups == 0:
                message += " finds none to train on again: this step trains on nothing"
            self.strategy.print(message)
            if self.on_exhausted == "reuse":
                room = [missing_groups * (groups > 0) for groups in available]
                repeats = deal(missing_groups, available, room)
        rank = self.strategy.get_rank()
        shares = self._shares(available, due)
        repeated_groups = [i % shares[rank] for i in range(repeats[rank])]
        return self._finish(
            step, step_counts, shares[rank], repeated_groups, available_groups - sum(shares)
        )

    def _shares(self, available: Sequence[int], due: Sequence[int]) -> list[int]:
        """Return how many groups each rank trains on: first those that are ``due``, of which one rank may hold more."""
        shares = deal(self.groups_per_step, [0] * len(available), room=due)
        room = [groups - share for groups, share in zip(available, shares)]
        further = deal(self.groups_per_step - sum(shares), shares, room)
        return [share + more for share, more in zip(shares, further)]

    def batches_ahead(self, surplus: int) -> int:
        room = self.max_staleness * self.groups_per_step - surplus
        possible = max(0, room) // (self.groups_per_batch or self.groups_per_step)
        return min(possible, self.max_batches) if self.max_batches > 0 else possible

    def _generate(self, source: PromptSource, step: int, step_counts: StepCounts) -> None:
        """Take one generation batch: samples, scores, accepts or rejects."""
        batch = self.ahead or self.sample(source.take(), step, step_counts.batches)
        self.ahead = None
        step_counts.batches += batch.batches
        step_counts.counts.update(batch.counts)
        step_counts.scored += batch.scored
        step_counts.names |= {
            metric_name for rollout in batch.rollouts for metric_name in rollout.extras
        }
        if batch.not_finite is not None:
            step_counts.not_finite = batch.not_finite
            step_counts.lost = batch.rollouts
            step_counts.counts["not_finite"] += 1
            return
        for group in group_by_prompt(batch.rollouts):
            step_counts.counts["judged"] += 1
            reason = self.group_filter and self.group_filter(group)
            if reason is None:
                self.surplus.append((batch.version + 1, group))
            else:
                step_counts.counts[reason] += 1

    def _agree(
        self, source: PromptSource, step_counts: StepCounts, step: int
    ) -> tuple[list[int], list[int], bool, int, int]:
        """Agree on what every decision of a step rests on. Collective.

        Returns:
            accepted groups of each rank; those of them that would be too old in the next step; whether the episode has
            no more prompts; groups of this step that were judged; generation batches with a score that is not finite.
        """
        due = sum(sampled_step < step for sampled_step, _ in self.surplus)
        rank_state = (
            len(self.surplus),
            due if self.max_staleness > 0 else 0,
            source.exhausted,
            set(step_counts.names),
            Counter(step_counts.counts),
        )
        available, due_of_ranks, exhausted, names_of_ranks, counts_of_ranks = zip(
            *self.strategy.all_gather_object(rank_state)
        )
        total_counts = sum(counts_of_ranks, Counter())
        if (
            total_counts["generated_samples"]
            and total_counts["generated_samples"] == total_counts["unscored"]
        ):
            raise nothing_scored(step)
        if total_counts["judged"] and total_counts["judged"] == total_counts[UNMEASURED]:
            raise RewardError(
                f"--filter_metric {self.group_filter.metric}: no sample of step {step} has it; the reward source gives "
                f"{', '.join(['score', *sorted(set().union(*names_of_ranks))])}"
            )
        return (
            list(available),
            list(due_of_ranks),
            any(exhausted),
            total_counts["judged"],
            total_counts["not_finite"],
        )

    def _finish(
        self,
        step: int,
        step_counts: StepCounts,
        share: int,
        repeated_groups: list[int],
        surplus: int,
    ) -> CollectedStep:
        """Take this rank's share out of the surplus, oldest first, and totals the counts. Collective."""
        chosen_groups = self.surplus[:share]
        self.surplus = self.surplus[share:]
        rollouts = []
        group_positions = []
        for sampled_step, group in chosen_groups:
            group_positions.append(range(len(rollouts), len(rollouts) + len(group)))
            rollouts += as_stale(group) if sampled_step < step else group
        count_names = [*self.sampler.counted, "judged", "not_finite", *REASONS]
        selection = {
            "trained_groups": len(chosen_groups) + len(repeated_groups),
            "reused_groups": len(repeated_groups),
            "stale_groups": sum(sampled_step < step for sampled_step, _ in chosen_groups),
            "staleness": sum(step - sampled_step for sampled_step, _ in chosen_groups),
        }
        counts = self.strategy.all_reduce(
            {name: step_counts.counts[name] for name in count_names} | selection, "sum"
        )
        trained_groups = counts["trained_groups"]
        judged_groups = counts.pop("judged")
        not_finite = counts.pop("not_finite")
        rejected = {name: counts.pop(name) for name in REASONS}
        counts["staleness"] /= max(1, trained_groups - counts["reused_groups"])
        counts |= {"num_gen_batches": step_counts.batches, "surplus_groups": surplus}
        if self.group_filter is not None:
            counts |= rejected
            counts["kept_share"] = (
                1 - sum(rejected.values()) / judged_groups if judged_groups else float("nan")
            )
        collected = CollectedStep(
            rollouts, trained_groups, counts, step_counts.scored, surplus=surplus
        )
        if not_finite:
            collected.rollouts = rollouts + step_counts.lost
            self.leave_out(collected, step_counts.not_finite)
        elif trained_groups == 0 and self.group_filter is None:
            raise nothing_scored(step)
        collected.repeated = [
            position for group in repeated_groups for position in group_positions[group]
        ]
        return collected

    def state_dict(self) -> list[dict[str, Any]]:
        """Return this rank's surplus, as plain values."""
        return [{"step": step, **to_plain(group)} for step, group in self.surplus]

    def load_state_dict(self, state: Sequence[dict[str, Any]]) -> None:
        """Restore ``state_dict``."""
        self.surplus = [(values["step"], from_plain(values)) for values in state]

    def share_out(
        self, states: Sequence[Sequence[dict[str, Any]]], world_size: int
    ) -> list[list[dict[str, Any]]]:
        """Return the states of so many ranks, made of those of another number."""
        return dealt_out(states, world_size)


def dealt_out(
    surplus: Sequence[Sequence[dict[str, Any]]], ranks: int
) -> list[list[dict[str, Any]]]:
    """Return each rank's ``GroupCollector.state_dict`` for another number of ranks: the oldest groups first, in turn."""
    if len(surplus) == ranks:
        return [list(groups) for groups in surplus]
    oldest_first = sorted(
        (group for groups in surplus for group in groups), key=lambda group: group["step"]
    )
    return [oldest_first[rank::ranks] for rank in range(ranks)]


def deal(group_count: int, held_groups: Sequence[int], room: Sequence[int]) -> list[int]:
    """Return how many of ``group_count`` groups each rank gets, one by one to the one that holds fewest and has room."""
    dealt_groups = [0] * len(held_groups)
    heapify(
        ranks := [(held_groups[rank], rank) for rank in range(len(held_groups)) if room[rank] > 0]
    )
    for _ in range(min(group_count, sum(room))):
        group_total, rank = heappop(ranks)
        dealt_groups[rank] += 1
        if dealt_groups[rank] < room[rank]:
            heappush(ranks, (group_total + 1, rank))
    return dealt_groups


def best_of_n(
    group: Sequence[Rollout], best_count: int, tie_rule: Literal["shorter", "longer"] = "shorter"
) -> list[Rollout]:
    """Return the ``best_count`` samples with the highest scores, in their order; ``tie_rule`` decides between equal ones."""
    sign = 1 if tie_rule == "shorter" else -1
    ranked = sorted(
        range(len(group)), key=lambda i: (-group[i].reward, sign * group[i].trained_length, i)
    )
    return [group[i] for i in sorted(ranked[:best_count])]


@dataclass(kw_only=True)
class BestOfN(RolloutSampler):
    """Keep the best of the samples of each prompt."""

    group_size: int  # so many are kept
    tie: Literal["shorter", "longer"] = "shorter"  # see best_of_n

    counted = (*RolloutSampler.counted, "not_best")

    def choose(self, scored: list[Rollout], counts: dict[str, float]) -> list[Rollout]:
        best_rollouts = [
            rollout
            for group in group_by_prompt(scored)
            for rollout in best_of_n(group, self.group_size, self.tie)
        ]
        counts["not_best"] = len(scored) - len(best_rollouts)
        return best_rollouts


def with_selection(
    collector: BatchCollector,
    config: PPOConfig,
    final_scores: Callable[[Sequence[Rollout]], Tensor],
) -> BatchCollector:
    """Return the collector itself, or another one where the options select samples or groups.

    ``final_scores`` shapes the scores of rollouts: (B,).
    """
    sampling = config.sampling
    rollout = config.rollout
    if sampling.generation_size > rollout.n_samples_per_prompt:
        collector.sampler = BestOfN(
            **vars(collector.sampler)
            | {"sampling": replace(collector.sampler.sampling, n=sampling.generation_size)},
            group_size=rollout.n_samples_per_prompt,
            tie=sampling.best_of_n_tie,
        )
    per_step = rollout.rollout_batch_size
    group_filter = None
    max_batches = 1
    if sampling.dynamic_sampling:
        group_filter = GroupFilter(sampling.filter_metric, sampling.filter_range, final_scores)
        max_batches = sampling.max_num_gen_batches
    elif sampling.gen_batch_size <= per_step:
        return collector
    return GroupCollector(
        **vars(collector),
        groups_per_step=per_step,
        groups_per_batch=sampling.gen_batch_size,
        group_filter=group_filter,
        max_batches=max_batches,
        on_exhausted=sampling.on_exhausted,
    )


def keep_samples_of_next_step(run: Any) -> None:
    """Have checkpoints keep what was sampled and waits for the next step."""
    collector = getattr(run, "sampler", None)
    if isinstance(collector, GroupCollector):
        run.register_state("surplus", collector, per_rank=True)
    if isinstance(collector, BatchCollector) and collector.max_staleness > 0:
        run.register_state("ahead", SamplesAhead(collector), per_rank=True)
