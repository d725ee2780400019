"""Log probs of actions: packed or padded, through logits or from the head itself."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.fixtures.families import COMMON
from support.ranks import run_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    GraniteConfig,
    LlamaConfig,
    OPTConfig,
    PhiConfig,
    PretrainedConfig,
    PreTrainedModel,
    RecurrentGemmaConfig,
    RwkvConfig,
)

from lightppo.algorithms import logprobs as head_module
from lightppo.errors import ModelLoadError, PackingNotSupportedError
from lightppo.models import actor as actor_module
from lightppo.models.actor import Actor
from lightppo.models.kernels import linear_log_probs as scoring_module
from lightppo.models.kernels.linear_log_probs import is_untouched, scores_from_head, scoring_head

Batch = tuple[Tensor, Tensor, int]
MakeModel = Callable[..., PreTrainedModel]


def plain_log_probs(model: PreTrainedModel, row: Tensor, temperature: float = 1.0) -> Tensor:
    """(n,) -> (n - 1,): log probs of tokens 1.. of one unpadded row by the shortest way."""
    logits = model(input_ids=row[None]).logits[0, :-1].float() / temperature
    return logits.log_softmax(-1).gather(-1, row[1:, None])[:, 0]


def loss_and_gradients(actor: Actor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    sequences, mask, num_actions = batch
    actor.train()
    log_probs = actor(sequences, num_actions, mask)
    weights = torch.linspace(-1, 1, log_probs.numel()).view_as(log_probs)
    real = mask[:, -num_actions:].sum()
    (log_probs * weights).sum().div(real).backward()
    return log_probs.detach(), {
        n: p.grad for n, p in actor.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("packing_samples", [False, True])
def test_batch_equals_single_unpadded_rows(
    family: str, attention: str, packing_samples: bool, causal_lm: MakeModel, ragged: Batch
) -> None:
    sequences, mask, num_actions = ragged
    actor = Actor(causal_lm(family, attention), packing_samples=packing_samples)
    with torch.no_grad():
        log_probs = actor(sequences, num_actions, mask)
        for b in range(len(sequences)):
            row = sequences[b][mask[b].bool()]
            # column in S of the first token that can be predicted
            first = int(mask[b].argmax()) + 1
            expected = torch.zeros(sequences.shape[1])
            expected[first : first + len(row) - 1] = plain_log_probs(actor.model, row)
            torch.testing.assert_close(log_probs[b], expected[-num_actions:], atol=1e-5, rtol=1e-5)


def test_packed_equals_padded_with_gradients(
    family: str, attention: str, causal_lm: MakeModel, ragged: Batch
) -> None:
    padded, padded_grads = loss_and_gradients(Actor(causal_lm(family, attention)), ragged)
    packed, packed_grads = loss_and_gradients(
        Actor(causal_lm(family, attention), packing_samples=True), ragged
    )
    torch.testing.assert_close(packed, padded, atol=1e-5, rtol=0)
    assert padded_grads.keys() == packed_grads.keys()
    assert max(float(g.abs().max()) for g in padded_grads.values()) > 1e-2
    for name, grad in padded_grads.items():
        torch.testing.assert_close(packed_grads[name], grad, atol=1e-5, rtol=0, msg=name)


def test_padding_has_no_log_prob_and_no_gradient(causal_lm: MakeModel, ragged: Batch) -> None:
    sequences, mask, num_actions = ragged
    actor = Actor(causal_lm())
    log_probs = actor(sequences, num_actions, mask)
    real = mask[:, -num_actions:].bool()
    assert bool((log_probs[~real] == 0).all())
    assert bool((log_probs[real] < 0).all())
    log_probs[~real].sum().backward()
    assert all(p.grad is None or float(p.grad.abs().max()) == 0 for p in actor.parameters())


def test_training_and_evaluation_mode_agree(
    family: str, causal_lm: MakeModel, ragged: Batch
) -> None:
    # the Llama, GPT-2 and GPT-NeoX configs here have dropout 0.1, the Mixtral one router jitter
    sequences, mask, num_actions = ragged
    actor = Actor(causal_lm(family))
    with torch.no_grad():
        evaluated = actor.eval()(sequences, num_actions, mask)
        trained = actor.train()(sequences, num_actions, mask)
    torch.testing.assert_close(trained, evaluated, atol=0, rtol=0)


def test_temperature_divides_the_logits(causal_lm: MakeModel, ragged: Batch) -> None:
    sequences, mask, _ = ragged
    row = sequences[1][mask[1].bool()]
    actor = Actor(causal_lm(), temperature=0.7)
    with torch.no_grad():
        got = actor(row[None], len(row) - 1)[0]
        torch.testing.assert_close(
            got, plain_log_probs(actor.model, row, 0.7), atol=1e-5, rtol=1e-5
        )
    with pytest.raises(ValueError, match="--temperature"):
        Actor(causal_lm(), temperature=0.0)


def test_valid_vocab_size_leaves_padding_rows_of_the_embedding_out(causal_lm: MakeModel) -> None:
    row = torch.tensor([[5, 6, 7]])
    actor = Actor(causal_lm(), valid_vocab_size=10)
    with torch.no_grad():
        logits = actor(row).logits[0, :-1, :10]
        torch.testing.assert_close(
            actor(row, 2)[0], logits.log_softmax(-1)[[0, 1], [6, 7]], atol=1e-6, rtol=1e-6
        )


def test_only_predicting_positions_go_through_the_head(causal_lm: MakeModel, ragged: Batch) -> None:
    sequences, mask, num_actions = ragged
    log_probs, output = Actor(causal_lm())(sequences, num_actions, mask, return_output=True)
    assert log_probs.shape == (4, 10)
    assert output.logits.shape == (4, 10, 48)
    _, output = Actor(causal_lm(), packing_samples=True)(
        sequences, num_actions, mask, return_output=True
    )
    assert output.logits.shape == (1, 24, 48)  # 10 + 1 + 3 + 10 actions
    # no num_actions: all
    assert Actor(causal_lm())(sequences, attention_mask=mask).logits.shape == (4, 24, 48)


def test_rows_packed_by_the_caller(family: str, causal_lm: MakeModel, ragged: Batch) -> None:
    sequences, mask, num_actions = ragged
    actor = Actor(causal_lm(family))
    row = sequences[mask.bool()][None]  # (1, T)
    lengths, actions = [11, 15, 8, 19], [10, 1, 3, 10]
    with torch.no_grad():
        expected = actor(sequences, num_actions, mask)[mask[:, -num_actions:].bool()]
        got = actor(row, actions, packed_seq_lens=lengths)
        torch.testing.assert_close(got, expected[None], atol=1e-5, rtol=1e-5)
        logits = actor(row, packed_seq_lens=lengths).logits  # (1, T, V)
        alone = actor(row[:, 11:26]).logits
    torch.testing.assert_close(logits[:, 11:26], alone, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match=r"packed_seq_lens .* 53 "):
        actor(row, actions, packed_seq_lens=[11, 15, 8])


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("packing_samples", [False, True])
def test_gradient_checkpointing_changes_memory_only(
    use_reentrant: bool, packing_samples: bool, causal_lm: MakeModel, ragged: Batch
) -> None:
    plain = Actor(causal_lm(), packing_samples=packing_samples)
    recomputed = Actor(causal_lm(), packing_samples=packing_samples)
    recomputed.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    calls = []
    recomputed.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    expected, expected_grads = loss_and_gradients(plain, ragged)
    got, grads = loss_and_gradients(recomputed, ragged)
    # forward, recomputation; the first packed forward tries three more
    assert len(calls) == 2 + 3 * packing_samples
    rounding = 1e-6 * packing_samples  # the recomputed one runs its last layer whole
    torch.testing.assert_close(got, expected, atol=rounding, rtol=rounding)
    for name, grad in expected_grads.items():
        torch.testing.assert_close(grads[name], grad, atol=1e-6, rtol=1e-6, msg=name)
    recomputed.gradient_checkpointing_disable()
    calls.clear()
    loss_and_gradients(recomputed, ragged)
    assert len(calls) == 1


def test_gradient_checkpointing_calls_nothing_deprecated(
    causal_lm: MakeModel, ragged: Batch
) -> None:
    """transformers 5.23 renamed the methods, and warns at each call by the old names."""
    actor = Actor(causal_lm(), packing_samples=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        actor.gradient_checkpointing_enable()
        loss_and_gradients(actor, ragged)
        actor.gradient_checkpointing_disable()


def test_bfloat16_forward_gives_float32_log_probs(
    causal_lm: MakeModel, ragged: Batch, tmp_path: str
) -> None:
    sequences, mask, num_actions = ragged
    causal_lm().save_pretrained(tmp_path)
    actor = Actor(str(tmp_path), bf16=True, packing_samples=True)
    assert {p.dtype for p in actor.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        log_probs = actor(sequences, num_actions, mask)
        expected = Actor(causal_lm())(sequences, num_actions, mask)
    assert log_probs.dtype == torch.float32
    # bf16 keeps 8 bits; random weights of std 0.2 give logits of about 3, so errors of about 0.03
    torch.testing.assert_close(log_probs, expected, atol=0.15, rtol=0)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_moe_router_loss_is_the_same_packed(
    family: str, causal_lm: MakeModel, ragged: Batch, tmp_path: str
) -> None:
    sequences, mask, num_actions = ragged
    causal_lm(family).save_pretrained(tmp_path)
    losses = []
    for packing_samples in (False, True):
        actor = Actor(
            str(tmp_path),
            packing_samples=packing_samples,
            override_config={"output_router_logits": True},
        )
        _, output = actor(sequences, num_actions, mask, return_output=True)
        losses.append(output.aux_loss)
    assert losses[0].requires_grad
    torch.testing.assert_close(losses[0], losses[1], atol=1e-5, rtol=1e-5)


ALL_SCORES = {"entropy": True, "entropy_grad": True, "logits": True}


def test_score_actions_on_single_unpadded_rows(
    family: str, causal_lm: MakeModel, ragged: Batch
) -> None:
    sequences, mask, num_actions = ragged
    actor = Actor(causal_lm(family), temperature=0.7, valid_vocab_size=40)
    sequences = sequences % 40
    with torch.no_grad():
        scores = actor.score_actions(sequences, num_actions, mask, entropy=True, logits=True)
        assert torch.equal(scores.log_probs, actor(sequences, num_actions, mask))
        logits = scores.logits.split([10, 1, 3, 10])  # real actions of each row
        for b in range(4):
            row = sequences[b][mask[b].bool()]
            k = len(logits[b])
            # (k, V)
            expected = actor.model(input_ids=row[None]).logits[0, -k - 1 : -1, :40].float()
            torch.testing.assert_close(logits[b], expected, atol=1e-5, rtol=1e-5)
            p = (expected / 0.7).softmax(-1)
            torch.testing.assert_close(
                scores.entropy[b][scores.real[b]], -(p * p.log()).sum(-1), atol=1e-5, rtol=1e-5
            )
            got = p.log().gather(-1, row[-k:, None])[:, 0]
            torch.testing.assert_close(
                scores.log_probs[b][scores.real[b]], got, atol=1e-5, rtol=1e-5
            )
    assert scores.real.sum(1).tolist() == [10, 1, 3, 10]
    assert bool((scores.entropy[~scores.real] == 0).all())


def scores_and_gradients(actor: Actor, batch: Batch) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Everything that score_actions gives, and the gradient of a mixture of all of it."""
    sequences, mask, num_actions = batch
    actor.train()
    routed = type(actor.hf_model).__name__ in ("MixtralForCausalLM", "Qwen2MoeForCausalLM")
    scores = actor.score_actions(sequences, num_actions, mask, **ALL_SCORES, router_loss=routed)
    weights = torch.linspace(-1, 1, 40).view(4, 10)
    loss = ((scores.log_probs + 2 * scores.entropy) * weights).sum() + (
        scores.logits.square().mean(-1)
    ).sum()
    values = [scores.log_probs, scores.entropy, scores.real, scores.logits]
    if routed:
        values.append(scores.router_loss)
        loss = loss + 24 * scores.router_loss
    loss.div(24).backward()
    return [v.detach() for v in values], {
        n: p.grad for n, p in actor.named_parameters() if p.grad is not None
    }


