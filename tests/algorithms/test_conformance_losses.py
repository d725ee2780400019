"""Losses and corrections: the same numbers as other public trainers on the same input (docs/conformance.md).

Versions and inputs are in tests/support/conformance.py.
"""

from __future__ import annotations

import pytest
import torch
from support.conformance import (
    ADVANTAGES,
    FLOAT32,
    LOG_PROBS,
    MASK,
    NEW_VALUES,
    OLD,
    REFERENCE,
    RETURNS,
    ROLLOUT,
    ROW_ADVANTAGES,
    VALUES,
    close,
    differs,
    numbers,
    on_tokens,
    rows,
)
from support.whole_step import PolicyLoss, ValueLoss
from torch import Tensor

from lightppo.algorithms.correction import (
    correction_weights,
    normalize_weights,
    rejection_mask,
)
from lightppo.algorithms.kl import approx_kl, mismatch_terms, top_divergence
from lightppo.algorithms.logprobs import log_probs_at, top_log_probs
from lightppo.algorithms.masking import LossNormalizer, aggregate_loss
from lightppo.algorithms.option_values import Rejection
from lightppo.algorithms.selection import select_clip_cov, select_kl_cov, top_share

PPO_GRADIENT = """.13135338 -.01782166 .04814349 .0025425 -.0041348  .01261525 -.06863761 .02985963
    -.05409886 0 -.0446803 -.01650256  -.01587824 -.04099957  {} -.03111177 0 0 0  -.03644251"""
UNCLIPPED = """.13135338 -.01782166 .04814349 .0025425 -.0041348  .01261525 -.06863761 .02985963
    -.05409886 .0393558 -.0446803 -.01650256  -.01587824 -.04099957
    .33158258 -.03111177 .03523265 .0246927 -.05046083  -.03644251"""
GSPO_WIDE = """-.04546212 -.04546212 -.04546212 -.04546212 -.04546212  .03589897 .03589897 .03589897
    -.01478201 -.01478201 -.01478201 -.01478201  .14164356 .14164356  0 0 0 0 0  .11388284"""
GSPO_DUAL = """-.06819318 -.06819318 -.06819318 -.06819318 -.06819318  .03230907 .03230907 .03230907
    -.01773841 -.01773841 -.01773841 -.01773841  0 0  0 0 0 0 0  0"""
GMPO_NARROW = """0 -.04016032 0 0 -.04016032  .03699226 0 .03699226  -.01430931 -.01430931 0 -.01430931
    .14164356 .14164356  0 -.02634286 -.02634286 -.02634286 0  .11388284"""
SAPO_GRADIENT = """.08717775 -.01185913 .02758481 .00166108 -.002736  .0140068 -.07569595 .0330947
    -.04507193 .03171669 -.03661797 -.01351072  -.02614205 -.06828773
    .05618205 -.02057173 .02290651 .01617758 -.03001293  -.1208916"""
GPG_GRADIENT = """.1165 -.0195 .0275 .002 -.005  .012 -.083 .033  -.0525 .0605 -.0355 -.0225  -.013 -.039
    .095 -.038 .0505 .033 -.03  -.032"""
DPPO_GRADIENT = UNCLIPPED.replace(".0393558", "0")
DPPO_CUT = """.13135338 -.01782166 .04125 .0025425 -.0041348  .01261525 -.06863761 .02985963
    -.05409886 0 -.0446803 -.01650256  -.01587824 -.04099957  .1425 -.03111177 0 0 -.045  -.03644251"""
DPPO_NARROW = DPPO_GRADIENT.replace(".03523265 .0246927 -.05046083", "0 0 0")
PRIME_GRADIENT = """.13136538 -.01783066 .04819949 .0025665 -.0041538  .01262025 -.06865661 .02984963
    -.0540958630 -.000043 -.0446573004 -.0165335565  -.0158582359 -.0409945728
    .331707581 -.0311317686 -.000036 -.000029 -.0504088295  -.0364295083"""
KL_TIMES_RATIO = [
    ("k1_ratio", 0.2278254, ".02987867 .07082967 .11904572 .11504805 .0243953"),
    ("k3_ratio", 0.16937521, "-.02649618 .02513311 .0315121 .05148559 -.01695266"),
]
ROW_MEAN, TOKEN_MEAN = "seq-mean-token-mean", "token-mean"


