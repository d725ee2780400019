"""The quickstart: make a model and a task, warm the model up, train it with PPO, show what changed.

    lightppo quickstart                             # in a checkout: make quickstart
    lightppo quickstart --ranks 2 --zero_stage 3    # make quickstart RANKS=2 ZERO_STAGE=3
    lightppo quickstart --rollout_engine vllm       # make quickstart ENGINE=vllm
    lightppo quickstart --env lookup                # make quickstart ENV=lookup
    lightppo quickstart --env guess

Every phase is an ordinary command, printed before it runs; the scripts are those for real models.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import tyro

HERE = Path(__file__).parent
EXAMPLES = HERE.parent
ENVIRONMENTS = {"lookup": "Drawers", "guess": "Between"}  # their classes


def main(
    run_dir: Path = Path("runs/quickstart"),
    ranks: int = 1,
    zero_stage: int = 1,
    install_seconds: float = 0.0,
    seed: int = 1,
    resume: bool = False,
    rollout_engine: Literal["hf", "vllm"] = "hf",
    head_dim: int | None = None,
    env: Literal["none", "lookup", "guess"] = "none",
) -> None:
    """Run the quickstart.

    Args:
        run_dir: folder of the run; an older run in it is removed.
        ranks: processes.
        zero_stage: ZeRO stage of actor and critic.
        install_seconds: what the installation took, for the summary.
        seed: of the initial weights and of all sampling.
        resume: keep an older run's folder and go on where its PPO run was interrupted.
        rollout_engine: what samples in the PPO run.
        head_dim: width of the model's attention heads. None: 16; with vLLM 32, the least that it takes on a CPU.
        env: none: sums of two numbers; lookup: a question to an environment comes before the answer;
            guess: a number is found in fewer guesses.
    """
    assets, sft, ppo = run_dir / "assets", run_dir / "sft", run_dir / "ppo"
    shared = ["--zero_stage", zero_stage, "--seed", seed]
    make_assets, config = HERE / "make_assets.py", HERE / "ppo.yaml"
    rewards = ["--reward_fn", HERE / "reward.py"]
    if env != "none":
        folder = EXAMPLES / "environments"
        make_assets, config = folder / f"{env}.py", folder / f"{env}.yaml"
        rewards = ["--env", f"{make_assets}:{ENVIRONMENTS[env]}"]
    seconds = {"install": install_seconds, "sft": 0.0, "ppo": 0.0}
    if resume and (run_dir / "seconds.json").is_file():
        seconds = json.loads((run_dir / "seconds.json").read_text())
    else:
        shutil.rmtree(run_dir, ignore_errors=True)
        start = time.monotonic()
        head_dim = head_dim or (16 if rollout_engine == "hf" else 32)
        run(
            [
                sys.executable,
                make_assets,
                "--output_dir",
                assets,
                "--seed",
                seed,
                "--head_dim",
                head_dim,
            ]
        )
        launch(ranks, "train_sft.py", "--pretrain", assets / "model", "--dataset", assets / "sft.jsonl",
               "--save_path", sft, *sft_options(ranks, env), *shared)  # fmt: skip
        seconds["sft"] = time.monotonic() - start
        (run_dir / "seconds.json").write_text(json.dumps(seconds))
    start = time.monotonic()
    launch(ranks, "train_ppo.py", "--config", config, "--pretrain", sft,
           "--prompt_data", assets / "prompts.jsonl", "--eval_data", assets / "eval.jsonl",
           "--save_path", ppo, "--ckpt_path", run_dir / "checkpoints", "--rollout_engine", rollout_engine,
           *rewards, *shared)  # fmt: skip
    seconds["ppo"] += time.monotonic() - start
    (run_dir / "seconds.json").write_text(json.dumps(seconds))
    run([sys.executable, HERE / "summarize.py", "--run_dir", run_dir])


def sft_options(ranks: int, env: str) -> list[str]:
    """How the supervised warm-up is run; games are long, and need fewer steps."""
    max_len, steps = (96, 200) if env == "guess" else (16, 1000)
    return shlex.split(
        f"--output_key output --max_len {max_len} --max_steps {steps} --train_batch_size 128 "
        f"--micro_train_batch_size {128 // ranks} --learning_rate 5e-3 --lr_warmup_ratio 0.1 "
        "--adam_betas 0.9 0.99 --lr_scheduler cosine --logging_steps 50"
    )


def launch(ranks: int, script: str, *arguments: object) -> None:
    """Run a script of examples/ under the DeepSpeed launcher."""
    with socket.socket() as probe:  # the default port may belong to another run on this machine
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    deepspeed = Path(sys.executable).with_name("deepspeed")
    launcher = [deepspeed, "--num_gpus", ranks, "--master_port", port, "--log_level", "warning"]
    # One thread: with matrices this small a second one takes longer to wake than to help.
    run([*launcher, EXAMPLES / script, *arguments], OMP_NUM_THREADS="1")


def run(command: list[object], **variables: str) -> None:
    """Run a command, shown first; its failure ends the quickstart with its exit code."""
    words = [str(word) for word in command]
    print(f"\n$ {shlex.join(words)}", flush=True)
    environment = {"TOKENIZERS_PARALLELISM": "false", **variables, **os.environ}
    if shutil.which("nvidia-smi") is None:
        # spares DeepSpeed's warnings about a missing GPU
        environment.setdefault("DS_ACCELERATOR", "cpu")
    code = subprocess.run(words, env=environment).returncode
    if code:
        raise SystemExit(code)


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
