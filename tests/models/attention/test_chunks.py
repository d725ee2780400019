"""Llama 4 in packed rows: chunks, and queries that are scaled by their positions."""

from __future__ import annotations

import pytest
import torch
from support.fixtures.families import COMMON, KV, Batch, batch_of
from transformers import AutoModelForCausalLM, Llama4TextConfig, PreTrainedModel

from lightppo.models.actor import Actor
from lightppo.models.attention.chunks import PACKED_CHUNKS, chunks_as_segments
from lightppo.models.batches import segments_as_mask

CPU = torch.device("cpu")


def llama4(**changes: object) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Llama4TextConfig(
        **COMMON | KV | {"initializer_range": 0.1} | changes,
        intermediate_size_mlp=48,
        num_local_experts=4,
        num_experts_per_tok=1,
        attention_chunk_size=8,
        no_rope_layers=[1, 0],
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()


@pytest.fixture
def groups() -> Batch:
    """Prompts of 13, 8 and 3 tokens with 2, 2 and 1 responses: some end inside a chunk, one at its end."""
    draw = torch.Generator().manual_seed(2)
    ids = lambda n: torch.randint(3, 48, (n,), generator=draw).tolist()  # noqa: E731
    long, even, short = ids(13), ids(8), ids(3)
    rows = [(long, ids(2)), (even, ids(9)), (long, ids(20)), (short, ids(4)), (even, ids(1))]
    return batch_of(rows)


def results(actor: Actor, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    sequences, mask, num_actions = batch
    log_probs = actor(sequences, num_actions, mask)
    (log_probs * torch.linspace(-1, 1, log_probs.numel()).view_as(log_probs)).sum().backward()
    return log_probs.detach(), {
        n: p.grad for n, p in actor.named_parameters() if p.grad is not None
    }


def test_packed_is_padded(groups: Batch) -> None:
    expected, gradients = results(Actor(llama4()), groups)
    for shares in (False, True):
        actor = Actor(llama4(), packing_samples=True, share_prompts=shares)
        assert actor.hf_model.config._attn_implementation == PACKED_CHUNKS
        assert actor.layout.shares_prompts == shares
        found, same = results(actor, groups)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
        assert same.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(same[name], gradient, atol=1e-5, rtol=1e-4, msg=name)


def test_queries_are_scaled_by_their_positions(groups: Batch) -> None:
    """As each sequence alone; transformers counts the padding in front of a padded one."""
    sequences, mask, num_actions = groups
    tuned = {"attn_temperature_tuning": True, "floor_scale": 4, "attn_scale": 2.0}
    plain, packed = Actor(llama4(**tuned)), Actor(llama4(**tuned), packing_samples=True)
    with torch.no_grad():
        found = packed(sequences, num_actions, mask)
        for row, ids, real in zip(found, sequences, mask.bool()):
            own = ids[real][None]
            responses = int(real[-num_actions:].sum())
            alone = plain(own, responses)
            torch.testing.assert_close(row[:responses], alone[0], atol=1e-6, rtol=0)


def test_chunks_by_hand() -> None:
    """Chunks of 4: a prompt of 6 is 4 + 2, its response of 7 goes on with 2, then 4 and 1."""
    plan = segments_as_mask([6, 7, 4, 1], [-1, 0, -1, 2]).plan
    lengths, parents = chunks_as_segments(plan, 4, torch.zeros(1))[0, 0].tolist()
    assert lengths == [4, 2, 2, 4, 1, 4, 1]
    assert parents == [-1, -1, 1, -1, -1, -1, -1]


def test_other_attention_is_refused_in_one_line() -> None:
    model = llama4()
    model.set_attn_implementation("eager")
    reason = Actor(model, packing_samples=None).layout.try_packing(CPU)
    assert "--attn_implementation sdpa" in reason
    assert "\n" not in reason
