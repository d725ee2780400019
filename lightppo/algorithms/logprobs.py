"""Log probs and entropy straight from hidden states: the logits of all tokens are never held at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightppo.algorithms.masking import at_least_float32
from lightppo.algorithms.matmul import linear, product

CHUNK_ELEMENTS = 1 << 26  # of a float32 chunk: 256 MB, whatever the vocabulary


def token_log_probs(logits: Tensor, labels: Tensor, temperature: float = 1.0, chunk_size: int | None = None) -> Tensor:
    """log softmax(logits / temperature) at ``labels``.

    Without gradients only one chunk of logits is ever held in float32. With gradients autograd keeps one float32 copy.

    Args:
        logits: (..., V), any float type.
        labels: (...), integer ids in [0, V).
        temperature: the sampling temperature, above 0.
        chunk_size: tokens per chunk, ``None`` = ``CHUNK_ELEMENTS`` / V; it does not change the result.

    Returns:
        (...), float32 (float64 for float64 logits).

    Raises:
        ValueError: shapes that do not fit, temperature or chunk_size not above 0.
    """
    chunk_size = _checked_chunk_size(logits, temperature, chunk_size)
    _check_labels(logits, labels)

    def gather(chunk: Tensor, ids: Tensor) -> Tensor:
        return _gather(_log_softmax(chunk, temperature), ids)

    return _in_chunks(gather, chunk_size, logits, labels)


def entropy_from_logits(logits: Tensor, temperature: float = 1.0, chunk_size: int | None = None) -> Tensor:
    """Entropy of softmax(logits / temperature), in nats; logits of -inf (forbidden tokens) add 0.

    Memory as :func:`token_log_probs`.

    Args:
        logits: (..., V), any float type.
        temperature: the sampling temperature, above 0.
        chunk_size: tokens per chunk, ``None`` = ``CHUNK_ELEMENTS`` / V; it does not change the result.

    Returns:
        (...), float32 (float64 for float64 logits).

    Raises:
        ValueError: temperature or chunk_size not above 0.
    """
    chunk_size = _checked_chunk_size(logits, temperature, chunk_size)

    def entropy(chunk: Tensor) -> Tensor:
        return _Entropy.apply(_log_softmax(chunk, temperature))

    return _in_chunks(entropy, chunk_size, logits)


def log_probs_and_entropy(
    logits: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    entropy_grad: bool = True,
) -> tuple[Tensor, Tensor]:
    """:func:`token_log_probs` and :func:`entropy_from_logits` from one log softmax per chunk; the same numbers.

    Args:
        logits: (..., V), any float type.
        labels: (...), integer ids in [0, V).
        temperature: the sampling temperature, above 0.
        chunk_size: tokens per chunk, ``None`` = ``CHUNK_ELEMENTS`` / V; it does not change the result.
        entropy_grad: False: the entropy is detached. Either way autograd keeps no more than for the log probs alone,
            one float32 copy of the logits.

    Returns:
        log probs (...) and entropy (...), float32 (float64 for float64 logits).

    Raises:
        ValueError: shapes that do not fit, temperature or chunk_size not above 0.
    """
    chunk_size = _checked_chunk_size(logits, temperature, chunk_size)
    _check_labels(logits, labels)

    def both(chunk: Tensor, ids: Tensor) -> Tensor:
        log_probs = _log_softmax(chunk, temperature)
        entropy = _Entropy.apply(log_probs if entropy_grad else log_probs.detach())
        return torch.stack([_gather(log_probs, ids), entropy], dim=-1)

    log_probs, entropy = (x.contiguous() for x in _in_chunks(both, chunk_size, logits, labels).unbind(-1))
    return log_probs, entropy if entropy_grad else entropy.detach()


def _check_labels(logits: Tensor, labels: Tensor) -> None:
    if labels.shape != logits.shape[:-1]:
        raise ValueError(f"labels {tuple(labels.shape)} do not fit logits {tuple(logits.shape)}")


def _checked_chunk_size(logits: Tensor, temperature: float, chunk_size: int | None) -> int:
    if not temperature > 0:
        raise ValueError(f"--temperature must be above 0 for log probs, got {temperature}; greedy decoding has none")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    if logits.dim() < 1:
        raise ValueError("logits need a vocabulary dimension")
    return chunk_size or max(1, CHUNK_ELEMENTS // max(1, logits.shape[-1]))


def _log_softmax(chunk: Tensor, temperature: float) -> Tensor:
    chunk = at_least_float32(chunk)
    return torch.log_softmax(chunk if temperature == 1.0 else chunk / temperature, dim=-1)


def _gather(log_probs: Tensor, ids: Tensor) -> Tensor:
    return log_probs.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


class _Entropy(torch.autograd.Function):
    """-Σ e^x·x of log probs x (..., V); its gradient -e^x·(x + 1) needs x alone, which log_softmax keeps anyway.

    By plain autograd the exponential and the product would be kept too, each as large as the logits in float32.
    """

    @staticmethod
    def forward(ctx, log_probs: Tensor) -> Tensor:
        ctx.save_for_backward(log_probs)
        return -(log_probs.exp() * _finite(log_probs)).sum(-1)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (log_probs,) = ctx.saved_tensors
        return -grad.unsqueeze(-1) * (log_probs.exp() * (_finite(log_probs) + 1))


def _finite(log_probs: Tensor) -> Tensor:
    """A floor that keeps 0 * -inf of a forbidden token from being NaN."""
    return log_probs.clamp(min=torch.finfo(log_probs.dtype).min)


def _in_chunks(fn: Callable[..., Tensor], chunk_size: int, logits: Tensor, *aligned: Tensor) -> Tensor:
    """Apply ``fn`` to chunks of at most ``chunk_size`` tokens; the result's leading shape is that of ``logits``."""
    shape = logits.shape[:-1]
    if shape.numel() <= chunk_size:
        return fn(logits, *aligned)
    # Along the first dimension nothing is copied, whatever the strides (logits[:, :-1] cannot be flattened for free).
    # split, not slices: its backward concatenates once instead of filling a whole gradient per chunk.
    per_row = shape[1:].numel()
    group = max(1, chunk_size // per_row)
    parts = zip(logits.split(group), *(tensor.split(group) for tensor in aligned))
    if per_row <= chunk_size:
        return torch.cat([fn(*part) for part in parts])
    return torch.stack([_in_chunks(fn, chunk_size, *(tensor.squeeze(0) for tensor in part)) for part in parts])


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    entropy: bool = False,
    entropy_grad: bool = False,
    valid_vocab_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """log softmax((hidden·weightᵀ + bias) / temperature) at ``labels``, and the entropy of that distribution.

    The numbers of :func:`~lightppo.algorithms.logprobs.log_probs_and_entropy` on the logits, with a backward of its own
    through the output head. With x = logits / temperature, p = softmax(x), E the entropy, y the label:

        ∂ log p_y / ∂x_v = [v = y] - p_v          ∂E / ∂x_v = -p_v (log p_v + E)

    The forward goes over chunks of tokens and keeps one number per token, log Σ_v e^{x_v}. The backward goes over
    blocks of the vocabulary, recomputes the logits of the block for all tokens and writes the block's rows of the
    weight gradient once, so that low-precision weights get a gradient that is rounded once. Where all tokens fit into
    one chunk their log softmax is kept instead, and nothing is recomputed. Either way what is held beyond the
    gradients does not grow with tokens × vocabulary: at most three float32 buffers of chunk_size × V numbers.

    Matrix products are in the dtype of the weight, as in the model; softmax, sums and the gradient of ``hidden`` are
    accumulated in float32 (float64 for float64 input). It is once differentiable.

    Args:
        hidden: (T, H), what goes into the head.
        weight: (V, H).
        labels: (T,), integer ids in [0, V).
        bias: (V,), or None.
        temperature: the sampling temperature, above 0.
        chunk_size: tokens per chunk, ``None`` = ``CHUNK_ELEMENTS`` / V; it changes the result by rounding only.
        entropy: give the entropy.
        entropy_grad: with a gradient; False: detached.
        valid_vocab_size: the distribution is over the first so many tokens; the other rows of the weight get a gradient
            of 0. None: all.

    Returns:
        log probs (T,) and entropy (T,) in nats, or None: float32 (float64 for float64 input).

    Raises:
        ValueError: shapes that do not fit; temperature, chunk_size or valid_vocab_size not above 0.
    """
    _check(hidden, weight, labels, bias)
    if not temperature > 0:
        raise ValueError(f"--temperature must be above 0 for log probs, got {temperature}; greedy decoding has none")
    for name, number in (("chunk_size", chunk_size), ("valid_vocab_size", valid_vocab_size)):
        if number is not None and number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    rows = weight.shape[0] if valid_vocab_size is None else min(valid_vocab_size, weight.shape[0])
    differentiable = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (hidden, weight, bias))
    plan = _Plan(
        temperature=temperature,
        chunk_size=chunk_size or max(1, CHUNK_ELEMENTS // max(1, rows)),
        rows=rows,
        entropy=entropy,
        entropy_grad=entropy and entropy_grad,
    )
    if differentiable:
        return _LinearLogProbs.apply(hidden, weight, bias, labels, plan)
    scores = _score(hidden, weight, bias, labels, plan, for_backward=False)
    return scores.log_probs, scores.entropy


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} must be (T, H) and weight {tuple(weight.shape)} (V, H)")
    if labels.shape != hidden.shape[:1]:
        raise ValueError(f"labels {tuple(labels.shape)} do not fit hidden {tuple(hidden.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)} does not fit weight {tuple(weight.shape)}")


