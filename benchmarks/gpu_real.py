"""The part ``real`` of gpu_check.py: SmolLM2-135M-Instruct learns GSM8K for five minutes, and its accuracy on held-out
questions as it does: a row for each evaluation, and lightppo's own page with the curves and the answers.

Needs ``--gsm8k FOLDER`` with ``train.jsonl`` and ``test.jsonl`` of openai/gsm8k, whose rows have ``question`` and
``answer``. The model is that of real_assets.py, or of ``--real_model FOLDER``.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commands import REPO, run
from gpu_kernels import RUN, lacks
from gpu_runs import on

if TYPE_CHECKING:
    from gpu_check import Rows

MARGIN = 120  # seconds of a turn for loading, the last evaluation and the page
LEAST = 20  # seconds of training, however short the turn
PAGE = ("report.html", "metrics.jsonl", "run_config.yaml")  # of a run's folder


@dataclass(frozen=True)
class Size:
    """Attributes: seconds of training and evaluating, prompts of a step, samples of each, samples of an optimizer step,
    tokens of an answer, held-out questions, steps from one evaluation to the next."""

    seconds: int
    prompts: int
    samples: int
    minibatch: int
    new_tokens: int
    held_out: int
    every: int


SIZES = {"cuda": Size(300, 64, 16, 256, 256, 1024, 5), "cpu": Size(20, 2, 2, 4, 16, 4, 2)}


def real(rows: Rows) -> None:
    """GRPO on GSM8K, with vLLM where it is there."""
    folder: Path | None = rows.options.gsm8k
    reason = lacks(*RUN)
    if folder is None:
        reason = "--gsm8k names no folder with train.jsonl and test.jsonl"
    elif missing := [
        name for name in ("train", "test") if not (folder / f"{name}.jsonl").is_file()
    ]:
        reason = f"{folder} has no {missing[0]}.jsonl"
    engine = "hf" if lacks("vllm") else "vllm"
    row = rows(f"GRPO with {engine}", partial(train, rows, engine), reason)
    for step, accuracy, minutes in row.get("curve", ()):
        rows(f"step {step}", partial(dict, accuracy=accuracy, minutes=minutes))


def make_model(rows: Rows) -> Path:
    folder, given = rows.file.parent / "smollm2", rows.options.real_model
    words = [sys.executable, "benchmarks/real_assets.py", "--output_dir", folder]
    words += ["--model", given] if given else []
    run(words, log=rows.logs / "real_assets.log", timeout=300, **on("cpu"))
    return folder / "model"


def flags_of(data: Path, model: Path, folder: Path, engine: str, device: str) -> list[str]:
    """The command line of the run."""
    size = SIZES[device]
    values = {
        "pretrain": model,
        "prompt_data": data / "train.jsonl",
        "eval_data": data / "test.jsonl",
        "eval_max_samples": size.held_out,
        "input_key": "question",
        "label_key": "answer",
        "reward_fn": REPO / "examples" / "reward_functions" / "gsm8k.py",
        "callback": Path(__file__).with_name("stop_after.py"),
        "prompt_max_len": 512,
        "truncation": "drop",
        "generate_max_len": size.new_tokens,
        "temperature": 0.7,  # at 1 a model this small rambles
        "advantage_estimator": "grpo",
        "init_kl_coef": 0,
        "rollout_batch_size": size.prompts,
        "n_samples_per_prompt": size.samples,
        "train_batch_size": size.minibatch,
        "num_episodes": 100,  # until its time is over
        "actor_learning_rate": 1e-5,
        "lr_scheduler": "constant",
        "lr_warmup_steps": 2,
        "eval_steps": size.every,
        "eval_temperature": 0.0,
        "rollout_engine": engine,
        "zero_stage": 1 if device == "cuda" else 0,
        "num_examine": 0,
        "resume": "never",
        "save_path": folder,
        "ckpt_path": folder / "checkpoints",
    }
    flags = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    # a GPU's memory decides how many tokens a pass has
    on_device = ["--bf16"] if device == "cuda" else ["--max_tokens_per_micro_batch", "2048"]
    flags += ["--apply_chat_template", *on_device]
    return flags + (
        ["--max_num_seqs", str(size.prompts * size.samples)] if engine == "vllm" else []
    )


def train(rows: Rows, engine: str) -> dict[str, Any]:
    """Train until the time is over; what a page needs is in ``real/`` below the part's folder, and with ``--out``."""
    folder = rows.file.parent / "runs" / "real"
    shutil.rmtree(folder, ignore_errors=True)
    model, turn = make_model(rows), 60 * rows.options.minutes
    seconds = min(SIZES[rows.device].seconds, max(LEAST, turn - MARGIN))
    flags = flags_of(rows.options.gsm8k.resolve(), model, folder, engine, rows.device)
    run([sys.executable, "examples/train_ppo.py", *flags], log=rows.logs / "real.log", timeout=turn,
        STOP_AFTER_SECONDS=str(seconds), TOKENIZERS_PARALLELISM="false", **on(rows.device))  # fmt: skip
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for place in filter(None, (rows.file.parent, rows.options.out)):
        keep_page(folder, place / "real")
    shutil.rmtree(folder)
    return outcome(metrics, SIZES[rows.device].held_out)


def keep_page(folder: Path, place: Path) -> None:
    """Keep what ``lightppo report`` reads, and its page, which the run itself writes with the extra ``plots``."""
    place.mkdir(parents=True, exist_ok=True)
    for name in PAGE:
        if (folder / name).is_file():
            shutil.copy(folder / name, place)


def outcome(metrics: list[dict[str, Any]], held_out: int) -> dict[str, Any]:
    """Return the numbers of the whole run, and (step, accuracy, minutes) of each evaluation."""
    points = {row["step"]: row for row in metrics if "eval/accuracy" in row}
    steps = [row for row in metrics if "perf/time_step" in row]
    start = points[min(points)]["time"]
    curve = [
        [step, row["eval/accuracy"], (row["time"] - start) / 60]
        for step, row in sorted(points.items())
    ]
    before, after = curve[0][1], curve[-1][1]
    error = math.sqrt(sum(share * (1 - share) for share in (before, after)) / held_out)
    return {
        "steps": len(steps),
        "answers": int(sum(row["rollout/samples"] for row in steps)),
        "before": before,
        "after": after,
        "standard_error": error,  # of the difference, were the questions drawn anew
        "curve": curve,
    }
