"""The experts of sampled responses, as decoding chose them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families.zoo import random_model
from support.tiny import save_tokenizer

from lightppo.data.records import Prompt
from lightppo.experience.experience import Experience
from lightppo.models.actor import Actor
from lightppo.models.router_replay import RouterReplay, unknown
from lightppo.rollout.engine import SamplingParams
from lightppo.rollout.hf import HFRolloutEngine


@pytest.mark.parametrize("family", ["qwen3_moe", "llama4_text"])  # in slots, and batch by batch
def test_decoding_says_which_experts_it_chose(family: str, tmp_path: Path) -> None:
    actor = Actor(random_model(family, attention="sdpa"))
    actor.router_replay = RouterReplay(actor.hf_model)
    engine = HFRolloutEngine(
        actor, save_tokenizer(tmp_path), micro_rollout_batch_size=3, records_experts=True
    )
    prompts = [Prompt("", ids, index=i) for i, ids in enumerate(([5, 6, 7, 8], [9, 10], [11]))]
    rollouts = engine.generate(
        prompts, SamplingParams(max_new_tokens=6, n=2, seed=1, stop_token_ids=tuple(range(20, 44)))
    )
    assert len({len(rollout.response_ids) for rollout in rollouts}) > 1  # slots were filled again
    batch = Experience.from_rollouts(rollouts)
    scores = actor.score_actions(
        batch.sequences, batch.num_actions, batch.attention_mask, record_experts=True
    )
    is_known = (batch.experts != unknown(batch.experts.dtype)).all(-1).all(-1)  # (B, S)
    lengths = batch.total_lengths - 1  # nothing reads the last token
    assert torch.equal(is_known.sum(1), lengths)
    # in float32 the forward pass chooses the same; the order of two that are chosen may differ
    assert torch.equal(
        batch.experts[is_known].sort().values, scores.experts[is_known].sort().values
    )
