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


def answer_log_probs(log_probs: Tensor, mask: Tensor, mean: bool) -> Tensor:
    """(B,), the log prob of each answer: the sum, or the mean, over its tokens ``mask`` of ``log_probs`` (B, A)."""
    total = log_probs.masked_fill(~mask, 0).sum(-1)
    return total / mask.sum(-1).clamp(min=1) if mean else total


def dpo_loss(lead: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """-(1 - ε) log σ(βh) - ε log σ(-βh), where the ``lead`` h (B,) is log[π/π_ref](y_c) - log[π/π_ref](y_l).

    ε, ``label_smoothing``, is the chance that a pair has its answers exchanged: cDPO. Its loss is least at
    βh = log[(1 - ε) / ε], which it does not run past. Sources: Rafailov et al. 2023 (arXiv:2305.18290), eq. 7; cDPO:
    Mitchell 2023, https://ericmitchell.ai/cdpo.pdf.
    """
    return -(1 - label_smoothing) * logsigmoid(beta * lead) - label_smoothing * logsigmoid(
        -beta * lead
    )


def ipo_loss(lead: Tensor, *, beta: float) -> Tensor:
    """(h - 1 / 2β)², h as in :func:`dpo_loss`: it stops at a lead of 1 / 2β, however clear the preferences are.

    The paper's answers are single actions. For answers of many tokens h is here of mean log probs, as its authors run
    it, lest 1 / 2β mean another lead per token at each length. Source: Azar et al. 2023 (arXiv:2310.12036), eq. 17.
    """
    return (lead - 1 / (2 * beta)) ** 2


def pair_mean(pair_loss: Tensor, pairs: float, dp_size: int = 1) -> Tensor:
    """One micro batch's share of the mean of ``pair_loss`` (B,) over the ``pairs`` of the optimizer step on all ranks.

    Derivation: :func:`~lightppo.algorithms.masking.aggregate_loss`.
    """
    normalizer = LossNormalizer(tokens=pairs, sequences=pairs, dp_size=dp_size)
    return aggregate_loss(
        pair_loss[:, None], pair_loss.new_ones(len(pair_loss), 1), "token-mean", normalizer
    )
