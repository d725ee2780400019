"""How far apart two policies are: KL from the reference, its controllers, the mismatch with the rollout engine, a teacher.

Notation: p the policy, q the reference, d = log p - log q at the sampled token, KL = KL(p || q).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightppo.algorithms.entries import KL_ESTIMATORS
from lightppo.algorithms.logprobs import log_softmax, rows_per_chunk
from lightppo.algorithms.masking import (
    at_least_float32,
    masked_mean,
    require_same_shape,
    zero_where_masked,
)
from lightppo.table import load

if TYPE_CHECKING:
    from lightppo.experience.experience import Experience
    from lightppo.models.actor import ActionScores


logger = logging.getLogger(__name__)

LOG_RATIO_LIMIT = 20.0  # e^20 = 4.9e8: far outside any sane update, far inside float32


def limited(log_ratio: Tensor) -> Tensor:
    """Return a log ratio limited to ±20, safe to exponentiate."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def k1(log_ratio: Tensor) -> Tensor:
    """d: unbiased under the policy, high variance, may be negative. Its expected gradient as a loss is 0."""
    return log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """½d²: biased, never negative. As a loss, its expected gradient is the gradient of the KL."""
    return 0.5 * log_ratio.square()


def k3(log_ratio: Tensor) -> Tensor:
    """e^{-d} + d - 1, d in ±20: unbiased, never negative, low variance. As a loss, its gradient is KL(q || p)'s."""
    log_ratio = limited(log_ratio)
    return (-log_ratio).expm1() + log_ratio


def absolute(log_ratio: Tensor) -> Tensor:
    """|d|: in expectation at least the KL. As a loss, its expected gradient is the gradient of Σ_v |p - q|."""
    return log_ratio.abs()


def with_gradient_of_k2(kl: Tensor, log_ratio: Tensor, change: Tensor | None) -> Tensor:
    """Return the value of the estimate with the gradient of k2 (straight-through)."""
    estimate = k2(log_ratio)
    return kl.detach() + (estimate - estimate.detach())  # the bracket is an exact 0


def times_ratio(kl: Tensor, log_ratio: Tensor, change: Tensor | None) -> Tensor:
    """Return the estimate times π / π_old, through which it has a gradient, too."""
    return kl if change is None else kl * limited(change).exp()


def token_log_ratio(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor | None) -> Tensor:
    """Return d (B, A) in float32 or float64, 0 at masked positions."""
    log_ratio = at_least_float32(log_probs) - at_least_float32(ref_log_probs)
    return log_ratio if mask is None else zero_where_masked(log_ratio, mask)


class KLEstimate:
    """A KL estimator and its limit, looked up once; called as :func:`approx_kl`."""

    def __init__(self, estimator: str = "k1", clip: float | None = None) -> None:
        entry = KL_ESTIMATORS.find(estimator)
        if entry.over_vocabulary:
            raise ValueError(
                f"--kl_estimator {estimator} needs the logits of both models: call full_kl"
            )
        self.value = entry.fn
        self.clip = clip
        self.as_loss = None if entry.as_loss is None else load(entry.as_loss)

    def __call__(
        self,
        log_probs: Tensor,
        ref_log_probs: Tensor,
        action_mask: Tensor | None = None,
        old_log_probs: Tensor | None = None,
    ) -> Tensor:
        require_same_shape(
            log_probs=log_probs,
            ref_log_probs=ref_log_probs,
            action_mask=action_mask,
            old_log_probs=old_log_probs,
        )
        log_ratio = token_log_ratio(log_probs, ref_log_probs, action_mask)  # (B, A)
        kl = self.value(log_ratio)
        if self.clip is not None:
            kl = kl.clamp(-self.clip, self.clip)
        if self.as_loss is None:
            return kl
        change = None
        if old_log_probs is not None:
            change = token_log_ratio(log_probs, old_log_probs.detach(), action_mask)
        return self.as_loss(kl, log_ratio, change)


