"""Penalties, and words that are never sampled."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lightppo.rollout.engine import SamplingParams
from lightppo.rollout.sampling import (
    NO_TOKEN,
    Penalties,
    TokenSampler,
    bad_word_ids,
    penalties_of,
    token_seeds,
)


def draw(params, logits, *, history, step=0, bad_words=()):
    """As the HF engine draws; ``bad_words`` are sequences of ids."""
    sampler = TokenSampler(
        params, valid_vocab_size=logits.shape[-1], logits_processors=[Penalties(params, bad_words)]
    )
    return sampler(logits, torch.from_numpy(token_seeds(0, 0, 0, len(logits))), step, history)


def shares(params, logits, *, history, step=0):
    """How often each token is drawn of one row of logits; the standard deviation is at most 0.0025."""
    rows = 40_000
    tokens, log_probs = draw(
        params, logits.expand(rows, -1), history=history.expand(rows, -1), step=step
    )
    assert torch.allclose(log_probs, (logits[0] / params.temperature).log_softmax(0)[tokens])
    return (torch.bincount(tokens, minlength=logits.shape[-1]) / rows).tolist()


def test_penalty_comes_before_temperature():
    # Penalty 2 on ids 0 and 1: logits 2 -1 → 1 -2; halved temperature doubles them: 2 -4 0.
    logits = torch.tensor([[2.0, -1.0, 0.0]])
    params = SamplingParams(temperature=0.5, repetition_penalty=2.0)
    expected = torch.tensor([2.0, -4.0, 0.0]).softmax(0).tolist()
    assert shares(params, logits, history=torch.tensor([[0, 1]])) == pytest.approx(
        expected, abs=0.01
    )


def test_presence_and_frequency_are_of_the_response_alone():
    # The prompt has id 2 three times; the response is 0, 0, 1: logits 3 − 2·0.5 − 0.25, 2 − 0.5 − 0.25, 1, 0.
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    history = torch.tensor([[NO_TOKEN, 2, 2, 2, 0, 0, 1]])
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=0.25)
    expected = torch.tensor([1.75, 1.25, 1.0, 0.0]).softmax(0).tolist()
    assert shares(params, logits, history=history, step=3) == pytest.approx(expected, abs=0.01)
    rows = torch.tensor([[3.0, 2.9], [3.0, 2.9]])
    ages = torch.tensor([1, 2])  # the first row's response is id 1, the second's are both
    greedy = SamplingParams(do_sample=False, presence_penalty=-0.2)
    drawn = draw(greedy, rows, history=torch.tensor([[0, 0, 1], [1, 1, 0]]), step=ages)[0]
    assert drawn.tolist() == [1, 0]


def test_padding_is_no_token_to_penalties_and_bans():
    logits = torch.tensor([[3.0, 2.9, 1.0]])
    params = SamplingParams(do_sample=False, repetition_penalty=1.5)
    bad_words = [[2, 2, 0]]  # completed by 0 only behind 2 2
    unpadded = draw(params, logits, history=torch.tensor([[2]]), bad_words=bad_words)
    padded = draw(
        params,
        logits,
        history=torch.tensor([[NO_TOKEN] * 3 + [2]]),
        bad_words=bad_words,
    )
    assert unpadded[0].item() == padded[0].item() == 0
    banned = draw(params, logits, history=torch.tensor([[1, 2, 2]]), bad_words=bad_words)
    assert banned[0].item() == 1


def test_bad_words_become_token_sequences(tokenizer):
    assert bad_word_ids(tokenizer, ("ab", "c")) == [tokenizer.encode("ab"), tokenizer.encode("c")]


def test_bad_word_behind_a_space_is_banned_too():
    # A tokenizer in whose vocabulary a word behind a space is another token, as in byte-level BPE.
    ids = {"cat": [5], " cat": [6]}
    fake = SimpleNamespace(encode=lambda text, add_special_tokens: ids[text], unk_token_id=None)
    assert bad_word_ids(fake, ("cat",)) == [[5], [6]]


def test_bad_word_without_tokens_is_named(tokenizer):
    with pytest.raises(ValueError, match=r"bad_words.*'Ω'"):
        bad_word_ids(tokenizer, ("Ω",))


def test_a_run_that_asks_for_nothing_has_no_penalties(tokenizer):
    assert penalties_of(SamplingParams(), tokenizer, 30) is None
    assert penalties_of(SamplingParams(presence_penalty=0.1), tokenizer, 30) is not None
