"""The walls between a program and the machine: namespaces, Landlock, seccomp, and a check of what the program uses.

Standard library only, as it runs inside the sandbox process, which starts without site-packages.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
INNER_ID = 1000  # the programs' user, inside a user namespace
_NOBODY = 65534
_MEBIBYTE = 1 << 20

# The kernel

_NEW_NAMESPACES = 0x7E020000  # every CLONE_NEW… flag: user, mounts, processes, network, IPC, host name, cgroups
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 32, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_MOUNT_ATTR_RDONLY, _AT_RECURSIVE = 1, 0x8000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP = 1, 4, 22
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_CAPABILITY_VERSION_3 = 0x20080522

_COLUMN = {"x86_64": 0, "aarch64": 1}.get(platform.machine())  # in the tables of system calls
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _syscall(number: int, *arguments: object) -> int:
    return _checked(_libc.syscall(ctypes.c_long(number), *arguments), f"system call {number}")


def _prctl(option: int, *arguments: object) -> int:
    full = [*(ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments)]
    full += [ctypes.c_ulong(0)] * (4 - len(full))
    return _checked(_libc.prctl(ctypes.c_int(option), *full), f"prctl {option}")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    kind_bytes = kind.encode() if kind else None
    result = _libc.mount(source.encode(), target.encode(), kind_bytes, ctypes.c_ulong(flags), options.encode())
    _checked(result, f"mount {source} on {target}")


def _unmount(target: str) -> None:
    """Removes a mount at once, even if it is still in use."""
    _checked(_libc.umount2(target.encode(), ctypes.c_int(_MNT_DETACH)), f"umount {target}")


def die_with_parent() -> None:
    """Has the kernel kill this process when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def become_supervisor() -> None:
    """Forbids tracing this process, and makes it adopt the orphans of programs."""
    _prctl(_PR_SET_DUMPABLE, 0)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


# Landlock: a process gives up all files except the ones it names, for good and for its children.

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446  # the same numbers on all machines
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
_FOR_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_NEWEST_BIT = {1: 12, 2: 13, 3: 14, 4: 14}  # kernel's version → last right it knows; 15 from version 5 on


def landlock_version() -> int:
    """The kernel's Landlock version; 0 without Landlock."""
    try:
        return _syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    except OSError:
        return 0


def _restrict_files(readable: Sequence[str], writable: Sequence[str]) -> None:
    """Allows only reading below ``readable``, and reading and writing below ``writable``; nothing can be executed.

    From version 4 on this also closes TCP, from version 6 signals to outside processes and their abstract sockets.
    """
    known = landlock_version()
    every_right = (1 << (_NEWEST_BIT.get(known, 15) + 1)) - 1
    # handled rights of files, of TCP ports (bind, connect), scopes (abstract sockets, signals)
    attributes = (ctypes.c_uint64 * 3)(every_right, 3, 3)
    size = 8 if known < 4 else 16 if known < 6 else 24
    rules = _syscall(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(size), ctypes.c_uint32(0))
    allowed = [(path, _READ_FILE | _READ_DIR) for path in readable]
    allowed += [(path, every_right & ~_EXECUTE) for path in writable]
    try:
        for path, rights in allowed:
            beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                rights &= every_right if os.path.isdir(path) else _FOR_FILES
                rule = struct.pack("=Qi", rights, beneath)
                _syscall(_LANDLOCK_ADD, ctypes.c_int(rules), ctypes.c_int(1), rule, ctypes.c_uint32(0))
            finally:
                os.close(beneath)
        _syscall(_LANDLOCK_RESTRICT, ctypes.c_int(rules), ctypes.c_uint32(0))
    finally:
        os.close(rules)


# seccomp: calls that a small program does not need fail, or are answered as if the kernel lacked them. Where namespaces
# are forbidden this is the only wall against networks and signals, elsewhere a second one. 32-bit calls kill the
# process, because they would bypass the numbers below.

