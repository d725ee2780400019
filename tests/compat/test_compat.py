"""The seed's options: defaults of SPEC row C2, generation options, args beneath them, mistakes."""

from __future__ import annotations

import argparse
import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from lightppo.compat.seed import config_from_options, constructor_config, take_schedule
from lightppo.config import PPOConfig
from lightppo.errors import ConfigError
from lightppo.logging.run_folder import public_options
from lightppo.trainer.build import eval_sampling_params, sampling_params

# What SPEC row C2 says the constructor means where it is given nothing.
C2_DEFAULTS = {
    "ema_beta": 0.992,
    "init_kl_coef": 0.001,
    "kl_target": None,
    "kl_horizon": 10_000,
    "ptx_coef": 0,
    "micro_train_batch_size": 8,
    "buffer_limit": 0,
    "buffer_cpu_offload": True,
    "eps_clip": 0.2,
    "value_clip": 0.2,
    "micro_rollout_batch_size": 8,
    "gradient_checkpointing": False,
    "max_epochs": 1,
    "max_norm": 1.0,
    "prompt_max_len": 128,
    "dataloader_pin_memory": True,
    "save_hf_ckpt": False,
    "disable_ds_ckpt": False,
}
# Another value for each, and for each generation option: option → (value, name in the config)
OTHER_VALUES: dict[str, tuple[Any, str]] = {
    "ema_beta": (0.5, "ema_beta"),
    "init_kl_coef": (0.2, "init_kl_coef"),
    "kl_target": (0.1, "kl_target"),
    "kl_horizon": (500, "kl_horizon"),
    "ptx_coef": (0.3, "ptx_coef"),
    "micro_train_batch_size": (2, "micro_train_batch_size"),
    "buffer_limit": (4096, "buffer_limit"),
    "buffer_cpu_offload": (False, "buffer_cpu_offload"),
    "eps_clip": (0.1, "eps_clip"),
    "value_clip": (None, "value_clip"),
    "micro_rollout_batch_size": (3, "micro_rollout_batch_size"),
    "gradient_checkpointing": (True, "gradient_checkpointing"),
    "max_epochs": (2, "max_epochs"),
    "max_norm": (0.5, "max_norm"),
    "prompt_max_len": (64, "prompt_max_len"),
    "dataloader_pin_memory": (False, "dataloader_pin_memory"),
    "save_hf_ckpt": (True, "save_hf_ckpt"),
    "disable_ds_ckpt": (True, "disable_ds_ckpt"),
    "max_new_tokens": (7, "generate_max_len"),
    "generate_max_len": (7, "generate_max_len"),
    "min_new_tokens": (2, "min_new_tokens"),
    "do_sample": (False, "do_sample"),
    "temperature": (0.7, "temperature"),
    "top_p": (0.9, "top_p"),
    "top_k": (5, "top_k"),
    "repetition_penalty": (1.2, "repetition_penalty"),
    "presence_penalty": (0.5, "presence_penalty"),
    "frequency_penalty": (-0.5, "frequency_penalty"),
    "min_p": (0.1, "min_p"),
    "stop": (("\n",), "stop"),
    "stop_token_ids": ((3, 4), "stop_token_ids"),
    "bad_words": (("no",), "bad_words"),
    "ignore_eos": (True, "ignore_eos"),
    "gamma": (0.9, "gamma"),
    "lambd": (0.5, "lambd"),
}

TOKENIZER = SimpleNamespace(pad_token_id=0, eos_token_id=2)


def args_of(**values: Any) -> argparse.Namespace:
    return argparse.Namespace(**values)


def test_constructor_defaults_are_those_of_the_contract():
    flat = config_from_options(None, {}).flat()
    assert {name: flat[name] for name in C2_DEFAULTS} == C2_DEFAULTS
    assert (flat["remote_rm_url"], flat["reward_fn"]) == ((), None)
    assert (flat["gamma"], flat["lambd"]) == (1.0, 0.95)


def test_the_remaining_defaults_of_the_contract_are_parameters():
    from lightppo import PPOTrainer

    parameters = inspect.signature(PPOTrainer.__init__).parameters
    assert list(parameters)[1:11] == [
        *("strategy", "actor", "critic", "reward_model", "initial_model", "ema_model"),
        *("actor_optim", "critic_optim", "actor_scheduler", "critic_scheduler"),
    ]
    assert all(
        parameters[name].default is inspect.Parameter.empty for name in list(parameters)[1:11]
    )
    assert {parameters[name].default for name in ("tokenizer", "remote_rm_url", "reward_fn")} == {
        None
    }


