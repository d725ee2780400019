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
from lightppo.user_code import error_text, in_daemon_thread

_BASIC = (int, float, str, bool, type(None), list, tuple, dict, Any)
_MAX_EXAMPLE = 80  # characters of a wrong argument
_SECTIONS = r"(?:Args|Arguments|Parameters|Returns|Raises|Yields|Examples?)"


class BadCall(Exception):
    """Refuse a call that no tool can take; the text says to the model what to write instead."""


@dataclass(eq=False)
class Tool:
    """Describe a function that the model may call, by its signature and docstring."""

    name: str
    function: Callable[..., Any]
    where: str  # file.py:Class.name
    is_method: bool = False  # the first parameter is the environment

    @cached_property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """Return what the model gives, by name."""
        parameters = list(inspect.signature(self.function).parameters.values())[self.is_method :]
        for parameter in parameters:
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
                raise ConfigError(
                    f"{self.where}: a model gives arguments by name, so {parameter} cannot be filled"
                )
        return {
            parameter.name: parameter
            for parameter in parameters
            if parameter.kind != parameter.VAR_KEYWORD
        }

    @cached_property
    def takes_others(self) -> bool:
        """Tell whether it has ``**kwargs``."""
        parameters = inspect.signature(self.function).parameters.values()
        return any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters)

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

        untyped = [
            parameter_name for parameter_name in self.parameters if parameter_name not in self.hints
        ]
        if untyped:
            raise ConfigError(
                f"{self.where}: argument {untyped[0]} has no type; write {untyped[0]}: int, for example"
            )
        basic_hints = {
            parameter_name: type_hint
            for parameter_name, type_hint in self.hints.items()
            if _is_basic(type_hint)
        }
        annotations = {
            parameter_name: basic_hints.get(parameter_name, Any)
            for parameter_name in [*self.parameters, "return"]
            if parameter_name in basic_hints or parameter_name in self.parameters
        }

        def described() -> None: ...

        described.__name__ = self.name
        described.__doc__ = self._docstring()
        described.__annotations__ = annotations
        described.__signature__ = inspect.Signature(
            [
                parameter.replace(annotation=annotations[parameter_name])
                for parameter_name, parameter in self.parameters.items()
            ]
        )
        try:
            schema = get_json_schema(described)
        except Exception as error:
            raise ConfigError(f"{self.where}: no JSON schema: {error_text(error)}") from error
        properties = schema["function"]["parameters"]["properties"]
        for parameter_name in self.parameters.keys() - basic_hints.keys():
            properties[parameter_name] = self._schema_by_pydantic(parameter_name) | {
                "description": properties[parameter_name]["description"]
            }
        return schema

    def check(self, arguments: Any) -> dict[str, Any]:
        """Return the arguments of a call by the signature's types; :class:`BadCall` says what is wrong.

        Names are strict. Values are converted where nothing is lost, as parsers of calls may give all values as texts:
        ``"3"`` and ``3.0`` are 3 for an ``int``, ``"[1, 2]"`` is a list for a ``list``, and 3 is ``"3"`` for a ``str``.
        """
        if not isinstance(arguments, Mapping):
            raise BadCall(f"{self.name}: the arguments must be an object. {self._usage}")
        required = (
            parameter
            for parameter in self.parameters.values()
            if parameter.default is parameter.empty
        )
        missing_names = [
            parameter.name for parameter in required if parameter.name not in arguments
        ]
        if missing_names:
            raise BadCall(
                f"{self.name}: missing argument {', '.join(missing_names)}. {self._usage}"
            )
        unknown_names = [str(name) for name in arguments if name not in self.parameters]
        if unknown_names and not self.takes_others:
            raise BadCall(
                f"{self.name}: unknown argument {', '.join(unknown_names)}. {self._usage}"
            )
        checked_arguments = dict(arguments)
        for name in filter(self.parameters.__contains__, arguments):
            checked_arguments[name] = self._converted(name, arguments[name])
        return checked_arguments

    @cached_property
    def _usage(self) -> str:
        return f"It takes {', '.join(self.parameters) or 'no arguments'}."

    @cached_property
    def adapters(self) -> dict[str, Any]:
        """Return what checks and converts the value of each parameter."""
        from pydantic import ConfigDict, PydanticUserError, TypeAdapter

        config = ConfigDict(arbitrary_types_allowed=True, coerce_numbers_to_str=True)
        adapters = {}
        for parameter_name in self.parameters:
            type_hint = self.hints.get(parameter_name, Any)
            try:
                try:
                    adapters[parameter_name] = TypeAdapter(type_hint, config=config)
                except (
                    PydanticUserError
                ):  # models and dataclasses have a configuration of their own
                    adapters[parameter_name] = TypeAdapter(type_hint)
            except Exception as error:
                raise ConfigError(
                    f"{self.where}: the type of argument {parameter_name} cannot be checked: {error_text(error)}"
                ) from error
        return adapters

    def _converted(self, parameter_name: str, argument: Any) -> Any:
        from pydantic import ValidationError

        try:
            return self.adapters[parameter_name].validate_python(argument)
        except ValidationError as error:
            validation_error = error
        if isinstance(argument, str):
            try:
                return self.adapters[parameter_name].validate_python(json.loads(argument))
            except (ValueError, RecursionError):  # ValidationError is a ValueError
                pass
        first_error = validation_error.errors(include_url=False, include_context=False)[0]
        error_place = ".".join(map(str, (parameter_name, *first_error["loc"])))
        argument_text = repr(argument)
        if len(argument_text) > _MAX_EXAMPLE:
            argument_text = f"{argument_text[:_MAX_EXAMPLE]}…"
        raise BadCall(
            f"{self.name}: argument {error_place}: {first_error['msg']}, got {argument_text}"
        )

    def _schema_by_pydantic(self, parameter_name: str) -> dict[str, Any]:
        """Return the schema of enumerations, models and whatever else transformers takes for any object."""
        try:
            schema = self.adapters[parameter_name].json_schema()
            return without_references(schema, schema.pop("$defs", {}))
        except Exception as error:
            raise ConfigError(
                f"{self.where}: no JSON schema for argument {parameter_name}: {error_text(error)}"
            ) from error

    def _docstring(self) -> str:
        """Return the docstring in the form that transformers reads: Google's, with one argument a line."""
        from transformers.utils.chat_template_utils import parse_google_format_docstring

        docstring = (inspect.getdoc(self.function) or "").strip()
        example = ""
        if self.parameters:
            explanations = ", ".join(f"{name}: what it is" for name in self.parameters)
            example = f' For example: """What it does. Args: {explanations}."""'
        if not docstring:
            raise ConfigError(
                f"{self.where} has no docstring, which tells the model what the tool does.{example}"
            )
        if self.parameters.keys() <= parse_google_format_docstring(docstring)[1].keys():
            return docstring
        docstring = _rewritten(docstring, list(self.parameters))
        missing_names = self.parameters.keys() - parse_google_format_docstring(docstring)[1].keys()
        if missing_names:
            raise ConfigError(
                f"{self.where}: the docstring does not describe {', '.join(sorted(missing_names))}.{example}"
            )
        return docstring


