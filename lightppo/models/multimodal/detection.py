"""Which checkpoints have image or audio towers, and what cannot train for that reason.

``AutoModelForCausalLM`` reads some checkpoints without their tower (Qwen3.5), so that an export would have lost it. It
reads others with it (Gemma 3), which weight decay would then change although no gradient reaches it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto import modeling_auto

from lightppo.config import PPOConfig
from lightppo.config.rules import needs_critic
from lightppo.errors import ModelLoadError
from lightppo.files import stage_to_local
from lightppo.models.multimodal.parts import is_of_tower
from lightppo.models.multimodal.whole_checkpoint import Whole
from lightppo.models.pretrained import (
    LoadOptions,
    checkpoint_files,
    errors_name,
    loading_options,
    read_config,
)

_PART = re.compile(r"vision|visual|image|audio|speech|video|vq")  # in the name of a config's part


_MAPPINGS = ("MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES")


def why_untrainable(
    config: PretrainedConfig,
    tensors: Iterable[str],
    name: str,
) -> str | None:
    """Return why a model with this config and these ``tensors`` is refused for training; None: it is a text model.

    ``name`` stands in front, e.g. ``--pretrain FOLDER``.
    """
    if not reads_more_than_text(config):
        return None
    tower_tensors = [tensor for tensor in tensors if is_of_tower(tensor)]
    if not tower_tensors:
        return None
    return (
        f"{name} has an image or audio tower ({len(tower_tensors)} tensors, such as {tower_tensors[0]}), which "
        "training would drop or change: train its language model alone, saved as a folder of its own, see docs/limits.md"
    )


def reads_more_than_text(config: PretrainedConfig) -> bool:
    """Tell whether the config is of a model that can have a tower."""
    has_known_type = any(
        config.model_type in getattr(modeling_auto, mapping, ()) for mapping in _MAPPINGS
    )
    part_names = (
        name
        for name, config_part in vars(config).items()
        if isinstance(config_part, PretrainedConfig | dict)
    )
    return has_known_type or any(_PART.search(name) for name in part_names)


def check_trainable(path: str, *, flag: str = "--pretrain", **options: Any) -> bool:
    """Tell whether the language model alone would train, beside towers. It reads names alone.

    ``options`` are fields of :class:`LoadOptions`. Random weights are looked at when they are made.

    Raises:
        ModelLoadError: an image or audio tower cannot be told from what would train.
    """
    load_options = LoadOptions(**options)
    path, config = read_config(path, flag, load_options)
    if load_options.init_from_scratch:
        return False
    return language_model(AutoModelForCausalLM, path, config, flag) is not None


def language_model(auto_class: Any, path: str, config: PretrainedConfig, flag: str) -> Whole | None:
    """Return the language model that ``auto_class`` loads of a checkpoint with towers; None for a text model.

    Raises:
        ModelLoadError: it cannot be told from the towers, or transformers has no class for it alone.
    """
    if not reads_more_than_text(config):
        return None
    with errors_name(path, flag):
        reason = why_untrainable(config, checkpoint_files(path), f"{flag} {path}")
    if reason is None:
        return None
    return Whole(auto_class, path, config, f"{flag} {path}")


def language_model_or_reason(
    auto_class: Any, path: str, config: PretrainedConfig, flag: str
) -> tuple[Whole | None, str | None]:
    """Return :func:`language_model`; where it raises, None and why what transformers loads cannot train."""
    try:
        return language_model(auto_class, path, config, flag), None
    except ModelLoadError as error:
        return None, str(error)


def check_trained_models(building: Any) -> None:
    """Refuse a run where what trains cannot be told from image or audio towers; of a PPO run the critic's too."""
    config = building.config
    if config.flat().get("val_only"):
        return
    options = loading_options(config)
    pretrain = config.model.pretrain
    check_trainable(stage_to_local(pretrain), **options)
    if isinstance(config, PPOConfig) and needs_critic(config):
        critic = config.model.critic_pretrain
        if critic != pretrain:
            options["init_from_scratch"] = False
            check_trainable(stage_to_local(critic), flag="--critic_pretrain", **options)
