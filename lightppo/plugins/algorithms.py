"""Corrections, rejections, rarely used estimators and policy losses."""

from lightppo.option import register_section
from lightppo.plugin import (
    BUFFER_STEPS,
    EARLY_STOPS,
    METRICS,
    NORMALISATIONS,
    OLD_LOG_PROBS,
    TOKEN_WEIGHTS,
    TokenWeight,
)
from lightppo.table import FILE_ENTRIES, Entry

_WEIGHTS = "lightppo.experience.token_weights"


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin`` and of algorithms."""
    from lightppo.algorithms import more_entries as tables
    from lightppo.algorithms.entries import (
        ADVANTAGE_ESTIMATORS,
        KL_ESTIMATORS,
        POLICY_LOSSES,
        TABLES,
    )

    for table, entries in (
        (ADVANTAGE_ESTIMATORS, tables.ESTIMATORS),
        (POLICY_LOSSES, tables.POLICY_LOSSES),
        (KL_ESTIMATORS, tables.KL_ESTIMATORS),
    ):
        for name, entry in entries.items():
            table.register(name, entry)
    TABLES.extend((tables.CORRECTIONS, tables.REJECTIONS))
    _register_token_weights()
    _register_options()
    BUFFER_STEPS["whiten"] = Entry("lightppo.experience.normalisation:whitening")
    BUFFER_STEPS.register("clip", Entry("lightppo.experience.normalisation:clipping"))
    BUFFER_STEPS.register(
        "selected_tokens", Entry("lightppo.experience.token_selection:token_selection")
    )
    EARLY_STOPS.register("limits", Entry("lightppo.trainer.early_stop:early_stop"))
    OLD_LOG_PROBS.register("fewest_passes", Entry("lightppo.config.old_log_probs:fewest_passes"))
    NORMALISATIONS.register("levels", Entry("lightppo.experience.normalisation:normalisation"))
    NORMALISATIONS.register(
        "groups", Entry("lightppo.experience.normalisation:whitening_of_groups")
    )
    METRICS.register(
        "rollout",
        {"left_out_prompts": "prompts that --dataset_filter_threshold has left out so far"},
    )

    FILE_ENTRIES.register("declared", Entry("lightppo.algorithms.declared_entries:read_entry"))


def _register_token_weights() -> None:
    of_engine = {"needs_rollout_log_probs": True}
    correction = TokenWeight(
        "lightppo.experience.token_weights:correction", flag="rollout_correction", **of_engine
    )
    rejection = TokenWeight(
        "lightppo.experience.token_weights:rejection", flag="rollout_rejection", **of_engine
    )
    in_training = TokenWeight(
        "lightppo.experience.token_weights:rejection_in_training",
        in_training=True,
        flag="rollout_rejection",
        **of_engine,
    )
    high_entropy = TokenWeight(
        "lightppo.experience.token_weights:high_entropy",
        needs_entropy=True,
        flag="high_entropy_token_ratio",
    )
    TOKEN_WEIGHTS.register("correction", correction)
    TOKEN_WEIGHTS.register("rejection", rejection)
    TOKEN_WEIGHTS.register("rejection_in_training", in_training)
    TOKEN_WEIGHTS.register("high_entropy", high_entropy)


def _register_options() -> None:
    register_section("correction", "lightppo.config.algorithms_options:CorrectionConfig")
    for name, kind, owner in (
        ("old_log_probs", "OldLogProbsConfig", "loss"),
        ("high_entropy", "HighEntropyConfig", "loss"),
        ("early_stop", "EarlyStopConfig", "loss"),
        ("prompt_filter", "PromptFilterConfig", "sampling"),
        ("score_norm", "ScoreNormConfig", "reward"),
        ("adv_norm", "AdvantageNormConfig", "algorithm"),
        ("kl_estimators", "KLConfig", "algorithm"),
        ("gdpo", "PartsConfig", "algorithm"),
    ):
        register_section(name, f"lightppo.config.algorithms_options:{kind}", adds_to=owner)
