"""Hostile programs against real sandboxes, in every isolation that this machine allows; sandboxes that break."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from lightppo.distributed import signals
from lightppo.errors import SandboxError, SandboxRefusedError
from lightppo.verifiers.sandbox import (
    ISOLATIONS,
    PROTECTIONS,
    ProgramRun,
    SandboxLimits,
    SandboxPool,
    walls,
)
from lightppo.verifiers.sandbox.pool import Sandbox

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sandboxes need Linux")

# code_timeout is far more than any of these programs takes; those that never end are given less.
LIMITS = SandboxLimits(
    code_timeout=60.0, code_memory_limit_mb=256, code_file_limit_mb=4, code_output_limit_mb=2
)
ENDLESS_SECONDS = 0.2
SECRET = "sk-a-secret-of-the-trainer"


HERE = [name for name in ISOLATIONS if name != "bubblewrap" or shutil.which("bwrap")]


def skip_what_the_machine_lacks(error: SandboxRefusedError) -> None:
    """Walls may be missing here; environment and memory are kept out by what every machine has."""
    missing = ", ".join(re.findall(r"does not protect ([a-z, ]+)", str(error)))
    assert not {"environment", "memory"} & set(missing.split(", ")), error
    pytest.skip(str(error))


@pytest.fixture(scope="module", params=HERE)
def pool(request) -> Iterator[SandboxPool]:
    os.environ["TRAINER_SECRET"] = SECRET
    try:
        made = SandboxPool(LIMITS, code_processes=1, isolations=[request.param])
    except SandboxRefusedError as error:
        skip_what_the_machine_lacks(error)
    with made:
        yield made
    del os.environ["TRAINER_SECRET"]


# Where Python itself lies below /tmp, programs see it there.
BELOW_TMP = sorted(
    {Path(path).parts[2] for path in sysconfig.get_paths().values() if path.startswith("/tmp/")}
)


def test_an_environment_below_tmp_is_there_and_cannot_be_changed(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        Path(folder, "of_the_environment.py").write_text("ANSWER = 42\n")
        monkeypatch.setattr(sysconfig, "get_path", lambda name: folder)
        try:
            pool = SandboxPool(LIMITS, code_processes=1, isolations=["namespaces"])
        except SandboxRefusedError as error:
            skip_what_the_machine_lacks(error)
        program = f"import of_the_environment as m\nprint(m.ANSWER)\nopen({folder!r} + '/new', 'w')"
        with pool:
            for _ in range(2):  # every program has a /tmp of its own
                run = pool.run(program)
                assert run.stdout == "42\n", run.stderr
                assert "Read-only file system" in run.stderr or "Permission denied" in run.stderr
        assert os.listdir(folder) == ["of_the_environment.py"]


def family(sandbox: Sandbox) -> set[int]:
    return {
        sandbox.pid,
        *(child.pid for child in psutil.Process(sandbox.pid).children(recursive=True)),
    }


def eventually(condition: Callable[[], bool], seconds: float = 120.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@contextlib.contextmanager
def nothing_left(pool: SandboxPool) -> Iterator[None]:
    """The same processes as before, still serving, and no file of the program."""
    sandbox = pool.sandboxes[0]
    before = family(sandbox)
    yield
    assert eventually(lambda: family(sandbox) <= before)  # what was killed may take a moment to go
    look = f"import os\nprint([n for n in os.listdir('.') if n not in {BELOW_TMP}] if os.getcwd() == '/tmp' else [])"
    assert pool.run(look).stdout == "[]\n"
    assert family(sandbox) == before  # none in its place


ENDS_BY_ITSELF = {
    "10 GB at once": "x = bytearray(10 << 30)",
    "10 GB by and by": "x = []\nwhile True:\n    x.append(bytearray(1 << 20))",
    "many threads": "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(99,)).start()",
    "environment": "import os\nprint(os.environ)\nprint(os.environ['TRAINER_SECRET'])",
    "environment of the parent": "import os\nprint(open(f'/proc/{os.getppid()}/environ').read())",
    "environment of the first": "print(open('/proc/1/environ').read())",
    "memory of the parent": "import os\nopen(f'/proc/{os.getppid()}/mem', 'rb').read(10)",
    "a socket": "import socket\nsocket.create_connection(('127.0.0.1', PORT))",
    "a datagram": "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))",
    "a datagram to a path": "PAIR.sendto(b'x', 'DATAGRAM')",
    "a message to a path": "PAIR.sendmsg([b'x'], [], 0, 'DATAGRAM')",
    "watching a folder": "assert LIBC.inotify_add_watch(LIBC.inotify_init1(0), b'FOLDER', 256) > 0",
    "hearing of a folder": "import fcntl\nfcntl.fcntl(os.open('/usr/lib', 0), fcntl.F_NOTIFY, 4)",
    "an attribute of the user's files": "print(os.getxattr('FILE', 'user.name'))",
    "attributes of the user's files": "print(os.listxattr('FILE'))",
    "holding up who opens a file": "import fcntl\nfcntl.fcntl(os.open(os.__file__, 0), fcntl.F_SETLEASE, 0)",
    "removing a message queue": "assert LIBC.mq_unlink(b'QUEUE') == 0",
    "reading the user's files": "print(open('FILE').read())",
    "writing the user's files": "open('FILE', 'w').write('x')",
    "making a file beside them": "open('FILE.new', 'w').write('x')",
    "removing the user's files": "import os\nos.remove('FILE')",
    "changing the mode of the user's files": "import os\nos.chmod('FILE', 0)",
    "writing into the interpreter": "import os\nopen(os.__file__, 'a').write('x')",
    "a full folder": "n = 0\nwhile True:\n    open(f'/tmp/{n}', 'wb').write(bytes(1 << 20))\n    n += 1",
    "a thousand files": "n = 0\nwhile True:\n    open(f'/tmp/{n}', 'wb').close()\n    n += 1",
    "a file beyond the limit": "with open('/tmp/big', 'wb') as f:\n    while True:\n        f.write(bytes(1 << 20))",
    "killing the parent": "import os\nos.kill(os.getppid(), 9)\nassert os.getppid() not in (0, 1)",
    "tracing the parent": "import ctypes, os\nassert ctypes.CDLL(None).ptrace(16, os.getppid(), None, None) == 0",
    "limits of the parent": "import os, resource\nresource.prlimit(os.getppid(), resource.RLIMIT_CPU, (0, 0))",
    "another program": "import os\nos.execv('/bin/sh', ['sh', '-c', 'id'])",
    "a shell": "import subprocess\nprint(subprocess.run('id', shell=True, check=True))",
    "shared memory": "import mmap\nmmap.mmap(-1, 1 << 30)",
    "broken memory": "import ctypes\nctypes.string_at(0)",
    "endless output": "text = 'x' * (1 << 20)\nfor _ in range(1024):\n    print(text)",
    "deep recursion in C": "class A:\n    def __repr__(self):\n        return repr(self)\nrepr(A())",
    "a fork bomb": "import os\nfor _ in range(10_000):\n    os.fork()",
    "mounts": "import ctypes\nassert ctypes.CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0, None) == 0",
}


# What some programs begin with.
SHORT_FORMS = {
    "PAIR": "__import__('socket').socketpair(1, 2)[0]",  # Unix datagrams
    "LIBC": "__import__('ctypes').CDLL(None)",
}


@pytest.fixture(scope="module")
def targets(tmp_path_factory) -> Iterator[dict[str, str]]:
    """A file, a port, a socket and a message queue that programs have no business with."""
    file = tmp_path_factory.mktemp("user") / "file"
    file.write_text(SECRET)
    file.chmod(0o666)
    with contextlib.suppress(OSError):  # not every file system has attributes
        os.setxattr(file, "user.name", SECRET.encode())
    queue = f"/lightppo-test-{os.getpid()}"
    ctypes.CDLL(None).mq_open(queue.encode(), os.O_CREAT | os.O_RDWR, 0o666, None)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        tempfile.TemporaryDirectory(dir="/tmp") as folder,  # a socket's path is short
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams,
    ):
        datagrams.bind(f"{folder}/socket")
        os.chmod(folder, 0o777)
        os.chmod(f"{folder}/socket", 0o777)
        datagrams.setblocking(False)
        port, path = str(server.getsockname()[1]), datagrams.getsockname()
        yield {
            "FILE": str(file),
            "FOLDER": str(file.parent),
            "PORT": port,
            "DATAGRAM": path,
            "QUEUE": queue,
        }
        with pytest.raises(BlockingIOError):
            datagrams.recv(1)
    ctypes.CDLL(None).mq_unlink(queue.encode())
    assert file.read_text() == SECRET
    assert file.stat().st_mode & 0o777 == 0o666
    assert [path.name for path in file.parent.iterdir()] == ["file"]


@pytest.mark.parametrize("name", ENDS_BY_ITSELF)
def test_hostile_program_fails(pool, targets, name):
    code = "import os\n" + ENDS_BY_ITSELF[name]
    for word, text in (targets | SHORT_FORMS).items():
        code = code.replace(word, text)
    with nothing_left(pool):
        run = pool.run(code)
    assert (run.ended, run.code) != ("exit", 0), run
    assert SECRET not in run.stdout + run.stderr
    assert len(run.stdout) <= LIMITS.code_output_limit_mb << 20


ENDLESS = {
    "endless loop": "while True:\n    pass",
    "sleep": "import time\ntime.sleep(1000)",
    "stopped": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "deaf": "import signal, time\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n"
    "    except (OSError, ValueError): pass\nwhile True: time.sleep(1)",
    "exceptions caught": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "waiting for its own output": "import os\nr, w = os.pipe()\nos.read(r, 1)",
    "a stubborn fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "children that sleep": "import os, time\nfor _ in range(3):\n    try: os.fork()\n    except OSError: pass\n"
    "os.setsid() if os.getpid() != os.getpgrp() else 0\ntime.sleep(1000)",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_program_is_killed(pool, name):
    started = time.monotonic()
    with nothing_left(pool):
        run = pool.run(ENDLESS[name], total_seconds=ENDLESS_SECONDS)
    assert run.ended in ("timeout", "processes")
    assert run.code == -signal.SIGKILL
    assert time.monotonic() - started < 300


HARMLESS = {
    "sys.exit(0) first": ("import sys\nsys.exit(0)\nprint('42')", ""),
    "os._exit(0)": ("import os\nprint('42')\nos._exit(0)", ""),
    "closed output": ("import os, sys\nsys.stdout.flush()\nos.close(1)\nsys.stdout = None", ""),
    "errors without end": (
        "import sys\nfor _ in range(50):\n    sys.stderr.write('x' * (1 << 20))\nprint(1)",
        "1\n",
    ),
    "patched builtins": (
        "import builtins\nbuiltins.print = builtins.compile = builtins.len = None",
        "",
    ),
    "patched modules": ("import os, json, sys\nos._exit = json.dumps = sys.exit = None", ""),
    "writing to every descriptor": (
        "import os\nfor n in range(3, 64):\n    try: os.write(n, b'{\"value\":42}\\n' * 99)\n    except OSError: pass",
        "",
    ),
    "closing every descriptor": ("import os\nos.closerange(3, 4096)\nprint(1)", "1\n"),
    "its own folder": (
        "import os\nif os.getcwd() == '/tmp':\n    open('a', 'w').write('x')\n    os.mkdir('b')\n    os.chmod('b', 0)",
        "",
    ),
    "deep recursion": (
        "import sys\ndef f(n):\n    return 0 if n == 0 else 1 + f(n - 1)\nprint(f(50_000))",
        "50000\n",
    ),
    "a thread": (
        "import threading\nthreading.stack_size(16 << 20)\nthreading.Thread(target=lambda: print(1)).start()",
        "1\n",
    ),
    "an event loop": ("import asyncio\nasync def f(): print(1)\nasyncio.run(f())", "1\n"),
    "exit()": ("print(1)\nexit()\nprint(2)", "1\n"),
    "quit()": ("print(1)\nquit(0)\nprint(2)", "1\n"),
    "output at the end": (
        "import atexit\natexit.register(print, 'end')\nprint('begin')",
        "begin\nend\n",
    ),
    "stdin": (
        "import os\nprint(os.fstat(0).st_size, open(0).read().split(), input)",
        "4 ['x', 'y'] <built-in function input>\n",
    ),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_program_ends_well(pool, name):
    code, printed = HARMLESS[name]
    with nothing_left(pool):
        run = pool.run(code, stdin="x\ny\n")
    assert (run.ended, run.code, run.stdout) == ("exit", 0, printed), run


def test_children_die_with_their_program(pool):
    """Zombies, orphans and daemons that left the session."""
    code = (
        "import os, time\nfor kind in range(6):\n"
        "    if os.fork() == 0:\n        if kind < 2: os._exit(0)\n        os.setsid()\n"
        "        if os.fork() == 0: os.close(1)\n        time.sleep(1000)\nprint('done', flush=True)"
    )
    with nothing_left(pool):
        run = pool.run(code)
    if "namespaces" in pool.layers:
        assert (run.ended, run.stdout) == ("exit", "done\n")
    else:  # no forks there, or none beyond the first few
        assert run.ended in ("exit", "processes")


def test_memory_of_all_processes_counts(pool):
    code = (
        "import os, time\nfor _ in range(6):\n"
        "    if os.fork() == 0:\n        x = bytearray(b'1') * (100 << 20)\n        time.sleep(1000)\ntime.sleep(1000)"
    )
    with nothing_left(pool):
        run = pool.run(code)
    # 6 · 100 MB are more than the 256 allowed; each alone is not. Root may not fork in bubblewrap, nobody in landlock
    forks = "namespaces" in pool.layers or ("bubblewrap" in pool.layers and os.geteuid() != 0)
    assert run.ended == "memory" if forks else run.code == 1


def test_killing_everybody_hits_nobody(pool):
    """By number, by group, and by asking for a signal on input."""
    heard = []
    before = signal.signal(signal.SIGIO, lambda *_: heard.append("SIGIO"))
    code = f"""
