"""DueTimes by steps, episodes and a clock that the test moves."""

from __future__ import annotations

import pytest
from support.fakes import FakeStrategy, on_ranks

from lightppo.config import PPOConfig
from lightppo.trainer.due_times import DueTimes
from lightppo.trainer.run_callbacks import saves


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def due_steps(due_times: DueTimes, steps: range) -> list[int]:
    return [step for step in steps if due_times.due(step)]


@pytest.mark.parametrize(
    ("steps", "expected"), [(1, [1, 2, 3, 4, 5, 6]), (3, [3, 6]), (0, []), (-1, [])]
)
def test_every_n_steps(steps, expected):
    assert due_steps(DueTimes(steps), range(1, 7)) == expected


def test_steps_count_from_the_start_of_the_run_also_after_a_resume():
    assert due_steps(DueTimes(4), range(6, 13)) == [8, 12]


def test_every_n_episodes_only_at_their_end():
    due_times = DueTimes(epochs=2)
    ends = {3: 1, 6: 2, 9: 3, 12: 4}
    assert [step for step in range(1, 13) if due_times.due(step, ends.get(step))] == [6, 12]


def test_seconds_count_from_the_last_time():
    clock = Clock()
    due_times = DueTimes(seconds=10, clock=clock)
    found = []
    for step, clock.now in enumerate(
        [1005.0, 1009.9, 1010.0, 1015.0, 1019.9, 1021.0, 1030.0], start=1
    ):
        found.append((step, due_times.due(step)))
    # Due at 1010 (10 s after 1000) and at 1021 (not before 1020); the next would be 1031.
    assert [step for step, due in found if due] == [3, 6]


def test_whichever_comes_first_starts_the_clock_anew():
    clock = Clock()
    due_times = DueTimes(4, epochs=1, seconds=10, clock=clock)
    found = {}
    for step, clock.now in enumerate([1009.0, 1011.0, 1019.0, 1020.0, 1029.0, 1030.0], start=1):
        found[step] = due_times.due(step, finished_episodes=1 if step == 5 else None)
    # 2: 11 s after the start. 4: by steps, 9 s after step 2. 5: end of an episode. 6: 1 s after step 5.
    assert found == {1: False, 2: True, 3: False, 4: True, 5: True, 6: False}


@pytest.mark.parametrize(
    ("options", "is_made"),
    [
        ({}, False),
        ({"save_steps": 2}, True),
        ({"save_epochs": 1}, True),
        ({"save_seconds": 9}, True),
    ],
)
def test_a_run_that_saves_only_its_end_has_no_clock(options, is_made):
    assert saves(PPOConfig.from_flat(**options).checkpoint) is is_made


def test_rank_0_clock_decides_for_all():
    def found(strategy: FakeStrategy) -> list[bool]:
        clock = Clock()
        due_times = DueTimes(seconds=10, agree=strategy.broadcast_object, clock=clock)
        result = []
        # Rank 1's clock runs ahead: by its own it would be due at once.
        for clock.now in ([1001.0, 1012.0, 1013.0], [1050.0, 1060.0, 1061.0])[strategy.rank]:
            result.append(due_times.due(1))
        return result

    assert on_ranks(2, found) == [[False, True, False]] * 2


def test_ranks_agree_also_where_a_step_is_due_anyway():
    """A rank that left out the agreement would leave the others waiting."""

    def collectives(strategy: FakeStrategy) -> int:
        due_times = DueTimes(1, seconds=10, agree=strategy.broadcast_object, clock=Clock())
        for step in range(1, 4):
            due_times.due(step)
        return strategy.collectives

    assert on_ranks(2, collectives) == [3, 3]
