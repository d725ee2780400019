"""Checkpoints of a whole run: actor, critic, EMA and trainer state under one tag, found again by the next start."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightppo.checkpoint.damage import last_undamaged, sums_of_others
from lightppo.checkpoint.engine_state import remove_checkpoint, restore_rng_state, rng_state
from lightppo.checkpoint.layout import (
    download_marks,
    mark_latest,
    of_all_ranks,
    part_folder,
    parts_of,
    read_mark,
    resume_root,
    saved_tags,
    step_of,
    tag_of,
)
from lightppo.checkpoint.run_exports import save_hf
from lightppo.config.options import CheckpointConfig, OptionSet
from lightppo.errors import CheckpointError, TrainingError
from lightppo.files import files_in_use, is_url, join, local_folder


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
        strategy: a :class:`lightppo.distributed.deepspeed.DeepspeedStrategy`.
        config: paths, what is saved, how many are kept.
        models: part name → prepared model: ``actor``, and ``critic``, ``ema`` and ``reference`` where there are such.
        tokenizer: goes into HF exports.
    """

    def __init__(
        self,
        strategy: Any,
        config: CheckpointConfig,
        models: Mapping[str, Any],
        tokenizer: Any,
    ) -> None:
        self.strategy = strategy
        self.config = config
        self.models = models
        self.tokenizer = tokenizer
        self.run = uuid.uuid4().hex[:12]  # a resumed run keeps its own; rank 0's is written

    def save(self, root: str | Path, step: int, client_state: Mapping[str, Any]) -> None:
        """Write the checkpoint of a step. Collective.

        ``client_state`` comes back from :meth:`load`; the random generators of every rank are added.
        """
        self.require_finite(step)
        if not self.config.disable_ds_ckpt:
            self._save_parts(root, step, client_state)
        if self.config.save_hf_ckpt:
            save_hf(self, root, step)

    def _save_parts(self, root: str | Path, step: int, client_state: Mapping[str, Any]) -> None:
        tag = tag_of(step)
        generator_states = self.strategy.gather_object(rng_state())
        state = {**client_state, "rng": generator_states, "run": self.run}

        def prepare() -> list[str]:
            previous = self.with_all_parts(local_folder(root))[:1]
            _drop(root, tag)
            return previous

        previous = self.strategy.on_rank_0(prepare, f"make room for {tag} in {root}")
        # The actor last: its client state is what makes the other parts a checkpoint of the run. Until it is
        # written, the others keep what belongs to the one before.
        for name in sorted(self.models, key=lambda name: name == "actor"):
            is_actor = name == "actor"
            facts = {"part": name, "step": step, "run": self.run}
            if self.strategy.is_rank_0():
                facts["siblings"] = sums_of_others(local_folder(root), name, tag)
            self.strategy.save_ckpt(
                self.models[name],
                part_folder(root, name),
                tag,
                max_num=self.config.max_ckpt_num,
                max_mem=self.config.max_ckpt_mem / len(self.models),
                client_state=state if is_actor else None,
                protected_tags=() if is_actor else previous,
                facts=facts,
            )
        self.strategy.on_rank_0(
            lambda: mark_latest(root, tag), f"mark {tag} as the latest in {root}"
        )

    def require_finite(self, step: int) -> None:
        """Raise TrainingError where a weight is NaN or infinite, before it takes a good one's place. Collective."""
        bad_parts = [
            name
            for name, model in self.models.items()
            if not self.strategy.has_finite_weights(model)
        ]
        if bad_parts := of_all_ranks(self.strategy, bad_parts):
            raise TrainingError(
                f"after step {step} weights of the {' and '.join(bad_parts)} are not finite: nothing is saved, "
                "and the last checkpoint stays. Lower the learning rate, or train in fp32; the same command goes on "
                "from there"
            )

    def candidates(self, root: str | Path, before: int | None = None) -> list[str]:
        """Return the tags that have all parts, the one to resume from first; ``before``: of earlier steps. Collective.

        CheckpointError: this run has other parts.
        """

        def find() -> list[str]:
            local_root = local_folder(root)
            whole_tags = self.with_all_parts(local_root)
            if not whole_tags and saved_tags(local_root, "actor"):
                missing_parts = [
                    f"_{name}" for name in sorted(self.models) if not saved_tags(local_root, name)
                ]
                raise CheckpointError(
                    f"the checkpoints in {root} have no part {', '.join(missing_parts) or 'in common'}: they belong to a "
                    "run with other options; set --resume never, or another --save_path"
                )
            return whole_tags if before is None else _before(before, whole_tags)

        return self.strategy.on_rank_0(find, f"look at the checkpoints in {root}")

    def with_all_parts(self, root: Path) -> list[str]:
        """Return the tag in ``latest``, if it has all parts, then the others, the one that was saved last first.

        Not the highest number: a run started anew in this folder counts from 1 again, beside what the old one left.
        """
        tags_of_parts = [saved_tags(root, name) for name in self.models]
        actor_tags = reversed(saved_tags(root, "actor"))
        whole_tags = [tag for tag in actor_tags if all(tag in tags for tags in tags_of_parts)]
        if not whole_tags:
            return []
        marked_tag = read_mark(root)
        return sorted(whole_tags, key=lambda tag: tag != marked_tag)

    def resume(
        self,
        options: Mapping[str, Any],
        content: Mapping[str, str],
        command: OptionSet | None = None,
        before: int | None = None,
        trains: bool = True,
        compare: Callable[[Resumed], Iterable[str]] = lambda resumed: (),
    ) -> dict[str, Any] | None:
        """Load the last checkpoint that ``--resume`` allows, if there is one; return its client state. Collective.

        Args:
            options, content, command: see :class:`Resumed`.
            before: the last one before this step.
            trains: False: the run only reads.
            compare: yields lines to print; it may raise ConfigError where the checkpoint is of another run.

        Raises:
            CheckpointError: the checkpoint does not fit this run.
        """
        is_own = self.config.resume == "auto"
        source = self.config.ckpt_path if is_own else self.config.resume
        if is_url(source):
            self.strategy.on_rank_0(lambda: download_marks(source), f"read {source}")
        root = resume_root(self.config.resume, self.config.ckpt_path)
        # A folder that this run does not hold, such as another run's, is only read.
        is_held = is_own and trains
        tags = [] if root is None else self.candidates(root, before)
        tag = last_undamaged(self, root, tags, is_held, before) if tags else None
        if tag is None:
            return None
        saved = self.load(root, tag, checked=True)
        resumed = Resumed(saved, options, content, command, f"{root}/{tag}", is_own, trains)
        for line in compare(resumed):
            self.strategy.print(line)
        step = saved["trainer"]["global_step"]
        self.strategy.print(f"resumed from {resumed.where}: {step} steps done")
        return saved

    def load(self, root: str | Path, tag: str, checked: bool = False) -> dict[str, Any]:
        """Load all parts and this rank's random generators; return the client state that was saved. Collective.

        It has a ``world_size`` in place of the generators, which with another number of ranks are seeded by seed, step
        and rank. ``checked``: files were compared with their manifests already.
        """
        states = {}
        for name, model in self.models.items():
            _, states[name] = self.strategy.load_ckpt(
                model,
                part_folder(root, name),
                tag,
                checked=checked,
                reshape=self.config.reshape_ckpt,
            )
        state = states["actor"]
        strategy = self.strategy
        saved_run = state.pop("run", self.run)
        if self.config.resume == "auto":  # from a path another run goes on
            self.run = saved_run
        generator_states = state.pop("rng")
        rank_count = strategy.world_size
        state["world_size"] = len(generator_states)
        if len(generator_states) == rank_count:
            restore_rng_state(generator_states[strategy.get_rank()])
        else:  # the states are of other ranks
            seed_key = (strategy.seed, state["trainer"]["global_step"], strategy.get_rank())
            strategy.set_seed(hash(seed_key) & 0x7FFF_FFFF_FFFF_FFFF)
            strategy.print(
                f"--reshape_ckpt: {len(generator_states)} ranks → {rank_count}; random generators are seeded anew"
            )
        return state


