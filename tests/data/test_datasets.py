"""Prompts from rows: ids, limits, bad rows by file and line."""

from __future__ import annotations

import logging
from datetime import datetime

import pytest
from datasets import Dataset
from torch.utils.data import DataLoader

from lightppo.data.blends import blending_datasets
from lightppo.data.datasets import (
    PromptDataset,
    truncate_ids,
)
from lightppo.errors import DataError
from lightppo.trainer.prompts import RolloutBatchSampler

USER = {"role": "user", "content": "2+2?"}


def text(tokenizer, prompt) -> str:
    return tokenizer.decode(prompt.token_ids)


def test_a_row_becomes_a_prompt(tokenizer, write_jsonl) -> None:
    rows = [
        {"input": "1+1=", "answer": "2", "level": 1},
        {"input": "2+2=", "answer": "4", "level": 2},
    ]
    dataset = PromptDataset(blending_datasets(write_jsonl(rows)), tokenizer, label_key="answer")
    prompt = dataset[1]
    assert (prompt.text, text(tokenizer, prompt), prompt.label, prompt.index) == (
        "2+2=",
        "2+2=",
        "4",
        1,
    )
    # the label's column too: TRL's and AReaL's functions name it
    assert prompt.extra == {"answer": "4", "level": 2}
    assert (prompt.data_source, prompt.messages) == ("default", None)
    assert dataset[-1] == prompt
    with pytest.raises(IndexError):
        dataset[2]
    assert vars_of(dataset.report) == (2, 2, 0, {})


def vars_of(report) -> tuple:
    return report.rows, report.kept, report.truncated, report.dropped


def test_verl_rows_with_extras_of_any_form(tokenizer, write_jsonl) -> None:
    def row(truth, extra):
        return {
            "data_source": "gsm8k",
            "prompt": [USER],
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": extra,
        }

    path = write_jsonl([row("4", {"index": 0}), row({"numbers": [1, 2]}, {"split": "train"})])
    dataset = PromptDataset(blending_datasets(path), tokenizer)
    assert dataset[0].text == "<u>2+2?~\n<a>"
    assert [p.label for p in dataset] == ["4", {"numbers": [1, 2]}]
    # not filled with the other row's keys
    assert dataset[1].extra["extra_info"] == {"split": "train"}
    assert dataset[1].extra.keys() == {"data_source", "reward_model", "extra_info"}
    assert (dataset[1].data_source, dataset[1].messages) == ("gsm8k", [USER])


def test_a_finished_conversation_keeps_its_answer_in_extra(tokenizer) -> None:
    chat = [USER, {"role": "assistant", "content": "4"}]
    prompt = PromptDataset(Dataset.from_list([{"messages": chat}]), tokenizer)[0]
    assert prompt.text == "<u>2+2?~\n<a>"
    assert prompt.extra["messages"] == chat


@pytest.mark.parametrize(
    ("side", "expected"),
    [("left", "defg"), ("right", "abcd"), ("middle", "abfg")],
)
def test_truncation(tokenizer, side: str, expected: str, caplog: pytest.LogCaptureFixture) -> None:
    rows = Dataset.from_list([{"input": "abcdefg"}, {"input": "xy"}])
    with caplog.at_level(logging.WARNING):
        dataset = PromptDataset(rows, tokenizer, prompt_max_len=4, truncation=side)
    assert text(tokenizer, dataset[0]) == dataset[0].text == expected
    assert dataset[1].text == "xy"
    assert vars_of(dataset.report) == (2, 2, 1, {})
    assert "1 of them truncated" in caplog.text


def test_truncate_ids_odd_budget() -> None:
    # 7 ids to 3: middle keeps 1 of the beginning and 2 of the end
    assert truncate_ids(list(range(7)), 3, "middle") == [0, 5, 6]
    assert truncate_ids(list(range(7)), 1, "middle") == [6]
    assert truncate_ids([1, 2], 2, "left") == [1, 2]


def test_truncated_text_has_no_second_begin_of_text(make_tokenizer) -> None:
    tokenizer = make_tokenizer(bos=True)
    dataset = PromptDataset(
        Dataset.from_list([{"input": "abc"}]), tokenizer, prompt_max_len=3, truncation="right"
    )
    assert (text(tokenizer, dataset[0]), dataset[0].text) == ("^ab", "ab")


@pytest.mark.parametrize(
    "options", [{"truncation": "drop"}, {"filter_overlong": True, "truncation": "left"}]
)
def test_overlong_prompts_dropped_and_counted(tokenizer, options: dict) -> None:
    rows = Dataset.from_list([{"input": "abcdefg"}, {"input": "abcd"}, {"input": "abcde"}])
    dataset = PromptDataset(rows, tokenizer, prompt_max_len=4, **options)
    assert vars_of(dataset.report) == (3, 1, 0, {"overlong": 2})
    # its number in the data
    assert (len(dataset), dataset[0].text, dataset[0].index) == (1, "abcd", 1)


def test_an_overlong_prompt_is_an_error_by_default(tokenizer, write_jsonl) -> None:
    path = write_jsonl([{"input": "ab"}, "", {"input": "abcde"}])
    with pytest.raises(DataError, match=rf"{path}:3: .*--prompt_max_len is 4: .*--truncation"):
        PromptDataset(blending_datasets(path), tokenizer, prompt_max_len=4)


