"""Running a script on several ranks under the real launchers."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

REPO = Path(__file__).parents[2]
_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class RanksResult:
    """How a run ended: exit code of the launcher and everything that it and the ranks wrote."""

    returncode: int
    output: str


def free_port() -> int:
    """A port that stays free until a launcher takes it, seconds later.

    The system gives ports from 32768 on to whoever asks for any, and to every connection. So this is one below, and
    each process of pytest-xdist has a thousand of its own.
    """
    first = 15_000 + 1000 * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 16)
    while True:
        port = random.SystemRandom().randrange(first, first + 1000)  # SystemRandom: tests seed the other
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: not one that has just closed
            try:
                sock.bind(("", port))
            except OSError:
                continue
            return port


def launch_command(launcher: str, world_size: int, script: Path, args: list[str]) -> list[str]:
    bin_dir = Path(sys.executable).parent
    match launcher:
        case "deepspeed":
            start = [str(bin_dir / "deepspeed"), "--num_gpus", str(world_size), "--master_port", str(free_port())]
        case "torchrun":
            start = [str(bin_dir / "torchrun"), f"--nproc_per_node={world_size}", f"--master_port={free_port()}"]
        case "python":
            start = [sys.executable]
        case _:
            raise ValueError(f"launcher must be deepspeed, torchrun or python, got {launcher!r}")
    return [*start, str(script), *args]


def run_ranks(
    script: Path,
    *args: str | Path,
    launcher: str = "deepspeed",
    world_size: int = 2,
    timeout: float = 400,
    check: bool = True,
    env: dict[str, str] | None = None,
) -> RanksResult:
    """Runs ``script args…`` on CPU ranks in a session of its own; nothing of it outlives the call.

    Args:
        script: path of a Python script.
        *args: its arguments.
        launcher: "deepspeed", "torchrun", or "python" (one rank without a launcher).
        world_size: number of ranks; 1 for "python".
        timeout: seconds until the whole run is killed and the test fails.
        check: fail the test when the exit code is not 0.
        env: additional environment variables.
    """
    marker = f"lightppo-test-{uuid.uuid4()}"
    environment = {name: value for name, value in os.environ.items() if name not in _LAUNCHER_VARIABLES}
    environment |= {
        "LIGHTPPO_TEST_RUN": marker,
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        **(env or {}),
    }
    command = launch_command(launcher, world_size, script, [str(arg) for arg in args])
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    timed_out = False
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        timed_out = True
    finally:
        # torchrun starts its workers in further sessions, so the process group alone would miss them.
        kill_marked(marker)
    if timed_out:
        output, _ = process.communicate()
        pytest.fail(f"{' '.join(command)} took longer than {timeout} s:\n{output[-6000:]}")
    if check and process.returncode != 0:
        pytest.fail(f"{' '.join(command)} ended with {process.returncode}:\n{output[-6000:]}")
    return RanksResult(process.returncode, output)


def kill_marked(marker: str) -> None:
    """Kills the processes that carry this run's marker in their environment."""
    for process in psutil.process_iter():
        try:
            if process.environ().get("LIGHTPPO_TEST_RUN") == marker:
                process.kill()
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
