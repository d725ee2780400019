"""Options of verl that say something together."""

from __future__ import annotations

from functools import partial

from lightppo.cli.conversion_rules import (
    LOOK,
    Arguments,
    Converted,
    clip_range,
    correction,
    kl_estimator,
    precision,
    rule,
    trackers,
)

verl = partial(rule, "verl")

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"


@verl(
    f"data.train_batch_size {_ACTOR}.ppo_mini_batch_size {_ROLLOUT}.n critic.ppo_mini_batch_size "
    f"{_ACTOR}.ppo_micro_batch_size {_ACTOR}.ppo_micro_batch_size_per_gpu",
)
def verl_batches(arguments: Arguments) -> Converted:
    samples = arguments.whole(f"{_ROLLOUT}.n")
    yield "n_samples_per_prompt", samples
    yield from arguments.counted("rollout_batch_size", "data.train_batch_size")
    if (prompts := arguments.number(f"{_ACTOR}.ppo_mini_batch_size")) is not None:
        yield "train_batch_size", int(prompts) * samples
    of_rank = arguments.number(f"{_ACTOR}.ppo_micro_batch_size_per_gpu")
    of_all = arguments.number(f"{_ACTOR}.ppo_micro_batch_size")
    if of_rank or of_all:
        yield "micro_train_batch_size", int(of_rank or max(1, of_all // arguments.ranks))


@verl(
    f"{_ACTOR}.use_dynamic_bsz {_ACTOR}.ppo_max_token_len_per_gpu {_ROLLOUT}.log_prob_micro_batch_size_per_gpu "
    f"{_ROLLOUT}.log_prob_micro_batch_size actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu "
    "actor_rollout_ref.ref.log_prob_micro_batch_size actor_rollout_ref.ref.log_prob_use_dynamic_bsz "
    f"{_ROLLOUT}.log_prob_use_dynamic_bsz critic.use_dynamic_bsz critic.ppo_max_token_len_per_gpu "
    "critic.ppo_micro_batch_size_per_gpu critic.forward_max_token_len_per_gpu",
)
def verl_micro_batches(arguments: Arguments) -> Converted:
    if arguments.on(f"{_ACTOR}.use_dynamic_bsz"):
        tokens = arguments.whole(f"{_ACTOR}.ppo_max_token_len_per_gpu", default=16384)
        yield "max_tokens_per_micro_batch", tokens
        return
    yield from arguments.counted(
        "micro_rollout_batch_size",
        f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    )
    if (rows := arguments.number("critic.ppo_micro_batch_size_per_gpu")) is not None:
        yield "micro_batch_specs", [f"critic_train={int(rows)}"]


@verl(
    f"{_ACTOR}.use_kl_loss {_ACTOR}.kl_loss_coef {_ACTOR}.kl_loss_type algorithm.use_kl_in_reward algorithm.kl_penalty "
    "algorithm.kl_ctrl.type algorithm.kl_ctrl.kl_coef algorithm.kl_ctrl.horizon algorithm.kl_ctrl.target_kl",
)
def verl_kl(arguments: Arguments) -> Converted:
    in_loss = arguments.on(f"{_ACTOR}.use_kl_loss")
    if not in_loss and not arguments.on("algorithm.use_kl_in_reward"):
        yield "init_kl_coef", 0
        return
    coefficient_name = f"{_ACTOR}.kl_loss_coef" if in_loss else "algorithm.kl_ctrl.kl_coef"
    coefficient = arguments.number(coefficient_name)
    if coefficient is None:
        coefficient = 0.001
    yield "init_kl_coef", coefficient
    if not in_loss:
        yield "use_kl_in_reward", True
        yield from kl_estimator(arguments.text("algorithm.kl_penalty") or "kl")
        if arguments.text("algorithm.kl_ctrl.type") == "adaptive":
            yield "kl_target", arguments.text("algorithm.kl_ctrl.target_kl") or 0.1
            yield "kl_horizon", arguments.whole("algorithm.kl_ctrl.horizon", default=10000)
    elif coefficient != 0:
        yield "use_kl_loss", True
        yield from kl_estimator(arguments.text(f"{_ACTOR}.kl_loss_type") or "low_var_kl")


@verl("algorithm.adv_estimator")
def verl_estimator(arguments: Arguments) -> Converted:
    estimator = arguments.text("algorithm.adv_estimator") or "gae"
    yield "advantage_estimator", estimator
    if estimator in ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        yield "adv_std_unbiased", True  # how it whitens


@verl(f"{_ACTOR}.clip_ratio {_ACTOR}.clip_ratio_low {_ACTOR}.clip_ratio_high")
def verl_clip(arguments: Arguments) -> Converted:
    lower_bound = arguments.text(f"{_ACTOR}.clip_ratio_low") or "0.2"
    upper_bound = arguments.text(f"{_ACTOR}.clip_ratio_high") or "0.2"
    yield from clip_range(lower_bound, upper_bound)
    ratio = arguments.text(f"{_ACTOR}.clip_ratio")
    if ratio is not None and float(ratio) not in (float(lower_bound), float(upper_bound)):
        yield (
            LOOK,
            f"clip_ratio {ratio} has no effect beside clip_ratio_low {lower_bound} and clip_ratio_high {upper_bound}",
        )


def warmup(arguments: Arguments, optimizer: str, role: str = "") -> Converted:
    steps = arguments.number(f"{optimizer}.lr_warmup_steps")
    ratio = arguments.number(f"{optimizer}.lr_warmup_steps_ratio")
    if steps is not None and steps > 0:
        yield f"{role}lr_warmup_steps", int(steps)
    elif ratio is not None or steps is not None:
        yield f"{role}lr_warmup_ratio", ratio or 0


@verl(f"{_ACTOR}.optim.lr_warmup_steps {_ACTOR}.optim.lr_warmup_steps_ratio")
def verl_warmup(arguments: Arguments) -> Converted:
    return warmup(arguments, f"{_ACTOR}.optim")


@verl("critic.optim.lr_warmup_steps critic.optim.lr_warmup_steps_ratio")
def verl_critic_warmup(arguments: Arguments) -> Converted:
    return warmup(arguments, "critic.optim", "critic_")


@verl("optim.lr_warmup_steps optim.lr_warmup_steps_ratio", "sft")
def verl_sft_warmup(arguments: Arguments) -> Converted:
    return warmup(arguments, "optim")


@verl(f"{_ROLLOUT}.name {_ROLLOUT}.mode")
def verl_engine(arguments: Arguments) -> Converted:
    return arguments.copied("rollout_engine", f"{_ROLLOUT}.name")


@verl("trainer.save_freq trainer.test_freq", "ppo sft")
def verl_due_times(arguments: Arguments) -> Converted:
    yield from arguments.counted("save_steps", "trainer.save_freq", above=0)
    evaluation_steps = arguments.number("trainer.test_freq")
    if evaluation_steps is not None and evaluation_steps > 0:
        yield "eval_steps", int(evaluation_steps)
    elif evaluation_steps is not None:
        yield (
            LOOK,
            "no evaluation while it trains there; here one per pass where held-out rows are given",
        )


@verl("trainer.total_epochs trainer.total_training_steps", "ppo sft")
def verl_length(arguments: Arguments) -> Converted:
    if arguments.command == "ppo":
        yield from arguments.counted("total_training_steps", "trainer.total_training_steps")
        yield from arguments.counted("num_episodes", "trainer.total_epochs")
    elif steps := [*arguments.counted("max_steps", "trainer.total_training_steps")]:
        yield from steps
    else:
        yield from arguments.counted("num_epochs", "trainer.total_epochs")


@verl("trainer.logger logger", "ppo sft")
def verl_trackers(arguments: Arguments) -> Converted:
    tracker_names = arguments.items("trainer.logger", "logger")
    return trackers(tracker_names, None, arguments.text("trainer.project_name"))


@verl("trainer.resume_mode trainer.resume_from_path", "ppo sft")
def verl_resume(arguments: Arguments) -> Converted:
    resume_modes = {"disable": "never", "resume_path": arguments.text("trainer.resume_from_path")}
    yield "resume", resume_modes.get(arguments.text("trainer.resume_mode")) or "auto"


@verl(
    f"{_ROLLOUT}.val_kwargs.do_sample {_ROLLOUT}.val_kwargs.temperature {_ROLLOUT}.val_kwargs.top_p "
    f"{_ROLLOUT}.val_kwargs.top_k {_ROLLOUT}.val_kwargs.n",
)
def verl_evaluation(arguments: Arguments) -> Converted:
    is_sampled = arguments.on(f"{_ROLLOUT}.val_kwargs.do_sample")
    yield "eval_n_samples", arguments.whole(f"{_ROLLOUT}.val_kwargs.n")
    if not is_sampled:
        yield "eval_temperature", 0
    else:
        yield "eval_temperature", arguments.number(f"{_ROLLOUT}.val_kwargs.temperature") or 0
        yield "eval_top_p", arguments.text(f"{_ROLLOUT}.val_kwargs.top_p") or 1
        yield "eval_top_k", arguments.whole(f"{_ROLLOUT}.val_kwargs.top_k", default=-1)


@verl(f"{_ACTOR}.fsdp_config.dtype {_ACTOR}.fsdp_config.model_dtype {_ACTOR}.strategy")
def verl_precision(arguments: Arguments) -> Converted:
    return precision(arguments.text(f"{_ACTOR}.fsdp_config.dtype") or "bfloat16")


@verl(f"{_ACTOR}.fsdp_config.param_offload {_ACTOR}.fsdp_config.optimizer_offload")
def verl_offload(arguments: Arguments) -> Converted:
    if arguments.on(f"{_ACTOR}.fsdp_config.param_offload"):
        yield "zero_stage", 3
        yield "param_offload", True
    if arguments.on(f"{_ACTOR}.fsdp_config.optimizer_offload"):
        yield "adam_offload", True


_REWARD_FN = "custom_reward_function"


@verl(
    f"{_REWARD_FN}.path {_REWARD_FN}.name reward.{_REWARD_FN}.path reward.{_REWARD_FN}.name reward_model.{_REWARD_FN}.path",
)
def verl_reward(arguments: Arguments) -> Converted:
    prefixes = ("", "reward.", "reward_model.")
    function_path = arguments.text(*(f"{prefix}{_REWARD_FN}.path" for prefix in prefixes))
    if function_path is not None:
        function_name = arguments.text(f"{_REWARD_FN}.name", f"reward.{_REWARD_FN}.name")
        yield "reward_fn", f"{function_path}:{function_name or 'compute_score'}"


@verl("trainer.critic_warmup")
def verl_critic_first(arguments: Arguments) -> Converted:
    if (steps := arguments.whole("trainer.critic_warmup", default=0)) > 1:
        yield "freezing_actor_steps", steps - 1


def _overlong(buffer_key: str) -> list[str]:
    return [
        f"{prefix}.{buffer_name}.{buffer_key}"
        for prefix in ("reward_model", "reward.reward_kwargs", "reward_model.reward_kwargs")
        for buffer_name in ("overlong_buffer", "overlong_buffer_cfg")
    ]


@verl(
    " ".join(name for key in ("enable", "len", "penalty_factor", "log") for name in _overlong(key)),
)
def verl_overlong(arguments: Arguments) -> Converted:
    if arguments.on(*_overlong("enable")) and (length := arguments.number(*_overlong("len"))):
        yield "overlong_buffer_len", int(length)
        yield from arguments.copied("overlong_penalty_factor", *_overlong("penalty_factor"))


_CORRECTION = "algorithm.rollout_correction"


@verl(f"{_CORRECTION}.rollout_is {_CORRECTION}.rollout_is_threshold")
def verl_correction(arguments: Arguments) -> Converted:
    level = arguments.text(f"{_CORRECTION}.rollout_is")
    if level is None:
        return
    threshold = arguments.text(f"{_CORRECTION}.rollout_is_threshold") or "2"
    bounds = [float(bound) for bound in threshold.split("_")]
    if len(bounds) == 2:
        correction_kind = {"token": "icepop"}.get(level, "seq_mis")
        yield from correction(correction_kind, *bounds)
    else:
        correction_kind = {"token": "tis"}.get(level, "seq_tis")
        yield from correction(correction_kind, None, bounds[0])


@verl("distillation.enabled distillation.distillation_loss.use_policy_gradient")
def verl_distillation(arguments: Arguments) -> Converted:
    if arguments.on("distillation.enabled"):
        is_advantage = arguments.on("distillation.distillation_loss.use_policy_gradient")
        yield "distill_by", "advantage" if is_advantage else "loss"


@verl("data.train_max_samples data.val_max_samples", "ppo sft")
def verl_rows(arguments: Arguments) -> Converted:
    yield from arguments.counted("max_samples", "data.train_max_samples", above=0)
    yield from arguments.counted("eval_max_samples", "data.val_max_samples", above=0)


@verl(
    "algorithm.filter_groups.metric algorithm.filter_groups.enable algorithm.filter_groups.max_num_gen_batches",
)
def verl_filter(arguments: Arguments) -> Converted:
    if arguments.on("algorithm.filter_groups.enable"):
        yield "dynamic_sampling", True
        metric = arguments.text("algorithm.filter_groups.metric")
        if metric not in (None, "reward"):
            yield "filter_metric", metric
        batch_limit = arguments.whole("algorithm.filter_groups.max_num_gen_batches", default=0)
        yield "max_num_gen_batches", batch_limit
        if batch_limit:
            yield "on_exhausted", "raise"


@verl(f"{_ACTOR}.policy_loss.loss_mode")
def verl_loss(arguments: Arguments) -> Converted:
    yield "policy_loss", arguments.text(f"{_ACTOR}.policy_loss.loss_mode")


@verl(
    f"{_ACTOR}.router_replay.mode {_ACTOR}.megatron.router_replay.mode {_ROLLOUT}.enable_rollout_routing_replay"
)
def verl_router_replay(arguments: Arguments) -> Converted:
    names = (f"{_ACTOR}.router_replay.mode", f"{_ACTOR}.megatron.router_replay.mode")
    if (mode := arguments.text(*names)) in ("R2", "R3"):
        yield "router_replay", "old" if mode == "R2" else "rollout"


@verl("actor_rollout_ref.nccl_timeout trainer.nccl_timeout")
def verl_timeout(arguments: Arguments) -> Converted:
    seconds = arguments.number("actor_rollout_ref.nccl_timeout", "trainer.nccl_timeout")
    yield "dist_timeout", (seconds or 600) / 60
