"""An hour, or so many steps, of the small run on two ranks that meet faults: does anything grow?

    make soak [STEPS=2000 | MINUTES=60] [ENGINE=vllm]

Every few steps a gradient is NaN or a rank is slow, one reward in 40 fails; at the end of a life a rank is killed, and
the run started again. Each rank notes what it holds after every step. Of each life that is long enough the slope is
taken, of its second half; a slope above its limit, or what a life leaves behind, ends the command with an error.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# KiB and numbers, per step
LIMITS = {"memory": 20.0, "children's memory": 20.0, "files": 0.01, "threads": 0.01}
LONG = 100  # steps of a life; what a process first needs has come by the half of them
UNITS = {
    "memory": "KiB/step",
    "children's memory": "KiB/step",
    "files": "per step",
    "threads": "per step",
}
REWARD = """
import random

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if random.random() < 0.025:
        raise ValueError("one in forty")
    return sum(c.isdigit() for c in solution_str) / max(1, len(solution_str))
"""


# -- a rank ----------------------------------------------------------------------------------------------------------


def rank_main() -> None:
    """As cli/ppo.py, with a trainer that meets faults and notes what it holds."""
    from lightppo import PPOTrainer
    from lightppo.config import parse_args
    from lightppo.trainer import run

    rank, notes = os.environ["RANK"], Path(os.environ["SOAK_NOTES"])

    class Soaked(PPOTrainer):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            backward = self.strategy.backward

            def disturbed(loss: Any, *others: Any) -> Any:
                step = self.state.global_step
                if rank == "1" and step % 10 == 5:
                    loss = loss * float("nan")
                if rank == "0" and step % 25 == 7:
                    time.sleep(0.2)
                return backward(loss, *others)

            self.strategy.backward = disturbed

        def save_logs_and_checkpoints(self, *args: Any, **options: Any) -> None:
            super().save_logs_and_checkpoints(*args, **options)
            with (notes / f"rank{rank}").open("a") as file:
                file.write(json.dumps({"step": self.state.global_step, **held()}) + "\n")

    config = parse_args(sys.argv[1:])
    run(lambda: Soaked.from_config(config).fit())


def held() -> dict[str, float]:
    """What this process holds, and its children."""
    import psutil

    me = psutil.Process()
    children = sum(child.memory_info().rss for child in me.children(recursive=True))
    return {
        "memory": me.memory_info().rss / 1024,
        "children's memory": children / 1024,
        "files": me.num_fds(),
        "threads": me.num_threads(),
    }


# -- the command -----------------------------------------------------------------------------------------------------


def slope(points: list[tuple[float, float]]) -> float:
    """Least squares."""
    mean_x, mean_y = (sum(column) / len(points) for column in zip(*points))
    square = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / square


def main() -> None:
    from support.ranks import ENVIRONMENT, kill_marked, launch_command

    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--steps", type=int, default=None, help="of all lives; by default as many as --minutes hold"
    )
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--lives", type=int, default=4)
    parser.add_argument("--engine", default="hf", choices=["hf", "vllm"])
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="lightppo-soak-"))
    environment = os.environ | ENVIRONMENT | {"LIGHTPPO_TEST_RUN": str(folder)}
    words = small_flags(folder, given.engine, given.steps or 10**6)
    before, too_much, dice = shared_memory(), [], random.Random(0)
    for life in range(given.lives):
        notes = folder / f"life{life}"
        notes.mkdir()
        steps, seconds = (
            given.steps and given.steps * (life + 1) // given.lives,
            60 * given.minutes / given.lives,
        )
        ends = {"steps": steps, "seconds": seconds}
        with (folder / f"log{life}").open("w") as log:
            command = launch_command("deepspeed", 2, Path(__file__), words)
            options = {"env": environment | {"SOAK_NOTES": str(notes)}, "stdin": subprocess.DEVNULL}
            launcher = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, **options
            )
            live(launcher, notes, dice, last=life == given.lives - 1, **ends)
        too_much += report(life, notes)
        if left := leftovers(str(folder)):
            too_much.append(f"life {life} leaves {left}")
            kill_marked(str(folder))
    if grown := sorted(shared_memory() - before):
        too_much.append(f"/dev/shm: {[str(path) for path in grown]}")
    print("\n".join(too_much) or f"nothing grows; nothing is left; records in {folder}", flush=True)
    sys.exit(bool(too_much))


def small_flags(folder: Path, engine: str, steps: int) -> list[str]:
    from faults.small_run import flags, write_inputs

    # Heads of 32, the smallest that vLLM's attention takes on a CPU.
    inputs = write_inputs(folder, hidden_size=64, num_attention_heads=2, num_key_value_heads=1)
    (folder / "reward.py").write_text(REWARD)
    return flags(
        *(inputs, folder),
        num_episodes=steps,
        total_training_steps=steps,
        save_steps=20,
        reward_manager="prime",
        reward_timeout=30,
        on_reward_failure="unscored",
        **({"rollout_engine": "vllm", "max_num_seqs": 16} if engine == "vllm" else {}),
    )


def live(
    launcher: subprocess.Popen[bytes],
    notes: Path,
    dice: random.Random,
    *,
    last: bool,
    steps: int | None,
    seconds: float,
) -> None:
    """Until the life has its steps, or its time; then it is killed, but the last one may end by itself."""
    began, killed = time.monotonic(), False
    while launcher.poll() is None and not killed:
        rows = noted(notes / "rank1")
        over = (
            time.monotonic() - began > seconds
            if steps is None
            else bool(rows) and rows[-1]["step"] >= steps
        )
        if over and not (last and steps):
            kill_a_rank(launcher.pid, dice)
            killed = True
        time.sleep(0.5)
    code = launcher.wait(timeout=600)
    assert killed != (code == 0), f"the launcher ended with {code}: see {notes.parent}"


def kill_a_rank(launcher: int, dice: random.Random) -> None:
    import psutil

    (of_node,) = psutil.Process(launcher).children()
    os.kill(dice.choice(of_node.children()).pid, signal.SIGKILL)


def noted(file: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def report(life: int, notes: Path) -> list[str]:
    """Prints the slopes of a life; what is above its limit."""
    too_much = []
    for rank in (0, 1):
        rows = noted(notes / f"rank{rank}")
        late = rows[len(rows) // 2 :]
        slopes = (
            {name: slope([(row["step"], row[name]) for row in late]) for name in LIMITS}
            if len(rows) >= LONG
            else {}
        )
        shown = ", ".join(
            f"{name} {value:+.3f} {UNITS[name]} (limit {LIMITS[name]})"
            for name, value in slopes.items()
        )
        shown = shown or f"too short for slopes, which need {LONG} steps"
        print(f"life {life}, rank {rank}, {len(rows)} steps: {shown}", flush=True)
        too_much += [
            f"life {life}, rank {rank}: {name}"
            for name, value in slopes.items()
            if value > LIMITS[name]
        ]
    return too_much


def leftovers(marker: str, seconds: float = 30.0) -> list[str]:
    """Processes of a life that is over."""
    import psutil

    deadline = time.monotonic() + seconds
    while True:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("LIGHTPPO_TEST_RUN") == marker:
                    found.append(" ".join(process.cmdline()))
            except psutil.Error:
                continue
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.5)


def shared_memory() -> set[Path]:
    """Files in shared memory that no process holds."""
    import psutil
    from support.vllm_servers import shared_memory_of

    held = {path for process in psutil.process_iter() for path in shared_memory_of(process)}
    return {path for path in Path("/dev/shm").iterdir() if path.is_file()} - held


if __name__ == "__main__":
    rank_main() if "RANK" in os.environ else main()
