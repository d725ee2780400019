"""The loss of a language model on text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightppo.algorithms.logprobs import token_log_probs
from lightppo.algorithms.masking import LossNormalizer, token_mean

IGNORE_INDEX = -100  # labels with this value have no loss


class GPTLMLoss:
    """Next-token cross entropy, mean over the step's tokens; for supervised training and PTX (arXiv:2203.02155)."""

    IGNORE_INDEX = IGNORE_INDEX

    def num_tokens(self, labels: Tensor) -> int:
        """Tokens of ``labels`` (B, S) that the loss counts; their sum over the step is ``normalizer_tokens``."""
        return int((labels[:, 1:] != self.IGNORE_INDEX).sum())

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        normalizer_tokens: float | None = None,
        dp_size: int = 1,
    ) -> Tensor:
        """Loss of one micro batch; position t of ``logits`` (B, S, V) predicts label t + 1.

        ``normalizer_tokens`` counts the whole optimizer step over all ranks; ``None``: this micro batch is the step.
        """
        labels = labels[:, 1:]
        mask = labels != self.IGNORE_INDEX  # (B, S-1)
        token_loss = -token_log_probs(logits[:, :-1], labels.masked_fill(~mask, 0))
        tokens = float(mask.sum()) if normalizer_tokens is None else normalizer_tokens
        # token-mean needs only the tokens
        return token_mean(token_loss, mask, LossNormalizer(tokens, sequences=0, dp_size=dp_size))


def pretrain_loss(
    model: Any, batch: Mapping[str, Tensor], loss_fn: GPTLMLoss, tokens: float, dp_size: int
) -> Tensor:
    """Language-model loss of a batch: its share of the mean over the ``tokens`` with labels of all ranks."""
    # (B, S, V)
    logits = model(
        batch["input_ids"], attention_mask=batch["attention_mask"], return_output=True
    ).logits
    return loss_fn(logits, batch["labels"], tokens, dp_size)
