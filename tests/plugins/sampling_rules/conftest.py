"""What tests of this plugin share with those of other folders."""

from support.fixtures.character_models import tokenizer

__all__ = ["tokenizer"]
