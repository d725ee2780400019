"""What many ranks cost each other in a PPO step, without models: bytes that come to a rank, CPU time of a rank.

    python benchmarks/ranks.py [--ranks 16 32 64] [--tokens 2000] [--output_dir runs/bench]

Forks so many processes with a gloo group on this machine. Each has 2 prompts with 8 samples and does what a step does
with them beside its models: groups are chosen and change ranks, samples are dumped, recorded, evaluated and saved,
numbers of optimizer steps are averaged, tokens are ranked over all ranks, rows are tokenised. The last column continues
the line through the last two numbers of ranks to 128.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from torch.distributed import distributed_c10d

from lightppo.algorithms.selection import top_share
from lightppo.checkpoint.run_checkpointer import RunCheckpointer
from lightppo.config import PPOConfig
from lightppo.data.prepared_rows import Encoded, prepare_rows
from lightppo.data.records import Prompt, Rollout
from lightppo.distributed.distributed import DistributedStrategy
from lightppo.logging.samples import Samples, write_step
from lightppo.logging.step_metrics import merge_summaries, optimizer_status, rollout_summaries
from lightppo.rewards.reward_source import RewardOutput
from lightppo.rollout.balancing import balance_ranks
from lightppo.rollout.engine import SamplingParams
from lightppo.rollout.sampler import GroupCollector, GroupFilter, SampledBatch
from lightppo.trainer.evaluation import Evaluator, write_evaluation

PROMPTS, SAMPLES, RECORDED = 2, 8, 16  # of a rank; of a prompt; of all
STEPS, NAMES, ROWS = 16, 20, 4096
TARGET = 128
WAIT = timedelta(minutes=30)


class Strategy(DistributedStrategy):
    """Saves nothing but what ranks send each other for it."""

    def has_finite_weights(self, model: Any) -> bool:
        return True

    def save_ckpt(self, *args: Any, **options: Any) -> None:
        pass


class Step:
    """One step of one rank; each public method is a part that is measured."""

    def __init__(self, strategy: Strategy, tokens: int, folder: Path) -> None:
        self.strategy, self.tokens, self.folder, self.rank = (
            strategy,
            tokens,
            folder,
            strategy.get_rank(),
        )
        draw = random.Random(self.rank)
        self.rollouts = [
            r for i in range(PROMPTS) for r in self._group(PROMPTS * self.rank + i, draw)
        ]

    def _group(self, index: int, draw: random.Random) -> list[Rollout]:
        prompt = Prompt(
            "p" * self.tokens,
            [draw.randrange(150_000) for _ in range(self.tokens // 10)],
            index=index,
        )
        sizes = [draw.randrange(self.tokens // 10, 2 * self.tokens) for _ in range(SAMPLES)]
        ids = [[draw.randrange(150_000) for _ in range(size)] for size in sizes]
        scores = [float(j % 2) for j in range(SAMPLES)]
        return [Rollout(prompt, j, ids[j], "text" * n, "stop", [draw.random() for _ in range(n)], scores[j])
                for j, n in enumerate(sizes)]  # fmt: skip

    def selection(self) -> None:
        """Groups that dynamic sampling accepts, counted over all ranks; what is left over waits for the next step."""
        batch = SampledBatch(self.rollouts, {}, self.rollouts)
        sampler = SimpleNamespace(
            generate=lambda *_: self.rollouts, score=lambda _: batch, counted=(), engine=None
        )
        source = SimpleNamespace(take=list, exhausted=False)
        groups = {"groups_per_step": self.strategy.world_size, "group_filter": GroupFilter()}
        self.collector = GroupCollector(sampler, self.strategy, **groups)
        self.collector.collect(source, 1)

    def balance(self) -> None:
        """Groups change ranks."""
        balance_ranks(self.rollouts, self.strategy)

    def dump(self) -> None:
        """``--rollout_data_dir``."""
        write_step(self.folder / "dump", 1, self.rollouts, self.strategy)

    def record(self) -> None:
        """``--record_samples``."""
        parts = (self.strategy, lambda ids: "x" * len(ids), torch.sub)
        record = Samples(self.folder / "record", RECORDED, SAMPLES, *parts)
        record.pick(1, self.rollouts, [])
        record.on_step_end(None, 1, {})

    def evaluation(self) -> None:
        """As many prompts and samples as in training."""
        of_prompt = {
            r.prompt.index: [q for q in self.rollouts if q.prompt is r.prompt]
            for r in self.rollouts
        }
        prompts = [Prompt("", [], index=i) for i in range(PROMPTS * self.strategy.world_size)]
        engine = SimpleNamespace(
            generate=lambda mine, _: [r for group in of_prompt.values() for r in group]
        )
        source = SimpleNamespace(
            name="made up", score=lambda rollouts: RewardOutput([r.reward for r in rollouts])
        )
        evaluator = Evaluator(engine, source, prompts, SamplingParams(), self.strategy)
        metrics = evaluator.evaluate(1)
        write = partial(write_evaluation, self.folder / "eval", 1, evaluator.samples, metrics)
        self.strategy.on_rank_0(write, "write the evaluation")

    def metrics(self) -> None:
        """Numbers of optimizer steps, and of samples."""
        draw = random.Random(self.rank)
        names = [f"number_{i}" for i in range(NAMES)]
        optimizer_status(
            [[{name: draw.random() for name in names}] for _ in range(STEPS)], self.strategy
        )
        merge_summaries(self.strategy.all_gather_object(rollout_summaries([])))

    def tokens_of_all(self) -> None:
        """``--high_entropy_token_ratio`` and the like: the threshold over the tokens of all ranks."""
        top_share(
            torch.rand(PROMPTS * SAMPLES * self.tokens),
            0.2,
            partial(self.strategy.all_reduce, op="sum"),
        )

    def checkpoint(self) -> None:
        """What a checkpoint holds of each rank: random generators, and the groups that wait."""
        config = (
            PPOConfig.from_flat(pretrain="m", prompt_data="p", save_path=str(self.folder))
            .resolved()
            .checkpoint
        )
        checkpointer = RunCheckpointer(self.strategy, config, {}, None)
        waiting = self.strategy.gather_object(self.collector.state_dict())
        checkpointer.save(str(self.folder), 1, {"trainer": {}, "surplus": waiting})

    def rows(self) -> None:
        """Prompts are tokenised, here by a stand-in that takes 0.2 ms for each."""
        rows = Dataset.from_dict({"n": range(ROWS)})

        def encode(chunk: list[dict]) -> list[Encoded]:
            end = time.process_time() + 2e-4 * len(chunk)
            while time.process_time() < end:
                pass
            return [Encoded([row["n"]] * 200, 200, False) for row in chunk]

        prepare_rows(rows, ["n"], encode, ranks=self.strategy)


PARTS = [name for name in vars(Step) if not name.startswith("_")]


@contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """Bytes that collectives bring to this rank, those of objects as they are padded."""
    came, rank, world = [0], dist.get_rank(), dist.get_world_size()
    real = {name: getattr(distributed_c10d, name) for name in BYTES}

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            came[0] += BYTES[name](rank, world, args, options)
            return real[name](*args, **options)

        return call

    for name in BYTES:
        for module in (distributed_c10d, dist):
            setattr(module, name, counting(name))
    try:
        yield came
    finally:
        for name in BYTES:
            for module in (distributed_c10d, dist):
                setattr(module, name, real[name])


def _others(tensors: list[torch.Tensor] | None, world: int) -> int:
    return sum(t.nbytes for t in tensors or ()) * (world - 1) // world


BYTES: dict[str, Callable[[int, int, tuple, dict], int]] = {
    "all_gather": lambda rank, world, args, options: _others(args[0], world),
    "gather": lambda rank, world, args, options: _others(options.get("gather_list"), world),
    "broadcast": lambda rank, world, args, options: args[0].nbytes * (rank > 0),
    "all_reduce": lambda rank, world, args, options: 2 * args[0].nbytes * (world - 1) // world,
    "all_to_all_single": lambda rank, world, args, options: args[0].nbytes,
}


def run_rank(rank: int, world: int, tokens: int, folder: Path) -> None:
    """All parts, one after the other; rank 0 writes what they cost each rank."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    place = {
        "store": dist.FileStore(str(folder / "store"), world),
        "rank": rank,
        "world_size": world,
    }
    dist.init_process_group("gloo", timeout=WAIT, **place)
    strategy, costs = Strategy(), {}
    step = Step(strategy, tokens, folder)
    for part in PARTS:
        dist.barrier()
        start = time.process_time()
        with counted_bytes() as came:
            getattr(step, part)()
        costs[part] = {"bytes": came[0], "seconds": time.process_time() - start}
    of_ranks = strategy.all_gather_object(costs)
    if rank == 0:
        (folder / "costs.json").write_text(json.dumps(of_ranks))
    dist.barrier()
    dist.destroy_process_group()


