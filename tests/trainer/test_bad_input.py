"""Mistakes of the user, through the real path: the message names flag, file, line or row, and says what to do."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.fakes import FakeEngine, FakeReward
from support.tiny import save_causal_lm, save_tokenizer, write_jsonl

from lightppo import PPOTrainer
from lightppo.config import PPOConfig, parse_args
from lightppo.distributed.deepspeed import DeepspeedStrategy
from lightppo.errors import ConfigError, TrainingError, UserError
from lightppo.preflight.before_imports import preflight

REPO = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("world")


@pytest.fixture
def refused(make_config):
    """``refused(*named, **options)``: what the start of such a run says, which names all of these."""

    def message(*named: str, **options: Any) -> str:
        with pytest.raises(UserError) as error:
            PPOTrainer.from_config(make_config(**options))
        assert [name for name in named if name not in str(error.value)] == []
        return str(error.value)

    return message


def prompts(tmp_path: Path, *rows: Any) -> dict[str, str]:
    return {"prompt_data": write_jsonl(tmp_path / "rows.jsonl", rows)}


# -- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["pretrain", "ref_pretrain", "critic_pretrain", "reward_pretrain"])
def test_a_model_that_is_not_there(refused, tmp_path, flag):
    path = str(tmp_path / "no" / "model")
    options = {flag: [path] if flag == "reward_pretrain" else path}
    if flag == "reward_pretrain":
        options |= {"reward_fn": None, "init_critic_from_actor": True}
    refused(f"--{flag} {path}:", **options)


def test_a_folder_that_is_no_model(refused, tmp_path):
    (tmp_path / "README.md").write_text("hello")
    refused(f"--pretrain {tmp_path}", "config.json", pretrain=str(tmp_path))


def test_a_model_that_transformers_does_not_know(refused, tmp_path):
    save_tokenizer(model := tmp_path / "model")
    (model / "config.json").write_text('{"model_type": "vit"}')
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    message = refused(f"--pretrain {model}", "vit", pretrain=str(model))
    assert len(message.splitlines()) == 1
    assert len(message) < 1200  # transformers lists every class that it has


def test_a_model_without_a_value_head_is_no_reward_model(refused, tiny_model):
    options = {"reward_pretrain": [tiny_model], "reward_fn": None, "init_critic_from_actor": True}
    refused(f"--reward_pretrain {tiny_model}", "score.weight", **options)


def edited_tokenizer(folder: Path, *missing: str) -> str:
    """A model whose tokenizer lacks these special tokens."""
    save_causal_lm(folder)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).exists():
            values = json.loads((folder / name).read_text())
            (folder / name).write_text(
                json.dumps({k: v for k, v in values.items() if k not in missing})
            )
    return str(folder)


def test_a_tokenizer_without_end_of_text(refused, tmp_path):
    path = edited_tokenizer(tmp_path / "model", "eos_token")
    refused(f"--pretrain {path}:", '"eos_token"', "tokenizer_config.json", pretrain=path)


def test_a_tokenizer_without_padding_pads_with_end_of_text(make_config, tmp_path):
    path = edited_tokenizer(tmp_path / "model", "pad_token")
    trainer = PPOTrainer.from_config(make_config(pretrain=path, benchmark_steps=1))
    assert trainer.tokenizer.pad_token_id == trainer.tokenizer.eos_token_id == 2
    trainer.fit()
    assert trainer.state.global_step == 1


def test_lengths_beyond_the_models_positions(refused, tiny_model):
    named = ("--prompt_max_len 60", "--generate_max_len 5", " 65 ", tiny_model, " 64 ")
    refused(*named, prompt_max_len=60, generate_max_len=5)


# -- data ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["prompt_data", "eval_data", "pretrain_data"])
def test_data_that_is_not_there(refused, tmp_path, flag):
    path = str(tmp_path / "no.jsonl")
    refused(f"--{flag} {path}:", **{flag: path})


def test_data_of_no_known_format(refused, tmp_path):
    (tmp_path / "rows.docx").write_text("hello")
    refused(
        f"--prompt_data {tmp_path}/rows.docx:", ".jsonl", prompt_data=str(tmp_path / "rows.docx")
    )


def test_an_empty_dataset(refused, tmp_path):
    data = prompts(tmp_path)
    refused(data["prompt_data"], "empty", **data)


def test_a_dataset_without_the_key(refused, tmp_path):
    data = prompts(tmp_path, {"text": "1+1=", "gold": "2"})
    refused("--input_key 'task'", "text, gold", **data, input_key="task")
    refused("--label_key 'answer'", "text, gold", **data, input_key="text", label_key="answer")


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"input": 7}, ["'input'", "int 7"]),
        ({"input": None}, ["'input'", "null"]),
        ({"label": "2"}, ["'input'", "missing"]),
        ({"input": ""}, ["'input'", "empty"]),
        ({"input": "0123456789abc"}, ["13 tokens", "--prompt_max_len", "--truncation"]),
    ],
    ids=["type", "null", "missing", "empty", "overlong"],
)
def test_a_bad_row_is_named_by_file_and_line(refused, tmp_path, bad, named):
    data = prompts(tmp_path, {"input": "1+1="}, {"input": "1+2="}, bad)
    refused(f"{data['prompt_data']}:3: ", *named, "--on_bad_row skip", **data)


def test_bad_rows_are_skipped_and_counted_if_asked_to(make_config, tmp_path, capsys):
    data = prompts(
        tmp_path, {"input": "1+1="}, {"input": ""}, {"input": "0123456789abc"}, {"input": "1+2="}
    )
    trainer = PPOTrainer.from_config(make_config(**data, on_bad_row="skip"))
    assert (
        "4 rows: 2 kept, 0 of them truncated; dropped: 1 empty, 1 overlong"
        in capsys.readouterr().out
    )
    assert [p.text for batch in trainer.prompts_dataloader for p in batch] in (
        ["1+1=", "1+2="],
        ["1+2=", "1+1="],
    )


def test_a_broken_line_of_the_file(refused, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input": "1+1="}\n{"input": \n')
    refused(f"{path}:2: ", "JSON", prompt_data=str(path))


@pytest.mark.parametrize("data", ["prompt_data", "eval_data", "pretrain_data"])
def test_the_last_row_is_checked_before_any_model_loads(refused, monkeypatch, tmp_path, data):
    """The first rows are right, so that only reading them all can tell."""
    monkeypatch.setattr(
        "lightppo.trainer.build.build_models", lambda *_: pytest.fail("models load")
    )
    rows = [{"input": "1+1="}] * 40 + [{"input": 7}]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    refused(
        f"{path}:41: ",
        "'input'",
        "int 7",
        **{data: path},
        **({"ptx_coef": 0.1} if data == "pretrain_data" else {}),
    )


def test_the_reward_file_runs_before_any_model_loads(refused, monkeypatch, tmp_path):
    monkeypatch.setattr(
        "lightppo.trainer.build.build_models", lambda *_: pytest.fail("models load")
    )
    (tmp_path / "mine.py").write_text(
        "def reward_func(queries, prompts, labels): pass\nraise OSError('no disk')"
    )
    refused(
        f"{tmp_path}/mine.py:2 in <module>: raise",
        "OSError: no disk",
        reward_fn=str(tmp_path / "mine.py"),
    )


# -- rewards ---------------------------------------------------------------------------------------------------------


def reward_file(tmp_path: Path, body: str) -> str:
    path = tmp_path / "my_reward.py"
    path.write_text(f"def reward_func(queries, prompts, labels):\n    {body}\n")
    return str(path)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("return [1.0]", r"my_reward\.py:reward_func: 1 scores for 4"),
        ("return [1.0, 1.0, float('nan'), 1.0]", r"sample 2 \(prompt row \d+, .*'.*='\).* nan"),
        ("return [1.0, float('inf'), 1.0, 1.0]", r"sample 1 \(prompt row .* inf"),
        ("return ['good'] * 4", r"sample 0 \(prompt row .* 'good'"),
        ("return None", "NoneType"),
        ("raise KeyError('gold')", r"my_reward\.py:2 in reward_func: raise KeyError\('gold'\)\)$"),
        ("return [None] * 4", "step 1: "),
    ],
    ids=str,
)
def test_a_reward_function_that_gives_no_usable_scores(make_config, tmp_path, body, why):
    trainer = PPOTrainer.from_config(make_config(reward_fn=reward_file(tmp_path, body)))
    with pytest.raises(UserError, match=why):
        trainer.fit()
    assert trainer.state.optimizer_steps == 0


def test_a_reward_file_that_is_not_there(refused, tmp_path):
    reward_file(tmp_path, "return []")
    refused(
        "--reward_fn:",
        f"{tmp_path}/my_rewards.py",
        " my_reward.py",
        reward_fn=str(tmp_path / "my_rewards.py"),
    )
    path = str(tmp_path / "no" / "file.py")
    refused("--remote_rm_url:", path, reward_fn=None, remote_rm_url=[path])


def test_a_reward_file_without_the_function_or_that_fails(refused, tmp_path):
    path = reward_file(tmp_path, "return []")
    refused("--reward_fn:", path, "'score'", "reward_func", reward_fn=f"{path}:score")
    Path(path).write_text("import no_such_module\ndef reward_func(queries, prompts, labels): pass")
    refused(
        "--reward_fn:",
        f"{path}:1 in <module>: import no_such_module",
        "ModuleNotFoundError",
        reward_fn=path,
    )


def test_a_reward_server_that_cannot_be_reached(make_config):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, but nobody listens
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/score"
        trainer = PPOTrainer.from_config(
            make_config(reward_fn=None, remote_rm_url=url, remote_rm_retries=0)
        )
        with pytest.raises(UserError, match=url):
            trainer.fit()


def test_a_token_that_is_not_set(refused, monkeypatch):
    monkeypatch.delenv("NO_SUCH_TOKEN", raising=False)
    options = {"remote_rm_url": "http://127.0.0.1:9/x", "remote_rm_token_env": "NO_SUCH_TOKEN"}
    refused("--remote_rm_token_env:", "NO_SUCH_TOKEN", reward_fn=None, **options)


# -- checkpoints -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_directory_that_is_not_one(refused, tmp_path):
    refused(f"--resume {tmp_path}:", "--ckpt_path", resume=str(tmp_path))


def test_checkpoints_of_a_run_with_other_models_or_another_stage(make_config, tmp_path):
    config = make_config(save_steps=1, benchmark_steps=1)
    PPOTrainer.from_config(config).fit()
    with pytest.raises(UserError, match=r"_ema.*--resume never.*--save_path"):
        PPOTrainer.from_config(config.with_options(enable_ema=True))
    with pytest.raises(UserError, match=r"zero_stage=0, not 1.*--reshape_ckpt"):
        PPOTrainer.from_config(config.with_options(zero_stage=1))


def test_a_disk_that_is_too_small(refused, make_config, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    refused(f"--ckpt_path {tmp_path}/ckpt:", "--max_ckpt_num", save_steps=1)
    PPOTrainer.from_config(make_config())  # saves nothing but the model


# -- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--critic_zero_stage", "1", "--advantage_estimator", "grpo", "--n_samples_per_prompt", "2"],
         "--critic_zero_stage needs a critic"),
        (["--train_batch_size", "3"], "--train_batch_size 3 does not divide the 512 samples"),
        (["--use_kl_loss", "--use_kl_in_reward"], "--use_kl_loss and --use_kl_in_reward"),
        (["--load_in_4bit"], "--lora_rank"),
    ],
    ids=str,
)  # fmt: skip
def test_mistakes_on_the_command_line_end_before_anything_loads(capsys, flags, said):
    with pytest.raises(SystemExit) as end:
        parse_args(["--pretrain", "m", "--prompt_data", "d.jsonl", "--reward_fn", "r.py", *flags])
    assert end.value.code == 2
    assert said in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_several_reward_models_without_a_function_to_combine_them(refused, tmp_path):
    refused("--reward_pretrain", "--reward_fn", reward_pretrain=["a", "b"], reward_fn=None)


# -- the constructor -------------------------------------------------------------------------------------------------


def construct(
    tokenizer: Any, *, critic: Any = None, reward_model: Any = None, **options: Any
) -> PPOTrainer:
    """A trainer by the seed's constructor, with stand-ins for its models."""
    defaults = {} if "config" in options else {"init_kl_coef": 0.0}
    models = (SimpleNamespace(), critic, reward_model, None, None)
    options = {"tokenizer": tokenizer, "rollout_engine": FakeEngine()} | defaults | options
    return PPOTrainer(DeepspeedStrategy(), *models, None, None, None, None, **options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"critic": None}, "--advantage_estimator gae.*critic"),
        ({"init_kl_coef": 0.1}, "initial_model"),
        ({"tokenizer": None}, "tokenizer="),
        ({"eps_clp": 0.1}, "'eps_clp'.*'eps_clip'"),
        ({"reward_func": len}, "'reward_func'.*'reward_fn'"),
        ({"reward_source": None, "reward_model": [len, len]}, "--reward_fn"),
        ({"reward_source": None}, "--remote_rm_url"),
        ({"reward_source": 7}, r"reward_source: 7 is neither .*name and score\)"),
        (
            {"eval_prompts": [], "eval_reward_fn": 7},
            "--eval_reward_fn: 7 is neither a function nor",
        ),
        ({"config": PPOConfig(), "eps_clip": 0.1}, "eps_clip.*config"),
        ({"max_norm": 7.0}, "max_norm 7"),
    ],
    ids=str,
)
def test_the_constructor_refuses(tiny_tokenizer, options, named):
    given = {
        "critic": SimpleNamespace(),
        "reward_source": FakeReward({}),
        "tokenizer": tiny_tokenizer,
    } | options
    with pytest.raises(ValueError, match=named):
        construct(**given)


