"""Process-group set-up for the three ways in: ``deepspeed``, ``torchrun`` and plain ``python``.

Nothing here compiles, asks for MPI or takes a lock: a run starts in a fraction of a second, or fails with a reason.
"""

from __future__ import annotations

import logging
import os
import socket
import warnings
from datetime import timedelta

import torch

logger = logging.getLogger(__name__)


class LaunchError(RuntimeError):
    """This process cannot become a rank: the environment, the port or the GPUs are not as they must be."""


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
    ensure_launcher_variables()
    quiet_third_parties()
    import deepspeed

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
    return device
