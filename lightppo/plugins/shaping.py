"""Shaping: scores before training, and returns as a critic learns them; docs/algorithms.md."""

from lightppo.option import register_section


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    register_section("shaping", "lightppo.config.shaping_options:ShapingConfig", adds_to="reward")
    register_section(
        "value_norm", "lightppo.config.shaping_options:ValueNormConfig", adds_to="loss"
    )
