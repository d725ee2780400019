"""CSV, TSV, parquet and arrow; large files, which one rank of a node parses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from datasets import Dataset

from lightppo.data.file_formats import read_file
from lightppo.data.rows import ORIGIN_COLUMN
from lightppo.errors import DataError

ROWS = [{"input": "a", "label": 1}, {"input": "b\n", "label": 2}]


def plain(dataset) -> list[dict]:
    return list(dataset.remove_columns(ORIGIN_COLUMN))


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
