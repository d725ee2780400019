"""Numbers in answers, and what can be told of two answers without algebra."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from lightppo.verifiers.math_notation import (
    MULTIPLIERS,
    NO_UNITS,
    exclude_each_other,
    is_unit,
    tidy,
    words_in,
)

# a decimal with so many significant digits may stand for the number it is rounded from
_MIN_DIGITS = 6
_FLOAT_DIGITS = 15  # of a double
_LONGEST_NUMBER = 200  # characters; a longer text is not a number that a question asks for
# Every pattern runs in the trainer on texts that a model wrote: nothing that may overlap repeats without bound.
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?:[ ]\d{3})+(?![\d/])|\d+)"
DECIMAL = rf"(?:{_DIGITS}(?:\.\d*)?|\.\d+)"
_SIGN = r"[-+]?\s*"
_NUMBER = re.compile(
    rf"""(?P<sign>{_SIGN})(?P<money>[$€£¥]?)\s*(?P<sign2>{_SIGN})
    (?:
      (?P<whole>\d+)?\s*\\frac\s*(?:\{{\s*(?P<num>-?{_DIGITS})\s*\}}\s*\{{\s*(?P<den>{_DIGITS})\s*\}}|(?P<n1>\d)\s*(?P<d1>\d))
      | (?:(?P<whole2>\d+)\s+)?(?P<num2>{_DIGITS})\s*/\s*(?P<den2>{_DIGITS})
      | (?P<decimal>{DECIMAL})(?:(?:[eE]|\s*(?:\\times|\\cdot|\*|×)\s*10\s*\^)\s*\{{?(?P<exponent>[-+]?\d{{1,3}})\}}?)?
    )
    (?P<tail>.*)""",
    re.VERBOSE | re.DOTALL,
)
_UNIT_COMMAND = re.compile(
    r"\\(?:text|textrm|mathrm|mbox|rm)\s*\{\s*([^{}\d]*?)\s*\}\s*(\^\s*\{?\s*-?\d\s*\}?)?"
)
_WORD = r"[A-Za-z]{2,}(?![A-Za-z])\.?(?:\s*\^\s*\{?-?\d\}?|[²³])?"
_UNIT = re.compile(rf"(?:/\s*)?{_WORD}(?:(?:\s*/\s*|\s+){_WORD})*")
_PERCENT = re.compile(r"(?:\\?%|percent(?:age)?\b|per\s+cent\b|pct\b)\s*", re.I)
_TEXT_COMMAND = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}"
)
_NUMERAL = re.compile(
    r"\(?(?P<digits>(?=[A-Z]*\d)[\dA-Z]+(?:\.[\dA-Z]+)?)\)?(?:_\{?\(?(?P<base>\d{1,2})\)?\}?)?"
)
_ORDINAL = re.compile(  # 1st, 17^{\text{th}}
    r"(?<=\d)\s?(?:\^\s?)?\{?\s?(?:\\(?:text|textrm|mathrm)\s?)?\{?(?:st|nd|rd|th)\}{0,2}$"
)
_LABEL = re.compile(r"^\\?[A-Za-z]\w*\s*=\s*")
_DAYTIME = re.compile(r"(?<![A-Za-z])([aApP])\.? ?[mM]\.?(?![A-Za-z])")  # a.m.


@dataclass(frozen=True, slots=True)
class Number:
    """A number as it is written."""

    value: Fraction
    decimals: int | None = None  # digits after the decimal point; None for a fraction
    digits: int = 0  # significant digits of a decimal
    percent: bool = False  # a percent sign follows
    words: tuple[str, ...] = ()  # its unit

    @property
    def may_be_rounded(self) -> bool:
        return bool(self.decimals) and self.digits >= _MIN_DIGITS

    def stands_for(self, value: Fraction) -> bool:
        """Tell whether this is a decimal with at least 6 significant digits and ``value`` rounds to it."""
        if not self.may_be_rounded:
            return False
        error = abs(self.value - value)
        # 0.30000000000000004
        is_noise = self.digits >= _FLOAT_DIGITS and error * 10**12 <= abs(value)
        return is_noise or error * 10**self.decimals <= Fraction(1, 2)


def as_number(answer: str) -> Number | None:
    """Read an answer that is one number in any notation, with currency, percent sign or unit; else None."""
    text = _ORDINAL.sub("", _LABEL.sub("", tidy(answer)))
    if len(text) > _LONGEST_NUMBER:
        return None
    match = _NUMBER.fullmatch(_UNIT_COMMAND.sub(_unit_words, text))
    if match is None:
        return None
    decimals = None
    digits = 0
    numerator = match["num"] or match["n1"] or match["num2"]
    denominator = match["den"] or match["d1"] or match["den2"]
    if numerator is not None:
        value = _fraction(match["whole"] or match["whole2"], numerator, denominator)
    else:
        decimal = re.sub("[, ]", "", match["decimal"])
        exponent = int(match["exponent"] or 0)
        decimals = max(len(decimal.partition(".")[2]) - exponent, 0)
        digits = len(decimal.replace(".", "").lstrip("0"))
        value = Fraction(decimal.rstrip(".")) * Fraction(10) ** exponent
    tail = _read_tail(match["tail"])
    if value is None or tail is None:
        return None
    if (match["sign"] + match["sign2"]).count("-") == 1:
        value = -value
    factor, percent, words = tail
    if match["money"]:
        words = (match["money"], *words)
    return Number(value * factor, decimals, digits, percent, words)


def _fraction(integer_part: str | None, numerator: str, denominator: str) -> Fraction | None:
    """Return a fraction or a mixed number; ``None`` where it is neither."""
    integer = int(integer_part or 0)
    dividend, divisor = (int(re.sub("[, ]", "", digits)) for digits in (numerator, denominator))
    if divisor == 0 or (integer and dividend >= divisor):
        return None
    return Fraction(dividend, divisor) + integer


def _unit_words(match: re.Match[str]) -> str:
    r"""Replace ``\text{…}`` behind a number by words that are read as a unit, or keep words that change the value."""
    content = _DAYTIME.sub(r"\1m", match[1])
    words = re.findall(r"[a-z]+", content.lower())
    if not NO_UNITS.isdisjoint(words) or "%" in content:
        return f" {content} "
    unit = " ".join(word for word in words if len(word) > 1)
    return f" unit {unit}{match[2] or ''} "


def _read_tail(text: str) -> tuple[int, bool, tuple[str, ...]] | None:
    """Read a multiplier, percent sign or unit behind a number: (factor, percent sign?, words), None for anything else."""
    if percent := _PERCENT.match(text.lstrip()):
        words = tuple(percent.string[percent.end() :].split())
        if all(word.isalpha() and is_unit(word) for word in words):
            return 1, True, words
        return None
    factor = 1
    currency: tuple[str, ...] = ()
    is_attached = text[:1].isalpha()  # 5xy is a product, 5cm is not
    text = text.strip()
    if text[:1] in tuple("€£¥"):
        currency = (text[0],)
        text = text[1:].strip()
    text = _DAYTIME.sub(r"\1m", text)
    multiplier, _, rest = text.partition(" ")
    if multiplier.lower() in MULTIPLIERS:
        factor = MULTIPLIERS[multiplier.lower()]
        text = rest.strip()
        is_attached = False
    if not text:
        return factor, False, currency
    words = words_in(text)
    units = [word.partition("^")[0] for word in words]
    if not _UNIT.fullmatch(text) or not NO_UNITS.isdisjoint(units):
        return None
    if not all(unit in ("unit", "a", "per") or is_unit(unit) for unit in units):
        return None
    if is_attached and not is_unit(units[0], attached=True):
        return None
    return factor, False, currency + words


def compare(gold: str, answer: str) -> bool | None:
    """Tell whether two answers are equal; ``None`` if telling takes algebra."""
    gold_number = as_number(gold)
    answer_number = as_number(answer)
    labels = {label.group() for text in (gold, answer) if (label := _LABEL.match(tidy(text)))}
    if gold_number is not None and answer_number is not None and len(labels) < 2:
        return same_number(gold_number, answer_number)
    numerals = [
        _NUMERAL.fullmatch(re.sub(r"^[A-Za-z]=", "", squeezed(text))) for text in (gold, answer)
    ]
    bases = {numeral["base"] for numeral in numerals if numeral} - {None}
    if all(numerals) and bases:  # not by value: 9 is not 1001_2 where base 2 was asked for
        return len({numeral["digits"] for numeral in numerals if numeral}) == len(bases) == 1
    if squeezed(gold) == squeezed(answer):
        return True
    return None


def same_number(gold: Number, answer: Number) -> bool:
    """Tell whether two numbers are equal; a percent sign that only one has may be a unit or a division by 100."""
    if exclude_each_other(gold.words, answer.words):
        return False
    if gold.percent and not answer.percent:
        return answer.value in (gold.value, gold.value / 100)
    if answer.percent and not gold.percent:
        return gold.value in (answer.value, answer.value / 100)
    return (
        gold.value == answer.value or gold.stands_for(answer.value) or answer.stands_for(gold.value)
    )


def squeezed(answer: str) -> str:
    """Return the text without spaces, but those between digits, and without fonts; letters alone in lower case."""
    text = _TEXT_COMMAND.sub(r"\1", tidy(answer)).replace("²", "^2").replace("³", "^3")
    text = re.sub(r"(?<![\d,]) +| +(?!\d)|(?<=,) +(?!\d{3}(?!\d))", "", text)
    text = re.sub(r"^\(([A-Za-z])\)$", r"\1", text)  # (A): a choice
    if re.sub(r"[\s.,'-]", "", text).isalpha():
        return text.casefold()
    return text
