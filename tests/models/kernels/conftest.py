"""What tests of this plugin share with those of other folders."""

from support.fixtures.character_models import actor_of, llama, make_llama, model, prompts, tokenizer
from support.fixtures.families import causal_lm, classifier, configs, family, ragged
from support.fixtures.small_runs import assets, make_config, parts, trainer_with, world

__all__ = [
    "actor_of",
    "assets",
    "causal_lm",
    "classifier",
    "configs",
    "family",
    "llama",
    "make_config",
    "make_llama",
    "model",
    "parts",
    "prompts",
    "ragged",
    "tokenizer",
    "trainer_with",
    "world",
]
