"""One run of TRL on a workload; started by compare.py in TRL's own environment.

    PYTHONPATH=runs/bench/trl_ppo runs/bench/trl/bin/python benchmarks/trl_side.py --workload W1 --output FILE ...

TRL's trainers run as they are; what is added only looks at the clock and counts tokens. With ``--vllm`` its GRPO samples
with vLLM in this process, and pushes of weights count as generation.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
import transformers
from datasets import Dataset
from even_words import reward_of
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)
from workloads import REAL_WORKLOADS, SCALES, WORKLOADS, Workload, trl_settings


class Watch:
    """Times of the phases, tokens and optimizer steps, iteration by iteration."""

    def __init__(self) -> None:
        self.iterations: list[dict[str, float]] = []
        self.begin()
        register_optimizer_step_post_hook(self._count_step)

    def begin(self) -> None:
        """An iteration starts now."""
        self.start = time.perf_counter()
        self.now = {"generation": 0.0, "experience": 0.0, "optimizer_steps": 0}

    def add(self, **amounts: float) -> None:
        for name, amount in amounts.items():
            self.now[name] = self.now.get(name, 0) + amount

    def finish(self) -> None:
        """The iteration is over: what is neither generation nor experience is training."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self.start
        training = seconds - self.now["generation"] - self.now["experience"]
        self.iterations.append(self.now | {"seconds": seconds, "training": training})
        print(f"iteration {len(self.iterations)}: {seconds:.1f} s", flush=True)
        self.begin()

    def timed(self, phase: str, function: Callable) -> Callable:
        """The function, its time added to a phase."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.add(**{phase: time.perf_counter() - start})
            return result

        return run

    def _count_step(self, *_: Any) -> None:
        self.add(optimizer_steps=1)


class Iterations(TrainerCallback):
    """Tells the watch when an iteration of so many trainer steps is over."""

    def __init__(self, watch: Watch, steps: int) -> None:
        self.watch, self.steps, self.seen = watch, steps, 0

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.watch.begin()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.seen += 1
        if self.seen % self.steps == 0:
            self.watch.finish()


class EvenWords(torch.nn.Module):
    """The reward as the reward model that TRL's PPO asks for; costs nothing."""

    base_model_prefix = "model"

    def __init__(self, eos: int, pad: int) -> None:
        super().__init__()
        self.eos, self.pad = eos, pad
        self.model = self.words

    def words(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any
    ) -> SimpleNamespace:
        real = attention_mask.bool() & (input_ids != self.eos)
        return SimpleNamespace(hidden_states=[real.cumsum(dim=1)])

    def score(self, words: torch.Tensor) -> torch.Tensor:
        return (words % 2 == 0).unsqueeze(-1).float()  # even_words.reward_of of a tensor


def load(kind: type, folder: Path, **options: Any) -> torch.nn.Module:
    """Weights in float32, as masters of bf16 training too."""
    torch.manual_seed(0)  # of a new value head
    return kind.from_pretrained(folder, dtype=torch.float32, **options)


def ppo_trainer(workload: Workload, options: argparse.Namespace, watch: Watch):
    """TRL's PPO with its functions timed."""
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

    model = options.assets / "model"
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [{"input_ids": tokenizer(text)["input_ids"]} for text in options.prompts]
    pad = tokenizer.pad_token_id
    whiten, truncate = ppo_trainer.masked_whiten, ppo_trainer.truncate_response

    def counted_truncate(stop: int, pad_id: int, responses: torch.Tensor) -> torch.Tensor:
        result = truncate(stop, pad_id, responses)
        watch.add(generated_tokens=int((result != pad_id).sum()))
        return result

    def last_of_experience(*args: Any, **kwargs: Any) -> torch.Tensor:
        result = whiten(*args, **kwargs)
        watch.now["experience"] = time.perf_counter() - watch.start - watch.now["generation"]
        return result

    def counted_batch_generation(
        model: Any, queries: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        watch.add(prompt_tokens=int((queries != pad).sum()))
        return generation(model, queries, *args, **kwargs)

    generation = watch.timed("generation", ppo_trainer.batch_generation)
    ppo_trainer.batch_generation = counted_batch_generation
    ppo_trainer.truncate_response = counted_truncate
    ppo_trainer.masked_whiten = last_of_experience
    return PPOTrainer(
        args=PPOConfig(output_dir=options.scratch, whiten_rewards=False, **options.settings),
        processing_class=tokenizer,
        model=load(AutoModelForCausalLM, model),
        ref_model=load(AutoModelForCausalLM, model),
        reward_model=EvenWords(tokenizer.eos_token_id, pad),
        value_model=load(AutoModelForSequenceClassification, model, num_labels=1),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:1]),
        callbacks=[Iterations(watch, 1)],
    )


