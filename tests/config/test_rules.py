"""Combinations of options: what cannot work, what would do nothing, what "None means …" stands for, facts."""

from __future__ import annotations

import re
from typing import Any

import pytest

from lightppo.algorithms.entries import ADVANTAGE_ESTIMATORS, CORRECTIONS, POLICY_LOSSES
from lightppo.config import PPOConfig
from lightppo.config.contradictions import contradictions
from lightppo.config.rules import (
    MicroBatchSpec,
    micro_batch_spec,
    old_log_probs_from,
    reference_is_actor,
)
from lightppo.errors import ConfigError
from lightppo.experience.token_weights import rejections_of
from lightppo.preflight.advice import advice

PATHS = {"pretrain": "model", "prompt_data": "p.jsonl", "reward_fn": "r.py"}
RLOO = {"advantage_estimator": "rloo", "n_samples_per_prompt": 2}
GROUP = {"advantage_estimator": "grpo", "n_samples_per_prompt": 4}
AHEAD = {
    **GROUP,
    "rollout_engine": "vllm_server",
    "vllm_server_url": ("http://localhost:1",),
    "max_staleness": 1,
}
FOUR = {"rollout_batch_size": 8, "n_samples_per_prompt": 4, "train_batch_size": 32}
TEACHER = {"advantage_estimator": "on_policy_distill", "teacher_pretrain": "larger"}
BY_LOSS = {"teacher_pretrain": "larger", "distill_by": "loss"}
NO_REWARD: dict[str, Any] = {"reward_fn": None}
MATH = {"reward_source": ["math"]}
FUNCTION = {"reward_fn": "r.py"}
SERVER = {"remote_rm_url": ["http://127.0.0.1:1/score"]}
URL = {"reward_fn": None, "remote_rm_url": ["http://host/score"]}
LOCAL = ("http://127.0.0.1:8000", "http://localhost:8001")
SERVERS = {"rollout_engine": "vllm_server", "vllm_server_url": LOCAL}
LORA = {"lora_rank": 4}
EVAL = {"eval_data": "held_out.jsonl"}
REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_use_reentrant": True}


def config(**options: Any) -> PPOConfig:
    return PPOConfig.from_flat(PATHS | options)


def problems(options: dict[str, Any], world_size: int = 1) -> list[str]:
    try:
        config(**options).validate(world_size)
    except ConfigError as error:
        return str(error).split("\n")
    return []


def contradictions_by_hand(config_: PPOConfig) -> list[str]:
    return contradictions(config_, world_size=1, by_hand=True)


def named(message: str) -> set[str]:
    return set(re.findall(r"--(\w+)", message))


