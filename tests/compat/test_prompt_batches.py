"""Batches of any dataloader as prompts."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from lightppo.compat.script_members import as_prompts
from lightppo.data.records import Prompt
from lightppo.distributed.distributed import RankSampler
from lightppo.trainer.prompts import EpisodePrompts as ScriptPrompts


class CharacterTokenizer:
    """An id per character; a begin-of-text id only if special tokens are asked for."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [1] * add_special_tokens + [ord(c) for c in text]}


def prompts_of(batch, limit: int = 10) -> list[Prompt]:
    return as_prompts(batch, CharacterTokenizer(), limit)


def test_prompts_stay_as_they_are():
    batch = [Prompt("a", [1], index=3), Prompt("b", [2], index=4)]
    assert prompts_of(batch) is batch
    assert prompts_of([]) == []  # a rank's empty share of the last batch


@pytest.mark.parametrize(
    "batch", [["ab", "c"], ("ab", "c"), (["ab", "c"],)], ids=["list", "tuple", "one column"]
)
def test_strings(batch):
    first, second = prompts_of(batch)
    # no special tokens: the template has put them
    assert (first.text, first.token_ids) == ("ab", [97, 98])
    assert (second.text, second.token_ids) == ("c", [99])
    assert (first.label, first.data_source) == (None, "default")


@pytest.mark.parametrize(
    "batch",
    [
        (["ab", "c"], ["1", "2"]),
        [["ab", "c"], ["1", "2"]],
        [("ab", "c"), ("1", "2")],
        (("ab", "c"), ("1", "2"), None),
    ],
)
def test_prompts_and_labels(batch):
    assert [(p.text, p.label, p.data_source) for p in prompts_of(batch)] == [
        ("ab", "1", "default"),
        ("c", "2", "default"),
    ]


@pytest.mark.parametrize("kind", [tuple, list])
def test_prompts_labels_and_references(kind):
    """In the seed's style the label names the data source and the reference is the ground truth."""
    batch = kind([["ab", "c"], ["gsm8k", "math"], [{"answer": 3}, 4]])
    assert [(p.text, p.label, p.data_source) for p in prompts_of(batch)] == [
        ("ab", {"answer": 3}, "gsm8k"),
        ("c", 4, "math"),
    ]


def test_references_without_labels():
    assert [(p.label, p.data_source) for p in prompts_of((["a"], None, ["x"]))] == [
        ("x", "default")
    ]


def test_equal_texts_are_one_group_and_others_are_not():
    indices = [p.index for p in prompts_of(["a", "b", "a"])]
    assert indices[0] == indices[2] != indices[1]
    assert prompts_of(["a"])[0].index == indices[0]  # in another batch, on another rank
    assert torch.tensor(indices).tolist() == indices  # fits the int64 of group ids


def test_a_prompt_over_the_limit_is_named():
    assert len(prompts_of(["12345"], limit=5)) == 1
    with pytest.raises(ValueError, match=r"'123456'.* 6 .*prompt_max_len 5"):
        prompts_of(["123456"], limit=5)


@pytest.mark.parametrize(
    "batch",
    [
        "one string",
        None,
        7,
        [1, 2],
        [["a"], "b"],
        (["a"], "b"),
        {"input": ["a"]},
        (["a"], ["b"], ["c"], ["d"]),
        [Prompt("a", [1]), "b"],
        torch.tensor([[1, 2]]),
    ],
    ids=str,
)
def test_anything_else_is_refused(batch):
    with pytest.raises(TypeError, match="a list of Prompt"):
        prompts_of(batch)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((["a", "b"], ["1"]), "2 prompts has 1 labels"),
        ((["a"], ["s"], ["1", "2"]), "1 prompts has 2 references"),
    ],
)
def test_columns_of_other_lengths_are_refused(batch, message):
    with pytest.raises(ValueError, match=message):
        prompts_of(batch)


# -- an episode ------------------------------------------------------------------------------------------------------


# -- episodes of any dataloader --------------------------------------------------------------------------------------


def episode(dataloader, number: int, consumed_prompts: int) -> list[tuple[list, bool]]:
    """Its batches, each with whether it is the last."""
    prompts = ScriptPrompts(dataloader, number, consumed_prompts, list)
    found = []
    while not prompts.exhausted:
        batch = prompts.take()
        found.append((batch, prompts.exhausted))
    return found


def test_position_goes_to_a_sampler_too():
    sampler = RankSampler(range(10), 2, 0, seed=1)
    batches = DataLoader(range(10), batch_size=2, sampler=sampler, collate_fn=list)
    whole = episode(batches, 1, 0)
    assert [len(batch) for batch, _ in whole] == [2, 2, 1]
    assert episode(batches, 1, 4) == whole[1:]  # 4 prompts over 2 ranks: one batch of 2 here


def test_torchs_own_sampler_is_reshuffled_and_cannot_resume():
    sampler = DistributedSampler(range(6), num_replicas=2, rank=0, seed=1)
    batches = DataLoader(range(6), batch_size=3, sampler=sampler, collate_fn=list)
    first, second, again = (episode(batches, number, 0) for number in (0, 1, 0))
    assert first == again != second
    with pytest.raises(ValueError, match="set_epoch"):
        episode(batches, 0, 3)


def test_any_iterable_of_batches_starts_from_its_beginning_only():
    assert episode([["a"], ["b"]], 5, 0) == [(["a"], False), (["b"], True)]
    with pytest.raises(ValueError, match=r"strategy\.setup_dataloader"):
        episode([["a"], ["b"]], 0, 1)
