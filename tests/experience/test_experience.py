"""Experience: layout, cutting and joining without losing a number."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.fakes import make_rollout
from support.far_device import FAR, FarDevice
from torch import Tensor

from lightppo.experience.experience import Experience

ACTION_TENSORS = (
    "action_log_probs",
    "base_action_log_probs",
    "rollout_log_probs",
    "values",
    "returns",
    "advantages",
    "kl",
    "loss_weights",
    "selected",
)


def uneven() -> Experience:
    """Row 0: prompt of 1, response of 5. Row 1: prompt of 3, response of 1. So S = 3 + 5 = 8, A = 5."""
    return Experience.from_rollouts(
        [make_rollout([1], [2, 3, 4, 5, 6], finish_reason="length"), make_rollout([7, 8, 9], [10])]
    )


def full(rows: list[tuple[int, int]]) -> Experience:
    """Experience of (prompt length, response length) rows with a number of its own at every real position."""
    experience = Experience.from_rollouts(
        [make_rollout(range(1, p + 1), range(50, 50 + a)) for p, a in rows]
    )
    number = torch.arange(1.0, experience.action_mask.numel() + 1).view(
        experience.action_mask.shape
    )
    for i, name in enumerate(ACTION_TENSORS):
        setattr(experience, name, (number + 1000 * i) * experience.action_mask)
    two = torch.stack([number, -number], dim=-1)  # (B, A, 2)
    experience.extra = {
        "one": -number * experience.action_mask,
        "two": two * experience.action_mask.unsqueeze(-1),
    }
    experience.info["reward"] = torch.arange(float(len(rows)))
    places = torch.arange(experience.sequences.numel()).view_as(experience.sequences)
    mask = experience.attention_mask.bool()
    experience.experts = (
        places.masked_fill(~mask, 255).to(torch.uint8)[..., None, None].repeat(1, 1, 2, 3)
    )
    return experience


def tensors_of(experience: Experience) -> list[Tensor]:
    """All of them; none may be absent."""
    mappings = [experience.info, experience.extra]
    others = [
        getattr(experience, field.name)
        for field in dataclasses.fields(experience)
        if field.name not in ("info", "extra", "part")
    ]
    return others + [tensor for mapping in mappings for tensor in mapping.values()]


def assert_same(one: Experience, other: Experience) -> None:
    for field in dataclasses.fields(Experience):
        left, right = getattr(one, field.name), getattr(other, field.name)
        if field.name in ("info", "extra"):
            assert left.keys() == right.keys()
            assert all(torch.equal(left[name], right[name]) for name in left)
        elif left is None or right is None:
            assert left is right, field.name
        else:
            assert left.dtype == right.dtype, field.name
            assert torch.equal(left, right), field.name


def test_layout_is_left_padding_prompt_response_right_padding():
    experience = uneven()
    assert experience.sequences.tolist() == [[0, 0, 1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 0, 0, 0, 0]]
    assert experience.attention_mask.tolist() == [
        [0, 0, 1, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 0, 0, 0, 0],
    ]
    assert experience.action_mask.tolist() == [[True] * 5, [True] + [False] * 4]
    assert (len(experience), experience.num_actions) == (2, 5)
    assert experience.response_lengths.tolist() == [5, 1]
    assert experience.total_lengths.tolist() == [6, 4]
    info = {name: values.tolist() for name, values in experience.info.items()}
    assert info == {"response_length": [5, 1], "total_length": [6, 4], "truncated": [1, 0]}


def test_log_probs_of_the_engine_are_padded_like_the_responses():
    rollouts = [
        make_rollout([1], [2, 3], log_probs=[-0.5, -1.5]),
        make_rollout([1], [4], log_probs=[-0.25]),
    ]
    assert Experience.from_rollouts(rollouts).rollout_log_probs.tolist() == [
        [-0.5, -1.5],
        [-0.25, 0.0],
    ]


def test_without_log_probs_of_every_rollout_there_are_none():
    rollouts = [make_rollout([1], [2], log_probs=[-0.5]), make_rollout([1], [4])]
    assert Experience.from_rollouts(rollouts).rollout_log_probs is None


@pytest.mark.parametrize(
    ("rollouts", "message"),
    [
        ([], "no rollouts"),
        ([make_rollout([], [2], index=7)], "prompt 7: the prompt has no tokens"),
        ([make_rollout([1], [], index=7)], "prompt 7: the response has no tokens"),
        (
            [make_rollout([1], [2, 3], index=7, sample_index=4, log_probs=[-0.5])],
            "prompt 7, sample 4: the rollout engine gave 1 log probs for 2 response tokens",
        ),
    ],
)
def test_rollouts_that_cannot_be_trained_on_are_named(rollouts, message):
    with pytest.raises(ValueError, match=message):
        Experience.from_rollouts(rollouts)


def test_select_cuts_off_the_padding_that_the_other_rows_needed():
    long, short = uneven().select([0]), uneven().select([1])
    assert long.sequences.tolist() == [[1, 2, 3, 4, 5, 6]]
    assert long.num_actions == 5
    assert short.sequences.tolist() == [[7, 8, 9, 10]]
    assert short.attention_mask.tolist() == [[1, 1, 1, 1]]
    assert short.action_mask.tolist() == [[True]]
    assert short.info["response_length"].tolist() == [1]


def test_select_takes_rows_in_the_order_asked_for():
    experience = full([(1, 3), (2, 2), (3, 1)])
    picked = experience.select([2, 0])
    assert picked.info["reward"].tolist() == [2, 0]
    # Rows 2 and 0 need 3 prompt and 3 action columns; numbers of row r, action t are 3r + t + 1.
    assert picked.action_log_probs.tolist() == [[7, 0, 0], [1, 2, 3]]
    assert picked.sequences.tolist() == [[1, 2, 3, 50, 0, 0], [0, 0, 1, 50, 51, 52]]


def test_holes_in_the_mask_are_no_padding():
    experience = full([(1, 4), (1, 2)])
    # the response ends in tool output
    experience.action_mask[0] = torch.tensor([False, True, False, False])
    row = experience.select([0])
    assert row.num_actions == 4
    assert row.action_mask.tolist() == [[False, True, False, False]]
    assert row.response_lengths.tolist() == [4]
    again = Experience.collate([row, experience.select([1])])
    assert again.action_mask.tolist() == [[False, True, False, False], [True, True, False, False]]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_splitting_and_joining_keeps_every_tensor(size):
    experience = full([(4, 1), (1, 6), (2, 2), (1, 1), (3, 5)])
    parts = experience.split(size)
    assert [len(part) for part in parts] == [min(size, 5 - i) for i in range(0, 5, size)]
    assert_same(Experience.collate(parts), experience)


def test_single_rows_have_no_padding():
    for part in full([(4, 1), (1, 6), (2, 2)]).split():
        assert part.attention_mask.bool().all()
        assert part.action_mask.all()


def test_joining_pads_prompts_left_and_responses_right():
    one, other = full([(1, 2)]), full([(3, 1)])
    joined = Experience.collate([one, other])
    assert joined.sequences.tolist() == [[0, 0, 1, 50, 51], [1, 2, 3, 50, 0]]
    assert joined.attention_mask.tolist() == [[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]]
    assert joined.action_mask.tolist() == [[True, True], [True, False]]
    assert joined.values.tolist() == [[3001, 3002], [3001, 0]]
    assert joined.info["total_length"].tolist() == [3, 4]


def test_joining_leaves_the_parts_alone():
    parts = full([(1, 2), (3, 1)]).split()
    joined = Experience.collate(parts)
    joined.advantages.fill_(-1)
    assert parts[0].advantages.tolist() == [[5001, 5002]]
    assert parts[1].sequences.tolist() == [[1, 2, 3, 50]]


def test_joining_refuses_parts_of_different_kinds():
    with pytest.raises(ValueError, match="nothing to collate"):
        Experience.collate([])
    without_values = full([(1, 2)])
    without_values.values = None
    for parts in ([full([(1, 2)]), without_values], [without_values, full([(1, 2)])]):
        with pytest.raises(ValueError, match="different tensors"):
            Experience.collate(parts)


@pytest.mark.parametrize("first", [0, 1])
def test_joining_refuses_parts_with_different_info(first):
    """Whichever comes first: a name of one part alone must neither be lost nor end in a KeyError."""
    parts = [full([(1, 2)]), full([(1, 2)])]
    parts[first].info["reward/format"] = torch.ones(1)
    with pytest.raises(ValueError, match="all need"):
        Experience.collate(parts)


def test_placeholder_has_everything_but_a_token_to_train():
    placeholder = Experience.placeholder()
    assert (len(placeholder), placeholder.num_actions, placeholder.sequences.shape) == (
        1,
        1,
        (1, 2),
    )
    assert not placeholder.action_mask.any()
    assert placeholder.attention_mask.all()  # a model never sees a row without a token
    for name in ACTION_TENSORS:
        assert getattr(placeholder, name).tolist() == [[0.0]]
    assert not placeholder.extra


def test_a_broken_number_among_several_of_a_token_is_found():
    experience = full([(1, 2), (2, 1)])
    experience.extra["two"][0, 1, 1] = torch.nan
    experience.extra["two"][1, 1, 0] = torch.nan  # padding
    assert experience.non_finite() == {"two": 1}


def test_moving_takes_every_tensor_along():
    experience = full([(1, 2), (2, 1)])
    assert experience.to_device("meta") is experience
    assert {tensor.device.type for tensor in tensors_of(experience)} == {"meta"}


def test_absent_tensors_stay_absent():
    experience = uneven().to_device("meta")
    assert all(getattr(experience, name) is None for name in ACTION_TENSORS)


def test_copies_to_the_cpu_are_waited_for():
    """A non-blocking copy from a GPU to the CPU returns before the numbers are there."""
    with FarDevice() as far:
        experience = uneven().to_device(FAR)
        assert far.waits == {}
        experience.to_device("cpu")
        assert far.waits["_to_copy"] >= 3
    assert experience.sequences.tolist() == uneven().sequences.tolist()


def test_what_came_from_the_cpu_is_still_there_until_it_is_changed():
    with FarDevice() as far:
        experience = uneven().to_device(FAR)
        assert experience.row_lengths() == uneven().row_lengths()
        assert experience.prompts() == uneven().prompts()
        assert far.waits == {}
        experience.attention_mask[:] = 1
        assert experience.row_lengths() != uneven().row_lengths()
        assert far.waits.total() == 1


@pytest.mark.gpu
def test_numbers_are_there_after_a_copy_to_the_cpu():
    experience = full([(1, 2)] * 64).to_device("cuda")
    busy = torch.randn(8192, 8192, device="cuda")
    for _ in range(20):
        busy = (busy @ busy).tanh()
    experience.advantages = experience.advantages + 0 * busy[0, 0]  # behind the queue
    assert torch.equal(experience.to_device("cpu").advantages, full([(1, 2)] * 64).advantages)


@pytest.mark.gpu
def test_pinning_pins_every_tensor():
    experience = full([(1, 2)])
    assert experience.pin_memory() is experience
    assert all(tensor.is_pinned() for tensor in tensors_of(experience))


def test_prompts_are_told_by_their_tokens() -> None:
    """Whatever the padding; a padding id inside a prompt is part of it."""
    rollouts = [
        make_rollout(p, [7] * n)
        for p, n in (([5, 6], 1), ([4, 5, 6], 3), ([5, 6], 2), ([0, 5, 6], 1))
    ]
    first, second, third, fourth = Experience.from_rollouts(rollouts).prompts()
    assert first == third
    assert len({first, second, fourth}) == 3
    assert Experience.from_rollouts(rollouts[2:3]).prompts() == [first]
