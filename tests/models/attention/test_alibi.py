"""Bloom, MPT and Falcon with alibi train on padded batches; packing says why it cannot."""

from __future__ import annotations

import pytest
import torch
from support.fixtures.families import Batch, batch_of
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    MptConfig,
    PreTrainedModel,
)

from lightppo.errors import PackingNotSupportedError
from lightppo.models.actor import Actor

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
    draw = torch.Generator().manual_seed(2)
    ids = lambda n: torch.randint(3, 48, (n,), generator=draw).tolist()  # noqa: E731
    prompt = ids(13)
    return batch_of([(prompt, ids(2)), (ids(8), ids(9)), (prompt, ids(20)), (ids(3), ids(4))])


def gradients(actor: Actor, log_probs: Tensor) -> dict[str, Tensor]:
    actor.zero_grad()
    log_probs.backward()
    return {name: p.grad.clone() for name, p in actor.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_batches_train_as_each_sequence_alone(family: str, groups: Batch) -> None:
    sequences, mask, num_actions = groups
    actor = Actor(model_of(family), packing_samples=None)
    assert actor.layout.try_packing(CPU) is not None
    assert not actor.layout.packs
    padded = actor(sequences, num_actions, mask)
    alone = torch.zeros_like(padded)
    for row, (ids, real) in enumerate(zip(sequences, mask.bool())):
        count = int(real[-num_actions:].sum())
        alone[row, real[-num_actions:]] = actor(ids[real][None], count)[0]
    torch.testing.assert_close(padded, alone, atol=1e-6, rtol=0)
    weights = torch.linspace(-1, 1, padded.numel()).view_as(padded)
    of_batch = gradients(actor, (padded * weights).sum())
    of_sequences = gradients(actor, (alone * weights).sum())
    assert of_batch.keys() == of_sequences.keys()
    for name, gradient in of_sequences.items():
        torch.testing.assert_close(of_batch[name], gradient, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_packing_is_refused_with_the_reason(family: str) -> None:
    with pytest.raises(PackingNotSupportedError) as refusal:
        Actor(model_of(family), packing_samples=True)
    model_type = family.partition(",")[0]
    assert str(refusal.value) == (
        f"--packing_samples does not work with model type {model_type!r}: its attention has alibi, which would count "
        "positions from the start of the row. Leave it out."
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_without_the_option_it_pads_and_says_why(family: str) -> None:
    actor = Actor(model_of(family), packing_samples=None)
    own = actor.hf_model.config._attn_implementation
    assert "its attention has alibi" in actor.layout.try_packing(CPU)
    assert actor.hf_model.config._attn_implementation == own