# Options beside those every run needs → flags that the only message names (→ number of ranks).
CONTRADICTIONS = [
    # what every run needs, batches, models, data, strategy, checkpoints
    ({"pretrain": None}, "pretrain"),
    ({"prompt_data": None}, "prompt_data"),
    ({"reward_fn": None}, "reward_fn remote_rm_url"),
    ({"train_batch_size": 100}, "train_batch_size rollout_batch_size"),
    (
        {"rollout_batch_size": 6, "n_samples_per_prompt": 2, "train_batch_size": 24},
        "train_batch_size rollout_batch_size",
    ),
    ({"ppo_n_minibatches": 5}, "ppo_n_minibatches rollout_batch_size"),
    ({"ppo_n_minibatches": 1024}, "ppo_n_minibatches rollout_batch_size"),
    ({"ppo_n_minibatches": 4, "train_batch_size": 64}, "train_batch_size ppo_n_minibatches"),
    ({"min_new_tokens": 9, "generate_max_len": 8}, "min_new_tokens generate_max_len"),
    ({"buffer_limit": 511}, "buffer_limit"),
    ({"packing_samples": False, "share_prompts": False}, "no_share_prompts packing_samples"),
    ({"shuffle": "groups"}, "shuffle n_samples_per_prompt"),
    ({"stop": ["\n", ""]}, "stop"),
    ({"bad_words": [" "]}, "bad_words"),
    (
        {"init_critic_from_actor": True, "critic_pretrain": "other"},
        "init_critic_from_actor critic_pretrain",
    ),
    ({**RLOO, "critic_pretrain": "model"}, "critic_pretrain advantage_estimator"),
    ({**RLOO, "init_critic_from_actor": True}, "init_critic_from_actor advantage_estimator"),
    ({**RLOO, "critic_zero_stage": 2}, "critic_zero_stage advantage_estimator"),
    ({**RLOO, "save_value_network": True}, "save_value_network advantage_estimator"),
    ({"flash_attn": True, "attn_implementation": "sdpa"}, "flash_attn attn_implementation"),
    (
        {"gradient_checkpointing_use_reentrant": True},
        "gradient_checkpointing_use_reentrant gradient_checkpointing",
    ),
    ({**REENTRANT, "aux_loss_coef": 0.1}, "gradient_checkpointing_use_reentrant aux_loss_coef"),
    ({**REENTRANT, "torch_compile": True}, "gradient_checkpointing_use_reentrant torch_compile"),
    ({"torch_compile": True, "zero_stage": 3}, "torch_compile zero_stage"),
    ({"torch_compile": True, "critic_zero_stage": 3}, "torch_compile critic_zero_stage"),
    ({"ref_pretrain": "other", "init_kl_coef": 0}, "ref_pretrain init_kl_coef"),
    ({"override_config": "rope_theta=1"}, "override_config"),
    ({"override_config": "[1]"}, "override_config"),
    ({"override_config": '{"attention_dropout": 1}'}, "override_config"),
    ({"override_config": '{"text_config": {"resid_pdrop": "0.1"}}'}, "override_config"),
    ({"save_hf_ckpt": True}, "save_hf_ckpt save_steps save_epochs save_seconds"),
    ({"ptx_coef": 0.1}, "ptx_coef pretrain_data"),
    ({"ema_beta": 0.9}, "ema_beta enable_ema"),
    ({"wandb_project": "mine"}, "wandb_project use_wandb"),
    ({"wandb_run_name": "mine"}, "wandb_run_name use_wandb use_tensorboard use_trackio use_mlflow"),
    ({"wandb_group": "mine"}, "wandb_group use_wandb use_trackio use_mlflow"),
    ({"use_mlflow": "https://me:SECRET@host"}, "use_mlflow"),
    (
        {"dataset_filter_threshold": 0.5, "dataset_max_filter_percentage": 0},
        "dataset_filter_threshold",
    ),
    ({"eval_top_p": 0.9}, "eval_top_p eval_data"),
    ({"val_before_train": False}, "no_val_before_train eval_data"),
    ({"reward_fn": None, "reward_pretrain": ["a", "b"]}, "reward_pretrain reward_fn"),
    ({**URL, "reward_pretrain": ["a"]}, "remote_rm_url reward_pretrain"),
    ({**URL, "reward_fn": "r.py"}, "remote_rm_url reward_fn"),
    ({"normalize_reward": True}, "normalize_reward reward_pretrain"),
    ({**URL, "remote_rm_url": ["host:80"]}, "remote_rm_url"),
    ({**URL, "remote_rm_url": ["http://host/score", "score.py"]}, "remote_rm_url"),
    ({**URL, "remote_rm_url": ["http://me:secret@host"]}, "remote_rm_url remote_rm_token_env"),
    ({"remote_rm_token_env": "TOKEN"}, "remote_rm_token_env remote_rm_url"),
    ({"input_template": "Q:"}, "input_template"),
    ({"input_template": "{} {}"}, "input_template"),
    ({"input_template": "{}", "apply_chat_template": True}, "input_template apply_chat_template"),
    ({"pretrain_data": "t.jsonl", "ptx_coef": 0}, "pretrain_data ptx_coef"),
    ({"pretrain_data_probs": "0.5,0.5"}, "pretrain_data_probs pretrain_data"),
    ({"output_key": "answer"}, "output_key pretrain_data"),
    ({"eval_steps": 5}, "eval_steps eval_data"),
    ({"val_only": True}, "eval_data"),
    ({**EVAL, "eval_n_samples": 4, "eval_temperature": 0}, "eval_n_samples eval_temperature"),
    ({**EVAL, "eval_top_p": 0.9}, "eval_top_p eval_temperature"),
    ({**EVAL, "eval_top_k": 5, "eval_temperature": 0}, "eval_top_k eval_temperature"),
    ({"eval_reward_fn": "judge.py"}, "eval_reward_fn eval_data"),
    ({**EVAL, "eval_reward_source": ["server"]}, "eval_reward_source remote_rm_url"),
    ({**EVAL, **URL, "eval_reward_source": ["function"]}, "eval_reward_source eval_reward_fn"),
    (
        {**EVAL, "eval_reward_source": ["math"], "eval_reward_fn": "judge.py"},
        "eval_reward_fn eval_reward_source",
    ),
    ({**EVAL, "eval_reward_source": ["guess"]}, "eval_reward_source"),
    ({"prompt_data": None}, "prompt_data"),
    ({**EVAL, "prompt_data": None, "reward_fn": None, "val_only": True}, "reward_fn remote_rm_url"),
    ({"eval_n_samples": 4}, "eval_n_samples eval_data"),
    ({"bf16": True, "zero_stage": 0, "critic_zero_stage": 1}, "bf16 zero_stage"),
    ({"bf16": True, "critic_zero_stage": 0}, "bf16 critic_zero_stage"),
    ({"fp16": True, "zero_stage": 0, "critic_zero_stage": 1}, "fp16 zero_stage"),
    ({"fp16": True, "bf16": True}, "fp16 bf16"),
    ({"adam_offload": True, "zero_stage": 0}, "adam_offload zero_stage"),
    ({"param_offload": True}, "param_offload zero_stage"),
    ({"ref_offload": True}, "ref_offload ref_zero_stage"),
    ({"grad_accum_dtype": "bf16"}, "grad_accum_dtype bf16"),
    ({"overlap_comm": True, "zero_stage": 1}, "overlap_comm zero_stage"),
    ({"zpg": 2}, "zpg zero_stage"),
    ({"zpg": 2, "zero_stage": 3}, "zpg"),
    ({"load_checkpoint": False, "resume": "ckpt/old"}, "no_load_checkpoint resume"),
    ({"disable_ds_ckpt": True, "save_steps": 5}, "disable_ds_ckpt save_hf_ckpt"),
    ({"disable_ds_ckpt": True, "save_seconds": 60}, "disable_ds_ckpt save_hf_ckpt"),
    ({"disable_ds_ckpt": True, "save_epochs": 1}, "disable_ds_ckpt save_hf_ckpt"),
    (
        {"rollout_batch_size": 7, "n_samples_per_prompt": 3, "train_batch_size": 21},
        "rollout_batch_size",
        3,
    ),
    ({"rollout_batch_size": 8, "train_batch_size": 2}, "train_batch_size", 4),
    ({"buffer_limit": 127}, "buffer_limit", 4),
    ({"zpg": 4, "zero_stage": 3, "train_batch_size": 128}, "zpg", 2),
    ({"sequence_parallel_size": 3, "train_batch_size": 128}, "sequence_parallel_size", 4),
    (
        {"sequence_parallel_size": 2, "packing_samples": False},
        "sequence_parallel_size packing_samples",
        2,
    ),
    *(
        ({"sequence_parallel_size": 2, **other}, f"sequence_parallel_size {next(iter(other))}", 2)
        for other in (
            {"attn_implementation": "eager"},
            {"torch_compile": True},
            {"gradient_checkpointing_use_reentrant": True, "gradient_checkpointing": True},
            {"aux_loss_coef": 0.1},
        )
    ),
    ({"sequence_parallel_size": 2, "buffer_limit": 127}, "buffer_limit", 8),
    # estimators, KL, losses, correction, shaping
    ({"advantage_estimator": "grpo"}, "advantage_estimator n_samples_per_prompt"),
    ({**GROUP, "temperature": 0}, "n_samples_per_prompt temperature"),
    ({"advantage_estimator": "remax", "do_sample": False}, "advantage_estimator temperature"),
    ({"advantage_estimator": "remax", "lambd": 0.9}, "lambd advantage_estimator"),
    ({**GROUP, "gamma": 0.9}, "gamma advantage_estimator"),
    ({**GROUP, "freezing_actor_steps": 2}, "freezing_actor_steps advantage_estimator"),
    ({**GROUP, "bootstrap_truncated": True}, "bootstrap_truncated advantage_estimator"),
    (
        {**GROUP, "advantage_estimator": "rloo", "grpo_std_eps": 0.0001},
        "grpo_std_eps advantage_estimator",
    ),
    ({**GROUP, "group_std_norm": False, "grpo_std_eps": 0.0001}, "grpo_std_eps group_std_norm"),
    ({"group_std_norm": False}, "no_group_std_norm advantage_estimator"),
    ({**GROUP, "adv_std_unbiased": True}, "adv_std_unbiased adv_norm"),
    ({**GROUP, "adv_norm_scope": "group"}, "adv_norm_scope adv_norm"),
    ({"adv_norm_scope": "group"}, "adv_norm_scope n_samples_per_prompt"),
    ({"use_kl_loss": True, "use_kl_in_reward": True}, "use_kl_loss use_kl_in_reward"),
    ({"use_kl_in_reward": False}, "no_use_kl_in_reward use_kl_loss"),
    ({"init_kl_coef": 0, "use_kl_loss": True}, "use_kl_loss init_kl_coef"),
    ({"init_kl_coef": 0, "kl_target": 0.1}, "kl_target init_kl_coef"),
    ({"init_kl_coef": 0, "kl_clip": 10}, "kl_clip init_kl_coef"),
    ({"init_kl_coef": 0, "ref_ema_eta": 0.1}, "ref_ema_eta init_kl_coef"),
    ({"init_kl_coef": 0, "ref_reset_steps": 5}, "ref_reset_steps init_kl_coef"),
    ({"ref_reset_steps": 5, "ref_ema_eta": 0.1}, "ref_ema_eta ref_reset_steps"),
    ({"kl_target": 0.1, "kl_horizon": 102}, "kl_horizon"),
    ({"kl_estimator": "k3_ratio"}, "kl_estimator use_kl_loss"),
    ({"clip_cov_ratio": 0.1}, "clip_cov_ratio policy_loss"),
    ({"policy_loss": "cispo", "dual_clip": 3}, "dual_clip policy_loss"),
    ({"policy_loss": "kl_cov", "eps_clip": 0.1}, "eps_clip policy_loss"),
    ({**GROUP, "advantage_estimator": "gpg", "eps_clip_high": 0.1}, "eps_clip_high policy_loss"),
    ({"eps_clip": 0.1, "eps_clip_low": 0.2, "eps_clip_high": 0.3}, "eps_clip eps_clip_low"),
    ({"policy_loss": "clip_cov", "clip_cov_low": 6}, "clip_cov_low clip_cov_high"),
    ({**GROUP, "value_huber_delta": 1}, "value_huber_delta advantage_estimator"),
    ({**GROUP, "value_clip": 0.3}, "value_clip advantage_estimator"),
    ({**GROUP, "critic_learning_rate": 1e-5}, "critic_learning_rate advantage_estimator"),
    ({"kl_horizon": 500}, "kl_horizon kl_target"),
    ({**GROUP, "value_norm": "exp"}, "value_norm advantage_estimator"),
    ({"value_norm": "ma", "value_norm_beta": 0.9}, "value_norm_beta value_norm"),
    ({"correction_low": 0.5}, "correction_low rollout_correction"),
    ({"correction_high": 0.5}, "correction_high rollout_correction"),
    ({"correction_veto": 0.0001}, "correction_veto rollout_correction"),
    ({"correction_batch_norm": True}, "correction_batch_norm rollout_correction"),
    ({"rollout_rejection": ["token_k2"]}, "rollout_rejection"),
    ({"rollout_rejection": ["token_k4=1"]}, "rollout_rejection"),
    (
        {"rollout_rejection": ["m2po=0.04"], "old_log_probs": "rollout"},
        "old_log_probs rollout_rejection",
    ),
    (
        {**GROUP, "advantage_estimator": "optimal_token_baseline", "old_log_probs": "rollout"},
        "old_log_probs advantage_estimator",
    ),
    ({"grpo_std_scope": "batch"}, "grpo_std_scope advantage_estimator"),
    (
        {**GROUP, "group_std_norm": False, "grpo_std_scope": "batch"},
        "grpo_std_scope group_std_norm",
    ),
    ({"rollout_correction": "icepop", "correction_low": 9}, "correction_low correction_high"),
    ({"reward_clip_range": [1, 1]}, "reward_clip_range"),
    ({"stop_properly_penalty": 1.5}, "stop_properly_penalty"),
    ({"overlong_penalty_factor": 2}, "overlong_penalty_factor overlong_buffer_len"),
    ({"overlong_buffer_len": 128, "generate_max_len": 64}, "overlong_buffer_len generate_max_len"),
    ({"mask_too_long": True, "stop_properly_penalty": 0.5}, "mask_too_long stop_properly_penalty"),
    (
        {"mask_no_eos_with_zero": True, "stop_properly_penalty": 0.5},
        "stop_properly_penalty mask_no_eos_with_zero",
    ),
    ({"reward_delta": True}, "reward_delta use_dense_reward"),
    (
        {"use_dense_reward": True, "reward_running_norm": True},
        "use_dense_reward reward_running_norm",
    ),
    (
        {"use_dense_reward": True, "advantage_estimator": "remax"},
        "advantage_estimator use_dense_reward",
    ),
    (
        {"use_dense_reward": True, "stop_properly_penalty": 0.5},
        "use_dense_reward stop_properly_penalty",
    ),
    # sampling
    ({**FOUR, "generation_size": 3}, "generation_size n_samples_per_prompt", 2),
    ({**FOUR, "best_of_n_tie": "longer"}, "best_of_n_tie generation_size", 2),
    (
        {
            **FOUR,
            "generation_size": 6,
            "n_samples_per_prompt": 1,
            "temperature": 0.0,
            "train_batch_size": 8,
        },
        "generation_size temperature",
        2,
    ),
    ({**FOUR, "gen_batch_size": 9}, "gen_batch_size", 2),
    ({**FOUR, "gen_batch_size": 4}, "gen_batch_size rollout_batch_size", 2),
    ({**FOUR, "gen_batch_size": 16, "buffer_limit": 16}, "buffer_limit dynamic_sampling", 2),
    ({**FOUR, "dynamic_sampling": True, "buffer_limit": 31}, "buffer_limit dynamic_sampling", 2),
    ({**FOUR, "filter_metric": "acc"}, "filter_metric dynamic_sampling", 2),
    ({**FOUR, "filter_range": (0.1, 0.9)}, "filter_range dynamic_sampling", 2),
    ({**FOUR, "max_num_gen_batches": 3}, "max_num_gen_batches dynamic_sampling", 2),
    ({**FOUR, "on_exhausted": "raise"}, "on_exhausted dynamic_sampling", 2),
    (
        {**FOUR, "dynamic_sampling": True, "n_samples_per_prompt": 1, "train_batch_size": 8},
        "dynamic_sampling n_samples_per_prompt",
        2,
    ),
    ({**FOUR, "dynamic_sampling": True, "filter_range": (0.9, 0.1)}, "filter_range", 2),
    ({**FOUR, "dynamic_sampling": True, "filter_metric": " "}, "filter_metric", 2),
    (
        {**FOUR, "dynamic_sampling": True, "max_num_gen_batches": 0, "on_exhausted": "reuse"},
        "on_exhausted max_num_gen_batches",
        2,
    ),
    (
        {**FOUR, "dataset_max_filter_percentage": 0.5},
        "dataset_max_filter_percentage dataset_filter_threshold",
        2,
    ),
    (
        {**FOUR, "dataset_filter_threshold": 0.5, "dataset_max_filter_percentage": 1.0},
        "dataset_max_filter_percentage",
        2,
    ),
    (
        {
            **FOUR,
            "fire_sampling": True,
            "do_sample": False,
            "n_samples_per_prompt": 1,
            "train_batch_size": 8,
        },
        "fire_sampling temperature",
        2,
    ),
    # rewards
    (NO_REWARD, "reward_fn remote_rm_url"),
    ({**NO_REWARD, "reward_source": ["maths"]}, "reward_source"),
    ({**NO_REWARD, "reward_source": ["math=much"]}, "reward_source"),
    ({**NO_REWARD, "reward_source": ["math=inf"]}, "reward_source"),
    ({**NO_REWARD, "reward_routes": "{"}, "reward_routes"),
    ({**NO_REWARD, "reward_routes": "nowhere.json"}, "reward_routes"),
    ({**NO_REWARD, "reward_routes": '{"gsm8k": "math"}'}, "reward_routes"),
    ({**NO_REWARD, "reward_routes": '{"gsm8k": {"mth": 1}}'}, "reward_routes"),
    ({**NO_REWARD, "reward_routes": '{"a": {"math": 1}}', **MATH}, "reward_source reward_routes"),
    ({**NO_REWARD, **MATH, "reward_routes_by": "label"}, "reward_routes_by reward_routes"),
    ({**NO_REWARD, "reward_source": ["function"]}, "reward_source reward_fn"),
    ({**NO_REWARD, **MATH, **FUNCTION}, "reward_fn reward_source"),
    ({**NO_REWARD, **MATH, **SERVER}, "remote_rm_url reward_source"),
    ({**NO_REWARD, **FUNCTION, **SERVER}, "remote_rm_url reward_fn"),
    ({**NO_REWARD, **MATH, "reward_manager": "batch"}, "reward_manager reward_fn"),
    ({**NO_REWARD, **SERVER, "reward_timeout": 3.0}, "reward_timeout reward_fn"),
    (
        {**NO_REWARD, "reward_pretrain": ["m"], "on_reward_failure": "error"},
        "on_reward_failure reward_fn",
    ),
    ({**NO_REWARD, **SERVER, "reward_max_length": 9}, "reward_max_length reward_pretrain"),
    (
        {**NO_REWARD, **SERVER, "reward_input_tokenizer": ["t"]},
        "reward_input_tokenizer reward_pretrain",
    ),
    (
        {**NO_REWARD, "reward_pretrain": ["m"], "reward_input_tokenizer": ["a", "b"]},
        "reward_input_tokenizer reward_pretrain",
    ),
    ({**NO_REWARD, **FUNCTION, "reward_manager": "prime"}, "reward_manager reward_timeout"),
    ({"reward_scaling": 0.0}, "reward_scaling"),
    ({"min_p": 0.1, "temperature": 0.0}, "min_p temperature"),
    (
        {**NO_REWARD, "reward_pretrain": ["m"], "async_rewards": True},
        "async_rewards reward_pretrain",
    ),
    (
        {**NO_REWARD, **MATH, "async_rewards": True, "skip_rollout": "rollouts"},
        "async_rewards skip_rollout",
    ),
    ({**NO_REWARD, **MATH, "code_timeout": 1.0}, "code_timeout reward_source"),
    (
        {**NO_REWARD, **MATH, "allow_unsafe_code_execution": True},
        "allow_unsafe_code_execution reward_source",
    ),
    ({**NO_REWARD, **MATH, "reward_format": "think"}, "reward_format reward_source"),
    (
        {**NO_REWARD, "reward_source": ["code"], "math_unmarked": False},
        "no_math_unmarked reward_source",
    ),
    ({**NO_REWARD, **MATH, "sandbox_fusion_url": "http://h"}, "sandbox_fusion_url reward_source"),
    (
        {
            **NO_REWARD,
            "reward_source": ["code"],
            "sandbox_fusion_url": "http://h",
            "function_call_url": "http://h",
        },
        "sandbox_fusion_url function_call_url",
    ),
    (
        {**NO_REWARD, "reward_source": ["math", "format=0.1"], "check_verifier_status": True},
        "check_verifier_status reward_minimum",
    ),
    ({**NO_REWARD, **MATH, "reward_minimum": 0.0}, "reward_minimum check_verifier_status"),
    # engines
    ({"max_num_seqs": 8}, "max_num_seqs rollout_engine"),
    ({"rollout_check": "warn"}, "rollout_check rollout_engine"),
    ({"rollout_engine": "vllm", "temperature": 0.001}, "temperature"),
    ({"rollout_engine": "vllm", "eval_temperature": 0.005}, "eval_temperature"),
    ({"rollout_engine": "vllm", "fire_sampling": True}, "fire_sampling rollout_engine"),
    ({"rollout_engine": "vllm", "max_model_len": 100}, "max_model_len prompt_max_len"),
    (
        {"rollout_engine": "vllm", "rollout_check": "off", "logp_diff_tolerance": 0.1},
        "logp_diff_tolerance rollout_check",
    ),
    (
        {"rollout_engine": "vllm", "load_format": "auto", "override_config": "{}"},
        "load_format pretrain",
    ),
    (
        {"rollout_engine": "vllm", "load_format": "auto", "init_from_scratch": True},
        "load_format init_from_scratch",
    ),
    (
        {"rollout_engine": "vllm", "trust_remote_code": True, "override_config": "{}"},
        "rollout_engine trust_remote_code",
    ),
    # servers
    ({**SERVERS, "vllm_server_url": ()}, "rollout_engine vllm_server_url"),
    ({**SERVERS, "vllm_server_url": ("127.0.0.1:8000",)}, "vllm_server_url"),
    ({**SERVERS, "vllm_server_url": ("http://127.0.0.1:1/?key=x",)}, "vllm_server_url"),
    (
        {**SERVERS, "vllm_server_url": ("http://a:b@host",)},
        "vllm_server_url vllm_server_api_key_env",
    ),
    ({**SERVERS, "vllm_server_url": (LOCAL[0], LOCAL[0] + "/")}, "vllm_server_url"),
    ({**SERVERS, "vllm_server_sync_dir": "/x"}, "vllm_server_sync_dir vllm_server_sync"),
    (
        {**SERVERS, "vllm_server_sync": "collective", "vllm_server_sync_dir": "/x"},
        "vllm_server_sync_dir vllm_server_sync",
    ),
    (
        {**SERVERS, "vllm_server_sync_address": "192.0.2.7"},
        "vllm_server_sync_address vllm_server_sync",
    ),
    (
        {**SERVERS, "vllm_server_sync": "collective", "vllm_server_sync_address": "0.0.0.0"},
        "vllm_server_sync_address",
    ),
    ({**SERVERS, "tensor_parallel_size": 2}, "tensor_parallel_size rollout_engine"),
    ({**SERVERS, "max_num_seqs": 8}, "max_num_seqs rollout_engine"),
    ({**SERVERS, "vllm_server_timeout": 900.0}, "vllm_server_timeout dist_timeout"),
    ({**SERVERS, "rollout_engine": "hf"}, "vllm_server_url rollout_engine"),
    (
        {**SERVERS, "rollout_engine": "vllm", "vllm_server_url": (), "vllm_server_retries": 3},
        "vllm_server_retries rollout_engine",
    ),
    # a teacher
    (
        {"advantage_estimator": "on_policy_distill"},
        "advantage_estimator teacher_pretrain teacher_url",
    ),
    ({**TEACHER, "teacher_url": LOCAL}, "teacher_pretrain teacher_url"),
    ({"distill_coef": 0.5}, "distill_coef teacher_pretrain teacher_url"),
    (
        {**BY_LOSS, "teacher_pretrain": None, "teacher_url": LOCAL},
        "distill_by teacher_pretrain teacher_url distill_topk",
    ),
    ({**BY_LOSS, "distill_discount": 0.5}, "distill_discount distill_by"),
    ({"teacher_pretrain": "larger", "distill_beta": 0.5}, "distill_beta distill_by"),
    ({"teacher_pretrain": "larger", "distill_topk": 9}, "distill_topk distill_by"),
    ({**BY_LOSS, "distill_tail": "renormalise"}, "distill_tail distill_topk"),
    ({**BY_LOSS, "distill_topk": 9, "distill_tail": "drop"}, "distill_tail distill_beta"),
    (
        {"teacher_pretrain": "larger", "teacher_api_key_env": "KEY"},
        "teacher_api_key_env teacher_url",
    ),
    ({"teacher_url": ["ftp://host"]}, "teacher_url"),
    ({"teacher_url": LOCAL, "temperature": 0.7}, "teacher_url temperature teacher_pretrain"),
    ({**TEACHER, "use_kl_in_reward": True}, "use_kl_in_reward advantage_estimator"),
    ({**TEACHER, "reward_scaling": 2.0}, "reward_scaling advantage_estimator"),
    (
        {**TEACHER, **NO_REWARD, "n_samples_per_prompt": 2, "dynamic_sampling": True},
        "dynamic_sampling",
    ),
    ({**TEACHER, **NO_REWARD, "generation_size": 2}, "generation_size"),
    ({**TEACHER, **NO_REWARD, **EVAL}, "eval_data eval_reward_source eval_reward_fn"),
    (
        {**NO_REWARD, "teacher_pretrain": "larger"},
        "reward_fn remote_rm_url reward_pretrain reward_source",
    ),
    (
        {"teacher_url": LOCAL, "micro_batch_specs": ["teacher=8"]},
        "micro_batch_specs teacher_pretrain",
    ),
    # adapters
    ({**LORA, "enable_ema": True}, "lora_rank enable_ema"),
    ({**LORA, "ref_ema_eta": 0.1}, "lora_rank ref_ema_eta"),
    ({**LORA, "ref_reset_steps": 2}, "lora_rank ref_reset_steps"),
    ({**LORA, "ref_offload": True, "zero_stage": 3}, "ref_offload lora_rank"),
    ({**LORA, "ref_zero_stage": 3, "zero_stage": 2}, "ref_zero_stage lora_rank"),
]


