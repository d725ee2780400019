"""Brings the process up behind its walls, and ends it with the trainer."""

from __future__ import annotations

import json
import os
import select
import signal
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

from . import kernel, landlock, namespaces, seccomp, supervisor
from .walls import Walls

_SYSTEM = (
    "/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/etc/alternatives",
    "/etc/localtime", "/usr/share/zoneinfo",
)  # fmt: skip
_DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
_LOOK_SECONDS = 1.0
_LEAST_LANDLOCK = 3  # before, files that may be read could be emptied


def main() -> None:
    """Reads its orders from the first argument, as JSON: ``isolation``, ``site_packages``, ``bubblewrap``, ``inside``.

    Standard input brings requests, standard output takes reports; see :mod:`supervisor`.
    """
    orders = json.loads(sys.argv[1])
    os.umask(0o022)
    os.closerange(3, 1 << 16)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a namespace's first process is deaf only without handlers
    if orders.get("inside"):
        _serve(orders, _paths(orders["site_packages"])[0])
    parent = os.getppid()
    orders["from_root"] = os.geteuid() == 0
    _be_first_to_go()
    try:
        watched = _STARTS[orders["isolation"]](orders)
    except OSError as error:
        _refuse(error)
    os.close(1)
    _guard(watched, parent)


def _be_first_to_go() -> None:
    """Where memory is short, the kernel takes this process and not the trainer."""
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("1000")
    except OSError:
        pass


def _refuse(error: BaseException) -> None:
    body = json.dumps({"ready": False, "reason": f"{error}"}).encode()
    os.write(1, struct.pack(">I", len(body)) + body)
    os._exit(71)


def _guard(watched: int, parent: int) -> None:
    """Waits for the end of the process, or of the trainer, which takes the process with it."""
    poller = select.poll()
    descriptor = os.pidfd_open(watched)
    poller.register(descriptor, select.POLLIN)
    poller.register(0, 0)  # a hang-up is told all the same
    while not poller.poll(1000 * _LOOK_SECONDS) and os.getppid() == parent:
        pass
    os.kill(watched, signal.SIGKILL)
    os.waitpid(watched, 0)
    os._exit(0)


def _start_namespaces(orders: dict[str, Any]) -> int:
    readable, links = _paths(orders["site_packages"])

    def inside() -> None:
        try:
            has_proc = namespaces.build_root(readable, links)
        except OSError as error:
            _refuse(error)
        _serve(orders, readable, has_proc)

    return namespaces.fork_inside(inside)


def _start_bubblewrap(orders: dict[str, Any]) -> int:
    readable, links = _paths(orders["site_packages"])
    command = [orders["bubblewrap"], "--unshare-all", "--unshare-user", "--die-with-parent", "--as-pid-1",
               "--uid", str(namespaces.INNER_ID), "--gid", str(namespaces.INNER_ID), "--proc", "/proc"]  # fmt: skip
    package = os.path.dirname(os.path.realpath(__file__))
    for path in [*readable, os.path.realpath(sys.executable), package]:
        command += ["--ro-bind", path, path]
    for device in filter(os.path.exists, _DEVICES):
        command += ["--dev-bind", device, device]
    for place, target in links.items():
        command += ["--symlink", target, place]
    again = [os.path.realpath(sys.executable), *sys.orig_argv[1:-1], json.dumps(orders | {"inside": True})]
    command += ["--remount-ro", "/", "--chdir", "/", "--", *again]
    return _fork(lambda: os.execv(command[0], command))


def _start_landlock(orders: dict[str, Any]) -> int:
    if landlock.version() < _LEAST_LANDLOCK:
        raise OSError(f"Landlock is of version {landlock.version()}, needs {_LEAST_LANDLOCK} (Linux 6.2 or newer)")
    if not seccomp.available():
        raise OSError("the kernel filters no system calls, or they are unknown on this machine")
    return _start_plain(orders)


def _start_plain(orders: dict[str, Any]) -> int:
    readable, _ = _paths(orders["site_packages"])
    return _fork(lambda: _serve(orders, readable))


_STARTS: dict[str, Callable[[dict[str, Any]], int]] = {
    "namespaces": _start_namespaces,
    "bubblewrap": _start_bubblewrap,
    "landlock": _start_landlock,
    "none": _start_plain,
}


def _fork(main: Callable[[], None]) -> int:
    process = os.fork()
    if process == 0:
        try:
            kernel.die_with_parent()
            main()
        except BaseException as error:
            _refuse(error)
        os._exit(70)
    return process


def _serve(orders: dict[str, Any], readable: Sequence[str], has_proc: bool | None = None) -> None:
    try:
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        shown = has_proc if has_proc is not None else os.path.exists("/proc/self/status")
        shares_root = orders["from_root"] and os.getuid() == namespaces.INNER_ID
        walls = Walls(orders["isolation"], [*readable, *_DEVICES], shown, shares_root)
        os.chdir("/")
        sys.path[:] = [os.path.realpath(path) for path in [*sys.path, *orders["site_packages"]] if os.path.exists(path)]
        supervisor.serve(walls)
    except BaseException as error:
        _refuse(error)
    os._exit(0)


def _paths(site_packages: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """What programs may read: the interpreter's modules and shared libraries.

    Returns:
        real paths, none below another; symbolic links that lead to them, place → target.
    """
    wanted = [*_SYSTEM, *sys.path, *site_packages, os.path.join(sys.base_prefix, "lib"), *_library_folders()]
    there = [os.path.abspath(path) for path in wanted if os.path.exists(path)]
    real = {os.path.realpath(path) for path in there}
    readable = sorted(path for path in real if not any(path.startswith(other + "/") for other in real))
    links = {path: os.readlink(path) for path in there if os.path.islink(path)}
    return readable, {place: links[place] for place in links if not place.startswith(tuple(f"{p}/" for p in readable))}


def _library_folders() -> set[str]:
    """Folders of the libraries that are loaded now."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        mapped = {line.split(maxsplit=5)[-1].strip() for line in file}
    return {os.path.dirname(path) for path in mapped if path.startswith("/") and ".so" in path}
