"""What a loaded model gets before it goes to its engine: what its options ask for, and what plugins change."""

from __future__ import annotations

from typing import Literal

import torch

from lightppo.config.options import OptionSet
from lightppo.config.rules import of_role
from lightppo.errors import ModelLoadError
from lightppo.models.wrapper import PretrainedWrapper
from lightppo.plugin import PREPARATIONS

Role = Literal["actor", "critic", "reference", "teacher", "reward", "ema"]
"""What a model does in a run. The model that SFT, RM or DPO train is the actor."""


def prepare_model(
    model: PretrainedWrapper,
    role: Role,
    config: OptionSet,
    device: torch.device,
) -> None:
    """Change a loaded model in place: save memory where it trains, then :data:`lightppo.plugin.PREPARATIONS`."""
    if role in ("actor", "critic"):
        keep_fewer_activations(model, role, config, device)
    for preparation in PREPARATIONS.values():
        preparation.fn(model, role, config, device)


def keep_fewer_activations(
    model: PretrainedWrapper,
    role: Literal["actor", "critic"],
    config: OptionSet,
    device: torch.device,
) -> None:
    """``--gradient_checkpointing`` and ``--activation_offload``, of a model that trains."""
    if config.model.activation_offload and device.type == "cpu":
        raise ModelLoadError(
            "--activation_offload moves activations off a GPU, and there is no GPU: leave it out"
        )
    model.activation_offload = config.model.activation_offload
    if of_role(config, role).gradient_checkpointing:
        use_reentrant = config.model.gradient_checkpointing_use_reentrant
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