import fcntl, os, signal
def attempt(action):
    try: action()
    except OSError: pass
attempt(lambda: os.kill(-1, signal.SIGKILL))
attempt(lambda: os.kill({os.getpid()}, signal.SIGKILL))
attempt(lambda: os.killpg({os.getpgrp()}, signal.SIGKILL))
attempt(lambda: os.setpriority(os.PRIO_PROCESS, {os.getpid()}, 19))
reader, writer = os.pipe()
attempt(lambda: fcntl.fcntl(reader, fcntl.F_SETOWN, {os.getpid()}))
attempt(lambda: fcntl.fcntl(reader, fcntl.F_SETFL, os.O_ASYNC))
os.write(writer, b"x")
for number in range(2, 200):
    if number != os.getpid():
        attempt(lambda: os.kill(number, signal.SIGKILL))
print("alive")
"""
    try:
        with nothing_left(pool):
            run = pool.run(code)
    finally:
        signal.signal(signal.SIGIO, before)
    assert run.stdout == "alive\n"
    assert not heard
    assert psutil.Process().nice() == os.getpriority(os.PRIO_PROCESS, 0) < 19


@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of x86_64")
def test_files_have_their_limit_one_by_one_and_together(pool):
    run = pool.run("""
import os, resource
print(resource.getrlimit(resource.RLIMIT_FSIZE)[0])
for n in range(16):
    try:
        with open(f"{n}", "wb", buffering=0) as file:
            for _ in range(8):
                file.write(bytes(1 << 20))
    except OSError:
        pass
