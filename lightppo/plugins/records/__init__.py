"""What a run records: its folder, metrics, samples, trackers, alarms."""


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
