"""ExperienceMaker: what the options of the algorithm make of samples. The numbers themselves are the algorithms'."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from support.fakes import FakeStrategy, make_rollout, on_ranks
from support.tables import answer, approx, make_one, maker
from support.whole_step import PolicyLoss
from torch import Tensor

from lightppo.algorithms.advantages import advantage_fn
from lightppo.algorithms.entries import ADVANTAGE_ESTIMATORS, CORRECTIONS
from lightppo.data.records import Rollout
from lightppo.errors import ConfigError, NonFiniteError
from lightppo.experience.batching import ReplayBuffer
from lightppo.experience.experience import Experience
from lightppo.experience.normalisation import ValueNorm
from lightppo.models.actor import ActionScores

# The table policy's log probs of ids 10, 20, 30 are -1, -2, -3; the engine's here differ.
ENGINE = [-1.0, -2.7, -3.7]  # π_old / π_rollout = 1, e^0.7 ≈ 2.01, e^0.7


def group(*rewards: float, index: int = 0, **fields) -> list[Rollout]:
    """Samples of one prompt: the response 10 20 30 each."""
    return [
        answer(reward, sample_index=i, index=index, **fields) for i, reward in enumerate(rewards)
    ]


class EntropyPolicy(torch.nn.Module):
    """Log prob -1 everywhere; the entropy is 1/10 of the id, the logits a table of two tokens."""

    temperature = 1.0

    def __init__(self, logits: tuple[float, float] = (0.0, 0.0)) -> None:
        super().__init__()
        self.row = torch.tensor(logits)

    def score_actions(
        self, sequences: Tensor, num_actions: int, attention_mask: Tensor, **_: bool
    ) -> ActionScores:
        actions, real = sequences[:, -num_actions:], attention_mask[:, -num_actions:].bool()
        entropy = (actions / 10).masked_fill(~real, 0.0)
        return ActionScores(-real.float(), real, entropy, self.row.expand(int(real.sum()), 2))


class TestGroups:
    def test_normalised_inside_each_group(self):
        options = {
            "n_samples_per_prompt": 2,
            "adv_norm": True,
            "adv_norm_scope": "group",
        }
        rollouts = group(0.0, 2.0) + group(5.0, 9.0, index=1)
        (plain,) = maker(
            coef=0.0, critic=False, advantage_estimator="reinforce"
        ).make_experience_list(rollouts)
        assert plain.advantages[:, 0].tolist() == [0, 2, 5, 9]
        (got,) = maker(
            coef=0.0, critic=False, advantage_estimator="reinforce", **options
        ).make_experience_list(rollouts)
        # every token of a group holds one of two numbers: (x - mean)/(σ + 1e-5)
        first, second = 1 / (1 + 1e-5), 2 / (2 + 1e-5)
        assert got.advantages[:, 0] == approx([-first, first, -second, second])

    def test_without_the_standard_deviation_grpo_is_dr_grpo(self):
        options = {"coef": 0.0, "critic": False, "n_samples_per_prompt": 3}
        without = maker(advantage_estimator="grpo", group_std_norm=False, **options)
        dr_grpo = maker(advantage_estimator="dr_grpo", **options)
        rollouts = group(0.0, 1.0, 5.0)
        assert torch.equal(
            make_one(without, *rollouts).advantages, make_one(dr_grpo, *rollouts).advantages
        )

    def test_the_greedy_baseline_is_shaped_like_the_scores(self):
        rollouts = group(3.0, 9.0)
        for rollout in rollouts:
            rollout.baseline = answer(5.0)
        options = {
            "coef": 0.0,
            "critic": False,
            "reward_scaling": 2.0,
            "reward_clip_range": (0.0, 12.0),
        }
        experience = make_one(maker(advantage_estimator="remax", **options), *rollouts)
        # scores 6 and 12 (18 clipped), baseline 10
        assert experience.advantages[:, 0] == approx([-4.0, 2.0])
        assert experience.info["reward/greedy_baseline"].tolist() == [5, 5]


ESTIMATORS_OVER_STD = [
    name
    for name, entry in ADVANTAGE_ESTIMATORS.items()
    if entry.kl_in_loss and not entry.ignores_scores
]


@pytest.mark.parametrize("name", ESTIMATORS_OVER_STD)
def test_equal_scores_give_no_advantage_unless_the_kl_is_asked_into_the_reward(name):
    """The KL of the two answers differs; divided by their deviation, its noise is as large as any score."""
    rollouts = [answer(1.0), make_rollout([40, 50], [10, 10, 10], reward=1.0, sample_index=1)]
    options = {"coef": 0.1, "critic": False, "advantage_estimator": name, "n_samples_per_prompt": 2}
    experience = make_one(maker(**options, old_log_probs="forward"), *rollouts)
    assert experience.advantages.tolist() == [[0.0] * 3] * 2
    asked = make_one(maker(**options, use_kl_in_reward=True), *rollouts)
    assert asked.advantages.abs().max() > 0.5


class TestTruncatedAnswers:
    def test_masked_ones_leave_mask_and_group(self):
        cut = answer(100.0, sample_index=2, finish_reason="length")
        options = {
            "coef": 0.0,
            "critic": False,
            "advantage_estimator": "dr_grpo",
            "n_samples_per_prompt": 3,
        }
        experience = make_one(maker(mask_too_long=True, **options), *group(0.0, 4.0), cut)
        assert experience.action_mask.any(1).tolist() == [True, True, False]
        assert experience.advantages[:, 0] == approx([-2.0, 2.0, 0.0])
        assert experience.info["reward"].tolist() == [0, 4, 100]  # logged as it is

    def test_masked_and_zero_as_in_areal(self):
        """The score of a cut answer is 0 where it is still looked at; it is trained on neither way."""
        cut = answer(100.0, sample_index=2, finish_reason="length")
        options = {
            "coef": 0.0,
            "critic": False,
            "advantage_estimator": "dr_grpo",
            "n_samples_per_prompt": 3,
        }
        both = maker(mask_too_long=True, mask_no_eos_with_zero=True, **options)
        experience = make_one(both, *group(0.0, 4.0), cut)
        assert experience.action_mask.any(1).tolist() == [True, True, False]
        assert experience.advantages[:, 0] == approx([-2.0, 2.0, 0.0])
        assert both.shaper.shape([cut]).tolist() == [0.0]
        assert maker(mask_too_long=True, **options).shaper.shape([cut]).tolist() == [100.0]

    def test_score_zero_but_the_kl_counts(self):
        experience = make_one(maker(mask_no_eos_with_zero=True), answer(finish_reason="length"))
        assert experience.info["return"] == approx([0.0])  # -0.1·(0.5 + 0 - 0.5)
        experience = make_one(
            maker(mask_no_eos_with_zero=True, coef=1.0, kl_estimator="k2"),
            answer(finish_reason="length"),
        )
        assert experience.info["return"] == approx([-0.25])

    def test_overlong_penalty_is_logged(self):
        options = {
            "generate_max_len": 4,
            "overlong_buffer_len": 2,
            "overlong_penalty_factor": 3.0,
            "coef": 0.0,
        }
        experience = make_one(
            maker(**options), answer(2.0), make_rollout([50], [10], reward=2.0, index=1)
        )
        # 3 tokens, 1 beyond 4 - 2: -(1/2)·3
        assert experience.info["reward/overlong_reward"] == approx([-1.5, 0])
        assert experience.info["reward/overlong"].tolist() == [1, 0]
        assert experience.info["return"] == approx([0.5, 2.0])


def test_dense_rewards():
    rollout = answer(7.0, token_rewards=[1.0, 1.5, 0.5])
    options = {"coef": 0.0, "critic": False, "advantage_estimator": "reinforce"}
    experience = make_one(maker(use_dense_reward=True, **options), rollout)
    assert experience.advantages == approx([[3.0, 2.0, 0.5]])  # rewards to go
    experience = make_one(maker(use_dense_reward=True, reward_delta=True, **options), rollout)
    assert experience.advantages == approx([[0.5, -0.5, -1.0]])  # of 1, 0.5, -1


class TestLossWeights:
    def weights(self, *rollouts: Rollout, **options) -> Tensor:
        return make_one(maker(**options), *(rollouts or [answer(log_probs=ENGINE)])).loss_weights

    def test_truncated_importance_sampling(self):
        assert self.weights(rollout_correction="tis", correction_high=1.5) == approx(
            [[1.0, 1.5, 1.5]]
        )

    def test_tokens_below_the_lower_bound_are_left_out(self):
        assert self.weights(rollout_correction="icepop")[0, 0] == 1
        assert self.weights(rollout_correction="icepop", correction_low=1.2)[0, 0] == 0

    def test_veto(self):
        assert self.weights(rollout_correction="icepop", correction_veto=0.99).tolist()[0][1:] != [
            0,
            0,
        ]
        sharp = answer(log_probs=[-0.2, -2.7, -3.7])  # the first ratio is e^-0.8 = 0.45
        assert self.weights(sharp, rollout_correction="tis", correction_veto=0.5).tolist() == [
            [0, 0, 0]
        ]

    def test_batch_norm_is_over_all_ranks(self):
        rollouts = [answer(log_probs=ENGINE), answer(log_probs=[-1.0, -2.0, -3.0], index=1)]
        options = {
            "rollout_correction": "tis",
            "correction_high": 4.0,
            "correction_batch_norm": True,
        }

        def on_rank(strategy: FakeStrategy) -> Tensor:
            return make_one(maker(strategy, **options), rollouts[strategy.rank]).loss_weights

        whole = make_one(maker(**options), *rollouts).loss_weights
        assert whole.mean() == pytest.approx(1.0)
        torch.testing.assert_close(torch.cat(on_ranks(2, on_rank)), whole)

    def test_an_engine_without_log_probs_cannot_be_corrected(self):
        with pytest.raises(
            ValueError, match="--rollout_correction tis needs the log probs of the rollout engine"
        ):
            self.weights(answer(), rollout_correction="tis")

    def test_only_the_tokens_of_high_entropy(self):
        experience_maker = maker(high_entropy_token_ratio=0.5, reference=False, init_kl_coef=0.0)
        experience_maker.actor = EntropyPolicy()
        long, short = answer(), make_rollout([50], [40], reward=0.0, index=1)
        # entropies 1, 2, 3 and 4: the upper half of all
        assert make_one(experience_maker, long, short).loss_weights.tolist() == [
            [0, 0, 1],
            [1, 0, 0],
        ]

    def test_both_together(self):
        options = {
            "high_entropy_token_ratio": 0.5,
            "rollout_correction": "tis",
            "correction_high": 9.0,
        }
        experience_maker = maker(reference=False, init_kl_coef=0.0, **options)
        experience_maker.actor = EntropyPolicy()
        weights = make_one(experience_maker, answer(log_probs=[-2.0, -2.0, -2.0])).loss_weights
        assert weights == approx([[0.0, 2.718282, 2.718282]])  # e^1; ceil(0.5·3) = 2 tokens

    def test_none_without_either(self):
        assert self.weights() is None


class TestValueNorm:
    def test_values_leave_the_critic_normalised_and_the_statistics_take_the_returns_in(self):
        value_norm = ValueNorm("ma")
        value_norm.update(torch.tensor([[2.0, 4.0]]), torch.ones(1, 2))  # mean 3, std 1
        experience_maker = maker(coef=0.0, value_norm="ma", bootstrap_truncated=True)
        experience_maker.value_norm = value_norm
        experience = make_one(experience_maker, answer(2.0, finish_reason="length"))
        # the critic says 0.5, 0.1, 0.2 and 0.3 after the last token
        assert experience.values == approx([[3.5, 3.1, 3.2]])
        # A2 = 2 + 3.3 - 3.2 = 2.1; A1 = 0.1 + 0.5·2.1 = 1.15; A0 = -0.4 + 0.575
        assert experience.advantages == approx([[0.175, 1.15, 2.1]])
        # returns 3.675, 4.25, 5.3 are in; the old statistics bring the critic's own numbers back
        assert value_norm.mean == pytest.approx((2 + 4 + 3.675 + 4.25 + 5.3) / 5)
        assert value_norm.normalize_old(experience.values) == approx([[0.5, 0.1, 0.2]])

    def test_the_statistics_are_of_all_ranks(self):
        def on_rank(strategy: FakeStrategy) -> tuple[float, float]:
            experience_maker = maker(strategy, coef=0.0, value_norm="ma", gamma=1.0, lambd=1.0)
            experience_maker.value_norm = ValueNorm("ma")
            make_one(experience_maker, answer([2.0, 6.0][strategy.rank], index=strategy.rank))
            return experience_maker.value_norm.mean, experience_maker.value_norm.std

        # λ = 1: the return of each of the three tokens is the score, 2 on one rank and 6 on the other
        assert on_ranks(2, on_rank) == [(pytest.approx(4.0), pytest.approx(2.0))] * 2


class TestFullKL:
    def make(self, **options) -> Experience:
        experience_maker = maker(kl_estimator="full", coef=0.1, **options)
        # p = (3/4, 1/4), q = (1/2, 1/2): KL = 0.75·ln 1.5 + 0.25·ln 0.5 = 0.130812
        experience_maker.actor = EntropyPolicy((float(torch.tensor(3.0).log()), 0.0))
        experience_maker.initial_model = EntropyPolicy()
        return make_one(
            experience_maker, answer(0.0), make_rollout([50], [10], reward=0.0, index=1)
        )

    def test_in_the_reward(self):
        experience = self.make()
        assert experience.kl == approx([[0.130812] * 3, [0.130812, 0, 0]])
        assert experience.info["return"] == approx([-0.0392436, -0.0130812])

    def test_clipped(self):
        assert self.make(kl_clip=0.1).kl == approx([[0.1] * 3, [0.1, 0, 0]])

    def test_as_a_loss_the_log_holds_k1(self):
        experience = self.make(use_kl_loss=True)
        assert experience.kl == approx([[0.0] * 3, [0.0, 0, 0]])  # both tables say -1


class TestOnPolicyShortcut:
    def test_the_actor_does_not_run(self):
        options = {"rollout_batch_size": 1, "train_batch_size": 1, "use_kl_loss": True}
        experience_maker = maker(**options)
        experience = make_one(experience_maker)
        assert experience_maker.actor.calls == []
        assert experience.action_log_probs is None
        assert experience.kl is None
        assert experience.base_action_log_probs.tolist() == [[-1.5, -2.0, -2.5]]
        recomputed = make_one(maker(**options, old_log_probs="forward"))
        assert recomputed.action_log_probs.tolist() == [[-1, -2, -3]]
        assert torch.equal(experience.advantages, recomputed.advantages)


class TestRejections:
    """ENGINE: d = 0, 0.7, 0.7."""

    def weights(self, *texts: str, **options) -> Tensor | None:
        return make_one(
            maker(rollout_rejection=texts, **options), answer(log_probs=ENGINE)
        ).loss_weights

    def test_masks_without_weights_and_with_them(self):
        assert self.weights("token_ratio=0.5:2").tolist() == [[1, 0, 0]]
        assert self.weights("seq_mean_ratio=0.5:2").tolist() == [[1, 1, 1]]  # e^(1.4/3) = 1.59
        assert self.weights("seq_mean_ratio=0.5:2", "token_k2=0.2").tolist() == [[1, 0, 0]]
        both = self.weights("seq_sum_k2=0.5", rollout_correction="tis", correction_high=1.5)
        assert both == approx([[1.0, 1.5, 1.5]])  # 2 · 0.245

    def test_in_training_there_is_nothing_to_do_before(self):
        assert self.weights("opsm=0.1") is None
        assert self.weights("token_ratio=0.5:2", old_log_probs="rollout") is None

    def test_all_ranks_decide_together(self):
        """d² of two ranks: 0, .49, .49 and 0, 0, 4: means 0 0 0 .1225 .196 .83."""
        other = [-1.0, -2.0, -5.0]

        def on_rank(strategy: FakeStrategy) -> list:
            rollout = answer(log_probs=[ENGINE, other][strategy.rank], index=strategy.rank)
            return make_one(
                maker(strategy, rollout_rejection=["m2po=0.2"]), rollout
            ).loss_weights.tolist()

        assert on_ranks(2, on_rank) == [[[1, 1, 1]], [[1, 1, 0]]]

    def test_without_log_probs_of_the_engine(self):
        with pytest.raises(
            ValueError,
            match=r"--rollout_rejection opsm=0.1 needs the log probs of the rollout engine",
        ):
            make_one(maker(rollout_rejection=["opsm=0.1"]), answer())


def test_the_optimal_token_baseline_gets_the_norms_of_a_pass():
    """Two logits of 0: Σπ² = 1/2, so ‖∇ log π‖² = 1.5 - 2π: of ids 10, 20, 30 with π = e^-1, e^-2, e^-3."""
    first, second = answer(3.0), make_rollout([40, 50], [20], reward=1.0, sample_index=1)
    options = {
        "advantage_estimator": "optimal_token_baseline",
        "n_samples_per_prompt": 2,
        "coef": 0.0,
        "critic": False,
    }
    experience = make_one(maker(**options), first, second)
    w0, w1 = 1.5 - 2 * math.exp(-1), 1.5 - 2 * math.exp(-2)
    baseline = (3 * w0 + 1 * w1) / (w0 + w1)
    assert experience.advantages == approx([[3 - baseline, 0, 0], [1 - baseline, 0, 0]])


def test_the_norms_are_of_the_distribution_that_was_sampled_from():
    """Logits ln 4 and 0 at temperature 2: π = (2/3, 1/3), Σπ² = 5/9, and ‖∇ log π‖² = 1 + 5/9 - 2π with π = e^-1."""
    experience_maker = maker(
        advantage_estimator="optimal_token_baseline",
        n_samples_per_prompt=2,
        coef=0.0,
        critic=False,
        reference=False,
    )
    experience_maker.actor = EntropyPolicy((math.log(4.0), 0.0))
    experience_maker.actor.temperature = 2.0
    batch = Experience.from_rollouts(group(1.0, 0.0))
    norms = experience_maker.run_models(batch)["score_norms"]
    assert norms == approx([[14 / 9 - 2 * math.exp(-1)] * 3] * 2)


def test_numbers_that_are_not_finite_on_one_rank_stop_all_ranks():
    def on_rank(strategy: FakeStrategy) -> str:
        experience_maker = maker(
            strategy, coef=0.0, critic=False, reference=False, advantage_estimator="reinforce"
        )
        if strategy.rank == 1:
            with torch.no_grad():
                experience_maker.actor.table[20] = -math.inf
        with pytest.raises(NonFiniteError) as stopped:
            make_one(experience_maker)
        return str(stopped.value)

    first, second = on_ranks(2, on_rank)
    assert first == second
    assert "rank 1" in first
    assert "action_log_probs" in first


def test_tokens_of_high_entropy_are_those_of_all_ranks():
    """Entropies 1, 2, 3 and 4, 5, 6: the upper half is the second rank's."""

    def on_rank(strategy: FakeStrategy) -> list:
        experience_maker = maker(
            strategy, high_entropy_token_ratio=0.5, reference=False, init_kl_coef=0.0
        )
        experience_maker.actor = EntropyPolicy()
        response = [[10, 20, 30], [40, 50, 60]][strategy.rank]
        rollout = make_rollout([50], response, reward=1.0, index=strategy.rank)
        return make_one(experience_maker, rollout).loss_weights.tolist()

    assert on_ranks(2, on_rank) == [[[0, 0, 0]], [[1, 1, 1]]]


