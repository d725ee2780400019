"""Options of AReaL that say something together."""

from __future__ import annotations

from functools import partial

from lightppo.cli.conversion_rules import (
    EVERY,
    LOOK,
    Arguments,
    Converted,
    adam_betas,
    clip_range,
    correction,
    precision,
    rule,
    truth,
)

areal = partial(rule, "AReaL")


@areal("actor.dtype actor.bf16 actor.enable_bf16 actor.enable_fp16", EVERY)
def areal_precision(arguments: Arguments) -> Converted:
    if arguments.on("actor.enable_fp16"):
        yield "fp16", True
    elif arguments.on("actor.bf16", "actor.enable_bf16"):
        yield "bf16", True
    else:
        yield from precision(arguments.text("actor.dtype"))


@areal("actor.optimizer.beta1 actor.optimizer.beta2", EVERY)
def areal_betas(arguments: Arguments) -> Converted:
    return adam_betas(arguments, "adam_betas", "actor.optimizer.beta1", "actor.optimizer.beta2")


@areal("actor.eps_clip actor.eps_clip_higher ppo.eps_clip")
def areal_clip(arguments: Arguments) -> Converted:
    lower_bound = arguments.text("actor.eps_clip", "ppo.eps_clip") or "0.2"
    return clip_range(lower_bound, arguments.text("actor.eps_clip_higher"))


@areal("gconfig.top_k gconfig.greedy eval_gconfig.top_k")
def areal_top_k(arguments: Arguments) -> Converted:
    for their_option, option in (("gconfig.top_k", "top_k"), ("eval_gconfig.top_k", "eval_top_k")):
        if (count := arguments.number(their_option)) is not None:
            yield option, int(count) if 0 < count < 1e6 else -1
    if arguments.on("gconfig.greedy"):
        yield "do_sample", False


def normalisation(arguments: Arguments, prefix: str) -> list[str]:
    """Return ``mean=… std=…`` of a NormConfig."""
    settings = []
    for statistic in ("mean", "std"):
        if (level := arguments.text(f"{prefix}.{statistic}_level")) is not None:
            settings.append(f"{statistic}={level}")
    if arguments.on(f"{prefix}.mean_leave1out"):
        settings.append("leave_one_out")
    if settings and truth(arguments.text(f"{prefix}.std_unbiased") or True):
        settings.append("unbiased")
    if settings and (epsilon := arguments.text(f"{prefix}.eps")) is not None:
        settings.append(f"eps={epsilon}")
    return settings


def _norm_names(prefix: str) -> str:
    settings = ("mean_level", "std_level", "mean_leave1out", "std_unbiased", "eps", "group_size")
    return " ".join([prefix, *(f"{prefix}.{setting}" for setting in settings)])


@areal(_norm_names("actor.adv_norm"))
def areal_advantages(arguments: Arguments) -> Converted:
    if settings := normalisation(arguments, "actor.adv_norm"):
        yield "adv_norm_by", settings
    else:
        yield "adv_norm", False


@areal(_norm_names("actor.reward_norm"))
def areal_rewards(arguments: Arguments) -> Converted:
    if settings := normalisation(arguments, "actor.reward_norm"):
        yield "reward_norm_by", settings


@areal("critic.path actor.path")
def areal_estimator(arguments: Arguments) -> Converted:
    yield "pretrain", arguments.text("actor.path")
    critic = arguments.text("critic.path")
    if critic is None:
        yield "advantage_estimator", "reinforce"
    else:
        yield "advantage_estimator", "gae"
        yield "critic_pretrain", critic


@areal("actor.discount ppo.discount actor.gae_lambda ppo.gae_lambda")
def areal_discount(arguments: Arguments) -> Converted:
    yield from arguments.copied("gamma", "actor.discount", "ppo.discount")
    if arguments.text("critic.path"):
        yield from arguments.copied("lambd", "actor.gae_lambda", "ppo.gae_lambda")


@areal("actor.reward_bias actor.reward_clip ppo.max_reward_clip")
def areal_scores(arguments: Arguments) -> Converted:
    if bias := arguments.number("actor.reward_bias"):
        yield "reward_bias", -bias
    if (bound := arguments.number("actor.reward_clip", "ppo.max_reward_clip")) is not None:
        yield "reward_clip_range", (-bound, bound)


@areal("actor.overlong_reward_penalty actor.overlong_tokens actor.overlong_penalty_factor")
def areal_overlong(arguments: Arguments) -> Converted:
    if arguments.on("actor.overlong_reward_penalty"):
        yield "overlong_buffer_len", arguments.whole("actor.overlong_tokens")
        yield "overlong_penalty_factor", arguments.text("actor.overlong_penalty_factor") or 1


