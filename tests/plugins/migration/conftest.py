"""What tests of this plugin share with those of other folders."""

from support.fixtures.command_line import _one_process, parse, refusal, yaml_file

__all__ = ["_one_process", "parse", "refusal", "yaml_file"]