def measure(world: int, tokens: int) -> dict[str, dict[str, float]]:
    """Bytes and CPU seconds of rank 0, and the mean of the others, by part."""
    with tempfile.TemporaryDirectory(prefix="lightppo-ranks-") as folder:
        start = multiprocessing.get_context("fork").Process
        ranks = [
            start(target=run_rank, args=(rank, world, tokens, Path(folder)))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit(
                f"of {world} ranks some failed: {[process.exitcode for process in ranks]}"
            )
        first, *others = json.loads((Path(folder) / "costs.json").read_text())
    means = lambda part, what: statistics.fmean(of[part][what] for of in others)  # noqa: E731
    return {part: {f"{what}_0": first[part][what] for what in first[part]}
            | {what: means(part, what) for what in first[part]} for part in PARTS}  # fmt: skip


def table(found: dict[int, dict[str, dict[str, float]]]) -> str:
    """Lines of Markdown: per part MB and CPU milliseconds of rank 0 / of another rank."""
    counts = sorted(found)
    lines = ["part | what | " + " | ".join([*map(str, counts), f"{TARGET}, extrapolated"])]
    lines.append("|".join(["---"] * (len(counts) + 3)))
    for part in PARTS:
        for what, unit in (("bytes", 1e6), ("seconds", 1e-3)):
            values = [[found[n][part][f"{what}{of}"] / unit for of in ("_0", "")] for n in counts]
            if len(counts) > 1:
                share = (TARGET - counts[-1]) / (counts[-1] - counts[-2])
                values.append([b + (b - a) * share for a, b in zip(*values[-2:])])
            cells = [" / ".join(f"{max(0.0, x):,.3g}" for x in pair) for pair in values]
            lines.append(" | ".join([part, {"bytes": "MB", "seconds": "CPU ms"}[what], *cells]))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--tokens", type=int, default=2000, help="mean length of a response")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/bench"))
    options = parser.parse_args()
    found = {world: measure(world, options.tokens) for world in options.ranks}
    options.output_dir.mkdir(parents=True, exist_ok=True)
    (options.output_dir / "ranks.json").write_text(json.dumps(found, indent=1))
    print("rank 0 / another rank", table(found), sep="\n\n")


if __name__ == "__main__":
    main()
