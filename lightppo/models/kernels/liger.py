"""Liger's kernels (arXiv:2410.10989) for norms, rotary embeddings and MLPs, where they give the model's own numbers."""

from __future__ import annotations

import copy
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightppo.errors import ModelLoadError
from lightppo.models.kernels.layers import ROTARY, own_code, rotating_by
from lightppo.models.packing import is_models_own, one_line

logger = logging.getLogger(__name__)

_VOCABULARY = 64  # of the model that is tried
_LAYERS = 2  # so that gradients also pass by a layer
_EXPERTS = 16
# relative differences; those of 16 bits are rounding, as where packed rows are compared
_MOST_IN_FLOAT32 = 1e-5
_MOST_IN_16_BITS = 1e-1
_SMALL = 1e-2  # beside the largest gradient
_LOG_PROBS = "log probs"
_OF_HEADS = {
    "architectures",
    "id2label",
    "label2id",
    "mean",
    "std",
    "tie_word_embeddings",
    "_name_or_path",
}


def use_liger_kernels_if_exact(model: PreTrainedModel, device: torch.device) -> None:
    """Use them on a GPU, where they are exact."""
    if not runs_on(device):
        return
    reason = why_not(model, device)
    if reason is None:
        put_kernels_in(model)
        _say(f"Liger's kernels run norms, rotary embeddings and MLPs of {_family(model)}")
    else:
        _say(f"Liger's kernels are not used: {reason}")


def use_liger_kernels(model: PreTrainedModel, device: torch.device | None = None) -> None:
    """Put in all kernels but the loss, in place; ModelLoadError where that cannot be, or gives other numbers."""
    if device is None or not runs_on(device):
        device = torch.device("cuda")
    if (reason := why_not(model, device)) is not None:
        raise ModelLoadError(f"--use_liger_kernel: {reason}: leave it out")
    put_kernels_in(model)


