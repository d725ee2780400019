"""Options of OpenRLHF and LightRFT that say something together."""

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
    truth,
)


@rule("OpenRLHF", "ds.param_dtype param_dtype bf16 fp16", EVERY)
def _openrlhf_precision(their: Their) -> Iterator[tuple[str, Any]]:
    if their.on("fp16"):
        yield "fp16", True
    elif their.on("bf16"):
        yield "bf16", True
    else:
        yield from precision(their.text("ds.param_dtype", "param_dtype"))


@rule(
    "OpenRLHF",
    "data.max_len max_len rollout.max_new_tokens max_new_tokens generate_max_len prompt_max_len",
)
def _openrlhf_lengths(their: Their) -> Iterator[tuple[str, Any]]:
    total = their.number("data.max_len", "max_len")
    new = their.number("rollout.max_new_tokens", "max_new_tokens", "generate_max_len")
    prompt = their.number("prompt_max_len")
    if new is None and total is not None:
        yield (
            LOOK,
            f"{total:g} tokens for prompt and answer together: half of it for each is set, choose other shares",
        )
        new = total / 2
    if prompt is None and total is not None and new is not None:
        prompt = max(1, total - new)
    if new is not None:
        yield "generate_max_len", int(new)
    if prompt is not None:
        yield "prompt_max_len", int(prompt)


@rule("OpenRLHF", "actor.eps_clip_low_high eps_clip_low_high actor.eps_clip eps_clip")
def _openrlhf_clip(their: Their) -> Iterator[tuple[str, Any]]:
    bounds = [
        one
        for text in their.items("actor.eps_clip_low_high", "eps_clip_low_high")
        for one in text.split()
    ]
    if len(bounds) == 2:
        yield "eps_clip_low", bounds[0]
        yield "eps_clip_high", bounds[1]
    elif (both := their.text("actor.eps_clip", "eps_clip")) is not None:
        yield "eps_clip", both


@rule(
    "OpenRLHF",
    "algo.advantage.is_correction_level algo.advantage.is_correction_mode algo.advantage.is_correction_threshold "
    "algo.advantage.is_correction_enable algo.advantage.is_correction_type enable_vllm_is_correction "
    "vllm_is_correction_type vllm_is_truncated_threshold use_icepop",
)
def _openrlhf_correction(their: Their) -> Iterator[tuple[str, Any]]:
    level = their.text("algo.advantage.is_correction_level") or "off"
    mode = their.text("algo.advantage.is_correction_mode") or "mask"
    kind = None
    if level != "off":
        if level == "seq":
            kind = "seq_mask_tis"
        elif mode == "clip":
            kind = "tis"
        else:
            kind = "icepop"
    elif their.on("algo.advantage.is_correction_enable", "enable_vllm_is_correction"):
        named = their.text("algo.advantage.is_correction_type", "vllm_is_correction_type") or "tis"
        kind = "icepop" if their.on("use_icepop") else named.replace("-", "_")
    bounds = their.items("algo.advantage.is_correction_threshold", "vllm_is_truncated_threshold")
    numbers = [float(one) for text in bounds for one in text.split()]
    low = numbers[0] if len(numbers) == 2 else None
    yield from correction(kind, low, numbers[-1] if numbers else None)


@rule(
    "OpenRLHF",
    "algo.kl.init_coef init_kl_coef algo.kl.use_loss use_kl_loss algo.kl.estimator kl_estimator algo.kl.unbiased_gradient",
)
def _openrlhf_kl(their: Their) -> Iterator[tuple[str, Any]]:
    coef = their.number("algo.kl.init_coef", "init_kl_coef")
    if coef is not None:
        yield "init_kl_coef", coef
    if coef == 0:
        return
    kind = their.text("algo.kl.estimator", "kl_estimator")
    in_loss = their.text("algo.kl.use_loss", "use_kl_loss")
    if in_loss is not None:
        yield "use_kl_loss", truth(in_loss)
    if kind is not None:
        yield (
            "kl_estimator",
            f"{kind}_ratio" if their.on("algo.kl.unbiased_gradient") and kind != "k2" else kind,
        )
        yield "kl_clip", 10


@rule("OpenRLHF", "ckpt.load_enable load_checkpoint", EVERY)
def _openrlhf_resume(their: Their) -> Iterator[tuple[str, Any]]:
    yield "resume", "auto" if their.on("ckpt.load_enable", "load_checkpoint") else "never"


@rule("LightRFT", "load_checkpoint")
def _lightrft_resume(their: Their) -> Iterator[tuple[str, Any]]:
    yield "resume", "auto" if their.on("load_checkpoint") else "never"


