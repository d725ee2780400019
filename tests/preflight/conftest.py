"""What tests of this room share with those of models."""

from support.fixtures.families import (
    attention,
    causal_lm,
    classifier,
    configs,
    family,
    save_tokenizer,
)

__all__ = ["attention", "causal_lm", "classifier", "configs", "family", "save_tokenizer"]
