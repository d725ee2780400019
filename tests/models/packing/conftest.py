"""What tests of this plugin share with those of other folders."""

from support.fixtures.families import (
    attention,
    causal_lm,
    classifier,
    configs,
    family,
    ragged,
)
from support.fixtures.small_runs import assets, make_config, parts, trainer_with, world

__all__ = [
    "assets",
    "attention",
    "causal_lm",
    "classifier",
    "configs",
    "family",
    "make_config",
    "parts",
    "ragged",
    "trainer_with",
    "world",
]
