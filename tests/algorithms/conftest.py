"""What tests of this room share with those of plugins."""

from support.fixtures.threads import simulate_ranks

__all__ = ["simulate_ranks"]
