"""What the tape costs: the CPU time of training steps with it, over that of the same steps without it.

    python benchmarks/tape.py [--pairs 5] [--scale cpu]

The same run is done with ``--tape auto`` and ``--tape off`` in turn, in one process. Its environment answers at once,
in turns of 16 tokens, so that as little as possible happens beside the tape. Of each kind the run with the least CPU
time counts: others on the machine only ever add to it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from commands import REPO, run
from workloads import SCALES

ENVIRONMENT = """
from lightppo import Step


class Talk:
    def reset(self, **row):
        self.left = 3

    def step(self, text):
        self.left -= 1
        return Step(" 7 ", reward=0.5, done=self.left == 0)
"""


def measure(folder: Path, number: int, tape: str) -> tuple[float, int]:
    """CPU seconds of the steps of a run but the first one, and the bytes of its tape."""
    from lightppo import Callback, PPOConfig, PPOTrainer

    class Clock(Callback):
        begin = end = 0.0

        def on_step_end(self, run: PPOTrainer, step: int, metrics: dict) -> None:
            self.begin = self.begin or time.process_time()
            self.end = time.process_time()

    clock, out = Clock(), folder / f"run{number}"
    config = PPOConfig.from_flat(
        pretrain=str(folder / "model"),
        prompt_data=str(folder / "rows.jsonl"),
        env=[f"{folder}/talk.py:Talk"],
        reward_source=["environment"],
        advantage_estimator="grpo",
        n_samples_per_prompt=4,
        rollout_batch_size=8,
        train_batch_size=32,
        max_turn_tokens=16,
        prompt_max_len=64,
        generate_max_len=96,
        init_kl_coef=0.0,
        actor_learning_rate=0.0,
        total_training_steps=6,
        zero_stage=0,
        num_examine=0,
        record_samples=0,
        save_path=str(out),
        ckpt_path=str(out / "ckpt"),
        tape=tape,
    )
    PPOTrainer.from_config(config, callbacks=[clock]).fit()
    size = sum(path.stat().st_size for path in (out / "tape").glob("*"))
    shutil.rmtree(out)
    return clock.end - clock.begin, size


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--scale", choices=sorted(SCALES), default="cpu")
    options = parser.parse_args()
    sys.path.insert(0, str(REPO))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "talk.py").write_text(ENVIRONMENT)
        words = [sys.executable, "benchmarks/make_assets.py", "--output_dir", folder]
        run([*words, "--scale", options.scale], log=folder / "assets.log", timeout=600)
        rows = [{"input": f"{n} + {n} = ", "label": str(2 * n)} for n in range(48)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        measure(folder, 0, "off")  # what happens once
        seconds: dict[str, list[float]] = {"auto": [], "off": []}
        for number, tape in zip(range(1, 2 * options.pairs + 1), itertools.cycle(seconds)):
            taken, size = measure(folder, number, tape)
            seconds[tape].append(taken)
            print(f"--tape {tape}: {taken:.3f} s, {size} bytes", flush=True)
    ratio = min(seconds["auto"]) / min(seconds["off"])
    print(
        f"least with {min(seconds['auto']):.3f} s, without {min(seconds['off']):.3f} s: {ratio:.4f}"
    )


if __name__ == "__main__":
    main()
