"""The life of a run, the same for PPO and for training on data: steps, limits, evaluations, checkpoints, the end.

A trainer is a :class:`TrainingLoop` whose ``fit`` trains one step after the other::

    with self.running():                          # callbacks: on_start … on_end, also after an error
        for step, data in self.steps():           # until a limit is reached
            status = ...                          # train on the data
            if self.finish_step(step, status):    # logged, evaluated, saved; a callback may want to stop
                break
        self.finish()                             # the last evaluation, the last checkpoint, the model
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from lightppo.callbacks import Callback, Callbacks
from lightppo.checkpoint.run_checkpointer import RunCheckpointer, with_present_names
from lightppo.config.options import OptionSet, public_options
from lightppo.distributed.deepspeed import DeepspeedStrategy
from lightppo.errors import NonFiniteError, TrainingError
from lightppo.files import facts_of, files_in_use, local_folder
from lightppo.logging.performance import Pace, PhaseTimer, bar_of_steps, on_bar
from lightppo.logging.step_metrics import with_namespace
from lightppo.plugin import METRICS
from lightppo.preflight.run_checks import check_same_run
from lightppo.ranks import Ranks, heartbeat
from lightppo.trainer.run_callbacks import run_callbacks

logger = logging.getLogger(__name__)


class Stateful(Protocol):
    """A part whose state a checkpoint keeps. Both methods are called on every rank, and so may be collective."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> None: ...


@dataclass
class TrainerState:
    """The progress of a run, after a finished step."""

    global_step: int = 0  # PPO steps done
    episode: int = 0  # current pass over the prompts, from 0
    consumed_prompts: int = 0  # prompts taken from this episode, over all ranks
    optimizer_steps: int = 0  # taken, of actor and critic
    skipped_optimizer_steps: int = 0  # for a non-finite gradient, actor and critic
    # of the skipped ones, those for too large a loss scale (--fp16)
    overflowed_optimizer_steps: int = 0
    # PPO steps, until the last one, in which a model had no finite gradient
    skipped_in_a_row: int = 0
    stopped_optimizer_steps: int = 0  # of the actor, by an early stop

    def become(self, state: TrainerState) -> None:
        """Take over another state; who holds this one sees it."""
        vars(self).update(vars(state))

    def finish_step(self, prompts: int, last_of_episode: bool) -> None:
        """Count one PPO step that used ``prompts`` prompts over all ranks."""
        self.global_step += 1
        self.consumed_prompts += prompts
        if last_of_episode:
            self.episode += 1
            self.consumed_prompts = 0


@dataclass
class SkippedSteps:
    """Optimizer steps that all ranks skip together for numbers that are not finite."""

    state: TrainerState  # of the run; the steps are counted in it
    strategy: Ranks
    # of each optimizer step of this step, by model: whether it was skipped
    of_model: dict[str, list[bool]] = field(default_factory=dict, init=False)
    batch: Any = field(default=None, init=False)  # of the first one that was
    why: str = field(default="", init=False)  # the step was left out
    last_why: str = field(default="", init=False)  # some step was
    minibatch: Any = field(default=None, init=False)  # what the next optimizer steps are of

    def begin_step(self) -> None:
        """Begin a step in which nothing is skipped yet."""
        self.of_model = {}
        self.batch = None
        self.why = ""

    def add(self, model: str, skipped: bool, overflow: bool = False) -> None:
        """Count an optimizer step of a model. An ``overflow`` that fp16 looks for its loss scale by ends no run."""
        self.state.skipped_optimizer_steps += skipped
        self.state.optimizer_steps += not skipped
        self.state.overflowed_optimizer_steps += overflow
        if overflow:
            return
        self.of_model.setdefault(model, []).append(skipped)
        if skipped and self.batch is None:
            self.batch = self.minibatch

    def leave_out(self, step: int, models: Iterable[str], error: NonFiniteError) -> None:
        """Count a step in which nothing is trained, on any rank."""
        for model in models:
            self.add(model, skipped=True)
        # This counts even if nothing would have been trained.
        self.batch = error.batch
        self.why = str(error)
        self.last_why = self.why
        if self.strategy.is_rank_0():
            logger.warning("step %d is left out: %s", step, error)

    def models(self) -> list[str]:
        """Return those of which every optimizer step of this step was skipped; the same on every rank."""
        return [name for name, skips in self.of_model.items() if all(skips)]

    def end_step(self) -> None:
        """Count the steps in a row."""
        if self.models():
            self.state.skipped_in_a_row += 1
        elif self.of_model:
            self.state.skipped_in_a_row = 0
        self.minibatch = None


