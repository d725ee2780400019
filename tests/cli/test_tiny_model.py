"""``lightppo tiny-model``: a model and a tokenizer of any alphabet, which load as any other."""

from __future__ import annotations

import re

import pytest

from lightppo.__main__ import main


def made(*arguments: object) -> None:
    main(["tiny-model", *(str(argument) for argument in arguments)])


def test_every_character_is_a_token_and_others_are_unknown(tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = tmp_path / "prompts.jsonl"
    text.write_text('{"question": "Größe? 大"}\n', encoding="utf-8")
    made(tmp_path / "model", "--characters", "abc a", "--characters_of", text)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    for known in ("abc", "Größe? 大", "a b"):
        ids = tokenizer(known)["input_ids"]
        assert len(ids) == 1 + len(known)  # with the begin of text
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == known
    assert tokenizer("aX\n")["input_ids"][2:] == [tokenizer.unk_token_id] * 2
    special = [
        tokenizer.pad_token_id,
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.unk_token_id,
    ]
    assert len(set(special)) == 4
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.max_position_embeddings == 256
    assert "lightppo sft" in capsys.readouterr().out


def test_sizes_and_seeds(tmp_path):
    from transformers import AutoModelForCausalLM

    shape = ("--hidden_size", 32, "--layers", 3, "--heads", 2, "--max_len", 40)
    for name, seed in (("one", 1), ("again", 1), ("other", 2)):
        made(tmp_path / name, "--characters", "ab", "--seed", seed, *shape)
    one, again, other = (
        AutoModelForCausalLM.from_pretrained(tmp_path / n) for n in ("one", "again", "other")
    )
    config = one.config
    found = (
        config.hidden_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.max_position_embeddings,
    )
    assert found == (32, 3, 2, 40)
    assert (one.lm_head.weight == again.lm_head.weight).all()
    assert (one.lm_head.weight != other.lm_head.weight).any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give --characters or --characters_of"),
        (("--characters", "ab", "--heads", "3"), "--hidden_size 64 with --heads 3.*multiple of 6"),
        (("--characters", "ab", "--layers", "0"), "--layers 0 is not a positive number"),
        (("--characters_of", "nowhere.txt"), "--characters_of nowhere.txt cannot be read"),
    ],
)
def test_mistakes(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        made(tmp_path / "model", *arguments)
    assert stopped.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_no_folder_is_overwritten(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(SystemExit) as stopped:
        made(tmp_path / "model", "--characters", "ab")
    assert stopped.value.code == 2
    assert f"{tmp_path / 'model'} is there already" in capsys.readouterr().err
