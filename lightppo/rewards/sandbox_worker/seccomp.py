"""A system-call filter: what a small program has no use for fails, or is answered as if the kernel had it not.

It is the wall against networks, signals and the like where namespaces are forbidden, and a second one where they are
not. 32-bit calls kill the process: they would go round the numbers below.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from . import kernel

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NO = -1  # the machine has no such call
_X32_BIT = 0x40000000

# name: (x86_64, aarch64)
_REFUSED = {
    # networks
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201),
    "accept": (43, 202), "accept4": (288, 242),
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "migrate_pages": (256, 238),
    "move_pages": (279, 239), "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119), "sched_setattr": (314, 274),
    # other programs
    "execve": (59, 221), "execveat": (322, 281),
    # mounts, namespaces, files by handle
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262),
    # memory that no limit counts, and what outlives its process
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196),
    "shmctl": (31, 195), "semget": (64, 190), "semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192),
    "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187), "mq_open": (240, 180),
    # doors into the kernel
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "syslog": (103, 116), "acct": (163, 89), "quotactl": (179, 60),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171),
    "sethostname": (170, 161), "setdomainname": (171, 162), "iopl": (172, _NO), "ioperm": (173, _NO),
    "modify_ldt": (154, _NO), "personality": (135, 92), "vhangup": (153, 58),
}  # fmt: skip
_UNKNOWN = {  # libraries fall back on older calls
    "clone3": (435, 435), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
}  # fmt: skip
_FORKS = {"fork": (57, _NO), "vfork": (58, _NO)}
# Without a mount namespace: what Landlock does not look at.
_METADATA = {
    "chmod": (90, _NO), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, _NO),
    "fchown": (93, 55), "lchown": (94, _NO), "fchownat": (260, 54), "utime": (132, _NO), "utimes": (235, _NO),
    "futimesat": (261, _NO), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
}  # fmt: skip
# Without a PID namespace: signals that may reach other processes.
_SIGNALS = {"tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240)}
_OWN_SIGNALS = {"kill": (62, 129), "tgkill": (234, 131)}  # first argument: a process
_FCNTL, _IOCTL = {"fcntl": (72, 25)}, {"ioctl": (16, 29)}
_SET_OWNER = {"fcntl": (8, 15), "ioctl": (0x8901, 0x8902)}  # who is told of input, by a signal

_CLONE = {"clone": (56, 220)}
_PRLIMIT, _AFFINITY = {"prlimit64": (302, 261)}, {"sched_setaffinity": (203, 122)}
_SOCKETPAIR, _MMAP, _PRCTL = {"socketpair": (53, 199)}, {"mmap": (9, 222)}, {"prctl": (157, 167)}

_AF_UNIX = 1
_SHARED_ANONYMOUS = 0x21
_CLONE_THREAD = 0x00010000
_NEW_NAMESPACES = 0x7E020000  # every CLONE_NEW… flag
_FIRST_UNJUDGED = 463  # calls that kernels learned after these lists were made

_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06


def available() -> bool:
    """True where this machine's calls are known and the kernel filters them."""
    if kernel.MACHINE not in _AUDIT_ARCH or struct.calcsize("P") != 8:
        return False
    try:  # asks whether "kill the process" is a known answer, which needs a filtering kernel
        number = {"x86_64": 317, "aarch64": 277}[kernel.MACHINE]
        kernel.syscall(number, ctypes.c_uint(2), ctypes.c_uint(0), ctypes.byref(ctypes.c_uint32(_KILL)))
    except OSError:
        return False
    return True


def install(*, own_processes: bool, own_files: bool) -> None:
    """Filters the calls of this process and of its children, for good. Needs ``no_new_privs``.

    Args:
        own_processes: a namespace keeps other processes away, so forks and signals are open.
        own_files: a namespace keeps other files away, so modes and times of files may be changed.
    """
    program = _program(own_processes, own_files)
    count = len(program) // 8
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", count, ctypes.addressof(buffer))
    kernel.prctl(kernel.PR_SET_SECCOMP, 2, ctypes.c_char_p(header))


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _fail(number: int) -> bytes:
    return _step(_RETURN, _ERRNO | number)


def _numbers(table: dict[str, tuple[int, int]]) -> list[int]:
    column = list(_AUDIT_ARCH).index(kernel.MACHINE)
    return [entry[column] for entry in table.values() if entry[column] != _NO]


def _refuse(table: dict[str, tuple[int, int]], error: int) -> bytes:
    return b"".join(_step(_EQUAL, number, 0, 1) + _fail(error) for number in _numbers(table))


def _when(table: dict[str, tuple[int, int]], *steps: bytes) -> bytes:
    """For the calls of the table, the steps; they end with the number of the call loaded again or with an answer."""
    body = b"".join(steps)
    return b"".join(_step(_EQUAL, number, 0, len(body) // 8) + body for number in _numbers(table))


def _argument(position: int) -> bytes:
    return _step(_LOAD, 16 + 8 * position)  # its lower half


_CALL_NUMBER = _step(_LOAD, 0)


def _only_if_argument(position: int, value: int) -> bytes:
    return _argument(position) + _step(_EQUAL, value, 1, 0) + _fail(errno.EPERM) + _CALL_NUMBER


def _unless_argument(position: int, value: int) -> bytes:
    return _argument(position) + _step(_EQUAL, value, 0, 1) + _fail(errno.EPERM) + _CALL_NUMBER


def _program(own_processes: bool, own_files: bool) -> bytes:
    parts = [
        _step(_LOAD, 4) + _step(_EQUAL, _AUDIT_ARCH[kernel.MACHINE], 1, 0) + _step(_RETURN, _KILL),
        _CALL_NUMBER,
    ]
    if kernel.MACHINE == "x86_64":
        parts.append(_step(_AT_LEAST, _X32_BIT, 0, 1) + _step(_RETURN, _KILL))
    parts += [
        _step(_AT_LEAST, _FIRST_UNJUDGED, 0, 1) + _fail(errno.ENOSYS),
        _refuse(_REFUSED, errno.EPERM),
        _refuse(_UNKNOWN, errno.ENOSYS),
        _when(_CLONE, _argument(0), _step(_ANY_BIT, _NEW_NAMESPACES, 0, 1), _fail(errno.EPERM), _CALL_NUMBER),
        _when(_PRLIMIT, _only_if_argument(0, 0)),
        _when(_AFFINITY, _only_if_argument(0, 0)),
        _when(_SOCKETPAIR, _only_if_argument(0, _AF_UNIX)),
        _when(_MMAP, _argument(3), _step(_AND, _SHARED_ANONYMOUS), _step(_EQUAL, _SHARED_ANONYMOUS, 0, 1),
              _fail(errno.ENOMEM), _CALL_NUMBER),
    ]  # fmt: skip
    if not own_processes:
        own = os.getpid()
        parts += [
            _refuse(_FORKS | _SIGNALS, errno.EPERM),
            _when(_CLONE, _argument(0), _step(_ANY_BIT, _CLONE_THREAD, 1, 0), _fail(errno.EPERM), _CALL_NUMBER),
            _when(_OWN_SIGNALS, _only_if_argument(0, own)),
            _when(_PRCTL, _unless_argument(0, kernel.PR_SET_PDEATHSIG)),
            _when(_FCNTL, *(_unless_argument(1, command) for command in _SET_OWNER["fcntl"])),
            _when(_IOCTL, *(_unless_argument(1, command) for command in _SET_OWNER["ioctl"])),
        ]
    if not own_files:
        parts.append(_refuse(_METADATA, errno.EPERM))
    parts.append(_step(_RETURN, _ALLOW))
    return b"".join(parts)
