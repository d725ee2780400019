"""``lightppo diff``: the first step and number in which two runs differ, how far apart they go, what else differs."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.tiny import read_jsonl, write_jsonl

from lightppo.__main__ import main
from lightppo.cli.diff import differences


@pytest.fixture
def diff(capsys) -> Callable[..., tuple[int, str]]:
    """``diff(run, run, *flags)``: exit code and output."""

    def command(*words: Any) -> tuple[int, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["diff", *map(str, words)])
        return ended.value.code, "".join(capsys.readouterr())

    return command


@pytest.fixture
def run(tmp_path) -> Callable[..., Path]:
    """``run("a", rows)``: the folder of a run that has only recorded these."""

    def make(name: str, rows: list[dict[str, Any]]) -> Path:
        (tmp_path / name).mkdir()
        write_jsonl(tmp_path / name / "metrics.jsonl", [{"time": 1.5, **row} for row in rows])
        return tmp_path / name

    return make


def test_a_run_and_its_copy(diff, recorded, copied):
    code, out = diff(recorded / "one", copied("one"))
    assert code == 0
    assert out.splitlines()[2:] == ["5 steps in both", "all that both recorded is equal", "", "options: 0 differ", "",
                                    "versions, ranks, files: 0 differ"]  # fmt: skip


def test_one_rank_and_two_another_seed_and_reward_file(diff, recorded, copied):
    run = copied("two")
    options = yaml.safe_load((run / "run_config.resolved.yaml").read_text())
    (run / "run_config.resolved.yaml").write_text(yaml.safe_dump({**options, "seed": 8}))
    start = json.loads((run / "run_metadata.jsonl").read_text())
    start["content"]["reward_fn"], start["versions"]["torch"] = "0123", "2.0"
    later = start | {"step": 2, "versions": start["versions"] | {"torch": "2.1"}}
    write_jsonl(run / "run_metadata.jsonl", [start, later])
    code, out = diff(recorded / "one", run, "--tolerance", "1e-5")
    assert code == 1
    lines = [line.strip() for line in out.splitlines()]
    assert "seed: 7 and 8" in lines
    assert "zero_stage: 0 and 3" in lines
    assert 'ranks: "1" and "2"' in lines
    assert any(
        re.fullmatch(r'torch: "2\.\d.*" and "2\.0, 2\.1 from step 3 on"', line) for line in lines
    )
    assert any(re.fullmatch(r'content of --reward_fn: "\w{16}" and "0123"', line) for line in lines)
    assert not any(line.startswith("content of --pretrain") for line in lines)
    # what ranks train on in one step is shuffled on each: the first rollouts are the same, the first gradients are not
    assert re.search(
        r"^first number that differs: step 1, train/\w+: -?[\d.e-]+ and -?[\d.e-]+$",
        out,
        re.MULTILINE,
    )
    assert re.search(
        r"^first sample that differs: step 2, prompt \d+, sample \d, output from character \d on: ",
        out,
        re.M,
    )
    table = [
        line.split() for line in out.partition("quantity ")[2].partition("\n\n")[0].splitlines()[1:]
    ]
    assert [row[1] for row in table] == sorted(row[1] for row in table)
    assert {row[0] for row in table} >= {
        "rollout/reward",
        "train/policy_loss",
        "train/actor_grad_norm",
    }


def test_the_first_quantity_is_the_one_that_arises_first():
    names = ["eval/reward", "train/actor_grad_norm", "train/policy_loss", "rollout/kl", "rollout/reward", "reward/acc",
             "rollout/response_length"]  # fmt: skip
    one, other = dict.fromkeys(names, 1.0), dict.fromkeys(names, 2.0)
    found = differences(
        [(3, one, one), (4, one, one | {"train/policy_loss": 5.0}), (5, one, other)]
    )
    assert list(found) == [
        "train/policy_loss",
        *(n for n in reversed(names) if n != "train/policy_loss"),
    ]
    assert found["train/policy_loss"] == [(4, 1.0, 5.0), (5, 1.0, 2.0)]


def test_what_no_clock_measured_counts(diff, run):
    """Evaluations of one run alone, and steps that one did not record, are no difference; NaN and a lacking one are."""
    row = {"step": 1, "rollout/reward": 0.5, "perf/time_step": 3.0, "train/ratio": None}
    a = run("a", [row, {"step": 1, "eval/reward": 1.0}, {"step": 2, "rollout/reward": 1.0}])
    b = run("b", [row | {"perf/time_step": 4.0, "time": 9.0}])
    code, out = diff(a, b)
    assert (code, out.splitlines()[:4]) == (
        *(
            0,
            [
                f"a: {a}, steps 1 to 2",
                f"b: {b}, steps 1 to 1",
                "1 steps in both",
                "all that both recorded is equal",
            ],
        ),
    )
    assert "options: not recorded in a and b" in out
    code, out = diff(
        a, run("c", [{"step": 1, "rollout/reward": 0.5, "train/ratio": 1.0, "train/new": 2.0}])
    )
    assert (code, "first number that differs: step 1, train/ratio: None and 1.0" in out) == (
        1,
        True,
    )
    assert re.search(r"^train/ratio +1 +null +1 +inf +1$", out, re.MULTILINE)
    assert re.search(r"^train/new +1 +missing +2 +inf +1$", out, re.MULTILINE)
    code, out = diff(a, run("d", [{"step": 7, "rollout/reward": 0.5}]))
    assert (code, "0 steps in both" in out) == (1, True)


@pytest.mark.parametrize(("tolerance", "code"), [("0", 1), ("1e-6", 1), ("1e-3", 0)])
def test_the_tolerance(diff, run, tolerance, code):
    rows = [{"step": 1, "rollout/reward": 1000.0, "rollout/kl": 0.01}]
    a, b = run("a", rows), run("b", [rows[0] | {"rollout/reward": 1000.5, "rollout/kl": 0.0105}])
    assert diff(a, b, "--tolerance", tolerance)[0] == code


def test_how_far_apart_from_then_on(diff, run):
    rows = [{"step": step, "rollout/reward": 1.0} for step in (1, 2, 3, 4)]
    other = [dict(row) for row in rows]
    for row, value in zip(other[1:], (1.5, 4.0, 0.5)):
        row["rollout/reward"] = value
    _, out = diff(run("a", rows), run("b", other))
    assert re.search(r"^rollout/reward +2 +1 +1\.5 +3 +3$", out, re.MULTILINE)


def test_no_run(diff, recorded, tmp_path):
    code, out = diff(recorded / "one", tmp_path)
    assert (code, f"lightppo diff: error: {tmp_path}/metrics.jsonl: cannot be read" in out) == (
        2,
        True,
    )


def test_rollout_files_of_a_moved_run_are_found(diff, recorded, copied):
    run = copied("one")
    path = run / "rollouts" / "step3.jsonl"
    rows = read_jsonl(path)
    rows[1]["score"] = -1.0
    write_jsonl(path, rows)
    code, out = diff(recorded / "one", run)
    which = f"prompt {rows[1]['index']}, sample {rows[1]['sample_index']}"
    assert (code, f"first sample that differs: step 3, {which}, score: " in out) == (1, True)
    shutil.rmtree(run / "rollouts")  # then those at the place that the option names
    assert diff(recorded / "one", run)[0] == 0


def test_a_runs_file_of_metrics_names_the_run(diff, run):
    one = run("a", [{"step": 1, "rollout/reward": 0.5}])
    code, said = diff(one / "metrics.jsonl", one)
    assert code == 0
    assert f"a: {one}, steps 1 to 1" in said
