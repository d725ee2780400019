"""One option, declared once: the command line, ``--help``, docs/flags.md, YAML, checks and resuming use it."""

from __future__ import annotations

import difflib
import functools
import os
import types
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Union, dataclass_transform, get_args, get_origin, get_type_hints

_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_ONE = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "None"}
_MANY = {int: "whole numbers", float: "numbers", str: "texts"}


@dataclass(frozen=True)
class Option:
    """What there is to know about one option.

    Attributes:
        name: of the flag, the key in YAML, the attribute of its section.
        type: bool, int, float, str, a ``Literal``, a tuple of these, or one of them ``| None``.
        default: a tuple where there are several values.
        help: what it does, in one or two sentences; the first alone where there is little room.
        unit: what it counts ("prompts over all ranks", "tokens").
        ge, gt, le, lt: range of every number; ``None`` as a value is always inside.
        names: the table that a value must be found in, see :class:`lightppo.algorithms.entries.Table`.
        below: option of the same algorithm that must be larger.
        only_with: conditions without which it would do nothing, see :func:`lightppo.config.rules.condition_text`.
        off: values besides the default that ask for nothing, and so need no ``only_with``.
        resume_safe: a resumed run may change it; everything else must stay as it was.
        required: every run must set it.
        owner: the section that it belongs to, ``config.<owner>.<name>``.
    """

    name: str
    type: Any
    default: Any
    help: str
    unit: str | None = None
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    names: Any = None
    below: str | None = None
    only_with: tuple[str, ...] = ()
    off: tuple[Any, ...] = ()
    resume_safe: bool = False
    required: bool = False
    owner: str = ""

    @property
    def bounds(self) -> dict[str, float]:
        """The bounds that are given, among ge, gt, le and lt."""
        return {key: getattr(self, key) for key in _BOUNDS if getattr(self, key) is not None}

    @property
    def range_text(self) -> str:
        """Such as ``≥0 ≤1``."""
        return " ".join(f"{_BOUNDS[key]}{bound:g}" for key, bound in self.bounds.items())

    @property
    def kind(self) -> Any:
        """The type of a value that is not None."""
        return next(kind for kind in alternatives(self.type) if kind is not type(None))

    @property
    def may_be_none(self) -> bool:
        return type(None) in alternatives(self.type)

    @property
    def type_text(self) -> str:
        """The type in words: ``a list of texts or None``."""
        if self.names is None:
            return _in_words(self.type)
        names = [*self.names, "path.py:name"] if self.names.decorator else self.names
        return f"one of {', '.join(names)}" + (" or None" if self.may_be_none else "")

    def is_set(self, value: Any) -> bool:
        """Whether a value asks for something that the default does not."""
        return value != self.default and value not in self.off

    def conform(self, value: Any) -> Any:
        """The value in the option's type: lists become tuples, a lone value a list of one, paths and numbers as needed.

        Raises:
            ValueError: another type, NaN, or outside the range; names the flag.
        """
        from pydantic import ValidationError

        try:
            value = _adapter(self.type, **self.bounds).validate_python(value)
        except ValidationError:
            choices = [choice for choice in get_args(self.kind) if isinstance(choice, str)]
            wanted = " ".join(filter(None, (self.type_text, self.range_text)))
            raise ValueError(f"--{self.name} must be {wanted}, not {value!r}{nearest(str(value), choices)}") from None
        if self.names is not None and value is not None:
            self.names.find(value)
        return value


def option(default: Any, help: str, *, only_with: str | tuple[str, ...] = (), **more: Any) -> Any:
    """The declaration of an option in the body of a :class:`Section`; ``more`` is as in :class:`Option`."""
    conditions = (only_with,) if isinstance(only_with, str) else only_with
    return Option("", None, default, help, only_with=conditions, **more)


