from __future__ import annotations

import math

import pytest
import torch

from lightppo.algorithms.losses import POLICY_LOSSES, GPTLMLoss, PolicyLoss, ValueLoss
from lightppo.algorithms.masking import LossNormalizer

NAN = float("nan")


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class TestPolicyLoss:
    def test_by_hand(self):
        ratio = torch.tensor([[1.5, 1.5, 0.5, 0.5, 1.1, 9.9]])
        advantages = torch.tensor([[2.0, -2.0, 2.0, -2.0, 1.0, 7.0]])
        mask = torch.tensor([[True, True, True, True, True, False]])
        loss, metrics = PolicyLoss()(ratio.log(), torch.zeros(1, 6), advantages, mask)
        # -min(ρA, clip(ρ, 0.8, 1.2)·A):
        #   ρ 1.5, A 2:  -min(3, 2.4) = -2.4 clipped     ρ 1.5, A -2: -min(-3, -2.4) = 3
        #   ρ 0.5, A 2:  -min(1, 1.6) = -1               ρ 0.5, A -2: -min(-1, -1.6) = 1.6 clipped
        #   ρ 1.1, A 1:  -1.1
        torch.testing.assert_close(loss, torch.tensor((-2.4 + 3 - 1 + 1.6 - 1.1) / 5))
        torch.testing.assert_close(metrics["clip_ratio"], torch.tensor(2 / 5))
        torch.testing.assert_close(metrics["ratio"], torch.tensor((1.5 + 1.5 + 0.5 + 0.5 + 1.1) / 5))
        # (ρ - 1) - ln ρ: 2·(0.5 - 0.4054651) + 2·(-0.5 + 0.6931472) + (0.1 - 0.0953102) = 0.5800539
        torch.testing.assert_close(metrics["approx_kl"], torch.tensor(0.5800539 / 5))

    def test_clip_higher(self):
        log_ratio = torch.tensor([[1.25, 1.35, 0.85]]).log()
        loss_fn = PolicyLoss(clip_eps_low=0.1, clip_eps_high=0.3, loss_agg_mode="seq-mean-token-sum")
        loss, metrics = loss_fn(log_ratio, torch.zeros(1, 3), torch.tensor([[1.0, 1.0, -1.0]]), torch.ones(1, 3).bool())
        # 1.25 is inside 1.3; 1.35 becomes 1.3; 0.85 becomes 0.9: -1.25 - 1.3 + 0.9
        torch.testing.assert_close(loss, torch.tensor(-1.65))
        torch.testing.assert_close(metrics["clip_ratio"], torch.tensor(2 / 3))

    def test_gradient_by_hand(self):
        log_probs = torch.tensor([[1.5, 1.5, 1.1]]).log().requires_grad_()
        loss, _ = PolicyLoss(loss_agg_mode="seq-mean-token-sum")(
            log_probs, torch.zeros(1, 3), torch.tensor([[2.0, -2.0, 3.0]]), torch.ones(1, 3).bool()
        )
        loss.backward()
        # d(-ρA)/d logp = -ρA where not clipped: 0 (clipped), 1.5·2, -1.1·3
        torch.testing.assert_close(log_probs.grad, torch.tensor([[0.0, 3.0, -3.3]]))

    def test_first_step_on_policy_is_reinforce(self):
        """old = the same tensor: ratio 1, gradient -A/tokens, although nobody detached it."""
        log_probs = randn(2, 3).requires_grad_()
        advantages, mask = randn(2, 3, seed=1), torch.tensor([[True, True, False], [True, False, False]])
        loss, metrics = PolicyLoss()(log_probs, log_probs, advantages, mask)
        loss.backward()
        torch.testing.assert_close(log_probs.grad, -advantages * mask / 3)
        assert (metrics["ratio"].item(), metrics["clip_ratio"].item(), metrics["approx_kl"].item()) == (1.0, 0.0, 0.0)

    def test_advantages_are_constants(self):
        advantages = randn(1, 2).requires_grad_()
        loss, _ = PolicyLoss()(randn(1, 2).requires_grad_(), randn(1, 2), advantages, torch.ones(1, 2).bool())
        loss.backward()
        assert advantages.grad is None

    def test_an_absurd_log_ratio_stays_finite(self):
        log_probs = torch.tensor([[200.0, -200.0]], requires_grad=True)
        loss, metrics = PolicyLoss()(
            log_probs, torch.zeros(1, 2), torch.tensor([[-1.0, -1.0]]), torch.ones(1, 2).bool()
        )
        # log-ratio ±20: e^20 = 485165195 unclipped on the bad side, and max(e^-20, 0.8)
        assert loss.item() == pytest.approx((math.exp(20) + 0.8) / 2)
        loss.backward()
        assert log_probs.grad.isfinite().all()
        assert metrics["ratio"].isfinite()

    def test_what_lies_under_the_mask_never_matters(self):
        mask = torch.tensor([[True, False, True]])
        clean = randn(1, 3).requires_grad_()
        dirty = clean.detach().masked_fill(~mask, -float("inf")).requires_grad_()
        advantages = randn(1, 3, seed=1)
        loss, _ = PolicyLoss()(clean, torch.zeros(1, 3), advantages, mask)
        loss.backward()
        other, metrics = PolicyLoss()(dirty, torch.full((1, 3), NAN).masked_fill(mask, 0.0), advantages / mask, mask)
        other.backward()
        assert torch.equal(loss, other)
        assert torch.equal(clean.grad, dirty.grad)
        assert all(x.isfinite() for x in metrics.values())

    @pytest.mark.parametrize("kind", POLICY_LOSSES)
    def test_gradcheck(self, kind):
        mask = torch.tensor([[True, True, False, True]] * 3)
        old, advantages = randn(3, 4), randn(3, 4, seed=1)
        log_probs = (old + 0.7 * randn(3, 4, seed=2)).requires_grad_()  # some clipped, none on the kink
        loss_fn = PolicyLoss(policy_loss=kind)
        assert 0 < loss_fn(log_probs, old, advantages, mask)[1]["clip_ratio"].item() < 1
        assert torch.autograd.gradcheck(lambda x: loss_fn(x, old, advantages, mask)[0], (log_probs,))

    @pytest.mark.parametrize("kind", POLICY_LOSSES)
    def test_every_kind_reports_the_promised_metrics(self, kind):
        log_probs = randn(2, 3).requires_grad_()
        mask = torch.ones(2, 3).bool()
        token_loss, metrics = POLICY_LOSSES[kind](
            log_probs, randn(2, 3, seed=1), randn(2, 3, seed=2), action_mask=mask, clip_eps_low=0.2, clip_eps_high=0.2
        )
        assert {"clip_ratio", "ratio", "approx_kl"} <= metrics.keys()
        assert token_loss.shape == (2, 3)
        assert all(x.shape == (2, 3) for x in metrics.values())
        _, scalars = PolicyLoss(policy_loss=kind)(log_probs, log_probs, log_probs, mask)
        assert all(x.dim() == 0 and not x.requires_grad for x in scalars.values())

    def test_fully_masked_micro_batch(self):
        log_probs = torch.full((2, 3), NAN, requires_grad=True)
        mask = torch.zeros(2, 3).bool()
        loss, metrics = PolicyLoss()(log_probs, log_probs, log_probs, mask, LossNormalizer(tokens=5, sequences=2))
        loss.backward()
        assert loss.item() == 0.0
        assert torch.equal(log_probs.grad, torch.zeros(2, 3))
        assert all(x.item() == 0.0 for x in metrics.values())

    def test_low_precision_inputs(self):
        log_probs = torch.tensor([[-1.0]]).bfloat16().requires_grad_()
        loss, _ = PolicyLoss()(log_probs, torch.tensor([[-1.001]]), torch.tensor([[1.0]]), torch.ones(1, 1).bool())
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, -torch.tensor(0.001).exp())

    def test_bad_input(self):
        with pytest.raises(ValueError, match=r"policy_loss: unknown name 'poo'. Did you mean 'ppo'"):
            PolicyLoss(policy_loss="poo")
        with pytest.raises(ValueError, match="--loss_agg_mode"):
            PolicyLoss(loss_agg_mode="mean")
        for low in (0.0, 1.0, -0.1):
            with pytest.raises(ValueError, match="--eps_clip_low"):
                PolicyLoss(clip_eps_low=low)
        with pytest.raises(ValueError, match="--eps_clip_high"):
            PolicyLoss(clip_eps_high=0.0)
        with pytest.raises(ValueError, match=r"advantages \(2, 1\)"):
            PolicyLoss()(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 1), torch.ones(2, 3).bool())


