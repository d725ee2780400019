"""Recurrent layers in packed rows: as padded ones, prompts once, and no neighbour in sight."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.far_device import FarDevice
from support.fixtures.families import Batch, batch_of
from support.hybrids import HYBRIDS, IN_ROWS, hybrid
from support.ranks import run_ranks
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from lightppo.errors import PackingNotSupportedError
from lightppo.models.actor import Actor
from lightppo.models.adapters.lora import LoraOptions, add_adapters
from lightppo.models.attention import recurrent
from lightppo.models.attention.recurrent import (
    FUNCTIONS,
    chunk_scan,
    convolution,
    delta_rule,
    fused_pass,
    run_by_segment,
    selective_scan,
)
from lightppo.models.batches import RowPlan
from lightppo.models.critic import Critic

CPU = torch.device("cpu")


@pytest.fixture
def groups() -> Batch:
    """Prompts of 19, 5, 1, 2 and 6 tokens in a row that mixes them; the last one has one response only."""
    draw = torch.Generator().manual_seed(2)
    ids = lambda n: torch.randint(3, 48, (n,), generator=draw).tolist()  # noqa: E731
    long, middle, short, two, alone = ids(19), ids(5), ids(1), ids(2), ids(6)
    rows = [(long, ids(4)), (middle, ids(3)), (short, ids(2)), (long, ids(1)), (alone, ids(8))]
    rows += [(middle, ids(3)), (long, ids(26)), (short, ids(7)), (middle, ids(5)), (two, ids(1))]
    return batch_of([*rows, (two, ids(3))])


def scores_and_gradients(model: Actor | Critic, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    sequences, mask, num_actions = batch
    model.train()
    model.zero_grad()
    scores = model(sequences, num_actions, mask)
    weights = torch.linspace(-1, 1, scores.numel()).view_as(scores)
    (scores * weights).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return scores.detach(), gradients


def assert_same(found: tuple[Tensor, dict], expected: tuple[Tensor, dict]) -> None:
    torch.testing.assert_close(found[0], expected[0], atol=1e-6, rtol=0)
    assert found[1].keys() == expected[1].keys()
    assert max(float(g.abs().max()) for g in expected[1].values()) > 1e-1
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, atol=1e-5, rtol=1e-4, msg=name)


@IN_ROWS
@pytest.mark.parametrize("family", HYBRIDS)
def test_packed_is_padded(family: str, groups: Batch) -> None:
    """Log probs and all gradients, with shared prompts and without."""
    expected = scores_and_gradients(Actor(hybrid(family)), groups)
    for shares in (False, True):
        actor = Actor(hybrid(family), packing_samples=True, share_prompts=shares)
        assert actor.layout.shares_prompts == shares
        assert_same(scores_and_gradients(actor, groups), expected)


@IN_ROWS
@pytest.mark.parametrize("reentrant", [False, True])
def test_with_gradient_checkpointing(reentrant: bool, groups: Batch) -> None:
    """Layers run again in the backward pass, when another row may have been through the model."""
    expected = scores_and_gradients(Actor(hybrid("qwen3_5")), groups)
    actor = Actor(hybrid("qwen3_5"), packing_samples=True)
    actor.gradient_checkpointing_enable({"use_reentrant": reentrant})
    actor.train()
    sequences, mask, num_actions = groups
    scores = actor(sequences, num_actions, mask)
    actor(sequences.flip(0)[:3], num_actions, mask.flip(0)[:3])
    weights = torch.linspace(-1, 1, scores.numel()).view_as(scores)
    (scores * weights).sum().backward()
    gradients = {name: p.grad for name, p in actor.named_parameters() if p.grad is not None}
    assert_same((scores.detach(), gradients), expected)


@IN_ROWS
def test_a_critic_and_a_copy(groups: Batch) -> None:
    model = hybrid("qwen3_next", AutoModelForSequenceClassification, num_labels=1)
    expected = scores_and_gradients(Critic(copy.deepcopy(model)), groups)
    critic = Critic(model, packing_samples=True)
    assert_same(scores_and_gradients(copy.deepcopy(critic), groups), expected)


@IN_ROWS
def test_with_adapters(groups: Batch) -> None:
    """On the projections of recurrent layers, too."""
    found = []
    for packs in (False, True):
        actor = Actor(hybrid("qwen3_5"), packing_samples=packs)
        options = LoraOptions(rank=4, alpha=8, target_modules=("in_proj_qkv", "out_proj"))
        add_adapters(actor, options, seed=1)
        with torch.no_grad():
            for name, parameter in actor.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(0.1)
        found.append(scores_and_gradients(actor, groups))
    assert any("in_proj_qkv" in name for name in found[0][1])
    assert_same(found[1], found[0])


@IN_ROWS
@pytest.mark.parametrize("shares", [False, True])
def test_no_layer_waits_for_a_gpu(shares: bool, groups: Batch) -> None:
    """However many layers there are."""
    waits = []
    for layers in (1, 3):
        kinds = [*["linear_attention"] * layers, "full_attention"]
        model = hybrid("qwen3_5", num_hidden_layers=layers + 1, layer_types=kinds)
        actor = Actor(model, packing_samples=True, share_prompts=shares).train()
        sequences, mask, num_actions = groups
        with FarDevice() as far:
            far.move(actor)
            sequences, mask = far.move(sequences), far.move(mask)
            actor(sequences, num_actions, mask)  # the first call also looks at packing
            far.waits.clear()
            actor(sequences, num_actions, mask).sum().backward()
        waits.append(far.waits)
    assert waits[0] == waits[1]
    assert 0 < waits[0].total() <= 6


@IN_ROWS
@pytest.mark.parametrize("family", ["qwen3_5", "lfm2", "bamba", "jamba"])
def test_no_neighbour_is_seen(family: str) -> None:
    """Other tokens in a sequence change nothing in another, to the last bit; in the prompt they change its responses."""
    rows = [([5, 6, 7, 8], [9, 10, 11]), ([20, 21], [22, 23]), ([5, 6, 7, 8], [30, 31])]
    actor = Actor(hybrid(family), packing_samples=True)
    sequences, mask, num_actions = batch_of(rows)
    with torch.no_grad():
        before = actor(sequences, num_actions, mask)
        for row, column in ((0, 4), (1, 2), (2, 5)):
            other = sequences.clone()
            other[row, column] = 40
            changed = (actor(other, num_actions, mask) != before).any(1)
            assert changed.tolist() == [i == row for i in range(3)]
        other = sequences.clone()
        other[[0, 2], 0] = 40
        assert (actor(other, num_actions, mask) != before).any(1).tolist() == [True, False, True]


@pytest.fixture
def scanned(monkeypatch: pytest.MonkeyPatch) -> Callable[[PreTrainedModel, str], list[int]]:
    """(model, a function of its module) -> positions that each call of the function gets from now on."""

    def watch(model: PreTrainedModel, name: str) -> list[int]:
        module = importlib.import_module(type(model).__module__)
        theirs = getattr(module, name)
        positions: list[int] = []

        @functools.wraps(theirs)
        def counting(states: Tensor, *args, **kwargs):
            positions.append(states.shape[0] * states.shape[1])
            return theirs(states, *args, **kwargs)

        monkeypatch.setattr(module, name, counting)
        recurrent._packed.cache_clear()
        return positions

    yield watch
    recurrent._packed.cache_clear()


@IN_ROWS
def test_a_prompts_state_is_computed_once(scanned: Callable) -> None:
    model = hybrid("qwen3_5")
    positions = scanned(model, "torch_chunk_gated_delta_rule")
    prompt = list(range(3, 23))
    batch = batch_of([(prompt, [30, 31, 32 + i]) for i in range(4)])
    actor = Actor(model, packing_samples=True)
    actor(batch[0], batch[2], batch[1])  # the first forward also compares packed with alone
    positions.clear()
    actor(batch[0], batch[2], batch[1])
    assert positions == [20, 4 * 3] * 2  # in each of its two recurrent layers


def test_layers_are_transformers_elsewhere() -> None:
    """Padded batches and decoding run their own code, under their own names."""
    model = hybrid("bamba")
    plain = copy.deepcopy(model)
    ids = torch.randint(3, 48, (2, 9))
    run_by_segment(model)
    with torch.no_grad():
        assert torch.equal(plain(ids).logits, model(ids).logits)
    mixer = model.model.layers[0].mamba
    assert type(mixer).__name__ == "BambaMixer"
    assert isinstance(mixer, type(plain.model.layers[0].mamba))
    assert inspect.signature(mixer.forward) == inspect.signature(
        plain.model.layers[0].mamba.forward
    )
    assert model.state_dict().keys() == plain.state_dict().keys()


@IN_ROWS
def test_with_flash_attn_the_borders_say_the_segments() -> None:
    """Attention layers get no mask then."""
    model = hybrid("lfm2")
    run_by_segment(model)
    seen: dict[str, torch.Tensor | None] = {}
    for layer in model.model.layers:
        layer.register_forward_pre_hook(
            lambda layer, args, kwargs: seen.update(
                {"attention" if layer.is_attention_layer else "conv": kwargs["attention_mask"]}
            ),
            with_kwargs=True,
        )
    ids = torch.randint(3, 48, (1, 9))
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]])
    with torch.no_grad():
        model(
            ids,
            position_ids=positions,
            use_cache=False,
            cu_seq_lens_q=torch.tensor([0, 5, 9], dtype=torch.int32),
        )
    assert seen["attention"] is None
    assert seen["conv"].tolist() == [[[[5, 4], [-1, -1]]]]


def test_layers_whose_code_is_not_known_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "is_mixer", lambda module: False)
    with pytest.raises(
        PackingNotSupportedError, match="layers of type conv: their code is not known"
    ) as caught:
        Actor(hybrid("lfm2"), packing_samples=True)
    assert "\n" not in str(caught.value)
    reason = Actor(hybrid("lfm2"), packing_samples=None).layout.try_packing(CPU)
    assert "layers of type conv: their code is not known" in reason
    monkeypatch.setattr(recurrent, "release_of", lambda package: (5, 15, 1))
    reason = Actor(hybrid("lfm2"), packing_samples=None).layout.try_packing(CPU)
    assert "layers of type conv: their code is not known before transformers 5.16" in reason


@IN_ROWS
def test_a_scan_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state would go on into the next sequence."""
    monkeypatch.delitem(FUNCTIONS, "torch_chunk_gated_delta_rule")
    recurrent._packed.cache_clear()
    reason = Actor(hybrid("qwen3_5"), packing_samples=None).layout.try_packing(CPU)
    recurrent._packed.cache_clear()
    assert "sees its neighbour" in reason


