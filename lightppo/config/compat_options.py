"""Options of the replay buffer as the seed has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightppo.option import Section, option


class BufferConfig(Section, adds_to="training", resume_safe=True):
    """A buffer that forgets."""

    buffer_limit: int = option(
        0,
        "Maximum samples in the buffer, oldest removed first; 0: no limit.",
        "samples per rank",
        ge=0,
    )

    @staticmethod
    def problems(options: Any) -> Iterator[str]:
        given = vars(options)
        surplus = given.get("dynamic_sampling") or (
            given.get("gen_batch_size", 0) > options.rollout_batch_size
        )
        held = options.samples if surplus else options.samples // options.ranks
        if 0 < options.buffer_limit < held:
            why = " with --dynamic_sampling or --gen_batch_size" if surplus else ""
            yield (
                f"--buffer_limit {options.buffer_limit} loses samples: a rank may hold {held} of a step{why}; "
                "set 0 or as many"
            )
