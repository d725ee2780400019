"""Environments on an OpenEnv server, ``openenv:URL``, through OpenEnv's own client.

Each episode has a WebSocket of its own. The MCP tools that an environment offers become tools of
ours; any other environment is played by text. The contract is that of openenv 0.10: ``/schema``,
``reset``, ``step``, and the actions ``list_tools`` and ``call_tool``.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any

from lightppo.episodes.env_failures import EnvFailure, Reply, Step, ToolError
from lightppo.episodes.tools import without_references
from lightppo.errors import ConfigError
from lightppo.user_code import error_text

_ACTIONS_OF_TOOLS = ("Action", "CallToolAction", "ListToolsAction")  # titles of schemas
_TYPES = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "array": list,
    "object": dict,
}
_WORLD_ERRORS = ("transport_error", "timeout")  # of a call: not what the model did wrong
_CONNECT_SECONDS = 10.0
_MOST_SECONDS = 86_400.0  # of the client; --env_timeout is shorter
_RESERVED = ("reset", "step", "get_reward", "close")


class OpenEnvEnvironment:
    """Play a session on the server. The column ``config`` has arguments of ``reset`` beside the seed."""

    def __init__(self, client: Any, schema: Mapping[str, Any]) -> None:
        self._client = client
        self._schema = schema

    async def reset(self, seed: int, config: Any = None, **columns: Any) -> str | None:
        """Return the first observation."""
        try:
            result = await self._client.reset(**{"seed": seed} | dict(config or {}))
        except RuntimeError as error:
            if "CAPACITY_REACHED" not in str(error):
                raise
            raise EnvFailure(
                f"{error}; start it with a max_concurrent_envs of at least the episodes in flight"
            ) from error
        return _text_of(result.observation) or None

    async def close(self) -> None:
        """End the session on the server, too."""
        await self._client.close()


class OpenEnvText(OpenEnvEnvironment):
    """Play by text: the action as a JSON object, or the value of its only required field."""

    async def step(self, text: str) -> Step:
        """Return one action."""
        try:
            result = await self._client.step(self._action(text))
        except RuntimeError as error:
            if "VALIDATION_ERROR" not in str(error):
                raise
            raise ToolError(self._usage) from error
        return Step(_text_of(result.observation), result.reward or 0.0, bool(result.done))

    def _action(self, text: str) -> dict[str, Any]:
        fence_match = re.fullmatch(r"```\w*\n(.*)\n```", text.strip(), re.DOTALL)
        text = (fence_match[1] if fence_match else text).strip()
        try:
            json_value = json.loads(text)
        except (ValueError, RecursionError):
            json_value = text
        if isinstance(json_value, dict):
            return json_value
        required_fields = self._schema.get("required", [])
        if len(required_fields) != 1:
            raise ToolError(self._usage)
        is_text = self._fields[required_fields[0]].get("type") == "string"
        return {required_fields[0]: text if is_text else json_value}

    @property
    def _fields(self) -> dict[str, Any]:
        fields = self._schema.get("properties", {})
        return {
            field_name: field for field_name, field in fields.items() if field_name != "metadata"
        }

    @property
    def _usage(self) -> str:
        field_list = ", ".join(
            f"{field_name}: {field_schema.get('type', 'any')}"
            for field_name, field_schema in self._fields.items()
        )
        return f"Answer with a JSON object of {{{field_list}}}."


def served(package: Any, url: str, option: str) -> tuple[Callable[[], Any], type, str]:
    """Return what makes a session, its class with the server's tools, and its name.

    Raises:
        ConfigError: no server answers there, or a tool of it cannot be called by name.
    """
    make_client = partial(
        package.GenericEnvClient,
        url,
        connect_timeout_s=_CONNECT_SECONDS,
        message_timeout_s=_MOST_SECONDS,
    )
    try:
        schema = _schema(url)
        tools = _tools(make_client) if schema.get("title") in _ACTIONS_OF_TOOLS else None
    except Exception as error:  # of the client, the server or the network
        raise ConfigError(
            f"{option}: {error_text(error)}; start the environment's server there first"
        ) from error
    if tools is None:
        return (lambda: OpenEnvText(make_client(), schema)), OpenEnvText, "openenv"
    try:
        environment_class = type("OpenEnvTools", (OpenEnvEnvironment,), dict(map(_method, tools)))
    except (ValueError, KeyError) as error:
        raise ConfigError(f"{option}: {error_text(error)}") from error
    return (lambda: environment_class(make_client(), schema)), environment_class, "openenv"


def _schema(url: str) -> dict[str, Any]:
    """Return the JSON schema of actions."""
    import requests

    address = re.sub("^ws", "http", url.rstrip("/"))
    response = requests.get(f"{address}/schema", timeout=_CONNECT_SECONDS)
    response.raise_for_status()
    return response.json()["action"]


def _tools(make_client: Callable[..., Any]) -> list[dict[str, Any]]:
    with make_client(message_timeout_s=_CONNECT_SECONDS).sync() as client:
        return client.step({"type": "list_tools"}).observation["tools"]


def _method(tool: Mapping[str, Any]) -> tuple[str, Callable[..., Any]]:
    """Return a tool of the server as a method; ValueError if it has no name that a method can have."""
    tool_name = tool["name"]
    input_schema = tool["input_schema"]
    if tool_name.startswith("_") or tool_name in _RESERVED:
        raise ValueError(f"the server has a tool named {tool_name!r}, which cannot be called")

    async def call(self: OpenEnvEnvironment, **arguments: Any) -> Reply:
        action = {"type": "call_tool", "tool_name": tool_name, "arguments": arguments}
        result = await self._client.step(action)
        error = result.observation.get("error")
        if error and error["error_type"] in _WORLD_ERRORS:
            raise EnvFailure(f"{error['error_type']}: {error['message']}")
        reply_text = error["message"] if error else _result_of(result.observation.get("result"))
        return Reply(reply_text, bool(result.done), result.reward or 0.0, error=bool(error))

    type_hints = {
        argument_name: _hint(field_schema, input_schema)
        for argument_name, field_schema in input_schema.get("properties", {}).items()
    }
    call.__name__ = call.__qualname__ = tool_name
    call.__doc__ = _docstring(tool["description"] or tool_name, input_schema.get("properties", {}))
    call.__annotations__ = type_hints
    call.__signature__ = inspect.Signature(
        [
            inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD),
            *(
                _parameter(
                    argument_name,
                    type_hints[argument_name],
                    argument_name in input_schema.get("required", ()),
                )
                for argument_name in type_hints
            ),
        ]
    )
    return tool_name, call


def _parameter(argument_name: str, type_hint: Any, is_required: bool) -> inspect.Parameter:
    default = inspect.Parameter.empty if is_required else None  # the server fills in its own
    return inspect.Parameter(
        argument_name, inspect.Parameter.KEYWORD_ONLY, annotation=type_hint, default=default
    )


def _hint(field_schema: Mapping[str, Any], input_schema: Mapping[str, Any]) -> Any:
    """Return a type that checks what Python can check, and is described as the server describes it."""
    from pydantic import WithJsonSchema

    description_schema = without_references(dict(field_schema), input_schema.get("$defs", {}))
    return Annotated[_TYPES.get(field_schema.get("type"), Any), WithJsonSchema(description_schema)]


def _docstring(description: str, fields: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the description, and a line for each argument, in the form that :class:`Tool` reads."""
    summary = re.split(r"\n\s*Args:", description)[0].strip()
    argument_lines = [
        f"    {argument_name}: {' '.join(str(field_schema.get('description') or argument_name).split())}"
        for argument_name, field_schema in fields.items()
    ]
    if argument_lines:
        return "\n".join([summary, "", "Args:", *argument_lines])
    return summary


def _result_of(result: Any) -> Any:
    """Return what an MCP tool gave: its data, otherwise its texts."""
    if not isinstance(result, Mapping):
        return result
    if result.get("data") is not None:
        return result["data"]
    texts = [
        content_part.get("text")
        for content_part in result.get("content") or ()
        if isinstance(content_part, Mapping)
    ]
    if texts:
        return "\n".join(text for text in texts if text)
    return dict(result)


def _text_of(observation: Mapping[str, Any]) -> str:
    """Return an observation's fields as JSON, a lone text as it is; metadata if there is nothing else."""
    fields = {
        field_name: value for field_name, value in observation.items() if field_name != "metadata"
    }
    fields = fields or observation.get("metadata") or {}
    values = list(fields.values())
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    if fields:
        return json.dumps(fields, ensure_ascii=False)
    return ""
