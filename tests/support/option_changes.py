"""Every option with another value, by the options beside which it acts, and by where the difference is looked for."""

from __future__ import annotations

from typing import Any

import pytest

# (options of both runs, name → another value)
Changes = list[tuple[dict[str, Any], dict[str, Any]]]


def cases(changes: Changes) -> list[Any]:
    """One for each option of a table: the options beside it, its name, its value."""
    return [
        pytest.param(base, name, value, id=name)
        for base, more in changes
        for name, value in more.items()
    ]


# The actor alone, which suffices for most options: each further model, and data to evaluate on, take time in each run.
ALONE = {"advantage_estimator": "reinforce", "init_kl_coef": 0.0}
CRITIC = {"init_kl_coef": 0.0}
REFERENCE = {"advantage_estimator": "reinforce"}
EVALUATED = ALONE | {"eval_data": "@prompts"}
GROUPS = ALONE | {"n_samples_per_prompt": 2}
REWARD_MODEL = ALONE | {"reward_fn": None, "reward_pretrain": ("@reward_model",)}
MATH = ALONE | {"reward_fn": None, "reward_source": ("math",)}
TEXT = ALONE | {"pretrain_data": "@text"}
COLUMNS = ALONE | {"prompt_data": "@columns"}
CODE = {"reward_source": ("code",), "reward_fn": None, "allow_unsafe_code_execution": True}
FUSION = CODE | {"sandbox_fusion_url": "http://127.0.0.1:9"}
SERVICE = CODE | {"function_call_url": "http://127.0.0.1:9"}
EPISODES = ALONE | {
    "reward_fn": None,
    "reward_source": ("environment",),
    "env": ("@env:Talk",),
}
TEACHER = ALONE | {"teacher_pretrain": "@other_model"}

REFUSED_HERE = {
    "activation_offload",
    "hf_cuda_graphs",
    "value_head_prefix",
    "disable_fast_tokenizer",
    "external_lib",
    "flash_attn",
    "fp16",
    "load_in_4bit",
    "teacher_api_key_env",
    "teacher_url",
    "use_liger_kernel",
    "sequence_parallel_size",
    "zpg",
}
"""Options that need what this machine lacks, a server that answers, or other files."""

