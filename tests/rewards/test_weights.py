"""Sources by weights, per data source or label."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from lightppo.data.records import Rollout
from lightppo.errors import RewardError
from lightppo.rewards import CombinedReward, RewardOutput, RewardSource, RoutedReward, score_rollouts


class Length:
    """Scores with the number of response ids times ``factor``; remembers the prompt rows of each call."""

    def __init__(self, name: str, factor: float = 1.0, calls: list[Any] | None = None, **more: Any) -> None:
        self.name = name
        self.factor = factor
        self.calls = calls if calls is not None else []
        self.more = more

    def score(self, rollouts: list[Rollout]) -> RewardOutput:
        self.calls.append((self.name, [rollout.prompt.index for rollout in rollouts]))
        metrics = {name: [value] * len(rollouts) for name, value in self.more.items()}
        return RewardOutput([self.factor * len(rollout.response_ids) for rollout in rollouts], metrics)


@pytest.fixture
def mixed(make_rollout: Callable[..., Rollout]) -> list[Rollout]:
    """Rows 100 to 103 with 1 to 4 response ids, of math, code, math and chat."""
    kinds = ("math", "code", "math", "chat")
    return [make_rollout(i, data_source=kind, label=i % 2) for i, kind in enumerate(kinds)]


def test_each_data_source_has_its_weighted_sources(mixed: list[Rollout]) -> None:
    calls: list[Any] = []
    judge, style = Length("judge", 1.0, calls, acc=0.5), Length("style", 10.0, calls)
    reward = RoutedReward({"math": [(judge, 2.0)], "code": [(style, 0.5), (judge, -1.0)], "*": [(style, 1.0)]})
    output = reward.score(mixed)
    # math: 2·1 and 2·3; code: 0.5·20 − 1·2; chat takes "*": 1·40
    assert output.scores == [2.0, 8.0, 6.0, 40.0]
    assert output.metrics == {
        "judge": [1.0, 2.0, 3.0, None],
        "judge/acc": [0.5, 0.5, 0.5, None],
        "style": [None, 20.0, None, 40.0],
    }
    assert calls == [("judge", [100, 101, 102]), ("style", [101, 103])]  # each once, with all its samples


def test_the_order_of_samples_changes_nothing(mixed: list[Rollout]) -> None:
    reward = RoutedReward({"math": [(Length("a"), 2.0)], "*": [(Length("b", 3.0), 1.0)]})
    assert reward.score(mixed[::-1]).scores == reward.score(mixed).scores[::-1]


def test_label_routes_by_its_text(mixed: list[Rollout]) -> None:
    mixed[3].prompt.label = "one"
    routes = {"0": [(Length("even"), 1.0)], "1": [(Length("odd"), -1.0)], "one": [(Length("word"), 0.5)]}
    reward = RoutedReward(routes, by="label")
    assert reward.score(mixed).scores == [1.0, -2.0, 3.0, 2.0]


def test_an_unknown_route_is_named(mixed: list[Rollout]) -> None:
    reward = RoutedReward({"math": [(Length("a"), 1.0)], "code": [(Length("b"), 1.0)]}, name="by_task")
    with pytest.raises(RewardError, match=r"^by_task: .* the data source 'chat' of sample 3 .* are 'math', 'code'"):
        score_rollouts(reward, mixed)
    assert mixed[0].reward is None


@pytest.mark.parametrize("n", [0, 1, 4])
def test_every_rank_calls_every_source_in_one_order(mixed: list[Rollout], n: int) -> None:
    calls: list[Any] = []
    a, b, c = (Length(name, calls=calls) for name in "abc")
    routes = {"code": [(c, 1.0), (a, 1.0)], "math": [(b, 1.0), (c, 1.0)], "*": [(a, 1.0)]}
    assert len(RoutedReward(routes).score(mixed[:n]).scores) == n
    assert [name for name, _ in calls] == ["c", "a", "b"]


def test_unscored_by_one_source_of_the_route_is_unscored(mixed: list[Rollout]) -> None:
    class Silent(Length):
        def score(self, rollouts: list[Rollout]) -> RewardOutput:
            return RewardOutput([None] * len(rollouts))

    silent, judge = Silent("silent"), Length("judge")
    output = RoutedReward({"math": [(silent, 0.0), (judge, 1.0)], "*": [(judge, 1.0)]}).score(mixed)
    assert output.scores == [None, 2.0, None, 4.0]
    assert output.metrics["judge"] == [1.0, 2.0, 3.0, 4.0]


def test_token_scores_take_the_weight_of_the_route(mixed: list[Rollout]) -> None:
    class Dense(Length):
        def score(self, rollouts: list[Rollout]) -> RewardOutput:
            rows = [[1.0] * len(rollout.response_ids) for rollout in rollouts]
            return RewardOutput([0.0] * len(rows), {}, rows)

    dense, judge = Dense("dense"), Length("judge")
    output = RoutedReward({"math": [(dense, 2.0)], "code": [(dense, -1.0)], "*": [(judge, 1.0)]}).score(mixed)
    assert output.token_scores == [[2.0], [-1.0, -1.0], [2.0] * 3, None]


def test_failures_are_added_up_over_the_sources(mixed: list[Rollout]) -> None:
    inner = CombinedReward({Length("a", failures=1.0): 1.0, Length("b", failures=2.0, timeouts=1.0): 1.0}, "inner")
    output = RoutedReward({"math": [(inner, 1.0), (Length("c", failures=4.0), 1.0)], "*": [(Length("d"), 1.0)]})
    metrics = output.score(mixed).metrics
    assert metrics["inner/failures"] == [3.0, None, 3.0, None]  # 1 + 2
    assert metrics["failures"] == [7.0, 0, 7.0, 0]  # 3 + 4; d counts none
    assert metrics["timeouts"] == [1.0, 0, 1.0, 0]


def test_needs_all_ranks_where_one_source_does() -> None:
    model = Length("model")
    assert not RoutedReward({"*": [(model, 1.0)]}).needs_all_ranks
    model.needs_all_ranks = True
    assert RoutedReward({"math": [(Length("a"), 1.0)], "*": [(model, 1.0)]}).needs_all_ranks
    assert CombinedReward({CombinedReward({model: 1.0}): 1.0}).needs_all_ranks


@pytest.mark.parametrize(
    ("routes", "options", "message"),
    [
        ({}, {}, "at least one source"),
        ({"math": []}, {}, "at least one source"),
        ({"math": [(Length("a"), math.nan)]}, {}, "weight of a must be a finite number"),
        ({"math": [(Length("a"), 1.0)], "*": [(Length("a"), 1.0)]}, {}, "several sources are named a"),
        ({"*": [(Length("a"), 1.0)]}, {"by": "index"}, "by data_source or label, not by 'index'"),
    ],
)
def test_bad_routes_are_refused(routes: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RoutedReward(routes, **options)


def test_a_source_twice_on_a_route_is_refused() -> None:
    source = Length("a")
    with pytest.raises(ValueError, match="a is twice on the route 'math'"):
        RoutedReward({"math": [(source, 1.0), (source, 2.0)]})


def test_it_is_a_source() -> None:
    assert isinstance(RoutedReward({"*": [(Length("a"), 1.0)]}), RewardSource)
