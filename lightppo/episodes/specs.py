"""Environments that a run names, loaded and looked at: which methods they have, and which are tools."""

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
    """Describe one environment: how it is made, and what it offers."""

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

    def look_at(self, environment_class: type) -> None:
        """Find the methods of the class."""
        self.kind = environment_class
        if not callable(getattr(environment_class, "reset", None)):
            raise ConfigError(f"{self.where}: {environment_class.__name__} has no method reset")
        methods = {
            method_name: Tool(
                method_name,
                getattr(environment_class, method_name),
                where=f"{self.where}.{method_name}",
                is_method=not isinstance(
                    inspect.getattr_static(environment_class, method_name), staticmethod
                ),
            )
            for method_name in self._method_names(environment_class)
        }
        if self.is_agent and self.functions:
            raise ConfigError(
                f"{self.where}: an agent program has tools of its own; leave out --tools"
            )
        doubled_names = methods.keys() & self.functions.keys()
        if doubled_names:
            raise ConfigError(
                f"{self.where}: {', '.join(sorted(doubled_names))} is in --tools, too"
            )
        self.tools = {**self.functions, **methods}
        self.check_types()

    def check_types(self) -> None:
        """Read the types of all tools now, so that no call waits for that and no type is a surprise."""
        for tool in self.tools.values():
            _ = tool.parameters
            if self.contract == "lightppo":
                _ = tool.adapters

    def _method_names(self, environment_class: type) -> list[str]:
        """Return the names of tools in the order of the source; in TRL's contract in its order."""
        method_names = [
            method_name
            for method_name, _ in inspect.getmembers(
                environment_class, predicate=inspect.isfunction
            )
        ]
        if self.contract == "lightppo":
            source_order = [
                method_name
                for base_class in reversed(environment_class.__mro__)
                for method_name in vars(base_class)
            ]
            method_names.sort(key=source_order.index)
        return [
            method_name
            for method_name in method_names
            if not method_name.startswith("_") and method_name not in RESERVED[self.contract]
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
        reserved_names = RESERVED[self.contract]
        functions = [
            function
            for method_name in reserved_names
            if (function := self.method(method_name)) is not None
        ]
        functions += [
            tool.function for method_name, tool in self.tools.items() if method_name != PYTHON_TOOL
        ]
        return all(map(inspect.iscoroutinefunction, functions))

    def reset_arguments(self, columns: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """Return columns by name, and the seed for a ``reset`` that names it; a column ``seed`` comes first."""
        is_static = isinstance(inspect.getattr_static(self.kind, "reset"), staticmethod)
        signature = inspect.signature(self.method("reset"))
        parameters = list(signature.parameters.values())[not is_static :]
        parameters_by_name = {
            parameter.name: parameter
            for parameter in parameters
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        }
        takes_others = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters)
        arguments = {
            name: value
            for name, value in columns.items()
            if takes_others or name in parameters_by_name
        }
        if "seed" in parameters_by_name:
            arguments.setdefault("seed", seed)
        missing_names = [
            name
            for name in sorted(parameters_by_name.keys() - arguments.keys())
            if parameters_by_name[name].default is inspect.Parameter.empty
        ]
        if missing_names:
            column_names = ", ".join(columns) or "none"
            raise TypeError(
                f"reset takes {', '.join(missing_names)}; the row's columns: {column_names}"
            )
        return arguments


def load_specs(
    entries: Sequence[Any], tools: Sequence[Any], contract: Contract
) -> dict[str, EnvironmentSpec]:
    """Return all environments by name; :class:`ConfigError` says what of ``--env`` and ``--tools`` cannot be used."""
    if contract not in RESERVED:
        raise ConfigError(f"--env_contract must be one of {', '.join(RESERVED)}, got {contract!r}")
    try:
        files = _objects_by_file(entries, tools)
        functions = _load_functions(tools, files)
        environment_specs: dict[str, EnvironmentSpec] = {}
        for entry in entries:
            for environment_spec in _load_entry(entry, functions, contract, files):
                if environment_spec.name in environment_specs:
                    raise ConfigError(
                        f"--env: two environments are named {environment_spec.name!r}; write NAME=file.py:Class"
                    )
                environment_specs[environment_spec.name] = environment_spec
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not environment_specs:
        if not functions:
            raise ConfigError("--env, --tools: name an environment or a tool")
        environment_specs[TOOLS_ONLY] = EnvironmentSpec(
            TOOLS_ONLY, "--tools", contract, functions=functions
        )
    return environment_specs


Files = dict[tuple[Path, str], Any]  # what is named, of files that each run once


def _objects_by_file(entries: Sequence[Any], tools: Sequence[Any]) -> Files:
    requested_names: dict[Path, tuple[str, dict[str, None]]] = {}
    for option, option_entries in (("--env", entries), ("--tools", tools)):
        for entry in option_entries:
            for path, object_name in _names_of(entry, option):
                requested_names.setdefault(path, (option, {}))[1][object_name] = None
    return {
        (path, object_name): loaded_object
        for path, (option, object_names) in requested_names.items()
        for object_name, loaded_object in zip(
            object_names, load_python_objects(path, list(object_names), option=option)
        )
    }


def _names_of(entry: Any, option: str) -> list[tuple[Path, str]]:
    """Return file and name of each object that a text names; none of an object, a module or an adapter."""
    if not isinstance(entry, str) or (option == "--tools" and entry == PYTHON_TOOL):
        return []
    python_spec = _split_name(entry)[1] if option == "--env" else entry
    if python_spec.partition(":")[0] in ADAPTED:
        return []
    file_part, _, object_names = python_spec.rpartition(":")
    if not python_spec.endswith(".py") and not file_part.endswith(".py"):
        return []
    if python_spec.endswith(".py"):
        raise ConfigError(
            f"{option} {python_spec}: name what it has: {python_spec}:{'Class' if option == '--env' else 'f,g'}"
        )
    return [
        split_python_spec(f"{file_part}:{object_name.strip()}", "", option=option)
        for object_name in object_names.split(",")
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
                (files[path, function_name], f"{path.name}:{function_name}")
                for path, function_name in _names_of(entry, "--tools")
            ] or [(_from_module(entry, "--tools"), entry)]
        else:
            candidates = [(entry, getattr(entry, "__qualname__", str(entry)))]
        for function, origin in candidates:
            if not callable(function) or isinstance(function, type):
                raise ConfigError(f"--tools: {origin} is of type {type(function).__name__}")
            tool = Tool(getattr(function, "__name__", origin), function, where=origin)
            if tool.name in functions:
                raise ConfigError(f"--tools: two tools are named {tool.name!r}")
            functions[tool.name] = tool
    return functions


def _load_entry(
    entry: Any, functions: dict[str, Tool], contract: Contract, files: Files
) -> list[EnvironmentSpec]:
    if not isinstance(entry, str):
        return _specs_of(entry, None, getattr(entry, "__qualname__", ""), functions, contract)
    name, entry_spec = _split_name(entry)
    prefix, _, adapter_argument = entry_spec.partition(":")
    if prefix in ADAPTED:
        from lightppo.episodes.adapters import adapted

        make_environment, environment_class, own_name = adapted(prefix, adapter_argument)
        return [
            EnvironmentSpec(
                name or own_name,
                entry_spec,
                "lightppo",
                make_environment,
                environment_class,
                functions,
            )
        ]
    file_objects = _names_of(entry, "--env")
    if not file_objects:
        return _specs_of(_from_module(entry_spec, "--env"), name, entry_spec, functions, contract)
    if name and len(file_objects) > 1:
        raise ConfigError(f"--env {entry}: one name for {len(file_objects)} classes")
    return [
        environment_spec
        for path, object_name in file_objects
        for environment_spec in _specs_of(
            files[path, object_name], name, f"{path.name}:{object_name}", functions, contract
        )
    ]


def _from_module(python_spec: str, option: str) -> Any:
    module, colon, name = python_spec.partition(":")
    if not colon or not re.fullmatch(r"[\w.]+", module):
        raise ConfigError(
            f"{option}: {python_spec!r} is not of the form file.py:Name or package:Name"
        )
    try:
        loaded_object: Any = importlib.import_module(module)
        for attribute in name.split("."):
            loaded_object = getattr(loaded_object, attribute)
    except BaseException as error:  # whatever importing it raises
        if not is_users_fault(error):
            raise
        raise ConfigError(f"{option} {python_spec}: {error_text(error)}") from error
    return loaded_object


def _specs_of(
    target: Any, name: str | None, origin: str, functions: dict[str, Tool], contract: Contract
) -> list[EnvironmentSpec]:
    if isinstance(target, Mapping):  # TRL's: name → class, or a function that makes one
        if name:
            raise ConfigError(f"--env: {origin} has names of its own; leave out {name}=")
        return [
            environment_spec
            for entry_name, entry_target in target.items()
            for environment_spec in _specs_of(
                entry_target, str(entry_name), f"{origin}[{entry_name!r}]", functions, contract
            )
        ]
    if not callable(target):
        raise ConfigError(f"--env: {origin} is of type {type(target).__name__}, not a class")
    from lightppo.episodes.adapters import adapter_of

    make_environment, environment_class, own_contract = adapter_of(target) or (
        target,
        _kind_of(target, origin),
        contract,
    )
    own_name = getattr(target, "__name__", origin)
    return [
        EnvironmentSpec(
            name or own_name, origin, own_contract, make_environment, environment_class, functions
        )
    ]


def _kind_of(target: Any, origin: str) -> type | None:
    """Return the class itself, or the one that a function says it returns."""
    if isinstance(target, type):
        return target
    try:
        return_type = typing.get_type_hints(target).get("return")
    except Exception as error:
        raise ConfigError(f"--env: {origin}: {error_text(error)}") from error
    if isinstance(return_type, type) and hasattr(return_type, "reset"):
        return return_type
    return None
