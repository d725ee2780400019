"""Numbers that are not finite, on rank 1 only. Usage: non_finite.py MODEL PROMPTS REWARD FOLDER

Trains a few steps for each of CASES; each rank writes what it saw into FOLDER/<case>.rank<rank>.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from lightppo import PPOTrainer
from lightppo.config import PPOConfig
from lightppo.errors import TrainingError

NAN = float("nan")
GRPO = {
    "advantage_estimator": "grpo",
    "n_samples_per_prompt": 2,
    "init_kl_coef": 0.01,
    "use_kl_loss": True,
}
CASES: dict[str, dict[str, Any]] = {
    "engine": {"zero_stage": 0},
    "actor": {"zero_stage": 3},
    "values": {"zero_stage": 2, "value_norm": "exp"},
    "score_of_a_stream": {
        "zero_stage": 0,
        "dynamic_sampling": True,
        "filter_range": [-100, 100],
        **GRPO,
    },
    "scores_for_good": {"zero_stage": 2, "max_skipped_steps": 2},
    "loss": {"zero_stage": 3},
    "actor_in_training": {"zero_stage": 0, "kl_target": 0.1, **GRPO},
    "for_good": {"zero_stage": 2, "max_skipped_steps": 2, "max_epochs": 2},
}


def poison(trainer: PPOTrainer, case: str, now: Callable[[], bool]) -> None:
    """While ``now()``, one number of one sample is NaN."""

    def wrap(owner: Any, name: str, spoil: Callable[[Any], Any]) -> None:
        call = getattr(owner, name)
        setattr(
            owner,
            name,
            lambda *args, **options: (
                spoil(call(*args, **options)) if now() else call(*args, **options)
            ),
        )

    def of_engine(rollouts: list) -> list:
        rollouts[0].log_probs[0] = NAN
        return rollouts

    def of_actor(scores: Any) -> Any:
        return replace(scores, log_probs=scores.log_probs + NAN)

    def of_loss(result: tuple) -> tuple:
        return result[0] + torch.tensor(NAN), result[1]  # a constant: the gradient is finite

    def of_source(output: Any) -> Any:
        output.scores[0] = NAN
        return output

    match case:
        case "score_of_a_stream" | "scores_for_good":
            wrap(trainer.reward_source, "score", of_source)
        case "engine":
            wrap(trainer.rollout_engine, "generate", of_engine)
        case "values":
            wrap(trainer.critic, "forward", lambda values: values + NAN)
        case "loss" | "for_good":
            wrap(trainer, "actor_loss_fn", of_loss)
        case _:
            wrap(trainer.actor, "score_actions", of_actor)


def weights(trainer: PPOTrainer, name: str) -> torch.Tensor:
    with trainer.strategy.gathered_parameters(getattr(trainer, name)) as module:
        return torch.cat([p.detach().double().flatten() for p in module.parameters()])


def run(case: str, options: dict[str, Any], folder: Path) -> dict[str, Any]:
    trainer = PPOTrainer.from_config(PPOConfig.from_flat(**options, save_path=str(folder / case)))
    models = ["actor", *(["critic"] if trainer.critic is not None else [])]
    seen: list[dict[str, torch.Tensor]] = []
    bad_rank = trainer.strategy.get_rank() == 1
    poison(
        trainer,
        case,
        lambda: bad_rank and (case.endswith("for_good") or trainer.state.global_step == 0),
    )
    finish = trainer.save_logs_and_checkpoints

    def after_step(*args: Any, **more: Any) -> None:
        finish(*args, **more)
        seen.append({name: weights(trainer, name) for name in models})

    trainer.save_logs_and_checkpoints = after_step
    seen.append({name: weights(trainer, name) for name in models})
    error = None
    try:
        trainer.fit()
    except TrainingError as problem:
        error = str(problem)
    moved = {
        name: [not torch.equal(a[name], b[name]) for a, b in pairwise(seen)] for name in models
    }
    finite = all(value.isfinite().all() for value in seen[-1].values())
    return {"moved": moved, "finite": bool(finite), "skipped": trainer.state.skipped_optimizer_steps, "error": error,
            "kl_coef": trainer.kl_ctl.value, "sums": [value.sum().item() for value in seen[-1].values()]}  # fmt: skip


def main(model: str, prompts: str, reward: str, folder: str) -> None:
    small = {"pretrain": model, "prompt_data": prompts, "reward_fn": reward, "prompt_max_len": 12,
             "generate_max_len": 4, "rollout_batch_size": 4, "micro_train_batch_size": 2, "num_examine": 0,
             "actor_learning_rate": 1e-2, "lr_warmup_steps": 0, "total_training_steps": 3}  # fmt: skip
    for case, options in CASES.items():
        samples = 4 * options.get("n_samples_per_prompt", 1)
        critic = {} if options.get("advantage_estimator") else {"critic_learning_rate": 1e-2}
        found = run(case, small | {"train_batch_size": samples} | critic | options, Path(folder))
        rank = torch.distributed.get_rank()
        Path(folder, f"{case}.rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[-4:])  # the launcher puts --local_rank first
