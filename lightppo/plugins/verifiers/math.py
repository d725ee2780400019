"""Rewards for mathematical answers: 1 if the response's final answer equals the label, else 0.

:func:`compare` decides at once on numbers and equal texts; math-verify compares the rest in worker processes that are
killed at their limit.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar

from lightppo.data.records import Prompt, Rollout
from lightppo.errors import RewardError
from lightppo.plugins.reward_sources.function_calls import NO_LABELS
from lightppo.plugins.reward_sources.tries import (
    Call,
    OnFailure,
    check_failure_options,
    settle,
)
from lightppo.plugins.verifiers.processes import KillablePool
from lightppo.rewards.source import RewardOutput, describe_sample

if TYPE_CHECKING:
    from lightppo.rewards.registry import RewardRequest

_LIBRARY = "math_verify"
_MEMORY_MB = 2048
_TIMEOUT = 5.0  # seconds of processor time; comparisons that end at all take milliseconds
# So many times as many seconds on the wall clock: a busy machine does not reach them, but a comparison that sleeps does.
_CLOCK = 20


def math_reward(request: RewardRequest) -> MathReward:
    """``--reward_source math``."""
    return MathReward(**request.options_of(MathReward))


def check_prompt(prompt: Prompt) -> None:
    """ValueError for a row without a label, or with one that is no answer."""
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

    def __post_init__(self) -> None:
        check_failure_options(self.on_reward_failure, self.reward_retries, self.reward_timeout)
        if importlib.util.find_spec(_LIBRARY) is None:
            raise ValueError(
                "rewards for mathematics need math-verify: pip install 'lightppo[math]'"
            )
        seconds = _TIMEOUT if self.reward_timeout is None else self.reward_timeout
        limits = {"cpu_seconds": seconds, "timeout": _CLOCK * seconds, "memory_mb": _MEMORY_MB}
        options = limits | {"workers": self.reward_workers}
        self._pool = KillablePool(
            f"{__name__}:equal_by_library", **options, preload=(_LIBRARY,), quiet=True
        )

    def score(self, rollouts: list[Rollout]) -> RewardOutput:
        """Scores the samples; each different pair of label and answer is compared once."""
        golds = [self._golds(rollouts, i) for i in range(len(rollouts))]
        answers = [
            find_answer(rollout.response_text, unmarked=self.math_unmarked) for rollout in rollouts
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
        asked = list(dict.fromkeys(pair for row in unknown for pair in row))
        settled = dict(
            zip(
                asked,
                settle(self._pool.run, [Call(pair) for pair in asked], _read, self.reward_retries),
            )
        )
        found = {"pred": [answer and tidy(answer) for answer in answers]}
        output = RewardOutput([], {"answered": [], "failures": [], "timeouts": []}, texts=found)
        for i, row in enumerate(unknown):
            states = [settled[pair] for pair in row]
            equal = right[i] or any(state.value for state in states)
            problem = (
                None
                if equal
                else next((state.error for state in states if state.error is not None), None)
            )
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
        """Ends the worker processes; they also end with this object and with the program."""
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
    return (value, None) if isinstance(value, bool) else (None, f"the worker answered {value!r}")


def equal_by_library(gold: str, answer: str) -> bool:
    """Whether math-verify finds two answers equal; runs in a worker process, where only a kill limits it."""
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy import Basic, I, MatrixBase
    from sympy.core.relational import Relational

    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)

    latex = LatexExtractionConfig()

    def parsed(text: str, units: bool) -> list[Any]:
        # Always as LaTeX, because the plain form goes through sympy's parse_expr, which evaluates Python.
        config = replace(
            latex, normalization_config=replace(latex.normalization_config, units=units)
        )
        found = parse(f"${tidy(text)}$", (config,), parsing_timeout=None)
        return [
            imaginary(expression)
            for expression in found
            if isinstance(expression, (Basic, MatrixBase))
        ]

    def imaginary(expression: Any) -> Any:
        """Reads ``i`` as ``I``, unless it is compared: complex numbers have no order."""
        units = {symbol: I for symbol in expression.free_symbols if symbol.name == "i"}
        return (
            expression.xreplace(units) if units and not expression.has(Relational) else expression
        )

    try:
        # With units, the library drops letters: ab of 2ab, h of 2πrh.
        pairs = [(parsed(gold, units), parsed(answer, units)) for units in (True, False)]
        pairs = pairs[:1] if pairs[0] == pairs[1] else pairs
        return any(verify(*pair, timeout_seconds=None, raise_on_error=True) for pair in pairs)
    except (MemoryError, RecursionError):
        raise
    except Exception:  # kinds that cannot be compared, e.g. a number and a matrix
        return False


# Final answers in texts: where they stand, and which are equal without any algebra.

# a decimal with so many significant digits may stand for the number it is rounded from
_MIN_DIGITS = 6
_FLOAT_DIGITS = 15  # of a double

# Every pattern runs in the trainer on texts that a model wrote: nothing that may overlap repeats without bound.
_BOX = re.compile(r"\\(?:boxed|fbox)\s{0,3}")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BARE_BOX = re.compile(r"[^\s${}\\]{1,50}")
_EMPTY_BOX = re.compile(r"\\(?:boxed|fbox)\s{0,3}\{[\s~]{0,9}\}")
_SPACING = r"(?:\\(?:q?quad(?![a-zA-Z])|[,;:! ])|~)"
_BETWEEN_BOXES = re.compile(  # a comma, "and" or a spacing command, and what is nothing
    rf"(?=[\s\S]*?(?:[,;]|and|or|{_SPACING}))(?:[\s$,;]|\\[()\[\]]|{_SPACING}|(?:\\text\{{ ?)?(?:and|or)(?: ?\}})?)+"
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

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d*)?|\.\d+)"
_SIGN = r"[-+]?\s*"
_MULTIPLIERS = {
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
# fmt: off
_NO_UNITS = frozenset((
    "and", "or", "pi", "sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "mod", "max", "min", "sqrt", "dozen",
    "squared", "cubed", "factorial", "halves", "thirds", "fourths", "fifths", "infinity", "alpha", "beta", "theta",
    "lambda", *_MULTIPLIERS,
))
_SHORT_UNITS = frozenset((
    "cm", "mm", "km", "kg", "mg", "lb", "lbs", "oz", "ft", "in", "hr", "hrs", "mins", "ml", "kb", "mb", "gb", "mph",
    "kph", "sq",
))
# fmt: on
_NUMBER_IN_TEXT = re.compile(rf"(?<![\w.])-?[$€£¥]?{_DECIMAL}(?: ?/ ?\d+)?(?: ?\\?%)?")
# the largest $n$ is 34
_IS_NUMBER = re.compile(rf" (?:is|are|equals|=) (?P<number>{_NUMBER_IN_TEXT.pattern})")
_WORD_NEXT = re.compile(r" {1,2}(?P<word>[a-z]{2,})|[.,;:]?$", re.I)
_EQUALS = re.compile(r"(?<![<>])(?<![^\d)]!)(?<!\\not)=")  # x <= 2 is not 2; 3!=6 is 6
_NUMBER_NEXT = re.compile(r" ?(?:,|and|or|to) ?[-$]{0,2}\d")
_NUMBER = re.compile(
    rf"""(?P<sign>{_SIGN})[$€£¥]?\s*(?P<sign2>{_SIGN})
    (?:
      (?P<whole>\d+)?\s*\\frac\s*(?:\{{\s*(?P<num>-?{_DIGITS})\s*\}}\s*\{{\s*(?P<den>{_DIGITS})\s*\}}|(?P<n1>\d)\s*(?P<d1>\d))
      | (?:(?P<whole2>\d+)\s+)?(?P<num2>{_DIGITS})\s*/\s*(?P<den2>{_DIGITS})
      | (?P<decimal>{_DECIMAL})(?:(?:[eE]|\s*(?:\\times|\\cdot|\*|×)\s*10\s*\^)\s*\{{?(?P<exponent>[-+]?\d{{1,3}})\}}?)?
    )
    (?P<tail>.*)""",
    re.VERBOSE | re.DOTALL,
)
_NUMERAL = re.compile(
    r"\(?(?P<digits>(?=[A-Z]*\d)[\dA-Z]+(?:\.[\dA-Z]+)?)\)?(?:_\{?\(?(?P<base>\d{1,2})\)?\}?)?"
)
_RELATION = re.compile(r"\\(?:[lg]eq?(?:slant)?|lt|gt|neq?)(?![A-Za-z])|[≤≥≠]|<|(?<![-=])>")
_LONGEST_NUMBER = 200  # characters; a longer text is not a number that a question asks for
_UNIT_TEXT = re.compile(
    r"\\(?:text|textrm|mathrm|mbox|rm)\s*\{\s*([^{}\d]*?)\s*\}\s*(?:\^\s*\{?\s*-?\d\s*\}?)?"
)
_WORD = r"[A-Za-z]{2,}(?![A-Za-z])\.?(?:\s*\^\s*\{?[23]\}?|[²³])?"
_UNIT = re.compile(rf"(?:/\s*)?{_WORD}(?:(?:\s*/\s*|\s+){_WORD})*")
_PERCENT = re.compile(r"(?:\\?%|percent(?:age)?\b|per\s+cent\b)\s*", re.I)

_REPLACED = [  # a backslash before another is the end of a matrix row
    (re.compile(r"(?<=\d)(?:,\s?\\!\s?|\\!,|\\,)(?=\d{3}(?!\d))"), ","),  # thousands
    (re.compile(rf"(?<!\\)(?:\\(?:left|right|displaystyle)(?![a-zA-Z])|{_SPACING})"), " "),
    (re.compile(r"\\[dt]frac"), r"\\frac"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\^ ?(?:\\circ|\{ ?\\circ ?\})|°"), ""),
    (re.compile(r"\\?\$|(?<!\\)\\[()[\]]"), ""),
    (re.compile(r"[−–]"), "-"),
    # Python's power; at the ends it is bold type
    (re.compile(r"(?<=[\w)}])\*\*(-?\w+)"), r"^{\1}"),
    (re.compile(r"(?<=[\w)}])\*\*\("), r"^("),
    (re.compile(r"(?:\*\*|\s)+"), " "),
]
_TEXT_COMMAND = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}"
)


def gold_answers(label: object) -> list[str]:
    """The right answers: one per entry of a list, each the whole text or a worked solution's final answer."""
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
    r"""The final answer of a response, or ``None``.

    Only the text after the last ``</think>`` counts (none of it if thinking has not ended), and in it only the last
    ``<answer>…</answer>`` if there is one. The first of these is taken: the last closed ``\boxed{…}``, or several in a
    row as one answer of several parts; the line after the last ``####``; what follows the last "answer is", "answer:"
    or "answer ="; the whole ``<answer>``; if ``unmarked``, the last formula or number.
    """
    start, end = response.rfind("<think>"), response.rfind("</think>")
    if start > end:
        return None
    text = response[end + len("</think>") :] if end >= 0 else response
    tags = _ANSWER_TAG.findall(text)
    text = _EMPTY_BOX.sub(" ", tags[-1] if tags else text)
    found = (
        _boxed(text)
        or _after_hashes(text)
        or _after_phrase(text)
        or (text.strip() if tags else None)
    )
    return found or (_last_formula_or_number(text) if unmarked else None) or None


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
    return line.strip(" *") or None


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
        return value["number"] if value and _content(formula).isalpha() else _content(formula)
    number = _NUMBER_IN_TEXT.match(sentence)
    if number is None or _NUMBER_NEXT.match(sentence, number.end()):
        return sentence or None
    behind = _WORD_NEXT.match(sentence, number.end())
    is_number = behind and (behind["word"] or "").lower() not in _NO_UNITS
    return number.group() if is_number and as_number(sentence) is None else sentence


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


