"""What tests of this room share with those of other rooms."""

from support.fixtures.small_runs import assets, make_config, world

__all__ = ["assets", "make_config", "world"]
