"""Combinations of options: those that cannot work, and what "None means …" stands for."""

from __future__ import annotations

from typing import Any

import pytest

from lightppo.config import PPOConfig
from lightppo.config.rules import trainer_contradictions
from lightppo.errors import ConfigError

GROUP = {"advantage_estimator": "rloo", "n_samples_per_prompt": 2}
SERVER = {"reward_fn": None, "remote_rm_url": ["http://host/score"]}


def config(**options: Any) -> PPOConfig:
    return PPOConfig.from_flat({"pretrain": "model", "prompt_data": "p.jsonl", "reward_fn": "r.py", **options})


def problems(options: dict[str, Any], world_size: int = 1) -> list[str]:
    with pytest.raises(ConfigError) as error:
        config(**options).validate(world_size)
    return str(error.value).split("\n")


# Options beside those every run needs → a fragment of the only message.
CONTRADICTIONS = [
    # what every run needs
    ({"pretrain": None}, "--pretrain is required"),
    ({"prompt_data": None}, "--prompt_data is required"),
    (
        {"reward_fn": None},
        "no reward: set --reward_fn path.py, --remote_rm_url URL, --reward_pretrain MODEL or a built-in",
    ),
    # batch sizes: 512 prompts by default
    ({"train_batch_size": 100}, "--train_batch_size 100 does not divide the 512 samples of a rollout"),
    ({"train_batch_size": 100}, "set it to a divisor such as 4, or set --ppo_n_minibatches"),  # gcd(512, 100)
    ({"rollout_batch_size": 6, "n_samples_per_prompt": 2, "train_batch_size": 24}, "does not divide the 12 samples"),
    ({"ppo_n_minibatches": 5}, "--ppo_n_minibatches 5 does not divide the 512 samples of a rollout"),
    ({"ppo_n_minibatches": 1024}, "--ppo_n_minibatches 1024 does not divide the 512 samples of a rollout"),
    (
        {"ppo_n_minibatches": 4, "train_batch_size": 64},
        "--train_batch_size 64 and --ppo_n_minibatches 4 disagree for 512 samples per rollout: set one of them",
    ),
    ({"min_new_tokens": 9, "generate_max_len": 8}, "--min_new_tokens 9 exceeds --generate_max_len 8"),
    ({"buffer_limit": 511}, "--buffer_limit 511 would lose samples: one rollout has 512 per rank"),
    # a prompt once for all its samples
    ({"share_prompts": False}, "--no_share_prompts has no effect without --packing_samples"),
    ({"shuffle": "groups"}, "--shuffle groups keeps the samples of a prompt together, and --n_samples_per_prompt 1"),
    # rollouts
    ({"stop": ["\n", ""]}, "--stop has an empty text: leave it out"),
    ({"bad_words": [" "]}, "--bad_words has an empty text: leave it out"),
    # critic
    ({"init_critic_from_actor": True, "critic_pretrain": "other"}, "name two starts for the critic: set one"),
    ({**GROUP, "critic_pretrain": "model"}, "--critic_pretrain needs a critic"),
    ({**GROUP, "init_critic_from_actor": True}, "--init_critic_from_actor needs a critic"),
    ({**GROUP, "critic_zero_stage": 2}, "--critic_zero_stage needs a critic"),
    ({**GROUP, "critic_adam_offload": True}, "--critic_adam_offload needs a critic"),
    ({**GROUP, "critic_param_offload": False}, "--critic_param_offload needs a critic"),
    ({**GROUP, "save_value_network": True}, "leave it out or use --advantage_estimator gae"),
    # models
    ({"flash_attn": True, "attn_implementation": "sdpa"}, "--flash_attn contradicts --attn_implementation sdpa"),
    (
        {"gradient_checkpointing_use_reentrant": True},
        "--gradient_checkpointing_use_reentrant has no effect without --gradient_checkpointing",
    ),
    ({"ref_pretrain": "other", "init_kl_coef": 0}, "--ref_pretrain has no effect with --init_kl_coef 0"),
    ({"override_config": "rope_theta=1"}, "--override_config must be a JSON object, not 'rope_theta=1'"),
    ({"override_config": "[1]"}, "--override_config must be a JSON object, not '[1]'"),
    # rewards
    ({"reward_fn": None, "reward_pretrain": ["a", "b"]}, "2 models in --reward_pretrain need --reward_fn path.py:name"),
    ({**SERVER, "reward_pretrain": ["a"]}, "--remote_rm_url and --reward_pretrain are two sources of reward"),
    ({**SERVER, "reward_fn": "r.py"}, "--remote_rm_url and --reward_fn are two sources of reward"),
    ({"normalize_reward": True}, "--normalize_reward acts on reward models: it needs --reward_pretrain"),
    ({**SERVER, "remote_rm_url": ["host:80"]}, "--remote_rm_url 'host:80' is neither an http(s) URL nor a .py file"),
    ({**SERVER, "remote_rm_url": ["http://me:secret@host"]}, "give a token by --remote_rm_token_env instead"),
    ({"remote_rm_token_env": "TOKEN"}, "--remote_rm_token_env is for reward servers: it needs --remote_rm_url http"),
    # data and evaluation
    ({"input_template": "Q:"}, "--input_template 'Q:' needs exactly one {} for the prompt"),
    ({"input_template": "{} {}"}, "needs exactly one {} for the prompt"),
    (
        {"input_template": "{}", "apply_chat_template": True},
        "--input_template and --apply_chat_template both render the prompt: set one",
    ),
    ({"pretrain_data": "t.jsonl", "ptx_coef": 0}, "--pretrain_data has no effect with --ptx_coef 0"),
    ({"pretrain_data_probs": "0.5,0.5"}, "--pretrain_data_probs describes --pretrain_data: set it"),
    ({"output_key": "answer"}, "--output_key describes --pretrain_data: set it, or leave --output_key out"),
    ({"eval_steps": 5}, "--eval_steps needs --eval_data"),
    ({"eval_seconds": 60}, "--eval_seconds needs --eval_data"),
    ({"val_only": True}, "--val_only needs --eval_data"),
    ({"eval_n_samples": 4, "eval_temperature": 0}, "--eval_n_samples > 1 with --eval_temperature 0"),
    # strategy
    ({"bf16": True, "zero_stage": 0, "critic_zero_stage": 1}, "needs --zero_stage 1, 2 or 3, not 0"),
    ({"bf16": True, "critic_zero_stage": 0}, "needs --critic_zero_stage 1, 2 or 3, not 0"),
    ({"adam_offload": True, "zero_stage": 0}, "--adam_offload moves sharded optimizer states"),
    ({"critic_adam_offload": True, "critic_zero_stage": 0}, "it needs --critic_zero_stage 1, 2 or 3, not 0"),
    ({"param_offload": True}, "--param_offload offloads ZeRO-3 shards: it needs --zero_stage 3, not 2"),
    ({"critic_param_offload": True}, "--critic_param_offload offloads ZeRO-3 shards: it needs --critic_zero_stage 3"),
    ({"ref_offload": True}, "--ref_offload offloads ZeRO-3 shards: it needs --ref_zero_stage 3"),
    ({"reward_offload": True}, "--reward_offload offloads ZeRO-3 shards: it needs --reward_zero_stage 3"),
    ({"grad_accum_dtype": "bf16"}, "--grad_accum_dtype bf16 needs --bf16"),
    ({"overlap_comm": True, "zero_stage": 1}, "--overlap_comm reduces shards of gradients: it needs --zero_stage 2"),
    ({"zpg": 2}, "--zpg 2 partitions ZeRO-3 parameters: it needs --zero_stage 3"),
    ({"zpg": 2, "zero_stage": 3}, "--zpg 2 does not divide the 1 ranks"),
    # checkpoints
    ({"load_checkpoint": False, "resume": "ckpt/old"}, "--no_load_checkpoint contradicts --resume PATH"),
    ({"disable_ds_ckpt": True, "save_steps": 5}, "--disable_ds_ckpt without --save_hf_ckpt leaves nothing to save"),
    ({"disable_ds_ckpt": True, "save_seconds": 60}, "--disable_ds_ckpt without --save_hf_ckpt"),
    ({"disable_ds_ckpt": True, "save_epochs": 1}, "--disable_ds_ckpt without --save_hf_ckpt"),
]


