"""The language model's loss by hand, and against torch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import lightppo
from lightppo.algorithms.losses import GPTLMLoss


def randn(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_by_hand():
    # position 0 predicts label 1 with (1/4, 3/4), position 1 predicts label 2 with (1/2, 1/2), position 2 nothing
    logits = torch.tensor([[[1.0, 3.0], [1.0, 1.0], [1.0, 9.0]]]).log()
    loss_fn = GPTLMLoss()
    labels = torch.tensor([[0, 1, 0]])
    expected = (-math.log(3 / 4) - math.log(1 / 2)) / 2
    assert loss_fn.num_tokens(labels) == 2
    torch.testing.assert_close(loss_fn(logits, labels), torch.tensor(expected))
    # the prompt is not learned: label 1 is ignored; the first label never counts anyway
    labels = torch.tensor([[-100, -100, 0]])
    assert loss_fn.num_tokens(labels) == 1
    torch.testing.assert_close(loss_fn(logits, labels), torch.tensor(math.log(2)))
    # 8 tokens in the step, 2 ranks: 2 · ln 2 / 8
    torch.testing.assert_close(loss_fn(logits, labels, 8, dp_size=2), torch.tensor(math.log(2) / 4))


def test_agrees_with_torch():
    logits, labels = (
        randn(3, 6, 9),
        torch.randint(9, (3, 6), generator=torch.Generator().manual_seed(0)),
    )
    labels[:, :2] = -100
    expected = torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, 9), labels[:, 1:].reshape(-1)
    )
    torch.testing.assert_close(GPTLMLoss()(logits, labels), expected)


def test_gradcheck():
    logits = randn(2, 3, 4).requires_grad_()
    labels = torch.tensor([[-100, 1, 3], [0, -100, 2]])
    assert torch.autograd.gradcheck(lambda x: GPTLMLoss()(x, labels), (logits,))


def test_all_ignored_is_an_exact_zero_with_a_gradient():
    logits = randn(2, 3, 4).requires_grad_()
    loss = GPTLMLoss()(logits, torch.full((2, 3), -100))
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_bad_input():
    with pytest.raises(ValueError, match=r"labels \(1, 1\)"):
        GPTLMLoss()(torch.zeros(1, 3, 4), torch.zeros(1, 2).long())
    with pytest.raises((RuntimeError, IndexError)):  # -5 is neither an id nor the ignore index
        GPTLMLoss()(torch.zeros(1, 3, 4), torch.tensor([[0, -5, 1]]))
    with pytest.raises(ValueError, match="normalizer"):
        GPTLMLoss()(torch.zeros(1, 3, 4), torch.zeros(1, 3).long(), normalizer_tokens=0)


def test_public_name():
    assert lightppo.GPTLMLoss is GPTLMLoss


def test_language_model_loss_does_not_depend_on_the_split():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 9, 7, generator=generator)
    labels = torch.randint(7, (4, 9), generator=generator)
    for row, length in enumerate([9, 2, 5, 1]):  # one row has no label to predict
        labels[row, length:] = -100
    loss_fn = GPTLMLoss()
    tokens = loss_fn.num_tokens(labels)
    assert tokens == 8 + 1 + 4 + 0

    def gradient(batches: list[slice], dp_size: int) -> Tensor:
        x = logits.clone().requires_grad_()
        # ranks run one after the other here; their average is the division at the end
        for rows in batches:
            loss_fn(x[rows], labels[rows], tokens, dp_size).backward()
        return x.grad / dp_size

    whole = gradient([slice(0, 4)], 1)
    torch.testing.assert_close(gradient([slice(0, 1), slice(1, 4)], 1), whole)
    torch.testing.assert_close(gradient([slice(0, 3), slice(3, 4)], 2), whole)
