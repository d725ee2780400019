"""Packed rows: their attention and shared prompts, and that models say the same in them."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from families.zoo import random_model
from support.far_device import FarDevice
from support.fixtures.families import COMMON, KV, Batch, Rows, batch_of, from_config
from torch import library, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Gemma2Config,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PhimoeConfig,
    PreTrainedModel,
    Qwen2Config,
)

from lightppo.models import batches, packing
from lightppo.models.actor import Actor
from lightppo.models.adapters.lora import LoraOptions, add_adapters
from lightppo.models.attention import row_attention
from lightppo.models.attention.row_attention import PACKED_SDPA, packed_attention
from lightppo.models.batches import (
    RowPlan,
    action_predictors,
    distinct_places,
    pack,
    position_ids_from_lengths,
    segments_as_mask,
    select_rows,
)
from lightppo.models.critic import Critic
from lightppo.models.packing import takes_segments, warn_that_nothing_is_shared
from lightppo.models.wrapper import compile_layers

LFM2 = Lfm2Config(**COMMON, num_key_value_heads=2, layer_types=["conv", "full_attention"])

#           left pad   prompt   response  right pad
SEQUENCES = torch.tensor([[0, 0, 11, 12, 13, 0], [21, 22, 23, 24, 25, 26]])
MASK = torch.tensor([[0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]])


def test_pack_keeps_real_tokens_in_row_order() -> None:
    row = pack(SEQUENCES, MASK)
    assert row.input_ids.tolist() == [[11, 12, 13, 21, 22, 23, 24, 25, 26]]
    assert row.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 5]]
    assert row.slots[0, 2:5].tolist() == [0, 1, 2]
    assert row.slots[1].tolist() == [3, 4, 5, 6, 7, 8]


def test_a_wholly_padded_row_takes_no_place() -> None:
    row = pack(SEQUENCES, torch.tensor([[0] * 6, [1] * 6]))
    assert row.input_ids.tolist() == [[21, 22, 23, 24, 25, 26]]


def test_packing_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="attention_mask"):
        pack(SEQUENCES, torch.zeros_like(MASK))


def test_action_predictors_of_a_packed_row() -> None:
    # lengths 3 and 4 with 1 and 2 actions: actions are places 2 | 5, 6, predicted from 1 | 4, 5; last places 2 and 6
    device = torch.device("cpu")
    assert action_predictors([3, 4], [1, 2], device).tolist() == [1, 4, 5]
    assert action_predictors([3, 4], [1, 2], device, include_last=True).tolist() == [1, 2, 4, 5, 6]
    for wrong in ([1, 4], [-1, 1], [1], 1):
        with pytest.raises(ValueError, match=r"num_actions .* \[3, 4\]"):
            action_predictors([3, 4], wrong, device)


def test_position_ids_from_lengths() -> None:
    row = torch.zeros(1, 5, dtype=torch.long)
    assert position_ids_from_lengths([2, 3], row).tolist() == [[0, 1, 0, 1, 2]]
    with pytest.raises(ValueError, match=r"packed_seq_lens .* 5 "):
        position_ids_from_lengths([2, 2], row)
    with pytest.raises(ValueError, match=r"packed_seq_lens .*\(2, 3\)"):
        position_ids_from_lengths([3, 3], torch.zeros(2, 3))


# ---------------------------------------------------------------------------------------------------------------------
# attention inside a packed row


MakeModel = Callable[..., PreTrainedModel]


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], window: int | None
) -> torch.Tensor:
    """The definition: softmax over the earlier positions of the same sequence, head by head. (1, T, H, D)"""
    total, heads = q.shape[2], q.shape[1]
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    i, j = torch.meshgrid(torch.arange(total), torch.arange(total), indexing="ij")
    seen = (owner[:, None] == owner) & (j <= i) & (i - j < (window or total))
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.transpose(2, 3)) * 0.5
    return (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("window", [None, 3])
def test_outputs_and_gradients_are_those_of_the_definition(
    kv_heads: int, window: int | None
) -> None:
    torch.manual_seed(0)
    lengths = [5, 1, 7]
    q, k, v = (torch.randn(1, h, 13, 8, requires_grad=True) for h in (4, kv_heads, kv_heads))
    out, weights = packed_attention(
        nn.Module(), q, k, v, segments_as_mask(lengths), scaling=0.5, sliding_window=window
    )
    expected = plain(q, k, v, lengths, window)
    assert weights is None
    torch.testing.assert_close(out, expected)
    factor = torch.randn_like(out)
    got = torch.autograd.grad((out * factor).sum(), (q, k, v))
    torch.testing.assert_close(got, torch.autograd.grad((expected * factor).sum(), (q, k, v)))


def continued(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: list[int],
    parents: list[int],
    window: int | None,
) -> torch.Tensor:
    """The definition: each segment behind the one it continues, by ``plain``. (1, T, H, D)"""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    outputs = []
    for i, p in enumerate(parents):
        own = list(range(starts[i], starts[i] + lengths[i]))
        before = [] if p < 0 else list(range(starts[p], starts[p] + lengths[p]))
        whole = plain(*(x[:, :, before + own] for x in (q, k, v)), [len(before) + len(own)], window)
        outputs.append(whole[:, len(before) :])
    return torch.cat(outputs, 1)


Segments = tuple[list[int], list[int]]
SEGMENTS: Segments = [3, 4, 1, 6, 2, 5], [-1, 0, 0, -1, -1, 4]


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 50])
def test_segments_continue_their_parents(kv_heads: int, window: int | None) -> None:
    torch.manual_seed(0)
    lengths, parents = SEGMENTS
    q, k, v = (torch.randn(1, h, 21, 8, requires_grad=True) for h in (4, kv_heads, kv_heads))
    mask = segments_as_mask(lengths, parents)
    assert mask.shape == (1, 1, 2, 6)
    out, _ = packed_attention(nn.Module(), q, k, v, mask, scaling=0.5, sliding_window=window)
    expected = continued(q, k, v, lengths, parents, window)
    torch.testing.assert_close(out, expected)
    factor = torch.randn_like(out)
    got = torch.autograd.grad((out * factor).sum(), (q, k, v))
    torch.testing.assert_close(got, torch.autograd.grad((expected * factor).sum(), (q, k, v)))


def lower_right(
    qkv: tuple, cu_q: torch.Tensor, cu_k: torch.Tensor, scale: float, back: int = -1
) -> torch.Tensor:
    """What torch says of its kernel for packed rows: (T, H, D) and borders; windows end at the lower right."""
    assert (cu_q.dtype, cu_k.dtype) == (torch.int32, torch.int32)
    assert len({x.shape[2] for x in qkv}) == 1
    q_lengths, k_lengths = cu_q.diff().tolist(), cu_k.diff().tolist()
    outputs = []
    parts = (x.split(n) for x, n in zip(qkv, (q_lengths, k_lengths, k_lengths)))
    for a, b, c in zip(*parts, strict=True):
        new, total = len(a), len(b)
        i, j = torch.meshgrid(torch.arange(total - new, total), torch.arange(total), indexing="ij")
        seen = (j <= i) & ((back < 0) | (i - j <= back))
        a, b, c = (x.transpose(0, 1) for x in (a, b, c))
        b, c = (x.repeat_interleave(len(a) // len(x), 0) for x in (b, c))
        scores = (a @ b.transpose(1, 2) * scale).masked_fill(~seen, float("-inf"))
        outputs.append(scores.softmax(-1) @ c)
    return torch.cat(outputs, 1).transpose(0, 1)


def kernel_2_10(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None
):
    assert (is_causal, query.shape[1]) == (True, key.shape[1])
    assert (max_q, max_k) == (cu_seq_q.diff().max(), cu_seq_k.diff().max())
    return lower_right((query, key, value), cu_seq_q, cu_seq_k, query.shape[2] ** -0.5)


def kernel_2_11(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
):
    assert window_size[1] == 0  # and fewer keys than queries, with no word about it
    return lower_right((query, key, value), cu_seq_q, cu_seq_k, scale, window_size[0])


def kernel_2_12(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
    seqused_k=None,
    block_table=None,
    num_splits=None,
):
    assert (window_size[1], query.shape[1] != key.shape[1]) == (0, enable_gqa)
    return lower_right((query, key, value), cu_seq_q, cu_seq_k, scale, window_size[0])


@pytest.fixture
def with_kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable], None]:
    """As if this torch had this kernel, and it fitted."""

    def use(kernel: Callable) -> None:
        monkeypatch.setattr(row_attention, "varlen_attn", kernel)
        monkeypatch.setattr(
            row_attention, "VARLEN_TAKES", frozenset(inspect.signature(kernel).parameters)
        )
        monkeypatch.setattr(row_attention, "flash_fits", lambda *_: True)

    return use


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("segments", [SEGMENTS, ([5, 1, 7], [-1] * 3)], ids=["shared", "alone"])
@pytest.mark.parametrize("kernel", [kernel_2_10, kernel_2_11, kernel_2_12])
@pytest.mark.parametrize("scale", [0.5, 0.3])
def test_kernels_of_a_gpu(
    kernel: Callable, segments: Segments, window: int | None, scale: float, with_kernel: Callable
) -> None:
    """The calls of torch's kernels for packed rows, of three signatures, with values narrower than keys (MLA)."""
    torch.manual_seed(0)
    lengths, parents = segments
    # 1 / sqrt(4) = 0.5: torch 2.10 takes no other
    shapes = (4, 4), (2, 4), (2, 3)
    q, k, v = (torch.randn(1, h, sum(lengths), d, requires_grad=True) for h, d in shapes)
    expected = continued(q * (scale / 0.5), k, v, lengths, parents, window)
    counted = Mock(side_effect=kernel)
    with_kernel(functools.wraps(kernel)(lambda *args, **options: counted(*args, **options)))
    mask = segments_as_mask(lengths, parents)
    out, _ = packed_attention(nn.Module(), q, k, v, mask, scaling=scale, sliding_window=window)
    assert counted.call_count == (kernel is not kernel_2_10 or (window, scale) == (None, 0.5))
    torch.testing.assert_close(out, expected)
    factor = torch.randn_like(out)
    got = torch.autograd.grad((out * factor).sum(), (q, k, v))
    torch.testing.assert_close(got, torch.autograd.grad((expected * factor).sum(), (q, k, v)))


