"""Options of what a model is made of; docs/models.md."""

import json
from collections.abc import Iterator
from typing import Any

from lightppo.option import Section, option


class OverrideConfig(Section, adds_to="model"):
    """Changes of a model's config."""

    override_config: str | None = option(
        None,
        'JSON that changes the config of all but reward models: {"rope_theta": 1e6}. Dropout set here acts in '
        "training.",
    )

    @staticmethod
    def problems(options: Any) -> Iterator[str]:
        if options.override_config is None:
            return
        try:
            values = json.loads(options.override_config)
        except json.JSONDecodeError:
            values = None
        if isinstance(values, dict):
            yield from _wrong_dropouts(values)
        else:
            yield f"--override_config must be a JSON object, not {options.override_config!r}"


def _wrong_dropouts(overrides: dict[str, Any]) -> Iterator[str]:
    """Rates of ``--override_config``, those of its parts too, that are none."""
    for name, value in overrides.items():
        if isinstance(value, dict):
            yield from _wrong_dropouts(value)
        elif value is None or isinstance(value, bool) or not ("drop" in name or "jitter" in name):
            continue
        elif not (isinstance(value, int | float) and 0 <= value < 1):
            yield f"--override_config {name!r}: a rate is a number of at least 0 and below 1, not {value!r}"