@dataclass(frozen=True, slots=True)
class Number:
    """A number as it is written."""

    value: Fraction
    decimals: int | None  # digits after the decimal point; None for a fraction
    digits: int  # significant digits of a decimal
    percent: bool  # a percent sign follows

    def stands_for(self, other: Number) -> bool:
        """True if this is a decimal with at least 6 significant digits and ``other`` rounds to it."""
        if not self.decimals or self.digits < _MIN_DIGITS:
            return False
        error = abs(self.value - other.value)
        # 0.30000000000000004
        noise = self.digits >= _FLOAT_DIGITS and error * 10**12 <= abs(other.value)
        return error * 10**self.decimals <= Fraction(1, 2) or noise


def tidy(answer: str) -> str:
    """The answer without parts that never change its meaning: math mode, spacing commands, a full stop."""
    for pattern, replacement in _REPLACED:
        answer = pattern.sub(replacement, answer)
    return answer.strip().rstrip(".").strip()


def as_number(answer: str) -> Number | None:
    """Reads an answer that is one number in any notation, with currency, percent sign or unit (dropped); else None."""
    text = re.sub(r"^\\?[A-Za-z]\w*\s*=\s*", "", tidy(answer))
    match = (
        _NUMBER.fullmatch(_UNIT_TEXT.sub(_unit_or_text, text))
        if len(text) <= _LONGEST_NUMBER
        else None
    )
    if match is None:
        return None
    part = match.groupdict()
    decimals, digits = None, 0
    numerator, denominator = (
        part["num"] or part["n1"] or part["num2"],
        part["den"] or part["d1"] or part["den2"],
    )
    if numerator is not None:
        numerator, denominator = (
            int(digits.replace(",", "")) for digits in (numerator, denominator)
        )
        if denominator == 0:
            return None
        value = Fraction(numerator, denominator) + int(part["whole"] or part["whole2"] or 0)
    else:
        plain = part["decimal"].replace(",", "")
        exponent = int(part["exponent"] or 0)
        decimals = max(len(plain.partition(".")[2]) - exponent, 0)
        digits = len(plain.replace(".", "").lstrip("0"))
        value = Fraction(plain.rstrip(".")) * Fraction(10) ** exponent
    if (part["sign"] + part["sign2"]).count("-") == 1:
        value = -value
    tail = _tail(part["tail"])
    return None if tail is None else Number(value * tail[0], decimals, digits, tail[1])


