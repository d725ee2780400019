"""What `lightppo memory` predicts against what runs hold: the table of docs/memory.md.

    python benchmarks/calculator.py [--quick] [--only NAME …] [--write]

Each row is a PPO run of two steps with random weights on CPU ranks. Measured are the bytes of all tensors that live at
a time, operation by operation (``LiveBytes``), at most of all ranks; beside it the growth of the process's resident
set, which also has what libraries keep. Writes ``runs/bench/calculator.json``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from commands import REPO
from make_assets import build_tokenizer
from workloads import SCALES

PROMPT, RESPONSE, PROMPTS = 48, 48, 16
MODEL = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 8,
         "num_key_value_heads": 4, "vocab_size": 4096, "max_position_embeddings": 2048}  # fmt: skip
GRPO = {
    "advantage_estimator": "group_norm",
    "n_samples_per_prompt": 4,
    "rollout_batch_size": 4,
    "init_kl_coef": 0,
}
BASE = {"rollout_batch_size": PROMPTS, "micro_train_batch_size": 4, "micro_rollout_batch_size": 8}

# name: ranks, options over BASE, changes of MODEL
ROWS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "fp32, ZeRO 0": (1, {"zero_stage": 0}, {}),
    "fp32, ZeRO 1": (2, {"zero_stage": 1}, {}),
    "fp32, ZeRO 2": (2, {"zero_stage": 2}, {}),
    "fp32, ZeRO 3": (2, {"zero_stage": 3}, {}),
    "bf16, ZeRO 1": (2, {"zero_stage": 1, "bf16": True}, {}),
    "bf16, ZeRO 2": (2, {"zero_stage": 2, "bf16": True}, {}),
    "bf16, ZeRO 3": (2, {"zero_stage": 3, "bf16": True}, {}),
    "fp16, ZeRO 2": (2, {"zero_stage": 2, "fp16": True}, {}),
    "fp16, ZeRO 3": (2, {"zero_stage": 3, "fp16": True}, {}),
    "bf16 gradients, one rank": (
        1,
        {"zero_stage": 2, "bf16": True, "grad_accum_dtype": "bf16"},
        {},
    ),
    "no critic, no reference": (1, {"zero_stage": 2, **GRPO}, {}),
    "GRPO with reference": (
        2,
        {"zero_stage": 2, **GRPO, "init_kl_coef": 0.01, "use_kl_loss": True},
        {},
    ),
    "checkpointing": (
        1,
        {"zero_stage": 1, "gradient_checkpointing": True, "micro_train_batch_size": 8},
        {},
    ),
    "padded": (1, {"zero_stage": 0, "packing_samples": False, "micro_train_batch_size": 8}, {}),
    "eager attention": (
        1,
        {"zero_stage": 0, "attn_implementation": "eager", "micro_train_batch_size": 8},
        {},
    ),
    "one long micro batch": (
        1,
        {"zero_stage": 0, "micro_train_batch_size": 16, "generate_max_len": 192},
        {},
    ),
    "tokens, not samples": (1, {"zero_stage": 0, "max_tokens_per_micro_batch": 1024}, {}),
    "LoRA": (1, {"zero_stage": 2, "lora_rank": 8}, {}),
    "LoRA, bf16, ZeRO 3": (2, {"zero_stage": 3, "lora_rank": 8, "bf16": True}, {}),
    "bf16, ZeRO 3, checkpointing": (
        2,
        {"zero_stage": 3, "bf16": True, "gradient_checkpointing": True},
        {},
    ),
    "moving average": (2, {"zero_stage": 2, "bf16": True, "enable_ema": True}, {}),
    "Adam on the host": (2, {"zero_stage": 2, "bf16": True, "adam_offload": True}, {}),
    "wide vocabulary, entropy": (
        1,
        {"zero_stage": 1, "entropy_coef": 0.01},
        {"vocab_size": 65536, "hidden_size": 256},
    ),
}
# Large blocks go back to the system at once, so that the resident set follows what is held.
VARIABLES = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "OMP_NUM_THREADS": "1",
             "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}  # fmt: skip
QUICK = ("fp32, ZeRO 0", "bf16, ZeRO 2", "LoRA")


def write_assets(folder: Path, changes: dict[str, Any]) -> None:
    """A config without weights, its tokenizer, prompts that are all of the same length."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        **MODEL | changes, pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder / "model")
    build_tokenizer(replace(SCALES["cpu"], vocabulary=config.vocab_size)).save_pretrained(
        folder / "model"
    )
    rows = [
        {"input": " ".join(f"w{3 + (7 * i + j) % 900}" for j in range(PROMPT)), "label": ""}
        for i in range(PROMPTS)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(
        "def reward_func(queries, prompts, labels):\n    return [float(len(q) % 7) for q in queries]\n"
    )


def options_of(name: str, folder: Path) -> dict[str, Any]:
    """All options of a row's run."""
    _, own, _ = ROWS[name]
    assets = {
        "pretrain": str(folder / "model"),
        "prompt_data": str(folder / "prompts.jsonl"),
        "reward_fn": str(folder / "reward.py"),
    }
    values = (
        BASE
        | {"prompt_max_len": PROMPT, "generate_max_len": RESPONSE, "ignore_eos": True}
        | assets
        | own
    )
    samples = values["rollout_batch_size"] * values.get("n_samples_per_prompt", 1)
    values |= {
        "init_from_scratch": True,
        "save_path": str(folder / "run"),
        "num_episodes": 2,
        "benchmark_steps": 2,
    }
    return {"train_batch_size": samples, "resume": "never", "num_examine": 0, **values}


def measure(options: dict[str, Any]) -> dict[str, int]:
    """Runs on this rank; the most bytes alive by phase, and the growth of the resident set."""
    import psutil
    from deepspeed.accelerator import get_accelerator

    from lightppo import PPOConfig, PPOTrainer
    from lightppo.distributed import deepspeed, distributed
    from lightppo.preflight.budget import (
        ACTOR,
        CRITIC,
        LOADING,
        ROLLOUT,
        SAVE,
        SCORING,
        LiveBytes,
    )

    live, peaks, now = LiveBytes("cpu"), {}, [LOADING]
    # its 20 MB are gone before a model loads
    distributed.share_host = lambda: None
    # torch computes in it on every CPU; DeepSpeed trains in it only where it is fast
    if options.get("fp16"):
        type(get_accelerator()).is_fp16_supported = lambda _: True
        deepspeed.LOSS_SCALE_POWER = 4  # a step that overflows makes no states of Adam

    def turn() -> None:
        peaks[now[-1]] = max(peaks.get(now[-1], 0), live.peak)
        live.peak = live.live

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        turn()
        now.append(name)
        try:
            yield
        finally:
            turn()
            now.pop()

    class Measured(PPOTrainer):
        def make_experience(self, *args: Any) -> None:
            with phase(SCORING):
                super().make_experience(*args)

        def ppo_train(self, *args: Any) -> dict[str, float]:
            with phase(ACTOR):
                return super().ppo_train(*args)

        def training_step_actor(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            with phase(ACTOR):
                return super().training_step_actor(*args, **kwargs)

        def training_step_critic(self, *args: Any) -> dict[str, float]:
            with phase(CRITIC):
                return super().training_step_critic(*args)

        def save_model(self, *args: Any) -> None:
            with phase(SAVE):
                super().save_model(*args)

    before = psutil.Process().memory_info().rss
    with live:
        trainer = Measured.from_config(PPOConfig.from_flat(options))
        with phase(ROLLOUT):
            trainer.fit()
    high = (
        int(
            next(
                s.split()[1]
                for s in Path("/proc/self/status").read_text().splitlines()
                if "VmHWM" in s
            )
        )
        * 1024
    )
    return peaks | {"resident": high - before}


def predicted(options: dict[str, Any], ranks: int) -> dict[str, int]:
    """The same phases by the calculator, of a rank."""
    from lightppo import PPOConfig
    from lightppo.preflight import budget

    found = budget.estimate(
        PPOConfig.from_flat(options).resolved(), budget.Machine(ranks, gpus=False)
    )
    tensors = tuple(part for part in found.parts if part.owner != "process")
    found = replace(found, parts=tensors)  # which is what ``measure`` counts
    sizes = {phase: found.of_phase(phase)[1] // ranks for phase in budget.PHASES}
    sizes[budget.ACTOR] = max(sizes[budget.ACTOR], sizes[budget.ACTOR_STEP])
    sizes[budget.CRITIC] = max(sizes[budget.CRITIC], sizes[budget.CRITIC_STEP])
    return sizes


def forked_ranks(
    folder: Path, ranks: int, work: Callable[..., None], arguments: tuple, timeout: float
) -> None:
    """Runs ``work(*arguments)`` on ranks that are forked from this process, which has the imports done."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    context = multiprocessing.get_context("fork")
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    processes = [
        context.Process(target=_as_rank, args=(folder, rank, shared, work, arguments))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout)
        if process.exitcode != 0:
            for other in processes:
                other.kill()
            raise SystemExit(
                f"exit code {process.exitcode}: {(folder / 'log0').read_text()[-3000:]}"
            )


def _as_rank(
    folder: Path, rank: int, variables: dict[str, str], work: Callable[..., None], arguments: tuple
) -> None:
    os.environ |= variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    log = os.open(folder / f"log{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    work(*arguments)


def on_rank(folder: Path) -> None:
    rank = int(os.environ.get("RANK", "0"))
    found = measure(json.loads((folder / "options.json").read_text()))
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


def compare(name: str, folder: Path, timeout: float) -> dict[str, Any]:
    """A row of the table."""
    ranks, _, changes = ROWS[name]
    shutil.rmtree(folder, ignore_errors=True)
    write_assets(folder, changes)
    options = options_of(name, folder)
    (folder / "options.json").write_text(json.dumps(options))
    forked_ranks(folder, ranks, on_rank, (folder,), timeout)
    found = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    most = {phase: max(rank.get(phase, 0) for rank in found) for phase in found[0]}
    said = predicted(options, ranks)
    resident = most.pop("resident")
    measured, expected = max(most.values()), max(said.values())
    return {"name": name, "ranks": ranks, "measured": measured, "predicted": expected, "resident": resident,
            "phases": {phase: [said[phase], most[phase]] for phase in most}}  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "run | ranks | predicted, MB | measured, MB | difference | resident set, MB",
        "---|---|---:|---:|---:|---:",
    ]
    for r in rows:
        off = r["predicted"] / r["measured"] - 1
        lines.append(f"{r['name']} | {r['ranks']} | {r['predicted'] / 1e6:.1f} | {r['measured'] / 1e6:.1f} | "
                     f"{off:+.1%} | {r['resident'] / 1e6:.0f}")  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run_dir", type=Path, default=Path("runs/bench"))
    parser.add_argument("--quick", action="store_true", help="three rows")
    parser.add_argument("--only", nargs="*", help="rows by name")
    parser.add_argument("--write", action="store_true", help="put the table into docs/memory.md")
    parser.add_argument("--timeout", type=float, default=900, help="seconds of one run")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        on_rank(options.rank)
        return
    if VARIABLES.items() - os.environ.items():  # they count from the start of a process
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | VARIABLES)
    import deepspeed  # noqa: F401 — before the fork, as the rest

    import lightppo.trainer.build  # noqa: F401

    folder, rows = options.run_dir.resolve(), []
    folder.mkdir(parents=True, exist_ok=True)
    for name in options.only or (QUICK if options.quick else ROWS):
        rows.append(compare(name, folder / "calculator", options.timeout))
        (folder / "calculator.json").write_text(json.dumps(rows, indent=1) + "\n")
        for phase, (said, seen) in rows[-1]["phases"].items():
            print(
                f"  {phase:<20}{said / 1e6:>10.1f}{seen / 1e6:>10.1f}{said / max(seen, 1) - 1:>+8.1%}"
            )
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    if options.write:
        page = REPO / "docs" / "memory.md"
        before, _, rest = page.read_text().partition("<!-- measured -->\n")
        page.write_text(
            f"{before}<!-- measured -->\n{table(rows)}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
        )


if __name__ == "__main__":
    main()
