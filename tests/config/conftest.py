"""What tests of this room share with those of other rooms."""

from support.fixtures.command_line import _one_process, parse, refusal, yaml_file

__all__ = ["_one_process", "parse", "refusal", "yaml_file"]
