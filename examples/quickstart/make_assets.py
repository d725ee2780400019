"""Make what the quickstart starts from, with no download: a small Llama with random weights, its tokenizer, the data.

    python examples/quickstart/make_assets.py --output_dir runs/quickstart/assets --seed 1

``model/`` loads with ``AutoModelForCausalLM`` and ``AutoTokenizer``. ``sft.jsonl`` has the imperfect demonstrations,
``prompts.jsonl`` the prompts for PPO, ``eval.jsonl`` the held-out prompts. See ``task.py`` for the task.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import task
import tyro

from lightppo.cli.tiny_model import character_tokenizer, save, small_llama


def write_jsonl(path: Path, rows: Iterable[dict[str, str]]) -> None:
    """One JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(
    output_dir: Path = Path("runs/quickstart/assets"), seed: int = 1, head_dim: int = 16
) -> None:
    """Make model, tokenizer and data.

    Args:
        output_dir: folder to write to; made if missing.
        seed: of the initial weights and of the errors in the demonstrations.
        head_dim: width of each of the model's four attention heads.
    """
    train, held_out = task.split_pairs()
    output_dir.mkdir(parents=True, exist_ok=True)
    write_jsonl(output_dir / "sft.jsonl", task.demonstrations(seed))
    write_jsonl(output_dir / "prompts.jsonl", task.labelled_prompts(train))
    write_jsonl(output_dir / "eval.jsonl", task.labelled_prompts(held_out))

    tokenizer = character_tokenizer(task.CHARACTERS)
    model = small_llama(tokenizer, seed, head_dim=head_dim)
    save(model, tokenizer, output_dir / "model")
    print(f"{output_dir}: a Llama of {model.num_parameters():,} parameters, {len(train):,} prompts to train on, "
          f"{len(held_out):,} held out")  # fmt: skip


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
