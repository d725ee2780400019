"""The commands of ``lightppo``: the table, help and mistakes, a run with its report and its evaluation; the wheel."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.ranks import REPO, run_ranks
from support.tiny import sums, write_jsonl

import lightppo
from lightppo.__main__ import COMMANDS, main
from lightppo.logging import report_page as report

HEAVY = {
    "torch",
    "numpy",
    "transformers",
    "deepspeed",
    "datasets",
    "accelerate",
    "vllm",
    "fastapi",
    "matplotlib",
}


def test_the_version(capsys):
    main(["--version"])
    assert capsys.readouterr().out == f"lightppo {lightppo.__version__}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "a command is missing"),
        (["pppo"], "unknown command 'pppo' (did you mean 'ppo'?)"),
        (["--bf16"], "'--bf16'"),
    ],
)
def test_no_command(words, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_help_and_mistakes_load_nothing_heavy():
    """Of every command, in one process: what it prints begins with its name."""
    words = [
        ["--help"],
        ["--version"],
        *([name, "--help"] for name in COMMANDS),
        ["ppo", "--gamma", "2"],
    ]
    code = f"""
import contextlib, io, json, sys
from lightppo.__main__ import main
shown = []
for words in {words!r}:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main(words)
    shown.append(out.getvalue())
print(json.dumps([shown, sorted(sys.modules)]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=REPO
    )
    assert done.returncode == 0, done.stderr
    shown, modules = json.loads(done.stdout)
    assert not HEAVY & {name.split(".")[0] for name in modules}
    assert all(f"\n  {name} " in shown[0] for name in COMMANDS)
    assert [
        text.startswith(f"usage: lightppo {name} ") for name, text in zip(COMMANDS, shown[2:])
    ] == [True] * len(COMMANDS)
    assert "--eval_data FILE" in shown[2 + list(COMMANDS).index("eval")]
    assert "lightppo ppo: error: --gamma" in done.stderr


def test_the_rank_that_deepspeed_puts_before_the_command(capsys, monkeypatch):
    with pytest.raises(SystemExit):
        main(["--local_rank=1", "sft", "--max_stepz", "3"])
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["lightppo sft: error: unknown flag --max_stepz (did you mean '--max_steps'?)"]
    with pytest.raises(SystemExit):
        main(["--local_rank=zero", "sft"])  # it is handed on
    assert "sft: error: --local_rank must be" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")  # one rank tells
    with pytest.raises(SystemExit):
        main(["--local_rank=1", "pppo"])
    assert capsys.readouterr().err == ""


def test_an_evaluation_trains_nothing(tiny_model, tmp_path):
    """``--no_val_only`` does not make it a training. Needs no prompts to train on; files are told apart."""
    (tmp_path / "command.py").write_text("from lightppo.__main__ import main\n\nmain()\n")
    (tmp_path / "reward.py").write_text(
        "def reward_func(queries, prompts, labels):\n    return [0.5] * len(queries)\n"
    )
    files = [
        write_jsonl(tmp_path / "first.jsonl", sums(3)),
        write_jsonl(tmp_path / "second.jsonl", sums(1)),
    ]
    words = [
        f"--pretrain={tiny_model}",
        f"--eval_data={','.join(files)}",
        "--no_val_only",
        "--eval_n_samples=3",
    ]
    words += [
        f"--reward_fn={tmp_path / 'reward.py'}",
        "--prompt_max_len=16",
        "--generate_max_len=4",
    ]
    words += ["--rollout_batch_size=4", "--train_batch_size=4", f"--save_path={tmp_path / 'out'}"]
    words += [f"--ckpt_path={tmp_path / 'ckpt'}"]
    told = run_ranks(tmp_path / "command.py", "eval", *words, world_size=1).output
    assert re.search(
        r"^ +accuracy +reward +mean@3 +best@3 +pass@1 +pass@2 +pass@3 ", told, re.MULTILINE
    )
    assert re.search(r"^second +1 +0.5 +0.5 .* 3$", told, re.MULTILINE)
    metrics = json.loads((tmp_path / "out" / "eval" / "step0.json").read_text())
    assert [(name, of["samples"]) for name, of in metrics.items()] == [
        ("all", 12),
        ("first", 9),
        ("second", 3),
    ]
    (row,) = report.read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert row["eval/reward"] == 0.5
    assert len(report.read_jsonl(tmp_path / "out" / "eval" / "step0.jsonl")) == 12
    assert not list(tmp_path.rglob("*.safetensors"))


class TestReport:
    @pytest.fixture
    def run(self, tmp_path) -> Path:
        rows = [{"step": step, "time": 0.0, "rollout/reward": step / 10} for step in (1, 2, 3)]
        rows[0]["eval/reward"], rows[2]["eval/reward"] = 0.25, 0.75
        write_jsonl(tmp_path / "metrics.jsonl", rows)
        return tmp_path

    def test_the_table_and_the_page(self, run, capsys):
        pytest.importorskip("plotly")
        main(["report", str(run)])
        out = capsys.readouterr().out
        assert re.search(
            r"^eval/reward +0\.25 +0\.75 +0\.75   1 → 3, best at 3$", out, re.MULTILINE
        )
        assert re.search(
            r"^rollout/reward +0\.1 +0\.3 +0\.3   1 → 3, best at 3$", out, re.MULTILINE
        )
        page = Path(out.splitlines()[-1])
        assert page.parent == run
        assert page.read_text().startswith("<!DOCTYPE html>")

    def test_without_evaluations_the_training_rows(self):
        rows = [
            {"step": 4, "rollout/reward": 0.5, "eval/reward": 1.0},
            {"step": 9, "rollout/reward": 2.0},
        ]
        table = report.before_and_after(rows)
        assert "eval/reward" not in table  # of one evaluation
        assert re.search(r"^rollout/reward +0\.5 +2 +2   4 → 9, best at 9$", table, re.MULTILINE)

    @pytest.mark.parametrize(
        ("words", "message"), [(["/nowhere"], "/nowhere/metrics.jsonl"), ([], "RUN")]
    )
    def test_no_run(self, words, message, capsys):
        with pytest.raises(SystemExit) as stopped:
            main(["report", *words])
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err


def test_a_wheel_holds_the_package_and_its_command(tmp_path):
    """Built from a copy, as building writes into the folder; installed beside nothing, its command answers."""
    pytest.importorskip("setuptools")
    source, site = tmp_path / "source", tmp_path / "site"
    no_cache = shutil.ignore_patterns("__pycache__")
    for name in ("lightppo", "examples"):
        shutil.copytree(REPO / name, source / name, ignore=no_cache)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPO / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    alone = ["--no-deps", "--no-index"]
    subprocess.run(
        [*pip, "wheel", str(source), "--no-build-isolation", *alone, "-w", str(tmp_path)],
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    files = set()
    for folder, base in (("lightppo", source), ("examples", source / "examples")):
        copied = (path for path in (source / folder).rglob("*") if path.is_file())
        prefix = "lightppo/examples/" if folder == "examples" else ""
        files |= {prefix + path.relative_to(base).as_posix() for path in copied}
    held = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in held if name.startswith("lightppo/")} == files
    subprocess.run([*pip, "install", *alone, "--target", str(site), str(wheel)], check=True)
    environment = os.environ | {"PYTHONPATH": str(site)}
    outputs = {}
    for words in ("--version", "quickstart --help"):
        done = subprocess.run(
            [site / "bin" / "lightppo", *words.split()], env=environment, cwd=tmp_path,
            capture_output=True, text=True, timeout=60
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        outputs[words] = done.stdout
    assert outputs["--version"] == f"lightppo {lightppo.__version__}\n"
    assert "--env {none,lookup,guess}" in outputs["quickstart --help"]
