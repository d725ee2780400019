"""Log probs and entropy straight from hidden states, through the output head.

Softmax, sums and results are in float32 (float64 for float64 input). T tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise, repeat
from typing import Any

import torch
from torch import Tensor, nn, stack
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from lightppo.algorithms.logprobs import (
    EVEN,
    check_labels,
    evened,
    gather,
    lowest,
    rows_per_chunk,
)
from lightppo.algorithms.masking import at_least_float32
from lightppo.models.batches import Batch, on_cpu, takes, to_device
from lightppo.models.kernels import layers
from lightppo.models.kernels.invariant import is_invariant
from lightppo.models.kernels.layers import is_plain_linear


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    entropy: bool | TokenPlaces = False,
    entropy_grad: bool = False,
    valid_vocab_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """:func:`.logprobs.log_probs_and_entropy` of the logits hidden·weightᵀ + bias, never held at once: (T,) each.

    It has a backward pass of its own through the output head, and is once differentiable. With x = logits /
    temperature, p = softmax(x), E the entropy, y the label:

        ∂ log p_y / ∂x_v = [v = y] - p_v          ∂E / ∂x_v = -p_v (log p_v + E)

    The forward pass takes chunks of tokens and keeps one number per token, log Σ_v e^{x_v}. The backward pass takes
    blocks of the vocabulary, recomputes each block's logits for all tokens, and writes the block's rows of the weight
    gradient once, so that it is rounded once in low precision. If all tokens fit into one chunk, their log softmax is
    kept and nothing is recomputed. Beyond the gradients, memory is at most three float32 buffers of chunk_size × V.
    Products are ``EVEN`` wide, as far as the weight has rows; beyond the valid ids x is -inf, so that p is exactly 0.

    Args:
        hidden: (T, H), the input of the head; ``weight`` is (V, H), ``bias`` (V,), ``labels`` (T,).
        chunk_size: tokens per chunk, ``None`` = ``CHUNK_ELEMENTS`` / V; it changes only the rounding.
        entropy: of all tokens, or of these, and then 0 elsewhere; it takes as long as half of the log softmax.
        valid_vocab_size: the distribution covers ids below this; the weight's other rows get gradient 0.
    """
    check_labels(hidden, labels)
    valid = min(valid_vocab_size or len(weight), len(weight))
    columns = head_rows(valid, len(weight))
    chunk_size = rows_per_chunk(columns, chunk_size, temperature)
    if entropy_grad and isinstance(entropy, TokenPlaces):
        raise ValueError("entropy_grad needs the entropy of all tokens")
    plan = _Plan(temperature, chunk_size, valid, columns, entropy, bool(entropy) and entropy_grad)
    if torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (hidden, weight, bias)
    ):
        return _LinearLogProbs.apply(hidden, weight, bias, labels, plan)
    return _score(hidden, weight, bias, labels, plan, for_backward=False)[:2]


def head_rows(valid: int, rows: int) -> int:
    """Return how many of a head's ``rows`` are multiplied for ``valid`` ids: ``EVEN`` wide, as far as there are rows.

    With ``--batch_invariant`` all, as in decoding.
    """
    if is_invariant():
        return rows
    return min(-(-valid // EVEN) * EVEN, rows)


@dataclass(frozen=True)
class TokenPlaces:
    """Some of T tokens, by their places (E,) in order."""

    index: Tensor  # on the device of the tokens
    on_cpu: Tensor  # the same, so that nobody waits for a GPU to know them

    def split(self, size: int, count: int) -> list[Tensor]:
        """The places within each part of ``size`` of ``count`` tokens."""
        bounds = torch.searchsorted(
            self.on_cpu, torch.arange(0, max(count, 1) + size, size)
        ).tolist()
        return [self.index[a:b] - n * size for n, (a, b) in enumerate(pairwise(bounds))]


@dataclass(frozen=True)
class _Plan:
    """What to compute: over the ``valid`` first ids, ``chunk_size`` · ``columns`` logits at a time."""

    temperature: float
    chunk_size: int
    valid: int
    columns: int
    entropy: bool | TokenPlaces
    entropy_grad: bool


Scores = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""Log probs; the entropy if asked for; log Σ e^x or (T, V) log softmax if the backward pass needs them: else (T,)."""


