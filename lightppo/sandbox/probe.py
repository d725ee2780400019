"""Finds out what a sandbox really keeps out: a program of ours runs in it and attacks targets of ours."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PROTECTIONS = {
    "network": "no connection to anybody",
    "files": "no reading and no writing of the user's files",
    "environment": "no variable of the trainer's environment",
    "processes": "no signal to other processes, no tracing of them",
    "forks": "a bounded number of processes",
    "memory": "a bounded amount of memory",
}

_ATTACKS = """
def attack(facts):
    import ctypes, os, socket

    def works(action):
        try:
            action()
            return True
        except BaseException:
            return False

    def connect(family, address):
        client = socket.socket(family)
        client.settimeout(2)
        client.connect(address)

    def read(path):
        with open(path, "rb") as file:
            file.read(100)

    def write(path):
        with open(path, "wb") as file:
            file.write(b"x")

    def trace():
        if ctypes.CDLL(None).ptrace(0x4206, os.getppid(), None, None) != 0:
            raise OSError

    trainer = facts["trainer"]
    return {
        "network": works(lambda: connect(socket.AF_INET, ("127.0.0.1", facts["port"])))
        or works(lambda: connect(socket.AF_UNIX, chr(0) + facts["socket"])),
        "files": works(lambda: read(facts["file"])) or works(lambda: write(facts["file"]))
        or works(lambda: write(facts["file"] + ".new")),
        "environment": works(lambda: read(f"/proc/{trainer}/environ")) or works(lambda: read("/proc/1/environ")),
        "names": sorted(os.environ),
        "processes": works(lambda: os.kill(trainer, 0)),
        "tracing": works(trace),
        "memory": works(lambda: bytearray((facts["memory_mb"] + 64) << 20)),
    }
"""

_FORKS = """
def fork(most):
    import os, signal

    children = []
    try:
        while len(children) <= most:
            child = os.fork()
            if child == 0:
                while True:
                    signal.pause()
            children.append(child)
    except OSError:
        pass
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return len(children)
"""
_SPARE_FORKS = 4  # ours, which the limit counts too

Run = Callable[[str, str, list[Any]], tuple[str, list[str]]]


def probe(run: Run, *, memory_mb: int, max_processes: int, environment: set[str], own_processes: bool) -> set[str]:
    """Attacks a sandbox; returns the :data:`PROTECTIONS` that hold.

    ``run`` calls a function of some code, and returns how that ended and its answers. ``environment``: variables that a
    program may see. ``own_processes``: the sandbox has its own process numbers, so ours mean nothing there.
    """
    with _targets() as facts:
        _, lines = run(_ATTACKS, "attack", [facts | {"trainer": os.getpid(), "memory_mb": memory_mb}])
    done = _value(lines)
    if not isinstance(done, dict):
        return set()
    ended, lines = run(_FORKS, "fork", [max_processes + _SPARE_FORKS])
    forked = _value(lines)
    open_doors = {
        "network": done["network"],
        "files": done["files"],
        "environment": done["environment"] or not environment.issuperset(done["names"]),
        "processes": (done["processes"] and not own_processes) or done["tracing"],
        "forks": ended != "processes" and not (isinstance(forked, int) and forked <= max_processes + _SPARE_FORKS),
        "memory": done["memory"],
    }
    return {name for name in PROTECTIONS if not open_doors[name]}


def _value(lines: list[str]) -> Any:
    return json.loads(lines[1]).get("value") if len(lines) == 2 else None


@contextlib.contextmanager
def _targets() -> Iterator[dict[str, Any]]:
    """A file, a port and an abstract socket that everybody on the machine could use."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lightppo-probe-")))
        folder.chmod(0o777)
        file = folder / "secret"
        file.write_text("secret")
        file.chmod(0o666)
        name = f"lightppo-probe-{secrets.token_hex(8)}"
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        abstract.bind("\0" + name)
        abstract.listen()
        yield {"file": str(file), "port": server.getsockname()[1], "socket": name}
