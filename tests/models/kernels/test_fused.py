"""Norms, MLPs and rotary embeddings with a backward pass of their own: the same model, in place."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from support.launches import norm_kernels
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.utils.deprecation import deprecate_kwarg

from lightppo.models import wrapper
from lightppo.models.actor import Actor
from lightppo.models.kernels.layers import (
    accelerate_on_cpu,
    fuse,
    gated_silu,
    own_code,
    rms_norm,
    rotary,
    same_code,
)
from lightppo.models.wrapper import compile_layers

Call = Callable[..., tuple[Tensor, ...]]
EPS = 1e-5


def llama_norm(x: Tensor, weight: Tensor) -> tuple[Tensor]:
    norm = LlamaRMSNorm(len(weight), EPS)
    del norm.weight
    norm.weight = weight
    return (norm(x),)


CALLS: dict[str, tuple[Call, Call, list[tuple[int, ...]]]] = {
    "rms_norm": (lambda x, w: (rms_norm(x, w, EPS),), llama_norm, [(2, 3, 8), (8,)]),
    "gated_silu": (
        lambda gate, up: (gated_silu(gate, up),),
        lambda gate, up: (nn.functional.silu(gate) * up,),
        [(2, 3, 8)] * 2,
    ),
    "rotary": (rotary, apply_rotary_pos_emb, [(2, 4, 3, 8)] * 2 + [(2, 3, 8)] * 2),
}


def results(
    call: Call,
    shapes: list[tuple[int, ...]],
    dtype: torch.dtype,
    wide: bool = False,
    device: str = "cpu",
) -> list[Tensor]:
    """Outputs and gradients of inputs in ``dtype``; ``wide``: the same numbers in float64."""
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    inputs = [x.double() if wide else x for x in inputs]
    learns = inputs[:2]  # no gradient goes to cos and sin
    outputs = call(*[x.requires_grad_() for x in learns], *inputs[2:])
    weights = [torch.randn(x.shape, generator=generator).to(device, dtype) for x in outputs]
    gradients = torch.autograd.grad(sum((x * w).sum() for x, w in zip(outputs, weights)), learns)
    return [x.detach() for x in (*outputs, *gradients)]


@pytest.mark.parametrize("name", CALLS)
def test_as_transformers_computes_it(name: str) -> None:
    ours, theirs, shapes = CALLS[name]
    for mine, its in zip(
        results(ours, shapes, torch.float32), results(theirs, shapes, torch.float32)
    ):
        torch.testing.assert_close(mine, its, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", CALLS)
def test_in_bfloat16_as_near_to_the_truth(name: str, device: str) -> None:
    ours, theirs, shapes = CALLS[name]
    truth = results(theirs, shapes, torch.bfloat16, wide=True, device=device)
    of_both = (results(call, shapes, torch.bfloat16, device=device) for call in (ours, theirs))
    for mine, its, true in zip(*of_both, truth):
        assert mine.dtype is torch.bfloat16
        off, its_off = ((x.double() - true).square().mean().sqrt().item() for x in (mine, its))
        assert off <= 1.2 * its_off


def test_a_kernel_of_torchs_rounds_where_transformers_does() -> None:
    ours, theirs, shapes = CALLS["rms_norm"]
    truth = results(theirs, shapes, torch.bfloat16, wide=True)
    with norm_kernels():
        by_kernel = results(ours, shapes, torch.bfloat16)
    its = results(theirs, shapes, torch.bfloat16)
    assert torch.equal(by_kernel[0], its[0])
    for mine, other, true in zip(by_kernel, its, truth):
        off, its_off = ((x.double() - true).square().mean().sqrt().item() for x in (mine, other))
        assert off <= 1.2 * its_off


@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_the_derivatives(name: str) -> None:
    ours, _, shapes = CALLS[name]
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    learns = [x.requires_grad_() for x in inputs[:2]]
    assert torch.autograd.gradcheck(lambda a, b: ours(a, b, *inputs[2:]), learns)


def test_a_norm_by_hand() -> None:
    # mean square (9 + 16) / 2 = 12.5, √12.5 = 3.5355…; ε = 0
    y = rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), 0.0)
    torch.testing.assert_close(y, torch.tensor([[0.84852814, 2.2627417]]))


def test_rows_of_zeros_and_frozen_weights() -> None:
    x, weight = torch.zeros(2, 4, requires_grad=True), torch.ones(4)
    rms_norm(x, weight, EPS).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((2, 4), EPS**-0.5))  # ∂ x/√ε
    learns = torch.ones(4, requires_grad=True)
    rms_norm(torch.full((2, 4), 2.0), learns, 0.0).sum().backward()
    # each of two rows is 1 everywhere
    torch.testing.assert_close(learns.grad, torch.full((4,), 2.0))


def test_without_gradient_to_the_bit() -> None:
    for name, (ours, _, shapes) in CALLS.items():
        inputs = [torch.randn(shape) for shape in shapes]
        with_graph = ours(*[x.clone().requires_grad_() for x in inputs[:2]], *inputs[2:])
        with torch.no_grad():
            for x, y in zip(ours(*inputs), with_graph):
                assert torch.equal(x, y), name


def fused_kinds(model: nn.Module) -> set[str]:
    named = (base.__name__ for module in model.modules() for base in type(module).__mro__)
    return {name.removeprefix("_Fused") for name in named if name.startswith("_Fused")}


def class_names(model: nn.Module) -> list[str]:
    return [type(module).__name__.removeprefix("CPU") for module in model.modules()]


ALL = {"RMSNorm", "MLP", "Rotary"}
KINDS = dict.fromkeys(("llama", "qwen2", "qwen3", "qwen2_moe"), ALL)
KINDS |= {
    "mixtral": {"RMSNorm", "Rotary"},
    "gemma": {"Rotary"},
    "gemma2": {"Rotary"},
    "gpt2": set(),
    "gpt_neox": set(),
}


def test_the_same_model(
    family: str,
    causal_lm: Callable[..., PreTrainedModel],
    ragged: tuple[Tensor, Tensor, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sequences, mask, actions = ragged
    results = []
    for apply in (fuse, lambda model: None):
        monkeypatch.setattr(wrapper, "fuse", apply)
        plain = causal_lm(family)
        names, kinds = (
            list(plain.state_dict()),
            [type(module).__name__ for module in plain.modules()],
        )
        actor = Actor(plain, packing_samples=True)
        assert fused_kinds(actor) == (KINDS[family] if apply is fuse else set())
        assert (list(actor.model.state_dict()), class_names(actor.model)) == (names, kinds)
        log_probs = actor(sequences, actions, mask)
        log_probs.square().sum().backward()
        results.append((log_probs.detach(), {name: p.grad for name, p in actor.named_parameters()}))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-4, atol=1e-4)
    for name, gradient in results[0][1].items():
        assert (gradient is None) == (results[1][1][name] is None)
        if gradient is not None:
            torch.testing.assert_close(
                gradient, results[1][1][name], rtol=1e-3, atol=1e-3, msg=name
            )


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_with_checkpointing(
    use_reentrant: bool,
    causal_lm: Callable[..., PreTrainedModel],
    ragged: tuple[Tensor, Tensor, int],
) -> None:
    sequences, mask, actions = ragged
    gradients = []
    for checkpointing in (False, True):
        actor = Actor(causal_lm("qwen3"), packing_samples=True).train()
        if checkpointing:
            actor.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            actor.model.enable_input_require_grads()
        actor(sequences, actions, mask).sum().backward()
        gradients.append({name: p.grad for name, p in actor.named_parameters()})
    for name, gradient in gradients[0].items():
        # without checkpointing the last layer runs at the read positions only
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-4, msg=name)


def test_a_compiled_layer_is_the_models_own(
    causal_lm: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    # a ZeRO-3 engine of an earlier test has put a function of DeepSpeed's in its place
    monkeypatch.setattr(torch.nn.functional, "linear", torch._C._nn.linear)
    model, ids = causal_lm("llama").eval(), torch.tensor([[4, 5, 6]])
    expected = model(ids).logits
    fuse(model)
    graphs: list[str] = []

    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
        graphs.append(module.code)
        return module.forward

    compile_layers(model, backend)
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-5, atol=1e-5)
    assert len(graphs) == 2  # one of each layer, without a break
    assert "autograd_function" not in "".join(graphs)


def test_only_what_is_known(causal_lm: Callable[..., PreTrainedModel]) -> None:
    class OwnNorm(LlamaRMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return super().forward(hidden_states) + 1

    model = causal_lm()
    layer = model.model.layers[0]
    layer.input_layernorm.__class__ = OwnNorm
    layer.post_attention_layernorm.forward = lambda x: x  # as Liger does
    fuse(model)
    assert type(layer.input_layernorm) is OwnNorm
    assert type(layer.post_attention_layernorm) is LlamaRMSNorm
    assert fused_kinds(layer) == {"MLP", "Rotary"}
    assert fused_kinds(model.model.layers[1]) == ALL
    before = [type(module) for module in model.modules()]
    fuse(model)  # twice is once
    assert [type(module) for module in model.modules()] == before


def test_an_argument_with_an_old_name_beside_its_new_one(
    causal_lm: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers 5.24 has put such a wrapper around every attention."""
    attention = modeling_llama.LlamaAttention
    renames = deprecate_kwarg("old_angles", "99.0.0", new_name="position_embeddings")
    monkeypatch.setattr(attention, "forward", renames(own_code(attention.forward)))
    model, seen = causal_lm("llama").eval(), []
    layer = model.model.layers[0].self_attn
    layer.register_forward_hook(lambda *call: seen.append(call), with_kwargs=True)
    model(torch.tensor([[4, 5, 6]]))
    _, args, kwargs, (expected, _) = seen[0]
    fuse(model)
    assert fused_kinds(layer) == {"Rotary"}
    kwargs["old_angles"] = kwargs.pop("position_embeddings")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(layer(*args, **kwargs)[0], expected, rtol=1e-5, atol=1e-6)


