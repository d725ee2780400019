"""``lightppo chat`` over a pipe, with what a run leaves behind."""

from __future__ import annotations

import io
import re
import shutil
from pathlib import Path

import pytest
import torch

from lightppo.__main__ import main

TEMPLATE = "{{ note }}{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }} {% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}a{% endif %}"
GREEDY = ("--temperature", "0", "--generate_max_len", "6")


@pytest.fixture
def say(monkeypatch, capsys):
    """``say(words, text)``: the lines that the command answers to this input."""

    def say(words: list[str], text: str) -> list[str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        main(["chat", *map(str, words)])
        return capsys.readouterr().out.splitlines()

    return say


def greedy(folder: str, text: str) -> str:
    """The same by transformers alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False
    )
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.fixture
def chat_model(tiny_model, tmp_path) -> str:
    from transformers import AutoTokenizer

    folder = shutil.copytree(tiny_model, tmp_path / "chat")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_turns_of_a_chat(chat_model, say):
    first = greedy(chat_model, "u1+1 a")
    second = greedy(chat_model, f"u1+1 a{first} u2+2 a")
    alone = greedy(chat_model, "u2+2 a")
    assert first != second != alone
    assert say([chat_model, *GREEDY], "1+1\n\n2+2\n/reset\n2+2\n/quit\n3+3\n") == [
        first,
        second,
        alone,
    ]
    assert say([chat_model, *GREEDY, "--system_prompt", "be"], "2+2\n") == [
        greedy(chat_model, "sbe u2+2 a")
    ]
    noted = greedy(chat_model, "xu2+2 a")
    assert say([chat_model, *GREEDY, "--chat_template_kwargs", '{"note": "x"}'], "2+2\n") == [noted]
    options = Path(chat_model, "run_config.resolved.yaml")  # of a run whose rows were chats
    options.write_text("{apply_chat_template: false, input_template: null, system_prompt: be}")
    assert say([chat_model, *GREEDY], "2+2\n") == [greedy(chat_model, "sbe u2+2 a")]
    options.write_text('{apply_chat_template: false, chat_template_kwargs: \'{"note": "x"}\'}')
    assert say([chat_model, *GREEDY], "2+2\n") == [noted]


def test_plain_prompts_stand_alone(chat_model, tiny_model, say):
    expected = [greedy(tiny_model, "2+2="), greedy(tiny_model, "3+3=")]
    assert say([tiny_model, *GREEDY], "2+2=\n3+3=") == expected
    assert say([chat_model, *GREEDY, "--input_template", "{}="], "2+2\n3+3\n") == expected


def test_what_is_sampled_follows_the_seed(tiny_model, say):
    words = [tiny_model, "--generate_max_len", "12", "--seed"]
    assert (
        say([*words, "1"], "2+2=\n") == say([*words, "1"], "2+2=\n") != say([*words, "2"], "2+2=\n")
    )


def test_a_run_and_its_checkpoint(recorded, copied, say):
    """Its folder, its last checkpoint, and an adapter of its own; prompts as it had them."""
    run = copied("one")
    expected = [greedy(str(run), "q7+9=")]
    config = run / "run_config.resolved.yaml"
    config.write_text(config.read_text().replace("input_template: null", "input_template: q{}="))
    assert say([run, *GREEDY], "7+9\n") == expected
    assert say([run / "checkpoints_ppo", *GREEDY, "--input_template", "q{}="], "7+9\n") == expected


def test_an_adapter(tiny_model, tmp_path, say):
    from peft import LoraConfig, get_peft_model
    from support.adapters import randomize_b
    from transformers import AutoModelForCausalLM

    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_model), LoraConfig(target_modules=["v_proj"])
    )
    randomize_b(model)
    model.save_pretrained(tmp_path / "adapter")
    main(["merge", str(tmp_path / "adapter"), str(tmp_path / "merged")])
    expected = greedy(str(tmp_path / "merged"), "2+2=")
    assert expected != greedy(tiny_model, "2+2=")
    assert say([tmp_path / "adapter", *GREEDY], "2+2=\n")[-1] == expected


@pytest.mark.parametrize(
    ("words", "text", "message"),
    [
        (["/nowhere"], "", "MODEL /nowhere: no such folder"),
        (["MODEL", "--temperature", "-1"], "", "--temperature must be a number ≥0"),
        (
            ["MODEL", "--apply_chat_template"],
            "",
            "--apply_chat_template: the tokenizer .* has no chat template",
        ),
        (["MODEL", "--input_template", "none"], "", "--input_template 'none' needs one {}"),
        (["MODEL", "--chat_template_kwargs", "x"], "", "--chat_template_kwargs is not JSON"),
        (["MODEL"], "1" * 64, "64 tokens so far, and the model has 64 positions: /reset"),
    ],
)
def test_mistakes(words, text, message, tiny_model, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    with pytest.raises(SystemExit) as stopped:
        main(["chat", *(tiny_model if word == "MODEL" else word for word in words)])
    assert stopped.value.code == 2

    assert re.search(message, capsys.readouterr().err)
