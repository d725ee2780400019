"""Ids and strings that end a response."""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch

from lightppo.rollout.engine import SamplingParams
from lightppo.rollout.sampling import StopCriteria, end_of_text_ids


def criteria(tokenizer, **params) -> StopCriteria:
    return StopCriteria(tokenizer, SamplingParams(**params), eos_ids=[1], vocab_size=30)


def lengths_until_end(stop: StopCriteria, ids: list[int]) -> int | None:
    rows = torch.tensor([0])
    for length in range(1, len(ids) + 1):
        if stop.ended(torch.tensor([ids]), rows, length).item():
            return length
    return None


@pytest.mark.parametrize(
    ("configured", "expected"),
    [(None, [1]), (1, [1]), (5, [1, 5]), ([7, 5, 1], [1, 5, 7])],
    ids=str,
)
def test_end_of_text_ids_of_tokenizer_and_model(tokenizer, configured, expected):
    assert end_of_text_ids(tokenizer, SimpleNamespace(eos_token_id=configured)) == expected


def test_end_of_text_ids_without_a_generation_config(tokenizer):
    assert end_of_text_ids(tokenizer, None) == [1]


def test_ids_end_a_response_and_ignore_eos_leaves_only_the_stop_ids(tokenizer):
    text = [3, 1, 4, 9, 5]
    assert lengths_until_end(criteria(tokenizer), text) == 2
    assert lengths_until_end(criteria(tokenizer, ignore_eos=True), text) is None
    assert lengths_until_end(criteria(tokenizer, ignore_eos=True, stop_token_ids=(9,)), text) == 4


def test_unknown_stop_id_is_named(tokenizer):
    with pytest.raises(ValueError, match=r"stop_token_ids \[30\]"):
        criteria(tokenizer, stop_token_ids=(3, 30))


def test_stop_string_ends_with_its_last_character_and_is_cut(tokenizer):
    stop = criteria(tokenizer, stop=("cd", "bcd"))
    ids = tokenizer.encode("aabcda")
    assert lengths_until_end(stop, ids) == 5
    assert stop.trim(ids[:5], "aabcd") == "aa"  # the earliest string counts: bcd begins before cd
    assert stop.trim(ids[:2], "aa") == "aa"


def test_a_special_token_is_a_stop_id(tokenizer):
    """Texts leave it out, so no string could be found there."""
    unknown = tokenizer.unk_token_id
    stop = criteria(tokenizer, stop=(tokenizer.unk_token, "c"), stop_token_ids=(9,))
    assert (stop.ids, stop.strings) == ([1, unknown, 9], ("c",))
    assert lengths_until_end(stop, [5, 4, unknown, 3]) == 1  # "c"
    assert lengths_until_end(stop, [4, 4, unknown, 3]) == 3
    assert stop.trim([4, 4, unknown], "bb") == "bb"
    tokenizer = deepcopy(tokenizer)  # other tests have this one, too
    tokenizer.add_tokens(["<|im_end|>"], special_tokens=True)  # without a name of its own
    stop = StopCriteria(tokenizer, SamplingParams(stop=("<|im_end|>",)), eos_ids=[1], vocab_size=31)
    assert (stop.ids, stop.strings) == ([1, 30], ())


def test_a_special_token_and_text_in_one_string_are_refused(tokenizer):
    with pytest.raises(ValueError, match=r"stop '<unk>a' has the special token '<unk>'.*alone"):
        criteria(tokenizer, stop=("b", tokenizer.unk_token + "a"))


def test_stop_string_longer_than_one_step_back_is_found_in_a_long_text(tokenizer):
    stop = criteria(tokenizer, stop=("0123456789",))
    ids = tokenizer.encode("a" * 40 + "0123456789")
    assert lengths_until_end(stop, ids) == 50


def test_special_tokens_inside_do_not_hide_a_stop_string(tokenizer):
    stop = criteria(tokenizer, stop=("ab",), ignore_eos=True)
    assert lengths_until_end(stop, [5, 3, 1, 1, 4]) == 5


def test_stop_string_must_lie_behind_the_minimum(tokenizer):
    stop = criteria(tokenizer, stop=("ab",), min_new_tokens=3)
    ids = tokenizer.encode("ababab")
    # The first "ab" and the one over the boundary (tokens 3, 4) do not count; the third "ab" ends at 6.
    assert lengths_until_end(stop, ids) == 6
    assert stop.trim(ids, "ababab") == "abab"


def test_rows_of_different_lengths(tokenizer):
    stop = criteria(tokenizer, stop=("ab",), min_new_tokens=2)
    texts = ["ccab", "abab", "ab", "cab", "cccc"]
    responses = torch.tensor([tokenizer.encode(text.ljust(6, "a")) for text in texts])
    lengths = torch.tensor([4, 4, 2, 3, 4])
    # "ab" must lie behind the first two tokens as a whole.
    expected = [True, True, False, False, False]
    assert stop.ended(responses, torch.arange(5), lengths).tolist() == expected
    rows = torch.tensor([4, 0])
    assert stop.ended(responses, rows, lengths[rows]).tolist() == [False, True]
