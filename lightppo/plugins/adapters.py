"""LoRA, and frozen weights in 4 bits."""

from lightppo.option import register_section


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    register_section("adapter", "lightppo.config.adapters_options:AdapterConfig")