@rule(
    "OpenRLHF",
    "vllm.num_engines vllm_num_engines vllm.tensor_parallel_size vllm_tensor_parallel_size",
)
def _openrlhf_engine(their: Their) -> Iterator[tuple[str, Any]]:
    if their.whole("vllm.num_engines", "vllm_num_engines", default=0) > 0:
        yield "rollout_engine", "vllm"
        yield (
            "tensor_parallel_size",
            their.whole("vllm.tensor_parallel_size", "vllm_tensor_parallel_size"),
        )


@rule(
    "OpenRLHF",
    "use_dynamic_batch train.dynamic_batch_enable train_max_tokens_per_gpu "
    "train.max_tokens_per_gpu rollout_max_tokens_per_gpu rollout.max_tokens_per_gpu",
)
def _openrlhf_tokens(their: Their) -> Iterator[tuple[str, Any]]:
    if their.on("train.dynamic_batch_enable", "use_dynamic_batch"):
        names = ("train.max_tokens_per_gpu", "train_max_tokens_per_gpu")
        yield "max_tokens_per_micro_batch", their.whole(*names, default=16192)


@rule("OpenRLHF", "train.agent_func_path agent_func_path")
def _openrlhf_agent(their: Their) -> Iterator[tuple[str, Any]]:
    if (path := their.text("train.agent_func_path", "agent_func_path")) is not None:
        yield "env", [f"openrlhf:{path}"]
        yield "reward_source", ["environment"]


@rule(
    "OpenRLHF",
    "algo.dynamic_filtering_enable dynamic_filtering algo.dynamic_filtering_range dynamic_filtering_reward_range",
)
def _openrlhf_filter(their: Their) -> Iterator[tuple[str, Any]]:
    if their.on("algo.dynamic_filtering_enable", "dynamic_filtering"):
        yield "dynamic_sampling", True
        bounds = their.items("algo.dynamic_filtering_range", "dynamic_filtering_reward_range")
        yield "filter_range", [one for text in bounds for one in text.split()] or [0, 1]


@rule("OpenRLHF", "logger.wandb.key use_wandb", EVERY)
@rule("LightRFT", "use_wandb")
def _wandb(their: Their) -> Iterator[tuple[str, Any]]:
    if their.text("logger.wandb.key", "use_wandb") is not None:
        yield "use_wandb", True  # a key stays out of what is printed


@rule("OpenRLHF", "reward_clip_range reward.clip_range")
def _openrlhf_reward_clip(their: Their) -> Iterator[tuple[str, Any]]:
    yield (
        "reward_clip_range",
        [
            one
            for text in their.items("reward.clip_range", "reward_clip_range")
            for one in text.split()
        ],
    )


@rule("LightRFT", "reward_clip")
def _lightrft_reward_clip(their: Their) -> Iterator[tuple[str, Any]]:
    most = their.number("reward_clip") or 0
    yield "reward_clip_range", (-most, most) if most else None


@rule("LightRFT", "overlong_buffer overlong_buffer_len overlong_buffer_penalty_factor")
def _lightrft_overlong(their: Their) -> Iterator[tuple[str, Any]]:
    if their.on("overlong_buffer"):
        yield "overlong_buffer_len", their.whole("overlong_buffer_len", default=1024)
        yield "overlong_penalty_factor", their.number("overlong_buffer_penalty_factor") or 1


@rule("LightRFT", "engine_type engine_tp_size")
def _lightrft_engine(their: Their) -> Iterator[tuple[str, Any]]:
    yield "rollout_engine", "vllm"
    yield "tensor_parallel_size", their.whole("engine_tp_size")
    if their.text("engine_type") == "sglang":
        yield LOOK, "sglang is not here: vllm is set"


@rule("LightRFT", "max_len reward_pretrain remote_rm_url")
def _lightrft_lists(their: Their) -> Iterator[tuple[str, Any]]:
    if their.text("max_len") is not None:
        yield LOOK, "--prompt_max_len and --generate_max_len are set for themselves"
    for name in ("reward_pretrain", "remote_rm_url"):
        if found := [one for one in their.items(name) if one not in ("{}", "")]:
            yield name, found


@rule("OpenRLHF", "eval.steps eval_steps", EVERY)
def _openrlhf_evaluation(their: Their) -> Iterator[tuple[str, Any]]:
    count = their.number("eval.steps", "eval_steps")
    if count is not None and count > 0:
        yield "eval_steps", int(count)
    elif count is not None and their.text("eval.dataset", "eval_dataset") is not None:
        yield LOOK, "no evaluation while it trains there; here one per pass over the rows"
