"""What tests of this room share with those of the command line."""

from support.fixtures.command_line import _one_process, parse

__all__ = ["_one_process", "parse"]