@pytest.mark.parametrize("option", OTHER_VALUES)
def test_every_option_reaches_the_config(option):
    value, name = OTHER_VALUES[option]
    needed = {"kl_target": 0.1} if option == "kl_horizon" else {}
    flat = config_from_options(None, needed | {option: value}).flat()
    assert flat[name] == value
    assert flat[name] != config_from_options(None, {}).flat()[name]


def test_other_values_cover_every_default():
    assert C2_DEFAULTS.keys() <= OTHER_VALUES.keys()


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("eps_clp", "eps_clip"),
        ("max_new_token", "max_new_tokens"),
        ("micro_batch_size", "micro_train_batch_size"),
        ("lambda", "lambd"),
        ("reward_func", "reward_fn"),
        ("tokeniser", "tokenizer"),
    ],
)
def test_an_unknown_option_names_the_nearest(wrong, right):
    with pytest.raises(ConfigError, match=rf"'{wrong}'.*'{right}'"):
        config_from_options(None, {wrong: 1})


def test_an_option_that_is_none_and_like_none():
    with pytest.raises(ConfigError, match=r"'qqqq'$"):
        config_from_options(None, {"qqqq": 1})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eps_clip": 1.5}, "--eps_clip .*1.5"),
        ({"temperature": -1}, "--temperature"),
        ({"max_new_tokens": 0}, "--generate_max_len .*0"),
        ({"min_new_tokens": 9, "max_new_tokens": 4}, "--min_new_tokens 9.*--generate_max_len 4"),
        ({"max_epochs": "two"}, "max_epochs"),
    ],
)
def test_values_out_of_range_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        config_from_options(None, options)


def test_args_fill_in_what_the_constructor_does_not_speak_of():
    args = args_of(
        n_samples_per_prompt=2,
        advantage_estimator="rloo",
        rollout_batch_size=8,
        train_batch_size=4,
        use_kl_loss=True,
        freezing_actor_steps=-1,
        seed=7,
        my_own_flag="of the script",
    )
    config = config_from_options(args, {})
    assert (config.rollout.n_samples_per_prompt, config.algorithm.advantage_estimator) == (
        2,
        "rloo",
    )
    assert (config.training.train_batch_size, config.strategy.seed) == (4, 7)
    assert (config.algorithm.use_kl_loss, config.algorithm.use_kl_in_reward) == (True, False)


@pytest.mark.parametrize(
    ("options", "whitened"),
    [
        ({"advantage_estimator": "rloo"}, True),
        ({"advantage_estimator": "rloo", "adv_norm": False}, False),
        ({"advantage_estimator": "group_norm"}, False),
        ({"advantage_estimator": "gae"}, True),
    ],
)
def test_advantages_are_whitened_as_in_the_seeds_fit(options, whitened):
    args = args_of(n_samples_per_prompt=2, rollout_batch_size=8, train_batch_size=4, **options)
    assert config_from_options(args, {}).algorithm.adv_norm == whitened
    # lightppo's own rloo has no whitening
    assert not PPOConfig.from_flat(advantage_estimator="rloo").resolved().algorithm.adv_norm


def test_options_win_over_defaults_and_defaults_over_args():
    """As in the seed: an option of the constructor comes from the constructor, whatever args hold."""
    args = args_of(eps_clip=0.3, max_epochs=4, temperature=0.5, generate_max_len=9)
    flat = config_from_options(args, {"max_epochs": 2}).flat()
    assert (flat["eps_clip"], flat["max_epochs"]) == (0.2, 2)
    # generation options are not among them
    assert (flat["temperature"], flat["generate_max_len"]) == (0.5, 9)
    flat = config_from_options(args, {"temperature": 0.25, "max_new_tokens": 5}).flat()
    assert (flat["temperature"], flat["generate_max_len"]) == (0.25, 5)


def test_the_clip_range_of_the_constructor_is_both_sides():
    args = args_of(eps_clip_low=0.05, eps_clip_high=0.4)
    kept = config_from_options(args, {}).loss
    assert (kept.eps_clip_low, kept.eps_clip_high) == (0.05, 0.4)
    given = config_from_options(args, {"eps_clip": 0.1}).loss
    assert (given.eps_clip_low, given.eps_clip_high) == (0.1, 0.1)


