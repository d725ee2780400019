"""User, mount, PID, network, IPC and host-name namespaces: nothing outside is there to be seen.

The new root is a small tmpfs with the interpreter and its libraries, read-only, four harmless devices, the namespace's
own /proc where that is allowed, and /tmp, which is made anew for every program.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence

from . import kernel

INNER_ID = 1000  # of the programs, as seen inside
_NOBODY = 65534
_DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
_FLAGS = (
    kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS | kernel.CLONE_NEWCGROUP
)  # fmt: skip
_ROOT_BYTES, _ROOT_FILES = 1 << 20, 4096
_WORK = "/tmp"  # of the programs
_beneath: dict[str, str] = {}  # what is to be seen below it, and where it is kept


def fork_inside(main: Callable[[], None]) -> int:
    """Forks a process that makes the namespaces and runs ``main`` as their first process.

    Returns:
        The process to watch: it ends with the namespaces, and they end with it.

    Raises:
        OSError: the kernel, or what contains us, allows no such namespaces.
    """
    ours, theirs = socket.socketpair()
    watched = os.fork()
    if watched == 0:
        ours.close()
        try:
            _enter_and_wait(theirs, main)
        except BaseException as error:
            theirs.sendall(_message(error))
        os._exit(70)
    theirs.close()
    with ours:
        _expect(ours)
        _map_ids(watched)
        ours.sendall(b"+")
        _expect(ours)
    return watched


def _enter_and_wait(channel: socket.socket, main: Callable[[], None]) -> None:
    kernel.die_with_parent()
    kernel.unshare(_FLAGS)
    channel.sendall(b"+")
    if channel.recv(1) != b"+":
        os._exit(70)
    if os.getuid() != INNER_ID:  # two ids are mapped
        os.setgroups([])
    first = os.fork()
    if first == 0:
        try:
            kernel.die_with_parent()
            _make_private()
            channel.sendall(b"+")
            channel.close()
            main()
        except BaseException as error:
            channel.sendall(_message(error))
        os._exit(70)
    channel.close()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    _, status = os.waitpid(first, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _message(error: BaseException) -> bytes:
    return f"{type(error).__name__}: {error}".encode()[:500]


def _expect(channel: socket.socket) -> None:
    channel.settimeout(20)
    answer = channel.recv(1000)
    if answer != b"+":
        raise OSError(answer.decode(errors="replace") or "the process in the namespaces ended early")


def _map_ids(process: int) -> None:
    """Root keeps its id inside and gives programs another one; everybody else has but his own."""
    user, group = os.geteuid(), os.getegid()
    maps = {"uid_map": f"{INNER_ID} {user} 1", "gid_map": f"{INNER_ID} {group} 1"}
    if user == 0:
        double = f"0 0 1\n{INNER_ID} {_NOBODY} 1"
        try:
            for name in maps:
                _write(f"/proc/{process}/{name}", double)
            return
        except PermissionError:  # root without CAP_SETUID
            pass
    _write(f"/proc/{process}/setgroups", "deny")
    for name, line in maps.items():
        _write(f"/proc/{process}/{name}", line)


def _write(path: str, text: str) -> None:
    try:
        with open(path, "wb", buffering=0) as file:
            file.write(text.encode())
    except OSError as error:
        raise type(error)(error.errno, f"writing {os.path.basename(path)}: {error.strerror}") from None


def _make_private() -> None:
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)


def build_root(readable: Sequence[str], links: dict[str, str]) -> bool:
    """Makes the new root and enters it.

    Args:
        readable: files and folders to show, by their real paths.
        links: symbolic links to make: place → target.

    Returns:
        True where /proc could be mounted.
    """
    base = next(path for path in ("/tmp", "/var/tmp", "/dev/shm", "/mnt") if os.path.isdir(path))
    # opened first: the base that is mounted over may be on the way to some of them
    opened = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in [*readable, *_DEVICES] if os.path.exists(path)}
    flags = {path: os.statvfs(path).f_flag for path in opened}
    options = f"size={_ROOT_BYTES},nr_inodes={_ROOT_FILES},mode=0755"
    kernel.mount("sandbox", base, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    for i, (path, descriptor) in enumerate(opened.items()):
        place = path
        if path.startswith(f"{_WORK}/"):  # an environment below /tmp: shown in every new one
            place = _beneath[path] = f"/below/{i}"
        _show(f"/proc/self/fd/{descriptor}", base + place, os.path.isdir(f"/proc/self/fd/{descriptor}"), flags[path])
        os.close(descriptor)
    for place, target in links.items():
        os.makedirs(os.path.dirname(base + place), exist_ok=True)
        os.symlink(target, base + place)
    for folder in (_WORK, "/proc"):
        os.makedirs(base + folder, exist_ok=True)
    try:
        safe = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
        kernel.mount("proc", base + "/proc", "proc", safe)
        has_proc = True
    except OSError:  # parts of the outer /proc are hidden, as in most containers
        has_proc = False
    kernel.enter_root(base)
    _show_beneath()  # for this process itself
    read_only = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("none", "/", None, read_only)
    return has_proc


def _show(source: str, place: str, is_folder: bool, flags: int) -> None:
    if is_folder:
        os.makedirs(place, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o644))
    try:
        kernel.mount(source, place, None, kernel.MS_BIND)
        whole = True
    except OSError:  # mounts below it that may not be uncovered
        kernel.mount(source, place, None, kernel.MS_BIND | kernel.MS_REC)
        whole = False
    # what the outer mount forbids must stay forbidden, or the kernel refuses
    kept = flags & (kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    device = place.endswith(_DEVICES)
    kept |= kernel.MS_NOSUID | (0 if device else kernel.MS_NODEV | kernel.MS_RDONLY)
    kernel.mount("none", place, None, kernel.MS_REMOUNT | kernel.MS_BIND | kept)
    if not whole:
        kernel.make_tree_read_only(place)


def renew_folder(byte_limit: int, file_limit: int, first: bool) -> None:
    """An empty /tmp of the programs; what the last one left is gone with the old one."""
    if not first:
        kernel.unmount(_WORK)
    options = f"size={byte_limit},nr_inodes={file_limit},mode=0700"
    if os.getuid() != INNER_ID:
        options += f",uid={INNER_ID},gid={INNER_ID}"
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    kernel.mount("sandbox", _WORK, "tmpfs", flags, options)
    _show_beneath()


def _show_beneath() -> None:
    for place, kept in _beneath.items():
        if os.path.isdir(kept):
            os.makedirs(place, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(place), exist_ok=True)
            os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o644))
        kernel.mount(kept, place, None, kernel.MS_BIND | kernel.MS_REC)  # as read-only as it is there


def become_program() -> None:
    """Takes the programs' id, where it is not this process's already."""
    if os.getuid() == INNER_ID:
        return
    os.setresgid(INNER_ID, INNER_ID, INNER_ID)
    os.setresuid(INNER_ID, INNER_ID, INNER_ID)
