"""Measures: summaries of samples over all ranks, times and speeds, the line of a step and progress bars."""

from lightppo.option import register_section
from lightppo.plugin import CALLBACKS, MEASURING, METRICS, CallbackEntry
from lightppo.plugins.measures import measured
from lightppo.table import Entry


def register() -> None:
    """Put these measures in the place of the core's."""
    here = "lightppo.plugins.measures"
    register_section("measures", f"{here}.sections:MeasuresConfig", adds_to="logging")
    MEASURING["samples"] = Entry(f"{here}.summaries:SampleSummaries")
    MEASURING["timer"] = Entry(f"{here}.timer:PhaseTimer")
    MEASURING["line"] = Entry(f"{here}.pace:lines_from")
    MEASURING["steps"] = Entry(f"{here}.pace:bar_of_steps")
    MEASURING["part"] = Entry(f"{here}.pace:bar_of_part")
    METRICS.register("rollout", measured.ROLLOUT)
    METRICS.register(
        "perf", measured.PERF, about="times of rank 0, and speeds of all ranks based on them"
    )
    METRICS.register("perf", f"{here}.measured:times_of_parts")
    CALLBACKS.register("speeds", CallbackEntry(f"{here}.speeds:speeds"))
