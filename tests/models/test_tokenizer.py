from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from lightppo.errors import ModelLoadError
from lightppo.models.actor import Actor
from lightppo.models.loading import get_tokenizer, valid_vocab_size

Save = Callable[..., str]
FULL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}


def llama(rows: int) -> PreTrainedModel:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=rows, **sizes))


def test_padding_side_and_ids(save_tokenizer: Save) -> None:
    tokenizer = get_tokenizer(save_tokenizer(**FULL))
    # 4 special tokens, then the digits: "1" is 5
    assert tokenizer(["1", "1+2"], padding=True, add_special_tokens=False).input_ids == [[0, 0, 5], [5, 14, 6]]
    assert get_tokenizer(save_tokenizer(**FULL), padding_side="right").padding_side == "right"


def test_eos_pads_where_there_is_no_pad_token(save_tokenizer: Save, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lightppo.models.loading"):
        tokenizer = get_tokenizer(save_tokenizer(eos_token="</s>"))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    assert "has no pad token; EOS '</s>' pads" in caplog.text
    assert tokenizer.bos_token_id is None  # a model without BOS is fine
    assert tokenizer("1").input_ids == [5]


def test_no_eos_is_an_error(save_tokenizer: Save) -> None:
    with pytest.raises(ModelLoadError, match=r'--pretrain .*has no EOS token.*Set "eos_token"'):
        get_tokenizer(save_tokenizer(pad_token="<pad>"))
    with pytest.raises(ModelLoadError, match="has no EOS token"):
        get_tokenizer(save_tokenizer())


@pytest.mark.parametrize("path", ["/nowhere/tokenizer", "./nowhere"])
def test_missing_path(path: str) -> None:
    with pytest.raises(ModelLoadError, match=f"--reward_pretrain {path}: no such folder"):
        get_tokenizer(path, flag="--reward_pretrain")


def test_folder_without_a_tokenizer(tmp_path: Path) -> None:
    llama(8).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=r"--pretrain .* could not be loaded"):
        get_tokenizer(str(tmp_path))


def test_tokenizer_must_fit_the_embedding(save_tokenizer: Save) -> None:
    path = save_tokenizer(**FULL)  # 19 entries, ids 0 to 18
    with pytest.raises(ModelLoadError, match="largest id is 18, but the model has only 18 embedding rows"):
        get_tokenizer(path, llama(18))
    tokenizer = get_tokenizer(path, llama(19))
    assert valid_vocab_size(tokenizer) == 19
    padded = llama(64)  # rows beyond the tokenizer are fine, and never to be sampled
    assert valid_vocab_size(get_tokenizer(path, padded)) == 19 < padded.config.vocab_size


@pytest.mark.parametrize("wrap", [lambda m: m, Actor, nn.DataParallel], ids=["hf", "actor", "engine"])
def test_the_model_learns_the_pad_token(save_tokenizer: Save, wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = llama(32)
    assert model.config.pad_token_id is None
    get_tokenizer(save_tokenizer(**FULL), wrap(model))
    assert model.config.pad_token_id == 0
    assert model.generation_config.pad_token_id == 0


def test_a_thing_that_is_no_model(save_tokenizer: Save) -> None:
    with pytest.raises(TypeError, match="not Linear"):
        get_tokenizer(save_tokenizer(**FULL), nn.Linear(1, 1))


def test_log_probs_ignore_padding_rows(save_tokenizer: Save) -> None:
    tokenizer = get_tokenizer(save_tokenizer(**FULL))
    torch.manual_seed(0)
    actor = Actor(llama(64), valid_vocab_size=valid_vocab_size(tokenizer))
    rows = torch.tensor([[5, 14, 6, token] for token in range(19)])
    with torch.no_grad():
        total = actor(rows, 1).exp().sum()
    torch.testing.assert_close(total, torch.tensor(1.0))
