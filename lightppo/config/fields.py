"""What one option is: default, help, unit, range and whether it may change on resume, all in one place.

A section is written as::

    @section
    class TrainingConfig:
        "Optimisation."
        train_batch_size: int = option(128, "Samples per optimizer step.", unit="samples over all ranks", ge=1)

The command line, range checks, the resume check and docs/flags.md are all made from this.
"""

import dataclasses
import difflib
from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar, dataclass_transform

import tyro

from lightppo.config.values import conform, kind_of

T = TypeVar("T")

_BOUNDS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "ge": ("≥", lambda value, bound: value >= bound),
    "gt": (">", lambda value, bound: value > bound),
    "le": ("≤", lambda value, bound: value <= bound),
    "lt": ("<", lambda value, bound: value < bound),
}


def option(
    default: Any,
    help: str,
    *,
    unit: str | None = None,
    resume_safe: bool = False,
    **bounds: float,
) -> Any:
    """A field of a section.

    Args:
        default: default value; a tuple for options with several values.
        help: what it does, in one or two sentences.
        unit: what it counts ("prompts over all ranks", "tokens", ...).
        resume_safe: a resumed run may change it; everything else must stay as it was.
        **bounds: any of ``ge``, ``gt``, ``le``, ``lt``; ``None`` values are not checked.

    Raises:
        TypeError: on an unknown bound.
    """
    if unknown := set(bounds) - set(_BOUNDS):
        raise TypeError(f"unknown bounds {sorted(unknown)}; use {sorted(_BOUNDS)}")
    metadata = {"help": help, "unit": unit, "bounds": bounds, "resume_safe": resume_safe}
    return dataclasses.field(default=default, metadata=metadata)


def range_text(bounds: dict[str, float]) -> str:
    """``{"ge": 0, "le": 1}`` → ``"≥0 ≤1"``."""
    return " ".join(f"{_BOUNDS[key][0]}{bound:g}" for key, bound in bounds.items())


def describe(field: dataclasses.Field) -> str:
    """Help text with unit and range, as ``--help`` and docs/flags.md show it."""
    meta = field.metadata
    notes = [note for note in (meta["unit"], range_text(meta["bounds"])) if note]
    return meta["help"] + (f" [{'; '.join(notes)}]" if notes else "")


@dataclass_transform(field_specifiers=(option,))
def section(cls: type[T]) -> type[T]:
    """Make a dataclass whose fields carry their help to the command line."""
    for name, kind in list(cls.__annotations__.items()):
        cls.__annotations__[name] = Annotated[kind, tyro.conf.arg(help=describe(cls.__dict__[name]))]
    return dataclasses.dataclass(cls)


def out_of_range(name: str, value: Any, field: dataclasses.Field) -> str | None:
    """Why ``value`` is not of the field's type or outside its range, or ``None``."""
    try:
        value = conform(value, kind_of(field))
    except TypeError as error:
        return f"--{name} {error}"
    values = value if isinstance(value, tuple) else (value,)
    bounds = field.metadata["bounds"]
    if value is None or all(_BOUNDS[key][1](v, bound) for v in values for key, bound in bounds.items()):
        return None
    return f"--{name} {value} is out of range: it must be {range_text(bounds)}"


def nearest(name: str, known: Iterable[str]) -> str:
    """``" (did you mean 'x'?)"`` for the known name closest to ``name``, or an empty string."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {matches[0]!r}?)" if matches else ""
