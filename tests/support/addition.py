"""The quickstart's two-digit addition: a model that is warmed up, and short runs of the trainer on it."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from lightppo.cli.tiny_model import character_tokenizer, small_llama
from support.ranks import REPO
from support.scripts import beside
from support.tiny import read_jsonl, write_jsonl

QUICKSTART = REPO / "examples" / "quickstart"
PROMPT_TOKENS = 7  # <s>07+35=
PROMPTS, SAMPLES, MINIBATCHES, STEPS = 64, 4, 4, 16  # of a rollout, and of a run


def quickstart(name: str) -> ModuleType:
    """A module of examples/quickstart, imported as a script beside it would; nothing of it stays in ``sys.modules``."""
    with beside(QUICKSTART):
        return importlib.import_module(name)


def warm_start(folder: Path, seed: int = 1, head_dim: int = 16, smoothing: float = 0.2) -> None:
    """Write model and prompts into ``folder``. The greedy answer is mostly right, a sampled one one time in three.

    The labels are smoothed, so that the model knows the sums but is not sure of them: each of the four tokens comes out
    right with a probability of about 0.8. What is left to do is what a reward alone can do in a few steps. Without
    ``smoothing`` it is a teacher: sampled answers are mostly right, too.
    """
    task = quickstart("task")
    rows = task.labelled_prompts(task.split_pairs()[0])
    tokenizer = character_tokenizer(task.CHARACTERS)
    texts = [
        tokenizer(row["input"] + row["label"])["input_ids"] + [tokenizer.eos_token_id]
        for row in rows
    ]
    with torch.random.fork_rng():
        model = small_llama(tokenizer, seed, head_dim=head_dim)
        _teach(model, torch.tensor(texts), torch.Generator().manual_seed(seed), smoothing)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    random.Random(seed).shuffle(rows)
    write_jsonl(folder / "prompts.jsonl", rows[: PROMPTS * STEPS])


def _teach(model: Any, texts: torch.Tensor, generator: torch.Generator, smoothing: float) -> None:
    """Supervised training on the answers in ``texts`` (N, 11) until nine in ten are right.

    Until, because small differences between machines grow into different runs; 210 to 250 steps were enough so far.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95), weight_decay=0.0)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    right = 0.0
    for _ in range(1500):
        rows = texts[torch.randint(len(texts), (128,), generator=generator)]  # (B, 11)
        logits = model(rows[:, :-1]).logits[:, PROMPT_TOKENS - 1 :]  # (B, 4, V)
        answers = rows[:, PROMPT_TOKENS:]  # (B, 4)
        loss = cross_entropy(logits.flatten(0, 1), answers.flatten(), label_smoothing=smoothing)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warm_up.step()
        right += 0.1 * ((logits.argmax(-1) == answers).all(1).float().mean().item() - right)
        if right > 0.9:
            return
    raise AssertionError(f"the warm-up did not learn the sums: {right:.0%} right after 1500 steps")


def score_in_parts(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, Any]:
    """Whether an answer is right, and the share of its digits that are; the first one is the score."""
    answers = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts)]
    right = [float(answer == label) for answer, label in zip(answers, labels)]
    digits = [
        sum(one == other for one, other in zip(answer, label)) / len(label)
        for answer, label in zip(answers, labels)
    ]
    return {"rewards": right, "extra_logs": {"right": right, "digits": digits}}


def short_run(assets: Path, run: Path) -> dict[str, Any]:
    """Options of a run from the warm start in ``assets``, into the folder ``run``.

    It takes four optimizer steps per rollout: three of them are off-policy, so that clipping, ratios and token
    selections have something to do.
    """
    samples = PROMPTS * SAMPLES
    return {
        "pretrain": str(assets / "model"),
        "prompt_data": str(assets / "prompts.jsonl"),
        "reward_fn": str(QUICKSTART / "reward.py"),
        "prompt_max_len": 8,
        "generate_max_len": 5,
        "rollout_batch_size": PROMPTS,
        "n_samples_per_prompt": SAMPLES,
        "micro_rollout_batch_size": samples,
        "ppo_n_minibatches": MINIBATCHES,
        "micro_train_batch_size": samples // MINIBATCHES,
        "total_training_steps": STEPS,
        "init_kl_coef": 0.0,
        "actor_learning_rate": 5e-4,
        "lr_scheduler": "constant",
        "zero_stage": 0,
        "num_examine": 0,
        "save_path": str(run),
        "ckpt_path": str(run / "ckpt"),
    }


def train(
    assets: Path, run: Path, engine: Callable[[Any], Any] | None = None, **options: Any
) -> list[dict[str, float]]:
    """A run of the real trainer from the warm start, in this process.

    Args:
        assets: folder of :func:`warm_start`.
        run: folder of the run.
        engine: makes of the trainer's rollout engine the one that samples.
        **options: laid over :func:`short_run`.

    Returns:
        the metrics of each step.
    """
    from lightppo import PPOConfig, PPOTrainer

    trainer = PPOTrainer.from_config(PPOConfig.from_flat(short_run(assets, run) | options))
    trainer.keeps = False
    if engine is not None:
        trainer.sampler.sampler.engine = engine(trainer.rollout_engine)
    trainer.fit()
    return steps_of(run)


def steps_of(run: Path) -> list[dict[str, float]]:
    """Metrics of each step of a run."""
    return read_jsonl(run / "metrics.jsonl")


def rise(rows: list[dict[str, float]]) -> float:
    """Mean reward of the last quarter of the steps minus that of the first."""
    first, last = ends(rows)
    return last - first


def ends(rows: list[dict[str, float]]) -> tuple[float, float]:
    """Mean reward of the first quarter of the steps, and of the last."""
    rewards = [row["rollout/reward"] for row in rows]
    quarter = len(rewards) // 4
    return sum(rewards[:quarter]) / quarter, sum(rewards[-quarter:]) / quarter
