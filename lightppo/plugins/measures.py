"""Measures: summaries of samples over all ranks, times and speeds, the line of a step and progress bars."""

from lightppo.logging import phase_names as measured
from lightppo.option import register_section
from lightppo.plugin import CALLBACKS, MEASURING, METRICS, CallbackEntry
from lightppo.table import Entry


def register() -> None:
    """Put these measures in the place of the core's."""
    register_section(
        "measures", "lightppo.config.measures_options:MeasuresConfig", adds_to="logging"
    )
    MEASURING["samples"] = Entry("lightppo.logging.summaries:SampleSummaries")
    MEASURING["timer"] = Entry("lightppo.logging.phase_timer:PhaseTimer")
    MEASURING["line"] = Entry("lightppo.logging.progress:lines_from")
    MEASURING["steps"] = Entry("lightppo.logging.progress:bar_of_steps")
    MEASURING["part"] = Entry("lightppo.logging.progress:bar_of_part")
    METRICS.register("rollout", measured.ROLLOUT)
    METRICS.register(
        "perf", measured.PERF, about="times of rank 0, and speeds of all ranks based on them"
    )
    METRICS.register("perf", "lightppo.logging.phase_names:times_of_parts")
    CALLBACKS.register("speeds", CallbackEntry("lightppo.logging.speeds:speeds"))
