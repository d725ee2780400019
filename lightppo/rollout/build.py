"""From ``--rollout_engine`` to an engine: one table, whose entries import what they need."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from lightppo.config import PPOConfig
from lightppo.rollout.engine import RolloutEngine

EngineBuilder = Callable[[PPOConfig, Any, Any, Any], RolloutEngine]


def build_rollout_engine(config: PPOConfig, strategy: Any, actor: Any, tokenizer: Any) -> RolloutEngine:
    """The engine that the options ask for, with the actor's present weights. Collective.

    Args:
        config: resolved.
        strategy: of the run, set up.
        actor: prepared.
        tokenizer: of the actor.

    Raises:
        ConfigError: the engine is not installed, or cannot run this model with these options.
    """
    return ENGINES[config.engine.rollout_engine](config, strategy, actor, tokenizer)


def _hf(config: PPOConfig, strategy: Any, actor: Any, tokenizer: Any) -> RolloutEngine:
    from lightppo.rollout.hf import HFRolloutEngine

    return HFRolloutEngine(
        actor,
        tokenizer,
        micro_rollout_batch_size=config.rollout.micro_rollout_batch_size,
        gather_parameters=lambda: strategy.gathered_parameters(actor),
        progress=strategy.is_rank_0() and sys.stderr.isatty(),
    )


def _vllm(config: PPOConfig, strategy: Any, actor: Any, tokenizer: Any) -> RolloutEngine:
    from lightppo.rollout.vllm import VLLMRolloutEngine

    return VLLMRolloutEngine(config, strategy, actor, tokenizer)


def _vllm_server(config: PPOConfig, strategy: Any, actor: Any, tokenizer: Any) -> RolloutEngine:
    from lightppo.rollout.vllm_server import VLLMServerRolloutEngine

    return VLLMServerRolloutEngine(config, strategy, actor, tokenizer)


ENGINES: dict[str, EngineBuilder] = {"hf": _hf, "vllm": _vllm, "vllm_server": _vllm_server}
"""``--rollout_engine`` → builder. A further engine is one entry here and one value of the option."""
