"""Whole runs whose replies are on the tape: played without what gave them, gone on with after a crash, altered."""

from __future__ import annotations

import io
import json
import random
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from support.http_server import JsonServer, ok
from support.runs import fitted, logged, whole_weights
from support.tiny import sums, write_jsonl

from lightppo import Callback, PPOTrainer
from lightppo.__main__ import main
from lightppo.config import PPOConfig
from lightppo.episodes.tape_files import TapeError, read_tape_file
from lightppo.errors import ConfigError, RewardError, RolloutError

LATE = Path(__file__).with_name("late.py")
GROUPED = {"advantage_estimator": "grpo", "n_samples_per_prompt": 2, "init_kl_coef": 0}
JUDGE = """
import random
dice = random.SystemRandom()

def reward_func(queries, prompts, labels):
    return {"rewards": [dice.random() for _ in queries], "extra_logs": {"mood": [dice.random() for _ in queries]}}
"""


@pytest.fixture
def calls(tmp_path, monkeypatch) -> Callable[[], list[str]]:
    """What was asked of the environment since the last time."""
    path, known = tmp_path / "calls.txt", []
    monkeypatch.setenv("LIGHTPPO_TEST_CALLS", str(path))

    def since() -> list[str]:
        lines = path.read_text().splitlines() if path.exists() else []
        new = lines[len(known) :]
        known.extend(new)
        return new

    return since


@pytest.fixture
def late(make_config, tmp_path, world) -> Callable[..., PPOConfig]:
    """``late(**options)``: a small run with the environment of late.py, in a file that can be removed."""
    rows = [row | {"turns": str(1 + i % 3)} for i, row in enumerate(sums(12))]
    prompts = write_jsonl(tmp_path / "episodes.jsonl", rows)
    (tmp_path / "world").mkdir()
    shutil.copy(LATE, tmp_path / "world" / "late.py")

    def make(name: str = "run", **options) -> PPOConfig:
        episodes = GROUPED | {
            "reward_fn": None,
            "reward_source": ["environment"],
            "prompt_data": prompts,
            "env": [f"{tmp_path}/world/late.py:Late"],
            "max_turn_tokens": 4,
            "generate_max_len": 30,
            "label_key": "label",
            "save_path": str(tmp_path / name),
            "ckpt_path": str(tmp_path / f"{name}_ckpt"),
        }
        return make_config(**episodes | options)

    return make


def same(first: PPOTrainer, second: PPOTrainer) -> None:
    """Every number that was logged, and every weight."""
    rows, others = (
        [
            {k: v for k, v in row.items() if k != "time" and not k.startswith("perf/")}
            for row in logged(one.config)
        ]
        for one in (first, second)
    )
    assert rows == others
    expected, found = whole_weights(first), whole_weights(second)
    assert all(bool((found[name] == weight).all()) for name, weight in expected.items())


def tape_files(config: PPOConfig) -> list[Path]:
    return sorted(Path(config.checkpoint.save_path, "tape").iterdir())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"advantage_estimator": "remax", "eval_steps": 1, "eval_data": "{prompts}"},
        {"dynamic_sampling": True, "max_num_gen_batches": 2, "on_exhausted": "train_short"},
        {"env_retries": 0, "env_workers": 1, "benchmark_steps": 1},
    ],
    ids=["plain", "greedy baselines and evaluations", "several batches", "a process"],
)
def test_a_run_without_its_environment(late, tmp_path, options):
    prompts = late().data.prompt_data
    options = {k: v.format(prompts=prompts) if k == "eval_data" else v for k, v in options.items()}
    recorded = fitted(late(**options))
    shutil.rmtree(tmp_path / "world")
    same(recorded, fitted(late("again", tape_from=str(tmp_path / "run"), **options)))
    assert not (tmp_path / "again" / "tape").exists()


def test_without_the_tape_there_is_no_such_run(late, tmp_path):
    fitted(late(tape="off"))
    assert not (tmp_path / "run" / "tape").exists()
    with pytest.raises(ConfigError, match=r"there is no .*run/tape: name the --save_path of a run"):
        fitted(late("again", tape_from=str(tmp_path / "run")))


