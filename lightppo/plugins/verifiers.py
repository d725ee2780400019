"""Options of rewards that check answers."""

from lightppo.option import register_section


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    register_section(
        "built_in", "lightppo.config.verifiers_options:BuiltInConfig", adds_to="verifier"
    )
