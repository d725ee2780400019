"""Tools: their JSON schema, the check of a call's arguments, and their results as text for the model."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lightppo.episodes.env_failures import EnvFailure, Reply
from lightppo.errors import ConfigError, SandboxError
from lightppo.processes.user_calls import in_daemon_thread
from lightppo.user_code import error_text

_BASIC = (int, float, str, bool, type(None), list, tuple, dict, Any)
_MOST_SHOWN = 80  # characters of a wrong argument
_SECTIONS = r"(?:Args|Arguments|Parameters|Returns|Raises|Yields|Examples?)"


class BadCall(Exception):
    """A call that no tool can take; the text says to the model what to write instead."""


@dataclass(eq=False)
class Tool:
    """A function that the model may call, as its signature and docstring describe it."""

    name: str
    function: Callable[..., Any]
    where: str  # file.py:Class.name
    is_method: bool = False  # the first parameter is the environment

    @cached_property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """Return what the model gives, by name."""
        parameters = list(inspect.signature(self.function).parameters.values())[self.is_method :]
        for one in parameters:
            if one.kind in (one.POSITIONAL_ONLY, one.VAR_POSITIONAL):
                raise ConfigError(
                    f"{self.where}: a model gives arguments by name, so {one} cannot be filled"
                )
        return {one.name: one for one in parameters if one.kind != one.VAR_KEYWORD}

    @cached_property
    def takes_others(self) -> bool:
        """Tell whether it has ``**kwargs``."""
        parameters = inspect.signature(self.function).parameters.values()
        return any(one.kind == one.VAR_KEYWORD for one in parameters)

    @cached_property
    def hints(self) -> dict[str, Any]:
        """Return the types of the parameters, and of the result as ``return``."""
        try:
            return typing.get_type_hints(self.function, include_extras=True)
        except Exception as error:  # names that only a type checker sees, and whatever else
            raise ConfigError(
                f"{self.where}: its types cannot be read: {error_text(error)}"
            ) from error

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema for chat templates, by transformers."""
        from transformers.utils import get_json_schema

        untyped = [name for name in self.parameters if name not in self.hints]
        if untyped:
            raise ConfigError(
                f"{self.where}: argument {untyped[0]} has no type; write {untyped[0]}: int, for example"
            )
        basic = {name: hint for name, hint in self.hints.items() if _is_basic(hint)}
        own = {
            name: basic.get(name, Any)
            for name in [*self.parameters, "return"]
            if name in basic or name in self.parameters
        }

        def described() -> None: ...

        described.__name__ = self.name
        described.__doc__ = self._docstring()
        described.__annotations__ = own
        described.__signature__ = inspect.Signature(
            [one.replace(annotation=own[name]) for name, one in self.parameters.items()]
        )
        try:
            schema = get_json_schema(described)
        except Exception as error:
            raise ConfigError(f"{self.where}: no JSON schema: {error_text(error)}") from error
        properties = schema["function"]["parameters"]["properties"]
        for name in self.parameters.keys() - basic.keys():
            properties[name] = self._schema_by_pydantic(name) | {
                "description": properties[name]["description"]
            }
        return schema

    def check(self, given: Any) -> dict[str, Any]:
        """Return the arguments of a call by the signature's types; :class:`BadCall` says what is wrong.

        Names are strict. Values are converted where nothing is lost, as parsers of calls may give all values as texts:
        ``"3"`` and ``3.0`` are 3 for an ``int``, ``"[1, 2]"`` is a list for a ``list``, and 3 is ``"3"`` for a ``str``.
        """
        if not isinstance(given, Mapping):
            raise BadCall(f"{self.name}: the arguments must be an object. {self._usage}")
        missing = [
            name
            for name, one in self.parameters.items()
            if one.default is one.empty and name not in given
        ]
        if missing:
            raise BadCall(f"{self.name}: missing argument {', '.join(missing)}. {self._usage}")
        unknown = [] if self.takes_others else [str(k) for k in given if k not in self.parameters]
        if unknown:
            raise BadCall(f"{self.name}: unknown argument {', '.join(unknown)}. {self._usage}")
        return {
            name: self._converted(name, value) if name in self.parameters else value
            for name, value in given.items()
        }

    @cached_property
    def _usage(self) -> str:
        return f"It takes {', '.join(self.parameters) or 'no arguments'}."

    @cached_property
    def adapters(self) -> dict[str, Any]:
        """Return what checks and converts the value of each parameter."""
        from pydantic import ConfigDict, PydanticUserError, TypeAdapter

        config = ConfigDict(arbitrary_types_allowed=True, coerce_numbers_to_str=True)
        adapters = {}
        for name in self.parameters:
            hint = self.hints.get(name, Any)
            try:
                try:
                    adapters[name] = TypeAdapter(hint, config=config)
                except (
                    PydanticUserError
                ):  # models and dataclasses have a configuration of their own
                    adapters[name] = TypeAdapter(hint)
            except Exception as error:
                raise ConfigError(
                    f"{self.where}: the type of argument {name} cannot be checked: {error_text(error)}"
                ) from error
        return adapters

    def _converted(self, name: str, value: Any) -> Any:
        from pydantic import ValidationError

        try:
            return self.adapters[name].validate_python(value)
        except ValidationError as error:
            wrong = error
        if isinstance(value, str):
            try:
                return self.adapters[name].validate_python(json.loads(value))
            except (ValueError, RecursionError):  # ValidationError is a ValueError
                pass
        first = wrong.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, (name, *first["loc"])))
        shown = repr(value)
        shown = shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}…"
        raise BadCall(f"{self.name}: argument {place}: {first['msg']}, got {shown}")

    def _schema_by_pydantic(self, name: str) -> dict[str, Any]:
        """Of enumerations, models and whatever else transformers takes for any object."""
        try:
            schema = self.adapters[name].json_schema()
            return without_references(schema, schema.pop("$defs", {}))
        except Exception as error:
            raise ConfigError(
                f"{self.where}: no JSON schema for argument {name}: {error_text(error)}"
            ) from error

    def _docstring(self) -> str:
        """Return the docstring in the form that transformers reads: Google's, with one argument a line."""
        from transformers.utils.chat_template_utils import parse_google_format_docstring

        text = (inspect.getdoc(self.function) or "").strip()
        example = ", ".join(f"{name}: what it is" for name in self.parameters)
        example = f' For example: """What it does. Args: {example}."""' if example else ""
        if not text:
            raise ConfigError(
                f"{self.where} has no docstring, which tells the model what the tool does.{example}"
            )
        if self.parameters.keys() <= parse_google_format_docstring(text)[1].keys():
            return text
        text = _rewritten(text, list(self.parameters))
        missing = self.parameters.keys() - parse_google_format_docstring(text)[1].keys()
        if missing:
            raise ConfigError(
                f"{self.where}: the docstring does not describe {', '.join(sorted(missing))}.{example}"
            )
        return text