def test_a_norm_with_other_constants_stays() -> None:
    """Its bytecode is Llama's; only a constant is another one."""

    class SixthRootNorm(LlamaRMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            input_dtype = hidden_states.dtype
            hidden_states = hidden_states.to(torch.float32)
            variance = hidden_states.pow(6).mean(-1, keepdim=True)
            hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
            return self.weight * hidden_states.to(input_dtype)

    assert SixthRootNorm.forward.__code__.co_code == LlamaRMSNorm.forward.__code__.co_code
    assert not same_code(SixthRootNorm.forward, LlamaRMSNorm.forward)
    model, x = nn.Sequential(SixthRootNorm(4, EPS)), torch.tensor([[1.0, -2.0, 3.0, 0.5]])
    expected = model(x)
    fuse(model)
    assert type(model[0]) is SixthRootNorm
    assert torch.equal(model(x), expected)


def test_others_kernels_stay(
    causal_lm: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Liger puts its own functions and classes into transformers' modules before a model is fused."""
    model = causal_lm()
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q, k))
    monkeypatch.setattr(
        modeling_llama.LlamaRMSNorm, "forward", lambda self, hidden_states: hidden_states
    )
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: x)
    fuse(model)
    assert fused_kinds(model) == set()


def test_other_types_and_copies(causal_lm: Callable[..., PreTrainedModel]) -> None:
    ids = torch.tensor([[4, 5, 6]])
    model = causal_lm("qwen3").double()
    fuse(model)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.model.norm.weight.zero_()
    assert copied(ids).logits.abs().max() == 0
    plain = causal_lm("qwen3").double()
    torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-5, atol=1e-5)
    norm = model.model.norm.float()  # a type other than its input's: as transformers has it
    assert norm(torch.ones(1, 32, dtype=torch.bfloat16)).dtype is torch.float32


