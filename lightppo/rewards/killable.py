"""Worker processes that can be killed: calls with a limit on wall-clock time and memory that nothing can talk out of.

A worker is a fresh Python process (no fork of a process that holds CUDA, threads or locks; ``__main__`` is not run
again), so it imports only what the target needs. It is reused until it exceeds a limit or dies; then it is killed
with its process group and replaced. Each worker belongs to one thread of this process and dies with it.

This is no sandbox: workers have this process's rights. It protects the trainer's time, not its files.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from lightppo.errors import RewardError, WorkerStartError
from lightppo.rewards.killable_worker import HEADER
from lightppo.rewards.source import Call, Outcome
from lightppo.sandbox import default_processes as default_processes

logger = logging.getLogger(__name__)

_START_TRIES = 3
_START_TIMEOUT = 120.0  # seconds until a worker has loaded its target; imports are slow on a busy machine
_LOOK_EVERY = 0.1  # seconds between two looks at a worker's memory
_END_WAIT = 5.0  # seconds for a killed process or a thread to be gone
_MAX_ANSWER = 16 << 20  # bytes
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from lightppo.rewards.killable_worker import work; work()"
)


class KillablePool:
    """Calls one function in worker processes.

    Processes start with the first calls and are killed by :meth:`close`, when the pool is collected, and at exit; also
    where this process is killed.

    Args:
        target: what is called: ``package.module:function`` or ``path.py:function``; may be a coroutine function.
        workers: processes.
        timeout: wall-clock limit of one call in seconds, from when a loaded worker gets it.
        memory_mb: a worker whose resident memory grows beyond this many MiB is killed; looked at every 0.1 s.
        preload: modules that a worker imports before its first call, outside of the limit.
        quiet: what workers print is thrown away.

    Raises:
        ValueError: a number out of range.
    """

    def __init__(
        self,
        target: str,
        *,
        workers: int = 2,
        timeout: float = 10.0,
        memory_mb: int | None = None,
        preload: Sequence[str] = (),
        quiet: bool = False,
    ) -> None:
        if workers < 1 or not timeout > 0 or (memory_mb is not None and memory_mb < 1):
            raise ValueError(f"worker processes: workers ≥ 1, timeout > 0 and memory ≥ 1 MiB are needed, "
                             f"got {workers}, {timeout}, {memory_mb}")  # fmt: skip
        self.timeout = timeout
        setup = {"target": target, "preload": list(preload)}
        self._slots = _Slots(workers, lambda: _Worker(setup, quiet), timeout, memory_mb)
        self._finalizer = weakref.finalize(self, self._slots.close)

    def run(self, calls: Sequence[Call]) -> list[Outcome]:
        """Calls the target with each of ``calls``; one outcome each, in their order.

        Raises:
            WorkerStartError: no worker can load the target.
            RewardError: the pool is closed, or the arguments cannot be pickled.
        """
        futures = [self._slots.submit(call) for call in calls]
        return [self._slots.result(future) for future in futures]

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the present workers."""
        return self._slots.pids()

    def close(self) -> None:
        """Kills the workers; calls under way fail. Safe to call again."""
        self._finalizer()

    def __enter__(self) -> KillablePool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Slots:
    """Threads, each with at most one worker, that take calls from one queue. Knows nothing of the pool, so that a
    forgotten pool is collected."""

    def __init__(self, n: int, start: Callable[[], _Worker], timeout: float, memory_mb: int | None) -> None:
        self.n = n
        self.start = start
        self.timeout = timeout
        self.memory_mb = memory_mb
        self.jobs: queue.SimpleQueue[tuple[Future[Outcome], bytes] | None] = queue.SimpleQueue()
        self.threads: list[threading.Thread] = []
        self.workers: dict[threading.Thread, _Worker] = {}
        self.lock = threading.Lock()
        self.closed = False
        self.pid = os.getpid()

    def submit(self, call: Call) -> Future[Outcome]:
        try:
            payload = pickle.dumps((call.args, call.kwargs))
        except Exception as error:  # whatever __reduce__ of a user's object raises
            raise RewardError(
                f"arguments of a reward call cannot be sent to a worker process: {type(error).__name__}: {error}"
            ) from error
        future: Future[Outcome] = Future()
        with self.lock:
            if self.closed or os.getpid() != self.pid:
                raise RewardError("the pool of worker processes is closed")
            self.jobs.put((future, payload))
            if len(self.threads) < self.n:
                # daemon: a thread that waits for calls must not keep the interpreter from ending
                thread = threading.Thread(target=self._serve, name=f"reward-worker-{len(self.threads)}", daemon=True)
                self.threads.append(thread)
                thread.start()
        return future

    def result(self, future: Future[Outcome]) -> Outcome:
        while True:  # each call is bounded by its thread; this looks that there still is one
            try:
                return future.result(timeout=1.0)
            except TimeoutError:
                if not future.done() and not any(thread.is_alive() for thread in self.threads):
                    raise RewardError("the threads of the worker processes have ended") from None

    def pids(self) -> list[int]:
        with self.lock:
            return [worker.process.pid for worker in self.workers.values()]

    def _serve(self) -> None:
        me = threading.current_thread()
        while (job := self.jobs.get()) is not None:
            future, payload = job
            try:
                outcome = self._call(me, payload)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(outcome)
        self._set(me, None)

    def _call(self, me: threading.Thread, payload: bytes) -> Outcome:
        worker = self._ready_worker(me)
        try:
            return worker.call(payload, self.timeout, self.memory_mb)
        except _WorkerLost as lost:
            self._set(me, None)
            if not self.closed:  # the next one loads while this thread may have nothing to do
                with contextlib.suppress(OSError):
                    self._set(me, self.start())
            return Outcome(error=str(lost), timed_out=lost.timed_out)

    def _ready_worker(self, me: threading.Thread) -> _Worker:
        reason = ""
        for _ in range(_START_TRIES):
            if self.closed:
                raise RewardError("the pool of worker processes is closed")
            try:
                worker = self.workers.get(me) or self._set(me, self.start())
                worker.wait_ready()
                return worker
            except (_WorkerLost, OSError) as error:  # OSError: no process or socket to be had
                reason = str(error)
                self._set(me, None)
            except WorkerStartError:
                self._set(me, None)
                raise
        raise WorkerStartError(f"{_START_TRIES} worker processes in a row did not start: {reason}")

    def _set(self, me: threading.Thread, worker: _Worker | None) -> Any:
        with self.lock:
            old = self.workers.pop(me, None)
            if worker is not None and not self.closed:
                self.workers[me] = worker
            late = worker if self.closed else None
        for gone in (old, late):
            if gone is not None:
                gone.kill()
        return worker

    def close(self) -> None:
        if os.getpid() != self.pid:  # a forked child: the workers are its parent's
            return
        with self.lock:
            self.closed = True
            workers = list(self.workers.values())
            threads = list(self.threads)
        with contextlib.suppress(queue.Empty):
            while (job := self.jobs.get_nowait()) is not None:
                job[0].set_exception(RewardError("the pool of worker processes is closed"))
        for _ in threads:
            self.jobs.put(None)
        for worker in workers:
            worker.kill()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(_END_WAIT)


