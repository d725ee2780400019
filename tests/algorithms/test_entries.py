"""The tables of algorithms: names, functions by their path, options and metrics that follow from an entry."""

from __future__ import annotations

import pytest

from lightppo.algorithms import entries
from lightppo.algorithms.entries import ADVANTAGE_ESTIMATORS, LOSS_AGG_MODES, POLICY_LOSSES, TABLES, lookup
from lightppo.errors import ConfigError

ENTRIES = [(table, name) for table in TABLES for name in table]


@pytest.mark.parametrize(("table", "name"), ENTRIES, ids=lambda x: x if isinstance(x, str) else x.flag)
def test_every_entry_has_a_function(table, name):
    entry = table.find(name)
    assert callable(entry.fn)
    for other in ("gradient_of", "selection"):
        assert getattr(entry, other, None) is None or callable(entries.load(getattr(entry, other)))
    assert entry.completed({}, name) == entry.defaults
    assert all(option.help.endswith(".") for option in entry.options)


def test_what_belongs_to_an_estimator_or_a_loss_exists():
    for entry in ADVANTAGE_ESTIMATORS.values():
        assert entry.policy_loss in POLICY_LOSSES
    modes = {entry.loss_agg_mode for entry in (*ADVANTAGE_ESTIMATORS.values(), *POLICY_LOSSES.values())}
    assert modes - {None} <= LOSS_AGG_MODES.keys()


def test_unknown_names_are_refused_with_the_nearest():
    assert lookup({"gae": 1, "rloo": 2}, "rloo", "--flag") == 2
    with pytest.raises(ConfigError, match=r"--flag: .*'rlo' \(did you mean 'rloo'\?\).*gae, rloo"):
        lookup({"gae": 1, "rloo": 2}, "rlo", "--flag")
    with pytest.raises(ConfigError, match=r"--advantage_estimator: .*'gea' \(did you mean 'gae'\?\)"):
        ADVANTAGE_ESTIMATORS.find("gea")
    with pytest.raises(ConfigError, match=r"--kl_estimator: unknown name 'mine.py:k9'"):
        entries.KL_ESTIMATORS.find("mine.py:k9")  # not from a file
