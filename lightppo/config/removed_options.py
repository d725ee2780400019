"""Options that earlier versions had: what became of them. Files that hold the value that is left are still read."""

from __future__ import annotations

from typing import Any

_AS_ACTOR = "the critic trains as the actor does"
_FROZEN = "all frozen models have --ref_zero_stage and --ref_offload"
_FIXED = "it is fixed at {value}"

# name → (the value that is left, what to do). None as a value stood for the same.
_REMOVED: dict[str, tuple[Any, str]] = {
    "critic_lr_scheduler": (None, f"{_AS_ACTOR}: --lr_scheduler"),
    "critic_lr_warmup_ratio": (None, f"{_AS_ACTOR}: --lr_warmup_ratio"),
    "critic_lr_warmup_steps": (None, f"{_AS_ACTOR}: --lr_warmup_steps"),
    "critic_min_lr_ratio": (None, f"{_AS_ACTOR}: --min_lr_ratio"),
    "critic_l2": (None, f"{_AS_ACTOR}: --l2"),
    "critic_adam_betas": (None, f"{_AS_ACTOR}: --adam_betas"),
    "critic_max_epochs": (None, f"{_AS_ACTOR}: --max_epochs"),
    "critic_max_norm": (None, f"{_AS_ACTOR}: --max_norm"),
    "critic_gradient_checkpointing": (None, f"{_AS_ACTOR}: --gradient_checkpointing"),
    "critic_adam_offload": (None, f"{_AS_ACTOR}: --adam_offload"),
    "critic_param_offload": (None, f"{_AS_ACTOR}: --param_offload"),
    "reward_zero_stage": (None, _FROZEN),
    "reward_offload": (False, _FROZEN),
    "teacher_zero_stage": (None, _FROZEN),
    "teacher_offload": (False, _FROZEN),
    "adv_norm_eps": (
        None,
        "ε is 1e-8 for a batch, 1e-5 for a group; --adv_norm_by takes eps=NUMBER",
    ),
    "value_norm_eps": (None, "it is fixed at 1e-5"),
    "fire_temperature": (None, "it is fixed at 10"),
    "adv_shift_mean": (True, "write --adv_norm_by std=batch"),
    "adv_std_norm": (True, "write --adv_norm_by mean=batch"),
    "skip_rollout_reuse": (False, "each batch of --skip_rollout goes to its own step"),
    "hf_save_epochs": (None, "set --hf_save_steps"),
    "hf_save_seconds": (None, "set --hf_save_steps"),
    "eval_epochs": (None, "an evaluation follows each episode, or every --eval_steps"),
    "eval_seconds": (None, "set --eval_steps"),
    "mlflow_experiment": ("lightppo", "MLflow reads MLFLOW_EXPERIMENT_NAME"),
    "vllm_server_start_timeout": (
        300.0,
        "servers have 300 s to start, and at most half of --dist_timeout",
    ),
    "vllm_server_concurrency": (
        1024,
        "a server gets {value} requests at most, and --vllm_server_timeout counts while they wait in it",
    ),
    "block_size": (None, "vLLM chooses it"),
    "vllm_request_seeds": (None, "each response has its seed on a CPU, and each call on a GPU"),
    "sleep_level": (
        None,
        "vLLM keeps its weights where adapters travel alone, and drops them elsewhere",
    ),
    "on_env_failure": ("unscored", "--env_failure_limit 0 ends the run at the first failure"),
    "code_total_timeout": (60.0, _FIXED),
    "code_file_limit_mb": (16, _FIXED),
    "code_output_limit_mb": (16, _FIXED),
    "code_max_processes": (16, _FIXED),
    "code_float_tolerance": (1e-05, _FIXED),
    "sandbox_fusion_language": ("python", _FIXED),
    "sandbox_fusion_memory_limit_mb": (1024, _FIXED),
    "sandbox_fusion_max_concurrent": (64, _FIXED),
    "sandbox_fusion_retries": (3, _FIXED),
    "function_call_batch_size": (1, _FIXED),
    "function_call_memory_limit_mb": (0, "the service has its own limit"),
    "function_call_max_concurrent": (64, _FIXED),
    "function_call_retries": (3, _FIXED),
}


def removal(name: str) -> str:
    """Return what to do instead of an option that was removed, as the end of a message; an empty string for others."""
    if name not in _REMOVED:
        return ""
    value, instead = _REMOVED[name]
    return f": it was removed, {instead.format(value=value)}"


def is_left(name: str, value: Any) -> bool:
    """Tell whether this was an option, with the value that is left: such a setting may be passed over."""
    return name in _REMOVED and (value is None or value == _REMOVED[name][0])
