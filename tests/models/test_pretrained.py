"""Changes of a model's config."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from lightppo.errors import ModelLoadError
from lightppo.models.loading import load_causal_lm

MakeModel = Callable[..., PreTrainedModel]


def test_override_config(causal_lm: MakeModel, tmp_path: Path) -> None:
    causal_lm().save_pretrained(tmp_path)
    model = load_causal_lm(str(tmp_path), override_config={"rms_norm_eps": 0.5})
    assert model.model.norm.variance_epsilon == 0.5
    plain = model.model.rotary_emb.inv_freq
    theta = model.config.rope_parameters["rope_theta"]
    for forms in (
        {"rope_theta": 4 * theta, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 4 * theta, "rope_type": "linear", "factor": 2.0}},
    ):
        model = load_causal_lm(str(tmp_path), override_config=forms)
        # frequency i of D/2 is θ^(−2i/D): the first is halved by the scaling, the others also shrink with θ
        powers = torch.arange(len(plain)) / len(plain)
        assert torch.allclose(model.model.rotary_emb.inv_freq, plain / 2 * 4.0**-powers)
    assert (
        load_causal_lm(str(tmp_path), override_config={"rope_theta": 9.0}).config.rope_parameters[
            "rope_theta"
        ]
        == 9
    )
    with pytest.raises(ModelLoadError, match=r"--override_config of --pretrain .*factor"):
        load_causal_lm(str(tmp_path), override_config={"rope_scaling": {"rope_type": "linear"}})
    with pytest.raises(
        ModelLoadError, match=r"--override_config: .*'rms_norm_epz'.*'rms_norm_eps'"
    ):
        load_causal_lm(str(tmp_path), override_config={"rms_norm_epz": 0.5})
    # other shapes than the checkpoint's
    with pytest.raises(ModelLoadError, match=f"--pretrain {tmp_path}"):
        load_causal_lm(str(tmp_path), override_config={"intermediate_size": 40})


def test_dropout_of_the_checkpoint_is_off_and_that_of_override_config_acts_in_training(
    causal_lm: MakeModel, tmp_path: Path
) -> None:
    causal_lm().save_pretrained(tmp_path)  # its config has dropout 0.1
    tokens = torch.arange(5, 25)[None]
    plain = load_causal_lm(str(tmp_path))
    dropping = load_causal_lm(str(tmp_path), override_config={"attention_dropout": 0.3})
    assert (plain.config.attention_dropout, dropping.config.attention_dropout) == (0.0, 0.3)
    with torch.no_grad():
        expected = plain(tokens).logits
        assert torch.equal(plain.train()(tokens).logits, expected)
        assert torch.equal(dropping(tokens).logits, expected)  # loaded in eval mode
        first, second = (dropping.train()(tokens).logits for _ in range(2))
        assert not torch.equal(first, second)
        assert torch.equal(dropping.eval()(tokens).logits, expected)


def test_dropout_modules_keep_the_rate_of_override_config(tmp_path: Path) -> None:
    config = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=32, n_positions=16)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    model = load_causal_lm(str(tmp_path), override_config={"resid_pdrop": 0.2})
    block = model.transformer.h[0]
    assert (block.attn.resid_dropout.p, block.mlp.dropout.p) == (0.2, 0.2)
    assert (block.attn.attn_dropout.p, model.transformer.drop.p) == (0.0, 0.0)
