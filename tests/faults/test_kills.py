"""Kills at random times, and at every file operation of a save: whatever they hit, the end is as without them."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from faults.small_run import STEPS, flags, metric_rows, outcome
from support.killer import Killer
from support.ranks import ENVIRONMENT, kill_marked, launch_command

pytestmark = pytest.mark.timeout(5400)  # a hundred kills, each followed by what is left of its run

KILLS = int(os.environ.get("KILLS", 100))
RUNS = {
    "GAE at ZeRO 2": {},
    "GRPO at ZeRO 3": {
        "zero_stage": 3,
        "advantage_estimator": "grpo",
        "n_samples_per_prompt": 2,
        "train_batch_size": 8,
        "critic_learning_rate": None,
    },
    "all else": {
        "zero_stage": 0,
        "enable_ema": True,
        "kl_target": 0.1,
        "save_hf_ckpt": True,
        "max_epochs": 2,
    },
}


@pytest.mark.faults
@pytest.mark.parametrize("run", RUNS)
def test_random_kills_change_nothing(run, start, tmp_path, capsys):
    """So many kills of one rank or both, over as many runs as that takes."""
    options, dice, kills, runs = RUNS[run], random.Random(run), 0, 0
    pids = tmp_path / "pids"
    pids.mkdir()
    start(tmp_path / "undisturbed", {"pids": str(pids)}, **options)
    expected = outcome(tmp_path / "undisturbed")
    whole = (tmp_path / "undisturbed" / "run" / "model.safetensors").stat().st_mtime - (
        pids / "0"
    ).stat().st_mtime
    times = [
        json.loads(row)["time"]
        for row in (tmp_path / "undisturbed" / "run" / "metrics.jsonl").open()
    ]
    of_step = (times[-1] - times[0]) / (STEPS - 1)
    while kills < -(-KILLS // len(RUNS)):
        folder, runs = tmp_path / f"run{runs}", runs + 1
        mark, done, steps_before, stalled = folder / "ckpt" / "latest", False, 0, 0
        while not done:
            for file in pids.iterdir():
                file.unlink()
            steps_done = int(mark.read_text().removeprefix("global_step")) if mark.exists() else 0
            stalled, steps_before = (stalled + 1 if steps_done == steps_before else 0), steps_done
            # a machine that is busy now gets there, too
            left = (whole - of_step * steps_done) * 1.1**stalled
            killer = Killer(pids, dice.choice([[0], [1], [0, 1]]), dice.uniform(0, left))
            killer.start()
            result = start(folder, {"pids": str(pids)}, check=False, **options)
            killer.over.set()
            killer.join()
            kills += killer.came
            done = result.returncode == 0
            assert done or killer.came, f"after {kills} kills:\n{result.output[-4000:]}"
        assert outcome(folder) == expected, f"{run}, after {kills} kills in {folder}"
    with capsys.disabled():
        print(f"\n{run}: {kills} kills in {runs} runs", flush=True)


def operations(
    start: Any, folder: Path, rank: int, number: int | None, step: int, **options: Any
) -> list[str]:
    """What the save of a step does to files, in order; the rank dies at the ``number``-th."""
    struck = folder.with_suffix(".json")
    spec = {
        "rank": rank,
        "operation": number,
        "step": step,
        "under": str(folder / "ckpt"),
        "struck": str(struck),
    }
    result = start(folder, spec, check=number is None, **options)
    assert (result.returncode != 0) == (number is not None), result.output[-3000:]
    assert ("resumed from" in result.output) == (step > 2), result.output[-3000:]
    return json.loads(struck.read_text()) if number is None else []


@pytest.mark.faults
@pytest.mark.parametrize("rank", [0, 1])
def test_a_kill_at_every_file_operation_of_a_save(start, tmp_path, rank, capsys):
    """A save, which also removes the checkpoint before: the run goes on from the old one or from the new, and its next
    save meets a kill at the next operation."""
    options = {"max_ckpt_num": 1, "num_episodes": 5}
    saves = range(2, 5 * STEPS)
    names = operations(start, tmp_path / "undisturbed", rank, None, saves[0], **options)
    expected = outcome(tmp_path / "undisturbed")
    assert len(names) > (15 if rank == 0 else 1)
    for first in range(0, len(names), len(saves)):
        folder, hit = (
            tmp_path / f"from{first}",
            list(enumerate(names, start=1))[first : first + len(saves)],
        )
        for step, (number, _) in zip(saves, hit):
            operations(start, folder, rank, number, step, **options)
        assert "resumed from" in start(folder, **options).output
        assert outcome(folder) == expected, hit
    with capsys.disabled():
        print(
            f"\nrank {rank}: killed at each of {len(names)} file operations of a save", flush=True
        )


@pytest.mark.faults
def test_time_from_a_kill_to_the_next_step(inputs, tmp_path, capsys):
    """Under the real launcher, which the user starts again once it has ended. On an idle machine: 20 s at most."""
    words = flags(inputs, tmp_path, num_episodes=50)
    environment = os.environ | ENVIRONMENT | {"LIGHTPPO_TEST_RUN": str(tmp_path)}
    rows = tmp_path / "run" / "metrics.jsonl"
    busy, log = os.getloadavg()[0] > os.cpu_count(), (tmp_path / "log").open("w")

    def launch() -> subprocess.Popen[bytes]:
        command = launch_command("deepspeed", 2, "lightppo", ["ppo", *words])
        return subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )

    def wait_for_step(step: int) -> float:
        deadline = time.monotonic() + 400
        while not rows.is_file() or f'"step": {step},' not in rows.read_text():
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.02)
        return time.monotonic()

    try:
        first = launch()
        wait_for_step(3)
        (of_node,) = psutil.Process(first.pid).children()
        killed_at = time.monotonic()
        os.kill(of_node.children()[1].pid, signal.SIGKILL)
        assert first.wait(timeout=120) != 0
        ended_at = time.monotonic()
        done = metric_rows(tmp_path)[-1]["step"]
        launch()
        took = wait_for_step(done + 1) - killed_at
    finally:
        kill_marked(str(tmp_path))
        log.close()
    with capsys.disabled():
        load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
        print(
            f"\n{ended_at - killed_at:.1f} s until the launcher ended, {took:.1f} s until the next step; {load}"
        )
    assert busy or took < 20
