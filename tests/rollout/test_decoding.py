"""Continuous batching: its cache, its attention, and the same responses as one by one."""

import contextlib
import itertools
import math
import weakref
from types import SimpleNamespace

import pytest
import torch
from support.decoders import BUILD, EOS_ID, SIZES, build, check_greedy
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    DynamicCache,
    Lfm2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Qwen2Config,
)

from lightppo.data.records import Prompt
from lightppo.models.attention.slot_layers import (
    SlotLayer,
    attention_to_slots,
    can_attend_to_slots,
    slot_attention,
)
from lightppo.models.batches import cache_argument, cheapest_parts
from lightppo.rollout import decoding as cache_module
from lightppo.rollout import hf
from lightppo.rollout.decoding import CPU_COLUMNS, OTHER_COLUMNS, SlotCache, can_use_slots
from lightppo.rollout.engine import SamplingParams
from lightppo.rollout.hf import HFRolloutEngine

HEADS, WIDTH = 2, 3


def config(**changes):
    sizes = {
        "hidden_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": HEADS,
    }
    return MistralConfig(**{**sizes, "sliding_window": None, **changes})


def prompts_cache(model_config, count: int, columns: int, seed: int = 0) -> DynamicCache:
    """As a forward over ``count`` prompts leaves it, with random states."""
    cache, generator = DynamicCache(config=model_config), torch.Generator().manual_seed(seed)
    for layer in range(2):
        cache.update(*torch.randn(2, count, HEADS, columns, WIDTH, generator=generator), layer)
    return cache


def column(rows: int, value: float) -> torch.Tensor:
    return torch.full((rows, HEADS, 1, WIDTH), value)


def step(cache: SlotCache, value: float) -> list[torch.Tensor]:
    """One forward's writes; the keys that each layer's attention looks at."""
    looked_at = [
        cache.update(column(cache.span.rows, value), column(cache.span.rows, -value), i)[0]
        for i in range(len(cache))
    ]
    cache.span.end += 1
    return looked_at


def slot_cache(
    model_config, slots: int = 4, prompt: int = 5, most: int = 40, tight: bool = True
) -> SlotCache:
    return SlotCache(
        model_config, slots=slots, prompt_columns=prompt, max_columns=most, tight=tight
    )


def test_prompts_are_right_aligned_and_repeated():
    cache, source = slot_cache(config()), prompts_cache(config(), 2, 4)
    cache.append(source, [1, 1, 0], width=3)
    for layer, prompts in zip(cache.layers, source.layers):
        keys = layer.buffers[0]
        # the last three columns of four
        assert torch.equal(keys[:3, :, 2:5], prompts.keys[[1, 1, 0], :, 1:])
        assert not keys[:3, :, :2].any()
        assert not keys[:3, :, 5:].any()


def test_a_step_writes_in_place_and_gives_views():
    cache = slot_cache(config())
    cache.append(prompts_cache(config(), 3, 5), [0, 1, 2], width=5)
    cache.span.first = 1
    before = cache.layers[0].buffers[0].data_ptr()
    keys = step(cache, 7.0)[0]
    assert keys.shape == (3, HEADS, 5, WIDTH)  # columns 1 to 5
    assert keys.untyped_storage().data_ptr() == before
    assert (keys[:, :, -1] == 7).all()
    cache.span.whole = True
    keys = step(cache, 8.0)[1]
    assert keys.shape == (3, HEADS, 5 + CPU_COLUMNS, WIDTH)
    # written, new, not in use: finite
    assert (keys[:, :, 5:8, 0] == torch.tensor([7.0, 8.0, 0.0])).all()


@pytest.mark.parametrize("window", [2, 3, 9])
def test_a_sliding_layer_gives_its_window_and_the_sizes_of_dynamic_cache(window):
    sliding = config(sliding_window=window)
    cache, plain = slot_cache(sliding), prompts_cache(sliding, 2, 5)
    cache.append(prompts_cache(sliding, 2, 5), [0, 1], width=5)
    cache.span.first = 0
    for value in range(1, 5):
        assert cache.get_mask_sizes(1, 0) == plain.get_mask_sizes(1, 0)
        assert cache.get_seq_length() == plain.get_seq_length()
        expected = [plain.update(column(2, value), column(2, -value), i)[0] for i in range(2)]
        for mine, theirs in zip(step(cache, value), expected):
            assert torch.equal(mine, theirs)


