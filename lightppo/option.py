"""One option, declared once: the command line, ``--help``, docs/flags.md, YAML, checks and resuming use it."""

from __future__ import annotations

import functools
import importlib
import os
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from lightppo.errors import ConfigError
from lightppo.suggestions import nearest

_BOUNDS = ("ge", "gt", "le", "lt")


@dataclass(frozen=True)
class Option:
    """What there is to know about one option."""

    name: str  # of the flag, the key in YAML, the attribute of its section
    type: Any  # bool, int, float, str, a Literal, a tuple of these, or one of them | None
    default: Any  # a tuple where there are several values
    help: str  # what it does, in one or two sentences; the first alone where there is little room
    unit: str | None = None  # what it counts: "prompts over all ranks", "tokens"
    ge: float | None = None  # range of every number; None as a value is always inside
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    names: Any = None  # the lightppo.table.Table that a value must be found in
    below: str | None = None  # option that must be larger, where both have a number
    # Conditions without which it does nothing: "lora_rank>0", "zero_stage=2|3", "rollout_check!=off", "dynamic_sampling"
    # (given or true), a condition of a section, or several of these with " or " between them.
    needs: tuple[str, ...] = ()
    # Values besides the default that ask for nothing, and so need nothing. Those out of range stand for the default.
    off: tuple[Any, ...] = ()
    # Whether a resumed run may change it; else it must stay as it was. None: as its section says.
    resume_safe: bool | None = None
    required: bool = False  # every run must set it
    # In Python, a function or an object may stand where a path does. It may, too, if the table of ``names`` takes files.
    takes_object: bool = False
    secret: bool = False  # a wrong value may be a key: it is not shown
    owner: str = ""  # the section that it belongs to: config.<owner>.<name>

    @functools.cached_property
    def bounds(self) -> dict[str, float]:
        """Return the given ones of ge, gt, le and lt."""
        return {key: getattr(self, key) for key in _BOUNDS if getattr(self, key) is not None}

    @functools.cached_property
    def kind(self) -> Any:
        """Return the type of a value that is not None."""
        return next(kind for kind in alternatives(self.type) if kind is not type(None))

    @functools.cached_property
    def takes_several(self) -> bool:
        """Tell whether a value is a tuple."""
        return get_origin(self.kind) is tuple

    @property
    def may_be_none(self) -> bool:
        return type(None) in alternatives(self.type)

    @functools.cached_property
    def may_be_object(self) -> bool:
        """Tell whether a function or an object may stand in place of its path."""
        return self.takes_object or (self.names is not None and self.names.takes_files)

    @functools.cached_property
    def _adapter(self) -> Any:
        """Return pydantic's validator, as strict as YAML and code need: true and NaN are no numbers."""
        return _adapter(self.type, **self.bounds)

    def is_set(self, value: Any) -> bool:
        """Tell whether a value asks for something that the default does not."""
        return value != self.default and value not in self.off

    def conform(self, value: Any) -> Any:
        """Return the value in the option's type: a list as a tuple, a path as text; a ConfigError names the flag."""
        try:
            return self._conformed(value)
        except ValueError as error:
            is_pydantics = not isinstance(error, ConfigError)
            raise ConfigError(self._wrong_value(value) if is_pydantics else str(error)) from None

    def _wrong_value(self, value: Any) -> str:
        choices = [choice for choice in get_args(self.kind) if isinstance(choice, str)]
        expected = " ".join(filter(None, (type_text(self), range_text(self))))
        if self.may_be_object:
            path = ": path.py:name" if self.names is None else ""
            expected += f"{path}, or in Python the function or object itself"
        shown_value = f"{value!r}{nearest(str(value), choices, self.name)}"
        return f"--{self.name} must be {expected}, not {'another value' if self.secret else shown_value}"

    def _conformed(self, value: Any) -> Any:
        if self.may_be_object and is_object(value):
            value = (value,) if self.takes_several else value
        elif self.takes_object and isinstance(value, list | tuple) and any(map(is_object, value)):
            return tuple(
                element if is_object(element) else self.conform([element])[0] for element in value
            )
        else:
            try:
                value = self._adapter.validate_python(value)
            except ValueError:  # pydantic's
                if _adapter(self.type).validate_python(value) not in self.off:
                    raise
                return self.default
        if self.names is not None and value is not None and value != self.default:
            self.names.find(value)
        return value


