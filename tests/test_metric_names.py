"""METRICS: the meanings of names in the logs, and how a plugin adds some."""

from __future__ import annotations

import pytest

from lightppo.errors import ConfigError
from lightppo.logging.metrics_page import metrics_page
from lightppo.logging.step_metrics import with_namespace
from lightppo.metric_names import METRICS, MetricTable


@pytest.fixture
def register():
    """METRICS.register, undone after the test."""
    before = list(METRICS._registered), dict(METRICS.namespaces)
    yield METRICS.register
    METRICS.register("train", {})  # forgets what was read
    METRICS._registered, METRICS.namespaces = before


@pytest.fixture(scope="module", autouse=True)
def unchanged():
    """The tests of other files find the names that there were."""
    before = list(METRICS)
    yield
    assert list(METRICS) == before


def test_a_registered_name_is_on_the_page_and_known_without_its_namespace(register):
    assert with_namespace({"judge_seconds": 1.0}) == {"train/judge_seconds": 1.0}
    register("perf", {"judge_seconds": "seconds that the judge took"})
    assert METRICS["perf/judge_seconds"] == "seconds that the judge took"
    assert with_namespace({"judge_seconds": 1.0}) == {"perf/judge_seconds": 1.0}
    assert "`perf/judge_seconds` | seconds that the judge took\n" in metrics_page()


def test_a_new_namespace_says_what_it_holds(register):
    register("judge", {"seconds": "seconds that it took"}, about="a judge of my own")
    assert (
        "## judge/: a judge of my own\n\nName | Meaning\n---|---\n`judge/seconds` | seconds that"
        in metrics_page()
    )


def test_names_may_come_from_a_function_that_is_called_late():
    table = MetricTable()
    table.register("later", "nowhere.to.be.found:names")  # nothing is imported yet
    with pytest.raises(
        ConfigError, match=r"nowhere\.to\.be\.found:names.* No module named 'nowhere'"
    ):
        list(table)
    table = MetricTable()
    table.register("alarm", "lightppo.logging.alarms:alarm_descriptions", about="alarms")
    assert "alarm/kl_explosion" in table


def test_one_name_has_one_meaning():
    table = MetricTable()
    table.register("train", {"loss": "one"})
    table.register("train", {"loss": "another"})
    with pytest.raises(ValueError, match="train/loss has two meanings"):
        len(table)
