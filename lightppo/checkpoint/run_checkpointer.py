"""Checkpoints of a whole run: actor, critic, EMA and trainer state under one tag, found again by the next start.

ckpt_path/_actor/global_stepN    weights, optimizer, scheduler; its client state is the state of the run
ckpt_path/_critic/global_stepN   likewise _ema, and _reference if it moves
ckpt_path/latest                 the last tag of which every part is whole

Each part is sealed with facts (:mod:`lightppo.files`): part, step, run.
"""

from __future__ import annotations

import logging
import math
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightppo.checkpoint.engine_state import (
    LATEST,
    META,
    list_tags,
    read_mark,
    remove_checkpoint,
    restore_rng_state,
    rng_state,
)
from lightppo.config.options import CheckpointConfig, OptionSet
from lightppo.distributed.deepspeed import DeepspeedStrategy
from lightppo.errors import CheckpointError, TrainingError
from lightppo.files import files_in_use, is_url, join, local_folder
from lightppo.plugin import CHECKPOINT_CHOICES, RESUMES, WITH_CHECKPOINTS

logger = logging.getLogger(__name__)


_STEP = re.compile(r"global_step\d+")


@dataclass(frozen=True)
class Resumed:
    """A checkpoint that is loaded, and the run that goes on from it."""

    saved: Mapping[str, Any]  # the state of the run that wrote it
    options: Mapping[str, Any]  # of this run, as they may be shown
    content: Mapping[str, str]  # marks of what they name
    command: OptionSet | None  # the options of this run; None: of PPO
    where: str
    is_own: bool  # in this run's own folder
    trains: bool = True  # False: this run only reads it


class RunCheckpointer:
    """Saves and finds checkpoints of a run.

    Args:
        config: paths, what is saved, how many are kept.
        models: part name → prepared model: ``actor``, and ``critic``, ``ema`` and ``reference`` where there are such.
        tokenizer: goes into HF exports.
    """

    def __init__(
        self,
        strategy: DeepspeedStrategy,
        config: CheckpointConfig,
        models: Mapping[str, Any],
        tokenizer: Any,
    ) -> None:
        self.strategy, self.config, self.models, self.tokenizer = (
            strategy,
            config,
            models,
            tokenizer,
        )
        self.run = uuid.uuid4().hex[:12]  # a resumed run keeps its own; rank 0's is written

    def save(self, root: str | Path, step: int, client_state: Mapping[str, Any]) -> None:
        """Write the checkpoint of a step. Collective.

        ``client_state`` comes back from :meth:`load`; the random generators of every rank are added.
        """
        self.require_finite(step)
        if not self.config.disable_ds_ckpt:
            self._save_parts(root, step, client_state)
        for entry in WITH_CHECKPOINTS.values():
            entry.fn(self, root, step)

    def _save_parts(self, root: str | Path, step: int, client_state: Mapping[str, Any]) -> None:
        tag = f"global_step{step}"
        generators = self.strategy.gather_object(rng_state())
        state = {**client_state, "rng": generators, "run": self.run}

        def prepare() -> list[str]:
            previous = self.with_all_parts(local_folder(root))[:1]
            _drop(root, tag)
            return previous

        previous = self.strategy.on_rank_0(prepare, f"make room for {tag} in {root}")
        # The actor last: its client state is what makes the other parts a checkpoint of the run. Until it is
        # written, the others keep what belongs to the one before.
        for name in sorted(self.models, key=lambda name: name == "actor"):
            is_actor = name == "actor"
            self.strategy.save_ckpt(
                self.models[name],
                join(root, f"_{name}"),
                tag,
                max_num=self.config.max_ckpt_num,
                max_mem=self.config.max_ckpt_mem / len(self.models),
                client_state=state if is_actor else None,
                protected_tags=() if is_actor else previous,
                facts={"part": name, "step": step, "run": self.run},
            )
        self.strategy.on_rank_0(
            lambda: mark_latest(root, tag), f"mark {tag} as the latest in {root}"
        )

    def require_finite(self, step: int) -> None:
        """Raises TrainingError where a weight is NaN or infinite, before it takes a good one's place. Collective."""
        bad = [
            name
            for name, model in self.models.items()
            if not self.strategy.has_finite_weights(model)
        ]
        of_all_ranks = sorted(
            {name for of_rank in self.strategy.all_gather_object(bad) for name in of_rank}
        )
        if of_all_ranks:
            raise TrainingError(
                f"after step {step} weights of the {' and '.join(of_all_ranks)} are not finite: nothing is saved, "
                "and the last checkpoint stays. Lower the learning rate, or train in fp32; the same command goes on "
                "from there"
            )

    def candidates(self, root: str | Path, before: int | None = None) -> list[str]:
        """Tags that have all parts, the one to resume from first; ``before``: of steps before this one. Collective.

        CheckpointError: this run has other parts.
        """

        def find() -> list[str]:
            local = local_folder(root)
            tags = self.with_all_parts(local)
            if not tags and _tags("actor", local):
                missing = [f"_{name}" for name in sorted(self.models) if not _tags(name, local)]
                raise CheckpointError(
                    f"the checkpoints in {root} have no part {', '.join(missing) or 'in common'}: they belong to a run "
                    "with other options; set --resume never, or another --save_path"
                )
            return tags if before is None else _before(before, tags)

        return self.strategy.on_rank_0(find, f"look at the checkpoints in {root}")

    def with_all_parts(self, root: Path) -> list[str]:
        """The tag in ``latest``, if it has all parts, then the others, the one that was saved last first.

        Not the highest number: a run started anew in this folder counts from 1 again, beside what the old one left.
        """
        of_parts = [_tags(name, root) for name in self.models]
        whole = [tag for tag in _tags("actor", root) if all(tag in tags for tags in of_parts)]
        if not whole:
            return []
        whole.reverse()
        marked = read_mark(root)
        return sorted(whole, key=lambda tag: tag != marked)

    def resume(
        self,
        options: Mapping[str, Any],
        content: Mapping[str, str],
        command: OptionSet | None = None,
        before: int | None = None,
        trains: bool = True,
    ) -> dict[str, Any] | None:
        """Load the last checkpoint that ``--resume`` allows, if there is one; returns its client state. Collective.

        Args:
            options, content, command: see :class:`Resumed`.
            before: the last one before this step.
            trains: False: the run only reads.

        Raises:
            ConfigError: a look of ``RESUMES`` takes it for another run.
            CheckpointError: the checkpoint does not fit this run.
        """
        is_own = self.config.resume == "auto"
        source = self.config.ckpt_path if is_own else self.config.resume
        if is_url(source):
            self.strategy.on_rank_0(lambda: download_marks(source), f"read {source}")
        root = resume_root(self.config.resume, self.config.ckpt_path)
        # A folder that this run does not hold, such as another run's, is only read.
        is_held = is_own and trains
        choose = next(reversed(CHECKPOINT_CHOICES.values())).fn
        tag = choose(self, root, is_held, before) if root is not None else None
        if tag is None:
            return None
        saved = self.load(root, tag, checked=choose is not last_whole)
        self._tell(Resumed(saved, options, content, command, f"{root}/{tag}", is_own, trains))
        return saved

    def _tell(self, resumed: Resumed) -> None:
        """Where the run goes on from, and what looks at it say. Collective."""
        for look in RESUMES.values():
            for line in look.fn(resumed):
                self.strategy.print(line)
        step = resumed.saved["trainer"]["global_step"]
        self.strategy.print(f"resumed from {resumed.where}: {step} steps done")

    def load(self, root: str | Path, tag: str, checked: bool = False) -> dict[str, Any]:
        """Load all parts and this rank's random generators; returns the client state that was saved. Collective.

        It has a ``world_size`` in place of the generators, which with another number of ranks are seeded by seed, step
        and rank. ``checked``: files were compared with their manifests already.
        """
        states = {}
        for name, model in self.models.items():
            _, states[name] = self.strategy.load_ckpt(
                model,
                join(root, f"_{name}"),
                tag,
                checked=checked,
                reshape=self.config.reshape_ckpt,
            )
        state, strategy = states["actor"], self.strategy
        run = state.pop("run", self.run)
        if self.config.resume == "auto":  # from a path another run goes on
            self.run = run
        generators, now = state.pop("rng"), strategy.world_size
        state["world_size"] = len(generators)
        if len(generators) == now:
            restore_rng_state(generators[strategy.get_rank()])
        else:  # the states are of other ranks
            key = (strategy.seed, state["trainer"]["global_step"], strategy.get_rank())
            strategy.set_seed(hash(key) & 0x7FFF_FFFF_FFFF_FFFF)
            strategy.print(
                f"--reshape_ckpt: {len(generators)} ranks → {now}; random generators are seeded anew"
            )
        return state


