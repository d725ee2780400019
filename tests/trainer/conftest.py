"""What tests of this room share with those of plugins."""

from support.fixtures.small_runs import assets, made, make_config, parts, trainer_with, world

__all__ = ["assets", "made", "make_config", "parts", "trainer_with", "world"]
