"""Reward functions as verl, TRL and AReaL call them; docs/rewards.md."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from lightppo.data.records import Rollout
from lightppo.rewards.function_styles import (
    QUERIES,
    Answer,
    NonFinite,
    Reading,
    Style,
    Values,
    row_of,
)
from lightppo.rewards.reward_calls import join_outputs
from lightppo.rewards.reward_source import (
    RewardOutput,
    describe_sample,
    finite,
    is_non_finite,
    reading_error,
    shown,
)


def read_sample(value: Any, part: list[Rollout], label: str) -> Reading:
    """Reads a score, a dict with ``score``, a tuple that begins with the score, or ``None``."""
    score, metrics, texts = value, {}, {}
    if isinstance(value, Mapping):
        if "score" not in value:
            return None, f"it returned a dict without 'score': {shown(value)}"
        score = value["score"]
        numbers = {str(name): finite(item) for name, item in value.items() if name != "score"}
        metrics = {name: [number] for name, number in numbers.items() if number is not None}
        texts = {str(name): [item] for name, item in value.items() if isinstance(item, str)}
    elif isinstance(value, (list, tuple)) and value:
        score = value[0]
    number = finite(score)
    if number is None and score is not None:
        problem = f"it returned {shown(value)}; a score must be a finite number, or None for an unscored sample"
        problem += reading_error(score)
        return None, NonFinite(problem) if is_non_finite(score) else problem
    return Answer(RewardOutput([number], metrics, texts=texts), [False]), None


def read_samples(value: Any, part: list[Rollout], label: str) -> Reading:
    """Reads a list with one entry per sample, each as :func:`read_sample` does."""
    values = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(values, (list, tuple)) or len(values) != len(part):
        return (
            None,
            f"it returned {shown(value)}; a list with one entry for each of {len(part)} samples is needed",
        )
    readings = [read_sample(item, part[i : i + 1], label) for i, item in enumerate(values)]
    # Other problems come before numbers that are not finite.
    bad = sorted((isinstance(text, NonFinite), i) for i, (_, text) in enumerate(readings) if text)
    problem = None
    if bad:
        text = f"{describe_sample(part, bad[0][1])}: {readings[bad[0][1]][1]}"
        problem = NonFinite(text) if bad[0][0] else text
    outputs = [RewardOutput([None]) if answer is None else answer.output for answer, _ in readings]
    return Answer(join_outputs(outputs), [answer is None for answer, _ in readings]), problem


# --- verl

_SCORED = {"response", "solution", "answer"}  # verl's users call its solution_str so
_WORDS = {"completion", "completions", "messages"} | {
    word for name in ("data_source", "ground_truth", "solution_str", "extra_info", *_SCORED)
    for word in (name, f"{name}s")
}  # fmt: skip


def _verl(rollout: Rollout) -> Values:
    info = rollout.prompt.extra.get("extra_info")
    info = info if isinstance(info, dict) else rollout.prompt.extra
    num_turns = None if rollout.turns is None else len(rollout.turns)
    return {
        "data_source": rollout.prompt.data_source,
        "solution_str": rollout.response_text,
        "ground_truth": rollout.prompt.label,
        # A copy, because functions write into it. In verl the two keys are always there.
        "extra_info": {"num_turns": num_turns, "rollout_reward_scores": {}} | info,
    }


def _verl_batch(rollout: Rollout) -> Values:
    return {f"{name}s": value for name, value in _verl(rollout).items()}


def verl_names(plural: str, parameters: Iterable[inspect.Parameter]) -> dict[str, str]:
    """The function's own names of verl's arguments → verl's, by their places before ``ground_truth``."""
    names = [p.name for p in parameters]
    label = f"ground_truth{plural}"
    own = names[: names.index(label)] if label in names else []
    theirs = [f"data_source{plural}", f"solution_str{plural}"][-len(own) :] if own else []
    renamed = {name: right for name, right in zip(own, theirs) if name != right}
    of_solution = {"completion"} | {f"{word}{plural}" for word in _SCORED}
    taken = _WORDS | {*QUERIES.words, *QUERIES.positional}  # have a meaning of their own
    known = any(
        name in taken and (right == f"data_source{plural}" or name not in of_solution)
        for name, right in renamed.items()
    )
    is_complete = len(own) == len(theirs) and not {*renamed.values()} & {*names}
    return renamed if is_complete and not known else {}


VERL = Style(
    "(data_source, solution_str, ground_truth, extra_info)",
    {"solution_str", "ground_truth"},
    _verl,
    read_sample,
    per_sample=True,
    label="ground_truth",
    words=_WORDS,
    renames=partial(verl_names, ""),
)

VERL_BATCH = Style(
    "(data_sources, solution_strs, ground_truths, extra_infos)",
    {"solution_strs", "ground_truths"},
    _verl_batch,
    read_samples,
    label="ground_truths",
    renames=partial(verl_names, "s"),
)


# --- TRL


def _trl(rollout: Rollout) -> Values:
    """If the prompt is a chat, the completion is one too: one message of the assistant, or those of an episode."""
    prompt, text, ids = rollout.prompt, rollout.response_text, rollout.response_ids
    if prompt.messages is None:
        return {"prompts": prompt.text, "completions": text, "completion_ids": ids}
    answer = [{"role": "assistant", "content": text}]
    if rollout.messages is not None:
        answer = rollout.messages[len(prompt.messages) :]
    own = {} if rollout.environment is None else {"environments": rollout.environment}
    return own | {"prompts": prompt.messages, "completions": answer, "completion_ids": ids}


def discard(*args: Any) -> None:
    """Stands for TRL's ``log_extra(column, values)`` and ``log_metric(name, value)``; keeps nothing."""


TRL = Style(
    "(prompts, completions, completion_ids, **columns)",
    {"completions"},
    _trl,
    columns=row_of,
    forbids="prompt",  # AReaL's
    always={"log_extra": discard, "log_metric": discard},
)


# --- AReaL

_AREAL_NAMES = ("prompt", "completions", "prompt_ids", "completion_ids")


def _areal(rollout: Rollout) -> Values:
    prompt, text = rollout.prompt, rollout.response_text
    ids = {"prompt_ids": prompt.token_ids, "completion_ids": rollout.response_ids}
    return {"prompt": prompt.text, "completions": text} | ids


def _row_and_chat(rollout: Rollout) -> Values:
    chat = rollout.prompt.messages
    return rollout.prompt.extra if chat is None else {"messages": chat} | rollout.prompt.extra


AREAL = Style(
    "(prompt, completions, prompt_ids, completion_ids, **row)",
    {*_AREAL_NAMES},
    _areal,
    read_sample,
    per_sample=True,
    positional=_AREAL_NAMES,
    columns=_row_and_chat,
)
