"""Signals."""

from lightppo.option import register_section


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    register_section("signals", "lightppo.config.ops_options:SignalConfig", adds_to="checkpoint")
