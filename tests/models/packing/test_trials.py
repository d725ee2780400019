"""What trials of a model share."""

from __future__ import annotations

import pytest

from lightppo.models.packing import one_line


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("two\n  lines"), "ValueError: two lines"),
        (ValueError("x" * 300), "ValueError: …"),
        (AssertionError(), "AssertionError: test_trials.py, line {line}: raise error"),
    ],
)
def test_one_line_says_where_if_an_error_has_no_message(error, text):
    with pytest.raises(type(error)) as caught:
        raise error
    assert one_line(caught.value) == text.format(line=caught.tb.tb_lineno)
