"""The arguments of commands that are small and train nothing."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from lightppo.config import PPOConfig
from lightppo.config.cli import exit_on_mistakes, print_on_rank_0, read_flags, with_file
from lightppo.config.help_page import section_help
from lightppo.errors import ConfigError
from lightppo.option import Section
from lightppo.plugin import trained_by
from lightppo.suggestions import answer_of, nearest

S = TypeVar("S", bound=Section)


class CommandParser(argparse.ArgumentParser):
    """The arguments of a small command: a mistake ends it with exit code 2 and a line, which says what was meant."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(self.explained(unknown[0]))
        return found

    def error(self, message: str) -> NoReturn:
        print_on_rank_0(f"{self.prog}: error: {message}\n", sys.stderr)
        raise SystemExit(2)

    def explained(self, word: str) -> str:
        """What is wrong with an argument that the command does not know."""
        name = word.partition("=")[0]
        if not name.startswith("-"):
            return f"unexpected argument {word!r}"
        places = [
            action.metavar
            for action in self._actions
            if action.metavar and not action.option_strings
        ]
        if place := answer_of(name, places, "argument"):
            return f"unknown flag {name}: {place} is given without a flag: {self.prog} {' '.join(places)}"
        return f"unknown flag {name}{nearest(name, self._option_string_actions, 'flag')}"


def parse_section(
    kind: type[S], check: Callable[[S, int], list[str]], argv: Sequence[str] | None, prog: str
) -> S:
    """The options of a script that has one section; errors as :func:`parse_args`.

    ``check`` says what is wrong with values that are each in range, for so many ranks. An option ``config`` names the
    YAML file of a run, out of which the section's options are taken beneath the flags.
    """
    arguments = sys.argv[1:] if argv is None else argv
    if {"--help", "-h"} & {*arguments}:
        print_on_rank_0(section_help(f"{prog} [flags]", kind))
        raise SystemExit(0)
    with exit_on_mistakes(prog):
        flags = read_flags(arguments, list(kind.options().values()))
        if flags.get("config") is not None:
            of_run = with_file(
                trained_by().get(flags.get("for"), PPOConfig)(), flags["config"]
            ).flat()
            flags = {
                name: value for name, value in of_run.items() if name in kind.options()
            } | flags
        config = kind(**flags)
        if problems := config.missing() + check(config, int(os.environ.get("WORLD_SIZE", "1"))):
            raise ConfigError("\n".join(problems))
    return config
