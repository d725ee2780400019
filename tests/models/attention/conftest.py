"""What tests of this plugin share with those of other folders."""

from support.fixtures.character_models import actor_of, prompts, tokenizer
from support.fixtures.families import ragged

__all__ = ["actor_of", "prompts", "ragged", "tokenizer"]
