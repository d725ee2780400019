"""ExperienceMaker against numbers worked out by hand; the models are tables of numbers per token."""

from __future__ import annotations

import pytest
import torch
from support.fakes import FakeStrategy, make_rollout, on_ranks
from support.tables import answer, approx, make_one, maker

from lightppo.experience.experience import Experience


def test_gae_with_kl_in_the_reward():
    experience = make_one(maker())
    assert experience.action_log_probs.tolist() == [[-1, -2, -3]]
    assert experience.base_action_log_probs.tolist() == [[-1.5, -2, -2.5]]
    assert experience.values == approx([[0.5, 0.1, 0.2]])
    assert experience.kl == approx([[0.5, 0.0, -0.5]])  # k1
    # Token rewards: -0.1·kl, the score 2 on the last token: -0.05, 0, 0.05 + 2.
    # δ2 = 2.05 - 0.2 = 1.85            A2 = 1.85
    # δ1 = 0 + 0.2 - 0.1 = 0.1          A1 = 0.1 + 0.5·1.85 = 1.025
    # δ0 = -0.05 + 0.1 - 0.5 = -0.45    A0 = -0.45 + 0.5·1.025 = 0.0625
    assert experience.advantages == approx([[0.0625, 1.025, 1.85]])
    assert experience.returns == approx([[0.5625, 1.125, 2.05]])  # A + V
    assert experience.info["reward"].tolist() == [2]
    assert experience.info["return"] == approx([2.0])  # -0.05 + 0 + 2.05
    assert experience.info["kl"] == approx([0.0])


@pytest.mark.parametrize(
    ("finish", "bootstrap", "expected"),
    [
        # The value after the last token, 0.3: δ2 = 2.05 + 0.3 - 0.2 = 2.15, A1 = 0.1 + 1.075, A0 = -0.45 + 0.5875
        ("length", True, [0.1375, 1.175, 2.15]),
        ("stop", True, [0.0625, 1.025, 1.85]),
        ("length", False, [0.0625, 1.025, 1.85]),
    ],
)
def test_only_truncated_answers_bootstrap_and_only_if_asked_to(finish, bootstrap, expected):
    experience = make_one(maker(bootstrap_truncated=bootstrap), answer(finish_reason=finish))
    assert experience.advantages == approx([expected])


def test_bootstrap_value_is_the_one_behind_a_short_response():
    """In a batch with a longer response: the value after the last token, not after the padding."""
    short = make_rollout([50], [20], reward=0.0, finish_reason="length", index=1)
    experience = make_one(
        maker(bootstrap_truncated=True, coef=0.0), answer(finish_reason="length"), short
    )
    # V before = 50/100, after = 20/100: A = 0 + 0.2 - 0.5
    assert experience.advantages[1] == approx([-0.3, 0, 0])
    assert experience.returns[1] == approx([0.2, 0, 0])


def test_scores_are_clipped_for_training_and_logged_as_they_were():
    low, high = answer(-7.0), answer(9.0, index=1)
    experience = make_one(maker(reward_clip_range=(-1.0, 4.0), coef=0.0), low, high)
    assert experience.info["reward"].tolist() == [-7, 9]
    assert experience.info["return"].tolist() == [-1, 4]
    # A2 = score - 0.2
    assert experience.advantages[:, 2] == approx([-1.2, 3.8])
    assert experience.info["reward_clip_ratio"].tolist() == [1, 1]
    at_the_bounds = [answer(-1.0), answer(4.0, index=1)]
    experience = make_one(maker(reward_clip_range=(-1.0, 4.0)), *at_the_bounds)
    assert experience.info["reward_clip_ratio"].tolist() == [0, 0]
    experience = make_one(maker(reward_clip_range=None, coef=0.0), low, high)
    assert experience.advantages[:, 2] == approx([-7.2, 8.8])
    assert "reward_clip_ratio" not in experience.info


