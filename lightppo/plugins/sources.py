"""Where rows and models come from beside files of JSON lines: folders, the hub, URLs, other formats, blends."""

from lightppo.option import register_section
from lightppo.plugin import MODEL_PATHS
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    MODEL_PATHS.register("folders", Entry("lightppo.data.folders:look"))
    register_section("sources", "lightppo.config.sources_options:SourcesConfig", adds_to="data")
