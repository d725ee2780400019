"""Weighted sums of sources, and routes by a column of the data."""

from __future__ import annotations

import math

import pytest
from support.fakes import FixedReward

from lightppo.errors import NonFiniteRewardError, RewardError
from lightppo.rewards import (
    CombinedReward,
    RewardOutput,
    RewardSource,
    RoutedReward,
    score_rollouts,
)
from lightppo.rewards.reward_source import join_outputs
from lightppo.verifiers.code import CodeReward
from lightppo.verifiers.formats import FormatReward
from lightppo.verifiers.math import MathReward


@pytest.mark.parametrize(
    ("scores", "kind"), [([1.0, -math.inf], NonFiniteRewardError), ([math.nan, "x"], RewardError)]
)
def test_numbers_that_are_not_finite_have_an_error_of_their_own(make_rollout, scores, kind):
    """What is worse comes first; all sources are asked before: on other ranks they may act together."""
    asked = []

    class Asked(FixedReward):
        def score(self, rollouts):
            asked.append(self.name)
            return super().score(rollouts)

    sources = {
        Asked("bad", RewardOutput(scores)): 1.0,
        Asked("good", RewardOutput([1.0, 1.0])): 1.0,
    }
    with pytest.raises(RewardError, match=r"^bad: the score of sample 1") as caught:
        score_rollouts(CombinedReward(sources), [make_rollout(i) for i in range(2)])
    assert type(caught.value) is kind
    assert asked == (["bad", "good"] if kind is NonFiniteRewardError else ["bad"])


def test_combined_is_the_weighted_sum(make_rollout):
    rollouts = [make_rollout(i) for i in range(3)]
    task = FixedReward(
        "task",
        RewardOutput([1.0, 0.0, None], {"acc": [1.0, 0.0, None]}, texts={"pred": ["4", None, "5"]}),
    )
    style = FixedReward("style", RewardOutput([0.5, -2.0, 1.0], {}, [None, [1.0, 2.0], None]))
    output = CombinedReward({task: 2.0, style: 0.5}).score(rollouts)
    # 2·1 + 0.5·0.5 = 2.25; 2·0 + 0.5·(−2) = −1; unscored by task
    assert output.scores == [2.25, -1.0, None]
    assert output.metrics == {
        "task": [1.0, 0.0, None],
        "task/acc": [1.0, 0.0, None],
        "style": [0.5, -2.0, 1.0],
    }
    assert output.token_scores == [None, [0.5, 1.0], None]  # 0.5·[1, 2]
    assert output.texts == {"task/pred": ["4", None, "5"]}
    assert join_outputs([RewardOutput([0.0]), output]).texts == {
        "task/pred": [None, "4", None, "5"]
    }


def test_combined_adds_token_scores(make_rollout):
    a, b = (
        FixedReward("a", RewardOutput([0.0], {}, [[1.0]])),
        FixedReward("b", RewardOutput([0.0], {}, [[3.0]])),
    )
    # 2·1 − 1·3
    assert CombinedReward({a: 2.0, b: -1.0}).score([make_rollout(0)]).token_scores == [[-1.0]]


def test_combined_blames_the_source_that_is_wrong(rollouts):
    sources = {
        FixedReward("fine", RewardOutput([1.0] * 5)): 1.0,
        FixedReward("broken", RewardOutput([1.0])): 0.0,
    }
    with pytest.raises(RewardError, match=r"^broken: 1 scores for 5 samples"):
        CombinedReward(sources).score(rollouts)


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ({}, "combined: .* source"),
        ({FixedReward("a", None): 1.0, FixedReward("a", None): 2.0}, "combined: .* named a;"),
        ({FixedReward("a", None): math.inf}, "combined: the weight of a .* inf"),
        ({FixedReward("a", None): "1"}, "combined: the weight of a .* '1'"),
    ],
)
def test_combined_refuses(sources, message):
    with pytest.raises(ValueError, match=message):
        CombinedReward(sources)


def test_combined_is_a_source():
    assert isinstance(CombinedReward({FixedReward("a", None): 1.0}), RewardSource)


# --- routes


class Length:
    """Scores with the number of response ids times ``factor``; remembers the prompt rows of each call."""

    def __init__(self, name, factor=1.0, calls=None, **more):
        self.name = name
        self.factor = factor
        self.calls = calls if calls is not None else []
        self.more = more

    def score(self, rollouts):
        self.calls.append((self.name, [rollout.prompt.index for rollout in rollouts]))
        metrics = {name: [value] * len(rollouts) for name, value in self.more.items()}
        return RewardOutput(
            [self.factor * len(rollout.response_ids) for rollout in rollouts], metrics
        )


@pytest.fixture
def mixed(make_rollout):
    """Rows 100 to 103 with 1 to 4 response ids, of math, code, math and chat."""
    kinds = ("math", "code", "math", "chat")
    return [make_rollout(i, data_source=kind, label=i % 2) for i, kind in enumerate(kinds)]


def test_each_data_source_has_its_weighted_sources(mixed):
    calls = []
    judge, style = Length("judge", 1.0, calls, acc=0.5), Length("style", 10.0, calls)
    reward = RoutedReward(
        {"math": [(judge, 2.0)], "code": [(style, 0.5), (judge, -1.0)], "*": [(style, 1.0)]}
    )
    output = reward.score(mixed)
    # math: 2·1 and 2·3; code: 0.5·20 − 1·2; chat takes "*": 1·40
    assert output.scores == [2.0, 8.0, 6.0, 40.0]
    assert output.metrics == {
        "judge": [1.0, 2.0, 3.0, None],
        "judge/acc": [0.5, 0.5, 0.5, None],
        "style": [None, 20.0, None, 40.0],
    }
    # each once, with all its samples
    assert calls == [("judge", [100, 101, 102]), ("style", [101, 103])]


