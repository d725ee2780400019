"""1 where the answer in the response is the label, else 0. ``--reward_fn examples/reward_functions/exact_match.py``

The answer is what follows the last ``####`` of the response, or the whole response where it has none.
"""

from typing import Any


def extract_answer(response: str) -> str:
    """The answer with white space at its ends removed and runs of it made one space."""
    return " ".join(response.rpartition("####")[2].split())


def reward_func(
    queries: list[str], prompts: list[str], labels: list[Any], **extra: Any
) -> dict[str, Any]:
    """Scores each response; ``queries`` are prompt + response.

    Raises:
        ValueError: a row has no label.
    """
    rewards = []
    for query, prompt, label in zip(queries, prompts, labels):
        if label is None:
            raise ValueError(f"the row of prompt {prompt[:80]!r} has no label; set --label_key")
        rewards.append(float(extract_answer(query[len(prompt) :]) == extract_answer(str(label))))
    return {"rewards": rewards, "extra_logs": {"accuracy": rewards}}
