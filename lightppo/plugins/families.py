"""Changes of configs of models: ``--override_config``."""

from lightppo.option import register_section


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    register_section(
        "overrides", "lightppo.config.families_options:OverrideConfig", adds_to="model"
    )
