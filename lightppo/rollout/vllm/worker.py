"""What runs inside vLLM's workers, in process and in servers: the sampler, and what is done with pushed weights.

``serving.py`` has servers load :class:`WorkerExtension`, and with it the transfer engine that is registered below.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform
from vllm.v1.sample.sampler import Sampler

from lightppo.rollout.vllm.lora_adapters import adapter_obstacle, added_outputs, shelf_of
from lightppo.rollout.vllm.routed_experts import (
    record_experts,
    stop_recording,
    take_experts,
)
from lightppo.rollout.vllm.versions import (
    load_below_adapters,
    pack_tied_heads,
    renew_convolutions,
    reported_name,
    reset_lora_state,
    unpacked_convolution,
)
from lightppo.rollout.vllm.weights import (
    PROTOCOL,
    GlooGroup,
    NCCLGroup,
    architecture,
    gpu_of,
    has_towers,
    probe_vector,
)

_GREEDY_BELOW = 1e-5  # vLLM's own limit
_WRAPPED = ".base_layer."  # in the names of layers that may have adapters

# -- sampling ----------------------------------------------------------------------------------------------------------


class RecordingSampler(Sampler):
    """Record log softmax(logits / temperature) over the valid vocabulary, before every filter, as training needs it.

    vLLM's own log probs are either of the raw logits (no temperature) or of the filtered distribution. Ids from
    ``valid_vocab_size`` on are never sampled, log probs are over ``log_prob_vocab_size`` ids; None: all.
    """

    def __init__(
        self,
        valid_vocab_size: int | None,
        log_prob_vocab_size: int | None,
        **options: Any,
    ) -> None:
        super().__init__(logprobs_mode="raw_logprobs", **options)
        self.valid_vocab_size = valid_vocab_size
        self.log_prob_vocab_size = log_prob_vocab_size
        self._temperature: Tensor | None = None
        self._undrawable: Tensor | None = None

    def forward(
        self,
        logits: Tensor,
        sampling_metadata: Any,
        *further_arguments: Any,
        **options: Any,
    ) -> Any:
        if self.log_prob_vocab_size is not None:
            logits[:, self.log_prob_vocab_size :] = -torch.inf  # (B, V), made anew in every step
        self._temperature = sampling_metadata.temperature  # (B,), None where all rows are greedy
        output = super().forward(logits, sampling_metadata, *further_arguments, **options)
        if output.logprobs_tensors is not None:
            output.logprobs_tensors.logprobs.masked_fill_(self._undrawable.unsqueeze(1), torch.nan)
        return output

    def compute_logprobs(self, logits: Tensor) -> Tensor:
        """Log probs (B, V) at each row's temperature; greedy rows at 1."""
        scaled = logits.float()
        if self._temperature is not None:
            greedy = self._temperature < _GREEDY_BELOW
            scaled = scaled / self._temperature.masked_fill(greedy, 1.0).unsqueeze(1)
        return scaled.log_softmax(dim=-1)

    def apply_logits_processors(
        self,
        logits: Tensor,
        *further_arguments: Any,
        **options: Any,
    ) -> Tensor:
        if self.valid_vocab_size is not None:
            logits[:, self.valid_vocab_size :] = -torch.inf
        logits = super().apply_logits_processors(logits, *further_arguments, **options)
        highest = logits.amax(dim=-1)
        self._undrawable = highest.isnan() | highest.isinf()  # NaN logits, +inf, or every id banned
        return logits


def install_sampler(
    worker: Any,
    valid_vocab_size: int | None,
    log_prob_vocab_size: int | None,
) -> None:
    """Put a :class:`RecordingSampler` into a worker of vLLM; a RuntimeError where this vLLM samples in another way."""
    runner = worker.model_runner
    previous_sampler = getattr(runner, "sampler", None)
    if type(previous_sampler) is not Sampler and not isinstance(previous_sampler, RecordingSampler):
        raise RuntimeError(
            f"this vLLM samples by {type(previous_sampler).__module__}.{type(previous_sampler).__name__}, whose log probs "
            "cannot be those of the trainer: unset VLLM_USE_V2_MODEL_RUNNER, or use another version of vLLM"
        )
    options = {"use_fp64_gumbel": getattr(previous_sampler, "use_fp64_gumbel", False)}
    runner.sampler = RecordingSampler(valid_vocab_size, log_prob_vocab_size, **options)


