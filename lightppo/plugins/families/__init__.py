"""What single families of models and foreign checkpoints need: attention, value heads, changes of configs."""

from lightppo.option import register_section
from lightppo.plugin import ATTENTION, CHECKS, MODEL_CONFIGS, VALUE_HEADS, Check
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    here = "lightppo.plugins.families"
    ATTENTION.register("families", Entry(f"{here}.attention_choice:resolve_attn_implementation"))
    MODEL_CONFIGS.register("override_config", Entry(f"{here}.config_changes:override"))
    VALUE_HEADS.register("families", Entry(f"{here}.value_heads:head_from_checkpoint"))
    CHECKS.register(
        "vocabularies", Check(f"{here}.vocabularies:check_vocabularies", when="tokenizer")
    )
    register_section("overrides", f"{here}.sections:OverrideConfig", adds_to="model")