def _unit_or_text(match: re.Match[str]) -> str:
    r"""Replaces ``\text{…}`` behind a number by a unit that _tail knows, or keeps its words if they are not a unit."""
    words = match.group(1).lower().split()
    return (
        f" {match.group(1)} "
        if any(w in _NO_UNITS or w in _MULTIPLIERS or "%" in w for w in words)
        else " unit "
    )


def _tail(text: str) -> tuple[int, bool] | None:
    """Reads a multiplier, percent sign or unit behind a number: (factor, percent sign?), None for anything else."""
    if percent := _PERCENT.match(text.lstrip()):
        return None if percent.string[percent.end() :].strip() else (1, True)
    factor = 1
    attached = text[:1].isalpha()  # 5xy is a product, 5cm is not
    head, _, rest = text.strip().partition(" ")
    if head.lower() in _MULTIPLIERS:
        factor, text, attached = _MULTIPLIERS[head.lower()], rest, False
    text = text.strip()
    words = [word.lower() for word in re.findall(r"[A-Za-z]+", text)]
    known = [
        word in _SHORT_UNITS or (len(word) > 2 and not set("aeiou").isdisjoint(word))
        for word in words
    ]
    is_unit = _UNIT.fullmatch(text) and not _NO_UNITS.intersection(words) and all(known)
    return (
        (factor, False)
        if not text or (is_unit and (not attached or words[0] in _SHORT_UNITS))
        else None
    )


