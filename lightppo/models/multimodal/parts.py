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
    """Tells the parts of a checkpoint apart; ``checkpoint`` stands in front of messages.

    Raises:
        ModelLoadError: some tensors are of neither, or a tower's are inside the language model; it names the parts.
    """
    names = sorted(names)
    ends = {name: found for name in names if (found := _EMBEDDING.search(name))}
    bodies = sorted(name[: end.start(2)] for name, end in ends.items() if not is_of_tower(name))
    if len(bodies) != 1:
        many = f"it has {len(bodies)} input embeddings" if bodies else "it has no input embedding"
        raise _refusal(checkpoint, f"{many} outside of its towers", names)
    (body,) = bodies
    outside = [
        name for name in names if not (body and name.startswith(body)) and not is_of_tower(name)
    ]
    heads = [name for name in outside if _HEAD.search(name)]
    fronts = {name[: name.index("lm_head.")] for name in heads}
    if len(fronts) > 1:
        raise _refusal(checkpoint, "it has several output heads", heads)
    language = {*heads, *filter(is_value_head, outside)}
    kept = []
    strange = []
    mixed = []
    for name in (name for name in names if name not in language):
        own = name.removeprefix(body) if name.startswith(body) else name
        part = own.partition(".")[0]
        if is_of_tower(part if own != name else name) or _DRAFT.search(name):
            kept.append(name)
        elif own == name and body:
            strange.append(name)
        elif is_of_tower(own) or _FED_BY_TOWER.search(own):
            mixed.append(name)
        else:
            language.add(name)
    if strange:
        raise _refusal(checkpoint, "these parts are neither of a known kind", strange)
    if mixed:
        raise _refusal(
            checkpoint, "these layers of its language model are for images or sound", mixed
        )
    head = next(iter(fronts), None)
    return Parts(body, head, frozenset(language), tuple(kept))


def _refusal(checkpoint: str, reason: str, names: Iterable[str]) -> ModelLoadError:
    return ModelLoadError(
        f"{checkpoint} has an image or audio tower and cannot be trained, because its parts cannot be told apart: "
        f"{reason}: {listed(names)}: train its language model alone, saved as a folder of its own, see docs/limits.md"
    )


def is_of_tower(name: str) -> bool:
    """Whether a tensor of such a checkpoint, or a part of it, is of a tower or between tower and language model."""
    return _TENSOR.search(name) is not None


def listed(names: Iterable[str], most: int = 6) -> str:
    """The parts that tensors are of, with their numbers: ``model.connector (4 tensors), …``."""
    counts = Counter(".".join(re.sub(r"\.\d+\..*", "", name).split(".")[:2]) for name in names)
    shown = [f"{part} ({count} tensors)" for part, count in sorted(counts.items())]
    return ", ".join(shown[:most]) + (", …" if len(shown) > most else "")