def policy_loss(
    kind: str,
    mode: str,
    low: float | None,
    high: float | None,
    advantages: Tensor = ADVANTAGES,
    **given: object,
) -> tuple[Tensor, Tensor]:
    """The loss of the whole batch, and its gradient into the log probs."""
    log_probs = LOG_PROBS.clone().requires_grad_()
    call = {key: given.pop(key) for key in ("normalizer", "weights", "selected") if key in given}
    loss = PolicyLoss(low, high, kind, mode, given)(log_probs, OLD, advantages, MASK, **call)[0]
    return loss.detach(), torch.autograd.grad(loss, log_probs)[0]


class TestPolicyLosses:
    @pytest.mark.parametrize(
        ("kind", "mode", "eps", "options", "loss", "gradient"),
        [
            # OpenRLHF PolicyLoss; TRL GRPOTrainer._compute_loss, dapo; AReaL ppo_actor_loss_fn; slime, per token
            ("ppo", TOKEN_MEAN, (0.2, 0.28), {}, 0.302588977, PPO_GRADIENT.format(".33158258")),
            # verl vanilla (clip_ratio_c 3 by default); OpenRLHF dual_clip, TRL delta, AReaL c_clip, slime --eps-clip-c
            (
                "ppo",
                TOKEN_MEAN,
                (0.2, 0.28),
                {"dual_clip": 3.0},
                0.256006396,
                PPO_GRADIENT.format("0"),
            ),
            # TRL grpo, slime; with the dual clip verl, OpenRLHF with token_level_loss False
            ("ppo", ROW_MEAN, (0.2, 0.28), {}, 0.024893325, None),
            ("ppo", ROW_MEAN, (0.2, 0.28), {"dual_clip": 3.0}, -0.006161729, None),
            # verl
            ("ppo", "seq-mean-token-sum", (0.2, 0.28), {"dual_clip": 3.0}, 0.853354653, None),
            # verl compute_policy_loss_gspo, OpenRLHF, TRL grpo with importance_sampling_level sequence, slime
            ("gspo", ROW_MEAN, (3e-4, 4e-4), {}, 0.104533589, None),
            ("gspo", ROW_MEAN, (0.2, 0.2), {}, 0.038428229, GSPO_WIDE),
            # AReaL, which has only the token mean; with c_clip 1.1
            ("gspo", TOKEN_MEAN, (3e-4, 4e-4), {}, -0.287058015, None),
            ("gspo", TOKEN_MEAN, (0.2, 0.2), {"dual_clip": 1.1}, -0.386992319, GSPO_DUAL),
            # verl cispo; TRL cispo with epsilon_high 5 (its bound itself); slime
            ("cispo", TOKEN_MEAN, (1.0, 4.0), {}, -0.104839832, UNCLIPPED),
            ("cispo", TOKEN_MEAN, (0.2, 0.28), {}, -0.035103821, None),  # verl, slime
            # TRL with epsilon_high 1.28
            ("cispo", TOKEN_MEAN, (1.0, 0.28), {}, -0.017417258, None),
            # verl geo_mean, TRL GMPOTrainer
            ("gmpo", ROW_MEAN, (0.4, 0.4), {}, 0.077079542, None),
            ("gmpo", ROW_MEAN, (0.1, 0.1), {}, 0.118393541, GMPO_NARROW),
            ("sapo", ROW_MEAN, (None, None), {}, -0.201393551, SAPO_GRADIENT),  # verl, TRL
            ("sapo", TOKEN_MEAN, (None, None), {}, 0.213463699, None),  # AReaL sapo_loss_fn
            ("gpg", TOKEN_MEAN, (None, None), {}, -0.02218, GPG_GRADIENT),  # verl
            # verl, clip_ratio_c 20, and 1.5
            ("dppo_tv", TOKEN_MEAN, (0.15, 0.15), {}, -0.065877589, DPPO_GRADIENT),
            ("dppo_tv", TOKEN_MEAN, (0.05, 0.1), {"dppo_ratio_max": 1.5}, 0.096943181, DPPO_CUT),
            ("dppo_kl", TOKEN_MEAN, (0.05, 0.05), {}, -0.065877589, DPPO_GRADIENT),
            ("dppo_kl", TOKEN_MEAN, (0.01, 0.02), {}, -0.063303478, DPPO_NARROW),
        ],
    )
    def test_loss_and_gradient(self, kind, mode, eps, options, loss, gradient):
        advantages = ROW_ADVANTAGES if kind in ("gspo", "gmpo") else ADVANTAGES
        got, got_gradient = policy_loss(kind, mode, *eps, advantages, **options)
        close(got, loss)
        if gradient:
            close(got_gradient, rows(gradient))

    def test_dppo_of_prime_rl(self):
        """prime-rl default_loss_fn, masks .05 and .1, kl_tau 1e-3: the same gradient; its value is that of -ρA."""
        _, gradient = policy_loss("dppo_tv", TOKEN_MEAN, 0.05, 0.1, dppo_drift_coef=1e-3)
        close(gradient, rows(PRIME_GRADIENT))

    def test_constant_scale(self):
        """verl with loss_scale_factor 40 and its dual clip; TRL dr_grpo with max_completion_length 40."""
        normalizer = LossNormalizer(tokens=20, sequences=6, scale=40)
        mode = "seq-mean-token-sum-norm"
        close(
            policy_loss("ppo", mode, 0.2, 0.28, dual_clip=3.0, normalizer=normalizer)[0],
            0.021333866,
        )
        close(policy_loss("ppo", mode, 0.2, 0.28, normalizer=normalizer)[0], 0.025215748)

    def test_covariance_losses(self):
        """verl clip_cov (ratio .25, all 5 candidates) and kl_cov (ratio .2), on a batch that is one micro batch."""
        drawn = [x[MASK] for x in (LOG_PROBS, ADVANTAGES, torch.zeros(6, 5))]
        options = {"clip_cov_ratio": 0.25, "clip_cov_low": 0.05, "clip_cov_high": 0.3}
        selected = torch.zeros_like(MASK).masked_scatter(
            MASK, select_clip_cov(*drawn, options=options)
        )
        loss, gradient = policy_loss("clip_cov", TOKEN_MEAN, 1.0, 1.0, selected=selected, **options)
        close(loss, 0.274834663)
        close(gradient, rows(UNCLIPPED) * ~selected)
        selected = torch.zeros_like(MASK).masked_scatter(
            MASK, select_kl_cov(*drawn, options={"kl_cov_ratio": 0.2})
        )
        loss, gradient = policy_loss(
            "kl_cov", TOKEN_MEAN, None, None, selected=selected, kl_cov_ratio=0.2
        )
        close(loss, 0.3151093)
        close(gradient[0], numbers(".18135338 -.01782166 .09814349 .0025425 -.0041348"))
        # verl takes the covariance of each micro batch: with two of three rows the penalty of [0][2] is on [4][2]
        differs(gradient[0], numbers(".18135338 -.01782166 .04814349 .0025425 -.0041348"), by=0.04)

    def test_clip_cov_on_tokens_that_are_clipped_already(self):
        """verl leaves tokens that its clip reaches out of the candidates: here [4][2], where the ratio is below 0.8.

        We choose before the first update, where the ratio is 1. A later choice of the same tokens has the same
        gradient; in the loss verl also counts 0.8 times the advantage of -1.01, of 20 tokens.
        """
        drawn = [x[MASK] for x in (LOG_PROBS, ADVANTAGES, torch.zeros(6, 5))]
        options = {"clip_cov_ratio": 0.25, "clip_cov_low": 0.05, "clip_cov_high": 0.3}
        selected = torch.zeros_like(MASK).masked_scatter(
            MASK, select_clip_cov(*drawn, options=options)
        )
        assert selected.nonzero().tolist() == [[0, 4], [1, 2], [2, 2], [2, 3], [4, 2]]
        loss, gradient = policy_loss(
            "clip_cov", TOKEN_MEAN, 0.2, 0.28, selected=selected, **options
        )
        close(loss, 0.297646995)
        close(loss + 0.8 * 1.01 / 20, 0.338046995)  # verl
        clipped = rows("0 0 0 0 0  0 0 0  0 1 0 0  0 0  0 0 1 1 1  0").bool()
        close(gradient, rows(UNCLIPPED) * ~selected * ~clipped)  # verl's too

    def test_clip_cov_has_fewer_tokens_left_in_verl(self):
        """Two may be chosen of two candidates: the clipped one and another. verl chooses the other one alone."""
        # ratios e^.5 and 1
        old, log_probs = numbers("-1 -1 -1 -1")[None], numbers("-.5 -1 -1 -1")[None]
        advantages = numbers("2 -1 1 -2")[None]
        # by hand: mean log prob -.875, mean advantage 0; covariances .75 .125 -.125 .25
        options = {"clip_cov_ratio": 0.5, "clip_cov_low": 0.2, "clip_cov_high": 1.0}
        selected = select_clip_cov(log_probs[0], advantages[0], torch.zeros(4), options=options)[
            None
        ]
        assert selected[0].tolist() == [True, False, False, True]
        loss = PolicyLoss(0.2, 0.2, "clip_cov", TOKEN_MEAN, options)
        ours = loss(log_probs, old, advantages, torch.ones(1, 4).bool(), selected=selected)[0]
        close(ours, (0 + 1 - 1 + 0) / 4)
        # verl: the first token keeps its clipped loss
        differs(ours, (-1.2 * 2 + 1 - 1 + 0) / 4, by=0.5)

    def test_gmpo_of_verl_averages_advantages_and_all_rows(self):
        """By hand: log ratios .1 and -.1 have the geometric mean 1, advantages 1 and 3 the mean 2; row 2 is empty.

        verl and TRL's GMPOTrainer give both tokens the gradient of the mean advantage, and divide by 2 rows.
        """
        log_probs = numbers(".1 -.1")[None].repeat(2, 1).requires_grad_()
        advantages = numbers("1 3")[None].repeat(2, 1)
        mask = numbers("1 0").bool()[:, None].repeat(1, 2)
        loss = PolicyLoss(0.4, 0.4, "gmpo", ROW_MEAN)(
            log_probs, torch.zeros(2, 2).double(), advantages, mask
        )[0]
        close(loss.detach(), -2.0)
        differs(loss.detach(), -1.0, by=0.9)  # verl
        gradient = torch.autograd.grad(loss, log_probs)[0]
        close(gradient, torch.stack([numbers("-.5 -1.5"), numbers("0 0")]))
        differs(gradient[0], numbers("-.5 -.5"), by=0.9)  # verl: -2·1/2 for each token, of 2 rows

    @pytest.mark.parametrize(
        ("advantages", "verl"),
        [(ROW_ADVANTAGES, (0.077079539, -0.036803298)), (ADVANTAGES, (-0.117381044, 0.004093982))],
        ids=["one advantage per row", "token advantages"],
    )
    def test_gmpo_with_an_empty_row(self, advantages, verl):
        """verl compute_policy_loss_geo_mean, clip_ratio .4: with all rows, and of six rows with the sixth one empty."""
        whole, with_empty_row = verl
        close(policy_loss("gmpo", ROW_MEAN, 0.4, 0.4, advantages)[0], whole)
        five = PolicyLoss(0.4, 0.4, "gmpo", ROW_MEAN)(
            LOG_PROBS[:5], OLD[:5], advantages[:5], MASK[:5]
        )[0]
        close(five * 5 / 6, with_empty_row)

    @pytest.mark.parametrize(
        ("mode", "ours", "verl"),
        [
            (TOKEN_MEAN, 12 / 3, 4.0),
            ("seq-mean-token-sum", (6 + 6) / 2, 4.0),
            ("seq-mean-token-mean", (3 + 6) / 2, 3.0),
            ("seq-mean-token-sum-norm", (6 + 6) / 2 / 8, 0.5),
        ],
    )
    def test_a_row_without_a_trained_token(self, mode, ours, verl):
        """By hand: rows of 2 4, of 6, and an empty one. verl's trainer divides by the 3 rows of its mini batch."""
        values = torch.stack([numbers("2 4"), numbers("6 0"), numbers("9 9")])
        mask = torch.stack([numbers("1 1"), numbers("1 0"), numbers("0 0")]).bool()
        got = aggregate_loss(values, mask, mode, LossNormalizer.from_masks([mask], scale=8))
        close(got, ours)
        differs(got, verl, by=0.0 if mode == TOKEN_MEAN else 0.2)

    @pytest.mark.parametrize(
        ("mode", "loss"),
        [
            # verl 0.10 agg_loss of the advantages, the sixth row empty: alone, and with global_batch_size=6
            (TOKEN_MEAN, (-0.096842105, -0.096842105)),
            ("seq-mean-token-sum", (-0.368, -0.306666667)),
            ("seq-mean-token-mean", (0.019066666, 0.015888889)),
            ("seq-mean-token-sum-norm", (-0.0092, -0.007666667)),
        ],
    )
    def test_verl_counts_empty_rows_in_its_trainer_alone(self, mode, loss):
        alone, in_trainer = loss
        mask = MASK & (torch.arange(6) != 5)[:, None]
        got = aggregate_loss(ADVANTAGES, mask, mode, LossNormalizer.from_masks([mask], scale=40))
        close(got, alone)
        close(got * (1 if mode == TOKEN_MEAN else 5 / 6), in_trainer)

    def test_cpgd_without_drift(self):
        """LightRFT PolicyLoss with use_cpg_loss: -A·clip(log p); ours less A·old log p, a constant."""
        loss, gradient = policy_loss("cpgd", ROW_MEAN, 0.2, 0.2, cpgd_drift_coef=0.0)
        constant = aggregate_loss(ADVANTAGES * OLD, MASK, ROW_MEAN)
        close(loss - constant, 0.318454166)
        expected = rows(""".07766667 -.013 .01833333 .00133333 -.00333333  .01333333 -.09222222 .03666667
            -.04375 0 0 -.01875  0 -.065  .06333333 -.02533333 0 0 0  -.10666667""")
        close(gradient, expected)

    def test_gspo_with_token_advantages(self):
        """OpenRLHF and AReaL give every token of a row its mean advantage; here each keeps its own."""
        gradient = policy_loss("gspo", ROW_MEAN, 0.2, 0.2)[1]
        ratio = (LOG_PROBS - OLD)[0].mean().exp()  # 1.137, inside the clip
        close(gradient[0], -ratio * ADVANTAGES[0] / 5 / 6)
        differs(gradient[0], 0.01841216, by=0.05)

    def test_kl_loss(self):
        """TRL grpo with beta 0.04: k3, averaged as the policy loss is."""
        kl = aggregate_loss(approx_kl(LOG_PROBS, REFERENCE, "k3"), MASK, ROW_MEAN)
        close(policy_loss("ppo", ROW_MEAN, 0.2, 0.28)[0] + 0.04 * kl, 0.029563546)

    @pytest.mark.parametrize(("kind", "mean", "first_row"), KL_TIMES_RATIO)
    def test_kl_loss_times_the_ratio(self, kind, mean, first_row):
        """slime compute_approx_kl with importance_ratio (use_unbiased_kl), mean over tokens and its gradient.

        TRL's use_bias_correction_kl has k3's formula.
        """
        log_probs = LOG_PROBS.clone().requires_grad_()
        kl = approx_kl(log_probs, REFERENCE, kind, action_mask=MASK, old_log_probs=OLD)
        loss = aggregate_loss(kl, MASK, TOKEN_MEAN)
        close(loss.detach(), mean, FLOAT32)
        close(torch.autograd.grad(loss, log_probs)[0][0], numbers(first_row), FLOAT32)

    def test_top_k_distillation(self):
        """verl compute_forward_kl_topk, k 2: of three rows of logits, which the tables' first rows serve as."""
        student = torch.stack([LOG_PROBS[0], OLD[0], REFERENCE[0]]).requires_grad_()
        top, ids = top_log_probs(torch.stack([ROLLOUT[0], REFERENCE[0], LOG_PROBS[0]]), 2)
        loss = top_divergence(log_probs_at(student, ids), top, beta=0.0, tail="drop")
        close(loss.detach(), numbers(".07511435 .21502069 .08737597"), FLOAT32)
        expected = numbers(
            """.1054398 .10865091 .05081239 -.06659882 -.19830427
            -.13691211 .13520894 .03301035 .15397978 -.18528696
            .14699233 .05461892 .03088839 -.19042387 -.04207578"""
        ).view(3, 5)
        close(torch.autograd.grad(loss.sum(), student)[0], expected, FLOAT32)

    def test_rloo_on_policy(self):
        """TRL RLOOTrainer clips the ratio of the whole sequence; on-policy its gradient is that of the token sum."""
        log_probs = LOG_PROBS.clone().requires_grad_()
        PolicyLoss(0.2, 0.2, "ppo", "seq-mean-token-sum")(
            log_probs, LOG_PROBS, ROW_ADVANTAGES, MASK
        )[0].backward()
        close(log_probs.grad, on_tokens("-.2 .11666667 -.06666667 .25 -.15 .1"))

    @pytest.mark.parametrize("kind", ["ppo", "gmpo"])
    def test_micro_batches_do_not_change_the_loss(self, kind):
        """Two micro batches of three rows. TRL bnpo: .35030; verl geo_mean, where FSDP adds them up: .15416."""
        mode, eps, advantages, whole, theirs = {
            "ppo": (TOKEN_MEAN, (0.2, 0.28), ADVANTAGES, 0.302588977, 0.350303521),
            "gmpo": (ROW_MEAN, (0.4, 0.4), ROW_ADVANTAGES, 0.077079542, 0.154159083),
        }[kind]
        loss, normalizer = PolicyLoss(*eps, kind, mode), LossNormalizer.from_masks([MASK])
        parts = [slice(0, 3), slice(3, 6)]
        total = sum(
            loss(LOG_PROBS[p], OLD[p], advantages[p], MASK[p], normalizer)[0] for p in parts
        )
        close(total, whole)
        differs(total, theirs, by=0.04)

    def test_high_entropy_tokens(self):
        """TRL get_high_entropy_mask with top_entropy_quantile 0.25, and its dapo loss over all tokens."""
        chosen = torch.zeros_like(MASK).masked_scatter(MASK, top_share(-LOG_PROBS[MASK], 0.25))
        assert chosen.nonzero().tolist() == [[0, 2], [1, 2], [3, 1], [4, 1], [5, 0]]
        close(policy_loss("ppo", TOKEN_MEAN, 0.2, 0.28, weights=chosen.double())[0], -0.030550721)