def test_the_order_of_samples_changes_nothing(mixed):
    reward = RoutedReward({"math": [(Length("a"), 2.0)], "*": [(Length("b", 3.0), 1.0)]})
    assert reward.score(mixed[::-1]).scores == reward.score(mixed).scores[::-1]


def test_label_routes_by_its_text(mixed):
    mixed[3].prompt.label = "one"
    routes = {
        "0": [(Length("even"), 1.0)],
        "1": [(Length("odd"), -1.0)],
        "one": [(Length("word"), 0.5)],
    }
    reward = RoutedReward(routes, by="label")
    assert reward.score(mixed).scores == [1.0, -2.0, 3.0, 2.0]


def test_any_column_routes(mixed):
    for rollout, task in zip(mixed, ("stem", "math", "math", None)):
        rollout.prompt.extra = {"task": task}
    routes = {"math": [(Length("even"), 1.0)], "*": [(Length("odd"), -1.0)]}
    assert RoutedReward(routes, by="task").score(mixed).scores == [-1.0, 2.0, 3.0, -4.0]


def test_an_unknown_route_is_named(mixed):
    reward = RoutedReward(
        {"math": [(Length("a"), 1.0)], "code": [(Length("b"), 1.0)]}, name="by_task"
    )
    with pytest.raises(
        RewardError, match=r"^by_task: .* data source 'chat' of sample 3 .* 'math', 'code'"
    ):
        score_rollouts(reward, mixed)
    assert mixed[0].reward is None


@pytest.mark.parametrize("n", [0, 1, 4])
def test_every_rank_calls_every_source_in_one_order(mixed, n):
    calls = []
    a, b, c = (Length(name, calls=calls) for name in "abc")
    routes = {"code": [(c, 1.0), (a, 1.0)], "math": [(b, 1.0), (c, 1.0)], "*": [(a, 1.0)]}
    assert len(RoutedReward(routes).score(mixed[:n]).scores) == n
    assert [name for name, _ in calls] == ["c", "a", "b"]


def test_unscored_by_one_source_of_the_route_is_unscored(mixed):
    class Silent(Length):
        def score(self, rollouts):
            return RewardOutput([None] * len(rollouts))

    silent, judge = Silent("silent"), Length("judge")
    output = RoutedReward({"math": [(silent, 0.0), (judge, 1.0)], "*": [(judge, 1.0)]}).score(mixed)
    assert output.scores == [None, 2.0, None, 4.0]
    assert output.metrics["judge"] == [1.0, 2.0, 3.0, 4.0]


def test_token_scores_take_the_weight_of_the_route(mixed):
    class Dense(Length):
        def score(self, rollouts):
            rows = [[1.0] * len(rollout.response_ids) for rollout in rollouts]
            return RewardOutput([0.0] * len(rows), {}, rows)

    dense, judge = Dense("dense"), Length("judge")
    output = RoutedReward(
        {"math": [(dense, 2.0)], "code": [(dense, -1.0)], "*": [(judge, 1.0)]}
    ).score(mixed)
    assert output.token_scores == [[2.0], [-1.0, -1.0], [2.0] * 3, None]


def test_failures_are_added_up_over_the_sources(mixed):
    inner = CombinedReward(
        {Length("a", failures=1.0): 1.0, Length("b", failures=2.0, timeouts=1.0): 1.0}, "inner"
    )
    output = RoutedReward(
        {"math": [(inner, 1.0), (Length("c", failures=4.0), 1.0)], "*": [(Length("d"), 1.0)]}
    )
    metrics = output.score(mixed).metrics
    assert metrics["inner/failures"] == [3.0, None, 3.0, None]  # 1 + 2
    assert metrics["failures"] == [7.0, 0, 7.0, 0]  # 3 + 4; d counts none
    assert metrics["timeouts"] == [1.0, 0, 1.0, 0]


def test_needs_all_ranks_where_one_source_does():
    model = Length("model")
    assert not RoutedReward({"*": [(model, 1.0)]}).needs_all_ranks
    model.needs_all_ranks = True
    assert RoutedReward({"math": [(Length("a"), 1.0)], "*": [(model, 1.0)]}).needs_all_ranks
    assert CombinedReward({CombinedReward({model: 1.0}): 1.0}).needs_all_ranks


def test_each_sample_is_judged_alone_if_all_sources_do():
    alone = FormatReward("think")
    assert CombinedReward({alone: 1.0, CombinedReward({MathReward(): 1.0}): 0.5}).per_sample
    assert not CombinedReward({alone: 1.0, Length("a"): 1.0}).per_sample
    assert not hasattr(CodeReward, "per_sample")  # it fails where all programs of a call do


TWICE = Length("twice")


@pytest.mark.parametrize(
    ("routes", "options", "message"),
    [
        ({}, {}, "routed: .* source"),
        ({"math": []}, {}, "routed: .* source"),
        ({"math": [(Length("a"), math.nan)]}, {}, "the weight of a .* nan"),
        ({"math": [(Length("a"), 1.0)], "*": [(Length("a"), 1.0)]}, {}, "named a;"),
        ({"math": [(TWICE, 1.0), (TWICE, 2.0)]}, {}, "twice .* 'math'"),
    ],
)
def test_bad_routes_are_refused(routes, options, message):
    with pytest.raises(ValueError, match=message):
        RoutedReward(routes, **options)
