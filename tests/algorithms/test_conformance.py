"""The same numbers as other public trainers on the same input, and by how much ours differ (docs/conformance.md).

Versions and inputs are in tests/support/conformance.py; tests of the losses in test_conformance_losses.py.
"""

from __future__ import annotations

import pytest
import torch
from support.conformance import (
    ADVANTAGES,
    FLOAT32,
    GREEDY,
    GROUPS,
    LOG_PROBS,
    MASK,
    OUTCOME,
    REFERENCE,
    RETURNS,
    REWARDS,
    SCORES,
    TOKEN_REWARDS,
    VALUES,
    close,
    differs,
    numbers,
    on_tokens,
    rows,
)
from support.fakes import FakeStrategy, make_rollout
from torch import Tensor

from lightppo.algorithms.advantages import advantage_fn, compute_token_rewards, group_normalize
from lightppo.algorithms.entries import ADVANTAGE_ESTIMATORS
from lightppo.algorithms.kl import AdaptiveKLController, approx_kl
from lightppo.algorithms.masking import whiten
from lightppo.algorithms.option_values import Norm
from lightppo.config import PPOConfig
from lightppo.experience.normalisation import (
    ScoreShaper,
    ValueNorm,
    dense_rewards,
    normalize_by,
    overlong_penalty,
    scale_scores,
    stop_properly,
    zero_truncated,
)


def estimate(
    name: str, rewards: Tensor = OUTCOME, mask: Tensor = MASK, **given: object
) -> tuple[Tensor, Tensor]:
    arguments = {
        "values": VALUES,
        "group_ids": GROUPS,
        "baseline_scores": GREEDY,
        "gamma": 0.9,
        "lambd": 0.8,
    } | given
    return advantage_fn(ADVANTAGE_ESTIMATORS[name])(
        token_rewards=rewards, action_mask=mask, scores=rewards.sum(1), **arguments
    )


def bessel(advantages: Tensor) -> Tensor:
    return whiten(advantages, MASK, unbiased=True)


class TestLevels:
    """AReaL Normalization, group_size 3, eps 1e-5: of the scores, and the first row of the token advantages."""

    @pytest.mark.parametrize(
        ("words", "scores", "first_row"),
        [
            (
                "mean=batch std=batch unbiased",
                ".5474369 -.6256422 -.0391026 -.9775659 1.720516 -.6256422",
                "-2.2444878 .4449425 -.484493 .0197752 .1582018",
            ),
            (
                "mean=group std=batch unbiased",
                ".5870784 -.5870784 0 -1.0176026 1.682958 -.6653555",
                "-2.2486379 .4408286 -.4886194 .0156556 .154084",
            ),
            (
                "mean=batch std=group",
                "1.139276 -1.3020297 -.0813769 -.8158362 1.4358717 -.5221351",
                "-2.2348771 .4430373 -.4824184 .0196905 .1575244",
            ),
            (
                "mean=group leave_one_out std=group unbiased",
                ".9999866 -.9999866 0 -.6931448 1.1463549 -.4532101",
                "-2.1436801 .4202524 -.4658125 .0149249 .146892",
            ),
            (
                "mean=batch leave_one_out std=batch",
                ".5996877 -.6853573 -.0428348 -1.0708709 1.8847327 -.6853573",
                "-2.3027966 .4565015 -.4970794 .020289 .1623117",
            ),
            (
                "std=group",
                "1.5491693 0 .7745847 -.256931 1.7128733 0",
                "-2.2905099 .3833901 -.5406783 -.0393221 .0983052",
            ),
            (
                "mean=group leave_one_out",
                ".75 -.75 0 -1.3 2.15 -.85",
                "-2.4809091 .4863636 -.5390909 .0172727 .17",
            ),
            (
                "std=batch unbiased",
                ".9676319 0 .4838159 -.2902896 1.9352638 0",
                "-2.2995577 .3849045 -.5428141 -.0394774 .0986935",
            ),
        ],
    )
    def test_mean_and_deviation(self, words, scores, first_row):
        norm, every = Norm.parse(words.split()), MASK.any(1, keepdim=True)
        close(normalize_by(SCORES[:, None], every, GROUPS, norm)[:, 0], numbers(scores), FLOAT32)
        close(normalize_by(ADVANTAGES, MASK, GROUPS, norm)[0], numbers(first_row), FLOAT32)


