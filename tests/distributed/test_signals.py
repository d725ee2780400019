"""Signals and launchers that die: what a process does that has a step under way, and what one that has none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from lightppo import Callback, PPOTrainer
from lightppo.distributed import signals
from lightppo.distributed.signals import safe_points, watched

REPO = Path(__file__).parents[2]
HEAD = """
import os, signal, subprocess, sys, time
from lightppo.distributed import signals
from lightppo.trainer import run

def ready():
    os.write(1, b"ready\\n")
"""
# Steps without end; each looks at its end, as training does.
STEPS = """
def main():
    with signals.safe_points(20):
        ready()
        for step in range(10_000):
            time.sleep(0.01)
            if number := signals.elected(signals.votes()):
                print("saved after", signal.Signals(number).name, flush=True)
                raise signals.Stopped(number, on_all_ranks=True)
run(main, "trainer")
"""
# One step without end.
STEP = """
def main():
    with signals.safe_points(GRACE):
        ready()
        time.sleep(100)
run(main, "trainer")
"""
STARTING = """
def main():
    ready()
    time.sleep(100)
run(main, "trainer")
"""


@contextmanager
def started(command: list[str], **options) -> Iterator[subprocess.Popen]:
    """A program in a session of its own that has said that it is ready; nothing of it outlives the block."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK")
    }
    environment |= {"PYTHONPATH": str(REPO)} | options.pop("env", {})
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    with subprocess.Popen(
        command, text=True, env=environment, start_new_session=True, **streams
    ) as program:
        try:
            assert os.read(program.stdout.fileno(), 6) == b"ready\n"
            yield program
        finally:
            for process in psutil.process_iter():
                # others' processes end meanwhile
                with suppress(ProcessLookupError, psutil.NoSuchProcess):
                    if os.getsid(process.pid) == program.pid:
                        process.kill()


def python(source: str, **options):
    return started([sys.executable, "-c", HEAD + source], **options)


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130), ("SIGUSR1", 138)])
@pytest.mark.parametrize("source", [STEPS, STARTING], ids=["in its steps", "at its start"])
def test_the_code_is_128_and_the_signal(source, name, code):
    # Shells start programs in the background with SIGINT ignored.
    with python(
        source, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler)
    ) as program:
        program.send_signal(getattr(signal, name))
        output, said = program.communicate(timeout=60)
    assert program.returncode == code
    assert "Traceback" not in said
    if source == STEPS:
        assert output == f"saved after {name}\n"
        assert (
            f"[rank 0] {name}: stopping when the step under way is done, or in 20 s (--signal_grace)"
            in said
        )
    else:
        assert said == f"[rank 0] trainer: stopped by {name}; there was nothing to save\n"


def test_a_step_that_takes_too_long_is_lost():
    with python(STEP.replace("GRACE", "0.5")) as program:
        program.send_signal(signal.SIGTERM)
        _, said = program.communicate(timeout=60)
    assert program.returncode == 143
    assert "not at a safe point within 0.5 s (--signal_grace): the step under way is lost" in said


def test_a_second_signal_ends_at_once():
    """But not what a launcher hands on within two seconds."""
    with python(STEP.replace("GRACE", "1000")) as program:
        program.send_signal(signal.SIGTERM)
        program.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            program.wait(3)
        program.send_signal(signal.SIGTERM)
        _, said = program.communicate(timeout=60)
    assert program.returncode == 143
    assert (
        said.splitlines()[-1]
        == "[rank 0] stopped by SIGTERM, SIGTERM came again: the step under way is lost"
    )


def test_what_fails_because_of_the_signal_is_no_error_of_its_own():
    source = """
from lightppo.errors import RewardError
def main():
    with signals.safe_points():
        ready()
        while not signals.stop_signal():
            time.sleep(0.01)
        raise RewardError("a program that the reward runs was ended")
run(main, "trainer")
"""
    with python(source) as program:
        program.send_signal(signal.SIGTERM)
        _, said = program.communicate(timeout=60)
    assert program.returncode == 143
    assert (
        "trainer: stopped by signal 15, the step under way is lost: RewardError: a program that the reward runs"
        in said
    )


