"""Bloom, MPT and Falcon with alibi in packed rows."""

from __future__ import annotations

import copy

import pytest
import torch
from support.fixtures.families import Batch, batch_of
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BloomConfig,
    FalconConfig,
    MptConfig,
    PreTrainedModel,
)

from lightppo.models.actor import Actor
from lightppo.models.attention.alibi import PACKED_ALIBI, sequences_of
from lightppo.models.batches import segments_as_mask
from lightppo.models.critic import Critic

CPU = torch.device("cpu")
# 6 heads: the slopes of the last two are made otherwise
SIZES = {"vocab_size": 48, "hidden_size": 48, "initializer_range": 0.1, "pad_token_id": 0}
FAMILIES = {
    "bloom": lambda: BloomConfig(**SIZES, n_layer=2, n_head=6),
    "mpt": lambda: MptConfig(
        **SIZES | {"d_model": 48}, n_layers=2, n_heads=6, max_seq_len=40, expansion_ratio=2
    ),
    "falcon": lambda: FalconConfig(
        **SIZES, num_hidden_layers=2, num_attention_heads=6, alibi=True, multi_query=False
    ),
    "falcon, one key": lambda: FalconConfig(
        **SIZES, num_hidden_layers=2, num_attention_heads=6, alibi=True, bias=True
    ),
}