def runs_on(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_available()


@cache  # actor and reference are of one family
def _say(message: str) -> None:
    logger.info(message)


def _family(model: PreTrainedModel) -> str:
    return type(model.base_model).__name__


def why_not(model: PreTrainedModel, device: torch.device) -> str | None:
    """Return why Liger's kernels cannot stand in for this model's code; None: they can."""
    if not runs_on(device):
        return "there is no CUDA device"
    if find_spec("liger_kernel") is None:
        return "liger-kernel is not installed (pip install liger-kernel)"
    try:
        patch = _patch_of(model)
    except Exception as error:
        return f"liger-kernel cannot be imported: {one_line(error)}"
    if patch is None:
        return f"Liger has no kernels for {_family(model)}"
    # actor, critic and reference have the same layers
    config = model.base_model.config.to_dict()
    layer_options = {name: value for name, value in config.items() if name not in _OF_HEADS}
    trial_key = type(model.base_model), str(layer_options), model.dtype, device
    if trial_key not in _TRIED:
        _TRIED[trial_key] = why_other_numbers(model, device)
    return _TRIED[trial_key]


_TRIED: dict[Any, str | None] = {}


# -- in a model -------------------------------------------------------------------------------------------------------


def _patch_of(model: PreTrainedModel) -> Callable[..., None] | None:
    # Liger warns of each backend that is for other hardware.
    logging.getLogger("liger_kernel.backends.registry").setLevel(logging.ERROR)
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    return MODEL_TYPE_TO_APPLY_LIGER_FN.get(model.base_model.config.model_type)


def put_kernels_in(model: PreTrainedModel) -> None:
    """Change this model alone: what Liger puts into transformers' modules, for all models to come, is taken out."""
    patch = _patch_of(model)
    losses = {"cross_entropy", "fused_linear_cross_entropy"} & inspect.signature(
        patch
    ).parameters.keys()
    module_names = {type(module).__module__ for module in model.modules()}
    original_names = {
        name: dict(vars(sys.modules[name]))
        for name in module_names
        if name.startswith("transformers.models.")
    }
    rotary_functions = {}
    try:
        patch(model=model, **dict.fromkeys(losses, False))
    finally:
        for name, original_entries in original_names.items():
            module_entries = vars(sys.modules[name])
            if module_entries.get(ROTARY) is not original_entries.get(ROTARY):
                rotary_functions[name] = module_entries[ROTARY]
            module_entries.update(original_entries)
    for module in model.modules():
        forward = _rotating(type(module))
        if forward is not None and forward.__module__ in rotary_functions:
            rotating_forward = rotating_by(rotary_functions[forward.__module__], forward)
            module.forward = MethodType(rotating_forward, module)


def _rotating(module_class: type[nn.Module]) -> FunctionType | None:
    """Return an attention's own forward, also beneath another one that has been put around it."""
    for each_class in module_class.__mro__:
        forward = vars(each_class).get("forward")
        if isinstance(forward, FunctionType) and ROTARY in own_code(forward).__code__.co_names:
            return forward
    return None


# -- are the numbers the same? ----------------------------------------------------------------------------------------


def why_other_numbers(model: PreTrainedModel, device: torch.device) -> str | None:
    """Compare log probs and gradients of two layers of the model's sizes, with random weights, on the device."""
    cuda_devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(cuda_devices):
            torch.manual_seed(0)
            return next(_differences(model, device), None)
    except torch.OutOfMemoryError:
        return "there is no memory to try them"
    except Exception as error:
        if not is_models_own(error):
            raise
        return f"trying them failed: {one_line(error)}"
    finally:
        if cuda_devices:
            torch.cuda.empty_cache()


def _differences(model: PreTrainedModel, device: torch.device) -> Iterator[str]:
    for dtype in dict.fromkeys((torch.float32, model.dtype)):
        small_model = small_copy(model, dtype, device)
        original_numbers = numbers_of(small_model)
        put_kernels_in(small_model)
        # A gradient of nearly 0 is nothing but rounding.
        norms = {name: _norm(numbers) for name, numbers in original_numbers.items()}
        least = _SMALL * max(norm for name, norm in norms.items() if name != _LOG_PROBS)
        largest_difference = _MOST_IN_FLOAT32 if dtype is torch.float32 else _MOST_IN_16_BITS
        for name, numbers in numbers_of(small_model).items():
            change = _norm(numbers.float() - original_numbers[name])
            difference = change / max(norms[name], least)
            if not difference <= largest_difference:  # NaN, too
                type_name = str(dtype).removeprefix("torch.")
                yield f"in {type_name} {name} of {_family(model)} would differ by {difference:.1e}"


def _norm(values: Tensor) -> float:
    return torch.linalg.vector_norm(values, dtype=torch.float32).item()


def numbers_of(small_model: PreTrainedModel) -> dict[str, Tensor]:
    """Return log probs of random tokens, and the gradients of their mean."""
    torch.manual_seed(1)
    hidden_size = small_model.config.get_text_config().hidden_size
    random_head = (
        torch.randn(hidden_size, _VOCABULARY, device=small_model.device) / hidden_size**0.5
    )
    token_ids = torch.randint(_VOCABULARY, (2, 24), device=small_model.device)
    hidden = small_model(input_ids=token_ids, use_cache=False).last_hidden_state
    scores = (hidden.float() @ random_head).log_softmax(-1)  # (2, 24, V)
    log_probs = scores[:, :-1].gather(2, token_ids[:, 1:, None])
    weights = dict(small_model.named_parameters())
    gradients = torch.autograd.grad(log_probs.mean(), list(weights.values()), allow_unused=True)
    return {_LOG_PROBS: log_probs.detach()} | {
        f"the gradient of {name}": gradient
        for name, gradient in zip(weights, gradients)
        if gradient is not None
    }


def small_copy(model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Return the model without its head, as wide as it is, with few layers, tokens and experts, and random weights."""
    config = copy.deepcopy(model.base_model.config)
    text_config = config.get_text_config()
    layer_count = text_config.num_hidden_layers
    for option_name, value in list(vars(text_config).items()):
        if isinstance(value, list) and len(value) == layer_count:  # one entry for each layer
            setattr(text_config, option_name, value[:_LAYERS])
    text_config.num_hidden_layers = min(layer_count, _LAYERS)
    text_config.vocab_size = _VOCABULARY
    text_config.pad_token_id = None
    for option_name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if isinstance(expert_count := getattr(text_config, option_name, None), int):
            setattr(text_config, option_name, min(expert_count, _EXPERTS))
    config._attn_implementation = "eager"
    with torch.device(device):
        small_model = type(model.base_model)(config).to(dtype).eval()
        with torch.no_grad():
            for weight in small_model.parameters():
                if weight.dim() == 1:  # of a norm: not all ones
                    weight.add_(torch.randn_like(weight), alpha=0.1)
    return small_model
