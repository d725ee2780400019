"""What a run needs of memory, before anything loads: bytes of a GPU and of a host, by part and phase, and the peak.

Parameters are counted, and passes run, on torch's meta device, which holds no data. What DeepSpeed 0.19 and vLLM hold
is by formula, from their sources. Micro batches are taken to be full: longest prompts and responses.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig
from transformers.integrations import deepspeed as hf_deepspeed

from lightppo.config import PPOConfig, rules
from lightppo.config.rules import frozen_models, old_log_probs_from
from lightppo.distributed.deepspeed import SMALL_BUCKET_ELEMENTS
from lightppo.distributed.fused_zero import collects_nothing
from lightppo.errors import ConfigError
from lightppo.files import stage_to_local
from lightppo.models import heads, loading
from lightppo.models.actor import Actor
from lightppo.models.adapters.lora import LoraOptions, add_adapters
from lightppo.models.adapters.quantised import fitting_layers
from lightppo.models.attention.row_attention import caps_scores
from lightppo.models.batches import cache_argument, takes
from lightppo.models.critic import Critic
from lightppo.models.kernels.linear_log_probs import is_untouched, scores_from_head, scoring_head
from lightppo.models.packing import READ_SHARE, only_at, position_wise
from lightppo.rollout.vllm.weights import BUCKET_BYTES

LOADING = "loading"
ROLLOUT = "rollout"
SCORING = "scoring"
SYNC = "weights to the engine"
SAVE = "saving"
ACTOR = "actor: training"
ACTOR_STEP = "actor: step"
CRITIC = "critic: training"
CRITIC_STEP = "critic: step"
PHASES = (LOADING, ROLLOUT, SCORING, ACTOR, ACTOR_STEP, CRITIC, CRITIC_STEP, SYNC, SAVE)
ALWAYS = frozenset(PHASES)
TRAINING = frozenset((ACTOR, ACTOR_STEP, CRITIC, CRITIC_STEP))

GPU_BUCKET_ELEMENTS = 500_000_000  # DeepSpeed's own reduce_bucket_size
LIVE_ELEMENTS = 1_000_000_000  # its stage3_max_live_parameters
NF4_BYTES = 0.516  # of a weight in 4 bits, scales included
CUDA_BYTES = 2_000_000_000  # assumed: CUDA's context, NCCL's buffers, gaps of the allocator
# A process on a CPU keeps freed blocks below this size: glibc, see distributed/device.py.
SMALL_BLOCK = 32 << 20
_COUNTED = "counted"  # the attention of models on the meta device


# -- passes on the meta device -----------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Bytes of tensors on a device that operations inside have made and that still live: now, and at most.

    ``small`` and ``small_peak`` are those in blocks below ``SMALL_BLOCK``.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.live = 0
        self.peak = 0
        self.small = 0
        self.small_peak = 0
        # (bytes of finished gradients, the most bytes alive until then)
        self.curve: list[tuple[int, int]] = []
        self._storages: dict[int, weakref.ref] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        # These are the places to read. Here all are taken as distinct.
        if func is torch.ops.aten._unique2.default and args[0].is_meta:
            return args[0].clone(), args[0].new_empty(0), args[0].new_empty(0)
        # Whether a mask lets all through; older transformers ask.
        is_number = func is torch.ops.aten._local_scalar_dense.default
        if is_number and args[0].is_meta and args[0].dtype == torch.bool:
            return True
        inputs = {
            _storage_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type == self.device:
                storage_key = _storage_key(leaf)
                if storage_key not in inputs and storage_key not in self._storages:
                    self._add(storage_key, leaf)
        return result

    def _add(self, storage_key: int, tensor: Tensor) -> None:
        storage: Any = tensor
        byte_count = tensor.nbytes
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            byte_count = storage.nbytes()
        small_bytes = byte_count * (byte_count < SMALL_BLOCK)

        def on_release(_: Any) -> None:
            self.live -= byte_count
            self.small -= small_bytes
            del self._storages[storage_key]

        self._storages[storage_key] = weakref.ref(storage, on_release)
        self.live += byte_count
        self.small += small_bytes
        self.peak = max(self.peak, self.live)
        self.small_peak = max(self.small_peak, self.small)

    def finish(self, parameter: nn.Parameter | None = None) -> None:
        """Take a finished gradient away, as ZeRO does, as a hook; without one, end the pass."""
        finished_bytes = self.curve[-1][0] if self.curve else 0
        if parameter is not None:
            finished_bytes += parameter.grad.nbytes
            parameter.grad = None
        self.curve.append((finished_bytes, self.peak))
        self.peak = self.live


def _storage_key(tensor: Tensor) -> int:
    """Tell apart what holds bytes; weights that oneDNN has packed have no storage."""
    if tensor.layout is torch.strided:
        return tensor.untyped_storage()._cdata
    return id(tensor)


class _Attention(torch.autograd.Function):
    """What a fused kernel holds: (B, H, S, D) three times, the output, a number per row, a mask added to the scores."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        batch, heads, length, _ = query.shape
        output = query.new_empty(batch, length, heads, value.shape[3]).transpose(1, 2)
        row_numbers = query.new_empty(batch, heads, length, dtype=torch.float)
        ctx.save_for_backward(query, key, value, bias, output, row_numbers)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (*(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3]), None)


