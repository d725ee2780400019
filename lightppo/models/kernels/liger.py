"""Liger's kernels (arXiv:2410.10989) for norms, rotary embeddings and MLPs, where they give the model's own numbers."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from functools import cache
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
    """Use them on a GPU, where they are installed and exact."""
    if not runs_on(device) or not is_installed():
        return
    reason = why_not(model, device)
    if reason is None:
        put_kernels_in(model)
        _say(f"Liger's kernels run norms, rotary embeddings and MLPs of {_family(model)}")
    else:
        _say(f"Liger's kernels are not used: {reason}")


def use_liger_kernels(model: PreTrainedModel, device: torch.device | None = None) -> None:
    """All but its loss, in place; ModelLoadError where that cannot be, or gives other numbers."""
    if device is None or not runs_on(device):
        device = torch.device("cuda")
    if (reason := why_not(model, device)) is not None:
        raise ModelLoadError(f"--use_liger_kernel: {reason}: leave it out")
    put_kernels_in(model)


def runs_on(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_available()


def is_installed() -> bool:
    return importlib.util.find_spec("liger_kernel") is not None


@cache  # actor and reference are of one family
def _say(line: str) -> None:
    logger.info(line)


def _family(model: PreTrainedModel) -> str:
    return type(model.base_model).__name__


def why_not(model: PreTrainedModel, device: torch.device) -> str | None:
    """Why Liger's kernels cannot stand in for this model's code; None: they can."""
    if not runs_on(device):
        return "there is no CUDA device"
    if not is_installed():
        return "liger-kernel is not installed (pip install liger-kernel)"
    try:
        patch = _patch_of(model)
    except Exception as error:
        return f"liger-kernel cannot be imported: {one_line(error)}"
    if patch is None:
        return f"Liger has no kernels for {_family(model)}"
    # actor, critic and reference have the same layers
    config = model.base_model.config.to_dict()
    layers = {name: value for name, value in config.items() if name not in _OF_HEADS}
    key = type(model.base_model), str(layers), model.dtype, device
    if key not in _TRIED:
        _TRIED[key] = why_other_numbers(model, device)
    return _TRIED[key]


_TRIED: dict[Any, str | None] = {}


# -- in a model -------------------------------------------------------------------------------------------------------


def _patch_of(model: PreTrainedModel) -> Callable[..., None] | None:
    # Liger warns of each backend that is for other hardware.
    logging.getLogger("liger_kernel.backends.registry").setLevel(logging.ERROR)
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    return MODEL_TYPE_TO_APPLY_LIGER_FN.get(model.base_model.config.model_type)


def put_kernels_in(model: PreTrainedModel) -> None:
    """Into this model alone: what Liger puts into transformers' modules, for all models to come, is taken out."""
    patch = _patch_of(model)
    options = {"cross_entropy": False, "fused_linear_cross_entropy": False}
    known = inspect.signature(patch).parameters
    places = {type(module).__module__ for module in model.modules()}
    before = {
        name: dict(vars(sys.modules[name]))
        for name in places
        if name.startswith("transformers.models.")
    }
    rotary = {}
    try:
        patch(model=model, **{name: value for name, value in options.items() if name in known})
    finally:
        for name, own in before.items():
            names = vars(sys.modules[name])
            if names.get(ROTARY) is not own.get(ROTARY):
                rotary[name] = names[ROTARY]
            names.update(own)
    for module in model.modules():
        forward = _rotating(type(module))
        if forward is not None and forward.__module__ in rotary:
            turning = rotating_by(rotary[forward.__module__], forward)
            module.forward = MethodType(turning, module)


def _rotating(kind: type[nn.Module]) -> FunctionType | None:
    """An attention's own forward, also beneath another one that has been put around it."""
    forwards = (vars(each).get("forward") for each in kind.__mro__)
    return next(
        (
            each
            for each in forwards
            if isinstance(each, FunctionType) and ROTARY in own_code(each).__code__.co_names
        ),
        None,
    )


# -- are the numbers the same? ----------------------------------------------------------------------------------------


def why_other_numbers(model: PreTrainedModel, device: torch.device) -> str | None:
    """Compares log probs and gradients of two layers of the model's sizes, with random weights, on the device."""
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            torch.manual_seed(0)
            return next(_differences(model, device), None)
    except torch.OutOfMemoryError:
        return "there is no memory to try them"
    except Exception as error:
        if not is_models_own(error):
            raise
        return f"trying them failed: {one_line(error)}"
    finally:
        if devices:
            torch.cuda.empty_cache()


def _differences(model: PreTrainedModel, device: torch.device) -> Iterator[str]:
    for dtype in dict.fromkeys((torch.float32, model.dtype)):
        small = small_copy(model, dtype, device)
        own = numbers_of(small)
        put_kernels_in(small)
        # A gradient of nearly 0 is nothing but rounding.
        least = _SMALL * max(_norm(own[name]) for name in own if name != _LOG_PROBS)
        most = _MOST_IN_FLOAT32 if dtype is torch.float32 else _MOST_IN_16_BITS
        for name, value in numbers_of(small).items():
            difference = _norm(value.float() - own[name]) / max(_norm(own[name]), least)
            if not difference <= most:  # NaN, too
                kind = str(dtype).removeprefix("torch.")
                yield f"in {kind} {name} of {_family(model)} would differ by {difference:.1e}"


def _norm(values: Tensor) -> float:
    return torch.linalg.vector_norm(values, dtype=torch.float32).item()


def numbers_of(small: PreTrainedModel) -> dict[str, Tensor]:
    """Log probs of random tokens, and the gradients of their mean."""
    torch.manual_seed(1)
    width = small.config.get_text_config().hidden_size
    head = torch.randn(width, _VOCABULARY, device=small.device) / width**0.5
    ids = torch.randint(_VOCABULARY, (2, 24), device=small.device)
    hidden = small(input_ids=ids, use_cache=False).last_hidden_state
    scores = (hidden.float() @ head).log_softmax(-1)  # (2, 24, V)
    log_probs = scores[:, :-1].gather(2, ids[:, 1:, None])
    weights = dict(small.named_parameters())
    gradients = torch.autograd.grad(log_probs.mean(), list(weights.values()), allow_unused=True)
    return {_LOG_PROBS: log_probs.detach()} | {
        f"the gradient of {name}": gradient
        for name, gradient in zip(weights, gradients)
        if gradient is not None
    }


def small_copy(model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model without its head, as wide as it is, with few layers, tokens and experts, and random weights."""
    config = copy.deepcopy(model.base_model.config)
    text = config.get_text_config()
    layers = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == layers:  # one entry for each layer
            setattr(text, name, value[:_LAYERS])
    text.num_hidden_layers = min(layers, _LAYERS)
    text.vocab_size = _VOCABULARY
    text.pad_token_id = None
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if isinstance(count := getattr(text, name, None), int):
            setattr(text, name, min(count, _EXPERTS))
    config._attn_implementation = "eager"
    with torch.device(device):
        small = type(model.base_model)(config).to(dtype).eval()
        with torch.no_grad():
            for weight in small.parameters():
                if weight.dim() == 1:  # of a norm: not all ones
                    weight.add_(torch.randn_like(weight), alpha=0.1)
    return small