def test_another_function_scores_evaluations(tiny_tokenizer):
    source = FakeReward({})
    given = {"critic": SimpleNamespace(), "reward_source": source, "eval_prompts": []}
    assert construct(tiny_tokenizer, **given).evaluator.reward_source is source
    judged = construct(tiny_tokenizer, **given, eval_reward_fn=lambda queries, prompts, labels: [])
    assert judged.evaluator.reward_source.name == "<lambda>"
    assert judged.reward_source is source


def test_fit_needs_prompts(tiny_tokenizer):
    trainer = construct(tiny_tokenizer, critic=SimpleNamespace(), reward_source=FakeReward({}))
    with pytest.raises(ConfigError, match="prompts_dataloader"):
        trainer.fit()


# -- the script ------------------------------------------------------------------------------------------------------


def run_script(*flags: str) -> subprocess.CompletedProcess:
    """``python examples/train_ppo.py``, in an environment that no launcher touched."""
    launcher = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "LOCAL_WORLD_SIZE",
    )
    environment = {name: value for name, value in os.environ.items() if name not in launcher}
    environment |= {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(REPO), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(REPO / "examples" / "train_ppo.py"), *flags]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_a_wrong_flag_ends_the_script_with_2():
    ended = run_script("--actor_learning_rat", "1e-6")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "--actor_learning_rate" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_missing_model_ends_the_script_with_2_and_one_line(assets, tmp_path):
    ended = run_script(
        "--pretrain", "./no/model", "--prompt_data", assets["prompt_data"], "--reward_fn", assets["reward_fn"],
        "--rollout_batch_size=4", "--train_batch_size=4", f"--save_path={tmp_path}", f"--ckpt_path={tmp_path / 'ckpt'}",
    )  # fmt: skip
    assert ended.returncode == 2
    assert ended.stderr.startswith("train_ppo.py: error: --pretrain ./no/model: no such folder")
    assert len(ended.stderr.splitlines()) == 1


