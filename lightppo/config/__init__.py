"""Typed configuration: one dataclass per concern, one flat flag per field.

``PPOConfig`` holds the sections; ``parse_args`` makes it from flags and YAML; ``PPOConfig.from_flat`` from any mapping.
Loads neither torch nor transformers nor deepspeed.
"""

from lightppo.config.cli import parse_args as parse_args
from lightppo.config.fields import ConfigError as ConfigError
from lightppo.config.ppo import PPOConfig as PPOConfig
from lightppo.config.sections import (
    AlgorithmConfig as AlgorithmConfig,
)
from lightppo.config.sections import (
    CheckpointConfig as CheckpointConfig,
)
from lightppo.config.sections import (
    DataConfig as DataConfig,
)
from lightppo.config.sections import (
    EvaluationConfig as EvaluationConfig,
)
from lightppo.config.sections import (
    LoggingConfig as LoggingConfig,
)
from lightppo.config.sections import (
    ModelConfig as ModelConfig,
)
from lightppo.config.sections import (
    RewardConfig as RewardConfig,
)
from lightppo.config.sections import (
    RolloutConfig as RolloutConfig,
)
from lightppo.config.sections import (
    StrategyConfig as StrategyConfig,
)
from lightppo.config.sections import (
    TrainingConfig as TrainingConfig,
)

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "ConfigError",
    "DataConfig",
    "EvaluationConfig",
    "LoggingConfig",
    "ModelConfig",
    "PPOConfig",
    "RewardConfig",
    "RolloutConfig",
    "StrategyConfig",
    "TrainingConfig",
    "parse_args",
]
