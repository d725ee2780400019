"""Options of TRL that say something together."""

from __future__ import annotations

import math
import re
from functools import partial

from lightppo.cli.conversion_rules import (
    EVERY,
    LOOK,
    SUPERVISED,
    Arguments,
    Converted,
    adam_betas,
    clip_range,
    correction,
    rule,
    trackers,
    truth,
)

trl = partial(rule, "TRL")


def micro_batch(arguments: Arguments) -> int:
    """Return the samples of a micro batch."""
    return arguments.whole("per_device_train_batch_size", default=8)


def optimizer_step(arguments: Arguments) -> int:
    """Return the samples of an optimizer step."""
    accumulated = arguments.whole("gradient_accumulation_steps")
    return micro_batch(arguments) * accumulated * arguments.ranks


def generation_batch(arguments: Arguments) -> int:
    """Return the samples of a generation batch."""
    samples = arguments.number("generation_batch_size")
    if samples is not None:
        return int(samples)
    passes = arguments.number("steps_per_generation")
    if passes is None:
        return optimizer_step(arguments)
    return int(micro_batch(arguments) * passes * arguments.ranks)


@trl("per_device_train_batch_size gradient_accumulation_steps", SUPERVISED)
def trl_rows(arguments: Arguments) -> Converted:
    yield "micro_train_batch_size", micro_batch(arguments)
    yield "train_batch_size", optimizer_step(arguments)


