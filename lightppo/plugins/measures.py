"""Measures: summaries of samples over all ranks, times and speeds, the line of a step and progress bars."""

from lightppo.option import register_section


def register() -> None:
    """Put these measures in the place of the core's."""
    register_section(
        "measures", "lightppo.config.measures_options:MeasuresConfig", adds_to="logging"
    )