def _rewritten(docstring: str, parameter_names: list[str]) -> str:
    """Return a docstring whose sections stand anywhere, such as ``Guess. Args: x: a number.``, with lines of their own."""
    section_parts = re.split(rf"(?:^|(?<=\s))({_SECTIONS}):(?=\s|$)", docstring)
    description = section_parts[0].strip()
    sections = dict(zip(section_parts[1::2], section_parts[2::2]))
    arguments = next(
        (
            sections.pop(parameter_name)
            for parameter_name in ("Args", "Arguments", "Parameters")
            if parameter_name in sections
        ),
        "",
    )
    name_pattern = "|".join(map(re.escape, parameter_names))
    argument_parts = re.split(
        rf"(?:^|(?<=[\s,;]))({name_pattern})\s*(?:\([^)]*\))?:(?=\s)", arguments
    )
    lines = [
        f"    {parameter_name}: {' '.join(explanation.split()).rstrip(',;')}"
        for parameter_name, explanation in zip(argument_parts[1::2], argument_parts[2::2])
    ]
    arguments_block = "\n".join(["", "", "Args:", *lines]) if lines else ""
    returns = " ".join(sections.get("Returns", "").split())
    return description + arguments_block + (f"\n\nReturns:\n    {returns}" if returns else "")


def _is_basic(type_hint: Any) -> bool:
    """Tell whether transformers describes a type exactly."""
    origin = typing.get_origin(type_hint)
    type_arguments = typing.get_args(type_hint)
    if origin is None:
        return any(type_hint is basic for basic in _BASIC)
    if origin is typing.Literal:
        return all(type(inner_type) in _BASIC for inner_type in type_arguments)
    if origin is tuple and (Ellipsis in type_arguments or len(type_arguments) == 1):
        return False
    return origin in (list, tuple, dict, typing.Union, types.UnionType) and all(
        map(_is_basic, type_arguments)
    )


