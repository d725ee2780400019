"""Faster decoding of the hf engine, if an option asks for it: CUDA graphs."""

from lightppo.option import register_section


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    register_section(
        "decoding", "lightppo.config.decoding_options:DecodingConfig", adds_to="engine"
    )
