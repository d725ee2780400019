"""Checks that nothing old is left after ``skip_step``, nor for a parameter that gets no gradient."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.rank_checks import (
    EPS,
    LR,
    MAX_NORM,
    TinyActor,
    causal_lm,
    halving,
    make_strategy,
    sharded_train_config,
    whole_weights,
)
from torch import nn

from lightppo.distributed.deepspeed import DeepspeedStrategy, StepOutcome

VARIANTS: dict[str, dict] = {
    "0": {"zero_stage": 0},
    "1": {"zero_stage": 1},
    "2": {"zero_stage": 2},
    "3": {"zero_stage": 3},
    "3, small parameters unsharded": {"zero_stage": 3, "persist": True},
    "1, optimizer offloaded": {"zero_stage": 1, "adam_offload": True},
    "2, optimizer offloaded": {"zero_stage": 2, "adam_offload": True},
    "3, optimizer offloaded": {"zero_stage": 3, "adam_offload": True},
    "3, all offloaded": {"zero_stage": 3, "adam_offload": True, "param_offload": True},
    "3, parameters offloaded": {"zero_stage": 3, "param_offload": True},
    "2, overlapping": {"zero_stage": 2, "overlap_comm": True},
    "3, overlapping": {"zero_stage": 3, "overlap_comm": True},
    "bf16, 1": {"zero_stage": 1, "bf16": True},
    "bf16, 1, gradients in bf16": {"zero_stage": 1, "bf16": True, "grad_accum_dtype": "bf16"},
    "bf16, 1, optimizer offloaded": {"zero_stage": 1, "bf16": True, "adam_offload": True},
    "bf16, 2": {"zero_stage": 2, "bf16": True},
    "bf16, 2, gradients in bf16": {"zero_stage": 2, "bf16": True, "grad_accum_dtype": "bf16"},
    "bf16, 2, optimizer offloaded": {"zero_stage": 2, "bf16": True, "adam_offload": True},
    "bf16, 3": {"zero_stage": 3, "bf16": True},
    "bf16, 3, all offloaded": {
        "zero_stage": 3,
        "bf16": True,
        "adam_offload": True,
        "param_offload": True,
    },
    "fp16, 1": {"zero_stage": 1, "fp16": True},
    "fp16, 2": {"zero_stage": 2, "fp16": True},
    "fp16, 2, optimizer offloaded": {"zero_stage": 2, "fp16": True, "adam_offload": True},
    "fp16, 3": {"zero_stage": 3, "fp16": True},
}


class TwoHeads(nn.Module):
    """A trunk and two heads: a backward pass through one head leaves the other without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(7, 9)
        self.heads = nn.ModuleList([nn.Linear(9, 1), nn.Linear(9, 1)])

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        return self.heads[head](torch.tanh(self.trunk(x)))


def rows(index: int) -> torch.Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(index))


@dataclass
class Run:
    """One training run of the two heads on this rank's rows."""

    role: DeepspeedStrategy
    persist: bool = False
    outcomes: list[StepOutcome] = field(default_factory=list)
    batches: int = 0

    def __post_init__(self) -> None:
        model = TwoHeads()
        model.ds_config = (
            self.role.get_ds_train_config() if self.persist else sharded_train_config(self.role)
        )
        optimizer = self.role.create_optimizer(model, lr=LR, weight_decay=0.1, eps=EPS)
        self.engine, self.optimizer, self.scheduler = self.role.prepare(
            (model, optimizer, halving(optimizer))
        )

    def loss(self, head: int, index: int) -> torch.Tensor:
        mine = rows(index).chunk(self.role.world_size)[self.role.get_rank()]
        mine = mine.to(self.role.dtype)
        return self.engine(mine, head).float().square().sum() / 4 * self.role.world_size

    def backward(self, *heads: int) -> None:
        for head in heads:
            self.role.backward(self.loss(head, self.batches), self.engine)
            self.batches += 1

    def step(self) -> None:
        self.outcomes.append(self.role.optimizer_step(self.optimizer, self.engine, self.scheduler))

    def throw_away(self, *heads: int, factor: float = 1000.0, last_rank: float = 1.0) -> None:
        """Backward passes that would show in any sum, and no step."""
        if self.role.get_rank() == self.role.world_size - 1:
            factor *= last_rank
        for head in heads:
            self.role.backward(self.loss(head, 77) * factor, self.engine)
        self.role.skip_step(self.engine, name="two heads")


STEPS = ((0, 1), (1, 0), (0,), (0, 1, 1))  # the heads of the backward passes of each step


