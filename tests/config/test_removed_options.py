"""Options of earlier versions: files at the value that is left are read, all else says what to do."""

from __future__ import annotations

import re

import pytest

from lightppo.config import PPOConfig, parse_args
from lightppo.config.removed_options import _REMOVED, removal
from lightppo.errors import ConfigError

OPTIONS = {option.name for option in PPOConfig.all_options()}


@pytest.mark.parametrize("name", _REMOVED)
def test_the_value_that_is_left_is_passed_over_and_others_say_what_to_do(name):
    value, _ = _REMOVED[name]
    assert PPOConfig.from_flat({name: value}) == PPOConfig.from_flat({name: None}) == PPOConfig()
    with pytest.raises(ConfigError, match=re.escape(f"unknown option '{name}'{removal(name)}")):
        PPOConfig.from_flat({name: "another"})
    named = re.findall(r"--(\w+)", removal(name))
    assert name not in OPTIONS
    assert set(named) <= OPTIONS


def test_a_removed_flag_and_a_key_of_yaml(tmp_path, capsys):
    says = "a server gets 1024 requests at most, and --vllm_server_timeout counts while they wait in it"
    required = ["--pretrain", "m", "--prompt_data", "p.jsonl", "--reward_fn", "r.py"]
    config = tmp_path / "run.yaml"
    config.write_text("vllm_server_concurrency: 1024\n")
    assert parse_args([*required, "--config", str(config)]).model.pretrain == "m"
    config.write_text("vllm_server_concurrency: 64\n")
    for words in (["--vllm_server_concurrency", "64"], ["--config", str(config)]):
        with pytest.raises(SystemExit) as exit_code:
            parse_args([*required, *words])
        assert exit_code.value.code == 2
        assert says in capsys.readouterr().err