def approx_kl(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    estimator: str = "k1",
    clip: float | None = None,
    action_mask: Tensor | None = None,
    old_log_probs: Tensor | None = None,
) -> Tensor:
    """Estimate KL(policy || reference) at each sampled token, (B, A) in nats, from d = log_probs - ref_log_probs.

    docs/algorithms.md gives the expected gradients, as a loss and in the reward. Sources: Schulman
    (joschu.net/blog/kl-approx.html); the gradients: arXiv:2506.09477, arXiv:2510.01555.

    Args:
        clip: limits the value to ±clip; a clipped value has no gradient, except k2's in a straight-through estimator.
        action_mask: (B, A), True = trained token; the others become 0 and get no gradient.
        old_log_probs: (B, A), of the policy that sampled, for estimators that are multiplied by π / π_old
            (DeepSeek-V3.2, arXiv:2512.02556, eq. 7); ``None``: it is the policy itself, and the factor is left out.
    """
    return KLEstimate(estimator, clip)(log_probs, ref_log_probs, action_mask, old_log_probs)


# -- over the vocabulary ---------------------------------------------------------------------------------------------

Divergence = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""Of log p and log q, (n, V) each: the divergence (n,), and two factors (n, V) of its gradient in log p's logits."""


def mean_log_ratio(p: Tensor, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ p d and d; d is 0 where p is 0, so that 0 · log 0 counts as 0 instead of NaN."""
    d = (log_p - log_q).masked_fill(p == 0, 0.0)
    return (p * d).sum(-1), d


def kl_of_rows(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return KL(p || q), a :data:`Divergence`."""
    p = log_p.exp()
    kl, d = mean_log_ratio(p, log_p, log_q)
    return kl, p, d - kl.unsqueeze(-1)


def full_kl(
    logits: Tensor,
    ref_logits: Tensor,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    divergence: Divergence = kl_of_rows,
) -> Tensor:
    """Σ_v p_v (log p_v - log q_v) with p, q = softmax(logits / temperature), (N, V) -> (N,): the exact KL.

    Its gradient is (p_v / temperature)(d_v - KL); ``ref_logits`` get none. Only one chunk of rows is in float32 at a
    time; the backward pass recomputes the distributions. p > 0 where q = 0 gives inf, and NaN gradients. Another
    ``divergence`` may stand in place of the KL.
    """
    require_same_shape(logits=logits, ref_logits=ref_logits)
    # Half the rows of a chunk of log probs: there are two distributions.
    chunk_size = rows_per_chunk(2 * logits.shape[1], chunk_size, temperature)
    return _FullKL.apply(logits, ref_logits, temperature, chunk_size, divergence)


class _FullKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        ref_logits: Tensor,
        temperature: float,
        chunk_size: int,
        divergence: Divergence,
    ) -> Tensor:
        kl = at_least_float32(logits.new_empty(logits.shape[0]))  # (N,)
        for start in range(0, len(logits), chunk_size):
            rows = slice(start, start + chunk_size)
            log_q = log_softmax(ref_logits[rows], temperature)
            kl[rows] = divergence(log_softmax(logits[rows], temperature), log_q)[0]
        ctx.save_for_backward(logits, ref_logits)
        ctx.temperature = temperature
        ctx.chunk_size = chunk_size
        ctx.divergence = divergence
        return kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, ref_logits = ctx.saved_tensors
        gradient = torch.empty_like(logits)  # (N, V)
        for start in range(0, len(logits), ctx.chunk_size):
            rows = slice(start, start + ctx.chunk_size)
            log_q = log_softmax(ref_logits[rows], ctx.temperature)
            _, p, slope = ctx.divergence(log_softmax(logits[rows], ctx.temperature), log_q)
            scale = (upstream[rows] / ctx.temperature).unsqueeze(-1)  # (n, 1)
            # Rows that the loss leaves out stay at 0 where the KL is inf or NaN.
            gradient[rows] = (scale * p * slope).masked_fill(scale == 0, 0.0).to(logits.dtype)
        return gradient, None, None, None, None


def divergence_of_models(
    actor: Any,
    frozen: Any,
    scores: ActionScores,
    experience: Experience,
    divergence: Divergence = kl_of_rows,
) -> tuple[Tensor, Tensor]:
    """Return the divergence from a frozen model, with gradient, and the frozen model's log probs: (B, A) each."""
    with torch.no_grad():
        frozen_scores = frozen.score_actions(
            experience.sequences, experience.num_actions, experience.attention_mask, logits=True
        )
    token_kl = full_kl(
        cast(Tensor, scores.logits), frozen_scores.logits, actor.temperature, divergence=divergence
    )  # (K,)
    kl = torch.zeros_like(scores.log_probs).masked_scatter(scores.real, token_kl)
    return scores.whole(kl), frozen_scores.log_probs


