"""Make what the example starts from, with no download: a small Llama with random weights, its tokenizer, the data.

    python examples/rlhf/make_assets.py --output_dir runs/rlhf/assets --seed 2

``model/`` loads with ``AutoModelForCausalLM`` and ``AutoTokenizer``. ``sft.jsonl`` has the demonstrations,
``prompts.jsonl`` the requests to train on, ``eval.jsonl`` the held-out ones. See ``shop.py`` for the task.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import shop
import tyro

from lightppo.cli.tiny_model import BOS, EOS, PAD, UNKNOWN, save, small_llama

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

POSITIONS = 128  # of the model: tokens of a request and its answer


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word or mark, BOS before every text. EOS is put after an answer by the data."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([PAD, BOS, EOS, *shop.vocabulary(), UNKNOWN])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    no_space_before_marks = [
        decoders.WordPiece(prefix="##", cleanup=True),
        decoders.Replace(" :", ":"),
    ]
    tokenizer.decoder = decoders.Sequence(no_space_before_marks)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS, unk_token=UNKNOWN
    )


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """One JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(
    output_dir: Path = Path("runs/rlhf/assets"),
    seed: int = 2,
    n_demonstrations: int = 20_000,
    n_prompts: int = 6_000,
    n_held_out: int = 512,
) -> None:
    """Make model, tokenizer and data.

    Args:
        output_dir: folder to write to; made if missing.
        seed: of the initial weights and of the data.
        n_demonstrations: rows of supervised training.
        n_prompts: requests that pairs and PPO take.
        n_held_out: requests for things that no training asks for.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    write_jsonl(output_dir / "sft.jsonl", shop.demonstrations(n_demonstrations, seed))
    write_jsonl(
        output_dir / "prompts.jsonl", shop.prompts(held_out=False, count=n_prompts, seed=seed)
    )
    write_jsonl(output_dir / "eval.jsonl", shop.prompts(held_out=True, count=n_held_out, seed=seed))
    tokenizer = build_tokenizer()
    model = small_llama(tokenizer, seed, positions=POSITIONS)
    save(model, tokenizer, output_dir / "model")
    print(f"{output_dir}: a Llama of {model.num_parameters():,} parameters, {n_prompts:,} prompts to train on, "
          f"{n_held_out:,} held out")  # fmt: skip


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
