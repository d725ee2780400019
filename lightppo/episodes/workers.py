"""Environments in processes that can be killed: a server that has loaded the user's files forks the workers.

The server runs nothing of the user's beside the loading of the files, so it can always fork and kill. It ends when
this process does, however that ends, and with it all workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
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
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from lightppo.episodes import env_failures as contract
from lightppo.episodes.env_failures import Contract, Place
from lightppo.episodes.hosts import (
    Answer,
    Answers,
    Calls,
    Host,
    InThread,
    Once,
    UserLoop,
    drive,
    in_loop,
    one_by_one,
)
from lightppo.episodes.specs import EnvironmentSpec, load_specs
from lightppo.errors import ConfigError, WorkerStartError
from lightppo.processes.groups import (
    MOST_BYTES,
    ONE_THREAD,
    as_json,
    closer_of,
    end_with,
    stay_at_sigterm,
)
from lightppo.user_code import error_text

logger = logging.getLogger(__name__)

_START_SECONDS = 120  # until the user's files are loaded; imports are slow on a busy machine
_START_TRIES = 5
_END_SECONDS = 5  # until the server has ended by itself
_SETTLE = 0.1  # seconds for an answer on its way
_LAST_WORDS = 5.0  # seconds in which the server says how a worker ended
_QUESTION = struct.Struct("!QQ")  # its length and number
_ANSWER = struct.Struct("!QQQ")  # its length, the question's number, the process that answers
_STARTER = (
    "import json, sys; orders = json.loads(sys.argv[2]); sys.path[:] = orders['path']; "
    "from lightppo.episodes.workers import serve; serve(int(sys.argv[1]), orders)"
)


# --- in this process


class WorkerPool:
    """At most ``size`` workers; sessions that find none wait for a place."""

    def __init__(
        self, entries: Sequence[str], tools: Sequence[str], contract: Contract, size: int
    ) -> None:
        if sys.platform != "linux":
            raise ConfigError("--env_workers works on Linux only; set it to 0")
        self.size = size
        self.lost_workers = 0  # that were killed, or ended by themselves
        self._orders = {
            **{"entries": list(entries), "tools": list(tools), "contract": contract},
            "folder": os.getcwd(),  # that relative paths start from
        }
        self._lock = threading.Lock()
        self._places = size
        self._waiting: deque[Future[None]] = deque()
        self._idle: list[_Worker] = []
        self._servers: list[_Server] = []  # at most one
        self._closer = closer_of(self, self._servers)

    async def take(self, spec: EnvironmentSpec) -> ProcessSeat:
        """Return a worker for one session, started if none is idle."""
        await self._place()
        try:
            return ProcessSeat(spec, await self._worker(spec.name), self)
        except BaseException:
            self._free_place()
            raise

    @property
    def pids(self) -> list[int]:
        """Of the workers that run."""
        return [pid for server in self._servers for pid in server.pids]

    def start(self) -> _Server:
        """Return the server, started if there is none."""
        with self._lock:
            if not self._closer.alive:
                raise RuntimeError("the environments are closed")
            if self._servers and self._servers[0].has_ended:
                self._servers.clear()
            if not self._servers:
                self._servers.append(_Server(self._orders))
            return self._servers[0]

    def close(self) -> None:
        """End all processes. May be called again."""
        self._closer()

    def give_back(self, worker: _Worker) -> None:
        """Keep a worker for the next session; of one that is ending, its place is free when it has ended."""
        if worker.is_ending:
            self.lost_workers += 1
            worker.close()
            free: Future[str] = Future()
            free.add_done_callback(lambda _: self._free_place())
            worker.ended.then(free)
            return
        with self._lock:
            self._idle.append(worker)
        self._free_place()

    async def _place(self) -> None:
        with self._lock:
            if self._places:
                self._places -= 1
                return
            granted: Future[None] = Future()
            self._waiting.append(granted)
        try:
            await asyncio.wrap_future(granted)
        except asyncio.CancelledError:
            with self._lock:
                waited = granted in self._waiting
                if waited:
                    self._waiting.remove(granted)
            if not waited and not granted.cancelled():  # granted at that moment
                self._free_place()
            raise

    def _free_place(self) -> None:
        with self._lock:
            while self._waiting:
                granted = self._waiting.popleft()
                if granted.set_running_or_notify_cancel():
                    granted.set_result(None)
                    return
            self._places += 1

    async def _worker(self, name: str) -> _Worker:
        with self._lock:
            for worker in [one for one in self._idle if one.ended.has_happened]:
                self._idle.remove(worker)
                worker.close()
            # In TRL's contract, a worker may have this environment's object already.
            known = next((one for one in self._idle if name in one.names), None)
            if known is None and self._idle:
                known = self._idle[0]
            if known is not None:
                self._idle.remove(known)
        known = known or await self._new_worker()
        known.names.add(name)
        return known

    async def _new_worker(self) -> _Worker:
        for _ in range(_START_TRIES):
            server = self.start()
            await server.wait_until_ready()
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


class _Server:
    """The process that forks workers, seen from here."""

    def __init__(self, orders: Mapping[str, Any]) -> None:
        self.has_ended = False
        self._ready = Once()  # empty, or why it could not load the user's files
        self._workers: dict[int, _Worker] = {}
        self._next = 0
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        started: Future[None] = Future()
        # The kernel ends the server with the thread that started it, as long as it loads the user's files.
        arguments = (theirs, {**orders, "path": sys.path, "parent": os.getpid()}, started)
        threading.Thread(target=self._keep, args=arguments, name="env-server", daemon=True).start()
        started.result()

    @property
    def pids(self) -> list[int]:
        with self._lock:
            return [worker.pid for worker in self._workers.values() if worker.pid]

    async def wait_until_ready(self) -> None:
        with self._ready.watched() as ready:
            problem = await asyncio.wrap_future(ready)
        if problem:
            raise WorkerStartError(problem)

    def fork(self) -> _Worker:
        ours, theirs = socket.socketpair()
        with self._lock, theirs:
            self._next += 1
            worker = _Worker(self._next, ours, self)
            self._workers[worker.number] = worker
            if self.has_ended:
                worker.has_ended("the server of worker processes died")
            else:
                order = json.dumps({"start": worker.number}).encode()
                try:
                    socket.send_fds(self._socket, [order], [theirs.fileno()])
                except OSError:
                    worker.has_ended("the server of worker processes died")
        return worker

    def kill(self, worker: _Worker) -> None:
        with contextlib.suppress(OSError):  # it has ended, and the worker with it
            self._socket.send(json.dumps({"kill": worker.number}).encode())

    def close(self) -> None:
        """Kill all workers and the server."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with self._lock:
            workers = list(self._workers.values())
        for worker in workers:
            worker.has_ended("the environments were closed")

    def _keep(
        self, theirs: socket.socket, orders: Mapping[str, Any], started: Future[None]
    ) -> None:
        command = [sys.executable, "-c", _STARTER, str(theirs.fileno()), json.dumps(orders)]
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command,
                    cwd=orders["folder"],
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # what environments print is no output of the run
                    pass_fds=[theirs.fileno()],
                    env={**ONE_THREAD, **os.environ, "CUDA_VISIBLE_DEVICES": ""},
                    start_new_session=True,  # a Ctrl-C is this process's
                )
        except OSError as error:
            started.set_exception(WorkerStartError(f"no process could be started: {error}"))
            return
        started.set_result(None)
        with contextlib.suppress(OSError):
            while message := self._socket.recv(1 << 16):
                self._hear(json.loads(message))
        self._process.wait()
        code = self._process.returncode
        late = " before it had loaded the environments" if not self._ready.has_happened else ""
        self._ready.happen(f"the server of worker processes died{late} ({_how(code)})")
        with self._lock:
            self.has_ended = True
            workers = list(self._workers.values())
        for worker in workers:
            worker.has_ended("the server of worker processes died")

    def _hear(self, message: Mapping[str, Any]) -> None:
        if "ready" in message:
            self._ready.happen(message["ready"])
        elif "pid" in message:
            self._workers[message["worker"]].pid = message["pid"]
        else:
            with self._lock:
                worker = self._workers.pop(message["worker"])
            how = message.get("not_started") or f"its process died ({_how(message['code'])})"
            worker.has_ended(how)


