"""A prompt once for all its responses: index arithmetic by hand, and models that cannot tell the difference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, OPTConfig, PreTrainedModel

from lightppo.models.actor import Actor
from lightppo.models.critic import Critic
from lightppo.models.lora import LoraOptions, add_adapters
from lightppo.models.packing import distinct_places, pack, pack_shared, read
from lightppo.models.wrapper import _say_that_nothing_is_shared

MakeModel = Callable[..., PreTrainedModel]
Batch = tuple[torch.Tensor, torch.Tensor, int]
Rows = list[tuple[list[int], list[int]]]


def batch_of(rows: Rows) -> Batch:
    """(prompt, response) of each row -> (sequences, attention_mask, A)."""
    width, actions = max(len(p) for p, _ in rows), max(len(r) for _, r in rows)
    sequences = torch.zeros(len(rows), width + actions, dtype=torch.long)
    mask = torch.zeros_like(sequences)
    for b, (prompt, response) in enumerate(rows):
        columns = slice(width - len(prompt), width + len(response))
        sequences[b, columns] = torch.tensor(prompt + response)
        mask[b, columns] = 1
    return sequences, mask, actions


def test_by_hand() -> None:
    # Row 1 has a prompt of its own that begins like the other; padding has the id 0, like row 1's last prompt token.
    row = pack_shared(*batch_of([([5, 6], [10, 11]), ([5, 6, 0], [20]), ([5, 6], [30, 31, 32])]))
    assert row is not None
    # prompts sorted: [-1, 5, 6] before [5, 6, 0]
    assert row.input_ids.tolist() == [[5, 6, 10, 11, 30, 31, 32, 5, 6, 0, 20]]
    assert row.position_ids.tolist() == [[0, 1, 2, 3, 2, 3, 4, 0, 1, 2, 3]]
    assert (row.lengths.tolist(), row.parents.tolist()) == ([2, 2, 3, 4], [-1, 0, 0, -1])
    assert row.slots[0, 1:5].tolist() == [0, 1, 2, 3]
    assert row.slots[1, :4].tolist() == [7, 8, 9, 10]
    assert row.slots[2, 1:6].tolist() == [0, 1, 4, 5, 6]


def test_nothing_shared() -> None:
    assert pack_shared(*batch_of([([5, 6], [10]), ([6, 5], [10]), ([6], [5])])) is None
    assert pack_shared(*batch_of([([5, 6], [10])])) is None
    assert pack_shared(*batch_of([([], [1, 2]), ([], [1, 2])])) is None  # no prompt at all
    sequences, mask, _ = batch_of([([5, 6], [10]), ([5, 6], [10])])
    assert pack_shared(sequences, mask, 3) is None


def test_a_batch_without_padding_and_rows_without_response() -> None:
    sequences = torch.tensor([[3, 4, 7], [3, 4, 8]])
    row = pack_shared(sequences, torch.ones_like(sequences), 1)
    assert row is not None
    assert row.input_ids.tolist() == [[3, 4, 7, 8]]
    assert (row.lengths.tolist(), row.parents.tolist()) == ([2, 1, 1], [-1, 0, 0])
    row = pack_shared(*batch_of([([3, 4], []), ([3, 4], [7, 8]), ([3, 4], [])]))
    assert row is not None
    assert (row.lengths.tolist(), row.parents.tolist()) == ([2, 2], [-1, 0])


def test_each_row_is_found_in_its_places() -> None:
    """Random groups: tokens and positions of every row are where its slots say, and no token stands twice."""
    draw = torch.Generator().manual_seed(0)
    number = lambda low, high: int(torch.randint(low, high, (1,), generator=draw))  # noqa: E731
    for _ in range(20):
        prompts = [[number(0, 3) for _ in range(number(1, 4))] for _ in range(3)]
        rows = [(prompts[number(0, 3)], [number(0, 9) for _ in range(number(1, 6))]) for _ in range(8)]
        sequences, mask, actions = batch_of(rows)
        row = pack_shared(sequences, mask, actions)
        assert row is not None
        alone = pack(sequences, mask)
        real = mask.bool()
        assert torch.equal(row.input_ids[0, row.slots[real]], sequences[real])
        assert torch.equal(row.position_ids[0, row.slots[real]], alone.position_ids[0])
        tokens = sum(map(len, {tuple(p): p for p, _ in rows}.values())) + sum(len(r) for _, r in rows)
        assert row.input_ids.shape[1] == tokens == int(row.lengths.sum())
        assert sorted(set(row.slots[real].tolist())) == list(range(tokens))
        for b, (_, response) in enumerate(rows):  # a response follows itself without a gap
            own = row.slots[b, -actions:][: len(response)]
            assert own.tolist() == list(range(int(own[0]), int(own[0]) + len(response)))


def test_distinct_places_and_their_reads() -> None:
    places = torch.tensor([4, 5, 9, 4, 7])
    different, reads = distinct_places(places)
    assert reads is not None
    assert different.tolist() == [4, 5, 7, 9]
    assert torch.equal(different[reads], places)
    x = torch.randn(4, 3, requires_grad=True)
    assert torch.equal(read(x, reads), x[reads])
    read(x, reads).sum().backward()
    assert x.grad[:, 0].tolist() == [2, 1, 1, 1]
    once = torch.tensor([3, 1])
    assert distinct_places(once) == (once, None)
    assert read(x, None) is x
    assert read(torch.tensor([1.5, 2.5]), torch.tensor([1, 1, 0])).tolist() == [2.5, 2.5, 1.5]


def test_gradients_of_reads_are_summed_in_one_order() -> None:
    """With two threads, and many rows to one place."""
    draw = torch.Generator().manual_seed(0)
    reads = torch.arange(40_000) % 3
    x, factor = torch.randn(3, 8, requires_grad=True), torch.randn(40_000, 8, generator=draw)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        gradients = [torch.autograd.grad(read(x, reads), x, factor)[0] for _ in range(8)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(gradients[0], other) for other in gradients)
    expected = torch.stack([factor[reads == i].double().sum(0) for i in range(3)])
    torch.testing.assert_close(gradients[0].double(), expected, atol=1e-3, rtol=0)


# -- models that cannot tell the difference


FAMILIES = ["llama", "qwen2", "qwen3", "gemma2", "gpt2", "gpt_neox", "opt", "mixtral"]
ACTIONS = 4 + 3 + 2 + 1 + 8 + 3 + 6 + 7 + 5
SHARED_TOKENS = 9 + 5 + 1 + 6 + ACTIONS


def make(family: str, usual: MakeModel, kind: Any = AutoModelForCausalLM) -> PreTrainedModel:
    if family != "opt":
        return usual(family)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_labels": 1}
    config = OPTConfig(**sizes, vocab_size=48, max_position_embeddings=64, word_embed_proj_dim=32, init_std=0.2)
    return kind.from_config(config, attn_implementation="sdpa")


@pytest.fixture
def groups() -> tuple[torch.Tensor, torch.Tensor, int]:
    """Three prompts of 5, 1 and 9 tokens with 3, 2 and 3 samples in a row that mixes them, one more alone."""
    draw = torch.Generator().manual_seed(2)
    ids = lambda n: torch.randint(3, 48, (n,), generator=draw).tolist()  # noqa: E731
    long, short, middle, alone = ids(9), ids(1), ids(5), ids(6)
    rows = [(long, ids(4)), (middle, ids(3)), (short, ids(2)), (long, ids(1)), (alone, ids(8))]
    rows += [(middle, ids(3)), (long, ids(6)), (short, ids(7)), (middle, ids(5))]
    return batch_of(rows)


@contextmanager
def counted(model: Actor | Critic) -> Iterator[list[int]]:
    """Tokens of each forward."""
    tokens: list[int] = []
    hook = model.hf_model.get_input_embeddings().register_forward_hook(
        lambda module, args, output: tokens.append(args[0].numel())
    )
    try:
        yield tokens
    finally:
        hook.remove()


def scores_and_gradients(actor: Actor, batch: Batch, **asked: bool) -> tuple[list[torch.Tensor], dict]:
    sequences, mask, num_actions = batch
    actor.train()
    actor.zero_grad()
    scores = actor.score_actions(sequences, num_actions, mask, entropy=True, entropy_grad=True, **asked)
    weights = torch.linspace(-1, 1, scores.log_probs.numel()).view_as(scores.log_probs)
    loss = ((scores.log_probs + 2 * scores.entropy) * weights).sum()
    values = [scores.log_probs, scores.entropy]
    if asked.get("logits"):
        values.append(scores.logits)
        loss = loss + scores.logits.square().mean(-1).sum()
    loss.div(int(scores.real.sum())).backward()
    return [v.detach() for v in values], {n: p.grad for n, p in actor.named_parameters() if p.grad is not None}


def assert_same(found: tuple[list, dict], expected: tuple[list, dict]) -> None:
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=1e-5)
    assert found[1].keys() == expected[1].keys()
    assert max(float(g.abs().max()) for g in expected[1].values()) > 1e-2
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_actor_says_the_same(family: str, checkpointing: bool, causal_lm: MakeModel, groups: Batch) -> None:
    expected = scores_and_gradients(Actor(make(family, causal_lm)), groups)
    actor = Actor(make(family, causal_lm), packing_samples=True)
    if checkpointing:
        actor.gradient_checkpointing_enable()
    scores_and_gradients(actor, groups)  # the first forward also compares packed with alone
    with counted(actor) as tokens:
        found = scores_and_gradients(actor, groups)
    assert set(tokens) == {SHARED_TOKENS}
    assert_same(found, expected)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_actor_gives_the_same_logits(family: str, causal_lm: MakeModel, groups: Batch) -> None:
    expected = scores_and_gradients(Actor(causal_lm(family)), groups, logits=True)
    assert_same(scores_and_gradients(Actor(causal_lm(family), packing_samples=True), groups, logits=True), expected)
    sequences, mask, num_actions = groups
    _, output = Actor(causal_lm(family), packing_samples=True)(sequences, num_actions, mask, return_output=True)
    assert output.logits.shape == (1, ACTIONS, 48)  # one for each action, also of the shared last prompt token


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("include_last", [False, True])
def test_critic_says_the_same(family: str, include_last: bool, classifier: MakeModel, groups: Batch) -> None:
    sequences, mask, num_actions = groups
    results = []
    for packing in (False, True):
        critic = Critic(make(family, classifier, AutoModelForSequenceClassification), packing_samples=packing).train()
        critic(sequences, num_actions, mask)
        with counted(critic) as tokens:
            values = critic(sequences, num_actions, mask, include_last=include_last)
        weights = torch.linspace(-1, 1, values.numel()).view_as(values)
        (values * weights).sum().div(ACTIONS).backward()
        results.append(([values.detach()], {n: p.grad for n, p in critic.named_parameters() if p.grad is not None}))
    assert tokens == [SHARED_TOKENS]
    assert_same(results[1], results[0])


def test_adapters_say_the_same(causal_lm: MakeModel, groups: Batch) -> None:
    results = []
    for packing in (False, True):
        actor = Actor(causal_lm(), packing_samples=packing)
        add_adapters(actor, LoraOptions(rank=4, alpha=8), seed=1)
        with torch.no_grad():  # adapters begin as nothing
            torch.manual_seed(3)
            for name, parameter in actor.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.2)
        results.append(scores_and_gradients(actor, groups))
    assert all("lora_" in name for name in results[0][1])
    assert_same(results[1], results[0])


def test_rows_are_shared_only_where_asked_and_possible(causal_lm: MakeModel, groups: Batch) -> None:
    sequences, mask, num_actions = groups
    real = int(mask.sum())
    cases = [
        (Actor(causal_lm(), packing_samples=True), True),
        (Actor(causal_lm(), packing_samples=True, share_prompts=False), False),
        (Actor(causal_lm()), False),
        (Actor(causal_lm(attention="eager"), packing_samples=True), False),
    ]
    for actor, shares in cases:
        actor(sequences, num_actions, mask)
        assert actor.shares_prompts == shares
        with counted(actor) as tokens:
            actor(sequences, num_actions, mask)
        assert tokens == [SHARED_TOKENS if shares else real if actor.packing_samples else sequences.numel()]
    assert real > SHARED_TOKENS


def test_an_attention_that_cannot_share_says_so_once(causal_lm: MakeModel, caplog: pytest.LogCaptureFixture) -> None:
    _say_that_nothing_is_shared.cache_clear()
    for _ in range(2):
        Actor(causal_lm(attention="eager"), packing_samples=True)
    assert [record.getMessage() for record in caplog.records if "share_prompts" in record.getMessage()] == [
        "--share_prompts needs --attn_implementation sdpa; with eager every sample brings its prompt along"
    ]
    caplog.clear()
    _say_that_nothing_is_shared.cache_clear()
    Actor(causal_lm(attention="eager"), packing_samples=True, share_prompts=False)
    Actor(causal_lm(attention="eager"))
    assert not caplog.records


def test_the_load_balancing_loss_counts_every_sample(causal_lm: MakeModel, groups: Batch) -> None:
    """Where it is asked for, prompts are not shared: it is the mean over all tokens."""
    sequences, mask, num_actions = groups
    losses = []
    for packing in (False, True):
        actor = Actor(causal_lm("mixtral"), packing_samples=packing).eval()
        losses.append(actor.score_actions(sequences, num_actions, mask, router_loss=True).router_loss)
    torch.testing.assert_close(losses[1], losses[0], atol=1e-5, rtol=1e-5)
