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
_UNIT_TEXT = re.compile(
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
        if not self.decimals or not self.may_be_rounded:
            return False
        error = abs(self.value - value)
        # 0.30000000000000004
        noise = self.digits >= _FLOAT_DIGITS and error * 10**12 <= abs(value)
        return error * 10**self.decimals <= Fraction(1, 2) or noise


def as_number(answer: str) -> Number | None:
    """Read an answer that is one number in any notation, with currency, percent sign or unit; else None."""
    text = _ORDINAL.sub("", _LABEL.sub("", tidy(answer)))
    if len(text) <= _LONGEST_NUMBER:
        match = _NUMBER.fullmatch(_UNIT_TEXT.sub(_unit_or_text, text))
    else:
        match = None
    if match is None:
        return None
    part = match.groupdict()
    decimals = None
    digits = 0
    numerator = part["num"] or part["n1"] or part["num2"]
    denominator = part["den"] or part["d1"] or part["den2"]
    if numerator is not None:
        numerator, denominator = (
            int(re.sub("[, ]", "", digits)) for digits in (numerator, denominator)
        )
        whole = int(part["whole"] or part["whole2"] or 0)
        if denominator == 0 or (whole and numerator >= denominator):
            return None
        value = Fraction(numerator, denominator) + whole
    else:
        plain = re.sub("[, ]", "", part["decimal"])
        exponent = int(part["exponent"] or 0)
        decimals = max(len(plain.partition(".")[2]) - exponent, 0)
        digits = len(plain.replace(".", "").lstrip("0"))
        value = Fraction(plain.rstrip(".")) * Fraction(10) ** exponent
    if (part["sign"] + part["sign2"]).count("-") == 1:
        value = -value
    tail = _tail(part["tail"])
    if tail is None:
        return None
    factor, percent, words = tail
    money = (part["money"],) if part["money"] else ()
    return Number(value * factor, decimals, digits, percent, money + words)


def _unit_or_text(match: re.Match[str]) -> str:
    r"""Replace ``\text{…}`` behind a number by words that _tail reads as a unit, or keep words that change the value."""
    content = re.sub(r"(?<![A-Za-z])([aApP])\.? ?[mM]\.?(?![A-Za-z])", r"\1m", match.group(1))
    words = re.findall(r"[a-z]+", content.lower())
    if any(w in NO_UNITS for w in words) or "%" in content:
        return f" {content} "
    known = " ".join(w for w in words if len(w) > 1)
    return f" unit {known}{match.group(2) or ''} "


def _tail(text: str) -> tuple[int, bool, tuple[str, ...]] | None:
    """Read a multiplier, percent sign or unit behind a number: (factor, percent sign?, words), None for anything else."""
    if percent := _PERCENT.match(text.lstrip()):
        words = percent.string[percent.end() :].split()
        plain = all(word.isalpha() and is_unit(word) for word in words)
        return (1, True, tuple(words)) if plain else None
    factor = 1
    money = ()
    attached = text[:1].isalpha()  # 5xy is a product, 5cm is not
    text = text.strip()
    if text[:1] in tuple("€£¥"):
        money = (text[0],)
        text = text[1:].strip()
    text = re.sub(r"(?<![A-Za-z])([aApP])\.? ?[mM]\.?(?![A-Za-z])", r"\1m", text)
    head, _, rest = text.partition(" ")
    if head.lower() in MULTIPLIERS:
        factor = MULTIPLIERS[head.lower()]
        text = rest.strip()
        attached = False
    if not text:
        return factor, False, money
    words = words_in(text)
    bare = [word.partition("^")[0] for word in words]
    known = all(word in ("unit", "a", "per") or is_unit(word) for word in bare)
    if not _UNIT.fullmatch(text) or NO_UNITS.intersection(bare) or not known:
        return None
    if attached and not is_unit(bare[0], attached=True):
        return None
    return factor, False, (*money, *words)


def compare(gold: str, answer: str) -> bool | None:
    """Tell whether two answers are equal; ``None`` if telling takes algebra."""
    a = as_number(gold)
    b = as_number(answer)
    labels = {match.group() for text in (gold, answer) if (match := _LABEL.match(tidy(text)))}
    if a is not None and b is not None and len(labels) < 2:
        return same_number(a, b)
    numerals = [
        _NUMERAL.fullmatch(re.sub(r"^[A-Za-z]=", "", squeezed(text))) for text in (gold, answer)
    ]
    bases = {numeral["base"] for numeral in numerals if numeral} - {None}
    if all(numerals) and bases:  # not by value: 9 is not 1001_2 where base 2 was asked for
        return len({numeral["digits"] for numeral in numerals if numeral}) == len(bases) == 1
    return True if squeezed(gold) == squeezed(answer) else None


def same_number(a: Number, b: Number) -> bool:
    """Tell whether two numbers are equal; a percent sign that only one has may be a unit or a division by 100."""
    if exclude_each_other(a.words, b.words):
        return False
    if a.percent != b.percent:
        plain, percent = (b, a) if a.percent else (a, b)
        return plain.value in (percent.value, percent.value / 100)
    return a.value == b.value or a.stands_for(b.value) or b.stands_for(a.value)


def squeezed(answer: str) -> str:
    """Return the text without spaces, but those between digits, and without fonts; letters alone in lower case."""
    text = _TEXT_COMMAND.sub(r"\1", tidy(answer)).replace("²", "^2").replace("³", "^3")
    text = re.sub(r"(?<![\d,]) +| +(?!\d)|(?<=,) +(?!\d{3}(?!\d))", "", text)
    text = re.sub(r"^\(([A-Za-z])\)$", r"\1", text)  # (A): a choice
    if re.sub(r"[\s.,'-]", "", text).isalpha():
        return text.casefold()
    return text
