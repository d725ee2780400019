"""Pairs of a chosen and a rejected answer: how rows say them, and the batches of their ids."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from datasets import Dataset
from support.chats import CHATML, TOOLS
from transformers import LlamaConfig

from lightppo.config.supervised_options import DPOConfig
from lightppo.data.chat_templates import PromptTemplate
from lightppo.data.example_rows import read_margin, read_pair, resolve_example_fields
from lightppo.data.records import Prompt, Rollout
from lightppo.errors import BadRowError, DataError, ModelLoadError, RewardError
from lightppo.models.critic import RowForm
from lightppo.rewards.reward_model import Retemplated, Retokenized, SameIds
from lightppo.supervised.pairs import PairDataset
from lightppo.supervised.trainer import prompt_flags


def test_tools_of_a_row_and_a_last_turn_of_calls(tokenizer):
    tokenizer.chat_template = CHATML
    call = {"function": {"name": "guess", "arguments": '{"x": 4}'}}
    calls = {"role": "assistant", "content": "", "tool_calls": [call]}
    row = {"prompt": [USER], "chosen": [calls], "rejected": [WRONG | {"tool_calls": None}]}
    (pair,) = PairDataset(Dataset.from_list([row | {"tools": json.dumps(TOOLS)}]), tokenizer, 2000)
    assert '"name": "look_up"' in tokenizer.decode(pair["prompt"])
    assert '"arguments": {"x": 4}}' in tokenizer.decode(pair["chosen"])


# -- rows ------------------------------------------------------------------------------------------------------------

USER = {"role": "user", "content": "2+2?"}
ANSWER = {"role": "assistant", "content": "4"}
WRONG = {**ANSWER, "content": "5"}
SYSTEM = {"role": "system", "content": "count"}
HH = "\n\nHuman: 2+2?\n\nAssistant:"
PAIRS = [
    ({"prompt": "q", "chosen": "a", "rejected": "b"}, "q", "a", "b"),
    ({"question": "q", "chosen": "a", "rejected": "b"}, "q", "a", "b"),
    ({"prompt": [USER], "chosen": "4", "rejected": "5"}, [USER], [ANSWER], [WRONG]),
    ({"prompt": "2+2?", "chosen": [ANSWER], "rejected": [WRONG]}, [USER], [ANSWER], [WRONG]),
    # UltraFeedback repeats the prompt, and may put a system message before it
    ({"prompt": "2+2?", "chosen": [USER, ANSWER], "rejected": [USER, WRONG]}, [USER], [ANSWER], [WRONG]),
    ({"prompt": "2+2?", "chosen": [SYSTEM, USER, ANSWER], "rejected": [SYSTEM, USER, WRONG]},
     [SYSTEM, USER], [ANSWER], [WRONG]),
    ({"chosen": [USER, ANSWER], "rejected": [USER, WRONG]}, [USER], [ANSWER], [WRONG]),
    ({"chosen": f"{HH} It is 4", "rejected": f"{HH} It is 5"}, HH, " It is 4", " It is 5"),
    ({"prompt": HH, "chosen": f"{HH} 4", "rejected": f"{HH} 5"}, HH, " 4", " 5"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "prompt", "chosen", "rejected"), PAIRS)
def test_pairs(row, prompt, chosen, rejected):
    assert read_pair(row, resolve_example_fields(list(row), pairs=True)) == (
        prompt,
        chosen,
        rejected,
    )


@pytest.mark.parametrize(
    ("row", "reason", "message"),
    [
        (
            {"prompt": "q", "chosen": "a", "rejected": None},
            "missing",
            "'rejected' is missing or null",
        ),
        (
            {"prompt": "q", "chosen": "a", "rejected": "a"},
            "equal",
            "'chosen' and 'rejected' are the same",
        ),
        ({"prompt": "q", "chosen": "a", "rejected": " "}, "empty", "'rejected' is empty"),
        (
            {"prompt": "q", "chosen": "a", "rejected": [ANSWER]},
            "wrong_type",
            "one of 'chosen' and 'rejected' is text",
        ),
        ({"chosen": "a", "rejected": "b"}, "missing", "share no prompt"),
        (
            {"chosen": [USER, ANSWER], "rejected": [USER, ANSWER, USER, WRONG]},
            "missing",
            "'chosen' is the beginning of 'rejected', so it has no answer of its own",
        ),
        (
            {"prompt": "2+2?", "chosen": [USER, ANSWER, USER, WRONG], "rejected": [USER, ANSWER]},
            "missing",
            "'rejected' is the beginning of 'chosen'",
        ),
    ],
)
def test_bad_pairs(row, reason, message):
    with pytest.raises(BadRowError, match=message) as caught:
        read_pair(row, resolve_example_fields(list(row), pairs=True))
    assert caught.value.reason == reason


def test_pairs_need_their_columns():
    with pytest.raises(
        DataError,
        match=r"--chosen_key 'chosen' is not a column of the data; its columns: prompt, answer",
    ):
        resolve_example_fields(["prompt", "answer"], pairs=True)
    with pytest.raises(DataError, match="--margin_key 'lead' is not a column"):
        resolve_example_fields(["prompt", "chosen", "rejected"], pairs=True, label_key="lead")


def test_margins():
    row = {"prompt": "q", "chosen": "a", "rejected": "b", "answer": "c", "lead": 2}
    assert read_margin(row, resolve_example_fields(list(row), pairs=True)) is None
    fields = resolve_example_fields(list(row), pairs=True, label_key="lead")
    assert read_margin(row, fields) == 2.0
    for bad in (-1, "2", True, float("nan")):
        with pytest.raises(BadRowError, match=r"--margin_key .lead. is .*; a number ≥ 0 is needed"):
            read_margin(row | {"lead": bad}, fields)


# -- batches ---------------------------------------------------------------------------------------------------------


def test_pairs_are_chosen_rows_then_rejected_ones_between_paddings(tiny_tokenizer) -> None:
    rows = [
        {"prompt": "1+", "chosen": "23", "rejected": "4"},
        {"prompt": "5", "chosen": "6", "rejected": "789"},
    ]
    dataset = PairDataset(Dataset.from_list(rows), tiny_tokenizer, 8)
    batch = dataset.collate_fn([dataset[0], dataset[1]])
    eos, pad = tiny_tokenizer.eos_token, tiny_tokenizer.pad_token
    shown = [tiny_tokenizer.convert_ids_to_tokens(ids) for ids in batch["sequences"]]
    prompts = [["1", "+"], [pad, "5"]]
    answers = [
        ["2", "3", eos, pad],
        ["6", eos, pad, pad],
        ["4", eos, pad, pad],
        ["7", "8", "9", eos],
    ]
    assert shown == [prompt + answer for prompt, answer in zip(prompts * 2, answers)]
    real = torch.tensor([[token != pad for token in row] for row in shown])
    assert torch.equal(batch["attention_mask"].bool(), real)
    assert torch.equal(batch["action_mask"], real[:, 2:])
    assert "margin" not in batch


def test_pairs_have_margins_and_limits(tiny_tokenizer) -> None:
    rows = [
        {"prompt": "1+", "chosen": "234", "rejected": "5", "lead": 0.5},
        {"prompt": "1", "chosen": "2", "rejected": "3", "lead": 2},
    ]
    data = Dataset.from_list([{**row, "lead": float(row["lead"])} for row in rows])
    dataset = PairDataset(data, tiny_tokenizer, 6, "lead")
    assert dataset.collate_fn([dataset[1], dataset[0]])["margin"].tolist() == [2.0, 0.5]
    with pytest.raises(DataError, match=r"row 1: 6 tokens .2 of the prompt., the limit is 5"):
        PairDataset(data, tiny_tokenizer, 5)
    assert [
        len(PairDataset(data, tiny_tokenizer, 5, truncation=kind)) for kind in ("right", "drop")
    ] == [2, 1]
    cut = PairDataset(data, tiny_tokenizer, 5, truncation="right")
    assert (tiny_tokenizer.decode(cut[0]["chosen"]), cut.report.truncated) == ("234", 1)


def test_pairs_that_a_cut_makes_equal_are_bad_rows(tiny_tokenizer) -> None:
    rows = Dataset.from_list(
        [
            {"prompt": "1", "chosen": "234", "rejected": "235"},
            {"prompt": "1", "chosen": "2", "rejected": "3"},
        ]
    )
    with pytest.raises(DataError, match="row 1: both answers have the same tokens"):
        PairDataset(rows, tiny_tokenizer, 3, truncation="right")
    assert PairDataset(
        rows, tiny_tokenizer, 3, truncation="right", on_bad_row="skip"
    ).report.dropped == {"equal": 1}


# -- the same rows in the hands of PPO ---------------------------------------------------------------------------------

CHAT = (
    "{% for m in messages %}{{ '<begin>' + m.role + '\n' + m.content + '<end>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<begin>assistant\n' }}{% endif %}"
)


def tokenizer_with_turns(eos: str):
    """A turn ends with ``<end>``, behind which the template breaks the line, as ChatML and Gemma have it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<unk>", "<begin>", "<end>"]
    letters = [chr(i) for i in (10, *range(32, 127))]
    backend = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(special + letters)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token=eos,
        unk_token="<unk>",
        additional_special_tokens=special[-2:],
    )
    tokenizer.chat_template = CHAT
    return tokenizer


