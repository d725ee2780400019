"""A run is refused that would write over what it reads; all others are not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, get_args

import pytest

from lightppo.__main__ import main
from lightppo.config import PPOConfig
from lightppo.config.supervised_options import COMMANDS, DPOConfig, SFTConfig
from lightppo.errors import ConfigError
from lightppo.logging.run_paths import READ, WRITTEN, check_places, file_of_world
from lightppo.storage import local_folder

# Their help speaks of files, but they name none that a run replaces. Files in --vllm_server_sync_dir have new names.
_NO_PLACE = (
    "best_metric config eval_split external_lib function_call_url override_config push_to_hub resume_changes "
    "reward_source tool_format"
)
_NO_PLACE += " value_head_prefix vllm_server_sync_dir wandb_run_name"


@pytest.fixture
def model(tmp_path, monkeypatch) -> Path:
    """A folder like a model's, in the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "tokenizer_config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text('{"input": "1+1=", "output": "2"}\n')
    return tmp_path / "model"


def refusal(**options: Any) -> str:
    """Of a PPO run; empty if it is not refused."""
    kind = next(
        kind for kind in (PPOConfig, SFTConfig, DPOConfig) if options.keys() <= kind().flat().keys()
    )
    try:
        check_places(kind.from_flat({"pretrain": "other"} | options).resolved())
    except ConfigError as error:
        return str(error)
    return ""


# -- a model that the run would overwrite ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spelled", ["model", "./model/", "x/../model", "{root}/model", "link", "file://{root}/model"]
)
@pytest.mark.parametrize("start", ["model", "{root}/model/", "link"])
def test_a_run_does_not_overwrite_its_start_however_it_is_spelled(model, spelled, start):
    Path("link").symlink_to("model")
    save_path, pretrain = spelled.format(root=model.parent), start.format(root=model.parent)
    said = refusal(pretrain=pretrain, save_path=save_path)
    assert said.startswith(f"--save_path {save_path}")
    assert (
        f"is also --pretrain {pretrain}, and the run would write over it: name another --save_path"
        in said
    )
    assert "\n" not in said


@pytest.mark.parametrize(
    "flag", ["ref_pretrain", "critic_pretrain", "reward_pretrain", "teacher_pretrain"]
)
def test_any_model_and_tokenizer(model, flag):
    assert f"is also --{flag}" in refusal(**{flag: "model"}, save_path="model")
    assert "is also --tokenizer_path" in refusal(tokenizer_path="model", save_path="model")
    assert "is also --reward_input_tokenizer" in refusal(
        reward_input_tokenizer=["a", "model"], save_path="model"
    )


def test_a_folder_inside_of_what_is_read(model):
    assert "is inside --pretrain model, which the run reads" in refusal(
        pretrain="model", save_path="model/run"
    )
    Path("inside").symlink_to("model/run")
    assert "is inside --pretrain model" in refusal(pretrain="model", save_path="inside")
    Path("rows").mkdir()  # all of a folder of rows is read, what an earlier start recorded too
    said = refusal(prompt_data="a.jsonl, rows", save_path="rows/run")
    assert "--save_path rows/run is inside --prompt_data rows" in said
    assert "--log_file rows/log.jsonl is inside --dataset rows" in refusal(
        dataset="rows", log_file="rows/log.jsonl"
    )


def test_a_folder_above_is_refused_where_the_run_replaces_the_part_that_is_read(model):
    """``lightppo sft`` writes to ./ckpt/sft, ``lightppo ppo`` to ./ckpt: nothing of the first is lost."""
    assert not refusal(pretrain="ckpt/sft", save_path="ckpt")
    assert not refusal(
        pretrain="model", save_path=".", reward_fn="reward.py:score", prompt_data="rows.jsonl"
    )
    for folder in ("checkpoints_ppo/best_hf", "checkpoints_ppo/global_step4_hf"):
        said = refusal(pretrain=f"runs/a/{folder}", save_path="runs/a")
        assert said.startswith("--ckpt_path runs/a/checkpoints_ppo: the run writes to ")
        assert not refusal(pretrain=f"runs/a/{folder}", save_path="runs/b")
    assert "writes to eval in it" in refusal(
        eval_data="runs/a/eval/step1.jsonl", save_path="runs/a"
    )
    assert "writes to rollouts in it" in refusal(
        prompt_data="a,runs/a/rollouts/step1.jsonl", save_path="runs/a"
    )


def test_what_else_a_run_writes(model):
    assert "--ckpt_path model is also --pretrain" in refusal(pretrain="model", ckpt_path="model")
    critic = {"critic_pretrain": "runs/a_critic", "save_path": "runs/a/"}
    assert "--save_path runs/a_critic is also --critic_pretrain" in refusal(
        **critic, save_value_network=True
    )
    assert not refusal(**critic)
    # an older folder of TensorBoard's with the name of the run is renamed
    assert "--use_tensorboard ./model is also --pretrain" in refusal(
        pretrain="model", use_tensorboard=".", save_path="runs/model"
    )
    assert not refusal(pretrain="model", use_tensorboard=".", save_path="runs/other")
    assert "writes to step1.jsonl" in refusal(
        prompt_data="dump/step1.jsonl", rollout_data_dir="dump"
    )
    assert not refusal(prompt_data="dump/rows.jsonl", rollout_data_dir="dump")
    assert "--log_file rows.jsonl is also --dataset" in refusal(
        dataset="rows.jsonl", log_file="rows.jsonl"
    )
    assert "--use_mlflow model is also --pretrain" in refusal(pretrain="model", use_mlflow="model")


