"""``--batch_invariant``: what the actor says of a token does not depend on the batch around it, to the last bit.

On a CPU the order of a sum depends on the shape of the batch. Here every product is made of calls of one shape: so many
rows at a time, and keys in blocks from the beginning of a sequence (the idea: He et al. 2025, Thinking Machines,
"Defeating Nondeterminism in LLM Inference"). Rows and keys that fill a block up change nothing. Then sampling, a pass
over the rollout and a training pass give the same log probs: packed or padded, with shared prompts or without, with any
number of slots and any micro batch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
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


def by_rows(multiply: Callable[[Tensor], Tensor], operand: Tensor, dim: int = 0) -> Tensor:
    """Multiply in calls of ``ROWS`` rows along ``dim``."""
    outputs = [multiply(fill_up(part, dim, ROWS)) for part in operand.split(ROWS, dim)]
    return torch.cat(outputs, dim).narrow(dim, 0, operand.shape[dim]).contiguous()


def fill_up(tensor: Tensor, dim: int, unit: int) -> Tensor:
    """Add zeros at the end of ``dim``, to a multiple of ``unit``."""
    if missing := -tensor.shape[dim] % unit:
        return pad(tensor, (0, 0) * (tensor.dim() - 1 - dim) + (0, missing))
    return tensor


def mm(left: Tensor, right: Tensor) -> Tensor:
    if len(left):
        return by_rows(lambda rows: _aten.mm.default(rows, right), left)
    return _aten.mm.default(left, right)


def addmm(
    bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    if bias.dim() != 1 or beta != 1 or alpha != 1 or not len(left):
        return _aten.add.Tensor(bias * beta, mm(left, right) * alpha)
    return by_rows(lambda rows: _aten.addmm.default(bias, rows, right), left)


def bmm(left: Tensor, right: Tensor) -> Tensor:
    if left.shape[2] == 1:  # no sum: rotary angles
        return _aten.bmm.default(left, right)
    return by_rows(lambda rows: _aten.bmm.default(rows, right), left, dim=1)


def grouped_mm(
    left: Tensor, right: Tensor, offs: Tensor, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """Multiply rows of each expert by its weight: (T, K), (E, K, N), ends of the groups (E,) -> (T, N)."""
    if bias is not None or left.dim() != 2 or right.dim() != 3:
        raise NotImplementedError("--batch_invariant: experts that are multiplied in this way")
    output = left.new_zeros(len(left), right.shape[2], dtype=out_dtype)
    group_start = 0
    for weight, group_end in zip(right, offs.tolist()):
        if group_end > group_start:
            output[group_start:group_end] = mm(left[group_start:group_end], weight)
        group_start = group_end
    return output


def onednn_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None, *_: Any) -> Tensor:
    flat_rows = hidden.reshape(-1, hidden.shape[-1])
    output = mm(flat_rows, weight.t()) if bias is None else addmm(bias, flat_rows, weight.t())
    return output.view(*hidden.shape[:-1], -1)


# -- functions of one number ------------------------------------------------------------------------------------------


def in_vectors(function: Callable[[Tensor], Tensor], numbers: Tensor) -> Tensor:
    """Apply a function to each number, by vector code alone: each thread's part is whole units."""
    flat_numbers = numbers.contiguous().view(-1)
    unit_size = UNIT * torch.get_num_threads()
    piece_size = max(ONE_THREAD - ONE_THREAD % unit_size, unit_size)
    # torch gives each thread at least this many elements. With fewer than that for all threads, it takes only some of
    # them.
    results = []
    if len(flat_numbers) >= ONE_THREAD * torch.get_num_threads():
        whole_count = len(flat_numbers) - len(flat_numbers) % unit_size
        results.append(function(flat_numbers[:whole_count]))
        flat_numbers = flat_numbers[whole_count:]
    for part in flat_numbers.split(piece_size):
        results.append(function(fill_up(part, 0, unit_size))[: len(part)])
    return torch.cat(results).view(numbers.shape)


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
    """Attend (B, H, L, D), (B, H_kv, S, D) twice -> (B, H, L, D), and log Σ e^score (B, H, L).

    The mask (B, 1, L, S) is added to the scores. A row's first key is the first that its last query sees; from there on
    its keys go in blocks.
    """
    rows, _, length, _ = query.shape
    mask = attn_mask
    if mask is not None:
        if mask.dim() == 2:
            mask = mask[None, None]
        mask = mask.expand(rows, mask.shape[1], length, mask.shape[3])
        key, value, mask = from_first_key(key, value, mask)
    block_size = KEYS[query.dtype]
    key_count = key.shape[2]
    key = fill_up(key, 2, block_size)
    value = fill_up(value, 2, block_size)
    outputs = []
    log_sums = []
    for start in range(0, length, QUERIES_AT_ONCE):
        query_block = query[:, :, start : start + QUERIES_AT_ONCE]
        query_count = query_block.shape[2]
        query_block = fill_up(query_block, 2, QUERIES)
        if mask is not None:
            missing = (0, -key_count % block_size, 0, query_block.shape[2] - query_count)
            added_mask = pad(mask[:, :, start : start + query_count], missing, value=HIDDEN)
            columns = key.shape[2]
        else:
            queries = query_block.shape[2]
            last_key = key_count
            if is_causal:
                last_key = min(start + queries, key_count)
            columns = last_key + -last_key % block_size
            added_mask = hidden(start, queries, key_count, columns, is_causal, query.dtype)
        output, log_sum = _aten._scaled_dot_product_flash_attention_for_cpu.default(
            query_block,
            key[:, :, :columns],
            value[:, :, :columns],
            dropout,
            False,
            attn_mask=added_mask.expand(rows, added_mask.shape[1], -1, -1),
            scale=scale,
        )
        outputs.append(output[:, :, :query_count])
        log_sums.append(log_sum[:, :, :query_count])
    output, log_sum = (
        torch.cat(blocks, 2).transpose(1, 2).contiguous().transpose(1, 2)
        for blocks in (outputs, log_sums)
    )
    return output, log_sum