print(sum(os.path.getsize(f"{n}") for n in range(16) if os.path.exists(f"{n}")))
""")
    limit, written = map(int, run.stdout.split())
    assert limit == LIMITS.code_file_limit_mb << 20
    assert written <= limit


def test_filtered_system_calls(pool):
    if "seccomp" not in pool.layers:
        pytest.skip("no filter here")
    numbers = {"socket": 41, "ptrace": 101, "unshare": 272, "memfd_create": 319, "userfaultfd": 323, "add_key": 248,
               "shmget": 29, "perf_event_open": 298, "process_vm_readv": 310, "setns": 308, "bpf": 321,
               "io_uring_setup": 425, "clone3": 435, "unheard of": 999, "sendmsg": 46, "sendmmsg": 307,
               "inotify_init": 253, "inotify_init1": 294, "inotify_add_watch": 254, "mq_unlink": 241}  # fmt: skip
    code = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for number in {list(numbers.values())}:
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(0)] * 6)
    print(result, ctypes.get_errno())
"""
    answers = dict(zip(numbers, pool.run(code).stdout.splitlines()))
    unknown = {"io_uring_setup", "clone3", "unheard of"}
    # ENOSYS, EPERM
    assert answers == {name: "-1 38" if name in unknown else "-1 1" for name in numbers}


