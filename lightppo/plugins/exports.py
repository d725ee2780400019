"""Models for transformers while a run goes on: at times of their own, with checkpoints, the best one."""

from lightppo.option import register_section


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    register_section(
        "exports", "lightppo.config.exports_options:ExportConfig", adds_to="checkpoint"
    )
    register_section("best", "lightppo.config.exports_options:BestConfig", adds_to="evaluation")
