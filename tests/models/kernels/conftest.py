"""What tests of this room share with those of other rooms."""

from support.fixtures.character_models import actor_of, llama, make_llama, model, prompts, tokenizer

__all__ = ["actor_of", "llama", "make_llama", "model", "prompts", "tokenizer"]
