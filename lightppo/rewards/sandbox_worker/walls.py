"""The walls around programs as they stand on this machine: what is closed, counted and killed, and how."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

from . import kernel, landlock, namespaces, seccomp

_NOBODY = 65534
_MEBIBYTE = 1 << 20
_FILES = 1024
_TRUSTED_PROCESSES = 2  # ours that may count under the programs' id
_SPARE_TASKS = 1024  # where the limit of processes counts all of a user's
_COUNT_SECONDS = 1.0
_WRITABLE_DEVICES = ("/dev/null", "/dev/full")


class Walls:
    """What stands between a program and the rest.

    Args:
        isolation: ``namespaces``, ``bubblewrap``, ``landlock`` or ``none``.
        readable: files and folders that programs may read.
        has_proc: /proc shows the processes. Without, a program may not fork.
        shares_root: programs run under the id of the machine's root, which no limit of processes holds; nor may they
            fork then.
    """

    def __init__(self, isolation: str, readable: Sequence[str], has_proc: bool, shares_root: bool) -> None:
        self._own_namespaces = isolation in ("namespaces", "bubblewrap")
        self._own_folder = isolation == "namespaces"
        # several processes only where they can be counted
        self._own_processes = self._own_namespaces and has_proc and not shares_root
        self._strict = isolation != "none"
        self._readable = [path for path in readable if os.path.exists(path)]
        self._has_proc = has_proc
        self._landlock = landlock.version()
        self._seccomp = seccomp.available()
        self._become_nobody = not self._own_namespaces and os.geteuid() == 0 and _nobody_can_read(self._readable)
        self._first = True
        self._user_tasks = (0.0, 0)
        layers = {isolation: self._own_namespaces, "landlock": self._landlock, "seccomp": self._seccomp}
        self.layers = [name for name, there in layers.items() if there]

    def prepare(self, limits: dict[str, Any]) -> None:
        """An empty folder for the next program, and the limit of processes as the kernel counts them here."""
        if self._own_folder:
            namespaces.renew_folder(limits["file_mb"] * _MEBIBYTE, _FILES, self._first)
            self._first = False
        limits["processes"] = limits["max_processes"] + _TRUSTED_PROCESSES
        if not self._own_namespaces:
            limits["processes"] = self._tasks_of_user() + _SPARE_TASKS

    def close(self) -> None:
        """In a program's process: gives up all rights, for good. A wall that must stand and does not is an OSError."""
        os.chdir("/tmp" if self._own_folder else "/")
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        if self._own_folder:
            namespaces.become_program()
        elif self._become_nobody:
            os.setgroups([])
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        if not self._own_namespaces:  # a PID namespace ends with its first process
            kernel.die_with_parent()
        kernel.drop_capabilities()
        writable = [path for path in _WRITABLE_DEVICES if os.path.exists(path)]
        steps = []
        if self._landlock:
            steps.append(lambda: landlock.restrict(self._readable, writable + ["/tmp"] * self._own_folder))
        if self._seccomp:
            processes, files = self._own_processes, self._own_namespaces
            steps.append(lambda: seccomp.install(own_processes=processes, own_files=files))
        for step in steps:
            try:
                step()
            except OSError:
                if self._strict:
                    raise

    def excess(self, process: int, limits: dict[str, Any]) -> str:
        """``memory`` or ``processes`` where all of a program's processes together have too much, else nothing."""
        if not self._has_proc:
            return ""
        kilobytes = tasks = 0
        for status in _statuses() if self._own_namespaces else _statuses([process]):
            kilobytes += sum(int(status.get(key, "0").split()[0]) for key in ("RssAnon", "RssShmem"))
            tasks += int(status.get("Threads", 1))
        if tasks > limits["max_processes"]:
            return "processes"
        return "memory" if kilobytes > limits["memory_mb"] * 1024 else ""

    def kill(self, process: int, seconds: float) -> int:
        """Kills a program and all that came of it, and waits until nothing is left.

        Returns:
            The program's wait status.

        Raises:
            OSError: something is left after ``seconds``.
        """
        end = time.monotonic() + seconds
        status = None
        while time.monotonic() < end:
            self._signal_all(process, status is None)
            try:
                ended, its_status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                if status is None:
                    raise
                return status
            if ended == process:
                status = its_status
            elif ended == 0:
                time.sleep(0.0005)
        raise OSError("processes of a program could not be killed")

    def _signal_all(self, process: int, running: bool) -> None:
        if os.getpid() == 1:
            targets = [-1]
        else:
            targets = [process, -process] if running else []
            if not self._seccomp:  # it could fork, and leave its group
                targets += [pid for pid, status in _processes() if status.get("PPid") == str(os.getpid())]
        for target in targets:
            with contextlib.suppress(OSError):  # nobody is left
                os.kill(target, signal.SIGKILL)

    def _tasks_of_user(self) -> int:
        """Threads of the programs' user on the whole machine, counted once a second."""
        now = time.monotonic()
        if now - self._user_tasks[0] > _COUNT_SECONDS:
            user = str(_NOBODY if self._become_nobody else os.getuid())
            statuses = [status for status in _statuses() if status.get("Uid", "").split()[:1] == [user]]
            self._user_tasks = (now, sum(int(status.get("Threads", 1)) for status in statuses))
        return self._user_tasks[1]


def _statuses(processes: Sequence[int] | None = None) -> Iterator[dict[str, str]]:
    return (status for pid, status in _processes(processes) if pid != os.getpid())


def _processes(processes: Sequence[int] | None = None) -> Iterator[tuple[int, dict[str, str]]]:
    for name in map(str, processes) if processes is not None else os.listdir("/proc"):
        if not name.isdecimal():
            continue
        try:
            with open(f"/proc/{name}/status", encoding="utf-8", errors="replace") as file:
                lines = [line.partition(":") for line in file]
        except OSError:  # it has just ended
            continue
        yield int(name), {key: value.strip() for key, _, value in lines}


def _nobody_can_read(paths: Sequence[str]) -> bool:
    """Whether the interpreter's files are open to a user without any rights."""
    process = os.fork()
    if process == 0:
        try:
            os.setgroups([])
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
            os._exit(0 if all(os.access(path, os.R_OK) for path in paths) else 1)
        finally:
            os._exit(1)
    return os.waitpid(process, 0)[1] == 0
