"""The options of a command that has one section."""

from __future__ import annotations

import pytest

from lightppo.config.arguments import parse_section
from lightppo.option import Section, option


class PaperConfig(Section):
    """Paper."""

    size: str | None = option(None, "Format.", required=True)
    sheets: int = option(1, "Number.", ge=1)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--size A4 --sheets 2", 2),
        ("--sheets 2", ["--size is required"]),
        ("--size A4 --sheets 0", ["--sheets"]),
        ("--size A4 --sheats 2", ["--sheats", "--sheets"]),
        ("--size A4 --sheets 9", ["too many for 1"]),
    ],
)
def test_a_script_with_one_section(flags, expected, capsys):
    check = lambda paper, ranks: [f"too many for {ranks}"] if paper.sheets > 8 else []  # noqa: E731
    run = lambda: parse_section(PaperConfig, check, flags.split(), "print.py")  # noqa: E731
    if isinstance(expected, int):
        assert run().sheets == expected
        return
    with pytest.raises(SystemExit) as stopped:
        run()
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(word in line for word in ("print.py: error: ", *expected))