def _counted_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    attention: str = "fused",
    **_: Any,
) -> tuple[Tensor, None]:
    """Count the ``attention`` of a :class:`MicroBatch`."""
    bias = None
    # In each layer, transformers repeats keys and values, and torch turns the mask into numbers.
    if attention == "masked":
        repeats = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(repeats, 1)
        value = value.repeat_interleave(repeats, 1)
        bias = query.new_empty(query.shape[0], 1, query.shape[2], key.shape[2])
    attended = _Attention.apply(query, key, value, bias)
    if attention == "apart":
        attended = attended.contiguous()
    return attended.transpose(1, 2), None


def _counted_experts(
    module: nn.Module, config: PretrainedConfig, hidden: Tensor, *_: Any, **__: Any
) -> Tensor:
    """Return a mixture of experts, each token through its number of them: (T, H) -> (T, H)."""
    expert_rows = hidden.repeat_interleave(getattr(config, "num_experts_per_tok", 1), 0)
    gate, value = _projected(expert_rows, module.gate_up_proj[0]).chunk(2, -1)
    activated = nn.functional.silu(gate) * value
    output = _projected(activated, module.down_proj[0])
    return output.view(len(hidden), -1, hidden.shape[1]).sum(1)


def _projected(hidden: Tensor, weight: Tensor) -> Tensor:
    """Multiply by a weight, whichever of its two dimensions comes first."""
    return hidden @ (weight if weight.shape[0] == hidden.shape[1] else weight.T)


transformers.AttentionInterface.register(_COUNTED, _counted_attention)


@dataclass(frozen=True)
class Shape:
    """A model without weights, as a run would load it."""

    config: PretrainedConfig = field(compare=False)
    text: str  # the config's, which tells models apart
    scores: bool  # with a value head
    dtype: torch.dtype
    adapters: LoraOptions | None = None
    in_4bit: bool = False
    eager: bool = False
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Sizes:
    """Of a model."""

    total: int  # parameters
    trained: int
    bytes: int  # of all weights
    width: int  # bytes of a weight
    trained_small: int = 0  # of those whose float32 gradients are blocks below SMALL_BLOCK

    @property
    def gathered(self) -> int:
        """Return the bytes of the weights that ZeRO-3 gathers at a time."""
        return min(self.total, LIVE_ELEMENTS) * self.width


@dataclass(frozen=True)
class MicroBatch:
    """What one pass takes: ``batch`` rows of ``length`` positions, ``read`` of all of them.

    ``attention``: packed into one row, by a fused kernel ("fused") or torch's for rows one by one ("apart"); with
    padding and a mask ("masked"); prompts whose keys and values are kept ("cache").
    """

    batch: int
    length: int
    read: int
    attention: str


@dataclass(frozen=True)
class PassBytes:
    """Bytes of a pass beside the weights."""

    curve: tuple[tuple[int, int], ...]  # see LiveBytes
    small: int = 0  # the most in small blocks
    cache: int = 0  # keys and values
    states: int = 0  # of layers that have those instead, whatever the length

    def peak(self, beside: Callable[[int], float] = lambda finished: 0) -> int:
        """Return the most, with what is held ``beside`` so many bytes of gradients."""
        return int(max(live + beside(finished) for finished, live in self.curve))


@lru_cache(maxsize=32)
def built(shape: Shape) -> Actor | Critic:
    """Return the model on the meta device; its attention is counted unless it is eager."""
    config = copy.deepcopy(shape.config)
    auto_class = transformers.AutoModelForCausalLM
    if shape.scores:
        config.num_labels = 1
        auto_class = transformers.AutoModelForSequenceClassification
    # An earlier run in this process may have set it, and nothing is sharded here.
    hf_deepspeed.unset_hf_deepspeed_config()
    with torch.device("meta"):
        model = auto_class.from_config(
            config,
            trust_remote_code=shape.trust_remote_code,
            dtype=shape.dtype,
            attn_implementation="eager",
        )
        # Qwen3.5 has the first at False, and attends by what its config names
        if not shape.eager and (
            model._supports_attention_backend or model._can_set_attn_implementation()
        ):
            model.set_attn_implementation(_COUNTED)
        for module in model.modules():
            weights = [
                getattr(module, weight_name, None) for weight_name in ("gate_up_proj", "down_proj")
            ]
            if all(isinstance(weight, Tensor) for weight in weights):
                module.forward = partial(_counted_experts, module, config.get_text_config())
        wrapper = (Critic if shape.scores else Actor)(model)
        if shape.adapters is not None:
            add_adapters(wrapper, shape.adapters)
    for parameter in wrapper.parameters():
        parameter.data = parameter.data.to(model.dtype)
    return wrapper


@lru_cache(maxsize=32)
def sizes(shape: Shape) -> Sizes:
    """Return numbers of parameters, and bytes."""
    hf_model = built(shape).hf_model
    weight_counts = {
        weight_name.replace(".base_layer", ""): parameter.numel()
        for weight_name, parameter in hf_model.named_parameters()
    }
    trained = [weight.numel() for weight in hf_model.parameters() if weight.requires_grad]
    quantised = 0
    if shape.in_4bit:
        bare_model = built(dataclasses.replace(shape, adapters=None, in_4bit=False)).hf_model
        layer_names = fitting_layers(bare_model, heads.head_names(bare_model))
        quantised = sum(weight_counts[f"{weight_name}.weight"] for weight_name in layer_names)
    total = sum(weight_counts.values())
    width = shape.dtype.itemsize
    return Sizes(
        total,
        sum(trained),
        bytes=int((total - quantised) * width + quantised * NF4_BYTES),
        width=width,
        trained_small=sum(
            weight_count for weight_count in trained if 4 * weight_count < SMALL_BLOCK
        ),
    )


