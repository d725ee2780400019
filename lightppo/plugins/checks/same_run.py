"""A run goes on from a checkpoint as the run that it was: what decides its numbers has not changed."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

from lightppo.config.options import all_options, sections
from lightppo.errors import ConfigError
from lightppo.option import Option
from lightppo.shown import shown_value


def compare(
    saved: Mapping[str, Any],
    options: Mapping[str, Any],
    content: Mapping[str, str],
    *,
    where: str,
    is_own: bool,
    idle: Container[str],
    declared: Iterable[Option] | None,
    say: Callable[[str], None],
) -> None:
    """Tells the options that have changed.

    Raises:
        ConfigError: options that must stay as they were have changed, or the content of what they name.
    """
    # older ones are not
    as_shown = {name: shown_value(value) for name, value in saved["config"].items()}
    refused, safe = unsafe_changes(as_shown, options, idle, declared)
    refused.pop("save_path", None)  # the same folder may be spelt otherwise, or have been moved
    changes = [f"--{name} {old} → {new}" for name, (old, new) in refused.items()]
    marks = {name: shown_value(mark) for name, mark in saved.get("content", {}).items()}
    for name, mark in marks.items():
        is_unread = options.get("val_only") and name != "pretrain"
        if name in refused or is_unread or content.get(name, mark) == mark:
            continue
        if name != "save_path":
            changes.append(f"--{name} {options[name]} has other content than it had")
        elif is_own:  # a path asks for another run that goes on from this one
            changes.append(f"--save_path {as_shown[name]} → {options[name]}")
    if changes:
        raise ConfigError(
            f"cannot resume {where} as another run: {', '.join(changes)}. Set that back, or start anew: with "
            "another --save_path (and --ckpt_path), or with --resume never"
        )
    for name, (old, new) in safe.items():
        say(f"resume: --{name} was {old}, is {new}")


def unsafe_changes(
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    idle: Container[str] = (),
    options: Iterable[Option] | None = None,
) -> tuple[dict[str, tuple], dict[str, tuple]]:
    """Compare a resumed run's options with those it was started with; an evaluation's only in what makes the weights.

    Args:
        idle: options that do nothing in this run.
        options: those of the command; ``None``: of PPO.

    Returns:
        (refused, safe): for each option that changed, (old, new).
    """
    refused, safe, evaluates = {}, {}, now.get("val_only", False)
    read_by = {name: kind.of for name, kind in sections().items()}
    for one in all_options() if options is None else options:
        unread = evaluates and (
            read_by.get(one.owner) == "training" or (one.required and now[one.name] is None)
        )
        if one.name not in saved or saved[one.name] == now[one.name] or unread or one.name in idle:
            continue
        other_part = read_by.get(one.owner) != "weights" or one.name.startswith(
            ("critic_", "ref_", "reward_")
        )
        (safe if one.resume_safe or (evaluates and other_part) else refused)[one.name] = (
            saved[one.name],
            now[one.name],
        )
    return refused, safe