def is_object(value: Any) -> bool:
    """Tell whether this is a function or an object of the user's own: nothing that a file of options may hold."""
    return not isinstance(value, str | os.PathLike | int | float | list | tuple | dict | set | None)


def definition_of(value: Any) -> Any:
    """Return a function or class itself, and the class of any other object."""
    return value if hasattr(value, "__qualname__") else type(value)


def shown_object(value: Any) -> Any:
    """Write a function or object of the user's own as a text, the same in every run; other values as they are."""
    if value is None or isinstance(value, str | bool | int | float | dict):
        return value
    definition = definition_of(value)
    return f"<{definition.__qualname__} of {definition.__module__}>"


def option(
    default: Any,
    help: str,
    unit: str | None = None,
    *,
    needs: str = "",
    also: str = "",
    **more: Any,
) -> Any:
    """Declare an option of a :class:`Section`; ``more`` as in :class:`Option`.

    ``needs`` has conditions with " and " between; ``also`` adds to those of a partial of this function.
    """
    conditions = tuple(filter(None, f"{needs} and {also}".split(" and ")))
    return Option("", None, default, help, unit, needs=conditions, **more)


@dataclass_transform(kw_only_default=True, field_specifiers=(option,))
class Section(types.SimpleNamespace):
    """Values of the options that one part of a run reads, as attributes::

        class TrainingConfig(Section):
            "Training: batches, epochs, optimizers."

            train_batch_size: int = option(128, "Samples per optimizer step.", "samples over all ranks", ge=1)

    ``adds_to="training"`` adds the options to another section, as a package does. ``of`` says what reads them:
    ``"trainer"`` (and what trains), also where a script has made models and data by hand; ``"training"``: the same, and
    no evaluation does; ``"weights"``: they make the weights of models.

    ``own=TABLE`` adds the own options of all entries of a table of algorithms, also of those that are added later;
    ``resume_safe=True`` holds for all options of the section. Its values are ``config.NAME``: ``name``, or the name of the
    class without ``Config``. A section that extends another one has its options, or
    those that are ``declared``, before its own.
    """

    _declared: ClassVar[Mapping[str, Option]] = {}
    _own: ClassVar[Any] = None
    _owner: ClassVar[str] = ""
    _is_open: ClassVar[bool] = False  # packages may add to it
    of: ClassVar[Literal["trainer", "training", "weights"] | None] = None

    def __init_subclass__(
        cls,
        own: Any = None,
        resume_safe: bool = False,
        declared: Mapping[str, Option] | None = None,
        adds_to: str = "",
        name: str = "",
        of: Literal["trainer", "training", "weights"] | None = None,
    ) -> None:
        cls._declared = dict(cls.options() if declared is None else declared)
        cls._is_open = not adds_to
        by_class = cls.__name__.removesuffix("Config").lower()
        cls._owner = cls._owner or adds_to or name or by_class
        cls._own = own
        cls.of = of or cls.of
        for name, kind in get_type_hints(cls).items():
            declaration = cls.__dict__.get(name)
            if not isinstance(declaration, Option):  # of the section that is extended, or no option
                continue
            safe = resume_safe if declaration.resume_safe is None else declaration.resume_safe
            declaration = replace(
                declaration, name=name, type=kind, owner=cls._owner, resume_safe=safe
            )
            cls._declared[name] = declaration
            delattr(cls, name)

    @classmethod
    def options(cls) -> dict[str, Option]:
        """Return the options by name, with those that packages add."""
        own_table = cls._own or {}
        added = [section.options() for section in additions_to(cls._owner)] if cls._is_open else []
        sources = [cls._declared, *own_table.items(), *added]
        if vars(cls).get("_sources") != sources:  # else what was made of them last is true still
            cls._sources, cls._options = sources, dict(cls._declared)
            for options in (own_table.flag_options(cls._owner) if own_table else {}, *added):
                cls._options |= options
        return cls._options

    def __init__(self, **values: Any) -> None:
        defaults = {name: option.default for name, option in self.options().items()}
        if unknown := values.keys() - defaults.keys():
            raise TypeError(
                f"{type(self).__name__} has no option {min(unknown)!r}{nearest(min(unknown), defaults)}"
            )
        super().__init__(**defaults | values)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name in (options := self.options()):
            return options[name].default  # of an algorithm that was added since
        raise AttributeError(f"{type(self).__name__} has no option {name!r}")

    # -- what a section knows of its options together; each is called for the sections of packages, too ----------------

    # names that ``needs`` may have beside options → what to set for it
    conditions: ClassVar[Mapping[str, str]] = {}
    # an option, others that exclude it, and why
    exclusive: ClassVar[Sequence[tuple[str, str, str]]] = ()

    @staticmethod
    def facts(config: Any) -> Mapping[str, bool]:
        """Return which of its ``conditions`` hold."""
        return {}

    @staticmethod
    def meant(config: Any) -> Mapping[str, Any]:
        """Return what None stands for, by option."""
        return {}

    @staticmethod
    def problems(options: Any) -> Iterable[str]:
        """Return what cannot work, a line for each, which begins with the option.

        Args:
            options: every option by name, with what None stands for; and ``config``, ``ranks``, ``by_hand``, whether a
                script has made models and data, and ``facts``, which ``conditions`` hold.
        """
        return ()

    @staticmethod
    def passes(options: Any) -> Iterable[str]:
        """Return why log probs that were recorded while sampling would not do; ``options`` as of :meth:`problems`."""
        return ()

    @staticmethod
    def trains(config: Any) -> bool:
        """Return False where these options ask for a run that trains nothing."""
        return True

    @staticmethod
    def sources(config: Any) -> Iterable[str]:
        """Return names of the sources of rewards that they ask for."""
        return ()

    @staticmethod
    def without_effect(config: Any, given: Iterable[str]) -> Iterable[str]:
        """Return why options that were ``given`` on the command line do nothing in this run, a line for each."""
        return ()

    @staticmethod
    def is_stale(config: Any) -> bool:
        """Tell whether an older policy may have sampled, and recorded, what a step trains on."""
        return False

    @staticmethod
    def places(config: Any) -> Iterable[str]:
        """Return where a run writes to, in words, as its options ask."""
        return ()

    def missing(self) -> list[str]:
        """Return one message per required option without a value."""
        required = [option for option in self.options().values() if option.required]
        return [
            f"--{declaration.name} is required: {declaration.help}"
            for declaration in required
            if not getattr(self, declaration.name)
        ]


