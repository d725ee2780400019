"""Options of corrections and rejections, and of the filter of prompts."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal

from lightppo.algorithms.entries import CORRECTIONS, KL_ESTIMATORS, TIMES_RATIO
from lightppo.algorithms.option_values import Norm, Rejection, weights_of_parts
from lightppo.config.old_log_probs import reasons_for_a_pass
from lightppo.config.options import all_options
from lightppo.config.reward_plan import names_rewards
from lightppo.config.rules import estimator_entry
from lightppo.errors import ConfigError
from lightppo.option import Section, option

corrected = partial(option, needs="rollout_correction!=none")


class CorrectionConfig(Section, of="training"):
    """Correction: differences between rollout engine and trainer."""

    rollout_correction: str = option(
        "none",
        "How to weight tokens by π_old / π_rollout (trainer / engine). With --env the last digits depend on the time of "
        "replies, except with --batch_invariant.",
        names=CORRECTIONS,
    )
    correction_low: float | None = corrected(
        None,
        "Lower bound of the weight. None: the correction's default.",
        ge=0,
        below="correction_high",
    )
    correction_high: float | None = corrected(
        None, "Upper bound of the weight. None: the correction's default.", gt=0
    )
    correction_veto: float | None = corrected(
        None,
        "Do not train on a response with a token weight below this; 1e-4 is usual. None: off.",
        gt=0,
        lt=1,
    )
    correction_batch_norm: bool = corrected(
        False, "Divide weights by their mean over the rollout batch of all ranks."
    )
    correction_agg: Literal["mean", "sum", "max"] = option(
        "mean",
        "What of a response's ratios is within the bounds: geometric mean, product, or the largest one.",
        needs="rollout_correction=geo_tis|geo_mis",
    )
    rollout_rejection: tuple[str, ...] = option(
        (),
        "Leave tokens out of the policy loss unless all of these are within bounds, NAME=HIGH or NAME=LOW:HIGH "
        "such as token_ratio=0.5:2 seq_mean_k3=0.01. Names: token, seq_sum, seq_mean or seq_max, with _ratio, "
        "_k1, _k2, _k3 or _k3r; opsm; m2po.",
    )

    @staticmethod
    def meant(config: Any) -> Mapping[str, Any]:
        entry = CORRECTIONS.find(config.correction.rollout_correction)
        return {"correction_low": entry.low, "correction_high": entry.high}

    @staticmethod
    def problems(options: Any) -> Iterator[str]:
        try:
            for text in options.rollout_rejection:
                Rejection.parse(text)
        except ConfigError as error:
            yield str(error)

    @staticmethod
    def passes(options: Any) -> Iterator[str]:
        if options.rollout_correction != "none":
            yield f"--rollout_correction {options.rollout_correction} compares with a pass"
        for text in options.rollout_rejection:
            if Rejection.parse(text).entry.over_rollout:
                yield f"--rollout_rejection {text} compares all tokens before the update"


class EarlyStopConfig(Section, adds_to="loss"):
    """Steps that go too far."""

    early_stop_imp_ratio: float | None = option(
        5.0,
        "Skip an optimizer step of the actor if its mean probability ratio is above this. None: off.",
        gt=1,
    )
    early_stop_kl: float | None = option(
        None,
        "Skip an optimizer step of the actor if the KL from old to new policy is above this. None: off.",
        "nats per token",
        gt=0,
    )


class OldLogProbsConfig(Section, adds_to="loss"):
    """Log probs that were recorded while sampling."""

    @staticmethod
    def problems(options: Any) -> Iterator[str]:
        if options.old_log_probs != "rollout":
            return
        try:
            for reason in reasons_for_a_pass(options):
                yield f"--old_log_probs rollout: {reason}; set auto or forward"
        except ConfigError:  # of a value that its section refuses
            return


class HighEntropyConfig(Section, adds_to="loss"):
    """A policy loss on tokens of high entropy alone."""

    high_entropy_token_ratio: float | None = option(
        None,
        "Apply the policy loss only to this share of the tokens, those of highest entropy. None: all.",
        gt=0,
        le=1,
        off=(0,),
    )

    @staticmethod
    def passes(options: Any) -> Iterator[str]:
        if options.high_entropy_token_ratio is not None:
            yield "--high_entropy_token_ratio needs the entropy of a pass"


class PromptFilterConfig(Section, adds_to="sampling"):
    """Prompts that are solved leave the further episodes."""

    dataset_filter_threshold: float | None = option(
        None,
        "After an episode, drop prompts whose mean score is above this.",
        needs="dataset_max_filter_percentage>0",
    )
    dataset_max_filter_percentage: float = option(
        0.1,
        "Maximum share of the prompts to drop per episode.",
        ge=0,
        lt=1,
        needs="dataset_filter_threshold",
        off=(0,),
    )

    @staticmethod
    def problems(options: Any) -> Iterator[str]:
        scores_count = not estimator_entry(options.config).ignores_scores
        if options.by_hand or options.dataset_filter_threshold is None or scores_count:
            return
        if not names_rewards(options):
            yield "--dataset_filter_threshold chooses by scores, and this run has no reward: leave it out"


# What changes the sum of the rewards, which gdpo does not read.
_OF_THE_SUM = (
    "reward_bias",
    "reward_scaling",
    "max_reward_clip",
    "reward_running_norm",
    "stop_properly_penalty",
    "overlong_buffer_len",
    "mask_no_eos_with_zero",
    "use_dense_reward",
    "reward_clip_range",
    "check_xml_format",
    "reward_norm_by",
)


class PartsConfig(Section, adds_to="algorithm"):
    """Rewards that are normalised one by one."""

    gdpo_rewards: tuple[str, ...] = option(
        (),
        "gdpo: the rewards, NAME or NAME=WEIGHT, by the names that they have in reward/: sources of --reward_source, "
        "or numbers that a reward function gives beside the score.",
        needs="advantage_estimator=gdpo",
    )

    @staticmethod
    def problems(options: Any) -> Iterator[str]:
        try:
            weights = weights_of_parts(options.gdpo_rewards)
        except ConfigError as error:
            yield str(error)
            return
        if options.advantage_estimator != "gdpo":
            return
        if len(weights) < 2:
            yield "--advantage_estimator gdpo normalises several rewards: name at least two by --gdpo_rewards, or use grpo"
        if options.init_kl_coef > 0 and options.use_kl_in_reward:
            yield "--use_kl_in_reward adds to the sum of the rewards, and gdpo reads each one: set --use_kl_loss"
        given = options.config.flat()
        for one in all_options():
            if one.name in _OF_THE_SUM and one.is_set(given[one.name]):
                yield f"--{one.name} changes the sum of the rewards, and gdpo reads each one: leave it out"


class KLConfig(Section, adds_to="algorithm"):
    """KL estimators beside those of the core."""

    @staticmethod
    def problems(options: Any) -> Iterator[str]:
        name = options.kl_estimator
        times_ratio = name in KL_ESTIMATORS and KL_ESTIMATORS[name].as_loss == TIMES_RATIO
        if times_ratio and not options.use_kl_loss:
            plain = name.removesuffix("_ratio")
            yield f"--kl_estimator {name} is of --use_kl_loss: in the reward the ratio is 1; set {plain}"

    @staticmethod
    def passes(options: Any) -> Iterator[str]:
        if options.init_kl_coef > 0 and options.kl_estimator == "full" and options.use_kl_in_reward:
            yield "--kl_estimator full needs the distributions of a pass"


_WORDS = "mean=batch|group std=batch|group leave_one_out unbiased eps=1e-5, those that you want."


def _norm_problem(name: str, words: tuple[str, ...]) -> Iterator[str]:
    try:
        if words:
            Norm.parse(words)
    except ConfigError as error:
        yield f"--{name} {' '.join(words)}: {error}"


class ScoreNormConfig(Section, adds_to="reward"):
    """Scores less a mean, over a deviation."""

    reward_norm_by: tuple[str, ...] = option(
        (),
        f"Normalise shaped scores by mean and deviation of all scores or of each group: {_WORDS}",
        needs="trained_scores",
    )

    @staticmethod
    def problems(options: Any) -> Iterator[str]:
        if not options.reward_norm_by:
            return
        yield from _norm_problem("reward_norm_by", options.reward_norm_by)
        if options.use_dense_reward:
            yield "--reward_norm_by is of the one score of a response, --use_dense_reward of its tokens: leave one out"
        if estimator_entry(options.config).needs_greedy_baseline:
            yield f"--reward_norm_by: {options.advantage_estimator} compares with scores as they are: leave it out"


whitens_batch = partial(option, needs="whitening and adv_norm_scope=batch")


class AdvantageNormConfig(Section, adds_to="algorithm"):
    """Advantages less a mean, over a deviation, and their limits."""

    adv_norm_scope: Literal["batch", "group"] = option(
        "batch",
        "Whiten over the batch of all ranks, or within each group.",
        needs="whitening and n_samples_per_prompt>1",
    )
    adv_shift_mean: bool = whitens_batch(True, "Subtract the mean when whitening the batch.")
    adv_std_norm: bool = whitens_batch(
        True, "Divide by the standard deviation when whitening the batch."
    )
    adv_std_unbiased: bool = whitens_batch(
        False, "Divide the variance by n - 1 instead of n.", also="adv_std_norm"
    )
    adv_norm_eps: float | None = option(
        None,
        "Added to the batch's variance (None: 1e-8) or the group's deviation (None: 1e-5).",
        ge=0,
        needs="whitening",
    )
    advantage_clip: float | None = option(None, "Clip advantages to ± this.", gt=0, off=(0,))
    adv_norm_by: tuple[str, ...] = option(
        (),
        f"In place of whitening: normalise advantages by mean and deviation of all tokens or of each group's: {_WORDS}",
    )

    exclusive = (
        (
            "no_adv_shift_mean",
            "no_adv_std_norm",
            "leave nothing of whitening, as --no_adv_norm does",
        ),
    )

    @staticmethod
    def facts(config: Any) -> Mapping[str, bool]:
        return {"whitening": False} if config.algorithm.adv_norm_by else {}

    @staticmethod
    def meant(config: Any) -> Mapping[str, Any]:
        algorithm = config.algorithm
        if algorithm.adv_norm_by:
            return {"adv_norm": False, "adv_norm_eps": None}
        given, by_default = algorithm.adv_norm, estimator_entry(config).whiten
        if not (by_default if given is None else given):
            return {}
        return {"adv_norm_eps": 1e-5 if algorithm.adv_norm_scope == "group" else 1e-8}

    @staticmethod
    def problems(options: Any) -> Iterator[str]:
        yield from _norm_problem("adv_norm_by", options.adv_norm_by)
        if options.adv_norm_by and options.adv_norm:
            yield "--adv_norm_by takes the place of --adv_norm: leave one out"
