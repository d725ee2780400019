#!/usr/bin/env bash
# datasets 5.2.0: a JSON column whose texts all look like dates is read as timestamps: the answer "2024-01-05" comes back
# as datetime(2024, 1, 5), no longer equal to what a model writes, and to_json writes milliseconds since 1970. One other
# text keeps the column as it is; if that one comes after the first 10 MB, the file is not read at all.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet datasets==5.2.0 pyarrow==26.0.1
cd "$folder"
HF_HOME="$folder/hf" "$folder/venv/bin/python" -W ignore - 2>"$folder/stderr" <<'PYTHON' || { cat "$folder/stderr"; exit 1; }
import json
from datetime import datetime
from pathlib import Path

import datasets
import pyarrow

print("datasets", datasets.__version__, "pyarrow", pyarrow.__version__)


def read(name, answers, filling=""):
    rows = (json.dumps({"question": filling, "answer": answer}) for answer in answers)
    Path(name).write_text("\n".join(rows) + "\n")
    return datasets.load_dataset("json", data_files=name, split="train")


dates = read("dates.jsonl", ["2024-01-05", "2023-12-31"])
dates.to_json("written.jsonl")
written = [json.loads(line)["answer"] for line in Path("written.jsonl").read_text().splitlines()]
print("  two dates:", dates["answer"][0], "| written:", written[0])
assert dates["answer"][0] == datetime(2024, 1, 5)
assert written[0] == 1_704_412_800_000

mixed = read("mixed.jsonl", ["2024-01-05", "in May"])
print("  a date and a text:", mixed["answer"][0])
assert mixed["answer"][0] == "2024-01-05"

try:
    read("late.jsonl", ["2024-01-05"] * 1200 + ["in May"], "x" * 10_000)
except datasets.exceptions.DatasetGenerationError as error:
    print("  a text after 12 MB of dates:", error.__cause__)
    assert "'in May' as a scalar of type timestamp" in str(error.__cause__)
else:
    raise AssertionError("it was read")
PYTHON
