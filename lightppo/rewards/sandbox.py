"""Runs programs that nobody has read, in processes that can do no harm. What they print or return comes back as text.

The outer half: it starts the processes of :mod:`lightppo.rewards.sandbox_worker`, looks whether their walls hold,
hands them programs and takes reports. ``docs/verifiers.md`` says what is kept out on which machine.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import weakref
from collections.abc import Sequence
from typing import Any

from lightppo.errors import SandboxError, SandboxRefusedError
from lightppo.rewards.killable import default_processes
from lightppo.rewards.sandbox_probe import PROTECTIONS
from lightppo.rewards.sandbox_process import ProgramRun, Sandbox, SandboxLimits

__all__ = ["ISOLATIONS", "ProgramRun", "SandboxError", "SandboxLimits", "SandboxPool", "SandboxRefusedError"]

logger = logging.getLogger(__name__)

ISOLATIONS = ("namespaces", "bubblewrap", "landlock")  # tried in this order; "none" only where it is allowed
_IDLE_SECONDS = 3600.0  # each program has its own, shorter limits


class SandboxPool:
    """Sandboxes for the threads of one rank, with the strongest isolation that this machine allows.

    Args:
        limits: of each program.
        code_processes: how many programs run at a time; ``None``: as many as this rank has cores.
        allow_unsafe_code_execution: where no isolation is to be had, run programs all the same, with limits on time and
            memory only. They can then read, change and send away whatever this user can.
        isolations: what is tried, best first.

    Raises:
        SandboxRefusedError: no isolation keeps out everything of
            :data:`~lightppo.rewards.sandbox_probe.PROTECTIONS`; the text says which and why.
    """

    def __init__(
        self,
        limits: SandboxLimits | None = None,
        *,
        code_processes: int | None = None,
        allow_unsafe_code_execution: bool = False,
        isolations: Sequence[str] = ISOLATIONS,
    ) -> None:
        code_processes = default_processes() if code_processes is None else code_processes
        if code_processes < 1:
            raise ValueError(f"--code_processes must be at least 1, got {code_processes}")
        if sys.platform != "linux":
            raise SandboxRefusedError("code can be run on Linux only; use --sandbox_fusion_url")
        self.limits = limits or SandboxLimits()
        self.size = code_processes
        first, self.protections = self._first(isolations, allow_unsafe_code_execution)
        self.isolation, self.layers = first.isolation, first.layers
        self._sandboxes = [first]
        self._close = weakref.finalize(self, _close_all, self._sandboxes, os.getpid())
        while len(self._sandboxes) < code_processes:
            self._sandboxes.append(Sandbox(self.isolation, self.limits))
        self._idle: queue.SimpleQueue[Sandbox] = queue.SimpleQueue()
        for sandbox in self._sandboxes:
            self._idle.put(sandbox)
        missing = [name for name in PROTECTIONS if name not in self.protections]
        level = logging.WARNING if missing else logging.INFO
        logger.log(level, "code sandbox: %s; not kept out: %s", ", ".join(self.layers) or "none", missing or "nothing")

    def _first(self, isolations: Sequence[str], allow_unsafe: bool) -> tuple[Sandbox, set[str]]:
        reasons = []
        for isolation in [*isolations, *["none"] * allow_unsafe]:
            try:
                sandbox = Sandbox(isolation, self.limits)
                held = sandbox.attack()
            except SandboxError as error:
                reasons.append(f"{isolation}: {error}")
                continue
            missing = [f"{name} ({text})" for name, text in PROTECTIONS.items() if name not in held]
            if not missing or isolation == "none":
                return sandbox, held
            sandbox.close()
            reasons.append(f"{isolation}: does not give {', '.join(missing)}")
        raise SandboxRefusedError(
            f"no sandbox for code on this machine: {'; '.join(reasons)}. See docs/verifiers.md for what it needs, use "
            "--sandbox_fusion_url, or set --allow_unsafe_code_execution in a throw-away container"
        )

    def run(self, code: str, **options: Any) -> ProgramRun:
        """:meth:`Sandbox.run` in the next idle sandbox; a sandbox that fails is replaced, and the program run again.

        Raises:
            SandboxError: two sandboxes failed with it.
        """
        if not self._close.alive:
            raise SandboxError("the sandbox is closed")
        failure = None
        for _ in range(2):
            try:
                sandbox = self._idle.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                raise SandboxError(f"no sandbox was idle for {_IDLE_SECONDS:g} s") from None
            try:
                if not sandbox.running:
                    sandbox.start()
                return sandbox.run(code, **options)
            except SandboxError as error:
                failure = error
                logger.warning("code sandbox: %s; replaced", error)
            finally:
                self._idle.put(sandbox)
        raise SandboxError(f"the sandbox failed twice: {failure}")

    def close(self) -> None:
        """Ends all sandboxes."""
        self._close()

    def __enter__(self) -> SandboxPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close_all(sandboxes: list[Sandbox], owner: int) -> None:
    if os.getpid() == owner:  # a fork of the trainer must not end what it does not own
        for sandbox in sandboxes:
            sandbox.close()
