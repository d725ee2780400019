"""One program: the process gives up what it must not have, runs the code, and ends. Nothing it says is believed."""

from __future__ import annotations

import atexit
import collections
import contextlib
import gc
import importlib
import json
import os
import random
import resource
import signal
import site
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import IO, Any

# What solutions of public datasets take for granted: names from these modules, and the modules.
PRELUDE_MODULES = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics",
    "itertools", "functools", "operator", "io", "sys", "json", "builtins", "typing",
)  # fmt: skip
_RECURSION_LIMIT = 200_000
_STACK_BYTES = 64 << 20
_MEBIBYTE = 1 << 20
_SEED = 0  # the same program gets the same verdict
_TRACEBACK_CHARS = 4000

STANDARD_INPUT, STANDARD_OUTPUT, STANDARD_ERROR, ANSWERS, READY = range(5)


def make_prelude() -> dict[str, Any]:
    """The names that every program starts with."""
    site.setquit()  # exit() and quit(), which the interpreter has only with site-packages
    names: dict[str, Any] = {}
    for name in PRELUDE_MODULES:
        module = importlib.import_module(name)
        public = getattr(module, "__all__", None) or [key for key in vars(module) if not key.startswith("_")]
        names.update({key: getattr(module, key) for key in public})
    return names | {name: sys.modules[name] for name in PRELUDE_MODULES if name not in ("builtins", "typing")}


def run(request: dict[str, Any], prelude: dict[str, Any], lock_down: Callable[[], None]) -> int:
    """Runs one program in this process, which is a fork made for it and has only the descriptors above.

    Args:
        request: ``code``; ``function`` and ``calls`` (JSON lists of arguments), or neither; ``limits``.
        prelude: see :func:`make_prelude`.
        lock_down: gives up the rights; called when all limits are set.

    Returns:
        The exit code.
    """
    os.setsid()
    _set_limits(request["limits"])
    _make_streams()
    atexit._clear()
    gc.enable()
    random.seed(_SEED)
    sys.setrecursionlimit(_RECURSION_LIMIT)
    lock_down()
    # its closing tells that all of the above was done; from here on the code is in control
    os.write(READY, b"+")
    os.close(READY)
    if request.get("function") is None:
        return _run_script(request["code"], prelude)
    return _run_calls(request["code"], request["function"], request["calls"], prelude)


def _set_limits(limits: dict[str, Any]) -> None:
    memory, files = limits["memory_mb"] * _MEBIBYTE, limits["file_mb"] * _MEBIBYTE
    cpu = int(limits["cpu_seconds"]) + 2  # the wall clock comes first, unless several threads run
    values = {
        resource.RLIMIT_CPU: (cpu, cpu + 1),
        resource.RLIMIT_FSIZE: (files, files),
        resource.RLIMIT_NOFILE: (64, 64),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_MEMLOCK: (0, 0),
        resource.RLIMIT_MSGQUEUE: (0, 0),
        resource.RLIMIT_NPROC: (limits["processes"], limits["processes"]),
        resource.RLIMIT_AS: (memory, memory),
    }
    _, most = resource.getrlimit(resource.RLIMIT_STACK)
    stack = _STACK_BYTES if most == resource.RLIM_INFINITY else min(_STACK_BYTES, most)
    resource.setrlimit(resource.RLIMIT_STACK, (stack, stack))
    for kind, value in values.items():
        _, most = resource.getrlimit(kind)
        if most != resource.RLIM_INFINITY:  # an outer limit may be lower
            value = (min(value[0], most), min(value[1], most))
        resource.setrlimit(kind, value)


