"""Seeds of requests, for engines that take a seed and not uniforms."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def request_seed(seed: int, prompt_index: int, sample_index: int, turn: int = 0) -> int:
    """The seed of one request in [0, 2^63), for engines that take a seed rather than uniforms."""
    key = f"lightppo/{seed}/{prompt_index}/{sample_index}"
    return _hashed(f"{key}/turn {turn}" if turn else key)


def joint_seed(seeds: Sequence[int]) -> int:
    """One seed of these, in their order, also in [0, 2^63)."""
    return _hashed(f"lightppo/{list(seeds)}")


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
