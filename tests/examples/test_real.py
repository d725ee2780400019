"""The example with a real chat model: its rule, its prompts, its table; a run of it with a tiny model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.ranks import REPO

from lightppo.config import parse_args
from lightppo.config.rules import needs_critic


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("The park is white in winter.", 1.0),
        (" Is the park open in winter? ", 1.0),
        ("The winter park.", 0.0),  # too short
        ("The parks are white in winter.", 0.0),  # another word
        ("The park is white in winter. I like it.", 0.0),
        ("The park is white in winter", 0.0),
        ("Here it is:\nThe park is white in winter.", 0.0),
        ("The park " + "is very " * 10 + "white in winter.", 0.0),
        ("", 0.0),
    ],
)
def test_the_rule_by_hand(real, answer, score):
    def scores(reason: str) -> object:
        call = {"responses": [answer], "finish_reasons": [reason]}
        return real("sentences").reward_func(["query"], ["prompt"], ["winter park"], **call)

    assert scores("stop") == {"rewards": [score], "extra_logs": {"accuracy": [score]}}
    assert scores("length") == {"rewards": [0.0], "extra_logs": {"accuracy": [0.0]}}


def test_held_out_words_are_in_no_training_prompt(real, tmp_path):
    real("sentences").main(tmp_path, prompts=512, held_out=256)
    prompts, held_out = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("prompts.jsonl", "eval.jsonl")
    )
    assert (len({row["label"] for row in prompts}), len({row["label"] for row in held_out})) == (
        512,
        256,
    )
    trained = {word for row in prompts for word in row["label"].split()}
    assert trained.isdisjoint(word for row in held_out for word in row["label"].split())
    first, second = prompts[0]["label"].split()
    asked = f'Write one short sentence with the words "{first}" and "{second}".'
    assert prompts[0]["input"] == [{"role": "user", "content": asked}]


def write_run(folder: Path, before: list[float], after: list[float]) -> Path:
    """Metrics and evaluations as a run of two steps leaves them, of which one was repeated."""
    (folder / "eval").mkdir(parents=True)
    metrics = [
        {"step": 0, "eval/accuracy": 0.0, "perf/time_eval": 30.0},
        {"step": 1, "rollout/samples": 128, "perf/time_step": 60.0},
        {"step": 1, "rollout/samples": 128, "perf/time_step": 60.0},
        {"step": 2, "rollout/samples": 128, "perf/time_step": 60.0},
        {"step": 2, "eval/accuracy": 0.0, "perf/time_eval": 0.0},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    for step, scores in ((0, before), (2, after)):
        rows = [
            {"label": f"w{i} v{i}", "response": f"step {step}", "score": score}
            for i, score in enumerate(scores)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "eval" / f"step{step}.jsonl").write_text(text)
    return folder


def test_the_table_and_its_page(real, tmp_path, monkeypatch):
    run = real("run")
    folder = write_run(tmp_path / "grpo1", before=[1, 0, 0, 0] * 4, after=[1, 1, 0, 1] * 4)
    found = run.outcome("grpo, seed 1", folder)
    assert (found.before, found.after, found.rise) == (0.25, 0.75, 0.5)
    assert found.standard_error == pytest.approx((4 / 15) ** 0.5 / 4)
    assert (found.answers, found.minutes, found.is_clear) == (256, 3.5, True)
    assert found.example == ("w1 v1", "step 0", "step 2")
    same = run.outcome("x", write_run(tmp_path / "x", [0, 1, 0, 1], [1, 0, 0, 1]))
    assert not same.is_clear
    page = tmp_path / "page.md"
    monkeypatch.setattr(run, "PAGE", page)
    page.write_text(run.PAGE_START + "old\n" + run.PAGE_END)
    run.write_page([found])
    assert page.read_text().splitlines()[1:-1] == [
        "run | before | after | rise | answers trained on | minutes",
        "---|---:|---:|---:|---:|---:",
        "grpo, seed 1 | 0.250 | 0.750 | +0.500 ± 0.129 | 256 | 3.5",
    ]
    docs = (REPO / "docs" / "real-model.md").read_text()
    assert docs.count(run.PAGE_START) == docs.count(run.PAGE_END) == 1


def test_each_run_is_trained_once_and_goes_on_where_it_was(real, tmp_path, monkeypatch, capsys):
    run = real("run")
    trained = []

    def started(command: list[object], **_: object) -> None:
        words = [str(word) for word in command]
        if "ppo" in words:
            config = parse_args(words[words.index("ppo") + 1 :]).resolved()
            folder = Path(config.checkpoint.save_path)
            trained.append((folder.name, config.strategy.seed, needs_critic(config)))
            assert config.checkpoint.resume == "auto"
            assert config.training.total_training_steps % config.checkpoint.save_steps == 0
            prompts = config.training.total_training_steps * config.rollout.rollout_batch_size
            assert prompts <= 512  # rows of prompts.jsonl
            write_run(folder, before=[0.0] * 8, after=[1.0, 0.0] * 4)
            (folder / "checkpoints").mkdir()
            if len(trained) == 3:  # stopped once
                raise SystemExit(143)
            (folder / "config.json").touch()

    monkeypatch.setattr(run, "run", started)
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "eval.jsonl").touch()
    with pytest.raises(SystemExit):
        run.main(run_dir=tmp_path, model=tmp_path)
    shutil.rmtree(tmp_path / "grpo3")
    run.main(run_dir=tmp_path, model=tmp_path)
    names = ["grpo1", "grpo2", "grpo3", "grpo3", "ppo1"]
    assert trained == [(name, int(name[-1]), name == "ppo1") for name in names]
    assert "ppo, seed 1      0.000   0.500  +0.500 ± 0.189" in capsys.readouterr().out
    assert not list(tmp_path.glob("*/checkpoints"))
    write_run(tmp_path / "grpo4", before=[1.0, 0.0] * 4, after=[0.0, 1.0] * 4)
    (tmp_path / "grpo4" / "config.json").touch()
    with pytest.raises(SystemExit, match="no clear rise: grpo, seed 4"):
        run.main(run_dir=tmp_path, model=tmp_path, seeds=(4, 1))


def test_another_file_than_the_models_is_refused(real, tmp_path):
    run = real("run")
    (tmp_path / "download").mkdir()
    (tmp_path / "download" / run.GGUF).write_bytes(b"GGUF")
    with pytest.raises(SystemExit, match="is not the file"):
        run.converted(tmp_path)