@trl(
    "per_device_train_batch_size gradient_accumulation_steps generation_batch_size "
    "steps_per_generation num_generations num_iterations",
)
def trl_batches(arguments: Arguments) -> Converted:
    samples = generation_batch(arguments)
    group_size = arguments.whole("num_generations", default=8)
    yield from trl_rows(arguments)
    yield "n_samples_per_prompt", group_size
    yield "rollout_batch_size", max(1, samples // group_size)
    yield "max_epochs", arguments.whole("num_iterations")
    if samples % group_size:
        yield (
            LOOK,
            f"a generation batch of {samples} samples is no multiple of the {group_size} samples of a prompt",
        )


_SUPERVISED_NAMES = {
    "total_training_steps": "max_steps",
    "num_episodes": "num_epochs",
    "prompt_data": "dataset",
    "eval_data": "eval_dataset",
}


def option_of(arguments: Arguments, option_name: str) -> str:
    """Return what an option of ``ppo`` is called in our command."""
    return option_name if arguments.command == "ppo" else _SUPERVISED_NAMES[option_name]


def steps_of(arguments: Arguments, optimizer_steps: float) -> int:
    """Return how many steps of our command take so many optimizer steps."""
    if arguments.command != "ppo":
        return math.ceil(optimizer_steps)
    passes = generation_batch(arguments) // optimizer_step(arguments)
    return math.ceil(optimizer_steps / max(1, passes * arguments.whole("num_iterations")))


@trl("max_steps num_train_epochs", EVERY)
def trl_length(arguments: Arguments) -> Converted:
    limit_option = option_of(arguments, "total_training_steps")
    steps = arguments.number("max_steps")
    epochs = arguments.number("num_train_epochs")
    if steps is not None and steps > 0:
        total_steps = steps_of(arguments, steps)
        yield limit_option, total_steps
        if arguments.command == "ppo":
            # It goes round the prompts until then: no step takes less than a pass.
            yield "num_episodes", total_steps
    elif epochs is not None:
        yield option_of(arguments, "num_episodes"), max(1, math.ceil(epochs))
        if epochs != int(epochs):
            yield LOOK, f"{epochs:g} passes: whole ones here; --{limit_option} ends a run sooner"


@trl(
    "save_strategy save_steps eval_strategy eval_steps logging_steps dataset_name dataset_test_split",
    EVERY,
)
def trl_due_times(arguments: Arguments) -> Converted:
    save_strategy = arguments.text("save_strategy") or "steps"
    evaluation_strategy = arguments.text("eval_strategy") or "no"
    logging_steps = arguments.number("logging_steps") or 0
    dataset = arguments.text("dataset_name")
    if save_strategy == "epoch":
        yield "save_epochs", 1
    elif save_strategy == "steps" and (count := arguments.number("save_steps") or 0) >= 1:
        yield "save_steps", steps_of(arguments, count)
    if dataset is not None:
        yield option_of(arguments, "prompt_data"), dataset
    if evaluation_strategy in ("steps", "epoch"):
        if dataset is not None:
            yield option_of(arguments, "eval_data"), dataset
        yield "eval_split", arguments.text("dataset_test_split") or "test"
        if evaluation_strategy == "steps":
            count = arguments.number("eval_steps") or logging_steps or 500
            yield "eval_steps", steps_of(arguments, count)
    if logging_steps >= 1:
        yield "logging_steps", steps_of(arguments, logging_steps)


@trl("warmup_ratio warmup_steps", EVERY)
def trl_warmup(arguments: Arguments) -> Converted:
    ratio = arguments.number("warmup_ratio") or 0
    steps = arguments.number("warmup_steps") or 0
    if steps >= 1:
        yield "lr_warmup_steps", int(steps)
    else:
        yield "lr_warmup_ratio", steps or ratio


@trl("adam_beta1 adam_beta2", EVERY)
def trl_betas(arguments: Arguments) -> Converted:
    return adam_betas(arguments, "adam_betas", "adam_beta1", "adam_beta2")


@trl("lr_scheduler_type lr_scheduler_kwargs lr_scheduler_kwargs.min_lr_rate", EVERY)
def trl_schedule(arguments: Arguments) -> Converted:
    scheduler = arguments.text("lr_scheduler_type") or "linear"
    yield "lr_scheduler", {"constant_with_warmup": "constant"}.get(scheduler, scheduler)
    settings = arguments.text("lr_scheduler_kwargs") or ""
    if rate := re.search(r"min_lr_rate\W+([\d.e-]+)", settings):
        yield "min_lr_ratio", rate[1]
    else:
        yield from arguments.copied("min_lr_ratio", "lr_scheduler_kwargs.min_lr_rate")


@trl("bf16 fp16 dtype torch_dtype", EVERY)
def trl_precision(arguments: Arguments) -> Converted:
    if arguments.on("fp16"):
        yield "fp16", True
    elif arguments.text("bf16") is None or arguments.on("bf16"):  # on by default
        yield "bf16", True


@trl("use_peft lora_r lora_alpha lora_dropout lora_target_modules", EVERY)
def trl_lora(arguments: Arguments) -> Converted:
    if arguments.on("use_peft"):
        yield "lora_rank", arguments.whole("lora_r", default=16)
        yield "lora_alpha", arguments.text("lora_alpha") or 32
        yield "lora_dropout", arguments.text("lora_dropout") or 0.05
        if module_names := arguments.items("lora_target_modules"):
            yield (
                "target_modules",
                module_names[0].split() if len(module_names) == 1 else module_names,
            )


@trl("report_to log_with logging_dir project", EVERY)
def trl_trackers(arguments: Arguments) -> Converted:
    tracker_names = arguments.items("report_to", "log_with")
    return trackers(tracker_names, arguments.text("logging_dir"), arguments.text("project"))


@trl("beta use_bias_correction_kl")
def trl_kl(arguments: Arguments) -> Converted:
    coefficient = arguments.number("beta") or 0.0
    yield "init_kl_coef", coefficient
    if coefficient and arguments.program == "trl-grpo":
        yield "use_kl_loss", True
        yield "kl_estimator", "k3_ratio" if arguments.on("use_bias_correction_kl") else "k3"


@trl("epsilon epsilon_high")
def trl_clip(arguments: Arguments) -> Converted:
    return clip_range(arguments.text("epsilon") or "0.2", arguments.text("epsilon_high"))


@trl("loss_type importance_sampling_level")
def trl_loss(arguments: Arguments) -> Converted:
    loss_type = arguments.text("loss_type") or "dapo"
    aggregation_modes = {
        "grpo": "seq-mean-token-mean",
        "dapo": "token-mean",
        "bnpo": "token-mean",
        "dr_grpo": "seq-mean-token-sum-norm",
    }
    if arguments.program == "trl-rloo":
        return
    if loss_type in ("cispo", "sapo"):
        yield "policy_loss", loss_type
    elif loss_type in aggregation_modes:
        if arguments.text("importance_sampling_level") == "sequence":
            yield "policy_loss", "gspo"
        yield "loss_agg_mode", aggregation_modes[loss_type]
    else:
        yield LOOK, f"{loss_type}: see --policy_loss and --loss_agg_mode"


@trl("scale_rewards")
def trl_scale(arguments: Arguments) -> Converted:
    scope = (arguments.text("scale_rewards") or "none").lower()
    if scope in ("none", "false"):
        yield "group_std_norm", False
    else:
        yield "grpo_std_eps", 1e-4
        yield "grpo_std_scope", "batch" if scope == "batch" else "group"


@trl(
    "use_vllm vllm_mode vllm_server_base_url vllm_server_host vllm_server_port vllm_importance_sampling_correction "
    "vllm_importance_sampling_mode vllm_importance_sampling_clip_min "
    "vllm_importance_sampling_clip_max vllm_importance_sampling_cap",
)
def trl_vllm(arguments: Arguments) -> Converted:
    if not arguments.on("use_vllm"):
        return
    if arguments.text("vllm_mode") == "server":
        server_host = arguments.text("vllm_server_host")
        if server_host in (None, "0.0.0.0"):
            server_host = "127.0.0.1"
        server_url = f"http://{server_host}:{arguments.text('vllm_server_port') or 8000}"
        yield "rollout_engine", "vllm_server"
        yield "vllm_server_url", [arguments.text("vllm_server_base_url") or server_url]
    else:
        yield "rollout_engine", "vllm"
    if truth(arguments.text("vllm_importance_sampling_correction") or True):
        correction_kinds = {
            "token_truncate": "tis",
            "sequence_truncate": "seq_tis",
            "token_mask": "icepop",
            "sequence_mask": "seq_mis",
        }
        correction_mode = arguments.text("vllm_importance_sampling_mode") or "sequence_mask"
        lower_bound = arguments.number("vllm_importance_sampling_clip_min")
        bounds = ("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap")
        yield from correction(
            correction_kinds.get(correction_mode), lower_bound, arguments.number(*bounds)
        )


_TRL_REWARDS = {
    "accuracy_reward": "math",
    "reasoning_accuracy_reward": "math",
    "think_format_reward": "format",
}


@trl("reward_funcs reward_model_name_or_path reward_weights")
def trl_rewards(arguments: Arguments) -> Converted:
    weights = iter(arguments.items("reward_weights"))
    sources = []
    models = arguments.items("reward_model_name_or_path")
    for reward_name in arguments.words("reward_funcs"):
        weight = next(weights, "1")
        weight = f"={weight}" if float(weight) != 1 else ""
        if reward_name in _TRL_REWARDS:
            sources.append(f"{_TRL_REWARDS[reward_name]}{weight}")
        elif "/" in reward_name:
            models.append(reward_name)
        elif "." in reward_name and not any(source.startswith("function") for source in sources):
            module, _, function = reward_name.rpartition(".")
            sources.append(f"function{weight}")
            yield "reward_fn", f"{module.replace('.', '/')}.py:{function}"
        else:
            yield LOOK, f"{reward_name}: write it as a function: --reward_fn path.py:name"
    if models and sources:
        sources.append("model")
    if sources and sources != ["function"]:
        yield "reward_source", sources
    if models:
        yield "reward_pretrain", models


@trl("top_k top_entropy_quantile min_p")
def trl_sampling(arguments: Arguments) -> Converted:
    if (count := arguments.number("top_k")) is not None:
        yield "top_k", int(count) or -1
    if (share := arguments.number("top_entropy_quantile")) is not None and share < 1:
        yield "high_entropy_token_ratio", share
    if (share := arguments.number("min_p")) is not None:
        yield "min_p", share


@trl("sync_ref_model ref_model_sync_steps ref_model_mixup_alpha")
def trl_reference(arguments: Arguments) -> Converted:
    if not arguments.on("sync_ref_model"):
        return
    actor_share = arguments.number("ref_model_mixup_alpha") or 0.6
    steps = arguments.whole("ref_model_sync_steps", default=512)
    if actor_share == 1:
        yield "ref_reset_steps", steps_of(arguments, steps)
    elif steps == 1:
        yield "ref_ema_eta", actor_share
    else:
        yield (
            LOOK,
            f"{actor_share:g} of the actor every {steps} steps: --ref_reset_steps copies all of it, "
            "--ref_ema_eta a share in every step",
        )


@trl("gradient_checkpointing_kwargs gradient_checkpointing_kwargs.use_reentrant", EVERY)
def trl_checkpointing(arguments: Arguments) -> Converted:
    settings = arguments.text("gradient_checkpointing_kwargs") or ""
    is_reentrant = re.search(r"use_reentrant\W+true", settings, re.IGNORECASE)
    if is_reentrant or arguments.on("gradient_checkpointing_kwargs.use_reentrant"):
        yield "gradient_checkpointing_use_reentrant", True


@trl("truncation_mode", SUPERVISED)
def trl_truncation(arguments: Arguments) -> Converted:
    if arguments.text("truncation_mode") == "keep_start":
        yield "truncation", "right"
    elif arguments.text("truncation_mode") is not None:
        yield LOOK, "the answer's beginning cannot be cut: --truncation right or drop"


@trl("loss_type", "dpo")
def trl_pairs(arguments: Arguments) -> Converted:
    losses = {"sigmoid": "dpo", "ipo": "ipo"}
    for loss_type in arguments.items("loss_type"):
        if loss_type in losses:
            yield "preference_loss", losses[loss_type]
        else:
            yield LOOK, f"{loss_type}: --preference_loss is dpo or ipo"


@trl("max_tool_calling_iterations")
def trl_turns(arguments: Arguments) -> Converted:
    if (calls := arguments.number("max_tool_calling_iterations")) is not None:
        yield "max_turns", int(calls) + 1  # the last answer is a turn


@trl("ddp_timeout", EVERY)
def trl_timeout(arguments: Arguments) -> Converted:
    yield "dist_timeout", (arguments.number("ddp_timeout") or 1800) / 60


@trl("load_best_model_at_end metric_for_best_model", EVERY)
def trl_best(arguments: Arguments) -> Converted:
    if arguments.on("load_best_model_at_end"):
        metric = arguments.text("metric_for_best_model") or "loss"
        yield "best_metric", f"eval/{metric.removeprefix('eval_')}"
