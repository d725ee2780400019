"""The verifier's health."""

from collections.abc import Callable
from typing import Any

import pytest
from support.fakes import FakeStrategy, on_ranks

from lightppo.data.records import Rollout
from lightppo.errors import RewardError
from lightppo.ranks import Alone
from lightppo.rewards.reward_source import check_verifier_status

Make = Callable[..., Rollout]


def check(rollouts: list[Rollout], minimum: float = 0.0, ranks: Any = None) -> None:
    check_verifier_status(rollouts, minimum=minimum, source_name="judge", ranks=ranks or Alone())


def scored(make_rollout: Make, rewards: list[float | None]) -> list[Rollout]:
    rollouts = [make_rollout(i, f"response {i}", label=f"label {i}") for i in range(len(rewards))]
    for rollout, reward in zip(rollouts, rewards):
        rollout.reward = reward
    return rollouts


@pytest.mark.parametrize(
    ("rewards", "minimum"),
    [([0.0, 0.0, 1.0], 0.0), ([0.0, None, 0.1], 0.0), ([-1.0, -0.8], -1.0), ([], 0.0)],
)
def test_a_healthy_verifier(
    make_rollout: Make, rewards: list[float | None], minimum: float
) -> None:
    check(scored(make_rollout, rewards), minimum)


@pytest.mark.parametrize(
    ("rewards", "minimum", "found"),
    [
        ([0.0, 0.0], 0.0, "every one of the 2 scores is at the minimum of 0"),
        ([None, -1.0], -1.0, "every one of the 1 scores is at the minimum of -1"),
        ([None, None], 0.0, "none of the 2 samples has a score"),
    ],
)
def test_a_batch_at_the_minimum_is_an_error_with_a_sample(
    make_rollout: Make, rewards: list[float | None], minimum: float, found: str
) -> None:
    shown = 1 if rewards[0] is None and rewards[1] is not None else 0
    pattern = rf"--check_verifier_status: {found} .*'question {shown}: '\): label 'label {shown}', score .*response {shown}"
    with pytest.raises(RewardError, match=pattern):
        check(scored(make_rollout, rewards), minimum)


@pytest.mark.parametrize(
    ("by_rank", "raises"),
    [
        ([[0.0, 0.0], [0.0, 1.0]], False),
        ([[0.0, 0.0], [0.0]], True),
        ([[0.0, 0.0], []], True),
        ([[], []], False),
    ],
)
def test_all_ranks_decide_the_same(
    make_rollout: Make, by_rank: list[list[float | None]], raises: bool
) -> None:
    def fails(strategy: FakeStrategy) -> bool:
        try:
            check(scored(make_rollout, by_rank[strategy.rank]), ranks=strategy)
        except RewardError:
            return True
        return False

    assert on_ranks(2, fails) == [raises, raises]