def test_the_installed_kernel_has_a_signature_that_is_known() -> None:
    """A torch without one has none; the names are those of torch 2.10 to 2.13."""
    if row_attention.varlen_attn is None:
        assert not row_attention.VARLEN_TAKES
    else:
        q = torch.empty(1, 2, 3, 8)
        assert row_attention.varlen_options(q, None, 8**-0.5)
        assert ("enable_gqa" in row_attention.VARLEN_TAKES) <= (
            "window_size" in row_attention.VARLEN_TAKES
        )


def tensor_on_a_gpu(dtype: torch.dtype, width: int) -> Any:
    return SimpleNamespace(is_cuda=True, dtype=dtype, shape=(1, 4, 9, width))


@pytest.mark.parametrize(
    ("dtype", "widths", "capability", "fits"),
    [
        (torch.bfloat16, (64, 64), (9, 0), True),
        (torch.float16, (256, 256), (8, 0), True),
        (torch.float16, (64, 64), (7, 5), False),  # a T4
        (torch.float32, (64, 64), (9, 0), False),
        (torch.bfloat16, (512, 512), (9, 0), False),
        (torch.bfloat16, (12, 12), (9, 0), False),
        (torch.bfloat16, (64, 128), (9, 0), False),
    ],
)
def test_what_flash_attention_takes(dtype, widths, capability, fits, monkeypatch) -> None:
    """Elsewhere a GPU has fast kernels only for as many keys as queries."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(batches, "to_device", lambda x, device: x)
    plan = RowPlan([4, 5], [-1, -1], torch.device("cuda"))
    query, value = (tensor_on_a_gpu(dtype, width) for width in widths)
    assert row_attention.flash_fits(query, value, plan) == fits
    assert row_attention.takes_fewer_keys(query, value, plan, masked=False) == fits
    assert not row_attention.takes_fewer_keys(query, value, plan, masked=True)


@pytest.mark.parametrize("window", [None, 3])
def test_expanded_keys_give_the_same(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in fp32, or with a mask, on a GPU."""
    q, k, v = (torch.randn(1, h, 21, 8) for h in (4, 2, 2))
    mask = segments_as_mask(*SEGMENTS)
    expected, _ = packed_attention(nn.Module(), q, k, v, mask, sliding_window=window)
    heads: list[tuple[int, bool]] = []

    def sdpa(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, enable_gqa: bool, **options: Any
    ) -> torch.Tensor:
        heads.append((k.shape[1], enable_gqa))
        return nn.functional.scaled_dot_product_attention(q, k, v, **options)

    monkeypatch.setattr(row_attention, "takes_fewer_keys", lambda *_: False)
    monkeypatch.setattr(row_attention, "scaled_dot_product_attention", sdpa)
    out, _ = packed_attention(nn.Module(), q, k, v, mask, sliding_window=window)
    assert heads == [(4, False)] * 6
    torch.testing.assert_close(out, expected)


