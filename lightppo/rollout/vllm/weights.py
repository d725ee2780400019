"""The actor's weights as its checkpoint has them, and how they travel to vLLM servers: by files, gloo or NCCL."""

from __future__ import annotations

import base64
import hashlib
import hmac
import importlib.util
import itertools
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
import torch
from torch import Tensor, distributed, nn

from lightppo.errors import RolloutError
from lightppo.rollout.vllm.versions import nccl_communicator
from lightppo.user_code import in_daemon_thread
from lightppo.zero3 import (
    find_adapters,
    find_engine,
    find_hf_model,
    find_whole,
    full_shape,
    zero_stage_of,
)

if TYPE_CHECKING:
    from lightppo.config.options import EngineConfig

GATHERED_NUMEL = 1 << 26
"""Parameters that are gathered together under ZeRO-3; one module's are never parted."""
BUCKET_BYTES = 256 << 20
"""Weights that travel together, one tensor at least. Two buckets are held at a time."""
SHARED_MEMORY = Path("/dev/shm")
PROTOCOL = 8
"""Raised whenever trainer and servers have to be of the same version of lightppo."""

Bucket = list[tuple[str, Tensor]]
T = TypeVar("T")

_FOLDER = "lightppo-weights-"
_STALE_SECONDS = 3600.0  # longer than any push; a process that we cannot see may be at it
_CONNECT_SECONDS = 30.0
# Of compared weights, relative to their size: an engine in bf16 rounds each of its outputs by up to 2⁻⁹ of it, and an
# output may be 5 times as large as most; products are summed in another order, too.
_TOLERANCES = {"float32": 1e-2, "float16": 1e-2, "bfloat16": 4e-2}