def test_the_seeds_types_become_ours():
    args = args_of(
        reward_pretrain="a/rm1,b/rm2",
        remote_rm_url="http://one:1,http://two:2",
        use_wandb="secret-key",
        save_steps=float("inf"),
        eval_steps=float("inf"),
        reward_clip_range=[-5, 5],
        stop="a, b",
    )
    flat = config_from_options(args, {}).flat()
    assert flat["reward_pretrain"] == ("a/rm1", "b/rm2")
    assert flat["remote_rm_url"] == ("http://one:1", "http://two:2")
    assert flat["use_wandb"] is True  # never the key itself
    assert (flat["save_steps"], flat["eval_steps"]) == (-1, -1)
    assert flat["reward_clip_range"] == (-5, 5)
    assert flat["stop"] == ("a, b",)  # a stop string may hold a comma


def test_nones_of_args_are_no_values():
    args = args_of(
        reward_pretrain=None, remote_rm_url=None, use_wandb=None, stop=None, wandb_project=None
    )
    flat, defaults = config_from_options(args, {}).flat(), PPOConfig().flat()
    assert {name: flat[name] for name in vars(args)} == {
        name: defaults[name] for name in vars(args)
    }


def test_contradictions_of_options_and_args_are_refused():
    with pytest.raises(ConfigError, match="--train_batch_size 5"):
        config_from_options(args_of(rollout_batch_size=8, train_batch_size=5), {})
    with pytest.raises(ConfigError, match="--n_samples_per_prompt"):
        config_from_options(args_of(advantage_estimator="grpo"), {})


def test_settings_of_a_critic_that_is_not_there_are_said_and_do_not_stop_a_script(capsys):
    """Scripts hand over all their options, whatever they train, and their defaults are not ours."""
    args = args_of(advantage_estimator="rloo", n_samples_per_prompt=2, critic_learning_rate=1e-3)
    flat = config_from_options(args, {"value_clip": 0.5, "lambd": 1.0}).flat()
    said = capsys.readouterr().out
    for name in ("critic_learning_rate", "value_clip", "lambd"):
        assert f"{name} needs a critic" in said
        assert flat[name] == PPOConfig().flat()[name]
    assert (
        config_from_options(args_of(critic_learning_rate=1e-3), {}).training.critic_learning_rate
        == 1e-3
    )
    assert capsys.readouterr().out == ""
    with pytest.raises(ConfigError, match="--critic_learning_rate needs a critic"):
        constructor_config(
            PPOConfig.from_flat(**vars(args)), SimpleNamespace(world_size=1), {}, None
        )


def test_batch_sizes_are_checked_against_the_ranks():
    args = args_of(rollout_batch_size=6, train_batch_size=3)
    assert config_from_options(args, {}, world_size=3).training.train_batch_size == 3
    with pytest.raises(ConfigError, match="--train_batch_size 3"):
        config_from_options(args, {}, world_size=2)


def test_the_result_is_resolved():
    config = config_from_options(None, {"eps_clip": 0.1})
    assert config == config.resolved()
    assert (config.loss.eps_clip_high, config.algorithm.adv_norm) == (0.1, True)


def test_a_config_made_in_code_is_checked_and_resolved():
    config = PPOConfig.from_flat(rollout_batch_size=6, train_batch_size=3, eps_clip=0.1)
    assert (
        constructor_config(config, SimpleNamespace(world_size=3), {}, None).loss.eps_clip_low == 0.1
    )
    with pytest.raises(ConfigError, match="--train_batch_size 3"):
        constructor_config(config, SimpleNamespace(world_size=2), {}, None)
    config.loss.eps_clip = 2.0  # past from_flat's checks
    with pytest.raises(ConfigError, match=r"--eps_clip .*2\.0"):
        constructor_config(config, SimpleNamespace(world_size=3), {}, None)


def test_what_a_reward_url_carries_is_kept_out_of_files():
    urls = [
        "https://host:8000/reward?key=SECRET#SECRET",
        "rewards.py",
        "http://user:SECRET@other/reward",
    ]
    config = PPOConfig.from_flat(remote_rm_url=urls, seed=3)
    public = public_options(config)
    assert "SECRET" not in str(public)
    first, second, third = public["remote_rm_url"]
    assert first.startswith("https://host:8000/reward")
    assert (second, third) == ("rewards.py", "http://…@other/reward")
    rest = {name: value for name, value in config.flat().items() if name != "remote_rm_url"}
    assert {name: public[name] for name in rest} == rest


