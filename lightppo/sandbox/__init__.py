"""Runs programs that nobody has read, in processes that can do no harm. What they print or return comes back as text.

One door: ``SandboxPool(SandboxLimits(...)).run(code)`` gives a ``ProgramRun``. ``pool`` starts sandboxes and talks to
them, ``probe`` attacks each kind before it is used; ``supervisor`` and ``walls`` run inside, on the standard library
alone. ``docs/rewards.md`` says what is kept out on which machine.
"""

from lightppo.sandbox.pool import ISOLATIONS, ProgramRun, SandboxLimits, SandboxPool, default_processes
from lightppo.sandbox.probe import PROTECTIONS

__all__ = ["ISOLATIONS", "PROTECTIONS", "ProgramRun", "SandboxLimits", "SandboxPool", "default_processes"]
