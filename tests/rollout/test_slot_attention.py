import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from lightppo.rollout.decode import attention_to_slots, can_attend_to_slots, slot_attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # CPU matrices; the kernels
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_one_new_token_as_repeated_heads(dtype, kv_heads, scaling):
    torch.manual_seed(0)
    query = torch.randn(3, 4, 1, 8, dtype=dtype)
    key, value = torch.randn(2, 3, kv_heads, 7, 8, dtype=dtype)
    hidden = torch.arange(7) < torch.tensor([0, 2, 5]).unsqueeze(1)
    mask = torch.zeros(3, 7, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)[:, None, None]
    module = SimpleNamespace(num_key_value_groups=4 // kv_heads, is_causal=True)
    output, weights = slot_attention(module, query, key, value, mask, scaling=scaling)
    repeated = (x.repeat_interleave(4 // kv_heads, dim=1) for x in (key, value))
    expected = scaled_dot_product_attention(query, *repeated, attn_mask=mask, scale=scaling)
    assert weights is None
    torch.testing.assert_close(output, expected.transpose(1, 2))


def test_prompts_and_masks_of_transformers_go_to_sdpa():
    torch.manual_seed(0)
    module = SimpleNamespace(num_key_value_groups=1, is_causal=True)
    query, key, value = torch.randn(3, 2, 4, 5, 8)
    output, _ = slot_attention(module, query, key, value, None)
    causal = scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(output, causal.transpose(1, 2))
    seen = torch.tensor([[True, True, False, True, True], [False, True, True, True, True]])[:, None, None]
    output, _ = slot_attention(module, query[:, :, :1], key, value, seen)
    expected = scaled_dot_product_attention(query[:, :, :1], key, value, attn_mask=seen)
    torch.testing.assert_close(output, expected.transpose(1, 2))


def test_attention_comes_back_after_an_error(llama):
    assert can_attend_to_slots(llama, llama.config)
    before = llama.config._attn_implementation
    with contextlib.suppress(ZeroDivisionError), attention_to_slots(llama.config):
        assert llama.config._attn_implementation != before
        raise ZeroDivisionError
    assert llama.config._attn_implementation == before


def test_other_attention_is_left_alone(llama):
    llama.set_attn_implementation("eager")
    assert not can_attend_to_slots(llama, llama.config)