class TestValueLoss:
    OLD, RETURNS = torch.zeros(1, 4), torch.tensor([[1.0, 1.0, 0.0, NAN]])
    MASK = torch.tensor([[True, True, True, False]])

    def test_huber_by_hand(self):
        # errors 0.5, -3, 1 with delta 1: 0.5*0.25 = 0.125; 1*(3 - 0.5) = 2.5; 0.5 (where both forms meet)
        values = torch.tensor([[0.5, -3.0, 1.0]], requires_grad=True)
        zeros, mask = torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool)
        loss, _ = ValueLoss(value_clip=None, huber_delta=1.0)(values, zeros, zeros, mask)
        torch.testing.assert_close(loss, torch.tensor((0.125 + 2.5 + 0.5) / 3))
        loss.backward()
        torch.testing.assert_close(values.grad, torch.tensor([[0.5, -1.0, 1.0]]) / 3)  # the slope ends at delta
        # clipped to 0 +- 0.2: errors 0.2, -0.2, 0.2; the larger, unclipped ones count
        clipped, metrics = ValueLoss(value_clip=0.2, huber_delta=1.0)(values.detach(), zeros, zeros, mask)
        torch.testing.assert_close(clipped, loss.detach())
        assert metrics["value_clip_ratio"] == 0

    def test_huber_delta_must_be_above_0(self):
        with pytest.raises(ValueError, match="--value_huber_delta must be above 0"):
            ValueLoss(huber_delta=0.0)

    def test_by_hand(self):
        values = torch.tensor([[0.5, 0.1, 0.5, 3.0]])
        loss, metrics = ValueLoss(value_clip=0.2)(values, self.OLD, self.RETURNS, self.MASK)
        # (0.5 - 1)² = 0.25 against (0.2 - 1)² = 0.64: 0.64, clipped
        # (0.1 - 1)² = 0.81 inside the clip
        # (0.5 - 0)² = 0.25 against (0.2 - 0)² = 0.04: 0.25
        torch.testing.assert_close(loss, torch.tensor(0.5 * (0.64 + 0.81 + 0.25) / 3))
        torch.testing.assert_close(metrics["value_clip_ratio"], torch.tensor(1 / 3))

    def test_without_clip(self):
        values = torch.tensor([[0.5, 0.1, 0.5, 3.0]])
        loss, metrics = ValueLoss(value_clip=None)(values, self.OLD, self.RETURNS, self.MASK)
        torch.testing.assert_close(loss, torch.tensor(0.5 * (0.25 + 0.81 + 0.25) / 3))
        assert metrics["value_clip_ratio"].item() == 0.0

    def test_gradient_by_hand(self):
        values = torch.tensor([[0.5, 0.1, 0.5, NAN]], requires_grad=True)
        loss, _ = ValueLoss(value_clip=0.2)(values, self.OLD, self.RETURNS, self.MASK)
        loss.backward()
        # V - R over 3 tokens, 0 where the clipped error rules
        torch.testing.assert_close(values.grad, torch.tensor([[0.0, -0.9 / 3, 0.5 / 3, 0.0]]))

    def test_values_inside_the_clip_are_not_counted_as_clipped(self):
        """old + (v - old) is not v in float32; a clip written so would count rounding as clipping."""
        old = 0.05 * randn(1, 1000, dtype=torch.float32)
        values = 0.05 * randn(1, 1000, seed=1, dtype=torch.float32)
        assert not torch.equal(old + (values - old), values)
        mask = torch.ones(1, 1000).bool()
        _, metrics = ValueLoss(value_clip=2.0)(values, old, randn(1, 1000, seed=3, dtype=torch.float32), mask)
        assert metrics["value_clip_ratio"].item() == 0.0

    def test_gradcheck(self):
        mask = torch.tensor([[True, False, True, True]] * 3)
        old, returns, values = randn(3, 4), randn(3, 4, seed=1), randn(3, 4, seed=2).requires_grad_()
        for clip in (0.5, None):
            loss_fn = ValueLoss(value_clip=clip)
            assert torch.autograd.gradcheck(lambda v, f=loss_fn: f(v, old, returns, mask)[0], (values,))

    def test_targets_are_constants(self):
        old, returns = torch.zeros(1, 1, requires_grad=True), torch.ones(1, 1, requires_grad=True)
        loss, _ = ValueLoss()(torch.zeros(1, 1, requires_grad=True), old, returns, torch.ones(1, 1).bool())
        loss.backward()
        assert old.grad is None
        assert returns.grad is None

    def test_fully_masked_micro_batch(self):
        values, mask = torch.full((1, 2), NAN, requires_grad=True), torch.zeros(1, 2).bool()
        loss, _ = ValueLoss()(values, values, values, mask)
        loss.backward()
        assert loss.item() == 0.0
        assert torch.equal(values.grad, torch.zeros(1, 2))

    def test_bad_input(self):
        with pytest.raises(ValueError, match="--value_clip must be above 0"):
            ValueLoss(value_clip=0.0)
        with pytest.raises(ValueError, match="--loss_agg_mode"):
            ValueLoss(loss_agg_mode="mean")
        with pytest.raises(ValueError, match=r"old_values \(1, 1\)"):
            ValueLoss()(torch.zeros(1, 2), torch.zeros(1, 1), torch.zeros(1, 2), torch.ones(1, 2).bool())


