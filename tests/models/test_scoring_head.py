"""The head that returns log probs: what the path over logits gives, at any ZeRO stage, and nothing left behind."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.ranks import run_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, CohereConfig, GraniteConfig, PhiConfig, PreTrainedModel

from lightppo.algorithms import logprobs as head_module
from lightppo.models import actor as actor_module
from lightppo.models.actor import Actor, is_untouched, scores_from_head, scoring_head

Batch = tuple[Tensor, Tensor, int]
MakeModel = Callable[..., PreTrainedModel]
WORKER = Path(__file__).with_name("scoring_head_worker.py")
_SMALL = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FURTHER = {
    "cohere": lambda: CohereConfig(**_SMALL, logit_scale=0.5),
    "granite": lambda: GraniteConfig(**_SMALL, logits_scaling=3.0),
    "phi": lambda: PhiConfig(**_SMALL),  # a head with a bias
}


def further(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FURTHER[name]())
    if name == "phi":
        nn.init.normal_(model.lm_head.bias)
    return model


def scores_and_gradients(actor: Actor, batch: Batch, logits: bool) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    sequences, mask, num_actions = batch
    actor.train().zero_grad()
    scores = actor.score_actions(sequences, num_actions, mask, entropy=True, entropy_grad=True, logits=logits)
    ((scores.log_probs + 2 * scores.entropy) * torch.linspace(-1, 1, 40).view(4, 10)).sum().backward()
    gradients = {n: p.grad.clone() for n, p in actor.named_parameters() if p.grad is not None}
    return scores.log_probs.detach(), scores.entropy.detach(), gradients


def assert_both_ways_agree(actor: Actor, batch: Batch) -> None:
    """With ``logits`` the head is asked for logits."""
    expected, got = scores_and_gradients(actor, batch, logits=True), scores_and_gradients(actor, batch, logits=False)
    for a, b in zip(expected[:2], got[:2], strict=True):
        torch.testing.assert_close(b, a, atol=1e-5, rtol=1e-5)
    assert expected[2].keys() == got[2].keys()
    assert max(float(g.abs().max()) for g in expected[2].values()) > 1e-2
    for name, gradient in expected[2].items():
        torch.testing.assert_close(got[2][name], gradient, atol=1e-4, rtol=1e-4, msg=name)


@pytest.mark.parametrize("chunk", [48 * 5, 1 << 26])
@pytest.mark.parametrize("packing_samples", [False, True])
def test_both_ways_agree(
    family: str, packing_samples: bool, chunk: int, causal_lm: MakeModel, ragged: Batch, monkeypatch
) -> None:
    monkeypatch.setattr(head_module, "CHUNK_ELEMENTS", chunk)
    actor = Actor(causal_lm(family), temperature=0.7, packing_samples=packing_samples, valid_vocab_size=47)
    sequences, mask, num_actions = ragged
    assert_both_ways_agree(actor, (sequences % 47, mask, num_actions))
    assert actor.head_is_last is (family != "gemma2")


@pytest.mark.parametrize("name", FURTHER)
def test_bias_and_scaled_logits(name: str, ragged: Batch) -> None:
    actor = Actor(further(name), temperature=0.7)
    assert_both_ways_agree(actor, ragged)
    assert actor.head_is_last is (name == "phi")


def test_a_model_that_takes_no_places(causal_lm: MakeModel, ragged: Batch, monkeypatch) -> None:
    """Its head is given all positions; those that predict actions are chosen inside."""
    takes = actor_module.takes
    monkeypatch.setattr(actor_module, "takes", lambda module, name: name != "logits_to_keep" and takes(module, name))
    for packing_samples in (False, True):
        actor = Actor(causal_lm(), packing_samples=packing_samples)
        assert_both_ways_agree(actor, ragged)
        assert actor.head_is_last


@pytest.mark.parametrize("packing_samples", [False, True])
def test_no_more_logits_than_one_chunk(packing_samples: bool, causal_lm: MakeModel, ragged: Batch, monkeypatch) -> None:
    """24 real actions in chunks of 5 tokens over a vocabulary of 47; besides, only the weight has a dimension of 47."""
    monkeypatch.setattr(head_module, "CHUNK_ELEMENTS", 5 * 48)
    sequences, mask, num_actions = ragged
    model = causal_lm()
    weight = model.lm_head.weight.untyped_storage().data_ptr()
    rows: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple) else (out,):
                if isinstance(x, Tensor) and x.shape[-1:] == (47,) and x.untyped_storage().data_ptr() != weight:
                    rows.append(x[..., 0].numel())
            return out

    actor = Actor(model, packing_samples=packing_samples, valid_vocab_size=47)
    with Watch():
        actor.score_actions(sequences % 47, num_actions, mask, entropy=True).log_probs.sum().backward()
    assert max(rows) == 5
    with Watch():
        actor.score_actions(sequences % 47, num_actions, mask, logits=True)
    assert max(rows) >= 24


def test_logits_that_are_changed_are_found_out_once(causal_lm: MakeModel, ragged: Batch) -> None:
    sequences, mask, num_actions = ragged
    for name, forwards in (("llama", [1, 1]), ("gemma2", [2, 1])):
        actor, calls = Actor(causal_lm(name)), []
        actor.model.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        for expected in forwards:
            calls.clear()
            actor.score_actions(sequences, num_actions, mask)
            assert len(calls) == expected, name


@pytest.mark.parametrize("change", [lambda x: x.mul_(2), lambda x: x + 0, lambda x: x[..., :1], lambda x: None])
def test_any_change_is_found_out(
    change: Callable[[Tensor], Tensor | None], causal_lm: MakeModel, ragged: Batch
) -> None:
    """Also in place, and with no real action at all."""
    model = causal_lm()
    for tokens in (3, 0):
        labels, hidden = torch.zeros(tokens, dtype=torch.long), torch.randn(1, tokens, 32)
        for calls in (0, 1, 2):
            with torch.no_grad(), scores_from_head(model.lm_head, lambda x: x[0], labels, 1.0, entropy=True) as answer:
                scores = torch.zeros(1, tokens, 2)
                for _ in range(calls):
                    scores = model.lm_head(hidden)
                assert is_untouched(answer, scores) is (calls == 1)
                assert is_untouched(answer, scores.detach()) is (calls == 1)  # as hooks make it
                assert not is_untouched(answer, change(scores))


def test_heads_that_are_not_asked(causal_lm: MakeModel, ragged: Batch) -> None:
    class Adapted(nn.Linear):
        def forward(self, hidden: Tensor) -> Tensor:
            return 2 * super().forward(hidden)

    model = causal_lm()
    assert scoring_head(model) is model.lm_head
    plain = scores_and_gradients(Actor(model), ragged, logits=True)[0]
    adapted = Adapted(32, 48, bias=False)
    adapted.weight = nn.Parameter(model.lm_head.weight.detach() / 2)
    model.lm_head = adapted
    assert scoring_head(model) is None
    torch.testing.assert_close(scores_and_gradients(Actor(model), ragged, logits=False)[0], plain)
    model = causal_lm()
    model.lm_head.forward = lambda hidden: nn.functional.linear(hidden, model.lm_head.weight)
    assert scoring_head(model) is None  # somebody else put a forward there
    model = causal_lm()
    model.config.vocab_size = 47
    assert scoring_head(model) is None


def test_nothing_is_left_behind(causal_lm: MakeModel, ragged: Batch) -> None:
    sequences, mask, num_actions = ragged
    model = causal_lm().eval()
    names = list(model.state_dict())
    ids = sequences[:, 10:13]
    before = model.generate(ids, max_new_tokens=4, do_sample=False)
    actor = Actor(model)
    actor.score_actions(sequences, num_actions, mask, entropy=True)
    assert "forward" not in vars(model.lm_head)
    assert list(model.state_dict()) == names
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), before)
    assert actor(sequences, num_actions, mask, return_output=True)[1].logits.shape == (4, 10, 48)
    with pytest.raises(RuntimeError):
        actor.score_actions(sequences.float(), num_actions, mask)  # no embedding of floats
    assert "forward" not in vars(model.lm_head)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_at_every_zero_stage(world_size: int, causal_lm: MakeModel, ragged: Batch, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("scoring_head_worker", WORKER)
    worker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker)
    sequences, mask, num_actions = ragged
    batch = {"sequences": sequences % 40, "mask": mask, "weights": torch.linspace(-0.1, 0.1, 40).view(4, 10)}
    torch.save({"batch": batch, "num_actions": num_actions}, tmp_path / "batch.pt")
    expected = {}
    for name in {name for name, _ in worker.CASES}:
        causal_lm(name).save_pretrained(tmp_path / name)
        actor = Actor(causal_lm(name), temperature=0.7, valid_vocab_size=40)
        scores = actor.score_actions(
            batch["sequences"], num_actions, mask, logits=True, entropy=True, entropy_grad=True
        )
        ((scores.log_probs + 2 * scores.entropy) * batch["weights"]).sum().backward()
        expected[name] = {n: p.grad for n, p in actor.model.named_parameters()}
        assert max(float(g.abs().max()) for g in expected[name].values()) > 1e-2
    run_ranks(
        WORKER, tmp_path, launcher="python" if world_size == 1 else "deepspeed", world_size=world_size, timeout=400
    )
    found = torch.load(tmp_path / "found.pt")
    for name, stage in worker.CASES:
        assert found[name, stage].keys() == expected[name].keys()
        for parameter, gradient in expected[name].items():
            torch.testing.assert_close(
                found[name, stage][parameter], gradient, atol=2e-5, rtol=1e-4, msg=f"{name} {stage} {parameter}"
            )
