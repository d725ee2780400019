"""Which sources a run has, as its options name them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lightppo.config import PPOConfig
from lightppo.config.reward_options import reward_plan, reward_sources

ROUTES = {"gsm8k": {"math": 1, "format": 0.1}, "*": {"function": 2}}
URL = {"reward_fn": None, "remote_rm_url": ["http://host/score"]}


def config(**options: Any) -> PPOConfig:
    paths = {"pretrain": "model", "prompt_data": "p.jsonl", "reward_fn": "r.py"}
    return PPOConfig.from_flat(paths | options)


@pytest.mark.parametrize(
    ("options", "plan", "sources"),
    [
        ({}, None, ["function"]),
        ({"reward_fn": None, "remote_rm_url": ["score.py"]}, None, ["function"]),
        (URL, None, ["server"]),
        ({"reward_pretrain": ["a", "b"]}, None, ["model"]),
        ({"reward_fn": None, "reward_source": ["math"]}, {"*": {"math": 1.0}}, ["math"]),
        (
            {"reward_fn": None, "reward_source": ["math=1", "format=0.1"]},
            {"*": {"math": 1.0, "format": 0.1}},
            ["math", "format"],
        ),
        (
            {"reward_source": ["function=-0.5", "code"]},
            {"*": {"function": -0.5, "code": 1.0}},
            ["function", "code"],
        ),
        (
            {"reward_routes": json.dumps(ROUTES)},
            {"gsm8k": {"math": 1.0, "format": 0.1}, "*": {"function": 2.0}},
            ["math", "format", "function"],
        ),
    ],
)
def test_reward_sources(options, plan, sources):
    asked = config(**options)
    assert reward_plan(asked) == plan
    assert reward_sources(asked) == sources
    asked.validate()


def test_routes_from_a_file(tmp_path):
    (tmp_path / "routes.json").write_text(json.dumps(ROUTES))
    asked = config(reward_routes=str(tmp_path / "routes.json"))
    assert reward_sources(asked) == ["math", "format", "function"]