# -- what was taken in silence, or ended with a traceback ------------------------------------------------------------


def test_a_stop_string_of_a_special_token_and_text(refused):
    refused(
        "--stop '<eos>=' has the special token '<eos>'", "give the token alone", stop=["<eos>="]
    )


def test_a_stop_token_beyond_the_vocabulary(refused):
    refused(
        "--stop_token_ids 43 99999: the tokenizer has no such id, its largest is 42",
        stop_token_ids=[2, 43, 99999],
    )


def test_a_bad_word_without_tokens(refused):
    refused("--bad_words: the tokenizer has no tokens for 'Ü'", bad_words=["Ü"])


def test_a_tokenizer_that_makes_no_tokens_of_a_text(refused, make_config, tmp_path):
    """Its normalizer drops the letter, as some do with what they cannot write."""
    model = tmp_path / "model"
    save_causal_lm(model)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Replace", "pattern": {"String": "a"}, "content": ""}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    data = prompts(tmp_path, {"input": "1+1="}, {"input": "aaa"})
    refused(
        f"{data['prompt_data']}:2: the tokenizer makes no tokens of the prompt",
        **data,
        pretrain=str(model),
    )
    # rows without that letter are as before
    PPOTrainer.from_config(make_config(pretrain=str(model)))


@pytest.mark.parametrize("name", ["prompt_split", "eval_split", "pretrain_split"])
def test_a_split_of_a_file(refused, tmp_path, name):
    data = prompts(tmp_path, {"input": "1+1=", "label": "2"})["prompt_data"]
    sources = {"prompt_data": data, "eval_data": data, "pretrain_data": data, "ptx_coef": 0.1}
    refused(f"--{name} tran: files have no splits", "leave it out", **sources, **{name: "tran"})


