"""A run that is stopped and resumed, any number of times, is the run that was never stopped: bit for bit."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import fitted, logged, trained_rows, whole_weights
from support.tiny import write_jsonl

from lightppo import PPOTrainer, files
from lightppo.config import PPOConfig
from lightppo.errors import CheckpointError, ConfigError, StorageError
from lightppo.logging.run_folder import release
from lightppo.rollout.hf import HFRolloutEngine

pytestmark = pytest.mark.usefixtures("world")


def weights(trainer: PPOTrainer) -> dict[str, torch.Tensor]:
    models = {"actor": trainer.actor, "critic": trainer.critic, "ema": trainer.ema_model}
    models |= {"reference": trainer.initial_model}
    return {
        f"{name}.{key}": tensor.clone()
        for name, model in models.items()
        for key, tensor in trainer.strategy.unwrap_model(model).state_dict().items()
    }


@pytest.fixture
def everything(make_config, tmp_path):
    """``everything(folder, **options)``: GAE, adaptive KL, PTX, moving average, moving reference, running statistics,
    randomly selected tokens, a schedule, two epochs of each rollout; episodes of three steps."""

    def make(folder: str, **options) -> PPOConfig:
        return make_config(
            n_samples_per_prompt=2,
            train_batch_size=4,
            max_epochs=2,
            num_episodes=2,
            init_kl_coef=0.1,
            kl_target=0.001,
            kl_horizon=50,
            enable_ema=True,
            ema_beta=0.5,
            ref_ema_eta=0.2,
            reward_running_norm=True,
            value_norm="exp",
            value_norm_beta=0.9,
            policy_loss="clip_cov",
            clip_cov_ratio=0.2,
            clip_cov_low=-9.0,
            # 5 texts in batches of 2 are 3 batches: no step starts where another one did
            pretrain_data=write_jsonl(
                tmp_path / "text.jsonl", [{"input": f"{i}+{i}={2 * i}"} for i in range(5)]
            ),
            save_path=str(tmp_path / folder / "run"),
            ckpt_path=str(tmp_path / folder / "ckpt"),
            **{"save_steps": 1} | options,
        )

    return make


@pytest.mark.parametrize("zero_stage", [pytest.param(0, marks=pytest.mark.long), 2])
def test_a_resumed_run_is_the_uninterrupted_run(everything, capsys, caplog, zero_stage):
    straight = fitted(everything("straight", zero_stage=zero_stage, benchmark_steps=4))
    # stops inside an episode; at its end; in the next one
    for start, stop in ((0, 2), (2, 3), (3, 4)):
        capsys.readouterr()
        torch.rand(7)  # whatever the process did in between
        resumed = fitted(everything("resumed", zero_stage=zero_stage, benchmark_steps=stop))
        assert ("resumed from" in (out := capsys.readouterr().out)) == (start > 0)
        assert start == 0 or f"global_step{start}: {start} steps done" in out

    expected, rows = trained_rows(straight.config), trained_rows(resumed.config)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows == expected
    ours, theirs = weights(resumed), weights(straight)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert not torch.equal(ours["actor.lm_head.weight"], ours["ema.lm_head.weight"])
    assert not torch.equal(ours["actor.lm_head.weight"], ours["reference.lm_head.weight"])
    ours, theirs = (t.client_state() for t in (resumed, straight))
    for name in ("score_statistics", "value_statistics"):
        assert ours[name] is not None
        assert ours[name] == theirs[name]
    assert resumed.state == straight.state
    # of all four steps
    assert resumed.states["alarms"].state_dict() == straight.states["alarms"].state_dict()
    assert len(resumed.states["alarms"].series["rollout/reward"]) == 4
    assert resumed.state.episode == 1
    # 4 steps × 2 epochs × 2 optimizer steps × 2 micro batches
    assert resumed.loss_terms["pretraining"].taken == 32
    assert resumed.kl_ctl.value == straight.kl_ctl.value != 0.1
    assert [row["train/ptx_loss"] > 0 for row in rows] == [True] * 4
    assert len({row["train/kl_coef"] for row in rows}) == 4
    assert len({row["train/actor_lr"] for row in rows}) == 4
    assert "was recorded" not in caplog.text  # nothing is missed that is there


def test_a_part_of_another_checkpoint_is_refused_and_lost_records_are_told(
    everything, tmp_path, caplog
):
    """Actor, critic, moving average and reference, each of the step before: a resume trained on with it."""
    config = everything("run", benchmark_steps=2)
    run = fitted(config).checkpointer.run
    root = tmp_path / "run" / "ckpt"
    shutil.copytree(root, tmp_path / "kept")
    for part in ("actor", "critic", "ema", "reference"):
        shutil.rmtree(root / f"_{part}" / "global_step2")
        shutil.copytree(root / f"_{part}" / "global_step1", root / f"_{part}" / "global_step2")
        told = f"{root}/global_step2 has parts of different checkpoints: _{part} is the {part} of step 1 of run {run}; "
        with pytest.raises(CheckpointError, match=told):
            PPOTrainer.from_config(config)
        shutil.rmtree(root)
        shutil.copytree(tmp_path / "kept", root)
    resumed = PPOTrainer.from_config(config.with_options(benchmark_steps=3))
    assert resumed.state.global_step == 2
    assert resumed.checkpointer.run == run
    (tmp_path / "run" / "run" / "metrics.jsonl").unlink()
    (tmp_path / "run" / "run" / "rollouts" / "step1.jsonl.gz").unlink()
    resumed.fit()
    told = "of what was recorded until step 2, metrics.jsonl is missing; rollouts/step1.jsonl.gz is missing. The run goes"
    assert f"{tmp_path}/run/run: {told}" in caplog.text


def test_a_run_stopped_by_a_signal_saves_and_goes_on_as_if_nothing_had_happened(
    everything, tmp_path, capsys
):
    """Also one that keeps no checkpoints; an evaluation that was due when the signal came is made by the next start,
    and a signal during an evaluation waits for its end only."""
    order = tmp_path / "stop"  # the reward function takes it
    reward = tmp_path / "reward.py"
    reward.write_text(f"""
