"""What worker processes call in the tests."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np


def double(x: Any) -> Any:
    return x * 2


def behave(how: str, value: float = 0.0) -> Any:
    return BEHAVIOURS[how](value)


def _loop(value: float) -> float:
    while True:
        pass


def _grow(value: float) -> float:
    held = []
    while True:
        held.append(b"x" * (1 << 24))


def _fork_and_come_back(value: float) -> float:
    if child := os.fork():
        os.waitpid(child, 0)
        return value
    return -1.0


def _with_child(value: float) -> float:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(os.environ["CHILD_PID_FILE"], "w") as file:
        file.write(str(child.pid))
    time.sleep(600)
    return value


def _terminated(value: float) -> float:
    """By a launcher that signals all below itself; what the function starts is ended by SIGTERM all the same."""
    os.kill(os.getpid(), signal.SIGTERM)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    child.terminate()
    assert child.wait() == -signal.SIGTERM
    return value


def _nap(value: float) -> float:
    time.sleep(value)
    return value


BEHAVIOURS = {
    "nap": _nap,
    "terminated": _terminated,
    "ok": lambda value: value,
    "numpy": lambda value: {"score": np.float32(value), "all": np.arange(3)},
    "sleep": lambda value: time.sleep(600),
    "loop": _loop,
    # one C call that no Python code can interrupt
    "hold_the_lock": lambda value: pow(7, 10**9) % 10,
    "deaf": lambda value: (
        [signal.signal(s, signal.SIG_IGN) for s in (signal.SIGTERM, signal.SIGINT)] and _loop(value)
    ),
    "exit": lambda value: os._exit(3),
    "exit_well": lambda value: os._exit(0),
    "sys_exit": lambda value: sys.exit(0),
    "crash": lambda value: ctypes.string_at(0),
    "stop": lambda value: os.kill(os.getpid(), signal.SIGSTOP),
    "raise": lambda value: 1 / 0,
    "object": lambda value: object(),
    "nan": lambda value: float("nan"),
    "text": lambda value: "1.0",
    "long": lambda value: "x" * (17 << 20),
    "grow": _grow,
    "with_child": _with_child,
    "modules": lambda value: sorted(sys.modules),
    "environment": lambda value: dict(os.environ),
    "pid": lambda value: os.getpid(),
    "fork": _fork_and_come_back,
    "recurse": lambda value: BEHAVIOURS["recurse"](value),
}


async def double_later(x: float) -> float:
    await asyncio.sleep(0)
    return x * 2


def flaky_score(solution_str: str, ground_truth: str) -> Any:
    """Fails in one of five ways for 3 of 10 samples; the true score is 1."""
    i = int(ground_truth)
    ways = ["sleep", "raise", "text", "nan", "exit"]
    return behave(ways[i // 10 % 5]) if i % 10 in (1, 4, 8) else 1.0


def timed(solution_str: str, ground_truth: str) -> float:
    """As many reward functions do: a time limit, and 0 for every failure."""
    try:
        before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.signal(signal.SIGALRM, before)
        return 1.0
    except Exception:
        return 0.0


async def timed_later(solution_str: str, ground_truth: str) -> float:
    await asyncio.sleep(0)
    return timed(solution_str, ground_truth)


def timed_by_alarm(solution_str: str, ground_truth: str) -> float:
    try:
        signal.alarm(0)
        return 1.0
    except Exception:
        return 0.0


def timed_by_math_verify(solution_str: str, ground_truth: str) -> float:
    from math_verify import parse, verify

    try:
        return float(verify(parse(f"${ground_truth}$"), parse(f"${solution_str}$")))
    except Exception:
        return 0.0
