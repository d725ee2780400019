"""Checkpoints with an image or audio tower: how to tell one, and why it is not trained.

``AutoModelForCausalLM`` reads some of them without the tower (Qwen3.5), so that an export would have lost it. It reads
others with the tower (Gemma 3), which weight decay would then change although no gradient reaches it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from transformers import PretrainedConfig
from transformers.models.auto import modeling_auto

_PART = re.compile(r"vision|visual|image|audio|speech|video|vq")  # in the name of a config's part
_TENSOR = re.compile(
    r"(^|[._])(vision|visual|image|audio|speech|video|vq|multi_modal|multimodal|mm_projector|vpm|apm|resampler)"
)

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
    towers = [tensor for tensor in tensors if _TENSOR.search(tensor)]
    if not towers:
        return None
    return (
        f"{name} has an image or audio tower ({len(towers)} tensors, such as {towers[0]}), which training would drop "
        "or change: train its language model alone, saved as a folder of its own (docs/limits.md says how)"
    )


def reads_more_than_text(config: PretrainedConfig) -> bool:
    """Whether the config is of a model that can have a tower."""
    known = any(config.model_type in getattr(modeling_auto, mapping, ()) for mapping in _MAPPINGS)
    parts = (
        name for name, part in vars(config).items() if isinstance(part, PretrainedConfig | dict)
    )
    return known or any(_PART.search(name) for name in parts)
