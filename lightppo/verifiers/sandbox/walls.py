"""The walls between a program and the machine: namespaces, Landlock, seccomp, and a check of what the program uses.

Standard library only, as it runs inside the sandbox process, which starts without site-packages.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import platform
import signal
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any

DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
_WRITABLE_DEVICES = DEVICES[:2]
INNER_ID = 1000  # the programs' user, inside a user namespace
_NOBODY = 65534
_MEBIBYTE = 1 << 20

# The kernel

# every CLONE_NEW… flag: user, mounts, processes, network, IPC, host name, cgroups
_NEW_NAMESPACES = 0x7E020000
_MS_RDONLY = 1
_MS_NOSUID = 2
_MS_NODEV = 4
_MS_NOEXEC = 8
_MS_REMOUNT = 32
_MS_BIND = 4096
_MS_REC = 16384
_MS_PRIVATE = 1 << 18
_MNT_DETACH = 2  # at once, even if it is still in use
_MOUNT_SETATTR = 442
_MOUNT_ATTR_RDONLY = 1
_AT_RECURSIVE = 0x8000
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION_3 = 0x20080522

_COLUMN = {"x86_64": 0, "aarch64": 1}.get(platform.machine())  # in the tables of system calls
_libc = ctypes.CDLL(None, use_errno=True)


def _call(function: str, *arguments: Any) -> int:
    """Call a function of the C library with numbers of the machine's word size; a negative result is an OSError."""
    result = getattr(_libc, function)(*map(_as_c_argument, arguments))
    if result < 0:
        number = ctypes.get_errno()
        call = f"{function} {' '.join(map(str, arguments[:2]))}"
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result


def _as_c_argument(value: Any) -> Any:
    if isinstance(value, int):
        return ctypes.c_long(value)
    if isinstance(value, str):
        return os.fsencode(value)
    return value


def _prctl(option: int, value: int) -> None:
    _call("prctl", option, value, 0, 0, 0)


def _mount(
    source: str, target: str, kind: str | None, flags: int, options: str | None = None
) -> None:
    _call("mount", source, target, kind, flags, options)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


# Landlock: a process gives up all files except the ones it names, for good and for its children.

# the same numbers on all machines
_LANDLOCK_CREATE = 444
_LANDLOCK_ADD = 445
_LANDLOCK_RESTRICT = 446
_EXECUTE = 1 << 0
_WRITE_FILE = 1 << 1
_READ_FILE = 1 << 2
_READ_DIR = 1 << 3
_TRUNCATE = 1 << 14
_FOR_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
# kernel's version → how many rights it knows; 16 from version 5 on
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}


def _landlock_version() -> int:
    """Return the kernel's Landlock version; 0 without Landlock."""
    with contextlib.suppress(OSError):
        return _call("syscall", _LANDLOCK_CREATE, None, 0, 1)
    return 0


def _restrict_files(version: int, readable: Sequence[str], writable: Sequence[str]) -> None:
    """Allow only reading below ``readable``, and reading and writing below ``writable``; nothing can be executed.

    From version 4 on this also closes TCP, from version 6 signals to outside processes and their abstract sockets.
    """
    every_right = (1 << _RIGHTS.get(version, 16)) - 1
    # handled rights of files, of TCP ports (bind, connect), scopes (abstract sockets, signals)
    attributes = (ctypes.c_uint64 * 3)(every_right, 3, 3)
    handled = 1 + (version >= 4) + (version >= 6)
    rules = _call("syscall", _LANDLOCK_CREATE, attributes, 8 * handled, 0)
    rights_by_path = dict.fromkeys(readable, _READ_FILE | _READ_DIR)
    rights_by_path |= dict.fromkeys(writable, every_right & ~_EXECUTE)
    for path, rights in rights_by_path.items():
        if not os.path.isdir(path):
            rights &= _FOR_FILES
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
        _call("syscall", _LANDLOCK_ADD, rules, 1, struct.pack("=Qi", rights, beneath), 0)
        os.close(beneath)
    _call("syscall", _LANDLOCK_RESTRICT, rules, 0)
    os.close(rules)


