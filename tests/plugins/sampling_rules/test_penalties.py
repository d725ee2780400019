"""Penalties, and words that are never sampled."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lightppo.plugins.sampling_rules.penalties import Penalties, bad_word_ids, penalties_of
from lightppo.rollout.engine import SamplingParams
from lightppo.rollout.sampling import NO_TOKEN, TokenSampler


def draw(params, logits, uniforms, *, history, step=0, bad_words=()):
    """As the HF engine draws; ``bad_words`` are sequences of ids."""
    sampler = TokenSampler(
        params, valid_vocab_size=logits.shape[-1], changes=[Penalties(params, bad_words)]
    )
    return sampler(logits, torch.as_tensor(uniforms, dtype=torch.float64), step, history)


def test_penalty_comes_before_temperature():
    # Penalty 2 on ids 0 and 1: logits 2 -1 → 1 -2; halved temperature doubles them: 2 -4 0.
    # p0 = e²/(e² + e⁻⁴ + 1) = 7.3891/8.4074 = .8789; p0 + p1 = .8811.
    logits = torch.tensor([[2.0, -1.0, 0.0]]).expand(4, 3)
    params = SamplingParams(temperature=0.5, repetition_penalty=2.0)
    history = torch.tensor([[0, 1]]).expand(4, 2)
    tokens, _ = draw(params, logits, [0.8788, 0.8790, 0.8810, 0.8812], history=history)
    assert tokens.tolist() == [0, 1, 1, 2]


def test_presence_and_frequency_are_of_the_response_alone():
    # The prompt has id 2 three times; the response is 0, 0, 1: logits 3 − 2·0.5 − 0.25, 2 − 0.5 − 0.25, 1, 0.
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    history = torch.tensor([[NO_TOKEN, 2, 2, 2, 0, 0, 1]])
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=0.25)
    shares = torch.tensor([1.75, 1.25, 1.0, 0.0]).softmax(0).cumsum(0).tolist()
    for token, share in enumerate(shares[:3]):
        u = [share - 1e-6, share + 1e-6]
        tokens, log_probs = draw(
            params, logits.expand(2, 4), u, history=history.expand(2, 7), step=3
        )
        assert tokens.tolist() == [token, token + 1]
        assert torch.allclose(log_probs, logits[0].log_softmax(0)[tokens])  # without penalties
    rows = torch.tensor([[3.0, 2.9], [3.0, 2.9]])
    ages = torch.tensor([1, 2])  # the first row's response is id 1, the second's are both
    greedy = SamplingParams(do_sample=False, presence_penalty=-0.2)
    drawn = draw(greedy, rows, [0.0] * 2, history=torch.tensor([[0, 0, 1], [1, 1, 0]]), step=ages)[
        0
    ]
    assert drawn.tolist() == [1, 0]


def test_padding_is_no_token_to_penalties_and_bans():
    logits = torch.tensor([[3.0, 2.9, 1.0]])
    params = SamplingParams(do_sample=False, repetition_penalty=1.5)
    bad_words = [[2, 2, 0]]  # completed by 0 only behind 2 2
    unpadded = draw(params, logits, [0.0], history=torch.tensor([[2]]), bad_words=bad_words)
    padded = draw(
        params,
        logits,
        [0.0],
        history=torch.tensor([[NO_TOKEN] * 3 + [2]]),
        bad_words=bad_words,
    )
    assert unpadded[0].item() == padded[0].item() == 0
    banned = draw(params, logits, [0.0], history=torch.tensor([[1, 2, 2]]), bad_words=bad_words)
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
