"""What tests of this room share with those of other rooms."""

from support.fixtures.character_models import actor_of, llama, make_llama, model, prompts, tokenizer
from support.fixtures.threads import simulate_ranks

__all__ = ["actor_of", "llama", "make_llama", "model", "prompts", "simulate_ranks", "tokenizer"]
