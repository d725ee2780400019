"""Landlock: a process gives up, for good and for its children, all files but those that it names."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence

from . import kernel

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # the same number on all machines
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE = 1 << 14
_READ = _READ_FILE | _READ_DIR
_FOR_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_NEWEST_BIT = {1: 12, 2: 13, 3: 14, 4: 14}  # kernel's version → last right it knows; 15 from version 5 on


def version() -> int:
    """The kernel's Landlock version; 0 where there is none."""
    try:
        return kernel.syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    except OSError:
        return 0


def restrict(readable: Sequence[str], writable: Sequence[str]) -> None:
    """Leaves reading below ``readable`` and reading and writing below ``writable``; nothing can be executed.

    From version 4 TCP is closed too, from version 6 signals to and abstract sockets of processes outside.

    Raises:
        OSError: the kernel has no Landlock.
    """
    known = version()
    every_right = (1 << (_NEWEST_BIT.get(known, 15) + 1)) - 1
    # handled rights of files, of TCP ports (bind, connect), scopes (abstract sockets, signals)
    attributes = (ctypes.c_uint64 * 3)(every_right, 3, 3)
    size = 8 if known < 4 else 16 if known < 6 else 24
    rules = kernel.syscall(_CREATE, attributes, ctypes.c_size_t(size), ctypes.c_uint32(0))
    try:
        for path in readable:
            _allow(rules, path, _READ & every_right)
        for path in writable:
            _allow(rules, path, every_right & ~_EXECUTE)
        kernel.syscall(_RESTRICT, ctypes.c_int(rules), ctypes.c_uint32(0))
    finally:
        os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not os.path.isdir(path):
            rights &= _FOR_FILES
        rule = struct.pack("=Qi", rights, beneath)
        kernel.syscall(_ADD, ctypes.c_int(rules), ctypes.c_int(1), rule, ctypes.c_uint32(0))
    finally:
        os.close(beneath)
