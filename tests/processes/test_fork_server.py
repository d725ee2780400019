"""The server of worker processes on Linux, and with nothing but what every POSIX system has."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightppo.processes.fork_server import Answer, Worker, WorkerPool

TARGETS = """
import os, signal, stat, subprocess, sys, time

def double(value): return 2 * value
def exit(code): os._exit(code)
def sleep(): time.sleep(600)
def system(): return sys.platform

def start():
    # It lives on, in the process group of its worker.
    return subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"]).pid

def grow():
    held = []
    while True:
        held.append(b"x" * (1 << 24))

def signals():
    return [signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL, signal.set_wakeup_fd(-1)]

def channels():
    count = 0
    for descriptor in range(3, 100):
        try:
            mode = os.fstat(descriptor).st_mode
            count += stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode)
        except OSError:
            pass
    return count

def load(settings):
    return lambda: lambda name, *arguments: {"value": globals()[name](*arguments)}
"""
MOST_SECONDS = 60  # until what never comes fails a test
Run = Callable[[Callable[[WorkerPool], Coroutine[Any, Any, Any]]], Any]


@pytest.fixture
def run(system: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    (tmp_path / "worker_targets.py").write_text(TARGETS)
    monkeypatch.syspath_prepend(tmp_path)
    pools = []

    def run(test: Callable[[WorkerPool], Coroutine[Any, Any, Any]]) -> Any:
        pools.append(WorkerPool("worker_targets:load", {}, 8, subject="t", memory_mb=300))
        return asyncio.run(test(pools[-1]))

    yield run
    for pool in pools:
        pool.close()


async def take(pool: WorkerPool) -> Worker:
    """A worker whose number the server has told."""
    worker = await pool.take()
    await become_true(lambda: worker.process > 0)
    return worker


async def ask(worker: Worker, *question: Any) -> Answer:
    return await worker.exchange(pickle.dumps(question), MOST_SECONDS)


async def become_true(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + MOST_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def has_ended(process_id: int) -> bool:
    try:
        return psutil.Process(process_id).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_the_system_is_the_one_that_is_meant(run: Run, system: Any) -> None:
    async def test(pool: WorkerPool) -> Answer:
        return await ask(await take(pool), "system")

    assert run(test) == {"value": "linux" if system is None else "darwin"}


def test_a_worker_that_dies_while_no_one_asks(run: Run) -> None:
    """Its place is free again, and what it has started ends with it."""

    async def test(pool: WorkerPool) -> None:
        worker = await take(pool)
        child = (await ask(worker, "start"))["value"]
        pool.give_back(worker)
        assert not has_ended(child)
        os.kill(worker.process, signal.SIGKILL)
        await become_true(lambda: worker.ended.has_happened)
        assert worker.ended.value == "the worker process died (signal 9, SIGKILL)"
        assert pool.process_ids == []
        await become_true(lambda: has_ended(child))
        assert await ask(await take(pool), "double", 4) == {"value": 8}

    run(test)


def test_many_that_die_at_once(run: Run) -> None:
    """The server sees the deaths of all when it wakes up once."""

    async def test(pool: WorkerPool) -> None:
        workers = [await take(pool) for _ in range(8)]
        server = psutil.Process(pool._servers[0]._process.pid)
        server.suspend()
        for worker in workers[:7]:
            os.kill(worker.process, signal.SIGKILL)
        for worker in workers[:7]:
            await become_true(lambda worker=worker: has_ended(worker.process))
        server.resume()
        await become_true(lambda: all(worker.ended.has_happened for worker in workers[:7]))
        assert [worker.exit_code for worker in workers] == [-signal.SIGKILL] * 7 + [None]
        assert pool.process_ids == [workers[7].process]
        assert await ask(workers[7], "double", 4) == {"value": 8}

    run(test)


def test_ends_and_limits(run: Run) -> None:
    async def test(pool: WorkerPool) -> list[str]:
        workers = [await take(pool) for _ in range(2)]
        return [(await ask(workers[0], "exit", 3))["text"], (await ask(workers[1], "grow"))["text"]]

    assert run(test) == [
        "the worker process died (exit code 3)", "more than 300 MiB of memory",
    ]  # fmt: skip


def test_a_server_that_is_killed_leaves_nothing(run: Run) -> None:
    """Neither workers, busy or not, nor what they have started."""

    async def test(pool: WorkerPool) -> None:
        idle, busy = [await take(pool) for _ in range(2)]
        child = (await ask(busy, "start"))["value"]
        answer = asyncio.ensure_future(ask(busy, "sleep"))
        await asyncio.sleep(0)
        os.kill(pool._servers[0]._process.pid, signal.SIGKILL)
        assert (await answer)["text"] == "the server of worker processes died"
        pool.give_back(idle)
        assert await ask(await take(pool), "double", 4) == {"value": 8}
        for process_id in (idle.process, busy.process, child):
            await become_true(lambda process_id=process_id: has_ended(process_id))

    run(test)


def test_two_orders_in_one_read(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each descriptor belongs to its order."""
    held: list[tuple[bytes, int]] = []
    send_fds = socket.send_fds

    def send_together(channel: socket.socket, messages: list[bytes], descriptors: list[int]) -> int:
        held.append((messages[0], os.dup(descriptors[0])))
        if len(held) == 4:
            send_fds(channel, [b"".join(m for m, _ in held)], [d for _, d in held])
            for _, descriptor in held:
                os.close(descriptor)
        return len(messages[0])

    monkeypatch.setattr(socket, "send_fds", send_together)

    async def test(pool: WorkerPool) -> None:
        workers = await asyncio.gather(*(take(pool) for _ in range(4)))
        answers = await asyncio.gather(*(ask(worker, "double", 4) for worker in workers))
        assert answers == [{"value": 8}] * 4
        for worker in workers:
            assert worker.process == worker._answering_process
        first, second, *others = workers
        with pool._servers[0]._sending:
            pool._servers[0]._control.sendall(
                b'{"kill": %d}\n{"kill": %d}\n' % (first.number, second.number)
            )
        await become_true(lambda: first.ended.has_happened and second.ended.has_happened)
        assert set(pool.process_ids) == {worker.process for worker in others}

    run(test)


