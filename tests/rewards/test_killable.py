import gc
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightppo.errors import RewardError, WorkerStartError
from lightppo.rewards.killable import KillablePool, default_processes
from lightppo.rewards.source import Call

TARGETS = Path(__file__).with_name("killable_targets.py")
Behave = Callable[..., list[Any]]


def ended(pid: int, within: float = 60.0) -> bool:
    """True once no such process runs (a zombie does not)."""
    end = time.monotonic() + within
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


@pytest.fixture(scope="module")
def pool() -> Iterator[KillablePool]:
    """One whose time limit no test reaches."""
    with KillablePool(f"{TARGETS}:behave", workers=2, timeout=60.0, memory_mb=300) as pool:
        yield pool


@pytest.fixture
def behave(pool: KillablePool) -> Behave:
    return lambda *hows: pool.run([Call((how,), {"value": 0.5}) for how in hows])


def test_answers_in_order(pool: KillablePool) -> None:
    outcomes = pool.run([Call(("ok", float(i))) for i in range(50)])
    assert [outcome.value for outcome in outcomes] == [float(i) for i in range(50)]
    assert pool.run([]) == []


def test_values_of_numpy_come_as_pythons(behave: Behave) -> None:
    assert behave("numpy")[0].value == {"score": 0.5, "all": [0, 1, 2]}


def test_what_exceeds_the_limit_is_killed() -> None:
    hows = ["sleep", "loop", "hold_the_lock", "deaf", "stop"]
    with KillablePool(f"{TARGETS}:behave", workers=2, timeout=2.0) as pool:
        pool.run([Call(("ok",))] * 8)
        before = set(pool.worker_pids)
        outcomes = pool.run([Call((how,)) for how in hows] + [Call(("ok", 0.5))])
        assert [outcome.value for outcome in outcomes] == [None] * 5 + [0.5]
        assert all(outcome.timed_out for outcome in outcomes[:5])
        assert {outcome.error for outcome in outcomes[:5]} == {"no answer within 2 s"}
        assert not before & set(pool.worker_pids)
        assert all(ended(pid) for pid in before)
        assert pool.run([Call(("pid",))])[0].value in pool.worker_pids  # the dead ones were replaced


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("exit", r"the worker process died \(exit code 3\)"),
        ("crash", r"the worker process died \(signal 11\)"),
        ("sys_exit", "SystemExit: 0"),
        ("raise", "ZeroDivisionError: division by zero"),
        ("recurse", "RecursionError: .*"),
        ("object", "TypeError: a reward function cannot return object from a worker process"),
        ("long", r"the answer has \d+ bytes"),
        ("grow", "more than 300 MiB of memory"),
    ],
)
def test_other_ends_have_their_reason(behave: Behave, how: str, reason: str) -> None:
    bad, good = behave(how, "ok")
    assert bad.error is not None
    assert re.fullmatch(reason, bad.error)
    assert not bad.timed_out
    assert good.value == 0.5


def test_many_bad_calls_do_not_starve_the_others(behave: Behave) -> None:
    outcomes = behave(*["exit", "ok", "raise"] * 6)
    assert [outcome.value for outcome in outcomes] == [None, 0.5, None] * 6


def test_children_of_a_killed_call_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHILD_PID_FILE", str(tmp_path / "pid"))
    with KillablePool(f"{TARGETS}:behave", workers=1, timeout=4.0) as pool:
        assert pool.run([Call(("with_child",))])[0].timed_out
        assert ended(int((tmp_path / "pid").read_text()))


def test_workers_are_light_and_have_no_gpu(behave: Behave) -> None:
    modules = behave("modules")[0].value
    assert not {"torch", "transformers", "deepspeed"} & {name.split(".")[0] for name in modules}
    assert behave("environment")[0].value["CUDA_VISIBLE_DEVICES"] == ""


def test_modules_and_coroutines_are_targets_too() -> None:
    with KillablePool("operator:mul", workers=1) as pool:
        assert pool.run([Call((3, 4))])[0].value == 12
    with KillablePool(f"{TARGETS}:double_later", workers=1) as pool:
        assert pool.run([Call((3.0,))])[0].value == 6.0


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("operator:no_such_function", "no attribute 'no_such_function'"),
        ("/no/such/file.py:f", "no file /no/such/file.py"),
    ],
)
def test_a_target_that_cannot_be_loaded_is_an_error_at_once(target: str, reason: str) -> None:
    with KillablePool(target, workers=2) as pool, pytest.raises(WorkerStartError, match=reason):
        pool.run([Call((1,))] * 3)


def test_a_target_that_ends_the_process_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import os\nos._exit(7)\n")
    with (
        KillablePool(f"{tmp_path / 'bad.py'}:f", workers=1) as pool,
        pytest.raises(WorkerStartError, match=r"3 worker processes in a row did not start: .*exit code 7"),
    ):
        pool.run([Call(())])


def test_arguments_that_cannot_be_sent(pool: KillablePool) -> None:
    with pytest.raises(RewardError, match="cannot be sent to a worker process"):
        pool.run([Call((lambda: 0,))])


def test_closed_collected_and_out_of_range() -> None:
    pool = KillablePool("operator:neg", workers=2)
    pool.run([Call((1,))] * 8)
    pids = pool.worker_pids
    assert pids
    pool.close()
    pool.close()
    assert all(ended(pid) for pid in pids)
    with pytest.raises(RewardError, match="closed"):
        pool.run([Call((1,))])

    pool = KillablePool("operator:neg", workers=1)
    pool.run([Call((1,))])
    pids = pool.worker_pids
    del pool
    gc.collect()
    assert all(ended(pid) for pid in pids)

    for options in ({"workers": 0}, {"timeout": 0.0}, {"memory_mb": 0}):
        with pytest.raises(ValueError, match="are needed"):
            KillablePool("operator:neg", **options)


SCRIPT = """
import os, sys, threading, time
from lightppo.rewards.source import Call
from lightppo.rewards.killable import KillablePool

pool = KillablePool(sys.argv[1], workers=2, timeout=300)
pool.run([Call(("ok",))] * 4)
calls = threading.Thread(target=pool.run, args=([Call(("loop",)), Call(("loop",))],), daemon=True)
calls.start()
while len(pool.worker_pids) < 2:  # both are there, and soon busy
    time.sleep(0.02)
time.sleep(0.3)
if sys.argv[2] == "fork":
    child = os.fork()
    if child == 0:
        sys.exit(0)  # runs what its parent has registered for the end
    os.waitpid(child, 0)
    pids = pool.worker_pids
    print(*pids, *[1 for pid in pids if os.path.exists(f"/proc/{pid}")], flush=True)
else:
    print(*pool.worker_pids, flush=True)
if sys.argv[2] == "killed":
    time.sleep(300)
"""


@pytest.mark.parametrize("how", ["exit", "killed", "fork"])
def test_workers_end_with_the_program(how: str) -> None:
    command = [sys.executable, "-c", SCRIPT, f"{TARGETS}:behave", how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        first, second, *alive = map(int, program.stdout.readline().split())
        if how == "killed":
            program.send_signal(signal.SIGKILL)
        program.wait(60)
    assert ended(first)
    assert ended(second)
    assert alive == ([1, 1] if how == "fork" else [])


def test_default_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert default_processes() == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    assert default_processes() == 1
