"""Tiny random models and a character tokenizer, all made in memory."""

from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lightppo.data.records import Prompt

CHARS = "abcdefghijklmnop 0123456789"
EOS_ID = 1


@pytest.fixture(scope="session")
def tokenizer():
    """ids: 0 pad, 1 eos, 2 unk, then one id per character of CHARS; 30 ids."""
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *CHARS])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def tiny_llama(vocab_size: int = 30, seed: int = 0, scale: float = 4.0, **changes) -> LlamaForCausalLM:
    """Random Llama; a large ``scale`` of the head makes its distributions uneven, as a trained model's are."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=0,
        **changes,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(scale)
    return model


def tiny_gpt2(vocab_size: int = 30, seed: int = 3) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=vocab_size,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        initializer_range=0.2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=False,  # tied and untrained, it would repeat its last token for ever
    )
    return GPT2LMHeadModel(config).eval()


MODELS = {"llama": tiny_llama, "gpt2": tiny_gpt2}


@pytest.fixture(params=sorted(MODELS))
def model(request):
    return MODELS[request.param]()


@pytest.fixture
def llama():
    return tiny_llama()


@pytest.fixture
def make_llama():
    return tiny_llama


def as_actor(model) -> SimpleNamespace:
    """What the engine asks of an actor: ``.model``."""
    return SimpleNamespace(model=model)


@pytest.fixture
def actor_of():
    return as_actor


@pytest.fixture
def prompts(tokenizer):
    """Ten prompts of 1 to 12 characters, indices 100 … 109."""
    texts = ["abc", "h", "ponmlkjihgfe", "a1b2", "deadbeef", "0123456789", "ij", "cafe", "ppp", "kilo 99"]
    return [Prompt(text, tokenizer.encode(text), index=100 + i) for i, text in enumerate(texts)]
