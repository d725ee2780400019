"""Distillation: a teacher, in these processes or on servers, judges the student's own samples; docs/algorithms.md."""

from lightppo.plugin import (
    ADVANTAGE_TERMS,
    ROLLOUT_PASSES,
    SCORE_TERMS,
    PassEntry,
)
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin`` and of algorithms."""
    from lightppo.algorithms.entries import ADVANTAGE_ESTIMATORS
    from lightppo.config.algorithm_options import ON_POLICY_DISTILL

    ADVANTAGE_ESTIMATORS.register("on_policy_distill", ON_POLICY_DISTILL)
    ROLLOUT_PASSES.register(
        "teacher", PassEntry("lightppo.trainer.distillation:teacher_pass", needs="teacher_pretrain")
    )
    ADVANTAGE_TERMS.register("teacher", Entry("lightppo.trainer.distillation:advantage_term"))
    SCORE_TERMS.register("teacher", Entry("lightppo.trainer.distillation:score_term"))
