"""Everything that the core trains without: engines, adapters, verifiers, records and other plugins."""

import importlib

# In this order: what a run calls of several plugins, it calls in the order in which they are registered.
SHIPPED = (
    "episodes",
    "supervised",
    "compat",
)


def register() -> None:
    """Add what every plugin beside the core brings to the tables of ``lightppo.plugin``."""
    for name in SHIPPED:
        importlib.import_module(f"{__name__}.{name}").register()