def model_of(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(FAMILIES[family]()).train()


@pytest.fixture
def groups() -> Batch:
    """Prompts of 13, 8 and 3 tokens with 2, 2 and 1 responses: 76 tokens, more than a sequence may have in MPT."""
    draw = torch.Generator().manual_seed(2)
    ids = lambda n: torch.randint(3, 48, (n,), generator=draw).tolist()  # noqa: E731
    long, even, short = ids(13), ids(8), ids(3)
    rows = [(long, ids(2)), (even, ids(9)), (long, ids(20)), (short, ids(4)), (even, ids(1))]
    return batch_of(rows)


def results(model: Actor | Critic, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    sequences, mask, num_actions = batch
    numbers = model(sequences, num_actions, mask)
    (numbers * torch.linspace(-1, 1, numbers.numel()).view_as(numbers)).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return numbers.detach(), gradients


def assert_same(one: tuple[Tensor, dict[str, Tensor]], other: tuple[Tensor, dict]) -> None:
    torch.testing.assert_close(one[0], other[0], atol=1e-6, rtol=0)
    assert one[1].keys() == other[1].keys()
    for name, gradient in other[1].items():
        torch.testing.assert_close(one[1][name], gradient, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_is_padded(family: str, shares: bool, groups: Batch) -> None:
    expected = results(Actor(model_of(family)), groups)
    actor = Actor(model_of(family), packing_samples=True, share_prompts=shares)
    assert actor.hf_model.config._attn_implementation == PACKED_ALIBI
    assert actor.layout.shares_prompts == shares
    assert_same(results(actor, groups), expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["bloom", "mpt", "falcon"])
def test_with_gradient_checkpointing(family: str, reentrant: bool, groups: Batch) -> None:
    expected = results(Actor(model_of(family)), groups)
    actor = Actor(model_of(family), packing_samples=True)
    actor.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        actor.hf_model.enable_input_require_grads()
    assert_same(results(actor, groups), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_neighbour_changes_nothing(family: str) -> None:
    """Values are equal to the bit, and no gradient reaches it."""
    actor = Actor(model_of(family), packing_samples=True)
    model = actor.hf_model
    embedded = model.get_input_embeddings()(torch.arange(3, 17)[None]).detach()
    outputs = []
    for first in (embedded[:, :6], embedded[:, :6].flip(1)):
        row = torch.cat([first, embedded[:, 6:]], 1).requires_grad_()
        output = model(inputs_embeds=row, attention_mask=segments_as_mask([6, 8]), use_cache=False)
        outputs.append(output.logits[:, 6:])
        (gradient,) = torch.autograd.grad(outputs[-1].square().sum(), row)
        assert not gradient[:, :6].any()
        assert gradient[:, 6:].abs().amin() > 0
    assert torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize("family", ["bloom", "mpt", "falcon"])
def test_it_goes_back_to_its_own_attention(family: str, groups: Batch) -> None:
    """And padded batches are the same to the bit while it packs."""
    sequences, mask, num_actions = groups
    plain = AutoModelForCausalLM.from_config(FAMILIES[family]()).eval()
    own = plain.config._attn_implementation
    known = copy.deepcopy(plain)
    with torch.no_grad():
        before = plain(sequences, attention_mask=mask).logits
        actor = Actor(known, packing_samples=None).eval()
        padded = actor(sequences, num_actions, mask)
        assert actor.layout.try_packing(CPU) is None
        assert actor.layout.obstacle(CPU) is None
        assert actor.layout.shares_prompts
        assert torch.equal(known(sequences, attention_mask=mask).logits, before)
        actor.layout.stop_packing()
        assert known.config._attn_implementation == own
        assert torch.equal(actor(sequences, num_actions, mask), padded)


@pytest.mark.parametrize("family", ["bloom", "mpt", "falcon"])
def test_it_decodes_the_same_while_it_packs(family: str) -> None:
    ids = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]])
    options = {"attention_mask": (ids > 0).long(), "max_new_tokens": 6, "do_sample": False}
    model = model_of(family).eval()
    expected = copy.deepcopy(model).generate(ids, **options)
    assert torch.equal(
        Actor(model, packing_samples=True).hf_model.generate(ids, **options), expected
    )


def test_a_critic(groups: Batch) -> None:
    """Of the two families without position ids, MPT and Bloom, and of Falcon."""
    for family in ("bloom", "mpt", "falcon"):
        config = FAMILIES[family]()
        config.num_labels = 1
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(config)
        nn.init.normal_(model.score.weight, std=0.05)
        expected = results(Critic(copy.deepcopy(model)), groups)
        assert expected[0].abs().max() > 0.1
        assert_same(results(Critic(model, packing_samples=True), groups), expected)


@pytest.mark.parametrize("family", ["bloom", "mpt"])
def test_attention_by_hand(family: str) -> None:
    """softmax(q·k / sqrt(d) + slope (j - i)) v in a row of a sequence of 3, a prompt of 2 and its responses of 3 and
    1; slopes of 4 heads are 1/4, 1/16, 1/64 and 1/256 (arXiv:2108.12409)."""
    config = FAMILIES[family]()
    config.n_head = config.n_heads = 4
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    actor = Actor(model, packing_samples=True)
    seen: list[Tensor] = []
    layer = model.transformer.h[0].self_attention if family == "bloom" else None
    layer = model.transformer.blocks[0].attn if layer is None else layer
    layer.register_forward_hook(lambda module, args, output: seen.extend((args[0], output[0])))
    if family == "bloom":
        layer.register_forward_pre_hook(lambda module, args: (args[0], torch.zeros_like(args[1])))
    segments = segments_as_mask([3, 2, 3, 1], [-1, -1, 1, 1])
    with torch.no_grad():
        actor.hf_model(torch.arange(3, 12)[None], attention_mask=segments, use_cache=False)
        hidden, output = (tensor[0] for tensor in seen)  # (9, 48)
        prompt = [3, 4]
        for places, kept in (
            ([0, 1, 2], slice(0, 3)),
            (prompt, slice(3, 5)),
            ([*prompt, 5, 6, 7], slice(5, 8)),
            ([*prompt, 8], slice(8, 9)),
        ):
            alone = attended(layer, hidden[places])[-(kept.stop - kept.start) :]
            torch.testing.assert_close(output[kept], alone, atol=1e-6, rtol=0)


def attended(layer: nn.Module, hidden: Tensor) -> Tensor:
    """(S, H) -> (S, H)."""
    places = torch.arange(len(hidden))
    if hasattr(layer, "Wqkv"):
        parts = layer.Wqkv(hidden).view(-1, 3, 4, 12).transpose(1, 2)
        last = layer.out_proj
    else:
        parts, last = layer.query_key_value(hidden).view(-1, 4, 3, 12), layer.dense
    outputs = []
    for head, slope in enumerate((1 / 4, 1 / 16, 1 / 64, 1 / 256)):
        query, key, value = parts[:, head].unbind(1)
        scores = query @ key.T / 12**0.5 + slope * (places[None] - places[:, None])
        future = places[None] > places[:, None]
        outputs.append(scores.masked_fill(future, float("-inf")).softmax(-1) @ value)
    return last(torch.cat(outputs, -1))


def test_sequences_by_hand() -> None:
    """A prompt of 2 with responses of 1 and 3, and a sequence of 2: the prompt's outputs are the longest one's."""
    plan = segments_as_mask([2, 1, 3, 2], [-1, 0, 0, -1]).plan
    found = sequences_of(plan, CPU)
    assert [places.tolist() for places in found.places] == [
        [[0, 1, 3, 4, 5], [0, 1, 2, 0, 0], [6, 7, 0, 0, 0]]
    ]
    assert found.back.tolist() == [0, 1, 7, 2, 3, 4, 10, 11]