def grpo_trainer(workload: Workload, options: argparse.Namespace, watch: Watch):
    """TRL's GRPO with its methods timed."""
    from trl import GRPOConfig, GRPOTrainer

    model = options.assets / "model"
    tokenizer = AutoTokenizer.from_pretrained(model)

    def reward(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        words = [len(prompt.split()) + sum(i != tokenizer.eos_token_id for i in ids)
                 for prompt, ids in zip(prompts, completion_ids)]  # fmt: skip
        return [reward_of(number) for number in words]

    class Timed(GRPOTrainer):
        _generate = watch.timed("generation", GRPOTrainer._generate)

        def _generate_and_score_completions(self, inputs):
            start, before = time.perf_counter(), watch.now["generation"]
            output = super()._generate_and_score_completions(inputs)
            generated, prompts = (
                int(output["completion_mask"].sum()),
                int(output["prompt_mask"].sum()),
            )
            both = time.perf_counter() - start
            watch.add(generated_tokens=generated, prompt_tokens=prompts)
            watch.add(experience=both - (watch.now["generation"] - before))
            return output

    return Timed(
        model=load(AutoModelForCausalLM, model),
        reward_funcs=reward,
        args=GRPOConfig(output_dir=options.scratch, **options.settings),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": text} for text in options.prompts]),
        callbacks=[Iterations(watch, workload.optimizer_steps)],
    )


def keep_weights_loadable() -> None:
    """Have vLLM multiply by a layer's own weight, as on a GPU. On a CPU it drops that for a packed copy once it is
    loaded, and TRL's first push ends with ``'Parameter' object has no attribute 'weight_loader'``."""
    from vllm.model_executor.layers.linear import LinearBase

    LinearBase._cpu_skip_gemm_dispatch = True


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    workloads = WORKLOADS | REAL_WORKLOADS
    parser.add_argument("--workload", choices=workloads, required=True)
    parser.add_argument("--scale", choices=SCALES, default="cpu")
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--vllm", action="store_true", help="sample with vLLM in this process")
    options = parser.parse_args()
    workload = replace(workloads[options.workload], vllm=options.vllm)
    scale = SCALES[options.scale]
    if workload.vllm and workload.critic:
        parser.error("--vllm: TRL's PPO cannot sample with vLLM")
    if workload.vllm and not torch.cuda.is_available():
        keep_weights_loadable()
    with open(options.assets / f"{workload.name}.jsonl") as file:
        options.prompts = [json.loads(line)["input"] for line in file]
    options.settings = trl_settings(
        workload, scale, options.iterations, cpu=not torch.cuda.is_available()
    )
    watch = Watch()
    with tempfile.TemporaryDirectory() as scratch:
        options.scratch = scratch
        trainer = (ppo_trainer if workload.critic else grpo_trainer)(workload, options, watch)
        trainer.train()
    import trl

    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    if options.vllm:
        import vllm

        versions += f", vllm {vllm.__version__}"
    result = {
        "version": f"trl {trl.__version__}, {versions}",
        "iterations": watch.iterations,
    }
    options.output.write_text(json.dumps(result, indent=1))
    print(f"wrote {options.output}", file=sys.stderr)


if __name__ == "__main__":
    main()
