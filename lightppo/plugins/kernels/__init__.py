"""Kernels: log probs without logits, fused norms, products and cores of CPUs; if asked for: compiled layers, Liger's."""

from lightppo.option import register_section
from lightppo.plugin import (
    DECODING_RUNNERS,
    ENTROPY_SAMPLES,
    HEAD_SCORES,
    KERNELS,
    MODULES,
    PREPARATIONS,
    RANK_START,
)
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    DECODING_RUNNERS.register("invariant", Entry("lightppo.plugins.kernels.invariant:runner"))
    RANK_START.register("host", Entry("lightppo.plugins.kernels.cores:host_shared"))
    MODULES.register("cpu_linear", Entry("lightppo.plugins.kernels.cpu:accelerate_on_cpu"))
    MODULES.register("fused", Entry("lightppo.plugins.kernels.fused:fuse"))
    HEAD_SCORES.register("head", Entry("lightppo.plugins.kernels.scoring_head:scores_by_head"))
    ENTROPY_SAMPLES.register("stride", Entry("lightppo.plugins.kernels.entropy_sample:sampling"))
    KERNELS.register("linear", Entry("lightppo.plugins.kernels.matmul:linear"))
    KERNELS.register("product", Entry("lightppo.plugins.kernels.matmul:product"))
    KERNELS.register("head_rows", Entry("lightppo.plugins.kernels.invariant:head_rows"))
    KERNELS["decoding"] = Entry("lightppo.plugins.kernels.cpu:packed_weights")
    PREPARATIONS.register(
        "activation_offload", Entry("lightppo.plugins.kernels.offload:prepare_offload")
    )
    PREPARATIONS.register("liger", Entry("lightppo.plugins.kernels.liger:prepare_liger"))
    PREPARATIONS.register(
        "batch_invariant", Entry("lightppo.plugins.kernels.invariant:prepare_invariant")
    )
    PREPARATIONS.register("compile", Entry("lightppo.plugins.kernels.layers:prepare_compiled"))
    register_section("kernels", "lightppo.plugins.kernels.sections:KernelConfig", adds_to="engine")
