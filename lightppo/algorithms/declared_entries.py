"""Estimators, losses and engines in files of the user's own: what their decorators say, before the files are run."""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import Any

from lightppo.errors import ConfigError
from lightppo.suggestions import nearest
from lightppo.table import Entry, Table


def read_entry(spec: str, table: Table) -> Any:
    """The entry of a function, or a class, in a file, which is read but not run."""
    return _read(spec, table.flag, table.decorator, table.kind)


@functools.cache
def _read(spec: str, flag: str, decorator: str | None, kind: type[Entry]) -> Any:
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
