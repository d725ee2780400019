"""The tokens whose entropy is computed where it is only logged: it takes as long as half of the log softmax."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightppo.algorithms.masking import LossNormalizer, token_mean
from lightppo.experience.experience import Experience
from lightppo.models.batches import on_cpu, to_device

# least number of tokens, over all ranks, of which the logged entropy of a step is the mean
_ENTROPY_SAMPLE = 2048
_LARGEST_STRIDE = 8  # one of so many tokens is in the sample of a large step


def systematic_sample(mask: Tensor, start: Tensor, stride: int) -> Tensor:
    """Return every ``stride``-th unmasked token of each row, (B, A) bool, from the one that ``start`` (B,) decides on.

    The sum over these times ``stride`` estimates the sum over all, without bias where ``start`` is random.
    """
    nth = mask.long().cumsum(1) + start.unsqueeze(1)  # (B, A)
    return mask.bool() & (nth % stride == 0)


@dataclass(frozen=True)
class EntropySample:
    """The tokens whose entropy is computed where it is only logged; masks (B, A) on the CPU."""

    stride: int  # each token of the sample stands for so many
    counted: Tensor  # the sample
    computed: Tensor  # the sample, and the rows that somebody reads

    def mean(
        self, entropy: Tensor, mask: Tensor, normalizer: LossNormalizer
    ) -> tuple[Tensor, Tensor]:
        """Return the micro batch's share of the estimated mean, and the entropy (B, A), NaN where it was not computed."""
        counted, computed = (
            to_device(places, mask.device) for places in (self.counted, self.computed)
        )
        of_sample = entropy.masked_fill(~counted, 0.0)
        mean = self.stride * token_mean(of_sample, mask, normalizer)
        return mean, entropy.masked_fill(~computed, torch.nan)


def entropy_sample(
    experience: Experience, tokens: float, rows: Iterable[int] = ()
) -> EntropySample | None:
    """Return the tokens of a micro batch that are in the sample of a step of ``tokens``; ``None``: all are.

    The choice depends on the ids of a row alone, so the logged mean depends neither on micro batches nor on ranks.
    """
    stride = min(_LARGEST_STRIDE, int(tokens) // _ENTROPY_SAMPLE)
    if stride < 2:
        return None
    ids, real, mask = map(
        on_cpu, (experience.sequences, experience.attention_mask, experience.action_mask)
    )
    counted = systematic_sample(mask, start=(ids * real).sum(1), stride=stride)
    computed = counted.clone()
    computed[list(rows)] = True
    return EntropySample(stride, counted, computed)