@torch.no_grad()
def full_weights(actor: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield names and whole tensors of the actor's checkpoint, as ``save_pretrained`` has them. Collective.

    All ranks must iterate together and to the end: under ZeRO-3 they gather together. Tied weights come under each of
    their names. Below ZeRO-3 the tensors are the actor's own and change with the next optimizer step. LoRA adapters are
    merged into new tensors; the frozen weights stay as they are.
    """
    adapters = find_adapters(find_hf_model(actor)[0])
    yield from _weights(actor, adapters, None if adapters is None else adapters.merged)


@torch.no_grad()
def frozen_weights(actor: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield as :func:`full_weights`, without the adapters: what an engine needs once, beside adapters. Collective."""
    adapters = find_adapters(find_hf_model(actor)[0])
    yield from _weights(actor, adapters, adapters.frozen)


@torch.no_grad()
def adapter_weights(actor: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield names and whole tensors of the actor's adapters, by ``LoraExport.alone``. Collective."""
    model, _ = find_hf_model(actor)
    sharded = zero_stage_of(find_engine(actor)) == 3
    adapters = find_adapters(model)
    adapter_tensors = [
        (name, tensor)
        for name, tensor in model.state_dict(keep_vars=True).items()
        if adapters.is_adapter_weight(name)
    ]
    for group in _grouped(
        adapter_tensors, lambda pair: full_shape(pair[1]).numel(), GATHERED_NUMEL
    ):
        tensors = dict(group)
        whole_tensors = _gathered_copies(tensors) if sharded else tensors
        for name, tensor in adapters.alone(whole_tensors).items():
            yield name, tensor.detach()


def adapter_names(model: nn.Module) -> list[str]:
    """Return the names that :func:`adapter_weights` gives; no collective."""
    adapters = find_adapters(model)
    return list(adapters.alone(dict.fromkeys(model.state_dict(keep_vars=True))))


def _weights(
    actor: Any,
    adapters: Any | None,
    prepared: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield weights; ``prepared`` makes weights of the checkpoint from those of whole layers; None: they are these."""
    from transformers.core_model_loading import revert_weight_conversion

    model, _ = find_hf_model(actor)
    sharded = zero_stage_of(find_engine(actor)) == 3
    layer_of = adapters.layer_of if adapters else lambda name: name.rpartition(".")[0]
    # every name of a tied weight
    modules = itertools.groupby(
        model.state_dict(keep_vars=True).items(), key=lambda pair: layer_of(pair[0])
    )
    tensors_of_modules = [list(tensors) for _, tensors in modules]
    for group in _grouped(
        tensors_of_modules,
        lambda module_tensors: sum(full_shape(weight).numel() for _, weight in module_tensors),
        GATHERED_NUMEL,
    ):
        tensors = dict(itertools.chain.from_iterable(group))
        if sharded:
            whole_tensors = _gathered_copies(tensors)
        else:
            whole_tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        prepared_weights = whole_tensors if prepared is None else prepared(whole_tensors)
        # names and shapes of checkpoints, which differ where transformers fuses experts, for example
        yield from revert_weight_conversion(model, prepared_weights).items()


def whole_names(actor: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield :func:`full_weights` by the names of the checkpoint with towers that the actor is a part of. Collective."""
    whole_checkpoint = find_whole(actor)
    for name, tensor in weights:
        yield whole_checkpoint.name_of(name), tensor


def _grouped(
    items: Iterable[T],
    size: Callable[[T], int],
    limit: int,
) -> Iterator[list[T]]:
    """Yield parts in their order, as many as the limit allows, one at least."""
    group: list[T] = []
    group_size = 0
    for item in items:
        if group and group_size + size(item) > limit:
            yield group
            group = []
            group_size = 0
        group.append(item)
        group_size += size(item)
    if group:
        yield group


def _gathered_copies(group: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of whole tensors: what ZeRO-3 gathers is gone at the end of the context."""
    import deepspeed

    params = [tensor for tensor in group.values() if isinstance(tensor, nn.Parameter)]
    with deepspeed.zero.GatheredParameters(list({id(param): param for param in params}.values())):
        copies = {id(tensor): tensor.detach().clone() for tensor in group.values()}
    return {name: copies[id(tensor)] for name, tensor in group.items()}


def buckets(weights: Iterable[tuple[str, Tensor]]) -> Iterator[Bucket]:
    """Return weights in their order, ``BUCKET_BYTES`` together."""
    detached = ((name, tensor.detach()) for name, tensor in weights)
    return _grouped(detached, lambda pair: pair[1].nbytes, BUCKET_BYTES)


_SHAPES = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "tie_word_embeddings", "num_local_experts", "num_experts",
)  # fmt: skip


def architecture(config: Any) -> dict[str, Any]:
    """Return what two models must have in common to take the same weights: entries of a Hugging Face config, where set."""
    text_config = config.get_text_config(decoder=True)
    return {name: value for name in _SHAPES if (value := widest(text_config, name)) is not None}


def widest(text_config: Any, name: str) -> Any:
    """Return an entry of a config, its largest value where layers differ (Gemma 4's heads); None: it has none."""
    values = text_config.to_dict()
    layer_configs = (values.get("per_layer_config") or {}).values()
    # such an entry cannot be read as an attribute
    layer_values = [layer[name] for layer in layer_configs if name in layer]
    if (of_others := values.get(f"global_{name}")) is not None:  # transformers before 5.16
        layer_values.append(of_others)
    if layer_values:
        return max([*layer_values, values[name]])
    return getattr(text_config, name, None)


def has_towers(config: Any) -> bool:
    """Return whether an engine with this Hugging Face config has more than a language model."""
    return config.get_text_config(decoder=True) is not config


# -- how they travel ---------------------------------------------------------------------------------------------------


def open_transport(engine: EngineConfig, device: torch.device) -> WeightFiles | Broadcasts:
    """Open what brings one push to several servers (``vllm_server.VLLMServer``), each in a thread of its own."""
    # ``open`` begins with a server, and tells its workers more; ``pack`` prepares a bucket once for all servers, and
    # all but the last one may be forgotten; ``send`` returns when the server has loaded it.
    if engine.vllm_server_sync == "collective":
        return Broadcasts(engine.vllm_server_sync_address, engine.vllm_server_timeout, device)
    return WeightFiles(engine.vllm_server_sync, engine.vllm_server_sync_dir)


class WeightFiles:
    """safetensors files, one per bucket, that this user alone can read; "auto" is memory with room for two buckets."""

    def __init__(self, location: str, shared_folder: str | None) -> None:
        self._where = location
        self._paths = []
        self._numbers = itertools.count()
        has_room = (
            SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 2.2 * BUCKET_BYTES
        )
        in_memory = location == "shm" or (location == "auto" and has_room)
        self._root = SHARED_MEMORY if in_memory else Path(shared_folder or tempfile.gettempdir())
        try:
            _remove_stale(self._root)
            self._folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-", dir=self._root))
        except OSError as error:
            raise self._error(error.strerror) from error

    def open(self, server: Any, **message: Any) -> None:
        server.post(
            "/init_weight_transfer_engine", {"init_info": {"transport": "files", **message}}
        )

    def pack(self, bucket: Bucket) -> Path:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        while len(self._paths) > 1:
            self._paths.pop(0).unlink()
        # no name twice: other machines remember names
        path = self._folder / f"{next(self._numbers)}.safetensors"
        self._paths.append(path)
        # copies: tied ones may not share memory
        tensors = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in bucket}
        try:
            save_file(tensors, path)
        except (OSError, SafetensorError) as error:
            raise self._error(str(error)) from error
        return path

    def send(self, server: Any, packed: Path, of_adapter: bool = False) -> None:
        server.take({"path": str(packed)}, of_adapter)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _error(self, reason: str | None) -> RolloutError:
        return RolloutError(
            f"--vllm_server_sync {self._where}: weights cannot be written to {self._root}: {reason}; make room there, "
            "or set --vllm_server_sync disk and --vllm_server_sync_dir"
        )


def _remove_stale(root: Path) -> None:
    """Remove what runs left that were killed in a push: it may be gigabytes of memory."""
    for folder in root.glob(f"{_FOLDER}*"):
        process_id = folder.name.removeprefix(_FOLDER).partition("-")[0]
        with suppress(OSError):  # gone meanwhile, or another user's
            is_old = time.time() - folder.stat().st_mtime > _STALE_SECONDS
            if is_old and process_id.isdigit() and not psutil.pid_exists(int(process_id)):
                shutil.rmtree(folder)


class Broadcasts:
    """A group per server and push: rank 0 is this process, the others are the server's workers.

    NCCL where this process and every worker have a GPU of their own (vLLM's communicator, so vLLM must be installed
    here too), otherwise gloo, which listens nowhere but at ``address``; NCCL chooses its interface itself.
    """

    def __init__(self, address: str, seconds: float, device: torch.device) -> None:
        self._address = address
        self._seconds = seconds
        self._device = device
        self._groups: dict[Any, GlooGroup | NCCLGroup] = {}

    def open(self, server: Any, **further: Any) -> None:
        gpus = [gpu_of(self._device), *server.gpus]
        size = len(server.gpus) + 1
        message = {"size": size, "seconds": self._seconds, **further}
        if None not in gpus and len(set(gpus)) == size and importlib.util.find_spec("vllm"):
            message |= {"transport": "nccl", "id": NCCLGroup.new_id()}
            join_group = partial(NCCLGroup, message, 0, self._device)
        else:
            listener = self._listen()
            store_address = {"address": self._address, "port": listener.getsockname()[1]}
            # by its number alone the store would listen on every address; torch 2.6's libuv takes no such listener
            listens = {"master_listen_fd": listener.detach(), "use_libuv": False}
            store = _store(
                store_address, self._seconds, is_master=True, wait_for_workers=False, **listens
            )
            message |= {"transport": "gloo", **store_address, "key": secrets.token_hex(16)}
            join_group = partial(GlooGroup, store, message, 0, self._address)
        # both ends wait for each other; if the server fails, gloo's ends at its time-out
        joining = in_daemon_thread(join_group)
        server.push_step("/init_weight_transfer_engine", {"init_info": message})
        self._groups[server] = joining.result(_CONNECT_SECONDS)

    def _listen(self) -> socket.socket:
        try:
            return socket.create_server((self._address, 0), family=_family(self._address))
        except OSError as error:
            raise RolloutError(
                f"--vllm_server_sync_address {self._address}: this machine cannot listen there: {error.strerror}"
            ) from None

    def pack(self, bucket: Bucket) -> Bucket:
        return [(name, tensor.contiguous()) for name, tensor in bucket]

    def send(self, server: Any, packed: Bucket, of_adapter: bool = False) -> None:
        group = self._groups[server]
        message = {
            "names": [name for name, _ in packed],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in packed],
            "shapes": [list(tensor.shape) for _, tensor in packed],
        }
        try:
            group.begin([tensor for _, tensor in packed])
            server.take(message, of_adapter)
            group.wait()
        except BaseException:
            group.close()  # at once: what hangs on a GPU is in the way of the other servers
            raise

    def close(self) -> None:
        for group in self._groups.values():
            group.close()
        self._groups.clear()


class BroadcastGroup:
    """Share what both kinds of group do; ``begin`` and ``wait`` are in the subclasses."""

    device: torch.device | str = "cpu"  # where they send from, and receive

    def receive(self, message: dict[str, Any]) -> Bucket:
        """Receive a bucket, by what :meth:`Broadcasts.send` told. All of it is there before any of it is loaded, so that an
        error in loading leaves nobody alone with what is under way."""
        dtypes = [getattr(torch, name) for name in message["dtype_names"]]
        tensors = [
            torch.empty(shape, dtype=dtype, device=self.device)
            for shape, dtype in zip(message["shapes"], dtypes)
        ]
        self.begin(tensors)
        self.wait()
        return list(zip(message["names"], tensors))

    def contents(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the bytes of contiguous tensors: NCCL and gloo do not know all types."""
        for tensor in tensors:
            if tensor.numel():
                yield tensor.to(self.device).view(-1).view(torch.uint8)


class GlooGroup(BroadcastGroup):
    """Broadcast from rank 0 through CPU memory, beside the default group of torch.distributed, which is not touched.

    Members meet in a store and prove to each other that they have the key of this push. Only bytes travel. A lost
    connection or a time-out is a RuntimeError. ``message`` is what :meth:`Broadcasts.open` tells the server.
    """

    def __init__(
        self,
        store: Any,
        message: dict[str, Any],
        rank: int,
        address: str,
    ) -> None:
        key = message["key"]
        size = message["size"]
        store.set(str(rank), _proof(key, rank))
        for member in range(size):
            if not hmac.compare_digest(store.get(str(member)), _proof(key, member).encode()):
                raise RuntimeError(
                    f"member {member} of the group came with the key of another push"
                )
        options = distributed.ProcessGroupGloo._Options()
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=min(_CONNECT_SECONDS, message["seconds"]))
        self._group: Any = distributed.ProcessGroupGloo(
            distributed.PrefixStore("group", store), rank, size, options
        )
        self._limit = timedelta(seconds=message["seconds"])
        self._under_way: list[tuple[Any, Tensor]] = []

    @classmethod
    def join(cls, message: dict[str, Any], rank: int) -> GlooGroup:
        """Join as a worker."""
        store = _store(message, message["seconds"])
        with socket.socket(_family(message["address"]), socket.SOCK_DGRAM) as sock:
            # sends nothing; tells this machine's address on the way
            sock.connect((message["address"], message["port"]))
            own_address = sock.getsockname()[0]
        return cls(store, message, rank, own_address)

    def begin(self, tensors: Iterable[Tensor]) -> None:
        """Begin to send contiguous tensors from rank 0, or to fill tensors of other ranks, which are in CPU memory."""
        options = distributed.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.asyncOp = True
        options.timeout = self._limit
        for content in self.contents(tensors):
            self._under_way.append((self._group.broadcast([content], options), content))

    def wait(self) -> None:
        for work, _ in self._under_way:
            work.wait(self._limit)
        self._under_way.clear()

    def close(self) -> None:
        """End the group without waiting for what is under way."""
        references = [self._group, self._under_way]
        is_hanging = not all(work.is_completed() for work, _ in self._under_way)
        self._group = None
        self._under_way = []
        if is_hanging:  # gloo's end waits for its operations, which end at their time-outs
            threading.Thread(target=references.clear, name="weight-group", daemon=True).start()


class NCCLGroup(BroadcastGroup):
    """Broadcast by vLLM's NCCL communicator, from GPU to GPU. ``message`` is what :meth:`Broadcasts.open` tells the server.

    NCCL has no time-outs: whoever calls ``begin`` need not wait for the others, and ``close`` ends what hangs.
    """

    def __init__(self, message: dict[str, Any], rank: int, device: torch.device) -> None:
        self._seconds = message["seconds"]
        self.device = device
        with torch.cuda.device(device):
            # of its own: in a shared one the broadcasts to a server that hangs would hold up all others
            self._stream = torch.cuda.Stream(device)
            self._group = nccl_communicator(
                base64.b64decode(message["id"]), rank, message["size"], device
            )
        if self._group.disabled:
            raise RuntimeError(
                "VLLM_DISABLE_PYNCCL is set, without which vLLM has no NCCL: unset it"
            )

    @staticmethod
    def new_id() -> str:
        """Return what the members of one group find each other by; it holds this machine's address and a random number."""
        try:
            from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

            return base64.b64encode(bytes(NCCLLibrary().ncclGetUniqueId().internal)).decode()
        except (ImportError, OSError, ValueError, RuntimeError) as error:
            raise RuntimeError(f"NCCL cannot be used by vLLM here: {error}") from error

    def begin(self, tensors: Iterable[Tensor]) -> None:
        """Begin as :class:`GlooGroup` does, with tensors on this GPU."""
        with torch.cuda.device(self.device):
            # until they are computed, or free
            self._stream.wait_stream(torch.cuda.current_stream())
        # in a thread: at its first broadcast NCCL connects, and waits for the others
        self._under_way = in_daemon_thread(self._broadcast, list(self.contents(tensors)))

    def _broadcast(self, contents: list[Tensor]) -> None:
        with torch.cuda.device(self.device):
            for content in contents:
                self._group.broadcast(content, src=0, stream=self._stream)
            self._stream.synchronize()

    def wait(self) -> None:
        self._under_way.result(self._seconds)

    def close(self) -> None:
        self._group.destroy()


def gpu_of(device: torch.device) -> str | None:
    """Return which GPU that is, the same in all processes; ``None`` without one."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).uuid)
    return None


def _store(store_address: dict[str, Any], seconds: float, **options: Any) -> Any:
    timeout = timedelta(seconds=min(_CONNECT_SECONDS, seconds))
    return distributed.TCPStore(
        store_address["address"], store_address["port"], timeout=timeout, **options
    )


def _proof(key: str, rank: int) -> str:
    """Return the proof that one has the key; the key itself does not travel here."""
    return hmac.new(key.encode(), str(rank).encode(), hashlib.sha256).hexdigest()


def _family(address: str) -> socket.AddressFamily:
    return socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][0]


# -- whether they have arrived -----------------------------------------------------------------------------------------


def probe_vector(width: int, device: torch.device | str = "cpu") -> Tensor:
    """Return a fixed vector (width,) with entries in [-1, 1], which no type of weights rounds: the same everywhere."""
    values = torch.sin(torch.arange(1, width + 1, dtype=torch.float64) * 12.9898)
    return values.to(torch.bfloat16).float().to(device)


def trainer_fingerprints(weights: Iterable[tuple[str, Tensor]]) -> dict[str, tuple[Tensor, ...]]:
    """Return what each pushed weight should act like: W x for a matrix and a fixed x, the weight itself for a vector.

    A matrix comes with x W too: some models (GPT-2) have their linear layers the other way round in the checkpoint.
    """
    fingerprints = {}
    for name, weight in weights:
        weight = weight.detach().float()
        matrices = (weight, weight.T) if weight.dim() == 2 else ()
        fingerprints[name] = tuple(
            (matrix @ probe_vector(matrix.shape[-1], matrix.device)).cpu() for matrix in matrices
        ) or (weight.cpu(),)
    return fingerprints


def differing_weights(
    trainer: dict[str, tuple[Tensor, ...]],
    engine: dict[str, Tensor],
    packed: dict[str, list[str]],
    dtype: str = "float32",
) -> tuple[list[str], list[str]]:
    """Return names of the trainer's weights that the engine lacks, and of those without a counterpart of their shape.

    ``trainer`` is of :func:`trainer_fingerprints`, ``engine`` the same by the engine's names; ``packed``: fused layer →
    the layers it is made of, in their order; ``dtype``: the type that the engine computes in.
    """
    tolerance = _TOLERANCES[dtype]
    engine_values: dict[str, Tensor] = dict(engine)
    for name, value in engine.items():
        module, _, kind = name.rpartition(".")
        parent, _, leaf = module.rpartition(".")
        names = [f"{parent}.{part_name}.{kind}" for part_name in packed.get(leaf, [])]
        sizes = [
            trainer[name_of_part][0].shape[0] if name_of_part in trainer else -1
            for name_of_part in names
        ]
        if names and min(sizes) > 0 and sum(sizes) == value.shape[0]:
            engine_values.update(zip(names, value.split(sizes)))
    differing = []
    unknown = []
    for name, expected in trainer.items():
        # of the same shape, or of a vocabulary that vLLM padded
        comparable = [
            candidate
            for candidate in expected
            if name in engine_values
            and engine_values[name].shape[1:] == candidate.shape[1:]
            and len(engine_values[name]) >= len(candidate)
        ]
        if not comparable:
            unknown.append(name)
        elif not any(
            _close(engine_values[name][: len(candidate)], candidate, tolerance)
            for candidate in comparable
        ):
            differing.append(name)
    return differing, unknown


def _close(weight: Tensor, expected: Tensor, tolerance: float) -> bool:
    scale = expected.square().mean().sqrt() + 1e-12
    return bool((weight - expected).abs().max() <= tolerance * scale)  # False where either is NaN