def test_rows_move_and_leave():
    cache, source = slot_cache(config()), prompts_cache(config(), 4, 5)
    cache.append(source, [0, 1, 2, 3], width=5)
    cache.span.first = 0
    cache.move_rows([3], [1], rows=3)
    assert cache.span.rows == 3
    for layer, prompts in zip(cache.layers, source.layers):
        assert torch.equal(layer.buffers[1][:3, :, :5], prompts.values[[0, 3, 2]])


@pytest.mark.parametrize("tight", [True, False])
def test_room_is_made_and_dead_columns_are_cut_off(tight):
    cache, source = slot_cache(config(), tight=tight, most=500), prompts_cache(config(), 2, 5)
    cache.append(source, [0, 1], width=5)
    cache.span.first = 3  # say row 0 begins there, and longer ones have left
    more = CPU_COLUMNS if tight else OTHER_COLUMNS
    while cache.span.end < cache.columns:
        step(cache, 7.0)
    assert cache.columns == 5 + more
    in_use = [layer.buffers[0][:2, :, 3:].clone() for layer in cache.layers]
    assert cache.make_room(2, 0) == 3
    assert (cache.span.first, cache.span.end) == (0, 2 + more)
    assert cache.columns > cache.span.end
    for layer, expected in zip(cache.layers, in_use):
        assert torch.equal(layer.buffers[0][:, :, : 2 + more], expected)
        assert not layer.buffers[0][:, :, 2 + more :].any()


def test_only_one_layer_is_held_twice_while_room_is_made(monkeypatch):
    cache = slot_cache(config())
    cache.append(prompts_cache(config(), 2, 5), [0, 1], width=5)
    cache.span.first = 0
    step(cache, 7.0)
    old_buffers = [weakref.ref(buffer) for layer in cache.layers for buffer in layer.buffers]
    assert len(old_buffers) == 4
    assert all(old() is not None for old in old_buffers)
    held, make_room = [], SlotLayer.make_room

    def watched(layer, *sizes):
        make_room(layer, *sizes)
        held.append(sum(old() is not None for old in old_buffers))

    monkeypatch.setattr(SlotLayer, "make_room", watched)
    cache.make_room(2, 0)
    assert held == [2, 0]


def test_room_before_the_rows_for_a_longer_prompt():
    cache = slot_cache(config(), prompt=2)
    cache.append(prompts_cache(config(), 1, 2), [0], width=2)
    cache.span.first = 0
    while cache.span.end < cache.columns:
        step(cache, 7.0)
    cache.span.first = cache.span.end - 4  # a young row
    assert cache.make_room(4, at_least=11) == 2 + CPU_COLUMNS - 11
    assert (cache.span.first, cache.span.end) == (7, 11)
    assert not cache.layers[0].buffers[0][:1, :, :7].any()


def test_which_models_can(monkeypatch):
    monkeypatch.setattr(cache_module, "RECURRENT_LAYERS", ())
    assert can_use_slots(LlamaConfig())
    assert can_use_slots(Qwen2Config())
    assert can_use_slots(config(sliding_window=4))
    assert not can_use_slots(
        Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"])
    )
    chunked = LlamaConfig()
    chunked.attention_chunk_size = 8
    assert not can_use_slots(chunked)
    for loops in (
        "n_recurrent_loops",
        "loop_num_passes",
    ):  # Dory's, whose forward lengthens the cache; Inkling 2's
        assert can_use_slots(LlamaConfig(**{loops: 1}))
        assert not can_use_slots(LlamaConfig(**{loops: 2}))


