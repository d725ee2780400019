"""``--activation_offload`` by a stream of copies. Copies run late here, so that each wait that is missing shows."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from support.late_streams import LateStreams
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from lightppo.models.actor import Actor
from lightppo.models.critic import Critic
from lightppo.models.kernels import offload
from lightppo.models.kernels.offload import ActivationOffload, OwnWeights, offloading

MakeModel = Callable[..., PreTrainedModel]
Batch = tuple[Tensor, Tensor, int]
Loss = Callable[[Tensor, list[nn.Parameter]], Tensor]

SIZE = 8
NBYTES = 4 * SIZE * SIZE  # of one activation


@pytest.fixture
def streams() -> Iterator[LateStreams]:
    with LateStreams() as streams:
        yield streams


def small_offload(streams: LateStreams, **bounds: int) -> ActivationOffload:
    """All leaves, nearly nothing stays."""
    return ActivationOffload(
        streams, **{"smallest": 1, "leaving": 0, "ahead": 2 * NBYTES, "slab": 1 << 12, **bounds}
    )


def make_weights(count: int = 4) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(SIZE, SIZE, generator=generator)) for _ in range(count)]


def gradients(
    loss_of: Loss, around: AbstractContextManager, weights: list[nn.Parameter]
) -> list[Tensor]:
    x = torch.linspace(-1, 1, SIZE * SIZE).view(SIZE, SIZE).requires_grad_()
    with around:
        loss = loss_of(x, weights)
    return list(torch.autograd.grad(loss, [x, *weights], allow_unused=True))


def chain(x: Tensor, weights: list[nn.Parameter]) -> Tensor:
    for weight in weights:
        x = torch.tanh(x @ weight) + x
    return x.square().sum()


def checkpointed(x: Tensor, weights: list[nn.Parameter]) -> Tensor:
    for weight in weights:
        x = checkpoint(
            lambda x, weight: torch.tanh(x @ weight).exp(), x, weight, use_reentrant=False
        )
    return x.square().sum()


def saved_twice(x: Tensor, weights: list[nn.Parameter]) -> Tensor:
    h = torch.sin(x)
    return (h * h + h @ weights[0] + h @ weights[1] + h.exp() * h).square().sum()


def views(x: Tensor, weights: list[nn.Parameter]) -> Tensor:
    """Halves, every second column, transposed, repeated, as other numbers, of one memory."""
    h = torch.sin(x)
    first, second = h.chunk(2, 1)
    gaps = h[:, ::2] * h[:, 1::2]
    turned = h.t() @ weights[0].t() * h.T
    repeated = h[0].expand(SIZE, SIZE) * h * h[:, :1].expand_as(h)
    return (first * second + gaps).exp().sum() + (turned * repeated + weights[1] * h).square().sum()


def other_types(x: Tensor, weights: list[nn.Parameter]) -> Tensor:
    h = torch.sin(x)
    picked = torch.where(h > 0, h @ weights[0], h.double().cos().float())
    places = torch.tensor([1, 0, 3, 2, 7, 6, 5, 4])
    return nn.functional.embedding(places, picked).bfloat16().square().sum().float()


LOSSES = [chain, checkpointed, saved_twice, views, other_types]


@pytest.mark.parametrize("loss_of", LOSSES)
@pytest.mark.parametrize("bounds", [{}, {"ahead": 0}, {"leaving": 1 << 30}, {"ahead": 1 << 30}])
def test_gradients_are_the_same_to_the_last_bit(
    loss_of: Loss, bounds: dict[str, int], streams: LateStreams
) -> None:
    weights = make_weights()
    plain = gradients(loss_of, nullcontext(), weights)
    kept = small_offload(streams, **bounds)
    for _ in range(3):
        offloaded = gradients(loss_of, kept.around(OwnWeights(weights)), weights)
        torch.testing.assert_close(offloaded, plain, atol=0, rtol=0)
    assert streams.finish() == []
    assert streams.counts["to the CPU"] >= 9
    assert (streams.counts["back"] > 0) == ("leaving" not in bounds)


def test_each_wait_is_needed() -> None:
    """Without any one of them numbers are wrong, or memory is given away too early."""

    def run(left_out: tuple[str, int] | None) -> LateStreams:
        with LateStreams() as streams:
            streams.left_out = left_out
            weights = make_weights()
            kept = small_offload(streams)
            for loss_of in (chain, checkpointed, saved_twice, views):
                plain = gradients(loss_of, nullcontext(), weights)
                offloaded = gradients(loss_of, kept.around(OwnWeights(weights)), weights)
                for one, other in zip(offloaded, plain):
                    if one is not None and not torch.equal(one, other):
                        streams.wrongs.append("other gradients")
            with kept.around(OwnWeights(weights)):  # read in part, then dropped
                losses = [chain(torch.ones(SIZE, SIZE), weights) for _ in range(2)]
            with pytest.raises(RuntimeError, match="no further"):
                stop_within_backward(losses.pop())
            losses.clear()
            gradients(chain, kept.around(OwnWeights(weights)), weights)
            streams.finish()
        return streams

    right = run(None)
    assert right.wrongs == []
    # before a copy to the CPU; before one back; before its numbers are read; before memory is given away, in the forward
    # pass and when nobody needs it any more
    assert len(right.lines) == 5, right.lines
    for line in right.lines:
        assert run(line).wrongs, line


def stop_within_backward(loss: Tensor) -> None:
    seen = []

    def stop(*_: Any) -> None:
        seen.append(0)
        if len(seen) == 4:
            raise RuntimeError("no further")

    node = loss.grad_fn
    while node is not None:
        node.register_hook(stop)
        node = next((each for each, _ in node.next_functions if each is not None), None)
    loss.backward()


@pytest.mark.parametrize(
    "checkpoints", [None, False, True], ids=["all", "checkpoints", "reentrant"]
)
@pytest.mark.parametrize("kind", ["padded", "packed", "critic"])
def test_models_train_the_same(
    kind: str,
    checkpoints: bool | None,
    causal_lm: MakeModel,
    classifier: MakeModel,
    ragged: Batch,
    streams: LateStreams,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = small_offload(streams, slab=1 << 16)
    monkeypatch.setattr(offload, "offload_of", lambda device: kept)
    model = Critic(classifier()) if kind == "critic" else Actor(causal_lm())
    if kind == "packed":
        model = Actor(causal_lm(), packing_samples=True)
    if checkpoints is not None:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": checkpoints})
        model.hf_model.enable_input_require_grads()
    found = []
    for offloads in (False, True, True):
        model.around_pass = offloading if offloads else None
        model.zero_grad()
        sequences, mask, num_actions = ragged
        out = model(sequences, num_actions, mask)
        out.square().sum().backward()
        found.append([out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) > 10
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=0, rtol=0)
    assert streams.finish() == []
    assert streams.counts["to the CPU"] >= 4
    with torch.no_grad():  # nothing is kept
        before = streams.counts["to the CPU"]
        model(sequences, num_actions, mask)
    assert streams.counts["to the CPU"] == before


def test_weights_small_tensors_and_other_devices_stay(streams: LateStreams) -> None:
    weights = make_weights(2)
    kept = small_offload(streams, smallest=NBYTES)
    own = OwnWeights(weights)
    with kept.around(own):
        x = torch.ones(SIZE, SIZE, requires_grad=True)
        assert (x @ weights[0]).grad_fn._saved_mat2.data_ptr() == weights[0].data_ptr()
        assert streams.counts["to the CPU"] == 1
        small = x[0].sin()
        far = torch.ones(SIZE, SIZE, device="meta", requires_grad=True).sin()
        assert streams.counts["to the CPU"] == 1
        row = torch.ones(1, SIZE, requires_grad=True)
        (row.expand(SIZE, SIZE) * x.cos()).sum()
        # x for its cosine, and that; not the row, which is one in memory
        assert streams.counts["to the CPU"] == 3
    assert small.grad_fn._saved_self.data_ptr() == x.data_ptr()
    assert far.grad_fn._saved_self.is_meta
    few = torch.eye(SIZE).to_sparse()
    with small_offload(streams).around(own):
        product = torch.sparse.mm(few, x)
    assert product.grad_fn._saved_mat1.is_sparse


def test_backward_twice(streams: LateStreams) -> None:
    weights = make_weights()
    kept = small_offload(streams)

    def twice(around: AbstractContextManager) -> list[Tensor]:
        with around:
            loss = chain(torch.ones(SIZE, SIZE), weights)
        once = torch.autograd.grad(loss, weights, retain_graph=True)
        assert kept.on_device() <= 4 * NBYTES  # though the graph lives
        return [*once, *torch.autograd.grad(loss, weights)]

    plain = twice(nullcontext())
    torch.testing.assert_close(twice(kept.around(OwnWeights(weights))), plain, atol=0, rtol=0)
    assert streams.finish() == []


def test_two_forward_passes_before_a_backward_pass(streams: LateStreams) -> None:
    weights = make_weights()
    kept = small_offload(streams)

    def both(around: Callable[[], AbstractContextManager]) -> list[Tensor]:
        with around():
            first = chain(torch.ones(SIZE, SIZE), weights)
        with around():
            second = checkpointed(torch.full((SIZE, SIZE), 0.5), weights)
        return list(torch.autograd.grad(first + second, weights))

    plain = both(nullcontext)
    torch.testing.assert_close(
        both(lambda: kept.around(OwnWeights(weights))), plain, atol=0, rtol=0
    )
    assert streams.finish() == []


def test_an_error_in_the_forward_pass_leaves_nothing_behind(streams: LateStreams) -> None:
    weights = make_weights()
    kept = small_offload(streams, leaving=1 << 30)
    halves = []

    def fail(x: Tensor, weights: list[nn.Parameter]) -> Tensor:
        halves.append(chain(x, weights))
        assert kept.on_device() > 0
        return x @ x[:3]

    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        gradients(fail, kept.around(OwnWeights(weights)), weights)
    assert kept.on_device() == 0
    halves.clear()
    gc.collect()
    plain = gradients(chain, nullcontext(), weights)
    taken = streams.counts["taken"]
    torch.testing.assert_close(
        gradients(chain, kept.around(OwnWeights(weights)), weights), plain, atol=0, rtol=0
    )
    assert streams.counts["taken"] == taken
    assert streams.finish() == []


def test_cpu_memory_is_taken_once(streams: LateStreams) -> None:
    """Micro batches have other lengths each time; a smaller one takes nothing."""
    weights = make_weights()
    kept = small_offload(streams, slab=1 << 10)

    def step(rows: int) -> None:
        with kept.around(OwnWeights(weights)):
            loss = chain(torch.ones(rows, SIZE), weights)
        loss.backward()

    step(40)
    taken = streams.counts["taken"], [len(slab) for slab in streams.slabs]
    assert taken[0] > 1
    assert all(size == 1 << (size - 1).bit_length() >= 1 << 10 for size in taken[1])
    for rows in (40, 7, 33, 40, 12, 39):
        step(rows)
    assert streams.counts["taken"] == taken[0]
    assert streams.finish() == []


def test_the_device_holds_little(streams: LateStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many layers there are."""
    kept = small_offload(streams, leaving=3 * NBYTES, ahead=2 * NBYTES)
    most = []
    copy = streams.copy
    monkeypatch.setattr(
        streams, "copy", lambda *tensors: (copy(*tensors), most.append(kept.on_device()))
    )
    for layers in (4, 16):
        weights = make_weights(layers)
        gradients(chain, kept.around(OwnWeights(weights)), weights)
        assert max(most) <= 4 * NBYTES  # and one whose copy was queued just now
        assert kept.on_device() <= NBYTES


