"""The trusted process inside: takes programs from the trainer, one at a time, forks for each, watches, kills, reports.

It lives as long as the trainer's end of its standard input is open.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import select
import struct
import time
from typing import Any

from . import program
from .walls import Walls

_REQUESTS, _REPORTS = 0, 1
_TICK = 0.05  # seconds between looks at memory and number of processes
_BEGIN_SECONDS = 20.0
_REAP_SECONDS = 10.0
_READ_BYTES = 1 << 16
_SHOWN_BYTES = 4096  # of standard error
_MEBIBYTE = 1 << 20


def serve(walls: Walls) -> None:
    """Reads requests and answers them until the trainer closes the pipe."""
    prelude = program.make_prelude()
    gc.collect()
    gc.freeze()  # so that forks do not copy pages for the collector
    _send({"ready": True, "pid": os.getpid(), "layers": walls.layers})
    while (request := _receive()) is not None:
        _send(Watch(request, walls, prelude).report())


def _receive() -> dict[str, Any] | None:
    header = _read_exactly(4)
    return None if header is None else json.loads(_read_exactly(struct.unpack(">I", header)[0]) or b"null")


def _read_exactly(count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        part = os.read(_REQUESTS, count - len(data))
        if not part:
            return None
        data += part
    return bytes(data)


def _send(message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    data = memoryview(struct.pack(">I", len(body)) + body)
    while data:
        data = data[os.write(_REPORTS, data) :]


class Watch:
    """One program from its fork to its end.

    Args:
        request: ``code``, ``stdin`` or ``function`` and ``calls``, ``limits``, ``seconds`` (of each call, or of the
            whole), ``total_seconds``.
        walls: what the program is kept behind.
        prelude: the names it starts with.
    """

    def __init__(self, request: dict[str, Any], walls: Walls, prelude: dict[str, Any]) -> None:
        self._request = request
        self._walls = walls
        self._limits = request["limits"]
        self._output = {name: bytearray() for name in ("stdout", "stderr", "answers", "ready")}
        self._ended = ""
        self._answered = 0
        walls.prepare(self._limits)
        self._start = time.monotonic()
        self._readers, self._process = self._fork(prelude)

    def _fork(self, prelude: dict[str, Any]) -> tuple[dict[int, str], int]:
        """Returns the pipes to read from, by descriptor, and the process."""
        pipes = {name: os.pipe() for name in self._output}
        stdin = _as_file(self._request.get("stdin") or "")
        process = os.fork()
        if process == 0:
            leave, status = os._exit, 1  # the program may have patched the module's
            try:
                calls = self._request.get("function") is not None
                stdout = os.open("/dev/null", os.O_WRONLY) if calls else pipes["stdout"][1]
                _place_descriptors([stdin, stdout, pipes["stderr"][1], pipes["answers"][1], pipes["ready"][1]])
                status = program.run(self._request, prelude, self._walls.close)
            except BaseException as error:
                _report_failure(error)
            finally:
                leave(status)
        os.close(stdin)
        readers = {}
        for name, (reader, writer) in pipes.items():
            os.close(writer)
            os.set_blocking(reader, False)
            readers[reader] = name
        return readers, process

    def report(self) -> dict[str, Any]:
        """Waits for the end, in one way or another, and clears up."""
        process = os.pidfd_open(self._process)
        try:
            self._watch(process)
        finally:
            os.close(process)
        seconds = time.monotonic() - self._start
        status = self._clear_up()
        ready = bytes(self._output["ready"])
        if ready != b"+":
            return {"broken": ready.decode(errors="replace") or "the process ended before the program began"}
        code = os.waitstatus_to_exitcode(status)
        return {
            "ended": self._ended or ("exit" if code >= 0 else "signal"),
            "code": code,
            "stdout": self._output["stdout"].decode(errors="replace"),
            "stderr": self._output["stderr"].decode(errors="replace"),
            "answers": self._output["answers"].decode(errors="replace"),
            "seconds": seconds,
        }

    def _watch(self, process: int) -> None:
        poller = select.poll()
        poller.register(process, select.POLLIN)
        poller.register(_REQUESTS, 0)  # a hang-up is told all the same
        for reader in self._readers:
            poller.register(reader, select.POLLIN)
        answered, begun, since, looked = 0, False, self._start, self._start
        while not self._ended:
            now = time.monotonic()
            if not begun and self._output["ready"]:  # locking itself in is not the program's time
                begun, since, self._start = True, now, now
            end = min(since + self._request["seconds"], self._start + self._request["total_seconds"])
            if now >= (end if begun else self._start + _BEGIN_SECONDS):
                self._ended = "timeout"
                return
            for descriptor, event in poller.poll(1000 * min(_TICK, max(end - now, 0.001))):
                if descriptor == process:
                    return
                if descriptor == _REQUESTS and event & select.POLLHUP:
                    self._walls.kill(self._process, _REAP_SECONDS)
                    os._exit(0)  # the trainer is gone
                if descriptor in self._readers and not self._read(descriptor):
                    poller.unregister(descriptor)
            if self._answered > answered:  # the next call has its own time
                answered, since = self._answered, time.monotonic()
            if now - looked >= _TICK:
                looked = now
                self._ended = self._ended or self._walls.excess(self._process, self._limits)

    def _read(self, reader: int) -> bool:
        """Takes what is there; False at the end of the pipe."""
        try:
            data = os.read(reader, _READ_BYTES)
        except BlockingIOError:
            return True
        kept = self._output[self._readers[reader]]
        most = _SHOWN_BYTES if self._readers[reader] == "stderr" else self._limits["output_mb"] * _MEBIBYTE
        if len(kept) + len(data) > most and self._readers[reader] != "stderr":
            self._ended = "output"
        kept += data[: most - len(kept)]
        self._answered += data.count(b"\n") if self._readers[reader] == "answers" else 0
        return bool(data)

    def _clear_up(self) -> int:
        """Kills whatever is left and takes what it had written; returns the program's status."""
        status = self._walls.kill(self._process, _REAP_SECONDS)
        for reader in self._readers:
            left = self._limits["output_mb"] * _MEBIBYTE // _READ_BYTES + 2
            while left and self._read(reader) and _has_more(reader):
                left -= 1
            os.close(reader)
        return status


def _has_more(reader: int) -> bool:
    return bool(select.select([reader], [], [], 0)[0])


def _as_file(text: str) -> int:
    """Standard input as an unlinked file in memory, to be read only."""
    descriptor = os.memfd_create("stdin", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    data = memoryview(text.encode("utf-8", "surrogatepass"))
    while data:
        data = data[os.write(descriptor, data) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def _place_descriptors(descriptors: list[int]) -> None:
    """Makes these 0, 1, 2, … and closes all others."""
    high = [os.dup2(descriptor, 100 + i) for i, descriptor in enumerate(descriptors)]
    for i, descriptor in enumerate(high):
        os.dup2(descriptor, i)
    os.closerange(len(high), 1 << 16)


def _report_failure(error: BaseException) -> None:
    with contextlib.suppress(OSError):  # the program had begun, and the pipe is closed
        os.write(program.READY, f"{type(error).__name__}: {error}"[:500].encode())
