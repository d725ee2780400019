"""Worker processes that are killed."""

import gc
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightppo.errors import RewardError, WorkerStartError
from lightppo.processes.fork_server import default_processes
from lightppo.processes.killable_pool import KillablePool
from lightppo.user_code import UserCall

MOST_SECONDS = 60  # until what never comes fails a test
TARGETS = Path(__file__).parents[1] / "support" / "fixtures" / "runner_targets.py"


Behave = Callable[..., list[Any]]


def servers() -> list[psutil.Process]:
    """The servers of all pools; not that of the tests, support/fork_server.py, which may be a child, too."""
    children = psutil.Process().children()
    return [p for p in children if "lightppo.processes.fork_server" in " ".join(p.cmdline())]


def workers() -> set[int]:
    """Process ids of the workers of all pools: the children of their servers."""
    return {worker.pid for server in servers() for worker in server.children()}


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
    with closing(KillablePool(f"{TARGETS}:behave", workers=2, timeout=60.0, memory_mb=300)) as pool:
        yield pool


@pytest.fixture
def behave(pool: KillablePool) -> Behave:
    return lambda *hows: pool.run([UserCall((how,), {"value": 0.5}) for how in hows])


def test_answers_in_order(pool: KillablePool) -> None:
    outcomes = pool.run([UserCall(("ok", float(i))) for i in range(50)])
    assert [outcome.value for outcome in outcomes] == [float(i) for i in range(50)]
    assert pool.run([]) == []


def test_a_worker_ends_its_call_after_a_sigterm(behave: Behave) -> None:
    assert behave("terminated")[0].value == 0.5


def test_a_forked_child_answers_nothing(behave: Behave) -> None:
    assert [outcome.value for outcome in behave(*["fork", "ok"] * 4)] == [0.5] * 8


def test_values_of_numpy_come_as_pythons(behave: Behave) -> None:
    assert behave("numpy")[0].value == {"score": 0.5, "all": [0, 1, 2]}


def test_what_exceeds_the_limit_is_killed() -> None:
    hows = ["sleep", "loop", "hold_the_lock", "deaf", "stop"]
    others = workers()
    with closing(KillablePool(f"{TARGETS}:behave", workers=2, timeout=0.7)) as pool:
        pool.run([UserCall(("ok",))] * 8)
        before = workers() - others
        outcomes = pool.run([UserCall((how,)) for how in hows] + [UserCall(("ok", 0.5))])
        assert [outcome.value for outcome in outcomes] == [None] * 5 + [0.5]
        assert all(outcome.timeouts for outcome in outcomes[:5])
        assert len(before) == 2
        assert all(ended(pid) for pid in before)
        # the dead ones were replaced
        assert pool.run([UserCall(("pid",))])[0].value in workers() - before - others


def test_processor_time_is_no_time_of_waiting() -> None:
    """A call that has no processor, as on a busy machine, is not late; one that computes for ever is."""
    with closing(
        KillablePool(f"{TARGETS}:behave", workers=2, timeout=60.0, cpu_seconds=0.3)
    ) as pool:
        outcomes = pool.run(
            [UserCall((how, 0.9)) for how in ["nap", "loop", "hold_the_lock", "ok", "exit"]]
        )
        late = "no answer within 0.3 s of processor time"
        reasons = [None, late, late, None, "the worker process died (exit code 3)"]
        assert [(outcome.error, outcome.timeouts) for outcome in outcomes] == [
            (r, int(r == late)) for r in reasons
        ]
        # each has a new limit
        assert [outcome.value for outcome in pool.run([UserCall(("nap", 0.0))] * 30)] == [0.0] * 30
    with pytest.raises(ValueError, match="--reward_timeout must be > 0"):
        KillablePool("operator:mul", timeout=1.0, cpu_seconds=0.0)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("exit", r"the worker process died \(exit code 3\)"),
        ("exit_well", r"the worker process died \(exit code 0\)"),
        ("crash", r"the worker process died \(signal 11, SIGSEGV\)"),
        ("sys_exit", r"SystemExit: 0 \(.*runner_targets.py:.* sys.exit\(0\),\)"),
        ("raise", r"ZeroDivisionError: division by zero \(.*runner_targets.py:.* 1 / 0,\)"),
        ("recurse", "RecursionError: .*"),
        ("object", "TypeError: .* object .*"),
        ("long", r"ValueError: .* \d+ bytes"),
        ("grow", "more than 300 MiB of memory"),
    ],
)
def test_other_ends_have_their_reason(behave: Behave, how: str, reason: str) -> None:
    bad, good = behave(how, "ok")
    assert bad.error is not None
    assert re.fullmatch(reason, bad.error)
    assert not bad.timeouts
    assert good.value == 0.5


