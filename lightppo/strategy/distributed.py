"""DistributedStrategy: one rank among others, however models are sharded: process group, collectives, data shares."""

from __future__ import annotations

import atexit
import ctypes
import logging
import math
import os
import pickle
import random
import socket
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, Sampler
from tqdm import tqdm

from lightppo.errors import LaunchError, UserError
from lightppo.ranks import heartbeat, ranks_on_node
from lightppo.shown import without_secrets

logger = logging.getLogger(__name__)

REDUCE_OPS = ("mean", "sum", "max", "min")
GATHERED_BYTES = 1 << 20
"""Of each rank, on the device at a time."""

# -- starting and ending a process -------------------------------------------------------------------------------------

_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def ensure_launcher_variables() -> None:
    """Makes a plain ``python script.py`` a world of one process; LaunchError if a launcher set only some variables."""
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
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.bind(("127.0.0.1", 0))  # a port that is free now
        os.environ["MASTER_PORT"] = str(sock.getsockname()[1])


def choose_gloo_interface() -> None:
    """Lets nodes reach each other where a host's own name leads to 127.0.1.1, as Debian has it: gloo listens there.

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
    all_addresses = [
        (a.address, name)
        for name, of in psutil.net_if_addrs().items()
        for a in of
        if a.family == socket.AF_INET
    ]
    interfaces = {
        address: name for address, name in all_addresses if not address.startswith("127.")
    }
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))  # sends nothing
        own = sock.getsockname()[0]
    found = {interfaces[own]} if own in interfaces else set(interfaces.values())
    if len(found) != 1:
        raise LaunchError(
            f"this host's name leads to {host}, where other nodes do not reach it, and it has the interfaces "
            f"{', '.join(sorted(found)) or 'none'}: set GLOO_SOCKET_IFNAME to the one that leads to the other nodes"
        )
    os.environ["GLOO_SOCKET_IFNAME"] = found.pop()


def share_cores(collectives_on_cpu: bool) -> None:
    """A rank's operators take its share of the host's cores, unless OMP_NUM_THREADS says how many. Collective.

    On a GPU machine these are the optimizer steps of ``--adam_offload``.

    With ``collectives_on_cpu`` each of gloo's two threads takes one: the copies of its gathers would begin an OpenMP
    team beside the rank's own, and where a process has more of OpenMP's threads than cores, they sleep at the end of
    each operator instead of waiting for microseconds. A step takes 1.6 times as long then (docs/performance.md).
    """
    threads = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, min(threads, len(os.sched_getaffinity(0)) // ranks_on_node(1)))
    if collectives_on_cpu:
        torch.set_num_threads(1)  # a thread keeps what it finds at its first large copy
        ranks = dist.get_world_size()
        # four gathers that last long enough to keep both busy
        own = torch.zeros(max(1 << 16, (1 << 20) // ranks))
        copies = [list(own.new_empty(ranks, len(own))) for _ in range(4)]
        for work in [dist.all_gather(of_ranks, own, async_op=True) for of_ranks in copies]:
            work.wait()
    torch.set_num_threads(threads)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def keep_freed_memory() -> None:
    """Lets glibc keep up to a GiB that tensors have freed; by default it goes back to the system from 64 MiB on.

    Each micro batch would get its pages from the system anew: 165,000 in a small model's step, 5% of its time.
    Variables of the user's own (MALLOC_…, GLIBC_TUNABLES) stand; other libraries for memory have no such function.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(
        name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ
    ):
        return
    # 32 MiB: its highest value
    for parameter, size in ((_M_TRIM_THRESHOLD, 1 << 30), (_M_MMAP_THRESHOLD, 32 << 20)):
        mallopt(parameter, size)


def on_cuda() -> bool:
    """True if engines run on GPUs: there is one, and DS_ACCELERATOR (DeepSpeed's own switch) does not say cpu."""
    return torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR", "cuda") == "cuda"