class TrainingLoop:
    """The base of every trainer.

    Args:
        config: resolved; its sections ``checkpoint``, ``logging`` and ``training`` are read.
        checkpointer: of the models of the run.
        callbacks: of users, see :func:`lightppo.trainer.run_callbacks.run_callbacks`.
        evaluator: ``evaluate(step)`` returns metrics ``eval/<name>``, for a callback; ``None``: no evaluation.
        content: marks of what options name, which a resumed run must find unchanged.
        keeps_files: whether anything is left of the run at its end; a trial keeps nothing.
        options: as they were given; ``None``: a script made the parts, and ends them.
    """

    unit = "step"
    why_untrained = "there was none"  # where no optimizer step was taken, and none was skipped
    bar: Any = None  # of the steps
    samples_tokens = False  # it has an experience maker, whose rollouts its callbacks get

    def __init__(
        self,
        config: OptionSet,
        strategy: DeepspeedStrategy,
        tokenizer: Any,
        checkpointer: RunCheckpointer,
        skipped: SkippedSteps,
        *,
        state: TrainerState,
        timer: PhaseTimer,
        callbacks: Iterable[Callback] = (),
        evaluator: Any | None = None,
        content: Mapping[str, str] | None = None,
        keeps_files: bool = True,
        options: OptionSet | None = None,
    ) -> None:
        self.config = config
        self.strategy = strategy
        self.tokenizer = tokenizer
        self.checkpointer = checkpointer
        self.skipped = skipped
        self.evaluator = evaluator
        self.content = dict(content or {})
        self.keeps_files = keeps_files
        self.options = options
        self.state = state
        self.timer = timer
        self.saving = PhaseTimer()
        self.total_steps: int | None = None  # of the run, known in fit
        self.last_saved: int | None = None
        self.saves = False  # checkpoints, and one at its end; known when it begins
        self.states: dict[str, Stateful] = {}
        self.states_of_ranks: dict[str, Stateful] = {}
        # states of the checkpoint that no part has asked for yet
        self.unclaimed: dict[str, Any] = {}
        self.callbacks = Callbacks(run_callbacks(self, callbacks))

    # -- what a trainer says -----------------------------------------------------------------------------------------

    @property
    def only_evaluates(self) -> bool:
        """Return whether no step is trained."""
        return False

    def limits(self) -> dict[str, tuple[int, int | None]]:
        """Return by option how much is done, and how much ends the run (``None``: no limit)."""
        raise NotImplementedError

    def count_steps(self) -> int:
        """Count the steps of the whole run, those that are done included."""
        raise NotImplementedError

    def episode_steps(self) -> Iterator[Any]:
        """Yield the data of each step of one episode, from where the run is."""
        raise NotImplementedError

    def save_model(self) -> None:
        """Write what the run was made for. Collective."""
        raise NotImplementedError

    # -- state ---------------------------------------------------------------------------------------------------

    def register_state(self, name: str, part: Stateful, per_rank: bool = False) -> None:
        """Keep the state of a part in checkpoints, under a name of its own; a resumed run loads it at once.

        Args:
            per_rank: each rank has a state of its own. Such a part has ``share_out(states, world_size)``, which makes
                the states of another number of ranks.
        """
        if name in self.states or name in self.states_of_ranks or name in _OWN_STATE:
            raise ValueError(
                f"register_state: there is a state {name!r} already: choose another name"
            )
        states = self.states_of_ranks if per_rank else self.states
        states[name] = part
        if name in self.unclaimed:
            self._load_part(name, part, self.unclaimed.pop(name))

    def client_state(self) -> dict[str, Any]:
        """Return all that a checkpoint holds beside models, optimizers and what is of each rank. Collective."""
        return {name: part.state_dict() for name, part in self.states.items()} | {
            "trainer": asdict(self.state),
            "config": public_options(self.config),
            "content": self.content,
        }

    def whole_state(self) -> dict[str, Any]:
        """Return :meth:`client_state` with what is of each rank. Collective."""
        states = self.client_state()
        for name, part in self.states_of_ranks.items():
            states[name] = self.strategy.gather_object(part.state_dict())
        return states

    def resume(self, options: Mapping[str, Any] | None = None, before: int | None = None) -> bool:
        """Go on from the last checkpoint that ``--resume`` allows; returns whether there was one. Collective.

        Args:
            options: compared with the saved ones; ``None``: the trainer's.
            before: from the last one before this step.
        """
        options = options or public_options(self.config)
        saved = self.checkpointer.resume(
            options,
            self.content,
            self.config,
            before,
            trains=not self.only_evaluates,
            compare=check_same_run,
        )
        if saved is None:
            return False
        self.load_state(saved)
        return True

    def load_state(self, states: Mapping[str, Any]) -> None:
        """Go on from :meth:`whole_state`. A part that it does not know begins anew, and this is said."""
        states = with_present_names(states)
        self.state.become(TrainerState(**states["trainer"]))
        self.last_saved = self.state.global_step or None
        self.unclaimed = dict(states)
        for name, part in (self.states | self.states_of_ranks).items():
            if name in states:
                self._load_part(name, part, self.unclaimed.pop(name))
            elif name in self.states:
                self.strategy.print(f"resume: the checkpoint has no state {name!r}: it begins anew")

    def _load_part(self, name: str, part: Stateful, state: Any) -> None:
        """Give a part its state of a checkpoint, or this rank's share of the states of all ranks."""
        if name in self.states_of_ranks:
            world_size = self.strategy.world_size
            states = state if len(state) == world_size else part.share_out(state, world_size)
            state = states[self.strategy.get_rank()]
        part.load_state_dict(state)

    @property
    def owns_parts(self) -> bool:
        """Tell whether the run was built whole: it saves its model at the end, and ends its parts."""
        return self.options is not None

    @property
    def ckpt_path(self) -> str:
        return self.config.checkpoint.ckpt_path

    @property
    def finished_episodes(self) -> int | None:
        """Return episodes that are done, if the last step was the last one of an episode."""
        return self.state.episode if self.state.consumed_prompts == 0 else None

    # -- limits --------------------------------------------------------------------------------------------------

    def reached_limits(self) -> str:
        """Return the limits that the run has come to, as flags; empty while it goes on."""
        reached = {
            name: limit
            for name, (done, limit) in self.limits().items()
            if limit is not None and done >= limit
        }
        return ", ".join(f"--{name} {limit}" for name, limit in reached.items())

    def evaluation_is_due(self) -> bool:
        """Tell whether ``--eval_steps`` asks for an evaluation after this step; without it one follows an episode."""
        eval_steps = self.config.evaluation.eval_steps
        if eval_steps == -1:
            return self.finished_episodes is not None
        return eval_steps > 0 and self.state.global_step % eval_steps == 0

    def saved_models(self) -> list[str]:
        """Return the folders of what :meth:`save_model` writes."""
        return [self.config.checkpoint.save_path]

    def is_complete(self) -> bool:
        """Tell whether the run has come to its end and its model is there, whole: nothing is left to do. Collective."""
        step = self.state.global_step
        if not self.owns_parts or self.only_evaluates or step == 0 or not self.reached_limits():
            return False
        is_saved = False
        if self.strategy.is_rank_0():
            folders = [local_folder(folder) for folder in self.saved_models()]
            is_saved = all(facts_of(folder).get("step") == step for folder in folders)
            is_saved = is_saved and not any(files_in_use().damage(folder) for folder in folders)
        return self.strategy.broadcast_object(is_saved)

    def tell_complete(self) -> None:
        self.strategy.print(
            f"run complete: {self.state.global_step} steps; raise {self.reached_limits()} to go on, or start anew with "
            "--resume never"
        )

    # -- the loop ------------------------------------------------------------------------------------------------

    @contextmanager
    def running(self) -> Iterator[None]:
        """Hold the time from the first step to the end of the run."""
        self.begin_run()
        try:
            with self.callbacks.around(self):
                self.before_first_step()
                yield
        except SystemExit:  # all ranks stop together
            self.close()
            raise
        self.close()

    def close(self) -> None:
        """End what the run has started."""

    def before_first_step(self) -> None:
        """Tell callbacks that all have started. Collective."""
        for callback in self.callbacks:
            callback.before_steps(self)

    def begin_run(self) -> None:
        """Begin when the names of metrics are known."""
        self.full_names = METRICS.by_short_name
        self.saves = self.config.checkpoint.save_steps > 0
        self.line = Pace(self.state.global_step).line

    def steps(self) -> Iterator[tuple[int, Any]]:
        """Yield number and data of each step until a limit is reached."""
        if self.only_evaluates:
            return
        if self.reached_limits():
            self.tell_complete()
        yield from bar_of_steps(self._steps_of_episodes(), self)

    def _steps_of_episodes(self) -> Iterator[tuple[int, Any]]:
        while not self.reached_limits():
            self.total_steps = self.count_steps()
            episode = self.state.episode
            for data in self.episode_steps():
                heartbeat.step = self.state.global_step + 1
                self.skipped.begin_step()
                yield heartbeat.step, data
                for callback in self.callbacks:
                    callback.after_step(self, heartbeat.step)
                if self.state.episode != episode or self.reached_limits():
                    break

    def finish_step(self, step: int, status: Mapping[str, float]) -> bool:
        """Log a trained step; evaluate and save what is due or voted for. Collective.

        Returns:
            whether a callback wants to stop.
        """
        status = dict(status) | self.timer.reset() | self.saving.reset()
        metrics = with_namespace(status, self.full_names)
        if self.bar is not None and not self.bar.disable:
            self.bar.set_postfix(on_bar(status), refresh=False)
        if step % self.config.logging.logging_steps == 0 or step == self.total_steps:
            self.strategy.print(self.line(step, self.total_steps, metrics))
        self.callbacks.on_step_end(self, step, metrics)
        votes = self.vote(step)
        save_steps = self.config.checkpoint.save_steps
        if votes["evaluate"]:  # first: a checkpoint keeps that it is done
            self.ask_for_evaluation(step)
        if votes["save"] or (save_steps > 0 and step % save_steps == 0):
            self.save_checkpoint(step)
        return votes["stop"] > 0

    def vote(self, step: int) -> dict[str, float]:
        """Return the votes of all callbacks on all ranks, in one collective; callbacks get to know them. Collective."""
        own_votes = self.callbacks.votes(self)
        own_votes["evaluate"] += self.evaluation_is_due()
        votes = self.strategy.all_reduce(own_votes, "sum")
        for callback in self.callbacks.having("on_votes"):
            callback.on_votes(self, step, votes)
        return votes

    def ask_for_evaluation(self, step: int) -> None:
        """Evaluate the weights, and let callbacks do so. Collective."""
        if self.evaluator is not None:
            self.evaluation.evaluate_step(step)
        for callback in self.callbacks.having("evaluate"):
            callback.evaluate(self, step)

    def finish(self) -> None:
        """End a run: the last evaluation, the last checkpoint, the model. Collective."""
        if self.only_evaluates:
            return
        step = self.state.global_step
        self.vote(step)  # before what may take long
        self.check_trained()
        self.ask_for_evaluation(step)
        if self.saves or self.last_saved is not None:
            self.save_checkpoint(step)
        if self.keeps_files:
            if self.owns_parts:
                self.save_model()
            self.strategy.print(f"finished: {step} step{'s' * (step != 1)}")

    def check_trained(self) -> None:
        """Raise TrainingError where no model has changed: such a run is no success."""
        state = self.state
        if state.global_step == 0 or state.optimizer_steps > 0:
            return
        skipped = state.skipped_optimizer_steps - state.overflowed_optimizer_steps
        # a trial may end before fp16's loss scale is found
        if not self.keeps_files and state.overflowed_optimizer_steps and not skipped:
            return
        overflow = "overflowed at --fp16's loss scale, which halves each time: go on, or set --bf16"
        counts = {
            "had a gradient that is not finite": skipped,
            overflow: state.overflowed_optimizer_steps,
            "were stopped early": state.stopped_optimizer_steps,
        }
        reasons = ", ".join(f"{count} {reason}" for reason, count in counts.items() if count)
        # A step that was left out explains more: its numbers were not finite before any gradient.
        cause = self.skipped.last_why or reasons or self.why_untrained
        raise TrainingError(
            f"no optimizer step was taken in {state.global_step} steps, nothing is saved: {cause}"
        )

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def save_checkpoint(self, step: int) -> None:
        """Save, once per step at most. Collective."""
        if self.last_saved == step:
            return
        with self.saving("save"):
            self.write_checkpoint(step)
        self.last_saved = step
        for callback in self.callbacks:
            callback.on_save(self, step)

    def write_checkpoint(self, step: int) -> None:
        """Write all that a resumed run needs. Collective."""
        self.checkpointer.save(self.ckpt_path, step, self.whole_state())


_OWN_STATE = ("trainer", "config", "content", "rng", "run", "consumed_samples")
