"""What Python's os module lacks of the Linux kernel: mounts, namespaces, capabilities, prctl."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

MACHINE = platform.machine()
_SYSCALL_COLUMN = {"x86_64": 0, "aarch64": 1}.get(MACHINE)
_NUMBERS = {"pivot_root": (155, 41)}  # the same on all machines from 424 on: those are given as numbers

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS = 0x00020000, 0x02000000, 0x04000000
CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x08000000, 0x10000000, 0x20000000, 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
MNT_DETACH = 2

PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, PR_SET_CHILD_SUBREAPER = 22, 38, 36

_MOUNT_SETATTR, _MOUNT_ATTR_RDONLY, _AT_RECURSIVE = 442, 1, 0x8000
_CAPABILITY_VERSION_3 = 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> int:
    """Raises OSError, named ``what``, for a libc call that returned -1."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(name: str | int, *arguments: object) -> int:
    """A system call by its name in the table above, or by its number."""
    if isinstance(name, str):
        if _SYSCALL_COLUMN is None:
            raise OSError(f"{name}: unknown on {MACHINE}")
        number = _NUMBERS[name][_SYSCALL_COLUMN]
    else:
        number = name
    _libc.syscall.restype = ctypes.c_long
    return checked(_libc.syscall(ctypes.c_long(number), *arguments), f"system call {name}")


def prctl(option: int, *arguments: object) -> int:
    full = [*(ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments)]
    full += [ctypes.c_ulong(0)] * (4 - len(full))
    return checked(_libc.prctl(ctypes.c_int(option), *full), f"prctl {option}")


def unshare(flags: int) -> None:
    checked(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    result = _libc.mount(
        source.encode(), target.encode(), kind.encode() if kind else None, ctypes.c_ulong(flags), options.encode()
    )
    checked(result, f"mount {source} on {target}")


def unmount(target: str) -> None:
    """Takes a mount away at once, whoever still uses it."""
    checked(_libc.umount2(target.encode(), ctypes.c_int(MNT_DETACH)), f"umount {target}")


def enter_root(folder: str) -> None:
    """Makes the mount at ``folder`` the root, and drops the old root."""
    os.chdir(folder)
    here = ctypes.c_char_p(b".")
    syscall("pivot_root", here, here)
    unmount(".")
    os.chdir("/")


def make_tree_read_only(folder: str) -> None:
    """A mount and all mounts below it."""
    attributes = struct.pack("QQQQ", _MOUNT_ATTR_RDONLY, 0, 0, 0)
    arguments = (ctypes.c_int(-1), ctypes.c_char_p(folder.encode()), ctypes.c_uint(_AT_RECURSIVE))
    syscall(_MOUNT_SETATTR, *arguments, ctypes.c_char_p(attributes), ctypes.c_size_t(len(attributes)))


def drop_capabilities() -> None:
    """Gives up every capability; ``no_new_privs`` keeps them from coming back."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    checked(_libc.capset(header, nothing), "capset")


def die_with_parent(signal_number: int = 9) -> None:
    """This process is killed when the one that forked it ends."""
    prctl(PR_SET_PDEATHSIG, signal_number)