@torch.no_grad()
def _score(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    plan: _Plan,
    *,
    for_backward: bool,
) -> Scores:
    """Chunk by chunk over the tokens, without a graph."""
    single = len(hidden) <= plan.chunk_size
    parts = []
    places = repeat(plan.entropy)
    if isinstance(plan.entropy, TokenPlaces):
        places = plan.entropy.split(plan.chunk_size, len(hidden))
    for h, ids, entropy in zip(
        hidden.split(plan.chunk_size), labels.split(plan.chunk_size), places
    ):
        logits = _logits(h, weight, bias, slice(0, plan.columns), plan)
        parts.append(
            _score_chunk(logits, ids, entropy, keep=for_backward and single, sum_up=for_backward)
        )
    if single:
        return parts[0]
    return tuple(None if part[0] is None else torch.cat(part) for part in zip(*parts))


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, block: slice, plan: _Plan
) -> Tensor:
    """(T, block), divided by the temperature, -inf beyond the valid ids, in a buffer that may be overwritten."""
    logits = at_least_float32(
        layers.linear(hidden, weight[block], None if bias is None else bias[block])
    )
    logits[:, max(0, plan.valid - block.start) :] = -torch.inf
    if plan.temperature == 1.0:
        return logits
    return logits.div_(plan.temperature)


def _score_chunk(
    logits: Tensor, labels: Tensor, entropy: bool | Tensor, keep: bool, sum_up: bool
) -> Scores:
    """Scores of (C, V) logits, which are overwritten; the entropy of all rows, or of some by their numbers."""
    log_softmax = torch.log_softmax(logits, dim=-1)
    log_probs = gather(log_softmax, labels)
    log_sum = entropies = None
    if sum_up and not keep:
        # x - log p is the same at every v, and most exact where x is largest
        top, where = logits.max(dim=-1)
        log_sum = top - gather(log_softmax, where)
    if isinstance(entropy, Tensor):
        some = torch.index_select(log_softmax, 0, entropy, out=logits[: len(entropy)])
        entropies = torch.zeros_like(log_probs).index_copy_(
            0, entropy, _entropies(some, torch.exp(some))
        )
    elif entropy:
        entropies = _entropies(log_softmax, torch.exp(log_softmax, out=logits))
    return log_probs, entropies, log_sum, log_softmax if keep else None


