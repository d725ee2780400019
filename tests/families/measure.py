"""Tries every family of docs/models.md and keeps what was seen: ``python tests/families/measure.py --store``.

Each family has a process of its own, forked from one that has the imports done, and a time limit. ``make families``
runs it twice: for vLLM, which has to be imported with its own settings, a second time.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STORED = ROOT / "docs" / "data" / "families.json"
OF_VLLM = "vLLM push"
ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
READ_BY_VLLM = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCH_COMPILE_DISABLE": "1",
}
SECONDS = 300  # of a family
VERSIONS = ("versions", "versions with vLLM")
Cell = dict[str, str]  # "says": a word, and "why"


def see(family: str, columns: Iterable[str]) -> dict[str, Cell]:
    """What each column says of a family, in this process."""
    from families.columns import COLUMNS, OtherWay, Refused, Subject

    found = {}
    with tempfile.TemporaryDirectory() as root:
        subject = Subject(family, Path(root) / "model")
        for column in columns:
            cell = {"says": "yes"}
            try:
                COLUMNS[column](subject)
            except Refused as reason:
                cell = {"says": "refused", "why": str(reason)}
            except OtherWay as reason:
                cell = {"says": "other way", "why": str(reason)}
            except AssertionError as difference:
                cell = {"says": "wrong", "why": str(difference)}
            except (
                Exception
            ) as error:  # the page must not have any: a run would end so, with a traceback
                cell = {"says": "fails", "why": f"{type(error).__name__}: {error}"}
            found[column] = {name: in_short(text, root) for name, text in cell.items()}
    return found


def in_short(text: str, root: str) -> str:
    """On one line, without paths of this machine."""
    text = re.sub(rf"{re.escape(root)}/?\S*?(?=[:\s]|$)", "FOLDER", text)
    return re.sub(r"\s+", " ", text)[:400]


def imports(with_vllm: bool) -> None:
    """All that is heavy, so that forks need not."""
    import deepspeed  # noqa: F401
    import peft  # noqa: F401
    import transformers
    from families import columns  # noqa: F401

    import lightppo.trainer.build

    if with_vllm:
        import vllm.v1.engine.llm_engine
        import vllm.v1.worker.cpu_worker  # noqa: F401

        import lightppo.rollout.vllm.colocated
        import lightppo.rollout.vllm.worker  # noqa: F401

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def in_forks(
    families: list[str], columns: list[str], jobs: int
) -> Iterator[tuple[str, dict[str, Cell]]]:
    """(family, what its columns say), ``jobs`` at a time, as they end."""
    context, running, left = get_context("fork"), {}, list(families)
    while left or running:
        while left and len(running) < jobs:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(left[0], columns, theirs))
            process.start()
            theirs.close()
            running[ours] = (left.pop(0), process, time.monotonic() + SECONDS)
        ready = wait(list(running), timeout=5)
        late = [end for end, (_, _, until) in running.items() if time.monotonic() > until]
        for end in {*ready, *late}:
            family, process, _ = running.pop(end)
            found = {name: {"says": "fails", "why": "took too long"} for name in columns}
            if end in ready:
                found = {name: {"says": "fails", "why": "the process died"} for name in columns}
                with suppress(EOFError):
                    found = end.recv()
            process.kill()
            process.join()
            yield family, found


def _child(family: str, columns: list[str], answer: Connection) -> None:
    answer.send(see(family, columns))


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help="default: all")
    parser.add_argument("--columns", nargs="+", help="default: all but vLLM's")
    parser.add_argument("--vllm", action="store_true", help="vLLM's column alone")
    parser.add_argument("--jobs", type=int, default=2, help="processes; 0: in this one")
    parser.add_argument("--store", action="store_true", help=f"into {STORED.relative_to(ROOT)}")
    parser.add_argument("--into", type=Path, help="into another file")
    asked = parser.parse_args(words)
    os.environ.update(ENVIRONMENT | (READ_BY_VLLM if asked.vllm else {}))
    warnings.simplefilter("ignore")
    imports(asked.vllm)
    from families.columns import COLUMNS
    from families.zoo import FAMILIES

    columns = asked.columns or [name for name in COLUMNS if (name == OF_VLLM) == asked.vllm]
    names = asked.families or list(FAMILIES)
    seen = {}
    results = (
        in_forks(names, columns, asked.jobs)
        if asked.jobs
        else ((name, see(name, columns)) for name in names)
    )
    for family, cells in results:
        seen[family] = cells
        for column, cell in cells.items():
            print(f"{family} | {column} | {cell['says']} | {cell.get('why', '')}", flush=True)
        if asked.store:  # at once: it takes minutes
            found = merged(stored(), {family: cells}, asked.vllm)
            STORED.write_text(json.dumps(found, indent=1) + "\n")
    if asked.into:
        asked.into.write_text(json.dumps(seen))


def stored() -> dict[str, Any]:
    return json.loads(STORED.read_text()) if STORED.exists() else {"families": {}}


def merged(
    before: dict[str, Any], seen: dict[str, dict[str, Cell]], with_vllm: bool = False
) -> dict[str, Any]:
    """With the new cells; families and columns in the code's order, others are gone."""
    from families.columns import COLUMNS
    from families.zoo import FAMILIES

    kept = before["families"]
    rows = {name: kept.get(name, {}) | seen.get(name, {}) for name in FAMILIES}
    rows = {
        name: {column: row[column] for column in COLUMNS if column in row}
        for name, row in rows.items()
    }
    about = {name: column.__doc__ for name, column in COLUMNS.items()}
    of_columns = {name: before[name] for name in VERSIONS if name in before}
    of_columns[VERSIONS[with_vllm]] = versions()  # vLLM's column may be of older releases
    return {**of_columns, "columns": about, "families": rows}


def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    from importlib.metadata import version

    names = ["torch", "transformers", "deepspeed", "peft", "bitsandbytes"]
    found = {name: version(name) for name in names if importlib.util.find_spec(name)}
    if importlib.util.find_spec("vllm"):
        import importlib.metadata as metadata

        found["vllm"] = next(
            metadata.version(name) for name in metadata.packages_distributions()["vllm"]
        )
    return found


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    main(sys.argv[1:])
