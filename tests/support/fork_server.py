"""A process that has heavy imports done, and forks ranks of scripts which then need not do them.

    python -u fork_server.py FD MODULE…

FD is a socket that listens. Of each connection, which is one end of a ``multiprocessing.Pipe``, a process of its own
takes the jobs; the server ends with the last of these. A job has a script, its words, a folder, a log, the environment
of each rank and a time-out; what goes back is an exit code, or None after the time-out. A job without a time-out has
one process, which stays until the tests have ended; what goes back is its number. Its exit code is asked for by that
number. A job with modules is a further server, which imports them on top; what goes back is None.

Nothing is computed here before a fork, so there are no threads that a rank would miss. A forked rank differs from one
of a launcher in this: what modules read from the environment while they are imported, and the seed of ``hash``, are
the server's; and Python is not taken down at the end.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import math
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import time
import traceback
import weakref
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

GRACE = 10  # seconds that ranks have after one has failed, to say why they fail too
FORK = multiprocessing.get_context("fork")


def listening(address: str) -> socket.socket | None:
    """What a server listens at, which is no file, so nothing is left behind; None if there is one already."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"\0{address}")
    except OSError:
        return listener.close()
    listener.listen()
    return listener


def serve(listener: socket.socket, modules: list[str]) -> None:
    """Imports modules, and forks a process for each connection; ends with the last of them."""
    gc.disable()  # what is imported is no garbage
    for name in modules:
        # of an extra that is not installed; a script that needs it says so
        with suppress(ImportError):
            importlib.import_module(name)
    if ops := sys.modules.get("deepspeed.ops"):
        _ = (
            ops.__compatible_ops__
        )  # asks a compiler what it can build, as each rank would at its start
    # Arrow's jemalloc stops its thread before a fork, and starts it after one.
    threads = {(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}
    assert len(threads - {"jemalloc_bg_thd"}) == 1, (
        f"an import started threads, which forks would lack: {threads}"
    )
    if report := sys.modules.get("lightppo.logging.report_page"):
        # no picture at the end of a run, which takes as long as the run
        report.FEWEST_STEPS = math.inf
    if memory := sys.modules.get("vllm.distributed.device_communicators.shm_broadcast"):
        # For a second after each message its workers look for the next one without a pause, on cores that other
        # tests need.
        memory.sched_yield = functools.partial(time.sleep, 0.0005)
    # At the end of Python torch takes down hundreds of operators one by one; a rank need not wait for that.
    for taken_down in weakref.finalize._registry:
        taken_down.atexit = False
    gc.freeze()  # no rank copies what it never touches
    gc.enable()
    gc.unfreeze = lambda: None  # which vLLM calls, and collects garbage seven times for each engine
    attending: list[ForkProcess] = []
    while True:
        if listener in wait([listener, *(process.sentinel for process in attending)]):
            control = Connection(listener.accept()[0].detach())
            attending.append(FORK.Process(target=attend, args=(listener, control)))
            attending[-1].start()
            control.close()
        attending = [process for process in attending if process.exitcode is None]
        if not attending:
            return


def attend(listener: socket.socket, control: Connection) -> None:
    """Does the jobs of one process of the tests until that has ended."""
    listener.close()
    staying: list[ForkProcess] = []
    while True:
        try:
            job = control.recv()
        except EOFError:  # the tests have ended
            return end(staying)
        if isinstance(job, int):
            process = next(process for process in staying if process.pid == job)
            process.join()
            control.send(process.exitcode)
            continue
        if "modules" in job:
            branch_off(control, job)
            control.send(None)
            continue
        ranks = [
            FORK.Process(target=run, args=(control, job, environment))
            for environment in job["environments"]
        ]
        for rank in ranks:
            rank.start()
        if job["timeout"] is None:
            staying += ranks
            control.send(ranks[0].pid)
        else:
            control.send(watch(ranks, control, job["timeout"]))


def branch_off(control: Connection, job: dict[str, Any]) -> None:
    """A further server, unless there is one; it ends by itself."""
    listener = listening(job["address"])
    if listener is None:
        return
    with listener:
        if os.fork():
            return
        control.close()
        os.environ.update(job["environment"])
        if os.environ.get("TORCH_COMPILE_DISABLE") == "1":  # which torch has read already
            sys.modules["torch._dynamo"].config.disable = True
        try:
            serve(listener, job["modules"])
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)


def run(control: Connection, job: dict[str, Any], environment: dict[str, str]) -> None:
    """As ``python -u script words…`` would, in a session of its own."""
    os.setsid()
    control.close()
    log = os.open(job["log"], os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(job["folder"])
    # what it starts by spawning is forked too, and what it would become it is at once
    if job["timeout"] is None:
        real = multiprocessing.get_context
        multiprocessing.get_context = lambda method=None: real(
            "fork" if method == "spawn" else method
        )
        os.execve = become
    sys.argv = [job["script"], *job["words"]]
    sys.path[:1] = [str(Path(job["script"]).parent), *environment["PYTHONPATH"].split(os.pathsep)]
    try:
        runpy.run_path(job["script"], run_name="__main__")
    finally:
        atexit._run_exitfuncs()


def become(program: str, command: list[str], environment: dict[str, str]) -> None:
    """``os.execve`` of ``python -m MODULE words…``, in this process."""
    module = command[command.index("-m") + 1]
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = command[command.index("-m") + 1 :]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def watch(ranks: list[ForkProcess], control: Connection, timeout: float) -> int | None:
    """Waits for ranks to end. What is left is killed soon after one has failed, and as soon as time or tests are over.

    Returns:
        the first exit code that is not 0, as a launcher does; None after the time-out.
    """
    deadline, first = time.monotonic() + timeout, 0
    while running := [rank for rank in ranks if rank.exitcode is None]:
        # of all, before the wait: one may have left `running` a moment after its pipe told that it ends
        if not first and (first := next((rank.exitcode for rank in ranks if rank.exitcode), 0)):
            deadline = min(deadline, time.monotonic() + GRACE)
        ready = wait(
            [control, *(rank.sentinel for rank in running)], max(0, deadline - time.monotonic())
        )
        if not ready or control in ready:
            first = first or None
            break
    else:  # the last ones may have ended after the look above
        first = first or next((rank.exitcode for rank in ranks if rank.exitcode), 0)
    end(ranks)
    return first


def end(ranks: list[ForkProcess]) -> None:
    for rank in ranks:
        rank.kill()
        with suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)  # also what a rank that has ended left behind
        rank.join()
        rank.close()


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