KINDS = {
    "actor": (Actor, AutoModelForCausalLM),
    "critic": (Critic, AutoModelForSequenceClassification),
}


def waits_of_a_step(model: Actor | Critic, batch: Batch) -> Counter[str]:
    """What waits for the GPU in one forward and backward pass."""
    sequences, mask, num_actions = batch
    with FarDevice() as far:
        far.move(model)
        sequences, mask = far.move(sequences), far.move(mask)
        model(sequences, num_actions, mask)  # the first call also looks whether sequences are apart
        far.waits.clear()
        model(sequences, num_actions, mask).sum().backward()
    return far.waits


@pytest.mark.parametrize(
    ("shared", "varlen"),
    [
        pytest.param(False, False, id="apart-by sequence"),
        pytest.param(True, True, id="shared-varlen"),
        # the other two of the four ways
        pytest.param(False, True, id="apart-varlen", marks=pytest.mark.long),
        pytest.param(True, False, id="shared-by sequence", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(
    ("kind", "reentrant"),
    [("actor", None), ("actor", False), ("actor", True), ("critic", None), ("critic", False)],
)
def test_no_layer_waits_for_the_gpu(
    kind: str, reentrant: bool | None, shared: bool, varlen: bool, with_kernel: Callable
) -> None:
    """With gradient checkpointing too; what is left is a handful for each micro batch."""
    prompts = [[5, 6, 7], [8, 9]] if not shared else [[5, 6, 7]] * 2
    batch = batch_of([(prompts[0], [10, 11]), (prompts[1], [12, 13, 14]), ([20], [21])])
    if varlen:
        with_kernel(
            lambda q, k, v, cu_q, cu_k, n, m, *, scale, window_size, enable_gqa: (
                q + 0 * (k.sum() + v.sum())
            )
        )
    waits = []
    for layers in (1, 3):
        config = LlamaConfig(**{**COMMON, "num_hidden_layers": layers}, **KV, num_labels=1)
        wrapper, family = KINDS[kind]
        model = wrapper(
            family.from_config(config, attn_implementation="sdpa"), packing_samples=True
        ).train()
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        waits.append(waits_of_a_step(model, batch))
    assert waits[0] == waits[1]
    assert 0 < waits[0].total() <= 6


@pytest.fixture
def with_flash_attn(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable], list[tuple]]:
    """As if flash-attn were there, with this kernel: borders and longest of queries and keys that each call got."""
    utils = pytest.importorskip("transformers.modeling_flash_attention_utils")
    if not hasattr(utils, "_flash_with_kvcache_fn"):
        pytest.skip("an older transformers loads flash-attn in another way")

    def use(kernel: Callable) -> list[tuple]:
        calls: list[tuple] = []

        def varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            causal, softmax_scale, dropout_p=0.0, window_size=(-1, -1),
        ):  # fmt: skip
            calls.append(((cu_seqlens_q, max_seqlen_q), (cu_seqlens_k, max_seqlen_k)))
            assert causal
            return kernel((q, k, v), cu_seqlens_q, cu_seqlens_k, softmax_scale, window_size[0])

        monkeypatch.setattr(utils, "_loaded_implementation", None)
        monkeypatch.setattr(
            utils, "_lazy_imports", lambda *_, **__: (None, varlen, None, None, None)
        )
        return calls

    return use


def flash_model(kind: str, layers: int = 2) -> Actor | Critic:
    """With --attn_implementation flash_attention_2, which transformers would refuse without a GPU."""
    config = LlamaConfig(**{**COMMON, "num_hidden_layers": layers}, **KV, num_labels=1)
    wrapper, family = KINDS[kind]
    model = wrapper(family.from_config(config), packing_samples=True)
    model.hf_model.config._attn_implementation = "flash_attention_2"
    return model


@pytest.mark.parametrize("kind", ["actor", "critic"])
@pytest.mark.parametrize(
    "rows", [[([5, 6], [10]), ([8, 9], [12, 13, 14])], [([8, 9], [12, 13])]], ids=["two", "one"]
)
def test_flash_attn_is_told_the_borders_once_for_all_layers(
    kind: str, rows: Rows, with_flash_attn: Callable
) -> None:
    calls = with_flash_attn(lower_right)
    torch.manual_seed(0)
    model, batch = flash_model(kind), batch_of(rows)
    model(batch[0], batch[2], batch[1])  # the first call also looks whether sequences are apart
    calls.clear()
    found = model(batch[0], batch[2], batch[1])
    lengths = [len(prompt) + len(response) for prompt, response in rows]
    expected = ([0, *itertools.accumulate(lengths)], max(lengths))
    assert [(cu.tolist(), longest) for call in calls for cu, longest in call] == [expected] * 4
    assert calls[0][0][0] is calls[1][0][0]
    model.layout.stop_packing()
    model.hf_model.config._attn_implementation = "sdpa"
    torch.testing.assert_close(found, model(batch[0], batch[2], batch[1]))


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("kind", ["actor", "critic"])
def test_no_layer_with_flash_attn_waits_for_the_gpu(
    kind: str, reentrant: bool | None, with_flash_attn
) -> None:
    def kernel(qkv: tuple, *_: Any) -> torch.Tensor:
        q, k, v = qkv
        return q + 0 * (k.sum() + v.sum())

    with_flash_attn(kernel)
    waits = []
    for layers in (1, 3):
        model = flash_model(kind, layers).train().bfloat16()
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        waits.append(waits_of_a_step(model, batch_of([([5, 6], [10, 11]), ([8, 9], [12, 13, 14])])))
    assert waits[0] == waits[1]
    assert 0 < waits[0].total() <= 6


@functools.cache
def varlen_operator() -> Callable:
    """A kernel that the compiler does not look into, as torch's."""

    def forward(q, k, v, cu_q, cu_k, max_q: int, max_k: int, scale: float, back: int):
        return lower_right((q, k, v), cu_q, cu_k, scale, back).contiguous()

    def backward(grad, q, k, v, cu_q, cu_k, max_q: int, max_k: int, scale: float, back: int):
        attend = lambda *qkv: lower_right(qkv, cu_q, cu_k, scale, back)  # noqa: E731
        return tuple(x.contiguous() for x in torch.func.vjp(attend, q, k, v)[1](grad))

    inputs = "Tensor q, Tensor k, Tensor v, Tensor cu_q, Tensor cu_k, SymInt n, SymInt m, float scale, SymInt back"
    op = library.custom_op(
        "lightppo_tests::varlen", forward, mutates_args=(), schema=f"({inputs}) -> Tensor"
    )
    back_op = library.custom_op(
        "lightppo_tests::varlen_backward",
        backward,
        mutates_args=(),
        schema=f"(Tensor grad, {inputs}) -> (Tensor, Tensor, Tensor)",
    )
    op.register_fake(lambda q, *_: q.new_empty(q.shape))
    back_op.register_fake(lambda grad, *args: tuple(x.new_empty(x.shape) for x in args[:3]))

    def setup(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:5])
        ctx.rest = inputs[5:]

    op.register_autograd(
        lambda ctx, grad: (*back_op(grad, *ctx.saved_tensors, *ctx.rest), *[None] * 6),
        setup_context=setup,
    )

    def kernel(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa):
        return op(q, k, v, cu_q, cu_k, max_q, max_k, scale, window_size[0])

    return kernel


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "varlen",
    [
        # test_loading.py compiles such rows too
        pytest.param(False, id="by sequence", marks=pytest.mark.long),
        pytest.param(True, id="varlen"),
    ],
)
def test_layers_are_compiled_once_for_all_rows(varlen: bool, with_kernel: Callable) -> None:
    """Without a break, for any number of sequences, with shared prompts and without."""
    if varlen:
        if row_attention.varlen_attn is None:
            pytest.skip(
                "torch before 2.10 has no kernel for packed rows, which an operator stands for"
            )
        with_kernel(varlen_operator())
    config = LlamaConfig(**{**COMMON, "num_hidden_layers": 1}, **KV)
    plain = Actor(
        AutoModelForCausalLM.from_config(config, attn_implementation="sdpa"), packing_samples=True
    )
    actor = Actor(copy.deepcopy(plain.hf_model), packing_samples=True)
    compiler = CompileCounterWithBackend("eager" if varlen else "aot_eager")
    compile_layers(actor.hf_model, backend=compiler)
    draw = random.Random(0)
    compiled = []
    for rows in (3, 5, 2):
        prompt = [draw.randrange(3, 48) for _ in range(rows)]
        batch = batch_of(
            [(prompt, [draw.randrange(3, 48)] * draw.randint(1, 6)) for _ in range(rows)]
        )
        for sequences, mask, actions in (batch, (batch[0].flip(1), batch[1].flip(1), 3)):
            results = []
            for model in (plain, actor):
                model.zero_grad()
                out = model(sequences, actions, mask)
                out.square().sum().backward()
                results.append((out, [p.grad for p in model.parameters()]))
            torch.testing.assert_close(*results, atol=1e-4, rtol=1e-3)
        compiled.append(compiler.frame_count)
    assert not counters["graph_break"]
    assert 0 < compiled[0] == compiled[-1]


