"""Worker processes that call a function and can be killed: ``--reward_manager prime``, ``--reward_source math``."""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import KW_ONLY, dataclass
from multiprocessing import spawn
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

from pebble import ProcessExpired, ProcessPool

from lightppo.errors import RewardError, WorkerStartError
from lightppo.processes.groups import (
    as_json,
    closer_of,
    default_processes,
    end_with,
    stay_at_sigterm,
)
from lightppo.processes.user_calls import Outcome, UserCall, awaited, in_daemon_thread, late
from lightppo.ranks import heartbeat
from lightppo.user_code import error_text, without_copies

_START_TRIES = 3
_START_SECONDS = 120  # until a worker has loaded its target; imports are slow on a busy machine
_LOOK_SECONDS = 1.0  # between checks that a pool of processes still runs
_MAX_TRACE = 10_000  # characters
_EXIT_0 = 256  # stands for exit code 0


@dataclass(eq=False)
class KillablePool:
    """Call one function in worker processes, with limits on wall-clock time and memory that no function can evade.

    A limit on processor time is for functions that we trust not to turn off ``signal.ITIMER_PROF``.

    The pool is pebble's. We add what a trainer needs: a worker imports only what the target needs and never runs the
    script again, is killed together with the processes it started, and dies with this process, however that ends; a
    broken pool is replaced. This is not a sandbox: workers have this process's rights.
    """

    target: str  # package.module:function or path.py:function; may be a coroutine function
    _: KW_ONLY
    workers: int | None = None  # calls at a time; None: one per core of this rank
    timeout: float  # wall-clock seconds per call, from when a loaded worker gets it
    # Seconds of processor time per call; None: no limit. Unlike the wall clock, a busy machine does not reach it.
    cpu_seconds: float | None = None
    # a worker with more MiB of resident memory is killed; checked every 0.1 s
    memory_mb: int | None = None
    # modules that a worker imports before its first call, outside the time limit
    preload: Sequence[str] = ()
    quiet: bool = False  # discard what workers print

    def __post_init__(self) -> None:
        if self.workers is None:
            self.workers = default_processes()
        if self.workers < 1 or not self.timeout > 0:
            got = f"got {self.workers} and {self.timeout}"
            raise ValueError(f"--reward_workers must be ≥ 1 and --reward_timeout > 0, {got}")
        if self.cpu_seconds is not None and not self.cpu_seconds > 0:
            raise ValueError(f"--reward_timeout must be > 0, got {self.cpu_seconds}")
        self._lock = threading.Lock()
        self._running: list[_RunningPool] = []  # at most one
        self._closer = closer_of(self, self._running)

    def run(self, calls: Sequence[UserCall]) -> list[Outcome]:
        """Call the target with each of ``calls``; one outcome each, in order."""
        try:
            payloads = [pickle.dumps((call.args, call.kwargs)) for call in calls]
        except Exception as error:  # whatever __reduce__ of a user's object raises
            problem = f"{type(error).__name__}: {error}"
            raise RewardError(
                f"arguments of a reward call cannot be sent to a worker process: {problem}"
            ) from error
        if not calls:
            return []
        outcomes: list[Outcome] = []
        for _ in range(_START_TRIES):
            running = self._start()
            try:
                for outcome in running.outcomes(payloads[len(outcomes) :], self.timeout):
                    outcomes.append(outcome)
                return outcomes
            except RuntimeError as error:  # the pool has ended, or cannot load the target
                why = running.last_end()
                with self._lock:
                    if running in self._running:
                        self._running.remove(running)
                running.close()
                if isinstance(error, WorkerStartError):
                    raise
        raise WorkerStartError(f"{_START_TRIES} worker processes in a row did not start: {why}")

    def close(self) -> None:
        """Kill the workers; running calls fail. May be called again."""
        self._closer()

    def _start(self) -> _RunningPool:
        with self._lock:
            if not self._closer.alive:
                raise RewardError("the pool of worker processes is closed")
            if not self._running:
                setup = (self.target, tuple(self.preload), self.quiet, self.cpu_seconds)
                self._running.append(_RunningPool(self.workers, self.memory_mb, setup))
            return self._running[0]


class _RunningPool(SpawnContext):
    """pebble's pool, and the context that makes its workers. It breaks if a worker dies without a call."""

    def __init__(self, n_workers: int, memory_mb: int | None, setup: tuple[Any, ...]) -> None:
        super().__init__()
        self._memory_mb = memory_mb
        *_, self._cpu_seconds = setup
        self._workers: deque[_Worker] = deque(maxlen=256)
        self._pool = ProcessPool(n_workers, initializer=_load, initargs=setup, context=self)
        self._started = threading.Event()
        self._ended = threading.Event()
        in_daemon_thread(self._keep)
        self._started.wait()

    def Process(self, **options: Any) -> _Worker:
        """Make a process for pebble."""
        self._workers.append(_Worker(self._memory_mb, **options))
        return self._workers[-1]

    def _keep(self) -> None:
        """The kernel ends a worker with the thread that started it: this one first, later the pool's."""
        with contextlib.suppress(BrokenProcessPool):  # its calls will tell
            _ = self._pool.active
        self._started.set()
        self._ended.wait()

    def outcomes(self, payloads: Sequence[bytes], timeout: float) -> Iterator[Outcome]:
        """Yield one per payload, in order; a ``RuntimeError`` if the pool has ended."""
        for future in [
            self._pool.schedule(_answer, (payload,), timeout=timeout) for payload in payloads
        ]:
            while not wait((future,), _LOOK_SECONDS).done:
                if not self._pool.active:  # an ended pool leaves its calls waiting
                    raise BrokenProcessPool("ended")
            heartbeat.beat()
            try:
                answer = json.loads(future.result())
            except TimeoutError:
                yield late(timeout)
            except ProcessExpired as error:
                yield self._died(error.pid)
            else:
                if "unloadable" in answer:
                    raise WorkerStartError(answer["unloadable"])
                if "trace" in answer:
                    trace = RewardError(f"in a worker process:\n{answer['trace']}")
                else:
                    trace = None
                yield Outcome(answer.get("value"), answer.get("error"), cause=trace)

    def _died(self, pid: int) -> Outcome:
        worker = next((worker for worker in self._workers if worker.pid == pid), None)
        if (
            worker is not None
            and worker.exitcode == -signal.SIGPROF
            and self._cpu_seconds is not None
        ):
            return Outcome(
                error=f"no answer within {self._cpu_seconds:g} s of processor time", timeouts=1
            )
        return Outcome(error="the worker process died" if worker is None else worker.end)

    def last_end(self) -> str:
        return next(
            (worker.end for worker in reversed(self._workers) if worker.end),
            "no process could be started",
        )

    def close(self) -> None:
        self._pool.stop()
        self._ended.set()
        with contextlib.suppress(RuntimeError):  # garbage-collected in a thread of the pool itself
            self._pool.join()


