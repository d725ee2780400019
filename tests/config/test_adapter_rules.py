"""Options of LoRA: what they stand for, what would do nothing, what cannot be had together."""

from __future__ import annotations

import pytest

from lightppo.config import PPOConfig
from lightppo.config.adapter_rules import reference_is_actor
from lightppo.errors import ConfigError

REQUIRED = {"pretrain": "model", "prompt_data": "prompts.jsonl", "reward_fn": "reward.py"}


def config(**options) -> PPOConfig:
    return PPOConfig.from_flat(REQUIRED | options)


def refusal(**options) -> str:
    with pytest.raises(ConfigError) as error:
        config(**options).validate()
    return str(error.value)


@pytest.mark.parametrize("option", [{"lora_alpha": 8.0}, {"lora_dropout": 0.1}, {"target_modules": ("q_proj",)}])
def test_options_without_a_rank_are_refused(option):
    (name,) = option
    assert refusal(**option) == f"--{name} has no effect without adapters: set --lora_rank, or leave it out"


def test_weights_in_4_bits_need_adapters():
    assert refusal(load_in_4bit=True) == (
        "--load_in_4bit holds weights that do not train in 4 bits, and without adapters all train: set --lora_rank, "
        "or leave it out"
    )
    config(load_in_4bit=True, lora_rank=4, torch_compile=True).validate()


def test_what_is_not_given_is_resolved():
    plain = config().resolved().adapter
    assert (plain.lora_rank, plain.lora_alpha, plain.lora_dropout, plain.target_modules) == (0, None, None, ())
    lora = config(lora_rank=8).resolved()
    assert (lora.adapter.lora_alpha, lora.adapter.lora_dropout) == (16.0, 0.0)
    lora.validate()  # also once resolved: run_config.yaml is read again
    given = config(lora_rank=8, lora_alpha=4.0, lora_dropout=0.3).resolved().adapter
    assert (given.lora_alpha, given.lora_dropout) == (4.0, 0.3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_ema": True}, "--enable_ema averages all weights, and --lora_rank trains adapters: leave one out"),
        ({"ref_ema_eta": 0.1}, "--ref_ema_eta moves the reference, which with --lora_rank is the actor without"),
        ({"ref_reset_steps": 2}, "--ref_reset_steps moves the reference, which with --lora_rank is the actor without"),
        ({"ref_offload": True, "zero_stage": 3}, "--ref_offload has no effect: with --lora_rank the reference is"),
        ({"ref_zero_stage": 3, "zero_stage": 2}, "--ref_zero_stage has no effect: with --lora_rank the reference is"),
        ({"lora_dropout": 1.0}, "--lora_dropout 1.0 is out of range"),
        ({"lora_alpha": 0.0}, "--lora_alpha 0.0 is out of range"),
    ],
)
def test_what_cannot_go_with_adapters(options, message):
    assert message in refusal(lora_rank=4, **options)


def test_when_the_reference_is_the_actor():
    assert reference_is_actor(config(lora_rank=4))
    assert reference_is_actor(config(lora_rank=4).resolved())
    assert reference_is_actor(config(lora_rank=4, ref_pretrain="model"))
    assert not reference_is_actor(config(lora_rank=4, ref_pretrain="another"))
    assert not reference_is_actor(config(lora_rank=4, init_kl_coef=0.0))
    assert not reference_is_actor(config())
    config(lora_rank=4, ref_pretrain="another", ref_zero_stage=3, ref_offload=True).validate()
