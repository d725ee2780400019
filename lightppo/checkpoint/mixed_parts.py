"""Parts of a checkpoint that were not saved together, such as those of two backups: no run may go on from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightppo.checkpoint.durable import seal_of
from lightppo.files import facts_of


def mixture(root: Path, tag: str, names: Iterable[str]) -> str | None:
    """Which parts of a checkpoint were not saved together with the others; ``None`` if all were.

    An older lightppo wrote nothing to tell it by: such parts fit together, but not to newer ones.
    """
    folders = {name: root / f"_{name}" / tag for name in names}
    facts = {name: facts_of(folder) for name, folder in folders.items()}
    if not any("run" in of_part for of_part in facts.values()):
        return None
    odd = _of_another_origin(facts, int(tag.removeprefix("global_step")))
    article = "the"
    siblings = facts["actor"].get("siblings")  # a core without plugins writes none
    if not odd and siblings is not None:
        odd, article = _of_another_save(folders, siblings), "of another save, the"
    if not odd:
        return None
    texts = [f"_{name} is {_origin(facts[name], article)}" for name in sorted(odd)]
    texts += [f"_{name} is {_origin(facts[name], 'the')}" for name in folders if name not in odd]
    return "; ".join(texts)


def _of_another_origin(facts: Mapping[str, Mapping[str, Any]], step: int) -> set[str]:
    """Parts of another step, or of another run than most parts are; of as many, than the actor is."""
    origins = {name: (of_part.get("run"), of_part.get("step")) for name, of_part in facts.items()}
    # None: of an older version
    fitting = [origin for origin in origins.values() if origin[1] in (step, None)]
    usual = max(fitting, key=fitting.count, default=None)
    other_model = {
        name for name, of_part in facts.items() if of_part.get("part") not in (name, None)
    }
    return other_model | {name for name, origin in origins.items() if origin != usual}


def _of_another_save(folders: Mapping[str, Path], sums: Mapping[str, str]) -> set[str]:
    """Parts whose sums the actor does not know; if it knows none of several, it is the actor."""
    others = [name for name in folders if name != "actor"]
    odd = {name for name in others if seal_of(folders[name]) != sums.get(name)}
    return {"actor"} if len(odd) == len(others) > 1 else odd


def _origin(facts: Mapping[str, Any], article: str) -> str:
    if "run" not in facts:
        return "of an older lightppo"
    return f"{article} {facts['part']} of step {facts['step']} of run {facts['run']}"