BUILT: Changes = [
    (
        ALONE,
        {
            # models
            "pretrain": "@other_model",
            "init_from_scratch": True,
            "override_config": '{"attention_dropout": 0.5}',
            "tokenizer_path": "@chat_model",
            "disable_fast_tokenizer": True,
            "attn_implementation": "eager",
            "flash_attn": True,
            "gradient_checkpointing": True,
            "activation_offload": True,
            "use_liger_kernel": True,
            "external_lib": "no_such_module",
            # data
            "prompt_data": "@other_prompts",
            "eval_data": "@other_prompts",
            "input_template": "1{}",
            "data_shuffle": False,
            "max_samples": 8,
            "prompt_max_len": 13,
            # rollouts
            "micro_rollout_batch_size": 3,
            "do_sample": False,
            "rollout_engine": "@engine:build",
            "hf_cuda_graphs": True,
            "batch_invariant": True,
            "gen_batch_size": 8,
            "generation_size": 2,
            "n_samples_per_prompt": 2,
            # rewards
            "reward_fn": "@rewards",
            "reward_routes": '{"*": {"function": 0.5}}',
            "reward_fn_style": "queries",
            "reward_workers": 3,
            "reward_timeout": 7.0,
            "reward_retries": 2,
            "on_reward_failure": "unscored",
            "async_rewards": True,
            # algorithm, loss
            "enable_ema": True,
            "teacher_pretrain": "@other_model",
            "early_stop_imp_ratio": 2.0,
            "high_entropy_token_ratio": 0.5,
            "rollout_correction": "tis",
            "rollout_rejection": ("token_ratio=0.5:2",),
            "lora_rank": 2,
            "load_in_4bit": True,
            # training
            "num_episodes": 2,
            "total_training_steps": 2,
            "dry_run": True,
            "callback": ("@callback",),
            "packing_samples": False,
            "buffer_limit": 4,
            "buffer_cpu_offload": False,
            "actor_learning_rate": 0.5,
            "lr_scheduler": "linear",
            "lr_warmup_ratio": 0.9,
            "lr_warmup_steps": 3,
            "min_lr_ratio": 0.5,
            "l2": 0.5,
            "adam_betas": (0.5, 0.6),
            "max_norm": 0.5,
            "max_skipped_steps": 7,
            "max_tokens_per_micro_batch": 99,
            # strategy
            "zero_stage": 2,
            "full_determinism": True,
            "dist_timeout": 7.0,
            # checkpoints
            "save_path": "@folder",
            "ckpt_path": "@folder",
        },
    ),
    (
        CRITIC,
        {
            "critic_pretrain": "@reward_model",
            "critic_learning_rate": 0.5,
            "critic_zero_stage": 2,
        },
    ),
    (
        REFERENCE,
        {
            "ref_pretrain": "@other_model",
            "ref_ema_eta": 0.5,
            "ref_reset_steps": 1,
            "micro_batch_specs": ("reference=1",),
            "ref_zero_stage": 3,
        },
    ),
    (
        EVALUATED,
        {
            "eval_max_samples": 8,
            "eval_n_samples": 2,
            "eval_temperature": 0.5,
            "eval_correct_threshold": 0.25,
            "eval_reward_source": ("math",),
            "eval_reward_fn": "@rewards",
            "val_only": True,
        },
    ),
    (ALONE | {"train_batch_size": 2}, {"rollout_batch_size": 2}),
    (ALONE | {"reward_timeout": 5.0}, {"reward_manager": "prime"}),
    (
        ALONE | {"reward_fn": None},
        {"remote_rm_url": ("http://127.0.0.1:9/score",), "reward_source": ("math",)},
    ),
    (REWARD_MODEL, {"reward_pretrain": ("@other_reward_model",)}),
    (REWARD_MODEL | {"advantage_estimator": "gae"}, {"init_critic_from_actor": True}),
    (EVALUATED | {"eval_temperature": 1.0}, {"eval_top_p": 0.5, "eval_top_k": 3}),
    (CRITIC | {"critic_pretrain": "@reward_model"}, {"value_head_prefix": "other"}),
    (
        REWARD_MODEL,
        {
            "reward_input_tokenizer": ("@chat_model",),
            "reward_max_length": 7,
            "reward_truncation": "left",
            "normalize_reward": True,
        },
    ),
    (
        ALONE | {"zero_stage": 2},
        {
            "bf16": True,
            "fp16": True,
            "adam_offload": True,
            "overlap_comm": True,
        },
    ),
    (ALONE | {"zero_stage": 2, "bf16": True}, {"grad_accum_dtype": "bf16"}),
    (ALONE | {"gradient_checkpointing": True}, {"gradient_checkpointing_use_reentrant": True}),
    (ALONE | {"prompt_data": "@prompts,@other_prompts"}, {"prompt_data_probs": "0.25,0.75"}),
    (ALONE | {"prompt_data": "@splits"}, {"prompt_split": "other"}),
    (ALONE | {"eval_data": "@splits"}, {"eval_split": "other"}),
    (
        COLUMNS,
        {
            "prompt_metadata": "@metadata",
            "input_key": "question",
            "label_key": "answer",
            "data_source_key": "origin",
        },
    ),
    (ALONE, {"pretrain_data": "@text"}),
    (ALONE | {"pretrain_data": "@splits", "output_key": "label"}, {"pretrain_split": "other"}),
    (ALONE | {"pretrain_data": "@text,@columns"}, {"pretrain_data_probs": "0.25,0.75"}),
    (ALONE | {"pretrain": "@chat_model"}, {"apply_chat_template": True}),
    (
        ALONE | {"pretrain": "@chat_model", "prompt_data": "@chats", "prompt_max_len": 30},
        {"system_prompt": "be", "chat_template_kwargs": '{"note": "be"}'},
    ),
    (ALONE | {"prompt_data": "@too_long"}, {"truncation": "left"}),
    (ALONE | {"prompt_data": "@too_long", "truncation": "left"}, {"filter_overlong_prompts": True}),
    (ALONE | {"prompt_data": "@bad"}, {"on_bad_row": "skip"}),
    (GROUPS, {"dynamic_sampling": True, "share_prompts": False}),
    (GROUPS | {"generation_size": 4}, {"best_of_n_tie": "longer"}),
    (
        GROUPS | {"dynamic_sampling": True},
        {
            "filter_metric": "acc",
            "filter_range": (0.25, 0.75),
            "max_num_gen_batches": 3,
            "on_exhausted": "raise",
        },
    ),
    (ALONE, {"dataset_filter_threshold": 0.5}),
    (ALONE | {"dataset_filter_threshold": 0.5}, {"dataset_max_filter_percentage": 0.5}),
    (ALONE, {"fire_sampling": True}),
    (ALONE | {"reward_fn": "@rewards:per_token"}, {"use_dense_reward": True}),
    (
        COLUMNS | {"reward_routes": '{"0": {"math": 1}, "*": {"function": 1}}'},
        {"reward_routes_by": "origin"},
    ),
    (MATH, {"check_verifier_status": True}),
    (ALONE | {"check_verifier_status": True, "reward_minimum": 0.0}, {"reward_minimum": -1.0}),
    (MATH, {"math_unmarked": False}),
    (ALONE | {"reward_source": ("format",), "reward_fn": None}, {"reward_format": "think"}),
    (MATH, {"check_xml_format": True}),
    (
        ALONE | {"reward_fn": None, "remote_rm_url": ("http://127.0.0.1:9/score",)},
        {"remote_rm_timeout": 7.0, "remote_rm_retries": 1, "remote_rm_token_env": "PATH"},
    ),
    (ALONE, {"teacher_url": ("http://127.0.0.1:9",)}),
    (ALONE | {"teacher_url": ("http://127.0.0.1:9",)}, {"teacher_api_key_env": "NO_SUCH_VARIABLE"}),
    (ALONE | {"zero_stage": 3}, {"param_offload": True, "zpg": 3}),
    (ALONE, {"sequence_parallel_size": 2}),
    (REFERENCE | {"ref_zero_stage": 3}, {"ref_offload": True}),
    (
        ALONE | {"lora_rank": 2},
        {"lora_alpha": 7, "lora_dropout": 0.5, "target_modules": ("q_proj",)},
    ),
]