def _make_streams() -> None:
    """The interpreter's own streams still belong to the process this one was forked from."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.stdin = sys.__stdin__ = _stream(STANDARD_INPUT, "r", "surrogateescape")
    sys.stdout = sys.__stdout__ = _stream(STANDARD_OUTPUT, "w", "surrogateescape")
    sys.stderr = sys.__stderr__ = _stream(STANDARD_ERROR, "w", "backslashreplace", buffering=1)
    sys.argv = ["program"]


def _stream(descriptor: int, mode: str, errors: str, buffering: int = -1) -> IO[str]:
    return open(descriptor, mode, buffering, encoding="utf-8", errors=errors, closefd=False)


def _namespace(name: str, prelude: dict[str, Any]) -> dict[str, Any]:
    module = types.ModuleType(name)
    sys.modules[name] = module
    streams = {"stdin": sys.stdin, "stdout": sys.stdout, "stderr": sys.stderr, "argv": sys.argv}
    module.__dict__.update(prelude | streams | {"__name__": name, "__file__": "program.py"})
    return module.__dict__


def _compiled(code: str) -> types.CodeType | None:
    try:
        return compile(code, "<program>", "exec", dont_inherit=True)
    except BaseException as error:  # beside SyntaxError: null bytes, surrogates, too deep, too large
        _answer({"compile_error": f"{type(error).__name__}: {error}"[:500]})
        return None


def _run_script(code: str, prelude: dict[str, Any]) -> int:
    """As ``python program.py`` would."""
    compiled = _compiled(code)
    if compiled is None:
        return 1
    status = 0
    try:
        exec(compiled, _namespace("__main__", prelude))
    except SystemExit as end:
        status = _exit_status(end)
    except BaseException:
        _show_traceback()
        status = 1
    for finish in (threading._shutdown, atexit._run_exitfuncs, lambda: sys.stdout and sys.stdout.flush()):
        try:
            finish()
        except BaseException:  # e.g. standard output was closed
            _show_traceback()
    return status


def _exit_status(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    print(end.code, file=sys.stderr)
    return 1


def _show_traceback() -> None:
    with contextlib.suppress(BaseException):  # the program broke its own streams; its exit code tells
        sys.stderr.write(traceback.format_exc(limit=20)[-_TRACEBACK_CHARS:])


def _run_calls(code: str, function: str, calls: list[str], prelude: dict[str, Any]) -> int:
    """Loads the code once and answers every call with one line, after one line for the loading."""
    compiled = _compiled(code)
    if compiled is None:
        return 1
    names = _namespace("solution", prelude)
    try:
        exec(compiled, names)
        _find(names, function, prelude)
    except BaseException as error:
        _answer({"load_error": _described(error)})
        return 1
    _answer({"loaded": True})
    for arguments in calls:
        try:
            value = _find(names, function, prelude)(*map(_with_int_keys, json.loads(arguments)))
            _answer({"value": value})
        except BaseException as error:
            _answer({"error": _described(error)})
    return 0


def _find(names: dict[str, Any], function: str, prelude: dict[str, Any]) -> Callable[..., Any]:
    """The method of a fresh ``Solution``, or the function."""
    solution = names.get("Solution")
    if isinstance(solution, type) and hasattr(solution, function):
        return getattr(solution(), function)
    if function in names and names[function] is not prelude.get(function):
        return names[function]
    raise NameError(f"the program defines no {function}")


def _with_int_keys(argument: Any) -> Any:
    """JSON has only strings as keys: back to numbers where all of them are."""
    if isinstance(argument, dict) and all(key.removeprefix("-").isdecimal() for key in argument):
        return {int(key): value for key, value in argument.items()}
    return argument


def _described(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:500]
    except BaseException:  # its text is the program's code
        return "an exception without a text"


def _answer(content: dict[str, Any]) -> None:
    sys.set_int_max_str_digits(0)
    line = memoryview(json.dumps(content, default=_plain, separators=(",", ":")).encode() + b"\n")
    while line:
        line = line[os.write(ANSWERS, line) :]


def _plain(value: Any) -> Any:
    """What JSON lacks, as lists: sets in order, queues and views, arrays."""
    if isinstance(value, (set, frozenset)):
        try:
            return sorted(value)
        except TypeError:
            return list(value)
    if isinstance(value, (collections.deque, range, type({}.keys()), type({}.values()), type({}.items()))):
        return list(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__} cannot be compared")