def test_what_is_sent_to_an_address_is_refused_whatever_the_socket(pool):
    """Datagram sockets cannot be made; should there be one all the same, it does not send to a path."""
    if "seccomp" not in pool.layers:
        pytest.skip("no filter here")
    run = pool.run("""
import socket
one, other = socket.socketpair()
print(one.send(b"x"), one.sendall(b"yz"), other.recv(3))
for attempt in (
    lambda: one.sendto(b"x", "/path"),
    lambda: one.sendmsg([b"x"]),
    lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM),
    lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_RAW),  # the kernel makes it a datagram socket
    lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK),
):
    try:
        print(attempt())
    except OSError as error:
        print(error.errno)
""")
    assert run.stdout.splitlines() == ["1 None b'xyz'", "1", "1", "1", "1", "1"], run


@pytest.mark.skipif(platform.machine() != "x86_64", reason="machine code of x86_64")
def test_calls_of_32_bits_kill(pool):
    """They have other numbers: getpid, 20 there, by int 0x80."""
    if "seccomp" not in pool.layers:
        pytest.skip("no filter here")
    code = """
import ctypes, mmap
page = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 7)
page.write(b"\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3")
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
print(ctypes.CFUNCTYPE(ctypes.c_int)(address)())
"""
    run = pool.run(code)
    assert (run.ended, run.code, run.stdout) == ("signal", -signal.SIGSYS, "")


