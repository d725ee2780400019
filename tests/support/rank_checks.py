"""What the scripts here share: tiny models, a plain-torch reference, and running checks one after the other."""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from lightppo.distributed.deepspeed import DeepspeedStrategy

VOCAB = 61  # odd, so that shards of the embedding need padding
LAYERS = 2
LR, MAX_NORM, EPS = 1e-2, 0.5, 1e-5


class TinyActor(nn.Module):
    """Stands for lightppo.models.Actor: the engine takes the place of ``.model``."""

    engine_attribute = "model"

    def __init__(self, model: nn.Module, ds_config: dict | None = None) -> None:
        super().__init__()
        self.model, self.ds_config = model, ds_config

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, use_cache=False).logits


class TinyCritic(nn.Module):
    """Stands for lightppo.models.Critic: sits inside its engine."""

    def __init__(self, model: nn.Module, ds_config: dict | None = None) -> None:
        super().__init__()
        self.model, self.ds_config = model, ds_config

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model.score(
            self.model.model(input_ids=ids, use_cache=False).last_hidden_state
        ).squeeze(-1)


def llama_config(tied: bool) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        num_labels=1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def causal_lm(seed: int = 0, tied: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(llama_config(tied))


def sequence_classifier(seed: int = 0) -> LlamaForSequenceClassification:
    torch.manual_seed(seed)
    return LlamaForSequenceClassification(llama_config(tied=False))


def batch(step: int, rows: int = 8, length: int = 10) -> torch.Tensor:
    return torch.randint(
        3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(100 + step)
    )


def nll_sum(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Negative log likelihood of the next tokens, summed; the caller divides by their number."""
    return nn.functional.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"
    )


def usual(cases: dict[str, Any], *names: str) -> dict[str, Any]:
    """The cases of these names; all of them in a test that passes ``every_case`` to ``run_checks``."""
    return cases if os.environ.get("EVERY_CASE") else {name: cases[name] for name in names}


def halving(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.5**step)


def make_strategy(zero_stage: int = 2, **options) -> DeepspeedStrategy:
    # torch computes in it on every CPU; DeepSpeed trains in it only where it is fast
    if options.get("fp16"):
        type(get_accelerator()).is_fp16_supported = lambda _: True
    return DeepspeedStrategy(seed=7, max_norm=MAX_NORM, zero_stage=zero_stage, **options)


def sharded_train_config(strategy: DeepspeedStrategy) -> dict:
    """The strategy's configuration, but at ZeRO-3 even tiny parameters are sharded."""
    config = strategy.get_ds_train_config()
    if config["zero_optimization"]["stage"] == 3:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return config


def trained_actor(strategy: DeepspeedStrategy, seed: int = 0, persist: bool = False):
    """A prepared actor, its optimizer and its scheduler."""
    actor = TinyActor(causal_lm(seed), None if persist else sharded_train_config(strategy))
    optimizer = strategy.create_optimizer(actor, lr=LR, weight_decay=0.1, eps=EPS)
    return strategy.prepare((actor, optimizer, halving(optimizer)))


def train_step(
    strategy: DeepspeedStrategy,
    actor,
    optimizer,
    scheduler,
    step: int,
    poison: float | bool = False,
):
    """One optimizer step on this rank's rows, in micro batches of 1 row and the rest; returns global loss and outcome.

    poison: the last rank's loss is not finite, or so many times as large.
    """
    ids = batch(step)
    tokens = ids[:, 1:].numel()
    mine = ids.chunk(strategy.world_size)[strategy.get_rank()]
    total = 0.0
    for micro in (mine[:1], mine[1:]):
        loss = nll_sum(actor(micro), micro) / tokens
        total += loss.item()
        if poison and strategy.get_rank() == strategy.world_size - 1:
            loss = loss * (float("nan") if poison is True else poison)
        strategy.backward(loss * strategy.world_size, actor, optimizer)
    outcome = strategy.optimizer_step(optimizer, actor, scheduler, name="actor")
    return strategy.all_reduce(total, op="sum"), outcome


def whole_weights(strategy: DeepspeedStrategy, model) -> dict[str, torch.Tensor]:
    with strategy.gathered_parameters(model) as module:
        return {name: p.detach().float().cpu().clone() for name, p in module.named_parameters()}


def run(checks: list[Callable[[DeepspeedStrategy, Path], None]]) -> None:
    """Runs the named checks in order on this rank and writes results_{rank}.json; stops at the first failure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)  # the deepspeed launcher's
    parser.add_argument("work_dir", type=Path)
    parser.add_argument("names", nargs="+")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    table = {check.__name__: check for check in checks}
    strategy = make_strategy()
    strategy.setup_distributed(timeout=timedelta(seconds=180))  # the test's own limit is more
    results = {}
    path = args.work_dir / f"results_{strategy.get_rank()}.json"
    for name in args.names:
        start = time.process_time()
        try:
            table[name](strategy, args.work_dir)
            results[name] = "passed"
        except BaseException:  # pytest's own failures are not Exceptions
            results[name] = traceback.format_exc()
            break
        finally:
            path.write_text(json.dumps(results))
        strategy.print(f"{name}: {time.process_time() - start:.1f} CPU s")
    if any(result != "passed" for result in results.values()):
        raise SystemExit(1)
