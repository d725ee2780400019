from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from lightppo.errors import ModelLoadError
from lightppo.models.critic import RewardModel

Batch = tuple[Tensor, Tensor, int]
MakeModel = Callable[..., PreTrainedModel]


def rename_head(folder: Path, prefix: str, with_bias: bool = False) -> None:
    weights = load_file(folder / "model.safetensors")
    weights[f"{prefix}.weight"] = weights.pop("score.weight")
    if with_bias:
        weights[f"{prefix}.bias"] = torch.zeros(1)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_score_is_at_the_last_real_token(family: str, classifier: MakeModel, ragged: Batch) -> None:
    sequences, mask, _ = ragged
    model = RewardModel(classifier(family))
    with torch.no_grad():
        scores = model(sequences, mask)
        for b in range(len(sequences)):
            row = sequences[b][mask[b].bool()]
            expected = model.model(input_ids=row[None]).logits[0, 0]  # what transformers itself says
            torch.testing.assert_close(scores[b], expected, atol=1e-5, rtol=1e-5)
    assert scores.dtype == torch.float32


def test_a_row_without_tokens_is_named(classifier: MakeModel, ragged: Batch) -> None:
    sequences, mask, _ = ragged
    mask = mask.clone()
    mask[2] = 0
    with pytest.raises(ValueError, match=r"rows \[2\] have no real token"):
        RewardModel(classifier())(sequences, mask)


def test_normalize_reward(classifier: MakeModel, tmp_path: Path) -> None:
    model = classifier()
    row = torch.tensor([[5, 6, 7]])
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=r"--normalize_reward: the config of .* has no mean and std"):
        RewardModel(str(tmp_path), normalize_reward=True)
    model.config.mean, model.config.std = 0.5, 2.0
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        raw = RewardModel(str(tmp_path))(row)
        torch.testing.assert_close(RewardModel(str(tmp_path), normalize_reward=True)(row), (raw - 0.5) / 2.0)
    model.config.std = 0.0
    with pytest.raises(ModelLoadError, match=r"std 0.0; it must be above 0"):
        RewardModel(model, normalize_reward=True)


def test_a_causal_lm_is_not_a_reward_model(causal_lm: MakeModel, tmp_path: Path) -> None:
    causal_lm().save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=r"--reward_pretrain .* has no score.weight, so it is not a reward model"):
        RewardModel(str(tmp_path))
    assert RewardModel(str(tmp_path), init_value_head=True)(torch.tensor([[5, 6]])).shape == (1,)  # to be trained


@pytest.mark.parametrize("prefix", ["value_head", "v_head.summary"])
def test_head_under_another_name(prefix: str, classifier: MakeModel, tmp_path: Path) -> None:
    model = classifier()
    model.save_pretrained(tmp_path)
    rename_head(tmp_path, prefix)
    with pytest.raises(ModelLoadError, match=rf"It has {prefix}.weight: set --value_head_prefix"):
        RewardModel(str(tmp_path))
    loaded = RewardModel(str(tmp_path), value_head_prefix=prefix)
    assert torch.equal(loaded.model.score.weight, model.score.weight)
    loaded.model.save_pretrained(tmp_path / "again")  # under transformers' own name
    assert "score.weight" in load_file(tmp_path / "again" / "model.safetensors")


def test_a_head_with_a_bias_is_not_cut_down_silently(classifier: MakeModel, tmp_path: Path) -> None:
    classifier().save_pretrained(tmp_path)
    rename_head(tmp_path, "value_head", with_bias=True)
    with pytest.raises(ModelLoadError, match="the head value_head has a bias"):
        RewardModel(str(tmp_path), value_head_prefix="value_head")


def test_several_labels_are_refused(classifier: MakeModel, tmp_path: Path) -> None:
    classifier(num_labels=3).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="has 3 labels; a reward needs one output"):
        RewardModel(str(tmp_path))
