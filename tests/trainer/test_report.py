"""Reports from the files of a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lightppo.errors import ReportError
from lightppo.trainer.report import PANELS, draw_training, evaluations, plot_training, read_jsonl, read_metrics, series

ROWS = [
    {"step": 0, "time": 0.0, "eval/accuracy": 0.5, "eval/reward": 0.4},
    {"step": 1, "time": 1.0, "rollout/reward": 0.5, "rollout/kl": 0.0, "rollout/response_length": 3.0},
    {"step": 2, "time": 2.0, "rollout/reward": 0.6, "rollout/kl": None, "rollout/response_length": 3.5},
    {"step": 3, "time": 3.0, "rollout/reward": 0.7, "rollout/kl": 0.2, "rollout/response_length": 4.0},
    {"step": 3, "time": 3.5, "eval/accuracy": 0.9, "eval/reward": 0.8},
]


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
