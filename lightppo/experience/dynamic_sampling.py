"""GroupCollector: the groups that one step trains on, from the surplus of earlier steps and new generation batches.

All ranks decide together, in :meth:`GroupCollector._agree`, whether a step needs another generation batch. Groups stay
on the rank that sampled them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from lightppo.data.records import Prompt, Rollout
from lightppo.errors import RewardError
from lightppo.experience.filters import REASONS, UNMEASURED, GroupFilter, group_by_prompt
from lightppo.experience.rollout_files import RolloutReplay
from lightppo.experience.rollout_records import from_plain, to_plain
from lightppo.experience.sampling import FAILURE_COUNTS, RolloutSampler
from lightppo.ranks import Ranks


class PromptSource(Protocol):
    """Generation batches of one episode, of this rank.

    Attributes:
        exhausted: no batch is left; the same on every rank.
    """

    exhausted: bool

    def take(self) -> list[Prompt]: ...


class OneBatch:
    """A :class:`PromptSource` of a single batch."""

    def __init__(self, prompts: list[Prompt]) -> None:
        self.prompts = prompts
        self.exhausted = False

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
    """What a step trains on.

    Attributes:
        rollouts: of this rank, whole groups.
        groups: trained on by all ranks, repeated ones included.
        repeated: positions in ``rollouts`` that are trained on once more (``--on_exhausted reuse``).
        counts: over all ranks, by the names of ``trainer.metric_names.METRICS`` without ``rollout/``.
        prompt_scores: mean score of each prompt that this rank sampled in this step.
        surplus: accepted groups that wait for the next step, all ranks.
    """

    rollouts: list[Rollout]
    groups: int
    repeated: list[int]
    counts: dict[str, float]
    prompt_scores: dict[int, float]
    surplus: int


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
    """Where a step stands, over all ranks.

    Attributes:
        available: accepted groups of each rank.
        sampled, scored: samples of this step.
        judged, unmeasured: groups of this step that the filter has seen, and those without its metric.
        names: numbers that the reward source gives.
        exhausted: the episode has no more prompts.
    """

    available: list[int]
    sampled: int
    scored: int
    judged: int
    unmeasured: int
    names: list[str]
    exhausted: bool

    @property
    def total(self) -> int:
        return sum(self.available)


class GroupCollector:
    """Samples until a step has its groups.

    Without ``groups_per_step``: one generation batch, of which all groups are trained on. With it: accepted groups that
    a step does not need are the surplus, first in line in the next step. The surplus is state: save it with
    :meth:`state_dict`. An episode ends when its prompts are used up and its surplus is trained on; its last step may be
    short, or even empty.

    Source: dynamic sampling of DAPO, arXiv:2503.14476, section 3.2.

    Args:
        sampler: samples and scores one generation batch.
        strategy: agreement of the ranks.
        groups_per_step: prompts to train on per step, over all ranks; ``None``: as they come.
        group_filter: ``None``: every scored group is accepted.
        max_batches: most generation batches of a step; 0: any number.
        on_exhausted: what follows where these have too few groups: ``train_short`` trains on those there are, ``raise``
            stops, ``reuse`` trains on some of them twice.
        replay: saves and replays what the engine samples.
        timer: makes a context for the time of ``rollout`` and of ``reward``.
    """

    def __init__(
        self,
        sampler: RolloutSampler,
        strategy: Ranks,
        *,
        groups_per_step: int | None = None,
        group_filter: GroupFilter | None = None,
        max_batches: int = 1,
        on_exhausted: Literal["train_short", "raise", "reuse"] = "train_short",
        replay: RolloutReplay | None = None,
        timer: Callable[[str], AbstractContextManager] = lambda phase: nullcontext(),
    ) -> None:
        self.sampler = sampler
        self.strategy = strategy
        self.groups_per_step = groups_per_step
        self.group_filter = group_filter
        self.max_batches = max_batches
        self.on_exhausted = on_exhausted
        self.replay = replay
        self.timer = timer
        self.surplus: list[Group] = []

    def collect(self, source: PromptSource, step: int) -> CollectedStep:
        """The groups of one step. Collective.

        Args:
            source: prompts of the episode; as many generation batches are taken as are needed.
            step: number of the PPO step; with the seed of the run it fixes the random numbers.

        Raises:
            RewardError: none of the samples was scored, no sample has the metric of the filter, or too few groups were
                accepted with ``on_exhausted="raise"``.
        """
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
        # The end of an episode is short without any policy, as it is without a filter.
        if missing and not standing.exhausted and self.group_filter is not None:
            repeats = self._short(standing, tally, step, missing)
        shares = balanced_shares(standing.available, self.groups_per_step)
        rank = self.strategy.get_rank()
        extra = [i % shares[rank] for i in range(repeats[rank])]
        return self._finish(step, tally, shares[rank], extra, standing.total - sum(shares))

    def _generate(self, source: PromptSource, step: int, tally: Tally) -> None:
        """One generation batch: sample, score, accept or reject."""
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
        """Where the step stands on all ranks: what every decision is made from, the same on every rank. Collective.

        Raises:
            RewardError: on every rank, if nothing was scored, or no sample has the metric.
        """
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
        """What ``on_exhausted`` makes of too few groups: the groups that each rank trains on once more."""
        text = (
            f"step {step}: {standing.total} of {self.groups_per_step} groups accepted after {tally.batches} generation "
            f"batches (--max_num_gen_batches); {standing.judged} were sampled"
        )
        if self.on_exhausted == "raise":
            raise RewardError(f"{text}: raise the limit, widen --filter_range or choose another --on_exhausted")
        self.strategy.print(f"{text}; --on_exhausted {self.on_exhausted}")
        return repeated_shares(standing.available, missing if self.on_exhausted == "reuse" else 0)

    def _finish(self, step: int, tally: Tally, share: int, extra: list[int], surplus: int) -> CollectedStep:
        """Take this rank's share out of the surplus, oldest first, and total the counts. Collective."""
        chosen, self.surplus = self.surplus[:share], self.surplus[share:]
        rollouts, places = [], []
        for group in chosen:
            places.append(range(len(rollouts), len(rollouts) + len(group.rollouts)))
            rollouts += group.rollouts
        own = {"unscored": 0, "small_group": 0, "generated_samples": 0, "generated_tokens": 0, "judged": 0}
        own |= {f"reward/{name}": 0.0 for name in FAILURE_COUNTS}
        if self.sampler.group_size < self.sampler.sampling.n:
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
        """The counts of all ranks as they are logged; of selection only where there is any."""
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
        """From ``state_dict``."""
        self.surplus = [Group(from_plain(values), values["step"]) for values in state]


def balanced_shares(available: Sequence[int], needed: int) -> list[int]:
    """How many groups each rank gives, ``needed`` in all or everything: equally many, as far as they have them.

    ``([5, 1, 4], 8)`` → ``[4, 1, 3]``.
    """
    shares = [0] * len(available)
    for _ in range(min(needed, sum(available))):
        open_ranks = (r for r in range(len(shares)) if shares[r] < available[r])
        shares[min(open_ranks, key=lambda r: (shares[r], r))] += 1
    return shares


def repeated_shares(available: Sequence[int], missing: int) -> list[int]:
    """How many of its groups each rank trains on once more, ``missing`` in all: none where no rank has a group.

    ``([2, 0, 1], 3)`` → ``[1, 0, 2]``: three and three.
    """
    repeats = [0] * len(available)
    holders = [r for r in range(len(available)) if available[r] > 0]
    for _ in range(missing if holders else 0):
        repeats[min(holders, key=lambda r: (available[r] + repeats[r], r))] += 1
    return repeats