@pytest.mark.parametrize("case", CONTRADICTIONS, ids=str)
def test_contradictions(case):
    options, flags, *world_size = case
    (message,) = problems(options, *world_size)
    assert set(flags.split()) <= named(message), message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ref_ema_eta", 0),
        ("advantage_clip", "0.0"),
        ("high_entropy_token_ratio", 0.0),
        ("ref_ema_eta", "0"),
    ],
)
def test_zero_out_of_range_is_off(name, value):
    assert config(**{name: value}).flat()[name] is None


def test_switches_that_are_on_by_default_are_named_as_they_are_given():
    (message,) = problems({"share_prompts": False, "packing_samples": False})
    assert message.startswith("--no_share_prompts ")


def test_secrets_in_an_address_are_not_shown():
    assert "secret" not in problems({**URL, "remote_rm_url": ["ftp://me:secret@host"]})[0]


def test_the_same_options_on_fitting_ranks():
    config(rollout_batch_size=511, train_batch_size=511).validate(world_size=7)
    config(rollout_batch_size=8, train_batch_size=2).validate(world_size=2)
    config(buffer_limit=128).validate(world_size=4)
    config(zpg=4, zero_stage=3).validate(world_size=8)
    config(sequence_parallel_size=2, buffer_limit=128).validate(world_size=8)
    in_4_bits = {"load_in_4bit": True, "lora_rank": 2, "activation_offload": True}
    config(sequence_parallel_size=2, **in_4_bits).validate(world_size=2)


