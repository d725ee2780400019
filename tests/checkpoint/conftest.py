"""What tests of this plugin share with those of other folders."""

from support.fixtures.checks_on_ranks import run_checks

__all__ = ["run_checks"]