class TestGPTLMLoss:
    def test_by_hand(self):
        # position 0 predicts label 1 with (1/4, 3/4), position 1 predicts label 2 with (1/2, 1/2), position 2 nothing
        logits = torch.tensor([[[1.0, 3.0], [1.0, 1.0], [1.0, 9.0]]]).log()
        loss_fn = GPTLMLoss()
        labels = torch.tensor([[0, 1, 0]])
        expected = (-math.log(3 / 4) - math.log(1 / 2)) / 2
        assert loss_fn.num_tokens(labels) == 2
        torch.testing.assert_close(loss_fn(logits, labels), torch.tensor(expected))
        # the prompt is not learned: label 1 is ignored; the first label never counts anyway
        labels = torch.tensor([[-100, -100, 0]])
        assert loss_fn.num_tokens(labels) == 1
        torch.testing.assert_close(loss_fn(logits, labels), torch.tensor(math.log(2)))
        # 8 tokens in the step, 2 ranks: 2 · ln 2 / 8
        torch.testing.assert_close(loss_fn(logits, labels, 8, dp_size=2), torch.tensor(math.log(2) / 4))

    def test_agrees_with_torch(self):
        logits, labels = randn(3, 6, 9), torch.randint(9, (3, 6), generator=torch.Generator().manual_seed(0))
        labels[:, :2] = -100
        expected = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 9), labels[:, 1:].reshape(-1))
        torch.testing.assert_close(GPTLMLoss()(logits, labels), expected)

    def test_gradcheck(self):
        logits = randn(2, 3, 4).requires_grad_()
        labels = torch.tensor([[-100, 1, 3], [0, -100, 2]])
        assert torch.autograd.gradcheck(lambda x: GPTLMLoss()(x, labels), (logits,))

    def test_all_ignored_is_an_exact_zero_with_a_gradient(self):
        logits = randn(2, 3, 4).requires_grad_()
        loss = GPTLMLoss()(logits, torch.full((2, 3), -100))
        loss.backward()
        assert loss.item() == 0.0
        assert torch.equal(logits.grad, torch.zeros_like(logits))

    def test_bad_input(self):
        with pytest.raises(ValueError, match=r"labels \(1, 2\) do not fit logits \(1, 3, 4\)"):
            GPTLMLoss()(torch.zeros(1, 3, 4), torch.zeros(1, 2).long())
        with pytest.raises((RuntimeError, IndexError)):  # -5 is neither an id nor the ignore index
            GPTLMLoss()(torch.zeros(1, 3, 4), torch.tensor([[0, -5, 1]]))
        with pytest.raises(ValueError, match="normalizer counts none"):
            GPTLMLoss()(torch.zeros(1, 3, 4), torch.zeros(1, 3).long(), normalizer_tokens=0)


def test_public_names():
    import lightppo

    assert lightppo.PolicyLoss is PolicyLoss
    assert lightppo.ValueLoss is ValueLoss
    assert lightppo.GPTLMLoss is GPTLMLoss
