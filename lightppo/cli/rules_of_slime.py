"""Options of slime that say something together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightppo.cli.conversion_rules import (
    KL_ESTIMATORS,
    LOOK,
    Their,
    correction,
    rule,
)


@rule("slime", "kl_coef use_kl_loss kl_loss_coef kl_loss_type use_unbiased_kl")
def _slime_kl(their: Their) -> Iterator[tuple[str, Any]]:
    if their.on("use_kl_loss"):
        coef = their.number("kl_loss_coef") or 0.0
        yield "init_kl_coef", coef
        if coef:
            yield "use_kl_loss", True
            kind = KL_ESTIMATORS.get(name := their.text("kl_loss_type") or "k1", name)
            is_ratio = their.on("use_unbiased_kl") and kind in ("k1", "k3")
            yield "kl_estimator", f"{kind}_ratio" if is_ratio else kind
            if name == "low_var_kl":
                yield "kl_clip", 10
    else:
        coef = their.number("kl_coef") or 0.0
        yield "init_kl_coef", coef
        if coef:
            yield "use_kl_in_reward", True


@rule("slime", "adam_beta1 adam_beta2")
def _slime_betas(their: Their) -> Iterator[tuple[str, Any]]:
    yield "adam_betas", (their.text("adam_beta1") or 0.9, their.text("adam_beta2") or 0.999)


@rule("slime", "lr min_lr lr_decay_style lr_warmup_iters lr_warmup_fraction")
def _slime_rates(their: Their) -> Iterator[tuple[str, Any]]:
    peak = their.number("lr")
    least = their.number("min_lr") or 0.0
    if peak:
        yield "actor_learning_rate", peak
        yield "min_lr_ratio", least / peak
    style = their.text("lr_decay_style")
    if style is not None:
        yield "lr_scheduler", "cosine_with_min_lr" if style == "cosine" and least else style
    if (steps := their.number("lr_warmup_iters")) is not None and steps > 0:
        yield "lr_warmup_steps", int(steps)
    else:
        yield "lr_warmup_ratio", their.number("lr_warmup_fraction") or 0


@rule("slime", "calculate_per_token_loss")
def _slime_loss(their: Their) -> Iterator[tuple[str, Any]]:
    yield (
        "loss_agg_mode",
        "token-mean" if their.on("calculate_per_token_loss") else "seq-mean-token-mean",
    )


@rule("slime", "use_tis tis_clip tis_clip_low")
def _slime_correction(their: Their) -> Iterator[tuple[str, Any]]:
    if their.on("use_tis"):
        yield from correction("tis", their.number("tis_clip_low"), their.number("tis_clip") or 2.0)


@rule("slime", "use_dynamic_batch_size max_tokens_per_gpu micro_batch_size")
def _slime_micro_batches(their: Their) -> Iterator[tuple[str, Any]]:
    if their.on("use_dynamic_batch_size"):
        yield "max_tokens_per_micro_batch", their.whole("max_tokens_per_gpu", default=4096)
    elif (rows := their.number("micro_batch_size")) is not None:
        yield "micro_train_batch_size", int(rows)


@rule("slime", "num_rollout num_epoch")
def _slime_length(their: Their) -> Iterator[tuple[str, Any]]:
    if (steps := their.number("num_rollout")) is not None:
        yield "total_training_steps", int(steps)
        yield "num_episodes", int(steps)  # it goes round the prompts until then
    elif (epochs := their.number("num_epoch")) is not None:
        yield "num_episodes", int(epochs)


@rule("slime", "eval_prompt_data eval_interval")
def _slime_evaluation(their: Their) -> Iterator[tuple[str, Any]]:
    names = [one for text in their.items("eval_prompt_data") for one in text.split()]
    if files := names[1::2]:  # a name before each file
        yield "eval_data", ",".join(files)
        if (count := their.number("eval_interval")) is not None:
            yield "eval_steps", int(count)


@rule("slime", "rm_type")
def _slime_reward(their: Their) -> Iterator[tuple[str, Any]]:
    kind = their.text("rm_type")
    if kind in ("math", "deepscaler", "dapo", "boxed_math"):
        yield "reward_source", ["math"]
    elif kind is not None:
        yield (
            LOOK,
            f"{kind}: --reward_source math, code or format, --reward_fn FILE.py or --remote_rm_url",
        )


@rule("slime", "load hf_checkpoint")
def _slime_model(their: Their) -> Iterator[tuple[str, Any]]:
    yield "pretrain", their.text("hf_checkpoint", "load")


@rule("slime", "recompute_granularity recompute_method recompute_num_layers")
def _slime_checkpointing(their: Their) -> Iterator[tuple[str, Any]]:
    yield "gradient_checkpointing", their.text("recompute_granularity") is not None


@rule("slime", "attention_backend")
def _slime_attention(their: Their) -> Iterator[tuple[str, Any]]:
    if (name := their.text("attention_backend")) not in (None, "auto"):
        yield "attn_implementation", "flash_attention_2" if name == "flash" else name


@rule("slime", "advantage_estimator")
def _slime_estimator(their: Their) -> Iterator[tuple[str, Any]]:
    name = their.text("advantage_estimator") or "grpo"
    if name in ("gspo", "cispo"):  # losses here
        yield "policy_loss", name
    kinds = {"gspo": "grpo", "cispo": "grpo", "ppo": "gae"}
    yield "advantage_estimator", kinds.get(name, name.replace("_plus_plus", "++"))
