"""Dynamic sampling on the quickstart task, against none: samples until an accuracy is reached.

    make quickstart && python benchmarks/dynamic_sampling.py [--quickstart runs/quickstart] [--seeds 1 2] [--steps 120]

Both runs start from the quickstart's supervised model and are GRPO with groups of four; they differ in
``--dynamic_sampling`` alone. The accuracy is measured on sampled answers to held-out prompts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import tyro

REPO = Path(__file__).parents[1]
KINDS = {
    "none": [],
    "dynamic": ["--dynamic_sampling", "--max_num_gen_batches", "0", "--gen_batch_size", "32"],
}
TARGETS = (0.7, 0.8, 0.9, 0.95)


def train(kind: str, seed: int, steps: int, quickstart: Path, folder: Path) -> list[dict]:
    """Rows of ``metrics.jsonl`` of one run."""
    assets = quickstart / "assets"
    options = {
        "pretrain": quickstart / "sft",
        "prompt_data": assets / "prompts.jsonl",
        "eval_data": assets / "eval.jsonl",
        "reward_fn": REPO / "examples" / "quickstart" / "reward.py",
        "label_key": "label",
        "prompt_max_len": 8,
        "generate_max_len": 5,
        "advantage_estimator": "grpo",
        "init_kl_coef": 0,
        "n_samples_per_prompt": 4,
        "rollout_batch_size": 32,
        "train_batch_size": 64,
        "micro_rollout_batch_size": 512,
        "micro_train_batch_size": 64,
        "num_episodes": 100,
        "total_training_steps": steps,
        "actor_learning_rate": 5e-4,
        "lr_scheduler": "constant",
        "zero_stage": 0,
        "eval_steps": 5,
        "num_examine": 0,
        "seed": seed,
        "save_path": folder / "run",
        "ckpt_path": folder / "ckpt",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, str(REPO / "examples" / "train_ppo.py"), *words, *KINDS[kind]]
    environment = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise SystemExit(done.stdout[-3000:])
    return [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]


def until(rows: Sequence[dict], target: float) -> tuple[int, int, int] | None:
    """(steps, samples trained on, samples generated) until an evaluation reaches the target."""
    steps = trained = generated = 0
    for row in sorted(rows, key=lambda row: (row["step"], "eval/accuracy" in row)):
        if "rollout/samples" in row:
            steps, trained = row["step"], trained + int(row["rollout/samples"])
            generated += int(row["rollout/generated_samples"])
        elif row["eval/accuracy"] >= target:
            return steps, trained, generated
    return None


def main(
    quickstart: Path = Path("runs/quickstart"), seeds: tuple[int, ...] = (1, 2), steps: int = 120
) -> None:
    """Run and compare.

    Args:
        quickstart: folder of a finished `make quickstart`.
        seeds: one run of each kind per seed.
        steps: PPO steps of a run.
    """
    if not (quickstart / "sft").is_dir():
        raise SystemExit(f"{quickstart} has no sft/: run `make quickstart` first")
    print("| seed | accuracy | dynamic sampling | steps | trained samples | generated samples |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            runs = {
                kind: train(kind, seed, steps, quickstart.resolve(), Path(folder, kind))
                for kind in KINDS
            }
        for target in TARGETS:
            for kind, rows in runs.items():
                cells = until(rows, target) or ("not reached", "", "")
                numbers = " | ".join(
                    f"{cell:,}" if isinstance(cell, int) else cell for cell in cells
                )
                print(
                    f"| {seed} | {target:g} | {'yes' if kind == 'dynamic' else 'no'} | {numbers} |",
                    flush=True,
                )


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