def test_score_actions_packed_equals_padded_with_gradients(
    family: str, causal_lm: MakeModel, ragged: Batch
) -> None:
    padded, padded_grads = scores_and_gradients(Actor(causal_lm(family)), ragged)
    packed, packed_grads = scores_and_gradients(
        Actor(causal_lm(family), packing_samples=True), ragged
    )
    assert padded[3].shape == (24, 48)
    for a, b in zip(padded, packed, strict=True):
        torch.testing.assert_close(b, a, atol=1e-5, rtol=1e-5)
    assert padded_grads.keys() == packed_grads.keys()
    for name, grad in padded_grads.items():
        torch.testing.assert_close(packed_grads[name], grad, atol=2e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("packing_samples", [False, True])
def test_scores_have_gradients_where_asked(
    packing_samples: bool, causal_lm: MakeModel, ragged: Batch
) -> None:
    sequences, mask, num_actions = ragged
    actor = Actor(causal_lm(), packing_samples=packing_samples)
    plain = actor.score_actions(sequences, num_actions, mask)
    assert (plain.entropy, plain.logits, plain.router_loss) == (None, None, None)
    logged = actor.score_actions(sequences, num_actions, mask, entropy=True)
    assert logged.log_probs.requires_grad
    assert not logged.entropy.requires_grad
    assert torch.equal(logged.log_probs, plain.log_probs)
    some = torch.arange(mask.shape[0] * num_actions).view(-1, num_actions) % 3 == 0
    sampled = actor.score_actions(sequences, num_actions, mask, entropy=some)
    assert torch.equal(sampled.entropy, logged.entropy.masked_fill(~some, 0.0))
    assert torch.equal(sampled.log_probs, plain.log_probs)
    bonus = actor.score_actions(sequences, num_actions, mask, entropy=True, entropy_grad=True)
    assert torch.equal(bonus.entropy, logged.entropy)
    bonus.entropy.sum().backward()
    assert float(actor.model.lm_head.weight.grad.abs().max()) > 1e-3
    actor.zero_grad()
    bonus = actor.score_actions(sequences, num_actions, mask, **ALL_SCORES)
    (bonus.entropy[~bonus.real].sum() + bonus.log_probs[~bonus.real].sum()).backward()
    assert all(p.grad is None or float(p.grad.abs().max()) == 0 for p in actor.parameters())


def test_scores_without_mask_and_without_real_actions(causal_lm: MakeModel) -> None:
    actor, row = Actor(causal_lm()), torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        scores = actor.score_actions(row, 2, **ALL_SCORES)
        assert scores.real.tolist() == [[True, True]]
        torch.testing.assert_close(scores.log_probs[0], plain_log_probs(actor.model, row[0]))
    for packing_samples in (False, True):
        actor.layout.packs = packing_samples
        scores = actor.score_actions(row, 2, torch.tensor([[1, 0, 0]]), **ALL_SCORES)
        assert scores.log_probs.tolist() == scores.entropy.tolist() == [[0, 0]]
        assert scores.logits.shape == (0, 48)
        # every rank runs a backward
        (scores.log_probs.sum() + scores.entropy.sum() + scores.logits.sum()).backward()
        assert all(float(p.grad.abs().max()) == 0 for p in actor.parameters() if p.grad is not None)


@pytest.mark.parametrize("packing_samples", [False, True])
def test_router_loss_by_hand(packing_samples: bool, causal_lm: MakeModel, ragged: Batch) -> None:
    """E · Σ_e f_e · P_e over the real tokens of all layers: f the share of choices, P the mean probability."""
    sequences, mask, num_actions = ragged
    actor = Actor(causal_lm("mixtral"), packing_samples=packing_samples).eval()
    gates: list[Tensor] = []
    with torch.no_grad():
        for b in range(4):
            row = sequences[b][mask[b].bool()][None]
            gates += actor.model(input_ids=row, output_router_logits=True).router_logits
        probabilities = torch.cat(gates).softmax(-1)  # (2 layers · 53 tokens, 4 experts)
        chosen = torch.zeros_like(probabilities).scatter(1, probabilities.topk(2, -1).indices, 1.0)
        expected = 4 * (chosen.mean(0) * probabilities.mean(0)).sum()
        got = actor.score_actions(sequences, num_actions, mask, router_loss=True).router_loss
    assert probabilities.shape == (106, 4)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("packing_samples", [False, True])
def test_router_loss_reaches_the_router_alone_or_recomputed(
    packing_samples: bool, causal_lm: MakeModel, ragged: Batch
) -> None:
    sequences, mask, num_actions = ragged
    grads = []
    for checkpointing in (False, True):
        actor = Actor(causal_lm("mixtral"), packing_samples=packing_samples).train()
        if checkpointing:
            actor.gradient_checkpointing_enable()
        actor.score_actions(sequences, num_actions, mask, router_loss=True).router_loss.backward()
        grads.append([layer.mlp.gate.weight.grad for layer in actor.model.model.layers])
        assert actor.model.lm_head.weight.grad is None
    assert all(float(g.abs().max()) > 1e-4 for g in grads[0])
    for plain, recomputed in zip(*grads):
        torch.testing.assert_close(recomputed, plain, atol=1e-6, rtol=1e-5)


def test_router_loss_that_cannot_be(causal_lm: MakeModel, ragged: Batch) -> None:
    sequences, mask, num_actions = ragged
    Actor(causal_lm("qwen2_moe")).check_router()
    dense = Actor(causal_lm("llama"))
    with pytest.raises(ValueError, match="--aux_loss_coef: LlamaForCausalLM"):
        dense.check_router()
    with pytest.raises(ValueError, match="--aux_loss_coef: LlamaForCausalLM"):
        dense.score_actions(sequences, num_actions, mask, router_loss=True)
    reentrant = Actor(causal_lm("mixtral")).train()
    reentrant.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match="--gradient_checkpointing_use_reentrant"):
        reentrant.score_actions(sequences, num_actions, mask, router_loss=True)
    # as AFMoE and Zaya, which take the flag and have no such loss
    silent = Actor(causal_lm("mixtral"))
    silent.model.register_forward_hook(
        lambda module, inputs, output: output.__setitem__("aux_loss", 0)
    )
    with pytest.raises(ValueError, match="--aux_loss_coef: MixtralForCausalLM"):
        silent.score_actions(sequences, num_actions, mask, router_loss=True)


