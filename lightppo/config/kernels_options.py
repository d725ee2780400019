"""Options of other kernels."""

from collections.abc import Iterator
from typing import Any

from lightppo.option import Section, option


class KernelConfig(Section, adds_to="engine", resume_safe=True):
    """The order of sums."""

    batch_invariant: bool = option(
        False,
        "CPU only: sum in one order, so that sampling and training give the same log probs to the bit, whatever time "
        "environments take. Takes time.",
        needs="rollout_engine=hf",
    )

    @staticmethod
    def problems(options: Any) -> Iterator[str]:
        if not options.batch_invariant:
            return
        others = {
            "--torch_compile": options.torch_compile,
            "--use_liger_kernel": options.use_liger_kernel,
            "--flash_attn": options.flash_attn,
            "--hf_cuda_graphs": options.hf_cuda_graphs,
            "--load_in_4bit": getattr(options, "load_in_4bit", False),
            f"--attn_implementation {options.attn_implementation}": (
                options.attn_implementation not in ("auto", "sdpa")
            ),
        }
        for name in (name for name, is_on in others.items() if is_on):
            yield f"--batch_invariant does not know the order of sums with {name}: leave one out"