def test_landlock_keeps_out_networks_and_files_where_the_kernel_has_it():
    """The tests above are skipped where an isolation is refused: here a wall with a new hole is seen."""
    if walls._landlock_version() < walls._LEAST_LANDLOCK or not walls._seccomp_available():
        pytest.skip("this kernel lacks Landlock or seccomp")
    with contextlib.closing(Sandbox("landlock", LIMITS)) as sandbox:
        assert {"network", "files"} <= sandbox.attack()


def test_protections_are_found_by_trying(pool):
    assert pool.protections == set(PROTECTIONS)


def test_programs_see_nothing_of_each_other(pool):
    pool.run("import builtins, os, sys\nbuiltins.mark = sys.mark = 1\nos.environ['MARK'] = '1'")
    run = pool.run(
        "import builtins, os, sys\nprint(hasattr(builtins, 'mark'), hasattr(sys, 'mark'), 'MARK' in os.environ)"
    )
    assert run.stdout == "False False False\n"


def test_only_the_beginning_of_the_errors_is_kept(pool):
    run = pool.run("import sys\nsys.stderr.write('first' + 'x' * 100_000)")
    assert run.ended == "exit"
    assert run.stderr == "first" + "x" * 4091


def test_same_program_same_verdict(pool):
    code = "import random\nprint(random.random(), list({'a', 'b', 'c', 'd'}))"
    assert pool.run(code).stdout == pool.run(code).stdout != ""


@pytest.mark.parametrize(
    "code", ["def f(:", "x = '\ud800'", "print(1)\0", "x = " + "(" * 9999, "\tx\n  y"]
)
def test_code_that_does_not_compile(pool, code):
    run = pool.run(code)
    assert (run.ended, run.code, len(run.answers)) == ("exit", 1, 1)
    assert "compile_error" in json.loads(run.answers[0])


def test_calls_are_answered_one_by_one(pool):
    code = "class Solution:\n    def f(self, a: List[int], b): return a[b], {1, 2}, {'k': b}, deque([b])"
    run = pool.run(code, function="f", calls=["[[5, 6], 1]", "[[5], 1]", '[{"3": 4}, 3]'])
    loaded, first, second, third = map(json.loads, run.answers)
    assert loaded == {"loaded": True}
    assert first == {"value": [6, {"lightppo.set": [1, 2]}, {"k": 1}, [1]]}
    assert second == {"error": "IndexError: list index out of range"}
    assert third["value"][0] == 4  # keys that are numbers are numbers again


