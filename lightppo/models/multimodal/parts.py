"""Which tensors of a checkpoint are its language model's, and which stay as they came: judged by their names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from lightppo.errors import ModelLoadError
from lightppo.models.heads import is_value_head

# the name that a language model's input embedding ends with
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|word_embeddings|embed_in)\.weight$")
_HEAD = re.compile(r"(^|\.)lm_head\.")
# predicts further tokens for speculative decoding (Qwen3.5): transformers has no code for it
_DRAFT = re.compile(r"(^|\.)mtp\.")
# layers of the language model that text alone does not reach
_FED_BY_TOWER = re.compile(r"(^|[._])cross_attn")

_TENSOR = re.compile(
    r"(^|[._])(vision|visual|image|audio|speech|video|vq|multi_modal|multimodal|mm_projector|vpm|apm|resampler"
    r"|connector|projector|aligner|perceiver)"
)


@dataclass(frozen=True)
class Parts:
    """The parts of a checkpoint; names begin with what stands in front of a part's own names."""

    body: str  # in front of the language model's: "model.language_model."
    # What stands before "lm_head.": "" or "language_model."; None: it has no head of its own.
    head: str | None
    language: frozenset[str]  # whole names, the head's too
    kept: tuple[str, ...]  # of towers and what else stays as it came


def parts_of(names: Iterable[str], checkpoint: str) -> Parts:
    """Tell the parts of a checkpoint apart; ``checkpoint`` stands in front of messages.

    Raises:
        ModelLoadError: some tensors are of neither, or a tower's are inside the language model; it names the parts.
    """
    names = sorted(names)
    matches = filter(None, (_EMBEDDING.search(name) for name in names if not is_of_tower(name)))
    body_prefixes = sorted(match.string[: match.start(2)] for match in matches)
    if len(body_prefixes) != 1:
        embedding_count = "it has no input embedding"
        if body_prefixes:
            embedding_count = f"it has {len(body_prefixes)} input embeddings"
        raise _refusal(checkpoint, f"{embedding_count} outside of its towers", names)
    (body_prefix,) = body_prefixes
    outside_names = [name for name in names if not is_of_tower(name)]
    if body_prefix:
        outside_names = [name for name in outside_names if not name.startswith(body_prefix)]
    head_names = [name for name in outside_names if _HEAD.search(name)]
    head_prefixes = {name[: name.index("lm_head.")] for name in head_names}
    if len(head_prefixes) > 1:
        raise _refusal(checkpoint, "it has several output heads", head_names)
    language_names = {*head_names, *filter(is_value_head, outside_names)}
    tower_names = []
    unknown_names = []
    mixed_names = []
    for name in (name for name in names if name not in language_names):
        name_in_part = name.removeprefix(body_prefix)
        first_part = name_in_part.partition(".")[0]
        if is_of_tower(first_part if name_in_part != name else name) or _DRAFT.search(name):
            tower_names.append(name)
        elif name_in_part == name and body_prefix:
            unknown_names.append(name)
        elif is_of_tower(name_in_part) or _FED_BY_TOWER.search(name_in_part):
            mixed_names.append(name)
        else:
            language_names.add(name)
    if unknown_names:
        raise _refusal(checkpoint, "these parts are neither of a known kind", unknown_names)
    if mixed_names:
        raise _refusal(
            checkpoint, "these layers of its language model are for images or sound", mixed_names
        )
    head_prefix = next(iter(head_prefixes), None)
    return Parts(body_prefix, head_prefix, frozenset(language_names), tuple(tower_names))


def _refusal(checkpoint: str, reason: str, names: Iterable[str]) -> ModelLoadError:
    return ModelLoadError(
        f"{checkpoint} has an image or audio tower and cannot be trained, because its parts cannot be told apart: "
        f"{reason}: {listed(names)}: train its language model alone, saved as a folder of its own, see docs/limits.md"
    )


def is_of_tower(name: str) -> bool:
    """Tell whether a tensor of such a checkpoint is of a tower, or between tower and language model."""
    return _TENSOR.search(name) is not None


def listed(names: Iterable[str], longest_list: int = 6) -> str:
    """Return list the parts that tensors are of, with their numbers: ``model.connector (4 tensors), …``."""
    part_counts = Counter(".".join(re.sub(r"\.\d+\..*", "", name).split(".")[:2]) for name in names)
    part_texts = [f"{part} ({count} tensors)" for part, count in sorted(part_counts.items())]
    return ", ".join(part_texts[:longest_list]) + (", …" if len(part_texts) > longest_list else "")