@pytest.mark.parametrize("system", ["posix_only"], indirect=True)
def test_an_order_that_comes_in_pieces(
    run: Run, system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer sends it in two, and the server reads at most five bytes at a time."""
    with system.open("a") as file:
        file.write("\nrecv_fds = socket.recv_fds")
        file.write("\nsocket.recv_fds = lambda channel, _, most: recv_fds(channel, 5, most)")
    send_fds = socket.send_fds
    monkeypatch.setattr(
        socket, "send_fds", lambda c, messages, fds: send_fds(c, [messages[0][:3]], fds)
    )

    async def test(pool: WorkerPool) -> None:
        workers = await asyncio.gather(*(take(pool) for _ in range(4)))
        for worker in workers:
            assert await ask(worker, "double", 4) == {"value": 8}
            assert worker.process == worker._answering_process
        workers[1].kill()
        workers[2].kill()
        await become_true(lambda: all(worker.ended.has_happened for worker in workers[1:3]))
        assert set(pool.process_ids) == {workers[0].process, workers[3].process}

    run(test)


def test_a_worker_has_none_of_the_servers_signals_and_files(run: Run) -> None:
    async def test(pool: WorkerPool) -> None:
        workers = [await take(pool) for _ in range(3)]
        for worker in workers:
            assert await ask(worker, "signals") == {"value": [True, -1]}
            assert await ask(worker, "channels") == {"value": 1}

    run(test)


def test_a_launcher_may_block_the_signal_of_deaths(run: Run) -> None:
    async def test(pool: WorkerPool) -> None:
        worker = await take(pool)
        os.kill(worker.process, signal.SIGKILL)
        await become_true(lambda: worker.ended.has_happened)

    former_mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    try:
        run(test)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former_mask)