# -- weights -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def push_weights(worker: Any, weights: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Replace the weights of an engine in this process by a checkpoint's, which are read to their end. Return the
    parameters that no weight went into."""
    config = worker.model_runner.vllm_config
    if config.lora_config is not None:
        reset_lora_state(worker.model_runner)
    weights = iter(weights)
    # some layers ask for it; vLLM's own routes for weights set it
    with set_current_vllm_config(config):
        reload = Reload(worker.model_runner.get_model(), config.model_config)
        try:
            reload.load(weights)
            for _ in weights:  # collective: whatever is left must be gathered by this rank too
                pass
        except BaseException:
            reload.abandon()
            raise
        return reload.finish()


class Reload:
    """Replace a model's weights by a checkpoint's, in place and layer by layer: ``load_weights`` alone is wrong on a
    live model, because vLLM may have packed its linear layers in another form."""

    def __init__(self, model: Any, model_config: Any) -> None:
        load_below_adapters()
        self._model = model
        self._config = model_config
        # towers keep what they have
        self._part = model.get_language_model() if has_towers(model_config.hf_config) else model
        self._left = self._pushed_names()
        # False for models that only have the embedding where the head is tied to it (Gemma).
        tied = model_config.hf_config.get_text_config().tie_word_embeddings
        self._has_head = not tied or any(
            name.rpartition(".")[2] == "lm_head" for name, _ in model.named_modules()
        )
        if current_platform.is_cpu():
            # vLLM 0.32 packs the experts of a mixture for a CPU at their first loading only, and takes them for packed
            # after. On a GPU nothing may be made anew: CUDA graphs hold the addresses.
            for module in self._part.modules():
                if (
                    getattr(method := getattr(module, "quant_method", None), "moe_kernel", None)
                    is not None
                ):
                    method.moe_kernel = None
        initialize_layerwise_reload(self._part)
        # but those that vLLM computes, such as scales where it quantises: checkpoints do not have them
        self._left &= self._pushed_names()
        self._first_names = self._names_of_the_same()

    def _pushed_names(self) -> set[str]:
        """Return the names of parameters that weights go into, as the whole model calls them."""
        part_parameters = {id(parameter) for parameter in self._part.parameters()}
        return {
            name.replace(_WRAPPED, ".")
            for name, parameter in self._model.named_parameters()
            if id(parameter) in part_parameters
        }

    def _names_of_the_same(self) -> dict[str, str]:
        """Map a parameter's name to its first name; a layer of shared experts has several."""
        first_names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        names = {
            name.replace(_WRAPPED, "."): first_names[id(parameter)].replace(_WRAPPED, ".")
            for name, parameter in self._model.named_parameters(remove_duplicate=False)
        }
        return {reported_name(name): first for name, first in names.items()} | names

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        loaded = self._model.load_weights(
            pair for pair in weights if self._has_head or not pair[0].endswith("lm_head.weight")
        )
        if loaded is None:
            self._left = set()
        else:
            self._left -= {self._first_names.get(name, name) for name in loaded}

    def finish(self) -> list[str]:
        """Return the parameters that no weight went into."""
        finalize_layerwise_reload(self._part, self._config)
        pack_tied_heads(self._part)
        renew_convolutions(self._part)
        return sorted(self._left)

    def abandon(self) -> None:
        """Give layers their own tensors back, and forget what has come for them, which vLLM would take for a part of the
        next push. Which weights they have is not defined until that."""
        from vllm.model_executor.model_loader.reload.layerwise import (
            _place_kernel_tensors,
            get_layerwise_info,
        )

        for layer in self._part.modules():
            info = get_layerwise_info(layer)
            if info.can_load() and info.kernel_tensors is not None:
                _place_kernel_tensors(layer, info)
            info.reset()
        finalize_layerwise_reload(self._part, self._config)


def _step(method: Callable[..., None]) -> Callable[..., None]:
    """Take one step of a push, unless an earlier one has failed. It raises nothing: vLLM 0.32 hears only the first of
    several workers that fail, and takes what the others say for answers to later questions."""

    @wraps(method)
    def run(self: PushedWeights, *message: Any) -> None:
        if self.problem is None:
            try:
                # vLLM sets its config for steps since 0.28 only
                with torch.no_grad(), set_current_vllm_config(self.vllm_config):
                    method(self, *message)
            except Exception as error:
                self.give_up(f"{type(error).__name__}: {error}")

    return run


