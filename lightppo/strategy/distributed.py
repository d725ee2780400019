"""DistributedStrategy: being one rank among others, whatever shards the model."""

from __future__ import annotations

import atexit
import logging
import os
import random
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Sized
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Sampler

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


REDUCE_OPS = ("mean", "sum", "max", "min")


def all_reduce(data: Any, op: str, device: torch.device) -> Any:
    """Reduces over all ranks; every rank gets the result.

    Args:
        data: a tensor of one shape on all ranks, a float, an int or bool, or a dictionary of these with the same keys
            on all ranks. Scalars of a dictionary travel together, as float64.
        op: "mean", "sum", "max" or "min".
        device: where this rank's process group communicates.

    Returns:
        The same structure. A tensor keeps shape, device and dtype, except that the mean of integers is float32 and
        booleans count as int64. A float stays a float; an int stays one except under "mean".

    Raises:
        ValueError: unknown op.
        TypeError: a value that cannot be reduced.
    """
    if op not in REDUCE_OPS:
        raise ValueError(f"op must be one of {', '.join(REDUCE_OPS)}, got {op!r}")
    if isinstance(data, dict):
        # Sorted, so that ranks that filled their dictionaries in another order still agree.
        scalars = sorted(key for key, value in data.items() if not isinstance(value, torch.Tensor | dict))
        others = {key: all_reduce(data[key], op, device) for key in sorted(data.keys() - set(scalars))}
        reduced = dict(zip(scalars, _reduce_scalars([data[key] for key in scalars], op, device)))
        return {key: others[key] if key in others else reduced[key] for key in data}
    if isinstance(data, torch.Tensor):
        return _reduce_tensor(data, op, device)
    return _reduce_scalars([data], op, device)[0]


def _reduce_scalars(values: list[Any], op: str, device: torch.device) -> list[float | int]:
    for value in values:
        if not isinstance(value, bool | int | float):
            raise TypeError(f"all_reduce takes tensors, numbers and dictionaries of them, got {type(value).__name__}")
    if not values:
        return []
    reduced = _reduce_tensor(torch.tensor([float(value) for value in values], dtype=torch.float64), op, device)
    keep_int = op != "mean"
    return [
        int(new) if keep_int and isinstance(old, int) else new
        for old, new in zip(values, reduced.tolist(), strict=True)
    ]


def _reduce_tensor(tensor: torch.Tensor, op: str, device: torch.device) -> torch.Tensor:
    buffer = tensor.detach().to(device).clone()
    if buffer.dtype == torch.bool:
        buffer = buffer.to(torch.int64)
    if op == "mean":
        if not buffer.is_floating_point():
            buffer = buffer.float()
        buffer /= dist.get_world_size()
    dist.all_reduce(buffer, op={"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}.get(op, dist.ReduceOp.SUM))
    return buffer.to(tensor.device)


def all_gather(data: Any, device: torch.device) -> Any:
    """Gathers from all ranks; every rank gets the result.

    Args:
        data: a tensor, a number, or a dictionary of these with the same keys on all ranks. Tensors may differ in
            their first dimension, which may be 0.
        device: where this rank's process group communicates.

    Returns:
        Tensors concatenated along their first dimension in rank order, in their dtype; a number or 0-d tensor becomes
        (world size,), a float in float64.
    """
    if isinstance(data, dict):
        gathered = {key: all_gather(data[key], device) for key in sorted(data)}
        return {key: gathered[key] for key in data}
    precise = torch.float64 if isinstance(data, float) else None
    tensor = data.detach() if isinstance(data, torch.Tensor) else torch.tensor(data, dtype=precise)
    local = tensor.to(device)
    local = local.reshape(1) if local.dim() == 0 else local
    sizes = [int(size) for size in all_gather_object(local.shape[0])]
    padded = local.new_zeros((max(sizes), *local.shape[1:]))
    padded[: local.shape[0]] = local
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]).to(tensor.device)


def all_gather_object(obj: Any) -> list[Any]:
    """Any picklable object of every rank, in rank order."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, obj)
    return gathered


def broadcast_object(obj: Any, src: int = 0) -> Any:
    """Rank ``src``'s picklable object, on every rank."""
    holder = [obj]
    dist.broadcast_object_list(holder, src=src)
    return holder[0]