def name_accelerator() -> None:
    """Tells DeepSpeed what it runs on; otherwise it warns on every machine without a GPU."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if on_cuda() else "cpu")


def _quiet_third_parties() -> None:
    """Drops the FutureWarnings that DeepSpeed raises at every ZeRO-3 hook (~74 a run), and its messages."""
    name_accelerator()
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
    logging.getLogger("DeepSpeed").addFilter(_not_about_skipped_steps)


def _not_about_skipped_steps(record: logging.LogRecord) -> bool:
    # optimizer_step reports it with the model's name
    return "OVERFLOW! Skipping step" not in record.getMessage()


# torch's names of the threads that release tensors after a collective and after a backward pass.
_TORCH_THREADS = ("pt_gloo_runloop", "pt_autograd")
TASKS = Path("/proc/self/task")


def wait_for_torch_threads(seconds: float = 10.0) -> bool:
    """Waits until torch's own threads are idle, as the last thing before Python ends; False if ``seconds`` pass first.

    gloo's thread releases a collective's tensors a moment after the caller has returned, and needs Python's lock for
    it. If Python ends meanwhile, the process aborts after all its work is done: "terminate called without an active
    exception". Destroying the group does not help: DeepSpeed's hooks keep it. Without /proc, threads get a moment.
    """
    deadline, before = time.monotonic() + seconds, None
    while time.monotonic() <= deadline:
        time.sleep(0.03)  # releases the lock; a waiting thread asks for it every 5 ms
        now = _torch_threads()
        if now == before and all(state == "S" for state, *_ in now.values()):
            return True
        before = now
    return False


def _torch_threads() -> dict[str, tuple[str, ...]]:
    """Each torch thread's state (R, S, D, …) and how often it was taken off a core, by thread number.

    Torch 2.6 names none of gloo's: without a GPU, whose libraries have threads that wake for ever, any that is not
    Python's may be one, but for those that wait for sockets.
    """
    named_only = on_cuda()
    threads, unnamed, python = {}, {}, {str(thread.native_id) for thread in threading.enumerate()}
    for task in TASKS.iterdir() if TASKS.is_dir() else ():
        try:
            fields = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
            named = fields["Name"].strip().startswith(_TORCH_THREADS)
            if not named and (
                named_only or task.name in python or "epoll" in (task / "wchan").read_text()
            ):
                continue
        except OSError:  # it has ended
            continue
        switches = (
            fields[f"{kind}_ctxt_switches"].strip() for kind in ("voluntary", "nonvoluntary")
        )
        (threads if named else unnamed)[task.name] = (fields["State"].split()[0], *switches)
    return threads or unnamed


# -- ranks -------------------------------------------------------------------------------------------------------------


class RankSampler(DistributedSampler):
    """torch's sampler of one rank's share of a seeded permutation, which can also start in the middle of an epoch.

    All ranks get equally many samples, as collectives require: up to ``num_replicas - 1`` samples come twice per epoch,
    or are left out with ``drop_last``. Without ``num_replicas`` and ``rank`` they are those of the process group.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        consumed_samples: int = 0,
    ) -> None:
        num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        rank = dist.get_rank() if rank is None else rank
        size = len(dataset)
        if size < (num_replicas if drop_last else 1):
            raise ValueError(
                f"{size} samples on {num_replicas} ranks leave nothing with drop_last={drop_last}"
            )
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        if self.total_size > size:
            twice = self.total_size - size
            logger.info(
                "%d samples on %d ranks: %d come twice per epoch", size, num_replicas, twice
            )
        self.set_epoch(0, consumed_samples)

    def set_epoch(self, epoch: int, consumed_samples: int = 0) -> None:
        """Chooses the permutation, and its start: ``consumed_samples`` counts what all ranks have taken of it."""
        self._skip = consumed_samples // self.num_replicas
        if self._skip > self.num_samples:
            raise ValueError(
                f"consumed_samples={consumed_samples} is more than one epoch of {self.total_size} samples"
            )
        super().set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        return islice(super().__iter__(), self._skip, None)

    def __len__(self) -> int:
        return self.num_samples - self._skip