# What a run writes and logs in two steps.
SHORT = ALONE | {"max_samples": 8}
TWO_EPISODES = SHORT | EVALUATED | {"num_episodes": 2}
CHECKPOINTS = SHORT | {"save_steps": 1}
DISTILLED = SHORT | TEACHER

BUILT += [
    (
        EPISODES,
        {
            "env": ("@env:Walk",),
            "max_turns": 3,
            "max_turn_tokens": 3,
            "max_tool_calls": 3,
            "max_observation_len": 3,
            "env_timeout": 3.0,
            "episode_timeout": 3.0,
            "env_workers": 1,
            "env_retries": 3,
            "env_failure_limit": 0.25,
            "tape": "off",
        },
    ),
    (EPISODES | {"use_dense_reward": True, "env_reward": "turns"}, {"env_reward": "sum"}),
]

RAN: Changes = [
    (
        SHORT,
        {
            "benchmark_steps": 1,
            "save_epochs": 1,
            "save_seconds": 1e-9,
            "save_steps": 1,
            "hf_save_steps": 1,
            "logging_steps": 2,
            "profile_steps": (1,),
            "peak_tflops": 1.0,
            "record_samples": 0,
            "rollout_data_dir": "@root/dumps",
            "skip_rollout": "@root/skipped",
            "use_tensorboard": "@root/tensorboard",
        },
    ),
    (SHORT | {"use_tensorboard": "@root/tensorboard"}, {"metric_names": "verl"}),
    (CHECKPOINTS, {"save_hf_ckpt": True, "max_ckpt_num": 1, "max_ckpt_mem": 1e-6}),
    (CHECKPOINTS | {"save_hf_ckpt": True}, {"disable_ds_ckpt": True}),
    (SHORT | EVALUATED, {"eval_steps": 1, "val_before_train": False}),
    (SHORT | EVALUATED | {"val_before_train": False}, {"best_metric": "eval/reward"}),
    (SHORT | TEXT, {"ptx_coef": 0.5, "output_key": "output"}),
    (SHORT | {"enable_ema": True}, {"ema_beta": 0.1}),
    (SHORT | {"init_kl_coef": 0.5}, {"kl_clip": 1e-9, "kl_estimator": "k3"}),
    (SHORT | {"advantage_estimator": "gae"}, {"save_value_network": True}),
    (SHORT | {"advantage_estimator": "gae", "value_norm": "exp"}, {"value_norm_beta": 0.1}),
    (DISTILLED, {"distill_by": "loss", "distill_coef": 0.5, "distill_discount": 0.5}),
    (DISTILLED | {"distill_by": "loss"}, {"distill_beta": 0.5, "distill_topk": 3}),
    (
        DISTILLED | {"distill_by": "loss", "distill_topk": 3},
        {"distill_tail": "renormalise"},
    ),
    (
        SHORT | {"reward_fn": "@rewards:per_token", "use_dense_reward": True},
        {"reward_delta": True},
    ),
    (SHORT | {"init_kl_coef": 0.5, "kl_target": 0.001}, {"kl_horizon": 100}),
    (
        SHORT
        | GROUPS
        | {
            "advantage_estimator": "gdpo",
            "reward_fn": "@rewards:in_parts",
            "gdpo_rewards": ("length", "ones"),
            "seed": 1,  # both parts vary within a group
        },
        {"gdpo_rewards": ("length", "ones=5")},
    ),
]

