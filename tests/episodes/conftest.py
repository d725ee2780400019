"""What tests of episodes share with those of whole runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.fixtures.character_models import actor_of, engine_of, llama, prompts, tokenizer
from support.tiny import sums, write_jsonl

from lightppo.config import PPOConfig

__all__ = ["actor_of", "engine_of", "llama", "prompts", "tokenizer"]


COUNTING = Path(__file__).with_name("counting.py")


@pytest.fixture
def make_episodes(make_config, tmp_path) -> Callable[..., PPOConfig]:
    """``make_episodes(**options)``: a small run whose episodes have one to three turns of at most four tokens."""
    rows = [row | {"turns": str(1 + i % 3)} for i, row in enumerate(sums(12))]
    prompts = write_jsonl(tmp_path / "episodes.jsonl", rows)

    def make(**options) -> PPOConfig:
        episodes = {
            "reward_fn": None,
            "reward_source": ["environment"],
            "prompt_data": prompts,
            "env": [f"{COUNTING}:Counting"],
            "max_turn_tokens": 4,
            "generate_max_len": 30,
            "label_key": "label",
        }
        return make_config(**episodes | options)

    return make