def test_groups_whose_scores_are_the_same_after_clipping_are_counted():
    scores = {0: (0.0, 0.0), 1: (0.0, 1.0), 2: (20.0, 90.0)}
    samples = [answer(score, index=index) for index, both in scores.items() for score in both]
    experience = make_one(maker(reward_clip_range=(-10.0, 10.0), coef=0.0), *samples)
    assert experience.info["equal_groups"].tolist() == [1, 1, 0, 0, 1, 1]
    experience = make_one(maker(reward_clip_range=None, coef=0.0), *samples)
    assert experience.info["equal_groups"].tolist() == [1, 1, 0, 0, 0, 0]
    # without groups there is nothing to count
    assert "equal_groups" not in make_one(maker(), answer(), answer(index=1)).info


def test_kl_estimator_and_its_mean_over_real_tokens():
    short = make_rollout([50], [10], reward=0.0, index=1)
    experience = make_one(maker(kl_estimator="k2"), answer(), short)
    # k2 = d²/2 with d = 0.5, 0, -0.5
    assert experience.kl == approx([[0.125, 0, 0.125], [0.125, 0, 0]])
    assert experience.info["kl"] == approx([0.25 / 3, 0.125])


def test_kl_as_a_loss_leaves_the_reward_alone():
    experience = make_one(maker(use_kl_loss=True, use_kl_in_reward=False, kl_estimator="k1"))
    assert experience.kl == approx([[0.5, 0.0, -0.5]])  # still measured
    # A2 = 2 - 0.2 = 1.8, A1 = 0.1 + 0.9 = 1, A0 = (0.1 - 0.5) + 0.5 = 0.1
    assert experience.advantages == approx([[0.1, 1.0, 1.8]])
    assert experience.info["return"].tolist() == [2]


def test_without_a_reference_there_is_no_kl():
    experience = make_one(maker(reference=False, coef=0.0))
    assert experience.base_action_log_probs is None
    assert experience.kl is None
    assert experience.info["kl"].tolist() == [0]
    assert experience.advantages == approx([[0.1, 1.0, 1.8]])


def test_coefficient_is_read_at_every_batch():
    experience_maker = maker(coef=0.0)
    make_one(experience_maker)
    experience_maker.kl_ctl.value = 1.0
    # -1·kl on each token, the score on the last: -0.5, 0, 0.5 + 2
    experience = make_one(experience_maker, answer(index=3), make_rollout([50], [10], reward=1.0))
    assert experience.info["return"] == approx([2.0, 0.5])


def test_padding_is_zero_whatever_the_models_say_there():
    rows = [answer(), make_rollout([50], [20], reward=1.0, index=1)]
    experience = make_one(maker(), *rows)
    padding = ~experience.action_mask
    assert padding.any()
    for name in ("kl", "advantages", "returns"):
        assert getattr(experience, name)[padding].eq(0).all(), name
        assert getattr(experience, name).isfinite().all(), name


def test_rewards_group_over_micro_batches_and_order_is_kept():
    # Groups by prompt index: 7 → 1, 2, 6; 3 → 5, 1; interleaved, of different lengths, in micro batches of 2.
    rollouts = [
        make_rollout([50], [10], reward=1.0, index=7),
        make_rollout([50], [10, 20, 30], reward=5.0, index=3),
        make_rollout([50], [20, 30], reward=2.0, index=7),
        make_rollout([40, 50], [10], reward=1.0, index=3),
        make_rollout([50], [30, 20, 10], reward=6.0, index=7),
    ]
    experience_maker = maker(
        advantage_estimator="rloo", critic=False, coef=0.0, micro_rollout_batch_size=2
    )
    parts = experience_maker.make_experience_list(rollouts)
    assert [len(part) for part in parts] == [2, 2, 1]
    rows = [row for part in parts for row in part.split()]
    assert [row.sequences[0, -row.num_actions :].tolist() for row in rows] == [
        r.response_ids for r in rollouts
    ]
    # Leave-one-out: 1 - (2 + 6)/2, 5 - 1, 2 - (1 + 6)/2, 1 - 5, 6 - (1 + 2)/2
    assert [row.advantages[0, 0].item() for row in rows] == [-3, 4, -1.5, -4, 4.5]
    assert all((row.advantages == row.advantages[0, 0]).all() for row in rows)
    assert all(row.values is None for row in rows)


