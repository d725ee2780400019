"""``--rollout_engine``: the table of engines."""

import importlib.util

import pytest
from support.fakes import FakeStrategy

from lightppo.config import PPOConfig
from lightppo.config.options import EngineConfig
from lightppo.errors import ConfigError
from lightppo.option import type_text
from lightppo.rollout.hf import HFRolloutEngine
from lightppo.trainer.build import build_rollout_engine


def test_engines_beside_the_core_are_names_of_the_option():
    engines = type_text(EngineConfig.options()["rollout_engine"])
    assert engines == "one of hf, vllm, vllm_server, path.py:name"
    with pytest.raises(ConfigError, match="--rollout_engine: unknown name 'vlm'"):
        PPOConfig.from_flat(rollout_engine="vlm")


def test_hf(llama, tokenizer, actor_of):
    strategy = FakeStrategy(rank=1, world_size=2)
    engine = build_rollout_engine(PPOConfig(), strategy, actor_of(llama), tokenizer)
    assert isinstance(engine, HFRolloutEngine)


def test_vllm_is_asked_for_before_anything_is_done(monkeypatch, llama, tokenizer, actor_of):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config = PPOConfig.from_flat(rollout_engine="vllm")
    with pytest.raises(ConfigError, match="--rollout_engine vllm needs vLLM"):
        build_rollout_engine(config, None, actor_of(llama), tokenizer)