def test_a_scan_that_begins_with_a_state_by_hand() -> None:
    """One channel, one state: h_t = exp(A·d)·h + d·B·x, y = C·h, with softplus(d') = d."""
    inverse = lambda d: torch.log(torch.expm1(torch.tensor(d)))  # noqa: E731
    plan = RowPlan([1, 2], [-1, 0], CPU)
    calls: list[int] = []

    def scan(x, dt, A, B, C, D, delta_bias, return_last_state, delta_softplus):
        calls.append(x.shape[2])
        h, out = torch.zeros(1), []
        for t in range(x.shape[2]):
            d = torch.nn.functional.softplus(dt[0, 0, t])
            h = torch.exp(A[0, 0] * d) * h + d * B[0, 0, t] * x[0, 0, t]
            out.append(C[0, 0, t] * h)
        y = torch.stack(out).view(1, 1, -1)
        return (y, h.view(1, 1, 1)) if return_last_state else y

    x, B, C = (torch.tensor([[v]]) for v in ([2.0, 3.0, 5.0], [1.0, 2.0, 1.0], [1.0, 1.0, 2.0]))
    dt = torch.stack([inverse(d) for d in (1.0, 0.5, 2.0)]).view(1, 1, 3)
    y = selective_scan(plan, scan, x, dt, torch.tensor([[-1.0]]), B, C, delta_softplus=True)
    e = torch.e
    first = 1.0 * 1 * 2  # h after the prompt
    second = e**-0.5 * first + 0.5 * 2 * 3
    third = e**-2 * second + 2.0 * 1 * 5
    torch.testing.assert_close(y, torch.tensor([[[first, second, 2 * third]]]))
    assert calls == [1, 2]


