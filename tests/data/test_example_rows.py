"""Which part of a row is prompt and answer, and what is a whole text."""

from __future__ import annotations

import pytest

from lightppo.data.example_rows import read_example, resolve_example_fields
from lightppo.errors import DataError

USER = {"role": "user", "content": "2+2?"}
ANSWER = {"role": "assistant", "content": "4"}

EXAMPLES = [
    ({"prompt": "q", "completion": "a"}, "q", "a"),
    ({"prompt": [USER], "completion": [ANSWER]}, [USER], [ANSWER]),
    ({"prompt": [USER], "completion": "4"}, [USER], [ANSWER]),
    ({"messages": [USER, ANSWER], "answer": "gold"}, [USER], [ANSWER]),
    ({"question": "q", "answer": "a"}, "q", "a"),
    ({"input": "q", "output": "a"}, "q", "a"),
    ({"prompt": [USER], "chosen": [USER, ANSWER], "rejected": [USER, USER]}, [USER], [ANSWER]),
    ({"prompt": "q", "chosen": "a", "rejected": "b"}, "q", "a"),
    ({"chosen": [USER, ANSWER], "rejected": [USER, {**ANSWER, "content": "5"}]}, [USER], [ANSWER]),
    ({"prompt": "q"}, "q", None),
]


@pytest.mark.parametrize(("row", "prompt", "completion"), EXAMPLES)
def test_supervised_forms(row: dict, prompt: object, completion: object) -> None:
    assert read_example(row, resolve_example_fields(list(row))) == (prompt, completion)


def test_documents_are_whole_texts() -> None:
    def read(row: dict, **keys) -> tuple:
        return read_example(row, resolve_example_fields(list(row), documents=True, **keys))

    assert read({"text": "all", "answer": "x"}) == ("all", None)
    assert read({"input": "all", "output": "x"}) == ("all", None)
    assert read({"input": "all", "output": "x"}, output_key="output") == ("all", "x")
    assert read({"prompt": "q", "completion": "a"}) == ("q", "a")
    # the prompts' key, not this data's
    assert read({"text": "all"}, input_key="question") == ("all", None)
    with pytest.raises(DataError, match="--input_key 'question'"):
        read({"body": "all"}, input_key="question")


def test_a_missing_column_is_named() -> None:
    with pytest.raises(DataError, match="--output_key 'o'"):
        resolve_example_fields(["prompt"], output_key="o")
