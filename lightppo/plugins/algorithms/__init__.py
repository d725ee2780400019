"""Corrections, rejections, rarely used estimators and policy losses."""

from lightppo.option import register_section
from lightppo.plugin import (
    CALLBACKS,
    EARLY_STOPS,
    METRICS,
    NORMALISATIONS,
    TOKEN_WEIGHTS,
    CallbackEntry,
    TokenWeight,
)
from lightppo.table import Entry

_WEIGHTS = "lightppo.plugins.algorithms.token_weights"


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin`` and of algorithms."""
    from lightppo.algorithms.entries import (
        ADVANTAGE_ESTIMATORS,
        KL_ESTIMATORS,
        POLICY_LOSSES,
        TABLES,
    )
    from lightppo.plugins.algorithms import tables

    for name, entry in tables.ESTIMATORS.items():
        ADVANTAGE_ESTIMATORS.register(name, entry)
    for name, entry in tables.POLICY_LOSSES.items():
        POLICY_LOSSES.register(name, entry)
    for name, entry in tables.KL_ESTIMATORS.items():
        KL_ESTIMATORS.register(name, entry)
    TABLES.extend((tables.CORRECTIONS, tables.REJECTIONS))

    correction = TokenWeight(
        f"{_WEIGHTS}:correction", needs_rollout_log_probs=True, flag="rollout_correction"
    )
    rejection = TokenWeight(
        f"{_WEIGHTS}:rejection", needs_rollout_log_probs=True, flag="rollout_rejection"
    )
    in_training = TokenWeight(
        f"{_WEIGHTS}:rejection_in_training",
        in_training=True,
        needs_rollout_log_probs=True,
        flag="rollout_rejection",
    )
    high_entropy = TokenWeight(
        f"{_WEIGHTS}:high_entropy", needs_entropy=True, flag="high_entropy_token_ratio"
    )
    TOKEN_WEIGHTS.register("correction", correction)
    TOKEN_WEIGHTS.register("rejection", rejection)
    TOKEN_WEIGHTS.register("rejection_in_training", in_training)
    TOKEN_WEIGHTS.register("high_entropy", high_entropy)
    EARLY_STOPS.register("limits", Entry("lightppo.plugins.algorithms.early_stop:early_stop"))
    CALLBACKS.register(
        "token_selection", CallbackEntry("lightppo.plugins.algorithms.selection:token_selection")
    )
    CALLBACKS.register(
        "prompt_filter", CallbackEntry("lightppo.plugins.algorithms.prompt_filter:prompt_filter")
    )
    METRICS.register(
        "rollout",
        {"left_out_prompts": "prompts that --dataset_filter_threshold has left out so far"},
    )
    NORMALISATIONS.register(
        "levels", Entry("lightppo.plugins.algorithms.normalisation:normalisation")
    )
    _register_sections()


def _register_sections() -> None:
    sections = "lightppo.plugins.algorithms.sections"
    register_section("correction", f"{sections}:CorrectionConfig")
    for name, kind, owner in (
        ("high_entropy", "HighEntropyConfig", "loss"),
        ("early_stop", "EarlyStopConfig", "loss"),
        ("prompt_filter", "PromptFilterConfig", "sampling"),
        ("score_norm", "ScoreNormConfig", "reward"),
        ("adv_norm", "AdvantageNormConfig", "algorithm"),
        ("kl_ratio", "RatioConfig", "algorithm"),
        ("gdpo", "PartsConfig", "algorithm"),
    ):
        register_section(name, f"{sections}:{kind}", adds_to=owner)
