"""Prompts → sampled, scored and selected groups of rollouts for a training step.

All ranks decide together, in ``GroupCollector._agree``, whether a step needs another generation batch.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal, Protocol

from torch import Tensor

from lightppo.data.records import Prompt, Rollout, from_plain, group_by_prompt, seed_of_step, to_plain
from lightppo.errors import RewardError
from lightppo.experience.checks import RolloutReplay
from lightppo.ranks import Ranks
from lightppo.rewards.source import AsyncScorer, RewardSource, describe_sample, score_rollouts
from lightppo.rollout.engine import RolloutEngine, SamplingParams

logger = logging.getLogger(__name__)


def best_of_n(group: Sequence[Rollout], n: int, tie: Literal["shorter", "longer"] = "shorter") -> list[Rollout]:
    """The ``n`` samples with the highest scores, in sampling order; ``tie`` decides between equal scores by length."""
    sign = 1 if tie == "shorter" else -1
    ranked = sorted(range(len(group)), key=lambda i: (-group[i].reward, sign * len(group[i].response_ids), i))
    return [group[i] for i in sorted(ranked[:n])]


# Any other name is one of the numbers that the reward source gives beside the score.
FILTER_METRICS: dict[str, Callable[[Rollout], float | None]] = {
    "score": lambda r: r.reward,
    "acc": lambda r: r.extras.get("acc", r.extras.get("accuracy")),
    "seq_reward": lambda r: r.reward if r.token_rewards is None else sum(r.token_rewards),
}

EQUAL, LOW, HIGH, UNMEASURED = REASONS = ("rejected_equal", "rejected_low", "rejected_high", "rejected_unmeasured")


@dataclass(frozen=True)
class Verdict:
    """The filter's answer about a group."""

    reason: str | None  # None: keep the group
    mean: float | None = None  # of the metric; None if a sample has no value


@dataclass
class GroupFilter:
    """Keeps groups that can teach something: their samples differ in the metric, or their mean lies within ``limits``.

    ``limits`` themselves are excluded. Source: DAPO, arXiv:2503.14476, equation 11: 0 < number correct < group size.
    """

    # score, acc (accuracy), seq_reward (sum of token scores, if any), seq_final_reward (after shaping, before KL), or a
    # name in Rollout.extras
    metric: str = "score"
    limits: tuple[float, float] | None = None
    final_scores: Callable[[Sequence[Rollout]], Tensor] | None = None  # shaped scores (B,), for seq_final_reward

    def __call__(self, group: Sequence[Rollout]) -> Verdict:
        """Judges the scored samples of one prompt, at least one."""
        values = self._values(group)
        if any(value is None for value in values):
            return Verdict(UNMEASURED)
        mean = sum(values) / len(values)
        if self.limits is None:
            # not by the standard deviation, which rounding may put above 0 for equal values
            return Verdict(EQUAL if min(values) == max(values) else None, mean)
        low, high = self.limits
        return Verdict(LOW if mean <= low else HIGH if mean >= high else None, mean)

    def _values(self, group: Sequence[Rollout]) -> list[float | None]:
        if self.metric != "seq_final_reward":
            of = FILTER_METRICS.get(self.metric, lambda r: r.extras.get(self.metric))
            return [of(r) for r in group]
        if self.final_scores is None:
            raise ValueError("--filter_metric seq_final_reward needs the shaping of scores: pass final_scores")
        return self.final_scores(group).tolist()


FAILURE_COUNTS = ("failures", "timeouts")  # which reward sources count themselves


@dataclass
class SampledBatch:
    """Scored rollouts of this rank."""

    rollouts: list[Rollout]  # to train on
    # counts of the others by reason, and of the reward source's failures and time-outs
    left_out: dict[str, float] = field(default_factory=dict)
    # Prompt.index → mean score of all its scored samples
    prompt_scores: dict[int, float] = field(default_factory=dict)


