"""How far the log probs of a rollout engine are from the trainer's, by type of the weights.

    python benchmarks/precision.py [--model FOLDER ...] [--engines hf hf_invariant vllm]
        [--dtypes float32 bfloat16 float16]

Each engine samples responses at temperature 1, and the actor, with the same weights in the same type, scores them as at
training. ``hf_invariant`` is ``hf`` with ``--batch_invariant``; the seconds of sampling and scoring tell what it costs.
Without ``--model``: a model of two layers, and the one of W1, with random weights. Such logits are all alike, and no
rounding shows; so random weights are made as large as trained ones (``--logit_std``). On a GPU where there is one. Prints
a table, writes ``runs/bench/precision.json``, and with ``--write`` the table in docs/rollouts.md. Seconds are those of
the CPU.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

from commands import REPO, run, tail
from workloads import SCALES

PAGE = REPO / "docs" / "rollouts.md"
ENGINES, DTYPES = ("hf", "hf_invariant", "vllm"), ("float32", "float16", "bfloat16")
# Changes of the scale "cpu", which is the model of W1.
MODELS = {
    "tiny": {"hidden": 64, "layers": 2, "heads": 2, "kv_heads": 1, "intermediate": 96},
    "5M": {},
}


def as_if_trained(model: Any, logit_std: float) -> None:
    """Scales random weights: matrices of layers keep the size of what they are multiplied with, and the head gives
    logits of this standard deviation."""
    import torch

    ids = torch.randint(
        model.config.vocab_size, (4, 32), generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".layers." in name and weight.dim() == 2:
                weight /= weight.std() * weight.shape[1] ** 0.5
        model.get_output_embeddings().weight *= (
            logit_std / model(ids.to(model.device)).logits.std(dim=-1).mean()
        )


def measure(
    model: str,
    engine: str,
    dtype: str,
    responses: int = 32,
    prompt_tokens: int = 32,
    new_tokens: int = 128,
    logit_std: float | None = None,
) -> dict[str, Any]:
    """The mismatch of one engine, in a world of this process alone: ``logp_diff_mean``, and what a training run logs
    under ``rollout/mismatch_``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from lightppo.algorithms.kl import mismatch_terms
    from lightppo.config import PPOConfig
    from lightppo.data.records import Prompt
    from lightppo.distributed.deepspeed import DeepspeedStrategy
    from lightppo.experience.experience import Experience
    from lightppo.logging.step_metrics import Summary, mismatch_metrics
    from lightppo.models.actor import Actor
    from lightppo.models.kernels.invariant import make_invariant
    from lightppo.models.loading import valid_vocab_size
    from lightppo.rollout.engine import SamplingParams
    from lightppo.trainer.build import build_rollout_engine

    options: dict[str, Any] = {"prompt_max_len": prompt_tokens, "generate_max_len": new_tokens}
    options |= {"max_num_seqs": responses} if engine == "vllm" else {}
    is_invariant = engine == "hf_invariant"
    config = PPOConfig.from_flat(
        pretrain=model,
        rollout_engine=engine.removesuffix("_invariant"),
        micro_rollout_batch_size=responses,
        batch_invariant=is_invariant,
        **options,
    ).resolved()
    strategy = DeepspeedStrategy(zero_stage=0)
    strategy.setup_distributed()
    tokenizer = AutoTokenizer.from_pretrained(model)
    weights = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(strategy.device)
    if logit_std is not None:
        as_if_trained(weights, logit_std)
    # only the parameters: training, too, keeps the frequencies of rotary embeddings in float32
    for parameter in weights.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))
    actor = Actor(weights, packing_samples=True).eval()
    if is_invariant:
        make_invariant(actor.hf_model, strategy.device)
    actor.valid_vocab_size = valid_vocab_size(tokenizer)
    sampler = build_rollout_engine(config, strategy, actor, tokenizer)
    draw = random.Random(0).randrange
    ids = range(max(tokenizer.all_special_ids, default=0) + 1, len(tokenizer))
    prompts = [
        Prompt("", [ids[draw(len(ids))] for _ in range(prompt_tokens)], index=i)
        for i in range(responses)
    ]
    sampling = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    try:
        sampler.generate(prompts[:1], sampling)  # what the first call alone does
        start = time.process_time()
        rollouts = sampler.generate(prompts, sampling)
        sampled_in = time.process_time() - start
    finally:
        sampler.close()
    found: dict[str, list[Any]] = {}
    start = time.process_time()
    for first in range(0, responses, 8):
        batch = Experience.from_rollouts(rollouts[first : first + 8])
        batch.to_device(strategy.device)
        with torch.no_grad():
            scores = actor.score_actions(batch.sequences, batch.num_actions, batch.attention_mask)
        terms = mismatch_terms(scores.log_probs, batch.rollout_log_probs, batch.action_mask)
        for name, values in terms.items():
            found.setdefault(name, []).append(values)
    scored_in = time.process_time() - start
    summaries = {name: Summary.of(torch.cat(values)) for name, values in found.items()}
    difference = summaries["logp_diff"]
    return {
        "engine": engine,
        "dtype": dtype,
        "device": strategy.device.type,
        "parameters": sum(p.numel() for p in actor.parameters()),
        "tokens": difference.count,
        "sampling_s": sampled_in,
        "scoring_s": scored_in,
        "logp_diff_mean": difference.mean,
        **mismatch_metrics(summaries),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """As docs/rollouts.md has it."""
    lines = [
        "model | engine | type | mean | largest | KL (k3) | sampling, s | scoring, s",
        "---|---|---|---:|---:|---:|---:|---:",
    ]
    for row in rows:
        numbers = (row["logp_diff_mean"], row["logp_diff_max"], row["k3_kl"])
        name = f"{row['parameters'] / 1e6:.1f}M"
        lines.append(
            f"{name} | `{row['engine']}` | {row['dtype']} | "
            + " | ".join(f"{n:.1e}" for n in numbers)
            + f" | {row['sampling_s']:.1f} | {row['scoring_s']:.1f}"
        )
    return "\n".join(lines)


def parent(options: argparse.Namespace) -> None:
    """Every engine in a process of its own, since vLLM's is one for a process's whole life."""
    folder = options.run_dir.resolve()
    variables = {"OMP_NUM_THREADS": str(options.threads), "PYTHONPATH": str(REPO)}
    models, rows = [Path(model).resolve() for model in options.model], []
    logit_std = 3.0 if options.logit_std is None and not models else options.logit_std
    for name, changes in MODELS.items() if not models else ():
        models.append(folder / "precision-assets" / name / "model")
        words = [sys.executable, "benchmarks/make_assets.py", "--output_dir", models[-1].parent]
        log = folder / "logs" / f"precision-assets-{name}.log"
        run([*words, "--changes", json.dumps(changes)], log=log, timeout=600)
    for model in models:
        for engine in (
            e
            for e in options.engines
            if e != "vllm" or importlib.util.find_spec("vllm") is not None
        ):
            for dtype in options.dtypes:
                log = folder / "logs" / f"precision-{model.parent.name}-{engine}-{dtype}.log"
                words = [sys.executable, Path(__file__), "--one", model, engine, dtype]
                words += ["--responses", options.responses, "--new_tokens", options.new_tokens]
                words += ["--logit_std", logit_std] if logit_std is not None else []
                run(words, log=log, timeout=options.timeout, **variables)
                rows.append({"model": str(model), **json.loads(tail(log, 1))})
    result = {"date": datetime.date.today().isoformat(), "rows": rows}
    (folder / "precision.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{table(rows)}")
    if options.write:
        marks = r"(?s)(<!-- precision[^\n]*-->\n).*?(<!-- end of precision -->)"
        text = re.sub(marks, lambda mark: f"{mark[1]}{table(rows)}\n{mark[2]}", PAGE.read_text())
        PAGE.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run_dir", type=Path, default=Path("runs/bench"))
    parser.add_argument(
        "--model", nargs="+", default=[], help="folders of checkpoints, with tokenizers"
    )
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument(
        "--logit_std", type=float, help="scale random weights; default: 3 without --model"
    )
    parser.add_argument("--responses", type=int, default=32)
    parser.add_argument(
        "--new_tokens", type=int, default=SCALES["cpu"].new_tokens, help="longest response"
    )
    parser.add_argument(
        "--threads", type=int, default=min(2, os.cpu_count() or 1), help="OMP_NUM_THREADS"
    )
    parser.add_argument("--timeout", type=float, default=900, help="seconds of one engine")
    parser.add_argument("--write", action="store_true", help="the table into docs/rollouts.md")
    parser.add_argument(
        "--one",
        nargs=3,
        metavar=("MODEL", "ENGINE", "DTYPE"),
        help="this one alone, in this process",
    )
    options = parser.parse_args()
    sizes = {name: getattr(options, name) for name in ("responses", "new_tokens", "logit_std")}
    if options.one:
        print("\n" + json.dumps(measure(*options.one, **sizes)))
    else:
        parent(options)


if __name__ == "__main__":
    main()