def _rewritten(text: str, names: list[str]) -> str:
    """Return a docstring whose sections stand anywhere, such as ``Guess. Args: x: a number.``, with lines of their own."""
    parts = re.split(rf"(?:^|(?<=\s))({_SECTIONS}):(?=\s|$)", text)
    description = parts[0].strip()
    sections = dict(zip(parts[1::2], parts[2::2]))
    arguments = next(
        (sections.pop(name) for name in ("Args", "Arguments", "Parameters") if name in sections), ""
    )
    known = "|".join(map(re.escape, names))
    pieces = re.split(rf"(?:^|(?<=[\s,;]))({known})\s*(?:\([^)]*\))?:(?=\s)", arguments)
    lines = [
        f"    {name}: {' '.join(what.split()).rstrip(',;')}"
        for name, what in zip(pieces[1::2], pieces[2::2])
    ]
    block = "\n".join(["", "", "Args:", *lines]) if lines else ""
    returns = " ".join(sections.get("Returns", "").split())
    return description + block + (f"\n\nReturns:\n    {returns}" if returns else "")


def _is_basic(hint: Any) -> bool:
    """Tell whether transformers describes a type exactly."""
    origin = typing.get_origin(hint)
    inner = typing.get_args(hint)
    if origin is None:
        return any(hint is basic for basic in _BASIC)
    if origin is typing.Literal:
        return all(type(one) in _BASIC for one in inner)
    if origin is tuple and (Ellipsis in inner or len(inner) == 1):
        return False
    return origin in (list, tuple, dict, typing.Union, types.UnionType) and all(
        map(_is_basic, inner)
    )


