"""Which samples of a group, and which groups, are worth training on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from lightppo.data.records import Rollout

FinalScores = Callable[[Sequence[Rollout]], Tensor]


def group_by_prompt(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """The samples of each prompt.

    Args:
        rollouts: as engines give them: those of a prompt one behind the other, ``sample_index`` rising.
    """
    groups: list[list[Rollout]] = []
    for rollout in rollouts:
        last = groups[-1][-1] if groups else None
        if last and last.prompt.index == rollout.prompt.index and last.sample_index < rollout.sample_index:
            groups[-1].append(rollout)
        else:
            groups.append([rollout])
    return groups


def best_of_n(group: Sequence[Rollout], n: int, tie: Literal["shorter", "longer"] = "shorter") -> list[Rollout]:
    """The ``n`` scored samples with the highest scores, in the order they were sampled.

    Args:
        group: scored samples of one prompt.
        n: how many; fewer samples are all kept.
        tie: which of equal scores is the better one; of equal lengths too, the one sampled first.
    """
    sign = 1 if tie == "shorter" else -1
    ranked = sorted(range(len(group)), key=lambda i: (-group[i].reward, sign * len(group[i].response_ids), i))
    return [group[i] for i in sorted(ranked[:n])]


def _scores(group: Sequence[Rollout], _: FinalScores | None) -> list[float | None]:
    return [r.reward for r in group]


def _sequence_rewards(group: Sequence[Rollout], _: FinalScores | None) -> list[float | None]:
    return [r.reward if r.token_rewards is None else sum(r.token_rewards) for r in group]


def _final_rewards(group: Sequence[Rollout], final_scores: FinalScores | None) -> list[float | None]:
    if final_scores is None:
        raise ValueError("--filter_metric seq_final_reward needs the shaping of scores: pass final_scores")
    return final_scores(group).tolist()


def _accuracies(group: Sequence[Rollout], _: FinalScores | None) -> list[float | None]:
    return [r.extras.get("acc", r.extras.get("accuracy")) for r in group]


# Any other name is one of the numbers that the reward source gives beside the score.
FILTER_METRICS: dict[str, Callable[[Sequence[Rollout], FinalScores | None], list[float | None]]] = {
    "score": _scores,
    "acc": _accuracies,
    "seq_reward": _sequence_rewards,
    "seq_final_reward": _final_rewards,
}

EQUAL, LOW, HIGH, UNMEASURED = REASONS = ("rejected_equal", "rejected_low", "rejected_high", "rejected_unmeasured")


@dataclass(frozen=True)
class Verdict:
    """``reason`` is ``None`` for a group to keep; ``mean`` of the metric, ``None`` where a sample has no value."""

    reason: str | None
    mean: float | None = None


class GroupFilter:
    """Keeps the groups that can teach something.

    Without a range: those whose samples differ in the metric (standard deviation above 0). With one: those whose mean
    lies inside, ends excluded: (0, 1) of an accuracy is the same as differing.

    Source: DAPO, arXiv:2503.14476, equation 11: 0 < number of correct answers < group size.

    Args:
        metric: ``score``, ``acc`` (``accuracy``), ``seq_reward`` (sum of token scores where there are such),
            ``seq_final_reward`` (after shaping, before KL), or a name in ``Rollout.extras``.
        limits: the range.
        final_scores: shaped scores (B,) of samples, for ``seq_final_reward``.
    """

    def __init__(
        self,
        metric: str = "score",
        limits: tuple[float, float] | None = None,
        final_scores: FinalScores | None = None,
    ) -> None:
        self.metric = metric
        self.limits = limits
        self.final_scores = final_scores

    def __call__(self, group: Sequence[Rollout]) -> Verdict:
        """Judge the scored samples of one prompt, at least one."""
        values = self._values(group)
        if any(value is None for value in values):
            return Verdict(UNMEASURED)
        mean = sum(values) / len(values)
        if self.limits is None:
            # not by a computed deviation, which rounding may put above 0 for equal values
            return Verdict(EQUAL if min(values) == max(values) else None, mean)
        low, high = self.limits
        return Verdict(LOW if mean <= low else HIGH if mean >= high else None, mean)

    def _values(self, group: Sequence[Rollout]) -> list[float | None]:
        known = FILTER_METRICS.get(self.metric)
        if known is not None:
            return known(group, self.final_scores)
        return [r.extras.get(self.metric) for r in group]
