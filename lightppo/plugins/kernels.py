"""Kernels: log probs without logits, fused norms, products and cores of CPUs; if asked for: compiled layers, Liger's."""

from lightppo.option import register_section
from lightppo.plugin import (
    HEAD_SCORES,
    KERNELS,
    MODULES,
    PREPARATIONS,
)
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    MODULES.register("cpu_linear", Entry("lightppo.models.kernels.cpu:accelerate_on_cpu"))
    MODULES.register("fused", Entry("lightppo.models.kernels.fused:fuse"))
    HEAD_SCORES.register("head", Entry("lightppo.models.kernels.scoring_head:scores_by_head"))
    KERNELS.register("linear", Entry("lightppo.models.kernels.matmul:linear"))
    KERNELS.register("product", Entry("lightppo.models.kernels.matmul:product"))
    KERNELS.register("head_rows", Entry("lightppo.models.kernels.invariant:head_rows"))
    KERNELS["decoding"] = Entry("lightppo.models.kernels.cpu:packed_weights")
    PREPARATIONS.register(
        "activation_offload", Entry("lightppo.models.kernels.offload:prepare_offload")
    )
    PREPARATIONS.register("liger", Entry("lightppo.models.kernels.liger:prepare_liger"))
    PREPARATIONS.register(
        "batch_invariant", Entry("lightppo.models.kernels.invariant:prepare_invariant")
    )
    PREPARATIONS.register("compile", Entry("lightppo.models.kernels.layers:prepare_compiled"))
    register_section("kernels", "lightppo.config.kernels_options:KernelConfig", adds_to="engine")
