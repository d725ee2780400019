"""Running a script on several ranks: under the real launchers, or forked from a process that has the imports done."""

from __future__ import annotations

import functools
import os
import random
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.fork_server import listening

REPO = Path(__file__).parents[2]
WITH_SUPPORT = {"PYTHONPATH": os.pathsep.join([str(REPO), str(REPO / "tests")])}
"""For scripts that import from tests/."""
LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "ARROW_DEFAULT_MEMORY_POOL": "system",  # Arrow's own has a thread, which a fork would lack
    "PYTHONPATH": os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
}
HEAVY = (
    "deepspeed",
    "datasets",
    "peft",
    "transformers.integrations.deepspeed",
    "transformers.models.llama.modeling_llama",
    "matplotlib.backends.backend_agg",
)
NEEDS_VLLM = ("lightppo.rollout.vllm.worker",)
PRELOADED = tuple(
    name
    for path in sorted((REPO / "lightppo").rglob("[a-z]*.py"))
    if (name := ".".join(path.relative_to(REPO).with_suffix("").parts)) not in NEEDS_VLLM
)
WITH_VLLM = (
    "lightppo.rollout.vllm.colocated",
    "vllm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "vllm.entrypoints.openai.api_server",
    *NEEDS_VLLM,
)
# While it is imported. It compiles a comparison of log probs, which takes longer than an engine's whole start.
READ_BY_VLLM = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "TORCH_COMPILE_DISABLE": "1",
}
TESTS = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
# name → what it has beside those before it, and what is in its environment then
SERVERS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "third parties": (HEAVY, {}),
    "lightppo": (PRELOADED, {}),
    "vllm": (WITH_VLLM, READ_BY_VLLM),
}


@dataclass(frozen=True)
class RanksResult:
    """How a run ended: exit code of the launcher and everything that it and the ranks wrote."""

    returncode: int
    output: str


_GIVEN_PORTS: set[int] = set()


def free_port() -> int:
    """A port that stays free until a launcher takes it, seconds later.

    The system gives ports from 32768 on to whoever asks for any, and to every connection. So this is one below, and
    each process of pytest-xdist has a thousand of its own.
    """
    first = 15_000 + 1000 * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 16)
    while True:
        # SystemRandom: tests seed the other
        port = random.SystemRandom().randrange(first, first + 1000)
        if port in _GIVEN_PORTS:  # whoever got it may not have taken it yet
            continue
        with socket.socket() as sock:
            # as servers do: not one that has just closed
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("", port))
            except OSError:
                continue
            _GIVEN_PORTS.add(port)
            return port


def launch_command(
    launcher: str, world_size: int, script: Path | str, args: list[str]
) -> list[str]:
    """A script by its path, a module by its name."""
    bin_dir = Path(sys.executable).parent
    match launcher:
        case "deepspeed":
            start = [
                str(bin_dir / "deepspeed"),
                "--num_gpus",
                str(world_size),
                "--master_port",
                str(free_port()),
            ]
        case "torchrun":
            start = [
                str(bin_dir / "torchrun"),
                f"--nproc_per_node={world_size}",
                f"--master_port={free_port()}",
            ]
        case "python":
            start = [sys.executable]
        case _:
            raise ValueError(f"launcher must be deepspeed, torchrun or python, got {launcher!r}")
    if isinstance(script, str):
        start.append("--module" if launcher == "deepspeed" else "-m")
    return [*start, str(script), *args]