def test_every_contradiction_is_told_at_once():
    messages = problems(
        {"pretrain": None, "use_kl_loss": True, "use_kl_in_reward": True, "val_only": True}
    )
    assert sorted(message.split(" ")[0] for message in messages) == [
        "--eval_data",
        "--pretrain",
        "--use_kl_loss",
    ]
    # 100 neither divides the samples nor is it divisible by the ranks: one thing at a time
    messages = problems({"train_batch_size": 100}, 3)
    assert [message.split(" ")[0] for message in messages] == [
        "--train_batch_size",
        "--rollout_batch_size",
    ]


def test_values_out_of_range_are_told_before_combinations():
    config_ = config()
    config_.training.train_batch_size = 0  # would divide by zero in the combinations
    with pytest.raises(ConfigError, match=r"^--train_batch_size must be .*≥1, not 0$"):
        config_.validate()


def test_a_trainer_made_by_hand_needs_no_paths():
    assert contradictions_by_hand(PPOConfig()) == []
    # what a script in the seed's style fills in although no critic is trained
    assert contradictions_by_hand(config(**RLOO, critic_pretrain="model")) == []
    (message,) = contradictions_by_hand(PPOConfig.from_flat(advantage_estimator="grpo"))
    assert "--n_samples_per_prompt" in message


