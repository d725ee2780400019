"""``lightppo data``: rows as training reads them, and public data sets as rows."""

from __future__ import annotations

import shutil

import pytest
from support.tiny import read_jsonl, write_jsonl

from lightppo.__main__ import main

ROWS = [
    {"question": "1+1", "answer": "2", "n": 1},
    {"question": "22+22", "answer": "44", "n": 2},
    {"question": ""},
]


@pytest.fixture
def look(tiny_model, capsys):
    """``look(flags…)``: exit code and what is printed."""

    def look(*words: object) -> tuple[int, str]:
        code = 0
        try:
            main(["data", f"--pretrain={tiny_model}", *map(str, words)])
        except SystemExit as stopped:
            code = stopped.code
        told = capsys.readouterr()
        return code, told.out + told.err

    return look


def test_prompts(look, tmp_path):
    rows = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    code, told = look(
        f"--prompt_data={rows}", "--input_template=q{}=", "--row", 2, 3, "--prompt_max_len=6"
    )
    assert code == 1
    assert (
        f"-- row 2: {rows}:2\ncannot be used: {rows}:2: the prompt has 7 tokens, --prompt_max_len is 6"
        in told
    )
    assert f"-- row 3: {rows}:3\ncannot be used: {rows}:3: 'question' is empty" in told
    assert "3 rows: 2 kept, 0 of them truncated; dropped: 1 empty" in told
    assert (
        "tokens: median 5, 95% up to 7, longest 7\nover --prompt_max_len 6: 1 (--truncation error)\n"
        in told
    )
    code, told = look(
        f"--prompt_data={rows}",
        "--input_template=q{}=",
        "--row",
        2,
        "--prompt_max_len=6",
        "--truncation=left",
    )
    assert (
        "columns: prompt question; label answer\nprompt: text in --input_template 'q{}='; label: '44'"
        in told
    )
    assert (
        "data source: default\n    22+22=\n6 tokens, 0 of them trained: 2|2|+|2|2|=\nids: 6 6 14 6 6 15\n"
        in told
    )
    assert "reward functions also get: answer, n\n" in told


def test_a_whole_set_without_a_problem(look, tmp_path):
    rows = write_jsonl(tmp_path / "rows.jsonl", ROWS[:2])
    (tmp_path / "run.yaml").write_text(
        f"prompt_data: {rows}\ninput_key: question\nlr_scheduler: constant\n"
    )
    code, told = look(f"--config={tmp_path / 'run.yaml'}", "--rows=0")
    assert code == 0
    assert told.startswith("-- --prompt_data: 2 rows: 2 kept")
    assert "prompt question" not in told


def test_a_chat(look, tiny_model, tmp_path):
    from transformers import AutoTokenizer

    folder = shutil.copytree(tiny_model, tmp_path / "chat")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }} {% endfor %}"
    )
    tokenizer.save_pretrained(folder)
    chat = [{"role": "system", "content": "be"}, {"role": "user", "content": "1+1"}]
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": chat, "data_source": "own"}])
    code, told = look(f"--prompt_data={rows}", f"--tokenizer_path={folder}")
    assert code == 0
    assert (
        "prompt: chat of 2 messages by the tokenizer's chat template; label: None; data source: own\n"
        in told
    )
    assert "\n    sbe u1+1 \n" in told


def test_which_tokens_are_trained(look, tmp_path):
    rows = write_jsonl(tmp_path / "rows.jsonl", [*ROWS[:2], {"question": "3+3", "answer": None}])
    words = (
        "--for=sft",
        f"--dataset={rows}",
        "--input_key=question",
        "--input_template={}=",
        "--max_len=8",
    )
    code, told = look(*words)
    assert code == 1
    assert (
        "    1+1=[2<eos>]\n6 tokens, 2 of them trained: 1|+|1|=|[2|<eos>]\nids: 5 14 5 15 [6 2]\n"
        in told
    )
    assert "over --max_len 8: 1 (--truncation error)\n" in told
    assert f"{rows}:3: no completion" in told


