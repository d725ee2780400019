"""Reports from the files of a run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.runs import fitted

from lightppo.errors import ConfigError, ReportError
from lightppo.trainer.metrics import TIMED
from lightppo.trainer.report import (
    PANELS,
    SFT_PANELS,
    before_and_after,
    draw_training,
    evaluations,
    plot_training,
    read_jsonl,
    read_metrics,
    series,
    summary,
)

ROWS = [
    {"step": 0, "time": 0.0, "eval/accuracy": 0.5, "eval/reward": 0.4},
    {"step": 1, "time": 1.0, "rollout/reward": 0.5, "rollout/kl": 0.0, "rollout/response_length": 3.0},
    {"step": 2, "time": 2.0, "rollout/reward": 0.6, "rollout/kl": None, "rollout/response_length": 3.5},
    {"step": 3, "time": 3.0, "rollout/reward": 0.7, "rollout/kl": 0.2, "rollout/response_length": 4.0},
    {"step": 3, "time": 3.5, "eval/accuracy": 0.9, "eval/reward": 0.8},
]


@pytest.fixture(autouse=True)
def pictures() -> None:
    """Are drawn."""


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(line + "\n" for line in lines))
    return path


def test_rows_come_back(tmp_path):
    path = write(tmp_path / "metrics.jsonl", *[json.dumps(row) for row in ROWS])
    assert read_metrics(path) == ROWS


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"step": 1}', '{"step": 2, "rew'], r"metrics\.jsonl, line 2:.*JSON"),
        (['{"step": 1}', "[1, 2]"], r"metrics\.jsonl, line 2:.*list"),
        (['{"step": 1}', '{"time": 2.0}'], r'metrics\.jsonl, line 2:.*"step"'),
        ([], r"metrics\.jsonl"),
    ],
)
def test_a_damaged_file_is_named_with_its_line(tmp_path, lines, message):
    with pytest.raises(ReportError, match=message):
        read_metrics(write(tmp_path / "metrics.jsonl", *lines))


def test_a_last_row_that_is_not_whole_is_left_out(tmp_path):
    path = write(tmp_path / "metrics.jsonl", '{"step": 1}')
    path.write_text(path.read_text() + '{"step": 2, "rew')
    assert read_metrics(path) == [{"step": 1}]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ReportError, match=r"none\.jsonl"):
        read_jsonl(tmp_path / "none.jsonl")


def test_series_leaves_out_what_was_not_logged_or_not_finite():
    assert series(ROWS, "rollout/kl") == ([1, 3], [0.0, 0.2])
    assert series(ROWS, "train/policy_loss") == ([], [])


def test_evaluations_in_order():
    assert [row["step"] for row in evaluations(ROWS)] == [0, 3]


def test_one_evaluation_is_not_a_comparison():
    with pytest.raises(ReportError, match="--val_before_train"):
        evaluations(ROWS[:-1])


def test_panels_show_the_metrics():
    figure = draw_training(ROWS, title="a run")
    panels = {axes.get_title(): axes for axes in figure.axes}
    assert list(panels) == [panel.title for panel in PANELS]

    def drawn(title: str) -> dict[str, tuple[list, list]]:
        lines = panels[title].lines
        return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in lines}

    assert drawn("reward") == {
        "training prompts": ([1, 2, 3], [0.5, 0.6, 0.7]),
        "held-out prompts": ([0, 3], [0.4, 0.8]),
    }
    assert drawn("KL to the reference (nats per token)") == {"training prompts": ([1, 3], [0.0, 0.2])}
    assert drawn("accuracy") == {"held-out prompts": ([0, 3], [0.5, 0.9])}
    assert drawn("response length (tokens)") == {"training prompts": ([1, 2, 3], [3.0, 3.5, 4.0])}


def test_an_empty_panel_says_so():
    axes = draw_training(ROWS[:1]).axes[1]
    assert [text.get_text() for text in axes.texts] == ["not logged"]


def test_png(tmp_path):
    plot_training(ROWS, tmp_path / "plot.png")
    data = (tmp_path / "plot.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    # width and height in the header: 11 x 7 inches at 100 dots
    assert (int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")) == (1100, 700)


def test_matplotlib_is_loaded_only_to_draw():
    code = "import sys, lightppo.trainer.report; sys.exit(any(m in sys.modules for m in ('matplotlib', 'torch')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_table_has_means_of_tenths_and_the_best_step():
    rows = [{"step": n, "rollout/reward": n / 100, "rollout/kl": 0.1, "train/loss": 1.0 / n} for n in range(1, 21)]
    rows = [{"step": 0, "eval/reward": 0.25}, *rows, {"step": 20, "eval/reward": 0.75}]
    header, *lines = before_and_after(rows).split("\n")
    assert header.split() == ["first", "last", "best", "steps"]
    assert [line.split() for line in lines] == [
        ["eval/reward", "0.25", "0.75", "0.75", "0", "→", "20,", "best", "at", "20"],
        ["rollout/reward", "0.015", "0.195", "0.2", "1", "→", "20,", "best", "at", "20"],  # steps 1 and 2, 19 and 20
        ["rollout/kl", "0.1", "0.1", "1", "→", "20"],
        ["train/loss", "0.75", "0.05132", "0.05", "1", "→", "20,", "best", "at", "20"],
    ]


def test_supervised_training_has_panels_of_its_own(tmp_path):
    rows = [{"step": n, "time": 0.0, "train/loss": 1 / n, "train/grad_norm": 0.5} for n in range(1, 6)]
    assert [axes.get_title() for axes in draw_training(rows).axes] == [panel.title for panel in SFT_PANELS]


def test_the_summary_of_a_run_without_rows_without_matplotlib_or_room(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    assert "none.jsonl" in summary(tmp_path / "none.jsonl")
    rows = [json.dumps({"step": n, "rollout/reward": 0.5}) for n in range(1, 10)]
    assert "curves" not in summary(write(path, *rows[:2]))
    assert not (tmp_path / "plot.png").exists()
    write(path, *rows)
    (tmp_path / "plot.png").mkdir()
    assert "no picture" in summary(path)
    assert "rollout/reward" in summary(path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    assert summary(path).endswith("no picture: pip install 'lightppo[plots]'")


@pytest.mark.usefixtures("world")
def test_what_a_run_says(make_config, tmp_path, capsys, assets):
    options = {"eval_data": assets["prompt_data"], "save_steps": 2, "profile_steps": [2], "num_examine": 1}
    options["old_log_probs"] = "forward"
    fitted(make_config(total_training_steps=4, num_episodes=2, actor_learning_rate=1e-4, **options))
    lines, run = capsys.readouterr().out.splitlines(), tmp_path / "run"
    text = "\n".join(lines)
    assert "  training: " in text
    assert "gamma=" not in text
    assert re.search(r"^models: actor [\d,]+ parameters, critic [\d,]+ parameters, reference", text, re.MULTILINE)
    steps = [line for line in lines if line.startswith("step ")]
    pattern = r"step (\d)/4 · reward [\d.]+ · kl [-\de.]+ · entropy [\d.]+ · len [\d.]+ · [\d.]+ s · ETA \d+:\d\d"
    assert [re.fullmatch(pattern, line)[1] for line in steps] == ["1", "2", "3", "4"]
    start = next(i for i, line in enumerate(lines) if line.startswith("[step 1] prompt: "))
    assert [line.split()[0] for line in lines[start + 1 : start + 3]] == ["answer:", "label"]
    end = lines[lines.index("finished: 4 steps") :]
    assert any(line.startswith("eval/accuracy ") for line in end)
    assert f"curves: {run}/plot.png" in end
    assert f"files: model and logs in {run}, checkpoints in {tmp_path}/ckpt, profiles in {run}/profile" in end
    assert any(line.startswith("generate: ") and f"'{run}'" in line for line in end)
    assert any(line.startswith(f"evaluate: lightppo eval --config {run}/run_config.yaml ") for line in end)
    assert any(line.startswith("go on: ") for line in end)
    assert (run / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in (run / "profile").iterdir()] == ["step2_rank0.json.gz"]
    rows = read_metrics(run / "metrics.jsonl")
    timed = {name for row in rows for name in row if name.startswith("perf/time_")}
    assert timed >= {f"perf/time_{part}" for part in (*TIMED, "eval", "save", "step")}
    for row in rows:
        assert all(value > 0 for name, value in row.items() if name in timed)
        if "perf/time_step" in row:
            assert row["perf/time_actor_update"] + row["perf/time_critic_update"] <= row["perf/time_train"]
            assert (
                sum(row[f"perf/time_{p}"] for p in ("old_log_probs", "reference", "values"))
                <= row["perf/time_experience"]
            )


@pytest.mark.usefixtures("world")
def test_a_step_to_profile_that_never_comes_is_refused(make_config):
    with pytest.raises(ConfigError, match="--profile_steps 9: the run has 3 steps"):
        fitted(make_config(profile_steps=[1, 9], actor_learning_rate=0.0))
