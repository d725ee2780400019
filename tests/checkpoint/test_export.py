"""Exports of a model: what their config says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.fakes import FakeStrategy
from transformers import AutoConfig, GPT2Config, GPT2LMHeadModel

from lightppo.checkpoint.export import save_model
from lightppo.models.actor import Actor
from lightppo.models.critic import Critic

RATES = {"resid_pdrop": 0.1, "embd_pdrop": 0.0, "attn_pdrop": 0.25}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    config = GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=2, n_positions=16, **RATES)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def rates_in(folder: Path) -> dict[str, float]:
    config = AutoConfig.from_pretrained(folder)
    return {name: getattr(config, name) for name in RATES}


@pytest.mark.parametrize("kind", [Actor, Critic])
def test_dropout_is_as_in_the_source_and_stays_off_in_training(
    kind: type, checkpoint: Path, tmp_path: Path
) -> None:
    model = kind(str(checkpoint))
    save_model(FakeStrategy(), model, None, tmp_path / "out")
    assert rates_in(tmp_path / "out") == RATES
    assert {getattr(model.hf_model.config, name) for name in RATES} == {0.0}


def test_dropout_that_an_option_sets_is_exported(checkpoint: Path, tmp_path: Path) -> None:
    changed = json.dumps({"attn_pdrop": 0.5})
    model = Actor(str(checkpoint), override_config=changed)
    save_model(FakeStrategy(), model, None, tmp_path / "out")
    assert rates_in(tmp_path / "out") == RATES | {"attn_pdrop": 0.5}