# Options → what they resolve to.
RESOLUTIONS = [
    ({}, {"ref_pretrain": "model", "critic_pretrain": "model", "attn_implementation": "auto"}),
    ({"ref_pretrain": "other"}, {"ref_pretrain": "other"}),
    ({"init_kl_coef": 0}, {"ref_pretrain": None}),
    ({"reward_pretrain": ["rm", "rm2"]}, {"critic_pretrain": "rm"}),
    ({"reward_pretrain": ["rm"], "critic_pretrain": "c"}, {"critic_pretrain": "c"}),
    ({"reward_pretrain": ["rm"], "init_critic_from_actor": True}, {"critic_pretrain": "model"}),
    (
        RLOO,
        {
            "critic_pretrain": None,
            "critic_zero_stage": None,
            "adv_norm": False,
        },
    ),
    ({"flash_attn": True}, {"attn_implementation": "flash_attention_2"}),
    ({}, {"adv_norm": True}),
    ({"adv_norm": False}, {"adv_norm": False}),
    ({**RLOO, "adv_norm": True}, {"adv_norm": True}),
    ({"eps_clip": 0.3}, {"eps_clip_low": 0.3, "eps_clip_high": 0.3}),
    ({"eps_clip_high": 0.28}, {"eps_clip_low": 0.2, "eps_clip_high": 0.28}),
    ({"eps_clip_low": 0.1}, {"eps_clip_low": 0.1, "eps_clip_high": 0.2}),
    ({}, {"use_kl_in_reward": True}),
    ({"use_kl_loss": True}, {"use_kl_in_reward": False}),
    ({"use_kl_in_reward": False, "init_kl_coef": 0}, {"use_kl_in_reward": False}),
    (GROUP, {"use_kl_loss": True, "use_kl_in_reward": False, "kl_estimator": "k2"}),
    (
        {**GROUP, "use_kl_in_reward": True},
        {"use_kl_loss": False, "use_kl_in_reward": True, "kl_estimator": "k1"},
    ),
    (
        {**GROUP, "use_kl_loss": False},
        {"use_kl_loss": False, "use_kl_in_reward": True, "kl_estimator": "k1"},
    ),
    ({**GROUP, "init_kl_coef": 0}, {"use_kl_loss": False}),
    ({**GROUP, "advantage_estimator": "grpo_passk"}, {"use_kl_loss": True}),
    ({**GROUP, "advantage_estimator": "cpgd"}, {"use_kl_loss": True}),
    ({**GROUP, "advantage_estimator": "group_adv_norm"}, {"use_kl_loss": True}),
    (RLOO, {"use_kl_loss": False, "use_kl_in_reward": True, "kl_estimator": "k1"}),
    ({}, {"train_batch_size": 128}),
    ({"train_batch_size": 64}, {"train_batch_size": 64}),
    ({"ppo_n_minibatches": 4}, {"train_batch_size": 128}),  # 512 prompts × 1 sample / 4
    ({"ppo_n_minibatches": 4, "n_samples_per_prompt": 3}, {"train_batch_size": 384}),  # 512 × 3 / 4
    ({}, {"critic_zero_stage": 2, "ref_zero_stage": 0}),
    ({"zero_stage": 3}, {"critic_zero_stage": 3, "ref_zero_stage": 3}),
    ({"zero_stage": 3, "ref_zero_stage": 0}, {"ref_zero_stage": 0}),
    ({"critic_zero_stage": 3}, {"critic_zero_stage": 3, "ref_zero_stage": 0}),
    ({}, {"resume": "auto"}),
    ({"load_checkpoint": False}, {"resume": "never"}),
    ({"resume": "ckpt/old"}, {"resume": "ckpt/old"}),
    (
        {},
        {
            "policy_loss": "ppo",
            "loss_agg_mode": "token-mean",
            "kl_estimator": "k1",
            "grpo_std_eps": None,
        },
    ),
    ({"use_kl_loss": True}, {"kl_estimator": "k2", "use_kl_in_reward": False}),
    ({"use_kl_loss": True, "kl_estimator": "k3"}, {"kl_estimator": "k3"}),
    (GROUP, {"grpo_std_eps": 1e-6}),
    ({**GROUP, "advantage_estimator": "dr_grpo"}, {"loss_agg_mode": "seq-mean-token-sum-norm"}),
    (
        {**GROUP, "advantage_estimator": "dr_grpo", "loss_agg_mode": "token-mean"},
        {"loss_agg_mode": "token-mean"},
    ),
    ({**GROUP, "advantage_estimator": "gpg"}, {"policy_loss": "gpg", "eps_clip_low": None}),
    (
        {**GROUP, "advantage_estimator": "gpg", "policy_loss": "ppo"},
        {"policy_loss": "ppo", "eps_clip_low": 0.2},
    ),
    (
        {**GROUP, "policy_loss": "gspo"},
        {"loss_agg_mode": "seq-mean-token-mean", "eps_clip_high": 4e-4},
    ),
    ({"policy_loss": "gspo", "eps_clip": 0.1}, {"eps_clip_low": 0.1, "eps_clip_high": 0.1}),
    ({"value_norm": "exp"}, {"value_norm_beta": 0.99995}),
    ({"value_norm": "ma"}, {"value_norm_beta": None}),
    (
        {"rollout_correction": "icepop", "correction_high": 3},
        {"correction_low": 0.5, "correction_high": 3},
    ),
    ({"overlong_buffer_len": 128}, {"overlong_penalty_factor": 1.0}),
    (FOUR, {"generation_size": 4, "gen_batch_size": 8}),
    (
        {**FOUR, "generation_size": 6, "gen_batch_size": 16, "fire_sampling": True},
        {"generation_size": 6, "gen_batch_size": 16},
    ),
    ({}, {"lora_rank": 0, "lora_alpha": None, "lora_dropout": None, "target_modules": ()}),
    ({"lora_rank": 8}, {"lora_alpha": 16.0, "lora_dropout": 0.0}),
    (
        {"lora_rank": 8, "lora_alpha": 4.0, "lora_dropout": 0.3},
        {"lora_alpha": 4.0, "lora_dropout": 0.3},
    ),
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


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
def test_every_estimator_is_accepted_with_what_it_needs(name):
    more = TEACHER if ADVANTAGE_ESTIMATORS[name].ignores_scores else {}
    more |= {"gdpo_rewards": ("right", "style")} if name == "gdpo" else {}
    samples = ADVANTAGE_ESTIMATORS[name].min_group_size
    resolved = config(
        **more | {"advantage_estimator": name, "n_samples_per_prompt": samples}
    ).resolved()
    resolved.validate()
    assert resolved.loss.policy_loss == ADVANTAGE_ESTIMATORS[name].policy_loss
    assert resolved.algorithm.adv_norm == ADVANTAGE_ESTIMATORS[name].whiten


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_policy_loss_brings_its_own_numbers(name):
    traits = POLICY_LOSSES[name]
    loss = config(policy_loss=name).resolved().loss
    assert (loss.eps_clip_low, loss.eps_clip_high) == (traits.eps_clip or (None, None))
    assert loss.loss_agg_mode == traits.loss_agg_mode
    others = {
        option for other in POLICY_LOSSES.values() for option in other.defaults
    } - traits.defaults.keys()
    assert {option: getattr(loss, option) for option in traits.defaults} == traits.defaults
    assert all(getattr(loss, option) is None for option in others)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_every_correction_brings_its_own_bounds(name):
    correction = config(rollout_correction=name).resolved().correction
    traits = CORRECTIONS[name]
    assert (correction.correction_low, correction.correction_high) == (traits.low, traits.high)


def test_when_rejections_are_judged():
    both = {"rollout_rejection": ["token_k2=1", "opsm=0.1"]}
    names = lambda run, in_training: [one.name for one in rejections_of(run, in_training)]  # noqa: E731
    run = config(**both).resolved()
    assert (names(run, False), names(run, True)) == (["token_k2"], ["opsm"])
    bypass = config(**both, old_log_probs="rollout").resolved()
    assert (names(bypass, False), names(bypass, True)) == ([], ["token_k2", "opsm"])


SHORTCUT = {"train_batch_size": 512, "init_kl_coef": 0}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (SHORTCUT, True),
        ({"train_batch_size": 512, "use_kl_loss": True}, True),
        ({"train_batch_size": 512}, False),  # the token rewards need the KL before
        ({**SHORTCUT, "train_batch_size": 256}, False),
        ({**SHORTCUT, "max_epochs": 2}, False),
        ({**SHORTCUT, "rollout_correction": "tis"}, False),
        ({**SHORTCUT, "rollout_rejection": ["token_k2=1"]}, False),
        ({**SHORTCUT, "rollout_rejection": ["opsm=1"]}, True),  # judged in training
        (
            {
                **SHORTCUT,
                **GROUP,
                "train_batch_size": 2048,
                "advantage_estimator": "optimal_token_baseline",
            },
            False,
        ),
        ({**SHORTCUT, "high_entropy_token_ratio": 0.2}, False),
        ({**SHORTCUT, "policy_loss": "kl_cov"}, False),
        ({**SHORTCUT, "freezing_actor_steps": 3}, False),
        ({**SHORTCUT, "old_log_probs": "forward"}, False),
    ],
)
def test_when_the_training_pass_gives_the_old_log_probs(options, expected):
    assert (
        old_log_probs_from(config(**options).resolved(), exact_rollout=False) == "training"
    ) is expected


