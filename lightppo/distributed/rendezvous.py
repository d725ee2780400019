"""The ranks of a run meet: by a launcher's variables, by an interface that leads to the others; and their quiet end."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightppo.distributed.device import on_cuda
from lightppo.errors import LaunchError
from lightppo.ranks import heartbeat, ranks_on_node

logger = logging.getLogger(__name__)


_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def ensure_launcher_variables() -> None:
    """Make a plain ``python script.py`` a world of one process; LaunchError if a launcher set only some variables."""
    missing = [name for name in _LAUNCHER_VARIABLES if name not in os.environ]
    if not missing:
        return
    # A cluster's shell may export an address of its own; only a rank proves that a launcher started this process.
    if "RANK" in os.environ or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise LaunchError(
            f"the launcher set RANK or WORLD_SIZE but not {', '.join(missing)}; "
            f"start with `deepspeed --num_gpus N`, `torchrun --nproc_per_node N` or plain `python`"
        )
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as free_socket:
        free_socket.bind(("127.0.0.1", 0))  # a port that is free now
        os.environ["MASTER_PORT"] = str(free_socket.getsockname()[1])


@contextmanager
def join_ranks(strategy: Any) -> Iterator[None]:
    """Prepare this rank to join the others inside, and watch it from then on; LaunchError where a port is in use."""
    quiet_third_parties()
    try:
        choose_gloo_interface()
    except LaunchError as error:
        if not on_cuda():
            raise
        logger.warning("%s; NCCL does not need it, vLLM in the training processes does", error)
    try:
        yield
    except RuntimeError as error:  # of older torch; a DistNetworkError of newer
        if "EADDRINUSE" not in str(error):
            raise
        raise LaunchError(
            f"port {os.environ['MASTER_PORT']} is in use, by another run perhaps: choose one with --master_port, "
            "before the script's name"
        ) from error
    seconds = 60 * strategy.timeout_minutes
    heartbeat.limit = seconds - min(60.0, seconds / 10)  # before the collectives' own errors
    atexit.unregister(wait_for_torch_threads)  # a process may join a second group
    atexit.register(wait_for_torch_threads)


def choose_gloo_interface() -> None:
    """Let nodes reach each other where a host's own name leads to 127.0.1.1, as Debian has it: gloo listens there.

    LaunchError if the interface that leads to the other nodes is not plain to see.
    """
    import psutil

    ranks = int(os.environ["WORLD_SIZE"])
    if "GLOO_SOCKET_IFNAME" in os.environ or ranks_on_node(otherwise=ranks) == ranks:
        return
    try:
        host = socket.gethostbyname(socket.gethostname())
    except OSError:
        return
    if not host.startswith("127."):
        return
    interfaces = {
        info.address: name
        for name, infos in psutil.net_if_addrs().items()
        for info in infos
        if info.family == socket.AF_INET and not info.address.startswith("127.")
    }
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))  # sends nothing
        own_address = probe.getsockname()[0]
    candidates = set(interfaces.values())
    if own_address in interfaces:
        candidates = {interfaces[own_address]}
    if len(candidates) != 1:
        raise LaunchError(
            f"this host's name leads to {host}, where other nodes do not reach it, and it has the interfaces "
            f"{', '.join(sorted(candidates)) or 'none'}: set GLOO_SOCKET_IFNAME to the one that leads to the other nodes"
        )
    os.environ["GLOO_SOCKET_IFNAME"] = candidates.pop()


def quiet_third_parties() -> None:
    """Drop the FutureWarnings that DeepSpeed raises at every ZeRO-3 hook (~74 a run), and its messages."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(deepspeed|torch)\b.*")
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"deepspeed\b.*")
    # A frozen embedding or a first layer gives backward hooks an input without gradient: harmless.
    warnings.filterwarnings(
        "ignore", message=r".*Full backward hook is firing when gradients are computed.*"
    )
    # Every rank has set its device before.
    warnings.filterwarnings(
        "ignore", message=r"barrier\(\): using the device under current context"
    )
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    logging.getLogger("DeepSpeed").addFilter(_not_about_skipped_steps)


def _not_about_skipped_steps(record: logging.LogRecord) -> bool:
    # optimizer_step reports the skip, with the model's name.
    return "OVERFLOW! Skipping step" not in record.getMessage()


# torch's names of the threads that release tensors after a collective and after a backward pass.
_TORCH_THREADS = ("pt_gloo_runloop", "pt_autograd")
TASKS = Path("/proc/self/task")


def wait_for_torch_threads(seconds: float = 10.0) -> bool:
    """Wait until torch's own threads are idle, as the last thing before Python ends; False if ``seconds`` pass first.

    gloo's thread releases a collective's tensors a moment after the caller has returned, and needs Python's lock for
    it. If Python ends meanwhile, the process aborts after all its work is done: "terminate called without an active
    exception". Destroying the group does not help: DeepSpeed's hooks keep it. Without /proc, threads get a moment.
    """
    deadline = time.monotonic() + seconds
    previous_threads = None
    while time.monotonic() <= deadline:
        time.sleep(0.03)  # releases the lock; a waiting thread asks for it every 5 ms
        current_threads = _torch_threads()
        if current_threads == previous_threads and all(
            state == "S" for state, *_ in current_threads.values()
        ):
            return True
        previous_threads = current_threads
    return False


def _torch_threads() -> dict[str, tuple[str, ...]]:
    """Return each torch thread's state (R, S, D, …) and how often it was taken off a core, by thread number.

    Torch 2.6 names none of gloo's: without a GPU, whose libraries have threads that wake for ever, any that is not
    Python's may be one, but for those that wait for sockets.
    """
    named_only = on_cuda()
    threads = {}
    unnamed_threads = {}
    python_threads = {str(thread.native_id) for thread in threading.enumerate()}
    for task in TASKS.iterdir() if TASKS.is_dir() else ():
        try:
            fields = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
            is_named = fields["Name"].strip().startswith(_TORCH_THREADS)
            if not is_named and (
                named_only or task.name in python_threads or "epoll" in (task / "wchan").read_text()
            ):
                continue
        except OSError:  # it has ended
            continue
        switches = (
            fields[f"{kind}_ctxt_switches"].strip() for kind in ("voluntary", "nonvoluntary")
        )
        (threads if is_named else unnamed_threads)[task.name] = (
            fields["State"].split()[0],
            *switches,
        )
    return threads or unnamed_threads
