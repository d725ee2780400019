"""Tables of rows whose values have any form. Imports ``datasets`` and pyarrow, so it is imported where rows are read.

Columns of JSON keep their numbers as they are written: ``datasets`` decodes them by ujson, which rounds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pyarrow as pa
from datasets import Dataset, Features, Json, Value, concatenate_datasets

from lightppo.data.rows import ORIGIN_COLUMN, chat_without_nulls
from lightppo.errors import DataError

Rows = Iterator[tuple[str, dict[str, Any]]]  # (origin, row)
_SCALARS = {str: "string", int: "int64", float: "float64", bool: "bool", type(None): "null"}


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
    features = {column: _exact(feature) for column, feature in dataset.features.items()}
    if all(features[column] is feature for column, feature in dataset.features.items()):
        return dataset
    exact = dataset.select_columns(dataset.column_names)  # its features are its own
    exact.info.features = Features(features)
    return exact


def _exact(feature: Any) -> Any:
    if type(feature) is Json and feature.decode:
        return ExactJson()
    if isinstance(feature, dict):
        exact_fields = {name: _exact(field) for name, field in feature.items()}
        is_same = all(exact_fields[name] is field for name, field in feature.items())
        return feature if is_same else exact_fields
    element_feature = getattr(feature, "feature", None)  # of List and LargeList
    if element_feature is None or (exact_element := _exact(element_feature)) is element_feature:
        return feature
    if hasattr(feature, "length"):
        return type(feature)(exact_element, feature.length)
    return type(feature)(exact_element)


def dataset_of(rows: Rows, limit: int | None) -> Dataset:
    """Make columns of the rows; None for a key that a row lacks."""
    columns: dict[str, list[Any]] = {}
    origins: list[str] = []
    for origin, row in islice(rows, limit):
        for key in row:  # in the file's order, so it is the same on every rank and run
            if key not in columns:
                columns[key] = [None] * len(origins)
        for key, values in columns.items():
            values.append(row.get(key))
        origins.append(row.get(ORIGIN_COLUMN) or origin)
    columns[ORIGIN_COLUMN] = origins
    features: dict[str, Any] = {}
    for key, values in columns.items():
        types = {type(value) for value in values if value is not None} or {type(None)}
        if len(types) == 1 and types <= _SCALARS.keys():
            features[key] = Value(_SCALARS[types.pop()])
        else:
            features[key] = ExactJson()
            columns[key] = _json_texts(values)
    features[ORIGIN_COLUMN] = Value("string")
    return Dataset.from_dict(columns, features=Features(features))


def _json_texts(values: list[Any]) -> list[str | None]:
    """Write values as JSON here: a feature of JSON would take the text "4" for a 4."""
    return [None if value is None else json.dumps(value, allow_nan=False) for value in values]


def concatenate(datasets: list[Dataset], source_names: list[str]) -> Dataset:
    """Put one dataset after the other. Missing columns become None, columns of differing types become JSON."""
    if len(datasets) == 1:  # the usual case; datasets would hash what it copies
        return datasets[0]
    column_features: dict[str, list[Any]] = {}
    for dataset in datasets:
        for column, feature in dataset.features.items():
            features = column_features.setdefault(column, [])
            if feature not in features and getattr(feature, "dtype", None) != "null":
                features.append(feature)
    mixed = [column for column, features in column_features.items() if len(features) > 1]
    datasets = [
        _as_json(dataset, mixed, source_name)
        for dataset, source_name in zip(datasets, source_names)
    ]
    return exactly_read(concatenate_datasets(datasets))


def _as_json(dataset: Dataset, columns: list[str], source_name: str) -> Dataset:
    for column in columns:
        feature = dataset.features.get(column, Json())
        if isinstance(feature, Json):
            continue
        values = dataset[column]
        try:
            # a chat or a list of tools as it was before a table put nulls into it
            values = [
                chat_without_nulls(value, feature) if isinstance(value, list) else value
                for value in values
            ]
            texts = _json_texts(values)
            converted = Dataset.from_dict({column: texts}, features=Features({column: ExactJson()}))
        except (TypeError, ValueError) as error:
            raise DataError(
                f"column {column!r} has another type in {source_name} than in the other sources, and cannot be held as "
                f"JSON: {error}; convert it, or take it out"
            ) from error
        parts = [dataset.remove_columns(column), converted]
        dataset = exactly_read(concatenate_datasets(parts, axis=1))
    return dataset
