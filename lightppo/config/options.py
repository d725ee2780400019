"""The options of a run: :class:`PPOConfig` names the sections. Docs: docs/flags.md.

Each option is declared once, in a section of ``lightppo/config/*_options.py``. The name of an option is unique over all
sections: it is the flag, and the key in YAML and in ``PPOConfig.from_flat``.
"""

import types
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, ClassVar, Self, get_type_hints

from lightppo.config.algorithm_options import (
    AlgorithmConfig,
    CorrectionConfig,
    DistillConfig,
    LossConfig,
)
from lightppo.config.checkpoint_options import CheckpointConfig
from lightppo.config.contradictions import contradictions
from lightppo.config.data_options import DataConfig
from lightppo.config.episode_options import EpisodesConfig, TapeConfig
from lightppo.config.evaluation_options import EvaluationConfig
from lightppo.config.logging_options import LoggingConfig
from lightppo.config.model_options import AdapterConfig, ModelConfig
from lightppo.config.option_errors import explanation, nearest
from lightppo.config.removed_options import is_left
from lightppo.config.reward_options import RewardConfig, VerifierConfig
from lightppo.config.rollout_options import EngineConfig, RolloutConfig, SamplingConfig
from lightppo.config.rules import resolutions
from lightppo.config.training_options import StrategyConfig, TrainingConfig
from lightppo.errors import ConfigError
from lightppo.option import SECTIONS, Option, Section, SectionPlace, additions_to, option
from lightppo.redaction import shown_value


class FileConfig(Section, resume_safe=True):
    """Options from a file."""

    config: str | None = option(
        None,
        "YAML file with options; flags override it. Its own `config` names another file in its folder, which it "
        "overrides.",
    )


class OptionSet(types.SimpleNamespace):
    """The options of a command by section: its annotations name the sections, and packages add theirs."""

    command: ClassVar[str] = ""
    words: ClassVar[Mapping[str, str]] = {}  # those of PPO's options → its own

    def __init__(self, **sections: Section) -> None:
        kinds = self.sections()
        if unknown := sections.keys() - kinds.keys():
            raise TypeError(
                f"{type(self).__name__} has no section {min(unknown)!r}{nearest(min(unknown), kinds)}"
            )
        super().__init__(**{name: sections.get(name) or kind() for name, kind in kinds.items()})

    @classmethod
    def sections(cls) -> dict[str, type[Section]]:
        """Return the sections by their names."""
        return dict(_sections_of(cls, tuple(SECTIONS.items())))

    @classmethod
    def of_trainer(cls) -> set[str]:
        """Return the sections that matter to a trainer whose models and data a script has made."""
        return {name for name, kind in cls.sections().items() if kind.of in ("trainer", "training")}

    @classmethod
    def parts(cls) -> list[type[Section]]:
        """Return the sections, and what packages add to each: who knows what of the options."""
        return list(_parts_of(cls, tuple(SECTIONS.items())))

    @classmethod
    def all_options(cls) -> Iterator[Option]:
        """Yield every option, in the order of the sections."""
        for section in cls.sections().values():
            yield from section.options().values()

    @classmethod
    def from_flat(cls, values: Mapping[str, Any] | None = None, **options: Any) -> Self:
        """Build from flag names and values; errors as :meth:`with_options`."""
        return cls().with_options(**{**(values or {}), **options})

    def with_options(self, **values: Any) -> Self:
        """Return a copy with some options replaced; lists become tuples, paths text.

        Raises:
            ConfigError: on an unknown name, a value of the wrong type or out of range; one line for each.
        """
        options = {option.name: option for option in self.all_options()}
        problems: list[str] = []
        changed: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            if name not in options:
                if is_left(name, value):
                    continue
                suggestion = nearest(f"--{name}", [f"--{option}" for option in options], "key")
                quoted = suggestion.replace("'--", "'")
                problems.append(f"unknown option {name!r}{quoted}")
                continue
            try:
                conformed = options[name].conform(value)
            except ConfigError as error:
                problems.append(explanation(error, options[name], value))
                continue
            changed.setdefault(options[name].owner, {})[name] = conformed
        if problems:
            raise ConfigError("\n".join(problems))
        replaced = {
            owner: type(section)(**vars(section) | changed[owner])
            for owner, section in vars(self).items()
            if owner in changed
        }
        return type(self)(**vars(self) | replaced)

    def flat(self) -> dict[str, Any]:
        """Return all options by flag name."""
        values: dict[str, Any] = {}
        for owner, kind in self.sections().items():
            section = getattr(self, owner)
            values |= {name: getattr(section, name) for name in kind.options()}
        return values

    def missing(self) -> Iterator[str]:
        """Yield one message per required option without a value."""
        for section in vars(self).values():
            yield from section.missing()


class PPOConfig(OptionSet):
    """Everything a PPO run needs: ``config.algorithm.gamma``; ``config.flat()["gamma"]``.

    ``PPOConfig.from_flat(pretrain="...", prompt_data="...")`` builds one in code, ``parse_args`` from the command line.
    """

    command = "ppo"

    file: FileConfig
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig
    engine: EngineConfig
    sampling: SamplingConfig
    reward: RewardConfig
    verifier: VerifierConfig
    algorithm: AlgorithmConfig
    loss: LossConfig
    training: TrainingConfig
    strategy: StrategyConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    evaluation: EvaluationConfig
    correction: CorrectionConfig
    distill: DistillConfig
    adapter: AdapterConfig
    tape: TapeConfig
    episodes: EpisodesConfig

    def validate(self, world_size: int = 1, by_hand: bool = False, unfed: bool = False) -> None:
        """Check values, then combinations; ConfigError with a line for each option that has a problem.

        Arguments as of :func:`contradictions`.
        """
        self.with_options(**self.flat())
        if problems := contradictions(self, world_size, by_hand, unfed):
            raise ConfigError("\n".join(problems))

    def known(self) -> dict[str, Any]:
        """Return values by flag name, with what None stands for."""
        return self.flat() | resolutions(self)

    def resolved(self) -> Self:
        """Return a copy with every "None means …" replaced by what it means. ConfigError for a value out of range."""
        conformed = self.with_options(**self.flat())
        return conformed.with_options(**resolutions(conformed))


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


@cache
def _sections_of(
    options: type[OptionSet], places: tuple[tuple[str, SectionPlace], ...]
) -> dict[str, type[Section]]:
    kinds = {name: kind for name, kind in get_type_hints(options).items() if _is_section(kind)}
    package_sections = {
        name: place.kind
        for name, place in places
        if options.command in place.commands and not place.adds_to and name not in kinds
    }
    return kinds | package_sections


@cache
def _parts_of(
    options: type[OptionSet], places: tuple[tuple[str, SectionPlace], ...]
) -> list[type[Section]]:
    return [
        section
        for name, kind in _sections_of(options, places).items()
        for section in (kind, *_additions(name, kind))
    ]


def _additions(name: str, kind: type[Section]) -> list[type[Section]]:
    return [
        addition
        for addition in additions_to(name)
        if addition.options().keys() <= kind.options().keys()
    ]


def all_options() -> Iterator[Option]:
    """Return every option of :class:`PPOConfig`, in the order of the sections."""
    return PPOConfig.all_options()


def public_options(config: OptionSet) -> dict[str, Any]:
    """Return all options by flag name, for logs, files, trackers and checkpoints: of URLs neither login nor query."""
    return {name: shown_value(value) for name, value in config.flat().items()}
