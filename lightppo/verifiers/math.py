"""Rewards for mathematical answers: 1 if the response's final answer equals the label, else 0.

Where answers stand in texts. Whether two are equal, :mod:`lightppo.verifiers.math_equality` tells: numbers and equal
texts at once, the rest in worker processes that are killed at their limit.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from lightppo.data.records import Prompt, Rollout
from lightppo.errors import RewardError
from lightppo.processes.killable_pool import KillablePool
from lightppo.processes.user_calls import UserCall
from lightppo.rewards.function import NO_LABELS, OnFailure, check_failure_options, settle
from lightppo.rewards.reward_source import RewardOutput, describe_sample
from lightppo.verifiers.math_equality import equal
from lightppo.verifiers.math_notation import NO_UNITS, SPACING, tidy
from lightppo.verifiers.math_numbers import DECIMAL, as_number, compare
from lightppo.verifiers.thinking import Thinking, after_thinking

if TYPE_CHECKING:
    from lightppo.rewards.reward_source import RewardRequest

_LIBRARY = "latex2sympy2_extended"
_MEMORY_MB = 2048
_TIMEOUT = 5.0  # seconds of processor time; comparisons that end at all take milliseconds
# So many times as many seconds on the wall clock: a busy machine does not reach them, but a comparison that sleeps does.
_CLOCK = 20


def math_reward(request: RewardRequest) -> MathReward:
    """Return the source of ``--reward_source math``."""
    return MathReward(thinking=Thinking(request.tokenizer), **request.options_of(MathReward))


def check_prompt(prompt: Prompt) -> None:
    """Raise ValueError for a row without a label, or with one that is no answer."""
    if prompt.label is None:
        raise ValueError(NO_LABELS)
    gold_answers(prompt.label)


@dataclass(eq=False)
class MathReward:
    """Scores a response by its final answer (see :func:`find_answer`); without an answer it is wrong.

    A comparison that runs into a limit or kills its worker never becomes a score. Metrics per sample: ``answered`` (1
    if an answer was found), ``failures`` (failed tries) and ``timeouts``; the answer is the text ``pred``.
    """

    minimum: ClassVar[float] = 0.0

    reward_timeout: float | None = None  # seconds of processor time per comparison; None: 5
    # processes for comparisons by the library; None: one per core of this rank
    reward_workers: int | None = None
    on_reward_failure: OnFailure = "unscored"
    reward_retries: int = 0  # they help only if the machine is short of memory or time
    # the last formula or number of a response that marks no answer counts
    math_unmarked: bool = True
    name: str = "math"
    thinking: Thinking = field(default_factory=Thinking)

    def __post_init__(self) -> None:
        check_failure_options(self.on_reward_failure, self.reward_retries, self.reward_timeout)
        if importlib.util.find_spec(_LIBRARY) is None:
            raise ValueError(
                "rewards for mathematics need latex2sympy2_extended: pip install 'lightppo[math]'"
            )
        seconds = _TIMEOUT if self.reward_timeout is None else self.reward_timeout
        limits = {"cpu_seconds": seconds, "timeout": _CLOCK * seconds, "memory_mb": _MEMORY_MB}
        options = limits | {"workers": self.reward_workers}
        self._pool = KillablePool(
            f"{equal.__module__}:{equal.__name__}", **options, preload=(_LIBRARY,), quiet=True
        )

    def score(self, rollouts: list[Rollout]) -> RewardOutput:
        """Score the samples; each different pair of label and answer is compared once."""
        golds = [self._golds(rollouts, i) for i in range(len(rollouts))]
        answers = [
            find_answer(self.thinking.shown(rollout), unmarked=self.math_unmarked)
            for rollout in rollouts
        ]
        pairs = [
            [] if answer is None else [(gold, answer) for gold in row]
            for row, answer in zip(golds, answers)
        ]
        verdicts = {pair: compare(*pair) for pair in {pair for row in pairs for pair in row}}
        right = [any(verdicts[pair] for pair in row) for row in pairs]
        unknown = [
            [] if right[i] else [p for p in row if verdicts[p] is None]
            for i, row in enumerate(pairs)
        ]
        open_pairs = list(dict.fromkeys(pair for row in unknown for pair in row))
        settled = dict(
            zip(
                open_pairs,
                settle(
                    self._pool.run,
                    [UserCall(pair) for pair in open_pairs],
                    _read,
                    self.reward_retries,
                ),
            )
        )
        texts = {"pred": [answer and tidy(answer) for answer in answers]}
        output = RewardOutput([], {"answered": [], "failures": [], "timeouts": []}, texts=texts)
        for i, row in enumerate(unknown):
            states = [settled[pair] for pair in row]
            equal = right[i] or any(state.value for state in states)
            if equal:
                problem = None
            else:
                problem = next((state.error for state in states if state.error is not None), None)
            if problem is not None and self.on_reward_failure == "error":
                raise RewardError(
                    f"{self.name}: comparing the answer of {describe_sample(rollouts, i)} failed: {problem}. "
                    "Raise --reward_timeout, or set --on_reward_failure unscored"
                )
            output.scores.append(None if problem is not None else float(equal))
            output.metrics["answered"].append(float(answers[i] is not None))
            output.metrics["failures"].append(float(sum(state.failures for state in states)))
            output.metrics["timeouts"].append(float(sum(state.timeouts for state in states)))
        return output

    def close(self) -> None:
        """End the worker processes; they also end with this object and with the program."""
        self._pool.close()

    def _golds(self, rollouts: list[Rollout], i: int) -> list[str]:
        label = rollouts[i].prompt.label
        try:
            if label is None:
                raise ValueError(NO_LABELS)
            return gold_answers(label)
        except ValueError as error:
            raise RewardError(f"{self.name}: {describe_sample(rollouts, i)}: {error}") from None


def _read(_: int, value: Any) -> tuple[Any, str | None]:
    if isinstance(value, bool):
        return (value, None)
    return (None, f"the worker answered {value!r}")


# Where final answers stand in texts.

# Every pattern runs in the trainer on texts that a model wrote: nothing that may overlap repeats without bound.
_BOX = re.compile(r"\\(?:boxed|fbox)\s{0,3}")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BARE_BOX = re.compile(r"[^\s${}\\]{1,50}")
_EMPTY_BOX = re.compile(r"\\(?:boxed|fbox)\s{0,3}\{[\s~]{0,9}\}")
_BETWEEN_BOXES = re.compile(  # a comma, "and" or a spacing command, and what is nothing
    rf"(?=[\s\S]*?(?:[,;]|and|or|{SPACING}))(?:[\s$,;]|\\[()\[\]]|{SPACING}|(?:\\text\{{ ?)?(?:and|or)(?: ?\}})?)+"
)
_LONGEST_JOINT = 40
_ANSWER_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_ANSWER_IS = re.compile(
    r"\banswers?\b(?: to [^.\n]{0,80}?)? {0,2}\*{0,2} ?(?:\bis\b|\bare\b|[:=]) {0,2}:?\s{0,4}", re.I
)
_SENTENCE_END = re.compile(r"\n|[.!?](?=\s|$)")
_SYMBOLS = (  # no word: a dollar sign may be money
    r"(?:\\text\{[^{}$\n]{0,80}\}|\\(?!text)[A-Za-z]+(?![A-Za-z])|\\[^A-Za-z\n]|[A-Za-z](?![A-Za-z])|[^$\n\\A-Za-z])"
)
_REASON = re.compile(r"\b(?:because|since|where|when|which|for|if)\b")
# words are in a formula only with a space inside both of its dollar signs or inside neither
_FORMULA = re.compile(
    r"\$\$(?P<display>.{1,500}?)\$\$|\\\((?P<round>.{1,500}?)\\\)|\\\[(?P<square>.{1,500}?)\\\]"
    r"|(?<![\\\d])\$(?P<inline>(?![ $])[^$\n]{1,500}?(?<![ \\])|(?= )[^$\n]{1,500}?(?<= )"
    rf"|{_SYMBOLS}{{1,500}}?)\$(?!\d)",
    re.DOTALL,
)

_NUMBER_IN_TEXT = re.compile(rf"(?<![\w.])-?[$€£¥]?{DECIMAL}(?: ?/ ?\d+)?(?: ?\\?%)?")
# the largest $n$ is 34
_IS_NUMBER = re.compile(rf" (?:is|are|equals|=) (?P<number>{_NUMBER_IN_TEXT.pattern})")
_WORD_NEXT = re.compile(r" {1,2}(?P<word>[a-z]{2,})|[.,;:]?$", re.I)
_EQUALS = re.compile(r"(?<![<>])(?<![^\d)]!)(?<!\\not)=")  # x <= 2 is not 2; 3!=6 is 6
_NUMBER_NEXT = re.compile(r" ?(?:,|and|or|to) ?[-$]{0,2}\d")


def gold_answers(label: object) -> list[str]:
    """Return the right answers: one per entry of a list, each the whole text or a worked solution's final answer."""
    texts = []
    for entry in label if isinstance(label, (list, tuple)) else [label]:
        if isinstance(entry, bool) or not isinstance(entry, (str, int, float)):
            raise ValueError(
                f"a label must be a text or a number, or a list of them, got {type(entry).__name__}"
            )
        texts.append(str(entry))
    answers = [(_boxed(text) or _after_hashes(text) or text).strip() for text in texts]
    if not answers or not all(answers):
        raise ValueError("the label is empty")
    return answers


