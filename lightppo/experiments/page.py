"""The page of an experiment: one file with a table and its curves, which needs no server and no network."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightppo.experiments.intervals import Bounded
from lightppo.files import write_text
from lightppo.redaction import plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
body { margin: 2rem auto; max-width: 1400px; padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif; color: #1c2330; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem; border-bottom: 1px solid #dfe3e9; text-align: right; }
th:first-child, td:first-child { text-align: left; } svg { max-width: 100%; height: auto; }
"""


def bounds(estimate: Bounded) -> str:
    """Return the bounds of an interval as text."""
    return f"{estimate.low:.4g} to {estimate.high:.4g}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table for a terminal: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    lines = []
    for first, *others in (header, *rows):
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(others, widths[1:])]
        lines.append(plain("  ".join(cells)).rstrip())
    return "\n".join(lines)


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the same as HTML."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f"<table><tr>{line(header, 'th')}</tr>{body}</table>"


def write_page(
    path: Path,
    title: str,
    lines: Sequence[str],
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    figure: Figure,
) -> None:
    """Write title, lines, table and figure."""
    drawing = io.StringIO()
    figure.savefig(drawing, format="svg")
    picture = drawing.getvalue()
    name = html.escape(plain(title))
    paragraphs = "".join(f"<p>{html.escape(plain(text))}</p>" for text in lines)
    head = f'<meta charset="utf-8"><title>{name}</title><style>{_STYLE}</style>'
    body = (
        f"<h1>{name}</h1>{paragraphs}{html_table(header, rows)}{picture[picture.index('<svg') :]}"
    )
    write_text(
        path, f'<!DOCTYPE html><html lang="en"><head>{head}</head><body>{body}</body></html>\n'
    )


def save_figure(figure: Figure, path: Path) -> None:
    """Write the figure alone, as PNG."""
    figure.savefig(path, format="png", dpi=90)
