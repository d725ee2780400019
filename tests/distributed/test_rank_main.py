"""The main function of each rank: what it does before the run."""

from __future__ import annotations

import gc

import pytest

from lightppo.distributed.rank_main import importing


def test_what_is_imported_is_no_garbage_to_look_through():
    frozen = gc.get_freeze_count()
    with importing():
        assert not gc.isenabled()
        imported = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen + len(imported)
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()
