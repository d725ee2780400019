"""Token weights: rejections that follow the policy in training, and weights of the user's own."""

from __future__ import annotations

import math

import pytest
import torch
from support.tables import answer, make_one, maker
from support.whole_step import PolicyLoss
from torch import Tensor

from lightppo.algorithms.masking import LossNormalizer
from lightppo.config import PPOConfig
from lightppo.config.rules import old_log_probs_from
from lightppo.errors import ConfigError
from lightppo.experience.experience import Experience
from lightppo.experience.token_weights import token_weights
from lightppo.plugin import TOKEN_WEIGHTS, TokenWeight
from lightppo.trainer.training_losses import weighted_policy_loss


def in_training(*texts: str) -> list:
    """The weights of these rejections, all of them judged in training."""
    config = PPOConfig.from_flat(rollout_rejection=texts, old_log_probs="rollout")
    return token_weights(config, in_training=True)


class TestRejectionsInTraining:
    """Ratios of π to π_old and to the engine are the same; both say -1 of every token."""

    MASK = torch.tensor([[True, True, False], [True, True, True]])
    ADVANTAGES = torch.tensor([[-1.0, -1.0, 9.0], [2.0, 2.0, 2.0]])

    def run(
        self, log_ratio: Tensor, *texts: str, **fields: Tensor
    ) -> tuple[float, Tensor, dict[str, float]]:
        before = torch.full((2, 3), -1.0)
        fields = {
            "action_log_probs": before,
            "rollout_log_probs": before,
            "advantages": self.ADVANTAGES,
        } | fields
        experience = Experience(
            sequences=torch.zeros(2, 4),
            attention_mask=torch.ones(2, 4),
            action_mask=self.MASK,
            **fields,
        )
        log_probs = (log_ratio - 1).requires_grad_()
        loss, metrics = weighted_policy_loss(
            PolicyLoss(loss_agg_mode="seq-mean-token-sum"),
            experience,
            LossNormalizer.from_masks([self.MASK]),
            log_probs=log_probs,
            entropy=before,
            token_weights=in_training(*texts),
        )
        loss.backward()
        return loss.item(), log_probs.grad, {name: value.item() for name, value in metrics.items()}

    def test_by_hand(self):
        """Mean log(π_rollout / π) of row 0: (.1 + .3)/2 = .2, above .15, and A < 0: no loss. Row 1 is as far: A > 0."""
        log_ratio = torch.tensor([[-0.1, -0.3, 7.0], [-0.2, -0.2, -0.2]])
        loss, gradient, metrics = self.run(log_ratio, "opsm=0.15")
        assert loss == pytest.approx(-2 * 3 * math.exp(-0.2) / 2)  # of 2 rows, as before
        assert gradient[0].tolist() == [0, 0, 0]
        assert (gradient[1] < 0).all()
        assert metrics["rejected_ratio"] == pytest.approx(2 / 5)

    def test_it_follows_the_policy_in_training(self):
        near = torch.tensor([[-0.1, -0.1, 7.0], [0.0, 0.0, 0.0]])
        assert self.run(near, "opsm=0.15")[2]["rejected_ratio"] == 0
        assert self.run(near - 0.1, "opsm=0.15")[2]["rejected_ratio"] == pytest.approx(2 / 5)

    def test_weights_and_several_rejections_go_together(self):
        log_ratio = torch.tensor([[-0.1, -0.3, 7.0], [-0.2, 0.0, -0.5]])
        halves = torch.full((2, 3), 0.5)
        texts = ("opsm=0.15", "token_ratio=0.8:1.2")  # e^-0.5 = 0.61
        _, gradient, metrics = self.run(log_ratio, *texts, loss_weights=halves)
        torch.testing.assert_close(
            gradient, torch.tensor([[0, 0, 0], [-math.exp(-0.2) / 2, -0.5, 0]])
        )
        assert metrics["rejected_ratio"] == pytest.approx(3 / 5)

    def test_a_loss_that_is_not_finite_is_not_hidden(self):
        log_ratio = torch.tensor([[math.nan, -0.3, 7.0], [-0.2, 0.0, -0.5]])
        assert math.isnan(self.run(log_ratio, "opsm=0.15")[0])

    def test_log_probs_of_the_engine_are_needed_where_there_are_tokens(self):
        with pytest.raises(ValueError, match="--rollout_rejection opsm needs rollout_log_probs"):
            self.run(torch.zeros(2, 3), "opsm=0.15", rollout_log_probs=None)
        placeholder = Experience.placeholder()
        (weigh,) = in_training("opsm=0.15")
        assert not weigh(placeholder, log_probs=torch.zeros(1, 1)).any()


