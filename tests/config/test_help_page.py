"""``--help``: one screen, and everything; and notes on flags that change nothing."""

from __future__ import annotations

import re

import pytest

from lightppo.config import PPOConfig
from lightppo.config.contradictions import condition_text
from lightppo.config.options import all_options
from lightppo.option import range_text

REQUIRED_FLAGS = ("pretrain", "prompt_data")


SPELLED_OUT = (
    "--lora_alpha 16 --lora_dropout 0 --target_modules all-linear --pretrain_data_probs 1.0 --ptx_coef 0.05 "
    "--ref_ema_eta 0 --dataset_max_filter_percentage 0 --ema_beta 0.992 --kl_horizon 10000 "
    "--eval_n_samples 1 --advantage_clip 0.0 --pretrain_split train"
)


def test_defaults_that_are_spelled_out_are_notes(parse, capsys):
    flat = parse(SPELLED_OUT).flat()
    assert (flat["ref_ema_eta"], flat["advantage_clip"]) == (None, None)
    notes = capsys.readouterr().err.splitlines()
    assert all(
        re.match(r"train_ppo.py: note: --\w+.* change(s?) nothing here: .* without --", note)
        for note in notes
    )
    noted = [
        name for note in notes for name in re.findall(r"--(\w+)", note.partition(" change")[0])
    ]
    assert sorted(noted) == ["dataset_max_filter_percentage", "ema_beta", "eval_n_samples", "kl_horizon", "lora_alpha",
                             "lora_dropout", "pretrain_data_probs", "pretrain_split", "ptx_coef",
                             "target_modules"]  # fmt: skip
    parse("--gamma 1.0 --value_clip 0.2")  # defaults that count
    assert capsys.readouterr().err == ""


def test_help_is_one_screen_of_the_usual_options(parse, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse("--help")
    assert stopped.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    flags = {line.split()[0].removeprefix("--") for line in lines if line.startswith("  --")}
    assert len(lines) <= 48
    assert max(map(len, lines)) <= 120
    assert flags < PPOConfig().flat().keys()
    assert all(
        any(f"--{name} " in line and "[required]" in line for line in lines)
        for name in REQUIRED_FLAGS
    )
    assert "--help all" in lines[-1]


def test_help_all_shows_unit_range_condition_and_default_of_every_flag(parse, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse("--help all")
    assert stopped.value.code == 0
    lines = iter(capsys.readouterr().out.splitlines())
    for one in all_options():
        spelled = next(line for line in lines if line.startswith(f"  --{one.name}"))
        assert f"--no_{one.name}" in spelled or one.kind is not bool
        text = next(lines)
        shown = [
            one.help,
            one.unit or "",
            range_text(one),
            *map(condition_text, one.needs),
            "(default: ",
        ]
        assert all(word in text for word in shown), one.name
