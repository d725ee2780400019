"""A character tokenizer and tiny random models, saved as folders that ``from_pretrained`` loads."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

REWARD = '''
def reward_func(queries, prompts, labels):
    """The more ones and twos, the better."""
    return [float(query.count("1") + query.count("2")) for query in queries]
'''

CHARACTERS = "0123456789+= abcdefghijklmnopqrstuvwxyz"


def save_tokenizer(folder: Path) -> Any:
    """One id per character; ids 0 to 3 are pad, bos, eos, unknown."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def tiny_config(**changes: Any) -> Any:
    """A Llama of about 30,000 parameters."""
    from transformers import LlamaConfig

    values = {
        "vocab_size": len(CHARACTERS) + 4,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.1,
    }
    return LlamaConfig(**{**values, **changes})


def save_causal_lm(folder: Path, seed: int = 0, **changes: Any) -> str:
    """A random Llama with its tokenizer."""
    import torch
    from transformers import LlamaForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        LlamaForCausalLM(tiny_config(**changes)).save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


def save_reward_model(
    folder: Path,
    seed: int = 1,
    mean: float | None = None,
    std: float | None = None,
    **changes: Any,
) -> str:
    """A random one-output classifier with its tokenizer; ``mean`` and ``std`` go into its config."""
    import torch
    from transformers import LlamaForSequenceClassification

    config = tiny_config(num_labels=1, **changes)
    if mean is not None:
        config.mean, config.std = mean, std
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        LlamaForSequenceClassification(config).save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> str:
    """Rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read_jsonl(path: Path | str) -> list[dict[str, Any]]:
    """Rows of a file of JSON lines."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def sums(count: int) -> list[dict[str, str]]:
    """``{"input": "03+05=", "label": "8"}`` and so on, all different, of different lengths."""
    return [
        {"input": f"{a}+{b}=", "label": str(a + b)} for a in range(count) for b in (a * 37 % 100,)
    ]