@pytest.mark.parametrize(("options", "fragment"), CONTRADICTIONS)
def test_contradictions(options, fragment):
    (message,) = problems(options)
    assert fragment in message


def test_secrets_in_an_address_are_not_shown():
    assert "secret" not in problems({**SERVER, "remote_rm_url": ["ftp://me:secret@host"]})[0]


@pytest.mark.parametrize(
    ("options", "world_size", "fragment"),
    [
        (
            {"rollout_batch_size": 7, "n_samples_per_prompt": 3, "train_batch_size": 21},
            3,
            "--rollout_batch_size 7 is not divisible by the 3 ranks; set it to a multiple of 3",
        ),
        ({"rollout_batch_size": 8, "train_batch_size": 2}, 4, "--train_batch_size 2 is not divisible by the 4 ranks"),
        ({"buffer_limit": 127}, 4, "one rollout has 128 per rank"),
        ({"zpg": 4, "zero_stage": 3, "train_batch_size": 128}, 2, "--zpg 4 does not divide the 2 ranks"),
    ],
)
def test_contradictions_with_the_number_of_ranks(options, world_size, fragment):
    (message,) = problems(options, world_size)
    assert fragment in message


def test_the_same_options_on_fitting_ranks():
    config(rollout_batch_size=511, train_batch_size=511).validate(world_size=7)
    config(rollout_batch_size=8, train_batch_size=2).validate(world_size=2)
    config(buffer_limit=128).validate(world_size=4)
    config(zpg=4, zero_stage=3).validate(world_size=8)


def test_every_contradiction_is_told_at_once():
    messages = problems({"pretrain": None, "use_kl_loss": True, "use_kl_in_reward": True, "val_only": True})
    assert [message.split(" ")[0] for message in messages] == ["--pretrain", "--use_kl_loss", "--val_only"]


