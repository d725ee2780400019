"""Runs untrusted programs where they can do no harm.

``SandboxPool(SandboxLimits(...)).run(code)`` gives a ``ProgramRun``. ``supervisor`` and ``walls`` run inside the
sandbox; ``docs/rewards.md`` says what is kept out on which machine.
"""

from lightppo.verifiers.sandbox.pool import (
    ISOLATIONS,
    PROTECTIONS,
    ProgramRun,
    SandboxLimits,
    SandboxPool,
)

__all__ = [
    "ISOLATIONS",
    "PROTECTIONS",
    "ProgramRun",
    "SandboxLimits",
    "SandboxPool",
]
