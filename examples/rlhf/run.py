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


def main(run_dir: Path = Path("runs/rlhf"), seed: int = 1) -> None:
    """Run the example.

    Args:
        run_dir: folder of the run; an older run in it is removed.
        seed: of the initial weights and of all sampling.
    """
    shutil.rmtree(run_dir, ignore_errors=True)
    assets, sft, reward_model, pairs = (run_dir / name for name in ("assets", "sft", "reward_model", "pairs.jsonl"))
    held_out = run_dir / "held_out_pairs.jsonl"
    start = time.monotonic()
    python("make_assets.py", "--output_dir", assets, "--seed", seed)
    lightppo("sft", "--pretrain", assets / "model", "--dataset", assets / "sft.jsonl", "--save_path", sft,
             "--output_key", "output", "--train_batch_size", 128, "--micro_train_batch_size", 128, "--max_steps", 500,
             "--learning_rate", 5e-3, *shlex.split(ADAM), "--seed", seed)  # fmt: skip
    python("pairs.py", "--model", sft, "--prompts", assets / "prompts.jsonl", "--output", pairs, "--count", PAIRS)
    python("pairs.py", "--model", sft, "--prompts", assets / "eval.jsonl", "--output", held_out, "--seed", seed + 1)
    on_pairs = ["--pretrain", sft, "--dataset", pairs, "--eval_dataset", held_out, "--train_batch_size", 64,
                "--micro_train_batch_size", 64, *shlex.split(ADAM), "--seed", seed]  # fmt: skip
    lightppo("rm", *on_pairs, "--save_path", reward_model, "--num_epochs", 2, "--learning_rate", 1e-3)
    shared = ["--config", HERE / "ppo.yaml", "--pretrain", sft, "--reward_pretrain", reward_model, "--prompt_data",
              assets / "prompts.jsonl", "--zero_stage", 1, "--seed", seed]  # fmt: skip
    for name, kl_coef in (("ppo", 0.1), ("ppo_no_kl", 0)):
        lightppo("ppo", *shared, "--init_kl_coef", kl_coef, "--save_path", run_dir / name,
                 "--ckpt_path", run_dir / name / "checkpoints")  # fmt: skip
    lightppo("dpo", *on_pairs, "--save_path", run_dir / "dpo", "--num_epochs", 2, "--learning_rate", 1e-3,
             "--beta", 0.3, "--hf_save_steps", 20, "--max_ckpt_num", 100)  # fmt: skip
    python("judge.py", "--run_dir", run_dir, "--trained_on", 2 * PAIRS)
    print(f"{time.monotonic() - start:.0f} s in all")


def lightppo(*arguments: object) -> None:
    """Run a command of lightppo in one process; on several ranks it would be torchrun -m lightppo."""
    run([sys.executable, "-m", "lightppo", *arguments])


def python(script: str, *arguments: object) -> None:
    """Run a script of this folder."""
    run([sys.executable, HERE / script, *arguments])


def run(command: list[object]) -> None:
    """Run a command, shown first; its failure ends the example with its exit code."""
    words = [str(word) for word in command]
    print(f"\n$ {shlex.join(words)}", flush=True)
    # One thread: with matrices this small a second one takes longer to wake than to help.
    environment = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", **os.environ}
    if shutil.which("nvidia-smi") is None:
        environment.setdefault("DS_ACCELERATOR", "cpu")  # spares DeepSpeed's warnings about a missing GPU
    if code := subprocess.run(words, env=environment).returncode:
        raise SystemExit(code)


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
