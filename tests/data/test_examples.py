"""Examples from rows: ids, labels, limits, bad rows by file and line."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from datasets import Dataset
from support.chats import CHATML, FORGETFUL, TOOLS
from support.fixtures.data_rows import build_sentence_piece

from lightppo.algorithms.losses import IGNORE_INDEX
from lightppo.data.blends import blending_datasets
from lightppo.data.datasets import PromptDataset
from lightppo.data.examples import SFTDataset
from lightppo.errors import DataError

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


def learned(tokenizer, row: dict, max_len: int = 400, **options) -> str:
    """The text that is learned, with a bar where one piece ends."""
    item = SFTDataset(Dataset.from_list([row]), tokenizer, max_len, **options)[0]
    parts = itertools.groupby(zip(item["input_ids"], item["labels"]), lambda pair: pair[1] >= 0)
    return "|".join(tokenizer.decode([int(i) for i, _ in part]) for is_so, part in parts if is_so)


LAST = {"role": "assistant", "content": "last"}
TALK = [{"role": "system", "content": "be"}, HI, ANSWER, HI, LAST]


def test_multiturn_learns_every_answer(tokenizer) -> None:
    assert learned(tokenizer, {"messages": TALK}) == "last~"
    assert learned(tokenizer, {"messages": TALK}, multiturn=True) == "yo~|last~"
    row = {"prompt": TALK[:-1], "completion": [LAST]}
    assert learned(tokenizer, row, multiturn=True) == "yo~|last~"
    row = {"prompt": "hi", "completion": "yo"}
    assert learned(tokenizer, row, multiturn=True, apply_chat_template=True) == "yo~"
    # a greeting answers nothing
    assert learned(tokenizer, {"messages": [ANSWER, HI, LAST]}, multiturn=True) == "last~"
    whole = len("<s>be~\n<u>hi~\n<a>yo~\n<u>hi~\n<a>last~")
    cut = {"max_len": whole - 3, "truncation": "right", "multiturn": True}
    assert learned(tokenizer, {"messages": TALK}, **cut) == "yo~|la"
    dataset = SFTDataset(Dataset.from_list([{"messages": TALK}] * 2), tokenizer, 99, multiturn=True)
    (example,) = dataset.examples(1)
    assert "".join(t for t, is_so in zip(example.answer, example.learned) if is_so) == "yo~last~"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        # Turns that are not the last are written without the thought that is switched off, as Qwen3's are.
        (
            CHATML.replace(
                "(message.content or '')",
                "('<think>\\n\\n</think>\\n\\n' if loop.last else '') + (message.content or '')",
            ),
            "yo<|im_end|>|<think>\n\n</think>\n\nlast<|im_end|>~",
        ),
        (CHATML, "yo<|im_end|>|last<|im_end|>~"),
    ],
)
def test_multiturn_with_chat_templates(tokenizer, template, expected) -> None:
    tokenizer.chat_template = template
    # a character that the vocabulary lacks is shown as "?"
    assert learned(tokenizer, {"messages": TALK}, multiturn=True) == expected


def test_multiturn_with_tools(tokenizer) -> None:
    tokenizer.chat_template = CHATML
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": "{}"}]}
    call["tool_calls"] = [{"function": one} for one in call["tool_calls"]]
    rows = {"messages": [HI, call, {"role": "tool", "content": "7"}, LAST], "tools": TOOLS}
    found = learned(tokenizer, rows, max_len=2000, multiturn=True)
    assert found == (
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>|last<|im_end|>~'
    )


THOUGHT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyo"}


@pytest.mark.parametrize(
    ("chat", "options", "message"),
    [
        (
            [HI, THOUGHT, HI, LAST],
            {"multiturn": True},
            "message 2: the chat template .*without --multi",
        ),
        ([HI, THOUGHT], {}, "drops or changes thinking of the answer: str '.nhm.n'"),
        ([HI, LAST | {"reasoning_content": "hm"}], {}, "does not write 'reasoning_content' of the"),
        ([HI, LAST], {}, "writes the prompt differently once it is answered .'<think>"),
        (
            [HI, {"role": "human", "content": "h"}, LAST],
            {},
            "drops the text of messages of the role",
        ),
    ],
)
def test_what_a_template_drops_of_what_is_learned(tokenizer, chat, options, message) -> None:
    """A template that opens the thinking of a new turn, and writes no thinking of turns that are there."""
    tokenizer.chat_template = FORGETFUL
    with pytest.raises(DataError, match=message) as refused:
        learned(tokenizer, {"messages": chat}, **options)
    assert "mend the row" not in str(refused.value)
    assert "give the tokenizer another chat_template" in str(refused.value)


def test_a_thought_that_is_switched_off_is_of_the_prompt(tokenizer) -> None:
    tokenizer.chat_template = CHATML.replace(
        "(message.content or '')",
        "('<think>\\n\\n</think>\\n\\n' if loop.last else '') + (message.content or '')",
    ).replace(
        "{{ '<|im_start|>assistant\\n' }}",
        "{{ '<|im_start|>assistant\\n' + ('' if enable_thinking else '<think>\\n\\n</think>\\n\\n') }}",
    )
    options = {"chat_template_kwargs": {"enable_thinking": False}}
    assert learned(tokenizer, {"messages": TALK}, **options) == "last<|im_end|>~"
    assert learned(tokenizer, {"messages": TALK}, multiturn=True, **options) == (
        "yo<|im_end|>|last<|im_end|>~"
    )


@pytest.fixture
def sentence_piece():
    return build_sentence_piece()


@pytest.mark.parametrize("prompt", ["Q: ", "Q:"])
@pytest.mark.parametrize("answer", ["4", "412", " 4"])
def test_no_blank_is_put_before_an_answer(sentence_piece, prompt, answer) -> None:
    rows = Dataset.from_list([{"prompt": prompt, "completion": answer}])
    item = SFTDataset(rows, sentence_piece, 20)[0]
    ids = item["input_ids"].tolist()
    asked = PromptDataset(rows, sentence_piece)[0].token_ids
    assert ids[: len(asked)] == asked
    assert sentence_piece.decode(ids[:-1]) == prompt + answer
    assert sentence_piece.decode(ids[:-1]).count(" ") == (prompt + answer).count(" ")


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