class TestValueLoss:
    @pytest.mark.parametrize(
        ("clip", "expected"), [(0.2, 0.33964), (0.5, 0.30603), (None, 0.3025575)]
    )
    def test_clipped(self, clip, expected):
        """verl compute_value_loss, TRL PPOTrainer.train, OpenRLHF ValueLoss, AReaL ppo_critic_loss_fn."""
        ours = ValueLoss(clip)(NEW_VALUES, VALUES, RETURNS, MASK)[0]
        close(ours, expected)
        if clip == 0.2:
            differs(ours, 0.67928, by=0.3)  # slime value_loss_function has no ½

    def test_huber(self):
        """AReaL and realhf, loss_fn_type huber, whose δ is 10."""
        values, returns = numbers("0 3")[None], numbers("25 1")[None]
        close(
            ValueLoss(None, huber_delta=10.0)(values, values, returns, torch.ones(1, 2))[0], 101.0
        )


RATIOS = """1.22140276 .75578374 .77105159 .69073433 .7945336  .74081822 .87809543 {low}
    .90483742 {a} {b} .77105159  .57694981 1.13882838  {low2} 1.28402542 .54335087 1.25860001 {c}  .75578374"""
RAW = {
    "low": ".38289289",
    "a": "1.56831219",
    "b": "1.63231622",
    "low2": ".47236655",
    "c": "1.53725752",
}
CUT = {"a": "1.5", "b": "1.5", "c": "1.5"}
DROP_HIGH, DROP_LOW = {"a": "0", "b": "0", "c": "0"}, {"low": "0", "low2": "0"}


