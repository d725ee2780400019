"""Files of rows, JSON with the line of each; large files, which one rank of a node parses; what cannot be read."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest
from datasets import Dataset

from lightppo.data.blends import blending_datasets, load_source
from lightppo.data.file_formats import file_format, read_file
from lightppo.data.rows import ORIGIN_COLUMN
from lightppo.errors import DataError

ROWS = [{"input": "a", "label": 1}, {"input": "b\n", "label": 2}]


def plain(dataset) -> list[dict]:
    return list(dataset.remove_columns(ORIGIN_COLUMN))


def test_jsonl_lines_blank_ones_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("\ufeff" + json.dumps(ROWS[0]) + "\n\n" + json.dumps(ROWS[1]), encoding="utf-8")
    dataset = read_file(path)
    assert plain(dataset) == ROWS
    assert dataset[ORIGIN_COLUMN][:] == [f"{path}:1", f"{path}:3"]


def test_columns_come_in_the_order_of_the_file(tmp_path: Path) -> None:
    names = [f"{letter}{number}" for letter in "zyxabc" for number in range(3)]
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"m": 1}) + "\n" + json.dumps(dict.fromkeys(names, 1)))
    assert read_file(path).column_names == ["m", *names, ORIGIN_COLUMN]


def test_json_arrays_and_lines_named_json(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(" \n" + json.dumps(ROWS, indent=1))
    dataset = read_file(path, shown_as="shown")
    assert plain(dataset) == ROWS
    assert dataset[ORIGIN_COLUMN][:] == ["shown, row 1", "shown, row 2"]
    path.write_text("\n".join(map(json.dumps, ROWS)))
    assert read_file(path)[ORIGIN_COLUMN][1] == f"{path}:2"


def test_compressed_and_limited(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, ROWS)).encode() + b"\nbroken"))
    assert plain(read_file(path, limit=2)) == ROWS  # what lies beyond the limit is not read
    assert plain(read_file(path, limit=1)) == ROWS[:1]


def test_values_keep_their_form(tmp_path: Path) -> None:
    rows = [
        {"x": 1, "y": {"a": 1}, "z": "007", "n": 1, "t": "4", "f": 0.123456789012345},
        {"x": "s", "y": {"b": [1, "t"]}, "z": "8", "n": 2.5, "t": 4, "f": "s"},
        {"x": '{"a": 1}', "y": None, "z": None, "n": True, "t": "null", "f": [1e-30], "late": [1]},
    ]
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    got = plain(read_file(path))
    keys = ("x", "y", "z", "n", "t")
    assert [{k: r[k] for k in keys} for r in got] == [{k: r[k] for k in keys} for r in rows]
    assert [r["f"] for r in got] == [0.123456789012345, "s", [1e-30]]
    assert [type(r["n"]) for r in got] == [int, float, bool]
    assert [r["late"] for r in got] == [None, None, [1]]


def test_numbers_in_lists_and_objects_keep_every_digit(tmp_path: Path) -> None:
    numbers = [2 / 3, 5e-324, 1.7976931348623157e308, 123456789012345678901234567890.5, 0.1 + 0.2]
    row = {"input": "a", "cases": numbers, "deep": [{"gold": each} for each in numbers]}
    (path := tmp_path / "x.jsonl").write_text(json.dumps(row))
    dataset = load_source(str(path), "train", "--prompt_data")
    assert plain(dataset) == [row]
    # also where another source is behind it, and in what was saved
    (other := tmp_path / "y.jsonl").write_text('{"input": "b", "cases": "none"}')
    blend = blending_datasets(f"{other},{path}")
    assert (blend[1]["cases"], blend[1]["deep"]) == (numbers, row["deep"])
    dataset.save_to_disk(tmp_path / "saved")
    dataset.to_parquet(tmp_path / "x.parquet")
    for source in (tmp_path / "saved", tmp_path / "x.parquet"):
        assert plain(blending_datasets(str(source))) == [row]


def test_an_escaped_character_of_two_halves(tmp_path: Path) -> None:
    (path := tmp_path / "x.jsonl").write_text('{"input": "\\uD83D\\uDE00"}')
    assert read_file(path)["input"][:] == ["😀"]


BROKEN = [
    ("x.jsonl", '{"a": 1}\n{"a": \n', r"x.jsonl:2: not JSON"),
    ("x.jsonl", '{"a": 1}\n[1]\n', "x.jsonl:2: an object is needed, not list"),
    ("x.json", '[{"a": 1},\n oops]', "x.json:2: not JSON"),
    ("x.json", '[{"a": 1}, 5]', "x.json, row 2: an object is needed, not int"),
    (
        "x.jsonl",
        '{"a": 1}\n{"a": {"b": 1267650600228229401496703205376}}',
        "x.jsonl:2: the integer 12676.*write it as text",
    ),
    ("x.json", '[{"a": NaN}]', "x.json: NaN is not JSON; write null"),
    ("x.jsonl", '{"a": 1}\n{"a": 1e400}', "x.jsonl:2: 1e400 is no number of 64 bits"),
    ("x.jsonl", '{"a": 1}\n{"a": ["\\uD800"]}', r"x.jsonl:2: a text has \\ud800, half of a char"),
    ("x.json", '[{"a": 1}, {"\\udfff": 1}]', r"x.json, row 2: a text has \\udfff"),
    ("x.csv", "input;label\na;b\n", "x.csv: the first line has semicolons .* and no commas"),
    ("x.tsv", "input,label\na,b\n", "x.tsv: the first line has commas .* and no tabs"),
    ("x.csv", "a,b\n1,2\n1,2,3\n", "x.csv, row 2: 3 cells, but the header has 2"),
    (
        "x.jsonl",
        '{"a": 1}\n{"a":\r\n{"a": 2}\n',
        r"x.jsonl:2: not JSON: Expecting value \(column 6\)",
    ),
    ("x.jsonl", '\n  {"a": 1,, "b": 2}\n', r"x.jsonl:2: not JSON: .* \(column 11\)"),
    (
        "x.json",
        '[\n  {"a": 1},\n  {"a" 2}\n]',
        r"x.json:3: not JSON: Expecting ':' delimiter \(column 8\)",
    ),
    ("x.csv", 'a,b\n1,"2\n', "x.csv, row 1: not CSV"),
    ("x.csv", "a,a\n1,2\n", "names a column twice"),
    ("x.parquet", "no parquet", "x.parquet: not a readable parquet file"),
    ("x.txt", "text", r"x.txt: unknown format; the name must end in one of .jsonl"),
]


@pytest.mark.parametrize(("name", "content", "message"), BROKEN)
def test_broken_files(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        read_file(tmp_path / name)


@pytest.mark.parametrize("name", ["x.jsonl", "x.csv"])
def test_not_utf8(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b'a\n"\xff\xfe"\n')
    with pytest.raises(DataError, match=f"{name}.*not UTF-8"):
        read_file(tmp_path / name)


def test_formats_by_name() -> None:
    assert file_format("a/b.JSONL") == ".jsonl"
    assert file_format("a.csv.gz") == ".csv"
    assert file_format("v1.5/data") is None
    assert file_format("a.tar.gz") is None


def test_messages_of_sources_that_are_not_there(write_jsonl, tmp_path: Path) -> None:
    write_jsonl([], "d/train.jsonl")
    for source, message in {
        "no/such.jsonl": "--eval_data no/such.jsonl: no such file or folder",
        f"{tmp_path}/d": "is empty: no rows train.jsonl",
        "nowhere://x.jsonl": "--eval_data nowhere://x.jsonl: unknown scheme",
    }.items():
        with pytest.raises(DataError, match=message):
            load_source(source, "train", "--eval_data")


# -- large files, CSV, parquet and arrow --

LARGE = {
    "x.jsonl": '{"input": "a", "label": 1, "extra": {"level": 2}, "tag": "4"}\n{"input": "b", "label": 2, "tag": 0.1}',
    "x.csv": 'input,label\na,007\n"b\n",2\n',
}


@pytest.mark.parametrize("name", LARGE)
def test_the_ranks_of_a_node_parse_a_large_file_once(
    tmp_path: Path, monkeypatch, name: str, caplog
) -> None:
    (path := tmp_path / name).write_text(LARGE[name])
    alone, written = read_file(path), path.stat()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LIGHTPPO_CACHE", str(tmp_path / "cache"))
    assert not read_file(path).cache_files  # a small one
    monkeypatch.setattr("lightppo.data.file_formats.SHARED_BYTES", 1)
    assert not read_file(path, limit=1).cache_files  # a look at it
    shared = read_file(path)
    assert shared.cache_files
    assert (shared.features, list(shared)) == (alone.features, list(alone))
    path.write_text(LARGE[name].replace("a", "c"))
    assert read_file(path)["input"][0] == "c"  # the file has changed
    os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns))
    # as far as it says, it has not: nothing is parsed again
    assert read_file(path)["input"][0] == "a"
    path.write_text(LARGE[name] + '\n"x')
    with pytest.raises(DataError, match=r"x.jsonl:3|x.csv, row 3"):
        read_file(path)
    monkeypatch.setenv("LIGHTPPO_CACHE", str(path / "below_a_file"))
    path.write_text(LARGE[name])
    assert list(read_file(path)) == list(alone)
    assert "each rank holds its own rows, because the cache fails" in caplog.text


def test_csv_cells_are_text(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text('input,answer\n"a, ""b""\nc",007\n\nd,\n')
    dataset = read_file(path)
    assert plain(dataset) == [{"input": 'a, "b"\nc', "answer": "007"}, {"input": "d", "answer": ""}]
    assert dataset[ORIGIN_COLUMN][:] == [f"{path}, row 1", f"{path}, row 2"]
    tabs = tmp_path / "x.tsv"
    tabs.write_text("input\tanswer\na,b\t1\n")
    assert plain(read_file(tabs)) == [{"input": "a,b", "answer": "1"}]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_mapped_formats(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"x.{kind}"
    if kind == "parquet":
        Dataset.from_list(ROWS).to_parquet(path)
    else:
        Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
        (tmp_path / "saved" / "data-00000-of-00001.arrow").rename(path)
    dataset = read_file(path)
    assert plain(dataset) == ROWS
    assert dataset[ORIGIN_COLUMN][1] == f"{path}, row 2"
    assert len(read_file(path, limit=1)) == 1
