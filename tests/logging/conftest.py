"""What tests of this room share with those of other rooms."""

from support.fixtures.recorded_runs import copied, recorded

__all__ = ["copied", "recorded"]