@lru_cache(maxsize=256)
def pass_bytes(
    shape: Shape,
    micro_batch: MicroBatch,
    *,
    trains: bool = False,
    checkpoints: bool = False,
    entropy: bool = False,
) -> PassBytes:
    """Return one pass on the meta device: forward through body and head, in training the backward too."""
    wrapper = built(shape)
    hf_model = wrapper.hf_model
    live_bytes = LiveBytes("meta")
    attention = micro_batch.attention
    transformers.AttentionInterface.register(
        _COUNTED, partial(_counted_attention, attention=attention)
    )
    hf_model.train(trains)
    if checkpoints:
        wrapper.gradient_checkpointing_enable()
    else:
        wrapper.gradient_checkpointing_disable()
    hooks = [
        parameter.register_post_accumulate_grad_hook(live_bytes.finish)
        for parameter in hf_model.parameters()
        if parameter.requires_grad
    ]
    reads_few = micro_batch.read < READ_SHARE * micro_batch.length and not checkpoints
    layers = []
    if attention in ("fused", "apart") and reads_few:
        layers = position_wise(hf_model)
    with torch.device("meta"), live_bytes, torch.set_grad_enabled(trains):
        places = torch.zeros(micro_batch.read // micro_batch.batch, dtype=torch.long)
        with only_at(layers, places):
            scores, cache_bytes = _scores(shape, micro_batch, places, entropy)
        if trains:
            scores.sum().backward()
    live_bytes.finish()
    for hook in hooks:
        hook.remove()
    return PassBytes(tuple(live_bytes.curve), live_bytes.small_peak, *cache_bytes)


def _cache_bytes(layers: Iterable[Any]) -> tuple[int, int]:
    """Return the keys and values, and states of layers that have those instead, which do not grow."""
    growing_bytes = 0
    constant_bytes = 0
    for state in (state for layer in layers for state in vars(layer).values()):
        if isinstance(state, dict):
            tensors = [tensor for tensor in state.values() if isinstance(tensor, Tensor)]
            constant_bytes += sum(tensor.nbytes for tensor in tensors)
        elif isinstance(state, Tensor):
            growing_bytes += state.nbytes
    return growing_bytes, constant_bytes


def _scores(
    shape: Shape, micro_batch: MicroBatch, places: Tensor, entropy: bool
) -> tuple[Tensor, tuple[int, int]]:
    """Return log probs, or values, at the places that are read; and the bytes of the cache, (0, 0) without one."""
    model = built(shape).hf_model
    caches = micro_batch.attention == "cache"
    ids = torch.zeros(micro_batch.batch, micro_batch.length, dtype=torch.long)
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": caches}
    if takes(model, "position_ids"):
        inputs["position_ids"] = torch.zeros_like(ids)
    if takes(model, "attention_mask"):  # four dimensions: taken as it is
        mask_type = torch.bool
        mask_size = (2, 1)
        if micro_batch.attention == "masked":
            mask_size = (micro_batch.length, micro_batch.length)
        if model.config._attn_implementation == "eager":
            mask_type = model.dtype
            mask_size = (micro_batch.length, micro_batch.length)
        inputs["attention_mask"] = torch.zeros(micro_batch.batch, 1, *mask_size, dtype=mask_type)
    if shape.scores:
        hidden = model.base_model(**inputs).last_hidden_state
        return heads.value_head(model)[1](hidden[:, places].flatten(0, 1)).float(), (0, 0)
    if selects_in_model := takes(model, "logits_to_keep"):
        inputs["logits_to_keep"] = places
    if caches:
        output = model(**inputs)
        return output.logits, _cache_bytes(output[cache_argument(model)].layers)
    labels = torch.zeros(micro_batch.read, dtype=torch.long)

    def select(hidden: Tensor) -> Tensor:
        if not selects_in_model:
            hidden = hidden[:, places]
        return hidden.reshape(micro_batch.read, -1).clone()

    if (head := scoring_head(model)) is not None:
        trains = torch.is_grad_enabled()
        with scores_from_head(
            head, select, labels, 1.0, entropy=trains, entropy_grad=entropy
        ) as head_scores:
            output = model(**inputs)
        if is_untouched(head_scores, output.logits):
            return output.logits, (0, 0)
    logits = model(**inputs).logits.reshape(micro_batch.read, -1).float()
    return torch.log_softmax(logits, -1).gather(-1, labels[:, None]), (0, 0)


# -- what a run holds, and when ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """Where a run is to go."""

    world_size: int = 1
    gpus: bool = True  # else all is in the host's memory, and DeepSpeed's buffers are small
    per_node: int = 8  # ranks
    device_bytes: int | None = None  # of a GPU; None: only counted
    host_bytes: int | None = None  # of a host whose ranks are on the CPU; None: only counted
    library_bytes: int = 0  # of a process before it has a model: Python, torch, other libraries

    @property
    def limit(self) -> int | None:
        """Return what the peak must fit into."""
        return self.device_bytes if self.gpus else self.host_bytes

    @property
    def ranks_of_host(self) -> int:
        """Return the number of ranks that share a host."""
        return min(self.world_size, self.per_node)


@dataclass(frozen=True)
class Part:
    """Bytes of one rank, in some phases."""

    owner: str  # actor, critic, …
    what: str
    phases: Set[str]
    gpu: int = 0
    host: int = 0
    sure: bool = True  # depends neither on lengths nor on what a library does at a moment
    # of a pass: its most in blocks that a process on a CPU keeps when they are freed
    small: int = 0


@dataclass(frozen=True)
class Estimate:
    """All parts of a run."""

    machine: Machine
    parts: tuple[Part, ...]

    def of_phase(self, phase: str, sure: bool = False) -> tuple[int, int]:
        """Return bytes of a GPU, and of a host with all its ranks; ``sure``: of the certain parts alone."""
        parts = [
            memory_part
            for memory_part in self.parts
            if phase in memory_part.phases and (memory_part.sure or not sure)
        ]
        gpu_bytes = sum(memory_part.gpu for memory_part in parts)
        host_bytes = sum(memory_part.host for memory_part in parts)
        if not self.machine.gpus:
            host_bytes += gpu_bytes
            gpu_bytes = 0
        return gpu_bytes, host_bytes * self.machine.ranks_of_host

    def peak(self, of_host: bool = False, sure: bool = False) -> tuple[str, int]:
        """Return the phase that needs most of a GPU, or of a host, and how much; without GPUs always of a host."""
        device = int(of_host or not self.machine.gpus)
        bytes_by_phase = {phase: self.of_phase(phase, sure)[device] for phase in PHASES}
        return max(bytes_by_phase.items(), key=lambda item: item[1])

    @property
    def fits(self) -> bool:
        """Return whether the peak is within a GPU, or without GPUs within a host."""
        return self.machine.limit is None or self.peak()[1] <= self.machine.limit


def estimate(
    config: PPOConfig, machine: Machine, configs: Mapping[str, PretrainedConfig] | None = None
) -> Estimate:
    """Return what a run of a resolved config needs, part by part.

    Args:
        configs: model configs by path; others are read from their folder or the hub.
    """
    roles = shapes(config, configs or {})
    heads = getattr(roles["actor"].config.get_text_config(), "num_attention_heads", 0)
    if heads % (size := config.strategy.sequence_parallel_size):
        raise ConfigError(f"--sequence_parallel_size {size} does not divide the {heads} heads")
    parts = [
        Part("CUDA", "context, NCCL, gaps", ALWAYS, gpu=CUDA_BYTES * machine.gpus, sure=False),
        Part("process", "Python, torch, libraries", ALWAYS, host=machine.library_bytes),
    ]
    for role, model_shape in roles.items():
        parts += _weight_parts(role, model_shape, config, machine)
        if role in ("actor", "critic") and not config.evaluation.val_only:
            parts += _training_parts(role, model_shape, config, machine)
    parts += _loading_part(roles, config, machine)
    parts += _scoring_parts(roles, config, machine)
    parts += _rollout_parts(roles["actor"], config, machine)
    # A row: ids, masks, about nine numbers of each token of the response.
    row_bytes = 16 * config.data.prompt_max_len + 53 * config.rollout.generate_max_len
    if config.loss.router_replay != "off":
        longest_sequence = config.data.prompt_max_len + config.rollout.generate_max_len
        row_bytes += longest_sequence * _choice_bytes(roles["actor"].config.get_text_config())
    groups = max(1, machine.world_size // config.strategy.sequence_parallel_size)
    buffer_bytes = math.ceil(rules.samples_per_rollout(config) / groups) * row_bytes
    on_host = buffer_bytes * config.training.buffer_cpu_offload
    phases = {SCORING, *TRAINING}
    parts += [
        Part("experience", "rows", phases, gpu=buffer_bytes - on_host, host=on_host, sure=False),
        Part("experience", "on the device", {SCORING}, gpu=buffer_bytes, sure=False),
    ]
    if config.engine.rollout_engine != "hf":
        bucket_bytes = 2 * BUCKET_BYTES
        parts.append(Part("engine", "two buckets of weights", {SYNC}, gpu=bucket_bytes, sure=False))
    parts += _file_copies(roles["actor"], machine)
    if not machine.gpus:
        parts = [*parts, *_freed_blocks(parts)]
    return Estimate(
        machine, tuple(memory_part for memory_part in parts if memory_part.gpu or memory_part.host)
    )


def _choice_bytes(config: PretrainedConfig) -> int:
    """Return what the experts of a token take, at most: one choice in each layer, see ``RouterReplay.dtype``."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    experts = max(getattr(config, name, None) or 0 for name in names)
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    return config.num_hidden_layers * chosen * (1 if experts < 256 else 2)


def _file_copies(actor: Shape, machine: Machine) -> Iterator[Part]:
    """Yield what is copied for a file, and merged with adapters in another copy. Only rank 0 has them."""
    counted = sizes(actor)
    adapted = sum(
        parameter.numel()
        for parameter_name, parameter in built(actor).hf_model.named_parameters()
        if parameter_name.endswith(".base_layer.weight")
    )
    ranks = machine.ranks_of_host
    yield Part("actor", "copy for files", {SAVE}, host=counted.bytes // ranks)
    yield Part("actor", "merged weights", {SAVE}, host=adapted * counted.width // ranks)


def _freed_blocks(parts: Iterable[Part]) -> Iterator[Part]:
    """Yield what a process on a CPU has freed and keeps: where a phase has less in small blocks than the largest pass."""
    small_bytes = {
        phase: sum(memory_part.small for memory_part in parts if phase in memory_part.phases)
        for phase in PHASES
        if phase != LOADING
    }
    most_bytes = max(small_bytes.values())
    for byte_count in sorted({*small_bytes.values()} - {most_bytes}, reverse=True):
        phases = {phase for phase, value in small_bytes.items() if value == byte_count}
        freed_bytes = most_bytes - byte_count
        yield Part("process", "freed blocks that it keeps", phases, host=freed_bytes, sure=False)


def shapes(config: PPOConfig, configs: Mapping[str, PretrainedConfig]) -> dict[str, Shape]:
    """Return the models of a run, by role."""
    model_options = config.model
    adapter_options = config.adapter
    run_dtype = getattr(torch, rules.compute_dtype(config))

    def shape(
        path: str, flag: str, scores: bool = False, dtype: torch.dtype = run_dtype, **traits: Any
    ) -> Shape:
        model_config = configs.get(path) or loading.load_config(
            stage_to_local(path),
            flag=flag,
            override_config=model_options.override_config,
            trust_remote_code=model_options.trust_remote_code,
            external_lib=model_options.external_lib,
        )
        eager = model_options.attn_implementation == "eager" or (
            model_options.attn_implementation == "auto" and caps_scores(model_config)
        )
        traits |= {"eager": eager, "trust_remote_code": model_options.trust_remote_code}
        return Shape(model_config, model_config.to_json_string(), scores, dtype, **traits)

    traits: dict[str, Any] = {"in_4bit": adapter_options.load_in_4bit}
    if adapter_options.lora_rank > 0:
        traits["adapters"] = LoraOptions(
            adapter_options.lora_rank,
            adapter_options.lora_alpha,
            adapter_options.lora_dropout,
            adapter_options.target_modules,
        )
    roles = {"actor": shape(model_options.pretrain, "--pretrain", **traits)}
    if rules.needs_critic(config):
        roles["critic"] = shape(model_options.critic_pretrain, "--critic_pretrain", True, **traits)
    if rules.needs_reference(config) and not rules.reference_is_actor(config):
        dtype = torch.float32 if rules.moves_reference(config) else run_dtype
        roles["reference"] = shape(
            model_options.ref_pretrain,
            "--ref_pretrain",
            dtype=dtype,
            in_4bit=adapter_options.load_in_4bit,
        )
    if "ema" in rules.moving_models(config):
        roles["moving average"] = shape(model_options.pretrain, "--pretrain", dtype=torch.float32)
    for role, frozen_model in frozen_models(config).items():
        roles[role] = shape(frozen_model.path, frozen_model.flag)
    for i, path in enumerate(model_options.reward_pretrain, start=1):
        roles[f"reward model {i}"] = shape(path, "--reward_pretrain", True)
    return roles


def _placement(role: str, config: PPOConfig) -> tuple[int, bool]:
    """Return the ZeRO stage of a model, and whether its weights wait on the host."""
    strategy = config.strategy
    if role == "actor":
        return strategy.zero_stage, strategy.param_offload
    if role == "critic":
        return strategy.critic_zero_stage, rules.critic_offloads(config)[1]
    if strategy.ref_offload:
        return 3, True
    return strategy.ref_zero_stage, False


def _weight_parts(
    role: str, model_shape: Shape, config: PPOConfig, machine: Machine
) -> Iterator[Part]:
    stage, offload = _placement(role, config)
    total_bytes = sizes(model_shape).bytes
    rank_bytes = total_bytes
    if stage == 3:
        rank_bytes = math.ceil(total_bytes / machine.world_size)
    yield Part(role, "weights", ALWAYS, gpu=rank_bytes * (not offload), host=rank_bytes * offload)
    if stage == 3 and config.strategy.zpg > 1:
        second_bytes = total_bytes // config.strategy.zpg
        yield Part(role, "secondary shards (--zpg)", ALWAYS, gpu=second_bytes)


def _loading_part(
    roles: Mapping[str, Shape], config: PPOConfig, machine: Machine
) -> Iterator[Part]:
    """Yield the largest model that is whole on a host while it loads: each goes to its GPU before the next one loads."""
    parts = []
    for role, model_shape in roles.items():
        if _placement(role, config)[0] == 3:
            continue
        byte_count = sizes(model_shape).total * sizes(model_shape).width
        description = "whole on the host"
        # A checkpoint in the run's own type is mapped from its file, once for all ranks of a host.
        is_file_type = model_shape.config.dtype is built(model_shape).hf_model.dtype
        if is_file_type and not (model_shape.in_4bit or config.model.init_from_scratch):
            byte_count = math.ceil(byte_count / machine.ranks_of_host)
            description = "mapped from the file"
        parts.append(Part(role, description, {LOADING}, host=byte_count))
    if machine.gpus and parts:
        yield max(parts, key=lambda memory_part: memory_part.host)


@dataclass(frozen=True)
class _Gradients:
    """How the gradients of actor or critic are made and summed."""

    stage: int
    shard: int  # numbers of this rank
    total: int  # bytes of all, as a pass makes them
    accumulated: int  # bytes of a number in their sum
    bucket: int  # bytes of DeepSpeed's buffer
    copies: int  # bytes: without shards of their own, gradients are averaged in copies
    has_several: bool  # passes before an optimizer step
    sums_in_fp32: bool  # another type than they are made in
    keeps_all: bool  # DeepSpeed's BF16_Optimizer: fp32 gradients of all parameters

    def beside(self, finished: int) -> float:
        """Return gradients and buffers when so many bytes have been made, beyond the parts of a run."""
        is_done = finished == self.total
        if self.stage == 0 or self.keeps_all:
            return finished * (self.keeps_all or not self.has_several) + is_done * self.copies
        if self.stage == 3:
            return 0
        bucket_bytes = (finished > 0) * self.bucket
        pass_sum = self.shard * self.accumulated  # beside the sum of earlier passes
        if self.sums_in_fp32 and self.has_several:
            pass_sum = 0
        if self.stage == 1:
            return bucket_bytes + finished * (1 + 2 * self.sums_in_fp32) + is_done * pass_sum
        return bucket_bytes + (finished >= min(self.bucket, self.total)) * pass_sum


def _gradients(
    role: str, model_shape: Shape, offload: bool, config: PPOConfig, machine: Machine
) -> _Gradients:
    strategy = config.strategy
    stage, _ = _placement(role, config)
    counted = sizes(model_shape)
    accumulated = 2 if strategy.grad_accum_dtype == "bf16" else 4
    sums_in_fp32 = counted.width == 2 and accumulated == 4
    bucket_bytes = GPU_BUCKET_ELEMENTS * counted.width
    is_unused = collects_nothing(stage, machine.world_size, sums_in_fp32, offload)
    if is_unused or not machine.gpus:
        bucket_bytes = SMALL_BUCKET_ELEMENTS * counted.width
    if strategy.overlap_comm and stage == 2:  # stage 3 overlaps from one buffer
        bucket_bytes *= 2
    shard = counted.trained
    if stage > 0:
        shard = math.ceil(counted.trained / machine.world_size)
    copied_bytes = 0
    if machine.world_size > 1:
        copied_bytes = 4 * min(counted.trained, GPU_BUCKET_ELEMENTS)
    samples = min(config.training.train_batch_size, rules.samples_per_rollout(config))
    rank_tokens = samples / machine.world_size * config.rollout.generate_max_len
    return _Gradients(
        stage,
        shard,
        counted.trained * counted.width,
        accumulated,
        bucket_bytes,
        copied_bytes,
        has_several=rank_tokens > _micro_batch(config, f"{role}_train", machine).read,
        sums_in_fp32=sums_in_fp32,
        keeps_all=stage == 1
        and model_shape.dtype is torch.bfloat16
        and sums_in_fp32
        and not offload,
    )


def _training_parts(
    role: str, model_shape: Shape, config: PPOConfig, machine: Machine
) -> Iterator[Part]:
    """Yield fp32 masters, Adam, gradients, DeepSpeed's buffers, activations of actor or critic."""
    counted = sizes(model_shape)
    offload = config.strategy.adam_offload
    training = ACTOR
    step = ACTOR_STEP
    if role == "critic":
        offload = rules.critic_offloads(config)[0]
        training = CRITIC
        step = CRITIC_STEP
    gradients = _gradients(role, model_shape, offload, config, machine)
    shard = gradients.shard
    is_sharded = gradients.stage > 0

    def part(
        what: str, phases: Set[str], size: float, host: bool = False, sure: bool = True
    ) -> Part:
        return Part(role, what, phases, int(size) * (not host), int(size) * host, sure)

    device_phases = ALWAYS
    if not offload and _makes_room_for_vllm(config, machine):
        device_phases = ALWAYS - {ROLLOUT}
        per_number = 8 + 4 * is_sharded + gradients.accumulated * (gradients.stage == 3)
        yield part("put aside while vLLM samples", ALWAYS, per_number * shard, host=True)
    if is_sharded:
        yield part("fp32 masters", device_phases, 4 * shard, offload)
    yield part("Adam", device_phases - {LOADING}, 8 * shard, offload)
    if offload:
        yield part("gradients and copies of shards", ALWAYS, (4 + counted.width) * shard, host=True)
    if gradients.stage == 3:
        summed_bytes = gradients.accumulated * shard
        yield part("gradients of the shard", device_phases, summed_bytes, offload)
        yield part("reduction", ALWAYS, gradients.bucket)
        yield part("gathered weights", {training}, counted.gathered, sure=False)
    elif gradients.keeps_all:
        yield part("gradients", ALWAYS, 4 * counted.trained)
    else:
        phases = {step}
        if gradients.has_several:  # from the first backward pass to the step
            phases = _accumulating_phases(config, {training, step})
        summed_bytes = (gradients.accumulated if is_sharded else 4) * shard
        summed = part("gradients", phases, summed_bytes, sure=gradients.has_several or is_sharded)
        small_share = 0.0
        if is_sharded and not machine.gpus:
            small_share = counted.trained_small / counted.trained
        yield from _gradient_parts(summed, small_share, training)
    if is_sharded and not offload and (gradients.stage == 3 or not gradients.sums_in_fp32):
        yield part("flat gradients", {step}, 4 * shard, sure=False)
    # Only the engine that is made last adds to the peak while models load.
    is_last = role == "critic" or not rules.needs_critic(config)
    if is_sharded and not gradients.keeps_all and is_last:
        yield part("first gradients", {LOADING}, 4 * shard, offload, sure=False)
    activations = pass_bytes(
        model_shape,
        _micro_batch(config, f"{role}_train", machine),
        trains=True,
        checkpoints=config.model.gradient_checkpointing,
        entropy=config.loss.entropy_coef > 0 and role == "actor",
    )
    active = part(
        "activations, buckets", {training}, activations.peak(gradients.beside), sure=False
    )
    yield dataclasses.replace(active, small=activations.small)


def _accumulating_phases(config: PPOConfig, phases_of_model: Set[str]) -> Set[str]:
    """Return when the gradients of earlier passes are there: also while the other model takes its turn."""
    actor_spec = rules.micro_batch_spec(config, "actor_train")
    critic_spec = rules.micro_batch_spec(config, "critic_train")
    # Actor and critic take each micro batch in turn where these are the same.
    if rules.needs_critic(config) and actor_spec == critic_spec:
        return TRAINING
    return phases_of_model


def _gradient_parts(summed: Part, small_share: float, training: str) -> Iterator[Part]:
    """Yield the sum of gradients, and those of a pass: they may find no room between the activations that it frees.

    ZeRO copies a pass's gradients; where there is no sum of earlier passes, both are new.
    """
    small_bytes = int(small_share * summed.gpu)
    yield dataclasses.replace(summed, small=small_bytes)
    description = f"gradients of a pass ({summed.owner})"
    if training not in summed.phases:
        small_bytes *= 2
    yield Part("process", description, {training}, host=small_bytes, sure=False, small=small_bytes)


def _makes_room_for_vllm(config: PPOConfig, machine: Machine) -> bool:
    """Return whether what trains is put aside while vLLM samples on the same GPU."""
    engine = config.engine
    return machine.gpus and engine.rollout_engine == "vllm" and engine.offload_during_rollout


# -- passes and their rows ---------------------------------------------------------------------------------------------


def _micro_batch(config: PPOConfig, call: str, machine: Machine) -> MicroBatch:
    """Return a full micro batch of a call."""
    training = config.training
    prompt_length = config.data.prompt_max_len
    response_length = config.rollout.generate_max_len
    implementation = config.model.attn_implementation
    spec = rules.micro_batch_spec(config, call)
    samples = rules.samples_per_rollout(config)
    packed = (
        implementation != "eager" and training.packing_samples is not False and call != "reward"
    )
    rows_of_call = samples
    if call.endswith("train"):
        rows_of_call = min(samples, training.train_batch_size)
    has_groups = rows_of_call == samples or training.shuffle == "groups"
    rows_per_prompt = 1
    is_flash = implementation == "flash_attention_2"
    if packed and training.share_prompts and has_groups and not is_flash:
        rows_per_prompt = config.rollout.n_samples_per_prompt
    row_limit = spec.size
    if spec.unit == "tokens":
        row_limit = max(
            1, math.floor(spec.size / (prompt_length / rows_per_prompt + response_length))
        )
    # of which each rank has a piece
    size = config.strategy.sequence_parallel_size if call != "reward" else 1
    rows_of_rank = max(1, rows_of_call * size // machine.world_size)
    row_count = min(row_limit, rows_of_rank)
    prompt_count = math.ceil(row_count / rows_per_prompt)
    token_count = prompt_count * prompt_length + row_count * response_length
    read_count = row_count * response_length
    if spec.unit == "tokens" and token_count < spec.size and row_count < rows_of_rank:
        # more rows fill it where they are shorter
        read_count = read_count * spec.size // token_count
        token_count = spec.size
    if not packed:
        row_read = read_count // row_count
        return MicroBatch(row_count, token_count // row_count, row_count * row_read, "masked")
    attention = "apart"
    if is_flash or (machine.gpus and rules.compute_dtype(config) != "float32"):
        attention = "fused"
    return MicroBatch(1, math.ceil(token_count / size), math.ceil(read_count / size), attention)


def _scoring_parts(
    roles: Mapping[str, Shape], config: PPOConfig, machine: Machine
) -> Iterator[Part]:
    """Yield the largest pass without gradients."""
    calls = {"critic", "reference", "reward", *frozen_models(config)}
    plays = bool(config.episodes.env or config.episodes.tools)
    exact_rollout = config.engine.rollout_engine == "hf" and (
        config.engine.batch_invariant or not plays
    )
    if not config.evaluation.val_only and old_log_probs_from(config, exact_rollout) == "forward":
        calls.add("actor")
    passes = []
    for role, model_shape in roles.items():
        call = role.partition(" ")[0]  # "reward" of "reward model 1"
        if call in calls:
            gathered = 0
            if _placement(role, config)[0] == 3:
                gathered = sizes(model_shape).gathered
            forward = pass_bytes(model_shape, _micro_batch(config, call, machine))
            passes.append((forward.peak() + gathered, role, forward.small))
    if passes:
        peak_bytes, role, small_bytes = max(passes)
        yield Part(
            role, "pass without gradients", {SCORING}, gpu=peak_bytes, sure=False, small=small_bytes
        )


SAMPLER_BYTES = 24  # of a logit, in float32: its filters sort


def _rollout_parts(model_shape: Shape, config: PPOConfig, machine: Machine) -> Iterator[Part]:
    """Yield the KV cache of the HF engine, or vLLM's share."""
    engine = config.engine
    weight_bytes = sizes(model_shape).total * sizes(model_shape).width
    prompt_length = config.data.prompt_max_len
    longest_sequence = prompt_length + config.rollout.generate_max_len
    samples = rules.samples_per_rollout(config)
    row_count = max(1, min(rules.rollout_rows(config), samples // machine.world_size))
    prompt_count = max(1, row_count // config.rollout.n_samples_per_prompt)
    prefill = pass_bytes(
        model_shape, MicroBatch(prompt_count, prompt_length, prompt_count, "cache")
    )
    token_bytes = prefill.cache / (prompt_count * prompt_length)
    if engine.rollout_engine == "vllm":
        cache_tokens = engine.max_num_seqs * (engine.max_model_len or longest_sequence)
        vllm_bytes = weight_bytes + min(4 << 30, token_bytes * cache_tokens)
        if engine.kv_cache_memory_bytes is not None:
            vllm_bytes = weight_bytes + engine.kv_cache_memory_bytes
        elif machine.gpus:
            reserved = engine.gpu_memory_utilization * (machine.device_bytes or 0)
            vllm_bytes = max(weight_bytes + row_count * token_bytes, reserved)
        sleeps = engine.free_cache_engine and machine.gpus
        phases = {ROLLOUT, SYNC} if sleeps else ALWAYS
        yield Part("vLLM", "its share", phases, gpu=int(vllm_bytes))
        if sleeps and rules.sleep_level(config) == 1:
            yield Part("vLLM", "weights, asleep", ALWAYS, host=sizes(model_shape).bytes)
    elif engine.rollout_engine == "hf":
        engine_part = partial(Part, "HF engine", phases={ROLLOUT}, sure=False)
        if config.strategy.zero_stage == 3:
            yield Part("actor", "gathered for generation", {ROLLOUT}, gpu=weight_bytes)
        columns = longest_sequence + (128 if machine.gpus else 16)
        cache_bytes = int(row_count * (columns * token_bytes + prefill.states / prompt_count))
        yield engine_part(what="KV cache", gpu=cache_bytes)
        yield engine_part(what="prompts", gpu=prefill.peak(), small=prefill.small)
        if engine.hf_cuda_graphs:  # what a step needs for a moment, they hold
            vocabulary = model_shape.config.get_text_config().vocab_size
            yield engine_part(what="CUDA graphs", gpu=SAMPLER_BYTES * row_count * vocabulary)


# -- what to say of it -------------------------------------------------------------------------------------------------


def gigabytes(byte_count: float) -> str:
    return f"{byte_count / 1e9:.2f} GB"


def table(estimated: Estimate) -> list[str]:
    """Write parts and phases for people."""
    machine = estimated.machine
    ranks = machine.ranks_of_host
    unit = "GPU" if machine.gpus else "rank"
    has_critic = any(memory_part.owner == "critic" for memory_part in estimated.parts)
    lines = [f"GB of {machine.world_size} ranks, {ranks} on a host{'':<26}{unit:>12}{'host':>10}"]
    for memory_part in estimated.parts:
        phase_names = ""
        if len(memory_part.phases) < 8:
            phase_names = ", ".join(phase for phase in PHASES if phase in memory_part.phases)
        columns = f"{memory_part.gpu / 1e9:>10.2f}{memory_part.host * ranks / 1e9:>10.2f}"
        lines.append(
            f"  {memory_part.owner:<16}{memory_part.what:<32}{columns}   {phase_names}".rstrip()
        )
    lines.append("in each phase")
    for phase in PHASES:
        if has_critic or "critic" not in phase:
            gpu_bytes, host_bytes = estimated.of_phase(phase)
            rank_bytes = gpu_bytes if machine.gpus else host_bytes / ranks
            lines.append(f"  {phase:<48}{rank_bytes / 1e9:>10.2f}{host_bytes / 1e9:>10.2f}")
    peak_of_gpu = ""
    if machine.gpus:
        phase, gpu_bytes = estimated.peak()
        peak_of_gpu = f"{gigabytes(gpu_bytes)} of a GPU ({phase}), "
    phase, host_bytes = estimated.peak(of_host=True)
    limit_note = ""
    if machine.host_bytes and estimated.fits:
        limit_note = f"; it has {gigabytes(machine.host_bytes)}, so the run fits"
    return [*lines, f"peak: {peak_of_gpu}{gigabytes(host_bytes)} of a host ({phase}){limit_note}"]


# -- the memory of this host, and of this process --------------------------------------------------------------------


def host_bytes() -> int:
    """Return the memory of this machine, or of the container that this process is in."""
    limits = [psutil.virtual_memory().total]
    for file_name in ("memory.max", "memory/memory.limit_in_bytes"):  # cgroups, version 2 and 1
        try:
            limits.append(int(Path("/sys/fs/cgroup", file_name).read_text()))
        except (OSError, ValueError):  # no such file; "max"
            continue
    return min(limits)


def library_bytes(ranks: int) -> int:
    """Return the memory of this process; ranks of a host share what is mapped from files."""
    memory = psutil.Process().memory_info()
    shared = getattr(memory, "shared", 0)
    return memory.rss - shared + shared // ranks