@pytest.mark.parametrize("split", ["train", "test", "validation", "Val"])
def test_a_usual_split_of_a_file_may_be_named(make_config, tmp_path, split):
    """A script may name it for whatever source it is given."""
    data = prompts(tmp_path, {"input": "1+1=", "label": "2"})["prompt_data"]
    preflight(make_config(prompt_data=data, prompt_split=split).resolved())


def test_the_same_rows_for_training_and_evaluation_are_told(make_config, tmp_path, caplog):
    data = prompts(tmp_path, {"input": "1+1=", "label": "2"})["prompt_data"]
    (tmp_path / "linked.jsonl").symlink_to(data)
    other = write_jsonl(tmp_path / "other.jsonl", [{"input": "2+1=", "label": "3"}])

    def told(**options: Any) -> list[str]:
        caplog.clear()
        preflight(make_config(**options).resolved())
        return [
            record.getMessage()
            for record in caplog.records
            if "learned by heart" in record.getMessage()
        ]

    (line,) = told(prompt_data=data, eval_data=str(tmp_path / "linked.jsonl"))
    assert line.startswith(f"--prompt_data and --eval_data both have the rows of {data}: ")
    assert told(prompt_data=data, eval_data=other) == []
    assert told(prompt_data=data, eval_data=data, val_only=True) == []


