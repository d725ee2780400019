"""What tests of this plugin share with those of other folders."""

from support.fixtures.character_models import actor_of, prompts, tokenizer

__all__ = ["actor_of", "prompts", "tokenizer"]
