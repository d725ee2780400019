"""Tiny random models of several families and a character tokenizer, all made here, offline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Gemma2Config,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
)

VOCAB = 48
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # large, so that a wrong mask changes the result
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KV = {"num_key_value_heads": 2, "head_dim": 8}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**COMMON, **KV, attention_dropout=0.1),
    "qwen2": lambda: Qwen2Config(**COMMON, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**COMMON, **KV),
    "gemma": lambda: GemmaConfig(**COMMON, **KV),  # tied
    "gemma2": lambda: Gemma2Config(**COMMON, **KV, sliding_window=4),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "gpt_neox": lambda: GPTNeoXConfig(**COMMON, attention_dropout=0.1, hidden_dropout=0.1),
    "mixtral": lambda: MixtralConfig(**COMMON, **KV, num_local_experts=4, router_jitter_noise=0.1),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **COMMON,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
    ),
}


@pytest.fixture
def configs() -> dict[str, Callable[[], PretrainedConfig]]:
    """Family -> its tiny config, a new one at each call."""
    return CONFIGS


@pytest.fixture(params=tuple(CONFIGS))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=("eager", "sdpa"))
def attention(request: pytest.FixtureRequest) -> str:
    return request.param


def from_config(kind: type, config: PretrainedConfig, attention: str | None) -> PreTrainedModel:
    """A random model; without ``attention``, with transformers' choice: sdpa for all that have it."""
    torch.manual_seed(0)
    try:
        return kind.from_config(config, attn_implementation=attention)
    except ValueError as error:  # Gemma 2 since 5.23
        if attention == "sdpa" and "scaled_dot_product_attention" in str(error):
            pytest.skip(f"this transformers has no sdpa for {config.model_type}")
        raise


@pytest.fixture
def causal_lm() -> Callable[..., PreTrainedModel]:
    """(family, attention) -> a random causal LM, the same at each call."""

    def make(family: str = "llama", attention: str | None = None) -> PreTrainedModel:
        return from_config(AutoModelForCausalLM, CONFIGS[family](), attention)

    return make


@pytest.fixture
def classifier() -> Callable[..., PreTrainedModel]:
    """(family, attention) -> a random one-output classifier, the same at each call."""

    def make(family: str = "llama", attention: str | None = None, num_labels: int = 1) -> PreTrainedModel:
        config = CONFIGS[family]()
        config.num_labels = num_labels
        return from_config(AutoModelForSequenceClassification, config, attention)

    return make


@pytest.fixture
def ragged() -> tuple[torch.Tensor, torch.Tensor, int]:
    """(sequences (B, S), attention_mask (B, S), A): left pad | prompt | response | right pad, lengths 2 to 24."""
    prompts, responses = [1, 14, 5, 9], [10, 1, 3, 10]
    width, actions = max(prompts), max(responses)
    generator = torch.Generator().manual_seed(1)
    sequences = torch.zeros(4, width + actions, dtype=torch.long)
    mask = torch.zeros_like(sequences)
    for b, (p, r) in enumerate(zip(prompts, responses)):
        sequences[b, width - p : width + r] = torch.randint(3, VOCAB, (p + r,), generator=generator)
        mask[b, width - p : width + r] = 1
    return sequences, mask, actions


@pytest.fixture
def scored(ragged):
    """(actor or reference, what else) -> ActionScores of the ragged batch."""
    sequences, mask, actions = ragged
    return lambda model, **options: model.score_actions(sequences, actions, mask, **options)


@pytest.fixture
def save_tokenizer(tmp_path: Path) -> Callable[..., str]:
    """Save a character tokenizer with the given special tokens; returns its folder."""

    def save(folder: str | None = None, **special: str) -> str:
        characters = ["<pad>", "<s>", "</s>", "<unk>", *"0123456789+=abc"]
        vocabulary = {character: i for i, character in enumerate(characters)}
        tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
        tokenizer.pre_tokenizer = Split("", "isolated")
        target = folder or str(tmp_path / "tokenizer")
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **special).save_pretrained(target)
        return target

    return save
