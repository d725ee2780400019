"""1 where the number in the response is the gold one, else 0. ``--reward_fn examples/reward_functions/gsm8k.py``

Labels are GSM8K's ``answer`` column (a worked solution that ends in ``#### 72``) or the bare number. The response's
number is the one after its last ``####``, or its last number where it has no ``####``. ``1,000``, ``$1000`` and
``1000.00`` are the same number. Fractions, units and LaTeX are not understood.
"""

import re
from decimal import Decimal
from typing import Any

_NUMBER = re.compile(r"(-?)\$?\s?(\d[\d,]*(?:\.\d+)?|\.\d+)")


def numbers_in(text: str) -> list[Decimal]:
    """All numbers of a text, in order."""
    return [Decimal(sign + digits.replace(",", "")) for sign, digits in _NUMBER.findall(text)]


def extract_gold(label: str) -> Decimal:
    """The number after the last ``####``, or the label itself if it is a number.

    Raises:
        ValueError: neither.
    """
    found = numbers_in(label.rpartition("####")[2])
    if len(found) != 1:
        raise ValueError(f"label {label[-80:]!r} has no single number after '####'")
    return found[0]


def extract_answer(response: str) -> Decimal | None:
    """The response's number, or ``None`` if it has none."""
    _, marker, tail = response.rpartition("####")
    found = numbers_in(tail)
    if not found:
        return None
    return found[0] if marker else found[-1]


def reward_func(
    queries: list[str], prompts: list[str], labels: list[Any], **extra: Any
) -> dict[str, Any]:
    """Scores each response; ``queries`` are prompt + response.

    Raises:
        ValueError: a label without a number.
    """
    answers = [extract_answer(query[len(prompt) :]) for query, prompt in zip(queries, prompts)]
    rewards = [float(answer == extract_gold(str(label))) for answer, label in zip(answers, labels)]
    answered = [float(answer is not None) for answer in answers]
    return {"rewards": rewards, "extra_logs": {"accuracy": rewards, "answered": answered}}
