"""Where rows and models come from beside files of JSON: the hub, URLs, other formats, blends."""

from lightppo.option import register_section
from lightppo.plugin import FORMATS, MODEL_PATHS, PUBLIC, ROWS
from lightppo.suggestions import ASKED
from lightppo.table import Entry

_TEXT = {".csv": "read_csv", ".tsv": "read_tsv"}
_TABLES = {".parquet": "read_parquet", ".arrow": "read_arrow"}


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    ASKED["shown_url"] = "lightppo.plugins.sources.shown_urls:without_login_and_query"
    ASKED["without_secrets"] = "lightppo.plugins.sources.shown_urls:shown_urls"
    for ending in FORMATS:  # one rank of a node parses a large file for all
        FORMATS[ending] = Entry("lightppo.plugins.sources.file_formats:read_json")
    for ending, name in (_TEXT | _TABLES).items():
        FORMATS.register(ending, Entry(f"lightppo.plugins.sources.file_formats:{name}"))
    ROWS.register("sources", Entry("lightppo.plugins.sources.blends:rows_of"))
    MODEL_PATHS.register("folders", Entry("lightppo.plugins.sources.folders:look"))
    PUBLIC["blending_datasets"] = "lightppo.plugins.sources.blends"
    register_section("sources", "lightppo.plugins.sources.sections:SourcesConfig", adds_to="data")