@lru_cache(maxsize=64)
def hidden(
    start: int, queries: int, seen: int, columns: int, is_causal: bool, dtype: torch.dtype
) -> Tensor:
    """Return the mask (1, 1, queries, columns) of queries from place ``start`` on, of ``seen`` keys."""
    key_places = torch.arange(columns)
    is_hidden = (key_places >= seen).expand(queries, columns)
    if is_causal:
        is_hidden = is_hidden | (key_places > start + torch.arange(queries)[:, None])
    return torch.zeros(queries, columns, dtype=dtype).masked_fill(is_hidden, HIDDEN)[None, None]


def from_first_key(key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Move each row's keys so that the first that its last query sees is column 0."""
    mask = mask.clamp(min=HIDDEN)
    first_keys = (mask[:, 0, -1] > HIDDEN / 2).to(torch.uint8).argmax(1).tolist()  # (B,)
    if not any(first_keys):
        return key, value, mask
    moved_tensors = []
    for tensor, dim, fill_value in ((key, 2, 0.0), (value, 2, 0.0), (mask, 3, HIDDEN)):
        seen_part = tensor.narrow(dim, min(first_keys), tensor.shape[dim] - min(first_keys))
        shifted = torch.full_like(seen_part, fill_value, memory_format=torch.contiguous_format)
        for row, (first_key, source_row) in enumerate(zip(first_keys, tensor)):
            length = source_row.shape[dim - 1] - first_key
            shifted[row].narrow(dim - 1, 0, length).copy_(
                source_row.narrow(dim - 1, first_key, length)
            )
        moved_tensors.append(shifted)
    key, value, mask = moved_tensors
    return key, value, mask


# -- the mode ---------------------------------------------------------------------------------------------------------

HANDLED: dict[Any, Callable[..., Any]] = {
    _aten.mm.default: mm,
    _aten.addmm.default: addmm,
    _aten.bmm.default: bmm,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: attention,
}
if hasattr(_aten, "_grouped_mm"):  # torch 2.6 lacks it
    HANDLED[_aten._grouped_mm.default] = grouped_mm
if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
    HANDLED[torch.ops.mkldnn._linear_pointwise.default] = onednn_linear
# Exact, whatever code computes them: one rounding.
_EXACT = {"abs", "neg", "relu", "sqrt", "reciprocal", "add", "sub", "mul", "div", "clamp"}
_EXACT |= {"clone", "fill", "masked_fill", "where", "zero", "bitwise_not", "logical_not"}
_EXACT |= {"eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "ceil", "floor", "round", "square"}
# Sums whose order is not known here.
_UNKNOWN = {"convolution", "baddbmm", "addbmm", "_scaled_grouped_mm", "_fused_sdp_choice"}
_UNKNOWN |= {"_safe_softmax"}  # of attention that is not the kernel above


@cache
def takes_grouped_keys() -> bool:
    """Tell whether torch's kernel for CPUs takes fewer heads of keys than of queries; 2.6 computes these otherwise."""
    query, key = torch.zeros(1, 2, 8, 8), torch.zeros(1, 1, 8, 8)
    return bool(torch._fused_sdp_choice(query, key, key, is_causal=True, enable_gqa=True))


class RepeatedKeys(TorchFunctionMode):
    """While it is entered, attention gets as many heads of keys as of queries."""

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        arguments: tuple = (),
        options: dict[str, Any] | None = None,
    ) -> Any:
        options = dict(options or {})
        if function is scaled_dot_product_attention and options.pop("enable_gqa", False):
            query, *keys_and_values = arguments[:3]
            repeats = query.shape[1] // keys_and_values[0].shape[1]
            repeated = [tensor.repeat_interleave(repeats, 1) for tensor in keys_and_values]
            arguments = (query, *repeated, *arguments[3:])
        return function(*arguments, **options)


class BatchInvariant(TorchDispatchMode):
    """While it is entered, operators give each row what they give it in any other batch."""

    def __enter__(self) -> BatchInvariant:
        self.repeated_keys = nullcontext() if takes_grouped_keys() else RepeatedKeys()
        self.repeated_keys.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.repeated_keys.__exit__(*error)

    def __torch_dispatch__(
        self,
        operator: Any,
        types: Any,
        arguments: tuple = (),
        options: dict[str, Any] | None = None,
    ) -> Any:
        return way_of(operator)(operator, arguments, options or {})


@cache
def way_of(operator: Any) -> Callable[..., Any]:
    """Return how an operator runs: a function of it, its arguments and its keyword arguments."""
    operator_name = operator.overloadpacket.__name__
    if operator in HANDLED:
        return lambda operator, args, kwargs: HANDLED[operator](*args, **kwargs)
    if operator_name in _UNKNOWN or operator.namespace == "lightppo":
        raise NotImplementedError(
            f"--batch_invariant: leave it out: the order of sums of {operator} is not known"
        )
    if torch.Tag.pointwise in operator.tags and operator_name.rstrip("_") not in _EXACT:
        return of_each_number
    return lambda operator, args, kwargs: operator(*args, **kwargs)


def of_each_number(operator: Any, arguments: tuple, options: dict[str, Any]) -> Tensor:
    """Apply a function of one tensor by :func:`in_vectors`; those of several are sums or products, and exact."""
    tensors = [value for value in (*arguments, *options.values()) if isinstance(value, Tensor)]
    if len(tensors) > 1 or not arguments[0].is_floating_point():
        return operator(*arguments, **options)
    if not operator._schema.is_mutable:
        return in_vectors(lambda part: operator(part, *arguments[1:], **options), arguments[0])
    new_values = in_vectors(
        lambda part: operator(part.clone(), *arguments[1:], **options), arguments[0]
    )
    return arguments[0].copy_(new_values)


# not empty while a forward pass of a model runs in this way
entered_modes: list[BatchInvariant] = []


def enter(module: nn.Module, arguments: Any) -> None:
    entered_modes.append(BatchInvariant().__enter__())


def leave(module: nn.Module, arguments: Any, output: Any) -> None:
    if entered_modes:
        entered_modes.pop().__exit__(None, None, None)


def make_invariant(model: nn.Module, device: torch.device) -> None:
    """Enter :class:`BatchInvariant` around each forward pass of the model.

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
    """Return why the sums of a model cannot be put in order; None: they can."""
    if device.type != "cpu":
        return "it works on a CPU alone so far"
    config = model.config.get_text_config(decoder=True)
    if config._attn_implementation not in ("sdpa", PACKED_SDPA):
        return f"it needs sdpa attention, and the model has {config._attn_implementation}"
    dtype = next(model.parameters()).dtype
    if dtype not in KEYS:
        return f"it needs bfloat16, float16 or float32, not {dtype}"
    layer_kinds = set(getattr(config, "layer_types", None) or ())
    sliding_window = getattr(config, "sliding_window", None)
    if layer_kinds - {"full_attention"} or (sliding_window and not layer_kinds):
        return "the model has layers that do not see all tokens"
    return None
