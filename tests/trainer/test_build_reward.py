"""The reward source of a run: options of models and servers reach it; sums of several; another tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.fakes import FakeStrategy, make_rollout
from support.tiny import save_reward_model

from lightppo.errors import ConfigError
from lightppo.rewards.remote import RemoteReward
from lightppo.rewards.retemplate import Retemplated, SameIds
from lightppo.trainer.build_reward import build_reward


@pytest.fixture
def build(make_config, tiny_tokenizer):
    """``build(models, **options)``: the source, with functions in place of the models."""

    def make(*models, **options):
        config = make_config(**{"reward_fn": None} | options).resolved()
        return build_reward(config, list(models), tiny_tokenizer, FakeStrategy())

    return make


def length_model(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return mask.sum(1).float()


@pytest.fixture
def reward_model(tmp_path) -> Path:
    return Path(save_reward_model(tmp_path / "rm"))


def shift_ids(folder: Path) -> None:
    """The same words with other ids: the digits trade places."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["0"], vocabulary["9"] = vocabulary["9"], vocabulary["0"]
    path.write_text(json.dumps(tokenizer))


def test_a_model_of_the_same_tokenizer_reads_the_ids(build, reward_model):
    source = build(length_model, reward_pretrain=[str(reward_model)], reward_max_length=4, reward_truncation="left")
    assert isinstance(source.inputs[0], SameIds)
    assert (source.reward_max_length, source.reward_truncation) == (4, "left")
    output = source.score([make_rollout([5, 6], [7]), make_rollout([5, 6, 7], [8, 9])])
    assert (output.scores, output.metrics["input_truncated"]) == ([3.0, 4.0], [0.0, 1.0])


def test_another_tokenizer_is_refused_or_used(build, reward_model, tmp_path):
    shift_ids(reward_model)
    with pytest.raises(ConfigError, match=r"--reward_pretrain .*rm has another tokenizer than the actor: 2 of .* Set "):
        build(length_model, reward_pretrain=[str(reward_model)])
    other = shutil.copytree(reward_model, tmp_path / "tokenizer")
    source = build(length_model, reward_pretrain=[str(reward_model)], reward_input_tokenizer=[str(other)])
    assert isinstance(source.inputs[0], Retemplated)
    rollout = make_rollout([4], [13], response_text="9")
    rollout.prompt.text = "0"
    row = source.inputs[0].encode([rollout])[0]
    assert row[:2] == [13, 4]  # its ids, not the actor's: 0 is 13 and 9 is 4


def test_servers(build):
    source = build(remote_rm_url=["http://127.0.0.1:9/score"], on_reward_failure="unscored", remote_rm_retries=2)
    assert isinstance(source, RemoteReward)
    assert (source.retries, source.on_reward_failure) == (2, "unscored")


def test_a_model_a_function_and_a_verifier_add_up(build, reward_model, tmp_path):
    (tmp_path / "one.py").write_text("def reward_func(queries, prompts, labels):\n    return [1.0] * len(queries)\n")
    options = {"reward_fn": str(tmp_path / "one.py"), "reward_pretrain": [str(reward_model)]}
    source = build(length_model, reward_source=["model=0.5", "function=10", "math"], **options)
    rollouts = [make_rollout([5, 6], [7], label="3", response_text="3")]
    output = source.score(rollouts)
    assert output.scores == [0.5 * 3 + 10 + 1]
    assert SimpleNamespace(**{k: v for k, v in output.metrics.items() if "/" not in k}).math == [1.0]
    assert source.needs_all_ranks


def test_verls_function_name_is_found(build, tmp_path):
    text = (
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return len(solution_str)\n"
    )
    (tmp_path / "verl.py").write_text(text)
    source = build(reward_fn=str(tmp_path / "verl.py"), reward_workers=1)
    assert source.name == "verl.py:compute_score"
    assert source.score([make_rollout(response_text="abc")]).scores == [3.0]