@dataclass(frozen=True)
class _Plan:
    """What is computed: over the first ``rows`` of the vocabulary, ``chunk_size`` · ``rows`` logits at a time."""

    temperature: float
    chunk_size: int
    rows: int
    entropy: bool
    entropy_grad: bool


@dataclass(frozen=True)
class _Scores:
    """(T,) each: log probs; entropy if asked for; log Σ e^x and (T, V) log softmax where the backward needs them."""

    log_probs: Tensor
    entropy: Tensor | None = None
    log_sum: Tensor | None = None
    log_softmax: Tensor | None = None


def _score(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, plan: _Plan, *, for_backward: bool
) -> _Scores:
    """Chunk by chunk over the tokens, without a graph."""
    vocabulary = slice(0, plan.rows)
    with torch.no_grad():
        if len(hidden) <= plan.chunk_size:
            logits = _logits(hidden, weight, bias, vocabulary, plan.temperature)
            return _score_chunk(logits, labels, plan.entropy, keep=for_backward)
        parts = [
            _score_chunk(_logits(h, weight, bias, vocabulary, plan.temperature), ids, plan.entropy, sum_up=for_backward)
            for h, ids in zip(hidden.split(plan.chunk_size), labels.split(plan.chunk_size))
        ]
    return _Scores(
        log_probs=torch.cat([part.log_probs for part in parts]),
        entropy=torch.cat([part.entropy for part in parts]) if plan.entropy else None,
        log_sum=torch.cat([part.log_sum for part in parts]) if for_backward else None,
    )


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, block: slice, temperature: float) -> Tensor:
    """(T, block), over the temperature, in a buffer that may be written into."""
    logits = at_least_float32(linear(hidden, weight[block], None if bias is None else bias[block]))
    return logits if temperature == 1.0 else logits.div_(temperature)


