"""Worker processes that answer questions and can be killed, for environments, reward functions and mathematics.

A server process loads the user's code once and forks the workers, so that a new one costs milliseconds. It runs
nothing of the user's beside the loading, so it can always fork and kill, and it tells how each worker ended. It ends
when this process does, however that ends, and with it all workers and what they have started.

A question is pickled, an answer is JSON: ``{"value": …}``, or ``{"kind": …, "text": …}`` for a failure. This process
unpickles nothing of a worker. It is not a sandbox: workers have this process's rights.

It needs POSIX and psutil. What only Linux has comes on top of that (``_end_with``, ``oom_score_adj``).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import importlib
import json
import os
import pickle
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil

from lightppo.errors import ConfigError, WorkerStartError
from lightppo.ranks import cores_of_rank
from lightppo.user_code import error_text

Answer = dict[str, Any]  # {"value": …} or {"kind": …, "text": …}
Respond = Callable[..., Answer]

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
# Otherwise macOS may abort a fork of a process that ever had a second thread. The server has none when it forks.
_SERVER_ENVIRONMENT = {**ONE_THREAD, "OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES"}
MAX_ANSWER_BYTES = 16 << 20
_START_SECONDS = 120  # until the user's code is loaded; imports are slow on a busy machine
_START_TRIES = 3
_END_SECONDS = 5  # until the server has ended by itself
_ARRIVAL_SECONDS = 0.1  # for an answer on its way
_REPORT_SECONDS = 5.0  # in which the server says how a worker ended
_MEMORY_MILLISECONDS = 100  # between looks at the memory of the workers
_MAX_TRACE = 10_000  # characters
_LIBC = ctypes.CDLL(None)  # loaded once: that takes a fork longer than the call
_PR_SET_PDEATHSIG = 1
_SERVER_DIED = "the server of worker processes died"
_QUESTION_HEADER = struct.Struct("!QQ")  # length and number
_ANSWER_HEADER = struct.Struct("!QQQ")  # length, number of the question, process that answers
_STARTER = (
    "import json, sys; orders = json.loads(sys.argv[2]); sys.path[:] = orders['path']; "
    "from lightppo.processes.fork_server import serve; serve(int(sys.argv[1]), orders)"
)


def default_processes() -> int:
    """Return how many worker processes suit this rank: its share of the available cores, from 1 to 16."""
    return min(cores_of_rank(), 16)


def closer_of(owner: Any, parts: Sequence[Any]) -> weakref.finalize:
    """Return what closes these parts once: when it is called, the owner is collected, or the program ends.

    A forked child closes none of them: they are its parent's.
    """
    return weakref.finalize(owner, _close_all, parts, os.getpid())


def _close_all(parts: Sequence[Any], owner_process: int) -> None:
    if os.getpid() == owner_process:
        for part in parts:
            part.close()


class Once:
    """Stand for something that happens once, for which any number of threads and loops can wait."""

    def __init__(self) -> None:
        self.value: Any = None
        self.has_happened = False
        self._waiting: set[Future[Any]] = set()
        self._lock = threading.Lock()

    def happen(self, value: Any = None) -> None:
        """Give the value to all that wait; only the first time counts."""
        with self._lock:
            if self.has_happened:
                return
            self.value = value
            self.has_happened = True
            waiting = self._waiting
            self._waiting = set()
        for future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_result(value)

    @contextlib.contextmanager
    def watched(self) -> Iterator[Future[Any]]:
        """Give a future of it, as long as somebody waits."""
        future: Future[Any] = Future()
        self.then(future)
        try:
            yield future
        finally:
            with self._lock:
                self._waiting.discard(future)

    def then(self, future: Future[Any]) -> None:
        """Give the value to a future, at once if it is there."""
        with self._lock:
            if not self.has_happened:
                self._waiting.add(future)
                return
        future.set_result(self.value)


# --- in this process


class WorkerPool:
    """Give at most ``size`` workers; who finds none idle waits.

    Args:
        loader: ``module:function``. The server calls it with ``settings``, which JSON can hold. It returns a function
            that each worker calls once, after the fork, and that returns what answers the questions.
        subject: what the loader loads, for messages.
        streams: what the server and the workers write to, as :class:`subprocess.Popen` takes it.
        memory_mb: a worker with more MiB of resident memory is killed.
    """

    def __init__(
        self,
        loader: str,
        settings: Mapping[str, Any],
        size: int,
        *,
        subject: str,
        streams: Mapping[str, int] | None = None,
        memory_mb: int | None = None,
    ) -> None:
        self.size = size
        self._orders = {
            **{"loader": loader, "settings": settings, "subject": subject},
            **{"memory_mb": memory_mb, "folder": os.getcwd()},  # that relative paths start from
        }
        self._streams = dict(streams or {})
        self._lock = threading.Lock()
        self._places = size
        self._waiting: deque[Future[None]] = deque()
        self._idle: list[Worker] = []
        self._servers: list[Server] = []  # at most one
        self._closer = closer_of(self, self._servers)

    async def take(self, name: str = "") -> Worker:
        """Return a worker, preferably one that was taken by this name before; it is started if none is idle."""
        await self._wait_for_place()
        try:
            worker = self._idle_worker(name) or await self._start_worker()
        except BaseException:
            self._free_place()
            raise
        worker.names.add(name)
        return worker

    def give_back(self, worker: Worker) -> None:
        """Keep a worker for the next user; the place of one that is ending is free when it has ended."""
        if worker.is_ending:
            worker.close()
            place_is_free: Future[str] = Future()
            place_is_free.add_done_callback(lambda _: self._free_place())
            worker.ended.then(place_is_free)
            return
        with self._lock:
            self._idle.append(worker)
        self._free_place()

    def _running_server(self) -> Server:
        """Return the server, started if there is none."""
        with self._lock:
            if not self._closer.alive:
                raise WorkerStartError("the pool of worker processes is closed")
            if self._servers and self._servers[0].has_ended:
                self._servers.clear()
            if not self._servers:
                self._servers.append(Server(self._orders, self._streams))
            return self._servers[0]

    def close(self) -> None:
        """End all processes; running calls fail. May be called again."""
        self._closer()

    @property
    def is_closed(self) -> bool:
        """Tell whether no more workers are given."""
        return not self._closer.alive

    @property
    def process_ids(self) -> list[int]:
        """Return those of the workers that run."""
        return [process for server in self._servers for process in server.process_ids]

    async def _wait_for_place(self) -> None:
        with self._lock:
            if self._places:
                self._places -= 1
                return
            place_granted: Future[None] = Future()
            self._waiting.append(place_granted)
        try:
            await asyncio.wrap_future(place_granted)
        except asyncio.CancelledError:
            with self._lock:
                is_waiting = place_granted in self._waiting
                if is_waiting:
                    self._waiting.remove(place_granted)
            if not is_waiting and not place_granted.cancelled():  # granted at that moment
                self._free_place()
            raise

    def _free_place(self) -> None:
        with self._lock:
            while self._waiting:
                place_granted = self._waiting.popleft()
                if place_granted.set_running_or_notify_cancel():
                    place_granted.set_result(None)
                    return
            self._places += 1

    def _idle_worker(self, name: str) -> Worker | None:
        with self._lock:
            for worker in [worker for worker in self._idle if worker.ended.has_happened]:
                self._idle.remove(worker)
                worker.close()
            if not self._idle:
                return None
            matching_workers = (worker for worker in self._idle if name in worker.names)
            worker = next(matching_workers, self._idle[0])
            self._idle.remove(worker)
            return worker

    async def _start_worker(self) -> Worker:
        for _ in range(_START_TRIES):
            server = self._running_server()
            problem = await server.wait_until_ready()
            if problem:
                continue
            try:
                worker = server.fork()
            except OSError as error:  # too many open files
                raise WorkerStartError(f"no worker process can be started: {error}") from error
            try:
                problem = await worker.wait_until_ready()
            except BaseException:
                worker.close()
                raise
            if not problem:
                return worker
            worker.close()
        raise WorkerStartError(f"{_START_TRIES} worker processes in a row did not start: {problem}")


class Server:
    """Talk to the process that forks workers."""

    def __init__(self, orders: Mapping[str, Any], streams: Mapping[str, int]) -> None:
        self.has_ended = False
        self._subject = orders["subject"]
        self._ready = Once()  # {} or {"problem": …} from the server, {"death": …} without it
        self._workers: dict[int, Worker] = {}
        self._last_number = 0
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._control, servers_channel = socket.socketpair()  # for one JSON object per line
        orders = {**orders, "path": sys.path, "parent": os.getpid()}
        started: Future[None] = Future()
        # The kernel ends the server with the thread that started it, as long as it loads the user's code.
        threading.Thread(
            target=self._run,
            args=(servers_channel, orders, streams, started),
            name="fork-server",
            daemon=True,
        ).start()
        started.result()

    @property
    def process_ids(self) -> list[int]:
        """Return those of the workers that run."""
        with self._lock:
            return [worker.process for worker in self._workers.values() if worker.process]

    async def wait_until_ready(self) -> str:
        """Wait until it has loaded the user's code; return how it died before, if so."""
        with self._ready.watched() as ready:
            report = await asyncio.wrap_future(ready)
        if report.get("problem"):
            raise WorkerStartError(report["problem"])
        return report.get("death", "")

    def fork(self) -> Worker:
        """Start a worker."""
        channel, workers_channel = socket.socketpair()
        with self._lock:
            self._last_number += 1
            worker = Worker(self._last_number, channel, self)
            self._workers[worker.number] = worker
        with workers_channel:
            start_order = _line({"start": worker.number})
            descriptors = [workers_channel.fileno()]
            try:
                with self._sending:
                    sent = socket.send_fds(self._control, [start_order], descriptors)
                    self._control.sendall(start_order[sent:])
            except OSError:
                worker.has_ended(_SERVER_DIED)
        return worker

    def kill(self, worker: Worker) -> None:
        """Kill a worker with all that it has started."""
        with contextlib.suppress(OSError), self._sending:  # it has ended, and the worker with it
            self._control.sendall(_line({"kill": worker.number}))

    def close(self) -> None:
        """Kill all workers and the server."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._end_workers("the pool of worker processes was closed")

    def _run(
        self,
        servers_channel: socket.socket,
        orders: Mapping[str, Any],
        streams: Mapping[str, int],
        started: Future[None],
    ) -> None:
        try:
            with servers_channel:
                descriptor = servers_channel.fileno()
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _STARTER, str(descriptor), json.dumps(orders)],
                    cwd=orders["folder"],
                    stdin=subprocess.DEVNULL,
                    **streams,
                    pass_fds=[descriptor],
                    env={**_SERVER_ENVIRONMENT, **os.environ, "CUDA_VISIBLE_DEVICES": ""},
                    start_new_session=True,  # a Ctrl-C is this process's
                )
        except OSError as error:
            started.set_exception(WorkerStartError(f"no process could be started: {error}"))
            return
        started.set_result(None)
        with contextlib.suppress(OSError), self._control.makefile("rb") as reports:
            for report in reports:
                if report.endswith(b"\n"):  # it may have died while it wrote
                    self._read_report(json.loads(report))
        exit_code = self._process.wait()
        with self._lock:
            self.has_ended = True
        if exit_code:  # it was killed, and has left its workers and what they started
            for process_id in self.process_ids:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process_id, signal.SIGKILL)
        end_text = f"{_SERVER_DIED} before it had loaded {self._subject} ({_end_text(exit_code)})"
        self._ready.happen({"death": end_text})
        self._end_workers(_SERVER_DIED)

    def _read_report(self, report: Mapping[str, Any]) -> None:
        number = report.get("worker")
        if number is None:
            self._ready.happen(report)
        elif "process" in report:
            self._workers[number].process = report["process"]
        else:
            with self._lock:
                worker = self._workers.pop(number)
            worker.exit_code = report.get("code")
            worker.has_ended(report["end"])

    def _end_workers(self, end_text: str) -> None:
        with self._lock:
            workers = list(self._workers.values())
        for worker in workers:
            worker.has_ended(end_text)


class Worker:
    """Talk to a worker process: one question and one answer at a time."""

    def __init__(self, number: int, channel: socket.socket, server: Server) -> None:
        self.number = number
        self.names: set[str] = set()  # by which it was taken
        self.process = 0  # as yet unknown
        self.exit_code: int | None = None
        self.ended = Once()  # how
        self.is_ending = False
        self._answering_process = 0  # the first one that answers is the worker
        self._questions = 0  # questions so far
        self._channel = channel
        self._server = server
        channel.setblocking(False)

    async def wait_until_ready(self) -> str:
        """Wait until it has loaded what its server could not; return why it did not start, if so."""
        answer = await self._within(self._receive(), _START_SECONDS)
        if answer.get("value"):
            self.kill()
            raise WorkerStartError(answer["value"])
        return answer.get("text", "")

    async def exchange(self, question: bytes, timeout: float) -> Answer:
        """Return the answer to pickled arguments; after anything else the worker is killed.

        Failures are of the kind ``exception``, ``timeout`` or ``lost``; with ``unread`` it ended before it had read
        the question.
        """
        return await self._within(self._ask(question), timeout)

    def kill(self) -> None:
        """Kill it at once, with all that it has started."""
        self.is_ending = True
        self._server.kill(self)

    def has_ended(self, end_text: str) -> None:
        """Tell all that wait for it how it ended."""
        self.is_ending = True
        self.ended.happen(end_text)

    def close(self) -> None:
        """Ask no more questions; it ends, if it has not yet."""
        self.is_ending = True
        self._channel.close()

    async def _within(self, exchange: Coroutine[Any, Any, Answer], timeout: float) -> Answer:
        exchange_task = asyncio.ensure_future(exchange)
        try:
            with self.ended.watched() as ended:
                return await self._first(exchange_task, asyncio.wrap_future(ended), timeout)
        except asyncio.CancelledError:
            self.kill()
            raise
        finally:
            exchange_task.cancel()
            await asyncio.wait({exchange_task})  # it leaves the socket alone from here

    async def _first(
        self, exchange_task: asyncio.Task[Answer], ended: asyncio.Future[str], timeout: float
    ) -> Answer:
        await asyncio.wait(
            {exchange_task, ended}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
        )
        if not exchange_task.done():  # its last answer; or this loop was late itself
            await asyncio.wait({exchange_task}, timeout=_ARRIVAL_SECONDS)
        if exchange_task.done() and exchange_task.exception() is None:
            return exchange_task.result()
        self.kill()  # also what it has started, or what it sent is nonsense
        if not exchange_task.done() and not ended.done():
            return {"kind": "timeout", "text": f"no answer within {timeout:g} s"}
        await asyncio.wait({ended}, timeout=_REPORT_SECONDS)
        error = exchange_task.exception() if exchange_task.done() else None
        is_nonsense = isinstance(error, ValueError)  # then its end says only that it was killed
        if ended.done() and not is_nonsense:
            problem = ended.result()
        else:
            problem = f"it broke off: {error_text(error)}"
        # Linux resets a connection whose other end was closed with something unread. Elsewhere this is seen only of a
        # worker that ended before the question was sent.
        is_unread = isinstance(error, (ConnectionResetError, BrokenPipeError))
        return {"kind": "lost", "text": problem, "unread": is_unread}

    async def _ask(self, question: bytes) -> Answer:
        self._questions += 1
        header = _QUESTION_HEADER.pack(len(question), self._questions)
        await asyncio.get_running_loop().sock_sendall(self._channel, header + question)
        return await self._receive()

    async def _receive(self) -> Answer:
        header = await self._read(_ANSWER_HEADER.size)
        answer_length, question_number, process_id = _ANSWER_HEADER.unpack(header)
        if answer_length > 2 * MAX_ANSWER_BYTES:
            raise ValueError(f"an answer of {answer_length} bytes")
        self._answering_process = self._answering_process or process_id
        if (question_number, process_id) != (self._questions, self._answering_process):
            raise ValueError(
                f"process {process_id} answered question {question_number}, where process {self._answering_process} "
                f"is to answer question {self._questions}: a process that the user's code forks must end with os._exit"
            )
        return json.loads(await self._read(answer_length))

    async def _read(self, length: int) -> bytes:
        event_loop = asyncio.get_running_loop()
        received = bytearray()
        while len(received) < length:
            new_bytes = await event_loop.sock_recv(
                self._channel, min(length - len(received), 1 << 20)
            )
            if not new_bytes:
                raise ConnectionError("no answer")
            received += new_bytes
        return bytes(received)


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _end_text(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit code {exit_code}"
    with contextlib.suppress(ValueError):
        return f"signal {-exit_code}, {signal.Signals(-exit_code).name}"
    return f"signal {-exit_code}"


# --- in the server


def serve(control_descriptor: int, orders: Mapping[str, Any]) -> None:
    """Load the user's code, then fork and kill as ordered."""
    _end_with(orders["parent"])
    # Go on after a SIGTERM: launchers signal what ranks have started, too, while the trainer ends its step. It is not
    # ignored, because programs that the user's code starts would inherit that.
    signal.signal(signal.SIGTERM, lambda *_: None)
    control = socket.socket(fileno=control_descriptor)
    start_worker: Callable[[], Respond] | None = None
    load_problem = ""
    if not orders.get("late"):
        signal.alarm(_START_SECONDS)
        process = psutil.Process()
        files_before = process.num_fds()
        start_worker, load_problem = _load(orders)
        signal.alarm(0)
        has_opened_files = process.num_fds() > files_before
        if not load_problem and (has_opened_files or process.num_threads() > 1):
            # Forks would lack the threads that the user's code has started, and share the connections that it has
            # opened: workers load it themselves.
            late_orders = json.dumps({**orders, "late": True})
            os.set_inheritable(control_descriptor, True)
            command = [sys.executable, "-c", _STARTER, str(control_descriptor), late_orders]
            os.execv(sys.executable, command)
    _end_with(None)  # from here the loop below looks after that
    gc.freeze()
    control.sendall(_line({"problem": load_problem}))
    _Forks(control, orders, start_worker).serve()


