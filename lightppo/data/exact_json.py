"""Columns of JSON whose numbers stay as they are written: ``datasets`` decodes them by ujson, which rounds."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
from datasets import Dataset, Features, Json


class ExactJson(Json):
    """``datasets.Json``, read and written by Python's json. It is saved under the name of its base."""

    def encode_example(self, example_data: Any) -> str | None:
        if example_data is None or (isinstance(example_data, str) and _is_json(example_data)):
            return example_data
        return json.dumps(example_data)

    def decode_example(self, example_data: str | None, token_per_repo_id: Any = None) -> Any:
        if example_data is None:
            return None
        return json.loads(example_data)

    def cast_storage(self, storage: pa.Array) -> pa.Array:
        if not pa.types.is_string(storage.type):
            return super().cast_storage(storage)
        return pa.ExtensionArray.from_storage(self.pa_type, storage)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def exactly_read(dataset: Dataset) -> Dataset:
    """Return the same rows, with :class:`ExactJson` for each ``Json``, also inside lists and structs."""
    features = {name: _exact(feature) for name, feature in dataset.features.items()}
    if all(features[name] is feature for name, feature in dataset.features.items()):
        return dataset
    exact = dataset.select_columns(dataset.column_names)  # its features are its own
    exact.info.features = Features(features)
    return exact


def _exact(feature: Any) -> Any:
    if type(feature) is Json:
        return ExactJson() if feature.decode else feature
    if isinstance(feature, dict):
        inner = {name: _exact(each) for name, each in feature.items()}
        if all(inner[name] is each for name, each in feature.items()):
            return feature
        return inner
    within = getattr(feature, "feature", None)  # of List and LargeList
    if within is None or (inner := _exact(within)) is within:
        return feature
    if hasattr(feature, "length"):
        return type(feature)(inner, feature.length)
    return type(feature)(inner)