@dataclass(frozen=True, eq=False)
class SectionPlace:
    """Where the section of a package is."""

    where: str  # "module:Class"; imported when options are first read
    adds_to: str = ""  # the section that it adds options to; "": it is ``config.NAME``
    commands: tuple[str, ...] = ("ppo",)  # that have it

    @functools.cached_property
    def kind(self) -> type[Section]:
        module, _, name = self.where.rpartition(":")
        return getattr(importlib.import_module(module), name)


SECTIONS: dict[str, SectionPlace] = {}
"""The sections of packages by name, see :func:`register_section`."""


def register_section(
    name: str, where: str, *, adds_to: str = "", commands: Sequence[str] = ("ppo",)
) -> None:
    """Add a package's options: they are on the command line, in ``--help``, YAML and docs, and are checked.

    Args:
        name: ``config.NAME`` has the values, unless they are added to another section.
        where: ``"module:Class"`` of a :class:`Section`.
        adds_to: name of a section, whose attributes they become.
        commands: that have the section.
    """
    if name in SECTIONS:
        raise ValueError(f"there is a section {name!r} already: choose another name")
    SECTIONS[name] = SectionPlace(where, adds_to, tuple(commands))


def additions_to(owner: str) -> list[type[Section]]:
    """Return the sections of packages that add to one."""
    return list(_additions_among(tuple(SECTIONS.values()), owner))


@functools.cache
def _additions_among(section_places: tuple[SectionPlace, ...], owner: str) -> list[type[Section]]:
    return [
        section_place.kind for section_place in section_places if section_place.adds_to == owner
    ]


