"""Where rows and models come from beside files of JSON lines: folders, the hub, URLs, other formats, blends."""

from lightppo.option import register_section
from lightppo.plugin import ENCODERS, MODEL_PATHS, PUBLIC, ROWS
from lightppo.suggestions import ASKED
from lightppo.table import Entry, Table

_FORMATS = "lightppo.plugins.sources.file_formats"

FORMATS: Table = Table(
    "file format",
    {
        ".jsonl": Entry(f"{_FORMATS}:read_json"),
        ".ndjson": Entry(f"{_FORMATS}:read_json"),
        ".json": Entry(f"{_FORMATS}:read_json"),
        ".csv": Entry(f"{_FORMATS}:read_csv"),
        ".tsv": Entry(f"{_FORMATS}:read_tsv"),
        ".parquet": Entry(f"{_FORMATS}:read_parquet"),
        ".arrow": Entry(f"{_FORMATS}:read_arrow"),
    },
)
"""Formats of data files by the end of their names: functions ``(path, name, limit)`` that return a
``datasets.Dataset``; errors call the file by ``name``, ``limit`` is None or how many rows to read."""


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    ASKED["shown_url"] = "lightppo.plugins.sources.shown_urls:without_login_and_query"
    ASKED["without_secrets"] = "lightppo.plugins.sources.shown_urls:shown_urls"
    ENCODERS.register("shares", Entry("lightppo.plugins.sources.row_workers:encode_by_shares"))
    ROWS.register("sources", Entry("lightppo.plugins.sources.blends:rows_of"))
    MODEL_PATHS.register("folders", Entry("lightppo.plugins.sources.folders:look"))
    PUBLIC["blending_datasets"] = "lightppo.plugins.sources.blends"
    register_section("sources", "lightppo.plugins.sources.sections:SourcesConfig", adds_to="data")
