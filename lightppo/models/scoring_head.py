"""Asks the output head of a causal LM for log probs instead of logits, for the length of one forward.

The model's own forward runs, and its head is called as always, so that hooks that gather, free and reduce the head's
weight (ZeRO-3) work as for logits. Between such forwards nothing about the model is different.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn, stack
from transformers import PreTrainedModel

from lightppo.algorithms.head import linear_log_probs
from lightppo.models.cpu_linear import CPULinear


@dataclass(frozen=True)
class HeadQuestion:
    """What the head is asked.

    Attributes:
        select: takes the K positions to score out of what the head is given, (B, S, H) -> (K, H).
        labels: (K,), the token to score at each.
        temperature: log probs are those of softmax(logits / temperature).
        valid_vocab_size: over the first so many tokens only; None: all.
        entropy: the entropy too.
        entropy_grad: with a gradient.
    """

    select: Callable[[Tensor], Tensor]
    labels: Tensor
    temperature: float
    valid_vocab_size: int | None = None
    entropy: bool = False
    entropy_grad: bool = False


class HeadAnswer:
    """What the head returned while it was asked."""

    def __init__(self) -> None:
        self._returned: list[Tensor] = []

    def record(self, scores: Tensor) -> Tensor:
        self._returned.append(scores)
        return scores

    def is_untouched(self, logits: Tensor) -> bool:
        """Whether the model called its head once and gave out, as ``logits``, what came from it, unchanged.

        Told by the storage and the count of writes into it, so that it is the same on all ranks, whatever the values;
        views that hooks make of the tensor share both.
        """
        if len(self._returned) != 1 or not isinstance(logits, Tensor):
            return False
        (scores,) = self._returned
        same_place = scores.untyped_storage()._cdata == logits.untyped_storage()._cdata
        return same_place and logits.shape == scores.shape and logits._version == scores._version == 0


def scoring_head(model: PreTrainedModel) -> nn.Linear | None:
    """The head, if it is a plain linear layer over the vocabulary that nobody has changed; else None."""
    head = model.get_output_embeddings()
    if type(head) not in (nn.Linear, CPULinear) or "forward" in vars(head):
        return None
    return head if head.out_features == model.config.get_text_config().vocab_size else None


@contextmanager
def asked(head: nn.Linear, question: HeadQuestion) -> Iterator[HeadAnswer]:
    """Meanwhile the head returns (1, K, 1) log probs, or (1, K, 2) with the entropy; float32.

    Args:
        head: from :func:`scoring_head`.
        question: what to return.
    """
    answer = HeadAnswer()

    def forward(hidden: Tensor) -> Tensor:
        log_probs, entropy = linear_log_probs(
            question.select(hidden),
            head.weight,
            question.labels,
            head.bias,
            question.temperature,
            entropy=question.entropy,
            entropy_grad=question.entropy_grad,
            valid_vocab_size=question.valid_vocab_size,
        )
        scores = log_probs.unsqueeze(-1) if entropy is None else stack([log_probs, entropy], dim=-1)
        return answer.record(scores.unsqueeze(0))

    head.forward = forward  # on the instance: module calls, and hooks around them, find it there
    try:
        yield answer
    finally:
        del head.forward