@dataclass
class RolloutSampler:
    """Samples responses and has them scored."""

    engine: RolloutEngine
    reward_source: RewardSource
    sampling: SamplingParams  # with n samples per prompt and the seed of the run
    min_group_size: int = 1  # smallest group that the advantage estimator can use
    _: KW_ONLY
    greedy_baseline: bool = False  # also answer each prompt greedily, as Rollout.baseline of its samples (ReMax)
    dense: bool = False  # the source must give token scores; without it, it must not
    group_size: int | None = None  # best of n: keep so many of the n samples of a prompt; None: all
    tie: Literal["shorter", "longer"] = "shorter"  # see best_of_n
    # sees each scored batch on every rank, and may refuse it by an exception
    check: Callable[[Sequence[Rollout]], None] = lambda rollouts: None
    # scores finished samples while the engine, which must take on_finished, generates the rest (--async_rewards)
    scorer: AsyncScorer | None = None
    # sees each batch before it is scored, on every rank
    inspect: Callable[[Sequence[Rollout]], None] = lambda rollouts: None

    @property
    def keeps_best(self) -> bool:
        """Whether fewer samples are kept than sampled."""
        return self.group_size is not None and self.group_size < self.sampling.n

    def generate(self, prompts: Sequence[Prompt], step: int) -> list[Rollout]:
        """n responses to each prompt; the same seed and step give the same responses."""
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
        """Scores the rollouts; samples that the source leaves unscored (``None``) leave their group and are counted.

        A group that becomes too small for the estimator, or whose greedy baseline is unscored, is left out and counted.
        """
        baselines = {id(r.baseline): r.baseline for r in rollouts if r.baseline is not None}
        everything = [*rollouts, *baselines.values()]
        if self.scorer is None:
            score_rollouts(self.reward_source, everything)
        else:
            self.scorer.collect()
        self.check(rollouts)
        # Totals, not means over the samples that stay, which lack the samples that failed for good.
        totals = {f"reward/{name}": sum(r.extras.pop(name, 0.0) for r in everything) for name in FAILURE_COUNTS}
        scored = [r for r in rollouts if r.reward is not None]
        self._check_token_scores(scored)
        groups = group_by_prompt(scored)
        best = scored
        if self.keeps_best:
            best = [r for group in groups for r in best_of_n(group, self.group_size, self.tie)]
        sizes = Counter(r.prompt.index for r in best)
        kept = [
            r
            for r in best
            if sizes[r.prompt.index] >= self.min_group_size and (r.baseline is None or r.baseline.reward is not None)
        ]
        left_out = {"unscored": len(rollouts) - len(scored), "small_group": len(best) - len(kept), **totals}
        if self.keeps_best:
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


class PromptSource(Protocol):
    """Generation batches of one episode on this rank."""

    exhausted: bool  # no batch is left; the same on every rank

    def take(self) -> list[Prompt]: ...


@dataclass
class OneBatch:
    """A :class:`PromptSource` of a single batch."""

    prompts: list[Prompt]
    exhausted: bool = False

    def take(self) -> list[Prompt]:
        self.exhausted = True
        return self.prompts


@dataclass(slots=True)
class Group:
    """Scored samples of one prompt, and the step that sampled them."""

    rollouts: list[Rollout]
    step: int


@dataclass
class CollectedStep:
    """What a step trains on."""

    rollouts: list[Rollout]  # this rank's, in whole groups
    groups: int  # trained on by all ranks, repeated groups included
    repeated: list[int]  # positions in rollouts that are trained on again (--on_exhausted reuse)
    counts: dict[str, float]  # over all ranks, named as in trainer.metrics.METRICS without rollout/
    prompt_scores: dict[int, float]  # mean score of each prompt that this rank sampled in this step
    surplus: int  # accepted groups of all ranks that wait for the next step


@dataclass
class Tally:
    """What happened to the samples of this step on this rank."""

    batches: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    prompt_scores: dict[int, float] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Standing:
    """The state of a step over all ranks."""

    available: list[int]  # accepted groups of each rank
    sampled: int  # samples of this step
    scored: int
    judged: int  # groups of this step that the filter has seen
    unmeasured: int  # of these, groups without the metric
    names: list[str]  # metrics of the reward source
    exhausted: bool  # the episode has no more prompts

    @property
    def total(self) -> int:
        return sum(self.available)


