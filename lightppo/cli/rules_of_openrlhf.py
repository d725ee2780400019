"""Options of OpenRLHF and LightRFT that say something together."""

from __future__ import annotations

from functools import partial

from lightppo.cli.conversion_rules import (
    EVERY,
    LOOK,
    Arguments,
    Converted,
    correction,
    precision,
    rule,
    truth,
)

openrlhf = partial(rule, "OpenRLHF")
lightrft = partial(rule, "LightRFT")


@openrlhf("ds.param_dtype param_dtype bf16 fp16", EVERY)
def openrlhf_precision(arguments: Arguments) -> Converted:
    if arguments.on("fp16"):
        yield "fp16", True
    elif arguments.on("bf16"):
        yield "bf16", True
    else:
        yield from precision(arguments.text("ds.param_dtype", "param_dtype"))


@openrlhf(
    "data.max_len max_len rollout.max_new_tokens max_new_tokens generate_max_len prompt_max_len",
)
def openrlhf_lengths(arguments: Arguments) -> Converted:
    total_length = arguments.number("data.max_len", "max_len")
    answer_length = arguments.number("rollout.max_new_tokens", "max_new_tokens", "generate_max_len")
    prompt_length = arguments.number("prompt_max_len")
    if total_length is not None:
        if answer_length is None:
            yield (
                LOOK,
                f"{total_length:g} tokens for prompt and answer together: half of it for each is set, choose other shares",
            )
            answer_length = total_length / 2
        if prompt_length is None:
            prompt_length = max(1, total_length - answer_length)
    if answer_length is not None:
        yield "generate_max_len", int(answer_length)
    if prompt_length is not None:
        yield "prompt_max_len", int(prompt_length)


@openrlhf("no_advantage_std_norm algo.advantage.no_std_norm")
def openrlhf_advantages(arguments: Arguments) -> Converted:
    if arguments.on("no_advantage_std_norm", "algo.advantage.no_std_norm"):
        yield "adv_norm_by", "mean=batch"


@openrlhf("actor.eps_clip_low_high eps_clip_low_high actor.eps_clip eps_clip")
def openrlhf_clip(arguments: Arguments) -> Converted:
    bounds = arguments.words("actor.eps_clip_low_high", "eps_clip_low_high")
    if len(bounds) == 2:
        yield "eps_clip_low", bounds[0]
        yield "eps_clip_high", bounds[1]
    else:
        yield from arguments.copied("eps_clip", "actor.eps_clip", "eps_clip")


@openrlhf(
    "algo.advantage.is_correction_level algo.advantage.is_correction_mode algo.advantage.is_correction_threshold "
    "algo.advantage.is_correction_enable algo.advantage.is_correction_type enable_vllm_is_correction "
    "vllm_is_correction_type vllm_is_truncated_threshold use_icepop",
)
def openrlhf_correction(arguments: Arguments) -> Converted:
    level = arguments.text("algo.advantage.is_correction_level") or "off"
    correction_kind = None
    if level == "seq":
        correction_kind = "seq_mask_tis"
    elif level != "off":
        is_clipped = arguments.text("algo.advantage.is_correction_mode") == "clip"
        correction_kind = "tis" if is_clipped else "icepop"
    elif arguments.on("algo.advantage.is_correction_enable", "enable_vllm_is_correction"):
        correction_kind = arguments.text(
            "algo.advantage.is_correction_type", "vllm_is_correction_type"
        )
        correction_kind = (correction_kind or "tis").replace("-", "_")
        if arguments.on("use_icepop"):
            correction_kind = "icepop"
    bounds = arguments.words(
        "algo.advantage.is_correction_threshold", "vllm_is_truncated_threshold"
    )
    *_, lower_bound, upper_bound = [None, None, *map(float, bounds)]
    yield from correction(correction_kind, lower_bound, upper_bound)


@openrlhf(
    "algo.kl.init_coef init_kl_coef algo.kl.use_loss use_kl_loss algo.kl.estimator kl_estimator algo.kl.unbiased_gradient",
)
def openrlhf_kl(arguments: Arguments) -> Converted:
    coefficient = arguments.number("algo.kl.init_coef", "init_kl_coef")
    if coefficient is not None:
        yield "init_kl_coef", coefficient
    if coefficient == 0:
        return
    in_loss = arguments.text("algo.kl.use_loss", "use_kl_loss")
    if in_loss is not None:
        yield "use_kl_loss", truth(in_loss)
    estimator = arguments.text("algo.kl.estimator", "kl_estimator")
    if estimator is not None:
        if arguments.on("algo.kl.unbiased_gradient") and estimator != "k2":
            estimator = f"{estimator}_ratio"
        yield "kl_estimator", estimator
        yield "kl_clip", 10


