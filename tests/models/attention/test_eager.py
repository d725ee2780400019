"""Models that attend by their own code alone, in packed rows: attention sinks, capped scores."""

from __future__ import annotations

import pytest
import torch
from support.fixtures.families import COMMON, KV, Batch
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    Gemma2Config,
    GPTJConfig,
    GptOssConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from lightppo.models.actor import Actor
from lightppo.models.attention.eager import PACKED_EAGER, added_masks, eager_by_segment
from lightppo.models.batches import segments_as_mask

CPU = torch.device("cpu")
SIZES = COMMON | KV | {"initializer_range": 0.1, "sliding_window": 4}
FAMILIES = {
    "gpt_oss": lambda: GptOssConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, rope_scaling=None
    ),
    "gemma2": lambda: Gemma2Config(**SIZES, attn_logit_softcapping=0.5),
}


def model_of(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family](), attn_implementation="eager")
    if family == "gpt_oss":
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)  # as large as scores
    return model.train()


def results(actor: Actor, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    sequences, mask, num_actions = batch
    log_probs = actor(sequences, num_actions, mask)
    (log_probs * torch.linspace(-1, 1, log_probs.numel()).view_as(log_probs)).sum().backward()
    gradients = {name: p.grad for name, p in actor.named_parameters() if p.grad is not None}
    return log_probs.detach(), gradients


@pytest.fixture
def groups(ragged: Batch) -> Batch:
    """Each row of the ragged batch, and a sample of the first two prompts more."""
    sequences, mask, num_actions = ragged
    more = sequences[:2].clone()
    more[:, -num_actions:] = more[:, -num_actions:].flip(1) * mask[:2, -num_actions:]
    return torch.cat([sequences, more]), torch.cat([mask, mask[:2]]), num_actions


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_is_padded(family: str, groups: Batch) -> None:
    """Over windows that are shorter than the rows; of gpt-oss the gradients of the sinks, too."""
    expected, gradients = results(Actor(model_of(family)), groups)
    for shares in (False, True):
        actor = Actor(model_of(family), packing_samples=True, share_prompts=shares)
        assert actor.hf_model.config._attn_implementation == PACKED_EAGER
        assert actor.layout.shares_prompts == shares
        found, same = results(actor, groups)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
        assert same.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(same[name], gradient, atol=1e-5, rtol=1e-4, msg=name)
    if family == "gpt_oss":
        assert gradients["model.model.layers.0.self_attn.sinks"].abs().max() > 1e-3


def test_it_goes_back_to_its_own_attention(groups: Batch) -> None:
    sequences, mask, num_actions = groups
    actor = Actor(model_of("gpt_oss"), packing_samples=None).eval()
    with torch.no_grad():
        before = actor(sequences, num_actions, mask)
        assert actor.layout.try_packing(CPU) is None
        assert actor.layout.shares_prompts
        actor.layout.stop_packing()
        assert actor.hf_model.config._attn_implementation == "eager"
        assert torch.equal(actor(sequences, num_actions, mask), before)


def test_a_sink_by_hand() -> None:
    """Two segments of 1 and 2 tokens: what a head gives is Σ e^s·v / (Σ e^s + e^sink)."""
    attention = model_of("gpt_oss").model.layers[0].self_attn
    attention.sinks.data.fill_(0.5)
    query = torch.zeros(1, 4, 3, 8)  # all scores are 0
    value = torch.tensor([1.0, 2.0, 4.0]).view(1, 1, 3, 1).expand(1, 2, 3, 8)
    key = torch.randn(1, 2, 3, 8)
    output, _ = eager_by_segment(
        attention,
        query,
        key,
        value,
        segments_as_mask([1, 2]),
        scaling=1.0,
        sliding_window=None,
        s_aux=attention.sinks,
    )
    sink = torch.tensor(0.5).exp()
    expected = torch.stack([1 / (1 + sink), 2 / (1 + sink), (2 + 4) / (2 + sink)])
    torch.testing.assert_close(output, expected.view(1, 3, 1, 1).expand(1, 3, 4, 8))


def test_masks_by_hand() -> None:
    plan = segments_as_mask([2, 3], [-1, 0]).plan
    lowest = torch.finfo(torch.float32).min
    first, second = added_masks(plan, 3, torch.zeros(1))
    assert (first[0, 0] == lowest).tolist() == [[False, True], [False, False]]
    assert (second[0, 0] == lowest).tolist() == [
        [False, False, False, True, True],
        [True, False, False, False, True],
        [True, True, False, False, False],
    ]


@pytest.mark.parametrize(
    "config",
    [
        GPTJConfig(vocab_size=48, n_embd=32, n_layer=1, n_head=4, rotary_dim=4),
        FalconConfig(vocab_size=48, hidden_size=32, num_hidden_layers=1, num_attention_heads=4),
    ],
    ids=lambda config: config.model_type,
)
def test_what_does_not_pack_is_padded_and_says_so_in_one_line(
    config: PretrainedConfig, groups: Batch
) -> None:
    sequences, mask, num_actions = groups
    actor = Actor(AutoModelForCausalLM.from_config(config).eval(), packing_samples=None)
    with torch.no_grad():
        before = actor(sequences, num_actions, mask)
        reason = actor.layout.try_packing(CPU)
        after = actor(sequences, num_actions, mask)
    if reason is None:  # from transformers 5.24 on
        torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)
        pytest.skip(f"this transformers packs {config.model_type}")
    assert "\n" not in reason
    assert torch.equal(after, before)
