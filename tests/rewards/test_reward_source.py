"""What every source must say, and scoring while generation goes on."""

from __future__ import annotations

import math
import random
import threading
import time

import numpy as np
import pytest
import torch
from support.fakes import FixedReward

from lightppo.data.records import Rollout
from lightppo.errors import NonFiniteRewardError, RewardError
from lightppo.rewards import (
    AsyncScorer,
    CombinedReward,
    RewardModelSource,
    RewardOutput,
    check_output,
    score_rollouts,
)
from lightppo.rewards.reward_source import WholeGroups, join_outputs, split_output


def test_check_makes_plain_floats(rollouts):
    output = RewardOutput(
        [True, np.float32(0.5), torch.tensor(2.0), None, 3],
        {"m": torch.arange(5)},
        [[1]] + [None] * 4,
    )
    checked = check_output(output, rollouts, "s")
    assert checked.scores == [1.0, 0.5, 2.0, None, 3.0]
    assert [type(score) for score in checked.scores] == [float, float, float, type(None), float]
    assert checked.metrics == {"m": [0.0, 1.0, 2.0, 3.0, 4.0]}
    assert checked.token_scores == [[1.0], None, None, None, None]


class Unreadable(float):
    def __float__(self):
        raise ValueError("boom")


@pytest.mark.parametrize(
    "bad",
    [Unreadable(1.0), math.nan, math.inf, -math.inf, "1.0", [1.0], 10**400, torch.tensor(math.nan)],
)
@pytest.mark.parametrize("where", ["score", "metric"])
def test_check_names_source_sample_and_prompt_of_a_bad_number(rollouts, bad, where):
    values = [0.0, 0.0, bad, 0.0, 0.0]
    output = RewardOutput(values) if where == "score" else RewardOutput([0.0] * 5, {"len": values})
    with pytest.raises(
        RewardError,
        match=rf"^judge: the {where}.* of sample 2 \(prompt row 102, .*'question 2: '\) is",
    ):
        check_output(output, rollouts, "judge")


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (RewardOutput([1.0] * 4), "judge: 4 scores for 5 samples"),
        (RewardOutput([1.0] * 5, {"m": [1.0]}), "judge: 1 metric 'm's for 5 samples"),
        (RewardOutput([1.0] * 5, {1: [1.0] * 5}), "judge: metric names .* 1$"),
        (RewardOutput(torch.zeros(5, 1)), r"judge: scores .*\(5, 1\)"),
        (RewardOutput(0.5), "judge: scores .* float"),
        (RewardOutput([1.0] * 5, {}, [None]), "1 rows of token scores for 5 samples"),
        (
            RewardOutput([1.0] * 5, {}, [None, [1.0], None, None, None]),
            "1 token scores for the 2 response tokens",
        ),
        (
            RewardOutput([1.0] * 5, {}, [None, [1.0, math.nan], None, None, None]),
            "token score 1 of sample 1 .* is nan",
        ),
        ([1.0] * 5, "judge: .*RewardOutput.* list"),
    ],
)
def test_check_refuses(rollouts, output, message):
    with pytest.raises(RewardError, match=message):
        check_output(output, rollouts, "judge")


def test_score_rollouts_writes_into_the_samples(rollouts):
    rollouts[0].extras["kept"] = 7.0
    output = RewardOutput([1, None, 0, 0, 0], {"acc": [1, None, 0, 0, 0]}, [[0.5]] + [None] * 4)
    score_rollouts(FixedReward("s", output), rollouts)
    assert [rollout.reward for rollout in rollouts] == [1.0, None, 0.0, 0.0, 0.0]
    assert rollouts[0].extras == {"kept": 7.0, "acc": 1.0}
    assert rollouts[1].extras == {}
    assert rollouts[0].token_rewards == [0.5]
    assert rollouts[1].token_rewards is None


def test_score_rollouts_changes_nothing_on_error(rollouts):
    with pytest.raises(RewardError, match=r"^s: the score of sample 4"):
        score_rollouts(FixedReward("s", RewardOutput([1.0, 1.0, 1.0, 1.0, math.nan])), rollouts)
    assert all(rollout.reward is None and rollout.extras == {} for rollout in rollouts)


