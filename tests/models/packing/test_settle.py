"""Which models of a run pack, and what follows for its micro batches."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families.zoo import random_model
from support.sampled import sample
from support.tiny import save_reward_model

from lightppo import PPOTrainer
from lightppo.data.records import Prompt
from lightppo.errors import PackingNotSupportedError
from lightppo.models.actor import Actor
from lightppo.models.packing import settle_models, settle_packing
from lightppo.ranks import Alone
from lightppo.trainer import build

pytestmark = pytest.mark.usefixtures("world")
CPU = torch.device("cpu")


def settled(config: Any) -> build.Models:
    """The models of a run, as its check of models leaves them."""
    config = config.resolved()
    models = build.build_models(config, build.build_strategy(config))
    settle_models(SimpleNamespace(config=config, strategy=Alone(CPU), models=models.by_flag))
    return models


def test_all_models_pack_but_reward_models(make_config, tmp_path):
    reward = {"reward_pretrain": [save_reward_model(tmp_path)], "reward_fn": None}
    models = settled(make_config(n_samples_per_prompt=2, **reward))
    for model in (models.actor, models.critic, models.reference):
        assert model.layout.packs
        assert model.layout.shares_prompts
    assert not models.reward_models[0].layout.packs


@pytest.mark.parametrize(
    "options",
    [{"share_prompts": False, "n_samples_per_prompt": 2}, {"n_samples_per_prompt": 1}],
    ids=["not asked for", "one sample"],
)
def test_prompts_are_not_shared(make_config, options):
    models = settled(make_config(packing_samples=True, **options))
    for model in (models.actor, models.critic, models.reference):
        assert model.layout.packs
        assert not model.layout.shares_prompts


def test_a_model_that_cannot_pack_ends_the_run_where_packing_was_asked_for(make_config):
    actor = Actor(random_model("phimoe"))
    with pytest.raises(PackingNotSupportedError, match="PhimoeAttention does not tell its"):
        settle_packing(make_config(packing_samples=True), Alone(CPU), [actor, None])
    settle_packing(make_config(packing_samples=False), Alone(CPU), [actor])
    assert not actor.layout.packs


@pytest.mark.parametrize(
    ("packs", "shares"),
    [(True, True), (True, False), (False, True)],
    ids=["shared", "apart", "padded"],
)
def test_shared_prompts_count_once_in_a_budget(trainer_with, parts, monkeypatch, packs, shares):
    """Prompts of 8 tokens, responses of 2: both samples are 12 tokens with one prompt, and 20 with two."""
    layouts = [
        model.layout for model in (parts["actor"][0], parts["critic"][0], parts["reference"])
    ]
    for layout in layouts if packs else ():
        assert layout.try_packing(CPU) is None
        monkeypatch.setattr(layout, "share_prompts", shares)
    trainer = trainer_with(max_tokens_per_micro_batch=12)
    sizes: list[int] = []

    def note(minibatch: Any, global_steps: int = 0) -> list[dict[str, float]]:
        sizes.extend(len(part) for part in minibatch.micro_batches)
        return []

    monkeypatch.setattr(trainer, "train_minibatch", note)
    sample(trainer, [Prompt("a", [5] * 8, index=0), Prompt("b", [7] * 8, index=1)], step=1)
    trainer.ppo_train(1)
    for layout in layouts:
        layout.stop_packing()
    assert sizes == ([2, 2] if packs and shares else [1, 1, 1, 1])


@pytest.mark.parametrize("exact", [True, False])
def test_packing_where_it_is_exact(make_config, tmp_path, monkeypatch, capsys, exact):
    """Without the flag a run is the packed one, or with a note the padded one."""
    if not exact:
        monkeypatch.setattr("lightppo.models.packing.alike", lambda a, b: False)
    rows = []
    for name, options in (("auto", {}), ("given", {"packing_samples": exact})):
        paths = {"save_path": str(tmp_path / name), "ckpt_path": str(tmp_path / f"{name}-ckpt")}
        steps = {"total_training_steps": 2, "n_samples_per_prompt": 2, "rollout_batch_size": 4}
        trainer = PPOTrainer.from_config(make_config(**paths, **steps, **options))
        assert [m.layout.packs for m in (trainer.actor, trainer.critic, trainer.initial_model)] == [
            exact
        ] * 3
        assert trainer.experience_maker.layout.packs == exact
        trainer.fit()
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        rows.append(
            [
                {k: v for k, v in json.loads(line).items() if k.startswith(("train/", "ro"))}
                for line in lines
            ]
        )
        is_told = "batches are padded: --packing_samples does not" in capsys.readouterr().out
        assert is_told == (name == "auto" and not exact)
    assert rows[0] == rows[1]