@pytest.mark.parametrize(
    ("body", "ended", "n_answers"),
    [
        ("import os; os._exit(0)", "exit", 1),
        ("import sys; sys.exit(0)", "exit", 3),  # an exception of a call, not the end
        ("raise KeyboardInterrupt", "exit", 3),
        ("return print", "exit", 3),  # no JSON
        ("x = []; x.append(x); return x", "exit", 3),
        ("return 'x' * (8 << 20)", "output", 1),
        ("import ctypes; ctypes.string_at(0)", "signal", 1),
    ],
)
def test_calls_that_end_badly(pool, body, ended, n_answers):
    with nothing_left(pool):
        run = pool.run(f"def f():\n    {body}", function="f", calls=["[]", "[]"])
    assert (run.ended, len(run.answers)) == (ended, n_answers)
    assert not any("value" in json.loads(answer) for answer in run.answers)


def test_each_call_has_its_own_time(pool):
    code = "import time\ndef f(n):\n    while n: time.sleep(1)\n    return n"
    run = pool.run(code, function="f", calls=["[0]", "[1]", "[0]"], seconds=1.0)
    assert run.ended == "timeout"
    assert run.answers == ['{"loaded":true}', '{"value":0}']


@pytest.mark.parametrize("call", [{}, {"function": "f", "calls": ["[]", "[]"]}])
def test_no_newlines_restart_the_clock(pool, call):
    code = "import os, time\ndef f():\n    while True:\n        os.write(3, b'\\n')\n        time.sleep(0.05)\n"
    code += "if __name__ == '__main__': f()"
    run = pool.run(code, seconds=1.0, total_seconds=40.0, **call)
    assert (run.ended, len(run.answers)) == ("timeout", 1 + len(call.get("calls", ())))
    assert run.seconds < 20


def test_a_limit_on_output_of_its_own(pool):
    run = pool.run("print('x' * 100_000)", output_bytes=1000)
    assert (run.ended, run.stdout) == ("output", "x" * 1000)


@pytest.mark.parametrize(
    "code", ["", "f = 3", "def g(): pass", "class Solution: pass", "import math"]
)
def test_a_program_without_the_function(pool, code):
    run = pool.run(code, function="gcd", calls=["[1, 2]"])  # a name that every program starts with
    assert run.code == 1
    assert "load_error" in json.loads(run.answers[0])


# --- sandboxes that break, end, or cannot be had


def make_pool(**options) -> SandboxPool:
    try:
        return SandboxPool(LIMITS, **({"code_processes": 1} | options))
    except SandboxRefusedError as error:
        skip_what_the_machine_lacks(error)


@pytest.fixture(scope="module")
def strongest() -> Iterator[SandboxPool]:
    with make_pool() as made:
        yield made


def inner(sandbox: Sandbox) -> psutil.Process:
    return psutil.Process(sandbox.pid).children(recursive=True)[-1]


def runs(pid: int) -> bool:
    """A zombie, which nobody has taken notice of yet, does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_killed_sandbox_is_replaced(strongest):
    first = strongest.sandboxes[0].pid
    inner(strongest.sandboxes[0]).kill()
    assert strongest.run("print(1)").stdout == "1\n"
    assert strongest.sandboxes[0].pid != first
    assert not runs(first)


def test_a_sigterm_to_all_below_a_trainer_that_stops_changes_no_verdict(strongest):
    """As DeepSpeed's launch.py sends it to all that a rank has started."""
    sandbox = strongest.sandboxes[0]
    before = family(sandbox)
    with signals.safe_points(), ThreadPoolExecutor() as threads:
        signals.request(signal.SIGTERM)
        answer = threads.submit(strongest.run, "import time\ntime.sleep(1)\nprint(1)")
        assert eventually(lambda: family(sandbox) > before)
        for pid in family(sandbox):
            os.kill(pid, signal.SIGTERM)
        assert answer.result(60).stdout == "1\n"
    assert (
        strongest.run("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)").code
        == -signal.SIGTERM
    )


def test_silent_sandbox_is_replaced(strongest, monkeypatch):
    monkeypatch.setattr(Sandbox, "GRACE_SECONDS", 0.3)
    first = family(strongest.sandboxes[0])
    inner(strongest.sandboxes[0]).suspend()
    with pytest.raises(SandboxError, match="time"):
        strongest.sandboxes[0].run("print(1)", total_seconds=0.1)
    assert eventually(lambda: not any(map(runs, first)))
    monkeypatch.undo()
    assert strongest.run("print(1)").stdout == "1\n"


