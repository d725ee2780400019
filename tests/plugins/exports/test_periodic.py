"""Exports: which are kept, which is the best."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.fakes import FakeStrategy
from support.loops import IdleLoop

from lightppo.config import CheckpointConfig, PPOConfig
from lightppo.errors import ConfigError
from lightppo.plugins.exports.periodic import Exports, save_hf
from lightppo.trainer.checkpointing import RunCheckpointer

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


def test_best_metric_keeps_the_best_evaluation_apart_from_rotation(parts, tmp_path):
    class Evaluated:
        def evaluate(self, step: int) -> dict[str, float]:
            return {"eval/accuracy": [0.2, 0.5, 0.4, 0.7, 0.1][step], "eval/reward": 0.0}

    exports: list[Path] = []

    class Strategy(FakeStrategy):
        def save_model(self, model, tokenizer, folder: Path, files: Mapping[str, str]) -> None:
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (folder / name).write_text(text)
            exports.append(folder)

    options = {
        "save_path": str(tmp_path / "run"),
        "ckpt_path": str(tmp_path / "ckpt"),
        "eval_steps": 1,
    }
    config = PPOConfig.from_flat(**options, best_metric="eval/accuracy")
    checkpointer = RunCheckpointer(Strategy(), config.checkpoint, {"actor": "actor"}, None)
    best = tmp_path / "ckpt" / "best_hf" / "best.json"

    loop = IdleLoop(config, checkpointer=checkpointer, evaluator=Evaluated())
    loop.evaluate_step(0)
    assert not best.exists()  # the start is the bar to pass
    for step, kept in ((1, 1), (2, 1), (3, 3)):
        loop.evaluate_step(step)
        assert json.loads(best.read_text())["step"] == kept
    assert len(exports) == 2

    resumed = IdleLoop(config, checkpointer=checkpointer, evaluator=Evaluated(), start_step=3)
    exports = next(callback for callback in resumed.callbacks if isinstance(callback, Exports))
    assert exports.best == 0.7
    resumed.evaluate_step(4)  # 0.1: the best of before stays
    assert json.loads(best.read_text()) == {"step": 3, "metric": "eval/accuracy", "value": 0.7}

    wrong = config.with_options(best_metric="eval/acc")
    wrong = IdleLoop(wrong, checkpointer=checkpointer, evaluator=Evaluated())
    with pytest.raises(ConfigError, match=r"--best_metric eval/acc .*eval/accuracy"):
        wrong.evaluate_step(1)
