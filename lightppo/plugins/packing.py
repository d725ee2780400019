"""Packed rows: several sequences in one row without padding, a prompt once for all its samples."""

from lightppo.option import register_section


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    register_section("packing", "lightppo.config.packing_options:PackingConfig", adds_to="training")
