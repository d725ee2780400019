"""Pairs of answers of a model to the same prompt, in the order that the rule of ``shop.py`` gives them.

    python examples/rlhf/pairs.py --model runs/rlhf/sft --prompts runs/rlhf/assets/prompts.jsonl --output pairs.jsonl

Rows are ``{"input", "chosen", "rejected"}``. Two answers of which none is better make no pair, nor does an empty one.
"""

from __future__ import annotations

import json
from pathlib import Path

import answers
import shop
import tyro
from make_assets import write_jsonl


def ordered(row: dict[str, str], first: str, second: str) -> dict[str, str] | None:
    """The pair, the better answer first; ``None`` without a better one, or with an empty one."""
    lead = shop.true_score(row["label"], first) - shop.true_score(row["label"], second)
    if lead == 0 or not (first and second):
        return None
    better, worse = (first, second) if lead > 0 else (second, first)
    return {"input": row["input"], "chosen": f" {better}", "rejected": f" {worse}"}


def main(model: Path, prompts: Path, output: Path, count: int | None = None, seed: int = 1) -> None:
    """Sample two answers to each prompt, and write the pairs.

    Args:
        model: folder of the model that answers.
        prompts: JSONL file of prompts.
        output: JSONL file to write.
        count: pairs to write, the first ones; an error if there are fewer. None: all.
        seed: of the sampling.
    """
    import lightppo  # noqa: F401  it quiets what others print when they are imported

    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    twice = [row["input"] for row in rows for _ in range(2)]
    texts = [text for batch in answers.sample(model, twice, seed) for text in batch.texts]
    found = [
        pair
        for row, *two in zip(rows, texts[::2], texts[1::2])
        if (pair := ordered(row, *two)) is not None
    ]
    if count is not None and len(found) < count:
        raise SystemExit(
            f"pairs.py: error: {len(found)} of {len(rows)} prompts give a pair, --count asks for {count}"
        )
    write_jsonl(output, found[:count])
    print(
        f"{output}: {len(found[:count]):,} pairs from {len(texts):,} answers to {len(rows):,} prompts"
    )


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
