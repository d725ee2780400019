"""Options of the shaping of scores, and of the normalisation of values; docs/algorithms.md."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal

from lightppo.config.rules import estimator_entry
from lightppo.option import Section, option
from lightppo.redaction import shown_value

shaping = partial(option, needs="trained_scores")
_CUT = "both say what becomes of a response cut by the limit"


class ShapingConfig(Section, adds_to="reward"):
    """Scores before training."""

    reward_bias: float = shaping(0.0, "Subtracted from every score, before --reward_scaling.")
    reward_scaling: float = shaping(1.0, "Factor on every score; a negative factor flips the sign.")
    max_reward_clip: float | None = shaping(None, "Clip scaled scores to ± this.", gt=0)
    reward_running_norm: bool = shaping(
        False, "Normalise scaled scores by the running mean and deviation over all ranks."
    )
    stop_properly_penalty: float | None = shaping(
        None,
        "Truncated responses score at most this share of their score (0 to 1), or at most this (below 0).",
        le=1,
    )
    overlong_buffer_len: int | None = shaping(
        None,
        "DAPO's soft length limit: responses that reach the last N tokens before --generate_max_len get a penalty.",
        "tokens",
        ge=1,
    )
    overlong_penalty_factor: float | None = option(
        None, "Maximum penalty. None: 1.", gt=0, needs="overlong_buffer_len", off=(1,)
    )
    mask_no_eos_with_zero: bool = shaping(
        False, "Truncated responses score 0; their KL still counts."
    )
    use_dense_reward: bool = shaping(
        False, "Train on one score per response token; the reward source must provide them."
    )
    reward_delta: bool = option(
        False, "Use differences of successive dense scores as rewards.", needs="use_dense_reward"
    )

    exclusive = (
        ("mask_too_long", "stop_properly_penalty", _CUT),
        ("stop_properly_penalty", "mask_no_eos_with_zero", _CUT),
        (
            "use_dense_reward",
            "reward_running_norm mask_no_eos_with_zero stop_properly_penalty",
            "are of token scores, and of the one score of a response",
        ),
    )

    @staticmethod
    def meant(config: Any) -> Mapping[str, Any]:
        return {} if config.reward.overlong_buffer_len is None else {"overlong_penalty_factor": 1.0}

    @staticmethod
    def problems(options: Any) -> Iterator[str]:
        if (options.overlong_buffer_len or 0) > options.generate_max_len:
            yield (
                f"--overlong_buffer_len {options.overlong_buffer_len} exceeds "
                f"--generate_max_len {options.generate_max_len}"
            )
        if options.use_dense_reward and estimator_entry(options.config).needs_greedy_baseline:
            name = f"--advantage_estimator {shown_value(options.advantage_estimator)}"
            yield f"{name} acts on the one score of a response, --use_dense_reward on token scores: leave one out"
        if options.reward_scaling == 0:
            yield "--reward_scaling 0 makes all scores the same: set another factor"


class ValueNormConfig(Section, adds_to="loss"):
    """Returns as a critic learns them."""

    value_norm: Literal["exp", "ma"] | None = option(
        None,
        "Train the critic on returns normalised by an exponential or plain moving average. None: raw returns.",
        needs="critic",
    )
    value_norm_beta: float | None = option(
        None, "Decay of exp. None: 0.99995.", gt=0, lt=1, needs="value_norm=exp"
    )
    value_norm_eps: float | None = option(
        None, "Minimum variance. None: 1e-5.", gt=0, needs="value_norm"
    )

    @staticmethod
    def meant(config: Any) -> Mapping[str, Any]:
        kind = config.loss.value_norm
        if kind is None:
            return {}
        return {
            "value_norm_eps": 1e-5,
            "value_norm_beta": 0.99995 if kind == "exp" else None,
        }