def run_ranks(
    script: Path | str,
    *args: str | Path,
    launcher: str = "fork",
    vllm: bool = False,
    bare: bool = False,
    world_size: int = 2,
    timeout: float = 400,
    check: bool = True,
    env: dict[str, str] | None = None,
) -> RanksResult:
    """Runs ``script args…`` on CPU ranks in sessions of their own; nothing of it outlives the call.

    Args:
        script: path of a Python script, or name of a module where there is a launcher.
        *args: its arguments.
        launcher: "deepspeed", "torchrun", "python" (one rank without a launcher), or "fork": the same without the
            imports, which take longer than most tests. The others are for what depends on how a process starts or ends.
        vllm: vLLM, too, is imported before the fork.
        bare: lightppo is not imported before the fork, so that it may be another one.
        world_size: number of ranks; 1 for "python".
        timeout: seconds until the whole run is killed and the test fails.
        check: fail the test when the exit code is not 0.
        env: additional environment variables; for "fork" none that are read at import.
    """
    words = [str(arg) for arg in args]
    marker = f"lightppo-test-{uuid.uuid4()}"
    environment = {
        name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES
    }
    environment |= {"LIGHTPPO_TEST_RUN": marker, **ENVIRONMENT, **(env or {})}
    try:
        if launcher == "fork":
            server = "vllm" if vllm else "third parties" if bare else "lightppo"
            code, output = run_forked(script, words, world_size, environment, timeout, server)
        else:
            command = launch_command(launcher, world_size, script, words)
            code, output = run_launcher(command, environment, timeout, marker)
    finally:
        # torchrun starts its workers in further sessions, so the process group alone would miss them.
        kill_marked(marker)
    if code is None or (check and code != 0):
        end = f"took longer than {timeout} s" if code is None else f"ended with {code}"
        pytest.fail(
            f"{launcher}, {world_size} ranks of {script} {' '.join(words)}: {end}:\n"
            + output[-20_000 if code is None else -6000 :]
        )
    return RanksResult(code, output)


def run_launcher(
    command: list[str], environment: dict[str, str], timeout: float, marker: str
) -> tuple[int | None, str]:
    """Exit code, None after the time-out, and output."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        kill_marked(marker)
        output, _ = process.communicate()
        return None, output


def run_forked(
    script: Path,
    words: list[str],
    world_size: int,
    environment: dict[str, str],
    timeout: float,
    server: str,
) -> tuple[int | None, str]:
    """As :func:`run_launcher`, with the variables that a launcher sets; a single rank has none."""
    ranks = [environment]
    if world_size > 1:
        shared = environment | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        shared |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world_size))
        ranks = [
            shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)
        ]
    with tempfile.NamedTemporaryFile("r", prefix="lightppo-ranks-", errors="replace") as log:
        return ask_fork_server(script, words, ranks, log.name, timeout, server), log.read()


def ask_fork_server(
    script: Path,
    words: list[str],
    environments: list[dict[str, str]],
    log: str,
    timeout: float | None,
    server: str,
) -> int | None:
    """What support/fork_server.py answers to a job."""
    job = {
        "script": str(script),
        "words": words,
        "environments": environments,
        "folder": os.getcwd(),
        "log": log,
    }
    return tell_fork_server(job | {"timeout": timeout}, server)


def tell_fork_server(job: dict[str, Any] | int, server: str) -> int | None:
    connection = fork_server(server)
    try:
        connection.send(job)
        return connection.recv()
    except BaseException:  # of a test that is broken off: its ranks end
        connection.close()
        fork_server.cache_clear()
        raise


@functools.cache
def fork_server(name: str) -> Connection:
    """A connection to a process of support/fork_server.py, which all processes of pytest-xdist share.

    It ends when all have closed their connections.
    """
    before = list(SERVERS)[: list(SERVERS).index(name)]
    if before:
        fork_server(before[-1])
    address = f"lightppo-tests-{TESTS}-{name}"
    while True:
        ours = socket.socket(socket.AF_UNIX)
        try:
            ours.connect(f"\0{address}")
            return Connection(ours.detach())
        except ConnectionRefusedError:  # there is none yet
            ours.close()
        modules, environment = SERVERS[name]
        if before:
            job = {"address": address, "modules": modules, "environment": environment}
            tell_fork_server(job, before[-1])
        elif listener := listening(address):
            with listener:
                start_fork_server(listener, modules)


def start_fork_server(listener: socket.socket, modules: tuple[str, ...]) -> None:
    """The first one, in a session of its own."""
    script = str(Path(__file__).with_name("fork_server.py"))
    command = [sys.executable, "-u", script, str(listener.fileno()), *modules]
    environment = {
        name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES
    }
    subprocess.Popen(
        command,
        env=environment | ENVIRONMENT,
        pass_fds=[listener.fileno()],
        start_new_session=True,
    )


def marked(marker: str) -> Iterator[psutil.Process]:
    """The processes that carry this run's marker in their environment."""
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            if process.environ().get("LIGHTPPO_TEST_RUN") == marker:
                yield process


def kill_marked(marker: str) -> None:
    """Kills the processes that carry this run's marker in their environment."""
    for process in marked(marker):
        with suppress(psutil.NoSuchProcess):
            process.kill()
