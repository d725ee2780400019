"""A further model of a run, its pass over the rollout, and terms made of both: the tables that plugins add to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from support.runs import fitted, trained_rows
from support.tables import answer, maker
from torch import Tensor

from lightppo.algorithms.masking import token_mean
from lightppo.config import PPOConfig
from lightppo.config.rules import parse_specs
from lightppo.errors import ConfigError
from lightppo.experience.batching import Minibatch
from lightppo.experience.experience import Experience
from lightppo.experience.maker import RolloutPass
from lightppo.logging.skipped_batches import load_batch, save_batch
from lightppo.plugin import (
    ADVANTAGE_TERMS,
    FROZEN_MODELS,
    ROLLOUT_PASSES,
    SCORE_TERMS,
    FrozenModel,
    PassEntry,
)
from lightppo.table import Entry
from lightppo.trainer.update import ScoreTerm

pytestmark = pytest.mark.usefixtures("world")


def second(config: PPOConfig) -> FrozenModel:
    """A second reference: the model that the run begins with."""
    return FrozenModel(config.model.pretrain, flag="--pretrain", zero_stage=0)


def second_pass(config: PPOConfig, models: Mapping[str, Any]) -> RolloutPass:
    """Its log probs, and two numbers of each token."""
    model = models["second"]

    def run(part: Experience) -> dict[str, Tensor]:
        scores = model.score_actions(part.sequences, part.num_actions, part.attention_mask)
        ids = part.sequences[:, -part.num_actions :].float()
        return {"second": scores.log_probs, "ids": torch.stack([ids, -ids], dim=-1)}

    def measure(experience: Experience, log_probs: Tensor) -> dict[str, Tensor]:
        ids = experience.extra["ids"]
        return {
            "rollout_gap": log_probs - experience.extra["second"],
            "rollout_wrong_ids": (ids[..., 0] != -ids[..., 1]).float(),
        }

    return RolloutPass(model, run, measure)


def two_more(config: PPOConfig) -> Callable[[Experience], Tensor]:
    return lambda batch: torch.full_like(batch.extra["second"], 2.0)


def pull(config: PPOConfig, models: Mapping[str, Any]) -> ScoreTerm:
    """The mean log of the largest probability: the entropy falls or rises with it."""

    def loss(actor, scores, experience, normalizer):
        best = scores.logits.float().log_softmax(-1).amax(-1)  # (N,)
        spread = torch.zeros_like(scores.log_probs).masked_scatter(scores.real, best)  # (B, A)
        share = token_mean(spread, experience.action_mask, normalizer)
        return share, {"largest": share.detach()}

    return ScoreTerm(loss, coef=0.5, logits=True)


@pytest.fixture
def doors() -> Iterator[None]:
    """What a plugin would register, undone after the test."""
    tables = (FROZEN_MODELS, ROLLOUT_PASSES, ADVANTAGE_TERMS, SCORE_TERMS)
    before = [dict(table) for table in tables]
    FROZEN_MODELS.register("second", Entry(second))
    ROLLOUT_PASSES.register("second", PassEntry(second_pass, needs="init_kl_coef>0"))
    ADVANTAGE_TERMS.register("two_more", Entry(two_more))
    SCORE_TERMS.register("pull", Entry(pull))
    yield
    for table, entries in zip(tables, before):
        table.clear()
        table.update(entries)


RUN = {"advantage_estimator": "reinforce", "adv_norm": False, "benchmark_steps": 1}


def test_they_change_advantages_and_loss(make_config, doors):
    config = make_config(**RUN, micro_batch_specs=("second=3",))
    trainer = fitted(config)
    assert set(trainer.frozen) == {"second"}
    (with_them,) = trained_rows(config)
    assert with_them["rollout/gap"] == pytest.approx(0, abs=1e-6)  # the actor as it began
    assert with_them["rollout/wrong_ids"] == 0
    assert with_them["train/largest"] < 0

    for table in (FROZEN_MODELS, ROLLOUT_PASSES, ADVANTAGE_TERMS, SCORE_TERMS):
        del table[list(table)[-1]]
    other = make_config(**RUN, save_path=config.checkpoint.save_path + "_without")
    (without,) = trained_rows(fitted(other).config)
    gained = with_them["rollout/advantage_mean"] - without["rollout/advantage_mean"]
    assert gained == pytest.approx(2)
    assert with_them["train/actor_grad_norm"] != pytest.approx(without["train/actor_grad_norm"])
    # the sampled texts are the same, and so is what nothing of it changes
    assert with_them["rollout/reward"] == without["rollout/reward"]


def test_a_term_of_advantages_needs_old_log_probs_before_training(make_config, doors):
    """One optimizer step per rollout takes them from the training pass otherwise."""
    from lightppo.config.rules import old_log_probs_from

    options = {**RUN, "init_kl_coef": 0.0}
    assert old_log_probs_from(make_config(**options).resolved(), True) == "rollout"
    del ADVANTAGE_TERMS["two_more"]
    assert old_log_probs_from(make_config(**options).resolved(), True) == "training"


def test_its_call_is_known_where_it_is_registered(make_config, doors):
    assert parse_specs(("second=4",))["second"].size == 4
    with pytest.raises(
        ConfigError, match=r"--micro_batch_specs second=…: .*--init_kl_coef above 0"
    ):
        make_config(**RUN, micro_batch_specs=("second=3",), init_kl_coef=0.0).validate()
    del ROLLOUT_PASSES["second"]
    with pytest.raises(ConfigError, match="calls: actor, reference"):
        parse_specs(("second=4",))


@pytest.mark.parametrize(("takes_all", "sizes"), [(False, [1, 1, 1]), (True, [3])])
def test_a_pass_takes_micro_batches_or_all_samples(monkeypatch, takes_all, sizes):
    seen: list[int] = []

    def run(part: Experience) -> dict[str, Tensor]:
        seen.append(len(part))
        return {"lengths": part.action_mask.float()}

    def counting(config: PPOConfig, models: Mapping[str, Any]) -> RolloutPass:
        return RolloutPass(torch.nn.Identity(), run, takes_all=takes_all)

    monkeypatch.setitem(ROLLOUT_PASSES, "counting", PassEntry(counting))
    rollouts = [answer(sample_index=i) for i in range(3)]
    parts = maker(micro_rollout_batch_size=1).make_experience_list(rollouts)
    assert seen == sizes
    assert [part.extra["lengths"].tolist() for part in parts] == [[[1.0, 1.0, 1.0]]] * 3


def test_what_passes_made_is_in_a_batch_that_is_written_down(tmp_path):
    experience = Experience.placeholder()
    experience.extra = {"second": torch.ones(1, 1), "ids": torch.ones(1, 1, 2)}
    save_batch(tmp_path / "batch.pt", Minibatch([experience]), [])
    (found,) = load_batch(tmp_path / "batch.pt")[0].micro_batches
    assert found.extra.keys() == experience.extra.keys()
    assert torch.equal(found.extra["ids"], experience.extra["ids"])
