"""Where rows and models come from beside files of JSON lines: folders, the hub, URLs, other formats, blends."""

from lightppo.option import register_section
from lightppo.plugin import ENCODERS, MODEL_PATHS, PUBLIC, ROWS
from lightppo.suggestions import ASKED
from lightppo.table import Entry, Table

_FORMATS = "lightppo.data.file_formats"

FORMATS: Table = Table(
    "file format",
    {
        ".jsonl": Entry("lightppo.data.file_formats:read_json"),
        ".ndjson": Entry("lightppo.data.file_formats:read_json"),
        ".json": Entry("lightppo.data.file_formats:read_json"),
        ".csv": Entry("lightppo.data.file_formats:read_csv"),
        ".tsv": Entry("lightppo.data.file_formats:read_tsv"),
        ".parquet": Entry("lightppo.data.file_formats:read_parquet"),
        ".arrow": Entry("lightppo.data.file_formats:read_arrow"),
    },
)
"""Formats of data files by the end of their names: functions ``(path, name, limit)`` that return a
``datasets.Dataset``; errors call the file by ``name``, ``limit`` is None or how many rows to read."""


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    ASKED["shown_url"] = "lightppo.shown_urls:without_login_and_query"
    ASKED["without_secrets"] = "lightppo.shown_urls:shown_urls"
    ENCODERS.register("shares", Entry("lightppo.data.row_workers:encode_by_shares"))
    ROWS.register("sources", Entry("lightppo.data.blends:rows_of"))
    MODEL_PATHS.register("folders", Entry("lightppo.data.folders:look"))
    PUBLIC["blending_datasets"] = "lightppo.data.blends"
    register_section("sources", "lightppo.config.sources_options:SourcesConfig", adds_to="data")
