"""The process that untrusted programs run in: it walls itself in, forks for every program, watches and kills.

Standard library only, as it starts without site-packages. It never sees expected outputs: verdicts are made outside.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import fcntl
import gc
import importlib
import json
import os
import random
import resource
import select
import signal
import site
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Sequence
from typing import IO, Any

from . import walls

_TRAINER = 0  # the socket that brings requests and takes reports, each one line of JSON
_MEBIBYTE = 1 << 20

# Start

_SYSTEM = (
    "/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/etc/alternatives",
    "/etc/localtime", "/usr/share/zoneinfo",
)  # fmt: skip


def main() -> None:
    """Take its orders as JSON in the first argument: ``isolation``, ``limits``, ``site_packages``, ``bubblewrap``."""
    orders = json.loads(sys.argv[1])
    os.umask(0o022)
    os.closerange(3, 1 << 16)
    # The first process of a namespace ignores signals for which it has no handler.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, lambda *_: None)  # of a launcher, while the trainer ends its step
    parent = os.getppid()
    try:
        if "readable" in orders:  # started again, inside bubblewrap
            _serve(orders)
        orders["readable"], orders["links"] = _readable(orders["site_packages"])
        orders["from_root"] = os.geteuid() == 0
        with (
            contextlib.suppress(OSError),
            open("/proc/self/oom_score_adj", "w", encoding="ascii") as file,
        ):
            # if memory is short, the kernel kills this process and not the trainer
            file.write("1000")
        if orders["isolation"] == "namespaces":
            walls.enter_namespaces()
        watched = os.fork()
        if watched == 0:
            walls.die_with_parent()
            if orders["isolation"] == "bubblewrap":
                os.execv(orders["bubblewrap"], _bubblewrap_command(orders))
            _serve(orders)
    except OSError as error:
        _refuse(error)
    poller = select.poll()
    poller.register(os.pidfd_open(watched), select.POLLIN)
    poller.register(_TRAINER, 0)  # hang-ups are always reported
    while not poller.poll(1000) and os.getppid() == parent:
        pass
    os.kill(watched, signal.SIGKILL)
    os.waitpid(watched, 0)
    os._exit(0)


def _refuse(error: BaseException) -> None:
    _send({"reason": f"{error}" or type(error).__name__})
    os._exit(71)


def _readable(site_packages: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return what programs may read, the interpreter's modules and libraries: real paths, and links (place → target)."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        mapped = {line.split(maxsplit=5)[-1].strip() for line in file}
    loaded = {os.path.dirname(path) for path in mapped if path.startswith("/") and ".so" in path}
    needed = [*_SYSTEM, *sys.path, *site_packages, os.path.join(sys.base_prefix, "lib"), *loaded]
    paths = [os.path.abspath(path) for path in needed if os.path.exists(path)]
    real_paths = {os.path.realpath(path) for path in paths}
    folders = tuple(f"{path}/" for path in real_paths)
    readable = sorted(path for path in real_paths if not path.startswith(folders))
    links = {
        path: os.readlink(path)
        for path in paths
        if os.path.islink(path) and not path.startswith(folders)
    }
    return readable, links


def _bubblewrap_command(orders: dict[str, Any]) -> list[str]:
    command = [orders["bubblewrap"], "--unshare-all", "--unshare-user", "--die-with-parent", "--as-pid-1",
               "--uid", str(walls.INNER_ID), "--gid", str(walls.INNER_ID), "--proc", "/proc"]  # fmt: skip
    interpreter = os.path.realpath(sys.executable)
    for readable_path in [
        *orders["readable"],
        interpreter,
        os.path.dirname(os.path.realpath(__file__)),
    ]:
        command += ["--ro-bind", readable_path, readable_path]
    for device in filter(os.path.exists, walls.DEVICES):
        command += ["--dev-bind", device, device]
    for link, target in orders["links"].items():
        command += ["--symlink", target, link]
    inner_command = [interpreter, *sys.orig_argv[1:-1], json.dumps(orders)]
    return [*command, "--remount-ro", "/", "--chdir", "/", "--", *inner_command]


# Serve


def _serve(orders: dict[str, Any]) -> None:
    """Read requests and answer them until the trainer hangs up."""
    try:
        if orders["isolation"] == "namespaces":
            walls.build_root(orders["readable"], orders["links"])
        wall = walls.Walls(
            orders["isolation"], orders["readable"], orders["limits"], orders["from_root"]
        )
        os.chdir("/")
        sys.path[:] = [
            os.path.realpath(path)
            for path in [*sys.path, *orders["site_packages"]]
            if os.path.exists(path)
        ]
        prelude = make_prelude()
        gc.collect()
        gc.freeze()  # so that forks do not copy pages for the collector
        _send({"pid": os.getpid(), "layers": wall.layers})
        while (request := sys.stdin.buffer.readline()).endswith(b"\n"):
            _send(_Watch(json.loads(request), wall, prelude).report())
    except BaseException as error:
        _refuse(error)
    os._exit(0)


def _send(message: dict[str, Any]) -> None:
    _write_all(_TRAINER, json.dumps(message).encode() + b"\n")


def _write_all(descriptor: int, content: bytes) -> None:
    remaining = memoryview(content)
    while remaining:
        remaining = remaining[os.write(descriptor, remaining) :]


# Watch

_TICK = 0.05  # seconds between looks at memory and number of processes
_BEGIN_SECONDS = 20.0
_REAP_SECONDS = 10.0
_READ_BYTES = 1 << 16
_SHOWN_BYTES = 4096  # of standard error


class _Watch:
    """One program from its fork to its end."""

    def __init__(self, request: dict[str, Any], wall: walls.Walls, prelude: dict[str, Any]) -> None:
        self._request = request
        self._walls = wall
        self._output = {stream_name: bytearray() for stream_name in ("stdout", "stderr", "answers")}
        self._most_bytes = wall.limits["code_output_limit_mb"] * _MEBIBYTE
        if request["output_bytes"]:
            self._most_bytes = min(self._most_bytes, request["output_bytes"])
        # How many lines may begin a call with its own time. The program could write more lines.
        self._marks = 1 if request["function"] is None else 2 + len(request["calls"])
        self._begun = False
        self._ended = ""
        wall.prepare()
        self._start = self._since = time.monotonic()  # of the program, and of its present call
        pipes = {stream_name: os.pipe() for stream_name in self._output}
        stdin = _as_file(request["stdin"])
        self._process = os.fork()
        if self._process == 0:
            leave, status = os._exit, 1  # the program may have patched os._exit
            try:
                if request["function"] is None:
                    stdout = pipes["stdout"][1]
                else:
                    stdout = os.open("/dev/null", os.O_WRONLY)
                _place_descriptors([stdin, stdout, pipes["stderr"][1], pipes["answers"][1]])
                status = _run_program(request, prelude, wall)
            except BaseException as error:
                with contextlib.suppress(OSError):  # the program had begun, and has closed the pipe
                    os.write(_ANSWERS, " ".join(_described(error).split()).encode())
            finally:
                leave(status)
        os.close(stdin)
        for reader, writer in pipes.values():
            os.close(writer)
            os.set_blocking(reader, False)
        self._readers = {reader: stream_name for stream_name, (reader, _) in pipes.items()}

    def report(self) -> dict[str, Any]:
        """Wait for the program's end, kill what is left of it, and report."""
        process = os.pidfd_open(self._process)
        self._watch(process)
        os.close(process)
        seconds = time.monotonic() - self._start
        exit_code = os.waitstatus_to_exitcode(self._walls.kill(self._process, _REAP_SECONDS))
        for reader in self._readers:  # the last output
            for _ in range(self._most_bytes // _READ_BYTES + 2):
                if not self._read(reader) or not select.select([reader], [], [], 0)[0]:
                    break
            os.close(reader)
        output_texts = {
            stream_name: output.decode(errors="replace")
            for stream_name, output in self._output.items()
        }
        if not self._begun:
            reason = output_texts["answers"] or "its process ended before it began"
            return {"reason": f"the sandbox could not start the program: {reason}"}
        output_texts["answers"] = output_texts["answers"].removeprefix(_BEGUN)
        ending = self._ended or ("exit" if exit_code >= 0 else "signal")
        return {"ended": ending, "code": exit_code, "seconds": seconds} | output_texts

    def _watch(self, process: int) -> None:
        poller = select.poll()
        for descriptor in (process, *self._readers):
            poller.register(descriptor, select.POLLIN)
        poller.register(_TRAINER, 0)  # hang-ups are always reported
        last_look = self._start
        while not self._ended:
            now = time.monotonic()
            deadline = self._start + _BEGIN_SECONDS
            if self._begun:
                deadline = min(
                    self._since + self._request["seconds"],
                    self._start + self._request["total_seconds"],
                )
            if now >= deadline:
                self._ended = "timeout"
                return
            for descriptor, event in poller.poll(1000 * min(_TICK, max(deadline - now, 0.001))):
                if descriptor == process:
                    return
                if descriptor == _TRAINER and event & select.POLLHUP:  # the trainer is gone
                    self._walls.kill(self._process, _REAP_SECONDS)
                    os._exit(0)
                if descriptor in self._readers and not self._read(descriptor):
                    poller.unregister(descriptor)
            if now - last_look >= _TICK:
                last_look = now
                self._ended = self._ended or self._walls.excess(self._process)

    def _read(self, reader: int) -> bool:
        """Take what has arrived; False at the end of the pipe."""
        try:
            received = os.read(reader, _READ_BYTES)
        except BlockingIOError:
            return True
        stream_name = self._readers[reader]
        output = self._output[stream_name]
        most_bytes = self._most_bytes
        if stream_name == "stderr":
            most_bytes = _SHOWN_BYTES
        elif len(output) + len(received) > most_bytes:
            self._ended = "output"
        output += received[: most_bytes - len(output)]
        # A line ends a call, and the next call has its own time.
        if stream_name == "answers" and b"\n" in received and self._marks > 0:
            self._since = time.monotonic()
            self._marks -= received.count(b"\n")
            if not self._begun:  # its locking-in does not count as the program's time
                self._start = self._since
                self._begun = True
        return bool(received)


def _as_file(content: str) -> int:
    """Return standard input as an unlinked, read-only file in memory."""
    descriptor = os.memfd_create("stdin", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    _write_all(descriptor, content.encode("utf-8", "surrogatepass"))
    os.lseek(descriptor, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def _place_descriptors(descriptors: list[int]) -> None:
    """Make these descriptors 0, 1, 2, … and close all others."""
    copies = [os.dup2(descriptor, 100 + i) for i, descriptor in enumerate(descriptors)]
    for i, descriptor in enumerate(copies):
        os.dup2(descriptor, i)
    os.closerange(len(copies), 1 << 16)


# The program: a fork gives up its rights, runs the code, and ends. Nothing it says is trusted.

# Solutions in public datasets expect these modules and their names.
PRELUDE_MODULES = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics",
    "itertools", "functools", "operator", "io", "sys", "json", "builtins", "typing",
)  # fmt: skip
_RECURSION_LIMIT = 200_000
_STACK_BYTES = 64 << 20
_STDIN, _STDOUT, _STDERR, _ANSWERS = range(4)
_BEGUN = "+\n"  # the first line of the answers, from before the code is in control


def make_prelude() -> dict[str, Any]:
    """Return the names that every program starts with."""
    site.setquit()  # exit() and quit(), which the interpreter has only with site-packages
    names: dict[str, Any] = {}
    for module_name in PRELUDE_MODULES:
        module = importlib.import_module(module_name)
        public_names = getattr(module, "__all__", None) or [
            name for name in vars(module) if not name.startswith("_")
        ]
        names.update({name: getattr(module, name) for name in public_names})
    for module_name in PRELUDE_MODULES:
        if module_name not in ("builtins", "typing"):
            names[module_name] = sys.modules[module_name]
    return names


def _run_program(request: dict[str, Any], prelude: dict[str, Any], wall: walls.Walls) -> int:
    """Run one program in this process, which has only the descriptors above; return the exit code."""
    os.setsid()
    _set_limits(wall.limits, request["total_seconds"])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    # the interpreter's own streams still belong to the process this one was forked from
    sys.stdin = sys.__stdin__ = _stream(_STDIN, "r", "surrogateescape")
    sys.stdout = sys.__stdout__ = _stream(_STDOUT, "w", "surrogateescape")
    sys.stderr = sys.__stderr__ = _stream(_STDERR, "w", "backslashreplace", buffering=1)
    sys.argv = ["program"]
    atexit._clear()
    gc.enable()
    random.seed(0)  # the same program gets the same verdict
    sys.setrecursionlimit(_RECURSION_LIMIT)
    sys.set_int_max_str_digits(0)  # print(10**5000)
    wall.close()
    os.write(_ANSWERS, _BEGUN.encode())
    try:
        compiled = compile(request["code"], "<program>", "exec", dont_inherit=True)
    except BaseException as error:
        # Other errors than SyntaxError are null bytes, surrogates, and code that is too deep or too large.
        _answer({"compile_error": _described(error)})
        return 1
    module_name = "__main__" if request["function"] is None else "solution"
    module = sys.modules[module_name] = types.ModuleType(module_name)
    streams = {"stdin": sys.stdin, "stdout": sys.stdout, "stderr": sys.stderr, "argv": sys.argv}
    vars(module).update(prelude | streams | {"__name__": module_name, "__file__": "program.py"})
    if request["function"] is None:
        return _run_script(compiled, vars(module))
    return _run_calls(compiled, vars(module), request["function"], request["calls"], prelude)


def _set_limits(limits: dict[str, Any], seconds: float) -> None:
    limits_by_resource = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        # The limit on the wall clock comes first, unless several threads run.
        resource.RLIMIT_CPU: int(seconds) + 2,
        resource.RLIMIT_FSIZE: limits["code_file_limit_mb"] * _MEBIBYTE,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_NPROC: limits["processes"],
        resource.RLIMIT_STACK: _STACK_BYTES,
        resource.RLIMIT_AS: limits["code_memory_limit_mb"] * _MEBIBYTE,
    }
    for resource_kind, limit in limits_by_resource.items():
        _, outer_limit = resource.getrlimit(resource_kind)
        if outer_limit != resource.RLIM_INFINITY:
            limit = min(limit, outer_limit)
        resource.setrlimit(resource_kind, (limit, limit))


def _stream(descriptor: int, mode: str, errors: str, buffering: int = -1) -> IO[str]:
    return open(descriptor, mode, buffering, encoding="utf-8", errors=errors, closefd=False)


def _run_script(compiled: types.CodeType, program_names: dict[str, Any]) -> int:
    """Run the code as ``python program.py`` would."""
    status = 0
    try:
        exec(compiled, program_names)
    except SystemExit as end:
        if isinstance(end.code, int):
            status = end.code & 0xFF
        elif end.code is not None:
            print(end.code, file=sys.stderr)
            status = 1
    except BaseException:
        _show_traceback()
        status = 1
    for finish in (
        threading._shutdown,
        atexit._run_exitfuncs,
        lambda: sys.stdout and sys.stdout.flush(),
    ):
        try:
            finish()
        except BaseException:  # e.g. standard output was closed
            _show_traceback()
    return status


def _show_traceback() -> None:
    # If the program broke its own streams, its exit code alone tells.
    with contextlib.suppress(BaseException):
        sys.stderr.write(traceback.format_exc(limit=20)[-4000:])


def _run_calls(
    compiled: types.CodeType,
    program_names: dict[str, Any],
    function: str,
    calls: list[str],
    prelude: dict[str, Any],
) -> int:
    """Load the code once and answer with one line for the loading, then one per call."""
    try:
        exec(compiled, program_names)
        find_function(program_names, function, prelude)
    except BaseException as error:
        _answer({"load_error": _described(error)})
        return 1
    _answer({"loaded": True})
    for arguments in calls:
        try:
            returned_value = find_function(program_names, function, prelude)(
                *map(_with_int_keys, json.loads(arguments))
            )
            _answer({"value": returned_value})
        except BaseException as error:
            _answer({"error": _described(error)})
    return 0


def find_function(
    program_names: dict[str, Any], function: str, prelude: dict[str, Any]
) -> Callable[..., Any]:
    """Return the method of a new ``Solution``, or the function."""
    solution = program_names.get("Solution")
    if isinstance(solution, type) and hasattr(solution, function):
        return getattr(solution(), function)
    if function in program_names and program_names[function] is not prelude.get(function):
        return program_names[function]
    raise NameError(f"the program defines no {function}")


def _with_int_keys(argument: Any) -> Any:
    """Turn keys, which JSON has only as strings, back into integers if all of them are integers."""
    if isinstance(argument, dict) and all(key.removeprefix("-").isdecimal() for key in argument):
        return {int(key): value for key, value in argument.items()}
    return argument


def _described(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:500]
    except BaseException:  # the program defines the error's text
        return "an exception without a text"


def _answer(content: dict[str, Any]) -> None:
    sys.set_int_max_str_digits(0)  # the program may have set it
    _write_all(
        _ANSWERS, json.dumps(content, default=plain_value, separators=(",", ":")).encode() + b"\n"
    )


def plain_value(value: Any) -> Any:
    """Turn values that JSON lacks into lists: queues, views, arrays; a set into an object that says so."""
    if isinstance(value, (set, frozenset)):
        return {"lightppo.set": list(value)}
    views = (type({}.keys()), type({}.values()), type({}.items()))
    if isinstance(value, (collections.deque, range, *views)):
        return list(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__} cannot be compared")
