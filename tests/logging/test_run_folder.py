"""The folder of a run: one process, no other run's files, the content that makes a run; also behind a URL."""

from __future__ import annotations

import gzip
import json
import linecache
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import yaml
from support.fakes import FakeStrategy
from support.runs import fitted, whole_weights
from support.tiny import read_jsonl, save_causal_lm, sums, write_jsonl

from lightppo import PPOTrainer
from lightppo.config import PPOConfig, parse_args
from lightppo.errors import ConfigError, StagingError, TrainingError
from lightppo.logging.run_folder import checkpoint_mark, claim, release, set_aside
from lightppo.storage import local_folder, upload
from lightppo.trainer import build
from lightppo.user_code import load_python_function

GROUPS = {"advantage_estimator": "grpo", "init_kl_coef": 0.0, "n_samples_per_prompt": 2}


# -- one process -----------------------------------------------------------------------------------------------------


@pytest.fixture
def other_process() -> Iterator[Any]:
    """``other_process(folder)``: the id of a process that holds the folder; it is killed at the end."""
    started = []

    def start(folder: Path) -> int:
        ready, told = os.pipe()
        if (child := os.fork()) == 0:
            try:
                claim({"--save_path": str(folder)}, FakeStrategy())
                os.write(told, b"x")
                signal.pause()
            finally:
                os._exit(0)
        started.append(child)
        os.close(told)
        assert os.read(ready, 1) == b"x"
        return child

    yield start
    for child in started:
        try:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


def test_a_folder_in_use_is_refused_until_its_process_is_gone(tmp_path, other_process):
    child = other_process(tmp_path / "run")
    with pytest.raises(ConfigError) as error:
        claim({"--save_path": str(tmp_path / "run")}, FakeStrategy())
    holder = f"process {child} on {socket.gethostname()}"
    assert str(error.value).startswith(
        f"--save_path {tmp_path}/run is in use by {holder}: wait for it, or choose"
    )
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    claim({"--save_path": str(tmp_path / "run")}, FakeStrategy())
    release([str(tmp_path / "run")])
    other_process(tmp_path / "run")  # it was let go


