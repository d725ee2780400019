"""``--batch_invariant``: what the actor says of a token does not depend on the batch around it, to the last bit.

On a CPU the order of a sum depends on the shape of the batch. Here every product is made of calls of one shape: so many
rows at a time, and keys in blocks from the beginning of a sequence (the idea: He et al. 2025, Thinking Machines,
"Defeating Nondeterminism in LLM Inference"). Rows and keys that fill a block up change nothing. Then sampling, a pass
over the rollout and a training pass give the same log probs: packed or padded, with shared prompts or without, with any
number of slots and any micro batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode

from lightppo.errors import ConfigError
from lightppo.models.attention.row_attention import PACKED_SDPA
from lightppo.models.kernels.layers import CPULinear

ROWS = 64  # of a product: few cost time in training, many where few responses are decoded
QUERIES = 32  # torch's kernel for CPUs attends in blocks of so many queries
QUERIES_AT_ONCE = 128  # blocks of one call, that keep their size: up to 191
KEYS = {torch.bfloat16: 32, torch.float16: 32, torch.float32: 512}  # its blocks of keys
# numbers: up to here one thread computes them; a function's vector code takes UNIT at a time, and
# other code, which rounds otherwise, the rest
ONE_THREAD = 32768
UNIT = 64

_aten = torch.ops.aten
HIDDEN = -6e4  # added to the score of a key that is not seen: float16 holds it

# -- products ---------------------------------------------------------------------------------------------------------


def by_rows(multiply: Callable[[Tensor], Tensor], rows: Tensor, dim: int = 0) -> Tensor:
    """``multiply`` in calls of ``ROWS`` rows along ``dim``."""
    count = rows.shape[dim]
    parts = [fill_up(part, dim, ROWS) for part in rows.split(ROWS, dim)]
    outputs = [multiply(part) for part in parts]
    whole = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim)
    if whole.shape[dim] == count:
        return whole
    return whole.narrow(dim, 0, count).contiguous()


def fill_up(x: Tensor, dim: int, unit: int) -> Tensor:
    """Zeros at the end of ``dim``, to a multiple of ``unit``."""
    missing = -x.shape[dim] % unit
    if missing:
        return pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, missing))
    return x


def mm(a: Tensor, b: Tensor) -> Tensor:
    if len(a):
        return by_rows(lambda rows: _aten.mm.default(rows, b), a)
    return _aten.mm.default(a, b)


def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if bias.dim() != 1 or beta != 1 or alpha != 1 or not len(a):
        return _aten.add.Tensor(bias * beta, mm(a, b) * alpha)
    return by_rows(lambda rows: _aten.addmm.default(bias, rows, b), a)


def bmm(a: Tensor, b: Tensor) -> Tensor:
    if a.shape[2] == 1:  # no sum: rotary angles
        return _aten.bmm.default(a, b)
    return by_rows(lambda rows: _aten.bmm.default(rows, b), a, dim=1)


def grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """Rows of each expert by its weight: (T, K), (E, K, N), ends of the groups (E,) -> (T, N)."""
    if bias is not None or a.dim() != 2 or b.dim() != 3:
        raise NotImplementedError("--batch_invariant: experts that are multiplied in this way")
    output = a.new_zeros(len(a), b.shape[2], dtype=out_dtype)
    start = 0
    for weight, end in zip(b, offs.tolist()):
        if end > start:
            output[start:end] = mm(a[start:end], weight)
        start = end
    return output


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None, *_: Any) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    output = mm(rows, weight.t()) if bias is None else addmm(bias, rows, weight.t())
    return output.view(*x.shape[:-1], -1)


# -- functions of one number ------------------------------------------------------------------------------------------


def in_vectors(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``fn`` of each number, by vector code alone: one thread's part, or each of all threads', is whole units."""
    flat = x.contiguous().view(-1)
    unit = UNIT * torch.get_num_threads()
    piece = max(ONE_THREAD - ONE_THREAD % unit, unit)
    # torch gives each thread at least this many elements. With fewer than that for all threads, it takes only some of
    # them.
    whole = len(flat) - len(flat) % unit if len(flat) >= ONE_THREAD * torch.get_num_threads() else 0
    parts = [fn(flat[:whole])] if whole else []
    for part in flat[whole:].split(piece):
        parts.append(fn(fill_up(part, 0, unit))[: len(part)])
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(x.shape)


