"""Options of other kernels."""

from lightppo.option import Section, option


class KernelConfig(Section, adds_to="engine", resume_safe=True):
    """CUDA graphs of the hf engine."""

    hf_cuda_graphs: bool = option(
        False,
        "GPU only: capture decoding steps as CUDA graphs. Needs full attention in every layer.",
        needs="rollout_engine=hf",
    )
    batch_invariant: bool = option(
        False,
        "CPU: fix the order of sums, so that sampling and training give the same log probs to the bit. Costs time.",
        needs="rollout_engine=hf",
    )