def test_no_interpreter_is_an_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(SandboxError, match="/nowhere/python"):
        Sandbox("namespaces", LIMITS)


def test_a_short_limit_does_not_disturb_the_attacks(strongest):
    """They have their own: on a busy machine, 10 ms are not enough for them."""
    with SandboxPool(SandboxLimits(code_timeout=0.01), code_processes=1) as hasty:
        assert hasty.protections == set(PROTECTIONS)


def test_two_failures_are_an_error(strongest, monkeypatch):
    monkeypatch.setattr(Sandbox, "STARTER", "raise SystemExit('no such day')")
    inner(strongest.sandboxes[0]).kill()
    with pytest.raises(SandboxError, match="no such day"):
        strongest.run("print(1)")
    monkeypatch.undo()
    assert strongest.run("print(1)").stdout == "1\n"


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        ("b'hello' + bytes([10])", "no report"),
        ("b'x' * (14 << 20)", "no report"),  # too long
        ("b'ab'", "ended"),
        ("b''", "ended"),
    ],
)
def test_nonsense_from_the_process(monkeypatch, reply, problem):
    monkeypatch.setattr(Sandbox, "STARTER", f"import os; os.write(0, {reply})")
    with pytest.raises(SandboxError, match=problem):
        Sandbox("namespaces", SandboxLimits(code_output_limit_mb=1))


def test_sandboxes_end_with_a_killed_trainer():
    trainer_code = (
        "from lightppo.verifiers.sandbox import SandboxPool\n"
        "pool = SandboxPool(code_processes=1)\nprint(pool.sandboxes[0].pid, flush=True)\n"
        "pool.run('while True: pass', total_seconds=1000)"
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", trainer_code], stdout=subprocess.PIPE, text=True
    )
    try:
        first_line = trainer.stdout.readline()
        if not first_line:
            pytest.skip("no sandbox here")
        sandbox = psutil.Process(int(first_line))
        assert eventually(lambda: len(sandbox.children(recursive=True)) >= 2)
        processes = family(sandbox)
    finally:
        trainer.kill()
        trainer.wait()
        trainer.stdout.close()
    assert eventually(lambda: not any(map(runs, processes)))


def test_closing_ends_all_processes():
    pool = make_pool(code_processes=2)
    processes = set().union(*map(family, pool.sandboxes))
    assert len(processes) >= 4
    pool.close()
    pool.close()
    assert eventually(lambda: not any(map(runs, processes)))
    with pytest.raises(SandboxError, match="closed"):
        pool.run("print(1)")


def test_a_fork_of_the_trainer_does_not_close_them(strongest):
    child = os.fork()
    if child == 0:
        strongest.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert strongest.run("print(1)").stdout == "1\n"


def test_refuses_without_isolation(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxRefusedError, match=r"bubblewrap.*--allow_unsafe_code_execution"):
        SandboxPool(LIMITS, isolations=["bubblewrap"])
    with pytest.raises(ValueError, match="--allow_unsafe_code_execution"):
        SandboxPool(LIMITS, isolations=[])


def test_refuses_a_sandbox_that_does_not_hold(strongest, monkeypatch):
    started = []
    start = Sandbox.start
    monkeypatch.setattr(Sandbox, "start", lambda self: (start(self), started.append(self.pid))[0])
    monkeypatch.setattr(Sandbox, "attack", lambda self: set(PROTECTIONS) - {"network"})
    with pytest.raises(SandboxRefusedError, match="network"):
        SandboxPool(LIMITS)
    assert started
    assert eventually(lambda: not any(map(runs, started)))


HELD = {"network": [], "files": [], "environment": False, "names": ["PATH"], "processes": False,
        "tracing": False, "memory": False}  # fmt: skip


class Attacked(Sandbox):
    """Is attacked by what ``run`` does."""

    def __init__(self, run, *, own_processes: bool = False, limits: SandboxLimits = LIMITS) -> None:
        self.run, self.own_processes, self.limits = run, own_processes, limits