_AUDIT_ARCH = (0xC000003E, 0xC00000B7)
_NO = -1  # this machine lacks the call
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
    # memory that no limit counts, and objects that outlive their process
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
# Without a mount namespace: calls that Landlock does not check.
_METADATA = {
    "chmod": (90, _NO), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, _NO),
    "fchown": (93, 55), "lchown": (94, _NO), "fchownat": (260, 54), "utime": (132, _NO), "utimes": (235, _NO),
    "futimesat": (261, _NO), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
}  # fmt: skip
# Without a PID namespace: signals that may reach other processes.
_SIGNALS = {"tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240)}
_OWN_SIGNALS = {"kill": (62, 129), "tgkill": (234, 131)}  # first argument: a process
_OWN_ONLY = {"prlimit64": (302, 261), "sched_setaffinity": (203, 122)}  # first argument 0: the caller
_FCNTL, _IOCTL = {"fcntl": (72, 25)}, {"ioctl": (16, 29)}
_FCNTL_SET_OWNER, _IOCTL_SET_OWNER = (8, 15), (0x8901, 0x8902)  # whom the kernel signals on input
_CLONE, _PRCTL, _SECCOMP = {"clone": (56, 220)}, {"prctl": (157, 167)}, {"seccomp": (317, 277)}
_SOCKETPAIR, _MMAP = {"socketpair": (53, 199)}, {"mmap": (9, 222)}

_AF_UNIX = 1
_SHARED_ANONYMOUS = 0x21
_CLONE_THREAD = 0x00010000
_FIRST_UNJUDGED = 463  # newer calls than these lists know

_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06


def seccomp_available() -> bool:
    """True if we know this machine's calls and the kernel can filter them."""
    if _COLUMN is None or struct.calcsize("P") != 8:
        return False
    try:  # asks whether "kill the process" is a known answer, which needs a filtering kernel
        (number,) = _numbers(_SECCOMP)
        _syscall(number, ctypes.c_uint(2), ctypes.c_uint(0), ctypes.byref(ctypes.c_uint32(_KILL)))
    except OSError:
        return False
    return True


def _filter_calls(own_processes: bool, own_files: bool) -> None:
    """Filters the calls of this process and its children, for good. Needs ``no_new_privs``.

    With ``own_processes`` and ``own_files``, namespaces hide all others, so forks, signals and file modes are allowed.
    """
    program = _filter(own_processes, own_files)
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    _prctl(_PR_SET_SECCOMP, 2, ctypes.c_char_p(header))


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _fail(number: int) -> bytes:
    return _step(_RETURN, _ERRNO | number)


_CALL_NUMBER = _step(_LOAD, 0)
_REFUSE = _fail(errno.EPERM)


def _argument(position: int) -> bytes:
    return _step(_LOAD, 16 + 8 * position)  # its lower half


def _refuse_by_argument(position: int, value: int, *, allowed: bool) -> bytes:
    """Refuses the call if the argument has this value, or any other value if this one is ``allowed``."""
    return _argument(position) + _step(_EQUAL, value, int(allowed), int(not allowed)) + _REFUSE + _CALL_NUMBER


def _numbers(table: dict[str, tuple[int, int]]) -> list[int]:
    return [entry[_COLUMN] for entry in table.values() if entry[_COLUMN] != _NO]


def _when(table: dict[str, tuple[int, int]], *steps: bytes) -> bytes:
    """Steps for the calls of the table; they end with an answer, or load the call's number again."""
    body = b"".join(steps)
    return b"".join(_step(_EQUAL, number, 0, len(body) // 8) + body for number in _numbers(table))


def _filter(own_processes: bool, own_files: bool) -> bytes:
    parts = [_step(_LOAD, 4), _step(_EQUAL, _AUDIT_ARCH[_COLUMN], 1, 0), _step(_RETURN, _KILL), _CALL_NUMBER]
    if platform.machine() == "x86_64":
        parts += [_step(_AT_LEAST, _X32_BIT, 0, 1), _step(_RETURN, _KILL)]
    parts += [
        _step(_AT_LEAST, _FIRST_UNJUDGED, 0, 1) + _fail(errno.ENOSYS),
        _when(_REFUSED, _REFUSE),
        _when(_UNKNOWN, _fail(errno.ENOSYS)),
        _when(_CLONE, _argument(0), _step(_ANY_BIT, _NEW_NAMESPACES, 0, 1), _REFUSE, _CALL_NUMBER),
        _when(_OWN_ONLY, _refuse_by_argument(0, 0, allowed=True)),
        _when(_SOCKETPAIR, _refuse_by_argument(0, _AF_UNIX, allowed=True)),
        _when(_MMAP, _argument(3), _step(_AND, _SHARED_ANONYMOUS), _step(_EQUAL, _SHARED_ANONYMOUS, 0, 1),
              _fail(errno.ENOMEM), _CALL_NUMBER),
    ]  # fmt: skip
    if not own_processes:
        parts += [
            _when(_FORKS | _SIGNALS, _REFUSE),
            _when(_CLONE, _argument(0), _step(_ANY_BIT, _CLONE_THREAD, 1, 0), _REFUSE, _CALL_NUMBER),
            _when(_OWN_SIGNALS, _refuse_by_argument(0, os.getpid(), allowed=True)),
            _when(_PRCTL, _refuse_by_argument(0, _PR_SET_PDEATHSIG, allowed=False)),
            _when(_FCNTL, *(_refuse_by_argument(1, command, allowed=False) for command in _FCNTL_SET_OWNER)),
            _when(_IOCTL, *(_refuse_by_argument(1, command, allowed=False) for command in _IOCTL_SET_OWNER)),
        ]
    if not own_files:
        parts.append(_when(_METADATA, _REFUSE))
    return b"".join([*parts, _step(_RETURN, _ALLOW)])


# Namespaces: nothing outside is visible. The new root is a small tmpfs with the interpreter and its libraries,
# read-only, four harmless devices, the namespace's own /proc where allowed, and a new /tmp for every program.

_ROOT_BYTES, _ROOT_FILES = 1 << 20, 4096
_WORK, _WORK_FILES = "/tmp", 1024  # the programs' folder
_beneath: dict[str, str] = {}  # place to show below it → where it is kept


def fork_inside(main: Callable[[], None]) -> int:
    """Forks a process that runs ``main`` as the first process of new namespaces; returns the process to watch."""
    ours, theirs = socket.socketpair()
    watched = os.fork()
    if watched == 0:
        ours.close()
        try:
            _enter(theirs, main)
        except BaseException as error:
            theirs.sendall(f"{type(error).__name__}: {error}".encode()[:500])
        os._exit(70)
    theirs.close()
    with ours:
        _expect_sign(ours)
        _map_ids(watched)
        ours.sendall(b"+")
        _expect_sign(ours)
    return watched


def _enter(channel: socket.socket, main: Callable[[], None]) -> None:
    """Enters the namespaces in lockstep with the process outside, which maps the ids."""
    die_with_parent()
    _checked(_libc.unshare(ctypes.c_int(_NEW_NAMESPACES)), "unshare")
    channel.sendall(b"+")
    if channel.recv(1) != b"+":
        os._exit(70)
    if os.getuid() != INNER_ID:  # two ids are mapped
        os.setgroups([])
    first = os.fork()
    if first == 0:
        die_with_parent()
        channel.sendall(b"+")
        channel.close()
        main()
        os._exit(70)
    channel.close()
    _prctl(_PR_SET_DUMPABLE, 0)
    _, status = os.waitpid(first, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _expect_sign(channel: socket.socket) -> None:
    channel.settimeout(20)
    answer = channel.recv(1000)
    if answer != b"+":
        raise OSError(answer.decode(errors="replace") or "the process in the namespaces ended early")


def _map_ids(process: int) -> None:
    """Root keeps its id inside and programs get another one; any other user has only their own id."""
    one = {"uid_map": f"{INNER_ID} {os.geteuid()} 1", "gid_map": f"{INNER_ID} {os.getegid()} 1"}
    if os.geteuid() == 0:
        with contextlib.suppress(PermissionError):  # root without CAP_SETUID
            return _write(process, dict.fromkeys(one, f"0 0 1\n{INNER_ID} {_NOBODY} 1"))
    _write(process, {"setgroups": "deny"} | one)


def _write(process: int, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        try:
            with open(f"/proc/{process}/{name}", "wb", buffering=0) as file:
                file.write(text.encode())
        except OSError as error:
            raise type(error)(error.errno, f"writing {name}: {error.strerror}") from None


def build_root(readable: Sequence[str], links: dict[str, str]) -> bool:
    """Makes the new root from ``readable`` (real paths) and ``links`` (place → target); True if /proc was mounted."""
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    base = next(path for path in ("/tmp", "/var/tmp", "/dev/shm", "/mnt") if os.path.isdir(path))
    # opened first: the base that is mounted over may be on the way to some of them
    opened = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in [*readable, *DEVICES] if os.path.exists(path)}
    flags = {path: os.statvfs(path).f_flag for path in opened}
    options = f"size={_ROOT_BYTES},nr_inodes={_ROOT_FILES},mode=0755"
    _mount("sandbox", base, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    for i, (path, descriptor) in enumerate(opened.items()):
        place = path
        if path.startswith(f"{_WORK}/"):  # an environment below /tmp: shown in every new one
            place = _beneath[path] = f"/below/{i}"
        _show(f"/proc/self/fd/{descriptor}", base + place, flags[path])
        os.close(descriptor)
    for place, target in links.items():
        os.makedirs(os.path.dirname(base + place), exist_ok=True)
        os.symlink(target, base + place)
    for folder in (_WORK, "/proc"):
        os.makedirs(base + folder, exist_ok=True)
    try:
        _mount("proc", base + "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
        has_proc = True
    except OSError:  # parts of the outer /proc are hidden, as in most containers
        has_proc = False
    os.chdir(base)
    (pivot_root,) = _numbers({"pivot_root": _REFUSED["pivot_root"]})
    _syscall(pivot_root, ctypes.c_char_p(b"."), ctypes.c_char_p(b"."))
    _unmount(".")  # the old root
    os.chdir("/")
    _show_beneath()  # for this process itself
    _mount("none", "/", None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    return has_proc


def _make_place(source: str, place: str) -> None:
    """Makes the file or folder that ``source`` is mounted on."""
    if os.path.isdir(source):
        os.makedirs(place, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o644))


def _show(source: str, place: str, flags: int) -> None:
    _make_place(source, place)
    try:
        _mount(source, place, None, _MS_BIND)
        whole = True
    except OSError:  # it has mounts below that may not be uncovered
        _mount(source, place, None, _MS_BIND | _MS_REC)
        whole = False
    # what the outer mount forbids must stay forbidden, or the kernel refuses
    kept = flags & (_MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    kept |= _MS_NOSUID | (0 if place.endswith(DEVICES) else _MS_NODEV | _MS_RDONLY)
    _mount("none", place, None, _MS_REMOUNT | _MS_BIND | kept)
    if not whole:  # nor may the mounts below it be written to
        (mount_setattr,) = _numbers({"mount_setattr": _REFUSED["mount_setattr"]})
        attributes = struct.pack("QQQQ", _MOUNT_ATTR_RDONLY, 0, 0, 0)
        where = (ctypes.c_int(-1), ctypes.c_char_p(place.encode()), ctypes.c_uint(_AT_RECURSIVE))
        _syscall(mount_setattr, *where, ctypes.c_char_p(attributes), ctypes.c_size_t(len(attributes)))


def _renew_work_folder(byte_limit: int, first: bool) -> None:
    """Mounts a new, empty /tmp for the next program; the old one goes with all it holds."""
    if not first:
        _unmount(_WORK)
    options = f"size={byte_limit},nr_inodes={_WORK_FILES},mode=0700"
    if os.getuid() != INNER_ID:
        options += f",uid={INNER_ID},gid={INNER_ID}"
    _mount("sandbox", _WORK, "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, options)
    _show_beneath()


def _show_beneath() -> None:
    for place, kept in _beneath.items():
        _make_place(kept, place)
        _mount(kept, place, None, _MS_BIND | _MS_REC)  # read-only, like its source


# All together

_TRUSTED_PROCESSES = 2  # our own processes that may count under the programs' id
_SPARE_TASKS = 1024  # for a limit that counts all of a user's processes
_COUNT_SECONDS = 1.0
_WRITABLE_DEVICES = ("/dev/null", "/dev/full")


class Walls:
    """Closes, counts and kills in the way that this machine allows.

    ``has_proc``: /proc shows the processes; without it a program may not fork. ``shares_root``: programs run under the
    machine's root id, which no process limit stops, so they may not fork either.
    """

    def __init__(self, isolation: str, readable: Sequence[str], has_proc: bool, shares_root: bool) -> None:
        self._own_namespaces = isolation in ("namespaces", "bubblewrap")
        self._own_folder = isolation == "namespaces"
        # a program may fork only if its processes can be counted
        self._own_processes = self._own_namespaces and has_proc and not shares_root
        self._may_miss = contextlib.suppress(*[OSError] * (isolation == "none"))
        self._readable = [path for path in [*readable, *DEVICES] if os.path.exists(path)]
        self._has_proc = has_proc
        self._landlock = landlock_version()
        self._seccomp = seccomp_available()
        self._become_nobody = not self._own_namespaces and os.geteuid() == 0 and _nobody_can_read(self._readable)
        self._first = True
        self._user_tasks = (0.0, 0)
        layers = {isolation: self._own_namespaces, "landlock": self._landlock, "seccomp": self._seccomp}
        self.layers = [name for name, there in layers.items() if there]

    def prepare(self, limits: dict[str, Any]) -> None:
        """Makes an empty folder for the next program, and sets the process limit as the kernel counts it here."""
        if self._own_folder:
            _renew_work_folder(limits["code_file_limit_mb"] * _MEBIBYTE, self._first)
            self._first = False
        limits["processes"] = limits["code_max_processes"] + _TRUSTED_PROCESSES
        if not self._own_namespaces:
            limits["processes"] = self._tasks_of_user() + _SPARE_TASKS

    def close(self) -> None:
        """Gives up all rights for good, in a program's process. Raises OSError if a wall that must stand does not."""
        os.chdir(_WORK if self._own_folder else "/")
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        if self._own_folder and os.getuid() != INNER_ID:
            _take_id(INNER_ID)
        elif self._become_nobody:
            os.setgroups([])
            _take_id(_NOBODY)
        if not self._own_namespaces:  # a PID namespace ends with its first process
            die_with_parent()
        header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
        _checked(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
        if self._landlock:
            writable = [path for path in _WRITABLE_DEVICES if os.path.exists(path)] + [_WORK] * self._own_folder
            with self._may_miss:
                _restrict_files(self._readable, writable)
        if self._seccomp:
            with self._may_miss:
                _filter_calls(self._own_processes, self._own_namespaces)

    def excess(self, process: int, limits: dict[str, Any]) -> str:
        """``memory`` or ``processes`` if a program's processes together exceed that limit, else empty."""
        if not self._has_proc:
            return ""
        kilobytes = tasks = 0
        for status in _statuses() if self._own_namespaces else _statuses([process]):
            kilobytes += sum(int(status.get(key, "0").split()[0]) for key in ("RssAnon", "RssShmem"))
            tasks += int(status.get("Threads", 1))
        if tasks > limits["code_max_processes"]:
            return "processes"
        return "memory" if kilobytes > limits["code_memory_limit_mb"] * 1024 else ""

    def kill(self, process: int, seconds: float) -> int:
        """Kills a program and all its descendants and waits for them; returns its wait status."""
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
                targets += [int(s["Pid"]) for s in _statuses() if s.get("PPid") == str(os.getpid())]
        for target in targets:
            with contextlib.suppress(OSError):  # no process is left
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
    """/proc's status of these processes, or of all processes but this one."""
    for name in map(str, processes) if processes is not None else os.listdir("/proc"):
        if not name.isdecimal() or name == str(os.getpid()):
            continue
        try:
            with open(f"/proc/{name}/status", encoding="utf-8", errors="replace") as file:
                lines = [line.partition(":") for line in file]
        except OSError:  # it has just ended
            continue
        yield {key: value.strip() for key, _, value in lines}


def _take_id(number: int) -> None:
    os.setresgid(number, number, number)
    os.setresuid(number, number, number)


def _nobody_can_read(paths: Sequence[str]) -> bool:
    """Whether a user without any rights can read the interpreter's files."""
    process = os.fork()
    if process == 0:
        try:
            os.setgroups([])
            _take_id(_NOBODY)
            os._exit(0 if all(os.access(path, os.R_OK) for path in paths) else 1)
        finally:
            os._exit(1)
    return os.waitpid(process, 0)[1] == 0
