"""A run on two ranks that is killed at random, with an environment that is late and fails; then without it."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from faults.small_run import STEPS, flags, outcome, write_inputs
from support.http_server import JsonServer, ok
from support.killer import Killer
from support.ranks import WITH_SUPPORT, RanksResult, run_ranks
from support.tiny import sums, write_jsonl

from lightppo.episodes.tape_files import TapeError, read_tape_file

SCRIPT = Path(__file__).parents[1] / "faults" / "faulty.py"
LATE = Path(__file__).with_name("late.py")
EPISODES = {
    "reward_fn": None,
    "reward_source": "environment",
    "label_key": "label",
    "advantage_estimator": "grpo",
    "n_samples_per_prompt": 2,
    "train_batch_size": 8,
    "critic_learning_rate": None,
    "init_kl_coef": 0,
    "max_turn_tokens": 4,
    "generate_max_len": 30,
    # by chance most episodes of a batch fail: worker processes share their luck
    "env_failure_limit": 1.0,
}
RUNS: dict[str, dict[str, Any]] = {
    "threads": {},
    "processes, every other step saved": {"env_workers": 2, "save_steps": 2, "env_retries": 0},
    "a reward server too, at ZeRO 3": {
        "zero_stage": 3,
        "reward_source": ("environment", "server=0.5"),
        "async_rewards": True,
        "on_reward_failure": "unscored",
        "remote_rm_retries": 0,
    },
}
LONG_KILLS = int(os.environ.get("KILLS", 100))


class Killed:
    """A run in a folder, which is started until it is complete."""

    def __init__(self, folder: Path, server: JsonServer, **options: Any) -> None:
        folder.mkdir()
        self.folder, self.world = folder, folder / "late.py"
        shutil.copy(LATE, self.world)
        self.pids = folder / "pids"
        self.pids.mkdir()
        rows = [row | {"turns": str(1 + i % 3)} for i, row in enumerate(sums(4 * STEPS))]
        inputs = write_inputs(folder) | {"prompt_data": write_jsonl(folder / "rows.jsonl", rows)}
        self.options = EPISODES | {"env": f"{self.world}:Late"} | options
        if isinstance(self.options["reward_source"], tuple):
            self.options["remote_rm_url"] = server.url
        self.inputs, self.starts = inputs, count()

    def start(self, name: str = "it", **options: Any) -> RanksResult:
        given = self.options | options
        sources = given.pop("reward_source")
        sources = sources if isinstance(sources, tuple) else (sources,)
        words = [*flags(self.inputs, self.folder / name, **given), "--reward_source", *sources]
        environment = WITH_SUPPORT | {"LIGHTPPO_TEST_START": str(next(self.starts))}
        spec = json.dumps({"pids": str(self.pids)})
        return run_ranks(SCRIPT, spec, *words, check=False, timeout=200, env=environment)

    def killed(self, kills: int, dice: random.Random, seconds: float) -> int:
        """Starts it until it is complete; how many kills came, of at most so many."""
        came, mark = 0, self.folder / "it" / "ckpt" / "latest"
        while True:
            for file in self.pids.iterdir():
                file.unlink()
            done = int(mark.read_text().removeprefix("global_step")) if mark.exists() else 0
            left = seconds * (1 - done / (STEPS + 1))
            killer = Killer(self.pids, dice.choice([[0], [1], [0, 1]]), dice.uniform(0, left))
            if came < kills:
                killer.start()
            result = self.start()
            killer.over.set()
            came += killer.came
            if result.returncode == 0:
                return came
            is_bad_luck = "none of the samples was scored" in result.output
            assert killer.came or is_bad_luck, f"after {came} kills:\n{result.output[-4000:]}"

    @property
    def tape(self) -> Path:
        return self.folder / "it" / "run" / "tape"


@pytest.fixture(scope="module")
def server() -> Iterator[JsonServer]:
    """Scores that are other ones at each request; some requests fail."""
    dice = random.Random(5)

    def reply(path: str, body: dict[str, Any], n: int) -> tuple[int, bytes]:
        if dice.random() < 0.1:
            return 503, b"{}"
        return ok(rewards=[dice.random() for _ in body["query"]])

    server = JsonServer()
    server.reply = reply
    yield server
    server.close()


def check_replay(run: Killed) -> None:
    """Without the environment, the same run again has the same numbers and weights."""
    run.world.unlink()
    played = run.start("again", tape_from=run.tape.parent, remote_rm_url="http://127.0.0.1:9/gone"
                       if "remote_rm_url" in run.options else None)  # fmt: skip
    assert played.returncode == 0, played.output[-4000:]
    assert int(re.search(r"the tape in .* gave (\d+) answers", played.output)[1]) > 50
    weights, rows = outcome(run.folder / "it")
    again, rows_again = outcome(run.folder / "again")
    assert len(rows) == STEPS
    different = [
        (row["step"], name)
        for row, other in zip(rows, rows_again, strict=True)
        for name in row.keys() | other.keys()
        if row.get(name) != other.get(name)
    ]
    assert different == []
    assert weights == again
    ends = Counter(end for path in run.tape.glob("step*") for end in whole_episodes(path))
    assert set(ends.values()) == {1}, "an episode that was whole was played again"


def whole_episodes(path: Path) -> Iterator[tuple[Any, ...]]:
    """The ends of episodes that did not fail: a run that failures ended asks these again."""
    place, failed = ("phase", "batch", "prompt", "sample"), set()
    for entry in read_tape_file(path).entries:
        episode = (path.name, *(entry.get(name) for name in place))
        if entry["kind"] == "call" and "failure" in entry:
            failed.add((episode, entry["take"], entry["try"] + 1))
        elif entry["kind"] == "end" and (episode, entry["take"], entry["tries"]) not in failed:
            yield episode


ALTERED = {
    "reply": (rb'"observation":" \d', rb'"observation":" x'),
    "reward": (rb'"reward":0\.\d', rb'"reward":0.x'),
    "token": (rb'"tokens":\[\d', rb'"tokens":[x'),
}


def check_altered(run: Killed, what: str) -> str:
    """One digit is another one: the line is named, with what it holds."""
    pattern, written = ALTERED[what]
    path = run.tape / "step3_rank1of2.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    number = next(i for i, line in enumerate(lines) if re.search(pattern, line))
    digit = re.search(pattern, lines[number])[0][-1:]
    other = written.replace(b"x", b"1" if digit != b"1" else b"2")
    before, entry = path.read_bytes(), json.loads(lines[number])
    lines[number] = re.sub(pattern, other, lines[number], count=1)
    path.write_bytes(b"".join(lines))
    named = f"{path}:{number + 1} was altered"
    with pytest.raises(TapeError, match=re.escape(named)) as error:
        read_tape_file(path)
    place = f"step 3, prompt {entry['prompt']}, sample {entry['sample']}, try {entry['try']}"
    assert f"{place}, turn {entry['turn']}" in str(error.value)
    text = str(error.value)
    ended = run.start("altered", tape_from=run.tape.parent)
    assert (ended.returncode, text in ended.output) == (1, True), ended.output[-3000:]
    path.write_bytes(before)
    return text


@pytest.mark.long
def test_a_killed_run_is_replayed_without_its_environment(server, tmp_path):
    dice, kills = random.Random(3), 0
    for runs in range(10):  # a fast machine may be done before the first kill
        run = Killed(tmp_path / f"run{runs}", server)
        if kills := run.killed(2, dice, seconds=4 / 2**runs):
            break
    assert kills
    check_replay(run)
    check_altered(run, "reward")


@pytest.mark.long
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("kind", RUNS)
def test_a_hundred_kills(kind, server, tmp_path, capsys):
    """A third of them on each kind of run, over as many runs as that takes."""
    dice, kills, runs = random.Random(kind), 0, 0
    while kills < -(-LONG_KILLS // len(RUNS)):
        run, runs = Killed(tmp_path / f"run{runs}", server, **RUNS[kind]), runs + 1
        kills += run.killed(12, dice, seconds=6)
        check_replay(run)
    named = [check_altered(run, what) for what in ALTERED]
    with capsys.disabled():
        print(f"\n{kind}: {kills} kills in {runs} runs, replays: 0 differing values", flush=True)
        print(*named, sep="\n", flush=True)
