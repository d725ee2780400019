"""Models that are tables of numbers per token, and an ExperienceMaker around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightppo.config import PPOConfig
from lightppo.config.rules import adds_teacher
from lightppo.experience.experience import Experience
from lightppo.experience.maker import ExperienceMaker, RolloutPass
from lightppo.models.actor import ActionScores
from lightppo.trainer.distillation import advantage_term, teacher_pass
from support.fakes import FakeStrategy, make_rollout

NAN = float("nan")


class TablePolicy(nn.Module):
    """The log prob of a token is the table's number for its id, wherever it stands. NaN where there is no token."""

    temperature = 1.0

    def __init__(self, table: dict[int, float]) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.tensor([table.get(i, NAN) for i in range(100)]))
        # shape, training mode, gradients on
        self.calls: list[tuple[tuple[int, ...], bool, bool]] = []

    def forward(self, sequences: Tensor, num_actions: int, attention_mask: Tensor) -> Tensor:
        self.calls.append((tuple(sequences.shape), self.training, torch.is_grad_enabled()))
        actions = slice(sequences.size(1) - num_actions, None)
        return self.table[sequences[:, actions]].where(attention_mask[:, actions].bool(), NAN)

    def score_actions(
        self, sequences: Tensor, num_actions: int, attention_mask: Tensor, **_: bool
    ) -> ActionScores:
        real = attention_mask[:, -num_actions:].bool()
        log_probs, logits = (
            self(sequences, num_actions, attention_mask),
            torch.zeros(int(real.sum()), 2),
        )
        return ActionScores(log_probs, real, logits=logits)


class TableCritic(nn.Module):
    """The value before an action is 1/100 of the id of the token before it. NaN where there is no token."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[tuple[int, ...], bool, bool]] = []

    def forward(
        self,
        sequences: Tensor,
        num_actions: int,
        attention_mask: Tensor,
        include_last: bool = False,
    ) -> Tensor:
        self.calls.append((tuple(sequences.shape), self.training, torch.is_grad_enabled()))
        # (B, A + 1)
        values = (sequences / 100).where(attention_mask.bool(), NAN)[:, -num_actions - 1 :]
        return values if include_last else values[:, :-1]


# ids 10, 20, 30: log prob under the policy, and under the reference
POLICY = {10: -1.0, 20: -2.0, 30: -3.0}
REFERENCE = {10: -1.5, 20: -2.0, 30: -2.5}
TEACHER = {10: -0.5, 20: -2.5, 30: -2.0}


def maker(
    strategy: Any = None,
    *,
    coef: float = 0.1,
    reference: bool = True,
    critic: bool = True,
    teacher: bool = False,
    passes: Mapping[str, RolloutPass] = {},
    advantage_terms: Sequence[Callable[[Experience], Tensor]] = (),
    **options: Any,
):
    options |= {"teacher_pretrain": "teacher"} if teacher else {}
    config = PPOConfig.from_flat(
        {"gamma": 1.0, "lambd": 0.5, "reward_clip_range": None} | options
    ).resolved()
    of_teacher = teacher_pass(config, TablePolicy(TEACHER)) if teacher else None
    term = advantage_term(config) if adds_teacher(config) else None
    return ExperienceMaker(
        TablePolicy(POLICY),
        TableCritic() if critic else None,
        TablePolicy(REFERENCE) if reference else None,
        strategy or FakeStrategy(),
        SimpleNamespace(value=coef),
        config,
        passes={"teacher": of_teacher} if of_teacher else passes,
        advantage_terms=[term] if term else advantage_terms,
    )


def answer(reward: float = 2.0, **fields: Any):
    """Prompt ending in id 50, response 10 20 30: values .5 .1 .2, and .3 after the last token."""
    return make_rollout([40, 50], [10, 20, 30], reward=reward, **fields)


def make_one(experience_maker: ExperienceMaker, *rollouts) -> Experience:
    (experience,) = experience_maker.make_experience_list(rollouts or [answer()])
    return experience


def approx(values: list) -> Any:
    return pytest.approx(torch.tensor(values), abs=1e-6)