def compare(gold: str, answer: str) -> bool | None:
    """Whether two answers are equal; ``None`` if telling takes algebra."""
    a, b = as_number(gold), as_number(answer)
    if a is not None and b is not None:
        return same_number(a, b)
    numerals = [
        _NUMERAL.fullmatch(re.sub(r"^[A-Za-z]=", "", _squeezed(text))) for text in (gold, answer)
    ]
    bases = {numeral["base"] for numeral in numerals if numeral} - {None}
    if all(numerals) and bases:  # not by value: 9 is not 1001_2 where base 2 was asked for
        return len({numeral["digits"] for numeral in numerals if numeral}) == len(bases) == 1
    if (a or b) and _RELATION.search(answer if a else gold):
        return False
    return True if _squeezed(gold) == _squeezed(answer) else None


def same_number(a: Number, b: Number) -> bool:
    """Whether two numbers are equal; a percent sign that only one has may be a unit or a division by 100."""
    if a.percent != b.percent:
        plain, percent = (b, a) if a.percent else (a, b)
        return plain.value in (percent.value, percent.value / 100)
    return a.value == b.value or a.stands_for(b) or b.stands_for(a)


def _squeezed(answer: str) -> str:
    text = _TEXT_COMMAND.sub(r"\1", tidy(answer)).replace(" ", "")
    text = re.sub(r"^\(([A-Za-z])\)$", r"\1", text)  # (A): a choice
    return text.casefold() if text.isalpha() else text
