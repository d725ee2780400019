"""``lightppo watch``: what it shows of a run, from files that grow, are cut, and end."""

from __future__ import annotations

import gzip
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.tiny import read_jsonl

from lightppo.__main__ import main
from lightppo.cli.watch import Watched

NO_PROCESS = 2**22 + 1  # beyond the kernel's largest


def row(step: int, **more: Any) -> dict[str, Any]:
    numbers = {
        "rollout/reward": 0.1 * step,
        "rollout/kl": 0.01,
        "perf/time_step": 2.0,
        "perf/time_rollout": 0.5,
    }
    return {"step": step, "time": 1000.0 + 60 * step} | numbers | more


def write(run: Path, rows: list[dict[str, Any]], mode: str = "w") -> None:
    run.mkdir(exist_ok=True)
    with (run / "metrics.jsonl").open(mode) as file:
        file.writelines(json.dumps(one) + "\n" for one in rows)


@pytest.fixture
def run(tmp_path) -> Path:
    write(tmp_path / "run", [row(step) for step in (1, 2, 3)])
    (tmp_path / "run" / "run_metadata.jsonl").write_text(
        '{"step": 0}\n{"step": 0, "total_steps": 12}\n'
    )
    return tmp_path / "run"


@pytest.fixture
def shown(capsys, monkeypatch):
    """``shown(*runs)``: the frame of `--once`, 120 columns wide."""

    def frame(*words: Any) -> str:
        monkeypatch.setenv("COLUMNS", "120")
        main(["watch", *map(str, words), "--once"])
        return capsys.readouterr().out

    return frame


def test_a_real_run(copied, shown):
    out = shown(copied("one"))
    assert "step 4/4 · " in out
    assert "ended" in out or "finished" in out
    for title in ("reward", "KL per token", "length", "entropy", "gradient norm"):
        assert title in out
    assert "rollout    █" in out
    assert "[step 4] score " in out
    assert "· label " in out
    assert max(map(len, out.splitlines())) <= 120
    assert "\x1b" not in out  # a pipe gets no colours


def test_where_a_run_stands(run, shown):
    (run / ".lock").write_text(f"process {os.getpid()} on {socket.gethostname()}")
    out = shown(run)
    assert "\nstep 3/12 · 60 s per step · ETA 9:00\n" in out
    assert f"rollout    {'█' * 8:<31}0.50 s\n" in out
    assert " reward ● 0.3" in out  # the last value, beside the title


@pytest.mark.parametrize(
    ("holder", "steps", "said"),
    [
        (
            f"process {os.getpid()} on {socket.gethostname()}",
            3,
            f"running, process {os.getpid()}, last row ",
        ),
        (f"process {NO_PROCESS} on {socket.gethostname()}", 3, "ended, last row "),
        (f"process {NO_PROCESS} on {socket.gethostname()}", 12, "finished, last row "),
        ("process 1 on elsewhere", 3, "on elsewhere, last row "),
        (None, 3, "ended, last row "),
        (None, 0, "ended, no row yet"),
    ],
    ids=["running", "ended", "finished", "elsewhere", "no lock", "no row"],
)
def test_whether_it_lives(run, shown, holder, steps, said):
    write(run, [row(step) for step in range(1, steps + 1)])
    if holder is not None:
        (run / ".lock").write_text(holder)
    assert said in shown(run)


def test_new_rows_alone_are_read(run, monkeypatch):
    watched = Watched(run)
    watched.look()
    seen: list[str] = []
    monkeypatch.setattr(
        json, "loads", lambda text, loads=json.loads: seen.append(text) or loads(text)
    )
    write(run, [row(4)], "a")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "ti')  # under way
    watched.look()
    watched.look()
    assert [one["step"] for one in watched.rows] == [1, 2, 3, 4]
    assert len(seen) == 1
    with (run / "metrics.jsonl").open("a") as file:
        file.write('me": 1300.0}\n')
    watched.look()
    assert [one["step"] for one in watched.rows] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("kept", [0, 1, 2])
@pytest.mark.parametrize("more", [0, 1, 5])
def test_a_file_that_a_resume_has_cut(run, kept, more):
    """Also where it has grown beyond its old length between two looks."""
    watched = Watched(run)
    watched.look()
    write(
        run,
        [row(step) for step in range(1, kept + 1)]
        + [row(kept + 1 + n, again=1.0) for n in range(more)],
    )
    watched.look()
    assert watched.rows == read_jsonl(run / "metrics.jsonl")