def test_tokens_are_selected_with_a_seed_of_the_run_and_of_the_step():
    options = {"clip_cov_ratio": 0.1, "clip_cov_low": -9.0, "clip_cov_high": 9.0}
    loss = PolicyLoss(policy_loss="clip_cov", options=options)

    def selected(seed: int, step: int) -> list:
        experience_maker = maker(seed=seed, coef=0.0, critic=False, reference=False)
        buffer = ReplayBuffer()
        for index in range(30):
            experience = Experience.from_rollouts(
                [make_rollout([index + 1], [10, 20], reward=1.0, index=index)]
            )
            experience.action_log_probs = torch.tensor([[-1.0, -2.0 - 0.01 * index]])
            experience.advantages = torch.tensor([[1.0, 0.5]])
            buffer.append(experience)
        experience_maker.normalize(buffer, loss, step)
        return [item.selected.tolist() for item in buffer.items]

    assert selected(seed=1, step=1) == selected(seed=1, step=1)
    assert selected(seed=1, step=1) != selected(seed=1, step=2)
    assert selected(seed=1, step=1) != selected(seed=2, step=1)


def test_the_deviation_of_the_batch_is_of_all_ranks():
    options = {
        "advantage_estimator": "grpo",
        "n_samples_per_prompt": 2,
        "coef": 0.0,
        "critic": False,
    }
    options |= {"grpo_std_scope": "batch", "grpo_std_eps": 0.0}

    def on_rank(strategy: FakeStrategy) -> list:
        rollouts = group(0.0, 2.0) if strategy.rank == 0 else group(6.0, 6.0, index=1)
        (got,) = maker(strategy, **options).make_experience_list(rollouts)
        return got.advantages[:, 0].tolist()

    # mean 3.5, squares 27, deviation 3
    assert on_ranks(2, on_rank) == [pytest.approx([-1 / 3, 1 / 3]), [0, 0]]


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
def test_a_rank_without_samples_goes_along_with_every_estimator(name):
    """Two ranks, one without samples: no hang, and the other has what it would have alone."""
    options = {"advantage_estimator": name, "n_samples_per_prompt": 2, "coef": 0.1, "teacher": True}
    options |= {
        "reward_running_norm": True,
        "rollout_correction": "tis",
        "correction_batch_norm": True,
    }
    options |= (
        {"critic": False} if not ADVANTAGE_ESTIMATORS[name].needs_critic else {"value_norm": "exp"}
    )

    def rollouts() -> list[Rollout]:
        both = group(0.0, 3.0, log_probs=ENGINE)
        if ADVANTAGE_ESTIMATORS[name].needs_greedy_baseline:
            for rollout in both:
                rollout.baseline = answer(1.0)
        return both

    def on_rank(strategy: FakeStrategy) -> list[Experience]:
        return maker(strategy, **options).make_experience_list(
            rollouts() if strategy.rank == 1 else []
        )

    nothing, (got,) = on_ranks(2, on_rank)
    alone = make_one(maker(**options), *rollouts())
    assert nothing == []
    for field in ("advantages", "returns", "loss_weights", "kl"):
        torch.testing.assert_close(getattr(got, field), getattr(alone, field))
    assert got.advantages.abs().sum() > 0


