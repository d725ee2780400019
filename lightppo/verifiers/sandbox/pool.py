"""The outside of the sandboxes: starts and attacks them, gives them programs, replaces those that break."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import queue
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightppo.errors import SandboxError, SandboxRefusedError
from lightppo.processes.fork_server import ONE_THREAD, closer_of, default_processes
from lightppo.ranks import asked_to_stop

logger = logging.getLogger(__name__)

ISOLATIONS = ("namespaces", "bubblewrap", "landlock")  # tried in this order; "none" only if allowed
_ENVIRONMENT = {
    **{"PATH": "/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8"},
    **{"PYTHONUTF8": "1", "PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "2"},
    **ONE_THREAD,
}
_START_SECONDS = 60.0


@dataclass(frozen=True)
class SandboxLimits:
    """What one program may use."""

    code_timeout: float = 6.0  # wall-clock seconds of one run, or of one function call
    # The limit of each process's address space, and of the resident memory of all together.
    code_memory_limit_mb: int = 1024
    code_file_limit_mb: int = 16  # each file, and all files together
    code_output_limit_mb: int = 16  # printed output, and returned values
    code_max_processes: int = 16  # processes and threads

    def __post_init__(self) -> None:
        for limit_name, value in asdict(self).items():
            if not 0 < value < math.inf:
                raise ValueError(f"--{limit_name} must be a number > 0, got {value}")
        if self.code_memory_limit_mb < 128:
            raise ValueError(
                f"--code_memory_limit_mb {self.code_memory_limit_mb}: Python itself needs 128"
            )


@dataclass
class ProgramRun:
    """How a program ended. All text comes from the program: compare it, never trust it."""

    # exit | signal | timeout | output | memory | processes; the last four name the limit that it was killed for
    ended: str
    code: int  # exit code, or minus the signal's number
    stdout: str
    stderr: str  # only the beginning
    # where a function was called: one line of JSON for the loading, then one per finished call
    answers: list[str] = field(default_factory=list)
    seconds: float = 0.0  # wall clock


# What a sandbox keeps out, found out by a program of ours that attacks targets of ours.
# see docs/rewards.md
PROTECTIONS = ("network", "files", "environment", "processes", "forks", "memory")

_ATTACKS = """
def attack(port, abstract, datagrams, file, trainer, memory_mb):
    import ctypes, os, socket

    libc = ctypes.CDLL(None)

    def works(action):
        try:
            action()
        except BaseException:
            return False
        return True

    def opened(doors):
        return [door for door, action in doors.items() if works(action)]

    def connect(family, address):
        client = socket.socket(family)
        client.settimeout(2)
        client.connect(address)

    def unconnected():
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0]

    def watch(folder):
        if libc.inotify_add_watch(libc.inotify_init1(0), folder.encode(), 256) < 0:  # files that are made
            raise OSError

    def access(path, mode):
        open(path, mode).read(1) if mode == "rb" else open(path, mode).write(b"x")

    return {
        "network": opened({
            "TCP": lambda: connect(socket.AF_INET, ("127.0.0.1", port)),
            "an abstract socket": lambda: connect(socket.AF_UNIX, chr(0) + abstract),
            "a datagram to a path": lambda: unconnected().sendto(b"x", datagrams),
            "a message to a path": lambda: unconnected().sendmsg([b"x"], [], 0, datagrams),
        }),
        "files": opened({
            "reading": lambda: access(file, "rb"),
            "writing": lambda: access(file, "wb"),
            "making": lambda: access(file + ".new", "wb"),
            "watching": lambda: watch(os.path.dirname(file)),
            "attributes": lambda: os.listxattr(file),
        }),
        "environment": works(lambda: access(f"/proc/{trainer}/environ", "rb"))
        or works(lambda: access("/proc/1/environ", "rb")),
        "names": sorted(os.environ),
        "processes": works(lambda: os.kill(trainer, 0)),
        "tracing": libc.ptrace(0x4206, os.getppid(), None, None) == 0,
        "memory": works(lambda: bytearray((memory_mb + 64) << 20)),
    }

