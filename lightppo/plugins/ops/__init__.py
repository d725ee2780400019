"""Signals, hanging ranks, files that survive a crash, URLs of storage."""


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
