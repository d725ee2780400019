"""Calls of reward functions in threads, loops and processes, and again where they failed."""

import asyncio
import functools
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightppo.data.records import Rollout
from lightppo.errors import NonFiniteRewardError, RewardError
from lightppo.rewards.function import (
    FunctionReward,
    LoopRunner,
    ThreadRunner,
    function_spec,
    settle,
)
from lightppo.rewards.reward_source import AsyncScorer, score_rollouts
from lightppo.rollout.engine import SamplingParams
from lightppo.rollout.sampler import RolloutSampler
from lightppo.user_code import Outcome, UserCall, load_python_function

Make = Callable[..., Rollout]
MOST_SECONDS = 60  # until what never comes fails a test
TARGETS = Path(__file__).parents[1] / "support" / "fixtures" / "runner_targets.py"


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """What hanging threads of a test wait for, so that none outlives it."""
    event = threading.Event()
    yield event
    event.set()


# many slow calls


def slow(solution_str: str, ground_truth: str) -> float:
    time.sleep(0.05)
    return float(ground_truth)


def concurrent(most: list[int]) -> Callable[..., float]:
    """A slow function that notes in most[0] how many of its calls ran at a time."""
    lock, running = threading.Lock(), [0]

    def score(solution_str: str, ground_truth: str) -> float:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        result = slow(solution_str, ground_truth)
        with lock:
            running[0] -= 1
        return result

    return score


def in_sixteens() -> Callable[..., float]:
    """A function that answers only where 16 of its calls run at a time."""
    meeting = threading.Barrier(16)

    def score(solution_str: str, ground_truth: str) -> float:
        meeting.wait(MOST_SECONDS)
        return float(ground_truth)

    return score


def in_sixteens_async() -> Callable[..., Any]:
    meeting = asyncio.Barrier(16)

    async def score(solution_str: str, ground_truth: str) -> float:
        await asyncio.wait_for(meeting.wait(), MOST_SECONDS)
        return float(ground_truth)

    return score


@pytest.mark.parametrize("make", [in_sixteens, in_sixteens_async])
def test_16_samples_at_a_time_where_nothing_else_is_said(
    make_rollout: Make, make: Callable[[], Any]
) -> None:
    rollouts = [make_rollout(i, label=str(i)) for i in range(64)]
    output = FunctionReward(make(), "slow").score(rollouts)
    assert output.scores == [float(i) for i in range(64)]


@pytest.mark.parametrize(
    ("workers", "timeout", "at_a_time"), [(1, None, 1), (1, 60, 1), (4, None, 4), (4, 60, 4)]
)
def test_as_many_at_a_time_as_there_are_workers(
    make_rollout: Make, workers: int, timeout: float | None, at_a_time: int
) -> None:
    most = [0]
    source = FunctionReward(concurrent(most), "f", reward_workers=workers, reward_timeout=timeout)
    assert source.score([make_rollout(i, label="2") for i in range(12)]).scores == [2.0] * 12
    assert 0 < most[0] <= at_a_time


def test_one_worker_without_a_limit_is_the_thread_of_the_caller(make_rollout: Make) -> None:
    """For functions that use signals, which Python allows in the main thread only."""

    def score(solution_str: str, ground_truth: str) -> float:
        return float(threading.current_thread() is threading.main_thread())

    rollouts = [make_rollout(i) for i in range(3)]
    assert FunctionReward(score, reward_workers=1).score(rollouts).scores == [1.0, 1.0, 1.0]
    assert FunctionReward(score, reward_workers=2).score(rollouts).scores == [0.0, 0.0, 0.0]
    batch = FunctionReward(lambda q, p, labels: [score("", "")] * len(q), "f")
    assert batch.score(rollouts).scores == [1.0, 1.0, 1.0]


# timers


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("timed", {}),
        ("timed", {"reward_workers": 1, "reward_timeout": 60.0, "on_reward_failure": "unscored"}),
        ("timed_later", {}),
        ("timed_by_alarm", {}),
        ("timed_by_math_verify", {}),
    ],
)
def test_timers_in_threads_are_refused(
    make_rollout: Make, name: str, options: dict[str, Any]
) -> None:
    """The function hides the error, and would answer 0 for all."""
    source = FunctionReward(load_python_function(str(TARGETS), name), **options)
    with pytest.raises(
        RewardError, match=r"signal\.(signal|alarm).* --reward_manager prime and --reward_timeout"
    ):
        source.score([make_rollout(i, "so 5", label="5") for i in range(3)])