class _Worker:
    """A worker process, seen from here: one question and one answer at a time."""

    def __init__(self, number: int, channel: socket.socket, server: _Server) -> None:
        self.number = number
        self.names: set[str] = set()  # environments that it had
        self.pid = 0  # as yet unknown
        self._process = 0  # that answers; the first one to do so is the worker
        self._questions = 0  # questions so far
        self.ended = Once()  # how
        self.is_ending = False
        self._socket = channel
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
        """Return its answer; after anything else it is killed."""
        return await self._within(self._ask(question), timeout)

    def kill(self) -> None:
        """Kill it at once, with all that it has started."""
        self.is_ending = True
        self._server.kill(self)

    def has_ended(self, how: str) -> None:
        self.is_ending = True
        self.ended.happen(how)

    def close(self) -> None:
        """Ask no more questions; it ends, if it has not yet."""
        self.is_ending = True
        self._socket.close()

    async def _within(self, coroutine: Any, timeout: float) -> Answer:
        task = asyncio.ensure_future(coroutine)
        try:
            with self.ended.watched() as ended:
                return await self._first(task, asyncio.wrap_future(ended), timeout)
        except asyncio.CancelledError:
            self.kill()
            raise
        finally:
            task.cancel()
            await asyncio.wait({task})  # it leaves the socket alone from here

    async def _first(self, task: asyncio.Task, ended: asyncio.Future, timeout: float) -> Answer:
        await asyncio.wait({task, ended}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():  # its last answer; or this loop was late itself
            await asyncio.wait({task}, timeout=_SETTLE)
        if task.done() and task.exception() is None:
            return task.result()
        self.kill()  # also what it has started, or what it sent is nonsense
        if not task.done() and not ended.done():
            return {"kind": "timeout", "text": f"no answer within {timeout:g} s"}
        await asyncio.wait({ended}, timeout=_LAST_WORDS)
        broke_off = task.exception() if task.done() else None
        nonsense = isinstance(broke_off, ValueError)  # then its end says only that it was killed
        if ended.done() and not nonsense:
            text = ended.result()
        else:
            text = f"it broke off: {error_text(broke_off)}"
        return {"kind": "lost", "text": text}

    async def _ask(self, question: bytes) -> Answer:
        self._questions += 1
        head = _QUESTION.pack(len(question), self._questions)
        await asyncio.get_running_loop().sock_sendall(self._socket, head + question)
        return await self._receive()

    async def _receive(self) -> Answer:
        length, number, pid = _ANSWER.unpack(await self._read(_ANSWER.size))
        if length > 2 * MOST_BYTES:
            raise ValueError(f"an answer of {length} bytes")
        self._process = self._process or pid
        if (number, pid) != (self._questions, self._process):
            raise ValueError(
                f"process {pid} answered question {number}, where process {self._process} is to answer question "
                f"{self._questions}: a process that the environment forks must end with os._exit"
            )
        return json.loads(await self._read(length))

    async def _read(self, length: int) -> bytes:
        loop = asyncio.get_running_loop()
        data = bytearray()
        while len(data) < length:
            part = await loop.sock_recv(self._socket, min(length - len(data), 1 << 20))
            if not part:
                raise ConnectionError("no answer")
            data += part
        return bytes(data)


class ProcessSeat:
    """A session's worker."""

    environment = None  # the object is in another process

    def __init__(self, spec: EnvironmentSpec, worker: _Worker, pool: WorkerPool) -> None:
        self.is_lost = False
        self._spec = spec
        self._worker = worker
        self._pool = pool

    async def ask(self, place: Place, given: Mapping[str, Any], timeout: float) -> Answer:
        """As :class:`lightppo.episodes.hosts.Seat`."""
        try:
            question = pickle.dumps((self._spec.name, place, dict(given)))
        except Exception as error:  # whatever __reduce__ of a user's object raises
            text = f"the row cannot be sent to a worker process: {error_text(error)}"
            return {"kind": "exception", "text": text}
        try:
            return await self._worker.exchange(question, timeout)
        finally:
            self.is_lost = self._worker.is_ending

    async def ask_in_turn(self, calls: Calls, timeout: float) -> Answers:
        return await one_by_one(self, calls, timeout)

    def leave(self) -> None:
        """As :class:`lightppo.episodes.hosts.Seat`."""
        self._pool.give_back(self._worker)

    def drop(self) -> None:
        """As :class:`lightppo.episodes.hosts.Seat`."""
        self._worker.kill()
        self.leave()


def _how(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {-code}, {signal.Signals(-code).name}"
    return f"signal {-code}"


# --- in the server


def serve(control_fd: int, orders: Mapping[str, Any]) -> None:
    """Serve: load the user's files, then fork and kill as told."""
    end_with(orders["parent"])
    stay_at_sigterm()
    control = socket.socket(fileno=control_fd)
    specs: dict[str, EnvironmentSpec] | None = None
    problem = ""
    if not orders.get("late"):
        signal.alarm(_START_SECONDS)
        before = _open_files()
        specs, problem = _load(orders)
        signal.alarm(0)
        if not problem and (len(os.listdir("/proc/self/task")) > 1 or _open_files() - before):
            # Forks would lack the threads that the files have started, and share the connections that they have opened:
            # workers load them themselves.
            again = json.dumps({**orders, "late": True})
            os.set_inheritable(control_fd, True)
            os.execv(sys.executable, [sys.executable, "-c", _STARTER, str(control_fd), again])
    end_with(None)  # from here the loop below looks after that
    gc.freeze()
    control.send(json.dumps({"ready": problem}).encode())
    _Forks(control, orders, specs).serve()


def _load(orders: Mapping[str, Any]) -> tuple[dict[str, EnvironmentSpec], str]:
    try:
        return load_specs(orders["entries"], orders["tools"], orders["contract"]), ""
    except BaseException as error:
        text = str(error) if isinstance(error, ConfigError) else error_text(error)
        return {}, f"the environments cannot be loaded in a worker process: {text}"


def _open_files() -> set[str]:
    folder = Path("/proc/self/fd")
    return {path.name for path in folder.iterdir() if path.is_symlink()}


class _Forks:
    """The loop of the server."""

    def __init__(
        self,
        control: socket.socket,
        orders: Mapping[str, Any],
        specs: dict[str, EnvironmentSpec] | None,
    ) -> None:
        self.control = control
        self.orders = orders
        self.specs = specs
        self.poller = select.poll()
        self.poller.register(control, select.POLLIN)
        self.numbers: dict[int, int] = {}  # process → worker
        self.processes: dict[int, int] = {}  # its file descriptor → process

    def serve(self) -> None:
        while os.getppid() == self.orders["parent"]:
            for ready, _ in self.poller.poll(1000):
                if ready != self.control.fileno():
                    self.bury(ready)
                elif not self.obey():
                    return self.end()
        self.end()

    def obey(self) -> bool:
        """Obey one order; return False at the end of all."""
        try:
            message, descriptors, *_ = socket.recv_fds(self.control, 1 << 12, 1)
        except OSError:
            return False
        if not message:
            return False
        order = json.loads(message)
        if "start" in order:
            self.fork(order["start"], descriptors[0])
        else:
            for pid, number in self.numbers.items():
                if number == order["kill"]:
                    _kill(pid)
        return True

    def fork(self, number: int, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:  # too many processes, too little memory
            os.close(descriptor)
            return self.tell({"worker": number, "not_started": str(error)})
        if pid == 0:
            code = 1
            try:
                self.control.close()
                for other in self.processes:
                    os.close(other)
                end_with(server)
                work(socket.socket(fileno=descriptor), self.orders, self.specs)
                code = 0
            except OSError:  # the trainer has gone
                pass
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(descriptor)
        watched = os.pidfd_open(pid)
        self.numbers[pid], self.processes[watched] = number, pid
        self.poller.register(watched, select.POLLIN)
        self.tell({"worker": number, "pid": pid})

    def bury(self, descriptor: int) -> None:
        pid = self.processes.pop(descriptor)
        self.poller.unregister(descriptor)
        os.close(descriptor)
        _kill(
            pid
        )  # what it has started; before the wait, as its number may be another's afterwards
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self.tell({"worker": self.numbers.pop(pid), "code": code})

    def tell(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # nobody listens: the loop will see
            self.control.send(json.dumps(message).encode())

    def end(self) -> None:
        for pid in self.numbers:
            _kill(pid)
        for pid in self.numbers:
            os.waitpid(pid, 0)
        os._exit(0)


def _kill(pid: int) -> None:
    """Kill a worker and its process group."""
    for kill in (os.killpg, os.kill):  # it may not have a group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


# --- in a worker


def work(
    channel: socket.socket, orders: Mapping[str, Any], specs: dict[str, EnvironmentSpec] | None
) -> None:
    """Answer until the channel is closed: sync code in this thread, which is the main one, async code in a loop."""
    os.setsid()
    contract.in_worker = True
    with contextlib.suppress(
        OSError
    ):  # if memory is short, the kernel kills this process and not the trainer
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # one of the user's own
            stream.reconfigure(line_buffering=True)
    random.seed()  # not the server's numbers
    problem = ""
    if specs is None:
        specs, problem = _load(orders)
    _send(channel, 0, {"value": problem})
    loops: list[UserLoop] = []

    def loop() -> UserLoop:
        if not loops:
            loops.append(UserLoop())
        return loops[0]

    hosts: dict[str, Host] = {}
    while question := _receive(channel):
        number, data = question
        name, place, given = pickle.loads(data)
        spec = specs[name]
        if place == "constructor" and not (name in hosts and hosts[name].is_reusable):
            invoke = in_loop if spec.is_async else InThread(loop)
            hosts[name] = Host(spec, invoke, own_process=True)
        answer = hosts[name].handle(place, given)
        done = loop().submit(answer).result() if spec.is_async else drive(answer)
        _send(channel, number, done)
        if place == "close":
            hosts.pop(name)


def _receive(channel: socket.socket) -> tuple[int, bytes] | None:
    """Return the number of a question, and what it is."""
    head = _read(channel, _QUESTION.size)
    if not head:
        return None
    length, number = _QUESTION.unpack(head)
    question = _read(channel, length)
    return (number, question) if question else None


def _read(channel: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = channel.recv(min(length - len(data), 1 << 20))
        if not part:
            return b""
        data += part
    return bytes(data)


def _send(channel: socket.socket, number: int, answer: Answer) -> None:
    """Send an answer as JSON: the trainer unpickles nothing that comes from an environment."""
    try:
        data = as_json(answer, "an environment").encode()
    except Exception as error:  # an object of the user's among the messages
        data = json.dumps({"kind": "exception", "text": error_text(error)}).encode()
    channel.sendall(_ANSWER.pack(len(data), number, os.getpid()) + data)
