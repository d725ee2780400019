"""Rewards written as a Python function, in the script or in a file of their own."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightppo.data.records import Rollout
from lightppo.rewards.source import RewardError, RewardOutput, output_from_result

RewardFunction = Callable[..., Any]


class FunctionReward:
    """Calls ``reward_func(queries, prompts, labels, **extra)`` once with all samples of the rank.

    ``queries`` (prompt + response), ``prompts`` and ``labels`` are lists with one entry per sample, given by position.
    By keyword, and only where the function names them or takes ``**extra``, also one entry per sample:

    - ``responses`` (text), ``prompt_ids``, ``response_ids``, ``finish_reasons`` (``"stop"`` | ``"length"``),
      ``data_sources``;
    - every further column of the data, ``None`` for rows without it;
    - ``extras``: all further columns as one dict per sample; the way to a column whose name is taken above.

    It returns a list or tensor of scores, or ``dict(rewards, scores, extra_logs)``; ``None`` = unscored.

    Args:
        fn: the function.
        name: what errors and metrics call it; the function's own name by default.

    Raises:
        ValueError: the function cannot take three lists by position.
    """

    def __init__(self, fn: RewardFunction, name: str | None = None) -> None:
        self.fn = fn
        self.name = name or getattr(fn, "__name__", type(fn).__name__)
        self._accepts = _keyword_filter(fn, self.name)

    def score(self, rollouts: list[Rollout]) -> RewardOutput:
        """Scores the samples; no sample, no call.

        Raises:
            RewardError: the function raised, or returned something else than described above.
        """
        if not rollouts:
            return RewardOutput([])
        queries = [rollout.prompt.text + rollout.response_text for rollout in rollouts]
        prompts = [rollout.prompt.text for rollout in rollouts]
        labels = [rollout.prompt.label for rollout in rollouts]
        extra = {name: values for name, values in _extra(rollouts).items() if self._accepts(name)}
        try:
            result = self.fn(queries, prompts, labels, **extra)
        except Exception as error:
            raise RewardError(
                f"reward function {self.name} raised on a batch of {len(rollouts)}: {type(error).__name__}: {error}"
            ) from error
        return output_from_result(result, len(rollouts), f"reward function {self.name}")


def _extra(rollouts: list[Rollout]) -> dict[str, list[Any]]:
    columns = dict.fromkeys(name for rollout in rollouts for name in rollout.prompt.extra)
    extra = {name: [rollout.prompt.extra.get(name) for rollout in rollouts] for name in columns}
    return extra | {
        "responses": [rollout.response_text for rollout in rollouts],
        "prompt_ids": [rollout.prompt.token_ids for rollout in rollouts],
        "response_ids": [rollout.response_ids for rollout in rollouts],
        "finish_reasons": [rollout.finish_reason for rollout in rollouts],
        "data_sources": [rollout.prompt.data_source for rollout in rollouts],
        "extras": [rollout.prompt.extra for rollout in rollouts],
    }


def _keyword_filter(fn: RewardFunction, name: str) -> Callable[[str], bool]:
    """Says which names may be given by keyword beside the three lists."""
    signature = inspect.signature(fn)
    try:
        taken = set(signature.bind_partial([], [], []).arguments)
    except TypeError as error:
        raise ValueError(
            f"reward function {name}{signature} must take (queries, prompts, labels, **extra): {error}"
        ) from None
    kinds = inspect.Parameter
    parameters = signature.parameters.values()
    named = {p.name for p in parameters if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)}
    open_ended = any(p.kind is kinds.VAR_KEYWORD for p in parameters)
    return lambda keyword: keyword not in taken and (open_ended or keyword in named)


def load_python_function(spec: str, default_name: str, *, option: str = "") -> Callable[..., Any]:
    """Loads a function from ``path.py`` or ``path.py:name``.

    The file is run anew, from exactly that path: no search path is consulted and none is changed.

    Args:
        spec: where the function is; ``~`` is expanded.
        default_name: the function's name where ``spec`` has none.
        option: the flag that errors name, e.g. ``--reward_fn``.

    Raises:
        ValueError: no such file or function (what is there is named), or the file fails when run.
    """
    value = load_python_object(spec, default_name, option=option)
    if not callable(value):
        raise ValueError(f"{_prefix(option)}{spec!r} is of type {type(value).__name__}, not a function")
    return value


def load_python_object(spec: str, default_name: str, *, option: str = "") -> Any:
    """:func:`load_python_function` for any object of a module, e.g. a reward source built there."""
    path, name = split_python_spec(spec, default_name, option=option)
    module = _run_file(path, option)
    try:
        return getattr(module, name)
    except AttributeError:
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        raise ValueError(
            f"{_prefix(option)}{path} has no {name!r}; it has {', '.join(own) or 'no function'}. "
            f"Name one as {path}:name"
        ) from None


def split_python_spec(spec: str, default_name: str, *, option: str = "") -> tuple[Path, str]:
    """Splits ``path.py[:name]`` and looks whether the file is there.

    Raises:
        ValueError: another form, or no such file (its neighbours are named).
    """
    head, colon, name = spec.rpartition(":")
    if not colon or spec.endswith(".py"):
        head, name = spec, default_name
    if not head.endswith(".py") or not name.isidentifier():
        raise ValueError(f"{_prefix(option)}{spec!r} is not of the form path.py or path.py:name")
    path = Path(head).expanduser().absolute()
    if path.is_file():
        return path, name
    if path.parent.is_dir():
        found = ", ".join(sorted(p.name for p in path.parent.glob("*.py"))) or "no Python file"
        raise ValueError(f"{_prefix(option)}no file {path}; {path.parent} has {found}")
    raise ValueError(f"{_prefix(option)}no file {path}; there is no directory {path.parent}")


def _run_file(path: Path, option: str) -> Any:
    # a name of its own, so that a file called math.py hides nothing; in sys.modules, for dataclasses and pickle
    module_name = f"lightppo_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise ValueError(f"{_prefix(option)}{path} fails when run: {type(error).__name__}: {error}") from error
    return module


def _prefix(option: str) -> str:
    return f"{option}: " if option else ""