@pytest.mark.parametrize("eos", ["<end>", "</s>"])  # the turn's end is the end-of-text, or is not
@pytest.mark.parametrize(("chat", "system_prompt"), [(True, None), (True, "be"), (False, None)])
def test_ppo_reads_the_rows_that_a_reward_model_was_trained_on(chat, eos, system_prompt):
    tokenizer = tokenizer_with_turns(eos)
    pairs = [{"prompt": f"{i}+1=", "chosen": f"{i + 1}", "rejected": f"{i}."} for i in range(3)]
    rows = PairDataset(
        Dataset.from_list(pairs),
        tokenizer,
        64,
        apply_chat_template=chat,
        system_prompt=system_prompt,
    )
    config = LlamaConfig()
    rows.row_form.keep(config)
    form = RowForm.of(LlamaConfig.from_dict(config.to_dict()))
    prompts = PromptTemplate(tokenizer, apply_chat_template=chat, system_prompt=system_prompt)
    finished, cut = [], []
    for pair in pairs:
        asked = prompts.render(pair["prompt"])
        prompt = Prompt(asked.text, prompts.encode_rendered([asked])[0], messages=asked.messages)
        answer = tokenizer.encode(pair["chosen"], add_special_tokens=False)
        stop = [tokenizer.convert_tokens_to_ids("<end>" if chat else eos)]  # what decoding stops at
        finished.append(Rollout(prompt, 0, answer + stop, pair["chosen"], "stop"))
        cut.append(Rollout(prompt, 0, answer, pair["chosen"], "length"))
    trained = [torch.cat([row["prompt"], row["chosen"]]).tolist() for row in rows]
    for reads in (SameIds(0, form=form), Retemplated(tokenizer, form)):
        assert reads.encode(finished) == trained
        opened = [rollout.prompt.token_ids + rollout.response_ids for rollout in cut]
        assert reads.encode(cut) == opened
    # a stop string leaves no token behind it
    cut[0].finish_reason = "stop"
    assert SameIds(0, form=form).encode(cut[:1]) == [[*opened[0], tokenizer.eos_token_id]]
    if chat:  # nobody says how another model was trained
        text = tokenizer.decode(Retemplated(tokenizer).encode(finished[:1])[0])
        assert text.endswith("1<end>\n")


