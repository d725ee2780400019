"""Processes of environments: who is killed, who is not, and what is left."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightppo.episodes.environments import EnvironmentFailed, Environments
from lightppo.errors import UserError

ENV = '''
import os, subprocess, sys, threading, time
from pathlib import Path

class Env:
    made = 0
    def __init__(self):
        Env.made += 1
        print("made", Env.made)
        print("an error", file=sys.stderr)
    def reset(self, **row): return str(os.getpid())
    def hang(self) -> str:
        """Hang."""
        threading.Event().wait()
    def answer(self) -> int:
        """Answer."""
        return os.getpid()
    def count(self) -> int:
        """How many were made in this process."""
        return Env.made
    def start(self) -> int:
        """Start a process that lives on."""
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]).pid
    def crash(self) -> str:
        """Crash."""
        import ctypes
        ctypes.string_at(0)
    def eat(self) -> str:
        """Take too much memory."""
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28))
        bytearray(1 << 30)
    def long(self) -> str:
        """A long text."""
        return "x" * (17 << 20)
    def wide(self) -> str:
        """A text that takes many writes."""
        return "x" * (4 << 20)
    def modules(self) -> list:
        """What is loaded."""
        return [name for name in ("torch", "transformers", "deepspeed") if name in sys.modules]
    def settings(self) -> list:
        """The environment."""
        return [os.environ["CUDA_VISIBLE_DEVICES"], os.environ["OMP_NUM_THREADS"], os.getpgid(0) == os.getpid()]
    def read(self) -> str:
        """Standard input."""
        return sys.stdin.read()
'''


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "env.py"
    path.write_text(ENV)
    return path


@pytest.fixture
def environments(path):
    environments = Environments(f"{path}:Env", timeout=60, workers=2)
    yield environments
    environments.end()


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def wait_for_end(*pids: int) -> None:
    deadline = time.monotonic() + 60
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, f"still running: {pids}"
        time.sleep(0.01)


def server_of(environments: Environments) -> int:
    return environments._workers._servers[0]._process.pid


def wait_for_workers(environments: Environments, count: int) -> None:
    """The server tells of a process when it comes to it."""
    deadline = time.monotonic() + 60
    while len(environments._workers.process_ids) != count:
        assert time.monotonic() < deadline, environments._workers.process_ids
        time.sleep(0.01)


def test_a_worker_is_used_again_and_stays_light(environments):
    async def run():
        pids = set()
        for _ in range(3):
            session = await environments.open({}, seed=1)
            pids.add(int(session.opening))
            made = (await session.call("count", {})).text
            found = [
                (await session.call(name, {})).text for name in ("modules", "settings", "read")
            ]
            await session.close()
        return pids, made, found

    pids, made, found = asyncio.run(run())
    assert len(pids) == 1
    assert made == "3"  # the constructor runs for every episode
    assert found == ["[]", '["", "1", true]', ""]
    wait_for_workers(environments, 1)
    assert environments._workers.process_ids == list(pids)


def test_a_killed_worker_harms_no_other(environments):
    async def run():
        first, second = [await environments.open({}, seed=1) for _ in range(2)]
        waiting = asyncio.ensure_future(environments.open({}, seed=1))  # for a place
        lost = asyncio.ensure_future(first.call("hang", {}))
        await asyncio.sleep(0)
        os.kill(int(first.opening), signal.SIGKILL)
        with pytest.raises(EnvironmentFailed, match=r"died \(signal 9, SIGKILL\)") as caught:
            await lost
        assert (await second.call("answer", {})).text == second.opening
        await first.close()
        third = await waiting
        assert third.opening not in (first.opening, second.opening)
        for session in (second, third):
            await session.close()
        return caught.value

    error = asyncio.run(run())
    assert (error.kind, error.place) == ("lost", "tool")
    wait_for_workers(environments, 2)


def test_waiting_for_a_place_does_not_count_for_the_time_out(path):
    environments = Environments(f"{path}:Env", timeout=60, workers=1)

    async def run():
        first = await environments.open({}, seed=1)
        waiting = asyncio.ensure_future(environments.open({}, seed=1))
        environments.timeout = 0.5
        with pytest.raises(EnvironmentFailed, match=r"no answer within 0\.5 s"):
            await first.call("hang", {})
        assert not waiting.done()
        environments.timeout = 60
        await first.close()
        second = await waiting
        third = asyncio.ensure_future(environments.open({}, seed=1))
        fourth = asyncio.ensure_future(environments.open({}, seed=1))
        await asyncio.sleep(0)
        third.cancel()  # a cancelled wait takes no place
        await second.close()
        last = await fourth
        assert last.opening == second.opening
        await last.close()
        wait_for_end(int(first.opening))

    try:
        asyncio.run(run())
    finally:
        environments.end()


@pytest.mark.parametrize(
    ("tool", "kind", "text"),
    [
        ("crash", "lost", "SIGSEGV"), ("eat", "exception", "MemoryError"),
        ("long", "exception", "the answer has"),
    ],
)  # fmt: skip
def test_ends_of_workers(environments, tool, kind, text):
    async def run():
        session = await environments.open({}, seed=1)
        try:
            await session.call(tool, {})
        finally:
            await session.close()

    with pytest.raises(EnvironmentFailed, match=text) as caught:
        asyncio.run(run())
    assert caught.value.kind == kind


def test_large_answers_and_questions(environments):
    async def run():
        session = await environments.open({"text": "y" * (4 << 20)}, seed=1)
        text = (await session.call("wide", {})).text
        await session.close()
        return len(text)

    assert asyncio.run(run()) == 4 << 20


FORKS = '''
import asyncio, os

class Forked:
    def tolist(self):
        """Where the answer is written. The child answers, too, and first."""
        if child := os.fork():
            os.waitpid(child, 0)
        return os.getpid()

class Env:
    def reset(self, **row): return str(os.getpid())
    def comes_back(self, raises: bool) -> str:
        """Fork; the child comes back, or raises."""
        if child := os.fork():
            return str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        if raises:
            raise SystemExit("the child")
        return "the child"
    async def comes_back_async(self) -> str:
        """Fork in the loop of the environment's coroutines."""
        await asyncio.sleep(0)
        return self.comes_back(False)
    def answer(self) -> int:
        """Answer."""
        return os.getpid()

