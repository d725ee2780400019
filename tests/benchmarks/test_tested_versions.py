"""The table of versions in docs/troubleshooting.md: written from what ran, and from the files with the pins and bounds."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

RESULTS = """<testsuites><testsuite>
<testcase classname="tests.models.test_actor" name="a"/>
<testcase classname="tests.models.test_actor" name="b"><skipped/></testcase>
<testcase classname="tests.data.test_rows.TestRows" name="c"><failure/></testcase>
<testcase classname="tests.test_docs" name="d"/>
</testsuite></testsuites>"""


@pytest.fixture
def versions(benchmark_script) -> ModuleType:
    return benchmark_script("tested_versions")


@pytest.fixture
def page(versions, tmp_path, monkeypatch) -> Path:
    """A page with marks alone, and nothing that is stored."""
    monkeypatch.setattr(versions, "STORED", tmp_path / "versions.json")
    monkeypatch.setattr(versions, "PAGE", tmp_path / "page.md")
    versions.PAGE.write_text("before\n" + "\n".join(versions.MARKS) + "\nafter\n")
    return versions.PAGE


def test_the_page_has_what_is_stored(versions) -> None:
    text = versions.PAGE.read_text(encoding="utf-8")
    assert text == versions.page_with_table(text), "make docs"


def test_a_row_says_what_ran_and_how_it_ended(
    versions, page, tmp_path, monkeypatch, capsys
) -> None:
    (tmp_path / "results.xml").write_text(RESULTS)
    here = {"Python": "3.11", "torch": "9.0", "transformers": "8.0"}
    monkeypatch.setattr(versions, "here", lambda: here)
    versions.main(["newest", str(tmp_path / "results.xml")])
    assert ": tests of data, models, 2 passed, 1 failed" in capsys.readouterr().out
    before, *lines, after = page.read_text().splitlines()
    assert (before, after) == ("before", "after")
    rows = {line.partition(" | ")[0]: line for line in lines if " | " in line}
    assert list(rows) == ["versions", "lowest", "pinned", "newest"]
    assert rows["newest"].startswith("newest | 3.11 | 9.0 | 8.0 | ")
    assert rows["newest"].endswith(": tests of data, models, 2 passed, 1 failed")
    assert f" | {versions.pinned()['torch']} | " in rows["pinned"]
    assert " passed" not in rows["lowest"] + rows["pinned"]  # nothing of them is stored
    (tmp_path / "again.xml").write_text(RESULTS.replace("<failure/>", ""))
    versions.main(["newest", *(str(tmp_path / f"{name}.xml") for name in ("results", "again"))])
    assert ": tests of data, models, 3 passed" in (written := page.read_text())
    assert "failed" not in written
    versions.main([])
    assert page.read_text() == written


def test_all_rooms_are_the_suite(versions) -> None:
    rooms = sorted(path.name for path in (versions.ROOT / "tests").iterdir())
    run = {"date": "2026-11-29", "rooms": rooms, "counts": {"passed": 7, "skipped": 0, "failed": 0}}
    assert versions.as_text(run) == "2026-11-29: the suite, 7 passed"