_SMALL = {
    "vocab_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}


def _eager(config: PretrainedConfig) -> PretrainedConfig:
    config._attn_implementation = "eager"
    return config


UNPACKABLE: dict[str, tuple[Callable[[], PretrainedConfig], str]] = {
    # makes no mask from position ids, and its eager attention takes no lengths: only the probe can tell
    "opt": (
        lambda: _eager(OPTConfig(**_SMALL, ffn_dim=48, word_embed_proj_dim=32)),
        "sees its neighbour",
    ),
    "recurrent_gemma": (
        lambda: RecurrentGemmaConfig(
            **_SMALL, intermediate_size=48, lru_width=32, attention_window_size=8
        ),
        "sees its neighbour|linear_attention",  # transformers names its layers since 5.23
    ),
    "rwkv": (lambda: RwkvConfig(**_SMALL), "takes no position_ids"),
    "llama": (
        lambda: LlamaConfig(**_SMALL, layer_types=["full_attention", "linear_attention"]),
        "linear_attention",
    ),
}


@pytest.mark.parametrize("name", UNPACKABLE)
def test_families_that_cannot_be_packed_are_refused(name: str, ragged: Batch) -> None:
    config, reason = UNPACKABLE[name]
    sequences, mask, num_actions = ragged
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config())
    with pytest.raises(PackingNotSupportedError, match=f"--packing_samples .*{name}.*{reason}"):
        Actor(model, packing_samples=True)(sequences, num_actions, mask)
    assert Actor(model)(sequences, num_actions, mask).shape == (4, 10)  # padded it works


