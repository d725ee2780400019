"""TrainerState: counting, saving, and the seed's way of saying where a run stands."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from support.loops import idle_loop

from lightppo.trainer.by_hand import state_after
from lightppo.trainer.loop import TrainerState


def test_steps_and_episodes_are_counted():
    state = TrainerState()
    seen = []
    # Two episodes of 20 prompts in batches of 8: 8 + 8 + 4.
    for prompts, last in [(8, False), (8, False), (4, True)] * 2:
        state.finish_step(prompts, last)
        seen.append((state.global_step, state.episode, state.consumed_prompts))
    assert seen == [(1, 0, 8), (2, 0, 16), (3, 1, 0), (4, 1, 8), (5, 1, 16), (6, 2, 0)]


@pytest.mark.parametrize(
    ("consumed", "expected"),
    [
        (0, (0, 0, 0)),
        (16, (2, 0, 16)),
        # 3 steps an episode; the seed counts steps × 8, so that 24 is the end of an episode of 20 prompts
        (24, (3, 1, 0)),
        (32, (4, 1, 8)),
        (48, (6, 2, 0)),
    ],
)
def test_the_seed_counts_steps_times_batch_size(consumed, expected):
    state = state_after(consumed, steps_per_episode=3, rollout_batch_size=8)
    assert (state.global_step, state.episode, state.consumed_prompts) == expected


@pytest.mark.parametrize("steps", range(7))
def test_both_ways_of_counting_agree(steps):
    state = TrainerState()
    for i in range(steps):
        state.finish_step(8, last_of_episode=i % 3 == 2)
    assert state_after(8 * steps, 3, 8) == state


@pytest.mark.parametrize(("old", "ids"), [("w1", {"wandb": "w1"}), (None, {})])
def test_older_checkpoints_have_the_runs_of_trackers_in_the_trainers_state(tmp_path, old, ids):
    for names in ({"run_id": old}, {"run_ids": ids}):
        loop = idle_loop(tmp_path)
        loop.load_state({"trainer": asdict(TrainerState(global_step=3)) | names})
        assert loop.state.global_step == 3
        assert loop.states["trackers"].state_dict() == ids
