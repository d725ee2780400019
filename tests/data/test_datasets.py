"""Prompts and supervised examples from rows: ids, labels, limits, bad rows by file and line."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from datasets import Dataset
from torch.utils.data import DataLoader

from lightppo.data.datasets import (
    IGNORE_INDEX,
    PromptDataset,
    SFTDataset,
    truncate_ids,
)
from lightppo.errors import DataError
from lightppo.plugins.sources.blends import blending_datasets
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
    monkeypatch.setattr("lightppo.data.rows.CHUNK_ROWS", 2)
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
    monkeypatch.setattr("lightppo.data.rows.CHUNK_ROWS", 3)
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


def test_the_seeds_style_reads_strategy_args_where_a_keyword_is_not_given(tokenizer) -> None:
    args = SimpleNamespace(
        input_key="q", label_key="a", apply_chat_template=True, prompt_max_len=50
    )
    rows = Dataset.from_list([{"q": "hi", "a": "yes", "r": "other"}])
    strategy = SimpleNamespace(args=args)
    prompt = PromptDataset(rows, tokenizer, strategy, None)[0]
    assert (prompt.text, prompt.label) == ("<u>hi~\n<a>", "yes")
    explicit = PromptDataset(rows, tokenizer, strategy, input_key="r", apply_chat_template=False)[0]
    assert explicit.text == "other"
    args.apply_chat_template = False
    assert PromptDataset(rows, tokenizer, strategy, "Q {}")[0].text == "Q hi"


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


HI = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "yo"}


def shown(tokenizer, item) -> tuple[str, str]:
    """The text, and the text with dots where there is no loss."""
    ids, labels = item["input_ids"].tolist(), item["labels"].tolist()
    assert all(label in (IGNORE_INDEX, i) for i, label in zip(ids, labels))
    return tokenizer.decode(ids), "".join(
        "." if y == IGNORE_INDEX else tokenizer.decode([y]) for y in labels
    )


def first(tokenizer, row: dict, max_len: int = 100, **options) -> tuple[str, str]:
    return shown(tokenizer, SFTDataset(Dataset.from_list([row]), tokenizer, max_len, **options)[0])


def test_loss_on_the_completion_and_the_end_of_text(tokenizer) -> None:
    assert first(tokenizer, {"input": "1+1=", "output": "2"}) == ("1+1=2~", "....2~")
    # not a second end
    assert first(tokenizer, {"prompt": "a", "completion": "b~"}) == ("ab~", ".b~")
    assert first(
        tokenizer, {"q": "a", "r": "b"}, input_key="q", output_key="r", input_template="({})"
    ) == (
        "(a)b~",
        "...b~",
    )


def test_chats_have_the_loss_on_the_last_turn(tokenizer) -> None:
    chat = [HI, ANSWER, HI, {"role": "assistant", "content": "last"}]
    whole = "<u>hi~\n<a>yo~\n<u>hi~\n<a>last~"
    assert first(tokenizer, {"messages": chat}) == (whole, "." * (len(whole) - 5) + "last~")
    as_chat = first(
        tokenizer,
        {"prompt": "hi", "completion": "yo"},
        apply_chat_template=True,
        system_prompt="be",
    )
    assert as_chat == ("<s>be~\n<u>hi~\n<a>yo~", "." * (7 + 7 + 3) + "yo~")
    assert first(tokenizer, {"prompt": [HI], "completion": [ANSWER]}) == (
        "<u>hi~\n<a>yo~",
        "..........yo~",
    )


def test_pretraining_has_the_loss_everywhere(tokenizer) -> None:
    assert first(tokenizer, {"text": "abc"}, pretrain_mode=True) == ("abc~", "abc~")
    assert first(tokenizer, {"prompt": "ab", "completion": "c"}, pretrain_mode=True) == (
        "abc~",
        "abc~",
    )
    whole = "<u>hi~\n<a>yo~"
    assert first(tokenizer, {"messages": [HI, ANSWER]}, pretrain_mode=True) == (whole, whole)


def test_the_prompt_has_the_ids_that_a_rollout_starts_from(make_tokenizer) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # "ab" is one token, "a" and "b" are others: a + b would merge over the boundary
    vocab = {"a": 0, "b": 1, "ab": 2, "~": 3, "?": 4}
    bpe = Tokenizer(models.BPE(vocab={**vocab}, merges=[("a", "b")], unk_token="?"))
    bpe.pre_tokenizer = pre_tokenizers.Split("~", "isolated")
    merging = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="~")
    assert merging("ab")["input_ids"] == [2]
    item = SFTDataset(Dataset.from_list([{"prompt": "a", "completion": "b"}]), merging, 10)[0]
    assert item["input_ids"].tolist() == [0, 1, 3]
    assert item["labels"].tolist() == [IGNORE_INDEX, 1, 3]

    tokenizer = make_tokenizer(bos=True)
    rows = Dataset.from_list([{"prompt": "abc", "completion": "d"}])
    prompt_ids = PromptDataset(rows, tokenizer)[0].token_ids
    item = SFTDataset(rows, tokenizer, 10)[0]
    assert item["input_ids"].tolist()[: len(prompt_ids)] == prompt_ids  # begin-of-text in both
    assert item["labels"].tolist()[: len(prompt_ids)] == [IGNORE_INDEX] * 4


@pytest.mark.parametrize("side", ["left", "right"])
def test_collate_pads_on_the_side_asked_for(tokenizer, side: str) -> None:
    rows = Dataset.from_list(
        [{"prompt": "a", "completion": "bc"}, {"prompt": "d", "completion": "e"}]
    )
    dataset = SFTDataset(rows, tokenizer, 10, padding_side=side)
    batch = dataset.collate_fn([dataset[0], dataset[1]])
    a, b, c, d, e, end, pad = (tokenizer.convert_tokens_to_ids(x) for x in "abcde~_")
    no = IGNORE_INDEX
    short = {"left": [pad, d, e, end], "right": [d, e, end, pad]}[side]
    assert batch["input_ids"].tolist() == [[a, b, c, end], short]
    assert batch["attention_mask"].tolist() == [
        [1, 1, 1, 1],
        {"left": [0, 1, 1, 1], "right": [1, 1, 1, 0]}[side],
    ]
    labels = {"left": [no, no, e, end], "right": [no, e, end, no]}[side]
    assert batch["labels"].tolist() == [[no, b, c, end], labels]


def test_too_long_rows(tokenizer, write_jsonl) -> None:
    path = write_jsonl(
        [{"prompt": "a", "completion": "b"}, {"prompt": "abc", "completion": "defg"}]
    )
    data = blending_datasets(path)
    with pytest.raises(DataError, match=rf"{path}:2: 8 tokens .*5"):
        SFTDataset(data, tokenizer, 5)
    cut = SFTDataset(data, tokenizer, 5, truncation="right")
    assert shown(tokenizer, cut[1]) == ("abcde", "...de")  # cut: no end-of-text is invented
    assert (cut.report.kept, cut.report.truncated) == (2, 1)
    dropped = SFTDataset(data, tokenizer, 5, truncation="drop")
    assert (len(dropped), dropped.report.dropped) == (1, {"overlong": 1})
    with pytest.raises(DataError, match=f"{path}:2: .*truncation right"):
        SFTDataset(data, tokenizer, 3, truncation="right")
    # the default there
    assert SFTDataset(data, tokenizer, 5, pretrain_mode=True).report.truncated == 1


def test_bad_rows_and_options(tokenizer, make_tokenizer, write_jsonl) -> None:
    path = write_jsonl([{"prompt": "a", "completion": "b"}, {"prompt": "a"}])
    with pytest.raises(DataError, match=f"{path}:2: .*'completion'"):
        SFTDataset(blending_datasets(path), tokenizer, 9, output_key="completion")
    with pytest.raises(DataError, match=f"{path}:2: .*--output_key"):
        SFTDataset(blending_datasets(path), tokenizer, 9)
    rows = Dataset.from_list([{"prompt": "a", "completion": "b"}])
    without_end = make_tokenizer()
    without_end.eos_token = None
    with pytest.raises(DataError, match="eos"):
        SFTDataset(rows, without_end, 9)
    for options, message in (
        ({"max_len": 1}, "max_len is 1"),
        ({"truncation": "left"}, "truncation is 'left'"),
        ({"padding_side": "both"}, "padding_side is 'both'"),
    ):
        with pytest.raises(DataError, match=message):
            SFTDataset(rows, tokenizer, **{"max_len": 9, **options})
    with pytest.raises(DataError, match="dataset is empty"):
        SFTDataset(Dataset.from_dict({"text": []}), tokenizer, 9)


def test_a_template_that_rewrites_the_prompt_is_refused(tokenizer) -> None:
    tokenizer.chat_template = (
        "{{ messages|length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(DataError, match="template"):
        first(tokenizer, {"messages": [HI, ANSWER]})


def test_the_seeds_style(tokenizer) -> None:
    args = SimpleNamespace(input_key="question", input_template="Q: {}", system_prompt="be")
    rows = Dataset.from_list([{"text": "abc"}])
    dataset = SFTDataset(rows, tokenizer, 20, SimpleNamespace(args=args), pretrain_mode=True)
    # the prompts' key and template are not for documents
    assert shown(tokenizer, dataset[0])[0] == "abc~"
