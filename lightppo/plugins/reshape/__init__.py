"""Checkpoints for another number of ranks, or another ZeRO stage."""


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