@pytest.mark.parametrize(
    ("options", "exact", "expected"),
    [
        ({}, True, "rollout"),
        ({}, False, "forward"),
        ({"bf16": True}, True, "forward"),
        ({"fp16": True}, True, "forward"),
        ({"skip_rollout": "d"}, True, "forward"),
        ({**FOUR, "dynamic_sampling": True}, True, "forward"),
        ({**FOUR, "gen_batch_size": 16}, True, "forward"),
        ({"high_entropy_token_ratio": 0.2}, True, "forward"),
        ({"rollout_rejection": ["token_k2=1"]}, True, "forward"),
        ({"rollout_rejection": ["token_k2=1"], "old_log_probs": "rollout"}, False, "rollout"),
        ({"rollout_rejection": ["opsm=1"]}, True, "rollout"),
        ({**GROUP, "advantage_estimator": "optimal_token_baseline"}, True, "forward"),
        ({"old_log_probs": "rollout"}, False, "rollout"),
        (SHORTCUT, False, "training"),
    ],
)
def test_where_old_log_probs_come_from(options, exact, expected):
    assert old_log_probs_from(config(**options).resolved(), exact) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"rollout_correction": "tis"},
        {"high_entropy_token_ratio": 0.2},
        {"kl_estimator": "full"},
        {"do_sample": False, "temperature": 0.5},
    ],
    ids=str,
)
def test_recorded_log_probs_where_a_pass_is_needed(options):
    (message,) = problems({**options, "old_log_probs": "rollout"} | ({"use_kl_in_reward": True}))
    assert {"old_log_probs", next(iter(options.keys() - {"do_sample"}))} <= named(message)


