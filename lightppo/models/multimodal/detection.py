"""Which checkpoints have image or audio towers, and what cannot train for that reason.

``AutoModelForCausalLM`` reads some checkpoints without their tower (Qwen3.5), so that an export would have lost it. It
reads others with it (Gemma 3), which weight decay would then change although no gradient reaches it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto import modeling_auto

from lightppo.errors import ModelLoadError
from lightppo.models.checkpoint_tensors import checkpoint_files
from lightppo.models.loading import LoadOptions, errors_name, read_config
from lightppo.models.multimodal.parts import is_of_tower
from lightppo.models.multimodal.whole_checkpoint import Whole

_PART = re.compile(r"vision|visual|image|audio|speech|video|vq")  # in the name of a config's part


_MAPPINGS = ("MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES")


def untrainable(
    config: PretrainedConfig,
    tensors: Iterable[str],
    name: str,
) -> str | None:
    """Why a model with this config and these ``tensors`` is refused for training; None: it is a text model.

    ``name`` stands in front, e.g. ``--pretrain FOLDER``.
    """
    if not reads_more_than_text(config):
        return None
    towers = [tensor for tensor in tensors if is_of_tower(tensor)]
    if not towers:
        return None
    return (
        f"{name} has an image or audio tower ({len(towers)} tensors, such as {towers[0]}), which training would drop "
        "or change: train its language model alone, saved as a folder of its own, see docs/limits.md"
    )


def reads_more_than_text(config: PretrainedConfig) -> bool:
    """Whether the config is of a model that can have a tower."""
    known = any(config.model_type in getattr(modeling_auto, mapping, ()) for mapping in _MAPPINGS)
    parts = (
        name for name, part in vars(config).items() if isinstance(part, PretrainedConfig | dict)
    )
    return known or any(_PART.search(name) for name in parts)


def check_trainable(path: str, *, flag: str = "--pretrain", **options: Any) -> bool:
    """Whether what trains of a checkpoint is the language model alone, beside towers. It reads names alone.

    ``options`` are fields of :class:`LoadOptions`. Random weights are looked at when they are made.

    Raises:
        ModelLoadError: an image or audio tower cannot be told from what would train.
    """
    how = LoadOptions.of(options)
    path, config = read_config(path, flag, how)
    if how.init_from_scratch:
        return False
    return language_model(AutoModelForCausalLM, path, config, flag) is not None


def language_model(auto_class: Any, path: str, config: PretrainedConfig, flag: str) -> Whole | None:
    """The language model that ``auto_class`` loads of a checkpoint with towers; None for a text model.

    Raises:
        ModelLoadError: it cannot be told from the towers, or transformers has no class for it alone.
    """
    if not reads_more_than_text(config):
        return None
    with errors_name(path, flag):
        reason = untrainable(config, checkpoint_files(path), f"{flag} {path}")
    return None if reason is None else Whole(auto_class, path, config, f"{flag} {path}")


@dataclass
class Untrainable:
    """A checkpoint with towers that loads as transformers loads it, and cannot train."""

    config: PretrainedConfig
    untrainable: str  # why
    options: dict[str, Any] = field(default_factory=dict)

    def belongs_to(self, model: Any) -> None:
        """Nothing is kept of it."""


def read_part(
    auto_class: Any, path: str, config: PretrainedConfig, flag: str
) -> Whole | Untrainable | None:
    """For ``lightppo.plugin.LANGUAGE_MODELS``: :func:`language_model`, or why there is none."""
    try:
        return language_model(auto_class, path, config, flag)
    except ModelLoadError as error:
        return Untrainable(config, str(error))
