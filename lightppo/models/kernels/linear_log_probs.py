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
from torch import Tensor, nn
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
from lightppo.models.kernels import invariant, layers
from lightppo.models.kernels.layers import is_plain_linear

# 16 MB on a CPU: a few such buffers stay in its caches, and the process keeps their memory
_CACHED_ELEMENTS = 1 << 22


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
    """Return :func:`.logprobs.log_probs_and_entropy` of hidden·weightᵀ + bias, never held at once: (T,) each.

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
    valid_count = min(valid_vocab_size or len(weight), len(weight))
    columns = head_rows(valid_count, len(weight))
    chunk_size = rows_per_chunk(columns, chunk_size, temperature)
    if entropy_grad and isinstance(entropy, TokenPlaces):
        raise ValueError("entropy_grad needs the entropy of all tokens")
    has_gradient = bool(entropy) and entropy_grad
    plan = _Plan(temperature, chunk_size, valid_count, columns, entropy, has_gradient)
    trained = (tensor for tensor in (hidden, weight, bias) if tensor is not None)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in trained):
        return _LinearLogProbs.apply(hidden, weight, bias, labels, plan)
    return _score(hidden, weight, bias, labels, plan, for_backward=False)[:2]


def head_rows(valid_count: int, row_count: int) -> int:
    """Return how many rows of a head are multiplied for the valid ids: ``EVEN`` wide, as far as there are rows.

    With ``--batch_invariant`` all, as in decoding.
    """
    if invariant.entered_modes:
        return row_count
    return min(-(-valid_count // EVEN) * EVEN, row_count)


@dataclass(frozen=True)
class TokenPlaces:
    """Some of T tokens, by their places (E,) in order."""

    index: Tensor  # on the device of the tokens
    on_cpu: Tensor  # the same, so that nobody waits for a GPU to know them

    def split(self, size: int, count: int) -> list[Tensor]:
        """Return the places within each part of ``size`` of ``count`` tokens."""
        starts = torch.arange(0, max(count, 1) + size, size)
        bounds = torch.searchsorted(self.on_cpu, starts).tolist()
        return [
            self.index[first:end] - part * size
            for part, (first, end) in enumerate(pairwise(bounds))
        ]


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
    """Score chunk by chunk over the tokens, without a graph."""
    is_single = len(hidden) <= plan.chunk_size
    size = _cached_count(hidden, plan.chunk_size, plan.columns)
    entropy_places = repeat(plan.entropy)
    if isinstance(plan.entropy, TokenPlaces):
        entropy_places = iter(plan.entropy.split(size, len(hidden)))
    scores = []
    for hidden_chunk, label_chunk in zip(
        hidden.split(plan.chunk_size), labels.split(plan.chunk_size)
    ):
        logits = _logits(hidden_chunk, weight, bias, slice(0, plan.columns), plan)
        for rows, row_labels in zip(logits.split(size), label_chunk.split(size)):
            scores.append(
                _score_chunk(
                    rows,
                    row_labels,
                    next(entropy_places),
                    keeps_softmax=for_backward and is_single,
                    needs_log_sum=for_backward,
                )
            )
            if len(rows) < len(logits) and scores[-1][3] is not None:
                rows.copy_(scores[-1][3])
                scores[-1] = (*scores[-1][:3], rows)
    if len(scores) == 1:
        return scores[0]
    joined = [None if part[0] is None else torch.cat(part) for part in list(zip(*scores))[:3]]
    return joined[0], joined[1], joined[2], logits if for_backward and is_single else None


def _cached_count(tensor: Tensor, count: int, width: int) -> int:
    """Return how many of ``count`` rows of ``width`` numbers to work on at a time: a power of two, or all on a GPU."""
    size = EVEN
    while size > 1 and size * width > _CACHED_ELEMENTS:
        size //= 2
    return (
        size if tensor.is_cpu and count * width > _CACHED_ELEMENTS and count % size == 0 else count
    )


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, block: slice, plan: _Plan
) -> Tensor:
    """Return (T, block), divided by the temperature, -inf beyond the valid ids, in a buffer that may be overwritten."""
    logits = at_least_float32(
        layers.linear(hidden, weight[block], None if bias is None else bias[block])
    )
    logits[:, max(0, plan.valid - block.start) :] = -torch.inf
    if plan.temperature == 1.0:
        return logits
    return logits.div_(plan.temperature)


def _score_chunk(
    logits: Tensor, labels: Tensor, entropy: bool | Tensor, keeps_softmax: bool, needs_log_sum: bool
) -> Scores:
    """Score (C, V) logits, which are overwritten; the entropy of all rows, or of some by their numbers."""
    log_softmax = torch.log_softmax(logits, dim=-1)
    log_probs = gather(log_softmax, labels)
    log_sum = entropies = None
    if needs_log_sum and not keeps_softmax:
        # x - log p is the same at every v, and most exact where x is largest
        largest_logits, largest_places = logits.max(dim=-1)
        log_sum = largest_logits - gather(log_softmax, largest_places)
    if isinstance(entropy, Tensor):
        chosen_rows = torch.index_select(log_softmax, 0, entropy, out=logits[: len(entropy)])
        entropies = torch.zeros_like(log_probs).index_copy_(
            0, entropy, _entropies(chosen_rows, torch.exp(chosen_rows))
        )
    elif entropy:
        entropies = _entropies(log_softmax, torch.exp(log_softmax, out=logits))
    return log_probs, entropies, log_sum, log_softmax if keeps_softmax else None


def _entropies(log_softmax: Tensor, probabilities: Tensor) -> Tensor:
    """Return -Σ p·log p of rows; both are overwritten, the first by its values with a floor."""
    return -probabilities.mul_(log_softmax.clamp_(min=lowest(log_softmax))).sum(-1)


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        context, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, plan: _Plan
    ) -> tuple[Tensor, Tensor | None]:
        log_probs, entropy, log_sum, log_softmax = _score(
            hidden, weight, bias, labels, plan, for_backward=True
        )
        context.set_materialize_grads(False)
        context.plan = plan
        # The weight itself, no view of it: ZeRO-3 takes its storage away until the backward.
        context.save_for_backward(hidden, weight, bias, labels, entropy, log_sum, log_softmax)
        if plan.entropy and not plan.entropy_grad:
            context.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        context, from_log_probs: Tensor | None, from_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, entropy, log_sum, log_softmax = context.saved_tensors
        plan: _Plan = context.plan
        wide_type = torch.promote_types(hidden.dtype, torch.float32)
        hidden_gradient, bias_gradient = (
            saved_tensor.new_zeros(saved_tensor.shape, dtype=dtype) if is_needed else None
            for saved_tensor, dtype, is_needed in zip(
                (hidden, bias), (wide_type, None), context.needs_input_grad[::2]
            )
        )
        weight_gradient = None
        if context.needs_input_grad[1]:
            weight_gradient = torch.empty_like(weight, memory_format=torch.contiguous_format)
            weight_gradient[plan.columns :] = 0
        if from_log_probs is None and from_entropy is None:
            weight_gradient = None if weight_gradient is None else weight_gradient.zero_()
            return hidden_gradient, weight_gradient, bias_gradient, None, None
        from_log_probs, from_entropy = (
            None if gradient is None else (gradient / plan.temperature).unsqueeze(-1)
            for gradient in (from_log_probs, from_entropy)
        )
        block_width = plan.columns  # a single block if log_softmax is kept and is small or on a GPU
        if log_softmax is None:
            block_width = max(1, evened(plan.chunk_size * plan.columns // len(hidden)))
        if hidden.is_cpu and len(hidden) * block_width > _CACHED_ELEMENTS:
            block_width = max(EVEN, evened(_CACHED_ELEMENTS // len(hidden)))
        for start in range(0, plan.columns, block_width):
            block = slice(start, min(start + block_width, plan.columns))
            log_probs = None if log_softmax is None else log_softmax[:, block]
            if is_recomputed := log_softmax is None:
                log_probs = _logits(hidden, weight, bias, block, plan).sub_(log_sum.unsqueeze(-1))
            logit_gradient = _to_logits(
                log_probs,
                labels,
                entropy,
                from_log_probs,
                from_entropy,
                block,
                overwrite=is_recomputed,
            )
            if bias_gradient is not None:
                bias_gradient[block] = logit_gradient.sum(0).to(bias.dtype)
            logit_gradient = logit_gradient.to(weight.dtype)
            if weight_gradient is not None:
                weight_gradient[block] = layers.weight_product(logit_gradient, hidden)
            if hidden_gradient is not None:
                hidden_gradient += layers.product(logit_gradient, weight[block])
        if hidden_gradient is not None:
            hidden_gradient = hidden_gradient.to(hidden.dtype)
        return hidden_gradient, weight_gradient, bias_gradient, None, None


def _to_logits(
    log_probs: Tensor,
    labels: Tensor,
    entropy: Tensor | None,
    from_log_probs: Tensor | None,
    from_entropy: Tensor | None,
    block: slice,
    overwrite: bool,
) -> Tensor:
    """Return the gradient of the logits (T, block), from the gradients (T, 1) of log probs and entropy."""
    entropy_term = None
    if from_entropy is not None:
        probabilities = log_probs.exp()
        # Log probs that were kept have this floor already.
        entropy_term = log_probs.clamp_(min=lowest(log_probs)) if overwrite else log_probs.clone()
        entropy_term.add_(entropy.unsqueeze(-1))
        # p · (log p + E) first: 0 for a forbidden token, whatever the gradient
        entropy_term.mul_(probabilities).mul_(from_entropy)
    else:
        probabilities = log_probs.exp_() if overwrite else log_probs.exp()
    if from_log_probs is None:
        return entropy_term.neg_()
    logit_gradient = probabilities.mul_(-from_log_probs)
    if entropy_term is not None:
        logit_gradient.sub_(entropy_term)
    is_in_block = (labels >= block.start) & (labels < block.stop)
    label_columns = (labels - block.start).clamp(0, block.stop - block.start - 1)
    return logit_gradient.scatter_add_(
        1, label_columns.unsqueeze(-1), from_log_probs.masked_fill(~is_in_block.unsqueeze(-1), 0)
    )


# -- in a model -------------------------------------------------------------------------------------------------------
# The head returns log probs in place of logits, so that memory does not grow with tokens × vocabulary. This needs a
# plain linear head with nothing after it. The first forward of any other model (Gemma 2's soft capping, the scaling of
# Cohere and Granite, adapters or 4 bits in the head) detects this and runs again; from then on all logits are made.


def scores_by_head(
    actor: Any,
    batch: Batch,
    actions: Tensor,
    entropy: bool | Tensor,
    entropy_grad: bool,
    router_logits: bool,
) -> tuple[Any, Tensor, Tensor | None, None] | None:
    """Make one forward of an :class:`~lightppo.models.actor.Actor`, as its ``_predict`` does, without logits.

    None if this model's log probs do not come from its head alone. All ranks agree on it.
    """
    # False once the model was seen to change what its head returns
    if not getattr(actor, "head_is_last", True):
        return None
    if (head := scoring_head(actor.hf_model)) is None:
        return None
    keeps_logits = takes(actor.hf_model, "logits_to_keep")

    def select(hidden: Tensor) -> Tensor:
        return batch.of_real(hidden if keeps_logits else batch.at_places(hidden))

    if isinstance(entropy, Tensor):
        index = entropy[on_cpu(batch.real)].nonzero().squeeze(1)
        entropy = TokenPlaces(to_device(index, batch.real_places.device), on_cpu=index)
    with scores_from_head(
        head,
        select,
        actions,
        actor.temperature,
        valid_vocab_size=actor.valid_vocab_size,
        entropy=entropy,
        entropy_grad=entropy_grad,
    ) as head_outputs:
        output = actor._run(batch, batch.places if keeps_logits else None, router_logits)
    actor.head_is_last = is_untouched(head_outputs, output.logits)
    if not actor.head_is_last:
        return None
    scores = output.logits[0]  # (K, 1 or 2), behind the hooks of the whole model
    entropies = scores[:, 1] if entropy else None
    if entropy and not entropy_grad:
        entropies = entropies.detach()
    return output, scores[:, 0], entropies, None


def scoring_head(model: PreTrainedModel) -> nn.Linear | None:
    """Return the head, if it is an unmodified linear layer over the vocabulary; else None."""
    head = model.get_output_embeddings()
    vocabulary = model.config.get_text_config().vocab_size
    return head if is_plain_linear(head) and head.out_features == vocabulary else None


@contextmanager
def scores_from_head(
    head: nn.Linear,
    select: Callable[[Tensor], Tensor],
    labels: Tensor,
    temperature: float,
    **options: Any,
) -> Iterator[list[Tensor]]:
    """Make the head return (1, K, 1) float32 log probs of ``labels``, or (1, K, 2) with the entropy.

    ``select`` picks the scored positions, (B, S, H) -> (K, H). Yields the head's results, for :func:`is_untouched`.
    """
    head_outputs: list[Tensor] = []

    def forward(hidden: Tensor) -> Tensor:
        log_probs, entropy = linear_log_probs(
            select(hidden), head.weight, labels, head.bias, temperature, **options
        )
        columns = [log_probs] if entropy is None else [log_probs, entropy]
        head_outputs.append(torch.stack(columns, dim=-1).unsqueeze(0))
        return head_outputs[-1]

    head.forward = forward  # on the instance: module calls, and hooks around them, find it there
    try:
        yield head_outputs
    finally:
        del head.forward


def is_untouched(head_outputs: list[Tensor], logits: Tensor) -> bool:
    """Tell whether the model called its head once and returned its result; by storage, so that all ranks agree."""
    if len(head_outputs) != 1 or not isinstance(logits, Tensor):
        return False
    (scores,) = head_outputs
    shares_storage = scores.untyped_storage()._cdata == logits.untyped_storage()._cdata
    return (
        shares_storage and logits.shape == scores.shape and logits._version == scores._version == 0
    )