import os, pathlib, signal

def reward_func(queries, prompts, labels):
    if (order := pathlib.Path({str(order)!r})).exists():
        number, calls, size = map(int, order.read_text().split())  # after so many calls with one sample, or with more
        if (len(queries) > 1) == (size > 1):
            order.write_text(f"{{number}} {{calls - 1}} {{size}}")
            if calls == 0:
                order.unlink()
                os.kill(os.getpid(), number)
    return [float(query.count("1") + query.count("2")) for query in queries]
""")
    held_out = write_jsonl(tmp_path / "held_out.jsonl", [{"input": "1+1=", "label": "2"}])
    options = {
        "reward_fn": str(reward),
        "benchmark_steps": 3,
        "save_steps": -1,
        "eval_data": held_out,
        "eval_steps": 1,
    }
    straight = fitted(everything("straight", **options))
    # In the first step's scoring; in the evaluation of the second step, after that of the first one.
    for number, (step, code, at) in {
        signal.SIGTERM: (1, 143, "0 8"),
        signal.SIGUSR1: (2, 138, "1 1"),
    }.items():
        order.write_text(f"{int(number)} {at}")
        config = everything("stopped", **options)
        with pytest.raises(SystemExit) as caught:
            fitted(config)
        assert caught.value.code == code
        said = capsys.readouterr().out
        where = config.checkpoint.ckpt_path
        assert (
            f"stopped by {number.name} after step {step} of 3; saved in {where}: the same command goes on"
            in said
        )
        assert Path(where, "latest").read_text() == f"global_step{step}"
    resumed = fitted(everything("stopped", **options))
    assert "resumed from" in capsys.readouterr().out

    assert trained_rows(resumed.config) == trained_rows(straight.config)
    evaluated = [
        [
            {n: x for n, x in row.items() if n == "step" or "eval/" in n}
            for row in logged(run.config)
        ]
        for run in (resumed, straight)
    ]
    evaluated = [[row for row in rows if "eval/reward" in row] for rows in evaluated]
    assert evaluated[0] == evaluated[1]
    assert [row["step"] for row in evaluated[0]] == [0, 1, 2, 3]
    ours, theirs = weights(resumed), weights(straight)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    fitted(everything("stopped", **options))  # the checkpoint of the stop is not the last one
    assert "run complete: 3 steps" in capsys.readouterr().out


def test_a_finished_run_does_nothing_and_says_so(make_config, tmp_path, capsys, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    config = make_config(save_steps=2, use_mlflow=str(tmp_path / "mlruns"))
    first = fitted(config)
    before, rows = whole_weights(first), trained_rows(config)
    assert len(rows) == 3
    capsys.readouterr()

    again = fitted(config)
    out = capsys.readouterr().out
    assert "resumed from" in out
    assert "run complete: 3 steps; raise --num_episodes 1 to go on" in out
    assert again.state.global_step == 3
    assert trained_rows(config) == rows
    after = whole_weights(again)
    assert all(torch.equal(before[name], after[name]) for name in before)

    capsys.readouterr()
    more = fitted(config.with_options(num_episodes=2))
    out = capsys.readouterr().out
    assert "resume: --num_episodes was 1, is 2" in out
    assert "run complete" not in out
    assert more.state.global_step == 6
    assert [row["step"] for row in trained_rows(config)] == [1, 2, 3, 4, 5, 6]
    client, ids = (
        mlflow.MlflowClient(str(tmp_path / "mlruns")),
        more.states["trackers"].state_dict(),
    )
    points = client.get_metric_history(ids["mlflow"], "rollout/reward")
    assert ids == first.states["trackers"].state_dict()
    assert [point.step for point in points] == [1, 2, 3, 4, 5, 6]
    (experiment,) = client.search_experiments(filter_string="name = 'lightppo'")
    assert len(client.search_runs([experiment.experiment_id])) == 1

    fitted(config.with_options(num_episodes=2, total_training_steps=5))
    out = capsys.readouterr().out
    assert "run complete: 6 steps; raise --num_episodes 2, --total_training_steps 5 to go on" in out


def files_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Time and bytes of every file, and times of the folders; not of the lock, which names its holder."""
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mtime_ns,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in (folder, *folder.rglob("*"))
        if path.name != ".lock"
    }


