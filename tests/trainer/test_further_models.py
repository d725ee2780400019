"""Parts of a run that a caller may add: a pass over the rollout, terms of the advantages and of the actor's loss."""

from __future__ import annotations

import pytest
import torch
from support.runs import trained_rows
from support.tables import REFERENCE, TablePolicy, answer, approx, make_one, maker
from torch import Tensor

from lightppo.algorithms.masking import token_mean
from lightppo.config.rules import old_log_probs_from, parse_specs
from lightppo.errors import ConfigError
from lightppo.experience.batching import Minibatch
from lightppo.experience.experience import Experience
from lightppo.experience.maker import RolloutPass
from lightppo.logging.skipped_batches import load_batch, save_batch
from lightppo.trainer.training_losses import ScoreTerm


def second_pass(model: TablePolicy) -> RolloutPass:
    """The log probs of a model, and two numbers of each token."""

    def run(part: Experience) -> dict[str, Tensor]:
        scores = model.score_actions(part.sequences, part.num_actions, part.attention_mask)
        ids = part.sequences[:, -part.num_actions :].float()
        return {"second": scores.log_probs, "ids": torch.stack([ids, -ids], dim=-1)}

    return RolloutPass(model, run)


def test_a_pass_makes_numbers_and_a_term_changes_the_advantages():
    options = {"coef": 0.0, "critic": False, "advantage_estimator": "reinforce", "adv_norm": False}
    model = TablePolicy(REFERENCE)
    model.train()
    both = make_one(
        maker(
            **options,
            passes={"second": second_pass(model)},
            advantage_terms=[lambda batch: 2.0 * batch.extra["second"]],
        )
    )
    alone = make_one(maker(**options))
    assert both.extra["second"] == approx([[-1.5, -2.0, -2.5]])
    assert both.extra["ids"].tolist() == [[[10.0, -10.0], [20.0, -20.0], [30.0, -30.0]]]
    assert both.advantages - alone.advantages == approx([[-3.0, -4.0, -5.0]])
    assert not alone.extra
    ((_, was_training, with_gradient),) = model.calls
    assert not was_training
    assert not with_gradient


@pytest.mark.parametrize(("takes_all", "sizes"), [(False, [1, 1, 1]), (True, [3])])
def test_a_pass_takes_micro_batches_or_all_samples(takes_all, sizes):
    seen: list[int] = []

    def run(part: Experience) -> dict[str, Tensor]:
        seen.append(len(part))
        return {"lengths": part.action_mask.float()}

    counting = RolloutPass(torch.nn.Identity(), run, takes_all=takes_all)
    rollouts = [answer(sample_index=i) for i in range(3)]
    parts = maker(micro_rollout_batch_size=1, passes={"counting": counting}).make_experience_list(
        rollouts
    )
    assert seen == sizes
    assert [part.extra["lengths"].tolist() for part in parts] == [[[1.0, 1.0, 1.0]]] * 3


@pytest.mark.usefixtures("world")
def test_a_term_of_the_loss_changes_the_gradient(make_config):
    """The mean log of the largest probability: the entropy falls or rises with it."""
    from lightppo import PPOTrainer

    def loss(actor, scores, experience, normalizer):
        best = scores.logits.float().log_softmax(-1).amax(-1)  # (N,)
        spread = torch.zeros_like(scores.log_probs).masked_scatter(scores.real, best)  # (B, A)
        share = token_mean(spread, experience.action_mask, normalizer)
        return share, {"largest": share.detach()}

    run = {"advantage_estimator": "reinforce", "adv_norm": False, "benchmark_steps": 1}
    rows = []
    for name, terms in (("with", [ScoreTerm(loss, coef=0.5, logits=True)]), ("without", [])):
        config = make_config(**run)
        config = config.with_options(save_path=f"{config.checkpoint.save_path}_{name}")
        trainer = PPOTrainer.from_config(config)
        trainer.score_terms += terms
        trainer.fit()
        rows += trained_rows(config)
    with_it, without = rows
    assert with_it["train/largest"] < 0
    assert with_it["train/actor_grad_norm"] != pytest.approx(without["train/actor_grad_norm"])
    # the sampled texts are the same, and so is what nothing of it changes
    assert with_it["rollout/reward"] == without["rollout/reward"]


@pytest.mark.usefixtures("world")
def test_a_teacher_in_the_advantages_needs_old_log_probs_before_training(make_config):
    """One optimizer step per rollout takes them from the training pass otherwise."""
    run = {"advantage_estimator": "reinforce", "adv_norm": False, "init_kl_coef": 0.0}
    taught = make_config(**run, teacher_pretrain="teacher").resolved()
    assert old_log_probs_from(taught, True) == "rollout"
    assert old_log_probs_from(make_config(**run).resolved(), True) == "training"


@pytest.mark.usefixtures("world")
def test_its_call_needs_a_teacher(make_config):
    assert parse_specs(("teacher=4",))["teacher"].size == 4
    with pytest.raises(ConfigError, match=r"--micro_batch_specs teacher=…: .*--teacher_pretrain"):
        make_config(micro_batch_specs=("teacher=3",)).validate()
    with pytest.raises(ConfigError, match="calls: actor, reference"):
        parse_specs(("second=4",))


def test_what_passes_made_is_in_a_batch_that_is_written_down(tmp_path):
    experience = Experience.placeholder()
    experience.extra = {"second": torch.ones(1, 1), "ids": torch.ones(1, 1, 2)}
    save_batch(tmp_path / "batch.pt", Minibatch([experience]), [])
    (found,) = load_batch(tmp_path / "batch.pt")[0].micro_batches
    assert found.extra.keys() == experience.extra.keys()
    assert torch.equal(found.extra["ids"], experience.extra["ids"])
