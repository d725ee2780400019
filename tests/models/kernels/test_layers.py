"""Products by oneDNN are those of torch's BLAS but for rounding; what it cannot take goes to the BLAS."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lightppo.models.kernels import layers
from lightppo.models.kernels.linear_log_probs import linear_log_probs


@pytest.fixture(params=[True, False], ids=["onednn", "blas"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Calls of oneDNN, on any machine that has it."""
    if request.param and not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this torch has no oneDNN")
    calls: list[int] = []
    before = layers.onednn_linear
    monkeypatch.setattr(layers, "onednn_suits_machine", lambda: request.param)
    monkeypatch.setattr(
        layers, "onednn_linear", lambda *tensors: calls.append(1) or before(*tensors)
    )
    yield calls
    assert bool(calls) is request.param


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("shape", [(7, 16), (2, 5, 16), (1, 16), (16,)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_linear_and_its_gradients(
    library: list[int], shape: tuple[int, ...], with_bias: bool
) -> None:
    results = []
    for function in (layers.linear, functional.linear):
        x, weight = numbers(*shape).requires_grad_(), numbers(12, 16).requires_grad_()
        bias = numbers(12).requires_grad_() if with_bias else None
        out = function(x, weight, bias)
        out *= 2  # as Gemma 3n does
        (out * numbers(*shape[:-1], 12)).sum().backward()
        results.append([out, x.grad, weight.grad] + ([bias.grad] if with_bias else []))
    for ours, torchs in zip(*results):
        torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-5)


def test_inputs_with_strides(library: list[int]) -> None:
    x, weight = numbers(5, 7, 32), numbers(12, 32)
    for a, w in (
        (x.transpose(0, 1), weight),
        (x[..., ::2], weight[:, :16]),
        (x[:, 1:3, :16], weight[:, 16:]),
    ):
        torch.testing.assert_close(
            layers.linear(a, w), functional.linear(a, w), rtol=1e-5, atol=1e-5
        )
    a, b = numbers(9, 5), numbers(9, 6)
    torch.testing.assert_close(layers.product(a.t(), b), a.t() @ b, rtol=1e-5, atol=1e-5)


def test_only_the_gradients_that_are_needed(library: list[int]) -> None:
    x, weight = numbers(5, 16), numbers(12, 16).requires_grad_()
    layers.linear(x, weight).sum().backward()
    torch.testing.assert_close(weight.grad, x.sum(0).expand(12, 16))
    frozen = numbers(5, 16).requires_grad_()
    layers.linear(frozen, weight.detach()).sum().backward()
    torch.testing.assert_close(
        frozen.grad, weight.detach().sum(0).expand(5, 16), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("shape", [(1, 1, 16), (8, 1, 16), (11, 1, 16), (3, 5, 16), (64, 16)])
def test_packed_weights(shape: tuple[int, ...]) -> None:
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this torch has no oneDNN")
    x, weight, bias = numbers(*shape), numbers(12, 16), numbers(12)
    for b in (None, bias):
        ours = layers.linear_packed(x, layers.packed(weight), b)
        assert ours.shape == (*shape[:-1], 12)
        torch.testing.assert_close(ours, functional.linear(x, weight, b), rtol=1e-5, atol=1e-5)


def test_few_kernels_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")  # the user's own
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    suits = layers.onednn_suits_machine.__wrapped__()
    assert os.environ["LRU_CACHE_CAPACITY"] == "7"
    assert os.environ.get("ONEDNN_PRIMITIVE_CACHE_CAPACITY") == ("32" if suits else None)


def test_the_head_goes_through_it(library: list[int]) -> None:
    hidden, weight = numbers(6, 16).requires_grad_(), numbers(40, 16).requires_grad_()
    labels = torch.tensor([3, 0, 39, 7, 7, 1])
    linear_log_probs(hidden, weight, labels, chunk_size=2)[0].sum().backward()
    gradients = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    (hidden @ weight.t()).log_softmax(-1)[torch.arange(6), labels].sum().backward()
    for ours, torchs in zip(gradients, (hidden.grad, weight.grad)):
        torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("most", [0, 1 << 20], ids=["large", "small"])
def test_the_gradient_of_a_weight_lies_as_the_weight(
    library: list[int], monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(layers, "_TRANSPOSED_BYTES", most)
    for rows, hidden in (
        (numbers(6, 40), numbers(6, 16)),
        (numbers(6, 16), numbers(6, 40)[:, ::2]),
    ):
        gradient = layers.weight_product(rows, hidden)
        assert gradient.is_contiguous()
        torch.testing.assert_close(gradient, rows.t() @ hidden, rtol=1e-5, atol=1e-5)


def test_what_onednn_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "onednn_suits_machine", lambda: True)
    monkeypatch.setattr(layers, "onednn_linear", lambda *tensors: pytest.fail("must not be asked"))
    for x, weight in (
        (numbers(3, 4).double(), numbers(5, 4).double()),
        (numbers(3, 4).bfloat16(), numbers(5, 4).bfloat16()),
        (numbers(0, 4), numbers(5, 4)),
        (numbers(3, 0), numbers(5, 0)),
    ):
        assert layers.linear(x, weight).equal(functional.linear(x, weight))
    monkeypatch.setattr(layers, "_COMPILED_PRODUCTS", 3 * 4 * 5 + 1)
    assert layers.linear(numbers(3, 4), numbers(5, 4)).equal(
        functional.linear(numbers(3, 4), numbers(5, 4))
    )
    monkeypatch.setattr(layers, "_COMPILED_PRODUCTS", 0)
    with torch.backends.mkldnn.flags(enabled=False):
        assert layers.linear(numbers(3, 4), numbers(5, 4)).equal(
            functional.linear(numbers(3, 4), numbers(5, 4))
        )
