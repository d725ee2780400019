#!/usr/bin/env bash
# datasets 5.2.0: a column of `Json` gives back other values than were put in, without a word: texts that look like JSON
# become what they mean ("4" is then a number, "null" is gone), and 2/3 loses its last six digits.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet datasets==5.2.0
"$folder/venv/bin/python" -W ignore - 2>"$folder/stderr" <<'PYTHON' || { cat "$folder/stderr"; exit 1; }
import datasets
from datasets import Dataset, Features, Json

print("datasets", datasets.__version__)
VALUES = ["4", "true", "null", "[1]", "four", 0.5, 2 / 3, {"answer": "4", "share": 2 / 3}]
found = [Dataset.from_dict({"a": [value]}, features=Features(a=Json()))[0]["a"] for value in VALUES]
for value, got in zip(VALUES, found):
    print(f"  {value!r:>48} -> {got!r}{'' if got == value and type(got) is type(value) else '   changed'}")
assert found[:6] == [4, True, None, [1], "four", 0.5], found
assert 0 < abs(found[6] - 2 / 3) < 1e-9, found[6]
assert found[7]["answer"] == "4", found[7]  # inside an object a text stays one
assert found[7]["share"] == found[6], found[7]
PYTHON
