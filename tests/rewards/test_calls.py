"""The calls of a reward function where no plugin makes them: one after the other, in the thread that asks."""

from __future__ import annotations

import threading

from lightppo.rewards.calls import OneByOne
from lightppo.rewards.source import Call


def test_calls_are_made_in_their_order_in_this_thread():
    seen = []

    def score(number: int, *, factor: int = 1) -> int:
        seen.append((number, threading.current_thread()))
        return number * factor

    outcomes = OneByOne(score).run([Call((3,)), Call((1,), {"factor": 5}), Call((2,))])
    assert [outcome.value for outcome in outcomes] == [3, 5, 2]
    assert seen == [(number, threading.current_thread()) for number in (3, 1, 2)]


def test_what_a_call_raises_is_in_its_outcome():
    def score(number: int) -> float:
        if number == 0:
            raise SystemExit("no more")
        return 1 / (number - 1)

    ended, fails, scored = OneByOne(score).run([Call((0,)), Call((1,)), Call((2,))])
    assert isinstance(ended.cause, SystemExit)
    assert "ZeroDivisionError" in fails.error
    assert isinstance(fails.cause, ZeroDivisionError)
    assert (scored.value, scored.error) == (1.0, None)


def test_coroutines_are_awaited():
    async def score(number: int) -> int:
        return number + 1

    assert [outcome.value for outcome in OneByOne(score).run([Call((1,)), Call((2,))])] == [2, 3]