class TestAdvantages:
    @pytest.mark.parametrize(
        ("weights", "expected"),
        [
            ((1.0, 1.0), "-.35359138 -.78744347 .83173378 -2.16026591 .81822981 1.03273493"),
            ((1.0, 0.5), ".38190828 -1.39659998 .17178679 -1.82084956 1.06421647 -.08627183"),
        ],
    )
    def test_gdpo(self, weights, expected):
        """verl compute_gdpo_outcome_advantage, with gdpo_reward_weights; its whitening is n - 1."""
        parts = torch.stack([SCORES, numbers("0 10 10 4 4 7")], dim=1)
        advantages, _ = estimate("gdpo", part_scores=parts, part_weights=weights)
        close(bessel(advantages), on_tokens(expected), FLOAT32)

    def test_gae(self):
        advantages, returns = estimate("gae", REWARDS)
        # verl compute_gae_advantage_return; TRL PPOTrainer.train has the same
        expected = rows("""-.54554708 -.68825984 -.906472 -.1026 -.65  .000528 .1874 .33  .0508016 .19528 -.211 .31
            .0888 0  .13734094 -.33841536 -.346688 .4546 -.08  .19""")
        close(returns, expected)
        verl = rows("""-.69451836 -.84770721 -2.16658939 1.06178409 -1.66020715  .33994255 1.55747269 .65300624
            -.46923007 -.03223366 .7009228 1.11564892  .27099557 .85128167
            1.04516356 -.18704606 -.84511006 -.11597198 -1.14799561  .57039148""")
        close(bessel(advantages), verl)
        # ours divides by n unless --adv_std_unbiased
        differs(whiten(advantages, MASK), verl, by=0.01)

    def test_gae_with_the_kl_in_the_reward(self):
        advantages, returns = estimate("gae", TOKEN_REWARDS)
        # AReaL PPOActor._compute_advantages, slime get_advantages_and_returns_batch
        expected = rows(""".24584939 .34562415 -.16857758 1.33392001 .51100001  -.04831201 .6204 -.13000001
            -.42089063 -.37345921 .71463999 .637  -.34163999 .03800001
            .89853017 .96323634 .84616159 .94327999 1.29899999  -.07699999""")
        close(advantages, expected, FLOAT32)
        # OpenRLHF RemoteExperienceMaker.compute_advantages_and_returns, whitened with n
        expected = rows("""-.2672579 -.08460274 -1.025939 1.72464579 .2181467  -.80577181 .41842255
            -.95531598  -1.48784218 -1.40101065 .59094536 .44881176  -1.34276003 -.64776257
            .92758851 1.04604447 .83171867 1.0095109 1.66071861  -.85829019""")
        close(whiten(advantages, MASK), expected, FLOAT32)
        close(returns[0, 0], 0.29584939, FLOAT32)

    def test_gae_of_truncated_responses(self):
        """realhf pygae1d_nolp_misalign: rows 2 and 4 go on with the value 0.6 of what follows."""
        bootstrap = numbers("0 0 .6 0 .6 0")
        expected = rows("""-.59554708 -.68825984 -1.486472 .4674 -1.18  .030528 .7674 .22
            -.25764448 .085216 .6378 1.04  -.0112 .34  .60245976 -.08686144 -.406752 .1434 -.33  .17""")
        close(estimate("gae", REWARDS, bootstrap_values=bootstrap)[0], expected)

    def test_gae_over_a_hole(self):
        mask = torch.tensor([[True, False, True, True]])
        rewards, values = numbers(".1 0 -.2 1")[None], numbers(".5 9 .3 -.4")[None]
        gae = advantage_fn(ADVANTAGE_ESTIMATORS["gae"])
        ours = gae(token_rewards=rewards, action_mask=mask, values=values, gamma=0.9, lambd=0.8)[0]
        close(ours, numbers("-.02344 0 .148 1.4")[None])  # verl compute_gae_advantage_return
        # OpenRLHF get_advantages_and_returns: the hole is a step with value 0, so the next token's value is lost
        differs(ours, numbers("-.1288768 0 .148 1.4")[None], by=0.1)

    def test_reinforce(self):
        advantages, returns = estimate("reinforce++", REWARDS)
        # verl compute_reinforce_plus_plus_outcome_advantage
        close(returns[0], numbers("-.996935 -1.05215 -1.0135 -.315 -.65"))
        close(
            bessel(advantages)[0],
            numbers("-1.72579568 -1.84127519 -1.76044058 -.29956147 -1.00019784"),
        )
        # slime get_reinforce_plus_plus_returns, normalize_advantages, kl_coef 0.1
        slime = rows("""-.05912316 -.0397995 .14284514 .31576102 .57899593  -.88394172 -.87725773 -.92987628
            -.57358761 -.5482212 -.3762439 -.26574496  -1.23534824 -1.33091489
            .8008128 1.10056085 1.32616499 1.76803274 2.06938054  -.9824948""")
        close(bessel(estimate("reinforce++", TOKEN_REWARDS)[0]), slime, FLOAT32)
        # OpenRLHF, estimator reinforce
        close(
            whiten(estimate("reinforce")[0], MASK)[2],
            numbers("-.45730474 -.39702338 -.33004409 -.25562265 0"),
            1e-6,
        )

    def test_reinforce_baseline(self):
        advantages = estimate("reinforce++_baseline")[0]
        # verl compute_reinforce_plus_plus_baseline_outcome_advantage; slime with --normalize-advantages
        close(
            bessel(advantages),
            on_tokens(".25608284 -.98302768 -.36347242 -1.4373682 1.41258599 -1.06563504"),
        )
        # OpenRLHF, estimator reinforce_baseline
        openrlhf = on_tokens(".26273545 -1.00856522 -.37291489 -1.4747088 1.44928274 -1.0933186")
        close(whiten(advantages, MASK), openrlhf, FLOAT32)

    @pytest.mark.parametrize(
        ("name", "options", "expected"),
        [
            # verl compute_rloo_outcome_advantage, TRL RLOOTrainer, OpenRLHF, AReaL reward_norm with mean_leave1out
            ("rloo", {}, ".75 -.75 0 -1.3 2.15 -.85"),
            # verl compute_grpo_outcome_advantage; slime _post_process_rewards
            ("grpo", {}, ".999998 -.999998 0 -.69314796 1.14636009 -.45321213"),
            # TRL GRPOTrainer, scale_rewards group; OpenRLHF group_norm; AReaL reward_norm with levels group
            ("grpo", {"std_eps": 1e-4}, ".99980004 -.99980004 0 -.69309309 1.14626933 -.45317625"),
            ("grpo", {"std_eps": 1e-9}, "1 -1 0 -.69314852 1.14636101 -.45321249"),
            ("grpo", {"std_eps": 1e-5}, ".99997997 -.99997997 0 -.69314295 1.14635181 -.45320886"),
            # verl norm_adv_by_std_in_grpo False, TRL scale_rewards none, OpenRLHF dr_grpo, slime without std
            ("grpo", {"divide_std": False}, ".5 -.5 0 -.86666667 1.43333333 -.56666667"),
            ("dr_grpo", {}, ".5 -.5 0 -.86666667 1.43333333 -.56666667"),
            # verl compute_opo_, compute_gpg_, compute_grpo_passk_outcome_advantage
            ("opo", {}, ".41666667 -.58333333 -.08333333 -1.475 .825 -1.175"),
            ("gpg", {}, ".75 -.75 0 -1.3 2.15 -.85"),
            ("grpo_passk", {}, ".999998 0 0 0 1.59957222 0"),
            ("grpo_passk", {"divide_std": False}, ".5 0 0 0 2 0"),
        ],
    )
    def test_groups(self, name, options, expected):
        close(estimate(name, **options)[0], on_tokens(expected))

    def test_kl_in_the_reward_of_groups(self):
        """s includes the KL: verl's two functions above on token rewards; TRL's RLOO with beta 0.1."""
        rloo = estimate("rloo", TOKEN_REWARDS)[0]
        close(rloo, on_tokens(".7415 -.6145 -.127 -1.182 2.052 -.87"))
        grpo = estimate("grpo", TOKEN_REWARDS)[0]
        close(grpo, on_tokens("1.07954338 -.89464519 -.18489819 -.66258589 1.15027602 -.48769012"))
        # OpenRLHF compares the scores alone and then takes each token's KL to go away; slime's grpo ignores kl_coef
        differs(rloo[0], numbers(".66600002 .61900002 .67400001 .71 .791"), by=0.1)
        differs(grpo, on_tokens(".99999797 -.99999797 0 -.69314796 1.14636016 -.45321214"), by=0.1)

    def test_equal_scores_are_an_exact_0(self):
        """A float32 mean of seven times 0.1 is not 0.1: -0.0074 in verl and slime, -0.82 in OpenRLHF's group_norm."""
        scores, ones = torch.full((7,), 0.1), torch.ones(7, 1)
        estimator = advantage_fn(ADVANTAGE_ESTIMATORS["grpo"])
        got = estimator(
            token_rewards=scores[:, None], action_mask=ones, scores=scores, group_ids=torch.zeros(7)
        )[0]
        assert (got == 0).all()

    def test_groups_of_different_sizes(self):
        """slime _post_process_rewards compares all samples of the batch with each other if one is missing."""
        estimator = advantage_fn(ADVANTAGE_ESTIMATORS["grpo"])
        five = estimator(
            token_rewards=OUTCOME[:5], action_mask=MASK[:5], scores=SCORES[:5], group_ids=GROUPS[:5]
        )[0]
        # (s - mean) / (std + 1e-6) by hand
        close(five[:, 0], numbers(".999998 -.999998 0 -.70710635 .70710635"))
        differs(
            five[:, 0], numbers(".39682782 -.70547163 -.15432191 -1.03616154 1.49912727"), by=0.5
        )

    def test_remax(self):
        # verl compute_remax_outcome_advantage, which has no discount
        expected = rows("""-1.7 -1.65 -1.51 -.78 -1.05  -.17 -.14 -.07
            -.22 -.06 -.49 -.09  .25 .1  -.17 -.56 -.41 .39 .02  .29""")
        close(estimate("remax", REWARDS, gamma=1.0)[0], expected)

    def test_cpgd_of_lightrft_is_always_zero(self):
        """CPGDCalculator.compute sums the (B,) scores before it takes mean and deviation: 0 for whatever scores."""
        ours = estimate("cpgd")[0]
        close(ours, estimate("grpo")[0])
        differs(ours, 0.0, by=1.0)

    def test_normalising_inside_groups(self):
        # realhf masked_normalization per group, AReaL Normalization with levels group and std_unbiased False
        expected = rows("""-2.23899817 .4389388 -.48652467 .01558848 .15342347
            -.18131864 1.68929899 -.5948236  1.08873236 -1.13631821 .75399017 .49801093  .34743991 .90121388
            -1.95285189 .87991488 -1.00504649 -.63231403 .7095229  .75212085""")
        close(group_normalize(ADVANTAGES, MASK, GROUPS), expected, FLOAT32)

    def test_whitening(self):
        # verl, TRL masked_whiten; slime distributed_masked_whiten
        theirs = rows("""-2.24451006 .44494693 -.48449777 .01977542 .15820335  -.17797877 1.70068604 -.59326257
            1.09753576 -1.13708659 .76135363 .50427319  .3164067 .8305676
            -1.81933855 .81079218 -.9393324 -.59326257 .65258883  .69213967""")
        close(bessel(ADVANTAGES), theirs)
        shifted = whiten(ADVANTAGES, MASK, unbiased=True, shift_mean=False)
        close(shifted[0], numbers("-2.30451006 .38494693 -.54449777 -.04022458 .09820335"))
        # AReaL masked_normalization: n, and 1e-5 added to the deviation instead of 1e-8 to the variance
        areal = numbers("-2.30279541 .45650128 -.49707919 .02028895 .16231157")
        close(whiten(ADVANTAGES, MASK)[0], areal, 3e-5)
        # slime's one-pass float32 variance does not survive a common offset; ours does
        offset = bessel((ADVANTAGES + 1000).float())
        close(offset, theirs, 2e-4)
        differs(offset[0], numbers("-2.08594775 .41358876 -.45021385 .01845277 .14706126"), by=0.15)

    def test_whitening_is_over_all_ranks(self, simulate_ranks):
        def of_rank(rank: int, all_reduce_sum) -> Tensor:
            part = slice(3 * rank, 3 * rank + 3)
            return whiten(
                ADVANTAGES[part], MASK[part], unbiased=True, all_reduce_sum=all_reduce_sum
            )

        ours = torch.cat(simulate_ranks(2, of_rank))
        close(ours, bessel(ADVANTAGES))
        # TRL PPOTrainer.train whitens each rank's rows by themselves
        differs(ours[0], numbers("-2.14369853 .42025603 -.4658165 .01492498 .14689323"), by=0.1)

    def test_deviation_of_the_batch(self):
        """TRL scale_rewards="batch"."""
        advantages, _ = estimate("grpo", std_eps=1e-4, batch_std=True)
        expected = on_tokens(".58647762 -.58647762 0 -1.0165612 1.68123583 -.66467463")
        close(advantages, expected)