def test_activations_are_back_before_they_are_needed(streams: LateStreams) -> None:
    """The next ones come while the device computes; without that it would wait for each."""
    weights = make_weights(12)
    plain = gradients(checkpointed, nullcontext(), weights)
    for ahead, waits in ((0, 1), (2 * NBYTES, 1)):
        kept = small_offload(streams, ahead=ahead)
        streams.head_starts.clear()
        offloaded = gradients(checkpointed, kept.around(OwnWeights(weights)), weights)
        torch.testing.assert_close(offloaded, plain, atol=0, rtol=0)
        assert sum(start == 0 for start in streams.head_starts) <= waits
        assert sum(start >= 5 for start in streams.head_starts) >= 8


# -- which of the two -------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu_of_streams(streams: LateStreams, monkeypatch: pytest.MonkeyPatch) -> Iterator[LateStreams]:
    monkeypatch.setattr(offload, "CUDAStreams", lambda device: streams)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    offload.offload_of.cache_clear()
    yield streams
    offload.offload_of.cache_clear()


def test_a_gpu_is_tried_once(
    gpu_of_streams: LateStreams, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(offload, "SLAB", 1 << 20)
    before = torch.get_rng_state()
    found = offload.offload_of(torch.device("cuda", 0))
    assert isinstance(found, ActivationOffload)
    assert torch.equal(torch.get_rng_state(), before)
    assert (found.smallest, found.most_leaving, found.most_ahead) == (
        offload.SMALLEST,
        offload.LEAVING,
        offload.AHEAD,
    )
    assert found.on_device() == 0
    copies = gpu_of_streams.counts["back"]
    assert copies > 8
    assert offload.offload_of(torch.device("cuda", 0)) is found
    assert gpu_of_streams.counts["back"] == copies
    assert offload.offload_of(torch.device("cpu")) is None
    assert not caplog.records


@pytest.mark.parametrize("who", ["compute", "copying"])
def test_a_gpu_with_other_gradients_copies_plainly(
    who: str,
    gpu_of_streams: LateStreams,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(getattr(gpu_of_streams, who), "wait_event", lambda event: None)
    with caplog.at_level(logging.WARNING, "lightppo"):
        for _ in range(2):
            assert offload.offload_of(torch.device("cuda", 0)) is None
    assert [record.getMessage() for record in caplog.records] == [
        "--activation_offload copies in the order of the computation, which takes longer: on a GPU a stream of copies "
        "gave other gradients"
    ]
