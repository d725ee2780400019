"""What ``--sequence_parallel_size`` spares of a long answer's activations, and what it costs in time.

    python benchmarks/sequence_parallel.py [--quick] [--tokens 32768]

A forward and a backward pass of a small Llama over one row, on 1, 2 and 4 CPU ranks that hold it together: the most
bytes of tensors alive beside the weights, of the rank that has most. Then a step of two rows on two ranks: each with one
of them, and both with a half of each; with long rows, and with short ones, where messages count for more. Writes
``runs/bench/sequence_parallel.json``, and fails if a rank holds more than it should; of the time it only says what it
should be, as that depends on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from calculator import VARIABLES, forked_ranks

MODEL = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 2, "num_attention_heads": 8,
         "num_key_value_heads": 4, "vocab_size": 2048, "max_position_embeddings": 1 << 20}  # fmt: skip
PROMPT = 64
REPEATS = 5
TARGETS = {2: 0.55, 4: 0.30}  # ranks → the largest share of one rank's activations
PARTS = (16, 8, 4)  # of the row whose memory is measured: the rows whose time is
TIME_TARGET = 1.15  # the longest step, of one of two ranks with rows of their own


def on_rank(
    folder: Path, size: int, tokens: int, rows: int, checkpointing: bool, counts: bool
) -> None:
    """One rank: writes the most bytes alive, or the seconds of a step."""
    import torch

    from lightppo.distributed.deepspeed import DeepspeedStrategy
    from lightppo.models.actor import Actor
    from lightppo.models.packing import settle_pieces
    from lightppo.preflight.budget import LiveBytes

    strategy = DeepspeedStrategy(zero_stage=0, sequence_parallel_size=size)
    strategy.setup_distributed()
    actor = Actor(str(folder), init_from_scratch=True, packing_samples=True)
    if checkpointing:
        actor.gradient_checkpointing_enable()
    optimizer = strategy.create_optimizer(actor, lr=1e-6)
    actor, optimizer, _ = strategy.prepare((actor, optimizer, None))
    if size > 1:
        assert settle_pieces(actor.layout, strategy) is None
    generator = torch.Generator().manual_seed(1)
    sequences = torch.randint(3, MODEL["vocab_size"], (rows, tokens), generator=generator)
    if size == 1:
        sequences = sequences.chunk(strategy.world_size)[strategy.get_rank()]
    actor.train()
    live = LiveBytes("cpu")

    def step() -> None:
        for row in sequences.split(1):
            with strategy.together:
                log_probs = actor(row, tokens - PROMPT)
                strategy.backward(log_probs.mean(), actor, optimizer)
        if not counts:
            strategy.optimizer_step(optimizer, actor)

    if counts:
        with live:
            step()
        found: dict[str, Any] = {"bytes": live.peak}
    else:
        seconds = []
        for _ in range(REPEATS + 1):
            strategy.barrier()
            start = time.perf_counter()
            step()
            strategy.barrier()
            seconds.append(time.perf_counter() - start)
        found = {"seconds": seconds[1:]}
    name = f"rank{strategy.get_rank()}.json"
    (folder / name).write_text(json.dumps(found))


def measured(ranks: int, *arguments: Any) -> list[dict[str, Any]]:
    """What each rank found."""
    from transformers import LlamaConfig

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = LlamaConfig(**MODEL, pad_token_id=0, bos_token_id=1, eos_token_id=2)
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(folder)
        forked_ranks(folder, ranks, on_rank, (folder, *arguments), timeout=3000)
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def median_seconds(length: int) -> list[float]:
    """Of a step of two rows on two ranks: a row each, and both with a half of each."""
    medians = []
    for size in (1, 2):
        seconds = measured(2, size, length, 2, False, False)[0]["seconds"]
        medians.append(statistics.median(seconds))
        print(
            f"two rows of {length} tokens, sequence_parallel_size {size}: {medians[-1]:.2f} s",
            flush=True,
        )
    print(f"ratio {medians[1] / medians[0]:.3f}, the target is {TIME_TARGET}")
    return medians


def peaks(tokens: int) -> dict[str, int]:
    """Bytes of the rank that has most, by whether activations are kept and the ranks that hold the row."""
    found = {}
    for kind, checkpointing in (("kept", False), ("checkpointed", True)):
        for size in (1, *TARGETS):
            ranks = measured(size, size, tokens, 1, checkpointing, True)
            peak = found[f"{kind}, {size}"] = max(rank["bytes"] for rank in ranks)
            share = peak / found[f"{kind}, 1"]
            print(f"{kind}, {size}: {peak / 1e6:.1f} MB, {share:.3f} of one rank's", flush=True)
    return found


def missed_targets(found: dict[str, int]) -> list[str]:
    """Say which peaks are a larger share of one rank's than they should be."""
    return [
        f"{kind} activations of {size} ranks: more than {target} of one rank's"
        for kind in ("kept", "checkpointed")
        for size, target in TARGETS.items()
        if found[f"{kind}, {size}"] > target * found[f"{kind}, 1"]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run_dir", type=Path, default=Path("runs/bench"))
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--quick", action="store_true", help="2048 tokens")
    options = parser.parse_args()
    if VARIABLES.items() - os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | VARIABLES)
    import deepspeed  # noqa: F401 — before the fork, as the rest

    import lightppo.trainer.build  # noqa: F401

    tokens = 2048 if options.quick else options.tokens
    result: dict[str, Any] = {"tokens": tokens, "load": os.getloadavg()[0]}
    lengths = [tokens // part for part in PARTS]
    result["seconds"] = {length: median_seconds(length) for length in lengths}
    result["peaks"] = peaks(tokens)
    folder = options.run_dir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sequence_parallel.json").write_text(json.dumps(result, indent=1) + "\n")
    if missed := missed_targets(result["peaks"]):
        sys.exit("\n".join(missed))


if __name__ == "__main__":
    main()