def kept(call: Callable[[], object]) -> int:
    """Bytes of the storages that a backward pass would find."""
    storages: dict[int, int] = {}

    def pack(saved: Tensor) -> Tensor:
        storages[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        output = call()
    del output
    return sum(storages.values())


def test_only_inputs_are_kept() -> None:
    x, up = (torch.randn(64, 32, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    weight = torch.ones(32, dtype=torch.bfloat16, requires_grad=True)
    assert kept(lambda: rms_norm(x, weight, EPS)) // x.numel() == 2
    assert kept(lambda: llama_norm(x, weight)) // x.numel() == 6
    assert kept(lambda: gated_silu(x, up)) // x.numel() == 2 * 2
    assert kept(lambda: nn.functional.silu(x) * up) // x.numel() == 3 * 2


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_mlp_keeps_two_of_its_wide_tensors(bias: bool, dtype: torch.dtype) -> None:
    """With a hook before its last layer, as ZeRO-3's, it keeps three; the numbers are the same."""
    config = LlamaConfig(hidden_size=32, intermediate_size=96, mlp_bias=bias)
    mlp, x = modeling_llama.LlamaMLP(config).to(dtype), torch.randn(2, 5, 32, dtype=dtype)
    plain = copy.deepcopy(mlp)
    fuse(mlp)
    accelerate_on_cpu(mlp)
    hooked = copy.deepcopy(mlp)
    hooked.down_proj.register_forward_pre_hook(lambda *_: None)
    gradients, sizes = [], []
    for module in (mlp, hooked, plain):
        learns = [x.clone().requires_grad_(), *module.parameters()]
        output = module(learns[0])
        to_output = torch.linspace(-1, 1, output.numel(), dtype=dtype).view_as(output)
        gradients.append([output, *torch.autograd.grad(output, learns, to_output)])
        sizes.append(kept(lambda: module(learns[0])))  # noqa: B023
    for ours, in_three, theirs in zip(*gradients):
        assert torch.equal(ours, in_three)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    wide = 2 * 5 * 96 * x.element_size()
    assert (sizes[1] - sizes[0]) // wide == 1  # the layer may keep its bias, too


@pytest.mark.parametrize("last_layer", ["frozen", "with an adapter"])
def test_an_mlp_whose_last_layer_is(last_layer: str) -> None:
    class Adapted(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + input.sum(-1, keepdim=True)

    mlp = modeling_llama.LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=96))
    if last_layer == "frozen":
        mlp.down_proj.weight.requires_grad_(False)
    else:
        mlp.down_proj.__class__ = Adapted
    fused = copy.deepcopy(mlp)
    fuse(fused)
    x = torch.randn(2, 5, 32)
    for module in (mlp, fused):
        module(x).square().sum().backward()
    for ours, its in zip(fused.parameters(), mlp.parameters()):
        torch.testing.assert_close(ours.grad, its.grad, rtol=1e-5, atol=1e-6)
