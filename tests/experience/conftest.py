"""What tests of this plugin share with those of the core."""

from support.fixtures.threads import simulate_ranks

__all__ = ["simulate_ranks"]
