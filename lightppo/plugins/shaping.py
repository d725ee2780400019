"""Shaping: scores before training, and returns as a critic learns them; docs/algorithms.md."""

from lightppo.plugin import SCORE_STEPS, VALUE_NORMS
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    # In the order in which they act, as docs/algorithms.md says.
    SCORE_STEPS.register("scale", Entry("lightppo.experience.scores:scale_step"))
    SCORE_STEPS.register("score_statistics", Entry("lightppo.experience.scores:running_norm_step"))
    SCORE_STEPS.register("dense", Entry("lightppo.experience.scores:dense_step"))
    SCORE_STEPS.register("stop_properly", Entry("lightppo.experience.scores:stop_properly_step"))
    SCORE_STEPS.register("overlong", Entry("lightppo.experience.scores:overlong_step"))
    SCORE_STEPS.register("zero", Entry("lightppo.experience.scores:zero_step"))
    VALUE_NORMS.register("running", Entry("lightppo.experience.running:value_norm"))
