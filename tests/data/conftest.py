"""A character tokenizer made here, and files to read."""

from __future__ import annotations

import json
import string
from pathlib import Path

import pytest

CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "<{{ m.role[0] }}>{{ m.content }}~\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def build_tokenizer(*, bos: bool = False, chat: bool = True, append_eos: bool = False):
    """One id per character; ``^`` is begin-of-text, ``~`` end-of-text, ``_`` padding, ``?`` unknown."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    characters = ["_", "^", "~", "?", *sorted(set(string.printable) - set("_^~?"))]
    vocab = {c: i for i, c in enumerate(characters)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    if bos or append_eos:
        single = " ".join([*["^"] * bos, "$A", *["~"] * append_eos])
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[("^", vocab["^"]), ("~", vocab["~"])]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="^" if bos else None,
        eos_token="~",
        pad_token="_",
        unk_token="?",
    )
    if chat:
        fast.chat_template = CHAT_TEMPLATE
    return fast


@pytest.fixture
def make_tokenizer():
    return build_tokenizer


@pytest.fixture
def tokenizer():
    return build_tokenizer()


@pytest.fixture
def write_jsonl(tmp_path: Path):
    """Write rows to a JSONL file (strings as they are: broken lines) and return its path."""

    def write(rows: list, name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows),
            encoding="utf-8",
        )
        return str(path)

    return write


@pytest.fixture(autouse=True)
def _own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf_cache")
    monkeypatch.setenv("LIGHTPPO_CACHE", str(tmp_path / "lightppo_cache"))
