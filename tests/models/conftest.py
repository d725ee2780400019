"""What tests of this room share with those of other rooms."""

from support.fixtures.families import (
    attention,
    causal_lm,
    classifier,
    configs,
    family,
    ragged,
    save_tokenizer,
    scored,
)

__all__ = [
    "attention",
    "causal_lm",
    "classifier",
    "configs",
    "family",
    "ragged",
    "save_tokenizer",
    "scored",
]
