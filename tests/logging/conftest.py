"""What tests of this room share with those of others."""

from support.fixtures.recorded_runs import copied, recorded
from support.fixtures.small_runs import assets, made, make_config, parts, trainer_with, world

__all__ = ["assets", "copied", "made", "make_config", "parts", "recorded", "trainer_with", "world"]