@areal("actor.kl_ctl actor.kl_estimator ppo.kl_ctl")
def areal_kl(arguments: Arguments) -> Converted:
    coefficient = arguments.number("actor.kl_ctl", "ppo.kl_ctl")
    if coefficient is not None:
        yield "init_kl_coef", coefficient
    if coefficient != 0 and (estimator := arguments.text("actor.kl_estimator")) is not None:
        yield "kl_estimator", estimator
        yield "kl_clip", 10


@areal("actor.recompute_logprob ppo.recompute_logprob")
def areal_old_log_probs(arguments: Arguments) -> Converted:
    is_recomputed = arguments.on("actor.recompute_logprob", "ppo.recompute_logprob")
    yield "old_log_probs", "forward" if is_recomputed else "rollout"


@areal("ref.mb_spec.max_tokens_per_mb critic.mb_spec.max_tokens_per_mb")
def areal_passes(arguments: Arguments) -> Converted:
    batch_sizes = []
    if arguments.number("actor.kl_ctl") != 0:
        batch_sizes += [
            f"reference={batch_size}t"
            for batch_size in arguments.items("ref.mb_spec.max_tokens_per_mb")
        ]
    critic_sizes = arguments.items("critic.mb_spec.max_tokens_per_mb")
    batch_sizes += [f"critic_train={batch_size}t" for batch_size in critic_sizes]
    if batch_sizes:
        yield "micro_batch_specs", batch_sizes


@areal(
    "saver.fileroot evaluator.fileroot recover.fileroot rollout.fileroot cluster.fileroot "
    "stats_logger.fileroot perf_tracer.fileroot",
    EVERY,
)
def areal_folder(arguments: Arguments) -> Converted:
    return arguments.copied("save_path", "saver.fileroot", "cluster.fileroot", "recover.fileroot")


_REJECTION = "actor.rejection_sampling"
_WEIGHT_CAPS = (
    "actor.behav_imp_weight_cap",
    "actor.behave_imp_weight_cap",
    "ppo.behav_imp_weight_cap",
)


@areal(
    f"actor.use_decoupled_loss ppo.use_decoupled_loss {_REJECTION} {_REJECTION}.metric {_REJECTION}.upper "
    f"{_REJECTION}.lower {_REJECTION}.level {_REJECTION}.action {_REJECTION}.agg {' '.join(_WEIGHT_CAPS)}",
)
def areal_correction(arguments: Arguments) -> Converted:
    metric = arguments.text(f"{_REJECTION}.metric") or "ratio"
    upper = arguments.number(f"{_REJECTION}.upper")
    weight_cap = arguments.number(*_WEIGHT_CAPS)
    if metric != "ratio":
        yield (
            LOOK,
            f"metric {metric}: --rollout_rejection, with --rollout_correction tis --correction_high 1e9",
        )
    elif upper is None:
        if arguments.on("actor.use_decoupled_loss", "ppo.use_decoupled_loss"):
            yield from correction("decoupled", None, weight_cap)
    else:
        correction_kinds = {
            ("token", "clamp"): "tis",
            ("sequence", "clamp"): "geo_tis",
            ("sequence", "mask"): "geo_mis",
        }
        level = arguments.text(f"{_REJECTION}.level") or "token"
        action = arguments.text(f"{_REJECTION}.action") or "mask"
        default = "decoupled" if arguments.on("actor.use_decoupled_loss") else "icepop"
        lower = arguments.number(f"{_REJECTION}.lower")
        yield from correction(correction_kinds.get((level, action), default), lower, upper)


@areal("stats_logger.wandb.mode wandb.mode")
def areal_wandb(arguments: Arguments) -> Converted:
    if arguments.text("stats_logger.wandb.mode", "wandb.mode") not in (None, "disabled"):
        yield "use_wandb", True


@areal("recover.mode recover_mode")
def areal_resume(arguments: Arguments) -> Converted:
    is_off = arguments.text("recover.mode", "recover_mode") in ("disabled", "off")
    yield "resume", "never" if is_off else "auto"


@areal("actor.loss_type", "dpo")
def areal_pairs(arguments: Arguments) -> Converted:
    loss_type = arguments.text("actor.loss_type")
    yield "preference_loss", "dpo" if loss_type == "sigmoid" else loss_type


@areal("actor.use_lora actor.lora_rank")
def areal_lora(arguments: Arguments) -> Converted:
    if arguments.on("actor.use_lora"):
        yield "lora_rank", arguments.whole("actor.lora_rank", default=32)


@areal("gconfig.temperature actor.temperature")
def areal_temperature(arguments: Arguments) -> Converted:
    yield "temperature", arguments.text("gconfig.temperature", "actor.temperature")