def fork(most):
    import os, signal

    for forked in range(most + 1):
        try:
            child = os.fork()
        except OSError:
            return forked
        while child == 0:
            signal.pause()
    return most + 1
"""
_ATTACK_SECONDS = 30.0
_SPARE_FORKS = 4  # ours, which the limit counts too


def _short_folder() -> str:
    """Return where there is room for a socket's path, which has at most 107 bytes: TMPDIR may be long."""
    folders = (tempfile.gettempdir(), "/tmp", "/dev/shm")
    return min((folder for folder in folders if os.access(folder, os.W_OK)), key=len)


class Sandbox:
    """One process that runs one program at a time, for one thread at a time."""

    # The package without its __init__.py, because the inside needs nothing of this half.
    STARTER = (
        "import sys, types; room = sys.modules['room'] = types.ModuleType('room'); room.__path__ = [sys.argv.pop(1)]; "
        "from room import supervisor; supervisor.main()"
    )
    GRACE_SECONDS = 30.0  # beyond a program's own limit: for a busy machine, and for killing

    def __init__(self, isolation: str, limits: SandboxLimits) -> None:
        self.isolation = isolation
        self.limits = limits
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as this object
        self.start()

    def start(self) -> None:
        """Start the process."""
        orders = {
            "isolation": self.isolation,
            "limits": asdict(self.limits),
            "site_packages": sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}),
            "bubblewrap": shutil.which("bwrap"),
        }
        if self.isolation == "bubblewrap" and not orders["bubblewrap"]:
            raise SandboxError("bubblewrap is not installed")
        # Python takes nothing from the working folder, the user's home and site-packages.
        options = ["-P", "-s", "-S", "-B", "-c"]
        folder = os.path.realpath(Path(__file__).parent)
        command = [sys.executable, *options, self.STARTER, folder, json.dumps(orders)]
        self._socket, inner_socket = socket.socketpair()
        streams = {"stdin": inner_socket, "stdout": subprocess.DEVNULL, "stderr": self._errors}
        try:
            self._process = subprocess.Popen(
                command, **streams, env=_environment(), cwd="/", start_new_session=True
            )
        except OSError as error:
            self._socket.close()
            raise SandboxError(f"no process could be started: {error}") from None
        finally:
            inner_socket.close()
        self.pid = self._process.pid
        answer = self._exchange(None, _START_SECONDS)
        self.layers = answer["layers"]
        self.own_processes = answer["pid"] == 1  # the trainer's process numbers mean nothing there

    def run(
        self,
        code: str,
        *,
        stdin: str = "",
        function: str | None = None,
        calls: Sequence[str] = (),
        seconds: float | None = None,
        total_seconds: float | None = None,
        output_bytes: int | None = None,
    ) -> ProgramRun:
        """Run a program as a script, or load it and call a function or a method of its class ``Solution``.

        Starts a sandbox that has ended again. :class:`SandboxError`: the sandbox failed, not the program.

        Args:
            calls: arguments of each call, as a JSON list.
            seconds: time limit of the script, or of the loading and of each call; default ``code_timeout``.
            total_seconds: time limit of all calls together; default: each may take its full time.
            output_bytes: limit on what is printed and on what is answered, below ``code_output_limit_mb``.
        """
        if seconds is None:
            seconds = self.limits.code_timeout
        if total_seconds is None:
            total_seconds = seconds * (1 + len(calls))
        if self._process is None:
            self.start()
        request = {
            "code": code,
            "stdin": stdin,
            "function": function,
            "calls": list(calls),
            "seconds": seconds,
            "total_seconds": total_seconds,
            "output_bytes": output_bytes,
        }
        report = self._exchange(request, total_seconds + self.GRACE_SECONDS)
        # What is behind the last line break is no whole answer.
        report["answers"] = report["answers"].split("\n", 1 + len(calls))[:-1]
        return ProgramRun(**report)

    def attack(self) -> set[str]:
        """Find out by trying which of :data:`PROTECTIONS` hold."""

        def attempt(function: str, *arguments: Any) -> tuple[str, Any]:
            program_run = self.run(
                _ATTACKS, function=function, calls=[json.dumps(arguments)], seconds=_ATTACK_SECONDS
            )
            if len(program_run.answers) < 2:
                return program_run.ended, None
            return program_run.ended, json.loads(program_run.answers[1]).get("value")

        prefix = "lightppo-probe-"
        with (
            tempfile.TemporaryDirectory(prefix=prefix) as folder,
            tempfile.TemporaryDirectory(prefix=prefix, dir=_short_folder()) as short_folder,
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.socket(socket.AF_UNIX) as abstract,
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams,
        ):
            secret_file = Path(folder, "secret")
            secret_file.write_text("secret")
            secret_file.chmod(0o666)
            secret_file.parent.chmod(0o777)
            abstract_name = prefix + secrets.token_hex(8)
            abstract.bind("\0" + abstract_name)
            abstract.listen()
            datagram_path = f"{short_folder}/socket"
            datagrams.bind(datagram_path)
            for public_path in (short_folder, datagram_path):
                os.chmod(public_path, 0o777)
            port = server.getsockname()[1]
            targets = (port, abstract_name, datagram_path, str(secret_file), os.getpid())
            _, openings = attempt("attack", *targets, self.limits.code_memory_limit_mb)
        if not isinstance(openings, dict):
            return set()
        most_forks = self.limits.code_max_processes + _SPARE_FORKS
        ended, forks = attempt("fork", most_forks)
        foreign_names = {*openings["names"]} - {*_environment(), "LC_CTYPE", "PWD"}
        is_open = {
            "network": openings["network"],
            "files": openings["files"],
            "environment": openings["environment"] or foreign_names,
            "processes": (openings["processes"] and not self.own_processes) or openings["tracing"],
            "forks": ended != "processes" and not (isinstance(forks, int) and forks <= most_forks),
            "memory": openings["memory"],
        }
        return {protection for protection in PROTECTIONS if not is_open[protection]}

    def close(self) -> None:
        """End the process and everything in it."""
        process = self._process
        self._process = None
        if process is None:
            return
        with contextlib.suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_RDWR)  # tells it that we are gone
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=2)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # If it is stuck in the kernel, it dies when the kernel lets go.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=self.GRACE_SECONDS)
        self._socket.close()

    def _exchange(self, request: dict[str, Any] | None, seconds: float) -> dict[str, Any]:
        """Send a request, if any, and return the report. Any failure ends the process."""
        deadline = time.monotonic() + seconds
        # printed bytes grow at most sixfold as JSON
        most_bytes = (12 * self.limits.code_output_limit_mb + 1) << 20
        answer = bytearray()
        try:
            if request is not None:
                self._socket.settimeout(seconds)
                self._socket.sendall(json.dumps(request).encode() + b"\n")
            while not answer.endswith(b"\n"):
                self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
                received = self._socket.recv(1 << 20)
                answer += received
                if not received:
                    raise ConnectionError("no answer")
                if len(answer) > most_bytes:
                    raise ValueError(f"it is longer than {most_bytes} bytes")
            report = json.loads(answer)
            problem = report.get("reason")
        except TimeoutError:
            problem = "the sandbox process did not answer in time"
        except OSError as error:
            problem = f"the sandbox process has ended ({error}){self._last_words()}"
        except ValueError as error:
            problem = f"the sandbox process sent no report: {error}"
        if problem:
            self.close()
            raise SandboxError(problem)
        return report

    def _last_words(self) -> str:
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - 500))
        words = self._errors.read().decode(errors="replace").split()
        if not words:
            return ""
        return f": {' '.join(words)}"


