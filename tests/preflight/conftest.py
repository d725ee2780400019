"""What tests of this room share with those of others."""

from support.fixtures.families import (
    attention,
    causal_lm,
    classifier,
    configs,
    family,
    save_tokenizer,
)
from support.fixtures.small_runs import assets, made, make_config, parts, trainer_with, world

__all__ = [
    "assets",
    "attention",
    "causal_lm",
    "classifier",
    "configs",
    "family",
    "made",
    "make_config",
    "parts",
    "save_tokenizer",
    "trainer_with",
    "world",
]