def test_timers_in_processes_and_in_the_main_thread(make_rollout: Make) -> None:
    pytest.importorskip("math_verify")
    rollouts = [make_rollout(i, "5", label=str(5 + i)) for i in range(2)]
    timed, by_math_verify = (
        load_python_function(str(TARGETS), name) for name in ("timed", "timed_by_math_verify")
    )
    for options in (
        {"reward_manager": "prime", "reward_timeout": 60.0, "reward_workers": 1},
        {"reward_workers": 1},
    ):
        assert FunctionReward(by_math_verify, **options).score(rollouts).scores == [1.0, 0.0]
    scorer = AsyncScorer(FunctionReward(timed, reward_workers=1))
    scorer.submit(rollouts)
    with pytest.raises(RewardError, match="--async_rewards"):
        scorer.collect()
    assert threading.current_thread() is threading.main_thread()
    signal.signal(signal.SIGALRM, signal.signal(signal.SIGALRM, signal.SIG_IGN))  # all others may


# limits and failures


def test_a_hanging_sample_is_left_behind(make_rollout: Make, release: threading.Event) -> None:
    def score(solution_str: str, ground_truth: str) -> float:
        return 1.0 if ground_truth != "hang" else float(release.wait(600))

    rollouts = [make_rollout(i, label="hang" if i in (0, 1, 5) else "x") for i in range(8)]
    options: dict[str, Any] = {"reward_workers": 4, "reward_timeout": 0.3}
    output = FunctionReward(score, **options, on_reward_failure="unscored").score(rollouts)
    assert output.scores == [None, None, 1.0, 1.0, 1.0, None, 1.0, 1.0]
    assert (
        output.metrics["timeouts"] == [1.0, 1.0, 0, 0, 0, 1.0, 0, 0] == output.metrics["failures"]
    )
    with pytest.raises(RewardError, match=r"sample 0 \(prompt row 100"):
        FunctionReward(score, **options).score(rollouts)


def test_a_hanging_batch_function_has_a_limit_too(
    make_rollout: Make, release: threading.Event
) -> None:
    source = FunctionReward(lambda q, p, labels: release.wait(600), "f", reward_timeout=0.2)
    with pytest.raises(RewardError, match=r"reward function f .*batch of 2: .* 0\.2 s"):
        source.score([make_rollout(0), make_rollout(1)])


def test_too_many_hanging_threads_are_an_error(release: threading.Event) -> None:
    runner = ThreadRunner(lambda: release.wait(600), 16, timeout=0.05)
    with pytest.raises(
        RewardError, match=r"^65 calls .*--reward_timeout 0.05.*--reward_manager prime"
    ):
        runner.run([UserCall()] * 200)


async def stubborn(how: str) -> float:
    if how == "blocks":
        time.sleep(2)
    while how == "refuses":
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            continue
    if how == "exits":
        sys.exit(0)
    return 1.0


def test_coroutines_have_a_limit_that_they_cannot_refuse() -> None:
    runner = LoopRunner(stubborn, concurrency=2, timeout=0.3)
    outcomes = runner.run([UserCall((how,)) for how in ("ok", "refuses", "exits", "refuses", "ok")])
    assert [outcome.value for outcome in outcomes] == [1.0, None, None, None, 1.0]
    assert [outcome.timeouts for outcome in outcomes] == [0, 1, 0, 1, 0]
    assert outcomes[2].error.startswith("SystemExit: 0 (")


def test_a_blocked_event_loop_is_left_behind() -> None:
    runner = LoopRunner(stubborn, concurrency=2, timeout=0.05, grace=0.05)
    for _ in range(5):
        assert all(outcome.timeouts for outcome in runner.run([UserCall(("blocks",))]))
    with pytest.raises(RewardError, match=r"event loop 5 times.*--reward_manager prime"):
        runner.run([UserCall(("ok",))])


def test_settle_tries_again_only_what_failed() -> None:
    tries: Counter[int] = Counter()

    def run(calls: list[UserCall]) -> list[Outcome]:
        outcomes = []
        for (i,) in (call.args for call in calls):
            tries[i] += 1
            good = tries[i] > i  # call 0 works at once, 1 the second time, 2 the third
            outcomes.append(Outcome(i) if good else Outcome(error="late", timeouts=int(i == 2)))
        return outcomes

    read = {0: ("a", None), 1: ("b", None), 2: ("part", "not all of it")}
    settled = settle(
        run, [UserCall((i,)) for i in range(3)], lambda i, value: read[value], retries=2
    )
    assert dict(tries) == {0: 1, 1: 2, 2: 3}
    assert [(s.value, s.error, s.failures, s.timeouts) for s in settled] == [
        ("a", None, 0, 0),
        ("b", None, 1, 0),
        # two time-outs, then an answer of which only a part can be used
        ("part", "not all of it", 3, 2),
    ]


