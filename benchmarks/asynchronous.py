"""Seconds of a step with `--max_staleness 1`, beside the synchronous run and vLLM in process.

    python benchmarks/asynchronous.py [--quick]

One vLLM server has a core and the trainer has another one, with a thread each. The sides of a workload run in turn:
synchronous, one step ahead, and vLLM in process with both cores. The workloads have the settings of W2 (GRPO) but
one epoch, and the model of 5 million parameters. Writes ``runs/bench/asynchronous.json``.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from commands import REPO, run, tail
from make_assets import build_model, build_tokenizer, give_long_answers
from rollout_engines import server
from workloads import SCALES, SPECIAL_TOKENS, WORKLOADS, Scale, lightppo_flags, prompt_texts

MODEL = replace(SCALES["cpu"], prompt_tokens=(16, 16))
SLOW_REWARD_SECONDS = 2.0  # for all answers of a batch


@dataclass(frozen=True)
class AsyncWorkload:
    """Work of which sampling and training take about the same time."""

    name: str
    about: str
    prompts: int
    samples_per_prompt: int
    scale: Scale
    long_share: float = 0.0  # of the prompts, whose answers all have the greatest length
    reward_seconds: float = 0.0  # of a batch


ASYNC_WORKLOADS = {
    "plain": AsyncWorkload(
        "plain",
        "16 × 4 answers of 96 tokens",
        16,
        4,
        replace(MODEL, new_tokens=96, end_probability=1e-12),
    ),
    "skewed": AsyncWorkload(
        "skewed",
        "20 × 4 answers: 5% have 512 tokens, the others 32 on average",
        20,
        4,
        replace(MODEL, new_tokens=512, end_probability=1 / 32),
        long_share=0.05,
    ),
    "slow reward": AsyncWorkload(
        "slow reward",
        "16 × 6 answers of 46 tokens on average; their rewards take 2 s",
        16,
        6,
        replace(MODEL, new_tokens=128, end_probability=1 / 46),
        reward_seconds=SLOW_REWARD_SECONDS,
    ),
}


@dataclass(frozen=True)
class Side:
    """One way to run the same work."""

    flags: tuple[str, ...]
    cores: tuple[int, ...]  # of the trainer; the server has core 0


SIDES = {
    "synchronous": Side(("--max_staleness", "0"), (1,)),
    "ahead": Side(("--max_staleness", "1"), (1,)),
    "in process": Side((), (0, 1)),
}
# Added where rewards are slow, as who waits for them would.
_RIVAL_WITH_SLOW_REWARD = ("--async_rewards",)


class BusyTimes:
    """Read the processor time of the server and of the trainer, with the time of day."""

    def __init__(self, server_pid: int | None) -> None:
        self.server_pid = server_pid
        self.readings: list[tuple[float, float, float]] = []  # time, server, trainer

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read until the block ends; processes are looked for seldom, since that takes time itself."""
        ended = threading.Event()

        def read() -> None:
            for i in itertools.count():
                if ended.wait(0.2):
                    return
                if i % 25 == 0:
                    server_processes, trainer_processes = self._processes()
                of_server, of_trainer = map(busy_seconds, (server_processes, trainer_processes))
                self.readings.append((time.time(), of_server, of_trainer))

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _processes(self) -> tuple[list[psutil.Process], list[psutil.Process]]:
        """Return those of the server, and all others that this process has started."""
        of_server = []
        if self.server_pid is not None:
            server_process = psutil.Process(self.server_pid)
            of_server = [server_process, *server_process.children(recursive=True)]
        all_processes = psutil.Process().children(recursive=True)
        return of_server, [process for process in all_processes if process not in of_server]

    def between(self, start: float, end: float) -> tuple[float, float]:
        """Return how many cores server and trainer kept busy."""
        inside = [reading for reading in self.readings if start <= reading[0] <= end]
        first, last = inside[0], inside[-1]
        seconds = last[0] - first[0]
        return (last[1] - first[1]) / seconds, (last[2] - first[2]) / seconds