def _drop(root: str | Path, tag: str) -> None:
    """Remove an older run's checkpoint of this tag before its parts are written one by one, the actor's first: parts
    of two runs would look like one checkpoint."""
    for part_path in parts_of(root):
        if (part_path / tag).is_dir():
            remove_checkpoint(part_path / tag)
            files_in_use().publish(join(root, part_path.name), tag)


def _before(step: int, tags: Iterable[str]) -> list[str]:
    """Return, of tags with the last saved first, those before a step; what an earlier run left does not count."""
    earlier_tags = []
    previous_step = math.inf
    for tag in tags:
        saved_step = step_of(tag)
        if saved_step >= previous_step:  # a run's steps rise from save to save
            break
        previous_step = saved_step
        if saved_step < step:
            earlier_tags.append(tag)
    return earlier_tags


def with_present_names(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint holds; an older one has parts' states in that of the trainer, and lacks some."""
    trainer_state = dict(saved["trainer"])
    run_ids = trainer_state.pop("run_ids", None) or {}
    if (run_id := trainer_state.pop("run_id", None)) is not None:
        run_ids = {"wandb": run_id}
    episode_scores = trainer_state.pop("episode_scores", {})
    left_out = trainer_state.pop("left_out_prompts", [])
    pretrain_batches = trainer_state.pop("pretrain_batches", 0) * saved.get("world_size", 1)
    older_states = {
        "trackers": run_ids,
        "recorded": saved.get("records", {}),
        "prompt_filter": {"scores": episode_scores, "left_out": left_out},
        "pretraining": {"batches": pretrain_batches},
        "evaluation": {"step": None, "result": None},
    }
    return older_states | dict(saved) | {"trainer": trainer_state}