class TestCorrection:
    @pytest.mark.parametrize(
        ("name", "bounds", "expected"),
        [
            # verl rollout_is token, TRL token_truncate, slime vanilla_tis_function
            ("tis", {"high": 2.0}, RATIOS.format(**RAW)),
            # TRL and slime with 1.5; AReaL apply_rejection_sampling with action clamp
            ("tis", {"high": 1.5}, RATIOS.format(**RAW | CUT)),
            # TRL token_mask, slime icepop_function, AReaL action mask with lower .5; verl "0.5_2.0"
            ("icepop", {"low": 0.5, "high": 1.5}, RATIOS.format(**RAW | DROP_HIGH | DROP_LOW)),
            ("icepop", {"low": 0.5, "high": 2.0}, RATIOS.format(**RAW | DROP_LOW)),
            # AReaL use_decoupled_loss with action mask and upper 1.5; realhf behav_imp_weight_cap 1.5
            ("decoupled", {"high": 1.5}, RATIOS.format(**RAW | DROP_HIGH)),
        ],
    )
    def test_token_weights(self, name, bounds, expected):
        close(correction_weights(name, OLD, ROLLOUT, MASK, **bounds), rows(expected), FLOAT32)

    @pytest.mark.parametrize(
        ("name", "bounds", "expected"),
        [
            # verl rollout_is sequence; TRL sequence_truncate
            (
                "seq_tis",
                {"high": 2.0},
                ".39062784 .2490753 1.78603843 .65704682 .63762815 .75578374",
            ),
            ("seq_tis", {"high": 1.5}, ".39062784 .2490753 1.5 .65704682 .63762815 .75578374"),
            # verl seq_mean_k1 "0.8_1.2", whose bounds are those of 1/ρ
            ("seq_mask", {"low": 1 / 1.2, "high": 1 / 0.8}, "0 0 1 0 1 0"),
        ],
    )
    def test_row_weights(self, name, bounds, expected):
        close(correction_weights(name, OLD, ROLLOUT, MASK, **bounds), on_tokens(expected))

    def test_veto(self):
        """verl 0.6.1 (d62da495) with rollout_token_veto_threshold; 0.10 has no veto any more."""
        kept = correction_weights("tis", OLD, ROLLOUT, MASK, veto=0.5) > 0
        assert kept.any(dim=1).tolist() == [True, False, True, True, False, True]

    def test_normalised(self):
        """verl rollout_is_batch_normalize: the mean over tokens for token weights, over rows for row weights."""
        tokens = normalize_weights(correction_weights("tis", OLD, ROLLOUT, MASK), MASK)
        close(tokens[0], numbers("1.30778228 .80923396 .82558157 .73958415 .85072427"))
        in_rows = normalize_weights(correction_weights("seq_tis", OLD, ROLLOUT, MASK), MASK)
        close((in_rows * MASK).sum() / 20, 1.0)  # here over tokens in both
        differs(
            in_rows,
            on_tokens(".52360638 .33386617 2.39404628 .88072041 .85469119 1.01306961"),
            by=0.02,
        )

    @pytest.mark.parametrize(
        ("name", "bounds", "high", "loss"),
        [
            # OpenRLHF PolicyLoss: tis [0, 1.5], icepop [.5, 5], seq-mask-tis [.5, 5] and [.8, 1.2]
            ("tis", {"high": 1.5}, 0.28, 0.117834529),
            ("icepop", {"low": 0.5, "high": 5.0}, 0.28, -0.054263341),
            ("seq_mask_tis", {"low": 0.5, "high": 5.0}, 0.28, 0.113798221),
            ("seq_mask_tis", {"low": 0.8, "high": 1.2}, 0.28, 0.180832595),
            # AReaL ppo_actor_loss_fn, realhf actor_loss_fn
            ("decoupled", {"high": 1.5}, 0.2, 0.170015479),
            ("decoupled", {"high": 5.0}, 0.2, 0.121043864),
        ],
    )
    def test_corrected_loss(self, name, bounds, high, loss):
        weights = correction_weights(name, OLD, ROLLOUT, MASK, **bounds)
        close(policy_loss("ppo", TOKEN_MEAN, 0.2, high, weights=weights)[0], loss, FLOAT32)

    def test_truncation_from_below_is_off_by_default(self):
        """OpenRLHF's tis with its default [0.5, 5] lifts small weights to 0.5."""
        weights = correction_weights("tis", OLD, ROLLOUT, MASK, high=5.0)
        differs(policy_loss("ppo", TOKEN_MEAN, 0.2, 0.28, weights=weights)[0], 0.126457766, by=0.01)
        lifted = correction_weights("tis", OLD, ROLLOUT, MASK, low=0.5, high=5.0)
        close(policy_loss("ppo", TOKEN_MEAN, 0.2, 0.28, weights=lifted)[0], 0.126457766, FLOAT32)

    def test_mismatch(self):
        """verl compute_offpolicy_metrics, compute_is_metrics (no weight is above its bound here)."""
        terms = mismatch_terms(OLD, ROLLOUT, MASK)
        ratio = terms["ratio"]
        close(terms["kl"].mean(), 0.145)
        close(terms["k3_kl"].mean(), 0.07894961)
        close(terms["ppl_ratio"].mean(), 1.21870017)
        close(ratio.square().mean() - 1, 0.00425296)
        close(terms["seq_ratio"].square().mean() - 1, -0.19765814)
        close(ratio.mean().square() / ratio.square().mean(), 0.86856791)


