"""The one-output head of critics and reward models: find it, read it from a checkpoint, initialise it."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightppo.errors import ModelLoadError
from lightppo.models.checkpoint_index import checkpoint_files, read_tensor

logger = logging.getLogger(__name__)

# Names of other people's heads, to tell "no head yet" from "a head under a name you did not give".
_HEAD_LIKE = re.compile(r"(^|[._])(v_head|value_head|score|reward_head|regression_head|classifier|summary)[._]")


def value_head(model: PreTrainedModel) -> tuple[str, nn.Linear]:
    """Name and module of the linear layer that makes the score.

    Raises:
        ModelLoadError: not exactly one linear layer beside the base model.
    """
    heads = [
        (name, child)
        for name, child in model.named_children()
        if name != model.base_model_prefix and isinstance(child, nn.Linear)
    ]
    if len(heads) != 1:
        raise ModelLoadError(
            f"{type(model).__name__} has {len(heads)} linear layers beside its base model; a critic or reward model "
            "needs exactly one (as in Llama, Qwen2, GPT-2)"
        )
    return heads[0]


def head_names(model: PreTrainedModel) -> set[str]:
    """Names of the output head of a causal LM, or of the value head."""
    if not model.can_generate():
        return {value_head(model)[0]}
    head = model.get_output_embeddings()
    return {name for name, module in model.named_modules() if module is head}


@torch.no_grad()
def set_value_head(model: PreTrainedModel, weight: Tensor | None, *, seed: int) -> None:
    """Set the head to ``weight`` (1, hidden), or to N(0, 1/(hidden + 1)) when None; a bias is set to 0."""
    _, head = value_head(model)
    if weight is None:
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(1, head.in_features, generator=generator) / math.sqrt(head.in_features + 1)
    with gathered(list(head.parameters())):
        head.weight.copy_(weight)
        if head.bias is not None:
            head.bias.zero_()


def head_from_checkpoint(path: str, prefix: str, kind: str, flag: str) -> Tensor | None:
    """The head's weight (1, hidden); None for a critic whose checkpoint has none."""
    files = checkpoint_files(path)
    ends_with = re.compile(rf"(^|\.){re.escape(prefix)}\.(weight|bias)$")
    found = {name: match[2] for name in files if (match := ends_with.search(name))}
    if "bias" in found.values():
        raise ModelLoadError(f"{flag} {path}: the head {prefix} has a bias, which value heads here do not have")
    if not found:
        others = sorted(name for name in files if _HEAD_LIKE.search(name))
        hint = f" It has {', '.join(others[:3])}: set --value_head_prefix." if others else ""
        if kind == "reward":
            hint = hint or " Train it as a reward model first."
            raise ModelLoadError(f"{flag} {path} has no {prefix}.weight, so it is not a reward model.{hint}")
        if others:
            raise ModelLoadError(f"{flag} {path} has no {prefix}.weight.{hint} Or pass init_value_head=True.")
        logger.info("%s has no %s.weight; the critic's value head is new", path, prefix)
        return None
    if len(found) > 1:
        raise ModelLoadError(f"{flag} {path}: --value_head_prefix {prefix} fits several weights: {sorted(found)}")
    name = next(iter(found))
    weight = read_tensor(files[name], name)
    if weight.dim() != 2 or weight.shape[0] != 1:
        raise ModelLoadError(f"{flag} {path}: {name} has shape {tuple(weight.shape)}; one output (1, hidden) is needed")
    return weight


@contextmanager
def gathered(params: list[nn.Parameter]) -> Iterator[None]:
    """Full parameters inside the block, changes of rank 0 kept; nothing to do where they are not ZeRO-3 shards."""
    if not any(hasattr(param, "ds_id") for param in params):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(params, modifier_rank=0):
        yield
