"""Alarms: what rings, when, and what the user is told."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
from support.runs import fitted

from lightppo.config import PPOConfig
from lightppo.plugins.records.alarms import ALARMS, Alarms
from lightppo.plugins.report.page import read_metrics, series
from lightppo.plugins.supervised.sections import SFTConfig

GOOD = {
    "rollout/policy_kl": 0.05,
    "train/approx_kl": 0.01,
    "train/entropy": 1.0,
    "rollout/reward": 0.5,
    "rollout/reward_max": 1.0,
    "rollout/reward_min": 0.0,
    "rollout/samples": 8.0,
    "train/actor_grad_norm": 0.3,
    "rollout/response_clip_ratio": 0.1,
    "train/actor_skipped": 0.0,
    "train/policy_loss": -0.1,
    "train/critic_skipped": 0.0,
    "train/critic_loss": 0.2,
    "reward/accuracy": 0.5,
    "train/skipped": 0.0,
    "train/loss": 2.0,
    "train/loss_scale": 16.0,
    "train/actor_loss_scale": 2.0**16,
    "train/critic_loss_scale": 2.0**16,
}


def rung(steps: Sequence[dict[str, float]], vocabulary: int | None = 100) -> list[set[str]]:
    """The alarms that ring at each of the steps, which say what differs from a good one."""
    alarms = Alarms(vocabulary)
    seen = [alarms.look(GOOD | step)[0] for step in steps]
    return [{name.removeprefix("alarm/") for name, value in step.items() if value} for step in seen]


def test_a_good_run_has_no_alarm():
    assert rung([{}] * 30) == [set()] * 30
    assert Alarms(100).look(GOOD)[0] == {f"alarm/{name}": 0.0 for name in ALARMS}


@pytest.mark.parametrize(
    ("name", "bad", "after"),
    [
        ("kl_explosion", {"rollout/policy_kl": 1.01}, 1),
        ("large_update", {"train/approx_kl": 0.51}, 1),
        ("entropy_collapse", {"train/entropy": 0.009}, 3),
        ("entropy_uniform", {"train/entropy": 0.96 * math.log(100)}, 3),
        ("equal_rewards", {"rollout/reward_max": 0.5, "rollout/reward_min": 0.5}, 3),
        ("zero_gradient", {"train/actor_grad_norm": 0.0}, 3),
        ("truncated", {"rollout/response_clip_ratio": 0.51}, 3),
        ("loss_not_finite", {"train/skipped": 1.0}, 1),
        ("loss_not_finite", {"train/loss": math.nan}, 1),
        ("not_finite", {"train/actor_skipped": 0.5}, 1),
        ("not_finite", {"train/policy_loss": math.nan}, 1),
        ("not_finite", {"train/entropy": math.inf}, 1),
        ("critic_not_finite", {"train/critic_loss": math.inf}, 1),
        ("critic_not_finite", {"train/critic_skipped": 1.0}, 1),
        ("underflow", {"train/loss_scale": 8.0}, 1),
        ("actor_underflow", {"train/actor_loss_scale": 8.0}, 1),
        ("critic_underflow", {"train/critic_loss_scale": 1.0}, 1),
    ],
)
def test_an_alarm_rings_after_so_many_bad_steps_and_until_they_end(name, bad, after):
    found = rung([{}, *([bad] * 4), {}])
    assert [name in step for step in found] == [False, *(i >= after for i in (1, 2, 3, 4)), False]
    # an infinite entropy is above any bound
    assert set().union(*found) - {"entropy_uniform"} <= {name}


def test_a_good_step_between_bad_ones_starts_the_count_again():
    bad = {"train/actor_grad_norm": 0.0}
    assert rung([bad, bad, {}, bad, bad]) == [set()] * 5


def test_one_sample_is_no_group_of_equal_rewards():
    bad = {"rollout/reward_max": 0.5, "rollout/reward_min": 0.5, "rollout/samples": 1.0}
    assert rung([bad] * 5) == [set()] * 5


def at(mean: float, low: float, high: float) -> dict[str, float]:
    """A step of these scores whose entropy and gradient are gone."""
    scores = {"rollout/reward": mean, "rollout/reward_min": low, "rollout/reward_max": high}
    return {**scores, "train/entropy": 0.001, "train/actor_grad_norm": 0.0}


GONE = {"entropy_collapse", "zero_gradient"}


@pytest.mark.parametrize(
    ("before", "after", "rings"),
    [
        ([at(0.4, 0.0, 1.0)], at(1.0, 1.0, 1.0), set()),  # solved
        ([at(0.4, 0.0, 1.0)], at(0.97, 0.0, 1.0), set()),  # all but
        ([at(0.4, 0.0, 1.0)], at(0.9, 0.0, 1.0), GONE),
        ([at(0.4, 0.0, 1.0)], at(0.0, 0.0, 0.0), {*GONE, "equal_rewards"}),  # at its worst
        ([at(-5.0, -9.0, -1.0)], at(-1.0, -1.0, -1.0), set()),  # whatever the scale
        # always the same: nobody knows whether there is better
        ([], at(1.0, 1.0, 1.0), {*GONE, "equal_rewards"}),
        ([at(0.5, 0.0, 2.0)], at(1.0, 1.0, 1.0), {*GONE, "equal_rewards"}),  # there is better
    ],
)
def test_a_task_that_is_solved_is_no_alarm(before, after, rings):
    alarms = Alarms()
    seen = [alarms.look(GOOD | step)[0] for step in [*before, *[after] * 5]]
    assert {name.removeprefix("alarm/") for name, value in seen[-1].items() if value} == rings


def of_rewards(rewards: Sequence[float], metric: str = "rollout/reward") -> list[bool]:
    name = {"rollout/reward": "reward_falls", "reward/accuracy": "accuracy_falls"}[metric]
    return [name in step for step in rung([{metric: reward} for reward in rewards])]


@pytest.mark.parametrize("metric", ["rollout/reward", "reward/accuracy"])
def test_a_fall_of_more_than_half_of_the_rise(metric):
    rise = [i / 10 for i in range(10)]  # medians of five: 0.2 … 0.7
    found = of_rewards([*rise, *[0.5] * 5, *[0.45] * 5], metric)
    # from 0.7, a median must lose half of its rise, 0.25, and three usual steps, 0.3
    assert not any(found)
    found = of_rewards([*rise, *[0.5] * 5, *[0.3] * 5], metric)
    assert found.index(True) == 17  # the median of 0.5 0.5 0.3 0.3 0.3 is 0.3
    assert all(found[17:])


def test_noise_is_no_fall():
    noisy = [0.5 + 0.1 * (-1) ** i + (0.05 if i % 3 else -0.05) for i in range(60)]
    assert not any(of_rewards(noisy))
    # a last batch of five prompts
    assert not any(of_rewards([0.01, 0.02] * 15 + [0.2] + [0.01, 0.02] * 15))


def test_a_fall_without_a_rise_rings_too():
    assert of_rewards([0.5] * 10 + [0.0] * 5)[-1]


def test_what_a_run_does_not_have_has_no_alarm():
    seen, told = Alarms(None).look({"train/actor_grad_norm": 1.0, "rollout/reward": 1.0})
    assert seen == {"alarm/zero_gradient": 0.0, "alarm/reward_falls": 0.0}
    assert told == []


def test_it_is_told_when_it_begins_only_and_again_when_it_comes_back():
    alarms, bad = Alarms(), GOOD | {"rollout/policy_kl": 2.5}
    told = [alarms.look(status)[1] for status in (GOOD, bad, bad, GOOD, bad)]
    assert [len(lines) for lines in told] == [0, 1, 0, 0, 1]
    (line,) = told[1]
    assert "kl_explosion: rollout/policy_kl is 2.5" in line
    assert "--actor_learning_rate" in line


def test_remedies_name_flags_that_exist():
    known = {option.name for kind in (PPOConfig, SFTConfig) for option in kind.all_options()}
    for name, alarm in ALARMS.items():
        named = set(re.findall(r"--(\w+)", f"{alarm.remedy} {alarm.condition}"))
        assert named <= known, name
        assert named or "as reward_falls" in alarm.remedy, name


@pytest.mark.usefixtures("world")
def test_a_learning_rate_of_1000_is_told(make_config, tmp_path, capsys):
    options: dict[str, Any] = {
        "actor_learning_rate": 1000.0,
        "num_episodes": 2,
        "init_kl_coef": 0.01,
        "max_norm": 0.0,
    }
    fitted(make_config(**options))
    lines = [line for line in capsys.readouterr().out.splitlines() if "ALARM" in line]
    assert any("kl_explosion" in line and "--actor_learning_rate" in line for line in lines), lines
    assert (
        len(lines) == len({line.split("ALARM ")[1].split(":")[0] for line in lines}) <= len(ALARMS)
    )
    _, rings = series(read_metrics(tmp_path / "run" / "metrics.jsonl"), "alarm/kl_explosion")
    assert rings[0] == 0.0
    assert 1.0 in rings