def find_answer(response: str, *, unmarked: bool = True) -> str | None:
    r"""Return the final answer of a response, or ``None``.

    Only the text after the last ``</think>`` counts (none of it if thinking has not ended), and in it only the last
    ``<answer>…</answer>`` if there is one. The first of these is taken: the last closed ``\boxed{…}``, or several in a
    row as one answer of several parts; the line after the last ``####``; what follows the last "answer is", "answer:"
    or "answer ="; the whole ``<answer>``; if ``unmarked``, the last formula or number.
    """
    text = after_thinking(response)
    if text is None:
        return None
    tags = _ANSWER_TAG.findall(text)
    text = _EMPTY_BOX.sub(" ", tags[-1] if tags else text)
    answer = (
        _boxed(text)
        or _after_hashes(text)
        or _after_phrase(text)
        or (text.strip() if tags else None)
    )
    return answer or (_last_formula_or_number(text) if unmarked else None) or None


def _boxed(text: str) -> str | None:
    closing: dict[int, int] = {}  # position of each opening brace → position of its closing brace
    opened: list[int] = []
    for match in _BRACE.finditer(text) if "box" in text else ():  # escaped braces are text
        if match.group() == "{":
            opened.append(match.start())
        elif match.group() == "}" and opened:
            closing[opened.pop()] = match.start()
    boxes: list[tuple[int, int, str]] = []
    position = 0
    while match := _BOX.search(text, position):
        position = match.end()
        if position in closing:
            end = closing[position] + 1
            boxes.append((match.start(), end, text[position + 1 : end - 1].strip()))
            position = end
        elif bare := _BARE_BOX.match(text, position):
            boxes.append((match.start(), bare.end(), bare.group()))
            position = bare.end()
    if not boxes:
        return None
    parts = [boxes[-1][2]]
    for (_, end, content), (start, _, _) in zip(boxes[-2::-1], boxes[:0:-1]):
        if start - end > _LONGEST_JOINT or not _BETWEEN_BOXES.fullmatch(text, end, start):
            break
        parts.insert(0, content)
    return ", ".join(dict.fromkeys(parts))