def test_a_copied_mask_is_as_good() -> None:
    """As reentrant checkpointing makes of an argument that stands alone."""
    q, k, v = (torch.randn(1, 4, 21, 8) for _ in range(3))
    mask = segments_as_mask(*SEGMENTS)
    expected, _ = packed_attention(nn.Module(), q, k, v, mask, sliding_window=None)
    copy, _ = packed_attention(nn.Module(), q, k, v, mask.detach(), sliding_window=None)
    assert torch.equal(copy, expected)


def test_lengths_that_do_not_fit_are_refused() -> None:
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match=r"row of 4 .* 5"):
        packed_attention(nn.Module(), q, q, q, segments_as_mask([2, 3]), sliding_window=None)


@pytest.mark.parametrize("config", [Gemma2Config, PhimoeConfig])
def test_a_layer_that_hides_its_window_is_refused(config: type) -> None:
    q, layer = torch.randn(1, 2, 4, 8), nn.Module()
    layer.config = config(sliding_window=3)
    with pytest.raises(NotImplementedError, match="--packing_samples: Module"):
        packed_attention(layer, q, q, q, segments_as_mask([4]))


def test_a_window_that_the_config_alone_knows_is_refused(ragged: Batch) -> None:
    actor = Actor(random_model("phimoe"), packing_samples=None)
    reason = actor.layout.try_packing(torch.device("cpu"))
    assert reason.startswith("--packing_samples: PhimoeAttention does not tell its attention of")
    layer = nn.Module()
    q = torch.randn(1, 2, 4, 8)
    for config, refused in (
        ({"sliding_window": 3, "max_position_embeddings": 8}, True),
        ({"sliding_window": 8, "max_position_embeddings": 8}, False),
        ({"sliding_window": 3, "max_position_embeddings": 8, "use_sliding_window": False}, False),
        ({"sliding_window": 3, "layer_types": ["full_attention"]}, False),
    ):
        layer.config = SimpleNamespace(**config)
        with pytest.raises(NotImplementedError) if refused else nullcontext():
            packed_attention(layer, q, q, q, segments_as_mask([4]))


