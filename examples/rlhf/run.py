"""RLHF from nothing: SFT, a reward model from pairs, PPO against it under KL, and DPO on the same pairs beside it.

    make rlhf

Every stage is an ordinary command, printed before it runs; docs/rlhf.md has the same for a model of your own.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import tyro

HERE = Path(__file__).parent
ADAM = "--lr_warmup_ratio 0.1 --adam_betas 0.9 0.99 --zero_stage 1 --max_len 96 --logging_steps 20"
PAIRS = 5_120  # DPO is trained on 2 x 5,120 answers, PPO on 80 steps x 128


def main(run_dir: Path = Path("runs/rlhf"), seed: int = 2) -> None:
    """Run the example.

    Args:
        run_dir: folder of the run; an older run in it is removed.
        seed: of the initial weights and of all sampling.
    """
    shutil.rmtree(run_dir, ignore_errors=True)
    assets, sft, reward_model, pairs = (
        run_dir / name for name in ("assets", "sft", "reward_model", "pairs.jsonl")
    )
    held_out = run_dir / "held_out_pairs.jsonl"
    start = time.monotonic()
    run(script("make_assets.py", "--output_dir", assets, "--seed", seed))
    run(lightppo("sft", "--pretrain", assets / "model", "--dataset", assets / "sft.jsonl", "--save_path", sft,
                 "--output_key", "output", "--train_batch_size", 128, "--micro_train_batch_size", 128,
                 "--max_steps", 500, "--learning_rate", 5e-3, *shlex.split(ADAM)))  # fmt: skip
    run(script("pairs.py", "--model", sft, "--prompts", assets / "prompts.jsonl", "--output", pairs, "--count", PAIRS,
               "--seed", seed))  # fmt: skip
    run(script("pairs.py", "--model", sft, "--prompts", assets / "eval.jsonl", "--output", held_out,
               "--seed", seed + 1))  # fmt: skip
    on_pairs = ["--pretrain", sft, "--dataset", pairs, "--eval_dataset", held_out, "--train_batch_size", 64,
                "--micro_train_batch_size", 64, "--learning_rate", 1e-3, *shlex.split(ADAM)]  # fmt: skip
    run(lightppo("rm", *on_pairs, "--save_path", reward_model, "--num_epochs", 3))
    ppo = ["--config", HERE / "ppo.yaml", "--pretrain", sft, "--reward_pretrain", reward_model, "--prompt_data",
           assets / "prompts.jsonl", "--zero_stage", 1, "--seed", seed]  # fmt: skip
    run(
        lightppo("ppo", *ppo, "--init_kl_coef", 0.1, *folders(run_dir / "ppo")),
        lightppo("ppo", *ppo, "--init_kl_coef", 0, *folders(run_dir / "ppo_no_kl")),
        lightppo("dpo", *on_pairs, "--num_epochs", 2, "--beta", 0.3, "--hf_save_steps", 20, "--max_ckpt_num", 100,
                 *folders(run_dir / "dpo")),
    )  # fmt: skip
    run(script("judge.py", "--run_dir", run_dir, "--trained_on", 2 * PAIRS))
    print(f"{time.monotonic() - start:.0f} s in all")


def folders(path: Path) -> list[object]:
    """Where a run saves its model and its exports on the way."""
    return ["--save_path", path, "--ckpt_path", path / "checkpoints"]


def lightppo(*arguments: object) -> list[object]:
    """A command of lightppo in one process; on several ranks it would begin with torchrun."""
    return [sys.executable, "-m", "lightppo", *arguments]


def script(name: str, *arguments: object) -> list[object]:
    """A script of this folder."""
    return [sys.executable, HERE / name, *arguments]


def run(*commands: list[object]) -> None:
    """Run commands at the same time, shown first; a failure ends the example with its exit code."""
    # One thread: with matrices this small a second one takes longer to wake than to help.
    environment = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", **os.environ}
    if shutil.which("nvidia-smi") is None:
        # spares DeepSpeed's warnings about a missing GPU
        environment.setdefault("DS_ACCELERATOR", "cpu")
    running = []
    if len(commands) > 1:
        print(
            f"\nthe next {len(commands)} at the same time; each writes metrics.jsonl into its --save_path"
        )
    for command in commands:
        words = [str(word) for word in command]
        print(f"\n$ {shlex.join(words)}", flush=True)
        output = subprocess.DEVNULL if len(commands) > 1 else None  # errors are shown in any case
        running.append(subprocess.Popen(words, env=environment, stdout=output))
    codes = [process.wait() for process in running]
    if any(codes):
        raise SystemExit(next(filter(None, codes)))


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
