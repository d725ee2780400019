"""The tape in a run: which step it is at, and what checkpoints know of it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import yaml

from lightppo.callbacks import Callback
from lightppo.checkpoint.engine_state import read_client_state
from lightppo.checkpoint.layout import list_tags, part_folder
from lightppo.config.evaluation_options import evaluation_config
from lightppo.config.reward_plan import reward_sources
from lightppo.episodes.tape import KnownEnd, Tape, tape_of
from lightppo.episodes.tape_files import Head
from lightppo.errors import RewardError, RolloutError
from lightppo.files import is_url, local_folder
from lightppo.plugin import REWARDS


def keeper(run: Any) -> Keeper | None:
    """Return the callback of a run that has something to ask outside, and may be gone on with or done again."""
    tape = tape_of(run.strategy, run.config)
    if tape is None or not asks_outside(run.config) or (run.only_evaluates and not tape.plays):
        return None
    return Keeper(run, tape)


def asks_outside(config: Any) -> bool:
    """Tell whether the tape has something of the run: of its environments, tools, or sources of rewards."""
    flat = config.flat()
    judge = evaluation_config(config)
    if flat.get("env") or flat.get("tools"):
        return True
    sources = reward_sources(config) + ([] if judge is None else reward_sources(judge))
    wanted = ("yes", "perhaps") if flat["tape"] == "all" or flat["tape_from"] else ("yes",)
    return any(REWARDS[name].outside in wanted for name in sources)


class Keeper(Callback):
    """Tells the tape which step it is, and checkpoints where the tape ends."""

    def __init__(self, run: Any, tape: Tape) -> None:
        self.run = run
        self.tape = tape
        run.register_state("tape", self, per_rank=True)

    def on_start(self, run: Any) -> None:
        self.tape.run = run.strategy.broadcast_object(run.checkpointer.run)
        if self.tape.plays:
            self.tape.check(run.state.global_step, heads_of(run, self.tape))
        self.tape.go_to(run.state.global_step, "eval")

    def around_step(self, run: Any, step: int) -> AbstractContextManager:
        return self.tape.during(step)

    def on_end(self, run: Any, error: BaseException | None) -> None:
        if self.tape.plays and error is None:
            count = run.strategy.all_reduce(self.tape.answered, "sum")
            run.strategy.print(f"the tape in {self.tape.folder} gave {int(count)} answers")
        # All ranks are in this step: no other has gone on with what failed.
        if isinstance(error, RewardError | RolloutError):
            self.tape.give_up()
        self.tape.close()

    # -- what a checkpoint keeps -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any] | None:
        return self.tape.settle()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint; TapeError: files of the tape are not as the checkpoint knows them. Collective."""
        self.tape.go_on(state, "the checkpoint")
        if not self.tape.plays:
            self.tape.check_past(self.run.state.global_step)
        if state is None or self.tape.plays or state["ranks"] == self.tape.ranks:
            return
        step = self.run.state.global_step
        ranks = state["ranks"]
        self.run.strategy.on_rank_0(
            lambda: self.tape.set_aside(step, ranks), f"set files of {self.tape.folder} aside"
        )

    def share_out(self, states: Sequence[Any], world_size: int) -> list[Any]:
        """Return states for another number of ranks: each begins new files behind the end of all."""
        return [self.tape.share_out(states)] * world_size


def heads_of(run: Any, tape: Tape) -> list[KnownEnd]:
    """Return what each checkpoint of the run whose tape plays knows of the end of this rank's files."""
    part = Path(part_folder(_checkpoints_of(tape.folder.parent)))
    known = []
    for tag in list_tags(part) if part.is_dir() else ():
        state = read_client_state(part / tag)
        ends = state.get("tape") or []
        if len(ends) == tape.ranks and ends[tape.rank] is not None:
            known.append(KnownEnd(Head.of(ends[tape.rank]), state["run"], str(part / tag)))
    return known


def _checkpoints_of(run: Path) -> Path:
    """Return the ``--ckpt_path`` of a run, which may have been moved together with it."""
    recorded = run / "run_config.resolved.yaml"
    if not recorded.is_file():
        return run
    options = yaml.safe_load(recorded.read_text())
    given = options["ckpt_path"]
    if is_url(given) or is_url(options["save_path"]):
        return run / Path(given).name
    beside = run / os.path.relpath(given, options["save_path"])
    return beside if beside.is_dir() else local_folder(given)
