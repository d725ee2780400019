"""Corrections, rejections, rarely used estimators and policy losses."""

from lightppo.plugin import (
    BUFFER_STEPS,
    EARLY_STOPS,
    NORMALISATIONS,
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
    BUFFER_STEPS["whiten"] = Entry("lightppo.experience.normalisation:whitening")
    BUFFER_STEPS.register("clip", Entry("lightppo.experience.normalisation:clipping"))
    BUFFER_STEPS.register(
        "selected_tokens", Entry("lightppo.experience.token_selection:token_selection")
    )
    EARLY_STOPS.register("limits", Entry("lightppo.trainer.early_stop:early_stop"))
    NORMALISATIONS.register("levels", Entry("lightppo.experience.normalisation:normalisation"))
    NORMALISATIONS.register(
        "groups", Entry("lightppo.experience.normalisation:whitening_of_groups")
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