@dataclass_transform(kw_only_default=True, field_specifiers=(option,))
class Section:
    """Values of the options that one part of a run reads, as attributes::

        class TrainingConfig(Section):
            "Training: batches, epochs, optimizers."

            train_batch_size: int = option(128, "Samples per optimizer step.", unit="samples over all ranks", ge=1)

    ``own=TABLE`` adds the own options of all entries of a table of algorithms, also of those that are added later;
    ``resume_safe=True`` holds for all options of the section.
    """

    _declared: ClassVar[dict[str, Option]] = {}
    _own: ClassVar[Any] = None

    def __init_subclass__(cls, own: Any = None, resume_safe: bool = False) -> None:
        owner = cls.__name__.removesuffix("Config").lower()
        cls._own = own
        cls._declared = {}
        for name, kind in get_type_hints(cls).items():
            if name not in cls.__annotations__:
                continue
            declared = cls.__dict__[name]
            safe = resume_safe or declared.resume_safe
            cls._declared[name] = replace(declared, name=name, type=kind, owner=owner, resume_safe=safe)
            delattr(cls, name)

    @classmethod
    def options(cls) -> dict[str, Option]:
        """The options by name."""
        owner = cls.__name__.removesuffix("Config").lower()
        own = {} if cls._own is None else cls._own.flag_options()
        return cls._declared | {name: replace(option, owner=owner) for name, option in own.items()}

    def __init__(self, **values: Any) -> None:
        defaults = {name: option.default for name, option in self.options().items()}
        if unknown := values.keys() - defaults.keys():
            raise TypeError(f"{type(self).__name__} has no option {min(unknown)!r}{nearest(min(unknown), defaults)}")
        vars(self).update(defaults | values)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name in (options := self.options()):
            return options[name].default  # of an algorithm that was added since
        raise AttributeError(f"{type(self).__name__} has no option {name!r}")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


def nearest(name: str, known: Iterable[str]) -> str:
    """``" (did you mean 'x'?)"`` for the known name closest to ``name``, or an empty string."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def alternatives(kind: Any) -> tuple[Any, ...]:
    """``int | None`` → ``(int, NoneType)``; a type that is no union is its only alternative."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _in_words(kind: Any) -> str:
    if len(kinds := alternatives(kind)) > 1:
        return " or ".join(map(_in_words, kinds))
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        inner = get_args(kind)
        return f"a list of {_MANY[inner[0]]}" if Ellipsis in inner else f"{len(inner)} {_MANY[inner[0]]}"
    return _ONE[kind]


@functools.cache
def _adapter(kind: Any, **bounds: float) -> Any:
    """pydantic's validator of a type, as strict as YAML and code need: true and NaN are no numbers."""
    from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, TypeAdapter

    def annotated(kind: Any) -> Any:
        if len(kinds := alternatives(kind)) > 1:
            return Union[tuple(map(annotated, kinds))]  # noqa: UP007
        if get_origin(kind) is tuple:
            inner = tuple(k if k is Ellipsis else annotated(k) for k in get_args(kind))
            return Annotated[tuple[inner], BeforeValidator(_listed)] if Ellipsis in inner else tuple[inner]
        if kind is bool:
            return StrictBool
        if kind is int:
            kind = Annotated[kind, Field(**bounds), BeforeValidator(_whole)]
        if kind is float:
            kind = Annotated[kind, Field(**bounds), AfterValidator(_not_nan)]
        return kind if kind is type(None) else Annotated[kind, BeforeValidator(_plain)]

    return TypeAdapter(annotated(kind))


def _listed(value: Any) -> Any:
    return value if value is None or isinstance(value, (list, tuple)) else (value,)


def _plain(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("true and false are no number, name or text")
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _whole(value: Any) -> Any:
    """YAML reads 1e6 as text."""
    return float(value) if isinstance(value, str) and not value.strip("+-").isdigit() else value


def _not_nan(value: Any) -> Any:
    if value != value:
        raise ValueError("not a number")
    return value