def test_values_out_of_range_are_told_before_combinations():
    config_ = config()
    config_.training.train_batch_size = 0  # would divide by zero in the combinations
    with pytest.raises(ConfigError, match=r"^--train_batch_size 0 is out of range: it must be ≥1$"):
        config_.validate()


def test_a_trainer_made_by_hand_needs_no_paths():
    assert trainer_contradictions(PPOConfig()) == []
    # what a script in the seed's style fills in although no critic is trained
    assert trainer_contradictions(config(**GROUP, critic_pretrain="model")) == []
    (message,) = trainer_contradictions(PPOConfig.from_flat(advantage_estimator="grpo"))
    assert "--n_samples_per_prompt" in message


# Options → what they resolve to.
RESOLUTIONS = [
    ({}, {"ref_pretrain": "model", "critic_pretrain": "model", "attn_implementation": "auto"}),
    ({"ref_pretrain": "other"}, {"ref_pretrain": "other"}),
    ({"init_kl_coef": 0}, {"ref_pretrain": None}),
    ({"reward_pretrain": ["rm", "rm2"]}, {"critic_pretrain": "rm"}),
    ({"reward_pretrain": ["rm"], "critic_pretrain": "c"}, {"critic_pretrain": "c"}),
    ({"reward_pretrain": ["rm"], "init_critic_from_actor": True}, {"critic_pretrain": "model"}),
    (GROUP, {"critic_pretrain": None, "critic_zero_stage": None, "critic_adam_offload": None, "adv_norm": False}),
    ({"flash_attn": True}, {"attn_implementation": "flash_attention_2"}),
    ({}, {"adv_norm": True}),
    ({"adv_norm": False}, {"adv_norm": False}),
    ({**GROUP, "adv_norm": True, "adv_std_norm": False}, {"adv_norm": True, "adv_std_norm": False}),
    ({"eps_clip": 0.3}, {"eps_clip_low": 0.3, "eps_clip_high": 0.3}),
    ({"eps_clip_high": 0.28}, {"eps_clip_low": 0.2, "eps_clip_high": 0.28}),
    ({"eps_clip_low": 0.1}, {"eps_clip_low": 0.1, "eps_clip_high": 0.2}),
    ({}, {"use_kl_in_reward": True}),
    ({"use_kl_loss": True}, {"use_kl_in_reward": False}),
    ({"use_kl_in_reward": False, "init_kl_coef": 0}, {"use_kl_in_reward": False}),
    ({}, {"train_batch_size": 128}),
    ({"train_batch_size": 64}, {"train_batch_size": 64}),
    ({"ppo_n_minibatches": 4}, {"train_batch_size": 128}),  # 512 prompts × 1 sample / 4
    ({"ppo_n_minibatches": 4, "n_samples_per_prompt": 3}, {"train_batch_size": 384}),  # 512 × 3 / 4
    ({}, {"critic_zero_stage": 2, "ref_zero_stage": 0, "reward_zero_stage": 0}),
    ({"zero_stage": 3}, {"critic_zero_stage": 3, "ref_zero_stage": 3, "reward_zero_stage": 3}),
    ({"zero_stage": 3, "ref_zero_stage": 0}, {"ref_zero_stage": 0, "reward_zero_stage": 0}),
    ({"reward_zero_stage": 3}, {"ref_zero_stage": 0, "reward_zero_stage": 3}),
    ({"critic_zero_stage": 3}, {"critic_zero_stage": 3, "ref_zero_stage": 0}),
    ({"adam_offload": True}, {"critic_adam_offload": True}),
    ({"adam_offload": True, "critic_adam_offload": False}, {"critic_adam_offload": False}),
    ({"adam_offload": True, "critic_zero_stage": 0}, {"critic_adam_offload": False}),
    ({"zero_stage": 3, "param_offload": True}, {"critic_param_offload": True}),
    ({"zero_stage": 3, "param_offload": True, "critic_zero_stage": 2}, {"critic_param_offload": False}),
    ({}, {"critic_param_offload": False, "resume": "auto"}),
    ({"load_checkpoint": False}, {"resume": "never"}),
    ({"resume": "ckpt/old"}, {"resume": "ckpt/old"}),
]


@pytest.mark.parametrize(("options", "expected"), RESOLUTIONS)
def test_resolution(options, expected):
    given = config(**options)
    given.validate()
    resolved = given.resolved()
    flat = resolved.flat()
    assert {name: flat[name] for name in expected} == expected
    # a resolved config is accepted again, and stays as it is
    resolved.validate()
    assert resolved.resolved() == resolved
    assert PPOConfig.from_flat(flat) == resolved


def test_the_command_line_gives_a_resolved_config(parse):
    assert parse("--eps_clip 0.3") == config(pretrain="model", prompt_data="prompts.jsonl", reward_fn="reward.py",
                                             eps_clip=0.3).resolved()  # fmt: skip


def test_the_command_line_tells_contradictions(refusal):
    assert refusal("--use_kl_loss --use_kl_in_reward") == (
        "train_ppo.py: error: --use_kl_loss and --use_kl_in_reward would count the KL twice: set one of them\n"
    )