# seccomp: calls that a small program does not need fail, or are answered as if the kernel lacked them. Where namespaces
# are forbidden this is the only wall against networks and signals, elsewhere a second one. 32-bit calls kill the
# process, because they would bypass the numbers below.

_AUDIT_ARCH = (0xC000003E, 0xC00000B7)
_X32_BIT = 0x40000000

# Calls as "name number on x86_64, on aarch64"; "-": the machine lacks it.
_REFUSED = (
    # networks
    "socket 41 198, connect 42 203, bind 49 200, listen 50 201, accept 43 202, accept4 288 242, "
    "sendmsg 46 211, sendmmsg 307 269, "  # to any path
    # other processes
    "ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, kcmp 312 272, pidfd_open 434 434, "
    "pidfd_getfd 438 438, pidfd_send_signal 424 424, process_madvise 440 440, process_mrelease 448 448, "
    "migrate_pages 256 238, move_pages 279 239, setpriority 141 140, ioprio_set 251 30, sched_setparam 142 118, "
    "sched_setscheduler 144 119, sched_setattr 314 274, "
    # other programs
    "execve 59 221, execveat 322 281, "
    # mounts, namespaces, files by handle
    "mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51, unshare 272 97, setns 308 268, "
    "open_tree 428 428, move_mount 429 429, fsopen 430 430, fsconfig 431 431, fsmount 432 432, fspick 433 433, "
    "mount_setattr 442 442, statmount 457 457, listmount 458 458, "
    "name_to_handle_at 303 264, open_by_handle_at 304 265, "
    # what happens to files
    "fanotify_init 300 262, inotify_init 253 -, inotify_init1 294 26, inotify_add_watch 254 27, "
    # memory that no limit counts, and objects that outlive their process
    "memfd_create 319 279, memfd_secret 447 447, shmget 29 194, shmat 30 196, shmctl 31 195, semget 64 190, "
    "semop 65 193, semctl 66 191, semtimedop 220 192, msgget 68 186, msgsnd 69 189, msgrcv 70 188, msgctl 71 187, "
    "mq_open 240 180, mq_unlink 241 181, "
    # doors into the kernel
    "bpf 321 280, perf_event_open 298 241, userfaultfd 323 282, add_key 248 217, request_key 249 218, "
    "keyctl 250 219, init_module 175 105, finit_module 313 273, delete_module 176 106, kexec_load 246 104, "
    "kexec_file_load 320 294, reboot 169 142, swapon 167 224, swapoff 168 225, syslog 103 116, acct 163 89, "
    "quotactl 179 60, quotactl_fd 443 443, settimeofday 164 170, clock_settime 227 112, clock_adjtime 305 266, "
    "adjtimex 159 171, sethostname 170 161, setdomainname 171 162, iopl 172 -, ioperm 173 -, modify_ldt 154 -, "
    "personality 135 92, vhangup 153 58"
)
# libraries fall back on older calls
_UNKNOWN = (
    "clone3 435 435, io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427"
)
# Without a mount namespace: calls that Landlock does not check.
_METADATA = (
    "chmod 90 -, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, chown 92 -, fchown 93 55, lchown 94 -, "
    "fchownat 260 54, utime 132 -, utimes 235 -, futimesat 261 -, utimensat 280 88, setxattr 188 5, lsetxattr 189 6, "
    "fsetxattr 190 7, removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16, "
    "getxattr 191 8, lgetxattr 192 9, fgetxattr 193 10, listxattr 194 11, llistxattr 195 12, flistxattr 196 13"
)
# Without a PID namespace: forks, and signals that may reach other processes.
_FORKS_AND_SIGNALS = (
    "fork 57 -, vfork 58 -, tkill 200 130, rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240"
)
_SECCOMP = (317, 277)
_FCNTL = "fcntl 72 25"
_FCNTL_SET_OWNER = (8, 15)  # whom the kernel signals on input
_IOCTL_SET_OWNER = (0x8901, 0x8902)
_FCNTL_LEASE = 1024  # holds up who opens a file
_FCNTL_NOTIFY = 1026  # tells of changes in a folder
_SOCKET_TYPE = 0xF  # the rest are flags

_SET_FILTER = 1
_GET_ANSWER_AVAILABLE = 2
_CLONE_THREAD = 1 << 16
_SHARED_ANONYMOUS = 0x21
_FIRST_UNJUDGED = 463  # newer calls than these lists know