def _end_with(parent: int | None) -> None:
    """Have Linux kill this process when the thread that started it ends; ``None``: not any more.

    Without the parent, which may have ended already, this process ends at once.
    """
    # Elsewhere the alarm ends a server that loads; then its loop looks for the trainer. The trainer kills the workers of
    # a server that died. If both died, a worker ends when it waits for its next question.
    if sys.platform == "linux":
        death_signal = 0 if parent is None else signal.SIGKILL
        _LIBC.prctl(_PR_SET_PDEATHSIG, death_signal)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def _load(orders: Mapping[str, Any]) -> tuple[Callable[[], Respond] | None, str]:
    """Return what starts a worker, or why the user's code cannot be loaded."""
    module_name, _, loader_name = orders["loader"].partition(":")
    try:
        return getattr(importlib.import_module(module_name), loader_name)(orders["settings"]), ""
    except BaseException as error:
        problem = str(error) if isinstance(error, ConfigError) else error_text(error)
        return None, f"{orders['subject']} cannot be loaded in a worker process: {problem}"


class _Forks:
    """Fork and kill workers, in the loop of the server."""

    def __init__(
        self,
        control: socket.socket,
        orders: Mapping[str, Any],
        start_worker: Callable[[], Respond] | None,
    ) -> None:
        self.control = control
        self.orders = orders
        self.start_worker = start_worker
        self.memory_bytes = (orders["memory_mb"] or 0) << 20
        self.processes: dict[int, int] = {}  # worker → process
        self.too_large: set[int] = set()  # numbers of workers
        self.beginning = b""  # of an order whose end has not come yet
        self.descriptors: list[int] = []  # of such orders
        self.signals, self.signals_in = os.pipe()  # readable after a SIGCHLD
        for descriptor in (self.signals, self.signals_in):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(self.signals_in, warn_on_full_buffer=False)
        self.users_handler = signal.signal(signal.SIGCHLD, lambda *_: None) or signal.SIG_DFL
        self.poller = select.poll()
        self.poller.register(control, select.POLLIN)
        self.poller.register(self.signals, select.POLLIN)

    def serve(self) -> None:
        wait_milliseconds = _MEMORY_MILLISECONDS if self.memory_bytes else 1000
        while os.getppid() == self.orders["parent"]:
            ready = {descriptor for descriptor, _ in self.poller.poll(wait_milliseconds)}
            if not ready or self.signals in ready:  # whoever started us may block SIGCHLD
                self.bury_dead()
            if self.control.fileno() in ready and not self.obey():
                break
            if self.memory_bytes:
                self.check_memory()
        self.end()

    def obey(self) -> bool:
        """Obey the orders that have come; return False at the end of all."""
        try:
            received, descriptors, *_ = socket.recv_fds(self.control, 1 << 12, 16)
        except OSError:
            return False
        # The kernel keeps their order: a descriptor comes with the first byte of its order.
        self.descriptors += descriptors
        *whole_orders, self.beginning = (self.beginning + received).split(b"\n")
        for order in map(json.loads, whole_orders):
            if "start" in order:
                self.fork(order["start"], self.descriptors.pop(0))
            elif order["kill"] in self.processes:
                _kill(self.processes[order["kill"]])
        return bool(received)

    def fork(self, number: int, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        server = os.getpid()
        try:
            process_id = os.fork()
        except OSError as error:  # too many processes, too little memory
            os.close(descriptor)
            return self.report({"worker": number, "end": str(error)})
        if process_id == 0:
            exit_code = 1
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, self.users_handler)
                self.control.close()
                for servers_own in (self.signals, self.signals_in, *self.descriptors):
                    os.close(servers_own)
                _end_with(server)
                _work(socket.socket(fileno=descriptor), self.orders, self.start_worker)
                exit_code = 0
            except OSError:  # the trainer has gone
                pass
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(exit_code)
        os.close(descriptor)
        self.processes[number] = process_id
        self.report({"worker": number, "process": process_id})

    def bury_dead(self) -> None:
        """Report the workers that have ended, and kill what they have started."""
        with contextlib.suppress(BlockingIOError):  # no signal came
            os.read(self.signals, 1 << 12)
        # ``os.waitpid`` cannot look without reaping, and macOS has no ``os.waitid`` before Python 3.13.
        for number, process_id in list(self.processes.items()):
            if psutil.Process(process_id).status() == psutil.STATUS_ZOMBIE:
                self.bury(number, process_id)

    def bury(self, number: int, process_id: int) -> None:
        # With what it has started; before the wait, as its number may be another's afterwards.
        _kill(process_id)
        exit_code = os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1])
        del self.processes[number]
        if number in self.too_large:
            self.too_large.remove(number)
            end_text = f"more than {self.orders['memory_mb']} MiB of memory"
        else:
            end_text = f"the worker process died ({_end_text(exit_code)})"
        self.report({"worker": number, "code": exit_code, "end": end_text})

    def check_memory(self) -> None:
        for number, process_id in self.processes.items():
            with contextlib.suppress(psutil.NoSuchProcess):  # macOS tells nothing of a dead one
                if psutil.Process(process_id).memory_info().rss > self.memory_bytes:
                    self.too_large.add(number)
                    _kill(process_id)

    def report(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # nobody listens: the loop will see
            self.control.sendall(_line(message))

    def end(self) -> None:
        for process_id in self.processes.values():
            _kill(process_id)
        for process_id in self.processes.values():
            os.waitpid(process_id, 0)
        os._exit(0)


def _kill(process_id: int) -> None:
    """Kill a worker and its process group."""
    for send_kill in (os.killpg, os.kill):  # it may not have a group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send_kill(process_id, signal.SIGKILL)


# --- in a worker


def _work(
    channel: socket.socket, orders: Mapping[str, Any], start_worker: Callable[[], Respond] | None
) -> None:
    """Answer in the main thread until the channel is closed."""
    os.setsid()
    with contextlib.suppress(OSError):
        # If memory is short, Linux kills this process and not the trainer.
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # one of the user's own
            stream.reconfigure(line_buffering=True)
    load_problem = ""
    if start_worker is None:
        start_worker, load_problem = _load(orders)
    random.seed()  # not the server's numbers
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    _send(channel, 0, json.dumps({"value": load_problem}))
    if start_worker is None:
        return
    respond = start_worker()
    while question := _receive(channel):
        question_number, question_bytes = question
        _send(channel, question_number, _answer(respond, question_bytes))


def _answer(respond: Respond, question: bytes) -> str:
    try:
        return _as_json(respond(*pickle.loads(question)))
    except BaseException as error:  # SystemExit too: who exits has no answer
        # The trace is for --debug. No exception leaves a worker.
        trace = "".join(traceback.format_exception(error))[-_MAX_TRACE:]
        return json.dumps({"kind": "exception", "text": error_text(error), "trace": trace})


def _as_json(answer: Answer) -> str:
    """Return an answer as text, with numbers and arrays of numpy and torch."""
    json_text = json.dumps(answer, default=_plain)
    if len(json_text) > MAX_ANSWER_BYTES:
        raise ValueError(f"the answer has {len(json_text)} bytes")
    return json_text


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a worker process cannot return {type(value).__name__} to the trainer")


def _receive(channel: socket.socket) -> tuple[int, bytes] | None:
    """Return the number of a question, and what it is."""
    header = _read(channel, _QUESTION_HEADER.size)
    if not header:
        return None
    question_length, question_number = _QUESTION_HEADER.unpack(header)
    question = _read(channel, question_length)
    return (question_number, question) if question else None


def _read(channel: socket.socket, length: int) -> bytes:
    received = bytearray()
    while len(received) < length:
        new_bytes = channel.recv(min(length - len(received), 1 << 20))
        if not new_bytes:
            return b""
        received += new_bytes
    return bytes(received)


def _send(channel: socket.socket, question_number: int, answer_text: str) -> None:
    answer_bytes = answer_text.encode()
    channel.sendall(
        _ANSWER_HEADER.pack(len(answer_bytes), question_number, os.getpid()) + answer_bytes
    )
