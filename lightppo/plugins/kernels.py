"""The options of kernels."""

from lightppo.option import register_section


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    register_section("kernels", "lightppo.config.kernels_options:KernelConfig", adds_to="engine")
