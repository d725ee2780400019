"""Log probs and entropy straight from hidden states."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightppo.algorithms import logprobs as head_module
from lightppo.algorithms.logprobs import log_probs_and_entropy
from lightppo.models.kernels import layers
from lightppo.models.kernels import linear_log_probs as head_code
from lightppo.models.kernels.linear_log_probs import TokenPlaces, linear_log_probs


def inputs(tokens=7, hidden=5, vocabulary=11, dtype=torch.float64, scale=1.0):
    """hidden (T, H), weight (V, H), bias (V,) with gradients, labels (T,), weights of log probs and entropy (2, T)."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((tokens, hidden), (vocabulary, hidden), (vocabulary,))
    leaves = [
        (scale * torch.randn(s, generator=generator)).to(dtype).requires_grad_() for s in shapes
    ]
    labels = torch.randint(vocabulary, (tokens,), generator=generator)
    return (
        *leaves,
        labels,
        torch.randn(2, tokens, generator=generator).to(torch.promote_types(dtype, torch.float32)),
    )


def plain(hidden, weight, labels, bias=None, temperature=1.0, entropy_grad=True, valid=None):
    logits = torch.nn.functional.linear(hidden, weight, bias)[:, :valid]
    return log_probs_and_entropy(logits, labels, temperature, entropy_grad=entropy_grad)


def gradients(outputs, weights, leaves):
    kept = [(x * w).sum() for x, w in zip(outputs, weights) if x is not None and x.requires_grad]
    return torch.autograd.grad(sum(kept), leaves)


def test_by_hand():
    """h = 1, W = (ln 1, ln 2, ln 5): p = (1, 2, 5)/8, label 2.

    E = ln 8 - (2 ln 2 + 5 ln 5)/8. Gradient of log p_2 in the logits: (-1/8, -2/8, 3/8); in the weight: times h = 1; in
    h: Σ W_v · that = (-2 ln 2 + 3 ln 5)/8. Gradient of E: -p_v (ln p_v + E).
    """
    hidden = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([[1.0], [2.0], [5.0]], dtype=torch.float64).log().requires_grad_()
    log_probs, entropy = linear_log_probs(
        hidden, weight, torch.tensor([2]), entropy=True, entropy_grad=True
    )
    expected = math.log(8) - (2 * math.log(2) + 5 * math.log(5)) / 8
    assert log_probs.item() == pytest.approx(math.log(5 / 8))
    assert entropy.item() == pytest.approx(expected)
    log_probs.sum().backward(retain_graph=True)
    assert weight.grad[:, 0].tolist() == pytest.approx([-1 / 8, -2 / 8, 3 / 8])
    assert hidden.grad.item() == pytest.approx((-2 * math.log(2) + 3 * math.log(5)) / 8)
    weight.grad = None
    entropy.sum().backward()
    assert weight.grad[:, 0].tolist() == pytest.approx(
        [-p * (math.log(p) + expected) for p in (1 / 8, 2 / 8, 5 / 8)]
    )


def test_temperature_by_hand_linear():
    """Logits (0, ln 4) at temperature 2 are (0, ln 2): p = (1, 2)/3; the gradient of log p_0 is (2/3, -2/3)/2."""
    hidden = torch.ones(1, 1, dtype=torch.float64)
    weight = torch.tensor([[0.0], [math.log(4)]], dtype=torch.float64, requires_grad=True)
    log_probs, entropy = linear_log_probs(hidden, weight, torch.tensor([0]), temperature=2.0)
    assert entropy is None
    assert log_probs.item() == pytest.approx(math.log(1 / 3))
    log_probs.sum().backward()
    assert weight.grad[:, 0].tolist() == pytest.approx([1 / 3, -1 / 3])


