"""Options of verl that say something together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightppo.cli.conversion_rules import (
    LOOK,
    Their,
    correction,
    kl_estimator,
    precision,
    rule,
    trackers,
)

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"


@rule(
    "verl",
    f"data.train_batch_size {_ACTOR}.ppo_mini_batch_size {_ROLLOUT}.n critic.ppo_mini_batch_size "
    f"{_ACTOR}.ppo_micro_batch_size {_ACTOR}.ppo_micro_batch_size_per_gpu",
)
def _verl_batches(their: Their) -> Iterator[tuple[str, Any]]:
    samples = their.whole(f"{_ROLLOUT}.n")
    yield "n_samples_per_prompt", samples
    if (prompts := their.number("data.train_batch_size")) is not None:
        yield "rollout_batch_size", int(prompts)
    if (prompts := their.number(f"{_ACTOR}.ppo_mini_batch_size")) is not None:
        yield "train_batch_size", int(prompts) * samples
    micro = their.number(f"{_ACTOR}.ppo_micro_batch_size_per_gpu")
    of_all = their.number(f"{_ACTOR}.ppo_micro_batch_size")
    if micro or of_all:
        yield "micro_train_batch_size", int(micro or max(1, of_all // their.ranks))


@rule(
    "verl",
    f"{_ACTOR}.use_dynamic_bsz {_ACTOR}.ppo_max_token_len_per_gpu {_ROLLOUT}.log_prob_micro_batch_size_per_gpu "
    f"{_ROLLOUT}.log_prob_micro_batch_size actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu "
    "actor_rollout_ref.ref.log_prob_micro_batch_size actor_rollout_ref.ref.log_prob_use_dynamic_bsz "
    f"{_ROLLOUT}.log_prob_use_dynamic_bsz critic.use_dynamic_bsz critic.ppo_max_token_len_per_gpu "
    "critic.ppo_micro_batch_size_per_gpu critic.forward_max_token_len_per_gpu",
)
def _verl_micro_batches(their: Their) -> Iterator[tuple[str, Any]]:
    if their.on(f"{_ACTOR}.use_dynamic_bsz"):
        yield (
            "max_tokens_per_micro_batch",
            their.whole(f"{_ACTOR}.ppo_max_token_len_per_gpu", default=16384),
        )
    else:
        names = [
            f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu",
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
        ]
        if (rows := their.number(*names)) is not None:
            yield "micro_rollout_batch_size", int(rows)
        if (rows := their.number("critic.ppo_micro_batch_size_per_gpu")) is not None:
            yield "micro_batch_specs", [f"critic_train={int(rows)}"]


@rule(
    "verl",
    f"{_ACTOR}.use_kl_loss {_ACTOR}.kl_loss_coef {_ACTOR}.kl_loss_type algorithm.use_kl_in_reward algorithm.kl_penalty "
    "algorithm.kl_ctrl.type algorithm.kl_ctrl.kl_coef algorithm.kl_ctrl.horizon algorithm.kl_ctrl.target_kl",
)
def _verl_kl(their: Their) -> Iterator[tuple[str, Any]]:
    if their.on(f"{_ACTOR}.use_kl_loss"):
        coef = their.number(f"{_ACTOR}.kl_loss_coef")
        yield "init_kl_coef", 0.001 if coef is None else coef
        if coef != 0:
            yield "use_kl_loss", True
            yield from kl_estimator(their.text(f"{_ACTOR}.kl_loss_type") or "low_var_kl")
    elif their.on("algorithm.use_kl_in_reward"):
        coef = their.number("algorithm.kl_ctrl.kl_coef")
        yield "init_kl_coef", 0.001 if coef is None else coef
        yield "use_kl_in_reward", True
        yield from kl_estimator(their.text("algorithm.kl_penalty") or "kl")
        if their.text("algorithm.kl_ctrl.type") == "adaptive":
            yield "kl_target", their.text("algorithm.kl_ctrl.target_kl") or 0.1
            yield "kl_horizon", their.whole("algorithm.kl_ctrl.horizon", default=10000)
    else:
        yield "init_kl_coef", 0


@rule("verl", "algorithm.adv_estimator")
def _verl_estimator(their: Their) -> Iterator[tuple[str, Any]]:
    name = their.text("algorithm.adv_estimator") or "gae"
    yield "advantage_estimator", name
    if name in ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        yield "adv_std_unbiased", True  # how it whitens


@rule("verl", f"{_ACTOR}.clip_ratio {_ACTOR}.clip_ratio_low {_ACTOR}.clip_ratio_high")
def _verl_clip(their: Their) -> Iterator[tuple[str, Any]]:
    low = their.text(f"{_ACTOR}.clip_ratio_low") or "0.2"
    high = their.text(f"{_ACTOR}.clip_ratio_high") or "0.2"
    both = their.text(f"{_ACTOR}.clip_ratio")
    if low == high:
        yield "eps_clip", low
    else:
        yield "eps_clip_low", low
        yield "eps_clip_high", high
    if both is not None and float(both) not in (float(low), float(high)):
        yield (
            LOOK,
            f"clip_ratio {both} has no effect beside clip_ratio_low {low} and clip_ratio_high {high}",
        )


def _warmup(their: Their, optim: str, role: str) -> Iterator[tuple[str, Any]]:
    steps = their.number(f"{optim}.lr_warmup_steps")
    ratio = their.number(f"{optim}.lr_warmup_steps_ratio")
    if steps is not None and steps > 0:
        yield f"{role}lr_warmup_steps", int(steps)
    elif ratio is not None or steps is not None:
        yield f"{role}lr_warmup_ratio", ratio or 0


@rule("verl", f"{_ACTOR}.optim.lr_warmup_steps {_ACTOR}.optim.lr_warmup_steps_ratio")
def _verl_warmup(their: Their) -> Iterator[tuple[str, Any]]:
    yield from _warmup(their, f"{_ACTOR}.optim", "")


@rule("verl", "critic.optim.lr_warmup_steps critic.optim.lr_warmup_steps_ratio")
def _verl_critic_warmup(their: Their) -> Iterator[tuple[str, Any]]:
    yield from _warmup(their, "critic.optim", "critic_")


@rule("verl", "optim.lr_warmup_steps optim.lr_warmup_steps_ratio", "sft")
def _verl_sft_warmup(their: Their) -> Iterator[tuple[str, Any]]:
    yield from _warmup(their, "optim", "")


@rule("verl", f"{_ROLLOUT}.name {_ROLLOUT}.mode")
def _verl_engine(their: Their) -> Iterator[tuple[str, Any]]:
    if (name := their.text(f"{_ROLLOUT}.name")) is not None:
        yield "rollout_engine", name


@rule("verl", "trainer.save_freq trainer.test_freq", "ppo sft")
def _verl_cadence(their: Their) -> Iterator[tuple[str, Any]]:
    for name, option in (("trainer.save_freq", "save_steps"), ("trainer.test_freq", "eval_steps")):
        if (count := their.number(name)) is not None and count > 0:
            yield option, int(count)
        elif count is not None and option == "eval_steps":
            yield (
                LOOK,
                "no evaluation while it trains there; here one per pass where held-out rows are given",
            )


@rule("verl", "trainer.total_epochs trainer.total_training_steps", "ppo sft")
def _verl_length(their: Their) -> Iterator[tuple[str, Any]]:
    is_ppo = their.command == "ppo"
    if (steps := their.number("trainer.total_training_steps")) is not None:
        yield ("total_training_steps" if is_ppo else "max_steps"), int(steps)
    if (epochs := their.number("trainer.total_epochs")) is not None and (is_ppo or steps is None):
        yield ("num_episodes" if is_ppo else "num_epochs"), int(epochs)


@rule("verl", "trainer.logger logger", "ppo sft")
def _verl_trackers(their: Their) -> Iterator[tuple[str, Any]]:
    yield from trackers(
        their.items("trainer.logger", "logger"), None, their.text("trainer.project_name")
    )


@rule("verl", "trainer.resume_mode trainer.resume_from_path", "ppo sft")
def _verl_resume(their: Their) -> Iterator[tuple[str, Any]]:
    mode = their.text("trainer.resume_mode") or "auto"
    path = their.text("trainer.resume_from_path")
    yield (
        "resume",
        path if mode == "resume_path" and path else {"disable": "never"}.get(mode, "auto"),
    )


@rule(
    "verl",
    f"{_ROLLOUT}.val_kwargs.do_sample {_ROLLOUT}.val_kwargs.temperature {_ROLLOUT}.val_kwargs.top_p "
    f"{_ROLLOUT}.val_kwargs.top_k {_ROLLOUT}.val_kwargs.n",
)
def _verl_evaluation(their: Their) -> Iterator[tuple[str, Any]]:
    is_sampled = their.on(f"{_ROLLOUT}.val_kwargs.do_sample")
    yield (
        "eval_temperature",
        (their.number(f"{_ROLLOUT}.val_kwargs.temperature") or 0) if is_sampled else 0,
    )
    yield "eval_n_samples", their.whole(f"{_ROLLOUT}.val_kwargs.n")
    if is_sampled:
        yield "eval_top_p", their.text(f"{_ROLLOUT}.val_kwargs.top_p") or 1
        yield "eval_top_k", their.whole(f"{_ROLLOUT}.val_kwargs.top_k", default=-1)


@rule("verl", f"{_ACTOR}.fsdp_config.dtype {_ACTOR}.fsdp_config.model_dtype {_ACTOR}.strategy")
def _verl_precision(their: Their) -> Iterator[tuple[str, Any]]:
    yield from precision(their.text(f"{_ACTOR}.fsdp_config.dtype") or "bfloat16")


@rule("verl", f"{_ACTOR}.fsdp_config.param_offload {_ACTOR}.fsdp_config.optimizer_offload")
def _verl_offload(their: Their) -> Iterator[tuple[str, Any]]:
    if their.on(f"{_ACTOR}.fsdp_config.param_offload"):
        yield "zero_stage", 3
        yield "param_offload", True
    if their.on(f"{_ACTOR}.fsdp_config.optimizer_offload"):
        yield "adam_offload", True


_REWARD_FN = "custom_reward_function"


@rule(
    "verl",
    f"{_REWARD_FN}.path {_REWARD_FN}.name reward.{_REWARD_FN}.path reward.{_REWARD_FN}.name reward_model.{_REWARD_FN}.path",
)
def _verl_reward(their: Their) -> Iterator[tuple[str, Any]]:
    path = their.text(
        f"{_REWARD_FN}.path", f"reward.{_REWARD_FN}.path", f"reward_model.{_REWARD_FN}.path"
    )
    if path is not None:
        name = their.text(f"{_REWARD_FN}.name", f"reward.{_REWARD_FN}.name") or "compute_score"
        yield "reward_fn", f"{path}:{name}"


@rule("verl", "trainer.critic_warmup")
def _verl_critic_first(their: Their) -> Iterator[tuple[str, Any]]:
    if (steps := their.whole("trainer.critic_warmup", default=0)) > 1:
        yield "freezing_actor_steps", steps - 1


_OVERLONG = [
    f"{start}.{name}"
    for start in ("reward_model", "reward.reward_kwargs", "reward_model.reward_kwargs")
    for name in ("overlong_buffer", "overlong_buffer_cfg")
]


def _overlong(last: str) -> list[str]:
    return [f"{start}.{last}" for start in _OVERLONG]


@rule(
    "verl",
    " ".join(
        name for last in ("enable", "len", "penalty_factor", "log") for name in _overlong(last)
    ),
)
def _verl_overlong(their: Their) -> Iterator[tuple[str, Any]]:
    if their.on(*_overlong("enable")) and (length := their.number(*_overlong("len"))):
        yield "overlong_buffer_len", int(length)
        if (factor := their.number(*_overlong("penalty_factor"))) is not None:
            yield "overlong_penalty_factor", factor


_IS = "algorithm.rollout_correction"


@rule("verl", f"{_IS}.rollout_is {_IS}.rollout_is_threshold")
def _verl_correction(their: Their) -> Iterator[tuple[str, Any]]:
    bounds = (their.text(f"{_IS}.rollout_is_threshold") or "2").split("_")
    if (level := their.text(f"{_IS}.rollout_is")) is None:
        return
    if len(bounds) == 2:
        yield from correction(
            "icepop" if level == "token" else "seq_mis", float(bounds[0]), float(bounds[1])
        )
    else:
        yield from correction("tis" if level == "token" else "seq_tis", None, float(bounds[0]))


@rule("verl", "distillation.enabled distillation.distillation_loss.use_policy_gradient")
def _verl_distillation(their: Their) -> Iterator[tuple[str, Any]]:
    if their.on("distillation.enabled"):
        yield (
            "distill_by",
            "advantage"
            if their.on("distillation.distillation_loss.use_policy_gradient")
            else "loss",
        )


@rule("verl", "data.train_max_samples data.val_max_samples", "ppo sft")
def _verl_rows(their: Their) -> Iterator[tuple[str, Any]]:
    for name, option in (
        ("data.train_max_samples", "max_samples"),
        ("data.val_max_samples", "eval_max_samples"),
    ):
        if (count := their.number(name)) is not None and count > 0:
            yield option, int(count)


@rule(
    "verl",
    "algorithm.filter_groups.metric algorithm.filter_groups.enable algorithm.filter_groups.max_num_gen_batches",
)
def _verl_filter(their: Their) -> Iterator[tuple[str, Any]]:
    if their.on("algorithm.filter_groups.enable"):
        yield "dynamic_sampling", True
        metric = their.text("algorithm.filter_groups.metric")
        if metric not in (None, "reward"):
            yield "filter_metric", metric
        most = their.whole("algorithm.filter_groups.max_num_gen_batches", default=0)
        yield "max_num_gen_batches", most
        if most:
            yield "on_exhausted", "raise"


@rule("verl", f"{_ACTOR}.policy_loss.loss_mode")
def _verl_loss(their: Their) -> Iterator[tuple[str, Any]]:
    yield "policy_loss", their.text(f"{_ACTOR}.policy_loss.loss_mode")


@rule("verl", "actor_rollout_ref.nccl_timeout trainer.nccl_timeout")
def _verl_timeout(their: Their) -> Iterator[tuple[str, Any]]:
    yield (
        "dist_timeout",
        (their.number("actor_rollout_ref.nccl_timeout", "trainer.nccl_timeout") or 600) / 60,
    )
