"""PPOConfig: all sections of a run, flat access by flag name, resolved defaults, checks between options."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from lightppo.config import rules
from lightppo.config.adapter_section import AdapterConfig
from lightppo.config.algorithm_sections import AlgorithmConfig, CorrectionConfig, LossConfig
from lightppo.config.engine_section import EngineConfig
from lightppo.config.fields import nearest, option, out_of_range, section
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
from lightppo.config.values import conform, kind_of
from lightppo.config.verifier_section import VerifierConfig
from lightppo.errors import ConfigError


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
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    verifier: VerifierConfig = field(default_factory=VerifierConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    @classmethod
    def from_flat(cls, values: Mapping[str, Any] | None = None, **more: Any) -> Self:
        """Build from flag names and values.

        Raises:
            ConfigError: on an unknown name (the nearest known one is given), a value of the wrong type or out of range.
        """
        return cls().with_options(**{**(values or {}), **more})

    def with_options(self, **values: Any) -> Self:
        """A copy with some options replaced; lists become tuples, paths text.

        Raises:
            ConfigError: on an unknown name, a value of the wrong type or out of range; one line for each.
        """
        homes = {f.name: (home, f) for home, f in all_options()}
        problems: list[str] = []
        changed: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            if name not in homes:
                problems.append(f"unknown option {name!r}{nearest(name, homes)}")
            elif problem := out_of_range(name, value, homes[name][1]):
                problems.append(problem)
            else:
                home, f = homes[name]
                changed.setdefault(home, {})[name] = conform(value, kind_of(f))
        if problems:
            raise ConfigError("\n".join(problems))
        sections = {home: dataclasses.replace(getattr(self, home), **new) for home, new in changed.items()}
        return dataclasses.replace(self, **sections)

    def flat(self) -> dict[str, Any]:
        """All options by flag name."""
        return {f.name: getattr(getattr(self, s), f.name) for s, f in all_options()}

    def value_problems(self) -> list[str]:
        """One message per option of the wrong type or out of range."""
        found = (out_of_range(f.name, getattr(getattr(self, home), f.name), f) for home, f in all_options())
        return [problem for problem in found if problem]

    def validate(self, world_size: int = 1) -> None:
        """Check values and, where these are all right, combinations of options.

        Args:
            world_size: number of ranks, for the batch sizes.

        Raises:
            ConfigError: with every problem found, one per line, each saying what to set.
        """
        if problems := self.value_problems() or rules.contradictions(self, world_size):
            raise ConfigError("\n".join(problems))

    def resolved(self) -> Self:
        """A copy in which every "None means …" default is replaced by what it means. Idempotent.

        Raises:
            ConfigError: on a value of the wrong type or out of range.
        """
        conformed = self.with_options(**self.flat())
        return conformed.with_options(**rules.resolutions(conformed))


def all_options() -> Iterator[tuple[str, dataclasses.Field]]:
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
    for _, f in all_options():
        if f.name in saved and saved[f.name] != now[f.name]:
            (safe if f.metadata["resume_safe"] else refused)[f.name] = (saved[f.name], now[f.name])
    return refused, safe