# -- the user's own ----------------------------------------------------------------------------------------------------


def _first_tokens(config):
    """The first token of a response counts twice."""

    def weigh(experience, **_):
        weights = torch.ones(experience.action_mask.shape)
        weights[:, 0] = 2
        return weights

    return weigh if config.algorithm.gamma == 1.0 else None


def _certain(config):
    """In proportion to the entropy before the update."""
    return lambda experience, *, entropy, **_: entropy


def _of_engine(config):
    return lambda experience, **_: experience.rollout_log_probs


def _unlikely(config):
    """In training: only tokens of probability below a half."""
    return lambda experience, *, log_probs, **_: log_probs < math.log(0.5)


@pytest.fixture
def register():
    """TOKEN_WEIGHTS.register, undone after the test."""
    before = dict(TOKEN_WEIGHTS)
    yield TOKEN_WEIGHTS.register
    TOKEN_WEIGHTS.clear()
    TOKEN_WEIGHTS.update(before)


ENGINE = [-1.0, -2.7, -3.7]  # the policy says -1, -2, -3


def test_a_weight_of_the_users_own_multiplies_the_others(register):
    register("first_tokens", TokenWeight(_first_tokens))
    assert make_one(maker()).loss_weights.tolist() == [[2, 1, 1]]
    both = make_one(maker(rollout_rejection=["token_ratio=0.5:2"]), answer(log_probs=ENGINE))
    assert both.loss_weights.tolist() == [[2, 0, 0]]


def test_a_factory_says_when_it_has_nothing_to_do(register):
    register("first_tokens", TokenWeight(_first_tokens))
    assert make_one(maker(gamma=0.5)).loss_weights is None


def test_a_weight_before_the_update_has_the_actor_run(register):
    """With one optimizer step for a rollout the training pass would do."""
    config = PPOConfig.from_flat(
        pretrain="m", rollout_batch_size=1, train_batch_size=1, init_kl_coef=0
    ).resolved()
    assert old_log_probs_from(config, exact_rollout=True) == "training"
    register("first_tokens", TokenWeight(_first_tokens))
    assert old_log_probs_from(config, exact_rollout=True) == "forward"


def test_what_a_weight_needs_is_made_or_refused(register):
    register("certain", TokenWeight(_certain, needs_entropy=True))
    with pytest.raises(
        ConfigError, match="--old_log_probs rollout: the token weight 'certain' needs the entropy"
    ):
        maker(old_log_probs="rollout")
    TOKEN_WEIGHTS.pop("certain")
    register("of_engine", TokenWeight(_of_engine, needs_rollout_log_probs=True))
    assert make_one(maker(), answer(log_probs=ENGINE)).loss_weights.tolist() == [
        pytest.approx(ENGINE)
    ]
    with pytest.raises(
        ValueError, match="the token weight 'of_engine' needs the log probs of the rollout engine"
    ):
        make_one(maker(), answer())


def test_a_weight_in_training_sees_the_policy_that_trains(register):
    register("unlikely", TokenWeight(_unlikely, in_training=True))
    assert make_one(maker()).loss_weights is None
    weights = token_weights(PPOConfig.from_flat(), in_training=True)
    mask = torch.ones(1, 2, dtype=torch.bool)
    experience = Experience(
        sequences=torch.zeros(1, 3),
        attention_mask=torch.ones(1, 3),
        action_mask=mask,
        advantages=torch.ones(1, 2),
    )
    log_probs = torch.tensor([[-0.1, -2.0]], requires_grad=True)
    loss, metrics = weighted_policy_loss(
        PolicyLoss(),
        experience,
        LossNormalizer.from_masks([mask]),
        log_probs=log_probs,
        entropy=log_probs.detach(),
        token_weights=weights,
    )
    loss.backward()
    assert log_probs.grad.tolist() == [[0, -0.5]]  # of 2 tokens
    assert metrics["rejected_ratio"] == 0.5
