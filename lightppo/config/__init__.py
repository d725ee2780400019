"""The options of a run: one section per concern, one flat flag per option.

``PPOConfig`` holds the sections; ``parse_args`` makes it from flags and YAML; ``PPOConfig.from_flat`` from any mapping.
Facts that follow from several options are in ``rules``. Loads neither torch nor transformers nor deepspeed.
"""

# ruff: noqa: F401
from lightppo.config.cli import parse_args
from lightppo.config.options import (
    AlgorithmConfig,
    CheckpointConfig,
    DataConfig,
    EngineConfig,
    EvaluationConfig,
    LoggingConfig,
    LossConfig,
    ModelConfig,
    PPOConfig,
    RewardConfig,
    RolloutConfig,
    SamplingConfig,
    StrategyConfig,
    TrainingConfig,
    VerifierConfig,
)
from lightppo.errors import ConfigError
