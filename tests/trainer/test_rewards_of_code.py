"""Rewards that are Python: functions and objects in place of paths, and sources of a user's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from support import fakes

from lightppo import PPOTrainer
from lightppo.config import PPOConfig
from lightppo.errors import ConfigError
from lightppo.plugin import REWARDS, RewardEntry
from lightppo.ranks import Alone
from lightppo.rewards import RewardOutput
from lightppo.trainer.build import build_reward


def ones(queries, prompts, labels):
    return [float(query.count("1")) for query in queries]


class Five:
    """A source of a user's own."""

    name = "five"

    def __init__(self, request=None):
        self.request = request

    def score(self, rollouts):
        return RewardOutput([5.0] * len(rollouts))


def typed_at_a_prompt():
    """A function without a file, as in a notebook."""
    names = {"__name__": "__main__"}
    exec("def minus(queries, prompts, labels):\n    return [-1.0] * len(queries)", names)
    return names["minus"]


def rewards_of(save_path) -> list[dict]:
    rows = [json.loads(line) for line in Path(save_path, "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "rollout/reward" in row]


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(("reward", "expected"), [(typed_at_a_prompt(), -1.0), (Five(), 5.0)])
def test_a_run_scores_by_what_it_was_given(make_config, reward, expected):
    config = make_config(reward_fn=reward)
    PPOTrainer.from_config(config).fit()
    rows = rewards_of(config.checkpoint.save_path)
    assert [row["rollout/reward"] for row in rows] == [expected] * len(rows)
    assert rows
    kept = yaml.safe_load(Path(config.checkpoint.save_path, "run_config.yaml").read_text())[
        "reward_fn"
    ]
    assert kept == {-1.0: "<minus of __main__>", 5.0: f"<Five of {__name__}>"}[expected]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (
            {"reward_fn": 3},
            "--reward_fn must be .*path.py:name, or in Python the function or object itself, not 3",
        ),
        (
            {"reward_fn": object()},
            "--reward_fn: <object.* scores nothing: give a function, or an object with name",
        ),
        ({"reward_fn": Five}, "--reward_fn: .*Five.* scores nothing"),
        (
            {"reward_fn": ones, "eval_data": "rows", "eval_reward_fn": object()},
            "--eval_reward_fn: <object.* scores nothing",
        ),
    ],
)
def test_what_scores_nothing_is_refused_before_anything_loads(options, named):
    with pytest.raises(ConfigError, match=named):
        PPOConfig.from_flat(pretrain="model", prompt_data="rows.jsonl", **options).validate()


def built(**options):
    return build_reward(PPOConfig.from_flat(**options), [], None, Alone())


@pytest.fixture
def own_source(monkeypatch):
    monkeypatch.setitem(REWARDS, "five", RewardEntry(Five, check_prompt=only_even))
    return "five"


def only_even(prompt):
    if int(prompt.label) % 2:
        raise ValueError("an odd label")


def test_a_source_of_a_plugin_has_a_name(own_source):
    config = PPOConfig.from_flat(
        pretrain="model", prompt_data="rows", reward_source=["five=0.5", "function"]
    )
    with pytest.raises(
        ConfigError, match="names 'function', which is what --reward_fn gives: set --reward_fn"
    ):
        config.validate()
    source = built(reward_source=["five=0.5", "function"], reward_fn=ones)
    assert source.score([fakes.make_rollout(response_text="121")]).scores == [0.5 * 5 + 2]
    alone = built(reward_source=["five"])
    assert alone.request.config.verifier.reward_source == ("five",)
    with pytest.raises(ConfigError, match=r"unknown source 'fife'.*five"):
        built(reward_source=["fife"])


def test_its_own_look_at_rows(own_source):
    from lightppo.preflight.before_imports import check_label

    config = PPOConfig.from_flat(reward_source=["five"])
    check_label(config, fakes.make_rollout(label="4").prompt)
    with pytest.raises(ValueError, match="an odd label"):
        check_label(config, fakes.make_rollout(label="3").prompt)


def test_a_maker_must_make_a_source(monkeypatch):
    monkeypatch.setitem(REWARDS, "nothing", RewardEntry(lambda request: 3))
    with pytest.raises(
        ConfigError, match="--reward_source nothing: its function gives 3, and not an object with"
    ):
        built(reward_source=["nothing"])
    with pytest.raises(
        TypeError, match=r"--reward_source mine: register a RewardEntry, as RewardEntry"
    ):
        REWARDS.register("mine", Five)