def test_a_finished_command_run_again_changes_nothing(make_config, assets, tmp_path, capsys):
    options = {"eval_data": assets["prompt_data"], "eval_max_samples": 2, "eval_steps": 0, "save_hf_ckpt": True,
               "save_value_network": True, "use_tensorboard": str(tmp_path / "tb")}  # fmt: skip
    config = make_config(save_steps=2, ckpt_path=None, **options)
    fitted(config)
    before = files_of(tmp_path)
    assert {
        "run/model.safetensors",
        "run_critic/model.safetensors",
        "run/metrics.jsonl",
    } < before.keys()
    release([config.checkpoint.save_path, config.resolved().checkpoint.ckpt_path])
    capsys.readouterr()
    fitted(config)
    after = files_of(tmp_path)
    assert [
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    ] == []
    said = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("run complete")
    ]
    assert said == [
        "run complete: 3 steps; raise --num_episodes 1 to go on, or start anew with --resume never"
    ]

    # not complete: its model is made again, no evaluation is
    (tmp_path / "run" / "model.safetensors").unlink()
    fitted(config)
    after = files_of(tmp_path)
    changed = {name for name in before if before[name][1] != after[name][1]}
    # the start is recorded
    assert not changed - {"run/plot.png", "run/run_metadata.jsonl"}, changed