def _after_hashes(text: str) -> str | None:
    _, marker, tail = text.rpartition("####")
    line = next((line.strip() for line in tail.splitlines() if line.strip()), "") if marker else ""
    return line.lstrip(":").strip(" *") or None


def _after_phrase(text: str) -> str | None:
    """What follows "the answer is": a formula at once, else its last one before a reason, its number, or all of it."""
    tail = None
    for match in _ANSWER_IS.finditer(text):
        tail = text[match.end() :]
    if tail is None:
        return None
    sentence = _SENTENCE_END.split(tail, maxsplit=1)[0].strip(" *\"'`")
    formulas = [
        _FORMULA.match(tail),
        *reversed([*_FORMULA.finditer(_REASON.split(sentence, maxsplit=1)[0])]),
    ]
    formula = next(filter(None, [*formulas, *reversed([*_FORMULA.finditer(sentence)])]), None)
    if formula:
        value = _IS_NUMBER.match(formula.string, formula.end())
        if value and _content(formula).isalpha():
            return value["number"]
        return _content(formula)
    number = _NUMBER_IN_TEXT.match(sentence)
    if number is None or _NUMBER_NEXT.match(sentence, number.end()):
        return sentence or None
    behind = _WORD_NEXT.match(sentence, number.end())
    is_number = behind and (behind["word"] or "").lower() not in NO_UNITS
    if is_number and as_number(sentence) is None:
        return number.group()
    return sentence


def _last_formula_or_number(text: str) -> str | None:
    if _BOX.search(text):  # the response was cut off inside the box
        return None
    formulas = list(_FORMULA.finditer(text))
    numbers = list(_NUMBER_IN_TEXT.finditer(text))
    if formulas and (not numbers or numbers[-1].start() < formulas[-1].end()):
        return _EQUALS.split(_content(formulas[-1]))[-1].strip() or None
    return numbers[-1].group() if numbers else None


def _content(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None).strip()
