"""Options of one PPO step: each is set to another value, and something that a user sees must differ.

What is looked at: what the engine is asked for, every tensor of the experience, the status of the step, the weights.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.fakes import FakeEngine
from support.sampled import sample

from lightppo.config.options import TrainingConfig
from lightppo.option import Option

pytestmark = pytest.mark.usefixtures("world")

GAE = {"micro_train_batch_size": 2, "init_kl_coef": 0.1}
GRPO = GAE | {"advantage_estimator": "grpo", "use_kl_loss": True}
TWO_STEPS = GAE | {"train_batch_size": 2, "max_epochs": 2}

# What is changed, by the run in which it acts.
CHANGES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        GAE,
        {
            "gamma": 0.5,
            "lambd": 0.5,
            "adv_norm": False,
            "adv_norm_scope": "group",
            "adv_shift_mean": False,
            "adv_std_norm": False,
            "adv_std_unbiased": True,
            "adv_norm_eps": 2.0,
            "advantage_clip": 0.1,
            "init_kl_coef": 0.5,
            "kl_target": 0.001,
            "bootstrap_truncated": True,
            "reward_bias": 0.5,
            "reward_scaling": 2.0,
            "max_reward_clip": 0.5,
            "reward_running_norm": True,
            "stop_properly_penalty": 0.5,
            "overlong_buffer_len": 4,
            "mask_no_eos_with_zero": True,
            "mask_too_long": True,
            "reward_clip_range": (-0.5, 0.5),
            "entropy_coef": 0.5,
            "value_norm": "exp",
            "loss_agg_mode": "seq-mean-token-sum",
            "temperature": 0.5,
            "top_p": 0.5,
            "top_k": 3,
            "min_p": 0.1,
            "repetition_penalty": 1.5,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.5,
            "min_new_tokens": 1,
            "generate_max_len": 4,
            "stop": ("a",),
            "stop_token_ids": (7,),
            "bad_words": ("b",),
            "ignore_eos": True,
            "seed": 7,
        },
    ),
    (GRPO, {"group_std_norm": False, "grpo_std_eps": 1.0, "use_kl_loss": False}),
    (
        TWO_STEPS,
        {
            "eps_clip": 0.001,
            "eps_clip_low": 0.001,
            "eps_clip_high": 0.001,
            "value_clip": 0.001,
            "value_huber_delta": 0.1,
            "max_epochs": 3,
            "critic_max_epochs": 1,
            "train_batch_size": 4,
            "early_stop_kl": 1e-9,
            "freezing_actor_steps": 5,
            "policy_loss": "gspo",
        },
    ),
    (GAE | {"ppo_n_minibatches": 1}, {"n_samples_per_prompt": 1}),
    (GAE | {"overlong_buffer_len": 4}, {"overlong_penalty_factor": 3.0}),
]
CASES = [(base, name, value) for base, changes in CHANGES for name, value in changes.items()]


class Engine(FakeEngine):
    """Every second answer is truncated; log probs of its own."""

    def generate(self, prompts, sampling):
        return [
            dataclasses.replace(
                rollout, log_probs=[-1.0, -1.5], finish_reason="length" if rollout.sample_index else "stop"
            )
            for rollout in super().generate(prompts, sampling)
        ]


def plain(value: Any) -> Any:
    """Nested plain values, to be compared; what a clock measured is left out."""
    if torch.is_tensor(value):
        return value.detach().double().flatten().tolist()
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items() if "time" not in str(key)}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return str(value)


@pytest.fixture
def outcome(trainer_with, parts) -> Callable[..., Any]:
    """``outcome(**options)``: all that a step shows; each time from the same weights and optimizer states."""
    models = [parts["actor"], parts["critic"]]
    weights = [copy.deepcopy(model.state_dict()) for model, _, _ in models]
    states = [copy.deepcopy(part.state_dict()) for _, *rest in models for part in rest]

    def restore() -> None:
        for (model, *_), kept in zip(models, weights):
            model.load_state_dict(kept)
        for part, kept in zip([part for _, *rest in models for part in rest], states):
            part.load_state_dict(copy.deepcopy(kept))

    def run(**options: Any) -> Any:
        restore()
        torch.manual_seed(0)
        trainer = trainer_with(rollout_engine=(engine := Engine()), **options)
        sample(trainer)
        items = [plain(vars(item)) for item in trainer.replay_buffer.items]
        status = trainer.train(1)
        trainer.control_kl(status)
        after = [plain(dict(model.named_parameters())) for model, *_ in models]
        return plain(engine.calls), items, plain(status), trainer.kl_ctl.value, after

    yield run
    restore()


def test_the_same_options_show_the_same(outcome):
    """Else every difference below would say nothing."""
    for base, _ in CHANGES:
        assert outcome(**base) == outcome(**base)


@pytest.mark.parametrize(("base", "name", "value"), CASES, ids=[name for _, name, _ in CASES])
def test_another_value_shows(outcome, base, name, value):
    assert outcome(**base) != outcome(**base | {name: value})


def test_an_option_that_nothing_reads_would_be_noticed(outcome, monkeypatch):
    """The comparison above fails for it."""
    dead = Option("dead", int, 3, "Nothing.", owner="training")
    monkeypatch.setitem(TrainingConfig._declared, "dead", dead)
    assert outcome(**GAE) == outcome(**GAE | {"dead": 4})