class Crash(Callback):
    """Ends the run in a step, when its samples are there."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_experience(self, run, step, experience):
        if step == self.step:
            raise ZeroDivisionError("crash")


def crashed(config: PPOConfig, step: int) -> None:
    trainer = PPOTrainer.from_config(config, callbacks=[Crash(step)])
    with pytest.raises(ZeroDivisionError):
        trainer.fit()
    trainer.close()


def test_a_resume_asks_nothing_that_is_on_the_tape(late, calls, tmp_path, monkeypatch):
    config = late(save_steps=1)
    crashed(config, 2)
    assert calls().count("reset") >= 16
    before = [path.read_bytes() for path in tape_files(config)]
    monkeypatch.setenv("LIGHTPPO_TEST_START", "1")  # it would answer otherwise by now
    crashed(config, 3)
    assert 8 <= calls().count("reset") < 16  # step 3 alone, and failed tries
    assert [path.read_bytes() for path in tape_files(config)[:2]] == before
    recorded = fitted(config)
    assert calls() == []
    shutil.rmtree(tmp_path / "world")
    same(recorded, fitted(late("again", tape_from=str(tmp_path / "run"))))


def test_a_resume_plays_again_what_broke_off(late, calls, tmp_path, monkeypatch, caplog):
    config = late(save_steps=1, env_retries=3)
    crashed(config, 2)
    calls()
    path = Path(config.checkpoint.save_path, "tape", "step2_rank0of1.jsonl")
    entries = read_tape_file(path).entries
    last = max(i for i, entry in enumerate(entries) if entry["kind"] == "end")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:last]) + lines[last][:20])
    monkeypatch.setenv("LIGHTPPO_TEST_START", "1")
    crashed(config, 3)
    assert "the last 20 bytes are left out" in caplog.text
    takes = [entry for entry in read_tape_file(path).entries if entry.get("take") == 2]
    assert {entry["prompt"] for entry in takes} == {entries[last]["prompt"]}
    recorded = fitted(config)
    shutil.rmtree(tmp_path / "world")
    same(recorded, fitted(late("again", tape_from=str(tmp_path / "run"), env_retries=0)))


class Then(Callback):
    """Does something when step 1 is done, and saved."""

    def __init__(self, action: Callable[[], object]) -> None:
        self.action = action

    def on_save(self, run, step):
        if step == 1:
            self.action()


def failing_from_step_2(config: PPOConfig, fail: Callable[[], object]) -> PPOTrainer:
    return PPOTrainer.from_config(config, callbacks=[Then(fail)])


def test_a_run_that_failing_environments_ended_goes_on(late, calls, tmp_path, monkeypatch):
    """The tape has their failures, and they are asked again all the same."""
    config = late(save_steps=1, env_retries=0)
    fail = partial(monkeypatch.setenv, "LIGHTPPO_TEST_FAILURES", "1")
    monkeypatch.setenv("LIGHTPPO_TEST_FAILURES", "0")
    for asked in (16, 8):  # it ends in the same way as long as they fail
        with pytest.raises(RolloutError, match=r"8 of 8 episodes failed \(--env_failure_limit 0.5"):
            failing_from_step_2(config, fail).fit()
        assert calls().count("reset") == asked
    monkeypatch.setenv("LIGHTPPO_TEST_FAILURES", "0")
    recorded = fitted(config)
    assert calls().count("reset") == 16
    shutil.rmtree(tmp_path / "world")
    same(recorded, fitted(late("again", tape_from=str(tmp_path / "run"), env_retries=0)))


@pytest.mark.parametrize(
    ("pattern", "kind"),
    [
        (rb'"observation":" (\d)', "call"),
        (rb'"reply":\{"observation":[^}]*"reward":0\.(\d)', "call"),
        (rb'"reply":0\.(\d)', "call"),
        (rb'"tokens":\[(\d)', "turn"),
        (rb'"seconds":\d+\.(\d)', "call"),
    ],
    ids=["reply", "reward of a turn", "reward", "token", "seconds"],
)
def test_what_was_altered_is_named(late, tmp_path, pattern, kind):
    config = late(save_steps=1, benchmark_steps=2)
    fitted(config)
    path = tape_files(config)[1]
    lines = path.read_bytes().splitlines(keepends=True)
    number = next(i for i, line in enumerate(lines) if re.search(pattern, line))
    at = re.search(pattern, lines[number]).start(1)
    digit = b"1" if lines[number][at : at + 1] != b"1" else b"2"
    entry = json.loads(lines[number])
    lines[number] = lines[number][:at] + digit + lines[number][at + 1 :]
    path.write_bytes(b"".join(lines))
    place = f"prompt {entry['prompt']}, sample {entry['sample']}, try {entry['try']}"
    text = f"{path}:{number + 1} was altered, or a line before it is missing: {kind} of phase train, step 2, {place}"
    with pytest.raises(TapeError, match=re.escape(f"{text}, turn {entry['turn']}")):
        fitted(late("again", tape_from=str(tmp_path / "run"), benchmark_steps=2))
    with pytest.raises(TapeError, match=re.escape(text)):
        fitted(late(save_steps=1, benchmark_steps=3))  # goes on


def test_a_resume_reads_the_files_of_all_steps(late):
    fitted(late(save_steps=1, benchmark_steps=2))
    path = tape_files(late())[0]
    assert path.name == "step1_rank0of1.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"reward":', b'"reword":', 1))
    with pytest.raises(TapeError, match=r"step1_rank0of1.jsonl:\d+ was altered"):
        fitted(late(save_steps=1, benchmark_steps=3))


def test_a_tape_that_was_made_anew_does_not_fit_the_checkpoints(late, tmp_path):
    fitted(late(save_steps=1, benchmark_steps=2))
    other = late("other", save_steps=1, benchmark_steps=2, seed=7)
    fitted(other)
    shutil.rmtree(tmp_path / "run" / "tape")
    shutil.copytree(tmp_path / "other" / "tape", tmp_path / "run" / "tape")
    with pytest.raises(TapeError, match=r"the checkpoint knows (it|\d+): restore the file"):
        fitted(late(save_steps=1, benchmark_steps=3))


def test_an_evaluation_leaves_the_tape_of_the_run_alone(late):
    prompts = late().data.prompt_data
    config = late(save_steps=1, benchmark_steps=1)
    fitted(config)
    before = [(path.name, path.read_bytes()) for path in tape_files(config)]
    fitted(late(val_only=True, eval_data=prompts, resume=config.checkpoint.ckpt_path))
    assert [(path.name, path.read_bytes()) for path in tape_files(config)] == before


# -- rewards ---------------------------------------------------------------------------------------------------------


def test_a_judge_that_is_gone(make_config, tmp_path, world):
    judge = tmp_path / "judge.py"
    judge.write_text(JUDGE)
    options = GROUPED | {"reward_fn": str(judge)}
    recorded = fitted(make_config(**options, tape="all"))
    judge.unlink()
    again = {"save_path": str(tmp_path / "again"), "ckpt_path": str(tmp_path / "again_ckpt")}
    same(recorded, fitted(make_config(**options | again, tape_from=str(tmp_path / "run"))))
    with pytest.raises(
        TapeError, match=r"prompt \d+, sample 0: the tape judges another response .* token \d+ was"
    ):
        fitted(make_config(**options | again, tape_from=str(tmp_path / "run"), temperature=9.0))


def test_functions_are_not_on_the_tape_unless_asked_for(make_config, tmp_path, world):
    fitted(make_config(**GROUPED, benchmark_steps=1))
    assert not (tmp_path / "run" / "tape").exists()


@pytest.fixture
def server():
    server = JsonServer()
    dice = random.Random(3)
    server.reply = lambda path, body, n: ok(rewards=[dice.random() for _ in body["query"]])
    yield server
    server.close()


def test_a_server_that_is_gone_and_its_secrets(make_config, server, tmp_path, world, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "hush-4711")
    url = f"{server.url}/score?key=secret-0815"
    options = GROUPED | {"reward_fn": None, "remote_rm_url": [url], "save_steps": 1}
    options |= {"remote_rm_token_env": "MY_TOKEN", "remote_rm_retries": 0}
    crashed(make_config(**options), 2)
    asked = len(server.requests)
    recorded = fitted(make_config(**options))
    assert len(server.requests) == asked + 1  # for step 3 alone
    written = b"".join(path.read_bytes() for path in tape_files(make_config()))
    assert b"hush" not in written
    assert b"secret" not in written
    server.close()
    monkeypatch.delenv("MY_TOKEN")
    options["remote_rm_url"] = ["http://gone.example/score?…"]  # as run_config.yaml has it
    options |= {"save_path": str(tmp_path / "again"), "ckpt_path": str(tmp_path / "again_ckpt")}
    same(recorded, fitted(make_config(**options, tape_from=str(tmp_path / "run"))))


def test_a_run_in_which_nothing_was_scored_goes_on(make_config, server, tmp_path, world):
    options = GROUPED | {"reward_fn": None, "remote_rm_url": [server.url], "save_steps": 1}
    options |= {"on_reward_failure": "unscored", "remote_rm_retries": 0}
    config, reply = make_config(**options), server.reply
    fail = partial(setattr, server, "reply", lambda path, body, n: (503, b"{}"))
    for _ in range(2):
        with pytest.raises(RewardError, match="step 2: none of the samples was scored"):
            failing_from_step_2(config, fail).fit()
    server.reply = reply
    recorded = fitted(config)
    server.close()
    options |= {"save_path": str(tmp_path / "again"), "ckpt_path": str(tmp_path / "again_ckpt")}
    same(recorded, fitted(make_config(**options, tape_from=str(tmp_path / "run"))))


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch, capsys) -> Callable[..., tuple[int, str]]:
    monkeypatch.setattr("lightppo.trainer.run", lambda command, prog, **_: command())

    def command(*words: object) -> tuple[int, str]:
        capsys.readouterr()
        code = 0
        try:
            main([str(word) for word in words])
        except SystemExit as ended:
            code = ended.code
        return code, "".join(capsys.readouterr())

    return command


def test_a_step_again_with_a_debugger_and_no_environment(late, command, tmp_path, monkeypatch):
    fitted(late(save_steps=1))
    shutil.rmtree(tmp_path / "world")
    monkeypatch.setattr("sys.stdin", io.StringIO("p rollouts[0].turns\nc\n"))
    code, out = command("replay", tmp_path / "run", "--step", 2, "--pdb")
    assert code == 0, out
    assert "'reward'" in out
    assert re.search(r"^step 2 is equal to what was recorded: \d\d numbers$", out, re.MULTILINE)
    assert "all weights are as in global_step2" in out
    assert re.search(r"the tape in .*run/tape gave \d\d answers", out)
    code, out = command("replay", tmp_path / "run", "--step", 2, "--ask_again")
    assert code == 2
    assert f"--env: no file {tmp_path}/world/late.py" in out


def test_other_weights_than_were_saved(late, command, tmp_path, monkeypatch):
    fitted(late(save_steps=1))
    original = PPOTrainer.finish_step

    def disturbed(self, step, status):
        if step == 2:
            next(iter(self.actor.parameters())).data[0, 0] += 1
        return original(self, step, status)

    monkeypatch.setattr(PPOTrainer, "finish_step", disturbed)
    code, out = command("replay", tmp_path / "run", "--step", 2)
    assert code == 1
    assert re.search(
        r"differs from what was saved: 1 of \d+ weights are not as in global_step2", out
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--tape_from={there}"], "--tape_from needs --env or --tools or"),
        (["--tape=all", "--tape_from={there}", "--env=x.py:X"], "leave --tape all out"),
        (["--dry_run", "--tape_from={there}", "--env=x.py:X"], "--dry_run samples other prompts"),
        (["--tape=off", "--reward_source=math"], "--tape needs --env or --tools or"),
        (
            ["--tape_from={there}/no", "--env=x.py:X"],
            "there is no {there}/no/tape: name the --save_path",
        ),
        (
            ["--tape_from={there}", "--save_path={there}", "--env=x.py:X"],
            "--save_path {there} is also --tape_from",
        ),
        (["--tape_from={there}", "--env=x.py:X"], "2 ranks wrote its tape, and this run has 1"),
    ],
)
def test_mistakes_end_the_command(command, assets, tmp_path, words, text):
    (tmp_path / "tape").mkdir()
    ranks = 1 if any("save_path" in word for word in words) else 2
    (tmp_path / "tape" / f"step1_rank0of{ranks}.jsonl").touch()
    given = [f"--{name}={assets[name]}" for name in ("pretrain", "prompt_data")]
    source = (
        [] if any("reward_source" in word for word in words) else ["--reward_source=environment"]
    )
    source = ["--reward_source=math"] if words == ["--tape_from={there}"] else source
    words = [word.format(there=tmp_path) for word in words]
    code, out = command("ppo", *given, *source, *words)
    assert code == 2
    assert text.format(there=tmp_path) in out