@pytest.mark.parametrize(
    ("options", "n"),
    [
        ({"use_kl_loss": True, "kl_estimator": "k1"}, 1),
        ({"use_kl_loss": True, "kl_estimator": "abs"}, 1),
        ({"use_kl_loss": True}, 0),
        (GROUP, 0),
        ({**GROUP, "use_kl_in_reward": True}, 0),
        ({**GROUP, "kl_estimator": "k1"}, 1),
        ({"kl_estimator": "k3"}, 1),
        ({}, 0),
        (AHEAD, 0),
        ({**AHEAD, "rollout_correction": "none"}, 1),
        ({**AHEAD, "rollout_correction": "none", "old_log_probs": "rollout"}, 0),
    ],
)
def test_advice(options, n):
    assert len(advice(config(**options).resolved())) == n


# -- what works ------------------------------------------------------------------------------------------------------

REMOTE = {**SERVERS, "vllm_server_url": (LOCAL[0], "http://192.0.2.1:8000")}


@pytest.mark.parametrize(
    ("options", "world_size"),
    [
        ({"rollout_engine": "vllm"}, 1),
        (
            {
                "rollout_engine": "vllm",
                "temperature": 0.0,
                "eval_data": "e",
                "eval_temperature": 0.0,
            },
            1,
        ),
        ({"rollout_engine": "vllm", "tensor_parallel_size": 2}, 4),
        (SERVERS, 1),
        (
            {
                **SERVERS,
                "vllm_server_sync": "shm",
                "vllm_server_timeout": 5.0,
                "vllm_server_retries": 0,
            },
            1,
        ),
        ({**SERVERS, "vllm_server_sync": "disk", "vllm_server_sync_dir": "/somewhere"}, 1),
        ({**SERVERS, "vllm_server_sync": "collective", "vllm_server_sync_address": "localhost"}, 1),
        ({**REMOTE, "vllm_server_sync": "disk", "vllm_server_sync_dir": "/shared"}, 1),
        ({**REMOTE, "vllm_server_sync": "collective", "vllm_server_sync_address": "192.0.2.7"}, 1),
        ({**FOUR, "generation_size": 6, "gen_batch_size": 16, "best_of_n_tie": "longer"}, 2),
        ({**FOUR, "dynamic_sampling": True, "gen_batch_size": 2, "filter_metric": "acc"}, 2),
        ({"dynamic_sampling": True, "filter_range": (0, 1)}, 1),
        ({"load_in_4bit": True, "lora_rank": 4, "torch_compile": True}, 1),
        ({**TEACHER, **NO_REWARD, "ref_zero_stage": 3, "ref_offload": True}, 1),  # alone
        (
            {
                **TEACHER,
                "n_samples_per_prompt": 2,
                "dynamic_sampling": True,
                "distill_discount": 1.0,
            },
            1,
        ),
        ({**BY_LOSS, **GROUP, "distill_beta": 0.5, "temperature": 0.7}, 1),  # beside a reward
        ({"teacher_url": LOCAL, "teacher_api_key_env": "KEY", "temperature": 0.0}, 1),
        ({"lora_rank": 4, "ref_pretrain": "another", "ref_zero_stage": 3, "ref_offload": True}, 1),
        ({**GROUP, "freezing_actor_steps": 0, "eval_steps": 0}, 1),  # which is off too
        ({**FUNCTION, **SERVER, "reward_source": ["function", "server=0.5"]}, 1),
        ({**EVAL, **URL, "eval_reward_source": ["math", "format=0.1"], "math_unmarked": False}, 1),
        ({**EVAL, **URL, "eval_reward_fn": "judge.py", "reward_timeout": 3.0}, 1),
        ({**EVAL, "eval_n_samples": 4, "eval_top_k": 5}, 1),
        ({"reward_manager": "dapo", "reward_scaling": -1.0}, 1),
        ({"reward_manager": "dapo", "overlong_buffer_len": 8, "reward_scaling": -1.0}, 1),
        (
            {
                **EVAL,
                "val_only": True,
                "prompt_data": None,
                "reward_fn": None,
                "eval_reward_source": ["math"],
            },
            1,
        ),
    ],
    ids=str,
)
def test_what_works(options, world_size):
    assert problems(options, world_size) == []
    config(**options).resolved().validate(world_size)


