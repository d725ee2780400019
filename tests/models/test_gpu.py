"""Attention kernels that only a GPU has."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.fixtures.families import COMMON, KV
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.utils import is_flash_attn_2_available

from lightppo.models.actor import Actor
from lightppo.models.attention import row_attention
from lightppo.models.batches import segments_as_mask
from lightppo.models.kernels.offload import (
    ActivationOffload,
    CUDAStreams,
    is_exact,
    offload_of,
    offloading,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


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
            str(tmp_path),
            bf16=True,
            attn_implementation=attn_implementation,
            packing_samples=packing_samples,
        ).cuda()
        with torch.no_grad():
            results.append(actor(sequences, num_actions, mask))
    # bf16 keeps 8 bits; logits of about 3 are off by about 0.03
    torch.testing.assert_close(results[0], results[1], atol=0.15, rtol=0)


def test_shared_prompts_equal_padded_in_bfloat16(
    causal_lm: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
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
        actor = Actor(
            str(tmp_path), bf16=True, attn_implementation="sdpa", packing_samples=packing_samples
        ).cuda()
        results.append(actor(sequences, 7, mask))
        results[-1].sum().backward()
        gradients.append(torch.cat([p.grad.flatten().float() for p in actor.parameters()]))
    assert actor.layout.shares_prompts
    torch.testing.assert_close(results[0], results[1], atol=0.15, rtol=0)
    assert torch.cosine_similarity(*gradients, dim=0) > 0.99


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 40])
def test_no_packed_row_needs_the_slow_kernel(
    dtype: torch.dtype, window: int | None, monkeypatch
) -> None:
    """Without torch's kernel for packed rows: shared prompts, fewer keys than queries, values narrower than keys."""
    monkeypatch.setattr(row_attention, "varlen_options", lambda *_: None)
    mask = segments_as_mask([64, 33, 48, 80], [-1, 0, 0, -1], "cuda")
    shapes = (8, 64), (2, 64), (2, 32)
    q, k, v = (
        torch.randn(1, h, 225, d, device="cuda", dtype=dtype, requires_grad=True) for h, d in shapes
    )
    # an error where neither fits
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        out, _ = row_attention.packed_attention(
            torch.nn.Module(), q, k, v, mask, sliding_window=window
        )
        out.sum().backward()


@pytest.mark.parametrize("how", ["plain", "checkpointing", "offloading"])
def test_no_layer_waits(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "offloading":  # also what is small
        device = torch.device("cuda", torch.cuda.current_device())
        monkeypatch.setattr(offload_of(device), "smallest", 1)
    prompts = torch.tensor([[5, 6, 7], [5, 6, 7], [8, 9, 10]])
    sequences = torch.cat([prompts, torch.randint(3, 48, (3, 6))], 1).cuda()
    waits = []
    for layers in (1, 4):
        config = LlamaConfig(**{**COMMON, "num_hidden_layers": layers}, **KV, dtype=torch.bfloat16)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        actor = Actor(model.cuda(), packing_samples=True).train()
        if how == "checkpointing":
            actor.gradient_checkpointing_enable()
        actor.around_pass = offloading if how == "offloading" else None
        actor(sequences, 6)  # the first call also looks whether sequences are apart
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                actor(sequences, 6).sum().backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits.append(sum("called a synchronizing" in str(w.message) for w in caught))
    assert waits[0] == waits[1] <= 8


@pytest.mark.parametrize("slow", ["computing", "copying"])
def test_copies_and_computation_wait_for_each_other(slow: str) -> None:
    """Whichever of the two streams is late."""

    class SlowStreams(CUDAStreams):
        def computing(self) -> torch.cuda.Stream:
            if slow == "computing":
                torch.cuda._sleep(1_000_000)
            return super().computing()

        def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
            if slow == "copying":
                with torch.cuda.stream(self.copying):
                    torch.cuda._sleep(1_000_000)
            super().copy(target, source)

    device = torch.device("cuda", torch.cuda.current_device())
    assert is_exact(ActivationOffload(SlowStreams(device), slab=1 << 20))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_in_4_bits_are_the_same_numbers_on_both_devices(dtype: torch.dtype) -> None:
    from lightppo.models.adapters.quantised import dense_weight, quantise

    pytest.importorskip("bitsandbytes")
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
    torch.testing.assert_close(
        x.grad, gradient, rtol=0, atol=1e-4 if dtype == torch.float32 else 0.05
    )