@dataclass
class GroupCollector:
    """Samples until a step has its groups.

    Without ``groups_per_step``, a step trains on one generation batch. With it, accepted groups that a step does not
    need are the surplus, which the next step trains on first; save it with :meth:`state_dict`. An episode ends when its
    prompts and its surplus are used up; its last step may be short or even empty.

    Source: dynamic sampling of DAPO, arXiv:2503.14476, section 3.2.
    """

    sampler: RolloutSampler
    strategy: Ranks
    _: KW_ONLY
    groups_per_step: int | None = None  # prompts to train on per step, over all ranks
    group_filter: GroupFilter | None = None  # None: accept every scored group
    max_batches: int = 1  # most generation batches per step; 0: no limit
    # if these give too few groups: train on those there are, stop, or train on some of them twice
    on_exhausted: Literal["train_short", "raise", "reuse"] = "train_short"
    replay: RolloutReplay | None = None
    balance: Callable[[list[Rollout]], list[Rollout]] | None = None  # swaps rollouts between ranks
    timer: Callable[[str], AbstractContextManager] = lambda phase: nullcontext()  # times "rollout" and "reward"
    surplus: list[Group] = field(default_factory=list)  # accepted groups of this rank that wait for training

    def collect(self, source: PromptSource | list[Prompt], step: int) -> CollectedStep:
        """The groups of one step, from as many generation batches as it needs. Collective.

        Raises:
            RewardError: no sample was scored, no sample has the filter's metric, or ``on_exhausted="raise"`` applies.
        """
        collected = self._collect(OneBatch(source) if isinstance(source, list) else source, step)
        if getattr(self.sampler.engine, "keeps_weights", False):
            self.sampler.engine.sleep()  # until the next push of weights, or the next rollouts
        # Repeated groups are named by their place on this rank, so with any of them nothing moves.
        if self.balance is not None and collected.groups and not self.strategy.same_count(len(collected.repeated)):
            collected.rollouts = self.balance(collected.rollouts)
        return collected

    def _collect(self, source: PromptSource, step: int) -> CollectedStep:
        tally = Tally()
        if self.groups_per_step is None:
            self._generate(source, step, tally)
            return self._finish(step, tally, len(self.surplus), [], 0)
        while True:
            standing = self._agree(source, tally, step)
            limit_reached = self.max_batches > 0 and tally.batches >= self.max_batches
            if standing.total >= self.groups_per_step or standing.exhausted or limit_reached:
                break
            self._generate(source, step, tally)
        missing = max(0, self.groups_per_step - standing.total)
        repeats = [0] * len(standing.available)
        # on_exhausted does not apply at the end of an episode, nor without a filter.
        if missing and not standing.exhausted and self.group_filter is not None:
            repeats = self._short(standing, tally, step, missing)
        shares = balanced_shares(standing.available, self.groups_per_step)
        rank = self.strategy.get_rank()
        extra = [i % shares[rank] for i in range(repeats[rank])]
        return self._finish(step, tally, shares[rank], extra, standing.total - sum(shares))

    def _generate(self, source: PromptSource, step: int, tally: Tally) -> None:
        """One generation batch: samples, scores, accepts or rejects."""
        prompts, sample = source.take(), self.sampler.generate
        with self.timer("rollout"):
            if self.replay is None:
                rollouts = sample(prompts, step)
            else:
                rollouts = self.replay.rollouts(prompts, step, tally.batches, lambda: sample(prompts, step))
        with self.timer("reward"):
            batch = self.sampler.score(rollouts)
            for group in group_by_prompt(batch.rollouts):
                reason = self.group_filter(group).reason if self.group_filter is not None else None
                if reason is None:
                    self.surplus.append(Group(group, step))
                else:
                    tally.reasons[reason] += 1
                tally.counts["judged"] += 1
        tally.batches += 1
        tally.counts.update(batch.left_out)
        tally.counts["generated_samples"] += len(rollouts)
        tally.counts["generated_tokens"] += sum(len(r.response_ids) for r in rollouts)
        tally.prompt_scores |= batch.prompt_scores
        tally.names |= {name for r in batch.rollouts for name in r.extras}

    def _agree(self, source: PromptSource, tally: Tally, step: int) -> Standing:
        """The state of the step over all ranks, on which every decision rests. Collective."""
        sampled = tally.counts["generated_samples"]
        own = (
            len(self.surplus),
            sampled,
            sampled - tally.counts["unscored"],
            tally.counts["judged"],
            tally.reasons[UNMEASURED],
            sorted(tally.names),
            source.exhausted,
        )
        columns = list(zip(*self.strategy.all_gather_object(own)))
        names = sorted({name for part in columns[5] for name in part})
        standing = Standing(list(columns[0]), *(sum(column) for column in columns[1:5]), names, any(columns[6]))
        if standing.sampled and not standing.scored:
            raise RewardError(f"step {step}: none of the samples was scored, so there is nothing to train on")
        if standing.judged and standing.unmeasured == standing.judged:
            raise RewardError(
                f"--filter_metric {self.group_filter.metric}: no sample of step {step} has it; the reward source gives "
                f"{', '.join(['score', *standing.names])}"
            )
        return standing

    def _short(self, standing: Standing, tally: Tally, step: int, missing: int) -> list[int]:
        """Applies ``on_exhausted`` to too few groups; returns how many groups each rank trains on again."""
        text = (
            f"step {step}: {standing.total} of {self.groups_per_step} groups accepted after {tally.batches} generation "
            f"batches (--max_num_gen_batches); {standing.judged} were sampled"
        )
        if self.on_exhausted == "raise":
            raise RewardError(f"{text}: raise the limit, widen --filter_range or choose another --on_exhausted")
        self.strategy.print(f"{text}; --on_exhausted {self.on_exhausted}")
        return repeated_shares(standing.available, missing if self.on_exhausted == "reuse" else 0)

    def _finish(self, step: int, tally: Tally, share: int, extra: list[int], surplus: int) -> CollectedStep:
        """Takes this rank's share out of the surplus, oldest first, and totals the counts. Collective."""
        chosen, self.surplus = self.surplus[:share], self.surplus[share:]
        rollouts, places = [], []
        for group in chosen:
            places.append(range(len(rollouts), len(rollouts) + len(group.rollouts)))
            rollouts += group.rollouts
        own = {"unscored": 0, "small_group": 0, "generated_samples": 0, "generated_tokens": 0, "judged": 0}
        own |= {f"reward/{name}": 0.0 for name in FAILURE_COUNTS}
        if self.sampler.keeps_best:
            own["not_best"] = 0
        own |= tally.counts | {name: tally.reasons[name] for name in REASONS}
        own |= {
            "trained_groups": len(chosen) + len(extra),
            "reused_groups": len(extra),
            "stale_groups": sum(group.step < step for group in chosen),
            "staleness": sum(step - group.step for group in chosen),
        }
        totals = self.strategy.all_reduce(own, "sum")
        trained, repeated = totals["trained_groups"], [i for e in extra for i in places[e]]
        counts = self._counts(totals, tally.batches, surplus)
        return CollectedStep(rollouts, trained, repeated, counts, tally.prompt_scores, surplus)

    def _counts(self, totals: dict[str, float], batches: int, surplus: int) -> dict[str, float]:
        """The counts of all ranks for the logs; counts of selection only if there is a selection."""
        judged, rejected = totals.pop("judged"), {name: totals.pop(name) for name in REASONS}
        groups = {name: totals.pop(name) for name in ("trained_groups", "reused_groups", "stale_groups", "staleness")}
        if self.groups_per_step is None:
            return totals
        trained = groups["trained_groups"] - groups["reused_groups"]
        groups["staleness"] = groups["staleness"] / trained if trained else 0.0
        totals |= groups | {"num_gen_batches": batches, "surplus_groups": surplus}
        if self.group_filter is not None:
            totals |= rejected
            totals["kept_share"] = 1 - sum(rejected.values()) / judged if judged else float("nan")
        return totals

    def state_dict(self) -> list[dict[str, Any]]:
        """This rank's surplus, as plain values."""
        return [{"step": group.step, **to_plain(group.rollouts)} for group in self.surplus]

    def load_state_dict(self, state: Sequence[dict[str, Any]]) -> None:
        """Restores ``state_dict``."""
        self.surplus = [Group(from_plain(values), values["step"]) for values in state]


def balanced_shares(available: Sequence[int], needed: int) -> list[int]:
    """How many groups each rank gives, ``needed`` in total or all, as equal as possible: ([5, 1, 4], 8) → [4, 1, 3]."""
    shares = [0] * len(available)
    for _ in range(min(needed, sum(available))):
        open_ranks = (r for r in range(len(shares)) if shares[r] < available[r])
        shares[min(open_ranks, key=lambda r: (shares[r], r))] += 1
    return shares


def repeated_shares(available: Sequence[int], missing: int) -> list[int]:
    """How many groups each rank trains on again, ``missing`` in total if there are any: ([2, 0, 1], 3) → [1, 0, 2]."""
    repeats = [0] * len(available)
    holders = [r for r in range(len(available)) if available[r] > 0]
    for _ in range(missing if holders else 0):
        repeats[min(holders, key=lambda r: (available[r] + repeats[r], r))] += 1
    return repeats
