"""Other kernels for the same numbers: CPU linears, fused norms, CUDA graphs."""


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