# Two optimizer steps of a trainer whose engine and rewards are tables.
GAE = {"micro_train_batch_size": 2, "init_kl_coef": 0.1}
STEP_GRPO = GAE | {"advantage_estimator": "grpo", "use_kl_loss": True}
TWO_STEPS = GAE | {"train_batch_size": 2, "max_epochs": 2}

STEP: Changes = [
    (
        GAE,
        {
            "gamma": 0.5,
            "lambd": 0.5,
            "adv_norm": False,
            "adv_norm_scope": "group",
            "adv_std_unbiased": True,
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
    (STEP_GRPO, {"group_std_norm": False, "grpo_std_eps": 1.0, "use_kl_loss": False}),
    (
        TWO_STEPS,
        {
            "eps_clip": 0.001,
            "eps_clip_low": 0.001,
            "eps_clip_high": 0.001,
            "value_clip": 0.001,
            "value_huber_delta": 0.1,
            "max_epochs": 3,
            "train_batch_size": 4,
            "early_stop_kl": 1e-9,
            "freezing_actor_steps": 5,
            "policy_loss": "gspo",
        },
    ),
    (GAE | {"ppo_n_minibatches": 1}, {"n_samples_per_prompt": 1}),
    (GAE | {"overlong_buffer_len": 4}, {"overlong_penalty_factor": 3.0}),
    (GAE, {"micro_train_batch_size": 1, "old_log_probs": "rollout"}),
    ({"micro_train_batch_size": 2}, {"advantage_estimator": "reinforce"}),
    (GAE, {"ppo_n_minibatches": 2}),
    (STEP_GRPO, {"grpo_std_scope": "batch"}),
    (GAE | {"advantage_estimator": "grpo"}, {"use_kl_in_reward": True}),
    (
        GAE | {"rollout_correction": "tis"},
        {
            "correction_low": 0.9,
            "correction_high": 0.1,
            "correction_veto": 0.5,
            "correction_batch_norm": True,
        },
    ),
    (
        GAE | {"advantage_estimator": "reinforce"},
        {"reward_norm_by": ("mean=group", "std=batch"), "adv_norm_by": ("mean=group", "std=batch")},
    ),
    (
        GAE | {"rollout_correction": "geo_mis", "correction_low": 0.03},
        {"correction_agg": "sum"},
    ),
    (TWO_STEPS, {"dual_clip": 1.0001}),
    (TWO_STEPS | {"policy_loss": "sapo"}, {"sapo_tau_pos": 0.1, "sapo_tau_neg": 9.0}),
    (
        TWO_STEPS
        | {
            "policy_loss": "clip_cov",
            "clip_cov_low": 1e-9,
            "clip_cov_high": 9.0,
            "clip_cov_ratio": 0.9,
        },
        {"clip_cov_ratio": 0.3, "clip_cov_low": 8.0, "clip_cov_high": 1e-6},
    ),
    (TWO_STEPS | {"policy_loss": "kl_cov"}, {"kl_cov_ratio": 0.9, "kl_cov_coef": 9.0}),
    (TWO_STEPS | {"policy_loss": "cpgd"}, {"cpgd_drift_coef": 9.0}),
    (
        TWO_STEPS | {"policy_loss": "dppo_tv"},
        {"dppo_ratio_max": 1.0001, "dppo_drift_coef": 9.0},
    ),
]

# What a reward source is made with, and what the arguments of vLLM are.
REWARDED: Changes = [
    (
        CODE,
        {
            "code_score": "share",
            "code_compare": "exact",
            "code_max_tests": 3,
            "code_timeout": 3.0,
            "code_memory_limit_mb": 999,
            "code_processes": 3,
            "allow_unsafe_code_execution": False,
            "sandbox_fusion_url": "http://127.0.0.1:9",
            "function_call_url": "http://127.0.0.1:9",
        },
    ),
    (
        FUSION,
        {},
    ),
    (
        SERVICE,
        {},
    ),
]

VLLM: Changes = [
    (
        {"rollout_engine": "vllm"},
        {
            "tensor_parallel_size": 2,
            "load_format": "auto",
            "gpu_memory_utilization": 0.25,
            "kv_cache_memory_bytes": 12345,
            "max_num_seqs": 3,
            "max_num_batched_tokens": 4096,
            "max_model_len": 4096,
            "enable_prefix_caching": False,
            "enforce_eager": True,
            "free_cache_engine": False,
        },
    ),
]

# Runs of `lightppo sft`, `rm` and `dpo`: the options that PPO has not.
ON_PAIRS = {"dataset": "@pairs", "eval_dataset": "@pairs"}
SUPERVISED: dict[str, Changes] = {
    "sft": [
        (
            {"dataset": "@text", "eval_dataset": "@text"},
            {
                "dataset": "@columns",
                "eval_dataset": "@columns",
                "num_epochs": 2,
                "max_steps": 1,
                "learning_rate": 0.5,
                "log_file": "@root/log.jsonl",
            },
        ),
        ({"dataset": "@text", "output_key": "output", "truncation": "right"}, {"max_len": 5}),
        ({"dataset": "@splits", "output_key": "label"}, {"dataset_split": "other"}),
    ],
    "rm": [
        (ON_PAIRS, {"chosen_key": "best", "rejected_key": "worst"}),
        (ON_PAIRS, {"margin_key": "margin"}),
    ],
    "dpo": [
        (
            ON_PAIRS,
            {
                "preference_loss": "ipo",
                "beta": 0.9,
                "average_log_probs": True,
                "label_smoothing": 0.3,
            },
        ),
    ],
}

ELSEWHERE = {
    "max_staleness": "trainer/test_max_staleness.py",  # needs servers
    "balance_ranks": "rollout/test_balancing.py",  # of two ranks
    "shuffle": "trainer/test_options_act.py",
    "env_contract": "episodes/test_assembly.py",
    "tool_format": "episodes/test_assembly.py",
    "tools": "episodes/test_assembly.py",
    "tape_from": "episodes/test_runs.py",
    "aux_loss_coef": "trainer/test_algorithms_act.py",  # of a mixture of experts
    "router_replay": "trainer/test_router_replay_runs.py",  # of a mixture of experts
    "config": "config/test_cli.py",
    "data_num_workers": "trainer/test_build.py",
    "dataloader_pin_memory": "trainer/test_pretraining.py",
    "debug": "trainer/test_failing_rewards.py",
    "load_checkpoint": "trainer/test_resume.py",
    # the launcher's: accepted, while ranks come from the environment
    "local_rank": "config/test_cli.py",
    "logp_diff_tolerance": "experience/test_rollout_check.py",
    "num_examine": "trainer/test_options_act.py",  # what is printed
    "multiturn": "data/test_examples.py",  # of chats with several answers
    "reshape_ckpt": "checkpoint/test_run_checkpointer.py",
    "resume": "trainer/test_resume.py",
    "resume_changes": "trainer/test_resume.py",
    "push_to_hub": "logging/test_hub.py",
    "hub_private": "logging/test_hub.py",
    "rollout_check": "experience/test_rollout_check.py",
    "signal_grace": "distributed/test_signals.py",
    "torch_compile": "trainer/test_build.py",  # which takes seconds
    "trust_remote_code": "trainer/test_build.py",
    "use_mlflow": "logging/test_loggers.py",
    "use_trackio": "logging/test_loggers.py",
    "use_wandb": "logging/test_loggers.py",
    "vllm_dtype": "experience/test_rollout_check.py",
    "vllm_lora_push": "rollout/vllm/test_vllm_server.py",
    "offload_during_rollout": "rollout/vllm/test_offload_optimizer.py",
    "vllm_server_api_key_env": "rollout/vllm/test_vllm_server.py",
    "vllm_server_retries": "rollout/vllm/test_vllm_server.py",
    "vllm_server_sync": "rollout/vllm/test_vllm_server.py",
    "vllm_server_sync_address": "rollout/vllm/test_vllm_server.py",
    "vllm_server_sync_dir": "rollout/vllm/test_vllm_server.py",
    "vllm_server_timeout": "rollout/vllm/test_vllm_server.py",
    "vllm_server_url": "rollout/vllm/test_vllm_server.py",
    "wandb_group": "logging/test_loggers.py",
    "wandb_org": "trainer/test_options_act.py",
    "wandb_project": "logging/test_loggers.py",
    "wandb_run_name": "logging/test_loggers.py",
}
"""Options whose difference only a crash, a server, a tracker or a second start shows, and the test that sets them."""
