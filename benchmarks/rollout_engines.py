"""Tokens per second of each rollout engine, and what pushing weights costs.

    python benchmarks/rollout_engines.py [--quick]

All engines sample the same prompts with the model of W1 in batches of 32, 64 and 128 responses, whose lengths spread
from one token to 128. Then weights are pushed: into engines of models of 5 and 100 million parameters, to servers by
files and by torch.distributed, and in whole steps of W1 (64 prompts). Writes ``runs/bench/rollout_engines.json``.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from commands import REPO, run, tail
from workloads import SCALES, WORKLOADS, lightppo_flags, prompt_texts

ENGINES = ("hf", "vllm", "vllm_server")
BATCHES = (32, 64, 128)
# Changes of the scale "cpu", which has 5 million parameters.
MODELS = {
    "5M": {},
    "100M": {
        "hidden": 768,
        "layers": 12,
        "heads": 12,
        "kv_heads": 12,
        "intermediate": 2048,
        "vocabulary": 8192,
    },
}
# Each way of pushing weights: engine and --vllm_server_sync.
PUSHES = {
    "vllm": ("vllm", "auto"),
    "vllm_server, by files": ("vllm_server", "auto"),
    "vllm_server, collective": ("vllm_server", "collective"),
}


def engine_and_prompts(options: argparse.Namespace) -> tuple[Any, Any, list[Any], dict[str, float]]:
    """(engine, actor, prompts, what it took), in a world of this process alone."""
    from transformers import AutoTokenizer

    from lightppo.config import PPOConfig
    from lightppo.data.records import Prompt
    from lightppo.distributed.deepspeed import DeepspeedStrategy
    from lightppo.models.actor import Actor
    from lightppo.models.loading import valid_vocab_size
    from lightppo.trainer.build import build_rollout_engine

    scale = replace(SCALES["cpu"], **MODELS[options.model])
    folder = str(options.assets / options.model / "model")
    count = max(options.batches)
    given: dict[str, Any] = {}
    if options.engine == "vllm_server":
        given = {"vllm_server_url": tuple(options.url), "vllm_server_sync": options.sync}
    given |= {"max_num_seqs": count} if options.engine == "vllm" else {}
    config = PPOConfig.from_flat(
        pretrain=folder,
        rollout_engine=options.engine,
        prompt_max_len=scale.prompt_tokens[1],
        generate_max_len=scale.new_tokens,
        micro_rollout_batch_size=count,
        **given,
    ).resolved()
    strategy = DeepspeedStrategy(zero_stage=0)
    strategy.setup_distributed()
    actor, tokenizer = Actor(folder), AutoTokenizer.from_pretrained(folder)
    actor.valid_vocab_size = valid_vocab_size(tokenizer)
    start = time.perf_counter()
    engine = build_rollout_engine(config, strategy, actor, tokenizer)
    seconds = time.perf_counter() - start
    texts = prompt_texts(replace(WORKLOADS["W1"], prompts=count), scale)
    return (
        engine,
        actor,
        [Prompt(text, tokenizer.encode(text), index=i) for i, text in enumerate(texts)],
        {"build_seconds": seconds},
    )


def child(options: argparse.Namespace) -> None:
    """One engine, measured; the last line of the output is the result."""
    from lightppo.rollout.engine import SamplingParams

    engine, actor, prompts, result = engine_and_prompts(options)
    try:
        if options.pushes:
            seconds = []
            for _ in range(options.pushes + 1):  # the first one to warm up
                start = time.perf_counter()
                engine.sync_weights(actor)
                seconds.append(time.perf_counter() - start)
            result["push_seconds"] = statistics.median(seconds[1:])
            result["parameters"] = sum(p.numel() for p in actor.parameters())
        for batch in options.batches if not options.pushes else ():
            sampling = SamplingParams(max_new_tokens=SCALES["cpu"].new_tokens)
            engine.generate(prompts[:8], replace(sampling, max_new_tokens=16))  # warm up
            rounds = []
            for seed in range(1, options.rounds + 1):
                start = time.perf_counter()
                rollouts = engine.generate(prompts[:batch], replace(sampling, seed=seed))
                tokens = sum(len(rollout.response_ids) for rollout in rollouts)
                rounds.append(tokens / (time.perf_counter() - start))
            result[str(batch)] = statistics.median(rounds)
    finally:
        engine.close()
    print("\n" + json.dumps(result), flush=True)


@contextmanager
def server(
    model: Path,
    log: Path,
    *,
    sequences: int,
    longest: int,
    before: Sequence[str] = (),
    **variables: str,
) -> Iterator[tuple[str, int]]:
    """Give the address and the process of a vLLM server, which ends with the block.

    Args:
        model: its folder.
        log: file for its output.
        sequences: most responses at a time.
        longest: tokens of a prompt and its response.
        before: words before the command.
        **variables: of the environment, beside this process's own.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [*before, sys.executable, "examples/serve_vllm.py", "--model", model, "--port", port]
    words += ["--dtype", "float32", "--max-num-seqs", sequences, "--max-model-len", longest]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(map(str, words)),
            cwd=REPO,
            stdout=output,
            stderr=output,
            env=os.environ | variables,
        )
        try:
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def measure(
    engine: str, model: str, folder: Path, options: argparse.Namespace, **more: Any
) -> dict[str, Any]:
    """One child, with a server beside it where the engine needs one."""
    name = f"rollout-{engine}-{model}" + (f"-push-{more['sync']}" if more.get("pushes") else "")
    words = [
        sys.executable,
        Path(__file__),
        "--engine",
        engine,
        "--model",
        model,
        "--rounds",
        options.rounds,
    ]
    words += ["--assets", folder / "rollout-assets", "--batches", *options.batches]
    words += [word for key, value in more.items() for word in (f"--{key}", value)]
    log = folder / "logs" / f"{name}.log"

    def start(*url: object) -> dict[str, Any]:
        run([*words, *url], log=log, timeout=options.timeout, OMP_NUM_THREADS=str(options.threads),
            DS_ACCELERATOR="cpu", PYTHONPATH=str(REPO))  # fmt: skip
        return json.loads(tail(log, 1))

    if engine != "vllm_server":
        return start()
    with server(
        folder / "rollout-assets" / model / "model",
        folder / "logs" / "rollout-server.log",
        sequences=max(BATCHES),
        longest=SCALES["cpu"].prompt_tokens[1] + SCALES["cpu"].new_tokens,
        OMP_NUM_THREADS=str(options.threads),
    ) as (url, _):
        return start("--url", url)


