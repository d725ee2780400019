"""Attention by lengths: each sequence of a packed row as if it were alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Gemma2Config, MistralConfig, OPTConfig, PreTrainedModel, Qwen2Config

from lightppo.models import packing as packed_attention_module
from lightppo.models.actor import Actor
from lightppo.models.critic import Critic
from lightppo.models.packing import (
    PACKED_SDPA,
    lengths_as_mask,
    lengths_from_position_ids,
    packed_attention,
    segments_as_mask,
    takes_lengths,
    use_packed_attention,
)
from tests.models.conftest import _COMMON, _KV

MakeModel = Callable[..., PreTrainedModel]
Batch = tuple[torch.Tensor, torch.Tensor, int]


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], window: int | None) -> torch.Tensor:
    """The definition: softmax over the earlier positions of the same sequence, head by head. (1, T, H, D)"""
    total, heads = q.shape[2], q.shape[1]
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    i, j = torch.meshgrid(torch.arange(total), torch.arange(total), indexing="ij")
    seen = (owner[:, None] == owner) & (j <= i) & (i - j < (window or total))
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.transpose(2, 3)) * 0.5
    return (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("window", [None, 3])
def test_outputs_and_gradients_are_those_of_the_definition(kv_heads: int, window: int | None) -> None:
    torch.manual_seed(0)
    lengths = [5, 1, 7]
    q, k, v = (torch.randn(1, h, 13, 8, requires_grad=True) for h in (4, kv_heads, kv_heads))
    out, weights = packed_attention(
        nn.Module(), q, k, v, lengths_as_mask(torch.tensor(lengths)), scaling=0.5, sliding_window=window
    )
    expected = plain(q, k, v, lengths, window)
    assert weights is None
    torch.testing.assert_close(out, expected)
    factor = torch.randn_like(out)
    got = torch.autograd.grad((out * factor).sum(), (q, k, v))
    torch.testing.assert_close(got, torch.autograd.grad((expected * factor).sum(), (q, k, v)))


def continued(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], parents: list[int], window: int | None
) -> torch.Tensor:
    """The definition: each segment behind the one it continues, by ``plain``. (1, T, H, D)"""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    outputs = []
    for i, p in enumerate(parents):
        own = list(range(starts[i], starts[i] + lengths[i]))
        before = [] if p < 0 else list(range(starts[p], starts[p] + lengths[p]))
        whole = plain(*(x[:, :, before + own] for x in (q, k, v)), [len(before) + len(own)], window)
        outputs.append(whole[:, len(before) :])
    return torch.cat(outputs, 1)


SEGMENTS = [3, 4, 1, 6, 2, 5], [-1, 0, 0, -1, -1, 4]


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 50])
def test_segments_continue_their_parents(kv_heads: int, window: int | None) -> None:
    torch.manual_seed(0)
    lengths, parents = SEGMENTS
    q, k, v = (torch.randn(1, h, 21, 8, requires_grad=True) for h in (4, kv_heads, kv_heads))
    mask = segments_as_mask(torch.tensor(lengths), torch.tensor(parents))
    assert mask.shape == (1, 1, 2, 6)
    out, _ = packed_attention(nn.Module(), q, k, v, mask, scaling=0.5, sliding_window=window)
    expected = continued(q, k, v, lengths, parents, window)
    torch.testing.assert_close(out, expected)
    factor = torch.randn_like(out)
    got = torch.autograd.grad((out * factor).sum(), (q, k, v))
    torch.testing.assert_close(got, torch.autograd.grad((expected * factor).sum(), (q, k, v)))


def lower_right_kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> torch.Tensor:
    """What torch says of its kernel for packed rows: (T, H, D) and borders; windows end at the lower right."""
    assert (cu_q.dtype, cu_k.dtype) == (torch.int32, torch.int32)
    q_lengths, k_lengths = cu_q.diff().tolist(), cu_k.diff().tolist()
    assert (max(q_lengths), max(k_lengths)) == (max_q, max_k)
    outputs = []
    for a, b, c in zip(q.split(q_lengths), k.split(k_lengths), v.split(k_lengths), strict=True):
        new, total = len(a), len(b)
        i, j = torch.meshgrid(torch.arange(total - new, total), torch.arange(total), indexing="ij")
        seen = j <= i + window_size[1]
        if window_size[0] >= 0:
            seen &= i - j <= window_size[0]
        a, b, c = (x.transpose(0, 1) for x in (a, b, c))
        outputs.append(
            nn.functional.scaled_dot_product_attention(a, b, c, attn_mask=seen, scale=scale, enable_gqa=enable_gqa)
        )
    return torch.cat(outputs, 1).transpose(0, 1)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("segments", [SEGMENTS, ([5, 1, 7], None)], ids=["shared", "alone"])
def test_what_a_gpu_kernel_is_given(segments: tuple, window: int | None, monkeypatch) -> None:
    """The call of a kernel with borders for queries and keys, by one that is written out."""
    torch.manual_seed(0)
    lengths, parents = segments
    q, k, v = (torch.randn(1, h, sum(lengths), 8, requires_grad=True) for h in (4, 2, 2))
    mask = lengths_as_mask(torch.tensor(lengths))
    if parents is not None:
        mask = segments_as_mask(torch.tensor(lengths), torch.tensor(parents))
    expected, _ = packed_attention(nn.Module(), q, k, v, mask, scaling=0.5, sliding_window=window)
    monkeypatch.setattr(packed_attention_module, "varlen_kernel", lambda query: lower_right_kernel)
    out, _ = packed_attention(nn.Module(), q, k, v, mask, scaling=0.5, sliding_window=window)
    torch.testing.assert_close(out, expected)
    factor = torch.randn_like(out)
    got = torch.autograd.grad((out * factor).sum(), (q, k, v))
    torch.testing.assert_close(got, torch.autograd.grad((expected * factor).sum(), (q, k, v)))


def test_lengths_that_do_not_fit_are_refused() -> None:
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match="a packed row of 4 tokens cannot hold sequences of 5"):
        packed_attention(nn.Module(), q, q, q, lengths_as_mask(torch.tensor([2, 3])), sliding_window=None)


def test_a_layer_that_hides_its_window_is_refused() -> None:
    q, layer = torch.randn(1, 2, 4, 8), nn.Module()
    layer.config = Gemma2Config()
    with pytest.raises(NotImplementedError, match="--packing_samples: Module has a sliding window and does not tell"):
        packed_attention(layer, q, q, q, lengths_as_mask(torch.tensor([4])))


def test_lengths_from_position_ids() -> None:
    assert lengths_from_position_ids(torch.tensor([[0, 1, 2, 0, 0, 1]])).tolist() == [3, 1, 2]


def test_only_sdpa_is_replaced(causal_lm: MakeModel, attention: str) -> None:
    model = causal_lm("llama", attention)
    use_packed_attention(model)
    assert takes_lengths(model) == (attention == "sdpa")
    assert model.config._attn_implementation == (PACKED_SDPA if attention == "sdpa" else "eager")


def windowed(kind: str) -> PreTrainedModel:
    """Models that look back 3 tokens, in all layers or every other."""
    torch.manual_seed(0)
    configs = {
        "mistral": lambda: MistralConfig(**_COMMON, **_KV, sliding_window=3),
        "qwen2": lambda: Qwen2Config(
            **_COMMON, num_key_value_heads=2, use_sliding_window=True, sliding_window=3, max_window_layers=1
        ),
        "opt": lambda: OPTConfig(
            **{**_COMMON, "initializer_range": 0.02}, init_std=0.2, ffn_dim=48, word_embed_proj_dim=32
        ),  # no window; makes no mask from position ids
        "gemma2": lambda: Gemma2Config(**_COMMON, **_KV, sliding_window=3, attn_logit_softcapping=None),
    }
    return AutoModelForCausalLM.from_config(configs[kind](), attn_implementation="sdpa")


@pytest.mark.parametrize("kind", ["mistral", "qwen2", "gemma2", "opt"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_windows_and_gradient_checkpointing(kind: str, checkpointing: bool, ragged: Batch) -> None:
    sequences, mask, num_actions = ragged
    gradients, log_probs = [], []
    for packing in (False, True):
        actor = Actor(windowed(kind), packing_samples=packing)
        actor.train()
        if checkpointing:
            actor.gradient_checkpointing_enable()
        log_probs.append(actor(sequences, num_actions, mask))
        log_probs[-1].sum().backward()
        gradients.append([p.grad for p in actor.parameters()])
    assert takes_lengths(actor.hf_model)
    torch.testing.assert_close(log_probs[0], log_probs[1], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(gradients[0], gradients[1], atol=2e-4, rtol=1e-3)


def test_no_mask_of_the_whole_row_is_made(causal_lm: MakeModel, classifier: MakeModel, ragged: Batch) -> None:
    """What the layers get is as long as there are sequences, in actor and critic."""
    sequences, mask, num_actions = ragged
    seen: list[torch.Size] = []

    def note(module: nn.Module, args: tuple, kwargs: dict) -> None:
        seen.append(kwargs["attention_mask"].shape)

    for model in (Actor(causal_lm(), packing_samples=True), Critic(classifier(), packing_samples=True)):
        model(sequences, num_actions, mask)  # the first call also compares packed with alone
        hook = model.hf_model.base_model.layers[0].self_attn.register_forward_pre_hook(note, with_kwargs=True)
        model(sequences, num_actions, mask)
        hook.remove()
    assert seen == [torch.Size([1, 1, 1, 4])] * 2
