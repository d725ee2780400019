"""Scoring while generation goes on; what happens in which order is settled by events, not by time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lightppo.data.records import Rollout
from lightppo.errors import RewardError
from lightppo.rewards import AsyncScorer, CombinedReward, RewardModelSource, RewardOutput, score_rollouts

SECONDS = 60  # until an event that never comes fails a test


class Gated:
    """Scores with the number of response ids; tells when it begins and waits for its gate."""

    name = "gated"

    def __init__(self, *, is_open: bool = True) -> None:
        self.began, self.gate = threading.Event(), threading.Event()
        self.threads: list[int] = []
        self.calls: list[list[int]] = []
        if is_open:
            self.gate.set()

    def score(self, rollouts: list[Rollout]) -> RewardOutput:
        self.calls.append([rollout.prompt.index for rollout in rollouts])
        self.threads.append(threading.get_ident())
        self.began.set()
        assert self.gate.wait(SECONDS)
        scores = [float(len(rollout.response_ids)) for rollout in rollouts]
        return RewardOutput(scores, {"half": [score / 2 for score in scores]})


@pytest.fixture
def closing() -> Iterator[Callable[..., AsyncScorer]]:
    scorers: list[AsyncScorer] = []

    def make(*args: Any, **options: Any) -> AsyncScorer:
        scorers.append(AsyncScorer(*args, **options))
        return scorers[-1]

    yield make
    for scorer in scorers:
        scorer.close()


def test_scoring_begins_before_generation_ends(rollouts: list[Rollout], closing: Callable[..., AsyncScorer]) -> None:
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


def test_the_same_as_scoring_at_the_end(
    make_rollout: Callable[..., Rollout], closing: Callable[..., AsyncScorer]
) -> None:
    ours, theirs = ([make_rollout(i) for i in range(5)] for _ in range(2))
    scorer = closing(Gated(), max_workers=3)
    for k in (3, 0, 4, 1, 2):  # parts come as they are finished
        scorer.submit([ours[k]])
    scorer.collect()
    score_rollouts(Gated(), theirs)
    assert ours == theirs


def test_used_again_and_without_samples(rollouts: list[Rollout], closing: Callable[..., AsyncScorer]) -> None:
    source = Gated()
    scorer = closing(source)
    assert scorer.collect() == RewardOutput([])
    for part in (rollouts[:1], rollouts[1:]):
        scorer.submit(part)
        assert scorer.collect().scores == [float(len(rollout.response_ids)) for rollout in part]
    assert len(set(source.threads)) == 1


def test_several_workers_score_at_the_same_time(rollouts: list[Rollout], closing: Callable[..., AsyncScorer]) -> None:
    meeting = threading.Barrier(2)  # passed only by two at a time

    class Meeting(Gated):
        def score(self, rollouts: list[Rollout]) -> RewardOutput:
            meeting.wait(SECONDS)
            return super().score(rollouts)

    scorer = closing(Meeting(), max_workers=2)
    scorer.submit(rollouts[:1])
    scorer.submit(rollouts[1:2])
    assert scorer.collect().scores == [1.0, 2.0]


@pytest.mark.parametrize("error", [RewardError("the judge is ill"), ZeroDivisionError("oops"), SystemExit(3)])
def test_errors_come_up_when_collected(
    rollouts: list[Rollout], closing: Callable[..., AsyncScorer], error: BaseException
) -> None:
    class Failing(Gated):
        def score(self, rollouts: list[Rollout]) -> RewardOutput:
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
    assert scorer.collect().scores == [3.0]  # the thread lives on, and the error is not raised again


def test_what_is_no_answer_is_an_error(rollouts: list[Rollout], closing: Callable[..., AsyncScorer]) -> None:
    class Short(Gated):
        def score(self, rollouts: list[Rollout]) -> RewardOutput:
            return RewardOutput([1.0])

    scorer = closing(Short())
    scorer.submit(rollouts)
    with pytest.raises(RewardError, match=r"^gated: 1 scores for 5 samples"):
        scorer.collect()


def test_a_source_that_hangs_is_a_time_out(rollouts: list[Rollout], closing: Callable[..., AsyncScorer]) -> None:
    source = Gated(is_open=False)
    scorer = closing(source, timeout=0.05)
    scorer.submit(rollouts[:2])
    scorer.submit(rollouts[2:])
    assert source.began.wait(SECONDS)
    with pytest.raises(RewardError, match=r"^gated: 5 of 5 samples were not scored 0.05 s after the end of generation"):
        scorer.collect()
    assert all(rollout.reward is None for rollout in rollouts)
    with pytest.raises(RuntimeError, match="has ended"):
        scorer.submit(rollouts)
    source.gate.set()
    for thread in scorer._threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
    assert source.calls == [[100, 101]]  # nothing more is begun


def test_what_is_left_at_the_end_is_not_scored_silently(rollouts: list[Rollout]) -> None:
    source = Gated(is_open=False)
    scorer = AsyncScorer(source)
    scorer.submit(rollouts[:2])
    scorer.submit(rollouts[2:])
    assert source.began.wait(SECONDS)
    scorer.close()
    source.gate.set()
    with pytest.raises(RewardError, match="gated: scoring was ended before these samples"):
        scorer.collect()


def test_sources_of_all_ranks_are_refused() -> None:
    model = RewardModelSource([lambda s, m: s[:, 0]], device="cpu", pad_token_id=0, micro_batch_size=1)
    for source in (model, CombinedReward({Gated(): 1.0, model: 1.0})):
        with pytest.raises(ValueError, match=r"^--async_rewards: .* reward model"):
            AsyncScorer(source)


def test_bad_options_are_refused() -> None:
    with pytest.raises(ValueError, match="max_workers must be at least 1"):
        AsyncScorer(Gated(), 0)
    with pytest.raises(ValueError, match="timeout must be > 0"):
        AsyncScorer(Gated(), timeout=0)
