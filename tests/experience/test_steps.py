"""ScoreShaper: which step acts on what, in which order."""

from __future__ import annotations

import pytest
import torch
from support.fakes import FakeStrategy, make_rollout, on_ranks

from lightppo.config import PPOConfig
from lightppo.experience.normalisation import ScoreShaper

MAX_LEN = 10


def shaper(strategy: FakeStrategy | None = None, **options) -> ScoreShaper:
    config = PPOConfig.from_flat(
        {"reward_clip_range": None, "generate_max_len": MAX_LEN} | options
    ).resolved()
    return ScoreShaper(config, strategy or FakeStrategy())


def responses(*scores_and_lengths: tuple[float, int]) -> list:
    """One of MAX_LEN tokens was cut."""
    return [
        make_rollout([1], [7] * n, reward=score, finish_reason="length" if n == MAX_LEN else "stop")
        for score, n in scores_and_lengths
    ]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1.0, -4.0, 6.0]),
        ({"reward_bias": 1.0}, [0.0, -5.0, 5.0]),
        ({"reward_bias": 1.0, "reward_scaling": 2.0}, [0.0, -10.0, 10.0]),  # (x - 1)·2
        ({"reward_scaling": 2.0, "max_reward_clip": 5.0}, [2.0, -5.0, 5.0]),
        ({"reward_scaling": -2.0, "max_reward_clip": 5.0}, [-2.0, 5.0, -5.0]),
        ({"reward_clip_range": (-1.0, 3.0)}, [1.0, -1.0, 3.0]),
        # lengths 2, 7, 10: the last 5 tokens before 10 cost up to 1; (7 - 5)/5 = 0.4, (10 - 5)/5 = 1
        ({"overlong_buffer_len": 5}, [1.0, -4.4, 5.0]),
        ({"overlong_buffer_len": 5, "overlong_penalty_factor": 0.5}, [1.0, -4.2, 5.5]),
        ({"stop_properly_penalty": 0.5}, [1.0, -4.0, 3.0]),
        ({"stop_properly_penalty": -2.0}, [1.0, -4.0, -2.0]),
        ({"mask_no_eos_with_zero": True}, [1.0, -4.0, 0.0]),
        # zero is zero
        ({"mask_no_eos_with_zero": True, "overlong_buffer_len": 5}, [1.0, -4.4, 0.0]),
        # the penalty is not scaled
        ({"overlong_buffer_len": 5, "reward_scaling": 10.0}, [10.0, -40.4, 59.0]),
        # the range is the last word
        ({"overlong_buffer_len": 5, "reward_clip_range": (-4.0, 4.0)}, [1.0, -4.0, 4.0]),
    ],
)
def test_each_step_and_the_order(options, expected):
    assert shaper(**options).shape(
        responses((1.0, 2), (-4.0, 7), (6.0, 10))
    ).tolist() == pytest.approx(expected)


def test_running_normalisation_sees_the_rollout_first():
    shaping = shaper(reward_running_norm=True)
    batch = responses((1.0, 2), (3.0, 2))
    # mean 2, the standard deviation is that of running.py: the same for both, so ±x
    first = shaping.shape(batch, learn=True)
    assert first[0] == -first[1]
    assert first[1] > 0.5
    # the second rollout is judged by both: its mean of 12 lies above the running one of 7
    second = responses((11.0, 2), (13.0, 2))
    assert (shaping.shape(second, learn=True) > 0.5).all()
    assert (shaping.shape(second) > 0.5).all()  # which learns nothing


def test_running_normalisation_is_over_all_ranks_and_saved():
    batch = responses((1.0, 2), (3.0, 2), (8.0, 2))

    def on_rank(strategy: FakeStrategy) -> torch.Tensor:
        shaping = shaper(strategy, reward_running_norm=True)
        shaping.shape(batch[:2] if strategy.rank == 0 else batch[2:], learn=True)
        # a rank without samples takes part
        shaping.shape([] if strategy.rank == 0 else batch, learn=True)
        return shaping.shape(batch)

    alone = shaper(reward_running_norm=True)
    alone.shape(batch, learn=True)
    alone.shape(batch, learn=True)
    for scores in on_ranks(2, on_rank):
        torch.testing.assert_close(scores, alone.shape(batch))
    resumed = shaper(reward_running_norm=True)
    ((name, state),) = alone.states.items()
    assert name == "score_statistics"
    resumed.states[name].load_state_dict(state.state_dict())
    assert torch.equal(resumed.shape(batch), alone.shape(batch))
    assert not shaper().states


class TestDenseRewards:
    def batch(self) -> tuple[list, torch.Tensor]:
        rollouts = responses((5.0, 2), (5.0, 3))
        rollouts[0].token_rewards = [1.0, 3.0]
        rollouts[1].token_rewards = [0.5, 0.25, 1.0]
        mask = torch.tensor([[True, True, False], [True, True, True]])
        return rollouts, mask

    def test_the_token_scores_are_the_rewards_and_the_score_is_not(self):
        rollouts, mask = self.batch()
        shaping = shaper(use_dense_reward=True)
        assert shaping.token_scores(rollouts, mask).tolist() == [[1.0, 3.0, 0.0], [0.5, 0.25, 1.0]]
        assert shaping.shape(rollouts).tolist() == [0.0, 0.0]

    def test_tokens_that_are_not_trained_have_places(self):
        rollouts, _ = self.batch()
        rollouts[1].trained = [True, False, True]  # the reply of a tool stands between
        shaping = shaper(use_dense_reward=True)
        assert shaping.final_scores(rollouts).tolist() == [4.0, 1.5]

    def test_differences(self):
        rollouts, mask = self.batch()
        got = shaper(use_dense_reward=True, reward_delta=True).token_scores(rollouts, mask)
        assert got.tolist() == [[1.0, 2.0, 0.0], [0.5, -0.25, 0.75]]
        assert got.sum(1).tolist() == [3.0, 1.0]  # the last score of each

    def test_they_are_scaled(self):
        rollouts, mask = self.batch()
        shaping = shaper(
            use_dense_reward=True, reward_bias=0.5, reward_scaling=2.0, max_reward_clip=3.0
        )
        assert shaping.token_scores(rollouts, mask).tolist() == [[1.0, 3.0, 0.0], [0.0, -0.5, 1.0]]

    def test_the_penalty_for_length_comes_on_top(self):
        rollouts, _ = self.batch()
        assert shaper(use_dense_reward=True, overlong_buffer_len=8).shape(rollouts).tolist() == [
            0.0,
            -0.125,
        ]
