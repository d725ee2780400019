"""What tests of this room share with those of other rooms."""

from support.fixtures.command_line import _one_process, parse, refusal, yaml_file
from support.fixtures.recorded_runs import copied, recorded

__all__ = ["_one_process", "copied", "parse", "recorded", "refusal", "yaml_file"]
