"""Whether a run may go on from a checkpoint: its options and what they name are as they were, as far as they matter."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

from lightppo.checkpoint.run_checkpointer import Resumed
from lightppo.config import PPOConfig
from lightppo.config.option_needs import idle_flags
from lightppo.config.options import OptionSet
from lightppo.errors import ConfigError
from lightppo.redaction import shown_value


def check_same_run(resumed: Resumed) -> Iterator[str]:
    """Yield a line for each option that may change, and did; ConfigError for what may not."""
    saved = resumed.saved
    options = resumed.options
    content = resumed.content
    # Older checkpoints hold values as they were given.
    as_shown = {name: shown_value(value) for name, value in saved["config"].items()}
    idle: set[str] = set()
    if resumed.command is not None:
        idle = idle.union(*idle_flags(resumed.command, options).values())
    kind = PPOConfig if resumed.command is None else type(resumed.command)
    refused, safe = unsafe_changes(as_shown, options, idle, kind, resumed.trains)
    refused.pop("save_path", None)  # the same folder may be spelt otherwise, or have been moved
    changes = [f"--{name} {old} → {new}" for name, (old, new) in refused.items()]
    marks = {name: shown_value(mark) for name, mark in saved.get("content", {}).items()}
    for name, mark in marks.items():
        is_unread = not resumed.trains and name != "pretrain"
        if name in refused or is_unread or content.get(name, mark) == mark:
            continue
        if name != "save_path":
            changes.append(f"--{name} {options[name]} has other content than it had")
        elif resumed.is_own:  # a path asks for another run that goes on from this one
            changes.append(f"--save_path {as_shown[name]} → {options[name]}")
    if changes:
        raise ConfigError(
            f"cannot resume {resumed.where} as another run: {', '.join(changes)}. Set that back, or start anew: with "
            "another --save_path (and --ckpt_path), or with --resume never"
        )
    for name, (old, new) in safe.items():
        yield f"resume: --{name} was {old}, is {new}"


def unsafe_changes(
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    idle: Container[str] = (),
    kind: type[OptionSet] = PPOConfig,
    trains: bool = True,
) -> tuple[dict[str, tuple], dict[str, tuple]]:
    """Compare a resumed run's options with those it was started with.

    Args:
        idle: options that do nothing in this run.
        kind: the options of the command.
        trains: False: only what makes the weights must be as it was.

    Returns:
        (refused, safe): for each option that changed, (old, new).
    """
    refused = {}
    safe = {}
    read_by = {name: section.of for name, section in PPOConfig.sections().items()}
    for one in kind.all_options():
        unread = not trains and (
            read_by.get(one.owner) == "training" or (one.required and now[one.name] is None)
        )
        if one.name not in saved or saved[one.name] == now[one.name] or unread or one.name in idle:
            continue
        other_part = read_by.get(one.owner) != "weights" or one.name.startswith(
            ("critic_", "ref_", "reward_")
        )
        (safe if one.resume_safe or (other_part and not trains) else refused)[one.name] = (
            saved[one.name],
            now[one.name],
        )
    return refused, safe