_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_ERRNO = 0x00050000
_LOAD = 0x20
_EQUAL = 0x15
_AT_LEAST = 0x35
_ANY_BIT = 0x45
_AND = 0x54
_RETURN = 0x06


def _seccomp_available() -> bool:
    """Tell whether we know this machine's calls and the kernel can filter them."""
    if _COLUMN is None or struct.calcsize("P") != 8:
        return False
    # Only a kernel that filters calls knows whether "kill the process" is an answer.
    with contextlib.suppress(OSError):
        return (
            _call("syscall", _SECCOMP[_COLUMN], _GET_ANSWER_AVAILABLE, 0, struct.pack("I", _KILL))
            == 0
        )
    return False


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _fail(number: int) -> bytes:
    return _step(_RETURN, _ERRNO | number)


_CALL_NUMBER = _step(_LOAD, 0)
_REFUSE = _fail(errno.EPERM)


def _refuse_if(
    position: int, test: int, value: int, holds: bool = True, mask: int = 0xFFFFFFFF
) -> bytes:
    """Refuse the call if the test of an argument's lower half, of its bits in ``mask``, holds, or does not hold."""
    loading = _step(_LOAD, 16 + 8 * position) + _step(_AND, mask)
    return loading + _step(test, value, int(not holds), int(holds)) + _REFUSE + _CALL_NUMBER


