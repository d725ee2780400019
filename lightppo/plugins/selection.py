"""Which sampled groups a step trains on, and on which rank: dynamic sampling, best of n, balanced ranks."""

from lightppo.option import register_section


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    register_section(
        "selection", "lightppo.config.selection_options:SelectionConfig", adds_to="sampling"
    )
    register_section(
        "balancing", "lightppo.config.selection_options:BalancingConfig", adds_to="training"
    )
