"""What single families of models and foreign checkpoints need: attention, value heads, changes of configs."""

from lightppo.option import register_section
from lightppo.plugin import ATTENTION, MODEL_CONFIGS, VALUE_HEADS
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    ATTENTION.register(
        "families", Entry("lightppo.models.attention.attention_choice:resolve_attn_implementation")
    )
    MODEL_CONFIGS.register("override_config", Entry("lightppo.models.config_changes:override"))
    VALUE_HEADS.register("families", Entry("lightppo.models.value_heads:head_from_checkpoint"))
    register_section(
        "overrides", "lightppo.config.families_options:OverrideConfig", adds_to="model"
    )
