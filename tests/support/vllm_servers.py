"""Real vLLM servers for tests, each in a session of its own; nothing of them outlives the tests."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import requests

from support.ranks import ENVIRONMENT, REPO, ask_fork_server, free_port, tell_fork_server

SERVE = REPO / "examples" / "serve_vllm.py"
KEY_VARIABLE = "LIGHTPPO_TEST_KEY"
KEY = "open-sesame"
SHARED_MEMORY = Path("/dev/shm")


class Servers:
    """Servers of models, all at once, by examples/serve_vllm.py, forked from a process that has vLLM imported. They
    end with that process at the latest.

    Args:
        models: folder of each.
        log_folder: for what they print.
        more: further options of each.

    Attributes:
        sockets: the folder that holds the folders of their sockets.
    """

    def __init__(self, models: list[str], log_folder: Path, more: list[list[str]]) -> None:
        # pytest's folders are too long for sockets
        self.sockets = Path(tempfile.mkdtemp(prefix="lppo-", dir="/tmp"))
        environment = os.environ | ENVIRONMENT
        environment |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_RPC_BASE_PATH": str(self.sockets),
            KEY_VARIABLE: KEY,
        }
        shared = [
            "--dtype=float32",
            f"--kv-cache-memory-bytes={32 << 20}",
            "--max-model-len=128",
            "--block-size=32",
        ]
        self.urls, self.logs, self.pids = [], [], []
        for model, own in zip(models, more):
            port = free_port()
            self.urls.append(f"http://127.0.0.1:{port}")
            self.logs.append(log_folder / f"server-{port}.log")
            self.logs[-1].touch()
            words = [
                f"--model={model}",
                f"--port={port}",
                f"--api_key_env={KEY_VARIABLE}",
                *shared,
                *own,
            ]
            log = str(self.logs[-1])
            self.pids.append(
                ask_fork_server(
                    SERVE, [*words, "--max-num-seqs=32"], [environment], log, None, "vllm"
                )
            )

    def wait(self) -> None:
        """Until all are up."""
        for url, pid, log in zip(self.urls, self.pids, self.logs):
            wait_until_up(url, lambda: _is_running(pid), log)  # noqa: B023

    def terminate(self) -> int | None:
        """Ends the first one as a user would; its exit code. vLLM's queues go at Python's own end, which forks lack."""
        queues = {
            path
            for process in self._own()
            for path in shared_memory_of(process)
            if path.name.startswith("psm_")
        }
        os.kill(self.pids[0], signal.SIGTERM)
        code = tell_fork_server(self.pids[0], "vllm")
        for path in queues:
            path.unlink(missing_ok=True)
        return code

    def leftovers(self, seconds: float = 120) -> list[str]:
        """Command lines of processes that servers have left; vLLM's end a little after the first one."""
        deadline = time.monotonic() + seconds
        while (own := self._own()) and time.monotonic() < deadline:
            psutil.wait_procs(own, timeout=1)
        return [" ".join(process.cmdline()) for process in own]

    def close(self) -> None:
        """Kills whatever is left, and removes its shared memory and sockets: what is killed cannot."""
        own = self._own()
        held = {path for process in own for path in shared_memory_of(process)}
        for process in own:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for path in held:
            path.unlink(missing_ok=True)
        shutil.rmtree(self.sockets, ignore_errors=True)

    def _own(self) -> list[psutil.Process]:
        """By their sessions: vLLM's processes write their names over what they have of the environment."""
        own = []
        for process in psutil.process_iter():
            with suppress(ProcessLookupError):
                if os.getsid(process.pid) in self.pids and _is_running(process.pid):
                    own.append(process)
        return own


def wait_until_up(
    url: str, is_running: Callable[[], bool], log: Path | None = None, seconds: float = 900
) -> None:
    deadline = time.monotonic() + seconds
    while True:
        with suppress(requests.RequestException):
            if requests.get(f"{url}/health", timeout=5).ok:
                return
        if not is_running() or time.monotonic() > deadline:
            pytest.fail(f"the vLLM server did not start:\n{log.read_text()[-6000:] if log else ''}")
        time.sleep(0.2)


def _is_running(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def shared_memory_of(process: psutil.Process) -> set[Path]:
    """Files in shared memory that a process has mapped."""
    try:
        lines = [
            line.split() for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines()
        ]
    except OSError:  # it has ended
        return set()
    # By number: a semaphore is mapped under the name that it had before its own.
    mapped = {
        int(words[4])
        for words in lines
        if len(words) > 5 and words[5].startswith(f"{SHARED_MEMORY}/")
    }
    return {path for path in SHARED_MEMORY.iterdir() if path.stat().st_ino in mapped}


def kill_server(pid: int) -> None:
    """SIGKILL for a server and all of its processes, as when its machine dies; their shared memory is removed."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    held = {path for process in family for path in shared_memory_of(process)}
    os.killpg(pid, signal.SIGKILL)
    for path in held:
        path.unlink(missing_ok=True)