@pytest.mark.parametrize("eos", ["<end>", "</s>"])
def test_a_server_reads_texts_of_chats_as_in_training(eos):
    tokenizer = tokenizer_with_turns(eos)
    pair = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
    rows = PairDataset(Dataset.from_list([pair]), tokenizer, 64, apply_chat_template=True)
    asked = PromptTemplate(tokenizer, apply_chat_template=True).render("2+2=")
    reads = Retokenized(tokenizer, rows.row_form)  # a request has no messages
    trained = torch.cat([rows[0]["prompt"], rows[0]["chosen"]]).tolist()
    for answer in ("4", "4<end>"):
        rollout = Rollout(Prompt(asked.text, []), 0, [], answer, "stop")
        assert reads.encode([rollout]) == [trained]
        cut = Rollout(Prompt(asked.text, []), 0, [], answer, "length")
        assert tokenizer.decode(reads.encode([cut])[0]) == asked.text + answer


def test_chats_are_not_rendered_for_a_model_that_was_trained_on_text():
    reads = Retemplated(tokenizer_with_turns("</s>"), RowForm(2, is_chat=False))
    chat = Rollout(Prompt("2+2?", [4], messages=[USER]), 0, [5], "4", "stop")
    with pytest.raises(RewardError, match="prompts are chats, and the reward model was trained"):
        reads.encode([chat])


def test_a_form_of_another_version_is_named():
    config = LlamaConfig(reward_rows={"end_id": 2, "is_chat": True, "more": 1})
    with pytest.raises(ModelLoadError, match=r"reward_rows in config\.json is .*'more'"):
        RowForm.of(config)


def test_the_next_command_renders_prompts_as_the_pairs_were(tiny_tokenizer) -> None:
    def flags(rows: list[dict], **options) -> str:
        data = DPOConfig.from_flat(**options).data
        form = {name: getattr(data, name) for name in ("apply_chat_template", "input_template")}
        dataset = PairDataset(Dataset.from_list(rows), tokenizer, 20, **form)
        return prompt_flags(data, dataset)

    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    texts = [{"prompt": "1+", "chosen": "2", "rejected": "3"}]
    assert flags(texts) == ""
    assert flags(texts, apply_chat_template=True) == " --apply_chat_template"
    assert flags(texts, input_template="a {}") == " --input_template 'a {}'"
    kwargs = {"apply_chat_template": True, "chat_template_kwargs": '{"x": false}'}
    assert flags(texts, **kwargs) == (
        " --apply_chat_template --chat_template_kwargs '{\"x\": false}'"
    )
    chats = [{"prompt": [USER | {"content": "1+"}], "chosen": "2", "rejected": "3"}]
    assert flags(chats) == " --apply_chat_template"