@dataclass(eq=False, repr=False)
class DistributedStrategy:
    """The ranks of a run, as in :class:`lightppo.ranks.Ranks`."""

    seed: int = 42  # of Python, NumPy and torch on every rank, and of samplers
    # slower; nondeterministic operations raise
    full_determinism: bool = field(default=False, kw_only=True)
    timeout_minutes: float = field(default=30, kw_only=True)  # a longer collective ends the job
    device: torch.device = field(default=torch.device("cpu"), init=False)

    # -- processes -----------------------------------------------------------------------------------------------

    def setup_distributed(self, timeout: timedelta | None = None) -> None:
        """Seeds, joins the process group (nccl on CUDA, gloo on CPU) and picks this rank's device. Collective."""
        self.set_seed(self.seed)
        _quiet_third_parties()
        import deepspeed

        # after the import, which takes seconds: the port must still be free
        ensure_launcher_variables()
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        if on_cuda():
            local_rank = int(os.environ["LOCAL_RANK"])
            if local_rank >= (count := torch.cuda.device_count()):
                raise LaunchError(
                    f"local rank {local_rank} has no GPU: this node shows {count}; start fewer processes (--num_gpus) "
                    "or check CUDA_VISIBLE_DEVICES"
                )
            self.device = torch.device("cuda", local_rank)
            torch.cuda.set_device(self.device)
        else:
            self.device = torch.device("cpu")
            # Joining gloo would compile this op for minutes, under a lock that a killed process leaves behind.
            # Private hook of DeepSpeed 0.19; the plain gloo collectives take over.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        try:
            choose_gloo_interface()
        except LaunchError as error:
            if not on_cuda():
                raise
            logger.warning("%s; NCCL does not need it, vLLM in the training processes does", error)
        try:
            timeout = timeout or timedelta(minutes=self.timeout_minutes)
            deepspeed.init_distributed(timeout=timeout, verbose=False)
            seconds = timeout.total_seconds()
            # before the collectives' own errors
            heartbeat.limit = seconds - min(60.0, seconds / 10)
            share_cores(collectives_on_cpu=not on_cuda())
            if not on_cuda():
                keep_freed_memory()
        except RuntimeError as error:  # of older torch; a DistNetworkError of newer
            if "EADDRINUSE" not in str(error):
                raise
            raise LaunchError(
                f"port {os.environ['MASTER_PORT']} is in use, by another run perhaps: choose one with --master_port, "
                "before the script's name"
            ) from error
        atexit.unregister(wait_for_torch_threads)  # a process may join a second group
        atexit.register(wait_for_torch_threads)

    def set_seed(self, seed: int) -> None:
        """Seeds Python, NumPy and torch, alike on every rank."""
        import numpy

        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        if self.full_determinism:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
            # transformers tells flash-attn
            os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False

    @property
    def world_size(self) -> int:
        """Number of ranks; 1 before ``setup_distributed``."""
        return dist.get_world_size() if dist.is_initialized() else 1

    def get_rank(self) -> int:
        """This rank; 0 before ``setup_distributed``."""
        return dist.get_rank() if dist.is_initialized() else 0

    def is_rank_0(self) -> bool:
        """True on the rank that prints, logs and writes."""
        return self.get_rank() == 0

    def setup_dataloader(
        self,
        dataset: Any,
        batch_size: int,
        pin_memory: bool = False,
        shuffle: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        sampler: Sampler | None = None,
        consumed_samples: int = 0,
    ) -> DataLoader:
        """A dataloader for this rank's share of a map-style dataset; ``batch_size`` is per rank.

        The order is seeded and differs every epoch (``dataloader.sampler.set_epoch``). ``consumed_samples`` counts the
        samples that all ranks have already taken. ``sampler`` replaces ``RankSampler``; ``collate_fn`` defaults to the
        dataset's own.
        """
        if sampler is None:
            ranks, order = (
                (self.world_size, self.get_rank()),
                {"shuffle": shuffle, "seed": self.seed},
            )
            sampler = RankSampler(
                dataset, *ranks, **order, drop_last=drop_last, consumed_samples=consumed_samples
            )
        return DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            drop_last=drop_last,
            collate_fn=collate_fn or getattr(dataset, "collate_fn", None),
            # its own, so that starting an epoch does not draw from the global one
            generator=torch.Generator(),
            pin_memory=pin_memory and on_cuda(),
        )

    # -- communication -------------------------------------------------------------------------------------------

    def all_reduce(self, data: Any, op: str = "mean") -> Any:
        """Mean, sum, max or min of a tensor, a number, or a dictionary of these over all ranks. Collective.

        Shapes and keys must be the same on all ranks. Tensors keep shape, device and dtype, but the mean of integers is
        float32 and booleans count as int64. Numbers travel as float64; an int stays an int except under "mean".
        """
        if op not in REDUCE_OPS:
            raise ValueError(f"op must be one of {', '.join(REDUCE_OPS)}, got {op!r}")
        if isinstance(data, torch.Tensor):
            return self._reduce(data, op)
        if not isinstance(data, dict):
            return self.all_reduce({"": data}, op)[""]
        # Sorted, because ranks may have filled their dictionaries in different orders.
        scalars = sorted(
            key for key, value in data.items() if not isinstance(value, torch.Tensor | dict)
        )
        reduced = {
            key: self.all_reduce(data[key], op) for key in sorted(data.keys() - set(scalars))
        }
        for kind in {type(data[key]) for key in scalars}:
            if not issubclass(kind, bool | int | float):
                raise TypeError(
                    f"all_reduce takes tensors, numbers and dictionaries of them, got {kind.__name__}"
                )
        if scalars:
            numbers = torch.tensor([float(data[key]) for key in scalars], dtype=torch.float64)
            for key, number in zip(scalars, self._reduce(numbers, op).tolist(), strict=True):
                reduced[key] = (
                    int(number) if op != "mean" and isinstance(data[key], int) else number
                )
        return {key: reduced[key] for key in data}

    def _reduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        buffer = tensor.detach().to(self.device).clone()
        if buffer.dtype == torch.bool:
            buffer = buffer.to(torch.int64)
        if op == "mean":
            if not buffer.is_floating_point():
                buffer = buffer.float()
            buffer /= dist.get_world_size()
        dist.all_reduce(
            buffer,
            op={"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}.get(op, dist.ReduceOp.SUM),
        )
        heartbeat.beat()
        return buffer.to(tensor.device)

    def all_gather(self, data: Any) -> Any:
        """Gathers tensors, numbers, or dictionaries of these (same keys everywhere) in rank order. Collective.

        Tensors are concatenated along their first dimension, whose size may differ or be 0, in their dtype. A number or
        0-d tensor becomes (world size,), a float in float64. A slice at a time passes through the device.
        """
        if isinstance(data, dict):
            gathered = {key: self.all_gather(data[key]) for key in sorted(data)}
            return {key: gathered[key] for key in data}
        precise = torch.float64 if isinstance(data, float) else None
        tensor = (
            data.detach() if isinstance(data, torch.Tensor) else torch.tensor(data, dtype=precise)
        )
        local = tensor.reshape(1) if tensor.dim() == 0 else tensor
        sizes = self._each(torch.tensor([len(local)], device=self.device)).flatten().tolist()
        everything = local.new_empty((sum(sizes), *(row := local.shape[1:])))
        rows = max(1, GATHERED_BYTES // max(1, local.element_size() * math.prod(row)))
        for start in range(0, max(sizes), rows):
            own = local[start : start + rows]
            padded = local.new_zeros((min(rows, max(sizes) - start), *row), device=self.device)
            padded[: len(own)] = own
            for part, of_rank in zip(self._each(padded), everything.split(sizes)):
                of_rank[start : start + rows] = part[: max(0, len(of_rank) - start)]
        return everything

    def _each(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of every rank, where all have one shape. (ranks, …)"""
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor)
        heartbeat.beat()
        return torch.stack(parts)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """A picklable object from every rank, in rank order. Collective."""
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, obj)
        heartbeat.beat()
        return gathered

    def gather_object(self, obj: Any) -> list[Any] | None:
        """A picklable object from every rank, in rank order, on rank 0; ``None`` on the others. Collective."""
        gathered = self.exchange_objects({0: obj})  # a gather pads to the longest
        return gathered if self.is_rank_0() else None

    def exchange_objects(self, parts: Mapping[int, Any]) -> list[Any]:
        """Sends each rank (a key) its own picklable object; what came here, in the senders' order. Collective."""
        sent = [
            pickle.dumps(parts[rank]) if rank in parts else b""
            for rank in range(dist.get_world_size())
        ]
        sizes = torch.tensor([len(part) for part in sent], device=self.device)
        dist.all_to_all_single(coming := torch.empty_like(sizes), sizes)
        own = torch.frombuffer(bytearray(b"".join((*sent, b"."))), dtype=torch.uint8)[:-1].to(
            self.device
        )
        found = own.new_empty(int(coming.sum()))
        dist.all_to_all_single(found, own, coming.tolist(), sizes.tolist())
        heartbeat.beat()
        return [
            pickle.loads(part.numpy()) for part in found.cpu().split(coming.tolist()) if len(part)
        ]

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Rank ``src``'s picklable object on every rank. Collective."""
        holder = [obj]
        dist.broadcast_object_list(holder, src=src)
        heartbeat.beat()
        return holder[0]

    def same_count(self, count: int) -> int:
        """The largest count of all ranks: how often every rank has to run a collective. Collective."""
        return self.all_reduce(int(count), op="max")

    def on_rank_0(self, action: Callable[[], Any], what: str) -> None:
        """Runs ``action`` on rank 0 while the others wait; its failure is raised on every rank. Collective.

        Errors for users stay what they are, any other is a RuntimeError.
        """
        error: Exception | None = None
        if dist.get_rank() == 0:
            try:
                action()
            except Exception as exception:
                error = exception
        told: Any = error
        if error is not None and not isinstance(error, UserError):
            told = "".join(traceback.format_exception_only(error)).strip()
        told = self.broadcast_object(told)
        if isinstance(told, UserError):
            raise error or told
        if told is not None:
            raise RuntimeError(f"rank 0 could not {what}: {told}") from error

    def barrier(self) -> None:
        """Waits for all ranks. Collective."""
        dist.barrier()

    def print(self, *msg: Any) -> None:
        """Prints on rank 0, above progress bars."""
        if self.is_rank_0():
            with tqdm.external_write_mode():
                print(*(without_secrets(str(part)) for part in msg), flush=True)

    def report_memory(self, prefix: str) -> dict[str, float]:
        """Memory of this process in GiB, printed on rank 0: allocated and peak on a GPU, resident on a CPU."""
        if self.device.type == "cuda":
            of = {"allocated": torch.cuda.memory_allocated, "peak": torch.cuda.max_memory_allocated}
            memory = {name: measure(self.device) / 2**30 for name, measure in of.items()}
        else:
            import psutil

            memory = {"resident": psutil.Process().memory_info().rss / 2**30}
        self.print(
            f"{prefix}: " + ", ".join(f"{name} {value:.2f} GiB" for name, value in memory.items())
        )
        return memory