def plain_norms() -> list[float]:
    """Gradient norms of the same steps in plain torch on the whole batch; no gradient is a gradient of zero."""
    model = TwoHeads()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=EPS)
    scheduler, index, norms = halving(optimizer), 0, []
    for heads in STEPS:
        optimizer.zero_grad()
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        for head in heads:
            (model(rows(index), head).square().sum() / 4).backward()
            index += 1
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        scheduler.step()
    return norms


# Of the suite; the others are near these.
SAMPLE = (
    *("1", "2, optimizer offloaded", "3", "3, all offloaded", "2, overlapping"),
    *("bf16, 1", "bf16, 2, gradients in bf16", "fp16, 3"),
)
# One rank has nothing to reduce, so it tries one variation of a kind.
ALONE = (
    "0",
    "1",
    "2, optimizer offloaded",
    "3",
    "3, all offloaded",
    "bf16, 1",
    "bf16, 2",
    "bf16, 3, all offloaded",
)


def check_skip_step(strategy: DeepspeedStrategy, work_dir: Path) -> None:
    skip_steps(strategy, SAMPLE if strategy.world_size > 1 else ALONE)


def check_skip_step_everywhere(strategy: DeepspeedStrategy, work_dir: Path) -> None:
    skip_steps(strategy, VARIANTS)


def skip_steps(strategy: DeepspeedStrategy, variants: Iterable[str]) -> None:
    """Backward passes that are thrown away, between all steps and in several ways, change no bit of what follows.

    The run without them has the gradient norms of plain torch, also where a head gets its gradient only from the
    second backward pass of a step (step 2 of 4) or not at all (step 3), the step before having left one.
    """
    expected = plain_norms()
    assert max(expected) > MAX_NORM  # some step is clipped
    for variant in variants:
        options = dict(VARIANTS[variant])
        persist = options.pop("persist", False)
        role = make_strategy(**options)
        plain, skipping = Run(role, persist), Run(role, persist)
        skipping.throw_away(1, 0)  # before any step
        for number, heads in enumerate(STEPS):
            for run in (plain, skipping):
                run.backward(*heads)
                run.step()
            if number == 0:
                skipping.throw_away(1, 0, 0)
                skipping.throw_away(0)  # and once more
            if number == 1:
                skipping.throw_away(0, 1, last_rank=float("nan"))
            if number == 2:
                skipping.loss(1, 77)  # no backward pass belongs to this forward
                skipping.throw_away()
        assert skipping.outcomes == plain.outcomes, variant
        got, tolerance = (
            [outcome.grad_norm for outcome in plain.outcomes],
            1e-4 if role.dtype is torch.float32 else 2e-2,
        )
        assert got == [pytest.approx(norm, rel=tolerance) for norm in expected], variant
        weights = whole_weights(role, plain.engine)
        for name, weight in whole_weights(role, skipping.engine).items():
            assert torch.equal(weight, weights[name]), (variant, name)
        assert skipping.scheduler.state_dict() == plain.scheduler.state_dict(), variant
        for counter in ("global_steps", "global_samples", "skipped_steps"):
            assert getattr(skipping.engine, counter) == getattr(plain.engine, counter), (
                variant,
                counter,
            )
    with pytest.raises(ValueError, match=r"strategy.prepare\(\)"):
        role.skip_step(causal_lm())
    with pytest.raises(ValueError, match="skip_step: reference was prepared without an optimizer"):
        role.skip_step(
            role.prepare(TinyActor(causal_lm(), role.get_ds_eval_config())), name="reference"
        )


def check_late_copies(strategy: DeepspeedStrategy, work_dir: Path) -> None:
    """Copies of gradients from a GPU to an offloaded optimizer may be under way when a step is thrown away."""
    for stage in (1, 2):
        run = Run(make_strategy(zero_stage=stage, adam_offload=True))
        run.backward(0, 1)
        shards = [shard.grad for shard in run.engine.optimizer.single_partition_of_fp32_groups]
        sums = [*run.engine.optimizer.accumulated_grads_in_cpu.values(), *shards]

        def arrive(sums: Iterable[torch.Tensor] = sums) -> None:
            for gradient in sums:
                gradient.fill_(7.0)

        wait = mock.Mock(side_effect=arrive)
        with mock.patch.multiple("torch.cuda", is_initialized=lambda: True, synchronize=wait):
            run.role.skip_step(run.engine)
        assert wait.called
        assert not any(gradient.any() for gradient in sums)


CHECKS = [check_skip_step, check_late_copies, check_skip_step_everywhere]