def kl_of_models(
    actor: Any, reference: Any, scores: ActionScores, experience: Experience, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Return :func:`full_kl` from the reference within ±clip (``--kl_estimator full``), and the reference's log probs."""
    kl, ref_log_probs = divergence_of_models(actor, reference, scores, experience)
    return kl if clip is None else kl.clamp(-clip, clip), ref_log_probs


# -- the coefficient of the KL ---------------------------------------------------------------------------------------


class KLController:
    """The KL coefficient, ``value``, and its state in checkpoints."""

    kind: str

    def __init__(self, coef: float) -> None:
        if not 0 <= coef < math.inf:
            raise ValueError(f"--init_kl_coef must be finite and at least 0, got {coef}")
        self.value = float(coef)

    def state_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the coefficient; everything else comes from flags. ValueError for a state of another kind."""
        if state.get("kind") != self.kind:
            raise ValueError(
                f"the checkpoint's KL is {state.get('kind')}, here {self.kind}: set --kl_target as it was"
            )
        self.value = float(state["value"])


class FixedKLController(KLController):
    """A coefficient that never changes."""

    kind = "fixed"

    def update(self, current_kl: float, n_samples: int) -> None:
        """Do nothing."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the flag's value; a different value in the checkpoint is logged."""
        coef = self.value
        super().load_state_dict(state)
        if self.value != coef:
            logger.warning(
                "--init_kl_coef is %g; the checkpoint was made with %g", coef, self.value
            )
        self.value = coef


class AdaptiveKLController(KLController):
    """Steers the coefficient so that the measured KL stays near a target, in the unit of ``update``'s ``current_kl``.

    value *= 1 + clip(kl / target - 1, ±0.2) · n / horizon. Source: Ziegler et al. 2019 (arXiv:1909.08593), §2.2.
    """

    kind = "adaptive"
    MAX_ERROR = 0.2

    def __init__(self, init_coef: float, target: float, horizon: float) -> None:
        if not (target > 0 and horizon > 0):
            raise ValueError(f"--kl_target ({target}) and --kl_horizon ({horizon}) must be above 0")
        super().__init__(init_coef)
        self.target = target
        self.horizon = horizon

    def update(self, current_kl: float, n_samples: int) -> None:
        """Call once per rollout batch, with the KL before any update on it; both numbers are over all ranks."""
        if not math.isfinite(current_kl):
            raise ValueError(
                f"the KL of this rollout is {current_kl}: policy or reference gives broken log probs"
            )
        if self.MAX_ERROR * n_samples >= self.horizon:
            raise ValueError(
                f"--kl_horizon {self.horizon} must be above a fifth of a rollout's {n_samples} samples"
            )
        error = min(max(current_kl / self.target - 1.0, -self.MAX_ERROR), self.MAX_ERROR)
        self.value *= 1.0 + error * n_samples / self.horizon


def make_kl_controller(
    init: float, target: float | None, horizon: float
) -> FixedKLController | AdaptiveKLController:
    """Make the controller: adaptive if ``--kl_target`` is set, fixed otherwise."""
    if target is None:
        return FixedKLController(init)
    return AdaptiveKLController(init, target, horizon)


# -- the rollout engine against the trainer ---------------------------------------------------------------------------


@torch.no_grad()
def mismatch_terms(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Measure how far engine and trainer are apart: float64 vectors of trained tokens (N,), or of rows that have any (R,).

    The engine samples with π_rollout; the trainer scores the same tokens with π_old before its first update. Here
    d = log ρ = log_probs - rollout_log_probs.
    """
    mask = mask.bool()
    log_ratio = log_ratio_of(log_probs, rollout_log_probs, mask)
    rows = mask.any(dim=1)
    token_ratios = log_ratio[mask]  # (N,)
    log_ratio = limited(log_ratio)  # (B, A)
    return {
        "kl": -token_ratios,  # mean: KL(π_rollout ‖ π_old), unbiased
        # e^d - d - 1; mean: the same KL, never negative (joschu.net/blog/kl-approx.html)
        "k3_kl": k3(-token_ratios),
        "logp_diff": token_ratios.abs(),
        "ratio": log_ratio[mask].exp(),  # ρ
        "ppl_ratio": 1 / row_mean(log_ratio, mask)[rows, 0],  # e^(-mean d) = ppl_old / ppl_rollout
        "seq_ratio": row_product(log_ratio)[rows, 0],  # Π ρ
    }


def log_ratio_of(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return d (B, A) in float64, where differences of float32 numbers are exact; 0 at masked positions."""
    require_same_shape(log_probs=log_probs, rollout_log_probs=rollout_log_probs, action_mask=mask)
    log_ratio = (log_probs.double() - rollout_log_probs.double()).masked_fill(~mask, 0.0)
    if broken := int(log_ratio.isnan().sum()):  # a bound would drop these tokens without a word
        raise ValueError(
            f"{broken} of {int(mask.sum())} trained tokens have a NaN log prob: of the actor or the engine"
        )
    return log_ratio


def row_product(log_ratio: Tensor) -> Tensor:
    """Return Π ρ over the row, (B, 1)."""
    return limited(log_ratio.sum(dim=1, keepdim=True)).exp()


def row_mean(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Return the geometric mean of ρ over the row's trained tokens, (B, 1); 1 for a row without any."""
    return masked_mean(log_ratio, mask, dim=1).unsqueeze(1).exp()


# -- the student against its teacher: p the student, q the teacher ----------------------------------------------------


REST_FLOOR = 1e-8  # least probability of the tokens beside the k, so that its log is finite


def divergence_of(beta: float) -> Divergence:
    """Return the generalised Jensen-Shannon divergence (1 - β) KL(p || m) + β KL(q || m) of m = (1 - β) p + β q.

    With β = 1 it is KL(p || q), with β = 0 KL(q || p). Source: GKD, Agarwal et al. 2023 (arXiv:2306.13649), eq. 1.
    """
    if beta == 1:
        return kl_of_rows
    if beta == 0:
        return reverse_kl
    return partial(jensen_shannon, beta=beta)


def reverse_kl(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return KL(q || p), a :data:`Divergence`."""
    p = log_p.exp()
    q = log_q.exp()
    return mean_log_ratio(q, log_q, log_p)[0], p - q, torch.ones_like(p)


def jensen_shannon(log_p: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the generalised divergence for 0 < β < 1, a :data:`Divergence`."""
    log_m = torch.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))
    p = log_p.exp()
    kl_of_p, d = mean_log_ratio(p, log_p, log_m)
    kl_of_q, _ = mean_log_ratio(log_q.exp(), log_q, log_m)
    return (1 - beta) * kl_of_p + beta * kl_of_q, (1 - beta) * p, d - kl_of_p.unsqueeze(-1)


def top_divergence(
    log_probs: Tensor, top_log_probs: Tensor, beta: float = 1.0, tail: str = "rest"
) -> Tensor:
    """Return the divergence of :func:`divergence_of` over a teacher's k best tokens alone, (N, k) -> (N,).

    ``tail`` says what becomes of all other tokens:

    - ``rest``: they count as one more token, of probability 1 - Σp and 1 - Σq, at least 1e-8. The divergence is at most
      that over the vocabulary, and 0 only where both models agree on the k.
    - ``renormalise``: p and q are divided by their sums, so that how much the policy gives to the k has no gradient.
    - ``drop``: Σ q (log q - log p), for beta 0.

    Args:
        log_probs: of the policy, with a gradient; ``top_log_probs``: of the teacher.
    """
    require_same_shape(log_probs=log_probs, top_log_probs=top_log_probs)
    log_p = log_probs
    log_q = at_least_float32(top_log_probs)
    if tail == "rest":
        log_p = _with_rest(log_p)
        log_q = _with_rest(log_q)
    elif tail == "renormalise":
        log_p = log_p.log_softmax(1)
        log_q = log_q.log_softmax(1)
    # Autograd makes the gradient here, so the factors are not used.
    return divergence_of(beta)(log_p, log_q)[0]


def _with_rest(log_probs: Tensor) -> Tensor:
    """Append ln(1 - Σ e^x): (N, k) -> (N, k + 1)."""
    rest = (1 - log_probs.exp().sum(1, keepdim=True)).clamp(min=REST_FLOOR).log()
    return torch.cat([log_probs, rest], dim=1)
