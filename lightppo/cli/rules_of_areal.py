"""Options of AReaL that say something together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightppo.cli.conversion_rules import (
    EVERY,
    LOOK,
    Their,
    correction,
    precision,
    rule,
)


@rule("AReaL", "actor.dtype actor.bf16 actor.enable_bf16 actor.enable_fp16", EVERY)
def _areal_precision(their: Their) -> Iterator[tuple[str, Any]]:
    if their.on("actor.enable_fp16"):
        yield "fp16", True
    elif their.on("actor.bf16", "actor.enable_bf16"):
        yield "bf16", True
    else:
        yield from precision(their.text("actor.dtype"))


@rule("AReaL", "actor.optimizer.beta1 actor.optimizer.beta2", EVERY)
def _areal_betas(their: Their) -> Iterator[tuple[str, Any]]:
    yield (
        "adam_betas",
        (their.text("actor.optimizer.beta1") or 0.9, their.text("actor.optimizer.beta2") or 0.999),
    )


@rule("AReaL", "critic.optimizer.beta1 critic.optimizer.beta2")
def _areal_critic_betas(their: Their) -> Iterator[tuple[str, Any]]:
    yield (
        "critic_adam_betas",
        (
            their.text("critic.optimizer.beta1") or 0.9,
            their.text("critic.optimizer.beta2") or 0.999,
        ),
    )


@rule("AReaL", "actor.eps_clip actor.eps_clip_higher ppo.eps_clip")
def _areal_clip(their: Their) -> Iterator[tuple[str, Any]]:
    low = their.text("actor.eps_clip", "ppo.eps_clip") or "0.2"
    high = their.text("actor.eps_clip_higher")
    if high is None or high == low:
        yield "eps_clip", low
    else:
        yield "eps_clip_low", low
        yield "eps_clip_high", high


@rule("AReaL", "gconfig.top_k gconfig.greedy eval_gconfig.top_k")
def _areal_top_k(their: Their) -> Iterator[tuple[str, Any]]:
    for name, option in (("gconfig.top_k", "top_k"), ("eval_gconfig.top_k", "eval_top_k")):
        if (count := their.number(name)) is not None:
            yield option, int(count) if 0 < count < 1e6 else -1
    if their.on("gconfig.greedy"):
        yield "do_sample", False


def _areal_norm(their: Their, start: str) -> list[str]:
    """``mean=… std=…`` of a NormConfig."""
    found = []
    for part in ("mean", "std"):
        if (level := their.text(f"{start}.{part}_level")) is not None:
            found.append(f"{part}={level}")
    if their.on(f"{start}.mean_leave1out"):
        found.append("leave_one_out")
    if found and (their.text(f"{start}.std_unbiased") is None or their.on(f"{start}.std_unbiased")):
        found.append("unbiased")
    if found and (eps := their.text(f"{start}.eps")) is not None:
        found.append(f"eps={eps}")
    return found


def _norm_names(start: str) -> str:
    lasts = ("mean_level", "std_level", "mean_leave1out", "std_unbiased", "eps", "group_size")
    return " ".join([start, *(f"{start}.{last}" for last in lasts)])


@rule("AReaL", _norm_names("actor.adv_norm"))
def _areal_advantages(their: Their) -> Iterator[tuple[str, Any]]:
    if found := _areal_norm(their, "actor.adv_norm"):
        yield "adv_norm_by", found
    else:
        yield "adv_norm", False


@rule("AReaL", _norm_names("actor.reward_norm"))
def _areal_rewards(their: Their) -> Iterator[tuple[str, Any]]:
    if found := _areal_norm(their, "actor.reward_norm"):
        yield "reward_norm_by", found


@rule("AReaL", "critic.path actor.path")
def _areal_estimator(their: Their) -> Iterator[tuple[str, Any]]:
    yield "pretrain", their.text("actor.path")
    has_critic = their.text("critic.path") is not None
    yield "advantage_estimator", "gae" if has_critic else "reinforce"
    if has_critic:
        yield "critic_pretrain", their.text("critic.path")


@rule("AReaL", "actor.discount ppo.discount actor.gae_lambda ppo.gae_lambda")
def _areal_discount(their: Their) -> Iterator[tuple[str, Any]]:
    if (discount := their.text("actor.discount", "ppo.discount")) is not None:
        yield "gamma", discount
    if (share := their.text("actor.gae_lambda", "ppo.gae_lambda")) is not None and their.text(
        "critic.path"
    ):
        yield "lambd", share


@rule("AReaL", "actor.reward_bias actor.reward_clip ppo.max_reward_clip")
def _areal_scores(their: Their) -> Iterator[tuple[str, Any]]:
    if bias := their.number("actor.reward_bias"):
        yield "reward_bias", -bias
    if (most := their.number("actor.reward_clip", "ppo.max_reward_clip")) is not None:
        yield "reward_clip_range", (-most, most)


@rule("AReaL", "actor.overlong_reward_penalty actor.overlong_tokens actor.overlong_penalty_factor")
def _areal_overlong(their: Their) -> Iterator[tuple[str, Any]]:
    if their.on("actor.overlong_reward_penalty"):
        yield "overlong_buffer_len", their.whole("actor.overlong_tokens", default=1)
        yield "overlong_penalty_factor", their.text("actor.overlong_penalty_factor") or 1


@rule("AReaL", "actor.kl_ctl actor.kl_estimator ppo.kl_ctl")
def _areal_kl(their: Their) -> Iterator[tuple[str, Any]]:
    coef = their.number("actor.kl_ctl", "ppo.kl_ctl")
    if coef is not None:
        yield "init_kl_coef", coef
    if coef != 0 and (kind := their.text("actor.kl_estimator")) is not None:
        yield "kl_estimator", kind
        yield "kl_clip", 10


@rule("AReaL", "actor.recompute_logprob ppo.recompute_logprob")
def _areal_old_log_probs(their: Their) -> Iterator[tuple[str, Any]]:
    yield (
        "old_log_probs",
        "forward" if their.on("actor.recompute_logprob", "ppo.recompute_logprob") else "rollout",
    )


@rule("AReaL", "ref.mb_spec.max_tokens_per_mb critic.mb_spec.max_tokens_per_mb")
def _areal_passes(their: Their) -> Iterator[tuple[str, Any]]:
    sizes = []
    if their.text("actor.kl_ctl") is None or their.number("actor.kl_ctl"):
        sizes += [f"reference={size}t" for size in their.items("ref.mb_spec.max_tokens_per_mb")]
    sizes += [f"critic_train={size}t" for size in their.items("critic.mb_spec.max_tokens_per_mb")]
    if sizes:
        yield "micro_batch_specs", sizes


@rule(
    "AReaL",
    "saver.fileroot evaluator.fileroot recover.fileroot rollout.fileroot cluster.fileroot "
    "stats_logger.fileroot perf_tracer.fileroot",
    EVERY,
)
def _areal_folder(their: Their) -> Iterator[tuple[str, Any]]:
    if (folder := their.text("saver.fileroot", "cluster.fileroot", "recover.fileroot")) is not None:
        yield "save_path", folder


_REJECTED = "actor.rejection_sampling"


@rule(
    "AReaL",
    f"actor.use_decoupled_loss ppo.use_decoupled_loss {_REJECTED} {_REJECTED}.metric {_REJECTED}.upper {_REJECTED}.lower "
    f"{_REJECTED}.level {_REJECTED}.action {_REJECTED}.agg actor.behav_imp_weight_cap "
    f"actor.behave_imp_weight_cap ppo.behav_imp_weight_cap",
)
def _areal_correction(their: Their) -> Iterator[tuple[str, Any]]:
    metric = their.text(f"{_REJECTED}.metric") or "ratio"
    upper = their.number(f"{_REJECTED}.upper")
    level = their.text(f"{_REJECTED}.level") or "token"
    action = their.text(f"{_REJECTED}.action") or "mask"
    cap = their.number(
        "actor.behav_imp_weight_cap", "actor.behave_imp_weight_cap", "ppo.behav_imp_weight_cap"
    )
    if metric != "ratio":
        yield (
            LOOK,
            f"metric {metric}: --rollout_rejection, with --rollout_correction tis --correction_high 1e9",
        )
    elif upper is None:
        if their.on("actor.use_decoupled_loss", "ppo.use_decoupled_loss"):
            yield from correction("decoupled", None, cap)
    else:
        kinds = {
            ("token", "clamp"): "tis",
            ("sequence", "clamp"): "geo_tis",
            ("sequence", "mask"): "geo_mis",
        }
        decoupled = "decoupled" if their.on("actor.use_decoupled_loss") else "icepop"
        yield from correction(
            kinds.get((level, action), decoupled), their.number(f"{_REJECTED}.lower"), upper
        )


@rule("AReaL", "stats_logger.wandb.mode wandb.mode")
def _areal_wandb(their: Their) -> Iterator[tuple[str, Any]]:
    if (their.text("stats_logger.wandb.mode", "wandb.mode") or "disabled") != "disabled":
        yield "use_wandb", True


@rule("AReaL", "recover.mode recover_mode")
def _areal_resume(their: Their) -> Iterator[tuple[str, Any]]:
    mode = their.text("recover.mode", "recover_mode")
    yield "resume", "never" if mode in ("disabled", "off") else "auto"


@rule("AReaL", "actor.loss_type", "dpo")
def _areal_pairs(their: Their) -> Iterator[tuple[str, Any]]:
    name = their.text("actor.loss_type")
    yield "preference_loss", "dpo" if name == "sigmoid" else name


@rule("AReaL", "actor.use_lora actor.lora_rank")
def _areal_lora(their: Their) -> Iterator[tuple[str, Any]]:
    if their.on("actor.use_lora"):
        yield "lora_rank", their.whole("actor.lora_rank", default=32)


@rule("AReaL", "gconfig.temperature actor.temperature")
def _areal_temperature(their: Their) -> Iterator[tuple[str, Any]]:
    yield "temperature", their.text("gconfig.temperature", "actor.temperature")
