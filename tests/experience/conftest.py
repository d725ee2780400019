"""What tests of this plugin share with those of the core."""

from support.fixtures.small_runs import assets, make_config, parts, trainer_with, world
from support.fixtures.threads import simulate_ranks

__all__ = ["assets", "make_config", "parts", "simulate_ranks", "trainer_with", "world"]
