"""The two records of a rollout, as engines and reward sources see them; groups of them as plain values and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length"]


@dataclass(slots=True)
class Prompt:
    """One prompt, as the model will see it."""

    text: str  # after chat template or input template
    token_ids: list[int]
    label: Any = None  # ground truth for rule rewards; any JSON value
    # row number in the (blended) dataset; identifies the prompt and seeds its random numbers
    index: int = 0
    data_source: str = "default"  # selects evaluation and reward weights
    # the row's other columns, for reward functions
    extra: dict[str, Any] = field(default_factory=dict)
    # the raw chat, if the row was one; reward models render it again
    messages: list[dict[str, Any]] | None = None


@dataclass(slots=True)
class Rollout:
    """One sampled response."""

    prompt: Prompt
    sample_index: int  # number among the prompt's samples, from 0
    response_ids: list[int]  # including the end-of-text or stop id, if one was sampled
    response_text: str  # response_ids decoded without special tokens
    # "stop": end-of-text, stop id or stop string; "length": cut by the token limit
    finish_reason: FinishReason
    log_probs: list[float] | None = None  # per response id, under the sampling temperature
    reward: float | None = None  # None until scored
    token_rewards: list[float] | None = None  # one score per response token
    # numbers from the reward source, logged as reward/<name>
    extras: dict[str, float] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)  # its texts, kept in the files of samples
    # an older policy than that of the step sampled it (a surplus of dynamic sampling, or --max_staleness)
    stale: bool = False
    # (version, start, end): the weights that sampled response_ids[start:end], by the PPO steps they were trained for
    versions: list[tuple[int, int, int]] = field(default_factory=list)
    # the greedy answer to the prompt, if the advantage estimator needs it
    baseline: Rollout | None = None
    # per response id: it was sampled, so it is trained; None: all were
    trained: list[bool] | None = None
    # A tensor of small integers (N - 1, L, k): for each of the N tokens of prompt and response but the last, the experts
    # that each of L routers chose while sampling.
    experts: Any = field(default=None, compare=False, repr=False)
    # the whole conversation, of an episode of several turns; response_text is then its last turn
    messages: list[dict[str, Any]] | None = None
    turns: list[dict[str, Any]] | None = None  # what happened in each turn of an episode
    # the user's object that an episode was played in, while reward functions may ask it; it is not saved
    environment: Any = None

    @property
    def truncated(self) -> bool:
        """True if the token limit cut the response."""
        return self.finish_reason == "length"

    @property
    def trained_length(self) -> int:
        """How many response ids were sampled."""
        if self.trained is None:
            return len(self.response_ids)
        return sum(self.trained)


def to_plain(group: Sequence[Rollout]) -> dict[str, Any]:
    """Return samples of one prompt as plain values; the prompt and its greedy baseline are stored once."""
    baseline = group[0].baseline
    return {
        "prompt": _fields(group[0].prompt),
        "baseline": None if baseline is None else _fields(baseline),
        "samples": [_fields(rollout) for rollout in group],
    }


def _fields(record: Prompt | Rollout) -> dict[str, Any]:
    """Return a record's own fields, without the records and objects that it points to."""
    values = {
        field.name: getattr(record, field.name)
        for field in dataclasses.fields(record)
        if field.name not in ("prompt", "baseline", "environment")
    }
    if values.get("experts", ()) is None:  # most runs record none
        del values["experts"]
    return values


def from_plain(values: Mapping[str, Any]) -> list[Rollout]:
    """Invert :func:`to_plain`."""
    prompt = Prompt(**values["prompt"])
    baseline = None
    if values["baseline"] is not None:
        baseline = Rollout(prompt, **values["baseline"])
    return [Rollout(prompt, **sample, baseline=baseline) for sample in values["samples"]]


def group_by_prompt(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """Group a list in which the samples of a prompt stand together, with rising ``sample_index``."""
    groups: list[list[Rollout]] = []
    for rollout in rollouts:
        previous = groups[-1][-1] if groups else None
        if (
            previous
            and previous.prompt.index == rollout.prompt.index
            and previous.sample_index < rollout.sample_index
        ):
            groups[-1].append(rollout)
        else:
            groups.append([rollout])
    return groups


def seed_of_step(seed: int, step: int) -> int:
    """Return a seed for each step; no two steps of a run share one."""
    return seed * 1_000_000_007 + step
