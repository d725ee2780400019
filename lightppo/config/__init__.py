"""Typed configuration: one dataclass per concern, one flat flag per field.

``PPOConfig`` holds the sections; ``parse_args`` makes it from flags and YAML; ``PPOConfig.from_flat`` from any mapping.
Loads neither torch nor transformers nor deepspeed.
"""

from lightppo.config.adapter_section import AdapterConfig
from lightppo.config.algorithm_sections import AlgorithmConfig, CorrectionConfig, LossConfig
from lightppo.config.cli import parse_args
from lightppo.config.engine_section import EngineConfig
from lightppo.config.ppo import PPOConfig
from lightppo.config.sampling_section import SamplingConfig
from lightppo.config.sections import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    LoggingConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    StrategyConfig,
    TrainingConfig,
)
from lightppo.config.verifier_section import VerifierConfig
from lightppo.errors import ConfigError

__all__ = [
    "AdapterConfig",
    "AlgorithmConfig",
    "CheckpointConfig",
    "ConfigError",
    "CorrectionConfig",
    "DataConfig",
    "EngineConfig",
    "EvaluationConfig",
    "LoggingConfig",
    "LossConfig",
    "ModelConfig",
    "PPOConfig",
    "RewardConfig",
    "RolloutConfig",
    "SamplingConfig",
    "StrategyConfig",
    "TrainingConfig",
    "VerifierConfig",
    "parse_args",
]
