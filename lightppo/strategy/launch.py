"""Process-group set-up for the three ways in: ``deepspeed``, ``torchrun`` and plain ``python``.

Nothing here compiles, asks for MPI or takes a lock: a run starts in a fraction of a second, or fails with a reason.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import time
import warnings
from datetime import timedelta
from pathlib import Path

import torch

from lightppo.errors import LaunchError

logger = logging.getLogger(__name__)


_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def find_free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def ensure_launcher_variables() -> None:
    """Makes a plain ``python script.py`` a world of one process; leaves a launcher's variables alone.

    Raises:
        LaunchError: only some of RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are set.
    """
    missing = [name for name in _LAUNCHER_VARIABLES if name not in os.environ]
    if not missing:
        return
    # A cluster's shell may export an address of its own; only a rank says that a launcher started this process.
    if "RANK" in os.environ or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise LaunchError(
            f"the launcher set RANK or WORLD_SIZE but not {', '.join(missing)}; "
            f"start with `deepspeed --num_gpus N`, `torchrun --nproc_per_node N` or plain `python`"
        )
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(find_free_port())


def on_cuda() -> bool:
    """True when engines run on GPUs: there is one, and DS_ACCELERATOR (DeepSpeed's own switch) does not say cpu."""
    return torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR", "cuda") == "cuda"


def quiet_third_parties() -> None:
    """Keeps DeepSpeed to warnings and drops the FutureWarnings that it raises at every ZeRO-3 hook (~74 a run)."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if on_cuda() else "cpu")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(deepspeed|torch)\b.*")
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"deepspeed\b.*")
    # A frozen embedding or a first layer gives backward hooks an input without gradient: harmless.
    warnings.filterwarnings("ignore", message=r".*Full backward hook is firing when gradients are computed.*")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)


def _not_about_skipped_steps(record: logging.LogRecord) -> bool:
    return "OVERFLOW! Skipping step" not in record.getMessage()  # optimizer_step reports it with the model's name


def init_process_group(timeout: timedelta) -> torch.device:
    """Joins the default process group (nccl on CUDA, gloo on CPU) and returns this rank's device.

    Args:
        timeout: a collective that takes longer than this ends the job instead of hanging for ever.

    Raises:
        LaunchError: there are more ranks on this node than GPUs.
    """
    quiet_third_parties()
    import deepspeed

    ensure_launcher_variables()  # a port that is free now: the import above takes seconds
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if on_cuda():
        local_rank = int(os.environ["LOCAL_RANK"])
        if local_rank >= torch.cuda.device_count():
            raise LaunchError(
                f"local rank {local_rank} has no GPU: this node shows {torch.cuda.device_count()}; "
                f"start fewer processes (--num_gpus) or check CUDA_VISIBLE_DEVICES"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        # Joining gloo would compile this op for minutes, under a lock that a killed process leaves behind.
        # Private hook of DeepSpeed 0.19; the plain gloo collectives take over.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").addFilter(_not_about_skipped_steps)
    try:
        deepspeed.init_distributed(timeout=timeout, verbose=False)
    except torch.distributed.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise LaunchError(
            f"port {os.environ['MASTER_PORT']} is in use, by another run perhaps: choose one with --master_port, "
            "before the script's name"
        ) from error
    atexit.unregister(wait_for_torch_threads)  # a process may join a second group
    atexit.register(wait_for_torch_threads)
    return device


# What torch calls the threads that release tensors after a collective and after a backward pass.
_TORCH_THREADS = ("pt_gloo_runloop", "pt_autograd")
_TASKS = Path("/proc/self/task")


def wait_for_torch_threads(seconds: float = 10.0) -> bool:
    """Waits until torch's own threads rest: the last thing a process does before Python ends.

    A collective is over for its caller a moment before gloo's thread has let go of its tensors, and for that the
    thread needs Python's lock. One that waits for the lock while Python ends is thrown out of a C++ destructor, and the
    process aborts after all its work is done: "terminate called without an active exception". Destroying the group does
    not help: DeepSpeed's hooks hold it, and its threads with it, to the end.

    Args:
        seconds: longest wait; a thread that is still busy then is left alone.

    Returns:
        whether all of them rest. Without /proc nothing is known of threads: they get a moment.
    """
    deadline, before = time.monotonic() + seconds, None
    while True:
        time.sleep(0.03)  # without the lock; who waits for it asks every 5 ms
        if not _TASKS.is_dir():
            return True
        now = _torch_threads()
        if now == before and all(state == "S" for state, *_ in now.values()):
            return True
        if time.monotonic() > deadline:
            return False
        before = now


def _torch_threads() -> dict[str, tuple[str, ...]]:
    """Of each of torch's threads, by its number: its state (R, S, D, …) and how often it was taken off a core."""
    threads = {}
    for task in _TASKS.iterdir():
        try:
            fields = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
        except OSError:  # it has ended
            continue
        if fields["Name"].strip().startswith(_TORCH_THREADS):
            switches = (fields[f"{kind}_ctxt_switches"].strip() for kind in ("voluntary", "nonvoluntary"))
            threads[task.name] = (fields["State"].split()[0], *switches)
    return threads