def step_share(engine: str, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Seconds of a step of W1 and of its push, medians without the first step."""
    output, log = folder / "rollout-step" / engine, folder / "logs" / f"rollout-step-{engine}.log"
    shutil.rmtree(output, ignore_errors=True)
    assets = folder / "rollout-assets" / "5M"
    flags = lightppo_flags(WORKLOADS["W1"], SCALES["cpu"], assets, output, options.rounds + 1)
    run([sys.executable, "examples/train_ppo.py", *flags, "--rollout_engine", engine], log=log,
        timeout=options.timeout, OMP_NUM_THREADS=str(options.threads), DS_ACCELERATOR="cpu")  # fmt: skip
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "perf/time_step" in row][1:]
    shutil.rmtree(folder / "rollout-step")
    return {
        "step_seconds": statistics.median(row["perf/time_step"] for row in rows),
        "rollout_seconds": statistics.median(row["perf/time_rollout"] for row in rows),
        "push_seconds": statistics.median(row["perf/time_sync"] for row in rows),
    }


def parent(options: argparse.Namespace) -> None:
    folder = options.run_dir.resolve()
    log = folder / "logs" / "machine.log"
    run(
        [sys.executable, "benchmarks/machine.py"],
        log=log,
        timeout=300,
        OMP_NUM_THREADS=str(options.threads),
    )
    result: dict[str, Any] = {
        "machine": json.loads(tail(log, 1)),
        "date": datetime.date.today().isoformat(),
    }
    result |= {
        "load": os.getloadavg()[0],
        "rounds": options.rounds,
        "engines": {},
        "push": {},
        "step": {},
    }
    engines = [
        e for e in options.engines if e == "hf" or importlib.util.find_spec("vllm") is not None
    ]
    for model, changes in MODELS.items():
        words = [
            sys.executable,
            "benchmarks/make_assets.py",
            "--output_dir",
            folder / "rollout-assets" / model,
        ]
        log = folder / "logs" / f"rollout-assets-{model}.log"
        run([*words, "--changes", json.dumps(changes)], log=log, timeout=600)
    for engine in engines:
        result["engines"][engine] = measure(engine, "5M", folder, options)
        print(
            f"{engine}: "
            + ", ".join(f"{b}: {result['engines'][engine][str(b)]:,.0f}/s" for b in options.batches)
        )
    for way, (engine, sync) in PUSHES.items():
        if engine in engines:
            row = {
                m: measure(engine, m, folder, options, pushes=options.rounds, sync=sync)
                for m in MODELS
            }
            result["push"][way] = row
    for engine in (e for e in engines if e != "vllm_server"):
        result["step"][engine] = step_share(engine, folder, options)
    shutil.rmtree(folder / "rollout-assets")
    (folder / "rollout_engines.json").write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run_dir", type=Path, default=Path("runs/bench"))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument(
        "--batches", nargs="+", type=int, default=list(BATCHES), help="responses sampled together"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="of each measurement; the median counts"
    )
    parser.add_argument("--quick", action="store_true", help="one round, one batch")
    parser.add_argument(
        "--threads", type=int, default=min(2, os.cpu_count() or 1), help="OMP_NUM_THREADS"
    )
    parser.add_argument("--timeout", type=float, default=900, help="seconds of one run")
    own = parser.add_argument_group("one engine, as the benchmark starts it")
    own.add_argument("--engine", choices=ENGINES)
    own.add_argument("--model", choices=MODELS, default="5M")
    own.add_argument("--assets", type=Path)
    own.add_argument(
        "--pushes", type=int, default=0, help="push weights so often instead of sampling"
    )
    own.add_argument(
        "--sync", choices=("auto", "collective"), default="auto", help="how servers get weights"
    )
    own.add_argument("--url", nargs="+", default=[])
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.batches = 1, options.batches[:1]
    (child if options.engine else parent)(options)


if __name__ == "__main__":
    main()