def out_of_order(options: Iterable[Option], values: Mapping[str, Any]) -> Iterator[str]:
    """Yield one message per option that is not ``below`` the other one."""
    for option in options:
        low = values.get(option.name)
        high = values.get(option.below)
        if None not in (low, high) and low >= high:
            yield f"--{option.name} {low:g} must be below --{option.below} {high:g}"


def alternatives(kind: Any) -> tuple[Any, ...]:
    """Split ``int | None`` into ``(int, NoneType)``; a type that is no union is its only alternative."""
    if get_origin(kind) in (Union, types.UnionType):
        return get_args(kind)
    return (kind,)


@functools.cache
def _adapter(kind: Any, **bounds: float) -> Any:
    """Return pydantic's validator, as strict as YAML and code need: true and NaN are no numbers."""
    from pydantic import BeforeValidator, Field, StrictBool, TypeAdapter

    def annotated(kind: Any) -> Any:
        if len(kinds := alternatives(kind)) > 1:
            return Union[tuple(map(annotated, kinds))]  # noqa: UP007
        if get_origin(kind) is tuple:
            inner = tuple(
                argument_kind if argument_kind is Ellipsis else annotated(argument_kind)
                for argument_kind in get_args(kind)
            )
            if Ellipsis in inner:
                return Annotated[tuple[inner], BeforeValidator(_listed)]
            return tuple[inner]
        if kind in (bool, type(None)):
            return StrictBool if kind is bool else kind
        return Annotated[kind, Field(**bounds), BeforeValidator(functools.partial(_plain, kind))]

    return TypeAdapter(annotated(kind))


def _listed(value: Any) -> Any:
    if value is None or isinstance(value, (list, tuple)):
        return value
    return (value,)


def _plain(kind: Any, value: Any) -> Any:
    """Read text as a number where one is wanted, as YAML gives 1e6."""
    if kind in (int, float) and isinstance(value, str):
        value = int(value) if value.strip("+-").isdigit() else float(value)
    if isinstance(value, bool) or value != value:
        raise ValueError("no number, name or text")
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value


# -- an option in words --------------------------------------------------------------------------------------------------

_SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_ONE_OF_TYPE = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    type(None): "None",
}
_MANY_OF_TYPE = {int: "whole numbers", float: "numbers", str: "texts"}


def range_text(option: Option) -> str:
    """Write the range, such as ``≥0 ≤1``."""
    return " ".join(f"{_SIGNS[key]}{_shown_bound(bound)}" for key, bound in option.bounds.items())


def _shown_bound(bound: float) -> str:
    """Write a number, or the power of two that it is."""
    power = bound.bit_length() - 1 if isinstance(bound, int) else 0
    if power > 20 and bound == 2**power:
        return f"2^{power}"
    return f"{bound:g}"


def choices(option: Option) -> list[Any]:
    """Return the values to choose from, or the names; none: any of its type."""
    if option.names is None:
        if get_origin(option.kind) is Literal:
            return [*get_args(option.kind)]
        return []
    is_another = isinstance(option.default, str) and option.default not in option.names
    if is_another:
        return [option.default, *option.names]
    return [*option.names]


def type_text(option: Option) -> str:
    """Write the type in words: ``a list of texts or None``."""
    if option.names is None:
        return _in_words(option.type)
    names = choices(option) + ["path.py:name"] * option.names.takes_files
    return f"one of {', '.join(names)}" + (" or None" if option.may_be_none else "")


def _in_words(kind: Any) -> str:
    if len(kinds := alternatives(kind)) > 1:
        return " or ".join(map(_in_words, kinds))
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        inner = get_args(kind)
        many = _MANY_OF_TYPE[inner[0]]
        if Ellipsis in inner:
            return f"a list of {many}"
        return f"{len(inner)} {many}"
    return _ONE_OF_TYPE[kind]


def shown_default(value: Any) -> str:
    """Write a default as ``--help`` and docs/flags.md show it."""
    if isinstance(value, tuple):
        return " ".join(map(str, value)) if value else "none"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
