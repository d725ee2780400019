"""Checkpoints of other ranks and other ZeRO stages on real ranks (ranks/reshape.py), and where elements lie."""

from __future__ import annotations

import pytest
import torch

from lightppo.checkpoint.reshape import Piece, pieces_of

GROUPS = [{"a": torch.Size([3, 3]), "b": torch.Size([2])}, {"c": torch.Size([])}]


def test_where_the_elements_of_a_parameter_lie():
    # 11 elements on 2 ranks: padded to 12, 6 each. a is 0 to 8, b is 9 and 10.
    flat = {"a": [Piece(0, 0, 0, 0, 6), Piece(1, 0, 0, 6, 3)], "b": [Piece(1, 0, 3, 0, 2)]}
    assert pieces_of(2, 2, GROUPS) == {**flat, "c": [Piece(0, 1, 0, 0, 1)]}
    # each parameter in 2 parts: 5 and 4 of a, then 1 and 1 of b; c is padded to 2
    parts = {
        "a": [Piece(0, 0, 0, 0, 5), Piece(1, 0, 0, 5, 4)],
        "b": [Piece(0, 0, 5, 0, 1), Piece(1, 0, 5, 1, 1)],
    }
    assert pieces_of(3, 2, GROUPS) == {**parts, "c": [Piece(0, 1, 0, 0, 1)]}


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_every_element_lies_in_one_place(stage, ranks):
    for pieces, size in zip(pieces_of(stage, ranks, GROUPS).values(), (9, 2, 1), strict=True):
        assert [i for p in pieces for i in range(p.start, p.start + p.count)] == list(range(size))


def test_between_one_rank_and_two_and_zero_2_and_3(run_checks):
    options = {"env": {"FORMS": "2,3,2 fp16,3 fp16", "ACROSS": "yes"}}
    run_checks("reshape.py", "check_save", **options)
    run_checks(
        "reshape.py",
        "check_load",
        "check_load_frozen",
        "check_refused",
        "check_save",
        world_size=1,
        **options,
    )
    run_checks("reshape.py", "check_load", "check_load_frozen", **options)


@pytest.mark.long
@pytest.mark.parametrize(
    ("forms", "most_ranks"),
    [
        *(
            ("0,1,2,3,3 unsharded", 4),
            ("1 bf16,2 bf16,3 bf16", 4),
            ("1 fp16,2 fp16,3 fp16", 2),
            ("0 lora,2 lora,3 lora", 3),
        ),
        *(("1 offload,2 offload,3 offload", 4), ("0 frozen,2 frozen,3 frozen", 4)),
    ],
)
def test_between_all_stages_and_one_two_and_four_ranks(run_checks, forms, most_ranks):
    options = {"env": {"FORMS": forms}, "timeout": 800}
    run_checks("reshape.py", "check_save", **options)
    run_checks(
        "reshape.py", "check_load", "check_load_frozen", "check_save", world_size=1, **options
    )
    run_checks(
        "reshape.py",
        "check_load",
        "check_load_frozen",
        "check_save",
        world_size=most_ranks,
        **options,
    )
    run_checks("reshape.py", "check_load", "check_load_frozen", **options)
