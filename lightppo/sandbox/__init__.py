"""Runs untrusted programs where they can do no harm; what they print or return comes back as text.

One door: ``SandboxPool(SandboxLimits(...)).run(code)`` gives a ``ProgramRun``. ``pool`` starts sandboxes, ``probe``
attacks each kind before use; ``supervisor`` and ``walls`` run inside. See ``docs/rewards.md``.
"""

from lightppo.sandbox.pool import ISOLATIONS, ProgramRun, SandboxLimits, SandboxPool, default_processes
from lightppo.sandbox.probe import PROTECTIONS

__all__ = ["ISOLATIONS", "PROTECTIONS", "ProgramRun", "SandboxLimits", "SandboxPool", "default_processes"]
