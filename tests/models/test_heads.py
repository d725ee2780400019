"""Heads of other people's checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from lightppo.errors import ModelLoadError
from lightppo.models.critic import Critic
from lightppo.models.heads import is_value_head

MakeModel = Callable[..., PreTrainedModel]


def test_what_looks_like_a_value_head() -> None:
    heads = (
        "score.weight",
        "v_head.summary.bias",
        "value_head.0.weight",
        "model.reward_head.weight",
    )
    assert all(map(is_value_head, heads))
    others = ("model.layers.1.mlp.gate.e_score_correction_bias", "lm_head.weight", "model.scorer.w")
    assert not any(map(is_value_head, others))


def test_critic_refuses_a_foreign_head_it_was_not_told_of(
    classifier: MakeModel, tmp_path: Path
) -> None:
    classifier().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["value_head.weight"] = weights.pop("score.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelLoadError, match=r"--critic_pretrain .*value_head\.weight: .*--value_head_prefix"
    ):
        Critic(str(tmp_path))
    with pytest.raises(ModelLoadError, match=r"--critic_pretrain .*value_head\.weight"):
        Critic(str(tmp_path), init_value_head=False)
    assert Critic(str(tmp_path), init_value_head=True)(torch.tensor([[5, 6]])).shape == (1, 2)