class TestMaskedRows:
    """Groups with a row that has no trained token, here the third of six: it is no member of its group."""

    WITHOUT_THIRD = MASK & (torch.arange(6) != 2)[:, None]

    @pytest.mark.parametrize(
        ("name", "ours", "theirs"),
        [
            # scores 1 and 0 of two rows: by hand; with the third row's 0.5 verl and OpenRLHF have the numbers above
            ("rloo", "1 -1 0", ".75 -.75 0"),
            ("dr_grpo", ".5 -.5 0", ".5 -.5 0"),
            ("grpo", ".70710578 -.70710578 0", ".999998 -.999998 0"),
        ],
    )
    def test_its_score_does_not_count(self, name, ours, theirs):
        """verl, TRL, slime and OpenRLHF compare all scores of the group; the row itself has no loss in any of them."""
        advantages = estimate(name, mask=self.WITHOUT_THIRD)[0]
        close(advantages[:3, 0], numbers(ours), FLOAT32)
        if name != "dr_grpo":  # 0.5 is the mean of the two others
            differs(advantages[:3, 0], numbers(theirs), by=0.2)

    def test_by_how_much(self):
        """Scores 0 and 4, and 100 of the masked row. OpenRLHF's reinforce_baseline, by hand: minus 104/3."""
        scores, mask = numbers("0 4 100"), numbers("1 1 0").bool()[:, None]
        arguments = {"token_rewards": scores[:, None] * mask, "action_mask": mask, "scores": scores}
        advantages = advantage_fn(ADVANTAGE_ESTIMATORS["dr_grpo"])(
            **arguments, group_ids=torch.zeros(3)
        )[0]
        close(advantages[:, 0], numbers("-2 2 0"))
        differs(advantages[:2, 0], numbers("-34.66666667 -30.66666667"), by=32)


