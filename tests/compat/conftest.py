"""What tests of this room share with those of other rooms."""

from support.fixtures.data_rows import make_tokenizer, tokenizer
from support.fixtures.small_runs import assets, made, make_config, parts, trainer_with, world

__all__ = [
    "assets",
    "made",
    "make_config",
    "make_tokenizer",
    "parts",
    "tokenizer",
    "trainer_with",
    "world",
]