def busy_seconds(processes: Sequence[psutil.Process]) -> float:
    """Return the processor seconds of those that still run."""
    total = 0.0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def pinned(cores: Sequence[int]) -> list[str]:
    """Return what a command begins with to run on these cores alone."""
    return ["taskset", "--cpu-list", ",".join(map(str, cores))]


def make_assets(workload: AsyncWorkload, folder: Path) -> None:
    """Write model, prompts and the reward function of a workload."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model = build_model(workload.scale)
    long_prompts = round(workload.prompts * workload.long_share)
    if long_prompts:
        give_long_answers(model, workload.scale)
    model.save_pretrained(folder / "model")
    build_tokenizer(workload.scale).save_pretrained(folder / "model")
    texts = prompt_texts(replace(WORKLOADS["W2"], prompts=workload.prompts), workload.scale)
    middle = workload.scale.vocabulary // 2
    for i, text in enumerate(texts):
        last_word = middle + i if i < long_prompts else len(SPECIAL_TOKENS) + i
        texts[i] = f"{text.rpartition(' ')[0]} w{last_word}"
    rows = [{"input": text, "label": ""} for text in texts]
    (folder / "W2.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    seconds = workload.reward_seconds / (workload.prompts * workload.samples_per_prompt)
    (folder / "reward.py").write_text(
        "import time\n\n\n"
        "def compute_score(solution_str, ground_truth):\n"
        f"    time.sleep({seconds})\n"
        "    return float(len(solution_str.split()) % 2 == 0)\n"
    )


def pinned_server(workload: AsyncWorkload, folder: Path) -> Any:
    """Return a vLLM server on the first core, as a context that gives its address and process."""
    return server(
        folder / "assets" / "model",
        folder / "server.log",
        sequences=workload.prompts * workload.samples_per_prompt,
        longest=workload.scale.prompt_tokens[1] + workload.scale.new_tokens,
        before=pinned([0]),
        **variables(1),
    )


def variables(threads: int) -> dict[str, str]:
    """Return those of the environment; affinity is set from outside alone."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "DS_ACCELERATOR": "cpu",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": str(REPO),
    }


def measure(
    workload: AsyncWorkload,
    name: str,
    address: tuple[str, int] | None,
    folder: Path,
    options: argparse.Namespace,
) -> list[dict[str, float]]:
    """Run the side of that name; return its steps without those that warm up."""
    side = SIDES[name]
    output = folder / name.replace(" ", "-")
    shutil.rmtree(output, ignore_errors=True)
    work = replace(
        WORKLOADS["W2"],
        prompts=workload.prompts,
        samples_per_prompt=workload.samples_per_prompt,
        epochs=1,
    )
    steps = options.warm_up + options.iterations + 1  # nothing is sampled while the last one trains
    flags = lightppo_flags(work, workload.scale, folder / "assets", output, steps)
    flags += ["--reward_fn", str(folder / "assets" / "reward.py"), "--reward_workers", "1"]
    flags += side.flags
    if address is not None:
        flags += ["--rollout_engine", "vllm_server", "--vllm_server_url", address[0]]
    else:
        flags += ["--rollout_engine", "vllm", "--max_num_seqs", str(work.samples)]
        flags += _RIVAL_WITH_SLOW_REWARD if workload.reward_seconds else ()
    busy_times = BusyTimes(None if address is None else address[1])
    with busy_times.reading():
        run(
            [*pinned(side.cores), sys.executable, "examples/train_ppo.py", *flags],
            log=output.with_suffix(".log"),
            timeout=options.timeout,
            **variables(len(side.cores)),
        )
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "perf/time_step" in row]
    return [
        step_numbers(row, before["time"], busy_times)
        for before, row in list(itertools.pairwise(rows))[options.warm_up - 1 : -1]
    ]