class PushedWeights(WeightTransferEngine[SimpleNamespace, SimpleNamespace]):
    """vLLM's end of a push, behind its routes for weights. A push that fails leaves nothing half loaded.

    What it is told is written where it is sent, in ``weights.py``.
    """

    init_info_cls = update_info_cls = SimpleNamespace

    problem: str | None = None  # why the present push has failed
    version: str | None = (
        None  # of the weights, as the trainer calls them; None: not from a trainer
    )
    _coming: str | None = None
    _group: GlooGroup | NCCLGroup | None = None
    _reload: Reload | None = None

    def init_transfer_engine(self, init_info: SimpleNamespace) -> None:
        self.give_up()
        self.problem = None
        self._meet(init_info)

    @_step
    def _meet(self, message: SimpleNamespace) -> None:
        self._coming = getattr(message, "version", None)
        self._adapter: list[tuple[str, Tensor]] = []
        rank = self.parallel_config.rank + 1
        if message.transport == "gloo":
            self._group = GlooGroup.join(vars(message), rank)
        if message.transport == "nccl":
            self._group = NCCLGroup(vars(message), rank, self.device)

    @_step
    def start_weight_update(self) -> None:
        self.version = None
        self._reload = Reload(self.model, self.model_config)

    # the base class waits for a GPU, on a CPU too
    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(SimpleNamespace(**update_info))

    @_step
    def receive_weights(self, update_info: SimpleNamespace) -> None:
        self._reload.load(self._received(update_info))

    def _received(self, message: SimpleNamespace) -> Iterable[tuple[str, Tensor]]:
        if self._group is None:
            return load_file(message.path).items()
        return self._group.receive(vars(message))

    @_step
    def receive_adapter(self, message: dict[str, Any]) -> None:
        """Receive a part of an adapter; the model stays as it is."""
        self._adapter += self._received(SimpleNamespace(**message))

    @_step
    def hold_adapter(self, worker: Any, name: str, config: dict[str, Any]) -> None:
        """End a push of an adapter."""
        self.shutdown()
        shelf_of(worker).hold(name, self._adapter, config)
        self._adapter = []

    @_step
    def finish_weight_update(self) -> None:
        missing = self._reload.finish()
        self._reload = None
        self.shutdown()
        if missing:
            raise ValueError(
                f"{len(missing)} weights of the server got no values, first {missing[0]}"
            )
        self.version = self._coming

    @torch.no_grad()
    def give_up(self, problem: str = "the push was given up") -> None:
        """End a push that nobody will finish."""
        if self._reload is not None:
            self._reload.abandon()
        self._reload = None
        self.problem = problem
        self.shutdown()

    @staticmethod
    def trainer_send_weights(*_: Any) -> None:
        """Exist for vLLM before 0.28, which makes no engine without it; trainers send by ``Broadcasts``."""
        raise NotImplementedError

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = None


WeightTransferEngineFactory.register_engine("lightppo", PushedWeights)

# -- what a server's workers are asked ---------------------------------------------------------------------------------