def test_one_altered_byte_sends_the_run_back_by_one_checkpoint(make_config, tmp_path, capsys):
    """All the way: the numbers are those of the run whose files were left alone."""
    straight = fitted(
        make_config(
            save_path=str(tmp_path / "straight"), ckpt_path=str(tmp_path / "other"), save_steps=1
        )
    )
    config = make_config(save_steps=1)
    fitted(config.with_options(benchmark_steps=2))
    (states,) = (tmp_path / "ckpt" / "_critic" / "global_step2").glob("*model_states.pt")
    content = bytearray(states.read_bytes())
    content[len(content) // 2] ^= 1
    states.write_bytes(content)
    capsys.readouterr()
    resumed = fitted(config)
    out = capsys.readouterr().out
    text = f"_critic: {states.name} has other content than was written; going on from global_step1"
    assert (
        f"{tmp_path}/ckpt: global_step2 is damaged, kept as global_step2.damaged: {text}\n" in out
    )
    assert f"resumed from {tmp_path}/ckpt/global_step1" in out
    assert trained_rows(config) == trained_rows(straight.config)
    ours, theirs = whole_weights(resumed), whole_weights(straight)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_exports_that_a_kill_took_are_made_by_the_next_start(make_config, tmp_path, capsys):
    config = make_config(save_steps=1, hf_save_steps=1, benchmark_steps=2)
    fitted(config)
    ckpt = tmp_path / "ckpt"
    export = {path.name: path.read_bytes() for path in (ckpt / "global_step2_hf").iterdir()}
    # killed in the middle of it
    (ckpt / "global_step2_hf").rename(ckpt / ".global_step2_hf.saving")
    (ckpt / ".global_step2_hf.saving" / "config.json").unlink()
    (ckpt / ".global_step7_hf.saving").mkdir()  # of a step that is not there
    (tmp_path / "run" / files.MANIFEST).unlink()  # and before the model
    capsys.readouterr()
    fitted(config)
    assert (
        f"{ckpt}/global_step2_hf was not written before the run ended: it is now"
        in capsys.readouterr().out
    )
    assert {path.name: path.read_bytes() for path in (ckpt / "global_step2_hf").iterdir()} == export
    assert list(ckpt.glob(".*saving")) == []
    assert files.manifest(tmp_path / "run")["facts"] == {"step": 2}


def test_a_folder_that_vanishes_during_a_run_is_made_again(make_config, tmp_path, caplog):
    config = make_config(save_steps=2, ckpt_path=None)
    trainer = PPOTrainer.from_config(config)
    ppo_train = trainer.ppo_train

    def train(step: int) -> dict[str, float]:
        if step == 2:
            shutil.rmtree(tmp_path / "run")
        return ppo_train(step)

    trainer.ppo_train = train
    trainer.fit()
    assert f"{tmp_path}/run was removed while the run goes on: it is made again" in caplog.text
    assert [row["step"] for row in trained_rows(config)] == [2, 3]
    assert files.damage(tmp_path / "run") == []
    assert files.damage(tmp_path / "run" / "checkpoints_ppo" / "_actor" / "global_step3") == []


def test_options_that_make_another_run_are_refused(make_config, tmp_path):
    config = make_config(save_steps=1, benchmark_steps=1)
    fitted(config)
    kept = (tmp_path / "run" / "run_config.yaml").read_text()
    changed = config.with_options(actor_learning_rate=0.5, gamma=0.9, benchmark_steps=2)
    with pytest.raises(ConfigError) as error:
        PPOTrainer.from_config(changed)
    assert f"cannot resume {tmp_path}/ckpt/global_step1 as another run: --gamma" in str(error.value)
    assert "--gamma 1.0 → 0.9, --actor_learning_rate 0.01 → 0.5" in str(error.value)
    assert "Set that back, or start anew: with another --save_path" in str(error.value)
    assert "benchmark_steps" not in str(error.value)
    # that of the run that is there
    assert (tmp_path / "run" / "run_config.yaml").read_text() == kept

    anew = PPOTrainer.from_config(
        changed.with_options(resume="never", ckpt_path=str(tmp_path / "other"))
    )
    assert anew.state.global_step == 0


@pytest.mark.parametrize("zero_stage", [0, pytest.param(2, marks=pytest.mark.long)])
def test_a_resumed_run_may_change_what_it_names(make_config, tmp_path, capsys, zero_stage):
    shared = {"lr_scheduler": "constant", "lr_warmup_ratio": 0.0, "zero_stage": zero_stage}
    config = make_config(save_steps=1, benchmark_steps=1, **shared)
    fitted(config)
    other_reward = tmp_path / "other.py"
    other_reward.write_text(Path(config.reward.reward_fn).read_text() + "# changed\n")
    changes = {"actor_learning_rate": 0.5, "adam_betas": (0.5, 0.6), "reward_fn": str(other_reward)}
    branch = config.with_options(
        resume=str(tmp_path / "ckpt"),
        resume_changes=list(changes),
        save_path=str(tmp_path / "branch"),
        ckpt_path=None,
        benchmark_steps=2,
        **changes,
    )
    trainer = fitted(branch)
    assert "resume: --actor_learning_rate was 0.01, is 0.5" in capsys.readouterr().out
    groups = trainer.actor.model.optimizer.param_groups
    assert {tuple(group["betas"]) for group in groups} == {(0.5, 0.6)}
    assert [row["train/actor_lr"] for row in trained_rows(branch)] == [0.5]
    with pytest.raises(ConfigError, match=r"as another run: --gamma 1\.0 → 0\.9"):
        PPOTrainer.from_config(branch.with_options(gamma=0.9, save_path=str(tmp_path / "third")))


@pytest.mark.parametrize(
    ("name", "problem"),
    [("actor_learnin_rate", "no option has this name"), ("lora_rank", "it makes the model")],
)
def test_what_a_resumed_run_cannot_change(make_config, name, problem):
    with pytest.raises(ConfigError, match=f"--resume_changes {name}: {problem}"):
        make_config(resume_changes=[name]).validate()


def test_resume_from_a_named_folder_into_another(make_config, tmp_path):
    config = make_config(save_steps=1, benchmark_steps=1)
    first = fitted(config)
    branch = config.with_options(resume=str(tmp_path / "ckpt"), ckpt_path=str(tmp_path / "branch"),
                                 save_path=str(tmp_path / "branch_run"))  # fmt: skip
    trainer = PPOTrainer.from_config(branch)
    assert trainer.state.global_step == 1
    ours, theirs = whole_weights(trainer), whole_weights(first)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    never = PPOTrainer.from_config(config.with_options(load_checkpoint=False))
    assert never.state.global_step == 0


def test_a_resumed_run_samples_with_the_resumed_weights(make_config, monkeypatch):
    """The first push to the engine is before the first rollout, and has the checkpoint's weights."""
    fitted(make_config(benchmark_steps=1, save_steps=1))
    events: list[str] = []
    build = PPOTrainer.from_config

    class Recording(HFRolloutEngine):
        def sync_weights(self, actor):
            events.append(f"push of norm {sum(p.norm() for p in actor.model.parameters()):.6f}")
            super().sync_weights(actor)

        def generate(self, *args, **options):
            events.append("rollout")
            return super().generate(*args, **options)

    monkeypatch.setattr("lightppo.rollout.hf.HFRolloutEngine", Recording)
    trainer = build(make_config(benchmark_steps=2, save_steps=1))
    norm = sum(p.norm() for p in trainer.actor.model.parameters())
    before = len(events)  # decoding was tried at the start, with tiny rows
    trainer.fit()
    assert events[before - 1 : before + 1] == [f"push of norm {norm:.6f}", "rollout"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder that is a disk of 8 MB."""
    (folder := tmp_path / "ckpt").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_one_line_and_costs_no_checkpoint(make_config, small_disk):
    config = make_config(save_steps=1, max_ckpt_num=1)
    trainer = PPOTrainer.from_config(config)
    ppo_train, filler = trainer.ppo_train, small_disk / "filler"

    def train(step: int) -> dict[str, float]:
        if step == 2:
            filler.write_bytes(b"x" * (shutil.disk_usage(small_disk).free - 50_000))
        return ppo_train(step)

    trainer.ppo_train = train
    text = r"_critic: the disk is full: 2\d\d\.\d kB are needed, \d\d\.\d kB are free: lower --max_ckpt_num"
    with pytest.raises(StorageError, match=text):
        trainer.fit()
    assert sorted(path.name for path in (small_disk / "_critic").iterdir() if path.is_dir()) == [
        "global_step1"
    ]
    # told by safetensors
    with pytest.raises(StorageError, match=r"/model: the disk is full: [\d.]+ kB are needed"):
        trainer.save_model(small_disk / "model")
    filler.unlink()
    release([config.checkpoint.save_path, config.checkpoint.ckpt_path])
    assert fitted(config).state.global_step == 3


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_takes_nothing_stops_the_run_with_a_checkpoint(
    make_config, tmp_path, monkeypatch, number
):
    config = make_config(save_steps=1, max_ckpt_num=1)
    trainer = PPOTrainer.from_config(config)
    fsync = os.fsync

    def refuse(handle: Any) -> None:
        if trainer.state.global_step == 2 and "_actor" in os.readlink(f"/proc/self/fd/{handle}"):
            raise OSError(number, os.strerror(number))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", refuse)
    told = (
        "the disk is full: .* lower --max_ckpt_num"
        if number == errno.ENOSPC
        else r"cannot be written \(Read-only"
    )
    with pytest.raises(StorageError, match=rf"{tmp_path}/ckpt/_actor: {told}.*--ckpt_path"):
        trainer.fit()
    monkeypatch.undo()
    assert PPOTrainer.from_config(config).state.global_step == 1