class TestOptimalTokenBaseline:
    """verl 0.10 (1dda039b) compute_optimal_token_baseline_advantage, run with Σπ² = π² + 0.1, to its ε of 1e-8.

    It sets the baseline of the longest sample to 0 where no other one reaches (handle_zero_tail, on): there A = R.
    """

    SCORE_NORMS = 1 - 2 * LOG_PROBS.exp() + LOG_PROBS.exp().square() + 0.1
    # verl's whole output; the tails are token 5 of row 1 and tokens 3 to 5 of row 5
    TOKEN_REWARDS_THERE = """.46110333 .43820481 .46620640 .20163541 1.041  -.44289667 -.41579519 -.47779360
        -.11789667 -.10079519 -.04379360 -.31136459  -.33356943 -.89934853
        1.82243057 1.36365147 1.963 2.086 2.089  -.12556943"""
    OUTCOME_THERE = """.49485839 .48895430 .48501824 .19652574 1  -.50514161 -.51104570 -.51498176
        -.00514161 -.01104570 -.01498176 -.30347426  -.39465975 -.91405285
        1.90534025 1.38594715 2 2 2  -.09465975"""
    TAILS = rows("0 0 0 0 1  0 0 0  0 0 0 0  0 0  0 0 1 1 1  0").bool()

    @pytest.mark.parametrize("case", ["token rewards", "score at the end"])
    def test_same_number_wherever_two_samples_are(self, case):
        rewards, text = {
            "token rewards": (TOKEN_REWARDS, self.TOKEN_REWARDS_THERE),
            "score at the end": (OUTCOME, self.OUTCOME_THERE),
        }[case]
        advantages, returns = estimate(
            "optimal_token_baseline", rewards, gamma=1.0, score_norms=self.SCORE_NORMS
        )
        theirs = rows(text)
        close(advantages[~self.TAILS], theirs[~self.TAILS])
        close(advantages[self.TAILS], 0.0 * theirs[self.TAILS])
        close(theirs[self.TAILS], returns[self.TAILS])  # A = R there

    def test_holes(self):
        """verl's tir_ form, compute_multi_turn_optimal_token_baseline_advantage: a hole in rows 1, 3 and 5."""
        holes = rows("0 1 0 0 0  0 0 0  0 0 1 0  0 0  1 0 0 0 0  0").bool()
        arguments = {"gamma": 1.0, "score_norms": self.SCORE_NORMS, "mask": MASK & ~holes}
        advantages, _ = estimate("optimal_token_baseline", TOKEN_REWARDS * ~holes, **arguments)
        theirs = rows(
            """.48772501 0 .44405101 .49333744 1.041  -.47127499 -.46494899 -.48666256
            -.11327499 -.11694899 0 -.01966256  -.83520294 -1.15575395
            0 1.39079706 1.10924605 2.086 2.089  -.62720294"""
        )
        tails = rows("0 0 0 0 1  0 0 0  0 0 0 0  0 0  0 0 0 1 1  0").bool()
        close(advantages, theirs * ~tails)

    def test_weights_of_a_correction_do_not_scale_the_energy(self):
        """rollout_is_weights of .5, 1 and 2 for the three rows multiply W by their squares in verl."""
        advantages, _ = estimate(
            "optimal_token_baseline", TOKEN_REWARDS, gamma=1.0, score_norms=self.SCORE_NORMS
        )
        differs(advantages[0, :4], numbers(".65801125 .59434423 .59202326 .46784703"), by=0.1)

    def test_certain_tokens(self):
        """All probabilities are 1, so W is 0: the plain mean of the samples here; verl has no baseline, A = R."""
        advantages, returns = estimate(
            "optimal_token_baseline", OUTCOME, gamma=1.0, score_norms=torch.zeros(6, 5)
        )
        close(advantages[:3, 0], numbers(".5 -.5 0"))
        close(returns[:3, 0], numbers("1 0 .5"))  # what verl gives