class _Worker(SpawnProcess):
    """A worker process for pebble, with a process group and a memory limit."""

    def __init__(self, memory_mb: int | None, **options: Any) -> None:
        super().__init__(**options)
        self._memory_mb = memory_mb
        self._excess = ""
        self._mourned = False

    def start(self) -> None:
        _starting.worker = True
        try:
            super().start()
        finally:
            _starting.worker = False
        # Out of the list of children that pebble and multiprocessing end with the program: a fork would end them too.
        multiprocessing.process._children.discard(self)

    def is_alive(self) -> bool:
        """pebble asks every 0.1 s. A death is reported the second time, when pebble knows whose call that was."""
        if super().is_alive():
            import psutil

            with contextlib.suppress(psutil.Error):  # just ended
                if (
                    self._memory_mb
                    and psutil.Process(self.pid).memory_info().rss > self._memory_mb << 20
                ):
                    self._excess = f"more than {self._memory_mb} MiB of memory"
                    self.terminate()
            return True
        if self._mourned:
            return False
        self.terminate()  # the processes that it has started live on
        return True

    def terminate(self) -> None:
        """Kill the worker and its process group at once."""
        self._mourned = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.kill()  # in case it has no process group yet

    @property
    def exitcode(self) -> int | None:
        """pebble takes 0 for an end that it asked for, which it never does."""
        code = super().exitcode
        return _EXIT_0 if code == 0 else code

    @property
    def end(self) -> str:
        """Say how the worker ended; empty while it runs."""
        code = self.exitcode
        if self._excess or code is None:
            return self._excess
        return f"the worker process died ({'signal' if code < 0 else 'exit code'} {abs(code) % _EXIT_0})"


def _data_for_worker(name: str) -> dict[str, Any]:
    """Return what multiprocessing tells a new process; our workers do not get the script, which they would run again."""
    data = _data_for_process(name)
    ours = getattr(_starting, "worker", False)
    return {
        key: value for key, value in data.items() if not (ours and key.startswith("init_main_"))
    }


_starting = threading.local()
_data_for_process = spawn.get_preparation_data
spawn.get_preparation_data = _data_for_worker


# --- inside a worker

_loaded: Callable[..., Any] | str = ""  # the target, or why it could not be loaded
_cpu_seconds: float | None = None  # of each call


def _load(target: str, preload: Sequence[str], quiet: bool, cpu_seconds: float | None) -> None:
    """Prepare a worker process and load its target."""
    global _loaded, _cpu_seconds
    _cpu_seconds = cpu_seconds
    os.setsid()  # a Ctrl-C is the trainer's, and a kill reaches the worker's children
    parent = multiprocessing.parent_process()
    end_with(0 if parent is None else parent.pid)  # with the trainer, however that ends
    stay_at_sigterm()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if quiet:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    signal.alarm(_START_SECONDS)
    try:
        for module in preload:
            importlib.import_module(module)
        module, _, name = target.rpartition(":")
        if module.endswith(".py"):
            from lightppo.user_code import load_python_function

            _loaded = load_python_function(target, name)
        else:
            _loaded = getattr(importlib.import_module(module), name)
    except BaseException as error:
        _loaded = f"{target} cannot be loaded in a worker process: {error_text(error)}"
    signal.alarm(0)


def _answer(payload: bytes) -> str:
    """Make one call in a worker. It answers in JSON, so that the trainer never unpickles what a function returns."""
    if isinstance(_loaded, str):
        return json.dumps({"unloadable": _loaded})
    with without_copies("the reward function"):
        return _called(_loaded, payload)


def _called(target: Callable[..., Any], payload: bytes) -> str:
    if _cpu_seconds is not None:
        # The kernel ends the process even in the midst of C code.
        signal.setitimer(signal.ITIMER_PROF, _cpu_seconds)
    try:
        args, kwargs = pickle.loads(payload)
        return as_json({"value": awaited(target(*args, **kwargs))}, "a reward function")
    except BaseException as error:  # SystemExit too: a function that exits has no answer
        # The trace is for --debug. No exception leaves a worker.
        trace = "".join(traceback.format_exception(error))[-_MAX_TRACE:]
        return json.dumps({"error": error_text(error), "trace": trace})
    finally:
        if _cpu_seconds is not None:
            signal.setitimer(signal.ITIMER_PROF, 0)
