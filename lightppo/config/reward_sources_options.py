"""Options of reward functions and of reward models with inputs of their own; docs/rewards.md."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

from lightppo.option import Section, option
from lightppo.plugin import REWARD_STYLES

safe = partial(option, resume_safe=True)
reward_model = partial(option, needs="reward_pretrain")


class PlanConfig(Section, adds_to="verifier"):
    """Which sources score the samples."""

    reward_source: tuple[str, ...] = option(
        (),
        "Built-in sources, NAME[=WEIGHT]: math, format, code; scores are added. Also those set by flags: "
        "function, server, model.",
    )
    reward_routes: str | None = option(
        None,
        'Reward sources per data source, as JSON or a JSON file: {"gsm8k": {"math": 1, "format": 0.1}, "*": '
        '{"model": 1}}.',
    )
    reward_routes_by: str = option(
        "data_source",
        "Column with the keys of --reward_routes: data_source, label, or another such as task.",
        needs="reward_routes",
    )

    exclusive = (("reward_source", "reward_routes", "both name the sources"),)


class FunctionConfig(Section, adds_to="verifier"):
    """How reward functions are called."""

    reward_fn_style: str = option(
        "auto",
        "Signature of --reward_fn. auto: from its parameter names.",
        needs="function",
        names=REWARD_STYLES,
    )
    reward_manager: Literal["auto", "naive", "batch", "dapo", "prime"] = safe(
        "auto",
        "How --reward_fn is called. naive: in threads; batch: one call; prime: processes killed at "
        "--reward_timeout; auto: by signature; dapo: auto, and a bare score is its acc, too.",
        needs="function",
    )
    reward_retries: int = safe(0, "Retries of a failed call.", ge=0, needs="function or math")
    on_reward_failure: Literal["error", "unscored"] | None = safe(
        None,
        "If all tries of a call fail: stop, or leave the sample out. None: error for functions, unscored for "
        "verifiers.",
        needs="function or server or math or code",
    )


class InputConfig(Section, adds_to="reward"):
    """What reward models read."""

    reward_input_tokenizer: tuple[str, ...] = reward_model(
        (),
        "Tokenizers of the reward models, one for all or one each; they render the chat again. None: the actor's "
        "token ids.",
    )
    reward_max_length: int | None = reward_model(
        None, "Maximum input length of a reward model. None: no limit.", "tokens", ge=2
    )
    reward_truncation: Literal["error", "left"] = reward_model(
        "error", "If an input is longer: stop, or cut its left side. Counted."
    )

    @staticmethod
    def problems(options: Any) -> Iterator[str]:
        models, tokenizers = len(options.reward_pretrain), len(options.reward_input_tokenizer)
        if models and tokenizers not in (0, 1, models):
            yield f"--reward_input_tokenizer has {tokenizers} for {models} --reward_pretrain: give one for all, or one each"
