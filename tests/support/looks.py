"""What objects hold, as plain values that can be compared: two runs that differ in an option differ in them."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import torch

from lightppo.config.options import OptionSet
from lightppo.option import Section

_OF_THE_MOMENT = ("run", "began", "started", "_started")  # ids and times
_PLAIN = (bool, int, float, str)
# Classes of these packages are looked into; of other objects only their class counts.
_OURS = ("lightppo", "support", "tests", "test_")


def look(thing: Any, seen: dict[int, Any] | None = None) -> Any:
    """What an object holds at any depth, without the options themselves, and without what only a clock knows."""
    seen = {} if seen is None else seen
    if isinstance(
        thing, bool | int | float | str | bytes | Path | None | torch.dtype | torch.device
    ):
        return thing if isinstance(thing, bool | int | float) else str(thing)
    if isinstance(thing, OptionSet | Section):
        return "options"
    if id(thing) in seen:
        return "seen"
    seen[id(thing)] = thing  # kept, so that no other object gets its id
    return _contents(thing, seen)


def _contents(thing: Any, seen: dict[int, Any]) -> Any:
    kind = f"{type(thing).__module__}.{type(thing).__qualname__}"
    if isinstance(thing, torch.Tensor):
        return [
            str(thing.dtype),
            list(thing.shape),
            thing.requires_grad,
            float(thing.detach().double().sum()),
        ]
    if isinstance(thing, Mapping):
        return {str(name): look(value, seen) for name, value in thing.items()}
    if isinstance(thing, list | tuple | set | frozenset):
        return [
            look(value, seen)
            for value in (thing if isinstance(thing, list | tuple) else sorted(thing, key=str))
        ]
    if isinstance(thing, functools.partial):
        return [look(part, seen) for part in (thing.func, thing.args, thing.keywords)]
    if isinstance(thing, types.MethodType):
        return [thing.__func__.__qualname__, look(thing.__self__, seen)]
    if isinstance(thing, types.FunctionType):
        return [thing.__qualname__, [look(_value(cell), seen) for cell in thing.__closure__ or ()]]
    if isinstance(thing, torch.nn.Module):
        return [kind, _of_model(thing, seen)]
    if isinstance(thing, torch.optim.Optimizer):
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in thing.param_groups
        ]
        return [kind, look(groups, seen)]
    if isinstance(thing, torch.optim.lr_scheduler.LRScheduler):
        return [
            kind,
            [[fn(step) for step in range(40)] for fn in getattr(thing, "lr_lambdas", ())],
        ]
    if hasattr(thing, "chat_template"):  # a tokenizer
        return [kind, len(thing), thing.chat_template, thing.padding_side]
    if isinstance(thing, datasets.Dataset):
        return [kind, [dict(row) for row in thing]]
    if isinstance(thing, torch.utils.data.DataLoader):
        return [
            kind,
            look({name: value for name, value in vars(thing).items() if name != "generator"}, seen),
        ]
    if kind.startswith(_OURS):
        return [kind, look(_attributes(thing), seen)]
    return kind


def _of_model(model: torch.nn.Module, seen: dict[int, Any]) -> Any:
    config = getattr(model, "config", None)
    own = {name: value for name, value in vars(model).items() if not name.startswith("_")}
    own = own if type(model).__module__.startswith(_OURS) else {}
    return {
        "own": look(own, seen),
        "config": config.to_dict() if hasattr(config, "to_dict") else look(config, seen),
        "plain": {name: value for name, value in vars(model).items() if isinstance(value, _PLAIN)},
        "recomputes": look(getattr(model, "_gradient_checkpointing_func", None), seen),
        "scaling": look(getattr(model, "scaling", None), seen),  # of LoRA
        "parameters": {
            name: look(value, seen) for name, value in model.named_parameters(recurse=False)
        },
        "modules": {
            name: [type(child).__name__, _of_model(child, seen)]
            for name, child in model.named_children()
        },
    }


def _attributes(thing: Any) -> dict[str, Any]:
    slots = [
        name
        for kind in type(thing).__mro__
        for name in getattr(kind, "__slots__", ())
        if hasattr(thing, name)
    ]
    all_of_it = {name: getattr(thing, name) for name in slots} | getattr(thing, "__dict__", {})
    return {name: value for name, value in all_of_it.items() if name not in _OF_THE_MOMENT}


def _value(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # of a name that is assigned later
        return None
