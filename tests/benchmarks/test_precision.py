"""The table of precision, and weights on which rounding shows. Nothing is measured."""

import pytest
import torch
from support.tiny import tiny_config
from transformers import LlamaForCausalLM


def test_table(benchmark_script):
    row = {"engine": "vllm", "dtype": "bfloat16", "parameters": 5_270_784, "logp_diff_mean": 0.0171}
    row |= {"logp_diff_max": 0.813, "k3_kl": 0.000932, "sampling_s": 2.04, "scoring_s": 0.31}
    text = benchmark_script("precision").table([row])
    assert (
        text.splitlines()[2] == "5.3M | `vllm` | bfloat16 | 1.7e-02 | 8.1e-01 | 9.3e-04 | 2.0 | 0.3"
    )


def test_random_weights_as_large_as_trained_ones(benchmark_script):
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config())
    benchmark_script("precision").as_if_trained(model, 3.0)
    ids = torch.randint(
        model.config.vocab_size, (4, 32), generator=torch.Generator().manual_seed(0)
    )
    assert model(ids).logits.std(dim=-1).mean().item() == pytest.approx(3.0, rel=1e-3)
    weight = model.model.layers[0].mlp.up_proj.weight
    assert weight.std().item() == pytest.approx(weight.shape[1] ** -0.5, rel=1e-3)
