"""Drawing from a large vocabulary."""

from __future__ import annotations

import pytest
import torch

from lightppo.plugins.kernels.drawing import inverse_cdf_by_blocks as inverse_cdf


@pytest.mark.parametrize("vocab_size", [1025, 1536, 5000])
def test_a_large_vocabulary_goes_by_blocks_to_the_same_tokens(vocab_size):
    generator = torch.Generator().manual_seed(0)
    probs = (torch.randn(4000, vocab_size, generator=generator) * 2).softmax(-1)
    u = torch.rand(4000, generator=generator, dtype=torch.float64)
    cdf = probs.cumsum(-1, dtype=torch.float64)
    expected = torch.searchsorted(cdf, (u * cdf[:, -1]).unsqueeze(1), right=True).squeeze(1)
    tokens = inverse_cdf(probs, u)
    assert tokens.unique().numel() > vocab_size / 3
    # Only a number within float32's rounding of a border may fall on its other side.
    assert (tokens != expected).float().mean() < 1e-3
    assert (tokens - expected).abs().max() <= 1


def test_zero_mass_is_never_drawn_at_the_borders_of_blocks():
    generator = torch.Generator().manual_seed(0)
    probs = torch.zeros(3000, 2000)
    # in the first, second and last block; one has none
    places = torch.tensor([3, 511, 512, 1023, 1540, 1990])
    probs[:, places] = torch.rand(3000, 6, generator=generator)
    cdf = probs[:, places].double().cumsum(-1)
    borders = (cdf / cdf[:, -1:])[:, :-1].T.flatten()
    for u in (
        torch.zeros(3000).double(),
        torch.full((3000,), 1 - 2.0**-52, dtype=torch.float64),
    ):
        assert (probs.gather(1, inverse_cdf(probs, u).unsqueeze(1)) > 0).all()
    for shift in (0.0, 1e-16, -1e-16):
        u = (borders + shift).clamp(0, 1 - 2.0**-52)
        drawn = probs.repeat(5, 1).gather(1, inverse_cdf(probs.repeat(5, 1), u).unsqueeze(1))
        assert (drawn > 0).all()


def test_the_tail_of_a_large_vocabulary_is_reached():
    # 2^20 equal tokens behind one of mass 1 - 2^-9 (2^-29 each, far below float32's 2^-24 beside 1):
    # u = 1 - 2^-10 lies in the middle of the tail: token 1 + 2^19.
    probs = torch.full((1, 1 + 2**20), 2.0**-29)
    probs[0, 0] = 1 - 2.0**-9
    u = torch.tensor([1 - 2.0**-10], dtype=torch.float64)
    assert inverse_cdf(probs, u).tolist() == [1 + 2**19]
