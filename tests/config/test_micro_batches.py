"""Sizes of micro batches, call by call."""

from __future__ import annotations

import pytest

from lightppo.config import PPOConfig
from lightppo.config.micro_batches import MicroBatchSpec, micro_batch_spec, parse_specs, problems
from lightppo.errors import ConfigError


def spec(call: str, **options: object) -> MicroBatchSpec:
    return micro_batch_spec(PPOConfig.from_flat(micro_rollout_batch_size=3, micro_train_batch_size=5, **options), call)


def test_the_narrowest_option_holds() -> None:
    assert spec("reference") == spec("reward") == MicroBatchSpec(3)
    assert spec("actor_train") == spec("critic_train") == MicroBatchSpec(5)
    assert spec("actor", max_tokens_per_micro_batch=64) == MicroBatchSpec(64, "tokens")
    assert spec("critic_train", max_tokens_per_micro_batch=64) == MicroBatchSpec(64, "tokens")
    own = {"max_tokens_per_micro_batch": 64, "micro_batch_specs": ["critic=7", "actor_train=128t"]}
    assert spec("critic", **own) == MicroBatchSpec(7)
    assert spec("actor_train", **own) == MicroBatchSpec(128, "tokens")
    assert spec("critic_train", **own) == MicroBatchSpec(64, "tokens")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("reference", "--micro_batch_specs 'reference': write CALL=SAMPLES or CALL=TOKENSt"),
        ("reference=0", "write CALL=SAMPLES or CALL=TOKENSt"),
        ("reference=4k", "write CALL=SAMPLES or CALL=TOKENSt"),
        ("actor_trian=4", r"no such call \(did you mean 'actor_train'\?\)"),
    ],
)
def test_what_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_specs((text,))
    assert problems(PPOConfig.from_flat(micro_batch_specs=[text]), {})


def test_twice_the_same_call() -> None:
    with pytest.raises(ConfigError, match="--micro_batch_specs names actor twice"):
        parse_specs(("actor=4", "actor=8t"))


@pytest.mark.parametrize(
    ("call", "options", "why"),
    [
        ("critic_train", {"advantage_estimator": "reinforce"}, "--advantage_estimator reinforce has no critic"),
        ("reference", {"init_kl_coef": 0.0}, "--init_kl_coef 0 needs no reference"),
        ("reward", {"reward_fn": "r.py"}, "it needs --reward_pretrain"),
    ],
)
def test_a_call_that_the_run_does_not_make(call: str, options: dict, why: str) -> None:
    config = PPOConfig.from_flat(pretrain="m", prompt_data="p.jsonl", micro_batch_specs=[f"{call}=4"], **options)
    with pytest.raises(ConfigError, match=f"--micro_batch_specs {call}=…: {why}; leave it out"):
        config.validate()
