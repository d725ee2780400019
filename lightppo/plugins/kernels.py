"""Cores of CPUs, and the options of kernels."""

from lightppo.option import register_section
from lightppo.plugin import RANK_START
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    RANK_START.register("host", Entry("lightppo.distributed.host_shares:host_shared"))
    register_section("kernels", "lightppo.config.kernels_options:KernelConfig", adds_to="engine")
