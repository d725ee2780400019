"""Distillation: a teacher, in these processes or on servers, judges the student's own samples; docs/algorithms.md."""

from lightppo.option import register_section
from lightppo.plugin import FROZEN_MODELS
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    register_section("distill", "lightppo.config.distillation_options:DistillConfig")
    FROZEN_MODELS.register("teacher", Entry("lightppo.config.distillation_options:teacher_of"))
