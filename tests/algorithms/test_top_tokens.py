"""Log probs of several tokens at each place."""

from __future__ import annotations

import pytest
import torch

from lightppo.algorithms.logprobs import log_probs_at, top_log_probs


def test_the_most_likely_tokens_by_hand():
    # softmax of ln 1, ln 4, ln 2, ln 1 is 1/8, 1/2, 1/4, 1/8
    logits = torch.tensor([[1.0, 4.0, 2.0, 1.0]]).log()
    values, ids = top_log_probs(logits, 2)
    assert ids.tolist() == [[1, 2]]
    torch.testing.assert_close(values, torch.tensor([[0.5, 0.25]]).log())
    # at temperature 1/2: 1, 16, 4, 1 of 22
    values, _ = top_log_probs(logits, 2, temperature=0.5)
    torch.testing.assert_close(values, torch.tensor([[16 / 22, 4 / 22]]).log())
    assert top_log_probs(logits[:0], 2)[0].shape == (0, 2)


def test_several_log_probs_of_a_row_by_hand():
    logits = torch.tensor([[1.0, 4.0, 2.0, 1.0]]).log().requires_grad_()
    found = log_probs_at(logits, torch.tensor([[1, 3]]))
    torch.testing.assert_close(found, torch.tensor([[0.5, 0.125]]).log())
    (found * torch.tensor([[2.0, 1.0]])).sum().backward()
    # 2·([v = 1] - p) + ([v = 3] - p)
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.375, 0.5, -0.75, 0.625]]))


@pytest.mark.parametrize("chunk_size", [None, 1, 2])
def test_several_log_probs_of_a_row_in_chunks(chunk_size):
    logits = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[0, 3, 6]] * 4 + [[2, 2, 1]])  # an id may stand twice
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: log_probs_at(x, ids, 1.3, chunk_size), (logits,))
    low = logits.detach().bfloat16().requires_grad_()
    found = log_probs_at(low, ids, chunk_size=chunk_size)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, low.float().log_softmax(1).gather(1, ids))
    with pytest.raises(ValueError, match=r"logits \(5, 0\), ids \(4, 0\)"):
        log_probs_at(logits, ids[:4])