# -- attention --------------------------------------------------------------------------------------------------------


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(B, H, L, D), (B, H_kv, S, D) twice -> (B, H, L, D), and log Σ e^score (B, H, L).

    The mask (B, 1, L, S) is added to the scores. A row's first key is the first that its last query sees; from there on
    its keys go in blocks.
    """
    rows, _, length, _ = query.shape
    mask = attn_mask
    if mask is not None:
        mask = mask[None, None] if mask.dim() == 2 else mask
        mask = mask.expand(rows, mask.shape[1], length, mask.shape[3])
        key, value, mask = from_first_key(key, value, mask)
    unit = KEYS[query.dtype]
    seen = key.shape[2]
    key = fill_up(key, 2, unit)
    value = fill_up(value, 2, unit)
    outputs = []
    sums = []
    for start in range(0, length, QUERIES_AT_ONCE):
        part = query[:, :, start : start + QUERIES_AT_ONCE]
        count = part.shape[2]
        part = fill_up(part, 2, QUERIES)
        if mask is not None:
            added = mask[:, :, start : start + count]
            added = pad(added, (0, -seen % unit, 0, part.shape[2] - count), value=HIDDEN)
            columns = key.shape[2]
        else:
            last = min(start + part.shape[2], seen) if is_causal else seen
            columns = last + -last % unit
            added = hidden(start, part.shape[2], seen, columns, is_causal, query.dtype)
        output, log_sum = _aten._scaled_dot_product_flash_attention_for_cpu.default(
            part,
            key[:, :, :columns],
            value[:, :, :columns],
            dropout,
            False,
            attn_mask=added.expand(rows, added.shape[1], -1, -1),
            scale=scale,
        )
        outputs.append(output[:, :, :count])
        sums.append(log_sum[:, :, :count])
    joined = [parts[0] if len(parts) == 1 else torch.cat(parts, 2) for parts in (outputs, sums)]
    output, log_sum = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in joined)
    return output, log_sum


@lru_cache(maxsize=64)
def hidden(
    start: int, queries: int, seen: int, columns: int, is_causal: bool, dtype: torch.dtype
) -> Tensor:
    """The mask (1, 1, queries, columns) of queries from place ``start`` on, of ``seen`` keys."""
    keys = torch.arange(columns)
    is_hidden = (keys >= seen).expand(queries, columns)
    if is_causal:
        is_hidden = is_hidden | (keys > start + torch.arange(queries)[:, None])
    return torch.zeros(queries, columns, dtype=dtype).masked_fill(is_hidden, HIDDEN)[None, None]


def from_first_key(key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Moves each row's keys so that the first that its last query sees is column 0."""
    mask = mask.clamp(min=HIDDEN)
    first = (mask[:, 0, -1] > HIDDEN / 2).to(torch.uint8).argmax(1).tolist()  # (B,)
    if not any(first):
        return key, value, mask
    moved = []
    for x, dim, missing in ((key, 2, 0.0), (value, 2, 0.0), (mask, 3, HIDDEN)):
        seen = x.narrow(dim, min(first), x.shape[dim] - min(first))
        whole = torch.full_like(seen, missing, memory_format=torch.contiguous_format)
        for row, (start, source) in enumerate(zip(first, x)):
            count = source.shape[dim - 1] - start
            whole[row].narrow(dim - 1, 0, count).copy_(source.narrow(dim - 1, start, count))
        moved.append(whole)
    key, value, mask = moved
    return key, value, mask


# -- the mode ---------------------------------------------------------------------------------------------------------

HANDLED: dict[Any, Callable[..., Any]] = {
    _aten.mm.default: mm,
    _aten.addmm.default: addmm,
    _aten.bmm.default: bmm,
    _aten._grouped_mm.default: grouped_mm,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: attention,
}
if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
    HANDLED[torch.ops.mkldnn._linear_pointwise.default] = onednn_linear
# Exact, whatever code computes them: one rounding.
_EXACT = {"abs", "neg", "relu", "sqrt", "reciprocal", "add", "sub", "mul", "div", "clamp"}
_EXACT |= {"clone", "fill", "masked_fill", "where", "zero", "bitwise_not", "logical_not"}
_EXACT |= {"eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "ceil", "floor", "round", "square"}
# Sums whose order is not known here.
_UNKNOWN = {"convolution", "baddbmm", "addbmm", "_scaled_grouped_mm", "_fused_sdp_choice"}


class BatchInvariant(TorchDispatchMode):
    """While it is entered, operators give each row what they give it in any other batch."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return way_of(func)(func, args, kwargs or {})


@cache
def way_of(func: Any) -> Callable[..., Any]:
    """How an operator runs: a function of it, its arguments and its keyword arguments."""
    name = func.overloadpacket.__name__
    if func in HANDLED:
        return lambda func, args, kwargs: HANDLED[func](*args, **kwargs)
    if name in _UNKNOWN or func.namespace == "lightppo":
        raise NotImplementedError(
            f"--batch_invariant: leave it out: the order of sums of {func} is not known"
        )
    if torch.Tag.pointwise in func.tags and name.rstrip("_") not in _EXACT:
        return of_each_number
    return lambda func, args, kwargs: func(*args, **kwargs)


def of_each_number(func: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """A function of one tensor, by :func:`in_vectors`; those of several are sums or products, and exact."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if len(tensors) > 1 or not args[0].is_floating_point():
        return func(*args, **kwargs)
    if torch.Tag.inplace not in func.tags:
        return in_vectors(lambda part: func(part, *args[1:], **kwargs), args[0])
    changed = in_vectors(lambda part: func(part.clone(), *args[1:], **kwargs), args[0])
    return args[0].copy_(changed)


_entered: list[BatchInvariant] = []


def enter(module: nn.Module, inputs: Any) -> None:
    _entered.append(BatchInvariant().__enter__())


def leave(module: nn.Module, inputs: Any, output: Any) -> None:
    if _entered:
        _entered.pop().__exit__(None, None, None)


def is_invariant() -> bool:
    """Whether a forward pass of a model runs in this way."""
    return bool(_entered)


def make_invariant(model: nn.Module, device: torch.device) -> None:
    """Enters :class:`BatchInvariant` around each forward pass of the model.

    Raises:
        ConfigError: its sums cannot be put in order.
    """
    if reason := why_not(model, device):
        raise ConfigError(f"--batch_invariant: leave it out: {reason}")
    for module in model.modules():
        if type(module) is CPULinear:
            module.__class__ = nn.Linear
    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)


def why_not(model: nn.Module, device: torch.device) -> str | None:
    """Why the sums of a model cannot be put in order; None: they can."""
    if device.type != "cpu":
        return "it works on a CPU alone so far"
    config = model.config.get_text_config(decoder=True)
    if config._attn_implementation not in ("sdpa", PACKED_SDPA):
        return f"it needs sdpa attention, and the model has {config._attn_implementation}"
    dtype = next(model.parameters()).dtype
    if dtype not in KEYS:
        return f"it needs bfloat16, float16 or float32, not {dtype}"
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if kinds - {"full_attention"} or (window and not kinds):
        return "the model has layers that do not see all tokens"
    return None
