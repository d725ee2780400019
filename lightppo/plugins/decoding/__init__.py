"""Faster decoding of the hf engine: continuous batching in slots and, if an option asks for them, CUDA graphs."""

from lightppo.option import register_section
from lightppo.plugin import CHECKS, DECODERS, DECODING_RUNNERS, Check
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    here = "lightppo.plugins.decoding"
    DECODERS.register("slots", Entry(f"{here}.slots:slots_for"))
    CHECKS.register("cuda_graphs", Check(f"{here}.graphs:check_device"))
    DECODING_RUNNERS.register("cuda_graphs", Entry(f"{here}.graphs:runner"))
    register_section("decoding", f"{here}.sections:DecodingConfig", adds_to="engine")
