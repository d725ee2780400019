"""DistributedStrategy: one rank among others, however models are sharded: process group, collectives, data shares.

Ranks meet by a launcher's variables, over an interface that leads to the others, and end quietly.
"""

from __future__ import annotations

import atexit
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
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, Sampler
from tqdm import tqdm

from lightppo.distributed.device import (
    check_type,
    import_deepspeed,
    name_accelerator,
    on_cuda,
    share_host,
)
from lightppo.distributed.sequence_parallel import DataParallelRanks, SequenceGroup
from lightppo.errors import LaunchError, UserError
from lightppo.ranks import Ranks, heartbeat, ranks_on_node
from lightppo.redaction import without_secrets

logger = logging.getLogger(__name__)

T = TypeVar("T")
REDUCE_OPS = {
    "mean": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
GATHERED_BYTES = 1 << 20
"""Of each rank, on the device at a time."""

# -- a rank's share of the data -----------------------------------------------------------------------------------------


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
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        dataset_size = len(dataset)
        if dataset_size < (self.num_replicas if drop_last else 1):
            raise ValueError(
                f"{dataset_size} samples on {self.num_replicas} ranks leave nothing with drop_last={drop_last}"
            )
        if self.total_size > dataset_size:
            repeated_count = self.total_size - dataset_size
            logger.info(
                "%d samples on %d ranks: %d come twice per epoch",
                dataset_size,
                num_replicas,
                repeated_count,
            )
        self.set_epoch(0, consumed_samples)

    def set_epoch(self, epoch: int, consumed_samples: int = 0) -> None:
        """Choose the permutation, and its start: ``consumed_samples`` counts what all ranks have taken of it."""
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


# -- the ranks meet, and end quietly ----------------------------------------------------------------------------------


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


# -- ranks -------------------------------------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class DistributedStrategy(Ranks):
    """The ranks of a run, as in :class:`lightppo.ranks.Ranks`."""

    seed: int = 42  # of Python, NumPy and torch on every rank, and of samplers
    # slower; nondeterministic operations raise
    full_determinism: bool = field(default=False, kw_only=True)
    timeout_minutes: float = field(default=30, kw_only=True)  # a longer collective ends the job
    sequence_parallel_size: int = field(default=1, kw_only=True)  # ranks that hold a row together
    device: torch.device = field(default=torch.device("cpu"), init=False)

    # -- processes -----------------------------------------------------------------------------------------------

    def setup_distributed(self, timeout: timedelta | None = None) -> None:
        """Seed, join the process group (nccl on CUDA, gloo on CPU) and pick this rank's device. Collective."""
        self.set_seed(self.seed)
        name_accelerator()
        deepspeed = import_deepspeed()
        # After the import, which takes seconds: the port that it picks must still be free later.
        ensure_launcher_variables()
        if timeout is not None:
            self.timeout_minutes = timeout.total_seconds() / 60
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
            # Private hook of DeepSpeed 0.19; the plain gloo collectives take over. It is set, not read: DeepSpeed
            # would run a C compiler to find out which other ops could be built.
            deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
        with join_ranks(self):
            timeout = timedelta(minutes=self.timeout_minutes)
            deepspeed.init_distributed(timeout=timeout, verbose=False)
        check_type(self)
        share_host()
        if self.sequence_parallel_size > 1:
            self.sequence_group = SequenceGroup.of_rank(self.sequence_parallel_size, timeout)
            self.together = self.sequence_group

    def set_seed(self, seed: int) -> None:
        """Seed Python, NumPy and torch, alike on every rank."""
        import numpy

        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        if self.full_determinism:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
            # transformers passes this on to flash-attn.
            os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False

    @property
    def world_size(self) -> int:
        """Return the number of ranks; 1 before ``setup_distributed``."""
        return dist.get_world_size() if dist.is_initialized() else 1

    @property
    def data_parallel(self) -> Ranks:
        """Return those that train on different rows: sequence groups, or the ranks themselves."""
        if self.sequence_group is None:
            return self
        return DataParallelRanks(self, self.sequence_group.size)

    def get_rank(self) -> int:
        """Return this rank; 0 before ``setup_distributed``."""
        return dist.get_rank() if dist.is_initialized() else 0

    # -- communication -------------------------------------------------------------------------------------------

    def all_reduce(self, data: Any, op: str = "mean") -> Any:
        """Return mean, sum, max or min of a tensor, a number, or a dictionary of these over all ranks. Collective.

        Shapes and keys must be the same on all ranks. Tensors keep shape, device and dtype, but the mean of integers is
        float32 and booleans count as int64. Numbers travel as float64; an int stays an int except under "mean".
        """
        if op not in REDUCE_OPS:
            raise ValueError(f"op must be one of {', '.join(REDUCE_OPS)}, got {op!r}")
        if isinstance(data, torch.Tensor):
            return self._reduce(data, op)
        if isinstance(data, int | float):
            return self.all_reduce({"": data}, op)[""]
        if not isinstance(data, dict):
            raise TypeError(
                f"all_reduce takes tensors, numbers and dictionaries of them, got {type(data).__name__}"
            )
        # Sorted, because ranks may have filled their dictionaries in different orders.
        numbers = [key for key in sorted(data) if isinstance(data[key], int | float)]
        reduced = {key: self.all_reduce(data[key], op) for key in sorted(data.keys() - {*numbers})}
        if numbers:
            number_row = torch.tensor([float(data[key]) for key in numbers], dtype=torch.float64)
            reduced |= zip(numbers, self._reduce(number_row, op).tolist())
        integer_keys = {key for key in numbers if isinstance(data[key], int) and op != "mean"}
        return {key: int(reduced[key]) if key in integer_keys else reduced[key] for key in data}

    def _reduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        buffer = tensor.detach().to(self.device, copy=True)
        if op == "mean":
            buffer = buffer / dist.get_world_size()
        elif buffer.dtype == torch.bool:
            buffer = buffer.to(torch.int64)
        dist.all_reduce(buffer, op=REDUCE_OPS[op])
        heartbeat.beat()
        return buffer.to(tensor.device)

    def all_gather(self, data: Any) -> Any:
        """Gather tensors, numbers, or dictionaries of these (same keys everywhere) in rank order. Collective.

        Tensors are concatenated along their first dimension, whose size may differ or be 0, in their dtype. A number or
        0-d tensor becomes (world size,), a float in float64. A slice at a time passes through the device.
        """
        if isinstance(data, dict):
            gathered = {key: self.all_gather(data[key]) for key in sorted(data)}
            return {key: gathered[key] for key in data}
        precise = torch.float64 if isinstance(data, float) else None
        if isinstance(data, torch.Tensor):
            tensor = data.detach()
        else:
            tensor = torch.tensor(data, dtype=precise)
        local_rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
        sizes = self._each(torch.tensor([len(local_rows)], device=self.device)).flatten().tolist()
        gathered_rows = local_rows.new_empty((sum(sizes), *(row_shape := local_rows.shape[1:])))
        rows_at_a_time = max(
            1, GATHERED_BYTES // max(1, local_rows.element_size() * math.prod(row_shape))
        )
        for start in range(0, max(sizes), rows_at_a_time):
            own_rows = local_rows[start : start + rows_at_a_time]
            padded_rows = local_rows.new_zeros(
                (min(rows_at_a_time, max(sizes) - start), *row_shape), device=self.device
            )
            padded_rows[: len(own_rows)] = own_rows
            for rows_of_rank, gathered_of_rank in zip(
                self._each(padded_rows), gathered_rows.split(sizes)
            ):
                gathered_of_rank[start : start + rows_at_a_time] = rows_of_rank[
                    : max(0, len(gathered_of_rank) - start)
                ]
        return gathered_rows

    def _each(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gather from every rank, where all have one shape. (ranks, …)"""
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor)
        heartbeat.beat()
        return torch.stack(parts)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Gather a picklable object from every rank, in rank order. Collective."""
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, obj)
        heartbeat.beat()
        return gathered

    def gather_object(self, obj: Any) -> list[Any] | None:
        """Gather a picklable object from every rank, in rank order, on rank 0; ``None`` on the others. Collective."""
        gathered = self.exchange_objects({0: obj})  # a gather pads to the longest
        return gathered if self.is_rank_0() else None

    def exchange_objects(self, parts: Mapping[int, Any]) -> list[Any]:
        """Send each rank (a key) its own picklable object; return what came here, in the senders' order. Collective."""
        ranks = range(dist.get_world_size())
        pickled_parts = [pickle.dumps(parts[rank]) if rank in parts else b"" for rank in ranks]
        sizes = torch.tensor([len(pickled) for pickled in pickled_parts], device=self.device)
        received_sizes = torch.empty_like(sizes)
        dist.all_to_all_single(received_sizes, sizes)
        # torch makes no tensor of no bytes
        data = torch.frombuffer(bytearray(b"".join(pickled_parts) + b"."), dtype=torch.uint8)
        outgoing_bytes = data[:-1].to(self.device)
        received_bytes = outgoing_bytes.new_empty(int(received_sizes.sum()))
        dist.all_to_all_single(
            received_bytes, outgoing_bytes, received_sizes.tolist(), sizes.tolist()
        )
        heartbeat.beat()
        parts_of_ranks = received_bytes.cpu().split(received_sizes.tolist())
        return [pickle.loads(pickled.numpy()) for pickled in parts_of_ranks if len(pickled)]

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Return rank ``src``'s picklable object on every rank. Collective."""
        holder = [obj]
        dist.broadcast_object_list(holder, src=src)
        heartbeat.beat()
        return holder[0]

    def same_count(self, count: int) -> int:
        """Return the largest count of all ranks: how often every rank has to run a collective. Collective."""
        return self.all_reduce(int(count), op="max")

    def on_rank_0(self, action: Callable[[], T], what: str) -> T:
        """Return what ``action`` returns on rank 0, on every rank, or its failure. Collective.

        Errors for users stay what they are, any other is a RuntimeError.
        """
        result = own_error = message = None
        if self.is_rank_0():
            try:
                result = action()
            except UserError as user_error:
                message = own_error = user_error
            except Exception as exception:
                own_error = exception
                message = "".join(traceback.format_exception_only(own_error)).strip()
        message, result = self.broadcast_object((message, result))
        if isinstance(message, UserError):
            raise own_error or message
        if message is not None:
            raise RuntimeError(f"rank 0 could not {what}: {message}") from own_error
        return result

    def barrier(self) -> None:
        """Wait for all ranks. Collective."""
        dist.barrier()

    def print(self, *msg: Any) -> None:
        """Print on rank 0, above progress bars."""
        if self.is_rank_0():
            with tqdm.external_write_mode():
                print(*(without_secrets(str(part)) for part in msg), flush=True)

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
        """Make a dataloader for this rank's share of a map-style dataset; ``batch_size`` is per rank.

        The order is seeded and differs every epoch (``dataloader.sampler.set_epoch``). ``consumed_samples`` counts the
        samples that all ranks have already taken. ``sampler`` replaces ``RankSampler``; ``collate_fn`` defaults to the
        dataset's own.
        """
        if sampler is None:
            ranks = self.data_parallel
            sampler = RankSampler(
                dataset,
                ranks.world_size,
                ranks.get_rank(),
                shuffle=shuffle,
                seed=self.seed,
                drop_last=drop_last,
                consumed_samples=consumed_samples,
            )
        return DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            drop_last=drop_last,
            collate_fn=collate_fn or getattr(dataset, "collate_fn", None),
            # A generator of its own, so that starting an epoch does not draw from the global one.
            generator=torch.Generator(),
            pin_memory=pin_memory and on_cuda(),
        )
