"""examples/notebooks: run from top to bottom without Jupyter, and what they show is what the run wrote."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path

import pytest
from support.ranks import REPO, run_ranks
from support.runs import logged
from support.tiny import read_jsonl

FOLDER = REPO / "examples" / "notebooks"
ORDER = ("first_run", "look_at_a_run")


@pytest.fixture(params=ORDER)
def notebook(request: pytest.FixtureRequest) -> dict:
    return json.loads((FOLDER / f"{request.param}.ipynb").read_text(encoding="utf-8"))


def test_all_are_tried():
    assert sorted(path.stem for path in FOLDER.iterdir()) == sorted(ORDER)


def test_they_hold_no_outputs_and_run_anywhere(notebook):
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell for cell in cells if cell["outputs"] or cell["execution_count"]] == []
    lines = [line for cell in cells for line in cell["source"]]
    assert [line for line in lines if line.lstrip().startswith(("%", "!"))] == []


def test_the_source_archive_has_all_examples():
    (patterns,) = (
        line.split()[2:]
        for line in (REPO / "MANIFEST.in").read_text().splitlines()
        if line.startswith("recursive-include examples ")
    )
    files = [path for path in (REPO / "examples").rglob("*.*") if "__pycache__" not in path.parts]
    assert [p for p in files if not any(fnmatch(p.name, pattern) for pattern in patterns)] == []


def test_they_run_and_show_what_the_run_wrote(tmp_path, monkeypatch):
    pytest.importorskip("plotly", minversion="6")
    monkeypatch.chdir(tmp_path)
    books = [FOLDER / f"{name}.ipynb" for name in ORDER]
    cells = Path(__file__).with_name("cells.py")
    output = run_ranks(cells, tmp_path / "found.json", *books, world_size=1).output
    found, run = json.loads((tmp_path / "found.json").read_text()), tmp_path / "runs/first_run/run"

    before, after = (read_jsonl(run / "eval" / f"step{step}.jsonl") for step in (0, 24))
    assert sum(row["score"] for row in before) < 3 < 12 <= sum(row["score"] for row in after)
    for old, new in zip(before, after, strict=True):
        words = [new["prompt"], old["response"], new["response"], new["label"]]
        words = [word for word in words if word]  # an answer may be empty
        assert words in [line.split() for line in output.splitlines()]

    trained = [row for row in logged(run) if "rollout/reward" in row]
    held_out = [row for row in logged(run) if "eval/reward" in row]
    steps = list(range(1, 25))
    lines = {
        ("reward", "samples of the step"): [row["rollout/reward"] for row in trained],
        ("lengths", "mean"): [row["rollout/response_length"] for row in trained],
        ("lengths", "max"): [row["rollout/response_length_max"] for row in trained],
    }
    for (figure, name), values in lines.items():
        assert found[figure][name] == [steps, pytest.approx(values)]
    assert found["reward"]["held-out prompts"] == [
        [0, 12, 24],
        pytest.approx([row["eval/reward"] for row in held_out]),
    ]
    rang = [row["step"] for row in trained if row.get("alarm/truncated")]
    alarm = next(row for row in found["alarms"] if row["alarm"] == "truncated")
    assert (alarm["steps"], alarm["first"], alarm["last"]) == (len(rang), rang[0], rang[-1])
    assert "--generate_max_len" in alarm["about"]

    assert {group["size"] for group in found["groups"]} == {16}
    assert len(found["groups"]) == 24 * 24
    assert found["most"]["std"] == max(group["std"] for group in found["groups"]) > 0.3
    equal = [row["rollout/equal_groups"] for row in trained]
    flat = [sum(g["std"] == 0 for g in found["groups"] if g["step"] == step) for step in steps]
    assert flat == pytest.approx([24 * share for share in equal])
    (shown,) = found["answers"].values()
    assert sum(shown[1]) == 16
