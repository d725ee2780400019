"""Data sets of prompts in the seed's style."""

from __future__ import annotations

from types import SimpleNamespace

from datasets import Dataset

from lightppo import PromptDataset


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
