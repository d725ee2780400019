"""Exports: which are kept, which is the best."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.fakes import FakeStrategy
from support.loops import IdleLoop

from lightppo.checkpoint.run_checkpointer import RunCheckpointer
from lightppo.checkpoint.run_exports import best_line, save_hf
from lightppo.config import CheckpointConfig, PPOConfig
from lightppo.errors import ConfigError

ages = itertools.count(1)


class ExportingStrategy(FakeStrategy):
    """Writes the names of what it is to export; each export is younger than the last."""

    def save_model(self, model: str, tokenizer: Any, output_dir: Path) -> None:
        output_dir.mkdir(parents=True, exist_ok=True)
        (output_dir / "model").write_text(f"{model} {tokenizer}")
        age = 1_000_000_000 * next(ages)
        os.utime(output_dir, ns=(age, age))


def exporter(**options: Any) -> RunCheckpointer:
    config = CheckpointConfig(**options)
    return RunCheckpointer(ExportingStrategy(), config, {"actor": "ACTOR"}, "TOKENIZER")


def test_exports_alone(tmp_path):
    mine = exporter(disable_ds_ckpt=True, save_hf_ckpt=True, max_ckpt_num=2)
    for step in (8, 9, 10):
        mine.save(tmp_path, step, {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["global_step10_hf", "global_step9_hf"]
    assert (tmp_path / "global_step10_hf" / "model").read_text() == "ACTOR TOKENIZER"
    assert mine.candidates(tmp_path) == []


def test_the_oldest_exports_go_not_those_with_the_lowest_number(tmp_path):
    mine = exporter(max_ckpt_num=2)
    for step in (90, 100, 1, 2):  # started anew after step 100
        save_hf(mine, tmp_path, step)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["global_step1_hf", "global_step2_hf"]
    save_hf(mine, tmp_path, 1)  # once more: takes its own place
    assert sorted(p.name for p in tmp_path.iterdir()) == ["global_step1_hf", "global_step2_hf"]


def test_other_folders_are_no_exports(tmp_path):
    for name in ("global_step1_hf.bak", "global_stepX_hf", "mine"):
        (tmp_path / name).mkdir()
    mine = exporter(max_ckpt_num=1)
    for step in (1, 2):
        save_hf(mine, tmp_path, step)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        *("global_step1_hf.bak", "global_step2_hf", "global_stepX_hf", "mine")
    ]


class Evaluated:
    """Accuracies by step."""

    def __init__(self, *accuracies: float) -> None:
        self.accuracies = accuracies

    def evaluate(self, step: int) -> dict[str, float]:
        return {"eval/accuracy": self.accuracies[step], "eval/reward": 0.0}


class KeepingStrategy(FakeStrategy):
    """Writes the note of each export."""

    def save_model(
        self, model: Any, tokenizer: Any, folder: Path, files: Mapping[str, str]
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)


@pytest.fixture
def best_loop(tmp_path):
    """A loop that keeps its best, and its folder's note; ``before`` is one that it goes on from."""
    options = {"save_path": str(tmp_path / "run"), "ckpt_path": str(tmp_path / "ckpt")}
    config = PPOConfig.from_flat(**options, eval_steps=1, best_metric="eval/accuracy")

    def make(evaluated: Evaluated, run: str = "a run", step: int = 0, **more: Any) -> IdleLoop:
        own = {name: more.pop(name) for name in ("before",) if name in more}
        changed = config.with_options(**more)
        saver = RunCheckpointer(KeepingStrategy(), changed.checkpoint, {"actor": "actor"}, None)
        saver.run, saver.saved = run, []
        saver.save = lambda root, step, state: saver.saved.append((root, step, state))
        return IdleLoop(changed, checkpointer=saver, evaluator=evaluated, start_step=step, **own)

    return make


def note_of(loop: IdleLoop) -> dict[str, Any]:
    return json.loads(Path(loop.ckpt_path, "best_hf", "best.json").read_text())


