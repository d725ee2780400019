"""Masters that one rank does not need, and who says so."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from lightppo.cli.memory_command import main
from lightppo.config import PPOConfig
from lightppo.config.supervised_options import COMMANDS, SFTConfig
from lightppo.errors import ConfigError
from lightppo.preflight.advice import (
    check_longest_row,
    check_positions,
    positions_of,
    tell_frozen,
    tell_second_masters,
    with_second_masters,
)

GROUP = {"advantage_estimator": "grpo", "n_samples_per_prompt": 2}


@pytest.mark.parametrize(
    ("options", "ranks", "roles"),
    [
        ({}, 1, ["actor", "critic"]),
        ({}, 2, []),
        (GROUP, 1, ["actor"]),
        ({"zero_stage": 1}, 1, ["actor", "critic"]),
        ({"zero_stage": 0}, 1, []),
        ({"zero_stage": 3}, 1, []),
        ({"zero_stage": 0, "critic_zero_stage": 2}, 1, ["critic"]),
        ({"bf16": True}, 1, []),
        ({"fp16": True}, 1, []),
        ({"adam_offload": True}, 1, []),
        ({"overlap_comm": True}, 1, []),
    ],
    ids=str,
)
def test_one_rank_in_float32_needs_no_masters(options, ranks, roles):
    assert with_second_masters(PPOConfig.from_flat(**options).resolved(), ranks) == roles


def told(config, **sizes: int) -> list[str]:
    strategy = SimpleNamespace(world_size=1)
    building = SimpleNamespace(config=config.resolved(), strategy=strategy, sizes=sizes)
    return list(tell_second_masters(building))


def test_a_run_whose_masters_are_large_says_so_at_its_start():
    (line,) = told(PPOConfig(), actor=100_000_000, critic=100_000_000, export=100_000_000)
    assert line.startswith("note: --zero_stage 2 with one rank in float32 shards nothing")
    assert line.endswith("--zero_stage 0 needs about 0.8 GB less")
    assert told(PPOConfig(), actor=1_000_000, critic=1_000_000) == []
    assert told(SFTConfig(), actor=100_000_000, export=100_000_000)[0].endswith("0.4 GB less")


def test_the_calculator_says_how_much(tiny_model, capsys):
    options = ["--pretrain", tiny_model, "--prompt_max_len", "16", "--generate_max_len", "16"]
    with pytest.raises(SystemExit) as ended:
        main([*options, "--gpus", "0"])
    assert ended.value.code == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("note: --zero_stage 2 with one rank in float32")
    with pytest.raises(SystemExit):
        main([*options, "--gpus", "0", "--zero_stage", "0"])
    assert "note" not in capsys.readouterr().out


@pytest.mark.parametrize(("frozen", "is_told"), [(-1, False), (2, False), (3, True)])
def test_a_run_that_never_trains_its_actor_says_so(frozen, is_told):
    config = PPOConfig.from_flat(
        freezing_actor_steps=frozen,
        total_training_steps=3,
        train_batch_size=8,
        rollout_batch_size=8,
    )
    building = SimpleNamespace(config=config, prompts_dataloader=[None] * 8)
    told = list(tell_frozen(building))
    assert bool(told) == is_told
    assert all(
        "--freezing_actor_steps 3: all steps of this run train the critic" in t for t in told
    )


def test_prompt_and_response_must_fit_the_positions_of_the_model():
    config = PPOConfig.from_flat(pretrain="models/tiny", prompt_max_len=100, generate_max_len=29)
    check_positions(config, 129)
    check_positions(config, None)
    with pytest.raises(
        ConfigError, match=r"--prompt_max_len 100.*--generate_max_len 29.*129.*models/tiny.*128"
    ):
        check_positions(config, 128)


def test_the_longest_row_must_fit_the_positions_of_the_model():
    config = COMMANDS["sft"].from_flat(pretrain="models/tiny", max_len=200)
    check_longest_row(config, 128, 128)
    check_longest_row(config, 129, None)
    with pytest.raises(ConfigError, match=r"--max_len 200: .* 129 tokens.*models/tiny has 128"):
        check_longest_row(config, 129, 128)


@pytest.mark.parametrize(("kind", "positions"), [("GPT2Config", 17), ("MambaConfig", None)])
def test_limits_have_other_names_or_there_is_none(tmp_path: Path, kind: str, positions: int | None):
    import transformers

    limit = {} if positions is None else {"n_positions": positions}
    getattr(transformers, kind)(**limit).save_pretrained(tmp_path)
    assert positions_of(PPOConfig.from_flat(pretrain=str(tmp_path))) == positions
