"""The policy loss of one micro batch: the token losses of token_losses.py, masked, weighed and aggregated."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from lightppo.algorithms.masking import (
    LOSS_AGG_MODES,
    LossNormalizer,
    aggregate_loss,
    at_least_float32,
    require_same_shape,
)
from lightppo.algorithms.tables import lookup
from lightppo.algorithms.token_losses import POLICY_LOSSES as POLICY_LOSSES
from lightppo.algorithms.token_losses import Metrics
from lightppo.algorithms.traits import POLICY_LOSS_TRAITS

# What the value of an option must be, and how to say it.
OPTION_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "dual_clip": (lambda x: x > 1, "above 1"),
    "sapo_tau_pos": (lambda x: x > 0, "above 0"),
    "sapo_tau_neg": (lambda x: x > 0, "above 0"),
    "clip_cov_ratio": (lambda x: 0 < x <= 1, "above 0 and at most 1"),
    "clip_cov_low": (lambda x: not math.isnan(x), "a number"),
    "clip_cov_high": (lambda x: not math.isnan(x), "a number"),
    "kl_cov_ratio": (lambda x: 0 < x <= 1, "above 0 and at most 1"),
    "kl_cov_coef": (lambda x: x >= 0, "at least 0"),
    "cpgd_drift_coef": (lambda x: x >= 0, "at least 0"),
}


@dataclass(frozen=True)
class PolicyLoss:
    """The policy loss of one micro batch.

    Attributes:
        clip_eps_low: ε below, above 0 and at most 1, which is no lower bound (``--eps_clip``, ``--eps_clip_low``);
            ``None`` = that of the loss in ``traits.POLICY_LOSS_TRAITS``, 0.2 for ppo.
        clip_eps_high: ε above, above 0 (``--eps_clip``, ``--eps_clip_high``); ``None`` likewise.
        policy_loss: one of ``POLICY_LOSSES`` (``--policy_loss``).
        loss_agg_mode: one of ``LOSS_AGG_MODES``. That of the loss's paper is in ``traits.POLICY_LOSS_TRAITS``.
        options: the loss's own options by flag name; those left out, or ``None``, have the default of the traits.

    Raises:
        ValueError: an unknown name, an option that the loss does not have, a value out of range, or an epsilon for a
            loss that clips nothing.
    """

    clip_eps_low: float | None = None
    clip_eps_high: float | None = None
    policy_loss: str = "ppo"
    loss_agg_mode: str = "token-mean"
    options: Mapping[str, float | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lookup(POLICY_LOSSES, self.policy_loss, "--policy_loss")
        lookup(LOSS_AGG_MODES, self.loss_agg_mode, "--loss_agg_mode")
        low, high = _checked_epsilons(self.policy_loss, self.clip_eps_low, self.clip_eps_high)
        object.__setattr__(self, "clip_eps_low", low)
        object.__setattr__(self, "clip_eps_high", high)
        object.__setattr__(self, "options", _checked_options(self.policy_loss, self.options))

    def __call__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor,
        normalizer: LossNormalizer | None = None,
        *,
        weights: Tensor | None = None,
        selected: Tensor | None = None,
    ) -> tuple[Tensor, Metrics]:
        """Loss and metrics.

        All but ``log_probs`` are constants: gradients into them are cut, so ``old_log_probs`` may be ``log_probs``
        itself in the first step on a rollout.

        Args:
            log_probs: (B, A), current policy.
            old_log_probs: (B, A), the policy the ratio is taken to.
            advantages: (B, A).
            action_mask: (B, A), True = trained token.
            normalizer: counts of the whole optimizer step; ``None`` = this micro batch is the step.
            weights: (B, A), a factor on each token's loss (off-policy correction, high-entropy mask). A weight of 0
                leaves a token without gradient; it still counts in the normalizer, in the metrics and in the ratio of
                its row. ``None`` = all 1.
            selected: (B, A), the tokens that clip_cov and kl_cov single out; ``None`` for all other losses.

        Returns:
            scalar loss, and detached scalars, at least ``clip_ratio``, ``ratio``, ``approx_kl``: token means of the
            step, to be summed over micro batches and averaged over ranks like the loss.

        Raises:
            ValueError: shapes differ; ``selected`` is missing, or given to a loss that selects nothing.
        """
        require_same_shape(
            log_probs=log_probs,
            old_log_probs=old_log_probs,
            advantages=advantages,
            action_mask=action_mask,
            weights=weights,
            selected=selected,
        )
        self._check_selected(selected)
        mask = action_mask.bool()
        normalizer = normalizer or LossNormalizer.from_masks([mask])
        token_loss, token_metrics = POLICY_LOSSES[self.policy_loss](
            zero_where_masked(log_probs, mask),
            zero_where_masked(old_log_probs.detach(), mask),
            zero_where_masked(advantages.detach(), mask),
            action_mask=mask,
            clip_eps_low=self.clip_eps_low,
            clip_eps_high=self.clip_eps_high,
            selected=None if selected is None else selected.bool() & mask,
            **self.options,
        )
        if weights is not None:
            weights = zero_where_masked(weights.detach(), mask)
            token_loss = (token_loss * weights).masked_fill(weights == 0, 0.0)  # also where the loss is not finite
        loss = aggregate_loss(token_loss, mask, self.loss_agg_mode, normalizer)
        return loss, token_means(token_metrics, mask, normalizer)

    def _check_selected(self, selected: Tensor | None) -> None:
        name, selects = self.policy_loss, POLICY_LOSS_TRAITS[self.policy_loss].selects_tokens
        if selects and selected is None:
            raise ValueError(
                f"policy_loss {name!r} needs the argument selected: make it with selection.SELECTIONS[{name!r}]"
            )
        if not selects and selected is not None:
            raise ValueError(f"policy_loss {name!r} singles out no tokens: leave the argument selected out")


def _checked_epsilons(name: str, low: float | None, high: float | None) -> tuple[float | None, float | None]:
    """The epsilons of a loss, completed; see :class:`PolicyLoss`."""
    default = POLICY_LOSS_TRAITS[name].eps_clip
    if default is None:
        if low is not None or high is not None:
            raise ValueError(f"--eps_clip: policy_loss {name!r} clips nothing; leave the epsilons out")
        return None, None
    low, high = (given if given is not None else own for given, own in zip((low, high), default))
    if not 0 < low <= 1:
        raise ValueError(f"--eps_clip_low must be above 0 and at most 1 (no lower bound), got {low}")
    if not high > 0:
        raise ValueError(f"--eps_clip_high must be above 0, got {high}")
    return low, high


def _checked_options(name: str, given: Mapping[str, float | None]) -> dict[str, float | None]:
    """The options of a loss, completed; see :class:`PolicyLoss`."""
    defaults = POLICY_LOSS_TRAITS[name].options
    for option in given:
        if option not in defaults:
            known = ", ".join(defaults) or "none"
            raise ValueError(f"--{option} is no option of policy_loss {name!r}; it has: {known}")
    options = {**defaults, **{option: value for option, value in given.items() if value is not None}}
    for option, value in options.items():
        is_valid, range_text = OPTION_RANGES[option]
        if value is not None and not is_valid(value):
            raise ValueError(f"--{option} must be {range_text}, got {value}")
    if "clip_cov_low" in options and not options["clip_cov_low"] < options["clip_cov_high"]:
        raise ValueError(
            f"--clip_cov_low {options['clip_cov_low']} must be below --clip_cov_high {options['clip_cov_high']}"
        )
    return options


def zero_where_masked(tensor: Tensor, mask: Tensor) -> Tensor:
    """float32 or more, 0 at masked positions: what lies there (NaN, -inf) must not reach a gradient as 0 * NaN."""
    return at_least_float32(tensor).masked_fill(~mask, 0.0)


def token_means(token_metrics: Metrics, mask: Tensor, normalizer: LossNormalizer) -> Metrics:
    """This micro batch's share of the token means of the step, without gradient."""
    return {name: aggregate_loss(x.detach(), mask, "token-mean", normalizer) for name, x in token_metrics.items()}