def test_best_metric_keeps_the_best_evaluation_apart_from_rotation(best_loop):
    evaluated = Evaluated(0.2, 0.5, 0.4, 0.7, 0.1)
    loop = best_loop(evaluated)
    loop.evaluation.evaluate_step(0)
    assert not Path(loop.ckpt_path).exists()  # the start is the bar to pass
    for step, kept in ((1, 1), (2, 1), (3, 3)):
        loop.evaluation.evaluate_step(step)
        assert note_of(loop)["step"] == kept
    loop.save_checkpoint(3)

    resumed = best_loop(evaluated, step=3, before=loop)
    resumed.evaluation.evaluate_step(4)  # 0.1: the best of before stays
    best = {"run": "a run", "step": 3, "metric": "eval/accuracy", "value": 0.7}
    assert note_of(resumed) == best

    wrong = best_loop(evaluated, best_metric="eval/acc")
    with pytest.raises(ConfigError, match=r"--best_metric eval/acc .*eval/accuracy"):
        wrong.evaluation.evaluate_step(1)


def test_a_resumed_run_has_to_pass_the_same_bar(best_loop):
    evaluated = Evaluated(0.9, 0.5, 0.6, 0.95)
    loop = best_loop(evaluated)
    for step in (0, 1):
        loop.evaluation.evaluate_step(step)
    loop.save_checkpoint(1)
    resumed = best_loop(evaluated, step=1, before=loop)
    resumed.evaluation.evaluate_step(2)  # better than step 1, not than the start
    assert not Path(resumed.ckpt_path, "best_hf").exists()
    resumed.evaluation.evaluate_step(3)
    assert note_of(resumed)["step"] == 3


def test_the_best_of_a_step_that_is_done_again_is_no_bar(best_loop):
    loop = best_loop(Evaluated(0.1, 0.3, 0.8))
    loop.evaluation.evaluate_step(1)
    loop.save_checkpoint(1)
    loop.evaluation.evaluate_step(2)
    assert note_of(loop)["step"] == 2
    resumed = best_loop(Evaluated(0.1, 0.3, 0.4), step=1, before=loop)
    told = " ".join(resumed.strategy.printed)
    assert "best_hf is of step 2, which this run does again" in told
    resumed.evaluation.evaluate_step(2)
    assert note_of(resumed)["value"] == 0.4


def test_the_best_of_another_run_is_no_bar(best_loop):
    other = best_loop(Evaluated(0.1, 0.8), run="another run")
    other.evaluation.evaluate_step(1)
    other.save_checkpoint(1)
    # --resume PATH: it goes on from there, and its own best begins with the weights that it got
    mine = best_loop(Evaluated(0.1, 0.8, 0.7), step=1, before=other)
    mine.evaluation.evaluate_step(2)
    assert note_of(mine) == {
        "run": "a run",
        "step": 2,
        "metric": "eval/accuracy",
        "value": 0.7,
    }


def test_a_number_that_is_not_finite_is_never_the_best(best_loop):
    loop = best_loop(Evaluated(0.1, math.nan, 0.3, math.inf))
    for step in range(4):
        loop.evaluation.evaluate_step(step)
    assert note_of(loop)["step"] == 2


def test_a_checkpoint_without_the_bar_has_it_from_the_export(best_loop):
    evaluated = Evaluated(0.1, 0.8, 0.7)
    loop = best_loop(evaluated)
    loop.evaluation.evaluate_step(1)
    old = best_loop(evaluated, step=1)  # a checkpoint of an older lightppo
    old.evaluation.evaluate_step(2)
    assert note_of(old)["value"] == 0.8


def test_the_end_of_a_run_says_whose_the_best_is(best_loop):
    def told(loop: IdleLoop) -> str:
        folder = Path(loop.ckpt_path, "best_hf")
        return best_line(loop.checkpointer, folder, "eval/accuracy").replace(str(folder), "FOLDER")

    none = "best: none is kept, as no evaluation after the start had a better eval/accuracy"
    loop = best_loop(Evaluated(0.2, 0.5))
    assert told(loop) == none
    for step in (0, 1):
        loop.evaluation.evaluate_step(step)
    assert told(loop) == "best: eval/accuracy 0.5 after step 1, in FOLDER"

    other = best_loop(Evaluated(0.2, 0.1), run="another run")
    for step in (0, 1):
        other.evaluation.evaluate_step(step)
    assert told(other) == f"{none}; FOLDER is of another run or metric"
