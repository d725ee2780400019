"""A prompt once for all its responses: index arithmetic by hand, and models that cannot tell the difference."""

from __future__ import annotations

import torch

from lightppo.models.packing import pack
from lightppo.models.shared_prompts import distinct_places, pack_shared, read

Rows = list[tuple[list[int], list[int]]]


def batch_of(rows: Rows) -> tuple[torch.Tensor, torch.Tensor, int]:
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
