"""What tests of this plugin share with those of other folders."""

from support.fixtures.checks_on_ranks import run_checks
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
    "run_checks",
    "save_tokenizer",
    "scored",
]