def test_a_file_that_is_gone_and_comes_back(run):
    watched = Watched(run)
    watched.look()
    (run / "metrics.jsonl").unlink()
    watched.look()
    assert watched.rows == []
    write(run, [row(1)])
    watched.look()
    assert [one["step"] for one in watched.rows] == [1]


def test_a_row_that_a_crash_tore(run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "ti\n' + json.dumps(row(5)) + "\n")
    watched = Watched(run)
    watched.look()
    assert [one["step"] for one in watched.rows] == [1, 2, 3, 5]


def test_alarms_that_ring(run, shown):
    write(run, [row(4, **{"alarm/kl_explosion": 1.0}), row(5)], "a")
    assert "ALARM kl_explosion: rollout/policy_kl above 1 nat per token" in shown(run)
    write(run, [row(6, **{"alarm/kl_explosion": 0.0})], "a")
    assert "ALARM" not in shown(run)


@pytest.mark.parametrize("where", ["rollouts", "elsewhere"])
def test_samples_of_the_latest_step(run, shown, tmp_path, where):
    folder = run / where if where == "rollouts" else tmp_path / where
    (run / "run_config.resolved.yaml").write_text(
        f"rollout_data_dir: {folder if where == 'elsewhere' else 'null'}\n"
    )
    folder.mkdir()
    sample = {"input": "1+1=", "ground_truth": "2", "output": "2", "score": 1.0}
    for step in (9, 10):
        rows = [
            {**sample, "step": step, "score": n / 10, "output": f"answer{n}\x1b[2J"}
            for n in range(5)
        ]
        text = "".join(json.dumps(one) + "\n" for one in rows)
        if where == "rollouts":
            (folder / f"step{step}.jsonl.gz").write_bytes(gzip.compress(text.encode()))
        else:
            (folder / f"step{step}.jsonl").write_text(text)
    out = shown(run)
    found = [line for line in out.splitlines() if line.startswith("[step")]
    assert found == [f"[step 10] score {score} · label 2" for score in ("0.4", "0.2", "0")]
    assert r"  answer: answer4\x1b[2J" in out  # without the escape
    assert "  prompt: 1+1=" in out


def test_supervised_training(run, shown):
    rows = [
        {
            "step": n,
            "time": float(n),
            "train/loss": 2.0 / n,
            "eval/loss": 3.0 / n,
            "train/grad_norm": 1.0,
            "train/margin": 0.5,
        }
        for n in (1, 2)
    ]
    write(run, rows)
    out = shown(run)
    assert " loss ● train 1 ● eval 1.5" in out
    assert " gradient norm ● 1" in out
    assert " margin ● 0.5" in out
    assert "reward" not in out


def test_a_run_that_has_ended_has_no_time_left(run, shown):
    assert "\nstep 3/12 · 60 s per step\n" in shown(run)


def test_several_runs_in_the_same_plots(run, shown, tmp_path):
    write(tmp_path / "other", [row(1), row(2)])
    out = shown(run, tmp_path / "other")
    assert f"{run}  ended" in out
    assert f"{tmp_path / 'other'}  ended" in out
    assert out.count("KL per token") == 1
    assert " reward ● run 0.3 ● other 0.2" in out
    assert f"\n{tmp_path / 'other'}\n" in out  # above its phases


def test_a_run_that_has_only_begun(tmp_path, shown):
    assert "waiting for the first step" in shown(tmp_path)


def test_ctrl_c_leaves_the_terminal_as_it_was(run, capsys, monkeypatch):
    frames = []

    def sleep(seconds: float) -> None:
        frames.append(seconds)
        if len(frames) == 2:
            raise KeyboardInterrupt

    write(run, [row(4, **{"train/loss": 1.0, "train/entropy": 1.0, "train/grad_norm": 1.0})], "a")
    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setenv("LINES", "24")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    main(["watch", str(run)])
    out = capsys.readouterr().out
    assert out.index("\x1b[?1049h") < out.index("step 4/12") < out.index("\x1b[?1049l")
    assert "gradient norm" not in out  # 24 lines have no room for it
    assert out.rindex("\x1b[?25h") > out.rindex("\x1b[?25l")


@pytest.mark.parametrize("package", ["rich.live", "plotext"])
def test_a_missing_package_names_the_extra(run, capsys, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as end:
        main(["watch", str(run)])
    assert end.value.code == 2
    assert "is missing: pip install 'lightppo[watch]'" in capsys.readouterr().err


def test_no_such_run(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main(["watch", str(tmp_path / "no")])
    assert end.value.code == 2
    assert (
        f"{tmp_path / 'no'}: no such folder; give the --save_path of a run"
        in capsys.readouterr().err
    )
