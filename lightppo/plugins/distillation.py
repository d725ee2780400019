"""Distillation: a teacher, in these processes or on servers, judges the student's own samples; docs/algorithms.md."""

from lightppo.option import register_section


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    register_section("distill", "lightppo.config.distillation_options:DistillConfig")
