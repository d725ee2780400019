"""Attention kernels that only a GPU has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import is_flash_attn_2_available

from lightppo.models.actor import Actor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("attn_implementation", ["sdpa", "flash_attention_2"])
def test_packed_equals_padded_in_bfloat16(
    attn_implementation: str,
    causal_lm: Callable[..., PreTrainedModel],
    ragged: tuple[Tensor, Tensor, int],
    tmp_path: Path,
) -> None:
    if attn_implementation == "flash_attention_2" and not is_flash_attn_2_available():
        pytest.skip("flash-attn is not installed")
    causal_lm("qwen2").save_pretrained(tmp_path)
    sequences, mask, num_actions = (x.cuda() if isinstance(x, Tensor) else x for x in ragged)
    results = []
    for packing_samples in (False, True):
        actor = Actor(
            str(tmp_path), bf16=True, attn_implementation=attn_implementation, packing_samples=packing_samples
        ).cuda()
        with torch.no_grad():
            results.append(actor(sequences, num_actions, mask))
    # bf16 keeps 8 bits; logits of about 3 are off by about 0.03
    torch.testing.assert_close(results[0], results[1], atol=0.15, rtol=0)


def test_shared_prompts_equal_padded_in_bfloat16(causal_lm: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    """By torch's kernel for packed rows, whose causal window has to end at the lower right; gradients too."""
    causal_lm("qwen2").save_pretrained(tmp_path)
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 48, (2, 9), generator=draw).repeat_interleave(3, 0)
    sequences = torch.cat([prompts, torch.randint(3, 48, (6, 7), generator=draw)], 1).cuda()
    mask = torch.ones_like(sequences)
    mask[1, -4:] = 0
    mask[3:, :2] = 0
    results, gradients = [], []
    for packing_samples in (False, True):
        actor = Actor(str(tmp_path), bf16=True, attn_implementation="sdpa", packing_samples=packing_samples).cuda()
        results.append(actor(sequences, 7, mask))
        results[-1].sum().backward()
        gradients.append(torch.cat([p.grad.flatten().float() for p in actor.parameters()]))
    assert actor.shares_prompts
    torch.testing.assert_close(results[0], results[1], atol=0.15, rtol=0)
    assert torch.cosine_similarity(*gradients, dim=0) > 0.99


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_in_4_bits_are_the_same_numbers_on_both_devices(dtype: torch.dtype) -> None:
    from lightppo.models.quantised import dense_weight, quantise

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 128, dtype=dtype))
    quantise(model, set())  # packed on the GPU
    layer = model[0]
    x = torch.randn(3, 5, 256, dtype=dtype, requires_grad=True)
    on_cpu = dense_weight(layer)
    layer(x).sum().backward()
    gradient, x.grad = x.grad, None
    layer.cuda()
    torch.testing.assert_close(
        dense_weight(layer).cpu(), on_cpu, rtol=1e-6 if dtype == torch.float32 else 2**-7, atol=0
    )
    layer(x.cuda()).sum().backward()
    torch.testing.assert_close(x.grad, gradient, rtol=0, atol=1e-4 if dtype == torch.float32 else 0.05)