class TestRejections:
    """The kept ones of the 20 trained tokens, by the program that the comment names, unless it says otherwise."""

    @pytest.mark.parametrize(
        ("texts", "kept"),
        [
            # verl b178a3cd compute_rollout_rejection_mask; its k1 has bounds of 1/ρ: "0.8_1.25" is the same either way
            (["token_ratio=0.8:1.25"], "10000010100001000000"),
            (["token_k2=0.05"], "11101110100101010101"),
            (["token_k3=0.05"], "11101110100101010101"),
            (["seq_sum_ratio=0.66666667:1.66666667"], "00000000000000000001"),  # "0.6_1.5"
            (["seq_sum_k2=0.3"], "11111000111111000001"),
            (["seq_sum_k3=0.25"], "11111000000011000001"),
            (["seq_mean_ratio=0.90909091:1.25"], "00000000111100111110"),  # "0.8_1.1"
            (["seq_mean_k2=0.05"], "11111000000000000001"),
            (["seq_mean_k3=0.05"], "11111000000000000001"),
            (["seq_max_k2=0.1"], "11111000000000000001"),
            (["seq_max_k3=0.1"], "11111000000000000001"),
            (["token_ratio=0.66666667:1.66666667", "seq_max_k3=0.3"], "11111000111101010111"),
            # AReaL apply_rejection_sampling, action mask: token kl_k1 (its sign is the other), ratio mean, max, sum
            (["token_k1=-0.3:0.3"], "11101010100101010101"),
            (["seq_mean_ratio=0.9:1.2"], "00000000111100111110"),
            (["seq_max_ratio=1.4"], "11111111000011000001"),
            (["seq_sum_ratio=0.5:1.5"], "00000000000011111111"),
            # the same, kl_k3: the other direction
            (["token_k3r=0.1"], "11111110110101010111"),
            (["token_k3r=0.05"], "11101110100101010101"),
            (["seq_mean_k3r=0.1"], "11111000111111000001"),
            (["seq_sum_k3r=0.3"], "11111000111111000001"),
            # AReaL _apply_m2po_masking
            (["m2po=0.04"], "10101010100001010100"),
            (["m2po=0.1"], "11111110111101010111"),
            (["m2po=0.2"], "1" * 20),
        ],
        ids=str,
    )
    def test_before_training(self, texts, kept):
        mask = rejection_mask([Rejection.parse(text) for text in texts], OLD, ROLLOUT, MASK)
        assert "".join(str(int(x)) for x in mask[MASK]) == kept

    @pytest.mark.parametrize(
        ("delta", "rows"), [(0.05, "101010"), (0.1, "101110"), (0.2, "101111")]
    )
    def test_off_policy_sequence_masking(self, delta, rows):
        """slime compute_opsm_mask; TRL get_off_policy_mask has the same formula."""
        rejection = Rejection.parse(f"opsm={delta}")
        mask = rejection_mask([rejection], LOG_PROBS, ROLLOUT, MASK, advantages=ROW_ADVANTAGES)
        assert "".join(str(int(x)) for x in mask[:, 0]) == rows

    @pytest.mark.parametrize(
        ("name", "bounds", "weights"),
        [
            # TRL sequence_mask, as GRPOTrainer has it
            ("seq_mis", (0.0, 1.7), ".39062784 .2490753 0 .65704682 .63762815 .75578374"),
            ("seq_mis", (0.3, 3.0), ".39062784 0 1.78603843 .65704682 .63762815 .75578374"),
            # AReaL apply_rejection_sampling, level sequence, metric ratio: action mask and clamp
            ("geo_mis", (0.9, 1.2), "0 0 1.15603995 0 .91393101 0"),
            ("geo_tis", (0.9, 1.2), ".9 .9 1.15603995 .9 .91393101 .9"),
        ],
    )
    def test_weights_of_rows(self, name, bounds, weights):
        low, high = bounds
        close(
            correction_weights(name, OLD, ROLLOUT, MASK, low=low, high=high),
            on_tokens(weights),
            FLOAT32,
        )

    @pytest.mark.parametrize(
        ("name", "agg", "bounds", "weights"),
        [
            # AReaL apply_rejection_sampling, level sequence, metric ratio, action mask
            ("geo_mis", "sum", (0.3, 1.7), ".82861471 0 0 .81058425 .91393113 .75578374"),
            ("geo_mis", "sum", (0.0, 0.5), ".82861471 .62918288 0 0 0 0"),
            ("geo_mis", "max", (0.9, 1.4), ".82861471 0 0 .81058425 0 0"),
            ("geo_mis", "max", (0.6, 1.2), "0 .62918288 0 .81058425 0 .75578374"),
            # action clamp
            ("geo_tis", "sum", (0.0, 0.5), ".82861471 .62918288 .5 .5 .5 .5"),
            ("geo_tis", "max", (0.9, 1.4), ".82861471 .9 1.1560396 .81058425 .91393113 .9"),
        ],
    )
    def test_what_of_a_row_is_bounded(self, name, agg, bounds, weights):
        low, high = bounds
        got = correction_weights(name, OLD, ROLLOUT, MASK, low=low, high=high, agg=agg)
        close(got, on_tokens(weights), FLOAT32)

    def test_rows_rejected_by_a_kl_keep_the_weights_of_their_tokens(self):
        """AReaL, level sequence, metric kl_k2, agg mean, upper .05: behave_imp_weight."""
        weights = correction_weights("tis", OLD, ROLLOUT, MASK, high=1e9)
        kept = rejection_mask([Rejection.parse("seq_mean_k2=0.05")], OLD, ROLLOUT, MASK)
        expected = """1.22140265 .75578374 .77105159 .69073433 .79453361  0 0 0  0 0 0 0  0 0  0 0 0 0 0
            .75578374"""
        close(weights * kept, rows(expected), FLOAT32)

    def test_weights_of_tokens_with_a_lower_bound(self):
        """AReaL action clamp; slime vanilla_tis_function and TRL token_truncate have the same formula."""
        expected = rows(
            """1.221403 .8 .8 .8 .8  .8 .878095 .8  .904837 1.25 1.25 .8  .8 1.138828
            .8 1.25 .8 1.25 1.25  .8"""
        )
        close(correction_weights("tis", OLD, ROLLOUT, MASK, low=0.8, high=1.25), expected, FLOAT32)
