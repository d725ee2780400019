"""Reward sources by name: each option reaches its source; weighted sums and routes."""

from __future__ import annotations

import json

import pytest
from support.fakes import make_rollout

from lightppo.config import PPOConfig
from lightppo.config.reward_rules import reward_plan
from lightppo.errors import RewardError
from lightppo.rewards import named
from lightppo.rewards.formats import has_think
from lightppo.rewards.services import FunctionCallVerifier, SandboxFusionVerifier
from lightppo.rewards.source import RewardOutput, RewardSource

GOOD = "<think>2 + 2</think><answer>4</answer>"


class Constant:
    """Gives every sample one number."""

    def __init__(self, name: str, score: float) -> None:
        self.name, self.constant = name, score

    def score(self, rollouts: list) -> RewardOutput:
        return RewardOutput([self.constant] * len(rollouts))


def source(**options) -> RewardSource:
    config = PPOConfig.from_flat(**options)
    own = {"function": lambda: Constant("function", 3.0), "model": lambda: Constant("model", 5.0)}
    return named.with_format_check(named.planned_source(reward_plan(config), config.verifier, own), config.verifier)


def scores(reward_source: RewardSource, *texts: str, **fields) -> list[float | None]:
    rollouts = [make_rollout(label="4", response_text=text, **fields) for text in texts]
    return reward_source.score(rollouts).scores


def test_one_source_is_itself():
    math = source(reward_source=["math"])
    assert math.name == "math"
    assert scores(math, GOOD, "it is 5") == [1.0, 0.0]


def test_weights_add_up():
    both = source(reward_source=["math=2", "format=0.5", "function=-1"])
    assert scores(both, GOOD, "the answer is 4", "<think>a</think><answer>5</answer>") == [-0.5, -1.0, -2.5]
    assert scores(source(reward_source=["function=0.5"]), "a") == [1.5]


def test_routes_by_data_source_and_by_label():
    routes = json.dumps({"gsm8k": {"math": 1}, "chat": {"model": 2, "function": 1}})
    routed = source(reward_routes=routes)
    assert scores(routed, GOOD, data_source="gsm8k") == [1.0]
    assert scores(routed, GOOD, data_source="chat") == [13.0]
    with pytest.raises(RewardError, match="no reward source is set for the data source 'code'"):
        scores(routed, GOOD, data_source="code")
    by_label = source(reward_routes=json.dumps({"4": {"math": 1}, "*": {"model": 1}}), reward_routes_by="label")
    assert scores(by_label, GOOD) == [1.0]


def test_options_of_mathematics():
    options = {"reward_timeout": 2.5, "reward_workers": 3, "reward_retries": 4, "on_reward_failure": "error"}
    math = source(reward_source=["math"], math_unmarked=False, **options)
    assert (math.math_unmarked, math.reward_retries, math.on_reward_failure) == (False, 4, "error")
    assert (math._pool.timeout, math._pool._slots.n) == (2.5, 3)
    assert scores(math, "I guess 4") == [0.0]  # not marked
    assert source(reward_source=["math"]).on_reward_failure == "unscored"


def test_options_of_formats():
    assert source(reward_source=["format"], reward_format="think").check is has_think
    checked = source(reward_source=["math"], check_xml_format=True)
    assert scores(checked, GOOD, "<think>a</think><answer>5</answer>", "5") == [1.0, -0.8, -1.0]
    with pytest.raises(ValueError, match=r"--check_xml_format: function does not say .* set --reward_minimum"):
        source(reward_source=["function"], check_xml_format=True)
    assert source(reward_source=["function"], check_xml_format=True, reward_minimum=3.0).wrong == 3.0


def test_options_of_functions():
    options = {"reward_fn_style": "trl", "reward_manager": "prime", "reward_workers": 2, "reward_timeout": 3.0}
    config = PPOConfig.from_flat(**options, reward_retries=1, on_reward_failure="unscored").verifier
    assert named.function_options(config) == options | {"reward_retries": 1, "on_reward_failure": "unscored"}
    assert named.function_options(PPOConfig().verifier)["on_reward_failure"] == "error"


LIMITS = {
    "code_timeout": 2.0,
    "code_memory_limit_mb": 300,
    "code_file_limit_mb": 3,
    "code_output_limit_mb": 4,
    "code_max_processes": 5,
}
COMPARISON = {"code_compare": "lines", "code_float_tolerance": 0.01}


def test_options_of_the_sandbox(monkeypatch):
    made = {}

    class Pool:
        size = 1

        def __init__(self, limits, **options) -> None:
            made.update(vars(limits) if hasattr(limits, "__dict__") else {n: getattr(limits, n) for n in LIMITS})
            made.update(options)

    monkeypatch.setattr("lightppo.sandbox.SandboxPool", Pool)
    code = source(
        reward_source=["code"],
        code_score="share",
        code_max_tests=7,
        code_total_timeout=9.0,
        code_processes=3,
        allow_unsafe_code_execution=True,
        on_reward_failure="error",
        **LIMITS,
        **COMPARISON,
    )
    assert made == LIMITS | {"code_processes": 3, "allow_unsafe_code_execution": True}
    assert (code._all, code._most, code._on_failure) == (False, 7, "error")
    assert code._verifier.code_total_timeout == 9.0
    comparison = code._verifier.comparison
    assert (comparison.code_compare, comparison.code_float_tolerance) == ("lines", 0.01)


def test_options_of_execution_services(monkeypatch):
    seen: dict = {}
    for kind in (SandboxFusionVerifier, FunctionCallVerifier):
        monkeypatch.setattr(kind, "__init__", lambda self, *args, **options: seen.update(options, args=args))
    fusion = {
        "sandbox_fusion_max_concurrent": 3,
        "sandbox_fusion_memory_limit_mb": 200,
        "sandbox_fusion_language": "cpp",
        "sandbox_fusion_retries": 1,
        "code_timeout": 2.0,
    }
    monkeypatch.setattr(named, "CodeReward", lambda verifier, **_: verifier)
    source(reward_source=["code"], sandbox_fusion_url="http://h:1", **fusion, **COMPARISON)
    url, comparison = seen.pop("args")
    assert (url, comparison.code_compare, seen) == ("http://h:1", "lines", fusion)
    seen.clear()
    calls = {
        "function_call_max_concurrent": 3,
        "function_call_batch_size": 4,
        "function_call_memory_limit_mb": 256,
        "function_call_retries": 1,
        "code_timeout": 2.0,
    }
    source(reward_source=["code"], function_call_url="http://h:2", **calls)
    assert seen.pop("args") == ("http://h:2",)
    assert seen == calls