def test_the_probe_leaves_the_mode_alone_and_runs_once(causal_lm: MakeModel, ragged: Batch) -> None:
    sequences, mask, num_actions = ragged
    actor = Actor(causal_lm(), packing_samples=True).train()
    calls = []
    actor.model.register_forward_hook(lambda *_: calls.append(1))
    actor(sequences, num_actions, mask)
    assert len(calls) == 4
    assert actor.model.training
    actor(sequences, num_actions, mask)
    assert len(calls) == 5


def test_bad_arguments(causal_lm: MakeModel, ragged: Batch) -> None:
    sequences, mask, _ = ragged
    with pytest.raises(ValueError, match="num_actions = 24"):
        Actor(causal_lm())(sequences, 24, mask)
    with pytest.raises(ValueError, match="num_actions = 24"):
        Actor(causal_lm()).score_actions(sequences, 24, mask)
    with pytest.raises(ModelLoadError, match="attn_implementation, seed, bf16"):
        Actor(causal_lm(), bf16=True, seed=1, attn_implementation="sdpa")
    with pytest.raises(ModelLoadError, match="--flash_attn"):
        Actor("anything", use_flash_attention_2=True, attn_implementation="eager")


# ---------------------------------------------------------------------------------------------------------------------
# the head that returns log probs: what the way through logits gives, at any ZeRO stage, and nothing left behind


