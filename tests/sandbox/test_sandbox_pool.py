"""Sandboxes that break, end, or cannot be had."""

from __future__ import annotations

import ast
import ctypes
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from lightppo.errors import SandboxError, SandboxRefusedError
from lightppo.sandbox import PROTECTIONS, ProgramRun, SandboxLimits, SandboxPool
from lightppo.sandbox.pool import Sandbox

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sandboxes need Linux")

LIMITS = SandboxLimits(code_timeout=60.0, code_memory_limit_mb=256)


def only(pool: SandboxPool) -> Sandbox:
    return pool.sandboxes[0]


def family(sandbox: Sandbox) -> set[int]:
    return {sandbox.pid, *(child.pid for child in psutil.Process(sandbox.pid).children(recursive=True))}


def make_pool(**options) -> SandboxPool:
    try:
        return SandboxPool(LIMITS, **({"code_processes": 1} | options))
    except SandboxRefusedError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
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


def eventually(condition: Callable[[], bool], seconds: float = 120.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def test_killed_sandbox_is_replaced(pool):
    first = only(pool).pid
    inner(only(pool)).kill()
    assert pool.run("print(1)").stdout == "1\n"
    assert only(pool).pid != first
    assert not runs(first)


def test_silent_sandbox_is_replaced(pool, monkeypatch):
    monkeypatch.setattr(Sandbox, "GRACE_SECONDS", 0.3)
    first = family(only(pool))
    inner(only(pool)).suspend()
    with pytest.raises(SandboxError, match="did not answer in time"):
        only(pool).run("print(1)", total_seconds=0.1)
    assert eventually(lambda: not any(map(runs, first)))
    monkeypatch.undo()
    assert pool.run("print(1)").stdout == "1\n"


def test_no_interpreter_is_an_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(SandboxError, match="no process could be started"):
        Sandbox("namespaces", LIMITS)


def test_a_short_limit_does_not_disturb_the_attacks(pool):
    """They have their own: on a busy machine, 10 ms are not enough for them."""
    with SandboxPool(SandboxLimits(code_timeout=0.01), code_processes=1) as hasty:
        assert hasty.protections == set(PROTECTIONS)


def test_two_failures_are_an_error(pool, monkeypatch):
    monkeypatch.setattr(Sandbox, "STARTER", "raise SystemExit('no such day')")
    inner(only(pool)).kill()
    with pytest.raises(SandboxError, match=r"failed twice: .*no such day"):
        pool.run("print(1)")
    monkeypatch.undo()
    assert pool.run("print(1)").stdout == "1\n"


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
        "from lightppo.sandbox import SandboxPool\n"
        "pool = SandboxPool(code_processes=1)\nprint(pool.sandboxes[0].pid, flush=True)\n"
        "pool.run('while True: pass', total_seconds=1000)"
    )
    trainer = subprocess.Popen([sys.executable, "-c", trainer_code], stdout=subprocess.PIPE, text=True)
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


def test_a_fork_of_the_trainer_does_not_close_them(pool):
    child = os.fork()
    if child == 0:
        pool.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert pool.run("print(1)").stdout == "1\n"


def test_refuses_without_isolation(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxRefusedError, match=r"bubblewrap is not installed.*--allow_unsafe_code_execution"):
        SandboxPool(LIMITS, isolations=["bubblewrap"])
    with pytest.raises(ValueError, match="no sandbox for code on this machine"):
        SandboxPool(LIMITS, isolations=[])


def test_refuses_a_sandbox_that_does_not_hold(pool, monkeypatch):
    started = []
    start = Sandbox.start
    monkeypatch.setattr(Sandbox, "start", lambda self: (start(self), started.append(self.pid))[0])
    monkeypatch.setattr(Sandbox, "attack", lambda self: set(PROTECTIONS) - {"network"})
    with pytest.raises(SandboxRefusedError, match=r"does not give network \(no connection to anybody\)"):
        SandboxPool(LIMITS)
    assert started
    assert eventually(lambda: not any(map(runs, started)))


HELD = {"network": False, "files": False, "environment": False, "names": ["PATH"], "processes": False,
        "tracing": False, "memory": False}  # fmt: skip


class Attacked(Sandbox):
    """Is attacked by what ``run`` does."""

    def __init__(self, run, *, own_processes: bool = False, limits: SandboxLimits = LIMITS) -> None:
        self.run, self.own_processes, self.limits = run, own_processes, limits


def answered(ended, *values) -> ProgramRun:
    """A run of a program that was loaded and has returned these values."""
    return ProgramRun(ended, 0, "", "", ['{"loaded":true}', *(json.dumps({"value": value}) for value in values)])


@pytest.mark.parametrize(
    ("done", "forked", "ended", "missing"),
    [
        ({}, 20, "exit", set()),  # 16 and the 4 of our own that the limit may count
        ({}, None, "processes", set()),  # killed for it
        ({}, 21, "exit", {"forks"}),
        ({}, None, "timeout", {"forks"}),
        ({"network": True}, 0, "exit", {"network"}),
        ({"files": True, "memory": True}, 0, "exit", {"files", "memory"}),
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
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(ptrace=lambda *arguments: 0))

    def run(code, function, calls, **_):
        names = {}
        exec(code, names)
        return answered("exit", names[function](*json.loads(calls[0])) if function == "attack" else 10**6)

    assert Attacked(run, limits=SandboxLimits(code_memory_limit_mb=128)).attack() == set()


def test_allowed_without_isolation():
    with SandboxPool(LIMITS, code_processes=1, isolations=[], allow_unsafe_code_execution=True) as pool:
        assert pool.isolation == "none"
        assert pool.run("print(1)").stdout == "1\n"
        assert pool.run("while True: pass", total_seconds=1.0).ended == "timeout"
        assert pool.run("x = bytearray(10 << 30)").code == 1


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"code_timeout": 0}, "--code_timeout"),
        ({"code_timeout": float("nan")}, "--code_timeout"),
        ({"code_timeout": float("inf")}, "--code_timeout"),
        ({"code_memory_limit_mb": 16}, "--code_memory_limit_mb"),
        ({"code_max_processes": 0}, "--code_max_processes"),
    ],
)
def test_limits_out_of_range(options, flag):
    with pytest.raises(ValueError, match=flag):
        SandboxLimits(**options)


def test_pool_size_out_of_range():
    with pytest.raises(ValueError, match="--code_processes"):
        SandboxPool(LIMITS, code_processes=0)


@pytest.mark.parametrize("name", ["supervisor", "walls"])
def test_the_inner_half_needs_the_standard_library_only(name):
    """It is started without site-packages, and without this package."""
    tree = ast.parse(Path(importlib.util.find_spec(f"lightppo.sandbox.{name}").origin).read_text())
    modules = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules += [node.module for node in froms if not node.level]
    assert {module.split(".")[0] for module in modules} <= sys.stdlib_module_names
    assert {alias.name for node in froms if node.level for alias in node.names} <= {"walls"}
