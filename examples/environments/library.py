"""A search over a folder of texts as a tool: ``--tools examples/environments/library.py:search``.

The texts are the Markdown files of ``$LIBRARY``, by default those of ``docs/``. A paragraph is the better, the more of
the words asked for it has and the rarer they are (tf-idf).
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections import Counter
from pathlib import Path

from lightppo import ToolError

_DOCS = Path(__file__).parents[2] / "docs"
_MOST = 3


def search(query: str) -> str:
    """Find the paragraphs that fit a question best.

    Args:
        query: words to look for.
    """
    paragraphs, documents = _library()
    asked = set(_words(query))
    scores = {
        i: sum(_rarity(word, documents, len(paragraphs)) for word in asked & words.keys())
        for i, (_, words) in enumerate(paragraphs)
    }
    best = sorted(scores, key=lambda i: (-scores[i], i))[:_MOST]
    found = [paragraphs[i][0] for i in best if scores[i] > 0]
    if not found:
        raise ToolError("nothing has these words; ask with others")
    return "\n\n".join(found)


@functools.cache
def _library() -> tuple[list[tuple[str, Counter[str]]], Counter[str]]:
    """Every paragraph with its words, and how many paragraphs have each word."""
    folder = Path(os.environ.get("LIBRARY", _DOCS))
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.md"))]
    pieces = [piece.strip() for text in texts for piece in re.split(r"\n\s*\n", text)]
    paragraphs = [(piece, Counter(_words(piece))) for piece in pieces if piece]
    return paragraphs, Counter(word for _, words in paragraphs for word in words)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _rarity(word: str, documents: Counter[str], count: int) -> float:
    return math.log(count / documents[word])
