"""What is refused before anything heavy is imported."""

from __future__ import annotations

import errno
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.fakes import FakeStrategy
from support.tiny import write_jsonl

from lightppo.config import PPOConfig
from lightppo.config.supervised_options import SFTConfig
from lightppo.data.rows import ORIGIN_COLUMN
from lightppo.errors import ConfigError
from lightppo.preflight.advice import tell_advice
from lightppo.preflight.before_imports import (
    before_imports,
    dry_run_config,
    look,
    preflight,
    preflight_supervised,
)
from lightppo.preflight.run_checks import check_files

GOOD = "def reward_func(queries, prompts, labels):\n    return [0.0] * len(queries)\n"


@pytest.fixture
def run(tmp_path):
    """``run(**options)``: a run whose model, data and rewards are there, with these options instead."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "tokenizer_config.json").write_text("{}")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (tmp_path / "reward.py").write_text(GOOD)
    write_jsonl(tmp_path / "rows.jsonl", [{"input": "1+1=", "label": "2"}])

    def of(**options: Any) -> PPOConfig:
        paths = {"pretrain": str(tmp_path / "model"), "prompt_data": str(tmp_path / "rows.jsonl")}
        paths |= {"save_path": str(tmp_path / "out"), "ckpt_path": str(tmp_path / "out" / "ckpt")}
        return PPOConfig.from_flat(paths | {"reward_fn": str(tmp_path / "reward.py")} | options)

    return of


def refusal(config: PPOConfig) -> str:
    with pytest.raises(ConfigError) as error:
        preflight(config)
    return str(error.value)


def test_a_callback_whose_file_is_not_there(run):
    assert refusal(run(callback=["/nowhere/x.py:Mine"])).startswith(
        "--callback /nowhere/x.py:Mine: no file /nowhere/x.py"
    )
    supervised = SFTConfig.from_flat(pretrain="/nowhere", dataset="x", callback=["/nowhere/x.py"])
    with pytest.raises(ConfigError, match=r"--callback /nowhere/x\.py: no file /nowhere/x\.py"):
        preflight_supervised(supervised)


def rows(folder: Path, *found: Any) -> dict[str, str]:
    return {"prompt_data": write_jsonl(folder / "other.jsonl", found)}


def test_what_is_right_passes_and_nothing_is_written(run, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    preflight(
        run(
            eval_data=str(tmp_path / "rows.jsonl"),
            ptx_coef=0.1,
            pretrain_data=str(tmp_path / "rows.jsonl"),
        )
    )
    assert sorted(tmp_path.rglob("*")) == before


def test_all_problems_have_their_line(run, tmp_path):
    (tmp_path / "file").write_text("")
    problems = refusal(
        run(
            pretrain="./no",
            save_path=str(tmp_path / "file" / "x"),
            prompt_data=str(tmp_path / "no"),
        )
    )
    assert [line.split()[0] for line in problems.splitlines()] == [
        "--pretrain",
        "--save_path",
        "--prompt_data",
    ]


# -- models, folders, accounts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["pretrain", "ref_pretrain", "critic_pretrain", "reward_pretrain"])
@pytest.mark.parametrize("path", ["/no/model", "./no", "../no", "~/no", "a/b/c", "org/no", "no"])
def test_models_that_are_not_there(run, flag, path):
    """Names that the hub may have are asked for once; the tests are offline."""
    assert f"--{flag} {path}: no such folder" in refusal(
        run(**{flag: [path] if flag == "reward_pretrain" else path})
    )


def test_a_model_in_the_cache_of_the_hub_needs_no_network(run, monkeypatch):
    monkeypatch.setattr(
        "huggingface_hub.try_to_load_from_cache", lambda name, file: f"/cache/{name}/{file}"
    )
    preflight(run(pretrain="org/name"))


@pytest.mark.parametrize(("status", "said"), [(404, "the hub does not have it"), (429, None)])
def test_what_the_hub_says(run, monkeypatch, status, said):
    class Answer(Exception):
        response = SimpleNamespace(status_code=status)

    def model_info(self: Any, name: str, timeout: float) -> None:
        assert (name, 0 < timeout <= 10) == ("org/name", True)
        raise Answer

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    if said is None:  # busy: the loader tries again
        preflight(run(pretrain="org/name"))
    else:
        assert said in refusal(run(pretrain="org/name"))


def test_a_folder_without_a_model(run, tmp_path):
    assert "has no config.json: it is no Hugging Face model; it has out.txt" in refusal(
        run(pretrain=_with(tmp_path))
    )
    (tmp_path / "empty" / "adapter_config.json").write_text("{}")
    assert "is an adapter: `lightppo merge " in refusal(run(pretrain=str(tmp_path / "empty")))


@pytest.mark.parametrize(
    "flag",
    ["pretrain", "ref_pretrain", "critic_pretrain", "reward_pretrain", "teacher_pretrain"],
)
def test_an_adapter_beside_weights(run, tmp_path, flag):
    folder = shutil.copytree(tmp_path / "model", tmp_path / "beside")
    (folder / "adapter_config.json").write_text("{}")
    given = {flag: (str(folder),) if flag == "reward_pretrain" else str(folder)}
    told = refusal(run(**given, init_kl_coef=0.1))
    assert f"--{flag} {folder} has an adapter (adapter_config.json) beside its weights" in told


def _with(tmp_path: Path) -> str:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "out.txt").write_text("")
    return str(tmp_path / "empty")


@pytest.mark.parametrize(
    "config",
    ['{"max_position_embeddings": 64}', '{"text_config": {"max_position_embeddings": 64}}'],
)
def test_prompt_and_response_must_fit_the_positions_of_the_model(run, tmp_path, config):
    (tmp_path / "model" / "config.json").write_text(config)
    assert "--prompt_max_len 40 + --generate_max_len 25 = 65" in refusal(
        run(prompt_max_len=40, generate_max_len=25)
    )
    preflight(run(prompt_max_len=40, generate_max_len=24))
    preflight(
        run(
            prompt_max_len=40,
            generate_max_len=25,
            override_config='{"max_position_embeddings": 65}',
        )
    )


def test_ranks_that_hold_a_row_together_must_share_out_its_heads(run, tmp_path):
    (tmp_path / "model" / "config.json").write_text('{"num_attention_heads": 6}')
    message = refusal(run(sequence_parallel_size=4))
    assert (
        f"--sequence_parallel_size 4 does not divide the 6 attention heads of --pretrain {tmp_path}"
        in message
    )
    preflight(run(sequence_parallel_size=2))


@pytest.mark.parametrize("flag", ["save_path", "ckpt_path", "rollout_data_dir", "use_tensorboard"])
def test_folders_that_cannot_be_written(run, tmp_path, monkeypatch, flag):
    (tmp_path / "file").write_text("")
    assert f"--{flag} {tmp_path}/file/x: {tmp_path}/file is a file" in refusal(
        run(**{flag: str(tmp_path / "file/x")})
    )
    (tmp_path / "locked").mkdir()
    make = Path.mkdir

    def refused(path: Path, *args: Any, **options: Any) -> None:
        if path.parent == tmp_path / "locked":
            raise OSError(errno.EROFS, "Read-only file system")
        make(path, *args, **options)

    monkeypatch.setattr(Path, "mkdir", refused)
    said = f"--{flag} {tmp_path}/locked/x: {tmp_path}/locked cannot be written to (Read-only file system)"
    assert said in refusal(run(**{flag: str(tmp_path / "locked" / "x")}))


def test_resume_from_what_is_no_checkpoint(run, tmp_path):
    assert f"--resume {tmp_path}: not a folder of checkpoints" in refusal(run(resume=str(tmp_path)))


def test_a_checkpoint_of_other_ranks_or_another_stage_is_refused_before_models_load(
    run, tmp_path, monkeypatch
):
    part = tmp_path / "out" / "ckpt" / "_actor" / "global_step3"
    part.mkdir(parents=True)
    (tmp_path / "out" / "ckpt" / "latest").write_text("global_step3")
    (part / "lightppo_checkpoint.json").write_text(json.dumps({"world_size": 2, "zero_stage": 2}))
    assert "global_step3 was saved with world_size=2, not 1: set --reshape_ckpt" in refusal(run())
    both = refusal(run(zero_stage=3, resume=str(tmp_path / "out" / "ckpt")))
    assert "world_size=2, not 1; zero_stage=2, not 3: set --reshape_ckpt" in both
    for options in ({"reshape_ckpt": True}, {"resume": "never"}, {"dry_run": True}):
        preflight(run(**options))
    monkeypatch.setenv("WORLD_SIZE", "2")
    preflight(run())


@pytest.mark.parametrize(
    ("mode", "logged_in", "said"),
    [
        ("online", True, None),
        ("online", False, "wandb login"),
        ("offline", False, None),
        ("disabled", False, None),
    ],
)
def test_the_login_at_weights_and_biases(run, monkeypatch, mode, logged_in, said):
    settings = SimpleNamespace(settings=SimpleNamespace(mode=mode))
    fake = SimpleNamespace(
        setup=lambda: settings, login=lambda prompt, verify: logged_in, Error=RuntimeError
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    if said is None:
        preflight(run(use_wandb=True))
    else:
        assert said in refusal(run(use_wandb=True))


def test_weights_and_biases_without_a_key(run, monkeypatch, tmp_path):
    wandb = pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb.teardown()
    assert "--use_wandb: not logged in" in refusal(run(use_wandb=True))
    wandb.teardown()
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    preflight(run(use_wandb=True))
    wandb.teardown()


# -- rewards ---------------------------------------------------------------------------------------------------------


VERL = "def reward_func(data_source, solution_str, ground_truth, extra_info): pass\n"


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        (
            "def reward_func(queries, prompts, labels):\n    return [1.0\n",
            {},
            ["SyntaxError", ":2: return [1.0"],
        ),
        ("def score(q): pass\n", {}, ["has no 'reward_func'; it has score"]),
        (
            "def reward_func(labels, queries): pass\n",
            {},
            ["--reward_fn_style", "(labels, queries)"],
        ),
        (GOOD, {"reward_manager": "naive"}, ["--reward_manager naive", "a whole batch"]),
        (GOOD, {"reward_fn_style": "areal"}, ["must take (prompt, completions"]),
        (
            VERL,
            {"reward_fn_style": "trl"},
            ["ground_truth, extra_info) is verl's, not --reward_fn_style trl's"],
        ),
        (VERL, {"reward_fn_style": "areal"}, ["is verl's"]),  # although its parameters' places fit
        (VERL, {"reward_fn_style": "queries"}, ["is verl's"]),
    ],
)
def test_reward_files(run, tmp_path, source, options, said):
    (tmp_path / "mine.py").write_text(source)
    message = refusal(run(reward_fn=str(tmp_path / "mine.py"), **options))
    assert [part for part in ["--reward_fn", *said] if part not in message] == []
    assert len(message.splitlines()) == 1
    assert "ast.py" not in message  # the user's lines alone


TRL = "def reward_func(completions, answer, **columns): pass\n"


@pytest.mark.parametrize(
    ("source", "style", "missing"),
    [
        (TRL, "verl", "completions"),
        (TRL, "auto", "answer"),
        (TRL.replace("answer", "label"), "trl", None),  # a column
        ("def reward_func(queries, prompts, labels, level): pass", "auto", "level"),
    ],
)
def test_a_function_that_lacks_an_argument(run, tmp_path, source, style, missing):
    """Columns of the rows are arguments too."""
    (tmp_path / "mine.py").write_text(source)
    config = run(reward_fn=str(tmp_path / "mine.py"), reward_fn_style=style)
    if missing is None:
        return preflight(config)
    message = refusal(config)
    assert f"missing a required argument: '{missing}'" in message
    assert "--reward_fn_style" in message
    assert ORIGIN_COLUMN not in message


@pytest.mark.parametrize("debug", [False, True])
def test_debug_shows_the_trace(run, tmp_path, capsys, debug):
    refusal(run(reward_fn=str(tmp_path / "none.py"), debug=debug))
    assert ("Traceback" in capsys.readouterr().err) is debug


@pytest.mark.parametrize(
    "source",
    [
        "from other import reward_func",
        "from other import *",
        "reward_func = make(labels=1)",
        "globals()['reward_func'] = print",
        "@wrapped\ndef reward_func(no, labels): pass",
        "if True:\n    def reward_func(queries, prompts, labels): pass",
        "def compute_score(data_source, solution_str, ground_truth, extra_info=print(1)): pass",
        "async def reward_func(queries, prompts, labels, *, k: int = 2, **more): pass",
        "import no_such_module\nraise SystemExit(7)\n" + GOOD,
    ],
)
def test_reward_files_are_read_and_not_run(run, tmp_path, source, capsys):
    (tmp_path / "mine.py").write_text(source)
    preflight(run(reward_fn=str(tmp_path / "mine.py")))
    assert capsys.readouterr().out == ""


# -- data ------------------------------------------------------------------------------------------------------------


def test_first_rows(run, tmp_path):
    where = f"{tmp_path}/other.jsonl:2: "
    assert where + "'input' is int 7" in refusal(
        run(**rows(tmp_path, {"input": "1"}, {"input": 7}))
    )
    assert "other.jsonl: --input_key 'task'" in refusal(
        run(**rows(tmp_path, {"input": "1"}), input_key="task")
    )
    assert "--label_key 'gold'" in refusal(run(**rows(tmp_path, {"input": "1"}), label_key="gold"))
    (tmp_path / "broken.jsonl").write_text('{"input": "1"}\n{"input": "1",,}\n')
    assert f"{tmp_path}/broken.jsonl:2: not JSON" in refusal(
        run(prompt_data=str(tmp_path / "broken.jsonl"))
    )
    preflight(run(**rows(tmp_path, {"input": 7}), on_bad_row="skip"))


def test_parquet(run, tmp_path):
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "bad.parquet").write_text("hello")
    assert "bad.parquet: not a readable parquet file" in refusal(
        run(prompt_data=str(tmp_path / "bad.parquet"))
    )
    pyarrow.parquet.write_table(pyarrow.table({"question": ["1", None]}), tmp_path / "rows.parquet")
    assert "rows.parquet, row 2: no prompt" in refusal(
        run(prompt_data=str(tmp_path / "rows.parquet"))
    )


@pytest.mark.parametrize("data", ["prompt_data", "eval_data"])
def test_templates(run, tmp_path, data):
    chats = {data: rows(tmp_path, {"messages": [{"role": "user", "content": "hi"}]})["prompt_data"]}
    assert "no chat template" in refusal(run(**chats))
    assert "no chat template" in refusal(run(apply_chat_template=True))
    assert "--system_prompt needs chat rows" in refusal(run(system_prompt="Be kind."))
    settings = tmp_path / "model" / "tokenizer_config.json"
    settings.write_text(json.dumps({"chat_template": "{{ messages }}"}))
    preflight(run(**chats))
    assert "--input_template is for plain text" in refusal(run(**chats, input_template="Q: {}"))
    settings.write_text("{}")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    (tmp_path / "own" / "tokenizer.json").write_text("{}")
    preflight(run(**chats, tokenizer_path=str(tmp_path / "own")))
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages }}")
    preflight(run(**chats))


def test_tests_of_programs_in_a_file_of_their_own(run, tmp_path):
    test = {"query_id": "b", "input_output": '{"inputs": ["1 1"], "outputs": ["2"]}'}
    options = rows(tmp_path, {"input": "add", "query_id": "b"}) | {
        "reward_fn": None,
        "reward_source": ("code",),
    }
    assert "no test cases" in refusal(run(**options))
    options["prompt_metadata"] = write_jsonl(tmp_path / "tests.jsonl", [test])
    preflight(run(**options))
    write_jsonl(tmp_path / "tests.jsonl", [test | {"query_id": "c"}])
    assert f"{tmp_path}/other.jsonl:1: query_id 'b' is not in --prompt_metadata" in refusal(
        run(**options)
    )


def test_rows_without_the_labels_that_a_verifier_needs(run, tmp_path):
    unlabelled = rows(tmp_path, {"input": "1+1="})
    math = {"reward_fn": None, "reward_source": ["math"]}
    assert f"{tmp_path}/other.jsonl:1: rows have no label: set --label_key" in refusal(
        run(**unlabelled, **math)
    )
    assert "no test cases" in refusal(run(**unlabelled, reward_fn=None, reward_source=["code"]))
    preflight(run(**math))


@pytest.mark.parametrize(
    ("source", "warned"),
    [
        (GOOD, False),
        (
            "def reward_func(queries, prompts, golds):\n    return [float(g in q) for q, g in zip(queries, golds)]",
            True,
        ),
        (
            "def compute_score(data_source, solution_str, ground_truth):\n    return ground_truth == solution_str",
            True,
        ),
    ],
)
def test_a_function_that_reads_labels_which_no_row_has(run, tmp_path, caplog, source, warned):
    (tmp_path / "mine.py").write_text(source)
    preflight(run(reward_fn=str(tmp_path / "mine.py")))
    assert caplog.text == ""
    preflight(run(reward_fn=str(tmp_path / "mine.py"), **rows(tmp_path, {"input": "1+1="})))
    assert (
        "rows have no label: set --label_key; the reward function reads" in caplog.text
    ) is warned


# -- supervised training, and scripts --------------------------------------------------------------------------------


def test_supervised_training(run, tmp_path):
    options = {
        "pretrain": str(tmp_path / "model"),
        "dataset": str(tmp_path / "rows.jsonl"),
        "dataset_split": "train",
    }
    options |= {"save_path": str(tmp_path / "sft"), "input_key": "input", "output_key": "label"}
    run()
    preflight_supervised(SFTConfig.from_flat(options))
    wrong = {
        "output_key": "gold",
        "pretrain": "./no",
        "save_path": str(tmp_path / "rows.jsonl"),
        "dataset": "./no.json",
        "eval_dataset": "./no.json",
        "resume": "./no",
    }
    for name, value in wrong.items():
        with pytest.raises(
            ConfigError, match=f"--{'output_key' if name == 'output_key' else name}"
        ):
            preflight_supervised(SFTConfig.from_flat(options | {name: value}))


@pytest.mark.parametrize("rank", ["0", "1"])
def test_rank_0_decides(run, capsys, monkeypatch, rank):
    monkeypatch.setenv("RANK", rank)
    if rank == "0":
        with pytest.raises(SystemExit) as end:
            before_imports(lambda: preflight(run(pretrain="./no", reward_fn="no.py")), "train.py")
        assert end.value.code == 2
        lines = capsys.readouterr().err.splitlines()
        assert lines[0].split(": ")[1:3] == ["error", "--pretrain ./no"]
        assert len(lines) == 2
    else:
        before_imports(lambda: preflight(run(pretrain="./no")), "train.py")
        assert capsys.readouterr().err == ""


# -- --dry_run ---------------------------------------------------------------------------------------------------------


def test_a_dry_run_is_small_and_keeps_nothing_of_the_run(run, tmp_path):
    """Also for two ranks: every size is shared out evenly."""
    large = {
        "rollout_batch_size": 64,
        "n_samples_per_prompt": 8,
        "train_batch_size": 128,
        "generate_max_len": 512,
    }
    large |= {
        "advantage_estimator": "grpo",
        "save_steps": 1,
        "hf_save_steps": 1,
        "save_epochs": 1,
        "min_new_tokens": 40,
    }
    large |= {
        "overlong_buffer_len": 100,
        "max_epochs": 3,
        "eval_n_samples": 16,
        "rollout_data_dir": str(tmp_path / "d"),
    }
    large |= {
        "use_tensorboard": str(tmp_path / "tb"),
        "dynamic_sampling": True,
        "eval_data": str(tmp_path / "rows.jsonl"),
    }
    config = dry_run_config(run(**large).resolved(), 2, "/tmp/x")
    flat = config.flat()
    assert (flat["rollout_batch_size"], flat["n_samples_per_prompt"], flat["train_batch_size"]) == (
        4,
        4,
        16,
    )
    assert (flat["generate_max_len"], flat["overlong_buffer_len"], flat["min_new_tokens"]) == (
        32,
        32,
        32,
    )
    assert (flat["benchmark_steps"], flat["max_epochs"], flat["eval_n_samples"]) == (1, 1, 4)
    assert (flat["save_path"], flat["resume"], flat["rollout_data_dir"]) == (
        "/tmp/x",
        "never",
        None,
    )
    assert not any(
        [
            flat["use_tensorboard"],
            flat["save_epochs"],
            flat["hf_save_steps"] > 0,
            flat["save_steps"] > 0,
        ]
    )
    config.validate(2)


def test_a_dry_run_of_a_small_run_is_as_small(run):
    flat = dry_run_config(
        run(rollout_batch_size=1, train_batch_size=1, generate_max_len=3).resolved(), 1, "x"
    ).flat()
    assert [
        flat[n] for n in ("rollout_batch_size", "n_samples_per_prompt", "generate_max_len")
    ] == [1, 1, 3]


def test_what_the_command_has_looked_at_is_not_looked_at_again(run, monkeypatch):
    """Nor warned of again; a run that a script builds is."""
    config, looks = run(), []
    monkeypatch.setattr("lightppo.preflight.before_imports.preflight", looks.append)
    monkeypatch.setattr("lightppo.preflight.run_checks.preflight", looks.append)
    resolved = config.resolved()
    building = SimpleNamespace(resolved_options=resolved, config=resolved, strategy=FakeStrategy())
    look(config, "lightppo ppo")
    check_files(building)
    assert looks == [resolved]
    check_files(building)
    assert looks == [resolved] * 2


def test_a_template_that_has_no_line_break_is_told_of_once(run):
    building = SimpleNamespace(config=run(input_template="{}\\nA:").resolved())
    told = [line for line in tell_advice(building) if "--input_template" in line]
    assert told == [
        "note: --input_template has a backslash and an n, not a line break: in bash write $'\\n'"
    ]


def test_more_steps_than_the_files_have_rows_are_refused_before_they_are_read(run, tmp_path):
    first, second = (
        write_jsonl(tmp_path / name, [{"input": "1+1=", "label": "2"}] * 5)
        for name in ("a.jsonl", "b.jsonl")
    )
    batch = {"rollout_batch_size": 4, "train_batch_size": 4}
    options = {"prompt_data": f"{first},{second}", "num_episodes": 2, **batch}
    assert (
        "--total_training_steps 7 is more than the 6 steps of --num_episodes 2 (10 prompts, --rollout_batch_size 4): "
        "set at most 6, or --num_episodes 3"
    ) in refusal(run(total_training_steps=7, **options).resolved())
    preflight(run(total_training_steps=6, **options).resolved())
    preflight(run(total_training_steps=7, dry_run=True, **options).resolved())
