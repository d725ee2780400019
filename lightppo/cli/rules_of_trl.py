"""Options of TRL that say something together."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from lightppo.cli.conversion_rules import (
    EVERY,
    LOOK,
    SCHEDULES,
    SUPERVISED,
    Their,
    correction,
    rule,
    trackers,
)


@rule("TRL", "per_device_train_batch_size gradient_accumulation_steps", SUPERVISED)
def _trl_rows(their: Their) -> Iterator[tuple[str, Any]]:
    micro = their.whole("per_device_train_batch_size", default=8)
    yield "micro_train_batch_size", micro
    yield "train_batch_size", micro * their.whole("gradient_accumulation_steps") * their.ranks


def _trl_sizes(their: Their) -> tuple[int, int, int]:
    """Samples of a micro batch, of an optimizer step, of a generation batch."""
    micro = their.whole("per_device_train_batch_size", default=8)
    step = micro * their.whole("gradient_accumulation_steps") * their.ranks
    batch = their.number("generation_batch_size")
    if batch is None:
        passes = their.number("steps_per_generation")
        batch = step if passes is None else micro * passes * their.ranks
    return micro, step, int(batch)


@rule(
    "TRL",
    "per_device_train_batch_size gradient_accumulation_steps generation_batch_size "
    "steps_per_generation num_generations num_iterations",
)
def _trl_batches(their: Their) -> Iterator[tuple[str, Any]]:
    micro, step, batch = _trl_sizes(their)
    group = their.whole("num_generations", default=8)
    yield "micro_train_batch_size", micro
    yield "train_batch_size", step
    yield "n_samples_per_prompt", group
    yield "rollout_batch_size", max(1, batch // group)
    yield "max_epochs", their.whole("num_iterations")
    if batch % group:
        yield (
            LOOK,
            f"a generation batch of {batch} samples is no multiple of the {group} samples of a prompt",
        )


def _trl_steps(their: Their, count: float) -> int:
    """PPO steps for their optimizer steps."""
    _, step, batch = _trl_sizes(their)
    return math.ceil(count / max(1, batch // step * their.whole("num_iterations")))


@rule("TRL", "max_steps num_train_epochs")
def _trl_length(their: Their) -> Iterator[tuple[str, Any]]:
    steps = their.number("max_steps")
    epochs = their.number("num_train_epochs")
    if steps is not None and steps > 0:
        total = _trl_steps(their, steps)
        yield "total_training_steps", total
        yield (
            "num_episodes",
            total,
        )  # it goes round the prompts until then: no step takes less than a pass
    elif epochs is not None:
        yield "num_episodes", max(1, math.ceil(epochs))
        if epochs != int(epochs):
            yield (
                LOOK,
                f"{epochs:g} passes: whole ones here; --total_training_steps ends a run sooner",
            )


@rule("TRL", "max_steps num_train_epochs", SUPERVISED)
def _trl_supervised_length(their: Their) -> Iterator[tuple[str, Any]]:
    steps = their.number("max_steps")
    epochs = their.number("num_train_epochs")
    if steps is not None and steps > 0:
        yield "max_steps", int(steps)
    elif epochs is not None:
        yield "num_epochs", max(1, math.ceil(epochs))
        if epochs != int(epochs):
            yield LOOK, f"{epochs:g} passes: whole ones here; --max_steps ends a run sooner"


@rule(
    "TRL",
    "save_strategy save_steps eval_strategy eval_steps logging_steps dataset_name dataset_test_split",
    EVERY,
)
def _trl_cadence(their: Their) -> Iterator[tuple[str, Any]]:
    is_ppo = their.command == "ppo"
    per_step = (lambda count: _trl_steps(their, count)) if is_ppo else math.ceil
    saves = their.text("save_strategy") or "steps"
    evals = their.text("eval_strategy") or "no"
    if saves == "epoch":
        yield "save_epochs", 1
    elif saves == "steps" and (count := their.number("save_steps")) is not None and count >= 1:
        yield "save_steps", per_step(count)
    data = their.text("dataset_name")
    if data is not None:
        yield "prompt_data" if is_ppo else "dataset", data
    if evals in ("steps", "epoch"):
        if data is not None:
            yield "eval_data" if is_ppo else "eval_dataset", data
        yield "eval_split", their.text("dataset_test_split") or "test"
        count = their.number("eval_steps") or their.number("logging_steps")
        yield ("eval_epochs", 1) if evals == "epoch" else ("eval_steps", per_step(count or 500))
    if (count := their.number("logging_steps")) is not None and count >= 1:
        yield "logging_steps", per_step(count)


@rule("TRL", "warmup_ratio warmup_steps", EVERY)
def _trl_warmup(their: Their) -> Iterator[tuple[str, Any]]:
    ratio = their.number("warmup_ratio")
    steps = their.number("warmup_steps")
    if steps is not None and steps >= 1:
        yield "lr_warmup_steps", int(steps)
    else:
        yield "lr_warmup_ratio", steps or ratio or 0


@rule("TRL", "adam_beta1 adam_beta2", EVERY)
def _trl_betas(their: Their) -> Iterator[tuple[str, Any]]:
    yield "adam_betas", (their.text("adam_beta1") or 0.9, their.text("adam_beta2") or 0.999)


@rule("TRL", "lr_scheduler_type lr_scheduler_kwargs lr_scheduler_kwargs.min_lr_rate", EVERY)
def _trl_schedule(their: Their) -> Iterator[tuple[str, Any]]:
    name = their.text("lr_scheduler_type") or "linear"
    yield "lr_scheduler", SCHEDULES.get(name, name)
    rate = re.search(r"min_lr_rate\W+([\d.e-]+)", their.text("lr_scheduler_kwargs") or "")
    if least := rate[1] if rate else their.text("lr_scheduler_kwargs.min_lr_rate"):
        yield "min_lr_ratio", least


@rule("TRL", "bf16 fp16 dtype torch_dtype", EVERY)
def _trl_precision(their: Their) -> Iterator[tuple[str, Any]]:
    if their.on("fp16"):
        yield "fp16", True
    elif their.text("bf16") is None or their.on("bf16"):  # on by default
        yield "bf16", True


@rule("TRL", "use_peft lora_r lora_alpha lora_dropout lora_target_modules", EVERY)
def _trl_lora(their: Their) -> Iterator[tuple[str, Any]]:
    if their.on("use_peft"):
        yield "lora_rank", their.whole("lora_r", default=16)
        yield "lora_alpha", their.text("lora_alpha") or 32
        yield "lora_dropout", their.text("lora_dropout") or 0.05
        if names := their.items("lora_target_modules"):
            yield "target_modules", names[0].split() if len(names) == 1 else names


@rule("TRL", "report_to log_with logging_dir project", EVERY)
def _trl_trackers(their: Their) -> Iterator[tuple[str, Any]]:
    yield from trackers(
        their.items("report_to", "log_with"), their.text("logging_dir"), their.text("project")
    )


@rule("TRL", "beta use_bias_correction_kl")
def _trl_kl(their: Their) -> Iterator[tuple[str, Any]]:
    coef = their.number("beta") or 0.0
    yield "init_kl_coef", coef
    if coef and their.program == "trl-grpo":
        yield "use_kl_loss", True
        yield "kl_estimator", "k3_ratio" if their.on("use_bias_correction_kl") else "k3"


@rule("TRL", "epsilon epsilon_high")
def _trl_clip(their: Their) -> Iterator[tuple[str, Any]]:
    low = their.text("epsilon") or "0.2"
    high = their.text("epsilon_high") or low
    if low == high:
        yield "eps_clip", low
    else:
        yield "eps_clip_low", low
        yield "eps_clip_high", high


@rule("TRL", "loss_type importance_sampling_level")
def _trl_loss(their: Their) -> Iterator[tuple[str, Any]]:
    name = their.text("loss_type") or "dapo"
    modes = {"grpo": "seq-mean-token-mean", "dapo": "token-mean", "bnpo": "token-mean"}
    modes |= {"dr_grpo": "seq-mean-token-sum-norm"}
    if their.program == "trl-rloo":
        return
    if name in ("cispo", "sapo"):
        yield "policy_loss", name
    elif name in modes:
        if their.text("importance_sampling_level") == "sequence":
            yield "policy_loss", "gspo"
        yield "loss_agg_mode", modes[name]
    else:
        yield LOOK, f"{name}: see --policy_loss and --loss_agg_mode"


@rule("TRL", "scale_rewards")
def _trl_scale(their: Their) -> Iterator[tuple[str, Any]]:
    how = (their.text("scale_rewards") or "none").lower()
    if how in ("none", "false"):
        yield "group_std_norm", False
    else:
        yield "grpo_std_eps", 1e-4
        yield "grpo_std_scope", "batch" if how == "batch" else "group"


@rule(
    "TRL",
    "use_vllm vllm_mode vllm_server_base_url vllm_server_host vllm_server_port vllm_importance_sampling_correction "
    "vllm_importance_sampling_mode vllm_importance_sampling_clip_min "
    "vllm_importance_sampling_clip_max vllm_importance_sampling_cap",
)
def _trl_vllm(their: Their) -> Iterator[tuple[str, Any]]:
    if not their.on("use_vllm"):
        return
    if their.text("vllm_mode") == "server":
        host = their.text("vllm_server_host")
        port = their.text("vllm_server_port") or "8000"
        host = "127.0.0.1" if host in (None, "0.0.0.0") else host
        yield "rollout_engine", "vllm_server"
        yield "vllm_server_url", [their.text("vllm_server_base_url") or f"http://{host}:{port}"]
    else:
        yield "rollout_engine", "vllm"
    if their.text("vllm_importance_sampling_correction") is None or their.on(
        "vllm_importance_sampling_correction"
    ):
        kinds = {"token_truncate": "tis", "sequence_truncate": "seq_tis", "token_mask": "icepop"}
        kinds |= {"sequence_mask": "seq_mis"}
        mode = their.text("vllm_importance_sampling_mode") or "sequence_mask"
        high = their.number("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap")
        yield from correction(
            kinds.get(mode), their.number("vllm_importance_sampling_clip_min"), high
        )


_TRL_REWARDS = {
    "accuracy_reward": "math",
    "reasoning_accuracy_reward": "math",
    "think_format_reward": "format",
}


@rule("TRL", "reward_funcs reward_model_name_or_path reward_weights")
def _trl_rewards(their: Their) -> Iterator[tuple[str, Any]]:
    names = [one for text in their.items("reward_funcs") for one in text.split()]
    weights = their.items("reward_weights")
    sources = []
    models = their.items("reward_model_name_or_path")
    for i, name in enumerate(names):
        weight = f"={weights[i]}" if i < len(weights) and float(weights[i]) != 1 else ""
        if name in _TRL_REWARDS:
            sources.append(f"{_TRL_REWARDS[name]}{weight}")
        elif "/" in name:
            models.append(name)
        elif "." in name and not any(one.startswith("function") for one in sources):
            module, _, function = name.rpartition(".")
            sources.append(f"function{weight}")
            yield "reward_fn", f"{module.replace('.', '/')}.py:{function}"
        else:
            yield LOOK, f"{name}: write it as a function: --reward_fn path.py:name"
    if models and sources:
        sources.append("model")
    if sources and sources != ["function"]:
        yield "reward_source", sources
    if models:
        yield "reward_pretrain", models


@rule("TRL", "top_k top_entropy_quantile min_p")
def _trl_sampling(their: Their) -> Iterator[tuple[str, Any]]:
    if (count := their.number("top_k")) is not None:
        yield "top_k", int(count) or -1
    if (share := their.number("top_entropy_quantile")) is not None and share < 1:
        yield "high_entropy_token_ratio", share
    if (least := their.number("min_p")) is not None:
        yield "min_p", least


@rule("TRL", "sync_ref_model ref_model_sync_steps ref_model_mixup_alpha")
def _trl_reference(their: Their) -> Iterator[tuple[str, Any]]:
    if not their.on("sync_ref_model"):
        return
    share = their.number("ref_model_mixup_alpha") or 0.6
    steps = their.whole("ref_model_sync_steps", default=512)
    if share == 1:
        yield "ref_reset_steps", _trl_steps(their, steps)
    elif steps == 1:
        yield "ref_ema_eta", share
    else:
        yield (
            LOOK,
            f"{share:g} of the actor every {steps} steps: --ref_reset_steps copies all of it, "
            "--ref_ema_eta a share in every step",
        )


@rule("TRL", "gradient_checkpointing_kwargs gradient_checkpointing_kwargs.use_reentrant", EVERY)
def _trl_checkpointing(their: Their) -> Iterator[tuple[str, Any]]:
    text = their.text("gradient_checkpointing_kwargs") or ""
    is_said = re.search(r"use_reentrant\W+true", text, re.IGNORECASE)
    if is_said or their.on("gradient_checkpointing_kwargs.use_reentrant"):
        yield "gradient_checkpointing_use_reentrant", True


@rule("TRL", "truncation_mode", SUPERVISED)
def _trl_truncation(their: Their) -> Iterator[tuple[str, Any]]:
    if their.text("truncation_mode") == "keep_start":
        yield "truncation", "right"
    elif their.text("truncation_mode") is not None:
        yield LOOK, "the answer's beginning cannot be cut: --truncation right or drop"


@rule("TRL", "loss_type", "dpo")
def _trl_pairs(their: Their) -> Iterator[tuple[str, Any]]:
    for name in their.items("loss_type"):
        if name in ("sigmoid", "ipo"):
            yield "preference_loss", "dpo" if name == "sigmoid" else "ipo"
        else:
            yield LOOK, f"{name}: --preference_loss is dpo or ipo"


@rule("TRL", "max_tool_calling_iterations")
def _trl_turns(their: Their) -> Iterator[tuple[str, Any]]:
    if (count := their.number("max_tool_calling_iterations")) is not None:
        yield "max_turns", int(count) + 1  # the last answer is a turn


@rule("TRL", "ddp_timeout", EVERY)
def _trl_timeout(their: Their) -> Iterator[tuple[str, Any]]:
    yield "dist_timeout", (their.number("ddp_timeout") or 1800) / 60


@rule("TRL", "load_best_model_at_end metric_for_best_model", EVERY)
def _trl_best(their: Their) -> Iterator[tuple[str, Any]]:
    if their.on("load_best_model_at_end"):
        name = their.text("metric_for_best_model") or "loss"
        yield "best_metric", f"eval/{name.removeprefix('eval_')}"
