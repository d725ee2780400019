from __future__ import annotations

import pytest
import torch

from lightppo.models.packing import (
    action_predictors,
    check_num_actions,
    pack,
    position_ids_from_lengths,
    position_ids_from_mask,
    real_actions,
    scatter,
)

#           left pad   prompt   response  right pad
SEQUENCES = torch.tensor([[0, 0, 11, 12, 13, 0], [21, 22, 23, 24, 25, 26]])
MASK = torch.tensor([[0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]])


def test_position_ids_start_at_the_first_real_token() -> None:
    assert position_ids_from_mask(MASK).tolist() == [[0, 0, 0, 1, 2, 2], [0, 1, 2, 3, 4, 5]]


def test_pack_keeps_real_tokens_in_row_order() -> None:
    row = pack(SEQUENCES, MASK)
    assert row.input_ids.tolist() == [[11, 12, 13, 21, 22, 23, 24, 25, 26]]
    assert row.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 5]]
    assert row.slots[0, 2:5].tolist() == [0, 1, 2]
    assert row.slots[1].tolist() == [3, 4, 5, 6, 7, 8]


def test_a_wholly_padded_row_takes_no_place() -> None:
    row = pack(SEQUENCES, torch.tensor([[0] * 6, [1] * 6]))
    assert row.input_ids.tolist() == [[21, 22, 23, 24, 25, 26]]


def test_packing_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 everywhere"):
        pack(SEQUENCES, torch.zeros_like(MASK))


def test_real_actions_need_a_real_token_before_them() -> None:
    # A = 4 looks at tokens 2..5, predicted from 1..4. Row 0: token 2 is predicted from padding, token 5 is padding.
    assert real_actions(MASK, 4).tolist() == [[False, True, True, False], [True, True, True, True]]


def test_scatter_puts_values_back_row_by_row_and_carries_gradients() -> None:
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    out = scatter(values, torch.tensor([[False, True], [True, True]]))
    assert out.tolist() == [[0.0, 1.0], [2.0, 3.0]]
    (out * torch.tensor([[10.0, 20.0], [30.0, 40.0]])).sum().backward()
    assert values.grad.tolist() == [20.0, 30.0, 40.0]


def test_action_predictors_of_a_packed_row() -> None:
    # lengths 3 and 4 with 1 and 2 actions: actions are places 2 | 5, 6, predicted from 1 | 4, 5; last places 2 and 6
    device = torch.device("cpu")
    assert action_predictors([3, 4], [1, 2], device).tolist() == [1, 4, 5]
    assert action_predictors([3, 4], [1, 2], device, include_last=True).tolist() == [1, 2, 4, 5, 6]
    with pytest.raises(ValueError, match=r"num_actions\[1\] = 4 must be between 0 and 3"):
        action_predictors([3, 4], [1, 4], device)
    with pytest.raises(ValueError, match="a list with one entry for each of 2"):
        action_predictors([3, 4], [1], device)


def test_position_ids_from_lengths() -> None:
    row = torch.zeros(1, 5, dtype=torch.long)
    assert position_ids_from_lengths([2, 3], row).tolist() == [[0, 1, 0, 1, 2]]
    with pytest.raises(ValueError, match="add up to the 5 packed tokens"):
        position_ids_from_lengths([2, 2], row)
    with pytest.raises(ValueError, match=r"\(1, T\), got \(2, 3\)"):
        position_ids_from_lengths([3, 3], torch.zeros(2, 3))


@pytest.mark.parametrize("num_actions", [0, 6, 7, -1, [1, 2]])
def test_num_actions_out_of_range(num_actions: object) -> None:
    with pytest.raises(ValueError, match=r"must be between 1 and 5 \(S - 1\)"):
        check_num_actions(num_actions, 6)
