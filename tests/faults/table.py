"""What a run does when a fault meets it at a phase: the table behind the tests and behind docs/faults.md.

``python tests/faults/table.py`` writes the page's table anew (``make docs``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
PHASES = ("generation", "scoring", "training", "sync", "saving", "loading")
MARKS = ("<!-- matrix -->", "<!-- end of matrix -->")

WAIT = 15.0  # seconds of --dist_timeout where a rank is waited for
GRACE = 30.0  # seconds more until all ranks are gone


@dataclass(frozen=True)
class Ends:
    """The run ends ``within`` seconds with what matches ``says``; started again, it is the undisturbed run."""

    text: str
    says: str
    within: float = GRACE


@dataclass(frozen=True)
class GoesOn:
    """The run comes to its end, and is the undisturbed run; or ``counted``, a metric that is then 1 in that step."""

    text: str = "goes on"
    counted: str | None = None


@dataclass(frozen=True)
class Cannot:
    """There is no such cell."""

    why: str


Outcome = Ends | GoesOn | Cannot


@dataclass(frozen=True)
class Fault:
    """A row: the outcome at every phase, but for the phases in ``at``."""

    name: str
    outcome: Outcome
    at: dict[str, Outcome] = field(default_factory=dict)
    needs: str | None = None  # reward server, vLLM server, disk, network: what the run has besides

    def cells(self) -> dict[str, Outcome]:
        return {phase: self.at.get(phase, self.outcome) for phase in PHASES}


DIED = Ends("ends at once; goes on when started again", "")
HUNG = Ends("ends after `--dist_timeout`", r"(?i)timed out|dist_timeout", within=WAIT + GRACE)
NO_ROOM = Ends(
    "ends at the next write, which names the path",
    r"No space left|cannot be written|free",
    within=60,
)
NOTHING_COMPUTED = Cannot("nothing is computed")

FAULTS = (
    Fault("SIGKILL", DIED),
    Fault("SIGSTOP", HUNG),
    Fault("exception", Ends("ends with the traceback", "RuntimeError: injected")),
    Fault("os._exit", DIED),
    Fault("out of memory", Ends("ends with the allocator's error", "can't allocate memory")),
    Fault("slow rank", GoesOn("goes on: the others wait, up to `--dist_timeout`")),
    Fault(
        "dead reward server",
        Ends(
            "ends when it is asked next, after `--remote_rm_retries`",
            r"reward server|remote_rm_url",
            within=60,
        ),
        at={
            "saving": Ends(
                "ends in the next step's scoring", r"reward server|remote_rm_url", within=60
            )
        },
        needs="reward server",
    ),
    Fault(
        "dead vLLM server",
        Ends(
            "ends when it is asked next, after `--vllm_server_retries`",
            r"vLLM|vllm_server",
            within=60,
        ),
        needs="vLLM server",
    ),
    Fault("full disk", NO_ROOM, needs="disk"),
    Fault(
        "NaN",
        NOTHING_COMPUTED,
        at={
            "generation": Ends("ends: no token can be drawn", "no token can be drawn"),
            "scoring": GoesOn(
                "the step is left out on all ranks and counted", counted="train/actor_skipped"
            ),
            "training": GoesOn(
                "the step is skipped on all ranks and counted", counted="train/actor_skipped"
            ),
            "saving": Ends(
                "ends: weights that are not finite take no good checkpoint's place",
                "are not finite",
            ),
        },
    ),
    Fault("lost network", HUNG, needs="network"),
    Fault("clock jump", GoesOn()),
)


def as_markdown() -> str:
    """Rows are faults, columns phases; neighbours with the same outcome are written once."""
    lines = [f"fault | {' | '.join(PHASES)}", "|".join(["---"] * (len(PHASES) + 1))]
    for fault in FAULTS:
        texts = [
            cell.why if isinstance(cell, Cannot) else cell.text for cell in fault.cells().values()
        ]
        shown = ["″" if i and text == texts[i - 1] else text for i, text in enumerate(texts)]
        lines.append(f"{fault.name} | {' | '.join(shown)}")
    return "\n".join(lines)


def page_with_table(page: str) -> str:
    """The page with the table between its marks."""
    before, _, rest = page.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    return f"{before}{MARKS[0]}\n{as_markdown()}\n{MARKS[1]}{after}"


if __name__ == "__main__":
    PAGE.write_text(page_with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
