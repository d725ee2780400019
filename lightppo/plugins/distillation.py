"""Distillation: a teacher, in these processes or on servers, judges the student's own samples; docs/algorithms.md."""

from lightppo.metric_names import SHOWN
from lightppo.option import register_section
from lightppo.plugin import (
    ADVANTAGE_TERMS,
    FROZEN_MODELS,
    METRICS,
    ROLLOUT_PASSES,
    SCORE_TERMS,
    PassEntry,
)
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin`` and of algorithms."""
    from lightppo.algorithms.entries import ADVANTAGE_ESTIMATORS
    from lightppo.config.distillation_options import ON_POLICY_DISTILL

    register_section("distill", "lightppo.config.distillation_options:DistillConfig")
    ADVANTAGE_ESTIMATORS.register("on_policy_distill", ON_POLICY_DISTILL)
    FROZEN_MODELS.register("teacher", Entry("lightppo.config.distillation_options:teacher_of"))
    ROLLOUT_PASSES.register(
        "teacher", PassEntry("lightppo.trainer.distillation:teacher_pass", needs="teacher_pretrain")
    )
    ADVANTAGE_TERMS.register("teacher", Entry("lightppo.trainer.distillation:advantage_term"))
    SCORE_TERMS.register("teacher", Entry("lightppo.trainer.distillation:score_term"))
    SHOWN["teacher kl"] = "rollout/teacher_kl"
    METRICS.register(
        "rollout",
        {
            "teacher_kl": "mean log prob - teacher's log prob per token: unbiased KL; with --distill_by loss as measured "
            "in training (nats)",
            "teacher_log_prob": "mean log prob per trained token under the teacher",
        },
    )
    METRICS.register(
        "train",
        {
            "teacher_top_mass": "mean probability that the teacher gives to its --distill_topk tokens",
            "distill_loss": "divergence from the teacher's distributions, before its coefficient (--distill_by loss)",
        },
    )
