"""One sentence with two given words: prompts for a chat model, and the rule that scores its answers.

python examples/real/sentences.py --output_dir runs/real/assets
lightppo ppo --reward_fn examples/real/sentences.py …
"""

from __future__ import annotations

import json
import random
import re
from itertools import permutations
from pathlib import Path

import tyro

WORDS = (
    "apple bird boat book bread bridge candle car castle cat chair child city clock cloud coffee desert doctor dog door "
    "farmer fire fish flower forest friend garden guitar hat horse house island key king lake lamp letter market moon"
)
HELD_OUT_WORDS = (
    "mountain mouse music ocean painter park rain river road school ship snow star stone storm street summer teacher "
    "train tree village window winter"
)
ASK = 'Write one short sentence with the words "{}" and "{}".'
WORD_COUNTS = range(5, 21)


def rule(answer: str, label: str) -> bool:
    """Tell whether an answer is one sentence of 5 to 20 words that has both words of the label."""
    text = answer.strip()
    words = re.findall(r"[a-z]+", text.lower())
    is_one_sentence = re.fullmatch(r"[^.!?\n]+[.!?]", text) is not None
    return is_one_sentence and len(words) in WORD_COUNTS and set(label.split()) <= set(words)


def reward_func(
    queries: list[str],
    prompts: list[str],
    labels: list[str],
    *,
    responses: list[str],
    finish_reasons: list[str],
) -> dict[str, object]:
    """Score each answer with 1.0 or 0.0; one that ran into the token limit is wrong."""
    scores = [
        float(reason == "stop" and rule(answer, label))
        for answer, label, reason in zip(responses, labels, finish_reasons, strict=True)
    ]
    return {"rewards": scores, "extra_logs": {"accuracy": scores}}


def rows(words: str, count: int, seed: int) -> list[dict[str, object]]:
    """Return that many prompts, each with another ordered pair of words."""
    pairs = random.Random(seed).sample(list(permutations(words.split(), 2)), count)
    return [
        {"input": [{"role": "user", "content": ASK.format(*pair)}], "label": " ".join(pair)}
        for pair in pairs
    ]


def main(output_dir: Path, prompts: int = 512, held_out: int = 256) -> None:
    """Write ``prompts.jsonl`` and ``eval.jsonl``, which have no word in common.

    Args:
        output_dir: folder for both.
        prompts: rows to train on.
        held_out: rows to evaluate on.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    for name, content in (
        ("prompts", rows(WORDS, prompts, seed=1)),
        ("eval", rows(HELD_OUT_WORDS, held_out, seed=2)),
    ):
        lines = "".join(json.dumps(row) + "\n" for row in content)
        (output_dir / f"{name}.jsonl").write_text(lines)


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
