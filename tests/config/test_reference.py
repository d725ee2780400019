"""docs/flags.md is made from the options and up to date."""

from __future__ import annotations

import pytest

from lightppo.config import reference
from lightppo.config.ppo import all_options


def test_the_page_is_up_to_date():
    assert reference.PAGE.read_text(encoding="utf-8") == reference.flags_page(), "run `make docs`"


def test_rows():
    rows = [line for line in reference.flags_page().split("\n") if line.startswith("| `--")]
    assert [row.split("`")[1] for row in rows] == [f"--{f.name}" for _, f in all_options()]
    assert "| `--lambd` | a number | `0.95` | GAE's λ. |  | ≥0 ≤1 | fixed |" in rows
    assert "| `--prompt_max_len` | a whole number | `1024` | Longest prompt. | tokens | ≥1 | fixed |" in rows
    (clip,) = (row for row in rows if row.startswith("| `--reward_clip_range`"))
    assert clip.startswith("| `--reward_clip_range` | 2 numbers or None | `-10.0 10.0` |")
    (workers,) = (row for row in rows if row.startswith("| `--data_num_workers`"))
    assert workers.endswith("|  | ≥0 | free |")


def test_every_row_has_as_many_cells_as_the_head():
    table = [line.replace("\\|", "") for line in reference.flags_page().split("\n") if line.startswith("|")]
    assert {line.count("|") for line in table} == {8}


def test_printed_or_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reference, "PAGE", tmp_path / "flags.md")
    reference.main([])
    assert capsys.readouterr().out == reference.flags_page()
    reference.main(["--write"])
    assert (tmp_path / "flags.md").read_text(encoding="utf-8") == reference.flags_page()
    with pytest.raises(SystemExit, match="usage"):
        reference.main(["--wirte"])