def test_colours_in_a_terminal(look, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    rows = write_jsonl(tmp_path / "rows.jsonl", ROWS[:1])
    _, told = look("--for=sft", f"--dataset={rows}", "--input_key=question")
    assert "    1+1\033[32m2<eos>\033[0m\n" in told


def test_both_sides_of_a_pair(tiny_tokenizer):
    from datasets import Dataset

    from lightppo.preflight.dry_run_report import described
    from lightppo.supervised.pairs import PairDataset

    rows = Dataset.from_list([{"input": "1+1=", "chosen": "2", "rejected": "33", "margin": 1.5}])
    pairs = PairDataset(rows, tiny_tokenizer, 16, margin_key="margin")
    lines = list(described(pairs))
    assert lines[1:4] == ["margin: 1.5", "chosen:", "    1+1=[2<eos>]"]
    assert lines[4] == "6 tokens, 2 of them trained: 1|+|1|=|[2|<eos>]"
    assert lines[6:8] == ["rejected:", "    1+1=[33<eos>]"]
    assert pairs.lengths.tolist() == [7]


CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
SETS = {
    "gsm8k": (
        [{"question": "one and one?", "answer": "1+1 = <<1+1=2>>2\n#### 2"}],
        [
            {
                "input": "one and one?",
                "output": "1+1 = <<1+1=2>>2\n#### 2",
                "label": "2",
                "data_source": "openai/gsm8k",
            }
        ],
    ),
    "math": (
        [
            {
                "problem": "half?",
                "solution": r"so \boxed{\frac{1}{2}}.",
                "level": "Level 1",
                "type": "Algebra",
            }
        ],
        [
            {
                "input": "half?",
                "output": r"so \boxed{\frac{1}{2}}.",
                "label": r"\frac{1}{2}",
                "data_source": "math",
            }
            | {"level": "Level 1", "type": "Algebra"}
        ],
    ),
    "ultrafeedback": (
        [
            {
                "instruction": "hi",
                "completions": [{"response": t, "overall_score": s} for t, s in scored],
            }
            for scored in (zip(("a", "b", "c"), (2.5, 4, 1)), zip(("d", "e"), (3, 3)))
        ],
        [
            {
                "input": "hi",
                "chosen": "b",
                "rejected": "c",
                "data_source": "ultrafeedback",
                "margin": 3.0,
            }
        ],
    ),
    "ultrafeedback_binarized": (
        [
            {
                "prompt": "hi",
                "chosen": CHAT,
                "rejected": [*CHAT[:1], {"role": "assistant", "content": "no"}],
            }
        ],
        [{"input": "hi", "chosen": "yes", "rejected": "no", "data_source": "ultrafeedback"}],
    ),
}


@pytest.mark.parametrize("name", SETS)
def test_public_data_sets(name, look, tmp_path):
    given, expected = SETS[name]
    source, out = write_jsonl(tmp_path / "given.jsonl", given), tmp_path / "out.jsonl"
    code, told = look(f"--prompt_data={source}", f"--write={out}")
    form = name.removesuffix("_binarized")
    left_out = f"; {len(given) - 1} pairs without a difference left out" * (len(given) > 1)
    assert (code, told) == (0, f"{out}: 1 rows of {form}{left_out}\n")
    assert read_jsonl(out) == expected
    assert look(f"--prompt_data={source}", f"--write={out}") == (
        2,
        f"lightppo data: error: --write {out}: is there already\n",
    )


@pytest.mark.parametrize(
    ("words", "row", "message"),
    [
        ([], None, "--prompt_data is required"),
        (["--for", "sft"], None, "--dataset is required"),
        (["--for", "sftt"], None, "--for must be one of ppo, sft"),
        (["--row", "5"], {"input": "1"}, "--row 5: there are 1 rows"),
        (
            ["--write", "OUT"],
            {"input": "1"},
            "its columns, input, are not those of --form gsm8k|math|ultrafeedback",
        ),
        (
            ["--write", "OUT"],
            {"question": "a", "answer": "2"},
            ":1: no row of gsm8k: ValueError: the solution has no ####",
        ),
    ],
)
def test_mistakes(words, row, message, look, tmp_path):
    flags = [str(tmp_path / "out.jsonl") if word == "OUT" else word for word in words]
    flags += [f"--prompt_data={write_jsonl(tmp_path / 'rows.jsonl', [row])}"] if row else []
    code, told = look(*flags)
    assert code == 2
    assert message in told
    assert not (tmp_path / "out.jsonl").exists()
