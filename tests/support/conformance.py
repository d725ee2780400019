"""Inputs and helpers of the conformance tests: literal numbers, so that other programs can be given the same.

Expected numbers in tests/algorithms/test_conformance*.py, without another remark, were printed by the function that the
comment names, on CPU, with these inputs: verl 0.10.0.dev (1dda039b), TRL 1.10.0.dev0 (f2cd5771), OpenRLHF 0.11.0
(3c3be623), AReaL 1.0.4 (4aef98d8) and its older trainer realhf (v0.5.1, 636ef265), slime 0.3.1 (624b824a), LightRFT
0.1.1 (49e62cb6), prime-rl 0.8.1.dev67 (559b4477). Some of them compute in float32: ``FLOAT32`` is the tolerance for those.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightppo.algorithms.advantages import compute_token_rewards
from lightppo.algorithms.kl import approx_kl

FLOAT32 = 1e-6
LENGTHS = [5, 3, 4, 2, 5, 1]  # two prompts, three samples each, no holes


def numbers(text: str) -> Tensor:
    return torch.tensor([float(word) for word in text.split()], dtype=torch.float64)


def rows(text: str) -> Tensor:
    """(6, 5) from the 20 trained tokens, row by row."""
    return torch.zeros(6, 5, dtype=torch.float64).masked_scatter(MASK, numbers(text))


def on_tokens(text: str) -> Tensor:
    """(6, 5) from one number per row."""
    return numbers(text)[:, None] * MASK


def close(got: Tensor | float, expected: Tensor | float, atol: float = 5e-8) -> None:
    torch.testing.assert_close(
        torch.as_tensor(got).double(), torch.as_tensor(expected).double(), rtol=0, atol=atol
    )


def differs(ours: Tensor | float, theirs: Tensor | float, by: float) -> None:
    """The largest difference is at least ``by``."""
    assert (torch.as_tensor(ours).double() - torch.as_tensor(theirs).double()).abs().max() >= by


MASK = torch.arange(5) < torch.tensor(LENGTHS)[:, None]
GROUPS = torch.tensor([0, 0, 0, 1, 1, 1])
SCORES = numbers("1 0 .5 -.3 2 0")
GREEDY = numbers(".4 .4 .4 -.1 -.1 -.1")
LOG_PROBS = rows("""-1.74 -1.71 -2.47 -1.25 -.95  -1.68 -1.51 -1.95  -.35 -.99 -1.4 -1.37  -1.52 -1.95
    -.36 -1.92 -1.75 -1.02 -1.67  -2.2""")
OLD = rows("""-1.86 -1.62 -3.03 -1.49 -.76  -1.73 -1.32 -1.85  -.38 -.56 -1.63 -1.06  -1.72 -2
    -1.61 -1.72 -1.39 -.73 -2.19  -2.33""")
REFERENCE = rows("""-1.27 -2.26 -2.83 -2.06 -.54  -1.71 -1.16 -2.15  -.28 -1.83 -1.73 -1.9  -1.15 -1.97
    -1.06 -1.94 -2.98 -1.05 -.78  -2.77""")
ROLLOUT = rows("""-2.06 -1.34 -2.77 -1.12 -.53  -1.43 -1.19 -.89  -.28 -1.01 -2.12 -.8  -1.17 -2.13
    -.86 -1.97 -.78 -.96 -2.62  -2.05""")
REWARDS = rows(
    "-.05 -.14 -.73 .27 -.65  -.03 -.07 .33  -.16 .43 -.4 .31  .15 0  .39 -.15 -.8 .37 -.08  .19"
)
VALUES = rows(
    ".05 0 .58 -.57 .53  -.03 -.58 .11  .51 .39 -.46 -.19  .1 -.34  -.32 -.05 .34 .7 .79  .02"
)
NEW_VALUES = rows(
    "-.51 .43 .16 0 .95  -.18 -.81 .3  1.28 -.71 -.52 -.41  -.04 -.62  -.32 -1.24 .12 1.3 1.02  .43"
)
RETURNS = rows(".3 .2 -.4 .6 1  .1 -.2 .4  .9 .5 -.1 .2  -.6 -.3  .5 1.1 .8 1.5 2  .7")
ADVANTAGES = rows(
    "-2.33 .39 -.55 -.04 .1  -.24 1.66 -.66  1.05 -1.21 .71 .45  .26 .78  -1.9 .76 -1.01 -.66 .6  .64"
)
# for losses that are defined with one advantage per sequence
ROW_ADVANTAGES = on_tokens("1.2 -.7 .4 -1.5 .9 -.6")
OUTCOME = compute_token_rewards(SCORES, MASK)  # the score at the last token
TOKEN_REWARDS = compute_token_rewards(
    SCORES, MASK, kl=approx_kl(LOG_PROBS, REFERENCE, "k1"), kl_coef=0.1
)