WORKER = Path(__file__).with_name("scoring_head_worker.py")
FURTHER = {
    "cohere": lambda: CohereConfig(**COMMON, logit_scale=0.5),
    "granite": lambda: GraniteConfig(**COMMON, logits_scaling=3.0),
    "phi": lambda: PhiConfig(**COMMON),  # a head with a bias
}


def further(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FURTHER[name]())
    if name == "phi":
        nn.init.normal_(model.lm_head.bias)
    return model


def scored_with_gradients(
    actor: Actor, batch: Batch, logits: bool
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    sequences, mask, num_actions = batch
    actor.train().zero_grad()
    scores = actor.score_actions(
        sequences, num_actions, mask, entropy=True, entropy_grad=True, logits=logits
    )
    (
        (scores.log_probs + 2 * scores.entropy) * torch.linspace(-1, 1, 40).view(4, 10)
    ).sum().backward()
    gradients = {n: p.grad.clone() for n, p in actor.named_parameters() if p.grad is not None}
    return scores.log_probs.detach(), scores.entropy.detach(), gradients


def assert_both_ways_agree(actor: Actor, batch: Batch) -> None:
    """With ``logits`` the head is asked for logits."""
    expected, got = (
        scored_with_gradients(actor, batch, logits=True),
        scored_with_gradients(actor, batch, logits=False),
    )
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
    actor = Actor(
        causal_lm(family), temperature=0.7, packing_samples=packing_samples, valid_vocab_size=47
    )
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
    for module in (actor_module, scoring_module):
        monkeypatch.setattr(
            module, "takes", lambda model, name: name != "logits_to_keep" and takes(model, name)
        )
    for packing_samples in (False, True):
        actor = Actor(causal_lm(), packing_samples=packing_samples)
        assert_both_ways_agree(actor, ragged)
        assert actor.head_is_last


@pytest.mark.parametrize("packing_samples", [False, True])
def test_no_more_logits_than_one_chunk(
    packing_samples: bool, causal_lm: MakeModel, ragged: Batch, monkeypatch
) -> None:
    """24 real actions in chunks of 5 tokens over a vocabulary of 47; besides, only the weight has a dimension of 47."""
    monkeypatch.setattr(head_module, "CHUNK_ELEMENTS", 5 * 48)
    sequences, mask, num_actions = ragged
    model = causal_lm()
    model.resize_token_embeddings(47)
    weight = model.lm_head.weight.untyped_storage().data_ptr()
    rows: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple) else (out,):
                if (
                    isinstance(x, Tensor)
                    and x.shape[-1:] == (47,)
                    and x.untyped_storage().data_ptr() != weight
                ):
                    rows.append(x[..., 0].numel())
            return out

    actor = Actor(model, packing_samples=packing_samples, valid_vocab_size=47)
    # tries packing, with logits of nine tokens
    actor.score_actions(sequences % 47, num_actions, mask)
    with Watch():
        actor.score_actions(
            sequences % 47, num_actions, mask, entropy=True
        ).log_probs.sum().backward()
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


