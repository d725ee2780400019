"""Sizes of micro batches of single calls: how they are written, and which calls a run makes."""

from __future__ import annotations

import re

import pytest

from lightppo.config import PPOConfig
from lightppo.config.rules import calls, parse_specs
from lightppo.errors import ConfigError

PATHS = {"pretrain": "model", "prompt_data": "p.jsonl", "reward_fn": "r.py"}


def problems(options: dict[str, object]) -> list[str]:
    with pytest.raises(ConfigError) as error:
        PPOConfig.from_flat(PATHS | options).validate()
    return str(error.value).split("\n")


def named(message: str) -> set[str]:
    return set(re.findall(r"--(\w+)", message))


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
    assert call in calls()
    assert call in message
