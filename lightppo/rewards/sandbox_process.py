"""One sandbox process, seen from outside: it is started, gets programs, and reports how they ended."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightppo.errors import SandboxError
from lightppo.rewards.sandbox_probe import probe

_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONUTF8": "1",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
}
_STARTER = (
    "import sys; sys.path.append(sys.argv.pop(1)); from sandbox_worker import launch; sys.path.pop(); launch.main()"
)
_START_SECONDS = 60.0
_ATTACK_SECONDS = 30.0
_GRACE_SECONDS = 30.0  # beyond a program's own limit: for a busy machine, and for killing
_MEBIBYTE = 1 << 20
_SHOWN_CHARS = 500


@dataclass(frozen=True)
class SandboxLimits:
    """What one program may use.

    Attributes:
        code_timeout: seconds by the wall clock of one run, or of one call of a function.
        code_memory_limit_mb: address space of each process, and resident memory of all of a program's processes.
        code_file_limit_mb: of each file, and of all files of a program together.
        code_output_limit_mb: of what it prints, and of what its function returns.
        code_max_processes: processes and threads of a program.
    """

    code_timeout: float = 6.0
    code_memory_limit_mb: int = 1024
    code_file_limit_mb: int = 16
    code_output_limit_mb: int = 16
    code_max_processes: int = 16

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"--{name} must be a number > 0, got {getattr(self, name)}")
        if self.code_memory_limit_mb < 128:
            raise ValueError(f"--code_memory_limit_mb {self.code_memory_limit_mb}: Python itself needs 128")


@dataclass
class ProgramRun:
    """How a program ended. All text is the program's own: to be compared, never to be believed.

    Attributes:
        ended: ``exit`` | ``signal`` | ``timeout`` | ``output`` | ``memory`` | ``processes``; the last four name the
            limit that it was killed for.
        code: exit code, or the signal's number with a minus sign.
        stdout: what it printed.
        stderr: the beginning of its error output.
        answers: where a function was called: one line of JSON for the loading, then one per finished call.
        seconds: by the wall clock.
    """

    ended: str
    code: int
    stdout: str
    stderr: str
    answers: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Sandbox:
    """One process that runs one program at a time. Used by one thread at a time.

    Args:
        isolation: ``namespaces`` | ``bubblewrap`` | ``landlock`` | ``none``.
        limits: of each program.

    Raises:
        SandboxError: this isolation is not to be had here; the text says why.
    """

    def __init__(self, isolation: str, limits: SandboxLimits) -> None:
        self.isolation = isolation
        self.layers: list[str] = []
        self.pid = 0
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as this object
        self._inner_pid = 0
        self.start()

    @property
    def running(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        """Starts the process."""
        orders = {
            "isolation": self.isolation,
            "site_packages": sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}),
            "bubblewrap": shutil.which("bwrap"),
        }
        if self.isolation == "bubblewrap" and not orders["bubblewrap"]:
            raise SandboxError("bubblewrap is not installed")
        options = ["-P", "-s", "-S", "-B"]  # nothing from the working folder, the user's home, site-packages
        folder = os.path.realpath(Path(__file__).parent)
        try:
            self._process = subprocess.Popen(
                [sys.executable, *options, "-c", _STARTER, folder, json.dumps(orders)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=_environment(),
                cwd="/",
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            raise SandboxError(f"no process could be started: {error}") from None
        self.pid = self._process.pid
        for pipe in (self._process.stdin, self._process.stdout):
            os.set_blocking(pipe.fileno(), False)
        try:
            answer = self._receive(time.monotonic() + _START_SECONDS)
            if not answer.get("ready"):
                raise SandboxError(str(answer.get("reason")))
        except SandboxError:
            self.close()
            raise
        self.layers, self._inner_pid = answer["layers"], answer["pid"]

    def run(
        self,
        code: str,
        *,
        stdin: str = "",
        function: str | None = None,
        calls: Sequence[str] = (),
        seconds: float | None = None,
        total_seconds: float | None = None,
    ) -> ProgramRun:
        """Runs a program as a script, or loads it and calls a function of it.

        Args:
            code: Python source.
            stdin: standard input of a script.
            function: name of the function, or of the method of a class ``Solution``.
            calls: arguments of each call: a JSON list.
            seconds: time limit of the run, or of each call and of the loading; by default that of the limits.
            total_seconds: for all calls together; by default no less than each may take.

        Raises:
            SandboxError: nothing is known about the program; the process was killed.
        """
        limits = self._limits
        seconds = limits.code_timeout if seconds is None else seconds
        total = seconds * (1 + len(calls)) if total_seconds is None else total_seconds
        request = {
            "code": code,
            "stdin": stdin,
            "function": function,
            "calls": list(calls),
            "seconds": seconds,
            "total_seconds": total,
            "limits": {
                "memory_mb": limits.code_memory_limit_mb,
                "file_mb": limits.code_file_limit_mb,
                "output_mb": limits.code_output_limit_mb,
                "max_processes": limits.code_max_processes,
                "cpu_seconds": total,
            },
        }
        try:
            deadline = time.monotonic() + total + _GRACE_SECONDS
            self._send(json.dumps(request).encode(), deadline)
            return _read_report(self._receive(deadline))
        except SandboxError:
            self.close()
            raise

    def attack(self) -> set[str]:
        """Which of :data:`~lightppo.rewards.sandbox_probe.PROTECTIONS` hold, by trying."""

        def run(code: str, function: str, arguments: list[Any]) -> tuple[str, list[str]]:
            done = self.run(code, function=function, calls=[json.dumps(arguments)], seconds=_ATTACK_SECONDS)
            return done.ended, done.answers

        return probe(
            run,
            memory_mb=self._limits.code_memory_limit_mb,
            max_processes=self._limits.code_max_processes,
            environment={*_environment(), "LC_CTYPE", "PWD"},
            own_processes=self._inner_pid == 1,
        )

    def close(self) -> None:
        """Ends the process and everything in it."""
        process, self._process = self._process, None
        if process is None:
            return
        process.stdin.close()  # tells it that we are gone
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=2)
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel; it dies when that lets go
            process.wait(timeout=_GRACE_SECONDS)
        process.stdout.close()

    def _send(self, body: bytes, deadline: float) -> None:
        data = memoryview(struct.pack(">I", len(body)) + body)
        while data:
            try:
                data = data[os.write(self._pipe("stdin"), data) :]
            except BlockingIOError:
                self._wait("stdin", select.POLLOUT, deadline)
            except OSError as error:
                raise SandboxError(f"the sandbox process is gone ({error}){self._last_words()}") from None

    def _receive(self, deadline: float) -> dict[str, Any]:
        size = struct.unpack(">I", self._read(4, deadline))[0]
        # printed bytes grow at most sixfold as JSON
        most = 6 * 2 * self._limits.code_output_limit_mb * _MEBIBYTE + _MEBIBYTE
        if size > most:
            raise SandboxError(f"the sandbox process announced a report of {size} bytes")
        try:
            report = json.loads(self._read(size, deadline))
        except ValueError as error:
            raise SandboxError(f"the sandbox process sent no JSON: {error}") from None
        return report

    def _read(self, count: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < count:
            self._wait("stdout", select.POLLIN, deadline)
            part = os.read(self._pipe("stdout"), min(count - len(data), _MEBIBYTE))
            if not part:
                raise SandboxError(f"the sandbox process ended{self._last_words()}")
            data += part
        return bytes(data)

    def _wait(self, pipe: str, event: int, deadline: float) -> None:
        poller = select.poll()
        poller.register(self._pipe(pipe), event)
        if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise SandboxError("the sandbox process did not answer in time")

    def _pipe(self, name: str) -> int:
        if self._process is None:
            raise SandboxError("the sandbox is closed")
        return getattr(self._process, name).fileno()

    def _last_words(self) -> str:
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - _SHOWN_CHARS))
        text = " ".join(self._errors.read().decode(errors="replace").split())
        return f": {text}" if text else ""


def _environment() -> dict[str, str]:
    libraries = os.environ.get("LD_LIBRARY_PATH")  # the interpreter may not start without
    return _ENVIRONMENT | ({"LD_LIBRARY_PATH": libraries} if libraries else {})


def _read_report(report: dict[str, Any]) -> ProgramRun:
    if "broken" in report or "reason" in report:
        raise SandboxError(f"the sandbox could not start the program: {report.get('broken') or report.get('reason')}")
    lines = report["answers"].split("\n")[:-1]  # the last one is empty, or was cut
    return ProgramRun(report["ended"], report["code"], report["stdout"], report["stderr"], lines, report["seconds"])