def _score_chunk(logits: Tensor, labels: Tensor, entropy: bool, keep: bool = False, sum_up: bool = False) -> _Scores:
    """Scores of (C, V) logits, which are overwritten."""
    log_softmax = torch.log_softmax(logits, dim=-1)
    log_probs = log_softmax.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    log_sum = entropies = None
    if sum_up:
        top, where = logits.max(dim=-1)  # x - log p is the same at every v; where x is largest it is most exact
        log_sum = top - log_softmax.gather(-1, where.unsqueeze(-1)).squeeze(-1)
    if entropy:
        probabilities = torch.exp(log_softmax, out=logits)
        entropies = -probabilities.mul_(_finite_(log_softmax)).sum(-1)
    return _Scores(log_probs, entropies, log_sum, log_softmax if keep else None)


def _finite_(log_probs: Tensor) -> Tensor:
    """In place, a floor that keeps 0 * -inf of a forbidden token from being NaN."""
    return log_probs.clamp_(min=torch.finfo(log_probs.dtype).min)


class _LinearLogProbs(torch.autograd.Function):
    """See :func:`linear_log_probs`."""

    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, plan: _Plan
    ) -> tuple[Tensor, Tensor | None]:
        scores = _score(hidden, weight, bias, labels, plan, for_backward=True)
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        # The weight itself, no view of it: ZeRO-3 takes its storage away until the backward.
        ctx.save_for_backward(hidden, weight, bias, labels, scores.entropy, scores.log_sum, scores.log_softmax)
        if plan.entropy and not plan.entropy_grad:
            ctx.mark_non_differentiable(scores.entropy)
        return scores.log_probs, scores.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, entropy, log_sum, log_softmax = ctx.saved_tensors
        plan: _Plan = ctx.plan
        grads = _Gradients.zeros(hidden, weight, bias, ctx.needs_input_grad)
        if grad_log_probs is None and grad_entropy is None:
            return grads.hidden, grads.weight, grads.bias, None, None
        upstream = _Upstream(labels, entropy, grad_log_probs, grad_entropy, plan.temperature)
        width = max(
            1, plan.chunk_size * plan.rows // max(1, len(hidden))
        )  # at least all rows where log_softmax is kept
        for start in range(0, plan.rows, width):
            block = slice(start, min(start + width, plan.rows))
            if log_softmax is not None:
                grad = upstream.to_logits(log_softmax, block, overwrite=False)
            else:
                logits = _logits(hidden, weight, bias, block, plan.temperature)
                grad = upstream.to_logits(logits.sub_(log_sum.unsqueeze(-1)), block, overwrite=True)
            grads.add(grad, hidden, weight, block)
        return grads.hidden_as(hidden.dtype), grads.weight, grads.bias, None, None


