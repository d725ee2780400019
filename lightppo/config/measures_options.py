"""Options of measuring."""

from lightppo.option import Section, option


class MeasuresConfig(Section, adds_to="logging", resume_safe=True):
    """Speed."""

    peak_tflops: float | None = option(
        None, "Peak speed of one device in the training type, for perf/mfu.", "TFLOP/s", gt=0
    )
