"""Reward sources by name and weight, and options of sources that are not there."""

from __future__ import annotations

import json

import pytest

from lightppo.config import PPOConfig
from lightppo.config.reward_rules import BUILT_IN, reward_plan, sources_of
from lightppo.errors import ConfigError
from lightppo.rewards.build import BUILT_IN_SOURCES

SERVER = {"remote_rm_url": ["http://127.0.0.1:1/score"]}
ROUTES = {"gsm8k": {"math": 1, "format": 0.1}, "*": {"function": 2}}


def config(**options) -> PPOConfig:
    return PPOConfig.from_flat({"pretrain": "model", "prompt_data": "p.jsonl"} | options)


def problems(**options) -> list[str]:
    try:
        config(**options).validate()
    except ConfigError as error:
        return str(error).split("\n")
    return []


def test_the_names_are_those_of_the_table():
    assert tuple(BUILT_IN_SOURCES) == BUILT_IN


@pytest.mark.parametrize(
    ("options", "plan"),
    [
        ({"reward_fn": "r.py"}, None),
        ({"reward_source": ["math"]}, {"*": {"math": 1.0}}),
        ({"reward_source": ["math=1", "format=0.1"]}, {"*": {"math": 1.0, "format": 0.1}}),
        ({"reward_source": ["function=-0.5", "code"], "reward_fn": "r.py"}, {"*": {"function": -0.5, "code": 1.0}}),
        (
            {"reward_routes": json.dumps(ROUTES), "reward_fn": "r.py"},
            {"gsm8k": {"math": 1.0, "format": 0.1}, "*": {"function": 2.0}},
        ),
    ],
)
def test_plans(options, plan):
    assert reward_plan(config(**options)) == plan
    assert problems(**options) == []


def test_routes_from_a_file(tmp_path):
    (tmp_path / "routes.json").write_text(json.dumps(ROUTES))
    plan = reward_plan(config(reward_routes=str(tmp_path / "routes.json")))
    assert sources_of(plan) == {"math", "format", "function"}


MATH = {"reward_source": ["math"]}
FUNCTION = {"reward_fn": "r.py"}


@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        ({}, "no reward: set --reward_fn path.py"),
        (
            {"reward_source": ["maths"]},
            "--reward_source: unknown source 'maths' (did you mean 'math'?); known are math",
        ),
        ({"reward_source": ["math=much"]}, "--reward_source: the weight of math must be a number, got 'much'"),
        ({"reward_source": ["math=inf"]}, "the weight of math must be a number"),
        ({"reward_routes": "{"}, "--reward_routes is not JSON"),
        ({"reward_routes": "nowhere.json"}, "--reward_routes 'nowhere.json' is neither a JSON object nor a file"),
        ({"reward_routes": '{"gsm8k": "math"}'}, "--reward_routes must be an object of objects"),
        ({"reward_routes": '{"gsm8k": {"mth": 1}}'}, "--reward_routes 'gsm8k': unknown source 'mth'"),
        ({"reward_routes": '{"a": {"math": 1}}', **MATH}, "both name the sources: set one of them"),
        ({**MATH, "reward_routes_by": "label"}, "--reward_routes_by has no effect without --reward_routes"),
        ({"reward_source": ["function"]}, "--reward_source names 'function', which is what --reward_fn gives: set"),
        ({**MATH, **FUNCTION}, "--reward_fn is set, but --reward_source does not name 'function': add it"),
        ({**MATH, **SERVER}, "--remote_rm_url is set, but --reward_source does not name 'server'"),
        ({**FUNCTION, **SERVER}, "--remote_rm_url and --reward_fn are two sources of reward: set one, or say how"),
        ({**MATH, "reward_manager": "batch"}, "--reward_manager acts on a reward function: it needs --reward_fn"),
        ({**SERVER, "reward_timeout": 3.0}, "--reward_timeout acts on a reward function or --reward_source math"),
        ({"reward_pretrain": ["m"], "on_reward_failure": "error"}, "--on_reward_failure acts on reward functions, ser"),
        ({**SERVER, "reward_max_length": 9}, "--reward_max_length acts on reward models: it needs --reward_pretrain"),
        ({**SERVER, "reward_input_tokenizer": ["t"]}, "--reward_input_tokenizer acts on reward models"),
        (
            {"reward_pretrain": ["m"], "reward_input_tokenizer": ["a", "b"]},
            "--reward_input_tokenizer has 2 for 1 models in --reward_pretrain: give one for all, or one each",
        ),
        (
            {**FUNCTION, "reward_manager": "prime"},
            "--reward_manager prime kills a call at its limit: set --reward_time",
        ),
        ({"reward_pretrain": ["m"], "async_rewards": True}, "--async_rewards cannot run a reward model beside generat"),
        ({**MATH, "async_rewards": True, "skip_rollout": "rollouts"}, "--async_rewards has no effect where --skip_rol"),
        ({**MATH, "code_timeout": 1.0}, "--code_timeout belongs to --reward_source code: name it there"),
        (
            {**MATH, "allow_unsafe_code_execution": True},
            "--allow_unsafe_code_execution belongs to --reward_source code",
        ),
        ({**MATH, "reward_format": "think"}, "--reward_format belongs to --reward_source format"),
        ({"reward_source": ["code"], "math_unmarked": False}, "--math_unmarked belongs to --reward_source math"),
        ({**MATH, "sandbox_fusion_url": "http://h"}, "--sandbox_fusion_url belongs to --reward_source code"),
        ({"reward_source": ["code"], "function_call_retries": 1}, "--function_call_retries needs --function_call_url"),
        (
            {"reward_source": ["code"], "sandbox_fusion_url": "http://h", "function_call_url": "http://h"},
            "--sandbox_fusion_url and --function_call_url both run the programs: set one of them",
        ),
        (
            {"reward_source": ["math", "format=0.1"], "check_verifier_status": True},
            "--check_verifier_status with several sources cannot know their lowest sum: set --reward_minimum",
        ),
        ({**MATH, "reward_minimum": 0.0}, "--reward_minimum has no effect without --check_verifier_status"),
    ],
)
def test_problems(options, fragment):
    (message,) = problems(**options)
    assert fragment in message


def test_two_flags_can_be_added_up():
    options = {**FUNCTION, **SERVER, "reward_source": ["function", "server=0.5"]}
    assert problems(**options) == []
