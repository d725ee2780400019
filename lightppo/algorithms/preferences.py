"""Losses of pairs, a chosen answer y_c and a rejected one y_l to the same prompt. Each returns (B,), a loss per pair.

The loss of a step is their mean over its pairs on all ranks: :func:`pair_mean`.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from lightppo.algorithms.masking import LossNormalizer, aggregate_loss, require_same_shape


def bradley_terry_loss(chosen: Tensor, rejected: Tensor, margin: Tensor | None = None) -> Tensor:
    """-log σ(r_c - r_l - m) of scores (B,): how surprising it is that y_c won, where P(y_c wins) = σ(r_c - r_l).

    The margin m, 0 if ``None``, says by how much r_c must lead. Sources: Bradley and Terry 1952; Ouyang et al. 2022
    (arXiv:2203.02155), eq. 1; margin: Touvron et al. 2023 (arXiv:2307.09288), eq. 2.
    """
    require_same_shape(chosen=chosen, rejected=rejected, margin=margin)
    lead = chosen - rejected
    return -logsigmoid(lead if margin is None else lead - margin)


def pair_mean(pair_loss: Tensor, pairs: float, dp_size: int = 1) -> Tensor:
    """One micro batch's share of the mean of ``pair_loss`` (B,) over the ``pairs`` of the optimizer step on all ranks.

    Derivation: :func:`~lightppo.algorithms.masking.aggregate_loss`.
    """
    normalizer = LossNormalizer(tokens=pairs, sequences=pairs, dp_size=dp_size)
    return aggregate_loss(pair_loss[:, None], pair_loss.new_ones(len(pair_loss), 1), "token-mean", normalizer)
