"""Tables of names: what each name stands for, imported when it is first used."""

from __future__ import annotations

import ast
import functools
import importlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from lightppo.errors import ConfigError
from lightppo.option import Option, out_of_order
from lightppo.suggestions import nearest
from lightppo.user_code import error_text, is_users_fault, load_python_function


@dataclass(frozen=True)
class Entry:
    """What all entries have."""

    home: ClassVar[str] = ""  # the module of functions that are given by their name alone

    # "module:name", "path.py:name", the name of a function in ``home``, or the function itself
    function: str | Callable
    # Options of its own. Beside another entry they would do nothing, so they are refused.
    options: tuple[Option, ...] = ()
    # The names that it adds to train/ → their meanings.
    metrics: Mapping[str, str] = field(default_factory=dict)

    @functools.cached_property
    def fn(self) -> Callable:
        """Import the function, on first use."""
        function = self.function
        if self.home and isinstance(function, str) and ":" not in function:
            function = f"{self.home}:{function}"
        return load(function)

    @property
    def defaults(self) -> dict[str, Any]:
        """Return its own options by name, with what they are where the flag says nothing; ``None``: off."""
        return {option.name: option.default for option in self.options}

    def completed(self, given: Mapping[str, Any], name: str) -> dict[str, Any]:
        """Check its own options: those given, and the defaults of those left out or ``None``."""
        if unknown := given.keys() - self.defaults.keys():
            option_names = ", ".join(self.defaults) or "none"
            raise ValueError(f"--{min(unknown)} is no option of {name}; it has: {option_names}")
        values = self.defaults | {name: value for name, value in given.items() if value is not None}
        values = {option.name: option.conform(values[option.name]) for option in self.options}
        for problem in out_of_order(self.options, values):
            raise ValueError(problem)
        return values


E = TypeVar("E", bound=Entry)


class Table(dict[str, E]):
    """Entries by name, in the order in which they came.

    Args:
        flag: the option that takes a name, or what a name is of: ``command``.
        decorator: for functions in files of the user's own, if the flag takes those: ``path.py:name``.
        kind: of their entries.
        files: functions in files of the user's own may be named, also without a decorator.
        taken: names that lightppo itself uses beside the entries.
    """

    def __init__(
        self,
        flag: str,
        entries: Mapping[str, E] = {},
        decorator: str | None = None,
        kind: type[E] = Entry,
        files: bool = False,
        taken: Collection[str] = (),
    ) -> None:
        super().__init__(entries)
        self.taken = taken
        self.flag = flag
        self.decorator = decorator
        self.kind = kind
        self.takes_files = files or decorator is not None

    def register(self, name: str, entry: E) -> None:
        """Add an entry; ValueError where the name is taken, TypeError where it is no entry of this table."""
        if not isinstance(entry, self.kind):
            kind = self.kind.__name__
            raise TypeError(
                f"{self.flag} {name}: register a {kind}, as {kind}('module:name'), not {entry!r}"
            )
        if name in self or name in self.taken:
            raise ValueError(f"{self.flag}: there is a {name!r} already: choose another name")
        self[name] = entry

    def find(self, name: str | Callable) -> E:
        """Find the entry of a name, of ``path.py:name`` or of a function itself; ConfigError for anything else."""
        if not isinstance(name, str):
            return self.entry_of(name)
        if name not in self and self.takes_files and ".py" in name:
            return declared_entry(name, self)
        if name in self:
            return self[name]
        suggestion = nearest(str(name), self, self.flag.lstrip("-"))
        raise ConfigError(
            f"{self.flag}: unknown name {name!r}{suggestion}; known: {', '.join(self)}"
        )

    def made(self, *arguments: Any) -> dict[str, Any]:
        """Return what the functions of the entries return, by name, without None."""
        results = {name: entry.fn(*arguments) for name, entry in self.items()}
        return {name: result for name, result in results.items() if result is not None}

    def first(self, *arguments: Any) -> Any | None:
        """Return the first of what they return that is not None."""
        return next(iter(self.made(*arguments).values()), None)

    @property
    def last(self) -> Callable:
        """Return the function of the entry that was registered last."""
        return next(reversed(self.values())).fn

    def entry_of(self, function: Any) -> E:
        """Return the entry of a function or class that stands in place of a path, with what its decorator says."""
        if not callable(function) or not self.takes_files:
            also = ", path.py:name, or a function" if self.takes_files else ""
            raise ConfigError(
                f"{self.flag}: {function!r} is no name; known: {', '.join(self)}{also}"
            )
        return self.kind(function, **getattr(function, "traits", {}))

    def flag_options(self, owner: str = "") -> dict[str, Option]:
        """Return the own options of all entries as flags of a section: None means what the entry says."""
        flags: dict[str, Option] = {}
        for own in (option for entry in self.values() for option in entry.options):
            users = [name for name, entry in self.items() if own.name in entry.defaults]
            default = "" if own.default is None else f" None: {own.default}."
            flags[own.name] = replace(
                own,
                type=own.type | None,
                default=None,
                help=f"{', '.join(users)}: {own.help}{default}",
                needs=(f"{self.flag[2:]}={'|'.join(users)}",),
                off=() if own.default is None else (own.default,),
                owner=owner,
            )
        return flags


def load(function: str | Callable) -> Callable:
    """Load the function of ``"module:name"`` or ``"path.py:name"``; a function is itself."""
    if not isinstance(function, str):
        return function
    module, _, name = function.rpartition(":")
    if module.endswith(".py"):
        return load_python_function(function, name)
    try:
        return getattr(importlib.import_module(module), name)
    except BaseException as error:
        if module.startswith(f"{__package__}.") or not is_users_fault(error):
            raise
        raise ConfigError(
            f"{function}, of a plugin, cannot be loaded: {error_text(error)}"
        ) from error


def declared_entry(spec: str, table: Table[E]) -> E:
    """Return the entry of a function, or a class, in a file of the user's own, which is read but not run."""
    return _declared(spec, table.flag, table.decorator, table.kind)


@functools.cache
def _declared(spec: str, flag: str, decorator: str | None, kind: type[Entry]) -> Any:
    path, _, name = spec.rpartition(":")
    try:
        tree = ast.parse(Path(path).expanduser().read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{flag} {spec}: cannot be read ({error.strerror}); write path.py:name"
        ) from None
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{flag} {spec}: {path} is not Python: {error}") from None
    functions = {
        node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    if name not in functions:
        raise ConfigError(
            f"{flag} {spec}: {path} has no function {name!r}{nearest(name, functions)}, only: {', '.join(functions)}"
        )
    traits: dict[str, Any] = {}
    for node in functions[name].decorator_list:
        if ast.unparse(node).rpartition(".")[2] == decorator:
            raise ConfigError(
                f"{flag} {spec}: {path}:{node.lineno}: write @{decorator}() with brackets"
            )
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == decorator:
            try:
                traits = {
                    str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords
                }
                kind("", **traits)
            except (ValueError, TypeError) as error:
                raise ConfigError(
                    f"{flag} {spec}: {path}:{node.lineno}: @{decorator}: {error}"
                ) from None
    return kind(f"{path}:{name}", **traits)
