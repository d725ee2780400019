"""Rewards for mathematical answers: 1 if the response's final answer equals the label, else 0.

Where answers stand in texts. Whether two are equal, :mod:`lightppo.verifiers.math_equality` tells: numbers and equal
texts at once, the rest in worker processes that are killed at their limit.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from lightppo.data.records import Prompt, Rollout
from lightppo.errors import RewardError
from lightppo.processes.killable_pool import KillablePool
from lightppo.rewards.function import NO_LABELS, OnFailure, check_failure_options, settle
from lightppo.rewards.reward_source import RewardOutput, describe_sample
from lightppo.user_code import UserCall
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


def check_prompt(prompt: Prompt) -> list[str]:
    """Return the right answers of a row; ValueError if it has no label, or one that is no answer."""
    if prompt.label is None:
        raise ValueError(NO_LABELS)
    return gold_answers(prompt.label)


@dataclass(eq=False)
class MathReward:
    """Scores a response by its final answer (see :func:`find_answer`); without an answer it is wrong.

    A comparison that runs into a limit or kills its worker never becomes a score. Metrics per sample: ``answered`` (1
    if an answer was found), ``failures`` (failed tries) and ``timeouts``; the answer is the text ``pred``.
    """

    minimum: ClassVar[float] = 0.0
    per_sample: ClassVar[bool] = True

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
        self._pool = KillablePool(
            f"{equal.__module__}:{equal.__name__}",
            cpu_seconds=seconds,
            timeout=_CLOCK * seconds,
            memory_mb=_MEMORY_MB,
            workers=self.reward_workers,
            preload=(_LIBRARY,),
            quiet=True,
        )

    def score(self, rollouts: list[Rollout]) -> RewardOutput:
        """Score the samples; each different pair of label and answer is compared once."""
        answers = [
            find_answer(self.thinking.shown(rollout), unmarked=self.math_unmarked)
            for rollout in rollouts
        ]
        pairs = []  # of each sample: its labels with its answer
        for i, answer in enumerate(answers):
            golds = self._golds(rollouts, i)
            pairs.append([(gold, answer) for gold in golds if answer is not None])
        verdicts = {pair: compare(*pair) for pair in itertools.chain(*pairs)}
        is_right = [any(verdicts[pair] for pair in sample_pairs) for sample_pairs in pairs]
        unknown = [
            [pair for pair in sample_pairs if verdicts[pair] is None and not right]
            for sample_pairs, right in zip(pairs, is_right)
        ]
        calls = {pair: UserCall(pair) for pair in itertools.chain(*unknown)}
        results = settle(self._pool.run, list(calls.values()), _read_verdict, self.reward_retries)
        results = dict(zip(calls, results))
        texts = {"pred": [answer and tidy(answer) for answer in answers]}
        output = RewardOutput([], {"answered": [], "failures": [], "timeouts": []}, texts=texts)
        for i, sample_pairs in enumerate(unknown):
            comparisons = [results[pair] for pair in sample_pairs]
            right = is_right[i] or any(comparison.value for comparison in comparisons)
            errors = [each.error for each in comparisons if each.error is not None]
            score = float(right)
            if errors and not right:
                score = None
                if self.on_reward_failure == "error":
                    raise RewardError(
                        f"{self.name}: comparing the answer of {describe_sample(rollouts, i)} failed: {errors[0]}. "
                        "Raise --reward_timeout, or set --on_reward_failure unscored"
                    )
            output.scores.append(score)
            output.metrics["answered"].append(float(answers[i] is not None))
            output.metrics["failures"].append(float(sum(each.failures for each in comparisons)))
            output.metrics["timeouts"].append(float(sum(each.timeouts for each in comparisons)))
        return output

    def close(self) -> None:
        """End the worker processes; they also end with this object and with the program."""
        self._pool.close()

    def _golds(self, rollouts: list[Rollout], i: int) -> list[str]:
        try:
            return check_prompt(rollouts[i].prompt)
        except ValueError as error:
            raise RewardError(f"{self.name}: {describe_sample(rollouts, i)}: {error}") from None


def _read_verdict(_: int, verdict: Any) -> tuple[Any, str | None]:
    if isinstance(verdict, bool):
        return verdict, None
    return None, f"the worker answered {verdict!r}"


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
    for entry in label if isinstance(label, list | tuple) else [label]:
        if isinstance(entry, bool) or not isinstance(entry, str | int | float):
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
    if tags:
        text = tags[-1]
    text = _EMPTY_BOX.sub(" ", text)
    answer = _boxed(text) or _after_hashes(text) or _after_phrase(text)
    if not answer and tags:
        answer = text.strip()
    if not answer and unmarked:
        answer = _last_formula_or_number(text)
    return answer or None


def _boxed(response: str) -> str | None:
    if "box" not in response:
        return None
    closings: dict[int, int] = {}  # position of each opening brace → position of its closing brace
    opened: list[int] = []
    for brace in _BRACE.finditer(response):  # escaped braces are text
        if brace.group() == "{":
            opened.append(brace.start())
        elif brace.group() == "}" and opened:
            closings[opened.pop()] = brace.start()
    boxes: list[tuple[int, int, str]] = []
    position = 0
    while command := _BOX.search(response, position):
        position = command.end()
        if position in closings:
            content = response[position + 1 : closings[position]].strip()
            position = closings[position] + 1
        elif bare := _BARE_BOX.match(response, position):
            content = bare.group()
            position = bare.end()
        else:
            continue
        boxes.append((command.start(), position, content))
    if not boxes:
        return None
    contents = [boxes[-1][2]]
    for (_, end, content), (start, _, _) in zip(boxes[-2::-1], boxes[:0:-1]):
        if start - end > _LONGEST_JOINT or not _BETWEEN_BOXES.fullmatch(response, end, start):
            break
        contents.insert(0, content)
    return ", ".join(dict.fromkeys(contents))


def _after_hashes(response: str) -> str | None:
    _, marker, answer_lines = response.rpartition("####")
    lines = [line.strip() for line in answer_lines.splitlines() if line.strip()]
    if not marker or not lines:
        return None
    return lines[0].lstrip(":").strip(" *") or None


def _after_phrase(response: str) -> str | None:
    """Return what follows "the answer is": a formula at once, else its last one before a reason, its number, or all."""
    phrases = list(_ANSWER_IS.finditer(response))
    if not phrases:
        return None
    answer_part = response[phrases[-1].end() :]
    sentence = _SENTENCE_END.split(answer_part, maxsplit=1)[0].strip(" *\"'`")
    before_reason = _REASON.split(sentence, maxsplit=1)[0]
    formula = _FORMULA.match(answer_part) or _last_formula(before_reason) or _last_formula(sentence)
    if formula:
        assigned_number = _IS_NUMBER.match(formula.string, formula.end())
        if assigned_number and _content(formula).isalpha():
            return assigned_number["number"]
        return _content(formula)
    number = _NUMBER_IN_TEXT.match(sentence)
    if number is None or _NUMBER_NEXT.match(sentence, number.end()):
        return sentence or None
    following = _WORD_NEXT.match(sentence, number.end())
    is_number = following and (following["word"] or "").lower() not in NO_UNITS
    if is_number and as_number(sentence) is None:
        return number.group()
    return sentence


def _last_formula_or_number(response: str) -> str | None:
    if _BOX.search(response):  # the response was cut off inside the box
        return None
    formula = _last_formula(response)
    numbers = list(_NUMBER_IN_TEXT.finditer(response))
    if formula and (not numbers or numbers[-1].start() < formula.end()):
        return _EQUALS.split(_content(formula))[-1].strip()
    if numbers:
        return numbers[-1].group()
    return None


def _last_formula(passage: str) -> re.Match[str] | None:
    formulas = list(_FORMULA.finditer(passage))
    if formulas:
        return formulas[-1]
    return None


def _content(formula: re.Match[str]) -> str:
    return next(group for group in formula.groups() if group is not None).strip()
