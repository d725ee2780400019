"""Control tokens, and texts without them."""

from __future__ import annotations

import pytest
from support.chats import CHATML, chat_tokenizer

from lightppo.episodes.control_tokens import (
    MARK,
    Breaker,
    ControlTokens,
    Strings,
    spaced_out,
    without_marks,
)


def characters(*, special: list[str], text: list[str], unknown: str):
    """A tokenizer of single characters with added tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(
        models.WordLevel({unknown: 0, **{c: i + 1 for i, c in enumerate("abc ")}}, unknown)
    )
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(each, normalized=False) for each in [unknown, *special]])
    backend.add_tokens([AddedToken(each, normalized=False) for each in text])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=unknown)


def test_what_is_a_control_token():
    tokenizer = characters(
        special=["<end>", "$"], text=["<call>", "  ", "<0x0A>", "é"], unknown="<unk>"
    )
    control = ControlTokens(tokenizer)
    assert sorted(control.strings.values()) == ["$", "<call>", "<end>"]
    ids = control.encode("a<call>b  x<end>$")
    assert [control.strings[id] for id in control.among(ids)] == ["<call>", "<end>", "$"]
    text, count = Breaker(control, ())("a$ <call><unk>")
    assert (text, count) == ("a  < call><unk>", 2)
    assert not control.among(control.encode(text))
    assert control.without_special("a<end><call>$") == "a<call>"


def test_decoding_marks_what_only_spells_a_control_token():
    control = ControlTokens(chat_tokenizer(CHATML))
    spelled = [id for character in "<|im_end|>" for id in control.encode(character)]
    true = control.encode("<|im_end|>")
    text = control.decode([*spelled, *true, *spelled, *control.encode("é")])
    assert text == f"<{MARK}|im_end|><|im_end|><{MARK}|im_end|>é"
    assert without_marks({"a": [text]}) == {"a": ["<|im_end|><|im_end|><|im_end|>é"]}
    assert control.decode([]) == ""


@pytest.mark.parametrize(
    ("text", "expected", "count"),
    [
        ("nothing", "nothing", 0),
        ("<ab><ab>", "< ab>< ab>", 2),
        ("<a<ab>b>", "<a< ab>b>", 1),
        ("<ab>c>", "< ab>c>", 1),  # the longer one counts
        ("x" * 5 + "<ab", "x" * 5 + "<ab", 0),
    ],
)
def test_strings_are_broken(text, expected, count):
    assert Strings(["<ab>", "<ab>c>"]).broken(text, " ") == (expected, count)


def test_a_breaker_that_makes_another_string():
    assert Strings(["ab", "a b"]).broken("ab", " ") == ("a  b", 2)


def test_lone_surrogates_leave():
    text, count = Breaker(ControlTokens(chat_tokenizer(CHATML)), ["<b>"])("\ud800<b>\udcff")
    assert (text, count) == ("?< b>?", 1)


def test_signs_are_spaced_out():
    assert spaced_out("<|a_b|> 5.\n") == "< | a_b| >  5. \n"


def test_others_who_truncate_and_pad_do_not_change_ids():
    tokenizer = chat_tokenizer(CHATML)
    tokenizer("a text", truncation=True, max_length=2, padding="max_length")
    control = ControlTokens(tokenizer)
    ids = control.encode("a text of some length")
    backend = control._tokenizer.backend_tokenizer
    assert tokenizer.backend_tokenizer.truncation
    assert backend.truncation is None
    assert backend.padding is None
    tokenizer("a text", truncation=True, max_length=2)
    assert backend.truncation is None
    assert control.decode(ids) == "a text of some length"
    assert ControlTokens(tokenizer)._tokenizer is control._tokenizer
    tokenizer.add_tokens(["<new>"])
    assert "<new>" in ControlTokens(tokenizer).decode(tokenizer.encode("<new>"))
