"""Other kernels, where options ask for them: CUDA graphs of decoding steps, compiled layers, Liger's."""

from lightppo.option import register_section
from lightppo.plugin import CHECKS, DECODING_RUNNERS, PREPARATIONS, Check
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    CHECKS.register("cuda_graphs", Check("lightppo.plugins.kernels.graphs:check_device"))
    DECODING_RUNNERS.register("cuda_graphs", Entry("lightppo.plugins.kernels.graphs:runner"))
    PREPARATIONS.register("liger", Entry("lightppo.plugins.kernels.liger:prepare_liger"))
    PREPARATIONS.register("compile", Entry("lightppo.plugins.kernels.layers:prepare_compiled"))
    register_section("kernels", "lightppo.plugins.kernels.sections:KernelConfig", adds_to="engine")