class _Upstream:
    """The gradients of log probs and entropy (T,), to be carried over to logits."""

    def __init__(
        self,
        labels: Tensor,
        entropy: Tensor | None,
        grad_log_probs: Tensor | None,
        grad_entropy: Tensor | None,
        temperature: float,
    ) -> None:
        self.labels, self.entropy = labels, entropy
        self.log_probs, self.entropies = (
            None if g is None else g / temperature for g in (grad_log_probs, grad_entropy)
        )

    def to_logits(self, log_probs: Tensor, block: slice, *, overwrite: bool) -> Tensor:
        """Gradient of the logits (T, block) from their log probs, which are a scratch buffer with ``overwrite``."""
        term = None
        if self.entropies is not None:
            probabilities = log_probs.exp()
            term = (_finite_(log_probs) if overwrite else log_probs.clone()).add_(self.entropy.unsqueeze(-1))
            # p · (log p + E) first: 0 for a forbidden token, whatever the gradient
            term.mul_(probabilities).mul_(self.entropies.unsqueeze(-1))
        else:
            probabilities = log_probs.exp_() if overwrite else log_probs.exp()
        if self.log_probs is None:
            return term.neg_()
        grad = probabilities.mul_(-self.log_probs.unsqueeze(-1))
        if term is not None:
            grad.sub_(term)
        own = (self.labels >= block.start) & (self.labels < block.stop)  # tokens whose label is in the block
        column = (self.labels - block.start).clamp(0, block.stop - block.start - 1)
        return grad.scatter_add_(1, column.unsqueeze(-1), self.log_probs.masked_fill(~own, 0).unsqueeze(-1))


@dataclass
class _Gradients:
    """Gradients of the head's inputs, filled block by block of the vocabulary; None where not needed."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def zeros(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: tuple[bool, ...]) -> _Gradients:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return cls(
            hidden=hidden.new_zeros(hidden.shape, dtype=wide) if needed[0] else None,
            weight=weight.new_zeros(weight.shape) if needed[1] else None,
            bias=bias.new_zeros(bias.shape) if needed[2] else None,
        )

    def add(self, grad: Tensor, hidden: Tensor, weight: Tensor, block: slice) -> None:
        """``grad`` (T, block) of the logits."""
        if self.bias is not None:
            self.bias[block] = grad.sum(0).to(self.bias.dtype)
        grad = grad.to(weight.dtype)
        if self.weight is not None:
            self.weight[block] = product(grad.t(), hidden)
        if self.hidden is None:
            return
        self.hidden += product(grad, weight[block])

    def hidden_as(self, dtype: torch.dtype) -> Tensor | None:
        return None if self.hidden is None else self.hidden.to(dtype)
