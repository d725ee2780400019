"""The environments that a run names, loaded and looked at: which methods they have, and which are tools."""

from __future__ import annotations

import importlib
import inspect
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightppo.episodes.env_failures import Contract
from lightppo.episodes.tools import Tool
from lightppo.errors import ConfigError
from lightppo.user_code import error_text, is_users_fault, load_python_objects, split_python_spec

# No tools of a class, in our style and in TRL's.
RESERVED = {"lightppo": ("reset", "step", "get_reward", "close"), "trl": ("reset", "get_reward")}
TOOLS_ONLY = "tools"  # the name of the environment without a class
PYTHON_TOOL = "python"
# prefixes, see adapters.py
ADAPTED = ("gym", "reasoning_gym", "skyrl_gym", "textworld", "openenv", "verifiers", "openrlhf")


@dataclass(eq=False)
class EnvironmentSpec:
    """One environment: how it is made, and what it offers."""

    name: str
    where: str  # as texts name it
    contract: Contract
    make: Callable[[], Any] | None = None  # None: nothing but tools
    kind: type | None = None  # None: as yet unknown, of a function that makes it
    functions: dict[str, Tool] = field(default_factory=dict)  # tools without an environment
    tools: dict[str, Tool] = field(default_factory=dict)  # all

    def __post_init__(self) -> None:
        self.tools = dict(self.functions)
        if self.kind is not None:
            self.look_at(self.kind)
        else:
            self.check_types()

    def look_at(self, kind: type) -> None:
        """Find the methods of the class."""
        self.kind = kind
        if not callable(getattr(kind, "reset", None)):
            raise ConfigError(f"{self.where}: {kind.__name__} has no method reset")
        methods = {
            name: Tool(
                name,
                getattr(kind, name),
                where=f"{self.where}.{name}",
                is_method=not isinstance(inspect.getattr_static(kind, name), staticmethod),
            )
            for name in self._method_names(kind)
        }
        if self.is_agent and self.functions:
            raise ConfigError(
                f"{self.where}: an agent program has tools of its own; leave out --tools"
            )
        twice = methods.keys() & self.functions.keys()
        if twice:
            raise ConfigError(f"{self.where}: {', '.join(sorted(twice))} is in --tools, too")
        self.tools = {**self.functions, **methods}
        self.check_types()

    def check_types(self) -> None:
        """Read the types of all tools now, so that no call waits for that and no type is a surprise."""
        for tool in self.tools.values():
            _ = tool.parameters
            if self.contract == "lightppo":
                _ = tool.adapters

    def _method_names(self, kind: type) -> list[str]:
        """In the order of the source; in TRL's contract in its order."""
        names = [name for name, _ in inspect.getmembers(kind, predicate=inspect.isfunction)]
        if self.contract == "lightppo":
            written = [name for base in reversed(kind.__mro__) for name in vars(base)]
            names.sort(key=written.index)
        return [
            name
            for name in names
            if not name.startswith("_") and name not in RESERVED[self.contract]
        ]

    def method(self, name: str) -> Callable[..., Any] | None:
        """Return a method of the class that is no tool."""
        if name in RESERVED[self.contract]:
            return getattr(self.kind, name, None)
        return None

    @property
    def is_agent(self) -> bool:
        """Tell whether it is an agent program: ``reset`` gives an Opening, and ``step`` gets whole turns."""
        return getattr(self.kind, "_asks_model", False)

    @property
    def is_async(self) -> bool:
        """Tell whether all of it runs in an event loop, so that it needs no thread."""
        names = RESERVED[self.contract]
        functions = [function for name in names if (function := self.method(name)) is not None]
        functions += [tool.function for name, tool in self.tools.items() if name != PYTHON_TOOL]
        return all(map(inspect.iscoroutinefunction, functions))

    @property
    def reset_names(self) -> tuple[set[str], set[str], bool]:
        """Return columns that ``reset`` must have, those that it may have, and whether it takes all others, too."""
        reset = self.method("reset")
        if reset is None:
            return set(), set(), False
        static = isinstance(inspect.getattr_static(self.kind, "reset"), staticmethod)
        parameters = list(inspect.signature(reset).parameters.values())[not static :]
        named = [
            one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
        ]
        needed = {one.name for one in named if one.default is one.empty}
        others = any(one.kind == one.VAR_KEYWORD for one in parameters)
        return needed, {one.name for one in named}, others

    def reset_arguments(self, row: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """Return columns by name, and the seed for a ``reset`` that names it; a column ``seed`` comes first."""
        needed, named, others = self.reset_names
        given = {name: value for name, value in row.items() if others or name in named}
        if "seed" in named:
            given.setdefault("seed", seed)
        missing = needed - given.keys()
        if missing:
            has = ", ".join(row) or "none"
            raise TypeError(f"reset takes {', '.join(sorted(missing))}; the row's columns: {has}")
        return given


def load_specs(
    entries: Sequence[Any], tools: Sequence[Any], contract: Contract
) -> dict[str, EnvironmentSpec]:
    """Return all environments by name; :class:`ConfigError` says what of ``--env`` and ``--tools`` cannot be used."""
    if contract not in RESERVED:
        raise ConfigError(f"--env_contract must be one of {', '.join(RESERVED)}, got {contract!r}")
    try:
        files = _objects_by_file(entries, tools)
        functions = _load_functions(tools, files)
        specs: dict[str, EnvironmentSpec] = {}
        for entry in entries:
            for spec in _load_entry(entry, functions, contract, files):
                if spec.name in specs:
                    raise ConfigError(
                        f"--env: two environments are named {spec.name!r}; write NAME=file.py:Class"
                    )
                specs[spec.name] = spec
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not specs:
        if not functions:
            raise ConfigError("--env, --tools: name an environment or a tool")
        specs[TOOLS_ONLY] = EnvironmentSpec(TOOLS_ONLY, "--tools", contract, functions=functions)
    return specs


Files = dict[tuple[Path, str], Any]  # what is named, of files that each run once


def _objects_by_file(entries: Sequence[Any], tools: Sequence[Any]) -> Files:
    wanted: dict[Path, tuple[str, dict[str, None]]] = {}
    for option, texts in (("--env", entries), ("--tools", tools)):
        for text in texts:
            for path, name in _names_of(text, option):
                wanted.setdefault(path, (option, {}))[1][name] = None
    return {
        (path, name): target
        for path, (option, names) in wanted.items()
        for name, target in zip(names, load_python_objects(path, list(names), option=option))
    }


def _names_of(entry: Any, option: str) -> list[tuple[Path, str]]:
    """Return file and name of each object that a text names; none of an object, a module or an adapter."""
    if not isinstance(entry, str) or (option == "--tools" and entry == PYTHON_TOOL):
        return []
    spec = _split_name(entry)[1] if option == "--env" else entry
    if spec.partition(":")[0] in ADAPTED:
        return []
    head, _, names = spec.rpartition(":")
    if not spec.endswith(".py") and not head.endswith(".py"):
        return []
    if spec.endswith(".py"):
        raise ConfigError(
            f"{option} {spec}: name what it has: {spec}:{'Class' if option == '--env' else 'f,g'}"
        )
    return [
        split_python_spec(f"{head}:{name.strip()}", "", option=option) for name in names.split(",")
    ]


def _split_name(entry: str) -> tuple[str | None, str]:
    match = re.fullmatch(r"([\w.-]+)=(.+)", entry)
    return (match[1], match[2]) if match else (None, entry)


def _load_functions(tools: Sequence[Any], files: Files) -> dict[str, Tool]:
    functions: dict[str, Tool] = {}
    for entry in tools:
        if entry == PYTHON_TOOL:
            from lightppo.episodes.tools import python

            candidates = [(python, PYTHON_TOOL)]
        elif isinstance(entry, str):
            candidates = [
                (files[path, name], f"{path.name}:{name}")
                for path, name in _names_of(entry, "--tools")
            ] or [(_from_module(entry, "--tools"), entry)]
        else:
            candidates = [(entry, getattr(entry, "__qualname__", str(entry)))]
        for function, where in candidates:
            if not callable(function) or isinstance(function, type):
                raise ConfigError(f"--tools: {where} is of type {type(function).__name__}")
            tool = Tool(getattr(function, "__name__", where), function, where=where)
            if tool.name in functions:
                raise ConfigError(f"--tools: two tools are named {tool.name!r}")
            functions[tool.name] = tool
    return functions


def _load_entry(
    entry: Any, functions: dict[str, Tool], contract: Contract, files: Files
) -> list[EnvironmentSpec]:
    if not isinstance(entry, str):
        return _specs_of(entry, None, getattr(entry, "__qualname__", ""), functions, contract)
    name, spec = _split_name(entry)
    prefix, _, rest = spec.partition(":")
    if prefix in ADAPTED:
        from lightppo.episodes.adapters import adapted

        make, kind, own_name = adapted(prefix, rest)
        return [EnvironmentSpec(name or own_name, spec, "lightppo", make, kind, functions)]
    places = _names_of(entry, "--env")
    if not places:
        return _specs_of(_from_module(spec, "--env"), name, spec, functions, contract)
    if name and len(places) > 1:
        raise ConfigError(f"--env {entry}: one name for {len(places)} classes")
    return [
        one
        for path, own in places
        for one in _specs_of(files[path, own], name, f"{path.name}:{own}", functions, contract)
    ]


def _from_module(spec: str, option: str) -> Any:
    module, colon, name = spec.partition(":")
    if not colon or not re.fullmatch(r"[\w.]+", module):
        raise ConfigError(f"{option}: {spec!r} is not of the form file.py:Name or package:Name")
    try:
        target: Any = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
    except BaseException as error:  # whatever importing it raises
        if not is_users_fault(error):
            raise
        raise ConfigError(f"{option} {spec}: {error_text(error)}") from error
    return target


def _specs_of(
    target: Any, name: str | None, where: str, functions: dict[str, Tool], contract: Contract
) -> list[EnvironmentSpec]:
    if isinstance(target, Mapping):  # TRL's: name → class, or a function that makes one
        if name:
            raise ConfigError(f"--env: {where} has names of its own; leave out {name}=")
        return [
            one
            for key, made in target.items()
            for one in _specs_of(made, str(key), f"{where}[{key!r}]", functions, contract)
        ]
    if not callable(target):
        raise ConfigError(f"--env: {where} is of type {type(target).__name__}, not a class")
    from lightppo.episodes.adapters import adapter_of

    make, kind, own_contract = adapter_of(target) or (target, _kind_of(target, where), contract)
    own_name = getattr(target, "__name__", where)
    return [EnvironmentSpec(name or own_name, where, own_contract, make, kind, functions)]


def _kind_of(target: Any, where: str) -> type | None:
    """Return the class itself, or the one that a function says it returns."""
    if isinstance(target, type):
        return target
    try:
        hint = typing.get_type_hints(target).get("return")
    except Exception as error:
        raise ConfigError(f"--env: {where}: {error_text(error)}") from error
    if isinstance(hint, type) and hasattr(hint, "reset"):
        return hint
    return None