def last_whole(
    checkpointer: RunCheckpointer, root: str | Path, is_held: bool, before: int | None
) -> str | None:
    """The last checkpoint that has all parts. Collective."""
    return next(iter(checkpointer.candidates(root, before)), None)


def _tags(name: str, root: Path) -> list[str]:
    """Whole checkpoints of one part, oldest first."""
    part = root / f"_{name}"
    return [tag for tag in list_tags(part) if _STEP.fullmatch(tag)] if part.is_dir() else []


def _drop(root: str | Path, tag: str) -> None:
    """An older run's checkpoint of this tag goes before its parts are written one by one, the actor's first: parts of
    two runs would look like one checkpoint."""
    for part in parts_of(root):
        if (part / tag).is_dir():
            remove_checkpoint(part / tag)
            files_in_use().publish(join(root, part.name), tag)


def parts_of(root: str | Path) -> list[Path]:
    """Folders of all parts that are there, the actor's first."""
    return sorted(local_folder(root).glob("_*"), key=lambda path: path.name != "_actor")


def _before(step: int, tags: Iterable[str]) -> list[str]:
    """Of tags, the last saved first, those before a step; what an earlier run left in the folder does not count."""
    kept, later = [], math.inf
    for tag in tags:
        saved = int(tag.removeprefix("global_step"))
        if saved >= later:  # a run's steps rise from save to save
            break
        later = saved
        if saved < step:
            kept.append(tag)
    return kept


def mark_latest(root: str | Path, tag: str) -> None:
    files_in_use().write_text(local_folder(root) / LATEST, tag)
    files_in_use().publish(root, LATEST)


def download_marks(root: str) -> None:
    """Of the checkpoints and exports at a URL, the small files that say which are whole."""
    marks = (LATEST, META, "_hf/best.json", "_hf/config.json")
    files_in_use().fetch(root, lambda name: name.endswith(marks))


def resume_root(resume: str, ckpt_path: str) -> str | Path | None:
    """Where to look for a checkpoint: ``--ckpt_path`` for auto, the named folder for a path, nowhere for never."""
    if resume == "never":
        return None
    if resume == "auto":
        return ckpt_path if is_url(ckpt_path) else local_folder(ckpt_path)
    parts = local_folder(resume) / "_actor"
    if not parts.is_dir() or not list_tags(parts):
        raise CheckpointError(
            f"--resume {resume}: not a folder of checkpoints (it has no _actor with a whole one inside); "
            "name the --ckpt_path of the run to go on with, or leave --resume at auto"
        )
    return resume if is_url(resume) else local_folder(resume)
