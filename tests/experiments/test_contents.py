"""Marks of the files and folders that options name: other content has another one, a copy the same."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from lightppo.experiments.contents import mark_of, marks_of


@pytest.fixture
def model(tmp_path) -> Path:
    """A folder like that of a model, with weights that are not read whole."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(3 << 20))
    return tmp_path / "model"


def test_a_folder_has_the_content_of_its_files(model, tmp_path):
    first = mark_of(model)
    assert mark_of(shutil.copytree(model, tmp_path / "copy")) == first
    for path in model.iterdir():
        os.utime(path, (1, 1))
    assert mark_of(model) == first
    (model / "chat_template.jinja").write_text("{{ messages}} ")
    second = mark_of(model)
    assert second != first
    (model / "model.safetensors").write_bytes(bytes([1]) * (3 << 20))
    assert mark_of(model) not in (first, second)


def test_what_does_not_count(model):
    first = mark_of(model, is_model=True)
    for name in (".lock", "report.html", "checkpoints_ppo/x.pt"):
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text("new")
    assert mark_of(model, is_model=True) == first
    assert mark_of(model) != first  # rows may be in folders below


def test_the_files_that_options_name(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("reward.py", "a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(name)
    options = {
        "reward_fn": "reward.py:score",
        "prompt_data": "a.jsonl, b.jsonl",
        "reward_pretrain": ["model", "owner/on-the-hub"],
        "eval_data": "s3://bucket/rows.jsonl",
        "resume": "model",
        "gamma": 1.0,
    }
    named = ["--prompt_data a.jsonl", "--prompt_data b.jsonl"]
    named += ["--reward_fn reward.py", "--reward_pretrain model"]
    marks = marks_of(options)
    assert sorted(marks) == named
    (tmp_path / "b.jsonl").write_text("c")
    assert [name for name in named if marks_of(options)[name] != marks[name]] == named[1:2]
    assert mark_of(tmp_path / "gone") is None