@pytest.mark.parametrize("valid", [None, 8])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("chunk_size", [None, 1, 3, 7])
def test_values_and_gradients_are_those_of_the_plain_form(
    chunk_size, entropy_grad, with_bias, valid
):
    hidden, weight, bias, labels, weights = inputs()
    leaves = (hidden, weight, bias) if with_bias else (hidden, weight)
    bias, labels = bias if with_bias else None, labels % 8
    expected = plain(hidden, weight, labels, bias, 0.7, entropy_grad, valid)
    got = linear_log_probs(hidden, weight, labels, bias, 0.7, chunk_size, True, entropy_grad, valid)
    assert got[1].requires_grad is entropy_grad
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(b, a)
    found = gradients(got, weights, leaves)
    for a, b in zip(gradients(expected, weights, leaves), found, strict=True):
        assert float(a.abs().max()) > 0.1
        torch.testing.assert_close(b, a)
    if valid:
        assert bool((found[1][valid:] == 0).all())


@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("chunk_size", [None, 2, 13, 37])
@pytest.mark.parametrize(
    ("vocabulary", "valid"), [(1037, 1000), (1037, 1001), (1037, None), (300, 130), (1024, 1000)]
)
def test_odd_vocabularies(vocabulary, valid, chunk_size, entropy_grad):
    """Products are wider than the valid ids; what is beyond them has probability and gradient 0."""
    hidden, weight, bias, labels, weights = inputs(41, 5, vocabulary, scale=0.4)
    labels = labels % (valid or vocabulary)
    labels[0] = (valid or vocabulary) - 1
    expected = plain(hidden, weight, labels, bias, 0.7, entropy_grad, valid)
    got = linear_log_probs(hidden, weight, labels, bias, 0.7, chunk_size, True, entropy_grad, valid)
    torch.testing.assert_close(got, expected)
    found = gradients(got, weights, (hidden, weight, bias))
    torch.testing.assert_close(found, gradients(expected, weights, (hidden, weight, bias)))
    for grad in found[1:]:
        assert bool((grad[valid or vocabulary :] == 0).all())
        assert bool((grad[: valid or vocabulary] != 0).any())


@pytest.mark.parametrize("vocabulary", [1037, 1100, 1152])
def test_products_are_multiples_of_128_wide(vocabulary, monkeypatch):
    """A head of 1037 rows, of which 1000 are valid, in chunks of 300 tokens: 128 · 8 columns, 256 tokens."""
    shapes = {"linear": [], "product": []}

    def spied(name, original):
        def spy(a, b, *rest):
            shapes[name].append((tuple(a.shape), tuple(b.shape)))
            return original(a, b, *rest)

        return spy

    for name in shapes:
        monkeypatch.setattr(layers, name, spied(name, getattr(layers, name)))
    monkeypatch.setattr(head_module, "CHUNK_ELEMENTS", 300 * 1024)
    hidden, weight, _, labels, weights = inputs(1000, 3, vocabulary, torch.float32)
    gradients(
        linear_log_probs(hidden, weight, labels % 1000, valid_vocab_size=1000),
        weights,
        (hidden, weight),
    )
    forward, recomputed = shapes["linear"][:4], shapes["linear"][4:]
    assert [a for a, _ in forward] == [(256, 3), (256, 3), (256, 3), (232, 3)]
    assert {b for _, b in forward} == {(1024, 3)}
    # 256 · 1024 numbers at a time, of 1000 tokens: 262 columns
    assert [b for _, b in recomputed] == [(256, 3)] * 4
    assert shapes["product"] == [((256, 1000), (1000, 3)), ((1000, 256), (256, 3))] * 4

    shapes["linear"].clear()
    # all valid: rows that the weight lacks cannot be made up
    linear_log_probs(hidden, weight, labels % vocabulary)
    assert {b for _, b in shapes["linear"]} == {(vocabulary, 3)}


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_gradcheck(chunk_size):
    hidden, weight, bias, labels, _ = inputs(tokens=3, hidden=2, vocabulary=4)

    def both(h, w, b):
        return linear_log_probs(h, w, labels, b, 1.3, chunk_size, entropy=True, entropy_grad=True)

    assert torch.autograd.gradcheck(both, (hidden, weight, bias))
    assert torch.autograd.gradcheck(
        lambda h, w: linear_log_probs(h, w, labels, None, 1.3, chunk_size)[0], (hidden, weight)
    )
    # entropy alone
    assert torch.autograd.gradcheck(lambda h, w: both(h, w, None)[1], (hidden, weight))