def test_ranks_share_engines_evenly():
    (message,) = problems({"rollout_engine": "vllm", "tensor_parallel_size": 2, "rollout_batch_size": 129,
                           "train_batch_size": 129}, 3)  # fmt: skip
    assert "tensor_parallel_size" in named(message)


@pytest.mark.parametrize("sync", ["auto", "shm", "disk", "collective"])
def test_servers_elsewhere_need_a_folder_that_both_see_or_an_address_of_the_trainer(sync):
    (message,) = problems({**REMOTE, "vllm_server_sync": sync})
    assert "http://192.0.2.1:8000" in message
    assert {"vllm_server_sync", "vllm_server_sync_address", "vllm_server_sync_dir"} <= named(
        message
    )
    leads_here = "machine, and --vllm_server_sync_address 127.0.0.1 leads here alone: set"
    assert (leads_here in message) == (sync == "collective")


def test_a_start_from_pretrain_without_one():
    messages = problems({"rollout_engine": "vllm", "load_format": "auto", "pretrain": None})
    assert ["pretrain" in named(message) for message in messages] == [True, True]


# -- facts -----------------------------------------------------------------------------------------------------------


def test_when_the_reference_is_the_actor():
    assert reference_is_actor(config(**LORA))
    assert reference_is_actor(config(**LORA).resolved())
    assert reference_is_actor(config(**LORA, ref_pretrain="model"))
    assert not reference_is_actor(config(**LORA, ref_pretrain="another"))
    assert not reference_is_actor(config(**LORA, init_kl_coef=0.0))
    assert not reference_is_actor(config())


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
