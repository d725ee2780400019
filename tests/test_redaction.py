"""What the core shows of URLs without a plugin that knows their forms: never a login, a query or a fragment."""

import pytest

from lightppo import redaction as shown
from lightppo import suggestions


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://host:8/a/b.jsonl", "https://host:8/a/b.jsonl"),
        ("https://me:SECRET@host/a?key=SECRET", "https://…host/a?…"),
        ("ftp://SECRET@host:21/a#SECRET", "ftp://…host:21/a#…"),
    ],
)
def test_the_core_shows_no_secrets(monkeypatch, url, expected):
    monkeypatch.setattr(shown, "ASKED", {})
    assert shown.shown_url(url) == expected
    assert shown.without_secrets(f"cannot read '{url}' twice") == f"cannot read '{expected}' twice"
    assert suggestions.ASKED.keys() >= {"shown_url", "without_secrets"}
