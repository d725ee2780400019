"""Optimizer steps from the buffer: every sample in exactly one, common counts on all ranks, one normaliser."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from support.fakes import FakeStrategy, make_rollout, on_ranks
from support.whole_step import PolicyLoss, ValueLoss
from torch import Tensor

from lightppo.algorithms.entries import LOSS_AGG_MODES
from lightppo.algorithms.masking import LossNormalizer
from lightppo.config.rules import MicroBatchSpec
from lightppo.experience.batching import Minibatch, minibatches, plan_step
from lightppo.experience.experience import Experience
from lightppo.models.packing import PackedLayout


def samples(count: int, rank: int = 0) -> list[Experience]:
    """One-row experiences of very different lengths; id 100·rank + i names a sample."""
    items = []
    for i in range(count):
        item = Experience.from_rollouts(
            [make_rollout(range(1, 2 + i % 3), [1] * (1 + (i * 5) % 7))]
        )
        item.info["id"] = torch.tensor([100.0 * rank + i])
        for name in ("action_log_probs", "advantages", "values", "returns"):
            setattr(item, name, torch.linspace(-1, 1 + i, item.num_actions)[None])
        items.append(item)
    return items


def plan(
    strategy: FakeStrategy,
    items: list[Experience],
    train_batch_size: int,
    micro: int,
    seed: int = 0,
) -> list[Minibatch]:
    return list(
        minibatches(
            items,
            strategy,
            train_batch_size=train_batch_size,
            actor=MicroBatchSpec(micro),
            generator=torch.Generator().manual_seed(seed),
            collate=Experience.collate,
        )
    )


def ids(batch: Experience) -> list[int]:
    """Of a micro batch; a placeholder has none."""
    return batch.info["id"].int().tolist() if batch.info else []


COUNTS = [(1,), (7,), (12,), (4, 4), (5, 2), (7, 0), (1, 9), (3, 3, 2)]


@pytest.mark.parametrize("micro", [1, 2, 4, 64])
@pytest.mark.parametrize("train_batch_size", [3, 4, 6, 100])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_every_sample_is_in_exactly_one_step(counts, train_batch_size, micro):
    world = len(counts)
    plans = on_ranks(
        world, lambda s: plan(s, samples(counts[s.rank], s.rank), train_batch_size, micro)
    )

    seen = Counter(
        i for steps in plans for step in steps for batch in step.micro_batches for i in ids(batch)
    )
    assert seen == Counter(100 * rank + i for rank in range(world) for i in range(counts[rank]))

    assert {len(steps) for steps in plans} == {math.ceil(sum(counts) / train_batch_size)}
    for steps in zip(*plans):  # one optimizer step on all ranks
        assert len({len(step.micro_batches) for step in steps}) == 1
        (normalizer,) = {batch.part.normalizer for step in steps for batch in step.micro_batches}
        batches = [batch for step in steps for batch in step.micro_batches]
        assert sum(len(ids(batch)) for batch in batches) > 0
        assert all(len(ids(batch)) <= micro for batch in batches)
        # All tokens of a response are trained here.
        trained = sum(int(batch.response_lengths.sum()) for batch in batches if batch.info)
        assert normalizer.tokens == trained
        assert normalizer.sequences == sum(len(ids(batch)) for batch in batches)
        assert normalizer.dp_size == world


def test_steps_are_as_even_as_they_can_be():
    # ceil(11 / 4) = 3 steps of 4 + 4 + 3; ceil(9 / 4) = 3 steps of 3
    for count, sizes in ((11, [4, 4, 3]), (9, [3, 3, 3]), (8, [4, 4])):
        steps = plan(FakeStrategy(), samples(count), 4, 64)
        assert [sum(map(len, step.micro_batches)) for step in steps] == sizes


def test_uneven_ranks_share_steps_and_get_placeholders():
    # 7 + 2 samples, 4 a step: ceil(9 / 4) = 3 steps. Rank 0 has 3 + 2 + 2 and rank 1 has 1 + 1 + 0 of them; with one
    # sample a micro batch rank 1 lacks 2, 1 and 2 micro batches.
    plans = on_ranks(2, lambda s: plan(s, samples((7, 2)[s.rank], s.rank), 4, 1))
    held = [
        [[len(ids(batch)) for batch in step.micro_batches] for step in steps] for steps in plans
    ]
    assert held == [[[1, 1, 1], [1, 1], [1, 1]], [[0, 0, 1], [0, 1], [0, 0]]]
    for batch in plans[1][0].micro_batches[:2]:
        assert not batch.action_mask.any()


def test_micro_batches_hold_rows_of_like_length():
    (step,) = plan(FakeStrategy(), samples(7), 100, 2)
    lengths = [length for batch in step.micro_batches for length in batch.total_lengths.tolist()]
    assert lengths == sorted(lengths, reverse=True)


def test_order_follows_from_the_generator_alone():
    orders = []
    for seed in (0, 0, 1):
        steps = plan(FakeStrategy(), samples(12), 3, 64, seed)
        orders.append(
            [sorted(i for batch in step.micro_batches for i in ids(batch)) for step in steps]
        )
    assert orders[0] == orders[1] != orders[2]
    assert orders[0] != [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


def of_prompts(groups: dict[int, int], response: int = 3) -> list[Experience]:
    """Samples of prompts of so many tokens (which differ in nothing else), mixed up; id 10·prompt + i."""
    pairs = [(prompt, i) for prompt, count in groups.items() for i in range(count)]
    items = []
    for prompt, i in sorted(pairs, key=lambda pair: (pair[1], pair[0])):
        item = Experience.from_rollouts([make_rollout(range(1, 1 + prompt), [1] * response)])
        item.info["id"] = torch.tensor([10.0 * prompt + i])
        items.append(item)
    return items


class SharedPrompts(PackedLayout):
    """As of models that pack."""

    packs = shares_prompts = True


def steps_of(items: list[Experience], size: int, seed: int, **options) -> list[Minibatch]:
    return list(
        minibatches(
            items,
            FakeStrategy(),
            train_batch_size=size,
            **{"actor": MicroBatchSpec(64), "layout": SharedPrompts(None), **options},
            generator=torch.Generator().manual_seed(seed),
            collate=Experience.collate,
        )
    )


def test_groups_are_drawn_whole_in_another_order_each_time():
    items = of_prompts({1: 4, 2: 4, 3: 4, 4: 4, 5: 4, 6: 4})
    orders = []
    for seed in (0, 0, 1):
        steps = [
            sorted(ids(step.micro_batches[0]))
            for step in steps_of(items, 8, seed, shuffle="groups")
        ]
        assert [len(step) for step in steps] == [8, 8, 8]
        prompts = [sorted({i // 10 for i in step}) for step in steps]
        assert sorted(p for step in prompts for p in step) == [1, 2, 3, 4, 5, 6]  # each in one step
        orders.append(prompts)
    assert orders[0] == orders[1] != orders[2]
    drawn = [sorted(ids(step.micro_batches[0])) for step in steps_of(items, 8, 0)]
    assert any(len({i // 10 for i in step}) > 2 for step in drawn)  # by samples they are mixed


def test_a_group_at_the_border_of_two_steps_is_cut():
    # 3 groups of 4 in steps of 6: one of them is half in each
    for seed in range(4):
        steps = [
            ids(step.micro_batches[0])
            for step in steps_of(of_prompts({1: 4, 2: 4, 3: 4}), 6, seed, shuffle="groups")
        ]
        assert sorted(i for step in steps for i in step) == [
            10 * p + i for p in (1, 2, 3) for i in range(4)
        ]
        held = [Counter(i // 10 for i in step) for step in steps]
        assert [sorted(counts.values()) for counts in held] == [[2, 4], [2, 4]]


def test_a_shared_prompt_counts_once():
    # 4 samples of 10 + 3 tokens are 22 tokens with one prompt, and 52 with four
    items = of_prompts({10: 4, 11: 4})
    budget = {"actor": MicroBatchSpec(26, "tokens")}
    (shared,) = steps_of(items, 8, 0, **budget)
    assert sorted(sorted(ids(batch)) for batch in shared.micro_batches) == [
        [100, 101, 102, 103],
        [110, 111, 112, 113],
    ]
    (apart,) = steps_of(items, 8, 0, share_prompts=False, **budget)
    assert all(len(batch) <= 2 for batch in apart.micro_batches)


def test_no_sample_anywhere_makes_no_step():
    assert on_ranks(2, lambda s: plan(s, [], 4, 2)) == [[], []]


def test_normalizer_counts_trained_tokens_of_all_ranks_and_the_scale():
    def planned(strategy: FakeStrategy) -> list[Experience]:
        # Rank 0: responses of 1 and 6 tokens, one of them a hole; rank 1: nothing trained in its only row.
        items = samples(2)[: 2 - strategy.rank]
        if strategy.rank == 0:
            items[1].action_mask[0, 2] = False
        else:
            items[0].action_mask[:] = False
        return plan_step(items, strategy, scale=8.0)

    first, second = on_ranks(2, planned)
    (n,) = {m.part.normalizer for m in [*first, *second]}
    assert (n.tokens, n.sequences, n.dp_size, n.scale) == (1 + 5, 2, 2, 8.0)
    assert [[m.part.has_samples for m in rank] for rank in (first, second)] == [
        [True, True],
        [False, True],
    ]
    assert {m.part.status_scale for m in first} == {1.5}  # 3 micro batches with samples on 2 ranks


def toy_log_probs(batch: Experience, weight: Tensor) -> Tensor:
    """Something that depends on a parameter at every position, as a model does: (B, A)."""
    positions = torch.arange(batch.num_actions) + batch.total_lengths[:, None]
    return weight[0] * positions.cos() + weight[1] * positions.sin()


def share_of_loss(batch: Experience, n: LossNormalizer, weight: Tensor, mode: str) -> Tensor:
    """Policy and value loss of one micro batch."""
    outputs = toy_log_probs(batch, weight)
    policy, _ = PolicyLoss(loss_agg_mode=mode)(
        outputs, batch.action_log_probs, batch.advantages, batch.action_mask, n
    )
    value, _ = ValueLoss(loss_agg_mode=mode)(
        outputs, batch.values, batch.returns, batch.action_mask, n
    )
    return policy + value


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_placeholders_add_exactly_nothing(mode):
    n = plan_step(samples(3), FakeStrategy())[0].part.normalizer
    weight = torch.tensor([0.3, -0.2], requires_grad=True)
    loss = share_of_loss(Experience.placeholder(), n, weight, mode)
    loss.backward()
    assert loss.item() == 0.0
    assert weight.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("micro", [1, 2, 4])
def test_gradient_depends_neither_on_micro_batches_nor_on_ranks(mode, micro):
    """Rank 0 has 5 samples, rank 1 has 2 of them; the same 7 in one batch on one rank give the same gradient."""
    everything = samples(7)

    def gradient(strategy: FakeStrategy) -> tuple[float, Tensor]:
        mine = (
            everything
            if strategy.world_size == 1
            else everything[:5]
            if strategy.rank == 0
            else everything[5:]
        )
        weight = torch.tensor([0.3, -0.2], requires_grad=True)
        (step,) = plan(strategy, mine, 100, 100 if strategy.world_size == 1 else micro)
        losses = [
            share_of_loss(batch, batch.part.normalizer, weight, mode)
            for batch in step.micro_batches
        ]
        torch.stack(losses).sum().backward()
        loss = strategy.all_reduce(sum(loss.item() for loss in losses), "mean")
        return loss, strategy.all_reduce(weight.grad, "mean")

    loss, expected = gradient(FakeStrategy())
    assert expected.abs().min() > 1e-3
    for rank_loss, found in on_ranks(2, gradient):
        assert rank_loss == pytest.approx(loss, rel=1e-6)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