@pytest.mark.parametrize("name", CORRECTIONS)
def test_every_correction_runs(name):
    experience = make_one(maker(rollout_correction=name), answer(log_probs=ENGINE))
    assert (experience.loss_weights is None) == (name == "none")
    assert SimpleNamespace(reward=experience.info["reward"]).reward.tolist() == [2.0]


OWN_ESTIMATOR = """
from lightppo.algorithms.entries import estimator

"""
OF_SAMPLES = "@estimator(per_sample=True)\ndef mine(groups, **_): return "
OF_TOKENS = "def mine(*, token_rewards, action_mask, **_): return "


def estimated(tmp_path, code: str, name: str = "mine.py") -> tuple[Tensor, Tensor]:
    path = tmp_path / name
    path.write_text(f"{OWN_ESTIMATOR}{code}\n")
    mask = torch.ones(4, 3, dtype=torch.bool)
    estimator = advantage_fn(ADVANTAGE_ESTIMATORS.find(f"{path}:mine"))
    return estimator(
        token_rewards=torch.ones(4, 3),
        action_mask=mask,
        scores=torch.ones(4),
        group_ids=torch.tensor([7, 7, 8, 8]),
        gamma=1.0,
    )


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (
            f"{OF_SAMPLES}groups.advantage.mean()",
            "must return advantages of shape (4,), one per sample, not ()",
        ),
        (
            f"{OF_SAMPLES}(groups.advantage, groups.advantage)",
            "must return advantages, a tensor of shape (4,), one per sample, not tuple",
        ),
        (
            f"{OF_SAMPLES}None",
            "must return advantages, a tensor of shape (4,), one per sample, not None",
        ),
        (
            f"{OF_SAMPLES}groups.scores.long()",
            "must return advantages as floating point numbers, not torch.int64",
        ),
        (f"{OF_TOKENS}token_rewards", "must return a pair (advantages, returns), not Tensor"),
        (
            f"{OF_TOKENS}(token_rewards.sum(1), token_rewards)",
            "must return advantages of shape (4, 3), one number per token, not (4,)",
        ),
        (
            f"{OF_TOKENS}(token_rewards, None)",
            "must return returns, a tensor of shape (4, 3), one number per token, not None",
        ),
        (
            f"{OF_TOKENS}(token_rewards.requires_grad_(), token_rewards)",
            "returns advantages with a gradient: compute them under torch.no_grad()",
        ),
        (
            "def mine(groups, **_): return groups.advantage",
            "cannot be called: mine() missing 1 required positional argument: 'groups'; it is "
            "called with token_rewards, action_mask and others by name: take the rest as **_. For a "
            "function of ScoreGroups, write @estimator(per_sample=True)",
        ),
        (
            "def mine(token_rewards, action_mask): return token_rewards",
            "cannot be called: mine() got an unexpected keyword argument 'scores'; it is called with",
        ),
        (
            "@estimator(per_sample=True)\ndef mine(groups): return groups.advantage",
            "cannot be called: mine() got an unexpected keyword argument 'gamma'; it is called with ScoreGroups",
        ),
    ],
)
def test_what_an_estimator_of_the_users_gives_is_looked_at(tmp_path, code, says):
    with pytest.raises(ConfigError) as caught:
        estimated(tmp_path, code)
    assert str(caught.value).startswith(f"--advantage_estimator: mine ({tmp_path / 'mine.py'}:4) ")
    assert says in str(caught.value)


def test_an_estimator_without_brackets_is_refused_before_it_is_run(tmp_path):
    with pytest.raises(ConfigError, match=r"mine.py:4: write @estimator\(\) with brackets"):
        estimated(tmp_path, "@estimator\ndef mine(groups, **_): return groups.advantage")


def test_right_estimators_of_the_users(tmp_path):
    advantages, _ = estimated(tmp_path, f"{OF_SAMPLES}groups.scores * 2")
    assert advantages.tolist() == [[2.0] * 3] * 4
    advantages, returns = estimated(
        tmp_path, f"{OF_TOKENS}(token_rewards, token_rewards)", "other.py"
    )
    assert advantages.tolist() == returns.tolist() == [[1.0] * 3] * 4