def answered(ended, *values) -> ProgramRun:
    """A run of a program that was loaded and has returned these values."""
    return ProgramRun(
        ended, 0, "", "", ['{"loaded":true}', *(json.dumps({"value": value}) for value in values)]
    )


@pytest.mark.parametrize(
    ("done", "forked", "ended", "missing"),
    [
        ({}, 20, "exit", set()),  # 16 and the 4 of our own that the limit may count
        ({}, None, "processes", set()),  # killed for it
        ({}, 21, "exit", {"forks"}),
        ({}, None, "timeout", {"forks"}),
        ({"network": ["TCP"]}, 0, "exit", {"network"}),
        ({"files": ["watching"], "memory": True}, 0, "exit", {"files", "memory"}),
        ({"environment": True}, 0, "exit", {"environment"}),
        ({"names": ["PATH", "API_KEY"]}, 0, "exit", {"environment"}),
        ({"processes": True}, 0, "exit", {"processes"}),
        ({"tracing": True}, 0, "exit", {"processes"}),
    ],
)
def test_attacks_that_work_are_seen(done, forked, ended, missing):
    def run(code, function, **_):
        if function == "attack":
            return answered("exit", HELD | done)
        return answered(ended, *[forked] * (forked is not None))

    assert set(PROTECTIONS) - Attacked(run).attack() == missing
    # with process numbers of its own, the trainer's number means somebody else there
    own = Attacked(run, own_processes=True).attack()
    assert set(PROTECTIONS) - own == (set() if done == {"processes": True} else missing)


def test_an_attack_without_an_answer_proves_nothing():
    assert Attacked(lambda code, **_: answered("signal"), own_processes=True).attack() == set()


def test_attacks_work_where_nothing_holds(monkeypatch):
    """The same attacks, run in this process: the files, the environment and the network are wide open."""
    monkeypatch.setenv("API_KEY", "secret")
    # the parent of the tests is not traced
    watching = {
        name: getattr(ctypes.CDLL(None), name) for name in ("inotify_init1", "inotify_add_watch")
    }
    monkeypatch.setattr(
        ctypes, "CDLL", lambda name: SimpleNamespace(ptrace=lambda *arguments: 0, **watching)
    )
    open_doors = {}

    def run(code, function, calls, **_):
        names = {}
        exec(code, names)
        if function == "attack":
            open_doors.update(names[function](*json.loads(calls[0])))
        return answered("exit", open_doors if function == "attack" else 10**6)

    assert Attacked(run, limits=SandboxLimits(code_memory_limit_mb=128)).attack() == set()
    assert open_doors["network"] == [
        "TCP",
        "an abstract socket",
        "a datagram to a path",
        "a message to a path",
    ]
    assert open_doors["files"] == ["reading", "writing", "making", "watching", "attributes"]


def test_allowed_without_isolation():
    with SandboxPool(
        LIMITS, code_processes=1, isolations=[], allow_unsafe_code_execution=True
    ) as pool:
        assert pool.isolation == "none"
        assert pool.run("print(1)").stdout == "1\n"
        assert pool.run("while True: pass", total_seconds=1.0).ended == "timeout"
        assert pool.run("x = bytearray(10 << 30)").code == 1


@pytest.mark.parametrize(
    ("make", "option", "value"),
    [
        (SandboxLimits, "code_timeout", 0),
        (SandboxLimits, "code_timeout", float("nan")),
        (SandboxLimits, "code_timeout", float("inf")),
        (SandboxLimits, "code_memory_limit_mb", 16),
        (SandboxLimits, "code_max_processes", 0),
        (SandboxPool, "code_processes", 0),
    ],
)
def test_options_out_of_range(make, option, value):
    with pytest.raises(ValueError, match=f"--{option}"):
        make(**{option: value})


@pytest.mark.parametrize("name", ["supervisor", "walls"])
def test_the_inner_half_needs_the_standard_library_only(name):
    """It is started without site-packages, and without this package."""
    tree = ast.parse(
        Path(importlib.util.find_spec(f"lightppo.verifiers.sandbox.{name}").origin).read_text()
    )
    modules = [
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    ]
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules += [node.module for node in froms if not node.level]
    assert {module.split(".")[0] for module in modules} <= sys.stdlib_module_names
    assert {alias.name for node in froms if node.level for alias in node.names} <= {"walls"}
