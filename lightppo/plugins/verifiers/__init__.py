"""Rewards that check answers: mathematics, formats, programs."""


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
