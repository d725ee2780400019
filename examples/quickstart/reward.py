"""The quickstart's rule reward: 1 where the response is exactly the sum and ends there, else 0.

--reward_fn examples/quickstart/reward.py
"""

from __future__ import annotations

import re

_SUM = re.compile(r"(\d+)\+(\d+)=")


def reward_func(
    queries: list[str],
    prompts: list[str],
    labels: list[str],
    *,
    finish_reasons: list[str] | None = None,
) -> dict[str, object]:
    """Adds the two numbers of each prompt and compares; the answer to ``07+35=`` is ``042``.

    Args:
        queries: prompt and response, without special tokens.
        prompts: like ``07+35=``.
        labels: the right answers, as the data says.
        finish_reasons: ``"stop"`` where the response ended by itself. One that ran into the token limit is wrong.

    Returns:
        ``rewards``, 1.0 or 0.0 per sample, and the same as ``accuracy`` to log.

    Raises:
        ValueError: a prompt is no sum, or its label is not the sum: the data is not of this task.
    """
    finish_reasons = finish_reasons or ["stop"] * len(queries)
    rewards = []
    for query, prompt, label, finish_reason in zip(
        queries, prompts, labels, finish_reasons, strict=True
    ):
        match = _SUM.fullmatch(prompt)
        if match is None:
            raise ValueError(f"prompt {prompt!r} is not a sum like '07+35='")
        answer = f"{int(match[1]) + int(match[2]):03d}"
        if label != answer:
            raise ValueError(f"prompt {prompt!r} has the label {label!r}, but the sum is {answer}")
        rewards.append(float(finish_reason == "stop" and query.removeprefix(prompt) == answer))
    return {"rewards": rewards, "extra_logs": {"accuracy": rewards}}
