"""Cadence: what is due every N episodes or seconds."""

from lightppo.option import register_section


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    register_section(
        "save_times", "lightppo.config.cadence_options:SaveTimesConfig", adds_to="checkpoint"
    )