@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_frozen_inputs_get_no_gradient_and_change_no_other(frozen, chunk_size):
    hidden, weight, bias, labels, weights = inputs()
    leaves = [hidden, weight, bias]
    expected = gradients(
        linear_log_probs(hidden, weight, labels, bias, 0.7, chunk_size), weights, leaves
    )
    for i in frozen:
        leaves[i].requires_grad_(False)
    free = [i for i in range(3) if i not in frozen]
    out = linear_log_probs(hidden, weight, labels, bias, 0.7, chunk_size)
    for i, grad in zip(free, gradients(out, weights, [leaves[i] for i in free])):
        torch.testing.assert_close(grad, expected[i])


def test_without_gradients_nothing_is_kept():
    hidden, weight, bias, labels, _ = inputs()
    with torch.no_grad():
        out = linear_log_probs(hidden, weight, labels, bias, entropy=True, entropy_grad=True)
    assert not out[0].requires_grad
    assert not out[1].requires_grad
    for a, b in zip(out, linear_log_probs(hidden, weight, labels, bias, entropy=True), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("chunk_size", [None, 2, 3])
@pytest.mark.parametrize("places", [[], [0], [1, 2, 6], list(range(7))])
def test_the_entropy_of_some_tokens(chunk_size, places):
    hidden, weight, bias, labels, weights = inputs()
    index = torch.tensor(places, dtype=torch.long)
    options = (labels, bias, 0.7, chunk_size)
    log_probs, every = linear_log_probs(hidden, weight, *options, entropy=True)
    some = linear_log_probs(hidden, weight, *options, entropy=TokenPlaces(index, index))
    assert torch.equal(some[0], log_probs)
    assert torch.equal(some[1], torch.zeros_like(every).index_copy(0, index, every[index]))
    assert not some[1].requires_grad
    expected = gradients(
        linear_log_probs(hidden, weight, *options)[:1], weights, [hidden, weight, bias]
    )
    for a, b in zip(gradients(some[:1], weights, [hidden, weight, bias]), expected, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match="entropy_grad needs the entropy of all tokens"):
        linear_log_probs(
            hidden, weight, *options, entropy=TokenPlaces(index, index), entropy_grad=True
        )


def test_the_entropy_of_no_tokens():
    none = torch.empty(0, dtype=torch.long)
    log_probs, entropy = linear_log_probs(
        torch.ones(0, 5), torch.ones(11, 5), none, entropy=TokenPlaces(none, none)
    )
    assert (log_probs.shape, entropy.shape) == ((0,), (0,))


@pytest.mark.parametrize("chunk_size", [None, 16])
@pytest.mark.parametrize("places", [None, [0, 8, 9, 40]])
def test_pieces_that_stay_in_the_cache(monkeypatch, chunk_size, places):
    """41 tokens and 520 words: 8 rows of the softmax at a time, 128 words of the gradient; only its sum rounds."""
    hidden, weight, bias, labels, weights = inputs(41, 5, 520, scale=0.4)
    entropy = True if places is None else TokenPlaces(torch.tensor(places), torch.tensor(places))
    results, largest = [], []

    class Softmax(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten._log_softmax.default:
                largest[-1] = max(largest[-1], len(args[0]))
            return function(*args, **(kwargs or {}))

    for elements in (1 << 22, 8 * 520):
        monkeypatch.setattr(head_code, "_CACHED_ELEMENTS", elements)
        largest.append(0)
        with Softmax():
            out = linear_log_probs(hidden, weight, labels, bias, 0.7, chunk_size, entropy)
        results.append((out, gradients(out[:1], weights, (hidden, weight, bias))))
    assert largest == ([41, 8] if chunk_size is None else [16, 8])
    for a, b in zip(results[0][0], results[1][0], strict=True):
        assert torch.equal(a, b)
    torch.testing.assert_close(results[1][1], results[0][1])


def test_a_gradient_may_be_taken_twice():
    """A kept graph: what the backward needs is not written into by it."""
    hidden, weight, _, labels, weights = inputs()
    for chunk_size in (None, 2):
        out = linear_log_probs(hidden, weight, labels, None, 0.7, chunk_size, True, True)
        loss = sum((x * w).sum() for x, w in zip(out, weights))
        first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
        for a, b in zip(first, torch.autograd.grad(loss, (hidden, weight)), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("chunk_size", [None, 100])
def test_float32_at_a_large_vocabulary_to_1e_5(chunk_size):
    hidden, weight, _, labels, weights = inputs(300, 32, 5000, torch.float32, scale=0.7)
    expected = plain(hidden.double(), weight.double(), labels, None, 0.8)
    got = linear_log_probs(hidden, weight, labels, None, 0.8, chunk_size, True, True)
    assert got[0].dtype == got[1].dtype == torch.float32
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(b.double(), a, atol=1e-5, rtol=1e-5)
    wide = gradients(expected, weights, (hidden, weight))
    for a, b in zip(wide, gradients(got, weights, (hidden, weight)), strict=True):
        assert float(a.abs().max()) > 1
        torch.testing.assert_close(b, a, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunk_size", [None, 5, 64])
def test_bfloat16_is_as_exact_as_the_plain_form(chunk_size):
    """Against float64 on the same numbers, the error is at most that of plain bfloat16; softmax is in float32."""
    hidden, weight, _, labels, weights = inputs(200, 16, 300, torch.bfloat16)
    exact_leaves = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    exact = gradients(plain(*exact_leaves, labels), weights, exact_leaves)
    plain_out = plain(hidden, weight, labels)
    got = linear_log_probs(
        hidden, weight, labels, chunk_size=chunk_size, entropy=True, entropy_grad=True
    )
    for a, b in zip(plain_out, got, strict=True):
        assert b.dtype == torch.float32
        torch.testing.assert_close(b, a, atol=1e-5, rtol=1e-5)
    rough, fine = (
        gradients(plain_out, weights, (hidden, weight)),
        gradients(got, weights, (hidden, weight)),
    )
    for true, a, b in zip(exact, rough, fine, strict=True):
        assert b.dtype == torch.bfloat16
        error, plain_error = (b - true).norm() / true.norm(), (a - true).norm() / true.norm()
        assert float(error) < 1.2 * float(plain_error) < 0.02


@pytest.mark.parametrize("chunk_size", [None, 1])
def test_forbidden_and_extreme_logits(chunk_size):
    """A bias of -inf takes a token out; logits of ±300 neither overflow nor vanish."""
    hidden = torch.tensor([[1.0], [300.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0], [-1.0]], requires_grad=True)
    bias = torch.tensor([0.0, -math.inf, 0.0])
    log_probs, entropy = linear_log_probs(
        hidden, weight, torch.tensor([2, 2]), bias, 1.0, chunk_size, True, True
    )
    p = 1 / (1 + math.exp(2))  # logits (1, -inf, -1); the second row has (300, -inf, -300)
    assert log_probs.tolist() == pytest.approx([math.log(p), -600])
    assert entropy.tolist() == pytest.approx(
        [-p * math.log(p) - (1 - p) * math.log(1 - p), 0], abs=1e-6
    )
    (log_probs.sum() + 3 * entropy.sum()).backward()
    assert bool(weight.grad.isfinite().all())
    assert bool(hidden.grad.isfinite().all())
    assert weight.grad[1].item() == 0
    # second row: (∂ log p_2/∂x) · h = (-300, 0, 300); its entropy has no gradient. First row: E' = -p_v (ln p_v + E)
    e = -p * math.log(p) - (1 - p) * math.log(1 - p)
    assert weight.grad[2].item() == pytest.approx(
        300 + (1 - p) - 3 * p * (math.log(p) + e), rel=1e-5
    )


def test_no_tokens_at_all_linear():
    hidden, weight, bias, _, _ = inputs(tokens=0)
    out = linear_log_probs(
        hidden, weight, torch.zeros(0, dtype=torch.long), bias, 0.7, None, True, True
    )
    assert [x.shape for x in out] == [(0,), (0,)]
    (out[0].sum() + out[1].sum()).backward()  # every rank runs the same backward
    assert float(weight.grad.abs().max()) == float(bias.grad.abs().max()) == 0


class Largest(TorchDispatchMode):
    """The numbers of elements of all tensors made meanwhile that are no views."""

    def __init__(self):
        super().__init__()
        self.sizes = [0]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple) else (out,):
            if isinstance(x, torch.Tensor):
                self.sizes.append(x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_tensor_is_one_chunk(dtype):
    hidden, weight, bias, labels, weights = inputs(60, 2, 100, dtype)
    with Largest() as largest:
        out = linear_log_probs(hidden, weight, labels, bias, 0.7, 10, True, True)
        gradients(out, weights, (hidden, weight, bias))
    assert max(largest.sizes) == 10 * 100


def test_the_default_chunk_is_bounded_whatever_the_vocabulary(monkeypatch):
    monkeypatch.setattr(head_module, "CHUNK_ELEMENTS", 1000)
    for vocabulary in (20, 200, 499):
        hidden, weight, _, labels, weights = inputs(100, 2, vocabulary)
        with Largest() as largest:
            gradients(linear_log_probs(hidden, weight, labels), weights, (hidden, weight))
        assert 500 < max(largest.sizes) <= 1000


MEASURE = """
import re, torch
from lightppo.algorithms.logprobs import log_probs_and_entropy
from lightppo.models.kernels.linear_log_probs import linear_log_probs

def peak():
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

def chunked(hidden, weight, labels):
    return linear_log_probs(hidden, weight, labels, chunk_size=2**23 // len(weight), entropy=True)

def plain(hidden, weight, labels):
    return log_probs_and_entropy(hidden @ weight.T, labels)

torch.set_num_threads(1)
hidden, weight = torch.randn(3072, 16).requires_grad_(), torch.randn(2**15, 16).requires_grad_()
labels = torch.zeros(3072, dtype=torch.long)
for form in (chunked, plain):  # the one that takes more comes last
    form(hidden[:8], weight[:64], labels[:8])[0].sum().backward()  # what a first call loads
    before = peak()
    form(hidden, weight, labels)[0].sum().backward()
    print(peak() - before)
"""


@pytest.mark.long  # the sizes of tensors, above, say it without a process
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="the peak of a process is read from /proc"
)
def test_memory_of_a_process_does_not_grow_with_the_logits():
    """Two buffers of 32 MiB in chunks of 2^23 numbers; the plain form makes three of (T, V): 1152 MiB.

    The bounds are far from both, for an allocator keeps more than it was asked for: 160 MiB were seen.
    """
    output = subprocess.run(
        [sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True
    ).stdout
    chunked, plain = map(int, output.split())
    assert chunked < 12 * 2**25
    assert plain > 24 * 2**25  # what is measured is what the logits take


def test_bad_input_linear():
    hidden, weight, labels = torch.zeros(3, 5), torch.zeros(7, 5), torch.zeros(3, dtype=torch.long)
    for temperature in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="--temperature"):
            linear_log_probs(hidden, weight, labels, temperature=temperature)
    with pytest.raises(ValueError, match=r"labels \(2,\)"):
        linear_log_probs(hidden, weight, labels[1:])