def test_a_worker_does_not_keep_the_lock(tmp_path, other_process):
    """A forked worker that outlives a killed rank holds nothing: closing what it inherited does not unlock either."""
    claim({"--save_path": str(tmp_path)}, FakeStrategy())
    if (worker := os.fork()) == 0:
        signal.pause()
    try:
        with pytest.raises(AssertionError):
            other_process(tmp_path)  # refused: this process still has it
        release([str(tmp_path)])
        other_process(tmp_path)  # although the worker lives
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch, caplog):
    def unsupported(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", unsupported)
    claim({"--ckpt_path": str(tmp_path)}, FakeStrategy())
    assert (
        f"--ckpt_path {tmp_path}: no locks on this file system (Operation not supported)"
        in caplog.text
    )


@pytest.mark.usefixtures("world")
def test_a_second_run_is_refused_before_its_models_load(
    make_config, tmp_path, other_process, monkeypatch
):
    other_process(tmp_path / "run" / "checkpoints_ppo")
    live = [
        tmp_path / "run" / "checkpoints_ppo" / name
        for name in ("_actor/global_step1.incomplete", ".best_hf.saving")
    ]
    for folder in live:  # what the other process is saving now
        folder.mkdir(parents=True)
    monkeypatch.setattr(build, "build_models", lambda *_: pytest.fail("models were loaded"))
    config = make_config(ckpt_path=None)
    with pytest.raises(
        ConfigError, match=r"--ckpt_path .*/run/checkpoints_ppo is in use by process"
    ):
        PPOTrainer.from_config(config)
    assert all(folder.is_dir() for folder in live)


@pytest.mark.usefixtures("world")
def test_an_evaluation_may_look_at_checkpoints_of_a_run_that_goes_on(
    make_config, tmp_path, assets, other_process, capsys
):
    """What it does not read may differ: here what trains the critic, the KL controller, the reward file."""
    fitted(make_config(save_steps=1, benchmark_steps=1))
    other_process(tmp_path / "ckpt")
    only = {
        "eval_data": assets["prompt_data"],
        "eval_max_samples": 2,
        "val_only": True,
        "prompt_data": None,
    }
    (tmp_path / "other.py").write_text(Path(assets["reward_fn"]).read_text() + "\n")
    only |= {"reward_fn": str(tmp_path / "other.py"), "kl_target": 0.1, "prompt_max_len": 10}
    config = make_config(**only, save_path=str(tmp_path / "eval")).with_options(
        critic_learning_rate=0.5
    )
    assert fitted(config).state.global_step == 1
    assert "resume: --prompt_max_len was 12, is 10\n" in capsys.readouterr().out


# -- no other run's files --------------------------------------------------------------------------------------------


def test_what_an_earlier_run_left_is_numbered(tmp_path, capsys):
    for run in "abc":
        (tmp_path / "metrics.jsonl").write_text(run)
        (tmp_path / "eval").mkdir()
        (tmp_path / "eval" / "step1.jsonl").write_text(run)
        set_aside(tmp_path / "metrics.jsonl", tmp_path / "eval", tmp_path / "none")
    assert not (tmp_path / "eval").exists()
    for number, run in enumerate("abc", start=1):
        assert (tmp_path / f"metrics.{number}.jsonl").read_text() == run
        assert (tmp_path / f"eval.{number}" / "step1.jsonl").read_text() == run
    line = "metrics.jsonl → metrics.2.jsonl, eval → eval.2"
    assert f"{tmp_path}: an earlier run's files are kept apart: {line}\n" in capsys.readouterr().out


@pytest.mark.usefixtures("world")
def test_a_new_run_keeps_evaluations_rollouts_and_curves_of_the_old_one(
    make_config, tmp_path, assets, capsys
):
    """The old one ends later, so that its files would stay beside those of the new one."""
    run, tb = tmp_path / "run", tmp_path / "tb"
    options = {"eval_data": assets["prompt_data"], "eval_max_samples": 2, "val_before_train": False,
               "rollout_data_dir": str(tmp_path / "rollouts"), "use_tensorboard": str(tb)}  # fmt: skip
    for steps in (2, 1):
        fitted(make_config(**options, benchmark_steps=steps))
    files = lambda folder: sorted(path.name for path in folder.iterdir())  # noqa: E731
    evaluations = (["step2.json", "step2.jsonl"], ["step1.json", "step1.jsonl"])
    assert (files(run / "eval.1"), files(run / "eval")) == evaluations
    samples = ["step1.jsonl.gz", "step2.jsonl.gz"]
    assert (files(run / "rollouts.1"), files(run / "rollouts")) == (samples, samples[:1])
    assert files(tmp_path / "rollouts.1") == ["step1.jsonl", "step2.jsonl"]
    assert files(tmp_path / "rollouts") == ["step1.jsonl"]
    assert files(tb) == ["run", "run.1"]
    assert len((run / "metrics.1.jsonl").read_text().splitlines()) == 3  # two steps, one evaluation
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    assert "benchmark_steps: 2" in (run / "run_config.1.yaml").read_text()
    assert capsys.readouterr().out.count("an earlier run's files are kept apart") == 1


@pytest.mark.usefixtures("world")
def test_all_samples_may_be_in_the_folder_of_some(make_config, tmp_path):
    run = tmp_path / "run"
    for _ in range(2):
        options = {"overlong_buffer_len": 1, "overlong_penalty_factor": 0.25}
        fitted(
            make_config(
                record_samples=3,
                rollout_data_dir=str(run / "rollouts"),
                benchmark_steps=1,
                **options,
            )
        )
    for folder in (run / "rollouts", run / "rollouts.1"):
        assert sorted(path.name for path in folder.iterdir()) == ["step1.jsonl", "step1.jsonl.gz"]
        every = read_jsonl(folder / "step1.jsonl")
        with gzip.open(folder / "step1.jsonl.gz", "rt") as file:
            some = [json.loads(line) for line in file]
        assert (len(every), len(some)) == (4, 3)
        for row in some:  # a critic, a reference, one optimizer step
            tokens = row.pop("tokens")
            numbers = {"log_prob", "rollout_log_prob", "kl", "entropy", "advantage", "value"}
            assert tokens.keys() == {"text"} | numbers
            assert {len(values) for values in tokens.values()} == {row["response_length"]}
            assert row in every
        assert {row["extras"]["overlong_reward"] for row in every} <= {0.0, -0.25}
        assert any(row["extras"]["overlong"] for row in every)


# -- what makes the run ----------------------------------------------------------------------------------------------


@pytest.fixture
def begun(make_config, tmp_path):
    """A run with a checkpoint of its first step, and files of its own."""
    (tmp_path / "reward.py").write_text(
        "def reward_func(queries, prompts, labels):\n    return [1.0] * len(queries)\n"
    )
    own = {
        "pretrain": save_causal_lm(tmp_path / "model", seed=3),
        "prompt_data": write_jsonl(tmp_path / "prompts.jsonl", sums(12)),
        "reward_fn": str(tmp_path / "reward.py"),
    }
    config = make_config(**own, ckpt_path=None, save_steps=1, benchmark_steps=1)
    fitted(config)
    return config.with_options(benchmark_steps=2)


@pytest.mark.usefixtures("world")
def test_other_content_behind_the_same_options_is_another_run(begun, tmp_path):
    def problem(config: PPOConfig = begun) -> str:
        with pytest.raises(
            ConfigError, match=r"cannot resume .*run/checkpoints_ppo/global_step1 as another run"
        ) as error:
            PPOTrainer.from_config(config)
        return str(error.value)

    reward = (tmp_path / "reward.py").read_text()
    (tmp_path / "reward.py").write_text(reward.replace("1.0", "2.0"))
    assert f"--reward_fn {tmp_path}/reward.py has other content than it had" in (text := problem())
    assert "prompt_data" not in text
    assert "pretrain" not in text
    assert "another --save_path (and --ckpt_path), or with --resume never" in text
    write_jsonl(tmp_path / "prompts.jsonl", sums(11))
    assert f"--prompt_data {tmp_path}/prompts.jsonl has other content" in problem()
    save_causal_lm(tmp_path / "model", seed=4)
    text = problem()
    assert all(
        f"--{name} {tmp_path}/model has other" in text
        for name in ("pretrain", "ref_pretrain", "critic_pretrain")
    )

    kept = (tmp_path / "run" / "metrics.jsonl").read_text()  # a refusal moves nothing
    anew = PPOTrainer.from_config(begun.with_options(resume="never"))
    assert anew.state.global_step == 0
    anew.fit()
    assert (tmp_path / "run" / "metrics.1.jsonl").read_text() == kept


ESTIMATOR = """
from lightppo import estimator


@estimator(per_sample=True)
def own(groups, **_):
    return groups.scores
"""


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("as_function", [False, True])
def test_another_estimator_of_the_same_name_is_another_run(make_config, tmp_path, as_function):
    (path := tmp_path / "own.py").write_text(ESTIMATOR)

    def config() -> PPOConfig:
        given = load_python_function(str(path), "own") if as_function else f"{path}:own"
        own = GROUPS | {"advantage_estimator": given}
        return make_config(**own, critic_pretrain=None, save_steps=1, benchmark_steps=1)

    fitted(config())
    PPOTrainer.from_config(config())
    path.write_text(ESTIMATOR.replace("groups.scores", "-groups.scores"))
    linecache.checkcache()
    with pytest.raises(
        ConfigError, match=r"--advantage_estimator .*own.* has other content than it had"
    ):
        PPOTrainer.from_config(config())


@pytest.mark.usefixtures("world")
def test_another_save_path_is_another_run_but_a_folder_may_be_moved(begun, tmp_path):
    elsewhere = {"save_path": str(tmp_path / "other")}
    with pytest.raises(
        ConfigError, match=rf"as another run: --save_path {tmp_path}/run → {tmp_path}/other\. "
    ):
        PPOTrainer.from_config(
            begun.with_options(**elsewhere, ckpt_path=str(tmp_path / "run" / "checkpoints_ppo"))
        )
    # by default the checkpoints of another folder are other ones
    assert PPOTrainer.from_config(begun.with_options(**elsewhere)).state.global_step == 0
    # on purpose
    # nothing here
    off = {"lora_alpha": 16, "lora_dropout": 0, "ptx_coef": 0, "pretrain_data_probs": "1.0"}
    branch = {
        "save_path": str(tmp_path / "branch"),
        "resume": str(tmp_path / "run" / "checkpoints_ppo"),
    }
    assert PPOTrainer.from_config(begun.with_options(**branch, **off)).state.global_step == 1
    release([str(tmp_path / "run"), str(tmp_path / "run" / "checkpoints_ppo")])
    (tmp_path / "run").rename(tmp_path / "moved")
    resumed = fitted(begun.with_options(save_path=str(tmp_path / "moved")))
    assert resumed.state.global_step == 2


def test_the_mark_of_a_checkpoint_is_of_its_content(tmp_path):
    first = save_causal_lm(tmp_path / "a", seed=1)
    # wherever and whenever
    assert checkpoint_mark(save_causal_lm(tmp_path / "b", seed=1)) == checkpoint_mark(first)
    assert checkpoint_mark(save_causal_lm(tmp_path / "c", seed=2)) != checkpoint_mark(first)
    (tmp_path / "b" / "metrics.jsonl").write_text("not of the model")
    assert checkpoint_mark(str(tmp_path / "b")) == checkpoint_mark(first)
    config = json.loads((tmp_path / "b" / "config.json").read_text()) | {"rms_norm_eps": 0.5}
    (tmp_path / "b" / "config.json").write_text(json.dumps(config))
    assert checkpoint_mark(str(tmp_path / "b")) != checkpoint_mark(first)


# -- what was asked --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("world")
def test_the_kept_options_are_those_that_were_asked(make_config, tmp_path):
    fitted(make_config(ckpt_path=None, benchmark_steps=1))
    asked, resolved = (
        yaml.safe_load((tmp_path / "run" / f"run_config{kind}.yaml").read_text())
        for kind in ("", ".resolved")
    )
    names = ("ref_pretrain", "critic_pretrain", "ckpt_path", "policy_loss")
    assert [asked[name] for name in names] == [None] * 4
    assert [resolved[name] for name in names] == [asked["pretrain"]] * 2 + [
        f"{tmp_path}/run/checkpoints_ppo",
        "ppo",
    ]
    other = [
        "--config",
        str(tmp_path / "run" / "run_config.yaml"),
        "--pretrain",
        "other",
        "--save_path",
        "there",
    ]
    again = parse_args(other).resolved()
    assert {again.model.pretrain, again.model.ref_pretrain, again.model.critic_pretrain} == {
        "other"
    }
    assert again.checkpoint.ckpt_path == "there/checkpoints_ppo"


# -- a run that trained nothing, or less than asked ------------------------------------------------------------------


@pytest.mark.usefixtures("world")
def test_a_run_without_an_optimizer_step_is_an_error_and_saves_nothing(make_config, tmp_path):
    (tmp_path / "same.py").write_text(
        "def reward_func(queries, prompts, labels):\n    return [1.0] * len(queries)\n"
    )
    config = make_config(
        **GROUPS, reward_fn=str(tmp_path / "same.py"), dynamic_sampling=True, save_steps=1
    )
    trainer = PPOTrainer.from_config(config)
    with pytest.raises(
        TrainingError, match=r"no optimizer step was taken in \d+ steps.*--filter_range"
    ):
        trainer.fit()
    assert list((tmp_path / "run").glob("*.safetensors")) == []


@pytest.mark.usefixtures("world")
def test_more_steps_than_the_prompts_hold_are_refused(make_config):
    """12 prompts in rollouts of 4 are three steps."""
    with pytest.raises(ConfigError) as error:
        PPOTrainer.from_config(make_config(total_training_steps=7, num_episodes=2))
    assert str(error.value) == (
        "--total_training_steps 7 is more than the 6 steps of --num_episodes 2 (12 prompts, --rollout_batch_size 4): "
        "set at most 6, or --num_episodes 3"
    )


@pytest.mark.usefixtures("world")
def test_fewer_steps_than_the_schedule_was_made_for_are_said(make_config, tmp_path, capsys):
    """With dynamic sampling only the run itself shows how many steps there are."""
    (tmp_path / "some.py").write_text(
        "def reward_func(queries, prompts, labels):\n    return [float(len(q) % 2) for q in queries]\n"
    )
    config = make_config(**GROUPS, reward_fn=str(tmp_path / "some.py"), dynamic_sampling=True, filter_range=(-9.0, 9.0),
                         rollout_batch_size=3, train_batch_size=6, gen_batch_size=5, num_episodes=2)  # fmt: skip
    steps = fitted(config).state.global_step
    assert "the schedules were stretched" not in capsys.readouterr().out
    release([config.checkpoint.save_path])
    fitted(config.with_options(total_training_steps=steps + 1))
    assert (
        f"the prompts held {steps} steps; the schedules were stretched over --total_training_steps {steps + 1}"
        in (capsys.readouterr().out)
    )


# -- behind a URL ----------------------------------------------------------------------------------------------------


@pytest.fixture
def memory(tmp_path, monkeypatch) -> Iterator[Any]:
    """fsspec's file system in memory, empty; what is written in its place is below ``tmp_path``."""
    monkeypatch.setenv("LIGHTPPO_CACHE", str(tmp_path / "node1"))
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    yield fs
    fs.store.clear()


def names(fs: Any, folder: str) -> set[str]:
    return {path.removeprefix(f"{folder}/") for path in fs.find(folder)}


@pytest.mark.usefixtures("world")
def test_a_run_at_a_url_goes_on_on_another_machine(
    make_config, memory, tmp_path, monkeypatch, assets
):
    options = {"save_steps": 1, "max_ckpt_num": 1, "eval_data": assets["prompt_data"], "eval_max_samples": 2,
               "best_metric": "eval/reward", "eval_steps": 1, "val_before_train": False,
               "save_hf_ckpt": True}  # fmt: skip
    straight = fitted(make_config(**options))
    samples = Path(straight.config.checkpoint.save_path, "rollouts")
    config = make_config(**options, save_path="memory://bucket/run", ckpt_path=None)
    fitted(config.with_options(benchmark_steps=2))
    memory.pipe("/bucket/run/rollouts/step3.jsonl.gz", b"of a step that no checkpoint has")
    memory.pipe("/bucket/run/rollouts/step9.jsonl.gz", b"")
    assert "/bucket/run/config.json" in memory.find("/bucket/run")
    whole = names(memory, "/bucket/run/checkpoints_ppo")
    assert {name.split("/")[1] for name in whole if name.startswith("_actor/")} == {
        "global_step2",
        "latest",
    }
    assert {name.split("/")[0] for name in whole} == {
        "_actor",
        "_critic",
        "latest",
        "global_step2_hf",
        "best_hf",
    }
    assert not list(Path.cwd().glob("memory:*"))

    monkeypatch.setenv("LIGHTPPO_CACHE", str(tmp_path / "node2"))
    assert not local_folder(config.checkpoint.save_path).exists()
    resumed = fitted(config)
    ours, theirs = whole_weights(resumed), whole_weights(straight)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    rows = [json.loads(line) for line in memory.cat("/bucket/run/metrics.jsonl").splitlines()]
    assert [row["step"] for row in rows if "rollout/reward" in row] == [1, 2, 3]
    assert {name for name in names(memory, "/bucket/run") if name.startswith("eval/")} == {
        f"eval/step{step}.{kind}" for step in (1, 2, 3) for kind in ("json", "jsonl")
    }
    kept = [name for name in names(memory, "/bucket/run") if name.startswith("rollouts/")]
    assert {name: memory.cat(f"/bucket/run/{name}") for name in kept} == {
        f"rollouts/{path.name}": path.read_bytes() for path in samples.iterdir()
    }
    kept = names(memory, "/bucket/run/checkpoints_ppo")
    assert {name.split("/")[1] for name in kept if name.startswith("_actor/")} == {
        "global_step3",
        "latest",
    }
    assert not any(name.startswith("global_step2_hf") for name in kept)

    anew = PPOTrainer.from_config(config.with_options(resume="never"))
    assert anew.state.global_step == 0
    anew.start_callbacks()
    kept = names(memory, "/bucket/run")
    assert {
        "metrics.1.jsonl",
        "eval.1/step1.jsonl",
        "rollouts.1/step3.jsonl.gz",
        "run_config.1.yaml",
    } < kept
    assert not any(name.startswith(("eval/", "rollouts/", "metrics.jsonl")) for name in kept)
    assert not (tmp_path / "node2" / "unsent").exists()  # all was sent
    again = make_config(
        pretrain="memory://bucket/run", save_path=str(tmp_path / "next"), ckpt_path=None
    )
    from_export = PPOTrainer.from_config(again)
    assert all(
        torch.equal(tensor, whole_weights(straight)[name])
        for name, tensor in whole_weights(from_export).items()
    )


def test_a_run_in_the_memory_of_its_process_is_warned_about_and_its_files_are_kept(
    memory, tmp_path, caplog
):
    """``memory://`` ends with a killed process: the next start begins anew."""
    folders = {"--save_path": "memory://bucket/run", "--ckpt_path": str(tmp_path / "ckpt")}
    here = local_folder(folders["--save_path"])
    claim(folders, FakeStrategy())
    said = "--save_path memory://bucket/run: memory:// is the memory of this process and ends with it: the next start"
    assert caplog.text.count(said) == caplog.text.count("memory of this process") == 1
    assert f"Copies of what is written are in {here};" in caplog.text
    (here / "model.safetensors").write_text("trained")
    upload(folders["--save_path"], "model.safetensors")

    # the process is killed, and another one starts
    memory.store.clear(), memory.pseudo_dirs.clear()
    caplog.clear()
    claim(folders, FakeStrategy())
    (kept,) = (tmp_path / "node1" / "unsent").rglob("model.safetensors")
    assert kept.read_text() == "trained"
    told = "--save_path memory://bucket/run: an earlier process ended, and its memory with it; its files are now in"
    assert f"{told} {kept.parent}" in caplog.text
    release(folders.values())


def test_what_was_not_sent_is_kept_apart_by_the_next_process(memory, tmp_path, monkeypatch, caplog):
    folders = {
        "--save_path": "memory://bucket/run",
        "--ckpt_path": "memory://bucket/run/checkpoints_ppo",
    }
    here = local_folder(folders["--save_path"])
    claim(folders, FakeStrategy())
    (here / "checkpoints_ppo" / "_actor").mkdir()
    (here / "checkpoints_ppo" / "_actor" / "shard").write_text("sent")
    upload(folders["--ckpt_path"], "_actor")
    (here / "metrics.jsonl").write_text("sent")
    upload(folders["--save_path"], "metrics.jsonl")
    claim(folders, FakeStrategy())  # all is at the URL
    assert [path.name for path in here.rglob("*") if path.is_file() and path.name != ".lock"] == [
        "metrics.jsonl"
    ]

    (here / "model.safetensors").write_text("trained")
    with monkeypatch.context() as patch:
        patch.setattr(
            type(memory), "put", lambda *_, **__: (_ for _ in ()).throw(ConnectionError("gone"))
        )
        patch.setattr("time.sleep", lambda seconds: None)  # between tries
        with pytest.raises(
            StagingError, match=rf"memory://bucket/run: ConnectionError: gone; what .* is in {here}"
        ):
            upload(folders["--save_path"], "model.safetensors")
    caplog.clear()
    claim(folders, FakeStrategy())
    (kept,) = (tmp_path / "node1" / "unsent").rglob("model.safetensors")
    assert kept.read_text() == "trained"
    said = "--save_path memory://bucket/run: an earlier process could not send all it wrote; its files are now in"
    assert f"{said} {kept.parent}" in caplog.text
    assert not (here / "model.safetensors").exists()  # the URL alone counts
    (here / "metrics.jsonl").write_text("same")  # sent once, and changed since
    claim(folders, FakeStrategy())
    assert (kept.parent.with_name("run.2") / "metrics.jsonl").read_text() == "same"
    release(folders.values())


def test_a_lost_connection_is_made_again_and_never_looks_like_an_empty_folder(
    memory, tmp_path, monkeypatch
):
    """fsspec's ``exists`` and ``find`` say no, and nothing, for a server that does not answer."""
    folders, failures = {"--ckpt_path": "memory://bucket/ckpt"}, {}
    memory.pipe("/bucket/ckpt/latest", b"global_step1")
    local = local_folder(folders["--ckpt_path"])

    def failing(name: str, real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if failures.get(name, 0) > 0:
                failures[name] -= 1
                raise BrokenPipeError(name)
            return real(*args, **options)

        return call

    names = ("info", "ls", "put", "pipe_file", "get_file")
    for name in names:
        monkeypatch.setattr(type(memory), name, failing(name, getattr(type(memory), name)))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    failures.update(dict.fromkeys(names, 1))
    claim(folders, FakeStrategy())
    assert (local / "latest").read_text() == "global_step1"
    (local / "latest").write_text("global_step2")
    upload(folders["--ckpt_path"], "latest")
    assert memory.cat("/bucket/ckpt/latest") == b"global_step2"
    assert failures == dict.fromkeys(names, 0)
    failures["info"] = 1000
    with pytest.raises(
        ConfigError, match=r"--ckpt_path memory://bucket/ckpt: .*BrokenPipeError: info"
    ):
        claim(folders, FakeStrategy())
    failures["info"] = 0
    release(folders.values())


def test_a_file_url_is_that_folder(tmp_path):
    assert local_folder(f"file://{tmp_path}/run") == tmp_path / "run"


@pytest.mark.parametrize("flag", ["save_path", "ckpt_path", "resume"])
@pytest.mark.parametrize(
    ("url", "problem"), [("nowhere://x/run", "unknown scheme"), ("s3://bucket/run", "Install s3fs")]
)
def test_a_scheme_that_cannot_be_used_is_refused_at_once(flag, url, problem, capsys):
    with pytest.raises(SystemExit) as stop:
        parse_args(
            ["--pretrain", "m", "--prompt_data", "p", "--reward_fn", "r.py", f"--{flag}", url]
        )
    assert stop.value.code == 2
    assert f"--{flag} {url}: {problem}" in capsys.readouterr().err


def test_a_password_in_the_url_of_a_folder_is_refused_and_not_shown(capsys):
    words = [
        "--pretrain",
        "m",
        "--prompt_data",
        "p",
        "--reward_fn",
        "r.py",
        "--save_path",
        "ftp://me:hidden@host/run",
    ]
    with pytest.raises(SystemExit):
        parse_args(words)
    said = capsys.readouterr().err
    assert (
        "--save_path: a password in a URL would be written into logs: set FSSPEC_FTP_PASSWORD"
        in said
    )
    assert "hidden" not in said


@pytest.mark.usefixtures("world")
def test_a_url_that_cannot_be_written_is_refused_before_models_load(
    make_config, memory, monkeypatch
):
    monkeypatch.setattr(
        type(memory),
        "pipe_file",
        lambda *_, **__: (_ for _ in ()).throw(PermissionError("read only")),
    )
    monkeypatch.setattr(build, "build_models", lambda *_: pytest.fail("models were loaded"))
    config = make_config(save_path="memory://bucket/run", ckpt_path=None)
    with pytest.raises(
        ConfigError, match=r"--save_path memory://bucket/run: cannot be written .*read only"
    ):
        PPOTrainer.from_config(config)


def test_a_run_that_is_refused_leaves_no_folders(tmp_path, monkeypatch):
    at_the_end: list[Any] = []
    monkeypatch.setattr(
        "lightppo.logging.run_folder.atexit.register",
        lambda function, *given: at_the_end.append((function, given)),
    )
    (tmp_path / "there").mkdir()

    def ended(*written: str) -> list[str]:
        folders = {"--save_path": "new/run", "--ckpt_path": "new/run/ckpt", "--x": "there"}
        folders = {flag: str(tmp_path / path) for flag, path in folders.items()}
        claim(folders, FakeStrategy())
        for path in written:
            (tmp_path / path).write_text("")
        release(folders.values())
        while at_the_end:
            function, given = at_the_end.pop()
            function(*given)
        return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))

    assert ended() == ["there", "there/.lock"]
    assert ended("new/run/metrics.jsonl") == [
        "new", "new/run", "new/run/.lock", "new/run/metrics.jsonl", "there", "there/.lock"
    ]  # fmt: skip