def test_only_sdpa_is_replaced(causal_lm: MakeModel, attention: str) -> None:
    model = Actor(causal_lm("llama", attention), packing_samples=True).hf_model
    assert takes_segments(model) == (attention == "sdpa")
    assert model.config._attn_implementation == (PACKED_SDPA if attention == "sdpa" else "eager")


def windowed(kind: str) -> PreTrainedModel:
    """Models that look back 3 tokens, in all layers or every other."""
    torch.manual_seed(0)
    configs = {
        "mistral": lambda: MistralConfig(**COMMON, **KV, sliding_window=3),
        "qwen2": lambda: Qwen2Config(
            **COMMON,
            num_key_value_heads=2,
            use_sliding_window=True,
            sliding_window=3,
            max_window_layers=1,
        ),
        "opt": lambda: OPTConfig(
            **{**COMMON, "initializer_range": 0.02},
            init_std=0.2,
            ffn_dim=48,
            word_embed_proj_dim=32,
        ),  # no window; makes no mask from position ids
        "gemma2": lambda: Gemma2Config(
            **COMMON, **KV, sliding_window=3, attn_logit_softcapping=None
        ),
    }
    return from_config(AutoModelForCausalLM, configs[kind](), "sdpa")


@pytest.mark.parametrize("kind", ["mistral", "qwen2", "gemma2", "opt"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_windows_and_gradient_checkpointing(kind: str, checkpointing: bool, ragged: Batch) -> None:
    sequences, mask, num_actions = ragged
    gradients, log_probs = [], []
    for packs in (False, True):
        actor = Actor(windowed(kind), packing_samples=packs)
        actor.train()
        if checkpointing:
            actor.gradient_checkpointing_enable()
        log_probs.append(actor(sequences, num_actions, mask))
        log_probs[-1].sum().backward()
        gradients.append([p.grad for p in actor.parameters()])
    assert takes_segments(actor.hf_model)
    torch.testing.assert_close(log_probs[0], log_probs[1], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(gradients[0], gradients[1], atol=2e-4, rtol=1e-3)


def test_no_mask_of_the_whole_row_is_made(
    causal_lm: MakeModel, classifier: MakeModel, ragged: Batch
) -> None:
    """What the layers get is as long as there are sequences, in actor and critic."""
    sequences, mask, num_actions = ragged
    seen: list[torch.Size] = []

    def note(module: nn.Module, args: tuple, kwargs: dict) -> None:
        seen.append(kwargs["attention_mask"].shape)

    for model in (
        Actor(causal_lm(), packing_samples=True),
        Critic(classifier(), packing_samples=True),
    ):
        model(sequences, num_actions, mask)  # the first call also compares packed with alone
        hook = model.hf_model.base_model.layers[0].self_attn.register_forward_pre_hook(
            note, with_kwargs=True
        )
        model(sequences, num_actions, mask)
        hook.remove()
    assert seen == [torch.Size([1, 1, 2, 4])] * 2


# ---------------------------------------------------------------------------------------------------------------------
# prompts that several samples share


def test_by_hand() -> None:
    # Row 1 has a prompt of its own that begins like the other; padding has the id 0, like row 1's last prompt token.
    row = pack(*batch_of([([5, 6], [10, 11]), ([5, 6, 0], [20]), ([5, 6], [30, 31, 32])]))
    # prompts sorted: [-1, 5, 6] before [5, 6, 0]
    assert row.input_ids.tolist() == [[5, 6, 10, 11, 30, 31, 32, 5, 6, 0, 20]]
    assert row.position_ids.tolist() == [[0, 1, 2, 3, 2, 3, 4, 0, 1, 2, 3]]
    assert row.segments[0, 0].tolist() == [[2, 2, 3, 4], [-1, 0, 0, -1]]
    assert row.slots[0, 1:5].tolist() == [0, 1, 2, 3]
    assert row.slots[1, :4].tolist() == [7, 8, 9, 10]
    assert row.slots[2, 1:6].tolist() == [0, 1, 4, 5, 6]


def test_nothing_shared() -> None:
    """The row is the same as without prompts that may be shared, in the order of the batch."""
    together = batch_of([([5, 6], [10]), ([5, 6], [10])])
    for sequences, mask, num_actions in (
        batch_of([([5, 6], [10]), ([6, 5], [10]), ([6], [5])]),
        batch_of([([9], [5]), ([6, 5], [10]), ([6], [5])]),
        batch_of([([5, 6], [10])]),
        batch_of([([], [1, 2]), ([], [1, 2])]),  # no prompt at all
        (together[0], together[1], 3),
    ):
        row, expected = pack(sequences, mask, num_actions), pack(sequences, mask)
        assert row.input_ids.tolist() == [sequences[mask.bool()].tolist()]
        assert row.segments[0, 0].tolist() == [mask.sum(1).tolist(), [-1] * len(mask)]
        for name in ("input_ids", "position_ids", "slots", "segments"):
            assert torch.equal(getattr(row, name), getattr(expected, name))


def test_a_batch_without_padding_and_rows_without_response() -> None:
    sequences = torch.tensor([[3, 4, 7], [3, 4, 8]])
    row = pack(sequences, torch.ones_like(sequences), 1)
    assert row.input_ids.tolist() == [[3, 4, 7, 8]]
    assert row.segments[0, 0].tolist() == [[2, 1, 1], [-1, 0, 0]]
    row = pack(*batch_of([([3, 4], []), ([3, 4], [7, 8]), ([3, 4], [])]))
    assert row.segments[0, 0].tolist() == [[2, 2], [-1, 0]]


def test_each_row_is_found_in_its_places() -> None:
    """Random groups: tokens and positions of every row are where its slots say, and no token stands twice."""
    draw = torch.Generator().manual_seed(0)
    number = lambda low, high: int(torch.randint(low, high, (1,), generator=draw))  # noqa: E731
    for _ in range(20):
        prompts = [[number(0, 3) for _ in range(number(1, 4))] for _ in range(3)]
        rows = [
            (prompts[number(0, 3)], [number(0, 9) for _ in range(number(1, 6))]) for _ in range(8)
        ]
        sequences, mask, actions = batch_of(rows)
        row = pack(sequences, mask, actions)
        alone = pack(sequences, mask)
        real = mask.bool()
        assert torch.equal(row.input_ids[0, row.slots[real]], sequences[real])
        assert torch.equal(row.position_ids[0, row.slots[real]], alone.position_ids[0])
        tokens = sum(map(len, {tuple(p): p for p, _ in rows}.values())) + sum(
            len(r) for _, r in rows
        )
        assert row.input_ids.shape[1] == tokens == int(row.segments[0, 0, 0].sum())
        assert sorted(set(row.slots[real].tolist())) == list(range(tokens))
        for b, (_, response) in enumerate(rows):  # a response follows itself without a gap
            own = row.slots[b, -actions:][: len(response)]
            assert own.tolist() == list(range(int(own[0]), int(own[0]) + len(response)))


def test_distinct_places_and_their_reads() -> None:
    places = torch.tensor([4, 5, 9, 4, 7])
    different, reads = distinct_places(places)
    assert reads is not None
    assert different.tolist() == [4, 5, 7, 9]
    assert torch.equal(different[reads], places)
    x = torch.randn(4, 3, requires_grad=True)
    assert torch.equal(select_rows(x, reads), x[reads])
    select_rows(x, reads).sum().backward()
    assert x.grad[:, 0].tolist() == [2, 1, 1, 1]
    once = torch.tensor([3, 1])
    assert distinct_places(once) == (once, None)
    assert select_rows(torch.tensor([1.5, 2.5]), torch.tensor([1, 1, 0])).tolist() == [
        2.5,
        2.5,
        1.5,
    ]


def test_gradients_of_reads_are_summed_in_one_order() -> None:
    """With two threads, and many rows to one place."""
    draw = torch.Generator().manual_seed(0)
    reads = torch.arange(40_000) % 3
    x, factor = torch.randn(3, 8, requires_grad=True), torch.randn(40_000, 8, generator=draw)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        gradients = [torch.autograd.grad(select_rows(x, reads), x, factor)[0] for _ in range(8)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(gradients[0], other) for other in gradients)
    expected = torch.stack([factor[reads == i].double().sum(0) for i in range(3)])
    torch.testing.assert_close(gradients[0].double(), expected, atol=1e-3, rtol=0)


# -- models that cannot tell the difference


FAMILIES = ["llama", "qwen2", "qwen3", "gemma2", "gpt2", "gpt_neox", "opt", "mixtral"]
ACTIONS = 4 + 3 + 2 + 1 + 8 + 3 + 6 + 7 + 5
SHARED_TOKENS = 9 + 5 + 1 + 6 + ACTIONS


def make(family: str, usual: MakeModel, kind: Any = AutoModelForCausalLM) -> PreTrainedModel:
    if family != "opt":
        return usual(family, "sdpa")
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_labels": 1,
    }
    config = OPTConfig(
        **sizes, vocab_size=48, max_position_embeddings=64, word_embed_proj_dim=32, init_std=0.2
    )
    return kind.from_config(config, attn_implementation="sdpa")


@pytest.fixture
def groups() -> tuple[torch.Tensor, torch.Tensor, int]:
    """Three prompts of 5, 1 and 9 tokens with 3, 2 and 3 samples in a row that mixes them, one more alone."""
    draw = torch.Generator().manual_seed(2)
    ids = lambda n: torch.randint(3, 48, (n,), generator=draw).tolist()  # noqa: E731
    long, short, middle, alone = ids(9), ids(1), ids(5), ids(6)
    rows = [(long, ids(4)), (middle, ids(3)), (short, ids(2)), (long, ids(1)), (alone, ids(8))]
    rows += [(middle, ids(3)), (long, ids(6)), (short, ids(7)), (middle, ids(5))]
    return batch_of(rows)


@contextmanager
def counted(model: Actor | Critic) -> Iterator[list[int]]:
    """Tokens of each forward."""
    tokens: list[int] = []
    hook = model.hf_model.get_input_embeddings().register_forward_hook(
        lambda module, args, output: tokens.append(args[0].numel())
    )
    try:
        yield tokens
    finally:
        hook.remove()


def scores_and_gradients(
    actor: Actor, batch: Batch, **asked: bool
) -> tuple[list[torch.Tensor], dict]:
    sequences, mask, num_actions = batch
    actor.train()
    actor.zero_grad()
    scores = actor.score_actions(
        sequences, num_actions, mask, entropy=True, entropy_grad=True, **asked
    )
    weights = torch.linspace(-1, 1, scores.log_probs.numel()).view_as(scores.log_probs)
    loss = ((scores.log_probs + 2 * scores.entropy) * weights).sum()
    values = [scores.log_probs, scores.entropy]
    if asked.get("logits"):
        values.append(scores.logits)
        loss = loss + scores.logits.square().mean(-1).sum()
    loss.div(int(scores.real.sum())).backward()
    return [v.detach() for v in values], {
        n: p.grad for n, p in actor.named_parameters() if p.grad is not None
    }


def assert_same(found: tuple[list, dict], expected: tuple[list, dict]) -> None:
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=1e-5)
    assert found[1].keys() == expected[1].keys()
    assert max(float(g.abs().max()) for g in expected[1].values()) > 1e-2
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_actor_says_the_same(
    family: str, checkpointing: bool, causal_lm: MakeModel, groups: Batch
) -> None:
    expected = scores_and_gradients(Actor(make(family, causal_lm)), groups)
    actor = Actor(make(family, causal_lm), packing_samples=True)
    if checkpointing:
        actor.gradient_checkpointing_enable()
    scores_and_gradients(actor, groups)  # the first forward also compares packed with alone
    with counted(actor) as tokens:
        found = scores_and_gradients(actor, groups)
    assert set(tokens) == {SHARED_TOKENS}
    assert_same(found, expected)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_actor_gives_the_same_logits(family: str, causal_lm: MakeModel, groups: Batch) -> None:
    expected = scores_and_gradients(Actor(causal_lm(family)), groups, logits=True)
    assert_same(
        scores_and_gradients(Actor(causal_lm(family), packing_samples=True), groups, logits=True),
        expected,
    )
    sequences, mask, num_actions = groups
    _, output = Actor(causal_lm(family), packing_samples=True)(
        sequences, num_actions, mask, return_output=True
    )
    # one for each action, also of the shared last prompt token
    assert output.logits.shape == (1, ACTIONS, 48)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("include_last", [False, True])
def test_critic_says_the_same(
    family: str, include_last: bool, classifier: MakeModel, groups: Batch
) -> None:
    sequences, mask, num_actions = groups
    results = []
    for packs in (False, True):
        critic = Critic(
            make(family, classifier, AutoModelForSequenceClassification), packing_samples=packs
        ).train()
        critic(sequences, num_actions, mask)
        with counted(critic) as tokens:
            values = critic(sequences, num_actions, mask, include_last=include_last)
        weights = torch.linspace(-1, 1, values.numel()).view_as(values)
        (values * weights).sum().div(ACTIONS).backward()
        results.append(
            (
                [values.detach()],
                {n: p.grad for n, p in critic.named_parameters() if p.grad is not None},
            )
        )
    assert tokens == [SHARED_TOKENS]
    assert_same(results[1], results[0])


def test_adapters_say_the_same(causal_lm: MakeModel, groups: Batch) -> None:
    results = []
    for packs in (False, True):
        actor = Actor(causal_lm(), packing_samples=packs)
        add_adapters(actor, LoraOptions(rank=4, alpha=8), seed=1)
        with torch.no_grad():  # adapters begin as nothing
            torch.manual_seed(3)
            for name, parameter in actor.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.2)
        results.append(scores_and_gradients(actor, groups))
    assert all("lora_" in name for name in results[0][1])
    assert_same(results[1], results[0])