def test_a_retry_that_works_is_counted(make_rollout: Make) -> None:
    tries: Counter[str] = Counter()

    def score(solution_str: str, ground_truth: str) -> Any:
        tries[ground_truth] += 1
        return float(ground_truth) if tries[ground_truth] > int(ground_truth) else "garbage"

    rollouts = [make_rollout(i, label=str(i)) for i in range(4)]
    output = FunctionReward(score, reward_retries=2, on_reward_failure="unscored").score(rollouts)
    assert output.scores == [0.0, 1.0, 2.0, None]
    assert output.metrics == {"failures": [0.0, 1.0, 2.0, 3.0], "timeouts": [0.0] * 4}


def test_what_can_be_used_of_a_batch_is_used(make_rollout: Make) -> None:
    rollouts = [make_rollout(i) for i in range(3)]
    answers: list[Any] = [[1.0, float("nan"), None], [1.0], [0.5, "x", None], KeyError("gone")]

    def score(queries: Any, prompts: Any, labels: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return {"rewards": answer, "extra_logs": {"n": [1] * len(answer)}}

    output = FunctionReward(score, reward_retries=3, on_reward_failure="unscored").score(rollouts)
    assert output.scores == [0.5, None, None]  # the last answer with one entry for each
    assert output.metrics == {"n": [1.0] * 3, "failures": [3.0, 4.0, 3.0], "timeouts": [0.0] * 3}
    source = FunctionReward(lambda q, p, labels: [1.0, float("inf"), 0.0], "f")
    with pytest.raises(NonFiniteRewardError, match=r"f: the score of sample 1 .* is inf"):
        source.score(rollouts)
    batch = FunctionReward(lambda solution_strs, ground_truths: [1.0, float("inf"), "x"], "f")
    # the worst of them
    with pytest.raises(RewardError, match=r"sample 2 .*: it returned x;") as caught:
        batch.score(rollouts)
    assert type(caught.value) is RewardError


def test_a_metric_of_the_name_of_a_count_is_an_error(make_rollout: Make) -> None:
    source = FunctionReward(
        lambda solution_str, ground_truth: {"score": 1.0, "failures": 2}, "f", reward_retries=1
    )
    with pytest.raises(RewardError, match=r"f: .*'failures'"):
        source.score([make_rollout(0)])


# a third of all calls fails


def flaky(solution_str: str, ground_truth: str) -> Any:
    """Fails in one of five ways for 3 of 10 samples; the true score is 1."""
    i = int(ground_truth)
    ways: list[Callable[[], Any]] = [
        lambda: time.sleep(3),
        lambda: 1 / 0,
        lambda: "<html>502</html>",
        lambda: float("nan"),
        lambda: {"reward": 1.0},
    ]
    return ways[i // 10 % 5]() if i % 10 in (1, 4, 8) else 1.0


@pytest.mark.parametrize(("manager", "steps"), [("naive", 2), ("prime", 1)])
def test_a_third_of_calls_failing_leaves_a_run_that_finishes(
    make_rollout: Make, manager: Any, steps: int
) -> None:
    fn = flaky if manager == "naive" else load_python_function(str(TARGETS), "flaky_score")
    source = FunctionReward(
        fn, "flaky", reward_manager=manager, reward_workers=8 if manager == "naive" else 2,
        reward_timeout=0.5, on_reward_failure="unscored",
    )  # fmt: skip
    sampler = RolloutSampler(None, source, SamplingParams(n=5), min_group_size=2)  # type: ignore[arg-type]
    unscored = 0
    for step in range(steps):
        rollouts = [make_rollout(i // 5, label=str(i + 50 * step)) for i in range(50)]
        batch = sampler.score(rollouts)
        bad = [i % 10 in (1, 4, 8) for i in range(50)]
        assert [rollout.reward for rollout in rollouts] == [
            None if failed else 1.0 for failed in bad
        ]
        assert batch.counts["reward/failures"] == 15
        # One way of five; on a busy machine another failure may come too late.
        assert 3 <= batch.counts["reward/timeouts"] <= 15
        assert {rollout.reward for rollout in batch.rollouts} == {1.0}
        unscored += len(rollouts) - len(batch.rollouts)
    assert unscored == 15 * steps


# prime


@pytest.fixture
def scorer(tmp_path: Path) -> str:
    path = tmp_path / "scorer.py"
    path.write_text(
        "import os, signal, time\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    if ground_truth == 'hang':\n"
        "        while True: pass\n"
        "    if ground_truth == 'die':\n"
        "        os._exit(1)\n"
        "    return {'score': float(ground_truth), 'pid': os.getpid(), 'level': extra_info['level']}\n"
        "def reward_func(queries, prompts, labels, **extra):\n"
        "    watched = float(hasattr(signal.alarm, '__wrapped__'))\n"
        "    return {'rewards': [float(x) for x in labels], 'extra_logs': {'pid': os.getpid(), 'watched': watched}}\n"
        "def wrong(f):\n"
        "    return lambda solution_str, ground_truth: f(None, solution_str, ground_truth, {'level': 0})\n"
        "wrapped = wrong(compute_score)\n"
    )
    return str(path)


def test_prime_scores_in_processes_that_are_killed(make_rollout: Make, scorer: str) -> None:
    labels = ["1", "hang", "die", "0.5"]
    rollouts = [make_rollout(i, label=label, extra={"level": i}) for i, label in enumerate(labels)]
    source = FunctionReward(
        load_python_function(scorer, "compute_score"),
        reward_manager="prime",
        reward_workers=2,
        reward_timeout=1.0,
        on_reward_failure="unscored",
    )
    score_rollouts(source, rollouts)
    assert [rollout.reward for rollout in rollouts] == [1.0, None, None, 0.5]
    assert [rollout.extras["timeouts"] for rollout in rollouts] == [0, 1, 0, 0]
    assert [rollout.extras["failures"] for rollout in rollouts] == [0, 1, 1, 0]
    assert rollouts[3].extras["level"] == 3.0
    assert rollouts[3].extras["pid"] != os.getpid()


def test_prime_runs_functions_of_a_batch_too(make_rollout: Make, scorer: str) -> None:
    fn = load_python_function(scorer, "reward_func")
    source = FunctionReward(fn, reward_manager="prime", reward_workers=1, reward_timeout=60)
    output = source.score([make_rollout(0, label="3"), make_rollout(1, label="4")])
    assert output.scores == [3.0, 4.0]
    # signal's own functions, while those of this process tell of timers
    assert output.metrics["watched"] == [0.0, 0.0]
    assert hasattr(signal.alarm, "__wrapped__")


def test_prime_with_a_spec(make_rollout: Make, scorer: str) -> None:
    fn = load_python_function(scorer, "wrapped")
    options: dict[str, Any] = {"reward_manager": "prime", "reward_workers": 1, "reward_timeout": 60}
    with pytest.raises(ValueError, match=r"--reward_manager prime: .* reward function <lambda>"):
        FunctionReward(fn, **options)
    assert FunctionReward(fn, **options, spec=f"{scorer}:wrapped").score(
        [make_rollout(0, label="3")]
    ).scores == [3.0]


def test_how_processes_find_a_function(scorer: str) -> None:
    assert (
        function_spec(load_python_function(scorer, "compute_score"), "f")
        == f"{scorer}:compute_score"
    )
    assert function_spec(re.compile, "f") == "re:compile"
    for fn in (lambda: 0, functools.partial(re.compile), Counter().update):
        with pytest.raises(ValueError, match=r"--reward_manager prime: .* f;"):
            function_spec(fn, "f")


@pytest.mark.parametrize(
    ("fn", "options"),
    [
        (slow, {"reward_manager": "batch"}),
        (lambda q, p, labels: [], {"reward_manager": "naive"}),
        (slow, {"reward_manager": "primes"}),
        (slow, {"reward_manager": "prime"}),  # without a limit
        (slow, {"reward_workers": 0}),
        (slow, {"reward_timeout": -1.0}),
        (slow, {"reward_retries": -1}),
        (slow, {"on_reward_failure": "0"}),
    ],
)
def test_options_that_do_not_fit(fn: Callable[..., Any], options: dict[str, Any]) -> None:
    (flag,) = options
    with pytest.raises(ValueError, match=f"--{flag}"):
        FunctionReward(fn, "slow", **options)