def as_kernel(calls: list[tuple[tuple, dict]]) -> Callable:
    """As transformers wraps a function of causal-conv1d, flash-linear-attention or mamba-ssm."""
    is_new_implementation = True

    def wrapped(*args, **kwargs):
        assert is_new_implementation
        calls.append((args, kwargs))
        return "output"

    return wrapped


@pytest.mark.parametrize(
    ("ours", "inputs", "options", "told"),
    [
        (convolution, ["states", "weight"], {"activation": "silu"}, "seq_idx"),
        (delta_rule, ["q", "k", "v"], {"g": "g", "beta": "beta", "cu_seqlens": None}, "cu_seqlens"),
        (chunk_scan, ["x", "dt", "A", "B", "C"], {"chunk_size": 16}, "seq_idx"),
        (fused_pass, ["projected"], {"chunk_size": 16}, "seq_idx"),
    ],
)
def test_kernels_are_told_the_borders(
    ours: Callable, inputs: list[str], options: dict[str, object], told: str
) -> None:
    """Of a row without parents, which they take as it is."""
    plan = RowPlan([2, 1, 3], [-1, -1, -1], CPU)
    borders = {"seq_idx": [[0, 0, 1, 2, 2, 2]], "cu_seqlens": [0, 2, 3, 6]}
    inputs = [torch.zeros(1, 1, 6) for _ in inputs]
    calls: list[tuple[tuple, dict]] = []
    assert ours(plan, as_kernel(calls), *inputs, **options) == "output"
    ((args, kwargs),) = calls
    assert all(given is taken for given, taken in zip(inputs, args, strict=True))
    assert kwargs[told].tolist() == borders[told]
    assert kwargs[told].dtype == torch.int32
    assert options.keys() - {told} <= kwargs.keys()


