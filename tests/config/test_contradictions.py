"""Options without effect: what they need, in words; what is refused, and what is told at the start."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.options import other_value

from lightppo.config import PPOConfig
from lightppo.config.contradictions import condition_text, conditions, idle_flags
from lightppo.config.options import all_options
from lightppo.errors import ConfigError
from lightppo.option import Option
from lightppo.plugin import REWARDS

PATHS = {"pretrain": "model", "prompt_data": "p.jsonl", "reward_fn": "r.py"}
RLOO = {"advantage_estimator": "rloo", "n_samples_per_prompt": 2}
GROUP = {"advantage_estimator": "grpo", "n_samples_per_prompt": 4}
TEACHER = {"advantage_estimator": "on_policy_distill", "teacher_pretrain": "larger"}
NO_REWARD: dict[str, Any] = {"reward_fn": None}
MATH = {"reward_source": ["math"]}
LORA = {"lora_rank": 4}


def config(**options: Any) -> PPOConfig:
    return PPOConfig.from_flat(PATHS | options)


def problems(options: dict[str, Any]) -> list[str]:
    try:
        config(**options).validate()
    except ConfigError as error:
        return str(error).split("\n")
    return []


def test_every_condition_is_of_options_or_facts_and_has_words():
    names = {option.name for option in all_options()}
    assert not names & conditions().keys()
    for option in all_options():
        for condition in option.needs:
            assert (
                set(re.findall(r"(?:^| or )(\w+)", condition))
                <= names | conditions().keys() | REWARDS.keys()
            ), option.name
            assert condition_text(condition)
    assert (
        condition_text("zero_stage=2|3 or lora_rank>0")
        == "--zero_stage 2 or 3 or --lora_rank above 0"
    )
    assert condition_text("rollout_check!=off") == "--rollout_check other than off"


NEEDY = [one for one in all_options() if one.needs]


def without_needs(one: Option) -> dict[str, Any]:
    """A run in which what the option needs is missing."""
    condition = one.needs[0]
    missing = {
        "critic": RLOO,
        "sampling": {"temperature": 0.0},
        "ptx_coef>0": {"ptx_coef": 0.0},
        "packing_samples!=False": {"packing_samples": False},
        "discounting": GROUP,
        "trained_scores": TEACHER,
        "whitening": RLOO,
        "clipping": {"policy_loss": "kl_cov"},
        "policy_loss=ppo|gspo": {"policy_loss": "cispo"},
        "rollout_engine=hf": {"rollout_engine": "vllm"},
        "own_reference": {**LORA, "zero_stage": 3},
        "init_kl_coef>0": {"init_kl_coef": 0.0},
        "zero_stage!=0": {"zero_stage": 0},
        "zero_stage!=3": {"zero_stage": 3},
        "zero_stage=1|2|3": {"zero_stage": 0},
        "zero_stage=2|3": {"zero_stage": 1},
        "dataset_max_filter_percentage>0": {"dataset_max_filter_percentage": 0.0},
        "reward_minimum or one_source": {
            "reward_fn": None,
            "reward_source": ["math", "format=0.1"],
        },
        "function": {**NO_REWARD, **MATH},
        "env or tools or server or function": {**NO_REWARD, **MATH},
        "function or math": {**NO_REWARD, "reward_source": ["format"]},
        "function or server or math or code": {**NO_REWARD, "reward_source": ["format"]},
    }
    return missing.get(condition, {})


@pytest.mark.parametrize("one", NEEDY, ids=[one.name for one in NEEDY])
def test_what_is_off_or_the_default_is_a_note_where_another_value_is_an_error(one):
    run = without_needs(one)
    for value in (one.default, *one.off):
        given = config(**run | {one.name: value})
        given.validate()
        ((needed, names),) = idle_flags(given, {one.name}).items()
        assert names == [one.name]
        assert needed == condition_text(one.needs[0])
    refused = problems(run | {one.name: other_value(one)})
    assert any(f"{one.name} needs {needed}" in message for message in refused)


def test_options_that_were_not_given_are_no_note():
    assert idle_flags(config(**RLOO), {"pretrain"}) == {}
    assert idle_flags(config(**GROUP), {"pretrain", "gamma"}) == {
        conditions()["discounting"]: ["gamma"]
    }
    assert idle_flags(config(lora_rank=4, lora_alpha=16), {"lora_alpha"}) == {}
