"""Which options the parts of ``--reward_source code`` are made with."""

from functools import wraps
from types import SimpleNamespace

import pytest

from lightppo.config import PPOConfig
from lightppo.ranks import Alone
from lightppo.trainer.build import build_reward
from lightppo.verifiers import programs


@pytest.fixture
def made(monkeypatch):
    """What the parts of ``--reward_source code`` were made with."""
    seen = {}

    def record(name):
        kind = getattr(programs, name)

        @wraps(kind)
        def make(**options):
            seen.setdefault("kinds", []).append(name)
            seen.update(
                {
                    key: value
                    for key, value in options.items()
                    if isinstance(value, (str, bool, int, float))
                }
            )
            return SimpleNamespace(
                size=1, concurrency=1, close=lambda: None, name="code", score=print
            )

        monkeypatch.setattr(programs, name, make)

    names = ("SandboxPool", "SandboxLimits", "SandboxVerifier", "Comparison", "CodeReward")
    for name in (*names, "SandboxFusionVerifier", "FunctionCallVerifier"):
        record(name)
    return seen


CODE = {
    "code_score": "share",
    "code_max_tests": 7,
    "on_reward_failure": "error",
    "code_timeout": 2.0,
}

COMPARISON = {"code_compare": "lines"}

LOCAL = {"code_memory_limit_mb": 300, "code_processes": 3, "allow_unsafe_code_execution": True}


@pytest.mark.parametrize(
    ("options", "verifier"),
    [
        (LOCAL | COMPARISON, "SandboxVerifier"),
        ({"sandbox_fusion_url": "http://h:1"} | COMPARISON, "SandboxFusionVerifier"),
        ({"function_call_url": "http://h:2"}, "FunctionCallVerifier"),
    ],
)
def test_options_of_programs(made, options, verifier):
    build_reward(PPOConfig.from_flat(reward_source=["code"], **options, **CODE), [], None, Alone())
    assert made.pop("kinds")[-2:] == [verifier, "CodeReward"]
    assert made == options | CODE
