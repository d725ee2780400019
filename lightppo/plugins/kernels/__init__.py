"""Kernels that are chosen by options: CUDA graphs of decoding steps."""

from lightppo.plugin import DECODING_RUNNERS
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    DECODING_RUNNERS.register("cuda_graphs", Entry("lightppo.plugins.kernels.graphs:runner"))
