"""Parts of gpu_check.py that are commands of their own: runs of the trainer, TRL, vLLM alone, tests."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import sys
import time
import xml.etree.ElementTree
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commands import REPO, run, tail
from gpu_kernels import RUN, lacks
from workloads import SCALES, VLLM_MEMORY, WORKLOADS, Workload, lightppo_flags

if TYPE_CHECKING:
    from gpu_check import Rows


def on(device: str) -> dict[str, str]:
    """The environment of a process there."""
    return (
        {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        if device == "cpu"
        else {"DS_ACCELERATOR": "cuda"}
    )


def ppo(
    rows: Rows, name: str, scale: str, flags: list[str], steps: tuple[int, ...], device: str = ""
) -> list[dict]:
    """The metrics of a run, ``steps`` after each other: the second and further ones resume from a checkpoint."""
    folder = rows.file.parent / "runs" / name.replace(" ", "-").replace(",", "")
    shutil.rmtree(folder, ignore_errors=True)
    work = replace(WORKLOADS["W1"], prompts=8, minibatch=4)
    for last in steps:
        words = lightppo_flags(work, SCALES[scale], rows.assets(scale), folder, last)
        # left to the run: rows by the GPU's memory, and which of both scores
        for left in (
            "--micro_rollout_batch_size",
            *(["--reward_fn"] if "--reward_pretrain" in flags else []),
        ):
            at = words.index(left)
            del words[at : at + 2]
        if "--rollout_engine" in flags and "--hf_cuda_graphs" in words:
            words.remove("--hf_cuda_graphs")
        words += [
            "--max_samples",
            str(work.prompts),
            "--resume",
            "auto",
            "--save_steps",
            str(steps[0]),
            *flags,
        ]
        run([sys.executable, "examples/train_ppo.py", *words], log=rows.logs / f"ppo-{folder.name}.log",
            timeout=600, TOKENIZERS_PARALLELISM="false", **on(device or rows.device))  # fmt: skip
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(folder)
    return [row for row in found if "perf/time_step" in row]


ZERO: dict[str, list[str]] = {
    "ZeRO 0": ["--zero_stage", "0"],
    "ZeRO 1": ["--zero_stage", "1"],
    "ZeRO 2": ["--zero_stage", "2"],
    "ZeRO 3": ["--zero_stage", "3"],
    "ZeRO 2, Adam offloaded": ["--zero_stage", "2", "--adam_offload"],
    "ZeRO 3, all offloaded": [
        "--zero_stage",
        "3",
        "--adam_offload",
        "--param_offload",
        "--ref_offload",
    ],
    "ZeRO 2, bf16": ["--zero_stage", "2", "--bf16"],
    "ZeRO 3, bf16": ["--zero_stage", "3", "--bf16"],
}
COMPARED = ("train/policy_loss", "train/critic_loss", "train/actor_grad_norm", "train/critic_grad_norm", "rollout/kl",
            "rollout/response_length")  # fmt: skip


def zero(rows: Rows) -> None:
    """Two PPO steps, a checkpoint, two more after resuming, against four steps on a CPU."""
    reason = lacks(*RUN)

    def reference() -> dict[str, Any]:
        found = ppo(rows, "CPU", "tiny", ZERO["ZeRO 0"], (4,), "cpu")
        return {"by_step": [{key: row[key] for key in COMPARED if key in row} for row in found]}

    def measure(name: str, flags: list[str]) -> dict[str, Any]:
        found, by_cpu = ppo(rows, name, "tiny", flags, (2, 4)), rows("CPU", reference)["by_step"]
        keys = [key for key in COMPARED if key in by_cpu[0]]
        if len(found) != 4 or not all(
            math.isfinite(row.get(key, math.nan)) for row in found for key in keys
        ):
            raise ValueError(
                f"{len(found)} steps: {[{key: row.get(key) for key in keys} for row in found]}"
            )
        # rounding draws other tokens: these runs are only as long, and finite
        if "--bf16" in flags:
            return {"steps": len(found)}
        off = {
            key: max(abs(a[key] - b[key]) / max(abs(b[key]), 1e-2) for a, b in zip(found, by_cpu))
            for key in keys
        }
        worst = max(off, key=off.get)
        if off[worst] >= 0.02:
            raise ValueError(f"off by {off[worst]:.3g} of the CPU's {worst}")
        return {
            "steps": len(found),
            "compared": len(keys),
            "largest_difference": off[worst],
            "of": worst,
        }

    rows("CPU", reference, reason)
    for name, flags in ZERO.items():
        rows(name, partial(measure, name, flags), reason)


def adapters(rows: Rows) -> None:
    """LoRA, 4 bits, and a reward model and a critic at ZeRO-3: two steps and two more after resuming."""
    reason, precision = lacks(*RUN), [] if rows.small else ["--bf16"]

    def reward_model() -> str:
        import torch
        from make_assets import llama_config
        from transformers import AutoModelForSequenceClassification

        folder = rows.assets() / "reward"
        if not folder.is_dir():
            config = llama_config(SCALES[rows.scale])
            config.num_labels = 1
            made = AutoModelForSequenceClassification.from_config(config, dtype=torch.bfloat16)
            made.save_pretrained(folder)
            for file in folder.parent.joinpath("model").glob("tokenizer*"):
                shutil.copy(file, folder)
        return str(folder)

    def measure(name: str, *flags: str, scored: bool = False) -> dict[str, Any]:
        more = ["--reward_pretrain", reward_model()] if scored else []
        found = ppo(rows, name, rows.scale, [*precision, *flags, *more], (2, 4))
        numbers = {key: found[-1][key] for key in COMPARED[:4] if key in found[-1]}
        if not all(abs(value) < 1e6 for value in numbers.values()):
            raise ValueError(f"not finite: {numbers}")
        return {
            "steps": len(found),
            "step_s": statistics.median(row["perf/time_step"] for row in found),
        } | numbers

    lora, qlora = ["--lora_rank", "8"], ["--lora_rank", "8", "--load_in_4bit"]
    rows("LoRA", lambda: measure("LoRA", *lora, "--zero_stage", "2"), reason or lacks("peft"))
    rows(
        "LoRA, ZeRO 3",
        lambda: measure("LoRA 3", *lora, "--zero_stage", "3"),
        reason or lacks("peft"),
    )
    rows(
        "QLoRA",
        lambda: measure("QLoRA", *qlora, "--zero_stage", "2"),
        reason or lacks("peft", "bitsandbytes"),
    )
    rows(
        "reward model and critic, ZeRO 3",
        lambda: measure("scored", "--zero_stage", "3", scored=True),
        reason,
    )


def bench(rows: Rows) -> None:
    """W1 and W2 of ``make bench`` on both sides."""
    both_sides(rows, list(WORKLOADS.values()), lacks(*RUN))


def bench_vllm(rows: Rows) -> None:
    """W2 with vLLM on both sides, in the process that trains."""
    reason = lacks("vllm") or lacks(*RUN)
    both_sides(rows, [replace(WORKLOADS["W2"], vllm=True)], reason)


def both_sides(rows: Rows, works: list[Workload], reason: str) -> None:
    """TRL and lightppo on the same work, in turn; ``reason``: why lightppo cannot run."""
    import compare

    options = argparse.Namespace(
        iterations=1 if rows.small else 3, threads=min(8, os.cpu_count() or 1), timeout=900,
        trl=rows.options.trl, trl_of_ppo=rows.options.trl_of_ppo,
    )  # fmt: skip
    folder, logs = rows.options.run_dir.resolve(), rows.logs
    at_hand = rows.options.trl or (folder / "trl" / ".installed").is_file() or not rows.small
    without = "" if at_hand else "TRL not there"
    if any(work.vllm for work in works):  # TRL's own environment has no vLLM: TRL runs in this one
        without = reason or without
        options.trl = options.trl or folder / "trl_beside_vllm"
        if not without and not (options.trl / "trl").is_dir():
            rows("TRL", lambda: compare.unpack_trl(options.trl, logs, 300))
    elif at_hand and not rows.options.trl and lacks("deepspeed") == "":
        rows(
            "TRL's environment",
            lambda: compare.install_trl(folder, logs, 600) or {"installed": True},
        )

    def side(work: Workload, which: str) -> dict[str, Any]:
        ran = compare.SIDES[which](work, rows.scale, folder, options, rows.assets())
        found = compare.together(
            [ran], work, rows.scale, rows.peak, shares_prompts=which == "lightppo"
        )
        kept = (
            "seconds",
            "mfu",
            "mfu_training",
            "generated_tokens_per_second",
            "trained_tokens_per_second",
        )
        row = {"iteration_s" if key == "seconds" else key: found[key] for key in kept}
        row |= {f"{phase}_s": value for phase, value in found["phases"].items()}
        theirs = rows.data["rows"].get(f"{work.title} TRL", {}).get("iteration_s")
        return row | (
            {"ratio": theirs / row["iteration_s"]} if which == "lightppo" and theirs else {}
        )

    for work in works:
        rows(f"{work.title} TRL", partial(side, work, "trl"), without)
        rows(f"{work.title} lightppo", partial(side, work, "lightppo"), reason)


def vllm(rows: Rows) -> None:
    """Rollouts and pushes with vLLM in the process beside vLLM alone; asleep while training, at both levels, and awake.

    On a GPU vLLM replays CUDA graphs, so log probs after pushes say whether these have the pushed weights.
    """
    reason = lacks("vllm") or lacks(*RUN)

    def alone() -> dict[str, Any]:
        words = [sys.executable, __file__, rows.assets(), rows.device]
        log = rows.logs / "vllm-alone.log"
        run(words, log=log, timeout=400, VLLM_ENABLE_V1_MULTIPROCESSING="0", **on(rows.device))
        return json.loads(tail(log, 1))

    def ours(name: str, *further: str) -> dict[str, Any]:
        flags = [
            *further,
            "--rollout_engine",
            "vllm",
            "--n_samples_per_prompt",
            "8",
            "--train_batch_size",
            "64",
        ]
        flags += ["--shuffle", "groups", *([] if rows.small else ["--bf16", "--zero_stage", "2"])]
        found = ppo(rows, name, rows.scale, [*flags, "--max_num_seqs", "64"], (4,))[1:]
        median = {
            key: statistics.median(row[key] for row in found)
            for key in found[0]
            if key.startswith("perf/time")
        }
        tokens = statistics.median(
            r["rollout/response_length"] * r["rollout/samples"] for r in found
        )
        row = {
            "tokens_per_second": tokens / median["perf/time_rollout"],
            "step_s": median["perf/time_step"],
        }
        row |= {
            "push_s": median["perf/time_sync"],
            "push_share": median["perf/time_sync"] / median["perf/time_step"],
        }
        row |= {
            f"logp_diff_{kind}": max(one[f"rollout/logp_diff_{kind}"] for one in found)
            for kind in ("mean", "max")
        }
        theirs = rows.data["rows"].get("vLLM alone", {}).get("tokens_per_second")
        return row | ({"of_vllm_alone": row["tokens_per_second"] / theirs} if theirs else {})

    rows("vLLM alone", alone, reason)
    rows("lightppo", partial(ours, "vllm"), reason)  # sleeps at level 2
    for name, further in {
        "adapter alone, sleeps at level 1": ("--lora_rank", "16"),
        "adapter merged, sleeps at level 2": ("--lora_rank", "16", "--vllm_lora_push", "merged"),
        "awake": ("--no_free_cache_engine",),
    }.items():
        rows(name, partial(ours, name, *further), reason)


def vllm_alone(folder: Path, device: str) -> None:
    """Tokens per second of 64 responses, as JSON in the last line."""
    from vllm import LLM, SamplingParams

    scale = SCALES["tiny" if device == "cpu" else "gpu"]
    lines = (folder / "W1.jsonl").read_text().splitlines()[:8]
    texts = [json.loads(line)["input"] for line in lines]
    options = {
        "max_num_seqs": 64,
        "max_model_len": scale.prompt_tokens[1] + scale.new_tokens,
        "seed": 0,
    }
    options |= {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 64 << 20} if device == "cpu" else {
        "dtype": "bfloat16", "gpu_memory_utilization": VLLM_MEMORY}  # fmt: skip
    engine, taken = LLM(model=str(folder / "model"), **options), []
    for seed in range(4):
        start = time.perf_counter()
        sampling = SamplingParams(
            n=8, max_tokens=scale.new_tokens, temperature=1.0, logprobs=0, seed=seed
        )
        done = engine.generate(texts, sampling, use_tqdm=False)
        tokens = sum(len(one.token_ids) for request in done for one in request.outputs)
        taken.append(tokens / (time.perf_counter() - start))
    print("\n" + json.dumps({"tokens_per_second": statistics.median(taken[1:])}), flush=True)


def tests(rows: Rows) -> None:
    """All tests with the marker ``gpu``, file by file."""
    for file in sorted(
        path for path in (REPO / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()
    ):
        rows(
            str(file.relative_to(REPO / "tests")),
            partial(tests_of, rows, file),
            lacks("pytest", "pytest_timeout"),
        )


def tests_of(rows: Rows, file: Path) -> dict[str, Any]:
    report, log = rows.logs / f"{file.stem}.xml", rows.logs / f"{file.stem}.log"
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
        file,
    ]
    report.unlink(missing_ok=True)
    try:
        run(words, log=log, timeout=400, **on(rows.device))
    except SystemExit:
        if not report.is_file():
            raise
    cases = list(xml.etree.ElementTree.parse(report).iter("testcase"))
    bad = [
        case.get("name")
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    if bad:
        raise AssertionError(
            f"{len(bad)} of {len(cases)} fail: {', '.join(map(str, bad))}\n{tail(log, 12)}"
        )
    return {"passed": len(cases) - skipped, "not_run": skipped}


def precision(rows: Rows) -> None:
    """How far each engine's log probs are from the trainer's, by type of the weights."""
    script = REPO / "benchmarks" / "precision.py"

    def measure(engine: str, dtype: str) -> dict[str, Any]:
        model = rows.assets("cpu" if rows.small else "gpu") / "model"
        words = [
            sys.executable,
            script,
            "--one",
            model,
            engine,
            dtype,
            "--responses",
            16,
            "--logit_std",
            3,
        ]
        log = rows.logs / f"precision-{engine}-{dtype}.log"
        run(
            [*words, "--new_tokens", 16 if rows.small else 128],
            log=log,
            timeout=300,
            **on(rows.device),
        )
        found = json.loads(tail(log, 1))
        return {key: found[key] for key in ("tokens", "logp_diff_mean", "logp_diff_max", "k3_kl")}

    for engine in ("hf", "vllm"):
        for dtype in ("float32", "float16", "bfloat16"):
            reason = lacks(*RUN, *(["vllm"] if engine == "vllm" else []))
            reason = reason if script.is_file() else "benchmarks/precision.py not there"
            rows(f"{engine} {dtype}", partial(measure, engine, dtype), reason)


if __name__ == "__main__":
    vllm_alone(Path(sys.argv[1]), sys.argv[2])