ROWS = [
    {"input": "ok"},
    {"input": 5},
    {"input": None},
    {"input": " "},
    {"input": "much too long"},
    {"input": [{"role": "wizard", "content": "x"}]},
    {"input": "ok2"},
]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (1, "'input' is int 5; text or a list"),
        (2, "no prompt: 'input' missing"),
        (3, "'input' is empty"),
        (5, "template refuses"),
    ],
)
def test_each_bad_row_is_named_by_file_and_line(
    tokenizer, write_jsonl, bad: int, message: str
) -> None:
    path = write_jsonl([ROWS[0], ROWS[bad]])
    with pytest.raises(DataError, match=f"{path}:2: .*{message}.*--on_bad_row skip"):
        PromptDataset(blending_datasets(path), tokenizer)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_skip_counts_by_reason_and_names_rows(
    tokenizer,
    write_jsonl,
    caplog: pytest.LogCaptureFixture,
    num_workers: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # several chunks, so that workers share them
    monkeypatch.setattr("lightppo.data.prepared_rows.CHUNK_ROWS", 2)
    path = write_jsonl(ROWS)
    with caplog.at_level(logging.WARNING):
        dataset = PromptDataset(
            blending_datasets(path),
            tokenizer,
            prompt_max_len=5,
            on_bad_row="skip",
            num_workers=num_workers,
        )
    reasons = {"wrong_type": 1, "missing": 1, "empty": 1, "overlong": 1, "template": 1}
    assert vars_of(dataset.report) == (7, 2, 0, reasons)
    assert [p.text for p in dataset] == ["ok", "ok2"]
    assert [p.index for p in dataset] == [0, 6]
    assert dataset.origin(1) == f"{path}:7"
    assert f"{path}:2: 'input' is int 5" in caplog.text


def test_workers_give_the_same_and_carry_the_error(
    tokenizer, write_jsonl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightppo.data.prepared_rows.CHUNK_ROWS", 3)
    path = write_jsonl([{"input": "x" * (i % 7 + 1)} for i in range(20)])
    data = blending_datasets(path)
    assert list(PromptDataset(data, tokenizer, num_workers=3)) == list(
        PromptDataset(data, tokenizer)
    )
    with pytest.raises(DataError, match=f"{path}:7: .*--prompt_max_len"):
        PromptDataset(data, tokenizer, num_workers=3, prompt_max_len=6)


def test_nothing_left_is_an_error(tokenizer) -> None:
    with pytest.raises(DataError, match=r"2 rows: 0 kept.*2 overlong"):
        PromptDataset(
            Dataset.from_list([{"input": "abc"}] * 2),
            tokenizer,
            prompt_max_len=2,
            truncation="drop",
        )


def test_bad_input_of_the_whole_dataset(tokenizer) -> None:
    with pytest.raises(DataError, match="dataset is empty"):
        PromptDataset(Dataset.from_dict({"input": []}), tokenizer)
    with pytest.raises(DataError, match=r"--input_key 'q' .*: a, b"):
        PromptDataset(Dataset.from_list([{"a": 1, "b": 2}]), tokenizer, input_key="q")
    with pytest.raises(TypeError, match=r"datasets.Dataset .*list"):
        PromptDataset([{"input": "a"}], tokenizer)
    rows = Dataset.from_list([{"input": "a"}])
    with pytest.raises(DataError, match="--truncation is 'top'"):
        PromptDataset(rows, tokenizer, truncation="top")
    with pytest.raises(DataError, match="--on_bad_row is 'fix'"):
        PromptDataset(rows, tokenizer, on_bad_row="fix")
    with pytest.raises(DataError, match="--prompt_max_len is 0"):
        PromptDataset(rows, tokenizer, prompt_max_len=0)


def test_a_missing_label_names_the_row(tokenizer, write_jsonl) -> None:
    path = write_jsonl([{"input": "a", "gold": "1"}, {"input": "b"}])
    with pytest.raises(DataError, match=f"{path}:2: .*'gold'"):
        PromptDataset(blending_datasets(path), tokenizer, label_key="gold")
    # not asked for
    assert [p.label for p in PromptDataset(blending_datasets(path), tokenizer)] == [None, None]


def test_labels_that_are_dates_are_said(tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    """Of the hub's JSON files, datasets makes dates of texts like 2024-01-05."""
    rows = {"input": ["when?"], "label": [datetime(2024, 1, 5)], "other": [datetime(2024, 1, 5)]}
    dataset = PromptDataset(Dataset.from_dict(rows), tokenizer, label_key="label")
    assert dataset[0].label == datetime(2024, 1, 5)
    assert [r.args for r in caplog.records if "holds dates" in r.message] == [("label",)]


def test_batches_of_prompts_through_the_sampler(tokenizer) -> None:
    rows = Dataset.from_list([{"input": str(i)} for i in range(5)])
    dataset = PromptDataset(rows, tokenizer)
    seen = []
    for rank in range(2):
        sampler = RolloutBatchSampler(5, 4, rank=rank, world_size=2)
        batches = list(DataLoader(dataset, batch_sampler=sampler, collate_fn=dataset.collate_fn))
        assert len(batches) == 2
        seen += [p.text for batch in batches for p in batch]
    assert sorted(seen) == list("01234")
