"""Changes of a loaded model before it goes to its engine, as options ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from lightppo.config import PPOConfig
from lightppo.config.options import OptionSet
from lightppo.errors import ModelLoadError
from lightppo.models.adapters.lora import LoraOptions, add_adapters
from lightppo.models.batches import decoder_layers
from lightppo.models.kernels.invariant import make_invariant
from lightppo.models.kernels.liger import use_liger_kernels, use_liger_kernels_if_exact
from lightppo.models.kernels.offload import offload_activations
from lightppo.models.wrapper import PretrainedWrapper, Role
from lightppo.plugin import PREPARATIONS


def prepare_model(
    model: PretrainedWrapper,
    role: Role,
    config: OptionSet,
    device: torch.device,
) -> None:
    """Change a loaded model in place: what options ask for, then :data:`lightppo.plugin.PREPARATIONS`."""
    model_options = config.model
    if role in ("actor", "critic"):
        if model_options.gradient_checkpointing:
            use_reentrant = model_options.gradient_checkpointing_use_reentrant
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        if config.adapter.lora_rank > 0:
            add_adapters(model, LoraOptions.of(config.adapter), config.strategy.seed)
        if model_options.activation_offload:
            offload_activations(model, device)
    # A reward model stays as it is.
    changes_code = role in ("actor", "critic", "reference", "teacher")
    if changes_code and model_options.use_liger_kernel:
        use_liger_kernels(model.hf_model, device)
    chooses = model_options.use_liger_kernel is None and not model_options.torch_compile
    if changes_code and chooses:
        use_liger_kernels_if_exact(model.hf_model, device)
    engine = getattr(config, "engine", None)
    if engine and engine.batch_invariant and role in ("actor", "reference"):
        make_invariant(model.hf_model, device)
    if changes_code and model_options.torch_compile:
        compile_layers(model.hf_model)
    for preparation in PREPARATIONS.values():
        preparation.fn(model, role, config, device)


def compile_layers(model: PreTrainedModel, backend: str = "inductor") -> None:
    """Compile each layer, in place, for rows of any length; names and weights stay."""
    layers = decoder_layers(model)
    if not layers:
        raise ModelLoadError(
            f"--torch_compile: {type(model).__name__} does not say which of its modules are layers"
        )
    # One by one: that compiles a single block, and leaves out the head, which makes log probs by chunks.
    for layer in layers:
        layer.compile(dynamic=True, backend=backend)


def prepare_alone(model: PretrainedWrapper, role: Role, **options: Any) -> None:
    """Prepare a model that a script has made as a run with these options does, where they ask for anything."""
    if any(options.values()):
        config = PPOConfig.from_flat(options).resolved()
        prepare_model(model, role, config, torch.device("cpu"))


def adapter_options(
    rank: int, alpha: float, dropout: float, target_modules: str | Sequence[str] | None
) -> dict[str, Any]:
    """Return the options of adapters of this rank; none for 0."""
    if rank <= 0:
        return {}
    module_names = (
        (target_modules,)
        if isinstance(target_modules, str)
        else tuple(target_modules or ("all-linear",))
    )
    return {
        "lora_rank": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "target_modules": module_names,
    }
