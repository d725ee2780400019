from __future__ import annotations

import pytest

from lightppo.algorithms.tables import lookup

TABLE = {"gae": 1, "rloo": 2}


def test_known_name():
    assert lookup(TABLE, "rloo", "--flag") == 2


def test_unknown_name_with_a_near_one():
    with pytest.raises(
        ValueError, match=r"^--flag: unknown name 'rlo'. Did you mean 'rloo'\? Known names: gae, rloo\.$"
    ):
        lookup(TABLE, "rlo", "--flag")


def test_unknown_name_with_nothing_near():
    with pytest.raises(ValueError, match=r"^--flag: unknown name 'xyz'. Known names: gae, rloo\.$"):
        lookup(TABLE, "xyz", "--flag")
