"""Value heads of checkpoints, also under other names than transformers'."""

from __future__ import annotations

import logging
import re

from torch import Tensor
from transformers.utils import cached_file

from lightppo.errors import ModelLoadError
from lightppo.models.checkpoint_tensors import checkpoint_files, open_tensors

logger = logging.getLogger(__name__)

# Names of other people's heads, to tell "no head yet" from "a head under another name".
# A router's "e_score_correction_bias" is none.
_HEAD_LIKE = re.compile(
    r"(^|[._])(v_head|value_head|score|reward_head|regression_head|classifier|summary)([._].*)?\.(weight|bias)$"
)


def is_value_head(name: str) -> bool:
    """Whether a tensor looks like the head of a critic or reward model."""
    return _HEAD_LIKE.search(name) is not None


def head_from_checkpoint(
    path: str,
    prefix: str,
    kind: str,
    flag: str,
) -> Tensor | None:
    """The head's weight (1, hidden); None for a critic whose checkpoint has none."""
    files = checkpoint_files(path)
    fitting = [
        name for name in files if re.search(rf"(^|\.){re.escape(prefix)}\.(weight|bias)$", name)
    ]
    if any(name.endswith(".bias") for name in fitting):
        raise ModelLoadError(
            f"{flag} {path}: the head {prefix} has a bias, which value heads here do not have"
        )
    if len(fitting) > 1:
        raise ModelLoadError(
            f"{flag} {path}: --value_head_prefix {prefix} fits several weights: {sorted(fitting)}"
        )
    if not fitting:
        others = ", ".join(sorted(name for name in files if _HEAD_LIKE.search(name))[:3])
        if others:
            hint = (
                f"It has {others}: set --value_head_prefix, or init_value_head=True for a new head"
            )
            raise ModelLoadError(f"{flag} {path} has no {prefix}.weight. {hint}")
        if kind == "reward":
            raise ModelLoadError(
                f"{flag} {path} has no {prefix}.weight: train it as a reward model first"
            )
        logger.info("%s has no %s.weight; its value head is new", path, prefix)
        return None
    _, read = open_tensors(cached_file(path, files[fitting[0]]))
    weight = read(fitting[0])
    if weight.dim() != 2 or weight.shape[0] != 1:
        raise ModelLoadError(
            f"{flag} {path}: {fitting[0]} has shape {tuple(weight.shape)}; a {kind} needs one output, (1, hidden)"
        )
    return weight
