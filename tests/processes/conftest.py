"""What tests of this room share, with those of other folders too."""

import os
import socket
from pathlib import Path

import pytest
from support.fixtures.rollouts import _servers, make_rollout, make_server, rollouts, server

__all__ = ["_servers", "make_rollout", "make_server", "rollouts", "server", "system"]

# Python runs this first in each process that is started. psutil may use what it likes: it knows many systems.
SITECUSTOMIZE = """
import asyncio, builtins, ctypes, os, signal, socket, subprocess, sys, sysconfig, urllib.request
import psutil

sysconfig.get_config_vars()  # kept, as of the true system

for module, names in (
    (os, "pidfd_open waitid P_PIDFD sched_getaffinity sched_setaffinity memfd_create eventfd"),
    (socket, "SOCK_SEQPACKET SO_PEERCRED"),
    (signal, "pidfd_send_signal sigtimedwait sigwaitinfo"),
):
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)

def hidden(function):
    def look(path, *args, **kwargs):
        caller = sys._getframe(1).f_globals["__name__"]
        if str(path).startswith("/proc/") and not caller.startswith("psutil"):
            raise FileNotFoundError(f"there is no {path}")
        return function(path, *args, **kwargs)
    return look

builtins.open = hidden(open)
for module, names in ((os, "listdir scandir stat readlink open"), (__import__("io"), "open")):
    for name in names.split():
        setattr(module, name, hidden(getattr(module, name)))
ctypes.CDLL = lambda *_: None  # no prctl
sys.platform = "darwin"
"""


@pytest.fixture(params=["linux", "posix_only"])
def system(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path | None:
    """This system, and one that has nothing but POSIX: the rest is hidden by the file that is returned."""
    if request.param == "linux":
        return None
    for module, name in [(os, "pidfd_open"), (os, "waitid"), (socket, "SOCK_SEQPACKET")]:
        monkeypatch.delattr(module, name, raising=False)
    folder = tmp_path / "posix_only"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    return folder / "sitecustomize.py"
