"""Running commands: shown first, logged to a file, with a sign of life, a time limit and their peak memory."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).parents[1]


@dataclass
class Finished:
    """Attributes: command as a line, seconds, peak memory of the process, load before and after.

    The peak is the largest resident set, or on a GPU machine the most memory in use on the first GPU beyond what was
    in use before.
    """

    command: str
    seconds: float
    peak_memory_bytes: int
    load: tuple[float, float]


def run(
    words: list[object],
    *,
    log: Path,
    timeout: float,
    every: float = 15.0,
    cwd: Path = REPO,
    **variables: str,
) -> Finished:
    """Run a command in its own process group.

    Args:
        words: the command.
        log: file for its output, made anew.
        timeout: seconds after which the group is killed.
        every: seconds between signs of life, each with the last line of the log.
        cwd: working directory.
        **variables: of the environment, beside this process's own.

    Raises:
        SystemExit: it failed or took too long; the message has the end of the log.
    """
    command = shlex.join(map(str, words))
    prefix = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    shown = f"{prefix} {command}".strip()
    print(f"\n$ {shown}", flush=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    start, load, last_sign = time.monotonic(), os.getloadavg()[0], time.monotonic()
    gpu_before = gpu_peak = gpu_memory_used()
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(map(str, words)), cwd=cwd, env={**os.environ, **variables}, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=_end_with_parent,
        )  # fmt: skip
        try:
            while True:
                pid, status, usage = os.wait4(process.pid, os.WNOHANG)
                if pid:
                    break
                seconds = time.monotonic() - start
                if seconds > timeout:
                    raise SystemExit(f"after {seconds:.0f} s: too long\n{tail(log)}")
                if time.monotonic() - last_sign > every:
                    last_sign = time.monotonic()
                    print(
                        f"  {seconds:5.0f} s | load {os.getloadavg()[0]:.1f} | {tail(log, 1)[-90:]}",
                        flush=True,
                    )
                gpu_peak = max(gpu_peak, gpu_memory_used())
                time.sleep(0.2)
        except BaseException:
            _end(process)
            raise
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.monotonic() - start
    if process.returncode:
        raise SystemExit(f"exit code {process.returncode} after {seconds:.0f} s\n{tail(log)}")
    print(f"  done in {seconds:.0f} s", flush=True)
    peak = gpu_peak - gpu_before or usage.ru_maxrss * 1024
    return Finished(shown, seconds, peak, (load, os.getloadavg()[0]))


def _end(process: subprocess.Popen) -> None:
    """The command may end what it has started itself; then its group goes."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
        os.killpg(process.pid, signal.SIGKILL)


def _end_with_parent() -> None:
    """By the kernel, however this process ends: a killed benchmark leaves nothing behind that holds the machine."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def gpu_memory_used() -> int:
    """Bytes in use on the first GPU; 0 without one."""
    if shutil.which("nvidia-smi") is None:
        return 0
    query = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return (
        int(subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout)
        * 2**20
    )


def tail(log: Path, lines: int = 25) -> str:
    """The last lines of a log; a progress bar's last state is one."""
    text = log.read_text(errors="replace").replace("\r", "\n").strip()
    return "\n".join(line for line in text.split("\n")[-lines:])