class TestKL:
    K1 = "-.47 .55 .36 .81 -.41  .03 -.35 .2  -.07 .84 .33 .53  -.37 .02  .7 .02 1.23 .03 -.89  .57"
    K3 = """.12999419 .12694981 .05767633 .25485807 .09681779  .00044553 .06906755 .01873075
        .00250818 .27171052 .04892373 .11860497  .07773461 .00019867
        .1965853 .00019867 .52229258 .00044553 .54512965  .13552544"""

    @pytest.mark.parametrize("name", ["k1", "abs", "k2", "k3", "k1+", "k3+"])
    def test_estimators(self, name):
        """verl kl_penalty; k1 to k3 also OpenRLHF, AReaL and slime; k1 and k3 also TRL."""
        k1 = rows(self.K1)
        values = {"k1": k1, "abs": k1.abs(), "k2": k1.square() / 2, "k3": rows(self.K3)}
        log_probs = LOG_PROBS.clone().requires_grad_()
        kl = approx_kl(log_probs, REFERENCE, name)
        close(kl.detach(), values[name.rstrip("+")])
        if name.endswith("+"):  # the gradient is that of k2
            close(torch.autograd.grad(kl.sum(), log_probs)[0], k1)

    def test_output_clip(self):
        """verl's k3 and all estimators of OpenRLHF and AReaL are clipped to ±10; slime's k3 and TRL's are not."""
        far, reference = torch.tensor([[-5.0, -13.5]]), torch.tensor([[-1.0, -1.0]])
        close(approx_kl(far, reference, "k3", clip=10.0)[0, 0], 10.0)
        close(approx_kl(far, reference, "k1", clip=10.0)[0, 1], -10.0)
        close(approx_kl(far, reference, "k3")[0, 0], 49.5981, 1e-4)  # e⁴ - 5

    def test_adaptive_coefficient(self):
        """verl, OpenRLHF and realhf AdaptiveKLController: init .2, target 6, horizon 10000, 512 samples."""
        controller = AdaptiveKLController(0.2, 6.0, 10_000)
        for kl, expected in (
            (7.0, 0.20170666666666667),
            (2.0, 0.1996411904),
            (6.6, 0.200663353294848),
        ):
            controller.update(kl, 512)
            assert controller.value == pytest.approx(expected, rel=1e-12)

    def test_adaptive_coefficient_rises_with_the_kl(self):
        """realhf feeds the mean of -coef·KL: with a KL above the target its coefficient falls to 0.197952."""
        controller = AdaptiveKLController(0.2, 6.0, 10_000)
        controller.update(7.0, 512)
        assert controller.value > 0.2