class RankSampler(Sampler[int]):
    """Indices of one rank: every ``num_replicas``-th of a seeded permutation of the dataset.

    All ranks get the same number, as collectives need it. Where the size does not divide, the epoch wraps around: up
    to ``num_replicas - 1`` samples come twice, and none is lost, unless ``drop_last``.

    Args:
        dataset: anything with a length.
        num_replicas: number of ranks.
        rank: this rank.
        shuffle: permute, differently every epoch; False keeps the order.
        seed: of the permutation; the same on all ranks.
        drop_last: leave the remainder out instead of wrapping around.
        consumed_samples: samples that all ranks together have already taken from the first epoch.

    Raises:
        ValueError: the dataset is empty, or smaller than the number of ranks with ``drop_last``.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int,
        rank: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        consumed_samples: int = 0,
    ) -> None:
        size = len(dataset)
        if size == 0:
            raise ValueError("the dataset is empty")
        if drop_last and size < num_replicas:
            raise ValueError(f"{size} samples on {num_replicas} ranks leave nothing with drop_last=True")
        self.dataset, self.num_replicas, self.rank = dataset, num_replicas, rank
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.samples_per_rank = size // num_replicas if drop_last else -(-size // num_replicas)
        if not drop_last and size % num_replicas:
            repeated = self.samples_per_rank * num_replicas - size
            logger.info("%d samples on %d ranks: %d come twice per epoch", size, num_replicas, repeated)
        self.epoch = 0
        self._skip = 0
        self.set_epoch(0, consumed_samples)

    def set_epoch(self, epoch: int, consumed_samples: int = 0) -> None:
        """Chooses the permutation and where in it to start.

        Args:
            epoch: number of the epoch.
            consumed_samples: samples of this epoch that all ranks together have already taken.

        Raises:
            ValueError: more were taken than the epoch holds.
        """
        skip = consumed_samples // self.num_replicas
        if skip > self.samples_per_rank:
            total = self.samples_per_rank * self.num_replicas
            raise ValueError(f"consumed_samples={consumed_samples} is more than one epoch of {total} samples")
        self.epoch, self._skip = epoch, skip

    def __iter__(self) -> Iterator[int]:
        size = len(self.dataset)
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(size, generator=generator).tolist()
        else:
            order = list(range(size))
        total = self.samples_per_rank * self.num_replicas
        order = (order * -(-total // size))[:total]
        return iter(order[self.rank : total : self.num_replicas][self._skip :])

    def __len__(self) -> int:
        return self.samples_per_rank - self._skip


class DistributedStrategy:
    """Process group, seeds, collectives, each rank's share of the data, and messages from rank 0.

    Args:
        seed: of Python, NumPy and torch on every rank, and of samplers.
        full_determinism: deterministic kernels only, slower; an operation that has none raises.
        timeout_minutes: a collective that takes longer ends the job.
    """

    def __init__(self, seed: int = 42, full_determinism: bool = False, timeout_minutes: float = 30) -> None:
        self.seed = seed
        self.full_determinism = full_determinism
        self.timeout_minutes = timeout_minutes
        self.device = torch.device("cpu")

    # -- processes -----------------------------------------------------------------------------------------------

    def setup_distributed(self, timeout: timedelta | None = None) -> None:
        """Seeds, joins the process group (gloo or nccl) and picks this rank's device. Collective.

        Args:
            timeout: longest wait for a collective; None is ``timeout_minutes``.
        """
        self.set_seed(self.seed)
        self.device = init_process_group(timeout or timedelta(minutes=self.timeout_minutes))

    def set_seed(self, seed: int) -> None:
        """Seeds Python, NumPy and torch, alike on every rank."""
        import numpy

        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        if self.full_determinism:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
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
        """A dataloader that gives this rank its share.

        Args:
            dataset: map-style.
            batch_size: samples per rank and batch.
            pin_memory: page-locked batches; without a GPU there is nothing to lock for.
            shuffle: seeded, differently every epoch (``dataloader.sampler.set_epoch``).
            collate_fn: list of samples → batch; ``None``: the ``collate_fn`` of the dataset, where it has one.
            drop_last: leave out what does not fill every rank's batch; else the last batch is smaller.
            sampler: in place of the built-in ``RankSampler``; then ``shuffle`` and ``consumed_samples`` are its own.
            consumed_samples: samples that all ranks together have taken already.
        """
        if sampler is None:
            sampler = RankSampler(
                dataset,
                self.world_size,
                self.get_rank(),
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
            generator=torch.Generator(),  # of its own: beginning an epoch draws no number of the global one
            pin_memory=pin_memory and on_cuda(),
        )

    # -- communication -------------------------------------------------------------------------------------------

    def all_reduce(self, data: Any, op: str = "mean") -> Any:
        """Reduces tensors, numbers or dictionaries of them. Collective. See ``collectives.all_reduce``."""
        return all_reduce(data, op, self.device)

    def all_gather(self, data: Any) -> Any:
        """Concatenates tensors, numbers or dictionaries of them. Collective. See ``collectives.all_gather``."""
        return all_gather(data, self.device)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Any picklable object of every rank, in rank order. Collective."""
        return all_gather_object(obj)

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Rank ``src``'s picklable object on every rank. Collective."""
        return broadcast_object(obj, src)

    def same_count(self, n: int) -> int:
        """The largest ``n`` of all ranks: how often everybody has to run a collective. Collective."""
        return self.all_reduce(int(n), op="max")

    def barrier(self) -> None:
        """Waits for all ranks. Collective."""
        dist.barrier()

    def print(self, *msg: Any) -> None:
        """Prints on rank 0."""
        if self.is_rank_0():
            print(*msg, flush=True)

    def report_memory(self, prefix: str) -> dict[str, float]:
        """Memory of this process in GiB, printed on rank 0: allocated and peak on a GPU, resident on a CPU.

        Args:
            prefix: what has just happened.
        """
        if self.device.type == "cuda":
            memory = {
                "allocated": torch.cuda.memory_allocated(self.device) / 2**30,
                "peak": torch.cuda.max_memory_allocated(self.device) / 2**30,
            }
        else:
            import psutil

            memory = {"resident": psutil.Process().memory_info().rss / 2**30}
        self.print(f"{prefix}: " + ", ".join(f"{name} {value:.2f} GiB" for name, value in memory.items()))
        return memory