@pytest.mark.parametrize(
    "change", [lambda x: x.mul_(2), lambda x: x + 0, lambda x: x[..., :1], lambda x: None]
)
def test_any_change_is_found_out(
    change: Callable[[Tensor], Tensor | None], causal_lm: MakeModel, ragged: Batch
) -> None:
    """Also in place, and with no real action at all."""
    model = causal_lm()
    for tokens in (3, 0):
        labels, hidden = torch.zeros(tokens, dtype=torch.long), torch.randn(1, tokens, 32)
        for calls in (0, 1, 2):
            with (
                torch.no_grad(),
                scores_from_head(
                    model.lm_head, lambda x: x[0], labels, 1.0, entropy=True
                ) as answer,
            ):
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
    plain = scored_with_gradients(Actor(model), ragged, logits=True)[0]
    adapted = Adapted(32, 48, bias=False)
    adapted.weight = nn.Parameter(model.lm_head.weight.detach() / 2)
    model.lm_head = adapted
    assert scoring_head(model) is None
    torch.testing.assert_close(scored_with_gradients(Actor(model), ragged, logits=False)[0], plain)
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
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.long), 2])
def test_gradients_at_every_zero_stage(
    world_size: int, causal_lm: MakeModel, ragged: Batch, tmp_path: Path
) -> None:
    spec = importlib.util.spec_from_file_location("scoring_head_worker", WORKER)
    worker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker)
    sequences, mask, num_actions = ragged
    batch = {
        "sequences": sequences % 40,
        "mask": mask,
        "weights": torch.linspace(-0.1, 0.1, 40).view(4, 10),
    }
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
    run_ranks(WORKER, tmp_path, world_size=world_size, timeout=400)
    found = torch.load(tmp_path / "found.pt")
    for name, stage in worker.CASES:
        assert found[name, stage].keys() == expected[name].keys()
        for parameter, gradient in expected[name].items():
            torch.testing.assert_close(
                found[name, stage][parameter],
                gradient,
                atol=2e-5,
                rtol=1e-4,
                msg=f"{name} {stage} {parameter}",
            )