class TestShaping:
    def test_token_rewards(self):
        """verl apply_kl_penalty, AReaL _compute_advantages; OpenRLHF compute_reward and realhf clip scores first."""
        expected = """.047 -.055 -.036 -.081 1.041  -.003 .035 -.02  .007 -.084 -.033 .447  .037 -.302
            -.07 -.002 -.123 -.003 2.089  -.057"""
        close(TOKEN_REWARDS, rows(expected))
        kl = approx_kl(LOG_PROBS, REFERENCE, "k1")
        clipped = compute_token_rewards(SCORES.clamp(-1.0, 1.0), MASK, kl=kl, kl_coef=0.1)
        close(clipped, rows(expected.replace("2.089", "1.089")))
        # OpenRLHF clips after the baseline is subtracted; here scores are clipped first
        ours = estimate("rloo", compute_token_rewards(SCORES.clamp(-1.0, 1.0), MASK))[0][:, 0]
        close(ours, numbers(".75 -.75 0 -.8 1.15 -.35"))  # by hand: clipped scores 1 0 .5 -.3 1 0
        differs(ours, numbers(".75 -.75 0 -1 1 -.85"), by=0.2)

    def test_truncated_answers_score_zero(self):
        """realhf get_packed_rewards with mask_no_eos_with_zero, max_reward_clip 1.5; rows 2 and 4 truncated."""
        truncated = torch.tensor([0, 0, 1, 0, 1, 0], dtype=torch.bool)
        scores = zero_truncated(scale_scores(SCORES, max_clip=1.5), truncated)
        rewards = compute_token_rewards(
            scores, MASK, kl=approx_kl(LOG_PROBS, REFERENCE), kl_coef=0.1
        )
        expected = rows("""0 0 0 0 0  0 0 0  .007 -.084 -.033 -.053  .037 -.302
            -.07 -.002 -.123 -.003 .089  0""")[2:5]
        close(rewards[2:5], expected)

    def test_scaling(self):
        """AReaL _compute_advantages with reward_bias -.5, which it adds; realhf subtracts, as we do."""
        close(
            scale_scores(SCORES, bias=0.5, scaling=2.0, max_clip=1.5), numbers("1 -1 0 -1.5 1.5 -1")
        )

    def test_overlong(self):
        """OpenRLHF apply_overlong_penalty; verl DAPORewardManager and AReaL go on to -2 at 120 of 100 tokens."""
        ours = overlong_penalty(
            torch.tensor([80, 84, 90, 100, 120, 10]), max_len=100, buffer_len=20, factor=1.0
        )
        close(ours, numbers("0 -.2 -.5 -1 -1 0"), FLOAT32)
        differs(ours, numbers("0 -.2 -.5 -1 -2 0"), by=1.0)

    def test_overlong_of_areal(self):
        """AReaL reward_overlong_penalty counts trained tokens alone, and is scaled and clipped with the score.

        100 tokens, 10 of them a tool's, score 1, --reward_scaling 3: by hand 3 - 1 here, 3·(1 - .5) there.
        """
        options = {"generate_max_len": 100, "overlong_buffer_len": 20, "reward_scaling": 3.0}
        shaper = ScoreShaper(PPOConfig.from_flat(options).resolved(), FakeStrategy())
        ours = shaper.shape([make_rollout(response_ids=[7] * 100, reward=1.0)])
        close(ours, numbers("2"))
        differs(ours, numbers("1.5"), by=0.4)

    def test_stop_properly(self):
        """OpenRLHF apply_stop_properly_penalty; but no truncated answer gains: -.3 stays -.3 and is not halved."""
        truncated = torch.tensor([0, 1, 0, 1, 0, 1], dtype=torch.bool)
        close(stop_properly(SCORES, truncated, -0.5), numbers("1 -.5 .5 -.5 2 -.5"))
        ours = stop_properly(SCORES, truncated, 0.5)
        close(ours, numbers("1 0 .5 -.3 2 0"))
        differs(ours, numbers("1 0 .5 -.15 2 0"), by=0.1)

    @pytest.mark.parametrize(
        ("delta", "expected"),
        [
            (
                False,
                "-.003 -.195 -.766 .189 -.609  -.033 -.035 .31  -.153 .346 -.433 .257  .187 -.002",
            ),
            (
                True,
                "-.003 -.145 -.626 .919 -.879  -.033 -.005 .38  -.153 .506 -.863 .657  .187 -.152",
            ),
        ],
    )
    def test_dense_rewards(self, delta, expected):
        """realhf get_packed_reward_dense, where the score before the first token is 0; the first four rows."""
        kl, nothing = approx_kl(LOG_PROBS, REFERENCE), torch.zeros(6, dtype=torch.float64)
        dense = dense_rewards(REWARDS, MASK, delta)
        close(
            compute_token_rewards(nothing, MASK, kl=kl, kl_coef=0.1, token_scores=dense)[:4][
                MASK[:4]
            ],
            numbers(expected),
        )


class TestValueNorm:
    @pytest.mark.parametrize(
        ("kind", "beta", "mean", "std"),
        [
            ("exp", 0.9, 0.25947368421052625, 0.5593744032324768),
            ("exp", 0.99995, 0.2694952373811928, 0.5650060075043603),
            ("ma", 0.99995, 0.2695, 0.5650086282527019),
        ],
    )
    def test_statistics_of_two_updates(self, kind, beta, mean, std):
        """realhf ExponentialRunningMeanStd and MovingAverageRunningMeanStd; after one update .46 and .63356136."""
        norm = ValueNorm(kind, beta)
        # realhf: 0.1 before the first update
        assert norm.denormalize(torch.tensor([1.0])).item() == 1.0
        norm.update(RETURNS, MASK)
        close(norm.mean, 0.46)
        close(
            norm.normalize(RETURNS)[0],
            numbers("-.25254065 -.41037858 -1.35740602 .22097307 .85232472"),
            FLOAT32,
        )
        norm.update(VALUES, MASK)
        close(torch.tensor([norm.mean, norm.std]), torch.tensor([mean, std]))
