"""The two records of a rollout, as engines and reward sources see them; groups of them as plain values and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length"]


@dataclass(slots=True)
class Prompt:
    """One prompt, as the model will see it.

    Attributes:
        text: the prompt after chat template or input template.
        token_ids: ``text`` tokenised, at most ``prompt_max_len`` ids.
        label: ground truth for rule rewards; any JSON value, ``None`` where the data has none.
        index: row number in the (blended) dataset; names the prompt and keys its random numbers.
        data_source: name of the source the row came from; evaluation and reward weights go by it.
        extra: all other columns of the row, handed to reward functions.
        messages: the raw chat where the row was a chat, for re-templating by a reward model.
    """

    text: str
    token_ids: list[int]
    label: Any = None
    index: int = 0
    data_source: str = "default"
    extra: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] | None = None


@dataclass(slots=True)
class Rollout:
    """One sampled response.

    Attributes:
        prompt: what was asked.
        sample_index: which of the n samples of this prompt, from 0.
        response_ids: sampled ids, the end-of-text or stop id included if one was sampled.
        response_text: ``response_ids`` decoded without special tokens.
        finish_reason: ``"stop"`` (end-of-text, stop id, stop string) or ``"length"`` (cut by the token limit).
        log_probs: log prob of each response id under the sampling temperature, or ``None`` if the engine has none.
        reward: the scalar score, ``None`` until scored.
        token_rewards: optional score per response token.
        extras: named numbers from the reward source, logged as ``reward/<name>``.
        baseline: the greedy answer to the same prompt, where the advantage estimator compares with it.
    """

    prompt: Prompt
    sample_index: int
    response_ids: list[int]
    response_text: str
    finish_reason: FinishReason
    log_probs: list[float] | None = None
    reward: float | None = None
    token_rewards: list[float] | None = None
    extras: dict[str, float] = field(default_factory=dict)
    baseline: Rollout | None = None

    @property
    def truncated(self) -> bool:
        """True where the token limit cut the response."""
        return self.finish_reason == "length"


def to_plain(group: Sequence[Rollout]) -> dict[str, Any]:
    """Samples of one prompt, which is kept once, as is their greedy baseline."""
    baseline = group[0].baseline
    return {
        "prompt": _fields(group[0].prompt),
        "baseline": None if baseline is None else _fields(baseline),
        "samples": [_fields(rollout) for rollout in group],
    }


def _fields(record: Prompt | Rollout) -> dict[str, Any]:
    """A record's own fields, without the records that it points to."""
    names = (f.name for f in dataclasses.fields(record))
    return {name: getattr(record, name) for name in names if name not in ("prompt", "baseline")}


def from_plain(values: Mapping[str, Any]) -> list[Rollout]:
    """From :func:`to_plain`."""
    prompt = Prompt(**values["prompt"])
    baseline = Rollout(prompt, **values["baseline"]) if values["baseline"] is not None else None
    return [Rollout(prompt, **sample, baseline=baseline) for sample in values["samples"]]


def group_by_prompt(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """The samples of each prompt, of rollouts as engines give them: a prompt's together, ``sample_index`` rising."""
    groups: list[list[Rollout]] = []
    for rollout in rollouts:
        last = groups[-1][-1] if groups else None
        if last and last.prompt.index == rollout.prompt.index and last.sample_index < rollout.sample_index:
            groups[-1].append(rollout)
        else:
            groups.append([rollout])
    return groups


def seed_of_step(seed: int, step: int) -> int:
    """A seed for each step of a run; steps of one run never share one."""
    return seed * 1_000_000_007 + step
