"""LoRA, and frozen weights in 4 bits."""

from lightppo.option import register_section
from lightppo.plugin import LOADING, PREPARATIONS
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    LOADING.register("load_in_4bit", Entry("lightppo.models.adapters.quantised:quantise_body"))
    PREPARATIONS.register("lora", Entry("lightppo.models.adapters.lora:prepare"))
    register_section("adapter", "lightppo.config.adapters_options:AdapterConfig")