def step_numbers(row: dict[str, float], start: float, busy_times: BusyTimes) -> dict[str, float]:
    """Return what counts of a step that began at ``start``; seconds end with the next step's beginning."""
    server_busy, trainer_busy = busy_times.between(start, row["time"])
    return {
        "seconds": row["time"] - start,
        "sampling": row["perf/time_rollout"],
        "rewards": row["perf/time_reward"],
        "push": row["perf/time_sync"],
        "server_busy": server_busy,
        "trainer_busy": trainer_busy,
        "staleness": row.get("rollout/staleness", 0.0),
        "response_length": row["rollout/response_length"],
    }


def side_result(steps: list[dict[str, float]]) -> dict[str, Any]:
    """Return the medians of all steps of a side, and their seconds one by one."""
    medians = {name: statistics.median(step[name] for step in steps) for name in steps[0]}
    return medians | {"steps": [step["seconds"] for step in steps]}


def workload_result(workload: AsyncWorkload, sides: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the sides, the parts of a synchronous step, and the least seconds that overlapping can reach."""
    synchronous = sides["synchronous"]
    sampling, rewards, push = (synchronous[name] for name in ("sampling", "rewards", "push"))
    training = synchronous["seconds"] - sampling - rewards - push
    limit = max(sampling + rewards, training) + push
    parts = {"sampling": sampling, "rewards": rewards, "training": training, "push": push}
    ratios = {name: side["seconds"] / synchronous["seconds"] for name, side in sides.items()}
    return {
        "about": workload.about,
        "parts": parts,
        "limit": limit,
        "sides": {name: side | {"ratio": ratios[name]} for name, side in sides.items()},
    }


def measure_workload(
    workload: AsyncWorkload, folder: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Run the sides of a workload in turn, each as often as there are rounds."""
    folder = folder / "asynchronous" / workload.name.replace(" ", "-")
    make_assets(workload, folder / "assets")
    steps: dict[str, list[dict[str, float]]] = {name: [] for name in options.sides}
    for _ in range(options.rounds):
        with pinned_server(workload, folder) as address:
            for name in ("synchronous", "ahead"):
                steps[name] += measure(workload, name, address, folder, options)
        if "in process" in steps:
            steps["in process"] += measure(workload, "in process", None, folder, options)
    return workload_result(workload, {name: side_result(one) for name, one in steps.items()})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run_dir", type=Path, default=Path("runs/bench"))
    parser.add_argument(
        "--workloads", nargs="+", choices=ASYNC_WORKLOADS, default=list(ASYNC_WORKLOADS)
    )
    parser.add_argument(
        "--without_rival", dest="sides", action="store_const", const=list(SIDES)[:2],
        default=list(SIDES), help="leave vLLM in process out",
    )  # fmt: skip
    parser.add_argument("--iterations", type=int, default=4, help="measured steps of a run")
    parser.add_argument("--warm_up", type=int, default=2, help="steps before them, at least one")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side, in turn")
    parser.add_argument("--quick", action="store_true", help="one measured step: does it work?")
    parser.add_argument("--timeout", type=float, default=900, help="seconds of one run")
    options = parser.parse_args()
    if options.quick:
        options.iterations = options.rounds = 1
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("this needs two cores: one for the server, one for the trainer")
    folder = options.run_dir.resolve()
    log = folder / "logs" / "machine.log"
    run([sys.executable, "benchmarks/machine.py"], log=log, timeout=300, OMP_NUM_THREADS="1")
    file = folder / "asynchronous.json"
    result: dict[str, Any] = {
        "machine": json.loads(tail(log, 1)),
        "date": datetime.date.today().isoformat(),
        "load": os.getloadavg()[0],
        "steps": options.iterations * options.rounds,
        "workloads": {},
    }
    for name in options.workloads:
        result["workloads"][name] = measure_workload(ASYNC_WORKLOADS[name], folder, options)
        file.write_text(json.dumps(result, indent=1) + "\n")
        for side, numbers in result["workloads"][name]["sides"].items():
            print(f"{name}, {side}: {numbers['seconds']:.2f} s, {numbers['ratio']:.2f}")
    print(f"{file}; the table of docs/asynchronous.md: python benchmarks/report.py --write")


if __name__ == "__main__":
    main()
