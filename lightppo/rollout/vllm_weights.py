"""Weights inside a vLLM worker: replaced by pushed ones, and compared with the trainer's.

These functions run where the worker is (``collective_rpc``); they know vLLM's modules, no lightppo engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def push_weights(worker: Any, weights: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Replaces the model's weights by those of a checkpoint, in place, layer by layer.

    A plain ``load_weights`` on a live model is wrong: vLLM may have packed its linear layers in another form.

    Args:
        worker: vLLM's.
        weights: names and whole tensors as in the checkpoint, tied ones under each name; read to its end.

    Returns:
        Parameters of the engine's model that no pushed weight went into.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    runner = worker.model_runner
    model = runner.get_model()
    expected = {name for name, _ in model.named_parameters()}
    iterator = iter(weights if _has_head(runner, model) else (pair for pair in weights if pair[0] != "lm_head.weight"))
    _forget_packed_experts(model)
    initialize_layerwise_reload(model)
    try:
        loaded = model.load_weights(iterator)
        for _ in iterator:  # collective: whatever is left must be gathered by this rank too
            pass
    except BaseException:
        _forget_half_loaded(model)
        raise
    finally:
        finalize_layerwise_reload(model, runner.vllm_config.model_config)
    for reset in ("reset_encoder_cache", "reset_mm_cache"):
        if hasattr(runner, reset):
            getattr(runner, reset)()
    return [] if loaded is None else sorted(expected - set(loaded))


def _forget_packed_experts(model: Any) -> None:
    """vLLM 0.32 packs the experts of a mixture for a CPU at their first loading only, and takes them for packed after.

    On a GPU nothing may be made anew: CUDA graphs hold the addresses.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        for module in model.modules():
            method = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None


def _forget_half_loaded(model: Any) -> None:
    """After an error: layers get their own tensors back, and forget what has come for them, which vLLM would take for
    a part of the next push. Which weights they have is not defined until that."""
    from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            _place_kernel_tensors(layer, info)
        info.reset()


def _has_head(runner: Any, model: Any) -> bool:
    """False for vLLM's models that only have the embedding where the head is tied to it (Gemma)."""
    tied = runner.vllm_config.model_config.hf_config.get_text_config().tie_word_embeddings
    return not tied or any(name.rpartition(".")[2] == "lm_head" for name, _ in model.named_modules())


def probe_vector(width: int, device: torch.device | str = "cpu") -> Tensor:
    """A fixed vector (width,) with entries in [-1, 1], the same everywhere."""
    return torch.sin(torch.arange(1, width + 1, dtype=torch.float64) * 12.9898).float().to(device)


def trainer_fingerprints(weights: Iterable[tuple[str, Tensor]]) -> dict[str, tuple[Tensor, ...]]:
    """What each pushed weight should act like: W x for a matrix and a fixed x, the weight itself for a vector.

    A matrix comes with x W too: some models (GPT-2) have their linear layers the other way round in the checkpoint.
    """
    prints = {}
    for name, weight in weights:
        weight = weight.detach().float()
        matrices = (weight, weight.T) if weight.dim() == 2 else ()
        prints[name] = tuple((m @ probe_vector(m.shape[-1], m.device)).cpu() for m in matrices) or (weight.cpu(),)
    return prints


def fingerprints_as_tensors(prints: dict[str, tuple[Tensor, ...]]) -> dict[str, Tensor]:
    """Fingerprints under names of their own, as a file of tensors takes them: ``name``, ``name:1``."""
    return {f"{name}:{i}" if i else name: value for name, values in prints.items() for i, value in enumerate(values)}


def fingerprints_from_tensors(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, tuple[Tensor, ...]]:
    """The inverse of :func:`fingerprints_as_tensors`, in whatever order the tensors come."""
    values: dict[str, dict[int, Tensor]] = {}
    for key, value in tensors:
        name, _, number = key.partition(":")
        values.setdefault(name, {})[int(number or 0)] = value
    return {name: tuple(found[i] for i in sorted(found)) for name, found in values.items()}


@torch.no_grad()
def engine_fingerprints(worker: Any) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
    """The same of the engine's weights, by the engine's names, and which pushed names its fused layers are made of.

    Linear layers are asked for their output: on a CPU their packed weights cannot be read.
    """
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    model = worker.model_runner.get_model()
    device = next(model.parameters()).device
    prints: dict[str, Tensor] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        own = dict(module.named_parameters(recurse=False))
        method = getattr(module, "quant_method", None)
        if method is not None and isinstance(module, (LinearBase, ParallelLMHead)):
            width = module.input_size if isinstance(module, LinearBase) else module.embedding_dim
            dtype = worker.model_runner.vllm_config.model_config.dtype
            prints[f"{name}.weight"] = method.apply(module, probe_vector(width, device).to(dtype)[None], None)[0]
            own.pop("weight", None)
        for key, weight in own.items():
            weight = weight.detach().float()
            prints[f"{name}.{key}"] = weight @ probe_vector(weight.shape[-1], device) if weight.dim() == 2 else weight
    packed = dict(getattr(model, "packed_modules_mapping", None) or {})
    return {name: value.float().cpu() for name, value in prints.items()}, packed


def differing_weights(
    trainer: dict[str, tuple[Tensor, ...]], engine: dict[str, Tensor], packed: dict[str, list[str]], tolerance: float
) -> tuple[list[str], list[str]]:
    """Which of the trainer's weights the engine does not have.

    Args:
        trainer: of :func:`trainer_fingerprints`.
        engine: of :func:`engine_fingerprints`.
        packed: fused layer → the layers it is made of, in their order.
        tolerance: largest difference relative to the size of the fingerprint.

    Returns:
        (differing, unknown): names in the trainer; unknown are those without a counterpart of the same shape.
    """
    parts: dict[str, Tensor] = dict(engine)
    for name, value in engine.items():
        module, _, kind = name.rpartition(".")
        parent, _, leaf = module.rpartition(".")
        names = [f"{parent}.{part}.{kind}" for part in packed.get(leaf, [])]
        sizes = [trainer[n][0].shape[0] if n in trainer else -1 for n in names]
        if names and min(sizes) > 0 and sum(sizes) == value.shape[0]:
            parts.update(zip(names, value.split(sizes)))
    differing, unknown = [], []
    for name, expected in trainer.items():
        found = parts.get(name)
        comparable = [e for e in expected if found is not None and _comparable(found, e)]
        if not comparable:
            unknown.append(name)
        elif not any(_close(found[: len(e)], e, tolerance) for e in comparable):
            differing.append(name)
    return differing, unknown


def _comparable(found: Tensor, expected: Tensor) -> bool:
    """Of the same shape, or of a vocabulary that vLLM padded."""
    return found.shape[1:] == expected.shape[1:] and len(found) >= len(expected)


def _close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    scale = expected.square().mean().sqrt() + 1e-12
    difference = (found - expected).abs().max()
    return bool(difference <= tolerance * scale)  # False where either is NaN
