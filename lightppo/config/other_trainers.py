"""Other trainers' options and what they are here: for the errors that meet them, and the tables of docs/migrating.md.

They are in other_trainers.txt, a part for each trainer; ``[TRL sft rm dpo]`` has what is different for these commands. A row
is ``names | what it is here``: names of one meaning with blanks between, or as many meanings as names with `` / `` between.
``*`` stands for any beginning, ``A=B`` for a value of one of our options. What is here begins with "not here", or is "="
where name and meaning are the same. Of several patterns that fit a name, one that says how the name begins wins, then
the longest.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from lightppo.plugin import trained_by

LAST_PART = "the last part of the name"


class Row(NamedTuple):
    """A row of a table."""

    names: list[str]
    texts: list[str]  # one for all names, or one for each

    def text_of(self, name: str) -> str:
        """Return what one of its names is here."""
        return self.texts[self.names.index(name) % len(self.texts)]


@functools.cache
def tables() -> dict[str, list[Row]]:
    """Return the rows of each part of other_trainers.txt, by its title: a trainer, or a trainer and commands."""
    text = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
    parts = re.split(r"^\[([\w -]+)\]\n", text, flags=re.MULTILINE)[1:]
    return {
        title: list(map(_row, lines.strip().split("\n")))
        for title, lines in zip(parts[::2], parts[1::2])
    }


def _row(line: str) -> Row:
    names, _, text = line.partition(" | ")
    return Row(names.split(), text.split(" / "))


@functools.cache
def parts_of(command: str) -> list[str]:
    """Return the titles of the parts that hold for a command, those of this command alone first."""
    command_parts = [title for title in tables() if command in title.split()[1:]]
    return [*command_parts, *(title for title in tables() if " " not in title)]


class Translation(NamedTuple):
    """What a name of another trainer is here."""

    trainer: str
    text: str


def translations(name: str, parts: Collection[str]) -> list[Translation]:
    """Return what the closest patterns in these parts say of a name; "=" where it is the same here."""
    exact = [(title, _exact(title)[name]) for title in parts if name in _exact(title)]
    if exact:
        return [Translation(title.split()[0], _text(row, name, name)) for title, row in exact]
    matches = [
        ((not pattern.startswith("*"), len(pattern)), title, _text(row, pattern, name))
        for title in parts
        for row in tables()[title]
        for pattern in row.names
        if "*" in pattern and fnmatchcase(name, pattern)
    ]
    best_closeness = max(matches, default=((),))[0]
    return [
        Translation(title.split()[0], text)
        for closeness, title, text in matches
        if closeness == best_closeness
    ]


@functools.cache
def _exact(title: str) -> dict[str, Row]:
    return {name: row for row in tables()[title] for name in row.names if "*" not in name}


def _text(row: Row, pattern: str, name: str) -> str:
    text = row.text_of(pattern)
    if text == LAST_PART:
        return f"`--{name.rpartition('.')[2]}`"
    return text


def hint(name: str, value: Any = None, flags: Collection[str] = ()) -> str:
    """Return ``": here --x (verl)"`` for a name of another trainer, or its value of our option; else an empty string.

    ``flags`` are those of the command that met the name: what other commands have is no answer there.
    """
    name = name.lstrip("+~-") if value is None else f"{name}={value}"
    parts = parts_of(_command_with(frozenset(flags)))
    command_parts = [title for title in parts if " " in title]
    answers = [
        translation
        for translation in translations(name, command_parts)
        if _is_answer(translation.text, flags)
    ]
    answers = answers or [
        translation
        for translation in translations(name, parts)
        if _is_answer(translation.text, flags)
    ]
    answers = [translation for translation in answers if translation.text != "="]
    answers = answers or _of_other_commands(translations(name, parts) if flags else [])
    trainers_of: dict[str, list[str]] = {}  # what it is here → who calls it so
    for translation in answers:
        equal_texts = (
            text for text in trainers_of if _first_flag(text) == _first_flag(translation.text) != ""
        )
        trainers_of.setdefault(next(equal_texts, translation.text), []).append(translation.trainer)
    texts = [
        f"{plain if plain.startswith('not here') else f'here {plain}'} ({', '.join(trainers)})"
        for text, trainers in trainers_of.items()
        for plain in [plain_text(text)]
    ]
    return ": " * bool(texts) + "; ".join(texts)


@functools.cache
def _command_with(flags: frozenset[str]) -> str:
    """Return the command that trains and has most of these flags: ``lightppo data`` has some of its command."""
    shared = {name: len(flags & flags_of(kind)) for name, kind in trained_by().items()}
    return max(shared, key=shared.__getitem__)


def _of_other_commands(answers: Collection[Translation]) -> list[Translation]:
    """Return meanings that this command lacks, by their flags and the commands that have these."""
    commands = {
        translation: [
            name
            for name, kind in trained_by().items()
            if _first_flag(translation.text) in flags_of(kind)
        ]
        for translation in answers
    }
    return [
        Translation(
            translation.trainer,
            f"`{_first_flag(translation.text)}` of lightppo {' and '.join(names)}",
        )
        for translation, names in commands.items()
        if names
    ]


def flags_of(kind: Any) -> set[str]:
    """Return the flags of a command, by its options."""
    return {f"--{option.name}" for option in kind.all_options()}


def _is_answer(text: str, flags: Collection[str]) -> bool:
    """Tell whether all of our options that a text names are flags of this command."""
    named_flags = {f"--{name}" for name in re.findall(r"--(?:no_)?(\w+)", text)}
    return not flags or not (named_flags & _all_flags()) - set(flags)


@functools.cache
def _all_flags() -> frozenset[str]:
    return frozenset().union(*map(flags_of, trained_by().values()))


def _first_flag(text: str) -> str:
    """Return the flag that a text begins with."""
    match = re.match(r"`(--\w+)", text)
    return match[1] if match else ""


def plain_text(text: str) -> str:
    return re.sub(r"\[(\S+?)\]\([^)\s]+\)", r"docs/\1", text).replace("`", "")


# -- docs/migrating.md -----------------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "migrating.md"


def with_tables(page: str) -> str:
    """Return the page with each table between ``<!-- TRAINER -->`` and ``<!-- end -->`` written anew."""
    return re.sub(
        r"(?s)(<!-- ([\w -]+): generated by `make docs` -->\n).*?(<!-- end -->)", _table, page
    )


def _table(markers: re.Match[str]) -> str:
    same_names = []
    lines = [f"{markers[2].split()[0]} | lightppo", "---|---"]
    for names, texts in tables()[markers[2]]:
        if texts == ["="]:
            same_names += names
        else:
            trainer_names = ", ".join(f"`{name}`".replace("*", "…") for name in names)
            meanings_here = texts[:1] if len(set(texts)) == 1 else texts
            lines.append(f"{trainer_names} | {' / '.join(meanings_here)}")
    if same_names:
        lines += ["", f"The same here: {', '.join(f'`{name}`' for name in same_names)}."]
    return markers[1] + "\n".join(lines) + "\n" + markers[3]


def write_page() -> None:
    """Write the tables of docs/migrating.md."""
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
