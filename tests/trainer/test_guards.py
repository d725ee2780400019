"""Checks before anything large is loaded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightppo.config import PPOConfig
from lightppo.errors import ConfigError
from lightppo.http_client import check_tokens
from lightppo.preflight.run_checks import check_disk


@pytest.fixture
def paths(tmp_path) -> dict[str, str]:
    (tmp_path / "data.jsonl").write_text('{"input": "1+1=", "label": "2"}\n')
    (tmp_path / "reward.py").write_text(
        "def reward_func(queries, prompts, labels):\n    return [0.0] * len(queries)\n"
    )
    return {
        "data": str(tmp_path / "data.jsonl"),
        "reward": str(tmp_path / "reward.py"),
        "no": str(tmp_path / "no"),
    }


def config_of(paths: dict[str, str], **changes: Any) -> PPOConfig:
    return PPOConfig.from_flat(
        {"prompt_data": paths["data"], "reward_fn": paths["reward"], **changes}
    )


def test_a_token_that_is_not_set_names_the_flag(paths, monkeypatch):
    monkeypatch.delenv("RM_TOKEN", raising=False)
    options = {
        "reward_fn": None,
        "remote_rm_url": ("http://127.0.0.1:1/reward",),
        "remote_rm_token_env": "RM_TOKEN",
    }
    with pytest.raises(ConfigError, match=r"--remote_rm_token_env.*RM_TOKEN"):
        check_tokens(SimpleNamespace(config=config_of(paths, **options)))
    monkeypatch.setenv("RM_TOKEN", "abc")
    check_tokens(SimpleNamespace(config=config_of(paths, **options)))


GB = 10**9
PARAMETERS = {"actor": GB, "critic": GB, "ema": GB}


def check_disk_of(config: PPOConfig, parameters: dict[str, int]) -> None:
    sizes = parameters | {"export": parameters["actor"]}
    check_disk(SimpleNamespace(resolved_options=config, sizes=sizes))


def needs(
    monkeypatch, tmp_path: Path, parameters: dict[str, int] = PARAMETERS, **options: Any
) -> float | None:
    """GB that the check asks for, or ``None`` where it asks for none."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=-1))
    config = PPOConfig.from_flat(ckpt_path=str(tmp_path / "not" / "yet" / "made"), **options)
    try:
        check_disk_of(config, parameters)
    except ConfigError as error:
        return float(str(error).split("need about ")[1].split(" GB")[0])
    return None


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # fp32: actor and critic 4 + 12 bytes a parameter, EMA 4: 16 + 16 + 4 = 36 GB; 3 are kept and one is written
        ({"save_steps": 5}, 4 * 36),
        ({"save_epochs": 1}, 4 * 36),
        ({"save_seconds": 60}, 4 * 36),
        # bf16: 2 + 12 bytes, the moving average stays fp32: 14 + 14 + 4 = 32 GB
        ({"save_steps": 5, "bf16": True}, 4 * 32),
        ({"save_steps": 5, "max_ckpt_num": 1}, 2 * 36),
        # with an export of the actor: 36 + 4
        ({"save_steps": 5, "save_hf_ckpt": True}, 4 * 40),
        ({"save_steps": 5, "save_hf_ckpt": True, "disable_ds_ckpt": True, "bf16": True}, 4 * 2),
        # exports without checkpoints
        ({"hf_save_steps": 5, "max_ckpt_num": 2}, 3 * 4),
        # what may be kept is limited: 50 GB and the one being written
        ({"save_steps": 5, "max_ckpt_mem": 50}, 50 + 36),
    ],
    ids=str,
)
def test_room_for_the_checkpoints_that_are_kept(monkeypatch, tmp_path, options, expected):
    assert needs(monkeypatch, tmp_path, **options) == expected


def test_models_that_a_run_does_not_have_need_no_room(monkeypatch, tmp_path):
    assert needs(monkeypatch, tmp_path, {"actor": GB}, save_steps=5) == 4 * 16


def test_enough_room_passes_to_the_byte_and_the_message_says_what_to_do(monkeypatch, tmp_path):
    free = [4 * 16 * GB]
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free[0]))
    config = PPOConfig.from_flat(ckpt_path=str(tmp_path), save_steps=5)
    check_disk_of(config, {"actor": GB})
    free[0] -= 1
    with pytest.raises(ConfigError, match=rf"--ckpt_path {tmp_path}.*--max_ckpt_num"):
        check_disk_of(config, {"actor": GB})


def test_the_disk_of_the_nearest_folder_that_exists_is_asked(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(
        "shutil.disk_usage", lambda path: asked.append(path) or SimpleNamespace(free=10**18)
    )
    check_disk_of(
        PPOConfig.from_flat(ckpt_path=str(tmp_path / "a" / "b"), save_steps=5), {"actor": 1}
    )
    assert asked == [tmp_path]


def test_a_run_that_saves_nothing_asks_for_no_room(monkeypatch, tmp_path):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=0))
    check_disk_of(PPOConfig.from_flat(ckpt_path=str(tmp_path)), PARAMETERS)