def test_names_of_the_hub(model):
    """The run would make a folder of this name, and the next start would read that."""
    assert "is also --pretrain" in refusal(pretrain="org/name", save_path="org/name")
    assert not refusal(pretrain="org/name", save_path="org")


def test_urls(model):
    assert "is also --pretrain" in refusal(
        pretrain="memory://bucket/model", save_path="memory://bucket/x/../model/"
    )
    assert "is also --pretrain" in refusal(
        pretrain="memory://bucket/model", save_path="memory:///bucket/model"
    )
    assert not refusal(pretrain="memory://bucket/model", save_path="memory://bucket/model2")
    assert "is also --pretrain" in refusal(
        pretrain="ftp://host/model", save_path="ftp://me@host/model"
    )
    assert not refusal(pretrain="ftp://host/model", save_path="ftp://other/model")
    here = str(local_folder("memory://bucket/run"))  # where the run writes first
    assert f"--save_path {here} is also --pretrain" in refusal(
        pretrain=here, save_path="memory://bucket/run"
    )


# -- what goes on as before --------------------------------------------------------------------------------------------


def test_a_run_goes_on_from_its_own_checkpoints(model):
    assert not refusal(resume="runs/a/checkpoints_ppo", save_path="runs/a")
    assert not refusal(
        resume="runs/a/checkpoints_ppo/", save_path="runs/a", config="runs/a/run_config.yaml"
    )
    assert not refusal(resume="runs/a/checkpoints_ppo", save_path="runs/b")
    assert "is also --resume" in refusal(
        resume="runs/a/checkpoints_ppo", save_path="runs/a/checkpoints_ppo"
    )


def test_servers_programs_and_files_beside_the_model_are_no_folders(model):
    of_rewards = {
        "remote_rm_url": ["http://127.0.0.1:1/model"],
        "reward_routes": '{"*": {"math": 1}}',
    }
    assert not refusal(**of_rewards, save_path="model", pretrain="other")
    assert not refusal(reward_fn="runs/a/reward.py:score", save_path="runs/a")


# -- at the start ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["ppo", "sft", "rm", "dpo", "eval"])
def test_all_commands_say_it_before_they_write(model, command, capsys):
    before = {path: path.read_bytes() for path in model.parent.rglob("*") if path.is_file()}
    rows = ["--prompt_data", "rows.jsonl", "--reward_source", "format"]
    rows = {"ppo": rows, "eval": ["--eval_data", *rows[1:]]}.get(
        command, ["--dataset", "rows.jsonl"]
    )
    with pytest.raises(SystemExit) as end:
        main([command, "--pretrain", "model", "--save_path", "./model", *rows])
    assert end.value.code == 2
    assert (
        f"lightppo {command}: error: --save_path ./model is also --pretrain"
        in capsys.readouterr().err
    )
    assert {path: path.read_bytes() for path in model.parent.rglob("*") if path.is_file()} == before


def test_a_script_that_builds_its_own_trainer(model, tiny_model, world, tmp_path):
    from lightppo import PPOTrainer, SFTTrainer

    before = sorted(os.listdir(tiny_model))
    config = SFTConfig.from_flat(
        pretrain=tiny_model, dataset="rows.jsonl", output_key="output", save_path=tiny_model
    )
    with pytest.raises(ConfigError, match="is also --pretrain"):
        SFTTrainer.from_config(config)
    config = PPOConfig.from_flat(
        pretrain=tiny_model,
        prompt_data="rows.jsonl",
        reward_source=["format"],
        save_path=tiny_model,
        zero_stage=0,
    )
    with pytest.raises(ConfigError, match="is also --pretrain"):
        PPOTrainer.from_config(config)
    assert sorted(os.listdir(tiny_model)) == before


@pytest.mark.parametrize(
    ("entry", "file"),
    [
        ("a/b.py:Guess", "a/b.py"),
        ("worlds.py:f,g", "worlds.py"),
        ("maze=~/maze.py:Maze", "~/maze.py"),
        ("openrlhf:agent.py", "agent.py"),
        ("gym:FrozenLake-v1", None),
        ("package.worlds:Maze", None),
        ("python", None),
    ],
)
def test_files_of_environments(entry, file):
    assert file_of_world(entry) == file


def test_every_option_with_a_path_is_known():
    """A new option that names a place must be said to be read or written."""
    kinds = [PPOConfig, *COMMANDS.values()]
    told = {
        one.name: one.help.lower()
        for kind in kinds
        for one in kind.all_options()
        if str in _texts(one.kind)
    }
    words = ("path", "folder", "file", "local", "model", "url", "tokenizer")
    places = {name for name, text in told.items() if any(word in text for word in words)}
    assert sorted(places - {*READ, *WRITTEN}) == sorted(_NO_PLACE.split())


def _texts(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) or (kind,)