def without_references(schema: Any, definitions: Mapping[str, Any], depth: int = 0) -> Any:
    """Return a schema in which what ``$ref`` names stands in its place, as templates print schemas as they are."""
    if depth > 20:
        raise ValueError("the type contains itself")
    if isinstance(schema, list):
        return [without_references(item, definitions, depth + 1) for item in schema]
    if not isinstance(schema, dict):
        return schema
    parts = schema.get("allOf")
    # as pydantic before 2.9 writes a reference with a default
    if isinstance(parts, list) and len(parts) == 1:
        schema = parts[0] | {name: member for name, member in schema.items() if name != "allOf"}
    if "$ref" in schema:
        other_members = {
            member_name: member for member_name, member in schema.items() if member_name != "$ref"
        }
        definition = definitions[schema["$ref"].rpartition("/")[2]]
        return without_references(definition | other_members, definitions, depth + 1)
    return {
        member_name: without_references(member, definitions, depth + 1)
        for member_name, member in schema.items()
    }


def text_of(result: Any, *, as_trl: bool) -> str:
    """Return a tool's result as the model reads it.

    Ours: texts as they are, nothing for ``None``, JSON for the rest. TRL: ``str(result)``; of a list of content parts,
    which are for models that see images, their texts.
    """
    if isinstance(result, str):
        return str(result)
    if as_trl:
        content_parts = result if isinstance(result, list) and result else [None]
        if all(
            isinstance(content_part, Mapping) and "type" in content_part
            for content_part in content_parts
        ):
            return "".join(
                str(content_part["text"])
                for content_part in content_parts
                if "text" in content_part
            )
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
    """  # noqa: D401, RUF100 - the model reads it
    raise EnvFailure("the tool python runs in the sandbox only")


class PythonRunner:
    """Run programs in the sandboxes of the tool."""

    def __init__(self, make_pool: Callable[[], Any] | None = None) -> None:
        from lightppo.verifiers.sandbox import SandboxPool

        self._pool = (make_pool or SandboxPool)()

    async def call(self, arguments: Mapping[str, Any]) -> Reply:
        """Run a program. What it does wrong is text for the model; :class:`EnvFailure`: the sandbox failed.

        The sandbox has the limits. The wait for a free one counts for none.
        """
        program = _PROGRAM.replace("SOURCE", json.dumps(arguments["code"]))
        try:
            program_run = await asyncio.wrap_future(in_daemon_thread(self._pool.run, program))
        except SandboxError as error:
            raise EnvFailure(str(error)) from error
        limits = {
            "timeout": f"stopped: it ran longer than {self._pool.limits.code_timeout:g} s",
            "output": "stopped: it printed too much",
            "memory": "stopped: it needed too much memory",
            "processes": "stopped: it started too many processes",
            "signal": f"stopped: it died by signal {abs(program_run.code)}",
        }
        problem = limits.get(program_run.ended, "")
        if program_run.ended == "exit" and program_run.code not in (0, 1):
            problem = f"exit code {program_run.code}"
        outputs = (program_run.stdout, program_run.stderr, problem)
        output = "\n".join(
            output_part.rstrip("\n") for output_part in outputs if output_part.strip()
        )
        has_failed = program_run.ended != "exit" or program_run.code != 0
        return Reply(output or "(nothing was printed)", error=has_failed)

    def close(self) -> None:
        """End the sandboxes."""
        self._pool.close()
