"""docs/flags.md: every option on a line, as its declaration says."""

from __future__ import annotations

import re

from lightppo.cli.flags_page import PAGE, flags_page, write_flags_page
from lightppo.config.options import all_options
from lightppo.config.supervised_options import COMMANDS


def test_the_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == flags_page(), "run `make docs`"


def test_lines():
    # PPO's lines count
    lines = [line for line in reversed(flags_page().split("\n")) if line.startswith("- ")]
    parsed = {
        m[1]: m
        for m in (re.fullmatch(r"- `--(\w+)`(\*?)(?: \((.*?)\))?: (.*)", line) for line in lines)
    }
    of_others = {one.name for kind in COMMANDS.values() for one in kind.all_options()}
    assert set(parsed) == {one.name for one in all_options()} | of_others
    values = {name: m[3] for name, m in parsed.items()}
    assert values["bf16"].split("; ")[0] == "`false`"
    assert values["init_from_scratch"] is None  # a switch that is off
    assert values["lambd"] == "`0.95` ≥0 ≤1; `critic`"
    assert values["prompt_max_len"] == "`1024` ≥1, tokens"
    assert values["truncation"] == "`error`, left, right, middle, drop"
    assert values["kl_target"] == "number >0; `--init_kl_coef>0`"
    assert values["value_clip"].split("; ")[0] == "`0.2` or None >0"
    assert values["stop"] == "texts"
    assert parsed["lambd"][4] == "GAE's λ."
    assert parsed["data_num_workers"][2] == "*"  # may change on resume
    assert values["data_num_workers"] == "`0` ≥0"


def test_the_page_is_written(tmp_path, monkeypatch):
    path = tmp_path / "flags.md"
    monkeypatch.setattr("lightppo.cli.flags_page.PAGE", path)
    write_flags_page()
    assert path.read_text(encoding="utf-8") == flags_page()
