"""What tests of this plugin share with those of other folders."""

from support.fixtures.recorded_runs import copied, recorded

__all__ = ["copied", "recorded"]
