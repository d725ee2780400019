import pytest
import torch
from transformers import DynamicCache, Lfm2Config, LlamaConfig, MistralConfig, Qwen2Config

from lightppo.rollout.decode import CPU_COLUMNS, OTHER_COLUMNS, SlotCache, can_use_slots

HEADS, WIDTH = 2, 3


def config(**changes):
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": HEADS}
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
        cache.update(column(cache.span.rows, value), column(cache.span.rows, -value), i)[0] for i in range(len(cache))
    ]
    cache.advance()
    return looked_at


def slot_cache(model_config, slots: int = 4, prompt: int = 5, most: int = 40, tight: bool = True) -> SlotCache:
    return SlotCache(model_config, slots=slots, prompt_columns=prompt, max_columns=most, tight=tight)


def test_prompts_are_right_aligned_and_repeated():
    cache, source = slot_cache(config()), prompts_cache(config(), 2, 4)
    cache.append(source, [1, 1, 0], width=3)
    for layer, prompts in zip(cache.layers, source.layers):
        keys = layer.buffers[0]
        assert torch.equal(keys[:3, :, 2:5], prompts.keys[[1, 1, 0], :, 1:])  # the last three columns of four
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
    assert (keys[:, :, 5:8, 0] == torch.tensor([7.0, 8.0, 0.0])).all()  # written, new, not in use: finite


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
        assert cache.make_room(4, 0) == 0
        step(cache, 7.0)
    assert cache.columns == 5 + more
    in_use = [layer.buffers[0][:2, :, 3:].clone() for layer in cache.layers]
    assert cache.make_room(2, 0) == 3
    assert (cache.span.first, cache.span.end) == (0, 2 + more)
    assert cache.columns > cache.span.end
    for layer, expected in zip(cache.layers, in_use):
        assert torch.equal(layer.buffers[0][:, :, : 2 + more], expected)
        assert not layer.buffers[0][:, :, 2 + more :].any()


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


def test_which_models_can():
    assert can_use_slots(LlamaConfig())
    assert can_use_slots(Qwen2Config())
    assert can_use_slots(config(sliding_window=4))
    assert not can_use_slots(Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"]))
    chunked = LlamaConfig()
    chunked.attention_chunk_size = 8
    assert not can_use_slots(chunked)
