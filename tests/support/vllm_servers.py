"""Real vLLM servers for tests, each in a session of its own; nothing of them outlives the tests."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import requests

from support.ranks import REPO, free_port

KEY_VARIABLE = "LIGHTPPO_TEST_KEY"
KEY = "open-sesame"
SHARED_MEMORY = Path("/dev/shm")


class Servers:
    """Servers started by examples/serve_vllm.py, all at the same time.

    Args:
        models: folder of each.
        log_folder: for what they print.
        max_model_len: most tokens of a sequence.
        more: further options of each.

    Attributes:
        sockets: the folder that holds the folders of their sockets.
    """

    def __init__(
        self,
        models: list[str],
        log_folder: Path,
        max_model_len: int = 128,
        more: list[dict[str, object]] | None = None,
    ) -> None:
        self.sockets = Path(tempfile.mkdtemp(prefix="lppo-", dir="/tmp"))  # pytest's folders are too long for sockets
        environment = os.environ | {
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_RPC_BASE_PATH": str(self.sockets),
            KEY_VARIABLE: KEY,
        }
        options = {"dtype": "float32", "kv-cache-memory-bytes": 32 << 20, "max-model-len": max_model_len}
        options |= {"max-num-seqs": 32, "block-size": 32, "api_key_env": KEY_VARIABLE}
        self.urls, self.logs = [], []
        self.processes: list[subprocess.Popen] = []
        for model, own in zip(models, more or [{}] * len(models)):
            port = free_port()
            words = [f"--{name}={value}" for name, value in (options | {"model": model, "port": port} | own).items()]
            self.logs.append(log_folder / f"server-{port}.log")
            with self.logs[-1].open("w") as log:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, str(REPO / "examples" / "serve_vllm.py"), *words],
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
            self.urls.append(f"http://127.0.0.1:{port}")

    def wait(self, seconds: float = 900) -> None:
        """Until all are up."""
        deadline = time.monotonic() + seconds
        for url, process, log in zip(self.urls, self.processes, self.logs):
            while True:
                try:
                    if requests.get(f"{url}/health", timeout=5).ok:
                        break
                except requests.RequestException:
                    pass
                if process.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"the vLLM server did not start:\n{log.read_text()[-6000:]}")
                time.sleep(0.5)

    def terminate(self, i: int, seconds: float = 180) -> int:
        """Ends one as a user would; its exit code."""
        self.processes[i].send_signal(signal.SIGTERM)
        return self.processes[i].wait(seconds)

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
        for process in self.processes:
            process.wait(30)
        for path in held:
            path.unlink(missing_ok=True)
        shutil.rmtree(self.sockets, ignore_errors=True)

    def _own(self) -> list[psutil.Process]:
        """By their sessions: vLLM's processes write their names over what they have of the environment."""
        sessions, own = {process.pid for process in self.processes}, []
        for process in psutil.process_iter():
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getsid(process.pid) in sessions and process.status() != psutil.STATUS_ZOMBIE:
                    own.append(process)
        return own


def shared_memory_of(process: psutil.Process) -> set[Path]:
    """Files in shared memory that a process has mapped."""
    try:
        lines = [line.split() for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines()]
    except OSError:  # it has ended
        return set()
    # By number: a semaphore is mapped under the name that it had before its own.
    mapped = {int(words[4]) for words in lines if len(words) > 5 and words[5].startswith(f"{SHARED_MEMORY}/")}
    return {path for path in SHARED_MEMORY.iterdir() if path.stat().st_ino in mapped}


def kill_server(pid: int) -> None:
    """SIGKILL for a server and all of its processes, as when its machine dies; their shared memory is removed."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    held = {path for process in family for path in shared_memory_of(process)}
    os.killpg(pid, signal.SIGKILL)
    for path in held:
        path.unlink(missing_ok=True)
