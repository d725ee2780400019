"""Processes side by side: a failed one is said and ends no other; GPUs are shared out."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.ranks import REPO

from lightppo.config import PPOConfig, parse_args
from lightppo.errors import ConfigError
from lightppo.experiments import members
from lightppo.experiments.members import (
    Member,
    devices_of,
    last_line,
    places,
    run_members,
    write_options,
)
from lightppo.logging.run_folder import claim_folder, release


@dataclass(frozen=True)
class Script(Member):
    """A member that runs some Python."""

    code: str = ""

    def __post_init__(self) -> None:
        write_options(self.config_file, PPOConfig())

    def command(self) -> list[str]:
        return [sys.executable, "-c", self.code]


def test_without_scipy_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ConfigError, match=r"pip install 'lightppo\[experiments\]'"):
        members.check_scipy()


def test_a_failed_member_is_said_and_the_others_go_on(tmp_path, capsys):
    codes = {
        "first": "print('x'); print('lightppo ppo: error: --gamma is wrong'); exit(2)",
        "second": f"open({str(tmp_path / 'made')!r}, 'w')",
        "third": "raise SystemExit(0)",
    }
    scripts = [Script(name, tmp_path / name, code=code) for name, code in codes.items()]
    assert run_members(scripts, 2, tmp_path) == {"first": 2, "second": 0, "third": 0}
    assert (tmp_path / "made").exists()
    out = capsys.readouterr().out
    assert "first: FAILED with exit code 2: lightppo ppo: error: --gamma is wrong" in out
    assert str(tmp_path / "first.log") in out
    assert "third: done" in out


def test_no_more_run_at_once_than_asked_for(tmp_path):
    """The second would find the file of the first, which removes it at its end."""
    busy = str(tmp_path / "busy")
    code = f"import os, time; os.mkdir({busy!r}); time.sleep(0.05); os.rmdir({busy!r})"
    scripts = [Script(str(number), tmp_path / str(number), code=code) for number in range(3)]
    assert set(run_members(scripts, 1, tmp_path).values()) == {0}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopping_the_command_stops_its_members(tmp_path, number):
    """As SIGTERM asks a run to: it may save a checkpoint before it ends."""
    code = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal
sys.path.insert(0, {str(REPO / "tests")!r})
from pathlib import Path
from experiments.test_members import Script, run_members
wait = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: exit(print('saved'))); "
wait += "print('up', flush=True); time.sleep(60)"
run_members([Script("one", Path({str(tmp_path / "one")!r}), code=wait)], 1, Path({str(tmp_path)!r}))
"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", code], cwd=REPO, **pipes)
    log = tmp_path / "one.log"
    end = time.monotonic() + 60
    while not (log.is_file() and "up" in log.read_text()):
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert out == "stopping 1 runs, which may save a checkpoint; the same command continues\n"
    assert "Traceback" not in err
    assert log.read_text().split() == ["up", "saved"]


def test_members_of_a_killed_command_keep_others_out(tmp_path):
    """They go on in their own sessions; a repeat must not run a second process in their folders."""
    code = f"""
import sys
sys.path.insert(0, {str(REPO / "tests")!r})
from pathlib import Path
from experiments.test_members import Script, claim_folder, run_members
folder = Path({str(tmp_path)!r})
claim_folder("save_path", str(folder), "save_path")
wait = "print('up', flush=True); import time; time.sleep(60)"
run_members([Script("one", folder / "one", code=wait)], 1, folder)
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=REPO)
    log = tmp_path / "one.log"
    end = time.monotonic() + 60
    while not (log.is_file() and "up" in log.read_text()):
        assert time.monotonic() < end
        time.sleep(0.05)
    holder = (tmp_path / ".lock").read_text()
    member = int(re.search(r"a run that it started \(process (\d+)", holder)[1])
    try:
        process.kill()
        process.wait()
        with pytest.raises(ConfigError) as refused:
            claim_folder("save_path", str(tmp_path), "save_path")
        assert f"is in use by {holder}: wait for it, or choose another" in str(refused.value)
    finally:
        os.kill(member, signal.SIGTERM)
    while True:
        try:
            claim_folder("save_path", str(tmp_path), "save_path")
            break
        except ConfigError:
            assert time.monotonic() < end + 60
            time.sleep(0.05)
    release([str(tmp_path)])


@pytest.mark.parametrize("damage", ["", '{"--pretrain mo', "[]"])
def test_a_damaged_file_is_named(tmp_path, damage):
    member = Member("a, seed 1", tmp_path / "seed1")
    member.contents.write_text(damage)
    with pytest.raises(ConfigError, match=r"seed1.contents.json is damaged: remove it and .*seed1"):
        members.check_alike([member])
    member.folder.mkdir()
    (member.folder / "run_config.yaml").touch()
    assert not members.had_options(member.folder, PPOConfig.from_flat(pretrain="model"))


def test_the_line_that_says_why(tmp_path):
    log = tmp_path / "log"
    log.write_text("step 1\nprog: error: no such file\nbye\n\n")
    assert last_line(log) == "prog: error: no such file"
    log.write_text("Killed\n")
    assert last_line(log) == "Killed"
    log.write_text("")
    assert last_line(log) == "it wrote nothing"


def test_each_slot_has_gpus_of_its_own():
    assert [devices_of(slot, 2, ["4", "5", "6", "7"]) for slot in (0, 1)] == ["4,5", "6,7"]
    assert devices_of(0, 2, []) is None


@pytest.mark.parametrize(
    ("visible", "jobs", "ranks", "expected"),
    [("", None, 1, 2), ("", 5, 1, 5), ("0,1,2,3", None, 2, 2), ("0,1,2,3", 1, 2, 1)],
)
def test_how_many_run_at_once(monkeypatch, visible, jobs, ranks, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert places(jobs, ranks) == expected


def test_too_few_gpus_are_refused(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    with pytest.raises(ConfigError, match="--jobs 2: each run has 2 ranks, and 3 GPUs are visible"):
        places(2, 2)


def test_the_gpus_of_a_machine_are_counted_without_torch(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(members, "_NVIDIA", tmp_path)
    for name in ("0000:01:00.0", "0000:02:00.0"):
        os.mkdir(tmp_path / name)
    assert members.visible_devices() == ["0", "1"]


def test_several_ranks_have_a_launcher():
    words = Member("a", Path("runs/a"), ranks=2).command()
    assert words[1:] == [
        *("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"),
        *("-m", "lightppo", "ppo", "--config", "runs/a.yaml"),
    ]


def test_options_come_back_from_their_file(tmp_path):
    config = PPOConfig.from_flat(
        pretrain="model",
        prompt_data="rows.jsonl",
        reward_fn="reward.py",
        adam_betas=(0.5, 0.75),
        actor_learning_rate=1e-6,
        stop=["ä", "b"],
    )
    write_options(tmp_path / "below" / "run.yaml", config)
    read = parse_args(["--config", str(tmp_path / "below" / "run.yaml")])
    assert {**read.flat(), "config": None} == config.flat()
