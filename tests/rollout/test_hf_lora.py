"""Hugging Face rollouts see the adapters: they are those of the merged model, and leave the adapters on."""

from __future__ import annotations

import pytest
import torch

from lightppo.models.actor import Actor
from lightppo.models.lora import AdaptersOff, LoraOptions, add_adapters
from lightppo.rollout.engine import SamplingParams
from lightppo.rollout.hf import HFRolloutEngine
from lightppo.rollout.weight_sync import full_weights

SAMPLING = {
    "greedy": SamplingParams(max_new_tokens=12, temperature=0.0),
    "sampled": SamplingParams(max_new_tokens=12, n=2, seed=4),
}


@pytest.mark.parametrize("name", SAMPLING)
def test_rollouts_are_those_of_the_merged_model(make_llama, tokenizer, prompts, name):
    def rollouts(actor):
        engine = HFRolloutEngine(actor, tokenizer, micro_rollout_batch_size=4)
        return [(r.response_ids, r.log_probs) for r in engine.generate(prompts, SAMPLING[name])]

    actor = Actor(make_llama())
    before = rollouts(actor)
    add_adapters(actor, LoraOptions(rank=4, dropout=0.5))  # dropout is off in rollouts
    actor.train()
    assert [ids for ids, _ in rollouts(actor)] == [ids for ids, _ in before]

    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in actor.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    merged = make_llama()
    merged.load_state_dict(dict(full_weights(actor)))
    ours, theirs = rollouts(actor), rollouts(Actor(merged))
    assert [ids for ids, _ in ours] == [ids for ids, _ in theirs]
    assert [ids for ids, _ in ours] != [ids for ids, _ in before]
    for (_, a), (_, b) in zip(ours, theirs):
        torch.testing.assert_close(torch.tensor(a), torch.tensor(b), atol=1e-4, rtol=0)

    actor.eval()
    ids = torch.tensor([prompts[2].token_ids])
    reference, separate = AdaptersOff(actor).score_actions(ids, 5), Actor(make_llama()).eval().score_actions(ids, 5)
    assert torch.equal(reference.log_probs, separate.log_probs)
    assert not torch.equal(actor.score_actions(ids, 5).log_probs, reference.log_probs)