class WorkerExtension:
    """Mixed into vLLM's worker class by ``--worker-extension-cls``; called over ``/collective_rpc``.

    Answers are dictionaries, since the route turns everything else into text.
    """

    def lightppo_admit(
        self,
        valid_vocab_size: int | None,
        log_prob_vocab_size: int | None,
    ) -> dict[str, Any]:
        """Have the worker sample as the trainer needs it from now on, and say what is served."""
        install_sampler(self, valid_vocab_size, log_prob_vocab_size)
        stop_recording(self)
        self.weight_transfer_engine.give_up()
        with suppress(RuntimeError):  # there was nothing to end
            self.finish_weight_update()  # of a trainer that was killed in mid-push
        model = self.vllm_config.model_config
        return {
            "protocol": PROTOCOL,
            "model": str(model.model),
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_model_len": int(model.max_model_len),
            "gpu": gpu_of(self.device),
            "sleep_mode": bool(model.enable_sleep_mode),
            "architecture": architecture(model.hf_config),
            "towers": has_towers(model.hf_config),
            "version": self.weight_transfer_engine.version,
        }

    def lightppo_record_experts(
        self, layers: list[int], top_k: int, dtype_name: str
    ) -> dict[str, str | None]:
        """Have the worker record which experts tokens go to; say why it cannot."""
        try:
            record_experts(self, layers, top_k, dtype_name)
        except RuntimeError as error:
            return {"problem": str(error)}
        return {"problem": None}

    def lightppo_take_experts(self, request: str, tokens: int) -> dict[str, str | None]:
        """Return the experts of a request's tokens, compressed."""
        try:
            experts = take_experts(self, request, tokens)
        except RuntimeError as error:
            return {"problem": str(error)}
        content = zlib.compress(experts.numpy().tobytes(), 1)
        return {"problem": None, "experts": base64.b64encode(content).decode()}

    def lightppo_adapter_obstacle(self, names: list[str], rank: int) -> dict[str, str | None]:
        """Return why it cannot take such adapters."""
        return {"obstacle": adapter_obstacle(self, names, rank)}

    def lightppo_receive_adapter(self, message: dict[str, Any]) -> dict[str, str | None]:
        """Receive a part of an adapter, by what the trainer told of it."""
        self.weight_transfer_engine.receive_adapter(message)
        return self.lightppo_problem()

    def lightppo_hold_adapter(self, name: str, config: dict[str, Any]) -> dict[str, str | None]:
        """Hold the adapter, of which all has come."""
        self.weight_transfer_engine.hold_adapter(self, name, config)
        return self.lightppo_problem()

    def lightppo_forget_adapters(self, names: list[str]) -> dict[str, Any]:
        """Free adapters that nobody will ask for; say which are held, and the numbers of those with a slot."""
        shelf = shelf_of(self)
        shelf.forget(names)
        return {"held": shelf.names(), "slots": sorted(self.list_loras())}

    def lightppo_problem(self) -> dict[str, str | None]:
        """Return why this worker has not done what the route before told it."""
        return {"problem": self.weight_transfer_engine.problem}

    def lightppo_fingerprints(self) -> dict[str, Any]:
        """Return :func:`engine_fingerprints`, the numbers as base64 of float32."""
        prints, packed, dtype = engine_fingerprints(self)
        coded = {
            name: base64.b64encode(value.numpy().tobytes()).decode()
            for name, value in prints.items()
        }
        return {"prints": coded, "packed": packed, "dtype": dtype}


@torch.no_grad()
def engine_fingerprints(worker: Any) -> tuple[dict[str, Tensor], dict[str, list[str]], str]:
    """Return what the trainer's fingerprints are compared with, by the engine's names; fused layers and parts; type.

    Linear layers are asked for their output: on a CPU their packed weights cannot be read.
    """
    model = worker.model_runner.get_model()
    config = worker.model_runner.vllm_config.model_config
    dtype = config.dtype
    if has_towers(config.hf_config):
        model = model.get_language_model()
    device = next(model.parameters()).device
    fingerprints: dict[str, Tensor] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        name = f"{module_name}.".replace(_WRAPPED, ".").removesuffix(".")
        parameters = dict(module.named_parameters(recurse=False))
        method = getattr(module, "quant_method", None)
        # a convolution's weight may be in a linear layer that is never called
        is_kernel = "weight" in parameters and parameters["weight"].dim() == 3
        if unpacked_convolution(module) is not None:
            is_kernel = True
            del parameters["weight"]
        is_linear = isinstance(module, (LinearBase, ParallelLMHead)) and not is_kernel
        if method is not None and is_linear:
            width = module.input_size if isinstance(module, LinearBase) else module.embedding_dim
            fingerprints[f"{name}.weight"] = method.apply(
                module, probe_vector(width, device).to(dtype)[None], None
            )[0]
            parameters.pop("weight", None)
        for parameter_name, weight in parameters.items():
            weight = weight.detach().float()
            if weight.dim() == 2:
                weight = weight @ probe_vector(weight.shape[-1], device)
            if weight.dim() < 2:
                fingerprints[f"{name}.{parameter_name}"] = weight
    packed = dict(getattr(model, "packed_modules_mapping", None) or {})
    for name, value in added_outputs(worker, model, probe_vector).items():
        if f"{name}.weight" in fingerprints:
            fingerprints[f"{name}.weight"] = fingerprints[f"{name}.weight"].float()
            fingerprints[f"{name}.weight"][: len(value)] += value  # a head's rows may be padded
    fingerprints = {name: value.float().cpu() for name, value in fingerprints.items()}
    return fingerprints, packed, str(dtype).removeprefix("torch.")