def test_many_bad_calls_do_not_starve_the_others(behave: Behave) -> None:
    outcomes = behave(*["exit", "ok", "raise"] * 3)
    assert [outcome.value for outcome in outcomes] == [None, 0.5, None] * 3


def test_an_idle_worker_that_dies_is_replaced(behave: Behave) -> None:
    behave("ok")
    gone = workers()
    for pid in gone:
        os.kill(pid, signal.SIGKILL)
    assert [outcome.value for outcome in behave("ok", "ok")] == [0.5, 0.5]
    assert not {outcome.value for outcome in behave("pid", "pid")} & gone


def test_a_server_that_dies_is_replaced(behave: Behave) -> None:
    behave("ok")
    gone = workers()
    for server in servers():
        os.kill(server.pid, signal.SIGKILL)
    assert all(ended(pid) for pid in gone)
    assert [outcome.value for outcome in behave("ok", "ok")] == [0.5, 0.5]


def test_workers_have_random_numbers_of_their_own(behave: Behave) -> None:
    numbers = {}
    for _ in range(60):
        for outcome in behave("random", "random"):
            numbers.setdefault(outcome.value[0], outcome.value[1:])
        if len(numbers) == 2:
            break
    first, second = numbers.values()
    assert not set(first) & set(second)


@pytest.mark.parametrize("quiet", [False, True])
def test_prints_of_a_function(quiet: bool, capfd: pytest.CaptureFixture[str]) -> None:
    with closing(KillablePool(f"{TARGETS}:behave", workers=1, timeout=60.0, quiet=quiet)) as pool:
        pool.run([UserCall(("print",))])
    out, err = capfd.readouterr()
    assert (out, err) == ("" if quiet else "said by a worker\n", "")


def test_threads_share_a_pool(behave: Behave) -> None:
    with ThreadPoolExecutor(4) as threads:  # ends before the pool: no worker may end with a thread
        batches = list(threads.map(lambda i: behave(*["ok"] * 10), range(4)))
    assert [outcome.value for batch in batches for outcome in batch] == [0.5] * 40
    assert [outcome.value for outcome in behave("ok", "exit", "ok")] == [0.5, None, 0.5]


def test_children_of_a_killed_call_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHILD_PID_FILE", str(tmp_path / "pid"))
    with closing(KillablePool(f"{TARGETS}:behave", workers=1, timeout=1.0)) as pool:
        assert pool.run([UserCall(("with_child",))])[0].timeouts
        assert ended(int((tmp_path / "pid").read_text()))


def test_workers_are_light_and_have_no_gpu(behave: Behave) -> None:
    modules = behave("modules")[0].value
    assert not {"torch", "transformers", "deepspeed"} & {name.split(".")[0] for name in modules}
    assert behave("environment")[0].value["CUDA_VISIBLE_DEVICES"] == ""


def test_modules_and_coroutines_are_targets_too() -> None:
    with closing(KillablePool("operator:mul", workers=1, timeout=10.0)) as pool:
        assert pool.run([UserCall((3, 4))])[0].value == 12
    with closing(KillablePool(f"{TARGETS}:double_later", workers=1, timeout=10.0)) as pool:
        assert pool.run([UserCall((3.0,))])[0].value == 6.0


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("operator:no_such_function", "no attribute 'no_such_function'"),
        ("/no/such/file.py:f", "no file /no/such/file.py"),
    ],
)
def test_a_target_that_cannot_be_loaded_is_an_error_at_once(target: str, reason: str) -> None:
    with (
        closing(KillablePool(target, workers=2, timeout=10.0)) as pool,
        pytest.raises(WorkerStartError, match=reason),
    ):
        pool.run([UserCall((1,))] * 3)