def test_kernels_begin_with_the_state_of_a_parent() -> None:
    """In batches, by their own arguments."""
    plan = RowPlan([2, 1, 1], [-1, 0, 0], CPU)
    asked: list[tuple] = []
    is_new_implementation = True

    def rule(q, k, v, g, beta, initial_state, output_final_state):
        assert is_new_implementation
        asked.append((tuple(q.shape), initial_state, output_final_state))
        return v, torch.full((len(q), 1, 1, 1), 7.0) if output_final_state else None

    q = torch.arange(4.0).view(1, 4, 1, 1)
    output, _ = delta_rule(plan, rule, q, q, q, g=q[..., 0], beta=q[..., 0])
    assert torch.equal(output, q)
    (first, second) = asked
    assert first == ((1, 2, 1, 1), None, True)
    assert (second[0], second[2]) == ((2, 1, 1, 1), False)
    assert second[1].flatten().tolist() == [7.0, 7.0]
    assert fused_pass(plan, rule, q) is None


WORKER = Path(__file__).with_name("sharded_mixers_worker.py")


@IN_ROWS
def test_gradients_under_zero3(tmp_path: Path) -> None:
    """Two ranks whose rows differ in everything: neither waits for the other, and weights are there where they are
    read."""
    names = ["qwen3_5", "jamba"]
    prompt = list(range(3, 14))
    rows = [(prompt, [20, 21, 22]), (prompt, [23]), (prompt, [24, 25])]
    rows += [([5], [30, 31, 32, 33]), ([6, 7, 8], [34, 35]), ([9, 10], [36])]
    sequences, mask, num_actions = batch_of(rows)
    weights = torch.linspace(-1, 1, 6 * num_actions).view(6, num_actions)
    batch = {"sequences": sequences, "mask": mask, "weights": weights}
    saved = {"batch": batch, "num_actions": num_actions, "names": names}
    torch.save(saved, tmp_path / "batch.pt")
    expected = {}
    for name in names:
        model = hybrid(name)
        model.save_pretrained(tmp_path / name)
        (Actor(model)(sequences, num_actions, mask) * weights).sum().backward()
        expected[name] = {n: p.grad for n, p in model.named_parameters()}
    run_ranks(WORKER, tmp_path, world_size=2, timeout=400)
    found = torch.load(tmp_path / "found.pt")
    for name in names:
        assert found[name].keys() == expected[name].keys()
        for parameter, gradient in expected[name].items():
            if gradient is None:
                gradient = torch.zeros(())
            close = {"atol": 2e-5, "rtol": 1e-4, "msg": f"{name} {parameter}"}
            torch.testing.assert_close(
                found[name][parameter], gradient.expand_as(found[name][parameter]), **close
            )