def test_a_signal_to_a_child_that_was_forked_off_is_the_childs():
    source = """
import warnings
warnings.filterwarnings("ignore", "This process .* is multi-threaded, use of fork", DeprecationWarning)
def main():
    with signals.safe_points():
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writer, b"1")
            time.sleep(100)
        os.read(reader, 1)
        os.kill(child, signal.SIGTERM)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        ready()
        print(ended, signals.stop_signal(), flush=True)
run(main)
"""
    with python(source) as program:
        assert program.communicate(timeout=60) == (f"{-signal.SIGTERM} 0\n", "")
    assert program.returncode == 0


def test_a_reader_that_ends_first_does_not_keep_the_run_from_saving(tmp_path):
    """``lightppo ppo … | tee log``: Ctrl-C ends tee too."""
    source = STEPS.replace(
        'print("saved', f'open({str(tmp_path / "saved")!r}, "w").close(); print("saved'
    )
    with python(source, stderr=subprocess.STDOUT) as program:
        program.stdout.close()
        program.send_signal(signal.SIGTERM)
        assert program.wait(60) == 143
    assert (tmp_path / "saved").exists()


def test_handlers_of_the_program_stay_and_the_others_come_back():
    before = {number: signal.getsignal(number) for number in signals.SIGNALS.values()}
    asked = []
    mine = {
        signal.SIGTERM: lambda number, frame: asked.append(signals.request(number)),
        signal.SIGINT: signal.SIG_IGN,
    }
    try:
        for number, handler in mine.items():
            signal.signal(number, handler)
        with watched(), safe_points():
            signal.raise_signal(signal.SIGINT)
            assert not signals.stop_signal()
            assert signal.getsignal(signal.SIGUSR1) is not before[signal.SIGUSR1]
            signal.raise_signal(signal.SIGTERM)
            assert signals.stop_signal() == signal.SIGTERM
            assert signals.votes() == {"SIGINT": 0, "SIGUSR1": 0, "SIGTERM": 1}
        assert asked == [None]
        assert signal.getsignal(signal.SIGTERM) is mine[signal.SIGTERM]
        assert signal.getsignal(signal.SIGUSR1) is before[signal.SIGUSR1]
        assert signals.stop_signal() == 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_all_ranks_stop_for_the_signal_that_is_nobodys_own():
    """A launcher adds SIGTERM to what it gets."""
    assert signals.elected({"SIGINT": 0, "SIGUSR1": 0, "SIGTERM": 0}) == 0
    assert signals.elected({"SIGINT": 0, "SIGUSR1": 0, "SIGTERM": 1}) == signal.SIGTERM
    assert signals.elected({"SIGINT": 0.5, "SIGUSR1": 0, "SIGTERM": 0.5}) == signal.SIGINT


# -- launchers ---------------------------------------------------------------------------------------------------------

# Starts what its arguments say, as a child, and waits; the one that DIES names ends before its child has started.
LAUNCHER = """
import os, subprocess, sys, time
child = subprocess.Popen(sys.argv[1:], env=os.environ | {"LOCAL_RANK": "0"})
if os.environ.get("DIES", "nobody") in sys.argv[0]:
    os.write(1, b"ready\\n")
    os._exit(1)
sys.exit(child.wait())
"""


