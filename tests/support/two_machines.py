"""Two machines on one: network namespaces joined by a cable, with host names and /etc/hosts as Debian writes them."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ADDRESSES = ("10.77.0.1", "10.77.0.2")
HOSTS = ("node-a", "node-b")


@dataclass(frozen=True)
class TwoMachines:
    """``names``: of the network namespaces; ``folder`` holds what differs between the machines."""

    names: tuple[str, str]
    folder: Path

    def command(self, node: int, words: Sequence[str]) -> list[str]:
        """A command that runs ``words`` on a machine."""
        setup = [f"hostname {HOSTS[node]}", f"mount --bind {self.folder / HOSTS[node]} /etc/hosts"]
        shell = f'{" && ".join(setup)} && exec "$@"'
        inside = ["unshare", "--uts", "--mount", "sh", "-c", shell, "sh", *words]
        return ["ip", "netns", "exec", self.names[node], *inside]

    def cut(self) -> None:
        """Pull the cable."""
        subprocess.run(["ip", "-n", self.names[1], "link", "set", "eth0", "down"], check=True)

    def mend(self) -> None:
        """Put it back."""
        subprocess.run(["ip", "-n", self.names[1], "link", "set", "eth0", "up"], check=True)


@contextmanager
def two_machines(folder: Path) -> Iterator[TwoMachines]:
    """Two machines that reach each other at ``ADDRESSES`` and by ``HOSTS``; gone afterwards."""
    names = (f"lightppo-{os.getpid()}-a", f"lightppo-{os.getpid()}-b")
    for host in HOSTS:
        lines = ["127.0.0.1 localhost", f"127.0.1.1 {host}"]
        lines += [f"{address} {other}" for address, other in zip(ADDRESSES, HOSTS) if other != host]
        (folder / host).write_text("\n".join(lines) + "\n")
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        link = ["ip", "link", "add", "eth0", "netns", names[0], "type", "veth"]
        subprocess.run([*link, "peer", "name", "eth0", "netns", names[1]], check=True)
        for name, address in zip(names, ADDRESSES):
            subprocess.run(
                ["ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0"], check=True
            )
            for device in ("lo", "eth0"):
                subprocess.run(["ip", "-n", name, "link", "set", device, "up"], check=True)
        yield TwoMachines(names, folder)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def enter_network(name: str) -> None:
    """This thread, and those that it starts, in a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{name}") as namespace:
        if libc.setns(namespace.fileno(), 0x40000000):  # CLONE_NEWNET
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {name}")


def why_not() -> str | None:
    """What keeps two machines from being made here; None if nothing does."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "needs ip (iproute2) and unshare (util-linux)"
    tried = subprocess.run(
        [
            "unshare",
            "--net",
            "--uts",
            "--mount",
            "sh",
            "-c",
            "ip link add type veth && mount --bind / /mnt",
        ],
        capture_output=True,
        text=True,
    )
    return (
        None
        if tried.returncode == 0
        else f"network namespaces are not permitted: {tried.stderr.strip()}"
    )
