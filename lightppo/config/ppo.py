"""PPOConfig: all sections of a run, flat access by flag name, resolved defaults, checks between options."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from lightppo.config import rules
from lightppo.config.fields import ConfigError, nearest, option, out_of_range, section
from lightppo.config.sections import (
    AlgorithmConfig,
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


@section
class FileConfig:
    """Options from a file."""

    config: str | None = option(None, "YAML file with options; flags on the command line win.", resume_safe=True)


@dataclass
class PPOConfig:
    """Everything a PPO run needs. Field names are unique over all sections, so each is also one flat flag.

    ``PPOConfig.from_flat(pretrain="...", prompt_data="...")`` builds one in code, ``parse_args`` from the command line.
    """

    file: FileConfig = field(default_factory=FileConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    @classmethod
    def from_flat(cls, values: Mapping[str, Any] | None = None, **more: Any) -> Self:
        """Build from flag names and values.

        Raises:
            ConfigError: on an unknown name (the nearest known one is given) or a value out of range.
        """
        return cls().with_options(**{**(values or {}), **more})

    def with_options(self, **values: Any) -> Self:
        """A copy with some options replaced; lists become tuples.

        Raises:
            ConfigError: on an unknown name or a value out of range.
        """
        homes = {f.name: section_name for section_name, f in _fields()}
        changed: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            if name not in homes:
                raise ConfigError(f"unknown option {name!r}{nearest(name, homes)}")
            changed.setdefault(homes[name], {})[name] = tuple(value) if isinstance(value, list) else value
        sections = {s: dataclasses.replace(getattr(self, s), **values) for s, values in changed.items()}
        config = dataclasses.replace(self, **sections)
        if problems := config.range_problems():
            raise ConfigError("\n".join(problems))
        return config

    def flat(self) -> dict[str, Any]:
        """All options by flag name."""
        return {f.name: getattr(getattr(self, s), f.name) for s, f in _fields()}

    def range_problems(self) -> list[str]:
        """One message per option outside its range."""
        found = (out_of_range(f.name, getattr(getattr(self, s), f.name), f) for s, f in _fields())
        return [problem for problem in found if problem]

    def validate(self, world_size: int = 1) -> None:
        """Check ranges and combinations of options.

        Args:
            world_size: number of ranks, for the batch sizes.

        Raises:
            ConfigError: with every problem found, one per line, each saying what to set.
        """
        if problems := self.range_problems() + rules.contradictions(self, world_size):
            raise ConfigError("\n".join(problems))

    def resolved(self) -> Self:
        """A copy in which every "None means …" default is replaced by what it means. Idempotent."""
        return self.with_options(**rules.resolutions(self))


def _fields() -> Iterator[tuple[str, dataclasses.Field]]:
    """(section name, option) for every option."""
    for home in dataclasses.fields(PPOConfig):
        for f in dataclasses.fields(home.default_factory):
            yield home.name, f


def unsafe_changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[dict[str, tuple], dict[str, tuple]]:
    """Compare a resumed run's options with those it was started with.

    Returns:
        (refused, safe): for each option that changed, (old, new).
    """
    refused, safe = {}, {}
    for _, f in _fields():
        if f.name in saved and saved[f.name] != now[f.name]:
            (safe if f.metadata["resume_safe"] else refused)[f.name] = (saved[f.name], now[f.name])
    return refused, safe