@pytest.fixture
def launched(tmp_path) -> Callable[..., list[str]]:
    """``launched("deepspeed", source)``: the command line of a program under what stands in for a launcher."""
    (tmp_path / "deepspeed" / "launcher").mkdir(parents=True)
    for name in ("torchrun", "anything", "deepspeed.pt", "deepspeed/launcher/launch.py"):
        (tmp_path / name).write_text(LAUNCHER)
    for folder in ("deepspeed", "deepspeed/launcher"):
        (tmp_path / folder / "__init__.py").touch()
    program = tmp_path / "program.py"

    def command(launcher: str, source: str) -> list[str]:
        program.write_text(HEAD + source)
        start = [sys.executable, str(tmp_path / launcher)]
        if launcher == "deepspeed.pt":
            start += [sys.executable, "-u", "-m", "deepspeed.launcher.launch"]
        return [*start, sys.executable, str(program), "--enable_each_rank_log=None"]

    return command


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize(
    ("launcher", "depth", "name"),
    [
        ("torchrun", 0, "torchrun"),
        ("deepspeed.pt", 0, "deepspeed.pt"),
        ("deepspeed.pt", 1, "deepspeed.launcher.launch"),
    ],
)
def test_a_launcher_that_ends_stops_its_ranks(launched, tmp_path, launcher, depth, name, number):
    environment = {"PYTHONPATH": f"{REPO}:{tmp_path}"}
    with started(launched(launcher, STEPS), env=environment, stderr=subprocess.STDOUT) as program:
        above = [psutil.Process(program.pid), *psutil.Process(program.pid).children(recursive=True)]
        above[depth].send_signal(number)
        output = program.stdout.read()  # until the last of them has ended
    assert (
        f"[rank 0] {name} (process {above[depth].pid}), which started this, has ended: stopping when"
        in output
    )
    assert output.endswith("saved after SIGTERM\n")


@pytest.mark.parametrize(
    ("launcher", "variable"), [("torchrun", "TORCHELASTIC_RUN_ID"), ("deepspeed.pt", "CROSS_SIZE")]
)
def test_a_launcher_that_has_ended_before_its_rank_looks(launched, tmp_path, launcher, variable):
    environment = {"DIES": launcher, variable: "1", "PYTHONPATH": f"{REPO}:{tmp_path}"}
    command = launched(launcher, 'run(lambda: time.sleep(100), "trainer")')
    with started(command, env=environment, stderr=subprocess.STDOUT) as program:
        assert (
            program.stdout.read()
            == "[rank 0] trainer: stopped by SIGTERM; there was nothing to save\n"
        )


def test_a_program_that_no_launcher_started_outlives_its_parent(launched):
    """A shell that ends, nohup, a wrapper."""
    source = """
def main():
    with signals.safe_points():
        parent = os.getppid()
        ready()
        while os.getppid() == parent:
            time.sleep(0.01)
        time.sleep(0.2)
        print("parent ended, asked:", signals.stop_signal(), flush=True)
run(main)
"""
    with started(launched("anything", source)) as program:
        program.kill()
        assert program.stdout.read() == "parent ended, asked: 0\n"


@pytest.fixture
def notebook(monkeypatch):
    """As in a cell, where Python's own handler takes interrupts."""
    shell = SimpleNamespace(get_ipython=lambda: object())
    monkeypatch.setitem(sys.modules, "IPython", shell)
    monkeypatch.setattr(sys, "ps1", "In: ", raising=False)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_of_a_notebook_waits_for_the_end_of_the_step(notebook, capsys):
    with safe_points():
        assert signals.stop_signal() == 0
        signal.raise_signal(signal.SIGINT)
        assert signals.elected(signals.votes()) == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert capsys.readouterr().err == (
        "interrupted: stopping when the step under way is done; another interrupt ends at once\n"
    )
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_an_interrupted_notebook_keeps_what_it_has_trained(
    notebook, make_config, tmp_path, monkeypatch, world
):
    class Interrupts(Callback):
        def on_rollouts(self, run: Any, step: int, collected: Any) -> None:
            if step == 2:
                signal.raise_signal(signal.SIGINT)

    config = make_config(total_training_steps=3, ckpt_path=str(tmp_path / "checkpoints"))
    with pytest.raises(SystemExit) as caught:
        PPOTrainer.from_config(config, callbacks=[Interrupts()]).fit()
    assert caught.value.code == 130
    again = PPOTrainer.from_config(config)
    assert again.state.global_step == 2
    again.fit()
    assert again.state.global_step == 3
