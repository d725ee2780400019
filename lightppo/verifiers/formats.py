"""Rewards for the form of a response: thoughts in ``<think>…</think>``, the answer in ``<answer>…</answer>``."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from lightppo.data.records import Rollout
from lightppo.errors import RewardError
from lightppo.rewards.reward_source import RewardOutput, RewardSource, check_output, close_source
from lightppo.verifiers.thinking import Thinking

if TYPE_CHECKING:
    from lightppo.rewards.reward_source import RewardRequest

_TAG = re.compile(r"</?(?:think|answer)>")
_THINK = ["<think>", "</think>"]


def has_think(response: str) -> bool:
    """Tell whether the text is ``<think>…</think>`` and then an answer; the opening tag may be in the prompt instead."""
    tags, texts = _split(response)
    if tags[:2] != _THINK or texts[0] or not set(_THINK).isdisjoint(tags[2:]):
        return False
    return any(texts[2:])


def has_think_answer(response: str) -> bool:
    """Accept ``<think>…</think><answer>…</answer>``, each tag once, with only white space around and between."""
    tags, texts = _split(response)
    return tags == [*_THINK, "<answer>", "</answer>"] and not any(texts[::2])


def _split(response: str) -> tuple[list[str], list[str]]:
    """Return the tags in order and the stripped texts around them; add a missing first ``<think>``."""
    if _TAG.findall(response)[:1] == ["</think>"]:
        response = "<think>" + response
    return _TAG.findall(response), [piece.strip() for piece in _TAG.split(response)]


FORMATS: dict[str, Callable[[str], bool]] = {"think": has_think, "think_answer": has_think_answer}


class FormatReward:
    """1 if the response has the form (a name in :data:`FORMATS` or a function ``check(response) -> bool``), else 0."""

    minimum = 0.0
    per_sample = True

    def __init__(
        self,
        reward_format: str | Callable[[str], bool] = "think_answer",
        *,
        thinking: Thinking | None = None,
        name: str = "format",
    ) -> None:
        self._is_named = isinstance(reward_format, str)
        if isinstance(reward_format, str):
            if reward_format not in FORMATS:
                raise ValueError(
                    f"--reward_format must be one of {', '.join(FORMATS)}, got {reward_format!r}"
                )
            reward_format = FORMATS[reward_format]
        self.check = reward_format
        self.name = name
        self._thinking = thinking or Thinking()

    def score(self, rollouts: list[Rollout]) -> RewardOutput:
        """Score the samples."""
        scores = []
        for rollout in rollouts:
            response = self._thinking.shown(rollout) if self._is_named else rollout.response_text
            scores.append(float(self.check(response)))
        return RewardOutput(scores)


class XmlFormatCheck:
    """Punishes a wrong answer less if it has the form ``<think>…</think><answer>…</answer>``.

    A sample that scores ``minimum`` (by default the source's) gets −0.8 with the form and −1 without; all other scores
    stay. Metric: ``xml_format``, 1 with the form. Source: AReaL, ``check_xml_format``.
    """

    minimum = -1.0

    def __init__(
        self,
        source: RewardSource,
        *,
        minimum: float | None = None,
        thinking: Thinking | None = None,
    ) -> None:
        self.source = source
        self.name = source.name
        self._thinking = thinking or Thinking()
        if minimum is None:
            minimum = getattr(source, "minimum", None)
        if minimum is None:
            raise ValueError(
                f"--check_xml_format: set --reward_minimum, the score of a wrong answer from {self.name}"
            )
        self.wrong = float(minimum)

    def close(self) -> None:
        """End what the source has started."""
        close_source(self.source)

    def score(self, rollouts: list[Rollout]) -> RewardOutput:
        """Score the samples."""
        output = check_output(self.source.score(rollouts), rollouts, self.name)
        if "xml_format" in output.metrics:
            raise RewardError(
                f"{self.name} has a metric 'xml_format', which --check_xml_format writes"
            )
        has_form = [has_think_answer(self._thinking.shown(rollout)) for rollout in rollouts]
        for i, score in enumerate(output.scores):
            if score is not None and score <= self.wrong:
                output.scores[i] = -0.8 if has_form[i] else self.minimum
        output.metrics["xml_format"] = [float(flag) for flag in has_form]
        return output


def format_reward(request: RewardRequest) -> FormatReward:
    """Return the source of ``--reward_source format``."""
    return FormatReward(**request.options_of(FormatReward), thinking=Thinking(request.tokenizer))


def with_xml_format(source: RewardSource, request: RewardRequest) -> RewardSource:
    """Return the source with ``--check_xml_format`` around it."""
    minimum = request.config.verifier.reward_minimum
    return XmlFormatCheck(source, minimum=minimum, thinking=Thinking(request.tokenizer))
