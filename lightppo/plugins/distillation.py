"""Distillation: a teacher, in these processes or on servers, judges the student's own samples; docs/algorithms.md."""

from lightppo.metric_names import SHOWN
from lightppo.option import register_section
from lightppo.plugin import (
    FROZEN_MODELS,
    METRICS,
)
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    register_section("distill", "lightppo.config.distillation_options:DistillConfig")
    FROZEN_MODELS.register("teacher", Entry("lightppo.config.distillation_options:teacher_of"))
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
