"""Requests over servers: who gets what, and what happens to the requests of a server that is lost."""

import threading

import pytest

from lightppo.rollout.dispatch import Dispatch, NoServerLeftError, ServerLostError, shares

MOST_SECONDS = 120


def test_shares_cost_the_same():
    # dearest first, to the cheaper part: 5 | 4; 3 → second (7); 3 → first (8); 3 → second (10)
    assert shares([5, 4, 3, 3, 3], 2) == [[0, 3], [1, 2, 4]]
    assert shares([1, 9, 1], 2) == [[1], [0, 2]]
    assert shares([], 2) == [[], []]


def test_callers_prefer_different_parts_among_equals():
    assert shares([7], 3, first=1) == [[], [0], []]
    assert shares([7, 7], 3, first=2) == [[1], [], [0]]


def run(ask, servers="ab", n=12, concurrency=2):
    dispatch = Dispatch(ask, list(servers), [1.0] * n, concurrency=concurrency)
    return dispatch, list(dispatch.run())


@pytest.mark.parametrize("concurrency", [1, 3, 50])
def test_every_request_is_answered_once(concurrency):
    dispatch, answers = run(lambda server, i: i * i, concurrency=concurrency)
    assert sorted((i, answer) for _, i, answer in answers) == [(i, i * i) for i in range(12)]
    assert dispatch.lost == {}


def test_no_requests():
    assert run(lambda server, i: 1 / 0, n=0)[1] == []


def test_no_more_requests_in_flight_than_allowed():
    lock, now, most = threading.Lock(), {"a": 0, "b": 0}, {"a": 0, "b": 0}
    both = threading.Barrier(2)  # two at a time are reached: both of a server must be inside to get on

    def ask(server, i):
        with lock:
            now[server] += 1
            most[server] = max(most[server], now[server])
        if server == "a":
            both.wait(MOST_SECONDS)
        with lock:
            now[server] -= 1

    run(ask, servers="a", n=12, concurrency=2)
    assert most["a"] == 2


def test_the_others_take_over_what_a_lost_server_leaves():
    def ask(server, i):
        if server == "a":
            raise ServerLostError("a is dead")
        return server

    dispatch, answers = run(ask)
    assert sorted(i for _, i, _ in answers) == list(range(12))
    assert {answer for _, _, answer in answers} == {"b"}
    assert dispatch.lost == {"a": "a is dead"}


def test_a_server_that_is_through_waits_for_what_may_come_back():
    others_done = threading.Semaphore(0)

    def ask(server, i):
        if server == "b":
            others_done.release()
            return "b"
        for _ in range(11):  # b has answered all the rest, and has nothing left to do
            assert others_done.acquire(timeout=MOST_SECONDS)
        raise ServerLostError("late")

    dispatch, answers = run(ask, concurrency=1)
    assert sorted(i for _, i, _ in answers) == list(range(12))
    assert dispatch.lost == {"a": "late"}


def test_a_fast_server_takes_from_a_slow_one():
    release = threading.Event()

    def ask(server, i):
        if server == "a":
            assert release.wait(MOST_SECONDS)
        return server

    dispatch = Dispatch(ask, ["a", "b"], [1.0] * 12, concurrency=1)
    answers = []
    for answer in dispatch.run():
        answers.append(answer)
        if len(answers) == 11:  # a is still at its first request
            release.set()
    assert sorted(server for server, _, _ in answers) == ["a"] + ["b"] * 11


def test_nothing_is_taken_over_from_a_server_with_room_for_it():
    _, answers = run(lambda server, i: server, concurrency=6)
    assert sorted(server for server, _, _ in answers) == ["a"] * 6 + ["b"] * 6


def test_without_any_server_left_all_reasons_are_told():
    def ask(server, i):
        raise ServerLostError(f"{server} is dead")

    with pytest.raises(NoServerLeftError) as caught:
        run(ask, servers="abc")
    assert caught.value.reasons == {"a": "a is dead", "b": "b is dead", "c": "c is dead"}


def test_another_error_ends_the_batch():
    asked = []

    def ask(server, i):
        asked.append(i)
        raise PermissionError("no")

    with pytest.raises(PermissionError, match="no"):
        run(ask, servers="a", n=500, concurrency=1)
    assert asked == [0]