class _WorkerLost(Exception):
    """The worker cannot be used any more."""

    def __init__(self, reason: str, timed_out: bool = False) -> None:
        super().__init__(reason)
        self.timed_out = timed_out


class _Worker:
    """This process's end of one worker. Messages: a length, then pickled arguments one way, JSON back (so that
    whatever a worker sends cannot run anything here)."""

    def __init__(self, setup: dict[str, Any], quiet: bool) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            argv = [
                json.dumps([str(path) for path in sys.path]),
                json.dumps(setup),
                str(theirs.fileno()),
                str(os.getpid()),
            ]
            output = subprocess.DEVNULL if quiet else None
            self.process = subprocess.Popen(
                [sys.executable, "-c", _START, *argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # a Ctrl-C is the trainer's, and kill() reaches the worker's children
                env=os.environ
                | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
            )
        self._deadline = time.monotonic() + _START_TIMEOUT
        self._ready = False

    def wait_ready(self) -> None:
        """Raises :class:`WorkerStartError` where the target cannot be loaded."""
        if self._ready:
            return
        answer = self._receive(self._deadline, None, f"a worker process had not started after {_START_TIMEOUT:g} s")
        if "error" in answer:
            raise WorkerStartError(answer["error"])
        self._ready = True

    def call(self, payload: bytes, timeout: float, memory_mb: int | None) -> Outcome:
        """One call. Raises :class:`_WorkerLost` where it exceeds a limit or takes the worker down."""
        deadline = time.monotonic() + timeout
        late = f"no answer within {timeout:g} s"
        try:
            self._socket.settimeout(timeout)
            self._socket.sendall(HEADER.pack(len(payload)) + payload)
        except TimeoutError:
            raise _WorkerLost(late, timed_out=True) from None
        except OSError:
            raise _WorkerLost(self._how_it_ended()) from None
        answer = self._receive(deadline, memory_mb, late)
        return Outcome(answer.get("value"), answer.get("error"))

    def kill(self) -> None:
        """Kills the worker and its process group."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for an answer
        try:
            self.process.wait(_END_WAIT)
        except subprocess.TimeoutExpired:
            logger.warning("worker process %d does not end after SIGKILL", self.process.pid)
        self._socket.close()

    def _receive(self, deadline: float, memory_mb: int | None, late: str) -> dict[str, Any]:
        header = self._read(HEADER.size, deadline, memory_mb, late)
        (size,) = HEADER.unpack(header)
        if size > _MAX_ANSWER:
            raise _WorkerLost(f"the answer has {size} bytes")
        try:
            return json.loads(self._read(size, deadline, memory_mb, late))
        except ValueError:
            raise _WorkerLost("the worker process sent something that is no answer") from None

    def _read(self, size: int, deadline: float, memory_mb: int | None, late: str) -> bytes:
        data = bytearray()
        while len(data) < size:
            left = deadline - time.monotonic()
            if left <= 0:
                raise _WorkerLost(late, timed_out=True)
            try:
                self._socket.settimeout(left if memory_mb is None else min(left, _LOOK_EVERY))
                chunk = self._socket.recv(min(size - len(data), 1 << 16))
            except TimeoutError:
                if memory_mb is not None and self._resident_mb() > memory_mb:
                    raise _WorkerLost(f"more than {memory_mb} MiB of memory") from None
                continue
            except OSError:
                chunk = b""
            if not chunk:
                raise _WorkerLost(self._how_it_ended())
            data += chunk
        return bytes(data)

    def _resident_mb(self) -> float:
        try:
            pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        except (OSError, IndexError):  # just ended, or no /proc
            return 0.0
        return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)

    def _how_it_ended(self) -> str:
        """Looks only: until kill() reaps it, its number cannot be another process's."""
        end = time.monotonic() + _END_WAIT
        with contextlib.suppress(ChildProcessError):
            while time.monotonic() < end:
                state = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if state is not None:
                    how = "exit code" if state.si_code == os.CLD_EXITED else "signal"
                    return f"the worker process died ({how} {state.si_status})"
                time.sleep(0.01)
        return "the worker process closed its connection"