def without_references(schema: Any, definitions: Mapping[str, Any], depth: int = 0) -> Any:
    """Templates print schemas as they are, so what ``$ref`` names stands in its place."""
    if depth > 20:
        raise ValueError("the type contains itself")
    if isinstance(schema, list):
        return [without_references(one, definitions, depth + 1) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        named = definitions[schema["$ref"].rpartition("/")[2]]
        return without_references(named | rest, definitions, depth + 1)
    return {key: without_references(value, definitions, depth + 1) for key, value in schema.items()}


def text_of(result: Any, *, as_trl: bool) -> str:
    """Return a tool's result as the model reads it.

    Ours: texts as they are, nothing for ``None``, JSON for the rest. TRL: ``str(result)``; of a list of content parts,
    which are for models that see images, their texts.
    """
    if isinstance(result, str):
        return str(result)
    if as_trl:
        parts = result if isinstance(result, list) and result else [None]
        if all(isinstance(part, Mapping) and "type" in part for part in parts):
            return "".join(str(part["text"]) for part in parts if "text" in part)
        return str(result)
    if result is None:
        return ""
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(result)


_PROGRAM = """
def _run(source):
    import ast, builtins, sys, traceback
    names = {"__name__": "__main__", "__builtins__": builtins}
    try:
        tree = ast.parse(source, "<python>")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<python>", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "<python>", "eval"), names)
            if value is not None:
                print(repr(value))
    except SystemExit:
        raise
    except BaseException as error:
        sys.stdout.flush()
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != "<python>":
            trace = trace.tb_next
        traceback.print_exception(error.with_traceback(trace))
        sys.exit(1)

_run(SOURCE)
"""


def python(code: str) -> str:
    """Runs a Python program and returns what it prints, and the value of its last line.

    Nothing is kept between calls.

    Args:
        code: The whole program.
    """
    raise EnvFailure("the tool python runs in the sandbox only")


class PythonRunner:
    """The sandboxes of the tool."""

    def __init__(self, make_pool: Callable[[], Any] | None = None) -> None:
        from lightppo.verifiers.sandbox import SandboxPool

        self._pool = (make_pool or SandboxPool)()

    async def call(self, arguments: Mapping[str, Any]) -> Reply:
        """Run a program. What it does wrong is text for the model; :class:`EnvFailure`: the sandbox failed.

        The sandbox has the limits. The wait for a free one counts for none.
        """
        program = _PROGRAM.replace("SOURCE", json.dumps(arguments["code"]))
        try:
            run = await asyncio.wrap_future(in_daemon_thread(self._pool.run, program))
        except SandboxError as error:
            raise EnvFailure(str(error)) from error
        limits = {
            "timeout": f"stopped: it ran longer than {self._pool.limits.code_timeout:g} s",
            "output": "stopped: it printed too much",
            "memory": "stopped: it needed too much memory",
            "processes": "stopped: it started too many processes",
            "signal": f"stopped: it died by signal {abs(run.code)}",
        }
        problem = limits.get(run.ended, "")
        if run.ended == "exit" and run.code not in (0, 1):
            problem = f"exit code {run.code}"
        printed = (run.stdout, run.stderr, problem)
        text = "\n".join(part.rstrip("\n") for part in printed if part.strip())
        failed = run.ended != "exit" or run.code != 0
        return Reply(text or "(nothing was printed)", error=failed)

    def close(self) -> None:
        """End the sandboxes."""
        self._pool.close()
