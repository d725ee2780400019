"""What the source of a reward file shows before anything runs it."""

from __future__ import annotations

import ast
import symtable
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from lightppo.config import PPOConfig
from lightppo.config.reward_plan import ANY_ROUTE, is_file_alone, reward_plan, reward_sources
from lightppo.option import is_object
from lightppo.rewards.function_calls import FunctionReward, function_source
from lightppo.rewards.function_styles import BoundFunction
from lightppo.rewards.registry import FUNCTION_NAMES, RewardRequest
from lightppo.user_code import fails_when_run, no_such_name, split_python_spec

_COMBINE_NAME = "reward_fn"


class Declared(NamedTuple):
    """A function as its source declares it."""

    function: Callable[..., Any]  # takes the same parameters, and does nothing
    names: frozenset[str]  # that its body reads


def declared_function(spec: str, *default_names: str, option: str = "") -> Declared | None:
    """The function that :func:`load_python_object` would load, without running the file; errors as there.

    None: only running it can tell, as of a function with a decorator.
    """
    path, name = split_python_spec(spec, default_names[0], option=option)
    try:
        tree = ast.parse(source := path.read_bytes(), str(path))
        symbols = symtable.symtable(source, str(path), "exec").get_symbols()
    except (SyntaxError, ValueError) as error:
        raise fails_when_run(path, error, option) from error
    bound = {
        symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()
    }
    if name == default_names[0]:
        name = next((known for known in default_names if known in bound), name)
    found = [
        node for node in ast.walk(tree) if name in (getattr(node, "name", None), _assigned(node))
    ]
    if name not in bound:
        own = [
            node.name
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)
        ]
        used = {symbol.get_name() for symbol in symbols} | {
            n.name for n in ast.walk(tree) if isinstance(n, ast.alias)
        }
        if not used & {"*", "exec", "globals", "setattr", "vars", "__getattr__"}:
            raise no_such_name(path, name, own, option)
    if (
        len(found) != 1
        or not isinstance(found[0], ast.FunctionDef | ast.AsyncFunctionDef)
        or found[0].decorator_list
    ):
        return None
    parameters, body = found[0].args, ast.Module(found[0].body)
    for one in (node for node in ast.walk(parameters) if isinstance(node, ast.arg)):
        one.annotation = None
    parameters.defaults = [ast.Constant(None) for _ in parameters.defaults]
    parameters.kw_defaults = [default and ast.Constant(None) for default in parameters.kw_defaults]
    # This evaluates nothing of the file but names of parameters.
    function = eval(f"lambda {ast.unparse(parameters)}: None")
    return Declared(
        function, frozenset(node.id for node in ast.walk(body) if isinstance(node, ast.Name))
    )


def _assigned(node: ast.AST) -> str | None:
    return node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else None


def check_reward_files(
    config: PPOConfig, flag: str = "--reward_fn"
) -> tuple[BoundFunction | None, str | None]:
    """Refuses a ``path.py`` whose source shows that it cannot be used, with a ``ValueError``; the file does not run.

    Returns the function, if it gets all rows, and its parameter with the labels, if it reads them.
    """
    reward, sources = config.reward, reward_sources(config)
    option, spec = flag, reward.reward_fn if "function" in sources else None
    if not spec and is_file_alone(reward.remote_rm_url):
        option, spec = "--remote_rm_url", reward.remote_rm_url[0]
    if isinstance(reward.reward_fn, str) and not spec and "model" in sources:
        declared_function(reward.reward_fn, _COMBINE_NAME, option=flag)
    options = RewardRequest(config, None).options_of(FunctionReward)
    gets_all = list(reward_plan(config) or (ANY_ROUTE,)) == [ANY_ROUTE]
    if is_object(spec):
        source = function_source(spec, option, options)
        if source is spec or not gets_all:
            return None, None
        return BoundFunction(spec, source.name, config.verifier.reward_fn_style), None
    if spec is None:
        return None, None
    declared = declared_function(spec, *FUNCTION_NAMES, option=option)
    if declared is None:
        return None, None
    name = Path(spec).name
    try:
        FunctionReward(declared.function, name, spec=spec, **options)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None
    bound = BoundFunction(declared.function, name, config.verifier.reward_fn_style)
    return (
        bound if gets_all else None,
        bound.label_parameter if bound.label_parameter in declared.names else None,
    )
