"""The last layer at read positions alone: what is read, and every gradient, is that of the whole layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, OPTConfig, PreTrainedModel

from lightppo.models import packing
from lightppo.models.actor import Actor
from lightppo.models.critic import Critic
from lightppo.models.packing import only_at, position_wise

PARTS = {
    "llama": ["self_attn.q_proj", "self_attn.o_proj", "mlp"],
    "qwen2": ["self_attn.q_proj", "self_attn.o_proj", "mlp"],
    "qwen3": ["self_attn.q_proj", "self_attn.o_proj", "mlp"],
    "gemma": ["self_attn.q_proj", "self_attn.o_proj", "mlp"],
    "gemma2": ["self_attn.q_proj", "self_attn.o_proj", "mlp"],
    "gpt2": ["attn.c_proj", "mlp"],  # queries, keys and values are one layer
    "gpt_neox": ["attention.dense", "mlp"],
    "mixtral": ["self_attn.q_proj", "self_attn.o_proj", "mlp"],
    "qwen2_moe": ["self_attn.q_proj", "self_attn.o_proj", "mlp"],
}


def names(model: nn.Module, modules: list[nn.Module]) -> list[str]:
    of = {module: name for name, module in model.named_modules()}
    return [
        of[module].split(".", 3)[-1] if "layers." in of[module] else of[module]
        for module in modules
    ]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(
            a[name], b[name], rtol=1e-4, atol=2e-6, msg=lambda m, name=name: f"{name}: {m}"
        )


def count_rows(module: nn.Module, seen: list[int]) -> None:
    """Positions that the weights of a module see."""
    linear = next(
        m for m in module.modules() if any(p.dim() == 2 for p in m.parameters(recurse=False))
    )
    before = linear.forward
    linear.forward = lambda x: seen.append(x.reshape(-1, x.shape[-1]).shape[0]) or before(x)


def test_the_parts(family: str, causal_lm: Callable[..., PreTrainedModel]) -> None:
    model = causal_lm(family)
    found = [name.removeprefix("transformer.h.1.") for name in names(model, position_wise(model))]
    assert found == PARTS[family]


def test_actor(
    family: str,
    causal_lm: Callable[..., PreTrainedModel],
    ragged: tuple[Tensor, Tensor, int],
    monkeypatch,
) -> None:
    sequences, mask, actions = ragged
    weights = torch.randn(4, actions, generator=torch.Generator().manual_seed(2))
    results = []
    for share in (0.0, 10.0):  # never, always
        monkeypatch.setattr(packing, "READ_SHARE", share)
        actor = Actor(causal_lm(family), packing_samples=True)
        actor(sequences, actions, mask)  # the probe
        assert actor.layout.last_layer_parts
        seen: list[int] = []
        count_rows(actor.layout.last_layer_parts[-1], seen)
        log_probs = actor(sequences, actions, mask)
        (log_probs * weights).sum().backward()
        results.append((log_probs.detach(), gradients(actor), max(seen)))
    (whole, whole_gradients, tokens), (part, part_gradients, read) = results
    torch.testing.assert_close(part, whole, rtol=1e-5, atol=1e-5)
    assert_same_gradients(part_gradients, whole_gradients)
    if family not in ("mixtral", "qwen2_moe"):  # an expert sees some rows only
        assert tokens == mask.sum()
        assert read == predictors(mask, actions)


def predictors(mask: Tensor, actions: int) -> int:
    """Positions from which an action is predicted."""
    return int((mask[:, -actions:].bool() & mask[:, -actions - 1 : -1].bool()).sum())


def test_critic(
    family: str,
    classifier: Callable[..., PreTrainedModel],
    ragged: tuple[Tensor, Tensor, int],
    monkeypatch,
) -> None:
    sequences, mask, actions = ragged
    weights = torch.randn(4, actions + 1, generator=torch.Generator().manual_seed(2))
    results = []
    for share in (0.0, 10.0):
        monkeypatch.setattr(packing, "READ_SHARE", share)
        critic = Critic(classifier(family), packing_samples=True)
        values = critic(sequences, actions, mask, include_last=True)
        assert critic.layout.last_layer_parts
        (values * weights).sum().backward()
        results.append((values.detach(), gradients(critic)))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-5, atol=1e-5)
    assert_same_gradients(results[1][1], results[0][1])


def test_opt_flattens_its_rows(ragged: tuple[Tensor, Tensor, int], monkeypatch) -> None:
    sequences, mask, actions = ragged
    config = OPTConfig(
        vocab_size=48, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, init_std=0.2, word_embed_proj_dim=32,
    )  # fmt: skip
    results = []
    for share in (0.0, 10.0):
        monkeypatch.setattr(packing, "READ_SHARE", share)
        torch.manual_seed(0)
        actor = Actor(
            AutoModelForCausalLM.from_config(config, attn_implementation="sdpa"),
            packing_samples=True,
        )
        log_probs = actor(sequences, actions, mask)
        assert len(actor.layout.last_layer_parts) == 4  # queries, output, fc1, fc2
        log_probs.sum().backward()
        results.append((log_probs.detach(), gradients(actor)))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-5, atol=1e-5)
    assert_same_gradients(results[1][1], results[0][1])


def test_a_compiled_layer_runs_whole(causal_lm: Callable[..., PreTrainedModel]) -> None:
    model = causal_lm("llama")
    model.model.layers[-1].compile(backend="eager", dynamic=True)
    assert position_wise(model) == []


@pytest.mark.parametrize("reason", ["checkpointing", "whole output", "router"])
def test_the_layer_runs_whole(
    reason: str,
    causal_lm: Callable[..., PreTrainedModel],
    ragged: tuple[Tensor, Tensor, int],
    monkeypatch,
) -> None:
    sequences, mask, actions = ragged
    monkeypatch.setattr(packing, "READ_SHARE", 10.0)
    model = causal_lm("mixtral" if reason == "router" else "llama")
    actor = Actor(model, packing_samples=True)
    if reason == "checkpointing":
        actor.gradient_checkpointing_enable()
    actor.train()
    actor(sequences, actions, mask)  # the probe
    seen: list[int] = []
    before = model.model.layers[-1].self_attn.o_proj.forward
    model.model.layers[-1].self_attn.o_proj.forward = lambda x: seen.append(x.shape[1]) or before(x)
    if reason == "whole output":
        actor(sequences, None, mask)
        assert seen == [sequences.shape[1]]  # padded, all of it
    elif reason == "router":
        actor.score_actions(sequences, actions, mask, router_loss=True)
        assert seen == [mask.sum()]
    else:
        actor(sequences, actions, mask)
        assert seen == [mask.sum()]
        with torch.no_grad():  # nothing is run again
            actor(sequences, actions, mask)
        assert seen[1] < mask.sum()


def test_a_module_that_is_given_more_or_returns_more(
    causal_lm: Callable[..., PreTrainedModel],
) -> None:
    class Routed(nn.Module):
        def forward(self, hidden: Tensor, scale: Tensor | None = None) -> object:
            return hidden * scale if scale is not None else (2 * hidden, "routes")

    module, hidden = Routed(), torch.arange(10.0).view(1, 5, 2)
    with only_at([module], torch.tensor([3, 1])):
        output, routes = module(hidden)
        assert routes == "routes"
        assert output[0, :, 0].tolist() == [0, 4, 0, 12, 0]
        assert module(hidden, torch.ones(1, 5, 1)).equal(hidden)
    assert "forward" not in vars(module)


def test_a_layer_that_is_not_position_wise_runs_whole(
    causal_lm: Callable[..., PreTrainedModel], ragged: tuple[Tensor, Tensor, int]
) -> None:
    """It says something else of three positions, as many as the first forward tries."""
    sequences, mask, actions = ragged
    model = causal_lm("llama")
    before = model.model.layers[-1].mlp.forward
    model.model.layers[-1].mlp.forward = lambda x: before(x) + (x.shape[1] == 3)
    actor = Actor(model, packing_samples=True)
    actor(sequences, actions, mask)
    assert actor.layout.last_layer_parts == []


def test_gradients_of_gathered_and_spread_rows() -> None:
    module = nn.Linear(2, 3).double()
    hidden = torch.randn(1, 5, 2, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        with only_at([module], torch.tensor([0, 3, 4])):
            return module(x)

    assert torch.autograd.gradcheck(run, hidden)
