"""What tests of this room share with those of other rooms."""

from support.fixtures.checks_on_ranks import run_checks

__all__ = ["run_checks"]
