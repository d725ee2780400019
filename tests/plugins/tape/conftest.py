"""What tests of the tape share with those of whole runs."""

from support.fixtures.small_runs import assets, make_config, world

__all__ = ["assets", "make_config", "world"]
