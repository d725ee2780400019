"""What a run needs of memory, before anything loads: bytes of a GPU and of a host, by part and phase, and the peak.

Parameters are counted, and passes run, on torch's meta device, which holds no data. What DeepSpeed 0.19 and vLLM hold
is by formula, from their sources. Micro batches are taken to be full: longest prompts and responses.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from lightppo.config.contradictions import facts_of
from lightppo.config.rules import frozen_models, old_log_probs_from
from lightppo.distributed.deepspeed import CPU_BUCKET_ELEMENTS
from lightppo.errors import ConfigError, UserError
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
TRAINING = {ACTOR, ACTOR_STEP, CRITIC, CRITIC_STEP}

GPU_BUCKET_ELEMENTS = 500_000_000  # DeepSpeed's own reduce_bucket_size
LIVE_ELEMENTS = 1_000_000_000  # its stage3_max_live_parameters
NF4_BYTES = 0.516  # of a weight in 4 bits, scales included
CUDA_BYTES = 2_000_000_000  # assumed: CUDA's context, NCCL's buffers, gaps of the allocator
KEPT_BLOCK = (
    32 << 20
)  # freed blocks below stay with a process on a CPU: glibc, see distributed/device.py
_COUNTED = "counted"  # the attention of models on the meta device


# -- passes on the meta device -----------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Bytes of tensors on a device that operations inside have made and that still live: now, and at most.

    ``small`` and ``most_small`` are those in blocks below ``KEPT_BLOCK``.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.live = 0
        self.peak = 0
        self.small = self.most_small = 0
        # (bytes of finished gradients, the most bytes alive until then)
        self.curve: list[tuple[int, int]] = []
        self._holders: dict[int, weakref.ref] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        # These are the places to read. Here all are taken as distinct.
        if func is torch.ops.aten._unique2.default and args[0].is_meta:
            return args[0].clone(), args[0].new_empty(0), args[0].new_empty(0)
        earlier_holders = {
            _holder(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if (
                isinstance(tensor, Tensor)
                and tensor.device.type == self.device
                and _holder(tensor) not in earlier_holders | self._holders.keys()
            ):
                self._add(_holder(tensor), tensor)
        return result

    def _add(self, key: int, tensor: Tensor) -> None:
        holder: Any = tensor
        size = tensor.nbytes
        if tensor.layout is torch.strided:
            holder = tensor.untyped_storage()
            size = holder.nbytes()
        small = size if size < KEPT_BLOCK else 0

        def gone(_: Any) -> None:
            self.live -= size
            self.small -= small
            del self._holders[key]

        self._holders[key] = weakref.ref(holder, gone)
        self.live += size
        self.small += small
        self.peak = max(self.peak, self.live)
        self.most_small = max(self.most_small, self.small)

    def finish(self, parameter: nn.Parameter | None = None) -> None:
        """Take a finished gradient away, as ZeRO does, as a hook; without one, end the pass."""
        finished_bytes = self.curve[-1][0] if self.curve else 0
        if parameter is not None:
            finished_bytes += parameter.grad.nbytes
            parameter.grad = None
        self.curve.append((finished_bytes, self.peak))
        self.peak = self.live


def _holder(tensor: Tensor) -> int:
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
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (*(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3]), None)


def _counted_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    kind: str = "fused",
    **_: Any,
) -> tuple[Tensor, None]:
    """Count a ``kind``: a fused kernel, torch's for rows one by one ("apart"), or with padding and a mask ("masked")."""
    bias = None
    # In each layer, transformers repeats keys and values, and torch turns the mask into numbers.
    if kind == "masked":
        key, value = (
            states.repeat_interleave(query.shape[1] // states.shape[1], 1)
            for states in (key, value)
        )
        bias = query.new_empty(query.shape[0], 1, query.shape[2], key.shape[2])
    output = _Attention.apply(query, key, value, bias)
    return (output.contiguous() if kind == "apart" else output).transpose(1, 2), None


def _counted_experts(
    module: nn.Module, config: PretrainedConfig, hidden: Tensor, *_: Any, **__: Any
) -> Tensor:
    """Return a mixture of experts, each token through its number of them: (T, H) -> (T, H)."""
    rows = hidden.repeat_interleave(getattr(config, "num_experts_per_tok", 1), 0)
    gate, value = _projected(rows, module.gate_up_proj[0]).chunk(2, -1)
    inner = nn.functional.silu(gate) * value
    output = _projected(inner, module.down_proj[0])
    return output.view(len(hidden), -1, hidden.shape[1]).sum(1)


def _projected(rows: Tensor, weight: Tensor) -> Tensor:
    """Multiply by a weight, whichever of its two dimensions comes first."""
    return rows @ (weight if weight.shape[0] == rows.shape[1] else weight.T)


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
    trained_small: int = 0  # of those whose float32 gradients are blocks below KEPT_BLOCK


@dataclass(frozen=True)
class PassRows:
    """What one pass takes: ``batch`` rows of ``length`` positions, ``read`` of all of them; ``packed``: one row."""

    batch: int
    length: int
    read: int
    packed: bool


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
    auto = transformers.AutoModelForCausalLM
    if shape.scores:
        config.num_labels = 1
        auto = transformers.AutoModelForSequenceClassification
    options = {"dtype": shape.dtype, "attn_implementation": "eager"}
    # An earlier run in this process may have set it, and nothing is sharded here.
    hf_deepspeed.unset_hf_deepspeed_config()
    with torch.device("meta"):
        model = auto.from_config(config, trust_remote_code=shape.trust_remote_code, **options)
        # Qwen3.5 has the first at False, and attends by what its config names
        if not shape.eager and (
            model._supports_attention_backend or model._can_set_attn_implementation()
        ):
            model.set_attn_implementation(_COUNTED)
        for module in model.modules():
            if all(
                isinstance(getattr(module, name, None), Tensor)
                for name in ("gate_up_proj", "down_proj")
            ):
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
    model = built(shape).hf_model
    width = shape.dtype.itemsize
    parameters = {
        name.replace(".base_layer", ""): parameter for name, parameter in model.named_parameters()
    }
    total = sum(parameter.numel() for parameter in parameters.values())
    trained_parameters = [each for each in parameters.values() if each.requires_grad]
    trained = sum(parameter.numel() for parameter in trained_parameters)
    small = 0
    if shape.in_4bit:
        bare = built(dataclasses.replace(shape, adapters=None, in_4bit=False)).hf_model
        small = sum(
            parameters[f"{name}.weight"].numel()
            for name in fitting_layers(bare, heads.head_names(bare))
        )
    of_weights = int((total - small) * width + small * NF4_BYTES)
    in_small = sum(each.numel() for each in trained_parameters if 4 * each.numel() < KEPT_BLOCK)
    return Sizes(total, trained, of_weights, width, in_small)


@lru_cache(maxsize=256)
def pass_bytes(
    shape: Shape,
    rows: PassRows,
    *,
    kind: str,
    trains: bool = False,
    checkpoints: bool = False,
    entropy: bool = False,
) -> PassBytes:
    """Return one pass on the meta device: forward through body and head, in training the backward too."""
    wrapper = built(shape)
    model = built(shape).hf_model
    live = LiveBytes("meta")
    transformers.AttentionInterface.register(_COUNTED, partial(_counted_attention, kind=kind))
    model.train(trains)
    if checkpoints:
        wrapper.gradient_checkpointing_enable()
    else:
        wrapper.gradient_checkpointing_disable()
    hooks = [
        parameter.register_post_accumulate_grad_hook(live.finish)
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    partly = rows.packed and rows.read < READ_SHARE * rows.length and not checkpoints
    with torch.device("meta"), live, torch.set_grad_enabled(trains):
        places = torch.zeros(rows.read // rows.batch, dtype=torch.long)
        with only_at(position_wise(model) if partly else [], places):
            scores, cache = _scores(shape, rows, places, kind, entropy)
        if trains:
            scores.sum().backward()
    live.finish()
    for hook in hooks:
        hook.remove()
    return PassBytes(tuple(live.curve), live.most_small, *cache)


def _cache_bytes(layers: Iterable[Any]) -> tuple[int, int]:
    """Return the keys and values, and states of layers that have those instead, which do not grow."""
    growing_bytes = constant_bytes = 0
    for layer in layers:
        for state in vars(layer).values():
            if isinstance(state, dict):
                constant_bytes += sum(
                    tensor.nbytes for tensor in state.values() if isinstance(tensor, Tensor)
                )
            elif isinstance(state, Tensor):
                growing_bytes += state.nbytes
    return growing_bytes, constant_bytes


def _scores(
    shape: Shape, rows: PassRows, places: Tensor, kind: str, entropy: bool
) -> tuple[Tensor, tuple[int, int]]:
    """Return log probs, or values, at the places that are read; and the bytes of the cache, (0, 0) without one."""
    model = built(shape).hf_model
    ids = torch.zeros(rows.batch, rows.length, dtype=torch.long)
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": kind == "cache"}
    if takes(model, "position_ids"):
        inputs["position_ids"] = torch.zeros_like(ids)
    if takes(model, "attention_mask"):  # four dimensions: taken as it is
        eager = model.config._attn_implementation == "eager"
        has_square_mask = eager or kind == "masked"
        mask_type = model.dtype if eager else torch.bool
        mask = torch.zeros(
            rows.batch, 1, *((rows.length,) * 2 if has_square_mask else (2, 1)), dtype=mask_type
        )
        inputs["attention_mask"] = mask
    if shape.scores:
        hidden = model.base_model(**inputs).last_hidden_state
        return heads.value_head(model)[1](hidden[:, places].flatten(0, 1)).float(), (0, 0)
    if in_model := takes(model, "logits_to_keep"):
        inputs["logits_to_keep"] = places
    if kind == "cache":
        output = model(**inputs)
        return output.logits, _cache_bytes(output[cache_argument(model)].layers)
    labels = torch.zeros(rows.read, dtype=torch.long)
    trains = torch.is_grad_enabled()

    def select(hidden: Tensor) -> Tensor:
        return (hidden if in_model else hidden[:, places]).reshape(rows.read, -1).clone()

    if (head := scoring_head(model)) is not None:
        with scores_from_head(
            head, select, labels, 1.0, entropy=trains, entropy_grad=entropy
        ) as head_scores:
            output = model(**inputs)
        if is_untouched(head_scores, output.logits):
            return output.logits, (0, 0)
    logits = model(**inputs).logits.reshape(rows.read, -1).float()
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


@dataclass(frozen=True)
class Part:
    """Bytes of one rank, in some phases."""

    owner: str  # actor, critic, …
    what: str
    phases: frozenset[str]
    gpu: int = 0
    host: int = 0
    sure: bool = True  # depends neither on lengths nor on what a library does at a moment
    small: int = (
        0  # of a pass: its most in blocks that a process on a CPU keeps when they are freed
    )


@dataclass(frozen=True)
class Estimate:
    """All parts of a run."""

    machine: Machine
    parts: tuple[Part, ...]

    def of_phase(self, phase: str, sure: bool = False) -> tuple[int, int]:
        """Return bytes of a GPU, and of a host with all its ranks; ``sure``: of the certain parts alone."""
        parts_of_phase = [
            part for part in self.parts if phase in part.phases and (part.sure or not sure)
        ]
        gpu = sum(part.gpu for part in parts_of_phase)
        host = sum(part.host for part in parts_of_phase)
        ranks = min(self.machine.world_size, self.machine.per_node)
        if self.machine.gpus:
            return (gpu, host * ranks)
        return (0, (gpu + host) * ranks)

    def peak(self, of_host: bool = False, sure: bool = False) -> tuple[str, int]:
        """Return the phase that needs most of a GPU, or of a host, and how much; without GPUs always of a host."""
        size_index = int(of_host or not self.machine.gpus)
        return max(
            ((phase, self.of_phase(phase, sure)[size_index]) for phase in PHASES),
            key=lambda item: item[1],
        )

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
    always = frozenset(PHASES)
    parts = [
        Part("CUDA", "context, NCCL, gaps", always, gpu=CUDA_BYTES * machine.gpus, sure=False),
        Part("process", "Python, torch, libraries", always, host=machine.library_bytes),
    ]
    for role, shape in roles.items():
        trains = role in ("actor", "critic") and not config.evaluation.val_only
        stage, offload = _placement(role, config)
        parts += _weight_parts(role, shape, stage, offload, config, machine)
        if trains:
            parts += _training_parts(role, shape, stage, config, machine)
    parts += _loading_part(roles, config, machine)
    parts += [
        *_scoring_parts(roles, config, machine),
        *_rollout_parts(roles["actor"], config, machine),
    ]
    rollout = config.rollout
    samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    # A row: ids, masks, about nine numbers of each token of the response.
    row = 16 * config.data.prompt_max_len + 53 * rollout.generate_max_len
    rows = math.ceil(samples / machine.world_size) * row
    on_device = 0 if config.training.buffer_cpu_offload else rows
    phases = frozenset({SCORING, *TRAINING})
    parts += [
        Part("experience", "rows", phases, gpu=on_device, host=rows - on_device, sure=False),
        Part("experience", "on the device", frozenset({SCORING}), gpu=rows, sure=False),
    ]
    if config.engine.rollout_engine != "hf":
        size = 2 * BUCKET_BYTES
        parts.append(
            Part("engine", "two buckets of weights", frozenset({SYNC}), gpu=size, sure=False)
        )
    parts += _file_copies(roles["actor"], machine)
    if not machine.gpus:
        parts += list(_freed_blocks(parts))
    return Estimate(machine, tuple(part for part in parts if part.gpu or part.host))


def _file_copies(actor: Shape, machine: Machine) -> Iterator[Part]:
    """Yield what is copied for a file, and merged with adapters in another copy. Only rank 0 has them."""
    ranks = min(machine.world_size, machine.per_node)
    saving = frozenset({SAVE})
    named_parameters = built(actor).hf_model.named_parameters()
    adapted = sum(
        parameter.numel()
        for name, parameter in named_parameters
        if name.endswith(".base_layer.weight")
    )
    yield Part("actor", "copy for files", saving, host=sizes(actor).bytes // ranks)
    yield Part("actor", "merged weights", saving, host=adapted * sizes(actor).width // ranks)


def _freed_blocks(parts: Iterable[Part]) -> Iterator[Part]:
    """Yield what a process on a CPU has freed and keeps: where a phase has less in small blocks than the largest pass."""
    small_bytes = {
        phase: sum(part.small for part in parts if phase in part.phases) for phase in PHASES
    }
    freed_by_phase = {
        phase: max(small_bytes.values()) - size
        for phase, size in small_bytes.items()
        if phase != LOADING
    }
    for size in sorted(set(freed_by_phase.values()) - {0}):
        phases = frozenset(
            phase for phase, freed_bytes in freed_by_phase.items() if freed_bytes == size
        )
        yield Part("process", "freed blocks that it keeps", phases, host=size, sure=False)


def shapes(config: PPOConfig, configs: Mapping[str, PretrainedConfig]) -> dict[str, Shape]:
    """Return the models of a run, by role."""
    model = config.model
    adapter = config.adapter
    lora = None
    options = {"override_config": model.override_config}
    options |= {"trust_remote_code": model.trust_remote_code, "external_lib": model.external_lib}

    own_dtype = getattr(torch, rules.compute_dtype(config))

    def shape(
        path: str, flag: str, scores: bool = False, dtype: torch.dtype = own_dtype, **traits: Any
    ) -> Shape:
        model_config = configs.get(path) or loading.load_config(
            stage_to_local(path), flag=flag, **options
        )
        eager = model.attn_implementation == "eager" or (
            model.attn_implementation == "auto" and caps_scores(model_config)
        )
        traits |= {"eager": eager, "trust_remote_code": model.trust_remote_code}
        return Shape(model_config, model_config.to_json_string(), scores, dtype, **traits)

    if config.flat().get("lora_rank", 0) > 0:
        lora = LoraOptions(
            adapter.lora_rank, adapter.lora_alpha, adapter.lora_dropout, adapter.target_modules
        )
    actor_options = {"adapters": lora, "in_4bit": adapter.load_in_4bit}
    roles = {"actor": shape(model.pretrain, "--pretrain", **actor_options)}
    if rules.needs_critic(config):
        roles["critic"] = shape(model.critic_pretrain, "--critic_pretrain", True, **actor_options)
    if rules.needs_reference(config) and facts_of(config).get("own_reference", True):
        dtype = torch.float32 if rules.moves_reference(config) else own_dtype
        roles["reference"] = shape(
            model.ref_pretrain, "--ref_pretrain", dtype=dtype, in_4bit=adapter.load_in_4bit
        )
    if "ema" in rules.moving_models(config):
        roles["moving average"] = shape(model.pretrain, "--pretrain", dtype=torch.float32)
    for name, further in frozen_models(config).items():
        roles[name] = shape(further.path, further.flag)
    for i, path in enumerate(model.reward_pretrain, start=1):
        roles[f"reward model {i}"] = shape(path, "--reward_pretrain", True)
    return roles


def _placement(role: str, config: PPOConfig) -> tuple[int, bool]:
    """Return the ZeRO stage of a model, and whether its weights wait on the host."""
    strategy = config.strategy
    if role in ("actor", "critic"):
        if role == "critic":
            return (strategy.critic_zero_stage, rules.critic_offloads(config)[1])
        return (strategy.zero_stage, strategy.param_offload)
    stage = strategy.ref_zero_stage
    offload = strategy.ref_offload
    return 3 if offload else stage, offload


def _weight_parts(
    role: str, shape: Shape, stage: int, offload: bool, config: PPOConfig, machine: Machine
) -> Iterator[Part]:
    counted = sizes(shape)
    always = frozenset(PHASES)
    size = counted.bytes
    if stage == 3:
        size = math.ceil(counted.bytes / machine.world_size)
    yield Part(role, "weights", always, gpu=size * (not offload), host=size * offload)
    if stage == 3 and config.strategy.zpg > 1:
        yield Part(
            role, "secondary shards (--zpg)", always, gpu=counted.bytes // config.strategy.zpg
        )


def _loading_part(
    roles: Mapping[str, Shape], config: PPOConfig, machine: Machine
) -> Iterator[Part]:
    """Yield the largest model that is whole on a host while it loads: each goes to its GPU before the next one loads."""
    loading_parts = []
    for role, shape in roles.items():
        counted = sizes(shape)
        scratch = config.model.init_from_scratch
        # A checkpoint in the run's own type is mapped from its file, once for all ranks of a host.
        mapped = shape.config.dtype is built(shape).hf_model.dtype and not (
            shape.in_4bit or scratch
        )
        ranks = 1
        description = "whole on the host"
        if mapped:
            ranks = min(machine.world_size, machine.per_node)
            description = "mapped from the file"
        if _placement(role, config)[0] != 3:
            size = math.ceil(counted.total * counted.width / ranks)
            loading_parts.append(Part(role, description, frozenset({LOADING}), host=size))
    if machine.gpus and loading_parts:
        yield max(loading_parts, key=lambda part: part.host)


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

    def beside(self, made: int) -> float:
        """Return gradients and buffers when so many bytes have been made, beyond the parts of a run."""
        is_done = made == self.total
        if self.stage == 0 or self.keeps_all:
            return made * (self.keeps_all or not self.has_several) + is_done * self.copies
        if self.stage == 3:
            return 0
        bucket = (made > 0) * self.bucket
        pass_sum = self.shard * self.accumulated  # beside the sum of earlier passes
        if self.sums_in_fp32 and self.has_several:
            pass_sum = 0
        if self.stage == 1:
            return bucket + made * (1 + 2 * self.sums_in_fp32) + is_done * pass_sum
        return bucket + (made >= min(self.bucket, self.total)) * pass_sum


def _gradients(
    role: str, shape: Shape, stage: int, offload: bool, config: PPOConfig, machine: Machine
) -> _Gradients:
    strategy = config.strategy
    counted = sizes(shape)
    accumulated = 2 if strategy.grad_accum_dtype == "bf16" else 4
    sums_in_fp32 = counted.width == 2 and accumulated == 4
    bucket = (GPU_BUCKET_ELEMENTS if machine.gpus else CPU_BUCKET_ELEMENTS) * counted.width
    if strategy.overlap_comm and stage == 2:  # stage 3 overlaps from one buffer
        bucket *= 2
    shard = counted.trained
    if stage > 0:
        shard = math.ceil(counted.trained / machine.world_size)
    copies = 0
    if machine.world_size > 1:  # DeepSpeed sends those of 16 bits
        copies = (4 + 2 * sums_in_fp32) * min(counted.trained, GPU_BUCKET_ELEMENTS)
    rows, _ = _rows(config, f"{role}_train", machine)
    return _Gradients(
        stage,
        shard,
        counted.trained * counted.width,
        accumulated,
        bucket,
        copies,
        has_several=_micro_batches(config, rows, machine) > 1,
        sums_in_fp32=sums_in_fp32,
        keeps_all=stage == 1 and shape.dtype is torch.bfloat16 and sums_in_fp32 and not offload,
    )


def _training_parts(
    role: str, shape: Shape, stage: int, config: PPOConfig, machine: Machine
) -> Iterator[Part]:
    """Yield fp32 masters, Adam, gradients, DeepSpeed's buffers, activations of actor or critic."""
    counted = sizes(shape)
    offload = config.strategy.adam_offload
    train = ACTOR
    step = ACTOR_STEP
    if role == "critic":
        offload = rules.critic_offloads(config)[0]
        train = CRITIC
        step = CRITIC_STEP
    gradients = _gradients(role, shape, stage, offload, config, machine)
    shard = gradients.shard

    def part(
        what: str, phases: Iterable[str], size: float, host: bool = False, sure: bool = True
    ) -> Part:
        return Part(role, what, frozenset(phases), int(size) * (not host), int(size) * host, sure)

    always = frozenset(PHASES)
    device_phases = always
    if not offload and _makes_room_for_vllm(config, machine):
        device_phases = always - {ROLLOUT}
        per_number = 8 + 4 * (stage > 0) + gradients.accumulated * (stage == 3)
        yield part("put aside while vLLM samples", always, per_number * shard, host=True)
    if stage > 0:
        yield part("fp32 masters", device_phases, 4 * shard, offload)
    yield part("Adam", device_phases - {LOADING}, 8 * shard, offload)
    if offload:
        yield part("gradients and copies of shards", always, (4 + counted.width) * shard, host=True)
    if stage == 3:
        size = gradients.accumulated * shard
        yield part("gradients of the shard", device_phases, size, offload)
        yield part("reduction", always, gradients.bucket)
        gathered = min(counted.total, LIVE_ELEMENTS) * counted.width
        yield part("gathered weights", [train], gathered, sure=False)
    elif gradients.keeps_all:
        yield part("gradients", always, 4 * counted.trained)
    else:
        phases = {step}
        if gradients.has_several:  # from the first backward pass to the step
            # The other model trains between them, where both take each micro batch in turn.
            phases = TRAINING if _train_by_turns(config) else {train, step}
        size = (4 if stage == 0 else gradients.accumulated) * shard
        summed = part("gradients", phases, size, sure=gradients.has_several or stage > 0)
        share = 0.0
        if stage > 0 and not machine.gpus:
            share = counted.trained_small / counted.trained
        yield from _gradient_parts(summed, share, train)
    if stage > 0 and not offload and (stage == 3 or not gradients.sums_in_fp32):
        yield part("flat gradients", [step], 4 * shard, sure=False)
    # Only the engine that is made last adds to the peak while models load.
    is_last = role == "critic" or not rules.needs_critic(config)
    if stage > 0 and not gradients.keeps_all and is_last:
        yield part("first gradients", [LOADING], 4 * shard, offload, sure=False)
    activations = _training_pass(role, shape, config, machine)
    size = activations.peak(gradients.beside)
    yield dataclasses.replace(
        part("activations, buckets", [train], size, sure=False), small=activations.small
    )


def _training_pass(role: str, shape: Shape, config: PPOConfig, machine: Machine) -> PassBytes:
    """Run forward and backward over a full micro batch of actor or critic."""
    rows, kind = _rows(config, f"{role}_train", machine)
    return pass_bytes(
        shape,
        rows,
        kind=kind,
        trains=True,
        checkpoints=config.model.gradient_checkpointing,
        entropy=config.loss.entropy_coef > 0 and role == "actor",
    )


def _gradient_parts(gradients: Part, share: float, train: str) -> Iterator[Part]:
    """Yield the sum of gradients, and those of a pass: they may find no room between the activations that it frees.

    ZeRO copies a pass's gradients; where there is no sum of earlier passes, both are new.
    """
    small = int(share * gradients.gpu)
    yield dataclasses.replace(gradients, small=small)
    description = f"gradients of a pass ({gradients.owner})"
    new_bytes = small * (1 + (train not in gradients.phases))
    yield Part(
        "process", description, frozenset({train}), host=new_bytes, sure=False, small=new_bytes
    )


def _makes_room_for_vllm(config: PPOConfig, machine: Machine) -> bool:
    """Return whether what trains is put aside while vLLM samples on the same GPU."""
    engine = config.engine
    return machine.gpus > 0 and engine.rollout_engine == "vllm" and engine.offload_during_rollout


# -- passes and their rows ---------------------------------------------------------------------------------------------


def _train_by_turns(config: PPOConfig) -> bool:
    """Return whether actor and critic take each micro batch in turn."""
    actor, critic = (
        rules.micro_batch_spec(config, call) for call in ("actor_train", "critic_train")
    )
    return rules.needs_critic(config) and actor == critic


def _rows(config: PPOConfig, call: str, machine: Machine) -> tuple[PassRows, str]:
    """Return a full micro batch of a call, and how it attends."""
    training = config.training
    prompt = config.data.prompt_max_len
    response = config.rollout.generate_max_len
    attention = config.model.attn_implementation
    per_prompt = config.rollout.n_samples_per_prompt
    spec = rules.micro_batch_spec(config, call)
    samples = config.rollout.rollout_batch_size * per_prompt
    packed = attention != "eager" and training.packing_samples is not False and call != "reward"
    rows_of_call = samples
    if call.endswith("train"):
        rows_of_call = min(samples, training.train_batch_size)
    whole_groups = rows_of_call == samples or training.shuffle == "groups"
    shared = 1
    if packed and training.share_prompts and whole_groups and attention != "flash_attention_2":
        shared = per_prompt
    fitting = spec.size
    if spec.unit == "tokens":
        fitting = max(1, math.floor(spec.size / (prompt / shared + response)))
    count = min(fitting, max(1, rows_of_call // machine.world_size))
    if not packed:
        return PassRows(count, prompt + response, count * response, False), "masked"
    fused = attention == "flash_attention_2" or (
        machine.gpus and rules.compute_dtype(config) != "float32"
    )
    tokens = math.ceil(count / shared) * prompt + count * response
    return PassRows(1, tokens, count * response, True), "fused" if fused else "apart"


def _micro_batches(config: PPOConfig, rows: PassRows, machine: Machine) -> int:
    """Return those of an optimizer step, on a rank."""
    rollout = config.rollout
    training = config.training
    samples = min(
        training.train_batch_size, rollout.rollout_batch_size * rollout.n_samples_per_prompt
    )
    return math.ceil(samples / machine.world_size * rollout.generate_max_len / rows.read)


def _scoring_parts(
    roles: Mapping[str, Shape], config: PPOConfig, machine: Machine
) -> Iterator[Part]:
    """Yield the largest pass without gradients."""
    calls = {name: name for name in ("critic", "reference", *frozen_models(config))}
    flat = config.flat()
    plays = (flat.get("env") or flat.get("tools")) and not flat.get("batch_invariant")
    exact = config.engine.rollout_engine == "hf" and not plays
    if not config.evaluation.val_only and old_log_probs_from(config, exact) == "forward":
        calls["actor"] = "actor"
    passes = []
    for role, shape in roles.items():
        call = "reward" if role.startswith("reward") else calls.get(role)
        if call is not None:
            rows, kind = _rows(config, call, machine)
            gathered = 0
            if _placement(role, config)[0] == 3:
                gathered = min(sizes(shape).total, LIVE_ELEMENTS) * sizes(shape).width
            run = pass_bytes(shape, rows, kind=kind)
            passes.append((run.peak() + gathered, role, run.small))
    if passes:
        size, role, small = max(passes)
        phases = frozenset({SCORING})
        yield Part(role, "pass without gradients", phases, gpu=size, sure=False, small=small)


def _rollout_parts(shape: Shape, config: PPOConfig, machine: Machine) -> Iterator[Part]:
    """Yield the KV cache of the HF engine, or vLLM's share."""
    engine = config.engine
    rollout = config.rollout
    weights = sizes(shape).total * sizes(shape).width
    prompt = config.data.prompt_max_len
    response = rollout.generate_max_len
    samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    slots = max(1, min(rules.rollout_rows(config), samples // machine.world_size))
    prompts = max(1, slots // rollout.n_samples_per_prompt)
    run = pass_bytes(shape, PassRows(prompts, prompt, prompts, False), kind="cache")
    of_token = run.cache / (prompts * prompt)
    while_sampling = frozenset({ROLLOUT})
    if engine.rollout_engine == "vllm":
        longest = engine.max_model_len or prompt + response
        share = weights + min(4 << 30, of_token * engine.max_num_seqs * longest)
        if engine.kv_cache_memory_bytes is not None:
            share = weights + engine.kv_cache_memory_bytes
        elif machine.gpus:
            reserved = engine.gpu_memory_utilization * (machine.device_bytes or 0)
            share = max(weights + slots * of_token, reserved)
        sleeps = engine.free_cache_engine and machine.gpus
        phases = frozenset({ROLLOUT, SYNC} if sleeps else PHASES)
        yield Part("vLLM", "its share", phases, gpu=int(share))
        if sleeps and rules.sleep_level(config) == 1:
            yield Part("vLLM", "weights, asleep", frozenset(PHASES), host=sizes(shape).bytes)
    elif engine.rollout_engine == "hf":
        if config.strategy.zero_stage == 3:
            yield Part("actor", "gathered for generation", while_sampling, gpu=weights)
        columns = prompt + response + (128 if machine.gpus else 16)
        cache = int(slots * (columns * of_token + run.states / prompts))
        yield Part("HF engine", "KV cache", while_sampling, gpu=cache, sure=False)
        yield Part(
            "HF engine", "prompts", while_sampling, gpu=run.peak(), sure=False, small=run.small
        )
        if engine.hf_cuda_graphs:  # what a step needs for a moment, they hold
            logits = slots * shape.config.get_text_config().vocab_size
            size = SAMPLER_BYTES * logits
            yield Part("HF engine", "CUDA graphs", while_sampling, gpu=size, sure=False)


SPARE = 0.2  # of a GPU: gaps of the allocator, a buffer of the cache beside its wider copy
SAMPLER_BYTES = 24  # of a logit, in float32: its filters sort
MOST_ROWS = 512


def decoding_rows(
    config: PPOConfig, machine: Machine, configs: Mapping[str, PretrainedConfig] | None = None
) -> int:
    """Return the rows that the HF engine can decode together beside all that a run holds then: a multiple of 8, at least 8.

    A step of decoding launches the same kernels for any number of rows.
    """
    estimated = estimate(config, machine, configs)
    rollout = config.rollout
    bytes_of_others = sum(
        part.gpu for part in estimated.parts if ROLLOUT in part.phases and part.owner != "HF engine"
    )
    engine_bytes = sum(part.gpu for part in estimated.parts if part.owner == "HF engine")
    samples = max(
        1, rollout.rollout_batch_size * rollout.n_samples_per_prompt // machine.world_size
    )
    vocabulary = shapes(config, configs or {})["actor"].config.get_text_config().vocab_size
    row = engine_bytes / min(rules.rollout_rows(config), samples) + SAMPLER_BYTES * vocabulary
    fitting_rows = int((1 - SPARE) * machine.device_bytes - bytes_of_others) // int(row)
    return max(8, min(fitting_rows, samples, MOST_ROWS) // 8 * 8)


def rows_that_fit(config: PPOConfig, strategy: Any) -> int:
    """Return :func:`decoding_rows` on the GPU with least room, and say so. Collective."""
    # What other processes hold is not there for this one.
    size = torch.cuda.mem_get_info(strategy.device)[0] + torch.cuda.memory_reserved(strategy.device)
    try:
        rows = decoding_rows(config, Machine(strategy.world_size, device_bytes=size))
    except Exception as error:  # of the model's own code, on a device that holds no data
        strategy.print(
            f"note: the memory of decoding cannot be computed: {type(error).__name__}: {error}"
        )
        rows = rules.rollout_rows(config)
    rows = strategy.all_reduce(rows, "min")
    strategy.print(
        f"HF engine: {rows} rows at a time, by the GPU's memory (--micro_rollout_batch_size sets it)"
    )
    return rows


# -- what to say of it -------------------------------------------------------------------------------------------------

# the cheapest for a run first; those of parts that it lacks are left out
REMEDIES: tuple[dict[str, Any], ...] = (
    {"bf16": True},
    {"gradient_checkpointing": True},
    {"max_tokens_per_micro_batch": None, "micro_train_batch_size": 1},
    {"micro_rollout_batch_size": 1},
    dict.fromkeys(("zero_stage", "critic_zero_stage", "ref_zero_stage"), 3),
    {"adam_offload": True},
    {"ref_offload": True},
    {"param_offload": True},
    {"lora_rank": 16},
    {"lora_rank": 16, "load_in_4bit": True},
)


def advice(
    config: PPOConfig, machine: Machine, configs: Mapping[str, PretrainedConfig] | None = None
) -> list[str]:
    """Say of a run that does not fit what each remedy saves, and the first ones that are enough together."""
    start = best = estimate(config, machine, configs).peak()[1]
    now = config
    lines = []
    has_frozen = rules.needs_reference(config) or config.model.reward_pretrain
    idle = set() if has_frozen else {"ref_zero_stage"}

    def peak(base: PPOConfig, changes: Mapping[str, Any]) -> tuple[float, PPOConfig]:
        flat = base.flat()
        critic = rules.needs_critic(base)
        changes = {
            n: v
            for n, v in changes.items()
            if n not in idle and (critic or not n.startswith("critic_"))
        }
        changes = {n: v for n, v in changes.items() if flat[n] != v}
        try:
            changed = base.with_options(**changes)
            changed.validate(machine.world_size, unfed=True)
            size = estimate(changed.resolved(), machine, configs).peak()[1] if changes else math.inf
        except UserError:  # not for this run, or not with this model
            return math.inf, base
        return size, changed

    def flags(changed: PPOConfig) -> str:
        before = config.flat()
        after = changed.flat()
        return " ".join(
            f"--{n}" + f" {v}" * (v is not True) for n, v in after.items() if before[n] != v
        )

    for remedy in REMEDIES:
        alone, changed = peak(config, remedy)
        if alone < 0.99 * start:
            lines.append(f"  {flags(changed)}: {gigabytes(start - alone)} less")
        if best > 0.9 * machine.limit:  # the estimate may be 10% off
            together, changed = peak(now, remedy)
            if together < 0.99 * best:
                now = changed
                best = together
    if best <= machine.limit:
        fits = "fits"
    else:
        fits = (
            f"does not fit either: more {'GPUs' if machine.gpus else 'memory'}, or a smaller model"
        )
    if now is config:
        return [*lines, f"  no option saves enough: {gigabytes(best)}, which {fits}"]
    return [*lines, f"  together {flags(now)}: {gigabytes(best)}, which {fits}"]


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB"


def table(estimated: Estimate) -> list[str]:
    """Write parts and phases for people."""
    gpus = estimated.machine.gpus
    ranks = min(estimated.machine.world_size, estimated.machine.per_node)
    lines = [
        f"GB of {estimated.machine.world_size} ranks, {ranks} on a host{'':<26}{'GPU' if gpus else 'rank':>12}{'host':>10}"
    ]
    for part in estimated.parts:
        when = ""
        if len(part.phases) < 8:
            when = ", ".join(phase for phase in PHASES if phase in part.phases)
        lines.append(
            f"  {part.owner:<16}{part.what:<32}{part.gpu / 1e9:>10.2f}{part.host * ranks / 1e9:>10.2f}   {when}".rstrip()
        )
    lines.append("in each phase")
    for phase in [
        phase_name
        for phase_name in PHASES
        if "critic" not in phase_name or any(part.owner == "critic" for part in estimated.parts)
    ]:
        of_gpu, host = estimated.of_phase(phase)
        lines.append(
            f"  {phase:<48}{(of_gpu if gpus else host / ranks) / 1e9:>10.2f}{host / 1e9:>10.2f}"
        )
    (phase, size), (host_phase, host) = estimated.peak(), estimated.peak(of_host=True)
    of_gpu = f"{gigabytes(size)} of a GPU ({phase}), " if gpus else ""
    limit = estimated.machine.host_bytes
    host_note = f"; it has {gigabytes(limit)}, so the run fits" if limit and estimated.fits else ""
    return [*lines, f"peak: {of_gpu}{gigabytes(host)} of a host ({host_phase}){host_note}"]


def check_memory(
    config: PPOConfig, machine: Machine, configs: Mapping[str, PretrainedConfig] | None = None
) -> list[str]:
    """Return what to print of a resolved config before anything loads.

    Raises:
        ConfigError: even what is certain does not fit into a GPU, or a host; the message says what would help.
    """
    estimated = estimate(config, machine, configs)
    lines = table(estimated)
    if not estimated.fits:
        lines += [f"this does not fit into {gigabytes(machine.limit)}:"]
        lines += advice(config, machine, configs)
        phase, certain = estimated.peak(sure=True)
        if certain > machine.limit:
            device = "a GPU" if machine.gpus else "a host"
            problem = f"{gigabytes(certain)} of {device} are needed at least ({phase}), it has {gigabytes(machine.limit)}"
            raise ConfigError("\n".join([problem, *lines]))
    return lines


# -- the memory of this host, and of this process --------------------------------------------------------------------


def host_bytes() -> int:
    """Return the memory of this machine, or of the container that this process is in."""
    sizes = [psutil.virtual_memory().total]
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):  # cgroups, version 2 and 1
        try:
            sizes.append(int(Path("/sys/fs/cgroup", limit).read_text()))
        except (OSError, ValueError):  # no such file; "max"
            continue
    return min(sizes)


def library_bytes(ranks: int = 1) -> int:
    """Return the memory of this process; ranks of a host share what is mapped from files."""
    memory = psutil.Process().memory_info()
    shared = getattr(memory, "shared", 0)
    return memory.rss - shared + shared // ranks