def test_a_rollout_of_more_prompts_than_there_are_is_told(make_config, capsys):
    PPOTrainer.from_config(make_config(rollout_batch_size=16, train_batch_size=16))
    assert (
        "warning: --rollout_batch_size 16 is more than the 12 prompts: every step has all of them"
        in (capsys.readouterr().out)
    )


@pytest.mark.parametrize("name", ["save_path", "ckpt_path"])
@pytest.mark.parametrize("dry_run", [False, True])
def test_a_folder_that_cannot_be_made(refused, tmp_path, name, dry_run):
    folder = str(tmp_path / "new" / ("x" * 300))
    refused(
        f"--{name} {folder}: {tmp_path} cannot be written to", **{name: folder}, dry_run=dry_run
    )
    assert not (tmp_path / "new").exists()  # what was tried leaves nothing


def test_no_optimizer_step_names_the_reward_that_was_no_number(make_config, tmp_path):
    """The cause is in the last line, which is all that some launchers keep."""
    code = "def reward_func(queries, prompts, labels):\n    return [float('nan')] * len(queries)\n"
    (tmp_path / "nan.py").write_text(code)
    config = make_config(reward_fn=str(tmp_path / "nan.py"), benchmark_steps=1)
    with pytest.raises(
        TrainingError, match=r"no optimizer step was taken .*nan\.py:reward_func: the score of"
    ):
        PPOTrainer.from_config(config).fit()


def test_checkpoints_that_do_not_fit_are_told_in_units_that_say_something(make_config, monkeypatch):
    usage = SimpleNamespace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(ConfigError, match=r"need about [\d.]+ MB, 1\.0 kB are free"):
        PPOTrainer.from_config(make_config(save_steps=1))
