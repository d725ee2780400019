"""The names that other trainers have for options."""


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