def _environment() -> dict[str, str]:
    libraries = os.environ.get("LD_LIBRARY_PATH")  # the interpreter may not start without them
    if not libraries:
        return _ENVIRONMENT
    return _ENVIRONMENT | {"LD_LIBRARY_PATH": libraries}


class SandboxPool(contextlib.AbstractContextManager):
    """Sandboxes for the threads of one rank, with the strongest isolation that this machine allows.

    Raises :class:`SandboxRefusedError` if no isolation gives all :data:`PROTECTIONS`.

    Args:
        code_processes: programs that run at a time; ``None``: :func:`default_processes`.
        allow_unsafe_code_execution: without any isolation, run programs all the same, limited only in time and memory.
            They can then read, change and send away whatever this user can.
    """

    def __init__(
        self,
        limits: SandboxLimits | None = None,
        *,
        code_processes: int | None = None,
        allow_unsafe_code_execution: bool = False,
        isolations: Sequence[str] = ISOLATIONS,
    ) -> None:
        self.limits = limits or SandboxLimits()
        self.size = default_processes() if code_processes is None else code_processes
        if self.size < 1:
            raise ValueError(f"--code_processes must be at least 1, got {code_processes}")
        if sys.platform != "linux":
            raise SandboxRefusedError("code can be run on Linux only; use --sandbox_fusion_url")
        sandbox, self.protections = self._strongest(isolations, allow_unsafe_code_execution)
        self.isolation = sandbox.isolation
        self.layers = sandbox.layers
        self.sandboxes = [sandbox]
        self._close = closer_of(self, self.sandboxes)
        while len(self.sandboxes) < self.size:
            self.sandboxes.append(Sandbox(self.isolation, self.limits))
        self._idle: queue.SimpleQueue[Sandbox] = queue.SimpleQueue()
        for sandbox in self.sandboxes:
            self._idle.put(sandbox)
        missing = [protection for protection in PROTECTIONS if protection not in self.protections]
        level = logging.WARNING if missing else logging.INFO
        layers = ", ".join(self.layers) or "none"
        text = "code sandbox: %s; not kept out: %s"
        logger.log(level, text, layers, missing or "nothing")

    def _strongest(self, isolations: Sequence[str], allow_unsafe: bool) -> tuple[Sandbox, set[str]]:
        """Start a sandbox with the first isolation that holds; return also what it keeps out."""
        reasons = []
        for isolation in [*isolations, *["none"] * allow_unsafe]:
            try:
                sandbox = Sandbox(isolation, self.limits)
                protections = sandbox.attack()
            except SandboxError as error:
                reasons.append(f"{isolation}: {error}")
                continue
            missing = [protection for protection in PROTECTIONS if protection not in protections]
            if not missing or isolation == "none":
                return sandbox, protections
            sandbox.close()
            reasons.append(f"{isolation}: does not protect {', '.join(missing)}")
        raise SandboxRefusedError(
            f"no sandbox for code on this machine: {'; '.join(reasons)}. See docs/rewards.md for what it needs, use "
            "--sandbox_fusion_url, or set --allow_unsafe_code_execution in a throw-away container"
        )

    def run(self, code: str, **options: Any) -> ProgramRun:
        """:meth:`Sandbox.run` in the next idle sandbox. If it fails, replaces it and tries the program once more.

        Also after a SIGTERM while this process is asked to stop: a launcher may have sent it to all below itself.
        """
        failure = None
        for attempt in range(2):
            if not self._close.alive:
                raise SandboxError("the sandbox is closed")
            sandbox = self._idle.get()
            try:
                run = sandbox.run(code, **options)
                if run.code != -signal.SIGTERM or not asked_to_stop() or attempt == 1:
                    return run
            except SandboxError as error:
                failure = error
                logger.warning("code sandbox: %s; replaced", error)
            finally:
                self._idle.put(sandbox)
        raise SandboxError(f"the sandbox failed twice: {failure}")

    def close(self) -> None:
        """End all sandboxes."""
        self._close()

    def __exit__(self, *_: object) -> None:
        self.close()