def test_rows_are_shared_only_where_asked_and_possible(causal_lm: MakeModel, groups: Batch) -> None:
    sequences, mask, num_actions = groups
    real = int(mask.sum())
    cases = [
        (Actor(causal_lm(), packing_samples=True), True),
        (Actor(causal_lm(), packing_samples=True, share_prompts=False), False),
        (Actor(causal_lm()), False),
        (Actor(causal_lm(attention="eager"), packing_samples=True), False),
    ]
    for actor, shares in cases:
        actor(sequences, num_actions, mask)
        assert actor.layout.shares_prompts == shares
        with counted(actor) as tokens:
            actor(sequences, num_actions, mask)
        assert tokens == [
            SHARED_TOKENS if shares else real if actor.layout.packs else sequences.numel()
        ]
    assert real > SHARED_TOKENS


def test_an_attention_that_cannot_share_says_so_once(
    causal_lm: MakeModel, caplog: pytest.LogCaptureFixture
) -> None:
    warn_that_nothing_is_shared.cache_clear()
    for _ in range(2):
        Actor(causal_lm(attention="eager"), packing_samples=True)
    assert [
        record.getMessage() for record in caplog.records if "share_prompts" in record.getMessage()
    ] == [
        "--share_prompts needs --attn_implementation sdpa; with eager every sample brings its prompt along"
    ]
    caplog.clear()
    warn_that_nothing_is_shared.cache_clear()
    Actor(causal_lm(attention="eager"), packing_samples=True, share_prompts=False)
    Actor(causal_lm(attention="eager"))
    assert not caplog.records


