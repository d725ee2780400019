"""Decoding with recurrent states in slots: transformers' greedy tokens, whatever rows come and go."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.decoders import check_greedy
from support.fixtures.character_models import EOS_ID
from support.hybrids import HYBRIDS, hybrid
from transformers import PreTrainedModel

from lightppo.rollout import decoding as slots_module
from lightppo.rollout.decoding import can_use_slots
from lightppo.rollout.engine import SamplingParams
from lightppo.rollout.hf import HFRolloutEngine

pytestmark = pytest.mark.skipif(
    not slots_module.RECURRENT_LAYERS,
    reason="this transformers decodes recurrent layers in batches",
)
DECODED = [name for name in HYBRIDS if name != "bamba_slow"]


def decoding(name: str) -> PreTrainedModel:
    """Of the tokenizer's 30 ids."""
    sizes = {"vocab_size": 30, "eos_token_id": EOS_ID, "bos_token_id": None}
    return hybrid(name, **sizes, initializer_range=0.3)


@pytest.fixture
def generate(tokenizer, actor_of) -> Callable:
    def run(model: PreTrainedModel, prompts: list, slots: int, **sampling) -> tuple:
        engine = HFRolloutEngine(actor_of(model), tokenizer, micro_rollout_batch_size=slots)
        return engine.generate(prompts, SamplingParams(**sampling)), engine.last_stats

    return run


def by_key(rollouts: list) -> dict[tuple, list[int]]:
    return {(r.prompt.index, r.sample_index): r.response_ids for r in rollouts}


@pytest.mark.parametrize("name", DECODED)
def test_greedy_equals_generate(name: str, generate: Callable, prompts: list) -> None:
    """Three slots for seven prompts of different lengths, filled again as responses end."""
    model = decoding(name)
    assert can_use_slots(model.config)
    rollouts, stats = generate(model, prompts[:7], 3, max_new_tokens=16, temperature=0.0)
    lengths = [len(r.response_ids) for r in rollouts]
    assert stats["decode_steps"] < sum(lengths)
    check_greedy(model, rollouts, new_tokens=16)


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2", "falcon_h1", "jamba"])
def test_samples_are_those_of_whole_batches(
    name: str, generate: Callable, prompts: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeds give the tokens that they gave without slots, and each prompt runs once for its samples."""
    model = decoding(name)
    prompts = prompts[:6]
    sampling = {"max_new_tokens": 25, "n": 3, "seed": 4}
    rollouts, stats = generate(model, prompts, 4, **sampling)
    assert len({len(r.response_ids) for r in rollouts}) > 1  # rows come and go at different times
    new = sum(len(r.response_ids) - 1 for r in rollouts)
    real = sum(len(p.token_ids) for p in prompts) + new
    assert stats["decode_positions"] <= 1.2 * real
    monkeypatch.setattr(slots_module, "RECURRENT_LAYERS", ())
    assert not can_use_slots(model.config)
    expected, _ = generate(model, prompts, 18, **sampling)
    assert by_key(rollouts) == by_key(expected)
