"""What a teacher adds: its advantages by hand, and in an ExperienceMaker."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from support.tables import answer, approx, make_one, maker

from lightppo.algorithms.masking import LossNormalizer, token_mean
from lightppo.errors import NonFiniteError
from lightppo.experience.experience import Experience
from lightppo.models.actor import ActionScores
from lightppo.trainer.distillation import TopLoss, teacher_advantages

NAN = float("nan")


class TestAdvantages:
    OWN = torch.tensor([[-1.0, -2.0, NAN, -3.0], [-0.5, NAN, NAN, -1.5]])
    TEACHER = torch.tensor([[-0.5, -4.0, 7.0, -1.0], [-1.0, 7.0, 7.0, -1.0]])
    MASK = torch.tensor([[True, True, False, True], [True, False, False, True]])

    @pytest.mark.parametrize(
        ("discount", "expected"),
        [
            # gaps 0.5, -2, hole, 2;  -0.5, holes, 0.5
            (0.0, [[0.5, -2.0, 0.0, 2.0], [-0.5, 0.0, 0.0, 0.5]]),
            # 0.5 + 0.5·(-2 + 0.5·2), -2 + 0.5·2, hole, 2;  -0.5 + 0.5·0.5, holes, 0.5
            (0.5, [[0.0, -1.0, 0.0, 2.0], [-0.25, 0.0, 0.0, 0.5]]),
            (1.0, [[0.5, 0.0, 0.0, 2.0], [0.0, 0.0, 0.0, 0.5]]),
        ],
    )
    def test_by_hand(self, discount, expected):
        got = teacher_advantages(self.OWN, self.TEACHER, self.MASK, discount)
        assert got.tolist() == expected
        assert not got.requires_grad

    def test_its_mean_is_minus_the_gradient_of_the_reverse_kl(self):
        """E_π[A ∇ log π] over all tokens of a distribution, against the derivative of KL(π || π_teacher)."""
        generator = torch.Generator().manual_seed(0)
        logits, other = torch.randn(2, 9, generator=generator, dtype=torch.float64)
        logits = logits.requires_grad_()
        log_p, log_q = logits.log_softmax(-1), other.log_softmax(-1)
        (exact,) = torch.autograd.grad(
            (log_p.exp() * (log_p - log_q)).sum(), logits, retain_graph=True
        )
        mask = torch.ones(1, 9, dtype=torch.bool)
        advantages = teacher_advantages(log_p.detach()[None], log_q[None], mask)[0]
        (mean,) = torch.autograd.grad((log_p.exp().detach() * advantages * log_p).sum(), logits)
        torch.testing.assert_close(mean, -exact)

    def test_a_teacher_that_is_the_student_teaches_nothing(self):
        own = torch.randn(3, 4)
        assert teacher_advantages(own, own, torch.ones(3, 4).bool(), 1.0).abs().sum() == 0

    def test_shapes_that_do_not_fit_are_refused(self):
        with pytest.raises(ValueError, match=r"teacher_log_probs \(2, 2\)"):
            teacher_advantages(torch.zeros(2, 1), torch.zeros(2, 2), torch.ones(2, 1).bool())


class TestInAMaker:
    """Its log probs of 10, 20, 30 are -0.5, -2.5, -2: 0.5, -0.5 and 1 above the policy's."""

    ALONE = {
        "teacher": True,
        "coef": 0.0,
        "critic": False,
        "advantage_estimator": "on_policy_distill",
    }

    def test_alone_it_is_the_advantage(self):
        experience = make_one(maker(**self.ALONE), answer(5.0))
        assert experience.advantages == approx([[0.5, -0.5, 1.0]])
        assert experience.extra["teacher_log_probs"] == approx([[-0.5, -2.5, -2.0]])
        assert experience.info["reward"].tolist() == [5]  # recorded

    def test_later_tokens_count_as_much_as_asked(self):
        experience = make_one(maker(**self.ALONE, distill_discount=0.5, distill_coef=2.0), answer())
        # 2 · (0.5 + 0.5·(-0.5 + 0.5·1)), 2 · (-0.5 + 0.5·1), 2 · 1
        assert experience.advantages == approx([[1.0, 0.0, 2.0]])

    def test_beside_a_reward_it_is_added_and_the_critic_does_not_see_it(self):
        options = {"coef": 0.0, "teacher": True, "distill_coef": 0.1, "adv_norm": False}
        both, alone = make_one(maker(**options)), make_one(maker(coef=0.0, adv_norm=False))
        assert both.advantages - alone.advantages == approx([[0.05, -0.05, 0.1]])
        assert torch.equal(both.returns, alone.returns)

    def test_group_normalisation_is_of_the_sum(self):
        options = self.ALONE | {"adv_norm": True, "adv_norm_scope": "group"}
        experience = make_one(
            maker(**options, n_samples_per_prompt=2), answer(0.0), answer(9.0, sample_index=1)
        )
        gaps = torch.tensor([0.5, -0.5, 1.0])
        assert experience.advantages[0] == approx(
            ((gaps - gaps.mean()) / (gaps.std(correction=0) + 1e-5)).tolist()
        )

    def test_as_a_loss_it_is_asked_in_training_alone(self):
        experience_maker = maker(**self.ALONE, distill_by="loss", old_log_probs="forward")
        assert not experience_maker.passes
        experience = make_one(experience_maker)
        assert experience.advantages.tolist() == [[0.0] * 3]
        assert not experience.extra

    def test_what_is_not_finite_is_found_before_training(self):
        experience_maker = maker(**self.ALONE)
        with torch.no_grad():
            experience_maker.passes["teacher"].model.table[20] = -math.inf
        with pytest.raises(NonFiniteError, match="teacher_log_probs"):
            make_one(experience_maker)


class TestTopLoss:
    """Log probs ln 1/2, ln 1/4, ln 1/4 of three tokens; the teacher gives its best, the third, 1/2."""

    ACTOR = SimpleNamespace(temperature=1.0)
    LOSS = TopLoss(beta=0.0, tail="drop", aggregate=token_mean)

    def scores(self) -> ActionScores:
        logits = torch.tensor([[0.5, 0.25, 0.25]]).log().requires_grad_()
        real = torch.ones(1, 1, dtype=torch.bool)
        return ActionScores(logits.log_softmax(-1)[:, 2:], real, logits=logits)

    def test_by_hand(self):
        experience, scores = Experience.placeholder(), self.scores()
        experience.action_mask = torch.ones(1, 1, dtype=torch.bool)
        experience.extra = {
            "teacher_top": torch.tensor([[[0.5]]]).log(),
            "teacher_top_ids": torch.tensor([[[2.0]]]),
        }
        loss, numbers = self.LOSS(
            self.ACTOR, scores, experience, LossNormalizer.from_masks([experience.action_mask])
        )
        # 1/2 (ln 1/2 - ln 1/4)
        assert loss.item() == pytest.approx(0.5 * math.log(2))
        assert numbers["teacher_top_mass"].item() == pytest.approx(0.5)
        assert numbers["distill_loss"].item() == pytest.approx(loss.item())

    def test_a_placeholder_adds_nothing(self):
        """Of a rank with fewer micro batches; no pass over the rollout has seen it."""
        normalizer = LossNormalizer.from_masks([torch.ones(1, 1, dtype=torch.bool)])
        loss, numbers = self.LOSS(self.ACTOR, self.scores(), Experience.placeholder(), normalizer)
        assert loss.item() == numbers["teacher_top_mass"].item() == 0