# -- special tokens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("eos", "stop_ids", "expected"),
    [
        (None, (), ()),
        (2, (), ()),  # the tokenizer's own end of text needs no stop id
        (9, (), (9,)),
        ([2, 8, 9], (), (8, 9)),
        (9, (5,), (5, 9)),
    ],
)
def test_other_end_of_text_ids_become_stop_ids(eos, stop_ids, expected):
    options = {"eos_token_id": eos, "stop_token_ids": stop_ids}
    assert config_from_options(None, options, TOKENIZER).rollout.stop_token_ids == expected


def test_max_length_counts_prompt_and_response():
    options = {"max_length": 100, "prompt_max_len": 60}
    assert config_from_options(None, options).rollout.generate_max_len == 40
    assert (
        config_from_options(None, {**options, "max_new_tokens": 10}).rollout.generate_max_len == 10
    )
    with pytest.raises(ConfigError, match=r"max_length 60.*max_new_tokens"):
        config_from_options(None, {"max_length": 60, "prompt_max_len": 60})


def test_the_pad_token_must_be_the_tokenizers():
    config_from_options(None, {"pad_token_id": 0}, TOKENIZER)
    with pytest.raises(ConfigError, match="pad_token_id 2"):
        config_from_options(None, {"pad_token_id": 2}, TOKENIZER)


# -- sampling and schedule -------------------------------------------------------------------------------------------


def test_sampling_takes_every_generation_option():
    config = PPOConfig.from_flat(
        generate_max_len=11,
        min_new_tokens=2,
        temperature=0.5,
        top_p=0.75,
        top_k=3,
        repetition_penalty=1.25,
        n_samples_per_prompt=4,
        stop=["x"],
        stop_token_ids=[5],
        bad_words=["y"],
        do_sample=False,
        ignore_eos=True,
        seed=9,
    )
    s = sampling_params(config)
    assert (s.max_new_tokens, s.min_new_tokens, s.temperature, s.top_p, s.top_k) == (
        11,
        2,
        0.5,
        0.75,
        3,
    )
    assert (s.repetition_penalty, s.n, s.stop, s.stop_token_ids, s.bad_words) == (
        1.25,
        4,
        ("x",),
        (5,),
        ("y",),
    )
    assert (s.do_sample, s.ignore_eos, s.seed) == (False, True, 9)


def test_evaluation_samples_as_training_but_for_its_own_options():
    config = PPOConfig.from_flat(
        generate_max_len=11,
        temperature=0.5,
        top_p=0.75,
        n_samples_per_prompt=4,
        do_sample=False,
        seed=9,
    )
    s = eval_sampling_params(config.resolved())
    assert (s.n, s.temperature, s.top_p, s.do_sample, s.greedy) == (1, 0.0, 1.0, True, True)
    assert (s.max_new_tokens, s.seed) == (11, 9)
    assert eval_sampling_params(config.with_options(eval_n_samples=2).resolved()).temperature == 1
    config = config.with_options(
        eval_n_samples=3, eval_temperature=0.25, eval_top_p=0.5, eval_top_k=7
    )
    s = eval_sampling_params(config.resolved())
    assert (s.n, s.temperature, s.top_p, s.top_k) == (3, 0.25, 0.5, 7)


def test_fit_takes_its_schedule_from_args():
    given = {
        "num_episodes": 3,
        "save_steps": 5,
        "eval_steps": 7,
        "logging_steps": 2,
        "ckpt_path": "/somewhere",
        "max_ckpt_num": 9,
        "max_ckpt_mem": 12.5,
    }
    config = PPOConfig.from_flat(eps_clip=0.1, seed=3)
    flat = take_schedule(config, args_of(**given, eps_clip=0.4, seed=4, own=1), 3).flat()
    assert {name: flat[name] for name in given} == given
    assert (flat["eps_clip"], flat["seed"]) == (0.1, 3)  # the constructor has had them
    assert take_schedule(config, args_of(save_steps=float("inf")), 3).checkpoint.save_steps == -1
    assert take_schedule(config, args_of(), 3) == config


def test_args_get_what_the_seeds_fit_puts_there():
    args = args_of(save_steps=-1, eval_steps=-1)
    config = take_schedule(PPOConfig(), args, 3)
    assert (config.checkpoint.save_steps, config.evaluation.eval_steps) == (-1, -1)
    assert (args.save_steps, args.eval_steps) == (float("inf"), 3)
