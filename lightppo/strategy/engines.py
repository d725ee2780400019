"""Finding one's way through wrappers: lightppo model → DeepSpeed engine → module → Hugging Face model.

A class with ``engine_attribute = "model"`` (the Actor) keeps its engine under that attribute and stays outermost;
every other module sits inside its engine. Found by attributes, so that nothing here imports a model class.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def engine_attribute(model: Any) -> str | None:
    """Name of the attribute under which this class of model keeps its engine; None when the engine is outermost."""
    return getattr(type(model), "engine_attribute", None)


def is_engine(model: Any) -> bool:
    """True for a DeepSpeed engine, without importing DeepSpeed."""
    return any(cls.__name__ == "DeepSpeedEngine" for cls in type(model).__mro__)


def find_engine(model: Any) -> Any | None:
    """The DeepSpeed engine of a prepared model, None of a plain module."""
    attribute = engine_attribute(model)
    inner = getattr(model, attribute) if attribute else model
    return inner if is_engine(inner) else None


def get_engine(model: Any, what_for: str) -> Any:
    """The engine of a prepared model.

    Raises:
        ValueError: the model has no engine; the message says what it was needed for.
    """
    engine = find_engine(model)
    if engine is None:
        raise ValueError(f"{what_for} needs a model that went through strategy.prepare(), got {type(model).__name__}")
    return engine


def has_optimizer(engine: Any) -> bool:
    """True when the engine trains; engines of frozen models carry a stand-in or nothing."""
    optimizer = getattr(engine, "optimizer", None)
    # At bf16 the stand-in of a replicated model has parameter groups too, and says that it is one.
    return hasattr(optimizer, "param_groups") and getattr(optimizer, "using_real_optimizer", True)


def zero_stage_of(engine: Any | None) -> int:
    """ZeRO stage of an engine, 0 for None."""
    return 0 if engine is None else int(engine.zero_optimization_stage())


def unwrap_model(model: Any) -> nn.Module:
    """The module without its engine; of a class with ``engine_attribute``, the module under that attribute."""
    attribute = engine_attribute(model)
    inner = getattr(model, attribute) if attribute else model
    return inner.module if is_engine(inner) else inner


def find_hf_model(model: Any) -> tuple[nn.Module, str]:
    """The Hugging Face model inside a wrapper, and the prefix of its parameters in ``unwrap_model(model)``.

    Raises:
        ValueError: the model neither is nor directly holds exactly one Hugging Face model.
    """
    module = unwrap_model(model)
    if _is_hf_model(module):
        return module, ""
    found = [(name, child) for name, child in module.named_children() if _is_hf_model(child)]
    if len(found) != 1:
        raise ValueError(
            f"{type(module).__name__} holds {len(found)} Hugging Face models "
            f"({', '.join(name for name, _ in found) or 'none'}); exactly one is needed to save or load it"
        )
    name, child = found[0]
    return child, f"{name}."


def find_adapters(model: Any) -> Any | None:
    """What knows the LoRA adapters of the Hugging Face model inside (``lightppo.models.lora.LoraExport``), or None.

    A model with adapters trains these alone; its other weights are those it was loaded with.

    Raises:
        ValueError: the model holds weights in 4 bits and has no adapters, so that nothing knows how to save or send it.
    """
    module = unwrap_model(model)
    parts = [module] if _is_hf_model(module) else [part for part in module.children() if _is_hf_model(part)]
    adapters = getattr(parts[0], "lora", None) if len(parts) == 1 else None
    if adapters is None and any(hasattr(part, "frozen_buffers") for part in module.modules()):
        raise ValueError(
            f"{type(module).__name__} holds weights in 4 bits and has no adapters, so it cannot be saved or sent: call "
            "add_adapters after loading it, or load it without load_in_4bit"
        )
    return adapters


def _is_hf_model(module: nn.Module) -> bool:
    return hasattr(module, "save_pretrained") and hasattr(module, "config")
