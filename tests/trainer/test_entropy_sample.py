"""Where the entropy is only logged, it is computed of a sample of the tokens of a large step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from support.sampled import sample
from torch.utils._python_dispatch import TorchDispatchMode

from lightppo import Callback, PPOTrainer
from lightppo.algorithms.masking import LossNormalizer
from lightppo.experience.experience import Experience
from lightppo.trainer import training_losses as sampling
from lightppo.trainer.training_losses import entropy_sample, sample_stride, systematic_sample

pytestmark = pytest.mark.usefixtures("world")

GRPO = {"advantage_estimator": "grpo", "init_kl_coef": 0.0}


class Observer(Callback):
    """Keeps the entropy of each token, by its row's ids."""

    def __init__(self, rows: tuple[int, ...] = ()) -> None:
        self.rows, self.seen = rows, {}

    def entropy_rows(self, run: Any, experience: Experience) -> tuple[int, ...]:
        return self.rows

    def on_micro_batch(
        self, run: Any, experience: Experience, log_probs: Any, entropy: Any
    ) -> None:
        masks = experience.attention_mask.bool(), experience.action_mask.bool()
        for ids, real, trained, values in zip(experience.sequences, *masks, entropy):
            self.seen[tuple(ids[real].tolist())] = values[trained].tolist()


class Exponentials(TorchDispatchMode):
    """Counts the exponentials that are taken one by one."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.exp, torch.ops.aten.exp_):
            self.count += args[0].numel()
        return func(*args, **(kwargs or {}))


@pytest.fixture
def trained(
    trainer_with: Callable[..., PPOTrainer], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """``trained(stride, **options)``: entropy, its callback and the exponentials of one step."""

    def train(
        stride: int, rows: tuple[int, ...] = (), weights: Sequence[Callable] = (), **options: Any
    ) -> tuple[float, Observer, int]:
        monkeypatch.setattr(sampling, "_ENTROPY_SAMPLE", 1)
        monkeypatch.setattr(sampling, "_LARGEST_STRIDE", stride)
        trainer = trainer_with(**GRPO, max_epochs=1, **options)
        trainer.callbacks.all = [observer := Observer(rows)]
        trainer.token_weights = list(weights)
        before = [p.detach().clone() for p in trainer.actor.parameters()]
        with torch.no_grad():
            trainer.actor.hf_model.lm_head.weight.mul_(50)  # so that tokens differ in their entropy
        sample(trainer)
        with Exponentials() as exponentials:
            status = trainer.ppo_train(1)
        with torch.no_grad():
            for parameter, value in zip(trainer.actor.parameters(), before):
                parameter.copy_(value)
        return status["entropy"], observer, exponentials.count

    return train


def values_of(observer: Observer) -> list[float]:
    return list(chain.from_iterable(observer.seen.values()))


def of_sample(seen: dict[tuple[int, ...], list[float]], stride: int) -> float:
    """By hand, from the entropies of all tokens."""
    chosen = [
        value
        for ids, values in seen.items()
        for n, value in enumerate(values, 1)
        if (n + sum(ids)) % stride == 0
    ]
    return stride * sum(chosen) / sum(map(len, seen.values()))


def test_the_mean_is_that_of_the_sample(trained):
    mean, observer, exponentials = trained(stride=1)
    every = observer.seen
    assert mean == pytest.approx(statistics.mean(values_of(observer)), rel=1e-5)

    sampled, observer, fewer = trained(stride=3)
    assert sampled == pytest.approx(of_sample(every, 3), rel=1e-5)
    assert sampled != pytest.approx(mean, rel=1e-5)
    known = [value for value in values_of(observer) if math.isfinite(value)]
    assert 0 < len(known) < sum(map(len, every.values()))
    assert fewer < exponentials


@pytest.mark.parametrize(
    "options", [{"micro_train_batch_size": 1}, {"packing_samples": True}, {"share_prompts": False}]
)
def test_it_depends_on_no_batching(trained, options):
    expected = trained(stride=3, micro_train_batch_size=4)[0]
    assert trained(stride=3, **options)[0] == pytest.approx(expected, rel=1e-5)


def test_rows_that_somebody_reads_are_whole(trained):
    every = trained(stride=1, micro_train_batch_size=4)[1].seen
    mean, observer, _ = trained(stride=3, rows=(1, 3), micro_train_batch_size=4)
    whole = [ids for ids, values in observer.seen.items() if all(map(math.isfinite, values))]
    assert len(whole) >= 2
    for ids in whole:
        assert observer.seen[ids] == pytest.approx(every[ids], rel=1e-5)
    assert mean == pytest.approx(of_sample(every, 3), rel=1e-5)


@pytest.mark.parametrize(
    "options", [{"entropy_coef": 0.01}, {"weights": [lambda rows, **_: rows.action_mask.float()]}]
)
def test_what_trains_on_the_entropy_gets_it_of_all_tokens(trained, options):
    _, observer, _ = trained(stride=3, **options)
    assert all(map(math.isfinite, values_of(observer)))


def test_a_small_step_is_no_sample():
    rows = Experience(
        torch.ones(1, 5, dtype=torch.long),
        torch.ones(1, 5, dtype=torch.long),
        torch.ones(1, 4).bool(),
    )
    assert [sample_stride(tokens) for tokens in (0.0, 4095.0, 4096.0, 1e9)] == [1, 1, 2, 8]
    cut = replace(rows, action_mask=torch.tensor([[True, False, True, True]]))
    # 1 + 5 and 3 + 5
    assert entropy_sample(cut, stride=2).counted.tolist() == [[True, False, False, True]]
    assert LossNormalizer.from_masks([cut.action_mask]).tokens == 3


def test_a_systematic_sample_by_hand():
    # the trained tokens are numbered from 1
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])
    sample = systematic_sample(mask, start=torch.tensor([1, 0]), stride=3)
    assert sample.tolist() == [
        [False, False, True, False, False, False, True],
        [False, False, True] * 2 + [False],
    ]


def test_all_systematic_samples_together_are_all_tokens():
    mask = torch.rand(4, 9, generator=torch.Generator().manual_seed(0)) < 0.7
    samples = [systematic_sample(mask, torch.full((4,), start), stride=4) for start in range(4)]
    assert torch.equal(torch.stack(samples).sum(0).bool(), mask)
    assert torch.stack(samples).sum() == mask.sum()
    assert torch.equal(systematic_sample(mask, torch.arange(4), stride=1), mask)