def _entropies(log_softmax: Tensor, probabilities: Tensor) -> Tensor:
    """-Σ p·log p of rows; both are overwritten, the first by its values with a floor."""
    return -probabilities.mul_(log_softmax.clamp_(min=lowest(log_softmax))).sum(-1)


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, plan: _Plan
    ) -> tuple[Tensor, Tensor | None]:
        log_probs, entropy, log_sum, log_softmax = _score(
            hidden, weight, bias, labels, plan, for_backward=True
        )
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        # The weight itself, no view of it: ZeRO-3 takes its storage away until the backward.
        ctx.save_for_backward(hidden, weight, bias, labels, entropy, log_sum, log_softmax)
        if plan.entropy and not plan.entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx, from_log_probs: Tensor | None, from_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, entropy, log_sum, log_softmax = ctx.saved_tensors
        plan: _Plan = ctx.plan
        wide = torch.promote_types(hidden.dtype, torch.float32)
        to_hidden, to_weight, to_bias = (
            x.new_zeros(x.shape, dtype=dtype) if needed else None
            for x, dtype, needed in zip(
                (hidden, weight, bias), (wide, None, None), ctx.needs_input_grad
            )
        )
        if from_log_probs is None and from_entropy is None:
            return to_hidden, to_weight, to_bias, None, None
        from_log_probs, from_entropy = (
            None if g is None else (g / plan.temperature).unsqueeze(-1)
            for g in (from_log_probs, from_entropy)
        )
        width = plan.columns  # a single block if log_softmax is kept
        if log_softmax is None:
            width = max(1, evened(plan.chunk_size * plan.columns // len(hidden)))
        for start in range(0, plan.columns, width):
            block = slice(start, min(start + width, plan.columns))
            log_probs = log_softmax
            if recomputed := log_softmax is None:
                log_probs = _logits(hidden, weight, bias, block, plan).sub_(log_sum.unsqueeze(-1))
            grad = _to_logits(
                log_probs,
                labels,
                entropy,
                from_log_probs,
                from_entropy,
                block,
                overwrite=recomputed,
            )
            if to_bias is not None:
                to_bias[block] = grad.sum(0).to(bias.dtype)
            grad = grad.to(weight.dtype)
            if to_weight is not None:
                to_weight[block] = layers.product(grad.t(), hidden)
            if to_hidden is not None:
                to_hidden += layers.product(grad, weight[block])
        return (
            None if to_hidden is None else to_hidden.to(hidden.dtype),
            to_weight,
            to_bias,
            None,
            None,
        )


def _to_logits(
    log_probs: Tensor,
    labels: Tensor,
    entropy: Tensor | None,
    from_log_probs: Tensor | None,
    from_entropy: Tensor | None,
    block: slice,
    overwrite: bool,
) -> Tensor:
    """Gradient of the logits (T, block), from the gradients (T, 1) of log probs and entropy."""
    term = None
    if from_entropy is not None:
        probabilities = log_probs.exp()
        # Log probs that were kept have this floor already.
        term = log_probs.clamp_(min=lowest(log_probs)) if overwrite else log_probs.clone()
        term.add_(entropy.unsqueeze(-1))
        # p · (log p + E) first: 0 for a forbidden token, whatever the gradient
        term.mul_(probabilities).mul_(from_entropy)
    else:
        probabilities = log_probs.exp_() if overwrite else log_probs.exp()
    if from_log_probs is None:
        return term.neg_()
    grad = probabilities.mul_(-from_log_probs)
    if term is not None:
        grad.sub_(term)
    in_block = (labels >= block.start) & (labels < block.stop)
    column = (labels - block.start).clamp(0, block.stop - block.start - 1)
    return grad.scatter_add_(
        1, column.unsqueeze(-1), from_log_probs.masked_fill(~in_block.unsqueeze(-1), 0)
    )


# -- in a model -------------------------------------------------------------------------------------------------------
# The head returns log probs in place of logits, so that memory does not grow with tokens × vocabulary. This needs a
# plain linear head with nothing after it. The first forward of any other model (Gemma 2's soft capping, the scaling of
# Cohere and Granite, adapters or 4 bits in the head) detects this and runs again; from then on all logits are made.


def scores_by_head(
    actor: Any,
    batch: Batch,
    actions: Tensor,
    *,
    entropy: bool | Tensor,
    entropy_grad: bool,
    router_logits: bool,
) -> tuple[Any, Tensor, Tensor | None, None] | None:
    """Make one forward of an :class:`~lightppo.models.actor.Actor`, as its ``_predict`` does, without logits.

    None if this model's log probs do not come from its head alone. All ranks agree on it.
    """
    # False once the model was seen to change what its head returns
    head = scoring_head(actor.hf_model) if getattr(actor, "head_is_last", True) else None
    if head is None:
        return None
    in_model = takes(actor.hf_model, "logits_to_keep")

    def select(hidden: Tensor) -> Tensor:
        return batch.of_real(hidden if in_model else batch.at_places(hidden))

    if isinstance(entropy, Tensor):
        index = entropy[on_cpu(batch.real)].nonzero().squeeze(1)
        entropy = TokenPlaces(to_device(index, batch.kept.device), on_cpu=index)
    options = {
        "valid_vocab_size": actor.valid_vocab_size,
        "entropy": entropy,
        "entropy_grad": entropy_grad,
    }
    with scores_from_head(head, select, actions, actor.temperature, **options) as returned:
        output = actor._run(batch, batch.places if in_model else None, router_logits)
    actor.head_is_last = is_untouched(returned, output.logits)
    if not actor.head_is_last:
        return None
    scores = output.logits[0]  # (K, 1 or 2), behind the hooks of the whole model
    entropies = scores[:, 1] if entropy else None
    return (
        output,
        scores[:, 0],
        entropies.detach() if entropy and not entropy_grad else entropies,
        None,
    )


def scoring_head(model: PreTrainedModel) -> nn.Linear | None:
    """The head, if it is an unmodified linear layer over the vocabulary; else None."""
    head = model.get_output_embeddings()
    if not is_plain_linear(head):
        return None
    if head.out_features == model.config.get_text_config().vocab_size:
        return head
    return None


@contextmanager
def scores_from_head(
    head: nn.Linear,
    select: Callable[[Tensor], Tensor],
    labels: Tensor,
    temperature: float,
    **options: Any,
) -> Iterator[list[Tensor]]:
    """Makes the :func:`scoring_head` return (1, K, 1) float32 log probs of ``labels``, or (1, K, 2) with the entropy.

    ``select`` picks the scored positions, (B, S, H) -> (K, H). Yields the head's results, for :func:`is_untouched`.
    """
    returned: list[Tensor] = []

    def forward(hidden: Tensor) -> Tensor:
        log_probs, entropy = linear_log_probs(
            select(hidden), head.weight, labels, head.bias, temperature, **options
        )
        scores = log_probs.unsqueeze(-1) if entropy is None else stack([log_probs, entropy], dim=-1)
        returned.append(scores.unsqueeze(0))
        return returned[-1]

    head.forward = forward  # on the instance: module calls, and hooks around them, find it there
    try:
        yield returned
    finally:
        del head.forward


def is_untouched(returned: list[Tensor], logits: Tensor) -> bool:
    """Whether the model called its head once and returned its result unchanged; by storage, so that all ranks agree."""
    if len(returned) != 1 or not isinstance(logits, Tensor):
        return False
    (scores,) = returned
    same_place = scores.untyped_storage()._cdata == logits.untyped_storage()._cdata
    return same_place and logits.shape == scores.shape and logits._version == scores._version == 0