def test_packing_is_tried_and_then_as_if_asked_for(
    family: str, causal_lm: MakeModel, groups: Batch
) -> None:
    sequences, mask, num_actions = groups
    tried, asked = (
        Actor(causal_lm(family, "sdpa"), packing_samples=packs) for packs in (None, True)
    )
    with torch.no_grad():
        padded = tried(sequences, num_actions, mask)
        assert not tried.layout.packs
        assert tried.layout.try_packing(torch.device("cpu")) is None
        assert tried.layout.shares_prompts
        packed = tried(sequences, num_actions, mask)
        assert torch.equal(packed, asked(sequences, num_actions, mask))
        tried.layout.stop_packing()
        assert torch.equal(tried(sequences, num_actions, mask), padded)
    torch.testing.assert_close(packed, padded, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            lambda make: make(attention="eager"),
            "--attn_implementation sdpa or flash_attention_2, not eager",
        ),
        (lambda make: AutoModelForCausalLM.from_config(LFM2), "layers of type conv"),
        (lambda make: make(), "sees its neighbour"),
    ],
)
def test_why_packing_is_not_done(
    model, reason, causal_lm: MakeModel, groups: Batch, monkeypatch
) -> None:
    """It stays padded, with the numbers of one for which it was never tried."""
    sequences, mask, num_actions = groups
    monkeypatch.setattr(packing, "why_not_by_segment", lambda model: "their code is not known")
    actor = Actor(model(causal_lm).eval(), packing_samples=None)
    with torch.no_grad():
        before = actor(sequences, num_actions, mask)
        monkeypatch.setattr("lightppo.models.packing.alike", lambda a, b: False)
        assert reason in actor.layout.try_packing(torch.device("cpu"))
        assert not actor.layout.packs
        assert torch.equal(actor(sequences, num_actions, mask), before)


def test_the_load_balancing_loss_counts_every_sample(causal_lm: MakeModel, groups: Batch) -> None:
    """Where it is asked for, prompts are not shared: it is the mean over all tokens."""
    sequences, mask, num_actions = groups
    losses = []
    for packs in (False, True):
        actor = Actor(causal_lm("mixtral"), packing_samples=packs).eval()
        losses.append(
            actor.score_actions(sequences, num_actions, mask, router_loss=True).router_loss
        )
    torch.testing.assert_close(losses[1], losses[0], atol=1e-5, rtol=1e-5)