# --- in the background: what happens in which order is settled by events, not by time


SECONDS = 60  # until an event that never comes fails a test


class Gated:
    """Scores with the number of response ids; tells when it begins and waits for its gate."""

    name = "gated"

    def __init__(self, *, is_open=True):
        self.began, self.gate = threading.Event(), threading.Event()
        self.threads = []
        self.calls = []
        if is_open:
            self.gate.set()

    def score(self, rollouts):
        self.calls.append([rollout.prompt.index for rollout in rollouts])
        self.threads.append(threading.get_ident())
        self.began.set()
        assert self.gate.wait(SECONDS)
        scores = [float(len(rollout.response_ids)) for rollout in rollouts]
        return RewardOutput(scores, {"half": [score / 2 for score in scores]})


@pytest.fixture
def closing():
    scorers = []

    def make(*args, **options):
        scorers.append(AsyncScorer(*args, **options))
        return scorers[-1]

    yield make
    for scorer in scorers:
        scorer.close()


def test_scoring_begins_before_generation_ends(rollouts, closing):
    source = Gated(is_open=False)
    scorer = closing(source)
    scorer.submit(rollouts[:2])  # the first micro batch; the engine decodes the second
    assert source.began.wait(SECONDS)
    assert rollouts[0].reward is None  # and generation has not ended
    scorer.submit(rollouts[2:])
    source.gate.set()
    output = scorer.collect()
    assert source.calls == [[100, 101], [102, 103, 104]]
    assert threading.get_ident() not in source.threads
    assert output == RewardOutput([1.0, 2.0, 3.0, 4.0, 5.0], {"half": [0.5, 1.0, 1.5, 2.0, 2.5]})
    assert [rollout.reward for rollout in rollouts] == output.scores
    assert rollouts[4].extras == {"half": 2.5}


def test_the_same_as_scoring_at_the_end(make_rollout, closing):
    ours, theirs = ([make_rollout(i) for i in range(5)] for _ in range(2))
    scorer = closing(Gated(), max_workers=3)
    for k in (3, 0, 4, 1, 2):  # parts come as they are finished
        scorer.submit([ours[k]])
    scorer.collect()
    score_rollouts(Gated(), theirs)
    assert ours == theirs