class Written:
    def reset(self, **row): return [{"role": "user", "content": [Forked()]}]
    def step(self, text): return None
'''


@pytest.mark.parametrize(
    ("tool", "given"),
    [
        ("comes_back", {"raises": False}),
        ("comes_back", {"raises": True}),
        ("comes_back_async", {}),
    ],
)
def test_a_forked_child_answers_nothing(path, tool, given, capfd):
    path.write_text(FORKS)
    environments = Environments(f"{path}:Env", timeout=60, workers=1)

    async def run():
        for _ in range(2):
            session = await environments.open({}, seed=1)
            assert (await session.call(tool, given)).text == "1"
            assert (await session.call("answer", {})).text == session.opening
            await session.close()

    try:
        asyncio.run(run())
    finally:
        environments.end()
    assert len(environments._workers._idle) == 1  # none was lost
    told = "env.py:Env: a process that it has forked came back, and is ended: end it with os._exit"
    assert capfd.readouterr().err.count(told) == 2


def test_an_answer_of_another_process_is_refused(path):
    """A child that forks while an answer is written is not taken for the worker."""
    path.write_text(FORKS)
    environments = Environments(f"{path}:Written", timeout=60, workers=1)
    try:
        with pytest.raises(
            EnvironmentFailed, match=r"process \d+ answered question 2, where"
        ) as caught:
            asyncio.run(environments.open({}, seed=1))
    finally:
        environments.end()
    assert caught.value.kind == "lost"
    assert environments._workers._idle == []


def test_a_row_that_cannot_be_sent(environments):
    async def run():
        await environments.open({"function": lambda: None}, seed=1)

    with pytest.raises(EnvironmentFailed, match="cannot be sent to a worker process") as caught:
        asyncio.run(run())
    assert caught.value.place == "reset"
    assert len(environments._workers._idle) == 1  # none was lost


def test_what_a_worker_started_ends_with_it(environments):
    async def run():
        session = await environments.open({}, seed=1)
        child = int((await session.call("start", {})).text)
        assert is_running(child)
        environments.timeout = 0.5
        with pytest.raises(EnvironmentFailed):
            await session.call("hang", {})
        await session.close()
        return child

    wait_for_end(asyncio.run(run()))


def test_the_end(environments):
    async def run():
        sessions = [await environments.open({}, seed=1) for _ in range(2)]
        child = int((await sessions[0].call("start", {})).text)
        hanging = asyncio.ensure_future(sessions[1].call("hang", {}))
        await asyncio.sleep(0)
        pids = [*environments._workers.process_ids, server_of(environments), child]
        await environments.close()
        with pytest.raises(EnvironmentFailed) as caught:
            await hanging
        for session in sessions:
            await session.close()
        await environments.close()
        return pids, caught.value

    pids, error = asyncio.run(run())
    assert error.kind == "lost"
    assert len(pids) == 4
    wait_for_end(*pids)


def test_a_server_that_dies_is_replaced(environments):
    async def run():
        session = await environments.open({}, seed=1)
        hanging = asyncio.ensure_future(session.call("hang", {}))
        await asyncio.sleep(0)
        os.kill(server_of(environments), signal.SIGKILL)
        with pytest.raises(EnvironmentFailed) as caught:
            await hanging
        await session.close()
        wait_for_end(int(session.opening))
        again = await environments.open({}, seed=1)
        await again.close()
        return caught.value, session.opening != again.opening

    error, other = asyncio.run(run())
    assert error.kind == "lost"
    assert other


SCRIPT = """
import asyncio, os, signal, sys
from lightppo.episodes.environments import Environments

environments = Environments(sys.argv[1] + ":Env", timeout=60, workers=2)

async def run():
    session = await environments.open({}, seed=1)
    other = await environments.open({}, seed=1)
    child = (await other.call("start", {})).text
    server = environments._workers._servers[0]._process.pid
    print(server, child, *environments._workers.process_ids, flush=True)
    hanging = asyncio.ensure_future(session.call("hang", {}))
    await asyncio.sleep(0)
    if sys.argv[2] == "exception":
        raise ValueError("the trainer broke")
    if sys.argv[2] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(run())
"""


@pytest.mark.parametrize(("how", "code"), [("exception", 1), ("kill", -9), ("return", 0)])
def test_nothing_outlives_the_trainer(path, tmp_path, how, code):
    script = tmp_path / "trainer.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, script, path, how],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == code, done.stderr
    pids = [int(word) for word in done.stdout.split()]  # prints of environments are elsewhere
    assert len(pids) == 4
    assert "made 1" in done.stderr
    assert "an error" in done.stderr
    wait_for_end(*pids)


THREADS_SCRIPT = """
import asyncio, sys, threading
from lightppo.episodes.environments import Environments, EnvironmentFailed

never = threading.Event()

class Env:
    def reset(self): ...
    def hang(self) -> str:
        "Hang."
        never.wait()
    async def hang_async(self) -> str:
        "Hang."
        never.wait()

environments = Environments(Env, timeout=60)

async def run():
    for name in ("hang", "hang_async"):
        environments.timeout = 60
        session = await environments.open({}, seed=1)
        environments.timeout = 0.3
        try:
            await session.call(name, {})
        except EnvironmentFailed as error:
            print(error)

asyncio.run(run())
"""


def test_hung_threads_do_not_keep_the_trainer_alive(tmp_path):
    script = tmp_path / "trainer.py"
    script.write_text(THREADS_SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("no answer within 0.3 s") == 2


def test_files_that_start_threads_are_loaded_by_each_worker(tmp_path):
    path = tmp_path / "threads.py"
    path.write_text(
        """
import os, threading
class Env:
    loaded = str(os.getpid())
    alive = threading.Thread(target=threading.Event().wait, daemon=True)
    alive.start()
    def reset(self): return f"{self.loaded == str(os.getpid())} {self.alive.is_alive()}"
    def step(self, text): return ""
"""
    )
    environments = Environments(f"{path}:Env", timeout=60, workers=2)

    async def run():
        sessions = [await environments.open({}, seed=1) for _ in range(2)]
        for session in sessions:
            await session.close()
        return [session.opening for session in sessions]

    try:
        assert asyncio.run(run()) == ["True True"] * 2
    finally:
        environments.end()


@pytest.mark.parametrize(
    ("ending", "text"),
    [("raise ValueError('not here')", "ValueError: not here"), ("os._exit(3)", "exit code 3")],
)
def test_files_that_no_worker_can_load(path, ending, text):
    path.write_text(f"{ENV}\nif 'CUDA_VISIBLE_DEVICES' in os.environ: {ending}\n")
    had = os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    environments = Environments(f"{path}:Env", timeout=60, workers=1)
    try:
        with pytest.raises(UserError, match=text):
            asyncio.run(environments.open({}, seed=1))
    finally:
        environments.end()
        if had is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = had


def test_several_loops_one_after_the_other(environments):
    async def run():
        session = await environments.open({}, seed=1)
        await session.close()
        return session.opening

    assert len({asyncio.run(run()) for _ in range(3)}) == 1


def test_a_session_that_nobody_closed_gives_its_place_free(path):
    environments = Environments(f"{path}:Env", timeout=60, workers=1)

    async def run():
        forgotten = await environments.open({}, seed=1)
        pid = int(forgotten.opening)
        del forgotten
        gc.collect()
        session = await environments.open({}, seed=1)
        await session.close()
        return pid, int(session.opening)

    try:
        forgotten, session = asyncio.run(run())
    finally:
        environments.end()
    assert forgotten != session


def test_files_that_open_connections_are_loaded_by_each_worker(tmp_path):
    path = tmp_path / "connected.py"
    path.write_text(
        """
import os, socket
class Env:
    loaded = os.getpid()
    server = socket.create_server(("127.0.0.1", 0))
    def reset(self): return str(self.loaded == os.getpid())
    def step(self, text): return ""
"""
    )
    environments = Environments(f"{path}:Env", timeout=60, workers=1)

    async def run():
        session = await environments.open({}, seed=1)
        await session.close()
        return session.opening

    try:
        assert asyncio.run(run()) == "True"
    finally:
        environments.end()


def test_files_are_found_from_where_the_run_began(path, tmp_path, monkeypatch):
    monkeypatch.chdir(path.parent)
    environments = Environments(f"{path.name}:Env", timeout=60, workers=1)
    monkeypatch.chdir("/")

    async def run():
        session = await environments.open({}, seed=1)
        await session.close()
        return session.opening

    try:
        assert int(asyncio.run(run())) > 0
    finally:
        environments.end()


def test_a_machine_without_room_for_a_process(environments, monkeypatch):
    def fork(server):
        raise OSError("too many open files")

    monkeypatch.setattr("lightppo.processes.fork_server.Server.fork", fork)
    with pytest.raises(UserError, match="no worker process can be started: too many open files"):
        asyncio.run(environments.open({}, seed=1))
    monkeypatch.undo()

    async def both():  # no place was lost
        sessions = [await environments.open({}, seed=1) for _ in range(2)]
        for session in sessions:
            await session.close()

    asyncio.run(both())