@openrlhf("ckpt.load_enable load_checkpoint", EVERY)
@lightrft("load_checkpoint")
def resume(arguments: Arguments) -> Converted:
    yield "resume", "auto" if arguments.on("ckpt.load_enable", "load_checkpoint") else "never"


@openrlhf(
    "vllm.num_engines vllm_num_engines vllm.tensor_parallel_size vllm_tensor_parallel_size",
)
def openrlhf_engine(arguments: Arguments) -> Converted:
    if arguments.whole("vllm.num_engines", "vllm_num_engines", default=0) > 0:
        yield "rollout_engine", "vllm"
        option_names = ("vllm.tensor_parallel_size", "vllm_tensor_parallel_size")
        yield "tensor_parallel_size", arguments.whole(*option_names)


@openrlhf(
    "use_dynamic_batch train.dynamic_batch_enable train_max_tokens_per_gpu "
    "train.max_tokens_per_gpu rollout_max_tokens_per_gpu rollout.max_tokens_per_gpu",
)
def openrlhf_tokens(arguments: Arguments) -> Converted:
    if arguments.on("train.dynamic_batch_enable", "use_dynamic_batch"):
        option_names = ("train.max_tokens_per_gpu", "train_max_tokens_per_gpu")
        yield "max_tokens_per_micro_batch", arguments.whole(*option_names, default=16192)


@openrlhf("train.agent_func_path agent_func_path")
def openrlhf_agent(arguments: Arguments) -> Converted:
    if (agent_path := arguments.text("train.agent_func_path", "agent_func_path")) is not None:
        yield "env", [f"openrlhf:{agent_path}"]
        yield "reward_source", ["environment"]


@openrlhf(
    "algo.dynamic_filtering_enable dynamic_filtering algo.dynamic_filtering_range dynamic_filtering_reward_range",
)
def openrlhf_filter(arguments: Arguments) -> Converted:
    if arguments.on("algo.dynamic_filtering_enable", "dynamic_filtering"):
        yield "dynamic_sampling", True
        option_names = ("algo.dynamic_filtering_range", "dynamic_filtering_reward_range")
        yield "filter_range", arguments.words(*option_names) or [0, 1]


@openrlhf("logger.wandb.key use_wandb", EVERY)
@lightrft("use_wandb")
def wandb(arguments: Arguments) -> Converted:
    if arguments.text("logger.wandb.key", "use_wandb") is not None:
        yield "use_wandb", True  # a key stays out of what is printed


@openrlhf("reward_clip_range reward.clip_range")
def openrlhf_reward_clip(arguments: Arguments) -> Converted:
    yield "reward_clip_range", arguments.words("reward.clip_range", "reward_clip_range")


@lightrft("reward_clip")
def lightrft_reward_clip(arguments: Arguments) -> Converted:
    bound = arguments.number("reward_clip")
    yield "reward_clip_range", (-bound, bound) if bound else None


@lightrft("overlong_buffer overlong_buffer_len overlong_buffer_penalty_factor")
def lightrft_overlong(arguments: Arguments) -> Converted:
    if arguments.on("overlong_buffer"):
        yield "overlong_buffer_len", arguments.whole("overlong_buffer_len", default=1024)
        factor = arguments.number("overlong_buffer_penalty_factor")
        yield "overlong_penalty_factor", factor or 1


@lightrft("engine_type engine_tp_size")
def lightrft_engine(arguments: Arguments) -> Converted:
    yield "rollout_engine", "vllm"
    yield "tensor_parallel_size", arguments.whole("engine_tp_size")
    if arguments.text("engine_type") == "sglang":
        yield LOOK, "sglang is not here: vllm is set"


@lightrft("max_len reward_pretrain remote_rm_url")
def lightrft_lists(arguments: Arguments) -> Converted:
    if arguments.text("max_len") is not None:
        yield LOOK, "--prompt_max_len and --generate_max_len are set for themselves"
    for option_name in ("reward_pretrain", "remote_rm_url"):
        if items := [item for item in arguments.items(option_name) if item not in ("{}", "")]:
            yield option_name, items


@openrlhf("eval.steps eval_steps", EVERY)
def openrlhf_evaluation(arguments: Arguments) -> Converted:
    count = arguments.number("eval.steps", "eval_steps")
    if count is not None and count > 0:
        yield "eval_steps", int(count)
    elif count is not None and arguments.text("eval.dataset", "eval_dataset") is not None:
        yield LOOK, "no evaluation while it trains there; here one per pass over the rows"
