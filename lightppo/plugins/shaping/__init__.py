"""Shaping: scores before training, and returns as a critic learns them; docs/algorithms.md."""

from lightppo.option import register_section
from lightppo.plugin import SCORE_STEPS, VALUE_NORMS
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    here = "lightppo.plugins.shaping"
    register_section("shaping", f"{here}.sections:ShapingConfig", adds_to="reward")
    register_section("value_norm", f"{here}.sections:ValueNormConfig", adds_to="loss")
    # In the order in which they act, as docs/algorithms.md says.
    SCORE_STEPS.register("scale", Entry(f"{here}.scores:scale_step"))
    SCORE_STEPS.register("score_statistics", Entry(f"{here}.scores:running_norm_step"))
    SCORE_STEPS.register("dense", Entry(f"{here}.scores:dense_step"))
    SCORE_STEPS.register("stop_properly", Entry(f"{here}.scores:stop_properly_step"))
    SCORE_STEPS.register("overlong", Entry(f"{here}.scores:overlong_step"))
    SCORE_STEPS.register("zero", Entry(f"{here}.scores:zero_step"))
    VALUE_NORMS.register("running", Entry(f"{here}.running:value_norm"))
