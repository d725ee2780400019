"""What makes models faster or smaller: the same numbers with it as without, and refusals where it cannot work."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import PreTrainedModel

from lightppo.errors import ModelLoadError
from lightppo.models.actor import Actor
from lightppo.models.critic import Critic
from lightppo.models.loading import check_activation_offload, compile_layers, decoder_layers, use_liger_kernels

MakeModel = Callable[..., PreTrainedModel]
Batch = tuple[torch.Tensor, torch.Tensor, int]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def gradients_of(model: Actor | Critic, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
    sequences, mask, num_actions = batch
    model.zero_grad()
    out = model(sequences, num_actions, mask)
    out.square().sum().backward()
    return out.detach(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("packing", [False, True])
def test_compiled_layers_give_the_same(packing: bool, causal_lm: MakeModel, ragged: Batch) -> None:
    plain = gradients_of(Actor(causal_lm(), packing_samples=packing), ragged)
    actor, counter = Actor(causal_lm(), packing_samples=packing), CompileCounter()
    names = [name for name, _ in actor.named_parameters()]
    compile_layers(actor.hf_model, backend=counter)
    torch.testing.assert_close(gradients_of(actor, ragged), plain, atol=1e-5, rtol=1e-4)
    assert counter.frame_count > 0
    assert names == [name for name, _ in actor.named_parameters()]


def test_decoding_does_not_compile(causal_lm: MakeModel, ragged: Batch) -> None:
    from lightppo.rollout.hf import generation_mode

    model, counter = causal_lm(), CompileCounter()
    compile_layers(model, backend=counter)
    with generation_mode(model):
        model(ragged[0])
    assert counter.frame_count == 0
    model(ragged[0])
    assert counter.frame_count > 0


def test_layers_are_found_by_the_names_that_transformers_gives(family: str, causal_lm: MakeModel) -> None:
    assert len(decoder_layers(causal_lm(family))) == 2


def test_a_model_that_names_no_layers(causal_lm: MakeModel) -> None:
    model = causal_lm()
    model._no_split_modules = None
    with pytest.raises(ModelLoadError, match="--torch_compile: LlamaForCausalLM does not say which"):
        compile_layers(model)


def test_offloaded_activations_give_the_same(
    causal_lm: MakeModel, classifier: MakeModel, ragged: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved, real = [], torch.autograd.graph.save_on_cpu
    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", lambda **options: moved.append(options) or real(**options))
    for model in (Actor(causal_lm()), Critic(classifier())):
        plain = gradients_of(model, ragged)
        model.activation_offload = True
        torch.testing.assert_close(gradients_of(model, ragged), plain)
        with torch.no_grad():  # nothing is kept
            model(ragged[0], ragged[2], ragged[1])
    assert len(moved) == 2


def test_what_needs_a_gpu_says_so(causal_lm: MakeModel) -> None:
    with pytest.raises(ModelLoadError, match="--activation_offload moves activations from a GPU"):
        check_activation_offload(torch.device("cpu"))
    check_activation_offload(torch.device("cuda"))
    if not torch.cuda.is_available():
        with pytest.raises(ModelLoadError, match=r"--use_liger_kernel: .*there is no CUDA device"):
            use_liger_kernels(causal_lm())
