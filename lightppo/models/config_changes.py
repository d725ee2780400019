"""Changes of a model's config: ``--override_config``."""

from __future__ import annotations

import json
from typing import Any

from transformers import PretrainedConfig

from lightppo.errors import ModelLoadError
from lightppo.models.loading import errors_name
from lightppo.suggestions import nearest


def _override(config: PretrainedConfig, values: dict[str, Any], name: str) -> None:
    for key, value in _with_rope(config, values, name).items():
        if not hasattr(config, key):
            hint = nearest(key, config.to_dict())
            raise ModelLoadError(f"{name}: the config of {config.model_type} has no {key!r}{hint}")
        current = getattr(config, key)
        if isinstance(current, PretrainedConfig) and isinstance(value, dict):
            _override(current, value, f"{name}.{key}")
        else:
            setattr(config, key, value)


def _with_rope(
    config: PretrainedConfig,
    values: dict[str, Any],
    name: str,
) -> dict[str, Any]:
    """``rope_theta`` and ``rope_scaling`` as transformers 5 has them: part of ``rope_parameters``, whose rest stays."""
    before = getattr(config, "rope_parameters", None)
    rest = dict(values)
    if not isinstance(before, dict):
        return rest
    told = {"rope_theta": rest.pop("rope_theta")} if "rope_theta" in rest else {}
    scaling = rest.pop("rope_scaling", None) or {}
    told |= {"rope_type" if key == "type" else key: value for key, value in scaling.items()}
    told |= rest.pop("rope_parameters", None) or {}
    layers = [key for key, value in before.items() if isinstance(value, dict)]
    if layers and not told.keys() <= set(layers):
        raise ModelLoadError(
            f"{name}: give rope_parameters for each kind of layer: {', '.join(layers)}"
        )
    merged = {key: before[key] | value if key in layers else value for key, value in told.items()}
    return rest | ({"rope_parameters": before | merged} if told else {})


def override(config: PretrainedConfig, changes: dict[str, Any] | str, path: str, flag: str) -> None:
    """Set attributes, which are given by name or as JSON; ``flag`` names the model."""
    values = json.loads(changes) if isinstance(changes, str) else changes
    _override(config, values, "--override_config")
    if any(name.startswith("rope_") for name in values):
        with errors_name(path, f"--override_config of {flag}"):
            config.standardize_rope_params()
            config.validate_rope()
