"""--batch_invariant: the log probs of sampling are those of every pass, to the last bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightppo.errors import ConfigError
from lightppo.experience.experience import Experience
from lightppo.models.actor import Actor
from lightppo.models.kernels import invariant
from lightppo.models.kernels.invariant import BatchInvariant, make_invariant
from lightppo.models.kernels.linear_log_probs import head_rows
from lightppo.rollout.decoding_runners import InvariantSteps
from lightppo.rollout.engine import SamplingParams
from lightppo.rollout.hf import HFRolloutEngine

CPU = torch.device("cpu")
VALID = 41  # of 48 ids, so that the head has rows that stand for no token


def actor_of(model: PreTrainedModel, is_invariant: bool = True, **options: bool) -> Actor:
    actor = Actor(copy.deepcopy(model), valid_vocab_size=VALID, **options)
    if is_invariant:
        make_invariant(actor.hf_model, CPU)
    return actor


@pytest.fixture
def sampled(tokenizer, prompts):
    """(model, slots) -> rollouts: prompts of 1 to 12 tokens, three samples each."""

    def sample(model: PreTrainedModel, slots: int, is_invariant: bool = True):
        engine = HFRolloutEngine(
            actor_of(model, is_invariant, packing_samples=True),
            tokenizer,
            micro_rollout_batch_size=slots,
            runner=InvariantSteps() if is_invariant else None,
        )
        sampling = SamplingParams(n=3, max_new_tokens=40, temperature=0.7, seed=5)
        return engine.generate(prompts, sampling)

    return sample


def differences(actor: Actor, rollouts: list, rows: int) -> int:
    """Tokens whose log prob in a training pass, in micro batches of so many rows, is another than in sampling."""
    actor.temperature = 0.7
    count = 0
    for first in range(0, len(rollouts), rows):
        batch = Experience.from_rollouts(rollouts[first : first + rows])
        scores = actor.score_actions(batch.sequences, batch.num_actions, batch.attention_mask)
        scores.log_probs.sum().backward()
        differ = scores.log_probs.detach() != batch.rollout_log_probs
        count += int(differ[batch.action_mask].sum())
    return count


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("llama", torch.bfloat16),
        ("mixtral", torch.bfloat16),
        pytest.param("llama", torch.float32, marks=pytest.mark.long),
        pytest.param("llama", torch.float16, marks=pytest.mark.long),
        pytest.param("qwen2", torch.bfloat16, marks=pytest.mark.long),
        pytest.param("qwen3", torch.bfloat16, marks=pytest.mark.long),
        pytest.param("mixtral", torch.float32, marks=pytest.mark.long),
    ],
)
def test_sampling_and_training_give_the_same_log_probs(kind, dtype, causal_lm, sampled):
    model = causal_lm(kind).to(dtype)
    rollouts = sampled(model, slots=30)
    lengths = {len(rollout.response_ids) for rollout in rollouts}
    assert len(lengths) > 2
    again = sampled(model, slots=4)
    assert [r.response_ids for r in again] == [r.response_ids for r in rollouts]
    assert [r.log_probs for r in again] == [r.log_probs for r in rollouts]
    for options in (
        {"packing_samples": True, "share_prompts": True},
        {"packing_samples": True, "share_prompts": False},
        {"packing_samples": False},
    ):
        for rows in (30, 7):
            assert differences(actor_of(model, **options), rollouts, rows) == 0


def test_keys_are_repeated_for_a_torch_that_takes_no_groups(causal_lm, sampled, monkeypatch):
    model = causal_lm("llama").to(torch.bfloat16)
    rollouts = sampled(model, slots=4)
    monkeypatch.setattr(invariant, "takes_grouped_keys", lambda: False)
    heads: set[tuple[int, int]] = set()

    def attention(query: Tensor, key: Tensor, *rest: Any, **options: Any) -> Any:
        heads.add((query.shape[1], key.shape[1]))
        return invariant.attention(query, key, *rest, **options)

    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    monkeypatch.setitem(invariant.HANDLED, kernel, attention)
    again = sampled(model, slots=4)
    assert [r.log_probs for r in again] == [r.log_probs for r in rollouts]
    assert heads
    assert all(of_queries == of_keys for of_queries, of_keys in heads)


def test_without_it_they_differ(causal_lm, sampled):
    model = causal_lm("llama").to(torch.bfloat16)
    rollouts = sampled(model, slots=30, is_invariant=False)
    assert differences(actor_of(model, is_invariant=False, packing_samples=True), rollouts, 7) > 0


def test_a_pass_without_gradients_and_with_the_entropy_says_the_same(causal_lm, sampled):
    model = causal_lm("llama").to(torch.bfloat16)
    batch = Experience.from_rollouts(sampled(model, slots=8)[:9])
    actor = actor_of(model, packing_samples=True)
    actor.temperature = 0.7
    inputs = batch.sequences, batch.num_actions, batch.attention_mask
    with torch.no_grad():
        before = actor.score_actions(*inputs).log_probs
    in_training = actor.score_actions(*inputs, entropy=True).log_probs
    with_logits = actor.score_actions(*inputs, logits=True).log_probs
    assert torch.equal(before, in_training)
    assert torch.equal(before, with_logits)


def test_gradients_are_those_of_the_plain_model(causal_lm, ragged):
    sequences, mask, actions = ragged
    found = []
    for is_invariant in (True, False):
        actor = actor_of(causal_lm("mixtral"), is_invariant, packing_samples=True)
        actor(sequences % VALID, actions, mask).square().sum().backward()
        found.append({name: weight.grad for name, weight in actor.named_parameters()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name], rtol=1e-3, atol=1e-3, msg=name)


# -- operators --------------------------------------------------------------------------------------------------------


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 2, 33, 777])
def test_a_row_is_what_it_is_in_a_large_batch(rows, dtype):
    """Also where several threads share a tensor, at borders that are no multiple of anything."""
    torch.manual_seed(0)
    x = torch.randn(3000, 1048).to(dtype)
    weight = torch.randn(72, 1048).to(dtype)
    functions = {
        "silu": nn.functional.silu,
        "gelu": lambda x: nn.functional.gelu(x, approximate="tanh"),
        "sigmoid_": lambda x: x.clone().sigmoid_(),
        "cos": torch.cos,
        "power": lambda x: x.abs().pow(-0.5),
        "linear": lambda x: nn.functional.linear(x, weight),
    }
    with BatchInvariant():
        for name, function in functions.items():
            whole = function(x)
            assert torch.equal(function(x[11 : 11 + rows]), whole[11 : 11 + rows]), name
            torch.testing.assert_close(function(x), whole, msg=name)


def test_functions_change_what_they_are_asked_to_change():
    x = torch.linspace(-3, 3, 70)
    expected = x.exp()
    with BatchInvariant():
        y = x.exp_()
    assert y is x
    torch.testing.assert_close(x, expected)


def test_experts_are_multiplied_as_torch_does():
    torch.manual_seed(0)
    rows, weights = torch.randn(9, 16), torch.randn(4, 16, 8)
    ends = torch.tensor([2, 2, 7, 9], dtype=torch.int32)
    by_hand = torch.cat([rows[:2] @ weights[0], rows[2:7] @ weights[2], rows[7:] @ weights[3]])
    torch.testing.assert_close(invariant.grouped_mm(rows, weights, ends), by_hand)


def test_sums_that_are_not_known_are_refused():
    ones = torch.ones(1, 1, 4)
    refused = pytest.raises(NotImplementedError, match=r"--batch_invariant.*aten.convolution")
    with refused, BatchInvariant():
        torch.conv1d(ones, ones)


def test_a_pass_that_fails_leaves_nothing_behind(causal_lm):
    actor = actor_of(causal_lm("llama"))
    with pytest.raises(IndexError):
        actor(torch.full((1, 4), 1000), 2)
    assert not invariant.entered_modes


# -- what it does not know --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gemma2", "gpt2"])
def test_a_model_that_it_does_not_know_is_refused(kind, causal_lm):
    model = causal_lm(kind, "eager") if kind == "gpt2" else causal_lm(kind)
    with pytest.raises(ConfigError, match="--batch_invariant: leave it out: "):
        make_invariant(model, CPU)


def test_a_gpu_is_refused(causal_lm: Callable[..., PreTrainedModel]):
    with pytest.raises(ConfigError, match="it works on a CPU alone so far"):
        make_invariant(causal_lm("llama"), torch.device("cuda"))


def test_the_head_has_all_its_rows_in_both_passes(monkeypatch):
    assert head_rows(41, 300) == 128
    monkeypatch.setattr(invariant, "entered_modes", [object()])
    assert head_rows(41, 300) == 300
