"""Options of slime that say something together."""

from __future__ import annotations

from functools import partial

from lightppo.cli.conversion_rules import (
    KL_ESTIMATORS,
    LOOK,
    Arguments,
    Converted,
    adam_betas,
    correction,
    rule,
)

slime = partial(rule, "slime")


@slime("kl_coef use_kl_loss kl_loss_coef kl_loss_type use_unbiased_kl")
def slime_kl(arguments: Arguments) -> Converted:
    in_loss = arguments.on("use_kl_loss")
    coefficient = arguments.number("kl_loss_coef" if in_loss else "kl_coef") or 0.0
    yield "init_kl_coef", coefficient
    if coefficient and not in_loss:
        yield "use_kl_in_reward", True
    elif coefficient:
        yield "use_kl_loss", True
        loss_type = arguments.text("kl_loss_type") or "k1"
        estimator = KL_ESTIMATORS.get(loss_type, loss_type)
        if arguments.on("use_unbiased_kl") and estimator in ("k1", "k3"):
            estimator = f"{estimator}_ratio"
        yield "kl_estimator", estimator
        if loss_type == "low_var_kl":
            yield "kl_clip", 10


@slime("adam_beta1 adam_beta2")
def slime_betas(arguments: Arguments) -> Converted:
    return adam_betas(arguments, "adam_betas", "adam_beta1", "adam_beta2")


@slime("lr min_lr lr_decay_style lr_warmup_iters lr_warmup_fraction")
def slime_rates(arguments: Arguments) -> Converted:
    peak_rate = arguments.number("lr")
    lowest_rate = arguments.number("min_lr") or 0.0
    if peak_rate:
        yield "actor_learning_rate", peak_rate
        yield "min_lr_ratio", lowest_rate / peak_rate
    schedule = arguments.text("lr_decay_style")
    if schedule == "cosine" and lowest_rate:
        schedule = "cosine_with_min_lr"
    if schedule is not None:
        yield "lr_scheduler", schedule
    if steps := [*arguments.counted("lr_warmup_steps", "lr_warmup_iters", above=0)]:
        yield from steps
    else:
        yield "lr_warmup_ratio", arguments.number("lr_warmup_fraction") or 0


@slime("calculate_per_token_loss")
def slime_loss(arguments: Arguments) -> Converted:
    by_token = arguments.on("calculate_per_token_loss")
    yield "loss_agg_mode", "token-mean" if by_token else "seq-mean-token-mean"


@slime("use_tis tis_clip tis_clip_low")
def slime_correction(arguments: Arguments) -> Converted:
    if arguments.on("use_tis"):
        lower_bound = arguments.number("tis_clip_low")
        yield from correction("tis", lower_bound, arguments.number("tis_clip") or 2.0)


@slime("use_routing_replay use_rollout_routing_replay")
def slime_router_replay(arguments: Arguments) -> Converted:
    if arguments.on("use_rollout_routing_replay"):
        yield "router_replay", "rollout"
    elif arguments.on("use_routing_replay"):
        yield "router_replay", "old"


@slime("use_dynamic_batch_size max_tokens_per_gpu micro_batch_size")
def slime_micro_batches(arguments: Arguments) -> Converted:
    if arguments.on("use_dynamic_batch_size"):
        yield "max_tokens_per_micro_batch", arguments.whole("max_tokens_per_gpu", default=4096)
    else:
        yield from arguments.counted("micro_train_batch_size", "micro_batch_size")


@slime("num_rollout num_epoch")
def slime_length(arguments: Arguments) -> Converted:
    yield from arguments.counted("total_training_steps", "num_rollout")
    # It goes round the prompts until then.
    yield from arguments.counted("num_episodes", "num_rollout", "num_epoch")


@slime("eval_prompt_data eval_interval")
def slime_evaluation(arguments: Arguments) -> Converted:
    if data_files := arguments.words("eval_prompt_data")[1::2]:  # a name before each file
        yield "eval_data", ",".join(data_files)
        yield from arguments.counted("eval_steps", "eval_interval")


@slime("rm_type")
def slime_reward(arguments: Arguments) -> Converted:
    reward_type = arguments.text("rm_type")
    if reward_type in ("math", "deepscaler", "dapo", "boxed_math"):
        yield "reward_source", ["math"]
    elif reward_type is not None:
        yield (
            LOOK,
            f"{reward_type}: --reward_source math, code or format, --reward_fn FILE.py or --remote_rm_url",
        )


@slime("load hf_checkpoint")
def slime_model(arguments: Arguments) -> Converted:
    yield "pretrain", arguments.text("hf_checkpoint", "load")


@slime("recompute_granularity recompute_method recompute_num_layers")
def slime_checkpointing(arguments: Arguments) -> Converted:
    yield "gradient_checkpointing", arguments.text("recompute_granularity") is not None


@slime("attention_backend")
def slime_attention(arguments: Arguments) -> Converted:
    if (backend := arguments.text("attention_backend")) not in (None, "auto"):
        yield "attn_implementation", "flash_attention_2" if backend == "flash" else backend


@slime("advantage_estimator")
def slime_estimator(arguments: Arguments) -> Converted:
    estimator = arguments.text("advantage_estimator") or "grpo"
    if estimator in ("gspo", "cispo"):  # losses here
        yield "policy_loss", estimator
    our_names = {"gspo": "grpo", "cispo": "grpo", "ppo": "gae"}
    yield "advantage_estimator", our_names.get(estimator, estimator.replace("_plus_plus", "++"))
