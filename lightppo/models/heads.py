"""Output heads and value heads: which module is one, and its weight in a checkpoint, also under other names."""

from __future__ import annotations

import logging
import math
import re
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import cached_file

from lightppo.errors import ModelLoadError
from lightppo.models.pretrained import checkpoint_files, open_tensors


def value_head(model: PreTrainedModel) -> tuple[str, nn.Linear]:
    """Return name and module of the linear layer that makes the score."""
    children = model.named_children()
    heads = [
        (name, module)
        for name, module in children
        if name != model.base_model_prefix and isinstance(module, nn.Linear)
    ]
    if len(heads) != 1:
        raise ModelLoadError(
            f"{type(model).__name__} has {len(heads)} linear layers beside its base model; 1 is needed"
        )
    return heads[0]


def head_names(model: PreTrainedModel) -> set[str]:
    """Return the names of a causal LM's output head, or of the value head."""
    if not model.can_generate():
        return {value_head(model)[0]}
    head = model.get_output_embeddings()
    return {name for name, module in model.named_modules() if module is head}


def drawn_head(model: PreTrainedModel, seed: int) -> Tensor:
    """Return a weight (1, hidden) of N(0, 1/(hidden + 1)) (arXiv:2009.01325)."""
    features = value_head(model)[1].in_features
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, features, generator=generator) / math.sqrt(features + 1)


@torch.no_grad()
def set_value_head(model: PreTrainedModel, weight: Tensor) -> None:
    """Set the head to ``weight`` (1, hidden); a bias becomes 0."""
    _, head = value_head(model)
    gathered_weights: AbstractContextManager = nullcontext()
    if hasattr(head.weight, "ds_id"):  # a ZeRO-3 shard
        import deepspeed

        gathered_weights = deepspeed.zero.GatheredParameters(
            list(head.parameters()), modifier_rank=0
        )
    with gathered_weights:
        head.weight.copy_(weight)
        if head.bias is not None:
            head.bias.zero_()


logger = logging.getLogger(__name__)


# Names of other people's heads, to tell "no head yet" from "a head under another name".
# A router's "e_score_correction_bias" is none.
_HEAD_LIKE = re.compile(
    r"(^|[._])(v_head|value_head|score|reward_head|regression_head|classifier|summary)([._].*)?\.(weight|bias)$"
)


def is_value_head(name: str) -> bool:
    """Tell whether a tensor looks like the head of a critic or reward model."""
    return _HEAD_LIKE.search(name) is not None


def head_from_checkpoint(
    path: str,
    prefix: str,
    kind: str,
    flag: str,
) -> Tensor | None:
    """Return the head's weight (1, hidden); None for a critic whose checkpoint has none."""
    files = checkpoint_files(path)
    head_weights = [
        name for name in files if re.search(rf"(^|\.){re.escape(prefix)}\.(weight|bias)$", name)
    ]
    if any(name.endswith(".bias") for name in head_weights):
        raise ModelLoadError(
            f"{flag} {path}: the head {prefix} has a bias, which value heads here do not have"
        )
    if len(head_weights) > 1:
        raise ModelLoadError(
            f"{flag} {path}: --value_head_prefix {prefix} fits several weights: {sorted(head_weights)}"
        )
    if not head_weights:
        similar_names = ", ".join(sorted(name for name in files if is_value_head(name))[:3])
        if similar_names:
            hint = f"It has {similar_names}: set --value_head_prefix, or init_value_head=True for a new head"
            raise ModelLoadError(f"{flag} {path} has no {prefix}.weight. {hint}")
        if kind == "reward":
            raise ModelLoadError(
                f"{flag} {path} has no {prefix}.weight: train it as a reward model first"
            )
        logger.info("%s has no %s.weight; its value head is new", path, prefix)
        return None
    _, read_tensor = open_tensors(cached_file(path, files[head_weights[0]]))
    weight = read_tensor(head_weights[0])
    if weight.dim() != 2 or weight.shape[0] != 1:
        raise ModelLoadError(
            f"{flag} {path}: {head_weights[0]} has shape {tuple(weight.shape)}; a {kind} needs one output, (1, hidden)"
        )
    return weight
