"""LoRA, and frozen weights in 4 bits."""


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
