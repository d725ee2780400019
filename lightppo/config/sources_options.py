"""Options of several sources of rows; docs/data.md."""

from lightppo.option import Section, option


class SourcesConfig(Section, adds_to="data"):
    """Several sources of prompts, and columns from other files."""

    prompt_data_probs: str | None = option(
        None, "Sampling probabilities of several --prompt_data, e.g. 0.7,0.3."
    )
    prompt_metadata: str | None = option(
        None,
        "File with extra columns for all prompts, also for evaluation, joined by query_id or id: AReaL's code tests.",
    )
