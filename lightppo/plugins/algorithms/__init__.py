"""Corrections, rejections, and a teacher on servers."""


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
