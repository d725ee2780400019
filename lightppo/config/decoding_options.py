"""Options of decoding."""

from lightppo.option import Section, option


class DecodingConfig(Section, adds_to="engine", resume_safe=True):
    """CUDA graphs of the hf engine."""

    hf_cuda_graphs: bool = option(
        False,
        "GPU only: capture decoding steps as CUDA graphs. Needs full attention in every layer.",
        needs="rollout_engine=hf",
    )
