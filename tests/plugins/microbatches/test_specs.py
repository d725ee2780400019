"""Sizes of micro batches: by tokens, and of single calls."""

from __future__ import annotations

import re
from typing import Any

import pytest

from lightppo.config import PPOConfig
from lightppo.config.rules import MicroBatchSpec, contradictions, micro_batch_spec
from lightppo.errors import ConfigError
from lightppo.plugins.microbatches.sections import parse_specs


def problems(options: dict[str, Any]) -> list[str]:
    """What cannot work in a run of GAE with these options."""
    needed = {"pretrain": "m", "prompt_data": "p.jsonl", "reward_fn": "r.py", "init_kl_coef": 0.01}
    needed |= {"advantage_estimator": "gae"}
    return contradictions(PPOConfig.from_flat(**needed | options), world_size=1)


def named(message: str) -> set[str]:
    """The flags in a message."""
    return set(re.findall(r"--(\w+)", message))


def spec(call: str, **options: object) -> MicroBatchSpec:
    return micro_batch_spec(
        PPOConfig.from_flat(micro_rollout_batch_size=3, micro_train_batch_size=5, **options), call
    )


def test_the_narrowest_size_of_micro_batches_holds() -> None:
    assert spec("reference") == spec("reward") == MicroBatchSpec(3)
    assert spec("actor_train") == spec("critic_train") == MicroBatchSpec(5)
    assert spec("actor", max_tokens_per_micro_batch=64) == MicroBatchSpec(64, "tokens")
    assert spec("critic_train", max_tokens_per_micro_batch=64) == MicroBatchSpec(64, "tokens")
    own = {"max_tokens_per_micro_batch": 64, "micro_batch_specs": ["critic=7", "actor_train=128t"]}
    assert spec("critic", **own) == MicroBatchSpec(7)
    assert spec("actor_train", **own) == MicroBatchSpec(128, "tokens")
    assert spec("critic_train", **own) == MicroBatchSpec(64, "tokens")


@pytest.mark.parametrize(
    ("texts", "word"),
    [
        (("reference",), "CALL=SAMPLES"),
        (("reference=0",), "CALL=SAMPLES"),
        (("reference=4k",), "CALL=SAMPLES"),
        (("actor_trian=4",), "did you mean 'actor_train'"),
        (("actor=4", "actor=8t"), "actor twice"),
    ],
)
def test_micro_batches_that_cannot_be_read(texts, word) -> None:
    with pytest.raises(ConfigError, match=f"--micro_batch_specs .*{re.escape(word)}"):
        parse_specs(texts)
    (message,) = problems({"micro_batch_specs": texts})
    assert word in message


@pytest.mark.parametrize(
    ("call", "options", "flag"),
    [
        ("critic_train", {"advantage_estimator": "reinforce"}, "advantage_estimator"),
        ("reference", {"init_kl_coef": 0.0}, "init_kl_coef"),
        ("reward", {}, "reward_pretrain"),
    ],
)
def test_micro_batches_of_a_call_that_the_run_does_not_make(call, options, flag) -> None:
    (message,) = problems({"micro_batch_specs": [f"{call}=4"], **options})
    assert {"micro_batch_specs", flag} <= named(message)
    assert call in message
