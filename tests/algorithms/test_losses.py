from __future__ import annotations

import math

import pytest
import torch

from lightppo.algorithms.entries import POLICY_LOSSES
from lightppo.algorithms.losses import GPTLMLoss, PolicyLoss, ValueLoss
from lightppo.algorithms.masking import LossNormalizer

NAN = float("nan")


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


KINDS = sorted(POLICY_LOSSES)
SUM = "seq-mean-token-sum"


def policy_loss(kind: str, **fields) -> PolicyLoss:
    """With epsilons that clip some tokens and not others, also where the loss's own are narrow or wide."""
    if POLICY_LOSSES[kind].eps_clip is not None:
        fields = {"clip_eps_low": 0.3, "clip_eps_high": 0.4} | fields
    return PolicyLoss(policy_loss=kind, **fields)


def selection(kind: str, *shape: int) -> dict[str, torch.Tensor]:
    """What a loss that singles out tokens needs besides: every third one."""
    picked = torch.arange(math.prod(shape)).view(shape) % 3 == 0
    return {"selected": picked} if POLICY_LOSSES[kind].selection else {}


class TestPolicyLoss:
    """What holds for every loss; the numbers of each are in test_policy_losses.py."""

    MASK = torch.tensor([[True, True, False, True], [True, False, False, False], [True, True, True, True]])

    def gradient(self, loss_fn, log_probs, *args, **kwargs):
        log_probs = log_probs.clone().requires_grad_()
        loss, metrics = loss_fn(log_probs, *args, **kwargs)
        loss.backward()
        return loss.detach(), log_probs.grad, metrics

    def test_defaults_are_those_of_the_loss(self):
        assert PolicyLoss() == PolicyLoss(0.2, 0.2, "ppo", "token-mean", {"dual_clip": None})
        for name, traits in POLICY_LOSSES.items():
            loss_fn = PolicyLoss(policy_loss=name, options=dict.fromkeys(traits.defaults))
            assert (loss_fn.clip_eps_low, loss_fn.clip_eps_high) == (traits.eps_clip or (None, None))
            assert loss_fn.options == traits.defaults
        assert PolicyLoss(clip_eps_high=0.28).clip_eps_low == 0.2
        assert PolicyLoss(policy_loss="sapo", options={"sapo_tau_neg": 2.0}).options["sapo_tau_pos"] == 1.0

    @pytest.mark.parametrize("kind", KINDS)
    def test_first_step_on_policy_is_reinforce(self, kind):
        """old = the same tensor, which nobody detached: ratio 1, and the gradient -A of REINFORCE for every loss."""
        log_probs, advantages = randn(3, 4), randn(3, 4, seed=1)
        advantages[2, 1] = 0.0
        selected = {name: torch.zeros_like(x) for name, x in selection(kind, 3, 4).items()}
        log_probs.requires_grad_()
        options = {"dual_clip": 3.0} if kind == "ppo" else {}
        loss_fn = PolicyLoss(policy_loss=kind, options=options)
        loss, metrics = loss_fn(log_probs, log_probs, advantages, self.MASK, **selected)
        loss.backward()
        torch.testing.assert_close(log_probs.grad, -advantages * self.MASK / 8)
        assert metrics["ratio"].item() == pytest.approx(1.0)
        assert (metrics["clip_ratio"].item(), metrics["approx_kl"].item()) == (0.0, 0.0)

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_token_has_its_gradient_from_its_own_loss_alone(self, kind):
        """So that a weight of a token is a weight of its gradient, also where one ratio belongs to the whole row."""
        log_probs, old, advantages = randn(2, 3), randn(2, 3, seed=1), randn(2, 3, seed=2)
        loss_fn = policy_loss(kind)

        def token_loss(x: torch.Tensor) -> torch.Tensor:
            arguments = {"action_mask": torch.ones(2, 3).bool(), "selected": None} | selection(kind, 2, 3)
            arguments |= {"clip_eps_low": loss_fn.clip_eps_low, "clip_eps_high": loss_fn.clip_eps_high}
            return POLICY_LOSSES[kind].fn(x, old, advantages, **arguments, **loss_fn.options)[0].flatten()

        jacobian = torch.autograd.functional.jacobian(token_loss, log_probs).view(6, 6)
        assert jacobian.diagonal().any()
        assert torch.equal(jacobian, jacobian.diagonal().diag())

    @pytest.mark.parametrize("kind", KINDS)
    def test_weights_are_weights_of_the_gradient(self, kind):
        tensors = randn(3, 4), randn(3, 4, seed=1), randn(3, 4, seed=2), self.MASK
        weights = torch.rand(3, 4, generator=torch.Generator().manual_seed(3)).double()
        weights[0, 0] = weights[1, 0] = 0.0
        weights[0, 2] = NAN  # masked
        weights.requires_grad_()
        loss_fn, extra = policy_loss(kind), selection(kind, 3, 4)
        _, plain, plain_metrics = self.gradient(loss_fn, *tensors, **extra)
        loss, weighted, metrics = self.gradient(loss_fn, *tensors, **extra, weights=weights)
        torch.testing.assert_close(weighted, torch.where(self.MASK, plain * weights.detach(), 0.0))
        assert torch.equal(weighted[1], torch.zeros(4).double())
        assert loss.isfinite()
        assert weights.grad is None
        assert metrics == plain_metrics

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_weight_of_zero_silences_a_token_that_is_not_finite(self, kind):
        """A token that the model holds impossible: -inf. Its row's ratio is lost, its neighbours' rows are not."""
        log_probs = randn(2, 2)
        log_probs[0] = -math.inf
        weights = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
        loss_fn, extra, ones = policy_loss(kind), selection(kind, 2, 2), torch.ones(2, 2).bool()
        loss, gradient, _ = self.gradient(
            loss_fn, log_probs, randn(2, 2, seed=1), randn(2, 2, seed=2), ones, weights=weights, **extra
        )
        assert loss.isfinite()
        assert gradient.isfinite().all()
        assert not gradient[0].any()

    def test_old_log_probs_and_advantages_are_constants(self):
        for kind in KINDS:
            old, advantages = randn(1, 2).requires_grad_(), randn(1, 2, seed=1).requires_grad_()
            self.gradient(policy_loss(kind), randn(1, 2), old, advantages, torch.ones(1, 2), **selection(kind, 1, 2))
            assert old.grad is None
            assert advantages.grad is None

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("log_ratio", [1000.0, -1000.0])
    @pytest.mark.parametrize("advantage", [2.0, -2.0])
    def test_an_absurd_log_ratio_stays_finite(self, kind, log_ratio, advantage):
        log_probs, ones = torch.tensor([[log_ratio, log_ratio, 0.1]]), torch.ones(1, 3)
        loss, gradient, metrics = self.gradient(
            policy_loss(kind), log_probs, 0 * ones, advantage * ones, ones, **selection(kind, 1, 3)
        )
        assert loss.isfinite()
        assert gradient.isfinite().all()
        assert all(x.isfinite() for x in metrics.values())

    @pytest.mark.parametrize("kind", KINDS)
    def test_what_lies_under_the_mask_never_matters(self, kind):
        log_probs, old, advantages, extra = randn(3, 4), randn(3, 4, seed=1), randn(3, 4, seed=2), selection(kind, 3, 4)
        clean = self.gradient(policy_loss(kind), log_probs, old, advantages, self.MASK, **extra)
        for bad in (NAN, math.inf, -math.inf):
            dirty = self.gradient(
                policy_loss(kind), *(x.masked_fill(~self.MASK, bad) for x in (log_probs, old, advantages)), self.MASK,
                **{name: x | ~self.MASK for name, x in extra.items()},
            )  # fmt: skip
            assert torch.equal(clean[0], dirty[0])
            assert torch.equal(clean[1], dirty[1])
            assert clean[2] == dirty[2]
        assert not clean[1][~self.MASK].any()

    # cispo and the drift of cpgd are stop-gradient forms that are no derivative of their value: see the closed forms in
    # test_policy_losses.py, and there also gspo and gmpo, which are one where a row has one advantage.
    @pytest.mark.parametrize("kind", ["ppo", "sapo", "clip_cov", "kl_cov", "gpg", "cpgd", "dual"])
    def test_gradcheck(self, kind):
        mask = torch.tensor([[True, True, False, True]] * 3)
        options = {"dual": {"dual_clip": 1.5}, "cpgd": {"cpgd_drift_coef": 0.0}}.get(kind, {})
        kind = {"dual": "ppo"}.get(kind, kind)
        old, advantages, extra = randn(3, 4), randn(3, 4, seed=1), selection(kind, 3, 4)
        log_probs = (old + 0.7 * randn(3, 4, seed=2)).requires_grad_()  # some clipped, none on the kink
        loss_fn = policy_loss(kind, options=options)
        clipped = loss_fn(log_probs, old, advantages, mask, **extra)[1]["clip_ratio"].item()
        assert 0 < clipped < 1 or POLICY_LOSSES[kind].eps_clip is None
        assert torch.autograd.gradcheck(lambda x: loss_fn(x, old, advantages, mask, **extra)[0], (log_probs,))

    @pytest.mark.parametrize("kind", KINDS)
    def test_equal_rewards_train_nothing(self, kind):
        loss_fn = policy_loss(kind, options={"cpgd_drift_coef": 0.0} if kind == "cpgd" else {})
        extra = {name: torch.zeros_like(x) for name, x in selection(kind, 3, 4).items()}
        zeros = torch.zeros(3, 4).double()
        loss, gradient, metrics = self.gradient(
            loss_fn, 5 * randn(3, 4), 5 * randn(3, 4, seed=1), zeros, zeros == 0, **extra
        )
        assert loss == 0
        assert not gradient.any()
        assert metrics["clip_ratio"] == 0  # there was no gradient to take away

    @pytest.mark.parametrize("kind", KINDS)
    def test_every_kind_reports_the_promised_metrics(self, kind):
        _, _, metrics = self.gradient(policy_loss(kind), *(randn(3, 4, seed=i) for i in range(3)), self.MASK,
                                      **selection(kind, 3, 4))  # fmt: skip
        assert {"clip_ratio", "ratio", "approx_kl"} <= metrics.keys()
        assert all(x.dim() == 0 and not x.requires_grad for x in metrics.values())

    @pytest.mark.parametrize("kind", KINDS)
    def test_fully_masked_micro_batch(self, kind):
        bad, mask = torch.full((2, 3), NAN), torch.zeros(2, 3).bool()
        loss, gradient, metrics = self.gradient(
            policy_loss(kind), bad, bad, bad, mask, LossNormalizer(tokens=5, sequences=2), **selection(kind, 2, 3)
        )
        assert loss.item() == 0.0
        assert torch.equal(gradient, torch.zeros(2, 3))
        assert all(x.item() == 0.0 for x in metrics.values())

    @pytest.mark.parametrize("kind", KINDS)
    def test_precision(self, kind):
        tensors, extra = [randn(3, 4, seed=i) for i in range(3)], selection(kind, 3, 4)
        exact = self.gradient(policy_loss(kind), *tensors, self.MASK, **extra)
        single = self.gradient(policy_loss(kind), *(x.float() for x in tensors), self.MASK, **extra)
        assert (exact[0].dtype, single[0].dtype) == (torch.float64, torch.float32)
        torch.testing.assert_close(single[0], exact[0].float())
        torch.testing.assert_close(single[1], exact[1].float())
        # bf16 log probs are taken as they are, and all that follows is float32: old would round to -1 in bf16
        half, old, ones = torch.tensor([[-1.0]]).bfloat16(), torch.tensor([[-1.001]]), torch.ones(1, 1)
        loss, _, metrics = self.gradient(policy_loss(kind), half, old, ones, ones, **selection(kind, 1, 1))
        assert loss.dtype == torch.float32
        torch.testing.assert_close(metrics["ratio"], torch.tensor(0.001).exp())

    def test_bad_names(self):
        with pytest.raises(ValueError, match=r"--policy_loss: unknown name 'gsop' \(did you mean 'gspo'.*cpgd"):
            PolicyLoss(policy_loss="gsop")
        with pytest.raises(ValueError, match="--loss_agg_mode"):
            PolicyLoss(loss_agg_mode="mean")
        with pytest.raises(ValueError, match=r"--dual_clap is no option of --policy_loss ppo; it has: dual_clip"):
            PolicyLoss(options={"dual_clap": 3.0})
        with pytest.raises(ValueError, match=r"--dual_clip is no option of --policy_loss gpg; it has: none"):
            PolicyLoss(policy_loss="gpg", options={"dual_clip": 3.0})

    def test_bad_numbers(self):
        for low in (0.0, 1.01, -0.1, NAN):
            with pytest.raises(ValueError, match=r"--eps_clip_low must be above 0 and at most 1"):
                PolicyLoss(clip_eps_low=low)
        with pytest.raises(ValueError, match="--eps_clip_high must be above 0"):
            PolicyLoss(clip_eps_high=0.0)
        for kind in ("sapo", "kl_cov", "gpg"):
            with pytest.raises(ValueError, match=f"--eps_clip: policy_loss '{kind}' clips nothing"):
                PolicyLoss(0.2, policy_loss=kind)
        for kind, option, bad in [
            ("ppo", "dual_clip", 1.0),
            ("sapo", "sapo_tau_pos", 0.0),
            ("sapo", "sapo_tau_neg", -1.0),
            ("clip_cov", "clip_cov_ratio", 0.0),
            ("clip_cov", "clip_cov_low", NAN),
            ("clip_cov", "clip_cov_high", NAN),
            ("kl_cov", "kl_cov_ratio", 1.5),
            ("kl_cov", "kl_cov_coef", -0.1),
            ("cpgd", "cpgd_drift_coef", -0.1),
        ]:
            with pytest.raises(ValueError, match=f"--{option} must be .*, not {bad}"):
                PolicyLoss(policy_loss=kind, options={option: bad})
        with pytest.raises(ValueError, match=r"--clip_cov_low 5 must be below --clip_cov_high 5"):
            PolicyLoss(policy_loss="clip_cov", options={"clip_cov_low": 5.0})

    def test_bad_tensors(self):
        good = [torch.zeros(2, 3)] * 3 + [torch.ones(2, 3).bool()]
        with pytest.raises(ValueError, match=r"advantages \(2, 1\)"):
            PolicyLoss()(good[0], good[1], torch.zeros(2, 1), good[3])
        with pytest.raises(ValueError, match=r"weights \(2, 1\)"):
            PolicyLoss()(*good, weights=torch.ones(2, 1))
        with pytest.raises(ValueError, match=r"selected \(3,\)"):
            PolicyLoss(policy_loss="kl_cov")(*good, selected=torch.ones(3))
        for kind in ("clip_cov", "kl_cov"):
            with pytest.raises(ValueError, match=f"policy_loss '{kind}' needs the argument selected"):
                PolicyLoss(policy_loss=kind)(*good)
        for kind in set(POLICY_LOSSES) - {"clip_cov", "kl_cov"}:
            with pytest.raises(ValueError, match=f"policy_loss '{kind}' singles out no tokens"):
                PolicyLoss(policy_loss=kind)(*good, selected=good[3])


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