def _when(calls: str, *steps: bytes) -> bytes:
    """Return the steps for these calls; they end with an answer, or load the call's number again."""
    body = b"".join(steps)
    numbers = [call.split()[1 + _COLUMN] for call in calls.split(", ")]
    return b"".join(
        _step(_EQUAL, int(number), 0, len(body) // 8) + body for number in numbers if number != "-"
    )


def _filter_calls(own_processes: bool, own_files: bool) -> None:
    """Filter the calls of this process and its children, for good. Needs ``no_new_privs``.

    With ``own_processes`` and ``own_files``, namespaces hide all others, so forks, signals and file modes are allowed.
    """
    # Datagram sockets send to any path. The kernel looks at an address only if its length is not 0.
    only_unix = _refuse_if(0, _EQUAL, socket.AF_UNIX, False)
    only_streams = _refuse_if(1, _EQUAL, socket.SOCK_STREAM, False, mask=_SOCKET_TYPE)
    shared_anonymous = (
        _step(_LOAD, 16 + 8 * 3)
        + _step(_AND, _SHARED_ANONYMOUS)
        + _step(_EQUAL, _SHARED_ANONYMOUS, 0, 1)
    )
    needs_zero = _refuse_if(0, _EQUAL, 0, False)
    steps = [
        _step(_LOAD, 4),
        _step(_EQUAL, _AUDIT_ARCH[_COLUMN], 1, 0),
        _step(_RETURN, _KILL),
        _CALL_NUMBER,
        _step(_AT_LEAST, _X32_BIT, 0, 1),
        _step(_RETURN, _KILL),
        _step(_AT_LEAST, _FIRST_UNJUDGED, 0, 1),
        _fail(errno.ENOSYS),
        _when(_REFUSED, _REFUSE),
        _when(_UNKNOWN, _fail(errno.ENOSYS)),
        _when("clone 56 220", _refuse_if(0, _ANY_BIT, _NEW_NAMESPACES)),
        # The first argument of these must be 0: the caller itself.
        _when("prlimit64 302 261, sched_setaffinity 203 122", needs_zero),
        _when("socketpair 53 199", only_unix, only_streams),
        _when("sendto 44 206", _refuse_if(5, _EQUAL, 0, False)),
        _when(_FCNTL, _refuse_if(1, _EQUAL, _FCNTL_LEASE), _refuse_if(1, _EQUAL, _FCNTL_NOTIFY)),
        _when("mmap 9 222", shared_anonymous, _fail(errno.ENOMEM), _CALL_NUMBER),
    ]
    if not own_processes:
        steps += [
            _when(_FORKS_AND_SIGNALS, _REFUSE),
            _when("clone 56 220", _refuse_if(0, _ANY_BIT, _CLONE_THREAD, False)),
            _when("kill 62 129, tgkill 234 131", _refuse_if(0, _EQUAL, os.getpid(), False)),
            _when("prctl 157 167", _refuse_if(0, _EQUAL, _PR_SET_PDEATHSIG)),
            _when(_FCNTL, *(_refuse_if(1, _EQUAL, command) for command in _FCNTL_SET_OWNER)),
            _when("ioctl 16 29", *(_refuse_if(1, _EQUAL, command) for command in _IOCTL_SET_OWNER)),
        ]
    if not own_files:
        steps.append(_when(_METADATA, _REFUSE))
    program = b"".join([*steps, _step(_RETURN, _ALLOW)])
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    _call("syscall", _SECCOMP[_COLUMN], _SET_FILTER, 0, header)


# Namespaces: nothing outside is visible. The new root is a small tmpfs with the interpreter and its libraries,
# read-only, four harmless devices, the namespace's own /proc where allowed, and a new /tmp for every program.

_WORK = "/tmp"  # the programs' folder
_beneath: dict[str, str] = {}  # place to show below it → where it is kept


def enter_namespaces() -> None:
    """Move this process into new namespaces; the next process that it forks is the first one there."""
    process = os.getpid()
    reader, writer = os.pipe()
    mapper = os.fork()
    if mapper == 0:  # stays outside, from where the ids are mapped
        os.close(writer)
        try:
            if os.read(reader, 1):  # else the other process has failed
                _map_ids(process)
        except OSError as error:
            os._exit(error.errno)
        os._exit(0)
    os.close(reader)
    _call("unshare", _NEW_NAMESPACES)
    os.write(writer, b"+")
    os.close(writer)
    number = os.waitstatus_to_exitcode(os.waitpid(mapper, 0)[1])
    if number:
        raise OSError(number, f"mapping the ids: {os.strerror(number)}")
    if os.getuid() != INNER_ID:  # two ids are mapped
        os.setgroups([])
    _prctl(_PR_SET_DUMPABLE, 0)


def _map_ids(process: int) -> None:
    """Map the ids: root keeps its own inside and programs get another one; any other user has only their own id."""

    def write(name: str, text: str) -> None:
        with open(f"/proc/{process}/{name}", "wb", buffering=0) as file:
            file.write(text.encode())

    try:
        if os.geteuid() != 0:
            raise PermissionError
        for name in ("uid_map", "gid_map"):
            write(name, f"0 0 1\n{INNER_ID} {_NOBODY} 1")
    except PermissionError:  # also root without CAP_SETUID
        write("setgroups", "deny")
        write("uid_map", f"{INNER_ID} {os.geteuid()} 1")
        write("gid_map", f"{INNER_ID} {os.getegid()} 1")


def build_root(readable: Sequence[str], links: dict[str, str]) -> None:
    """Make the new root from ``readable`` (real paths) and ``links`` (place → target), with /proc where allowed."""
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    base = next(path for path in ("/tmp", "/var/tmp", "/dev/shm", "/mnt") if os.path.isdir(path))
    # opened first: the base that is mounted over may be on the way to some of them
    opened = {
        path: os.open(path, os.O_PATH | os.O_CLOEXEC)
        for path in [*readable, *DEVICES]
        if os.path.exists(path)
    }
    _mount("sandbox", base, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,nr_inodes=4096,mode=0755")
    for i, (path, descriptor) in enumerate(opened.items()):
        inner_path = path
        if path.startswith(f"{_WORK}/"):  # an environment below /tmp: shown in every new one
            inner_path = _beneath[path] = f"/below/{i}"
        _show(descriptor, base + inner_path)
        os.close(descriptor)
    for inner_path, target in links.items():
        os.makedirs(os.path.dirname(base + inner_path), exist_ok=True)
        os.symlink(target, base + inner_path)
    for folder in (_WORK, "/proc"):
        os.makedirs(base + folder, exist_ok=True)
    with contextlib.suppress(OSError):  # parts of the outer /proc are hidden, as in most containers
        _mount("proc", base + "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    os.chdir(base)
    _call("pivot_root", ".", ".")
    _call("umount2", ".", _MNT_DETACH)  # the old root
    os.chdir("/")
    _show_beneath()  # for this process itself
    _mount("none", "/", None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)


def _make_place(source: str, mount_point: str) -> None:
    """Make the file or folder that ``source`` is mounted on."""
    if os.path.isdir(source):
        os.makedirs(mount_point, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(mount_point), exist_ok=True)
        os.close(os.open(mount_point, os.O_CREAT | os.O_WRONLY, 0o644))


def _show(descriptor: int, mount_point: str) -> None:
    source = f"/proc/self/fd/{descriptor}"
    _make_place(source, mount_point)
    try:
        _mount(source, mount_point, None, _MS_BIND)
    except OSError:  # it has mounts below that may not be uncovered, nor be written to
        _mount(source, mount_point, None, _MS_BIND | _MS_REC)
        attributes = struct.pack("QQQQ", _MOUNT_ATTR_RDONLY, 0, 0, 0)
        _call(
            "syscall", _MOUNT_SETATTR, -1, mount_point, _AT_RECURSIVE, attributes, len(attributes)
        )
    # What the outer mount forbids must stay forbidden, otherwise the kernel refuses.
    flags = os.fstatvfs(descriptor).f_flag & (_MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    flags |= _MS_NOSUID
    if not mount_point.endswith(DEVICES):
        flags |= _MS_NODEV | _MS_RDONLY
    _mount("none", mount_point, None, _MS_REMOUNT | _MS_BIND | flags)


def _show_beneath() -> None:
    for mount_point, source in _beneath.items():
        _make_place(source, mount_point)
        _mount(source, mount_point, None, _MS_BIND | _MS_REC)  # read-only, like its source


def _renew_work_folder(byte_limit: int) -> None:
    """Mount a new, empty /tmp for the next program; the old one goes with all it holds."""
    if os.path.ismount(_WORK):
        _call("umount2", _WORK, _MNT_DETACH)
    options = f"size={byte_limit},nr_inodes=1024,mode=0700"
    if os.getuid() != INNER_ID:
        options += f",uid={INNER_ID},gid={INNER_ID}"
    _mount("sandbox", _WORK, "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, options)
    _show_beneath()


# All together

_LEAST_LANDLOCK = 3  # earlier versions let programs truncate readable files
_TRUSTED_PROCESSES = 2  # our own processes that may count under the programs' id
_SPARE_TASKS = 1024  # for a limit that counts all of a user's processes


class Walls:
    """Closes, counts and kills in the way that this machine allows; ``from_root``: the trainer is root."""

    def __init__(
        self, isolation: str, readable: Sequence[str], limits: dict[str, Any], from_root: bool
    ) -> None:
        _prctl(_PR_SET_DUMPABLE, 0)  # nobody may trace this process
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # it adopts the orphans of programs
        self.limits = limits
        self._own_namespaces = isolation in ("namespaces", "bubblewrap")
        self._own_folder = isolation == "namespaces"
        self._has_proc = os.path.exists("/proc/self/status")
        # a program may fork only if its processes can be counted, and not as the machine's root, which no limit stops
        shares_root = from_root and os.getuid() == INNER_ID
        self._own_processes = self._own_namespaces and self._has_proc and not shares_root
        self._may_miss = contextlib.suppress(*[OSError] * (isolation == "none"))
        self._readable = [path for path in [*readable, *DEVICES] if os.path.exists(path)]
        self._landlock = _landlock_version()
        self._seccomp = _seccomp_available()
        if isolation == "landlock" and not (self._landlock >= _LEAST_LANDLOCK and self._seccomp):
            support = f"Landlock {self._landlock} and {'' if self._seccomp else 'no '}seccomp"
            raise OSError(
                f"needs Landlock {_LEAST_LANDLOCK} (Linux 6.2) and seccomp, has {support}"
            )
        self._user = INNER_ID if self._own_folder else os.getuid()
        if not self._own_namespaces and os.geteuid() == 0 and _nobody_can_read(self._readable):
            self._user = _NOBODY
        layers = {
            isolation: self._own_namespaces,
            "landlock": self._landlock,
            "seccomp": self._seccomp,
        }
        self.layers = [name for name, is_there in layers.items() if is_there]

    def prepare(self) -> None:
        """Make an empty folder for the next program, and set the process limit as the kernel counts it here."""
        if self._own_folder:
            _renew_work_folder(self.limits["code_file_limit_mb"] * _MEBIBYTE)
        self.limits["processes"] = self.limits["code_max_processes"] + _TRUSTED_PROCESSES
        if not self._own_namespaces:
            self.limits["processes"] = _tasks_of(self._user, int(time.monotonic())) + _SPARE_TASKS

    def close(self) -> None:
        """Give up all rights for good, in a program's process. Raises OSError if a wall that must stand does not."""
        os.chdir(_WORK if self._own_folder else "/")
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        if self._user != os.getuid():
            _take_id(self._user)
        if not self._own_namespaces:  # a PID namespace ends with its first process
            die_with_parent()
        header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
        _call("capset", header, (ctypes.c_uint32 * 6)())
        if self._landlock:
            writable = [path for path in _WRITABLE_DEVICES if os.path.exists(path)]
            if self._own_folder:
                writable.append(_WORK)
            with self._may_miss:
                _restrict_files(self._landlock, self._readable, writable)
        if self._seccomp:
            with self._may_miss:
                _filter_calls(self._own_processes, self._own_namespaces)

    def excess(self, process: int) -> str:
        """Return ``memory`` or ``processes`` if a program's processes together exceed that limit, else empty."""
        if not self._has_proc:
            return ""
        kilobytes = 0
        tasks = 0
        for status in _statuses(None if self._own_namespaces else process):
            for memory in ("RssAnon", "RssShmem"):
                kilobytes += int(status.get(memory, "0").split()[0])
            tasks += int(status.get("Threads", 1))
        if tasks > self.limits["code_max_processes"]:
            return "processes"
        if kilobytes > self.limits["code_memory_limit_mb"] * 1024:
            return "memory"
        return ""

    def kill(self, process: int, seconds: float) -> int:
        """Kill a program and all its descendants and wait for them; return its wait status."""
        deadline = time.monotonic() + seconds
        status = None
        while time.monotonic() < deadline:
            for target in self._targets(process, has_ended=status is not None):
                with contextlib.suppress(OSError):  # no process is left
                    os.kill(target, signal.SIGKILL)
            try:
                ended_process, wait_status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                if status is None:
                    raise
                return status
            if ended_process == process:
                status = wait_status
            elif ended_process == 0:
                time.sleep(0.0005)
        raise OSError("processes of a program could not be killed")

    def _targets(self, process: int, has_ended: bool) -> list[int]:
        """Return the numbers of processes, or minus those of groups, that are to be killed with a program."""
        if os.getpid() == 1:
            return [-1]
        targets = [] if has_ended else [process, -process]
        if not self._seccomp:  # it could fork, and leave its group
            parent = str(os.getpid())
            targets += [
                int(status["Pid"]) for status in _statuses() if status.get("PPid") == parent
            ]
        return targets


@functools.lru_cache(maxsize=1)
def _tasks_of(user: int, second: int) -> int:
    """Count the threads of a user on the whole machine, once a second."""
    return sum(
        int(status.get("Threads", 1))
        for status in _statuses()
        if status.get("Uid", "").split()[:1] == [str(user)]
    )


def _statuses(process: int | None = None) -> Iterator[dict[str, str]]:
    """Yield /proc's status of a process, or of all processes but this one."""
    names = os.listdir("/proc") if process is None else [str(process)]
    for name in names:
        if not name.isdecimal() or name == str(os.getpid()):
            continue
        try:
            with open(f"/proc/{name}/status", encoding="utf-8", errors="replace") as file:
                lines = [line.partition(":") for line in file]
        except OSError:  # it has just ended
            continue
        yield {key: value.strip() for key, _, value in lines}


def _take_id(number: int) -> None:
    os.setgroups([])
    os.setresgid(number, number, number)
    os.setresuid(number, number, number)


def _nobody_can_read(paths: Sequence[str]) -> bool:
    """Tell whether a user without any rights can read the interpreter's files."""
    process = os.fork()
    if process == 0:
        try:
            _take_id(_NOBODY)
            os._exit(not all(os.access(path, os.R_OK) for path in paths))
        finally:
            os._exit(1)
    return os.waitpid(process, 0)[1] == 0