def test_a_target_that_ends_the_process_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import os\nos._exit(7)\n")
    with (
        closing(KillablePool(f"{tmp_path / 'bad.py'}:f", workers=1, timeout=10.0)) as pool,
        pytest.raises(WorkerStartError, match=r"^3 worker processes .*exit code 7"),
    ):
        pool.run([UserCall(())])


def test_arguments_that_cannot_be_sent(pool: KillablePool) -> None:
    with pytest.raises(RewardError, match=r"worker process: .*lambda"):
        pool.run([UserCall((lambda: 0,))])


def test_closed_collected_and_out_of_range() -> None:
    others = workers()
    pool = KillablePool("time:sleep", workers=2, timeout=60.0)
    pool.run([UserCall((0,))] * 8)
    pids = workers() - others
    assert pids
    with ThreadPoolExecutor(1) as threads:
        under_way = threads.submit(pool.run, [UserCall((600,))])
        time.sleep(0.2)
        pool.close()
        pool.close()
        with pytest.raises(RewardError, match="closed"):
            under_way.result(MOST_SECONDS)
    assert all(ended(pid) for pid in pids)
    with pytest.raises(RewardError, match="closed"):
        pool.run([UserCall((1,))])

    pool = KillablePool("operator:neg", workers=1, timeout=60.0)
    pool.run([UserCall((1,))])
    pids = workers() - others
    assert pids
    del pool
    gc.collect()
    assert all(ended(pid) for pid in pids)

    for options in ({"workers": 0, "timeout": 1.0}, {"workers": 1, "timeout": 0.0}):
        with pytest.raises(ValueError, match=r"--reward_workers .* --reward_timeout"):
            KillablePool("operator:neg", **options)


SCRIPT = """
import os, sys, threading, time
import psutil
from lightppo.processes.killable_pool import KillablePool
from lightppo.user_code import UserCall

def workers():
    servers = [p for p in psutil.Process().children() if "fork_server" in " ".join(p.cmdline())]
    return [worker.pid for server in servers for worker in server.children()]

pool = KillablePool(sys.argv[1], workers=2, timeout=300)
open(sys.argv[3], "a").write("run;")
pool.run([UserCall(("ok",))] * 4)
calls = threading.Thread(target=pool.run, args=([UserCall(("loop",)), UserCall(("loop",))],), daemon=True)
calls.start()
while len(workers()) < 2:  # both are there, and soon busy
    time.sleep(0.02)
time.sleep(0.3)
if sys.argv[2] == "fork":
    child = os.fork()
    if child == 0:
        sys.exit(0)  # runs what its parent has registered for the end
    os.waitpid(child, 0)
    pids = workers()
    print(*pids, *[1 for pid in pids if os.path.exists(f"/proc/{pid}")], flush=True)
else:
    print(*workers(), flush=True)
if sys.argv[2] == "killed":
    time.sleep(300)
"""


@pytest.mark.parametrize(
    ("how", "system"),
    [("exit", "linux"), ("killed", "linux"), ("killed", "posix_only"), ("fork", "linux")],
    indirect=["system"],
)
def test_workers_end_with_the_program(how: str, system: Path | None, tmp_path: Path) -> None:
    script, log = tmp_path / "script.py", tmp_path / "log"
    script.write_text(SCRIPT)
    command = [sys.executable, script, f"{TARGETS}:behave", how, log]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        first, second, *alive = map(int, program.stdout.readline().split())
        if how == "killed":
            program.send_signal(signal.SIGKILL)
        program.wait(60)
    assert ended(first)
    assert ended(second)
    assert alive == ([1, 1] if how == "fork" else [])
    assert log.read_text() == "run;"  # workers do not run the script again


def test_default_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert default_processes() == 3
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.setenv("LOCAL_SIZE", "6")  # of the deepspeed launcher
    assert default_processes() == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    assert default_processes() == 1
