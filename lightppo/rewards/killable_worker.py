"""What runs in a worker process of :mod:`lightppo.rewards.killable`. Light to import: each new worker waits for it."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pickle
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

HEADER = struct.Struct("!Q")  # before each message: its length in bytes
_PR_SET_PDEATHSIG = 1


def load_target(target: str) -> Callable[..., Any]:
    """Loads ``package.module:function`` or ``path.py:function``."""
    module, _, name = target.rpartition(":")
    if module.endswith(".py"):
        from lightppo.user_code import load_python_function

        return load_python_function(target, name)
    return getattr(importlib.import_module(module), name)


def work() -> None:
    """What a worker process runs."""
    setup, fd, parent = json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    _die_with(parent)
    os.set_inheritable(fd, False)
    connection = socket.socket(fileno=fd)
    stream = connection.makefile("rb")
    try:
        for module in setup["preload"]:
            importlib.import_module(module)
        function = load_target(setup["target"])
    except BaseException as error:
        _send(connection, {"error": f"{setup['target']} cannot be loaded in a worker process: {_text(error)}"})
        return
    _send(connection, {})
    while header := stream.read(HEADER.size):
        payload = stream.read(HEADER.unpack(header)[0])
        _send(connection, _answer(function, payload))


def awaited(value: Any) -> Any:
    """The value of an awaitable, run to its end here; any other value as it is."""
    if not inspect.isawaitable(value):
        return value
    import asyncio

    async def run() -> Any:
        return await value

    return asyncio.run(run())


def _answer(function: Callable[..., Any], payload: bytes) -> dict[str, Any]:
    try:
        args, kwargs = pickle.loads(payload)
        return {"value": plain(awaited(function(*args, **kwargs)))}
    except BaseException as error:  # SystemExit too: a function that exits has no answer
        return {"error": _text(error)}


def _send(connection: socket.socket, answer: dict[str, Any]) -> None:
    data = json.dumps(answer).encode()
    connection.sendall(HEADER.pack(len(data)) + data)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:2000]


def _die_with(parent: int) -> None:
    """Has the kernel kill this process when the thread that started it ends, however it ends."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os._exit(1)


def plain(value: Any) -> Any:
    """A result as JSON has it: numbers of numpy and torch as Python's, tuples as lists.

    Raises:
        TypeError: something else, e.g. an object.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy and torch, scalars too
        return plain(value.tolist())
    raise TypeError(f"a reward function cannot return {type(value).__name__} from a worker process")
