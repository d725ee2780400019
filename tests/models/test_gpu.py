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
