"""Signals, hanging ranks, files that survive a crash, URLs of storage."""

from lightppo.option import register_section
from lightppo.plugin import CALLBACKS, CallbackEntry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    CALLBACKS.register(
        "signals",
        CallbackEntry("lightppo.distributed.signals:StopAtSignal", after_yours=True),
    )
    register_section("signals", "lightppo.config.ops_options:SignalConfig", adds_to="checkpoint")