@pytest.mark.parametrize("seed", range(10))
def test_groups_are_whole_and_in_order_however_their_answers_end(make_rollout, seed):
    samples = [make_rollout(i // 3) for i in range(9)]
    for i, rollout in enumerate(samples):
        rollout.sample_index = i % 3
    greedy = [make_rollout(i) for i in range(3)]
    prompts = [rollout.prompt for rollout in greedy]
    events = [*((0, rollout) for rollout in samples), *((1, rollout) for rollout in greedy)]
    random.Random(seed).shuffle(events)
    whole: list[list[Rollout]] = []
    groups = WholeGroups(prompts, 4, whole.append)
    for call, rollout in events:
        groups.add(call, [rollout])
    whole.sort(key=lambda group: group[0].prompt.index)
    expected = [[*samples[3 * i : 3 * i + 3], greedy[i]] for i in range(3)]
    assert [list(map(id, group)) for group in whole] == [list(map(id, group)) for group in expected]


def test_samples_that_are_judged_alone_go_together_where_they_wait(rollouts, closing):
    source = Gated(is_open=False)
    source.per_sample = True
    scorer = closing(source)
    scorer.submit(rollouts[:1])
    assert source.began.wait(SECONDS)
    for part in (rollouts[1:2], rollouts[2:4], rollouts[4:]):
        scorer.submit(part)
    source.gate.set()
    output = scorer.collect()
    assert source.calls == [[100], [101, 102, 103, 104]]
    assert output == RewardOutput([1.0, 2.0, 3.0, 4.0, 5.0], {"half": [0.5, 1.0, 1.5, 2.0, 2.5]})


def test_an_answer_is_split_as_it_was_joined():
    parts = [
        RewardOutput([1.0, None], {"m": [1.0, None]}, [[0.5], None], {"pred": ["a", None]}),
        RewardOutput([], {"m": []}, [], {"pred": []}),
        RewardOutput([3.0], {"m": [2.0]}, [[1.0, 2.0]], {"pred": ["b"]}),
    ]
    assert split_output(join_outputs(parts), [2, 0, 1]) == parts


def test_used_again_and_without_samples(rollouts, closing):
    source = Gated()
    scorer = closing(source)
    assert scorer.collect() == RewardOutput([])
    for part in (rollouts[:1], rollouts[1:]):
        scorer.submit(part)
        assert scorer.collect().scores == [float(len(rollout.response_ids)) for rollout in part]
    assert len(set(source.threads)) == 1


def test_several_workers_score_at_the_same_time(rollouts, closing):
    meeting = threading.Barrier(2)  # passed only by two at a time

    class Meeting(Gated):
        def score(self, rollouts):
            meeting.wait(SECONDS)
            return super().score(rollouts)

    scorer = closing(Meeting(), max_workers=2)
    scorer.submit(rollouts[:1])
    scorer.submit(rollouts[1:2])
    assert scorer.collect().scores == [1.0, 2.0]


@pytest.mark.parametrize(
    "error", [RewardError("the judge is ill"), ZeroDivisionError("oops"), SystemExit(3)]
)
def test_errors_come_up_when_collected(rollouts, closing, error):
    class Failing(Gated):
        def score(self, rollouts):
            if rollouts[0].prompt.index == 100:
                raise NonFiniteRewardError("the score is nan")  # which gives way to what is worse
            if rollouts[0].prompt.index == 101:
                raise error
            return super().score(rollouts)

    scorer = closing(Failing())
    for rollout in rollouts:
        scorer.submit([rollout])
    with pytest.raises(type(error)) as caught:
        scorer.collect()
    assert caught.value is error
    assert [rollout.reward for rollout in rollouts] == [None] * 5  # all or none
    scorer.submit(rollouts[2:3])
    # the thread lives on, and the error is not raised again
    assert scorer.collect().scores == [3.0]


def test_what_is_no_answer_is_an_error(rollouts, closing):
    class Short(Gated):
        def score(self, rollouts):
            return RewardOutput([1.0])

    scorer = closing(Short())
    scorer.submit(rollouts)
    with pytest.raises(RewardError, match=r"^gated: 1 scores for 5 samples"):
        scorer.collect()


def test_a_source_that_hangs_is_a_time_out(rollouts, closing):
    before = set(threading.enumerate())
    source = Gated(is_open=False)
    scorer = closing(source, timeout=0.05)
    scorer.submit(rollouts[:2])
    scorer.submit(rollouts[2:])
    assert source.began.wait(SECONDS)
    with pytest.raises(RewardError, match=r"^gated: 5 of 5 samples .* 0.05 s"):
        scorer.collect()
    assert all(rollout.reward is None for rollout in rollouts)
    with pytest.raises(RuntimeError, match="AsyncScorer"):
        scorer.submit(rollouts)
    source.gate.set()
    deadline = time.monotonic() + SECONDS
    while set(threading.enumerate()) - before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert source.calls == [[100, 101]]  # nothing more is begun


def test_what_is_left_at_the_end_is_not_scored_silently(rollouts):
    source = Gated(is_open=False)
    scorer = AsyncScorer(source)
    scorer.submit(rollouts[:2])
    scorer.submit(rollouts[2:])
    assert source.began.wait(SECONDS)
    scorer.close()
    source.gate.set()
    with pytest.raises(RewardError, match=r"^gated: "):
        scorer.collect()


def test_sources_of_all_ranks_are_refused():
    model = RewardModelSource(
        [lambda s, m: s[:, 0]], device="cpu", pad_token_id=0, micro_batch_size=1
    )
    for source in (model, CombinedReward({Gated(): 1.0, model: 1.0})):
        with pytest.raises(ValueError, match=r"^--async_rewards: "):
            AsyncScorer(source)


def test_bad_options_are_refused():
    for options in ({"max_workers": 0}, {"timeout": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            AsyncScorer(Gated(), **options)
