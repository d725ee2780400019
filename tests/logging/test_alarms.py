"""Alarms: what rings, when, and what the user is told."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
from support.runs import fitted

from lightppo.config import PPOConfig
from lightppo.config.supervised_options import SFTConfig
from lightppo.logging.alarms import ALARMS, Alarms
from lightppo.logging.report_page import read_metrics, series

GOOD = {
    "rollout/policy_kl": 0.05,
    "train/approx_kl": 0.01,
    "train/entropy": 1.0,
    "rollout/reward": 0.5,
    "rollout/reward_max": 1.0,
    "rollout/reward_min": 0.0,
    "rollout/samples": 8.0,
    "rollout/reward_clip_ratio": 0.0,
    "episode/tool_errors": 0.0,
    "episode/tool_calls": 1.0,
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
    alarms = Alarms(vocabulary, prompts=4)
    seen = [alarms.look(GOOD | step, i)[0] for i, step in enumerate(steps, start=1)]
    return [{name.removeprefix("alarm/") for name, value in step.items() if value} for step in seen]


def test_a_good_run_has_no_alarm():
    assert rung([{}] * 30) == [set()] * 30
    assert Alarms(100, 4).look(GOOD, 1)[0] == {f"alarm/{name}": 0.0 for name in ALARMS}


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
        ("clipped_scores", {"rollout/reward_clip_ratio": 0.11}, 1),
        ("failing_tools", {"episode/tool_errors": 1.0}, 3),
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
    steps = [*before, *[after] * 5]
    seen = [alarms.look(GOOD | step, i)[0] for i, step in enumerate(steps, start=1)]
    assert {name.removeprefix("alarm/") for name, value in seen[-1].items() if value} == rings


def of_rewards(rewards: Sequence[float], metric: str = "rollout/reward") -> list[bool]:
    name = {"rollout/reward": "reward_falls", "reward/accuracy": "accuracy_falls"}[metric]
    return [name in step for step in rung([{metric: reward} for reward in rewards])]


@pytest.mark.parametrize("metric", ["rollout/reward", "reward/accuracy"])
def test_a_fall_of_more_than_half_of_the_rise(metric):
    rise = [i / 10 for i in range(10)]  # medians of five: 0.2 … 0.7
    found = of_rewards([*rise, *[0.5] * 5, *[0.45] * 5], metric)
    # from 0.7, a median must lose half of its rise, 0.25, and four usual steps, 0.4
    assert not any(found)
    found = of_rewards([*rise, *[0.5] * 5, *[0.2] * 10, *[0.45] * 5, *[0.6] * 5], metric)
    assert found.index(True) == 21  # the fifth median of at least three times 0.2
    # it goes on until a median has lost less than half of that
    assert found[21:] == [True] * 11 + [False] * 3


def test_noise_is_no_fall():
    noisy = [0.5 + 0.1 * (-1) ** i + (0.05 if i % 3 else -0.05) for i in range(60)]
    assert not any(of_rewards(noisy))
    # a last batch of five prompts
    assert not any(of_rewards([0.01, 0.02] * 15 + [0.2] + [0.01, 0.02] * 15))


def test_a_fall_without_a_rise_rings_too():
    assert of_rewards([0.5] * 10 + [0.0] * 9)[-1]


def drifting(seed: int, steps: int = 120) -> list[float]:
    """Rewards that rise to the end, as of prompts whose difficulty drifts."""
    rng, drift, rewards = random.Random(seed), 0.0, []
    for i in range(steps):
        drift = 0.6 * drift + 0.8 * rng.gauss(0, 1)
        rewards.append(0.9 - 0.6 * math.exp(-i / 30) + 0.08 * drift)
    return rewards


def test_a_run_that_improves_has_no_alarm_that_comes_and_goes():
    rings = [of_rewards(drifting(seed)) for seed in (3, 8)]
    assert sum(map(any, rings)) == 0


WORST = {"rollout/reward": 0.0, "rollout/reward_max": 0.0}


def test_a_rate_that_breaks_the_policy_is_named_first_and_at_once():
    better = {"rollout/reward": 0.6}
    # Of four prompts a step, 4 × ln 0.4 is not below ln 1e-6 before the fourth step; of forty at once.
    found = rung([better, *[WORST] * 6, better])
    assert [("reward_collapse" in step) for step in found] == [False] * 4 + [True] * 3 + [False]
    alarms = Alarms(None, prompts=40)
    alarms.look(GOOD | better, 1)
    seen, lines = alarms.look(GOOD | WORST, 2)
    assert seen["alarm/reward_collapse"] == 1.0
    assert lines[0].startswith("ALARM reward_collapse: rollout/reward is 0")
    assert "--actor_learning_rate" in lines[0]


def test_scores_that_were_never_better_are_no_collapse():
    assert "reward_collapse" not in set().union(*rung([WORST] * 20))
    sparse = {"rollout/reward": 0.02}  # one answer in fifty
    steps = [sparse, WORST] * 10
    assert "reward_collapse" not in set().union(*rung(steps))


def test_a_tool_that_is_never_called_is_no_alarm():
    bad = {"episode/tool_errors": 0.0, "episode/tool_calls": 0.0}
    assert rung([bad] * 5) == [set()] * 5


def test_what_a_run_does_not_have_has_no_alarm():
    seen, told = Alarms(None).look({"train/actor_grad_norm": 1.0, "rollout/reward": 1.0}, 1)
    assert seen == {"alarm/zero_gradient": 0.0, "alarm/reward_falls": 0.0}
    assert told == []


def test_it_is_told_when_it_begins_only_and_again_when_it_comes_back():
    alarms, bad = Alarms(), GOOD | {"rollout/policy_kl": 2.5}
    steps = enumerate((GOOD, bad, bad, GOOD, bad), start=1)
    told = [alarms.look(status, step)[1] for step, status in steps]
    assert [len(lines) for lines in told] == [0, 1, 0, 0, 1]
    (line,) = told[1]
    assert "kl_explosion: rollout/policy_kl is 2.5" in line
    assert "--actor_learning_rate" in line
    summary = alarms.summary()
    assert summary.startswith("ALARMS: kl_explosion in 3 steps (2 to 5): the log at the first")
    assert Alarms().summary() == ""


def test_a_resumed_run_knows_what_rang():
    rewards = [*(i / 10 for i in range(10)), *[0.5] * 5, *[0.2] * 10]
    alarms = Alarms()
    for step, reward in enumerate(rewards, start=1):
        alarms.look({"rollout/reward": reward}, step)
    resumed = Alarms()
    resumed.load_state_dict(json.loads(json.dumps(alarms.state_dict())))
    middle = {"rollout/reward": 0.35}  # would not begin to ring, but goes on
    assert resumed.look(middle, 26)[0] == alarms.look(middle, 26)[0] == {"alarm/reward_falls": 1.0}
    assert (
        resumed.summary()
        == alarms.summary()
        == "ALARMS: reward_falls in 5 steps (22 to 26): "
        + ("the log at the first of these steps says what to do, as does the report")
    )
    older = Alarms()
    older.load_state_dict({"rollout/reward": rewards})
    assert older.series == {"rollout/reward": rewards}


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
    assert re.match(r"ALARMS: .*kl_explosion in \d+ steps", lines.pop())
    assert any("kl_explosion" in line and "--actor_learning_rate" in line for line in lines), lines
    assert (
        len(lines) == len({line.split("ALARM ")[1].split(":")[0] for line in lines}) <= len(ALARMS)
    )
    _, rings = series(read_metrics(tmp_path / "run" / "metrics.jsonl"), "alarm/kl_explosion")
    assert rings[0] == 0.0
    assert 1.0 in rings
