"""Rewards for the form of a response: thoughts in ``<think>…</think>``, the answer in ``<answer>…</answer>``."""

from __future__ import annotations

import re
from collections.abc import Callable

from lightppo.data.records import Rollout
from lightppo.errors import RewardError
from lightppo.rewards.source import RewardOutput, RewardSource, check_output, close_source

_TAG = re.compile(r"</?(?:think|answer)>")
_THINK = ("<think>", "</think>")
_THINK_ANSWER = (*_THINK, "<answer>", "</answer>")


def has_think(text: str) -> bool:
    """Whether the text is ``<think>…</think>`` and then an answer; the opening tag may be in the prompt instead."""
    tags, between = _split(text)
    return (
        tags[:2] == list(_THINK)
        and not set(_THINK).intersection(tags[2:])
        and not between[0].strip()
        and any(part.strip() for part in between[2:])
    )


def has_think_answer(text: str) -> bool:
    """True for ``<think>…</think><answer>…</answer>``, each tag once, with only white space around and between."""
    tags, between = _split(text)
    return tags == list(_THINK_ANSWER) and not any(between[i].strip() for i in (0, 2, 4))


def _split(text: str) -> tuple[list[str], list[str]]:
    """The tags in order and the texts around them; adds a missing first ``<think>``."""
    tags = _TAG.findall(text)
    if tags and tags[0] == "</think>":
        text, tags = "<think>" + text, ["<think>", *tags]
    return tags, _TAG.split(text)


FORMATS: dict[str, Callable[[str], bool]] = {"think": has_think, "think_answer": has_think_answer}


class FormatReward:
    """1 if the response has the form (a name in :data:`FORMATS` or a function ``check(response) -> bool``), else 0."""

    minimum = 0.0

    def __init__(self, reward_format: str | Callable[[str], bool] = "think_answer", *, name: str = "format") -> None:
        if isinstance(reward_format, str):
            if reward_format not in FORMATS:
                raise ValueError(f"--reward_format must be one of {', '.join(FORMATS)}, got {reward_format!r}")
            reward_format = FORMATS[reward_format]
        self.check = reward_format
        self.name = name

    def score(self, rollouts: list[Rollout]) -> RewardOutput:
        """Scores the samples."""
        return RewardOutput([float(self.check(rollout.response_text)) for rollout in rollouts])


class XmlFormatCheck:
    """Punishes a wrong answer less if it has the form ``<think>…</think><answer>…</answer>``.

    A sample that scores ``minimum`` (by default the source's) gets −0.8 with the form and −1 without; all other scores
    stay. Metric: ``xml_format``, 1 with the form. Source: AReaL, ``check_xml_format``.
    """

    well_formed, malformed = -0.8, -1.0

    def __init__(self, source: RewardSource, *, minimum: float | None = None, name: str | None = None) -> None:
        minimum = getattr(source, "minimum", None) if minimum is None else minimum
        if minimum is None:
            raise ValueError(f"--check_xml_format: {source.name} does not say which score a wrong answer has; "
                             "set --reward_minimum")  # fmt: skip
        self.source = source
        self.wrong = float(minimum)
        self.minimum = self.malformed
        self.name = name or source.name

    def close(self) -> None:
        """Ends what the source has started."""
        close_source(self.source)

    def score(self, rollouts: list[Rollout]) -> RewardOutput:
        """Scores the samples."""
        output = check_output(self.source.score(rollouts), rollouts, self.source.name)
        if "xml_format" in output.metrics:
            raise RewardError(f"{self.source.name} has a metric 'xml_format', which --check_xml_format writes")
        good = [has_think_answer(rollout.response_text) for rollout in rollouts]
        scores = [
            score if score is None or score > self.wrong else (self.well_formed if form else self.malformed)
            for score, form in zip(output.scores, good)
        ]
        return RewardOutput(
            scores, output.metrics | {"xml_format": [float(form) for form in good]}, output.token_scores
        )
