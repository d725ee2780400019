"""Losses: policy (from policy_losses.py), value, and language modelling.

Each returns one micro batch's share of the loss of the whole optimizer step; see
:func:`lightppo.algorithms.masking.aggregate_loss` for what that means and why it does not depend on the micro batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightppo.algorithms.logprobs import token_log_probs
from lightppo.algorithms.masking import LOSS_AGG_MODES, LossNormalizer, aggregate_loss, require_same_shape
from lightppo.algorithms.policy_losses import POLICY_LOSSES as POLICY_LOSSES
from lightppo.algorithms.policy_losses import PolicyLoss as PolicyLoss
from lightppo.algorithms.policy_losses import token_means, zero_where_masked
from lightppo.algorithms.tables import lookup
from lightppo.algorithms.token_losses import Metrics

IGNORE_INDEX = -100


@dataclass(frozen=True)
class ValueLoss:
    """½·max((V - R)², (clip(V, V_old ± c) - R)²) of one micro batch.

    Source: the clipped value loss of OpenAI's PPO code; see Engstrom et al. 2020 (arXiv:2005.12729), §3.

    Attributes:
        value_clip: c, in units of the value, above 0; ``None`` = no clipping, ½(V - R)² (``--value_clip``).
        huber_delta: δ above 0: an error e counts δ(|e| - δ/2) instead of ½e² where |e| > δ (Huber 1964); ``None`` = ½e²
            everywhere (``--value_huber_delta``).
        loss_agg_mode: one of ``LOSS_AGG_MODES``.
    """

    value_clip: float | None = 0.2
    loss_agg_mode: str = "token-mean"
    huber_delta: float | None = None

    def __post_init__(self) -> None:
        lookup(LOSS_AGG_MODES, self.loss_agg_mode, "--loss_agg_mode")
        if self.value_clip is not None and not self.value_clip > 0:
            raise ValueError(f"--value_clip must be above 0, or none for no clipping, got {self.value_clip}")
        if self.huber_delta is not None and not self.huber_delta > 0:
            raise ValueError(f"--value_huber_delta must be above 0, or none for squared errors, got {self.huber_delta}")

    def __call__(
        self,
        values: Tensor,
        old_values: Tensor,
        returns: Tensor,
        action_mask: Tensor,
        normalizer: LossNormalizer | None = None,
    ) -> tuple[Tensor, Metrics]:
        """Loss and metrics.

        Args:
            values: (B, A), current critic.
            old_values: (B, A), the critic at rollout time.
            returns: (B, A), the target.
            action_mask: (B, A), True = trained token.
            normalizer: counts of the whole optimizer step; ``None`` = this micro batch is the step.

        Returns:
            scalar loss, and the detached scalar ``value_clip_ratio``: share of tokens whose clipped error is the
            larger one, a token mean of the step like the metrics of :class:`PolicyLoss`.

        Raises:
            ValueError: shapes differ.
        """
        require_same_shape(values=values, old_values=old_values, returns=returns, action_mask=action_mask)
        mask = action_mask.bool()
        normalizer = normalizer or LossNormalizer.from_masks([mask])
        values, old_values, returns = (
            zero_where_masked(x, mask) for x in (values, old_values.detach(), returns.detach())
        )
        error = self._error(values - returns)
        clipped = torch.zeros_like(error)
        if self.value_clip is not None:
            near_old = values.clamp(old_values - self.value_clip, old_values + self.value_clip)
            clipped_error = self._error(near_old - returns)
            clipped = (clipped_error > error).to(error.dtype)
            error = torch.maximum(error, clipped_error)
        loss = aggregate_loss(error, mask, self.loss_agg_mode, normalizer)
        return loss, token_means({"value_clip_ratio": clipped}, mask, normalizer)

    def _error(self, difference: Tensor) -> Tensor:
        """½e², or Huber's, of each token."""
        if self.huber_delta is None:
            return 0.5 * difference.square()
        return torch.nn.functional.huber_loss(
            difference, torch.zeros_like(difference), reduction="none", delta=self.huber_delta
        )


class GPTLMLoss:
    """Next-token cross entropy, for supervised training and for PTX beside PPO; mean over the tokens of the step.

    Source of PTX: Ouyang et al. 2022 (arXiv:2203.02155), eq. 2.
    """

    IGNORE_INDEX = IGNORE_INDEX

    def num_tokens(self, labels: Tensor) -> int:
        """How many tokens of ``labels`` (B, S) the loss counts: what ``normalizer_tokens`` is the global sum of."""
        return int((labels[:, 1:] != self.IGNORE_INDEX).sum())

    def __call__(
        self, logits: Tensor, labels: Tensor, normalizer_tokens: float | None = None, dp_size: int = 1
    ) -> Tensor:
        """Loss of one micro batch.

        Args:
            logits: (B, S, V); position t predicts label t + 1.
            labels: (B, S), ids, or -100 where nothing is learned.
            normalizer_tokens: counted tokens of the whole optimizer step, over all ranks and micro batches; ``None`` =
                this micro batch is the step.
            dp_size: data-parallel ranks.

        Returns:
            A scalar; an exact 0 with a grad_fn where all labels are -100.

        Raises:
            ValueError: shapes do not fit, or ``normalizer_tokens`` is 0 while there are labels.
        """
        if labels.shape != logits.shape[:-1]:
            raise ValueError(f"labels {tuple(labels.shape)} do not fit logits {tuple(logits.shape)}")
        labels = labels[:, 1:]
        mask = labels != self.IGNORE_INDEX  # (B, S-1)
        token_loss = -token_log_probs(logits[:, :-1], labels.masked_fill(~mask, 0))
        tokens = float(mask.sum()) if normalizer_tokens is None else normalizer_tokens
        # token-mean reads the tokens alone
        return aggregate_loss(token_loss, mask, "token-mean", LossNormalizer(tokens, sequences=0, dp_size=dp_size))
