"""A run that hangs ends and says where; where a rank fails, the others do not hide why. Ranks of ranks/hanging.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.ranks import ENVIRONMENT, free_port, run_ranks

from lightppo.distributed import watchdog
from lightppo.ranks import heartbeat

SCRIPT = Path(__file__).parent / "ranks" / "hanging.py"
REWARD = """
import asyncio
import threading

def hang(queries, prompts, labels):
    threading.Event().wait()  # line 6

async def hang_async(prompts, completions, **rest):
    await never()

async def never():
    await asyncio.Event().wait()  # line 12
"""


@pytest.fixture
def start(tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)

    def start(case: str, **how):
        return run_ranks(SCRIPT, case, tmp_path / "reward.py", 1.5, check=False, **how)

    return start


@pytest.mark.parametrize(
    ("ranks", "case", "line", "torch"),
    [
        (1, "hang", "6 in hang", "new"),
        (2, "hang_async", "12 in never", "new"),
        # `make test-lowest` has that torch
        pytest.param(2, "hang", "6 in hang", "2.6", marks=pytest.mark.long),
    ],
)
def test_a_hang_names_rank_phase_and_the_line_of_the_user_and_ends_the_run(
    start, tmp_path, ranks, case, line, torch
):
    ended = start(case, world_size=ranks, env={"AS_TORCH": torch})
    said = ended.output
    assert ended.returncode == 124, said
    assert said.count("the rollout is done") == ranks  # longer than the limit, and not ended
    last = ranks - 1
    assert f"[rank {last}] hangs, without a sign of life for" in said
    assert "step 4, phase reward" in said
    assert (
        f"[rank {last}] your code is at {tmp_path}/reward.py:{line}; --reward_timeout limits a call"
        in said
    )
    assert "thread MainThread:" in said
    assert said.rstrip().endswith("--dist_timeout (minutes)")
    assert "Timed out" not in said
    if ranks == 2:
        assert "step 4, phase train" in said
        assert "in all_reduce" in said  # the stack of the rank that waits
        assert "rank 1 (phase reward) lags behind: the others wait for it" in said


def test_a_rank_that_lags_is_named_where_no_stack_tells_who_waits(start):
    """With NCCL ranks wait in code of ours, for a number from the GPU."""
    said = start("hang_as_nccl").output
    assert said.count("in wait_outside_torch") >= 2
    assert "rank 1 (phase train) lags behind: the others wait for it" in said


@pytest.mark.parametrize(
    ("issued", "late"),
    [
        ({0: {"world": 5}, 1: {"world": 4}}, [1]),
        ({0: {"world": 5}, 1: {"world": 5}}, []),
        ({0: {}, 1: {}}, []),
        # ranks 0 and 1 wait for 2 and 3 in the world; 2 waits for 3 in their pair
        (
            {
                0: {"all": 9, "a": 2},
                1: {"all": 9, "a": 2},
                2: {"all": 8, "b": 3},
                3: {"all": 8, "b": 2},
            },
            [3],
        ),
        ({0: {"all": 9}, 1: {"all": 7}, 2: {"all": 8}}, [1]),
    ],
)
def test_who_is_behind(issued, late):
    assert watchdog._behind(issued) == late


@pytest.mark.parametrize(
    ("launcher", "tracebacks"),
    [
        ("fork", 1),
        # the rank's own, torchrun's, and the rank's again in its last lines
        pytest.param("torchrun", 3, marks=pytest.mark.long),
    ],
)
def test_the_cause_is_the_last_error_and_the_other_rank_is_quiet(start, launcher, tracebacks):
    ended = start("error", launcher=launcher)
    assert ended.returncode == 1
    assert "KeyError: 'the cause'" in "".join(ended.output.rstrip().splitlines()[-4:])
    assert ended.output.count("Traceback") == tracebacks
    assert "Connection closed" not in ended.output


@pytest.mark.learning
def test_a_rank_that_ends_without_a_word_is_named_by_the_other(tmp_path):
    """Nobody but the test waits for the ranks, so that the end of one can be seen by the other, whenever it looks."""
    where = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = []
    with (tmp_path / "log").open("wb") as log:
        for rank in ("0", "1"):
            environment = {**os.environ, **ENVIRONMENT, **where, "RANK": rank, "LOCAL_RANK": rank}
            command = [sys.executable, str(SCRIPT), "kill", "", "100"]
            ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    try:
        line = "[rank 1] ended without an error of its own: killed by signal 9 (SIGKILL)"
        deadline = time.monotonic() + 200
        while line not in (said := (tmp_path / "log").read_text()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert line in said, said
        assert "Traceback" not in said
        ranks[0].terminate()  # as a launcher does
        assert ranks[0].wait(60) == -signal.SIGTERM
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.mark.parametrize(
    ("idle", "says"),
    [
        (1.0, "hangs, without a sign of life for 1 s"),  # another rank was the first to notice
        (0.5, "moves, but another rank hangs"),
    ],
)
def test_a_rank_that_is_silent_does_not_say_that_it_moves(monkeypatch, idle, says):
    monkeypatch.setattr(heartbeat, "limit", 1.5)
    assert f"[rank 0] {says}: step" in watchdog.Watchdog()._report(idle)


class SilentStore:
    """Of a machine that is cut off: nobody answers, and nobody says so."""

    def check(self, keys: list[str]) -> bool:
        return threading.Event().wait()


def test_a_store_that_does_not_answer_keeps_no_rank_from_its_end(monkeypatch):
    looking, ended = watchdog.Watchdog(), threading.Event()
    told = []

    def end(idle: float) -> None:
        told.append(looking._tell({}))
        looking._done.set()
        ended.set()

    monkeypatch.setattr(looking, "_end", end)
    monkeypatch.setattr(looking, "_meet", lambda: setattr(looking, "_store", SilentStore()))
    monkeypatch.setattr(heartbeat, "limit", 2.0)
    monkeypatch.setattr(heartbeat, "phase", "actor_update")
    with looking:
        assert ended.wait(60)
    assert told == [False]  # it says itself where it is
