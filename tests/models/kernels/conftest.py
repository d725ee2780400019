"""What tests of this room share with those of other rooms."""

import pytest
from support.fixtures.character_models import actor_of, llama, make_llama, model, prompts, tokenizer

__all__ = ["actor_of", "llama", "make_llama", "model", "prompts", "tokenizer"]


@pytest.fixture(autouse=True)
def compiles_small_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have oneDNN take products of tiny models too, where it takes any."""
    monkeypatch.setattr("lightppo.models.kernels.layers._COMPILED_PRODUCTS", 0)
