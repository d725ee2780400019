"""What tests of this room share with others."""

from support.fixtures.threads import simulate_ranks

__all__ = ["simulate_ranks"]