@pytest.mark.parametrize("micro", [1, 2, 8])
def test_micro_batches_change_nothing(micro):
    rollouts = [
        answer(1.0),
        make_rollout([50], [10], reward=2.0, index=1),
        make_rollout([30] * 9, [20, 30], reward=3.0, index=2, finish_reason="length"),
    ]
    options = {"bootstrap_truncated": True}
    expected = make_one(maker(micro_rollout_batch_size=64, **options), *rollouts)
    found = Experience.collate(
        maker(micro_rollout_batch_size=micro, **options).make_experience_list(rollouts)
    )
    mask = expected.action_mask
    assert torch.equal(found.action_mask, mask)
    for name in (
        "action_log_probs",
        "base_action_log_probs",
        "values",
        "advantages",
        "returns",
        "kl",
    ):
        assert torch.equal(getattr(found, name)[mask], getattr(expected, name)[mask]), name
    assert {name: values.tolist() for name, values in found.info.items()} == {
        name: values.tolist() for name, values in expected.info.items()
    }


def test_models_run_in_evaluation_mode_without_gradients_longest_rows_first():
    experience_maker = maker(micro_rollout_batch_size=2)
    experience_maker.actor.train()
    rollouts = [make_rollout([50], [10] * n, reward=0.0, index=n) for n in (1, 4, 2, 3)]
    experience_maker.make_experience_list(rollouts)
    for model in (experience_maker.actor, experience_maker.initial_model, experience_maker.critic):
        # Rows of 1 + 4 and 1 + 3 tokens, then 1 + 2 and 1 + 1; (not training, no gradients)
        assert model.calls == [((2, 5), False, False), ((2, 3), False, False)]


def test_ranks_run_as_many_forwards_also_one_without_rollouts():
    def run(strategy: FakeStrategy) -> tuple[list[int], int]:
        experience_maker = maker(strategy, micro_rollout_batch_size=2)
        rollouts = [answer(index=i) for i in range((5, 0, 1)[strategy.rank])]
        parts = experience_maker.make_experience_list(rollouts)
        return [len(part) for part in parts], len(experience_maker.actor.calls)

    # 5 rows in micro batches of 2: 3 forwards everywhere
    assert on_ranks(3, run) == [([2, 2, 1], 3), ([], 3), ([1], 3)]


def test_a_repeated_forward_changes_no_number():
    def run(strategy: FakeStrategy) -> list[list[float]]:
        rollouts = [answer(float(i), index=i) for i in range((4, 1)[strategy.rank])]
        parts = maker(strategy, micro_rollout_batch_size=1).make_experience_list(rollouts)
        return [part.advantages[0].tolist() for part in parts]

    _, (row,) = on_ranks(2, run)
    assert row == pytest.approx(make_one(maker(), answer(0.0)).advantages[0].tolist())


def test_extras_of_the_reward_become_info_with_nan_where_a_sample_has_none():
    rows = [
        answer(extras={"format": 1.0, "accuracy": 0.0}),
        answer(index=1, extras={"format": 0.5}),
        answer(index=2),
    ]
    info = make_one(maker(), *rows).info
    assert info["reward/format"][:2].tolist() == [1.0, 0.5]
    assert info["reward/format"].isnan().tolist() == [False, False, True]
    assert info["reward/accuracy"].isnan().tolist() == [False, True, True]


def test_log_probs_of_the_engine_are_kept_beside_the_trainers():
    experience = make_one(maker(), answer(log_probs=[-1.25, -2.0, -3.0]))
    assert experience.rollout_log_probs.tolist() == [[-1.25, -2, -3]]
    assert experience.action_log_probs.tolist() == [[-1, -2, -3]]


def test_a_rollout_without_reward_is_named():
    with pytest.raises(ValueError, match="prompt 4, sample 2 has no reward"):
        make_one(maker(), answer(), answer(reward=None, index=4, sample_index=2))


def test_a_group_too_small_for_the_estimator_is_named():
    experience_maker = maker(advantage_estimator="grpo", critic=False)
    with pytest.raises(
        ValueError, match=r"prompt 5 has 1 sample, but --advantage_estimator grpo needs at least 2"
    ):
        make_one(experience_maker, answer(), answer(), answer(index=5))
