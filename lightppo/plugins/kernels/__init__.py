"""Kernels: fused norms, matrix products on CPUs; if options ask for them, compiled layers and Liger's."""

from lightppo.plugin import KERNELS, MODULES, PREPARATIONS
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    MODULES.register("cpu_linear", Entry("lightppo.plugins.kernels.cpu:accelerate_on_cpu"))
    MODULES.register("fused", Entry("lightppo.plugins.kernels.fused:fuse"))
    KERNELS["linear"] = Entry("lightppo.plugins.kernels.matmul:linear")
    KERNELS["product"] = Entry("lightppo.plugins.kernels.matmul:product")
    KERNELS["decoding"] = Entry("lightppo.plugins.kernels.cpu:packed_weights")
    PREPARATIONS.register(
        "activation_offload", Entry("lightppo.plugins.kernels.offload:prepare_offload")
    )
    PREPARATIONS.register("liger", Entry("lightppo.plugins.kernels.liger:prepare_liger"))
    PREPARATIONS.register("compile", Entry("lightppo.plugins.kernels.layers:prepare_compiled"))
