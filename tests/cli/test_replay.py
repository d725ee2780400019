"""``lightppo replay``: any step of a run again, from its files, which stay as they are; the debugger; mistakes."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
import yaml
from support.http_server import JsonServer, ok
from support.ranks import run_ranks
from support.tiny import write_jsonl
from support.world import one_rank

from lightppo import PPOTrainer, storage
from lightppo.__main__ import main
from lightppo.errors import CheckpointError, ConfigError, TrainingError
from lightppo.experience.batching import Minibatch
from lightppo.logging.report_page import read_jsonl
from lightppo.logging.skipped_batches import load_batch, save_batch
from lightppo.rollout.hf import HFRolloutEngine


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    with one_rank():
        yield


@pytest.fixture
def replay(world, monkeypatch, capsys) -> Callable[..., tuple[int, str]]:
    """``replay(run, step, *flags)``: exit code and output, in this process."""
    # the process group stays
    monkeypatch.setattr("lightppo.trainer.run", lambda command, prog: command())

    def command(run: Path, step: int | None, *flags: Any) -> tuple[int, str]:
        capsys.readouterr()
        code = 0
        try:
            main(
                [
                    "replay",
                    str(run),
                    *(["--step", str(step)] if step is not None else []),
                    *map(str, flags),
                ]
            )
        except SystemExit as ended:
            code = ended.code
        return code, "".join(capsys.readouterr())

    return command


def files(folder: Path) -> dict[str, tuple[int, bytes]]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in found}


def edit_lines(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes each row of a JSONL file in place."""
    rows = read_jsonl(path)
    for row in rows:
        change(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_step_of_a_run_that_was_moved_and_is_in_use(replay, copied, tmp_path):
    run = copied("one")
    before = files(run)
    with (run / ".lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as the run does while it goes on
        code, out = replay(run, 3, "--output", tmp_path / "kept", "--samples", 1)
    assert code == 0
    assert f"resumed from {run}/checkpoints_ppo/global_step2: 2 steps done" in out
    assert f"replay: {run} is only read; from step 3 on, to 3" in out
    assert re.search(r"^step 3 is equal to what was recorded: \d\d numbers$", out, re.MULTILINE)
    assert files(run) == before

    samples = read_jsonl(run / "rollouts" / "step3.jsonl")
    assert read_jsonl(tmp_path / "kept" / "rollouts" / "step3.jsonl") == samples
    assert all(f"{s['index']}.{s['sample_index']}:{s['score']:.4g}" in out for s in samples)
    shown = out.split("step 3: 8 samples")[1]
    first = next(
        s for s in samples if f"prompt {s['index']}, sample 0: prompt: {s['input']}" in shown
    )
    assert f"answer: {first['output']}" in shown
    assert shown.count("  advantages ") == 1
    assert [line for line in out.splitlines() if line.startswith("optimizer step")] == [
        "optimizer step 1, pass 1, the mean of:",
        "optimizer step 2, pass 1, the mean of:",
    ]
    losses = [float(x) for x in re.findall(r"policy_loss ([-\d.e]+)", out)]
    (row,) = (
        row
        for row in read_jsonl(run / "metrics.jsonl")
        if row["step"] == 3 and "train/policy_loss" in row
    )
    assert len(losses) == 4
    assert sum(losses) / 4 == pytest.approx(row["train/policy_loss"], abs=1e-5)
    ratios = out.split("after step 3: probability of tokens, new / old")[1].splitlines()[1]
    assert len(set(ratios.partition(": ")[2].split())) > 1


def test_recorded_rollouts_are_used_and_what_is_missing_is_sampled(replay, copied, monkeypatch):
    run = copied("one")
    with monkeypatch.context() as patch:
        patch.setattr(HFRolloutEngine, "generate", lambda *_: pytest.fail("sampled"))
        code, out = replay(run, 1)
    assert (code, "step 1 is equal to what was recorded" in out) == (0, True)
    (run / "saved" / "step1_batch0_rank0of1.json").unlink()
    code, out = replay(run, 1)
    assert (code, "step 1 is equal to what was recorded" in out) == (0, True)
    assert not (run / "saved" / "step1_batch0_rank0of1.json").exists()


def test_the_first_number_and_sample_that_differ_are_named(replay, copied):
    run = copied("one")

    def change(row: dict[str, Any]) -> None:
        if row["step"] == 4 and "rollout/kl" in row:
            row |= {"rollout/kl": 9.0, "train/policy_loss": 9.0}

    edit_lines(run / "metrics.jsonl", change)
    edit_lines(run / "rollouts" / "step4.jsonl", lambda row: row.update(score=7.5))
    shutil.rmtree(run / "checkpoints_ppo" / "_actor" / "global_step4")
    code, out = replay(run, 4, "--samples", 0)
    assert code == 1
    assert re.search(
        r"^step 4 differs from what was recorded: first rollout/kl: was 9\.0, is -?0\.\d+$",
        out,
        re.M,
    )
    assert re.search(
        r"recorded samples: step 4, prompt \d+, sample 0, score: 7\.5 and \d\.0$", out, re.MULTILINE
    )
    with pytest.raises(ConfigError, match=r"--step 5: .*/one ends after step 4"):
        replay(run, 5)


def test_checkpoints_of_an_earlier_run_in_the_folder_are_not_taken(replay, copied):
    run = copied("one")
    for part in ("_actor", "_critic"):
        (mark,) = (run / "checkpoints_ppo" / part / "global_step2").glob("lightppo_checkpoint.json")
        os.utime(mark.parent.parent / "global_step4" / mark.name, (1, 1))  # saved long ago
    code, out = replay(run, 4, "--samples", 0)
    assert (code, "/global_step2: 2 steps done" in out) == (0, True)


def test_a_damaged_checkpoint_is_passed_over_and_said_and_nothing_is_renamed(replay, copied):
    run = copied("one")
    (states,) = (run / "checkpoints_ppo" / "_critic" / "global_step2").glob("*model_states.pt")
    data = bytearray(states.read_bytes())
    data[len(data) // 2] ^= 1
    states.write_bytes(data)
    before = files(run)
    code, out = replay(run, 3, "--samples", 0)
    assert (code, "step 3 is equal to what was recorded" in out) == (0, True)
    assert re.search(
        r"_ppo: global_step2 is damaged: _critic: .*model_states.pt.*; going on from the start", out
    )
    assert "from step 1 on, to 3" in out
    assert files(run) == before


def edit_options(run: Path, **changes: Any) -> None:
    for name in ("run_config.yaml", "run_config.resolved.yaml"):
        options = yaml.safe_load((run / name).read_text())
        (run / name).write_text(yaml.safe_dump(options | changes))


def test_checkpoints_of_another_stage_are_taken_where_the_run_took_them(replay, copied):
    run = copied("one")
    edit_options(run, zero_stage=1, critic_zero_stage=1, reshape_ckpt=True)
    _, out = replay(run, 3, "--samples", 0)
    assert f"resumed from {run}/checkpoints_ppo/global_step2: 2 steps done" in out
    assert re.search(r"^step 3 ", out, re.MULTILINE)


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_checkpoints_at_a_url(replay, copied, monkeypatch, tmp_path, scheme):
    """They are brought to a folder of the replay's own: the run's, in the cache, may be in use."""
    monkeypatch.setenv("LIGHTPPO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(storage, "_apart", None)
    run, url = (
        copied("one"),
        "memory://bucket/ckpt" if scheme == "memory" else f"file://{tmp_path}/moved",
    )
    fsspec.filesystem(scheme).put(f"{run}/checkpoints_ppo/", url, recursive=True)
    shutil.rmtree(run / "checkpoints_ppo")
    edit_options(run, ckpt_path=url)
    code, out = replay(run, 3, "--samples", 0)
    assert (code, "step 3 is equal to what was recorded" in out) == (0, True)
    assert re.search(r"resumed from \S+/global_step2: 2 steps done", out)
    assert not (tmp_path / "cache" / "folders").exists()
    if scheme == "memory":
        fsspec.filesystem("memory").rm("/bucket", recursive=True)
        code, out = replay(run, 1, "--samples", 0)  # a run that has none
        assert (code, "from step 1 on, to 1" in out) == (0, True)


def test_a_reward_server_whose_address_is_not_kept_whole(replay, copied):
    run, server = copied("one"), JsonServer()
    server.reply = lambda path, body, n: ok(rewards=[1.0] * len(body["query"]))
    edit_options(run, reward_fn=None, remote_rm_url=[f"{server.url}/score?…"])
    code, out = replay(run, 1)
    assert (
        code,
        f"--remote_rm_url {server.url}/score?…: a run keeps no login and nothing after ?" in out,
    ) == (2, True)
    code, out = replay(run, 1, "--remote_rm_url", "http://localhost:1/other?key=1")
    assert (code, f"--remote_rm_url: the run had {server.url}/score?…" in out) == (2, True)
    edit_lines(run / "run_metadata.jsonl", lambda row: row["content"].pop("reward_fn", None))
    code, out = replay(run, 1, "--remote_rm_url", f"{server.url}/score?key=4711")
    assert "1.0" in out
    assert "4711" not in out
    assert {path for path, _ in server.requests} == {"/score?key=4711"}
    server.close()


class TestDebugger:
    def test_it_stops_before_the_step_trains(self, replay, recorded, monkeypatch):
        words = "p trainer.state.global_step, len(rollouts), experience[0].advantages.shape\nc\n"
        monkeypatch.setattr("sys.stdin", io.StringIO(words))
        code, out = replay(recorded / "one", 3, "--pdb")
        assert "(2, 8, torch.Size([1, " in out
        assert out.index("(2, 8,") < out.index("optimizer step 1")
        assert (code, "step 3 is equal to what was recorded" in out) == (0, True)

    def test_quit_ends_the_replay(self, replay, recorded, monkeypatch):
        monkeypatch.setattr("sys.stdin", io.StringIO("q\n"))
        code, out = replay(recorded / "one", 1, "--pdb")
        assert (code, "optimizer step" in out) == (0, False)

    def test_it_stops_where_the_step_fails(self, replay, recorded, monkeypatch):
        def fails(self: Any, *_: Any) -> None:
            broken = "here"
            raise ZeroDivisionError(broken)

        monkeypatch.setattr(PPOTrainer, "training_step_critic", fails)
        monkeypatch.setattr("sys.stdin", io.StringIO("c\np broken * 2\nq\n"))
        with pytest.raises(ZeroDivisionError):
            replay(recorded / "one", 1, "--pdb")


def test_a_saved_batch_alone(replay, recorded, monkeypatch, tmp_path):
    """Its numbers are those that it had within the step."""
    original = PPOTrainer.train_minibatch

    def saving(self: Any, minibatch: Any, step: int) -> Any:
        path = tmp_path / "step3_rank0.pt"
        if step == 3 and not path.exists():
            minibatch.micro_batches[1].returns[0, 0] = float("nan")
            save_batch(path, minibatch, [("1+1=", "2")] * 4, step=step, rank=0)
        return original(self, minibatch, step)

    monkeypatch.setattr(PPOTrainer, "train_minibatch", saving)
    _, whole = replay(recorded / "one", 3)
    monkeypatch.setattr(PPOTrainer, "train_minibatch", original)
    code, out = replay(recorded / "one", 3, "--batch", tmp_path / "step3_rank0.pt")
    assert code == 0
    assert f"{tmp_path}/step3_rank0.pt, of step 3 and rank 0: 4 samples" in out
    assert "micro batch 1: not finite: none" in out
    assert "micro batch 2: not finite: {'returns': 1}" in out
    first, alone = (
        text.split("the mean of:")[1].split("optimizer step")[0].strip() for text in (whole, out)
    )
    assert alone == first
    assert "critic_loss nan" in alone
    assert "equal to what was recorded" not in out

    batch, texts, facts = load_batch(tmp_path / "step3_rank0.pt")
    # left out before training
    early = replace(batch.micro_batches[0], advantages=None, returns=None, part=None)
    early.values[0, 0] = float("nan")
    save_batch(tmp_path / "early_rank0.pt", Minibatch([early]), texts[: len(early)], **facts)
    code, out = replay(recorded / "one", 3, "--batch", tmp_path / "early_rank0.pt")
    assert (code, "micro batch 1: not finite: {'values': 1}" in out) == (0, True)
    assert "run again: not finite: none" in out
    with pytest.raises(ConfigError, match=r"--batch .*/none\.pt: no such file"):
        replay(recorded / "one", 3, "--batch", tmp_path / "none.pt")


def test_two_ranks_under_zero_3_one_at_the_debugger(recorded, tmp_path):
    script = tmp_path / "at_the_debugger.py"
    typed = "import io, os, sys\n\nif os.environ['RANK'] == '0':\n    sys.stdin = io.StringIO('p len(rollouts)\\nc\\n')\n"
    script.write_text(typed + "from lightppo.__main__ import main\n\nmain()\n")
    done = run_ranks(script, "replay", recorded / "two", "--step", "4", "--pdb", "--samples", "1")
    lines = done.output.splitlines()
    assert "(Pdb) 4" in lines
    for rank in (0, 1):
        assert f"-- rank {rank}, optimizer step 2, pass 1, the mean of:" in lines
        assert any(line.startswith(f"-- rank {rank}, step 4: 4 samples") for line in lines)
        assert f"-- rank {rank}, after step 4: probability of tokens, new / old" in lines
    assert any(line.startswith("step 4 is equal to what was recorded: ") for line in lines)


class TestMistakes:
    @pytest.mark.parametrize(
        ("step", "flags", "message"),
        [
            (0, (), r"--step 0: .*/one has recorded 4 steps; the next one, 5, can be tried too"),
            (9, (), r"--step 9: .*/one has recorded 4 steps"),
            (3, ("--output", "{run}"), r"--output .*/one: holds files: name a new folder"),
        ],
    )
    def test_no_such_step_or_folder(self, replay, recorded, step, flags, message):
        code, out = replay(
            recorded / "one", step, *(flag.format(run=recorded / "one") for flag in flags)
        )
        assert (code, bool(re.search(f"lightppo replay: error: {message}", out))) == (2, True)

    def test_no_run(self, replay, tmp_path):
        code, out = replay(tmp_path, 1)
        assert (
            code,
            f"{tmp_path} has no run_config.yaml: name the --save_path of a run" in out,
        ) == (2, True)

    @pytest.mark.parametrize(
        ("start", "message"),
        [
            (
                {"step": 2},
                "went on from step 2 of another run, and has no checkpoint before this step",
            ),
            ({"ranks": 2}, "had 2 ranks, and this is 1: torchrun --nproc_per_node 2 …"),
            ({"content": {"reward_fn": "other"}}, "--reward_fn: other content than"),
        ],
    )
    def test_another_start(self, replay, copied, start, message):
        run = copied("one")
        edit_lines(run / "run_metadata.jsonl", lambda row: row.update(start))
        with pytest.raises((ConfigError, CheckpointError), match=message):
            replay(run, 1)

    def test_a_run_of_another_version(self, replay, copied):
        run = copied("one")
        edit_lines(
            run / "run_metadata.jsonl",
            lambda row: row["versions"].update(lightppo="9.0 (0)", torch="1.0"),
        )
        options = yaml.safe_load((run / "run_config.yaml").read_text())
        (run / "run_config.yaml").write_text(yaml.safe_dump(options | {"option_of_9": 1}))
        code, out = replay(run, 1)
        assert code == 2
        assert f"note: {run} was made with lightppo 9.0 (0), this is 0.1.0 (" in out
        assert f"note: {run} was made with torch 1.0, this is " in out
        assert f"--config {run}/run_config.yaml: unknown option 'option_of_9'" in out


PAIRS = [
    {"input": f"{i}+{i}=", "chosen": "abc"[: 1 + i % 3], "rejected": "xyzabc"[: 1 + i % 5]}
    for i in range(8)
]


@pytest.fixture
def taught(world, tiny_model, tmp_path) -> Callable[..., Path]:
    """``taught("rm", **options)``: the folder of a finished run of four steps, on pairs."""
    from lightppo.config.supervised_options import COMMANDS
    from lightppo.supervised.trainer import SupervisedTrainer

    def run(command: str, **options: Any) -> Path:
        folder = tmp_path / command
        flat = {
            "pretrain": tiny_model,
            "dataset": write_jsonl(tmp_path / "pairs.jsonl", PAIRS),
            "save_path": folder,
        }
        flat |= {
            "max_len": 24,
            "train_batch_size": 4,
            "micro_train_batch_size": 2,
            "num_epochs": 2,
            "zero_stage": 0,
        }
        flat |= {
            "learning_rate": 1e-3,
            "save_steps": 2,
            "lora_rank": 4,
            "lora_dropout": 0.1,
        } | options
        SupervisedTrainer.from_config(COMMANDS[command].from_flat(flat)).fit()
        return Path(shutil.copytree(folder, tmp_path / "moved" / command))

    return run


@pytest.mark.parametrize(
    "command", ["dpo", *(pytest.param(name, marks=pytest.mark.long) for name in ("sft", "rm"))]
)
def test_a_step_of_training_on_data(replay, taught, command):
    run = taught(command)
    before = files(run)
    code, out = replay(run, 4, "--samples", 1)
    assert f"replay: {run} is only read; from step 3 on, to 4" in out
    assert re.search(r"^step 4 is equal to what was recorded: \d+ numbers$", out, re.MULTILINE)
    assert code == 0
    assert files(run) == before
    (row,) = (
        row for row in read_jsonl(run / "metrics.jsonl") if row["step"] == 4 and "train/loss" in row
    )
    assert f"all together: train/loss {row['train/loss']:.6g}, " in out
    assert f"train/grad_norm {row['train/grad_norm']:.6g}, " in out
    assert re.search(r"^  micro batch 2: \d rows, loss [\d.]+", out, re.MULTILINE)
    assert "+" in out.split("micro batch 2")[1].splitlines()[1]


def test_a_saved_batch_of_training_on_data(replay, taught, monkeypatch, tmp_path):
    """What the run has left, by the command that its error names, with the weights of then."""
    from lightppo.distributed.deepspeed import DeepspeedStrategy
    from lightppo.supervised.trainer import SupervisedTrainer

    steps, original = [], SupervisedTrainer.training_step

    def told(self: Any, batches: Any) -> Any:
        steps.append(original(self, batches))
        return steps[-1]

    monkeypatch.setattr(SupervisedTrainer, "training_step", told)
    backward = DeepspeedStrategy.backward

    def broken(self: Any, loss: Any, *rest: Any) -> None:
        backward(self, loss * float("nan") if len(steps) == 2 else loss, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(DeepspeedStrategy, "backward", broken)
        with pytest.raises(TrainingError) as error:
            taught("rm", max_skipped_steps=1, lora_dropout=0.0)
    run, batch = re.search(r"lightppo replay (\S+) --batch (\S+)", str(error.value)).groups()
    code, out = replay(Path(run), None, "--batch", batch)
    assert code == 0
    assert f"{batch}, of step 3 and rank 0" in out
    assert "from step 3 on, to 3" in out
    assert f"all together: train/loss {steps[-1]['train/loss']:.6g}" in out
    assert re.search(r"train/grad_norm [\d.]+, ", out)  # finite without the patch
    assert "recorded" not in out


@pytest.mark.long
def test_a_step_of_training_on_data_by_two_ranks(tiny_model, tmp_path):
    (tmp_path / "command.py").write_text("from lightppo.__main__ import main\n\nmain()\n")
    flags = {
        "pretrain": tiny_model,
        "dataset": write_jsonl(tmp_path / "pairs.jsonl", PAIRS),
        "zero_stage": 3,
    }
    flags |= {
        "max_len": 24,
        "train_batch_size": 4,
        "micro_train_batch_size": 1,
        "save_path": tmp_path / "run",
    }
    run_ranks(
        tmp_path / "command.py", "dpo", *(f"--{k}={v}" for k, v in flags.items()), "--save_steps=1"
    )
    out = run_ranks(
        tmp_path / "command.py", "replay", tmp_path / "run", "--step=2", "--samples=1"
    ).output
    assert re.search(r"^step 2 is equal to what was recorded: \d+ numbers$", out, re.MULTILINE)
    assert out.count("step 2: 2 micro batches, this rank's means without dropout:\n") == 2
    assert "-- rank 1, step 2" in out
