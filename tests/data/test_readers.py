"""The core's reader: a file of JSON lines."""

import pytest

from lightppo.config import PPOConfig
from lightppo.data.readers import rows_of_file
from lightppo.data.rows import ORIGIN_COLUMN
from lightppo.errors import DataError


def rows_of(source):
    return rows_of_file(PPOConfig.from_flat(prompt_data=str(source)), "prompt_data", "train", None)


def test_rows_keep_their_lines(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"input": "a", "label": 1}\n{"input": "b", "label": 2}\n')
    rows = rows_of(path)
    assert rows["input"][:] == ["a", "b"]
    assert rows["label"][:] == [1, 2]
    assert rows[ORIGIN_COLUMN][:] == [f"{path}:1", f"{path}:2"]


@pytest.mark.parametrize("line", ['{"a": ', "[1]", "5"])
def test_a_broken_line_is_named(tmp_path, line):
    path = tmp_path / "x.jsonl"
    path.write_text(f'{{"a": 1}}\n{line}\n')
    with pytest.raises(DataError, match=r"x\.jsonl:2: not a JSON object"):
        rows_of(path)


def test_a_file_that_is_not_there():
    with pytest.raises(DataError, match=r"--prompt_data no/such\.jsonl: no such file"):
        rows_of("no/such.jsonl")
