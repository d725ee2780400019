"""Options of the tape; docs/environments.md."""

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

from lightppo.option import Section, option

outside = partial(option, needs="env or tools or server or function", resume_safe=True)


class TapeConfig(Section):
    """The tape: replies from outside, written down."""

    tape: Literal["auto", "all", "off"] = outside(
        "auto",
        "Replies that --save_path/tape keeps. auto: of environments, tools and reward servers; all: of reward "
        "functions, too.",
    )
    tape_from: str | None = outside(
        None,
        "Folder of a run whose tape answers in place of environments, tools, reward servers and functions. None of "
        "them is loaded or asked.",
    )

    @staticmethod
    def problems(options: Any) -> Iterator[str]:
        if options.tape_from is None:
            return
        if options.tape != "auto":
            yield f"--tape_from plays a tape and writes none: leave --tape {options.tape} out"
        if options.dry_run:
            yield "--dry_run samples other prompts than --tape_from has: leave one of them out"
