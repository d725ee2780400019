"""Sources, splits, blends, columns of other files; messages for what is not there."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets import Dataset, DatasetDict
from support.fakes import FakeStrategy

from lightppo.data.blends import (
    blending_datasets,
    check_data_paths,
    interleave_indices,
    with_metadata,
)
from lightppo.data.datasets import PromptDataset
from lightppo.data.rows import ORIGIN_COLUMN
from lightppo.errors import DataError


def plain(dataset) -> list[dict]:
    return list(dataset.remove_columns(ORIGIN_COLUMN))


REPO = Path(__file__).parents[2]
GSM8K = REPO.parent / "shared" / "data" / "gsm8k"


def numbered(write_jsonl, name: str, count: int) -> str:
    return write_jsonl([{"input": f"{name}{i}"} for i in range(count)], f"{name}.jsonl")


def test_sources_one_after_the_other_keep_their_origins(write_jsonl) -> None:
    a, b = numbered(write_jsonl, "a", 2), numbered(write_jsonl, "b", 3)
    dataset = blending_datasets(f"{a}, {b}")
    assert dataset["input"][:] == ["a0", "a1", "b0", "b1", "b2"]
    assert dataset[ORIGIN_COLUMN][3] == f"{b}:2"
    assert blending_datasets(f"{a},{b}", max_count=2)["input"][:] == ["a0", "a1", "b0", "b1"]
    assert blending_datasets(a, max_count=1e8).num_rows == 2  # the seed passes floats


def test_a_blend_uses_every_row_and_origins_stay_right(
    write_jsonl, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = numbered(write_jsonl, "a", 30), numbered(write_jsonl, "b", 50)
    with caplog.at_level(logging.INFO):
        dataset = blending_datasets(f"{a},{b}", "0.75,0.25", seed=1)
    seen = Counter(dataset["input"])
    assert len(seen) == 80
    for row in dataset:
        path, line = row[ORIGIN_COLUMN].rsplit(":", 1)
        assert (
            json.loads(Path(path).read_text().splitlines()[int(line) - 1])["input"] == row["input"]
        )
    # in their order
    assert [x for x in dataset["input"] if x.startswith("b")] == [f"b{i}" for i in range(50)]
    assert "30 rows" in caplog.text
    assert "(repeats)" in caplog.text  # about 150 draws of a's 30 rows
    assert dataset["input"][:] == blending_datasets(f"{a},{b}", "0.75,0.25", seed=1)["input"][:]
    assert dataset["input"][:] != blending_datasets(f"{a},{b}", "0.75,0.25", seed=2)["input"][:]


def test_interleaving_follows_the_probabilities_and_stops_where_told() -> None:
    indices, drawn = interleave_indices([2000, 10_000], [0.25, 0.75], 0, "all_exhausted")
    assert len(indices) == sum(drawn)
    assert drawn[1] == 10_000  # the last to be used up: 10000 draws at 3/4 make about 13333 in all
    assert abs(drawn[0] / len(indices) - 0.25) < 0.02
    assert sorted(set(indices.tolist())) == list(range(12_000))

    indices, drawn = interleave_indices([20, 500], [0.5, 0.5], 0, "first_exhausted")
    assert drawn[0] == 20
    assert indices[-1] == 19  # ends with the last row of the first source to be used up
    assert len(set(indices.tolist())) == len(indices)


def test_first_exhausted_says_what_is_not_used(
    write_jsonl, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = numbered(write_jsonl, "a", 3), numbered(write_jsonl, "b", 90)
    with caplog.at_level(logging.WARNING):
        dataset = blending_datasets(f"{a},{b}", "0.5,0.5", stopping_strategy="first_exhausted")
    used = sum(x.startswith("b") for x in dataset["input"])
    assert f"{b}: 90 rows, {used} used" in caplog.text


def test_only_rank_0_logs(write_jsonl, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lightppo.data"):
        blending_datasets(numbered(write_jsonl, "a", 3), None, FakeStrategy(rank=1, world_size=2))
    assert not caplog.records


def test_sources_of_different_forms(write_jsonl, tmp_path: Path, tokenizer) -> None:
    chat = [{"role": "user", "content": "hi"}]
    verl = tmp_path / "verl.parquet"
    Dataset.from_list(
        [{"prompt": chat, "reward_model": {"ground_truth": "1"}, "extra_info": {"i": 1}}]
    ).to_parquet(verl)
    areal = write_jsonl(
        [{"prompt": "text", "solutions": ["2"], "extra_info": "none"}], "areal.jsonl"
    )
    gsm8k = write_jsonl([{"question": "q?", "answer": "#### 3"}], "gsm8k.jsonl")
    dataset = blending_datasets(f"{verl},{areal},{gsm8k}")
    prompts = list(PromptDataset(dataset, tokenizer))
    assert [p.text for p in prompts] == ["<u>hi~\n<a>", "text", "q?"]
    assert [p.label for p in prompts] == ["1", ["2"], "#### 3"]
    assert [p.extra["extra_info"] for p in prompts] == [{"i": 1}, "none", None]


def test_nulls_that_a_table_put_into_a_chat(write_jsonl, tmp_path: Path) -> None:
    """Behind a source of JSON, where a null was written, they are not there any more."""
    calls = [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"b": None}}]
    chats = [{"prompt": [{"role": "assistant", "content": "", "tool_calls": [c]}]} for c in calls]
    Dataset.from_list([*chats, {"prompt": []}]).to_parquet(tmp_path / "x.parquet")
    path = write_jsonl([*chats, {"prompt": "text"}])
    of_table, _, _, of_json, second, _ = blending_datasets(f"{tmp_path}/x.parquet,{path}")["prompt"]
    assert of_table[0]["tool_calls"] == of_json[0]["tool_calls"] == calls[:1]
    assert second[0]["tool_calls"] == calls[1:]


def test_columns_that_json_cannot_hold(tmp_path: Path, write_jsonl) -> None:
    path = tmp_path / "x.parquet"
    Dataset.from_list([{"input": "a", "raw": b"\x00"}]).to_parquet(path)
    with pytest.raises(DataError, match=r"column 'raw' has another type in .*x.parquet"):
        blending_datasets(f"{path},{write_jsonl([{'input': 'b', 'raw': 'text'}])}")


def test_folders_of_files_by_split(write_jsonl, tmp_path: Path) -> None:
    for name in (
        "d/train-00000.jsonl",
        "d/train-00001.jsonl",
        "d/test.jsonl",
        "d/.hidden/train.jsonl",
    ):
        write_jsonl([{"input": name}], name)
    (tmp_path / "d" / "README.md").write_text("no data")
    folder = str(tmp_path / "d")
    train = blending_datasets(folder)
    assert train["input"][:] == ["d/train-00000.jsonl", "d/train-00001.jsonl"]
    assert train[ORIGIN_COLUMN][0] == f"{folder}/train-00000.jsonl:1"
    assert blending_datasets(folder, train_split="test")["input"][:] == ["d/test.jsonl"]
    assert len(blending_datasets(folder, max_count=1)) == 1
    with pytest.raises(DataError, match=r"'validation'.*: test.jsonl, train-00000"):
        blending_datasets(folder, train_split="validation")
    write_jsonl([{"input": "x"}], "e/part.jsonl")
    write_jsonl([{"input": "y"}], "e/val/part.jsonl")
    assert blending_datasets(str(tmp_path / "e"))["input"][:] == ["x"]  # names no split: train
    assert blending_datasets(str(tmp_path / "e"), train_split="validation")["input"][:] == ["y"]


def test_saved_datasets(tmp_path: Path) -> None:
    both = DatasetDict(
        train=Dataset.from_list([{"input": "a"}]), test=Dataset.from_list([{"input": "b"}])
    )
    both.save_to_disk(tmp_path / "both")
    both["train"].save_to_disk(tmp_path / "one")
    test = blending_datasets(str(tmp_path / "both"), train_split="test")
    assert test[0] == {"input": "b", ORIGIN_COLUMN: f"{tmp_path / 'both'}[test], row 1"}
    assert blending_datasets(str(tmp_path / "one"))["input"][:] == ["a"]
    with pytest.raises(DataError, match=r"'dev'.*: train, test"):
        blending_datasets(str(tmp_path / "both"), train_split="dev")
    test.save_to_disk(tmp_path / "again")  # a saved blend keeps the origins it has
    assert (
        blending_datasets(str(tmp_path / "again"))[ORIGIN_COLUMN][0]
        == f"{tmp_path / 'both'}[test], row 1"
    )


def test_hub_names_are_asked_for_with_config_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def load(name, config, *, split):
        asked.append((name, config, split))
        if name == "no/such":
            raise ConnectionError("offline")
        return Dataset.from_list([{"question": "q"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr("lightppo.data.folders.is_cached", lambda name, kind: kind == "dataset")
    dataset = blending_datasets("openai/gsm8k@main", train_split="test")
    assert asked == [("openai/gsm8k", "main", "test")]
    assert dataset[ORIGIN_COLUMN][0] == "openai/gsm8k@main[test], row 1"
    with pytest.raises(DataError, match=r"--prompt_data no/such: .*ConnectionError: offline"):
        blending_datasets("no/such")


MISSING = [
    ("/no/such.jsonl", "--prompt_data /no/such.jsonl: no such file or folder"),
    ("no/such.parquet", "no such file or folder"),
    ("./nosuch", "no such file or folder"),
    ("file:///no/such.jsonl", "no such file or folder"),
    ("a.jsonl,,b.jsonl", "has an empty item"),
    ("", "has an empty item"),
    ("nowhere://x/y.jsonl", "unknown scheme 'nowhere'"),
]


@pytest.mark.parametrize(("paths", "message"), MISSING)
@pytest.mark.parametrize("load", [check_data_paths, blending_datasets])
def test_missing_sources(paths: str, message: str, load) -> None:
    with pytest.raises(DataError, match=message):
        load(paths)


def test_blanks_between_sources(write_jsonl) -> None:
    a, b = (str(numbered(write_jsonl, name, 1)) for name in "ab")
    with pytest.raises(DataError, match=f"separate several sources with commas: --x {a},{b}"):
        check_data_paths(f"{a} {b}", flag="--x")


def test_paths_checked_before_a_run(
    write_jsonl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = numbered(write_jsonl, "a", 1)
    with pytest.raises(
        DataError,
        match="--eval_data owner/name: no such file or folder here, not in the hub's cache",
    ):
        check_data_paths(f"{a},owner/name", flag="--eval_data")
    monkeypatch.setattr(
        "lightppo.data.folders.is_cached",
        lambda name, kind: (name, kind) == ("owner/name", "dataset"),
    )
    check_data_paths(
        f"{a},{tmp_path},owner/name,owner/name@config,memory://x.jsonl", flag="--eval_data"
    )
    with pytest.raises(DataError, match=r"--eval_data_probs '1,2'"):
        check_data_paths(a, "1,2", flag="--eval_data")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(DataError, match=r"--eval_data .*notes.txt"):
        check_data_paths(str(tmp_path / "notes.txt"), flag="--eval_data")


@pytest.mark.parametrize(
    ("probs", "message"),
    [
        ("0.5", "1 numbers for 2"),
        ("a,b", "numbers are needed"),
        ("0,1", "over 0"),
        ("0.7,0.2", "sums to 0.9"),
        ("nan,1", "over 0"),
    ],
)
def test_bad_probabilities(probs: str, message: str) -> None:
    with pytest.raises(DataError, match=f"--prompt_data_probs .*{message}"):
        check_data_paths("owner/one,owner/two", probs)


def test_empty_sources_and_bad_options(write_jsonl, tmp_path: Path) -> None:
    empty = write_jsonl([], "empty.jsonl")
    with pytest.raises(DataError, match=f"--pretrain_data {empty}"):
        blending_datasets(empty, flag="--pretrain_data")
    (tmp_path / "d").mkdir()
    with pytest.raises(DataError, match="no data files"):
        blending_datasets(str(tmp_path / "d"))
    write_jsonl([], "d/train.jsonl")
    with pytest.raises(DataError, match=r"train.jsonl"):
        blending_datasets(str(tmp_path / "d"))
    a = numbered(write_jsonl, "a", 1)
    with pytest.raises(DataError, match="max_count is 0"):
        blending_datasets(a, max_count=0)
    with pytest.raises(DataError, match="stopping_strategy is 'never'"):
        blending_datasets(a, stopping_strategy="never")


def test_a_script_gets_held_out_rows_too(write_jsonl, tmp_path: Path, caplog) -> None:
    """As OpenRLHF: of the split, or the first 3 % of the training rows of a source that has no such split."""
    file = write_jsonl([{"q": i} for i in range(100)], "a.jsonl")
    write_jsonl([{"q": i} for i in range(200, 210)], "folder/train.jsonl")
    write_jsonl([{"q": i} for i in range(300, 304)], "folder/test.jsonl")
    saved, splits = tmp_path / "saved", {"train": [400, 401], "validation": [500]}
    DatasetDict(
        {name: Dataset.from_dict({"q": rows}) for name, rows in splits.items()}
    ).save_to_disk(str(saved))
    folder, script = (
        str(tmp_path / "folder"),
        SimpleNamespace(args=SimpleNamespace(), is_rank_0=lambda: True),
    )

    train, held_out = blending_datasets(
        f"{file},{folder}", "0.5,0.5", script, 42, max_count=1e8, eval_split="test"
    )
    assert set(train["q"]) == {*range(100), *range(200, 210)}
    assert held_out["q"] == [0, 1, 2, 300, 301, 302, 303]
    assert (
        "a.jsonl has no split 'test': evaluation is on 3 of the rows that are trained on"
        in caplog.text
    )
    _, held_out = blending_datasets(
        str(saved), None, None, 42, train_split="train", eval_split="validation"
    )
    assert held_out["q"] == [500]
    # until 0.3 scripts name no split
    _, held_out = blending_datasets(str(saved), "1.0", script, 42)
    assert held_out["q"] == [400]  # at least one
    for none in ({"return_eval": False}, {"train_split": "train"}):
        assert blending_datasets(str(saved), None, script, 42, **none)["q"] == [400, 401]
    assert blending_datasets(str(saved), None, None, 42)["q"] == [400, 401]  # not a script
    assert len(blending_datasets(str(saved), None, None, 42, return_eval=True)) == 2


@pytest.mark.skipif(not GSM8K.is_dir(), reason="no ../shared/data/gsm8k beside this checkout")
def test_real_gsm8k_rows(tokenizer) -> None:
    both = blending_datasets(f"{GSM8K / 'train.jsonl'},{GSM8K / 'test.jsonl'}")
    assert both.num_rows == 7473 + 1319
    last = both.select(range(7000, both.num_rows))  # the end of the first file and the whole second
    dataset = PromptDataset(
        last, tokenizer, input_key="question", label_key="answer", prompt_max_len=2048
    )
    assert (dataset.report.rows, dataset.report.kept, dataset.report.dropped) == (
        473 + 1319,
        473 + 1319,
        {},
    )
    assert dataset.origin(472) == f"{GSM8K / 'train.jsonl'}:7473"
    prompt = dataset[473]
    assert dataset.origin(473) == f"{GSM8K / 'test.jsonl'}:1"
    assert prompt.text.startswith("Janet’s ducks lay 16 eggs per day.")
    assert prompt.label.endswith("#### 18")
    assert all("####" in label for label in both["answer"])
    # without keys: question and answer
    recognised = PromptDataset(both.select(range(50)), tokenizer)
    assert [p.label for p in recognised] == both["answer"][:50]
    assert blending_datasets(str(GSM8K), train_split="test").num_rows == 1319


def test_metadata_is_joined_by_query_id(write_jsonl) -> None:
    """Ids may be text in one file and numbers in the other, as AReaL takes them; a column of the prompts stays."""
    prompts = write_jsonl(
        [{"prompt": p, "query_id": i} for p, i in (("a", 7), ("b", 8), ("c", 7))], "prompts.jsonl"
    )
    tests = [
        {"query_id": "8", "input_output": "{}", "prompt": "no"},
        {"query_id": "7", "input_output": None, "n": 1},
    ]
    rows = with_metadata(blending_datasets(prompts), write_jsonl(tests, "tests.jsonl"))
    kept = [{name: value for name, value in row.items() if name != ORIGIN_COLUMN} for row in rows]
    assert kept == [
        {"prompt": "a", "query_id": 7, "input_output": None, "n": 1},
        {"prompt": "b", "query_id": 8, "input_output": "{}", "n": None},
        {"prompt": "c", "query_id": 7, "input_output": None, "n": 1},
    ]
    assert rows[1][ORIGIN_COLUMN] == f"{prompts}:2"


def test_metadata_is_joined_by_id_where_one_side_has_no_query_id(write_jsonl) -> None:
    prompts = write_jsonl(
        [{"prompt": "a", "id": 7, "query_id": "x"}, {"prompt": "b", "id": 8}], "prompts.jsonl"
    )
    tests = write_jsonl([{"id": "8", "n": 1}, {"id": "7", "n": 2}], "tests.jsonl")
    assert with_metadata(blending_datasets(prompts), tests)["n"] == [2, 1]
    both = write_jsonl(
        [{"query_id": "y", "id": 7, "n": 3}, {"query_id": "x", "id": 8, "n": 4}], "both.jsonl"
    )
    first = write_jsonl([{"prompt": "a", "id": 7, "query_id": "x"}], "first.jsonl")
    assert with_metadata(blending_datasets(first), both)["n"] == [4]  # query_id wins


@pytest.mark.parametrize(
    ("prompts", "tests", "problem"),
    [
        (
            [{"query_id": 1}, {"query_id": 2}],
            [{"query_id": 1}],
            r"prompts.jsonl:2: query_id 2 is not in --prompt_m",
        ),
        (
            [{"query_id": 1}, {"x": 2}],
            [{"query_id": 1}],
            r"prompts.jsonl:2: query_id None is not in",
        ),
        ([{"id": 1}, {"id": 2}], [{"id": 1}], r"prompts.jsonl:2: id 2 is not in --prompt_m"),
        (
            [{"x": 1}],
            [{"query_id": 1}],
            r"--prompt_metadata .*: no column 'query_id' or 'id' in the prompts",
        ),
        (
            [{"query_id": 1}],
            [{"x": 1}],
            r"--prompt_metadata .*tests.jsonl: no column 'query_id' or 'id' in it",
        ),
        (
            [{"query_id": 1}],
            [{"id": 1}],
            r"--prompt_metadata .*tests.jsonl: .* different names: call both 'query_id'",
        ),
        (
            [{"query_id": 1}],
            [{"query_id": 1}, {"query_id": "1"}],
            r"--prompt_metadata .*tests.jsonl:2: .* there twice",
        ),
    ],
)
def test_metadata_that_cannot_be_joined(write_jsonl, prompts, tests, problem) -> None:
    with pytest.raises(DataError, match=problem):
        with_metadata(
            blending_datasets(write_jsonl(prompts, "prompts.jsonl")),
            write_jsonl(tests, "tests.jsonl"),
        )
