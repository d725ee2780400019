from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    LlamaConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
    RecurrentGemmaConfig,
)

from lightppo.models.actor import Actor
from lightppo.models.errors import ModelLoadError
from lightppo.models.packing import PackingNotSupportedError

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
    return log_probs.detach(), {n: p.grad for n, p in actor.named_parameters() if p.grad is not None}


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
            first = int(mask[b].argmax()) + 1  # column in S of the first token that can be predicted
            expected = torch.zeros(sequences.shape[1])
            expected[first : first + len(row) - 1] = plain_log_probs(actor.model, row)
            torch.testing.assert_close(log_probs[b], expected[-num_actions:], atol=1e-5, rtol=1e-5)


def test_packed_equals_padded_with_gradients(family: str, attention: str, causal_lm: MakeModel, ragged: Batch) -> None:
    padded, padded_grads = loss_and_gradients(Actor(causal_lm(family, attention)), ragged)
    packed, packed_grads = loss_and_gradients(Actor(causal_lm(family, attention), packing_samples=True), ragged)
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


def test_training_and_evaluation_mode_agree(family: str, causal_lm: MakeModel, ragged: Batch) -> None:
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
        torch.testing.assert_close(got, plain_log_probs(actor.model, row, 0.7), atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="--temperature must be above 0"):
        Actor(causal_lm(), temperature=0.0)


def test_valid_vocab_size_leaves_padding_rows_of_the_embedding_out(causal_lm: MakeModel) -> None:
    row = torch.tensor([[5, 6, 7]])
    actor = Actor(causal_lm(), valid_vocab_size=10)
    with torch.no_grad():
        logits = actor(row).logits[0, :-1, :10]
        torch.testing.assert_close(actor(row, 2)[0], logits.log_softmax(-1)[[0, 1], [6, 7]], atol=1e-6, rtol=1e-6)


def test_only_predicting_positions_go_through_the_head(causal_lm: MakeModel, ragged: Batch) -> None:
    sequences, mask, num_actions = ragged
    log_probs, output = Actor(causal_lm())(sequences, num_actions, mask, return_output=True)
    assert log_probs.shape == (4, 10)
    assert output.logits.shape == (4, 10, 48)
    _, output = Actor(causal_lm(), packing_samples=True)(sequences, num_actions, mask, return_output=True)
    assert output.logits.shape == (1, 24, 48)  # 10 + 1 + 3 + 10 actions
    assert Actor(causal_lm())(sequences, attention_mask=mask).logits.shape == (4, 24, 48)  # no num_actions: all


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
    with pytest.raises(ValueError, match="add up to the 53 packed tokens"):
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
    assert len(calls) == 2 + 2 * packing_samples  # forward, recomputation; the packing probe takes two
    torch.testing.assert_close(got, expected, atol=0, rtol=0)
    for name, grad in expected_grads.items():
        torch.testing.assert_close(grads[name], grad, atol=1e-6, rtol=1e-6, msg=name)
    recomputed.gradient_checkpointing_disable()
    calls.clear()
    loss_and_gradients(recomputed, ragged)
    assert len(calls) == 1


def test_bfloat16_forward_gives_float32_log_probs(causal_lm: MakeModel, ragged: Batch, tmp_path: str) -> None:
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
def test_moe_router_loss_is_the_same_packed(family: str, causal_lm: MakeModel, ragged: Batch, tmp_path: str) -> None:
    sequences, mask, num_actions = ragged
    causal_lm(family).save_pretrained(tmp_path)
    losses = []
    for packing_samples in (False, True):
        actor = Actor(str(tmp_path), packing_samples=packing_samples, override_config={"output_router_logits": True})
        _, output = actor(sequences, num_actions, mask, return_output=True)
        losses.append(output.aux_loss)
    assert losses[0].requires_grad
    torch.testing.assert_close(losses[0], losses[1], atol=1e-5, rtol=1e-5)


_SMALL = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
UNPACKABLE: dict[str, tuple[Callable[[], PretrainedConfig], str]] = {
    # counts positions from the attention mask inside its attention: only the probe can tell
    "opt": (lambda: OPTConfig(**_SMALL, ffn_dim=48, word_embed_proj_dim=32), "sees its neighbour"),
    "recurrent_gemma": (
        lambda: RecurrentGemmaConfig(**_SMALL, intermediate_size=48, lru_width=32, attention_window_size=8),
        "sees its neighbour",
    ),
    "bloom": (lambda: BloomConfig(**_SMALL), "takes no position_ids"),
    "llama": (lambda: LlamaConfig(**_SMALL, layer_types=["full_attention", "linear_attention"]), "linear_attention"),
}


@pytest.mark.parametrize("name", UNPACKABLE)
def test_families_that_cannot_be_packed_are_refused(name: str, ragged: Batch) -> None:
    config, reason = UNPACKABLE[name]
    sequences, mask, num_actions = ragged
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config())
    with pytest.raises(PackingNotSupportedError, match=f"--packing_samples does not work.*{name}.*{reason}"):
        Actor(model, packing_samples=True)(sequences, num_actions, mask)
    assert Actor(model)(sequences, num_actions, mask).shape == (4, 10)  # padded it works


def test_the_probe_leaves_the_mode_alone_and_runs_once(causal_lm: MakeModel, ragged: Batch) -> None:
    sequences, mask, num_actions = ragged
    actor = Actor(causal_lm(), packing_samples=True).train()
    calls = []
    actor.model.register_forward_hook(lambda *_: calls.append(1))
    actor(sequences, num_actions, mask)
    assert len(calls) == 3
    assert actor.model.training
    actor(sequences, num_actions, mask)
    assert len(calls) == 4


def test_bad_arguments(causal_lm: MakeModel, ragged: Batch) -> None:
    sequences, mask, _ = ragged
    with pytest.raises(ValueError, match="num_actions = 24 must be between 1 and 23"):
        Actor(causal_lm())(sequences, 24, mask)
    with pytest.raises(ModelLoadError, match="attn_implementation, seed, bf16: only for loading by path"):
        Actor(causal_lm(), bf16=True, seed=1, attn_implementation="sdpa")
    with pytest.raises(ModelLoadError, match="contradict each other"):
        Actor("anything", use_flash_attention_2=True, attn_implementation="eager")