# ---------------------------------------------------------------------------------------------------------------------
# attention of one new token


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # CPU matrices; the kernels
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_one_new_token_as_repeated_heads(dtype, kv_heads, scaling):
    torch.manual_seed(0)
    query = torch.randn(3, 4, 1, 8, dtype=dtype)
    key, value = torch.randn(2, 3, kv_heads, 7, 8, dtype=dtype)
    hidden = torch.arange(7) < torch.tensor([0, 2, 5]).unsqueeze(1)
    mask = torch.zeros(3, 7, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)[:, None, None]
    module = SimpleNamespace(num_key_value_groups=4 // kv_heads, is_causal=True)
    output, weights = slot_attention(module, query, key, value, mask, scaling=scaling)
    repeated = (x.repeat_interleave(4 // kv_heads, dim=1) for x in (key, value))
    expected = scaled_dot_product_attention(query, *repeated, attn_mask=mask, scale=scaling)
    assert weights is None
    torch.testing.assert_close(output, expected.transpose(1, 2))


def test_prompts_and_masks_of_transformers_go_to_sdpa():
    torch.manual_seed(0)
    module = SimpleNamespace(num_key_value_groups=1, is_causal=True)
    query, key, value = torch.randn(3, 2, 4, 5, 8)
    output, _ = slot_attention(module, query, key, value, None)
    causal = scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(output, causal.transpose(1, 2))
    seen = torch.tensor([[True, True, False, True, True], [False, True, True, True, True]])[
        :, None, None
    ]
    output, _ = slot_attention(module, query[:, :, :1], key, value, seen)
    expected = scaled_dot_product_attention(query[:, :, :1], key, value, attn_mask=seen)
    torch.testing.assert_close(output, expected.transpose(1, 2))


def test_attention_comes_back_after_an_error(llama):
    assert can_attend_to_slots(llama, llama.config)
    before = llama.config._attn_implementation
    with contextlib.suppress(ZeroDivisionError), attention_to_slots(llama.config):
        assert llama.config._attn_implementation != before
        raise ZeroDivisionError
    assert llama.config._attn_implementation == before


def test_other_attention_is_left_alone(llama):
    llama.set_attn_implementation("eager")
    assert not can_attend_to_slots(llama, llama.config)


# ---------------------------------------------------------------------------------------------------------------------
# decoding in slots


@pytest.fixture
def generate(tokenizer, actor_of):
    def run(model, prompts, slots: int, on_finished=lambda rollouts: None, **sampling):
        engine = HFRolloutEngine(actor_of(model), tokenizer, micro_rollout_batch_size=slots)
        return engine.generate(prompts, SamplingParams(**sampling), on_finished), engine.last_stats

    return run


def by_key(rollouts):
    return {(r.prompt.index, r.sample_index): r.response_ids for r in rollouts}


def full_logits(model, ids: list[int]) -> torch.Tensor:
    """By one forward without padding or cache, (S, V)."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        *((name, "sdpa") for name in BUILD),
        ("gemma2", "eager"),
        pytest.param("llama", "eager", marks=pytest.mark.long),  # gemma2 has what llama has
    ],
)
class TestEveryKindOfModel:
    def test_greedy_equals_generate_with_slots_filled_again(
        self, name, attention, generate, prompts
    ):
        model = build(name, attention)
        rollouts, stats = generate(model, prompts, 3, max_new_tokens=40, temperature=0.0)
        assert model.config._attn_implementation == attention
        lengths = [len(r.response_ids) for r in rollouts]
        assert stats["decode_steps"] < sum(lengths)
        check_greedy(model, rollouts, new_tokens=40)

    def test_samples_do_not_depend_on_slots_and_have_the_log_probs_of_a_full_forward(
        self, name, attention, generate, prompts
    ):
        model = build(name, attention)
        prompts, sampling = prompts[:6], {"max_new_tokens": 30, "n": 3, "seed": 4}
        rollouts, _ = generate(model, prompts, 4, **sampling)
        # rows come and go at different times
        assert len({len(r.response_ids) for r in rollouts}) > 1
        for slots in (1, 18):
            assert by_key(generate(model, prompts[::-1], slots, **sampling)[0]) == by_key(rollouts)
        for rollout in rollouts:
            prompt, response = rollout.prompt.token_ids, rollout.response_ids
            log_probs = full_logits(model, prompt + response)[len(prompt) - 1 : -1].log_softmax(-1)
            expected = log_probs.gather(1, torch.tensor(response).unsqueeze(1)).squeeze(1)
            torch.testing.assert_close(torch.tensor(rollout.log_probs), expected, atol=1e-4, rtol=0)


def test_the_same_responses_as_in_micro_batches(generate, prompts, llama, monkeypatch):
    sampling = {"max_new_tokens": 20, "n": 2, "seed": 4}
    in_slots, stats = generate(llama, prompts, 3, **sampling)
    monkeypatch.setattr(hf, "can_use_slots", lambda config: False)
    in_batches, of_batches = generate(llama, prompts, 3, **sampling)
    assert by_key(in_batches) == by_key(in_slots)
    # its rows wait for each other, and a prompt runs once for each sample
    assert of_batches["decode_positions"] > stats["decode_positions"]


def test_views_of_wide_buffers_as_on_a_gpu(generate, prompts, monkeypatch):
    """The other layout: buffers grow by much and attention gets what is in use."""
    model = build("qwen2")
    sampling = {"max_new_tokens": 40, "n": 3, "seed": 4}
    expected, _ = generate(model, prompts, 4, **sampling)
    made, masks = [], []
    init, step_mask = SlotCache.__init__, cache_module.SlotDecoder._step_mask

    def loose(self, config, **options):
        init(self, config, **{**options, "tight": False})
        made.append(self)

    def kept(self):
        masks.append(step_mask(self))
        return masks[-1]

    monkeypatch.setattr(SlotCache, "__init__", loose)
    monkeypatch.setattr(cache_module.SlotDecoder, "_step_mask", kept)
    monkeypatch.setattr(cache_module, "OTHER_COLUMNS", 4)
    assert by_key(generate(model, prompts, 4, **sampling)[0]) == by_key(expected)
    assert not made[0].span.whole
    assert {len(mask) for mask in masks} == {1, 2, 3, 4}
    assert all(mask.storage_offset() == 0 for mask in masks)  # read in pieces of 16 bytes
    # where a row is no multiple of 8, torch makes another mask
    assert all(mask.stride(0) == mask.shape[3] for mask in masks)


@pytest.mark.gpu
def test_rows_leave_one_by_one_on_a_gpu(generate, prompts):
    """At the end a row is alone, whose first column is not the first of all."""
    model = build("qwen2").to("cuda", torch.bfloat16)
    rollouts, _ = generate(model, prompts, 64, max_new_tokens=60, n=5, seed=4)
    assert len(rollouts) == 5 * len(prompts)
    assert all(math.isfinite(value) for rollout in rollouts for value in rollout.log_probs)


def test_history_follows_its_row(generate, prompts):
    """Penalties and bans look at the right ids, whatever row and column they have moved to."""
    model = build("llama")
    sampling = {
        "max_new_tokens": 40,
        "n": 2,
        "seed": 4,
        "repetition_penalty": 1.3,
        "bad_words": ("ab", "c"),
    }
    sampling |= {"presence_penalty": 0.5, "frequency_penalty": 0.3}
    alone, _ = generate(model, prompts, 1, **sampling)
    for slots in (3, 7):
        assert by_key(generate(model, prompts, slots, **sampling)[0]) == by_key(alone)


def test_minimum_length_and_stop_strings_per_row(generate, prompts):
    model = build("llama")
    sampling = {"max_new_tokens": 40, "n": 3, "min_new_tokens": 5, "stop": ("a", "7"), "seed": 2}
    alone, _ = generate(model, prompts, 1, **sampling)
    assert min(len(r.response_ids) for r in alone) == 6
    rollouts, _ = generate(model, prompts, 4, **sampling)
    assert by_key(rollouts) == by_key(alone)
    assert [r.response_text for r in rollouts] == [r.response_text for r in alone]


def test_first_token_temperature_acts_on_first_tokens_only(generate, prompts):
    model = build("llama")
    sampling = {"max_new_tokens": 20, "n": 4, "seed": 2}
    plain, _ = generate(model, prompts, 5, **sampling)
    heated, _ = generate(model, prompts, 5, **sampling, first_token_temperature=3.0)
    same_first = [(p, h) for p, h in zip(plain, heated) if p.response_ids[0] == h.response_ids[0]]
    assert 0 < len(same_first) < len(plain)
    assert all(p.response_ids == h.response_ids for p, h in same_first)


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Statistic and its 99.9 % bound (Wilson-Hilferty)."""
    df = len(expected) - 1
    bound = df * (1 - 2 / (9 * df) + 3.09 * math.sqrt(2 / (9 * df))) ** 3
    return ((counts - expected) ** 2 / expected).sum().item(), bound


def test_distribution_of_whole_responses_with_slots_filled_again(generate, tokenizer):
    """Every response of up to three tokens over a vocabulary of 4, against its probability by the model."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(**{**SIZES, "vocab_size": 4, "initializer_range": 0.1})
    ).eval()
    prompt, n = Prompt("x", [3, 2, 3, 0, 2]), 6000
    rollouts, stats = generate(model, [prompt], 64, max_new_tokens=3, n=n, seed=9)
    # the prompt once; the last token of a response is not needed
    assert stats["decode_positions"] < 5 + 2 * n
    probabilities = {}
    for length in (1, 2, 3):
        for response in itertools.product(range(4), repeat=length):
            ended = response[-1] == EOS_ID or length == 3
            if EOS_ID in response[:-1] or not ended:
                continue
            log_probs = full_logits(model, [*prompt.token_ids, *response])[4:-1].log_softmax(-1)
            probabilities[response] = sum(
                log_probs[i, token].item() for i, token in enumerate(response)
            )
    responses = list(probabilities)
    expected = n * torch.tensor([probabilities[r] for r in responses]).exp()
    assert expected.sum().item() == pytest.approx(n, rel=1e-4)
    assert expected.min() > 5
    counts = torch.zeros(len(responses))
    for rollout in rollouts:
        counts[responses.index(tuple(rollout.response_ids))] += 1
    statistic, bound = chi_square(counts, expected)
    assert statistic < bound
    uneven = expected * torch.linspace(0.8, 1.2, len(expected))
    statistic, bound = chi_square(counts, uneven / uneven.sum() * n)
    assert statistic > bound  # the test would see probabilities that are off by up to a fifth


class TestWork:
    """What goes through the model, counted."""

    def watch(self, model) -> tuple[list[int], list[int]]:
        """Positions of each forward over prompts, and of each over new tokens, as they come."""
        prompts, steps = [], []

        def hook(_, args, kwargs):
            counted = steps if isinstance(kwargs[cache_argument(model)], SlotCache) else prompts
            counted.append(kwargs["input_ids"].numel())

        model.register_forward_pre_hook(hook, with_kwargs=True)
        return prompts, steps

    def test_little_more_than_the_real_tokens(self, generate, prompts):
        model = build("llama")
        in_prompts, in_steps = self.watch(model)
        rollouts, stats = generate(model, prompts, 8, max_new_tokens=40, n=8)
        # Each prompt once, and of each response all but the last token, which nothing is predicted from.
        real = sum(len(p.token_ids) for p in prompts) + sum(
            len(r.response_ids) - 1 for r in rollouts
        )
        assert stats["decode_positions"] == sum(in_prompts) + sum(in_steps)
        assert stats["decode_steps"] == len(in_prompts) + len(in_steps)
        assert real <= stats["decode_positions"] <= 1.1 * real

    def test_slots_are_filled_while_prompts_wait(self, generate, prompts):
        model = build("llama")
        _, steps = self.watch(model)
        rollouts, _ = generate(model, prompts, 8, max_new_tokens=40, n=8)
        tail = 40  # no prompt waits any more in the last steps
        assert all(rows == 8 for rows in steps[:-tail])
        assert len(steps) <= sum(len(r.response_ids) for r in rollouts) / 8 + tail

    def test_columns_stay_with_the_longest_row(self, generate, prompts, monkeypatch):
        widths = []
        make_room = SlotCache.make_room

        def watched(self, slots, at_least):
            widths.append(self.columns)
            return make_room(self, slots, at_least)

        monkeypatch.setattr(SlotCache, "make_room", watched)
        rollouts, stats = generate(build("llama"), prompts, 4, max_new_tokens=40, n=8)
        assert stats["decode_steps"] > 3 * max(widths)
        longest = max(len(r.prompt.token_ids) + len(r.response_ids) for r in rollouts)
        assert max(widths) <= longest + 2 * cache_module.CPU_COLUMNS


def test_rollouts_are_reported_once_and_early(generate, prompts):
    reported, left = [], []

    def on_finished(rollouts):
        reported.extend(rollouts)
        left.append(40 - len(reported))

    rollouts, _ = generate(build("llama"), prompts, 8, on_finished, max_new_tokens=30, n=4)
    assert {id(r) for r in reported} == {id(r) for r in rollouts}
    assert len(reported) == 40
    assert left[0] > 30
    assert left[-1] == 0


@pytest.mark.parametrize(
    ("lengths", "call_cost", "expected"),
    [
        ([9, 9, 9], 5, [(0, 3)]),
        ([100, 99, 10, 9], 50, [(0, 2), (2, 4)]),
        ([100, 99, 10, 9], 1000, [(0, 4)]),
        ([64, 8], 50, [(0, 1), (1, 2)]),
        ([], 5, []),
    ],
)
def test_prompts_of_like_length_share_a_forward(lengths, call_cost, expected):
    assert cheapest_parts(lengths, call_cost) == expected
