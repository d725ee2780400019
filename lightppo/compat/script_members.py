"""Attributes and methods of ``PPOTrainer`` that scripts of LightRFT's and OpenRLHF's launcher era read, set and call."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from operator import attrgetter
from typing import Any

from lightppo.algorithms.kl import make_kl_controller
from lightppo.checkpoint.engine_state import rng_state
from lightppo.checkpoint.layout import mark_latest, step_of, tag_of
from lightppo.compat.constructor_options import fill_schedule, script_args
from lightppo.compat.prompt_batches import SeedLoader, pretrain_batches_of
from lightppo.compat.script_losses import policy_loss_of, pretrain_loss_of, value_loss_of
from lightppo.config import PPOConfig
from lightppo.config.rules import micro_batch_spec, rollout_rows, scoring_calls
from lightppo.files import local_folder
from lightppo.logging.step_metrics import optimizer_status


class KLState:
    """The state of a ``kl_ctl`` that has only ``value`` and ``update``."""

    def __init__(self, controller: Any) -> None:
        self.controller = controller

    def state_dict(self) -> dict[str, Any]:
        return {"kind": type(self.controller).__name__, "value": float(self.controller.value)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["kind"] != (own := type(self.controller).__name__):
            raise ValueError(
                f"the checkpoint's kl_ctl is {state['kind']}, here {own}: set the one that it was made with"
            )
        self.controller.value = float(state["value"])


class _GivenTracker:
    """A Weights & Biases run (or module), or a TensorBoard writer, that a script has set; the script ends it."""

    def __init__(self, name: str, given: Any) -> None:
        self.replaces = name
        self.given = given

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.replaces == "_wandb":
            return self.given.log({"global_step": step, **metrics})
        for name, value in metrics.items():
            self.given.add_scalar(name, value, step)

    def close(self) -> None:
        """Nothing to do."""


def _is_tracker(sink: Any, name: str) -> bool:
    if isinstance(sink, _GivenTracker):
        return sink.replaces == name
    if name == "_wandb":
        return getattr(sink, "name", None) == "wandb"
    return hasattr(sink, "writer")


def _setting(path: str, apply: str | None = None) -> property:
    """Make an attribute of an option; when it is set, the trainer works with it."""
    name = path.rpartition(".")[2]
    read = attrgetter(f"config.{path}")

    def write(trainer: Any, value: Any) -> None:
        trainer._set_options(**{name: value})
        if apply is not None:
            getattr(trainer, apply)()

    return property(read, write)


def _of_part(path: str) -> property:
    """Make an attribute that is here an attribute of a part of the trainer."""
    part, _, name = path.rpartition(".")

    def write(trainer: Any, value: Any) -> None:
        setattr(attrgetter(part)(trainer), name, value)

    return property(attrgetter(path), write)


def _tracker(name: str, of_recorder: str) -> property:
    """Make an attribute of rank 0: what a script has set, else the recorder's, from the first step on."""

    def read(trainer: Any) -> Any:
        return trainer.trackers.get(name) or (
            trainer.recorder and getattr(trainer.recorder, of_recorder)
        )

    def write(trainer: Any, value: Any) -> None:
        trainer.trackers = trainer.trackers | {name: value}
        if trainer.started:
            trainer.use_given_trackers()

    return property(read, write)


def _replaceable_loss(name: str, as_called: Callable[[Any], Any]) -> property:
    """Make an attribute of the loss ``name``, which a script may set in the seed's form, too."""
    given = f"_given_{name}"

    def read(trainer: Any) -> Any:
        return vars(trainer).get(given) or getattr(trainer, name)

    def write(trainer: Any, fn: Callable[..., Any]) -> None:
        vars(trainer)[given] = fn
        setattr(trainer, name, as_called(fn))

    return property(read, write)


def own_fit(fit: Callable[..., None]) -> Callable[..., None]:
    """Wrap the ``fit`` of a subclass: its loader gives the seed's batches, and the records end with it.

    What its caller leaves out comes from the trainer.
    """
    signature = inspect.signature(fit)
    ordinary = {
        n: p.default for n, p in signature.parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD
    }

    @wraps(fit)
    def run(self: Any, *values: Any, **named: Any) -> None:
        if self.is_complete():
            self.tell_complete()
            return self.close()
        bound = signature.bind_partial(self, *values, **named)
        for name, value in self.fit_arguments().items():
            missing = name not in bound.arguments and (
                self.owns_parts or ordinary.get(name) is inspect.Parameter.empty
            )
            if name in ordinary and (missing or bound.arguments.get(name, ...) is None):
                bound.arguments[name] = value
        loader = bound.arguments.get("prompts_dataloader")
        if loader is not None and not isinstance(loader, SeedLoader):
            bound.arguments["prompts_dataloader"] = SeedLoader(loader)
        fit(*bound.args, **bound.kwargs)
        self.end_records()

    return run


class ScriptMembers:
    """What ``PPOTrainer`` has for scripts alone: ``fit`` enters none of it unless a script uses it."""

    trackers: Mapping[str, Any] = {}  # that a script has set
    outcomes: Sequence[Mapping[str, float]] = ()  # of optimizer steps in a loop of a script
    args_of_fit: Any = None  # that a script gave to fit
    client_states: Mapping[str, Any] | None = None  # that a script adds to the checkpoint
    started = False  # callbacks have had on_start
    generate_kwargs: Mapping[str, Any] = {}  # generation options of the constructor
    _args: Any = None
    _aux_loss: bool | None = None  # as a script has set it
    _wants_stop = False  # a callback does
    text_step = 0  # number of the last step whose prompts came as texts
    synced = 0  # optimizer steps of the weights that the engine has

    # -- attributes ----------------------------------------------------------------------------------------------

    micro_train_batch_size = _setting("training.micro_train_batch_size", "_resize_training")
    prompt_max_len = _setting("data.prompt_max_len")
    dataloader_pin_memory = _setting("data.dataloader_pin_memory", "_pin_buffer")
    kl_target = _setting("algorithm.kl_target", "_make_kl_controller")
    gradient_checkpointing = _setting("model.gradient_checkpointing", "_checkpoint_gradients")
    save_hf_ckpt = _setting("checkpoint.save_hf_ckpt")
    disable_ds_ckpt = _setting("checkpoint.disable_ds_ckpt")
    _wandb = _tracker("_wandb", "wandb_run")
    _tensorboard = _tracker("_tensorboard", "tensorboard_writer")
    actor_loss_fn = _replaceable_loss("policy_loss", policy_loss_of)
    critic_loss_fn = _replaceable_loss("value_loss", value_loss_of)
    ptx_loss_fn = _replaceable_loss("pretrain_loss", pretrain_loss_of)
    ema_beta = _of_part("moving_average.beta")
    ema_model = property(lambda trainer: trainer.followers.get("ema"))
    pretraining = property(lambda trainer: trainer.loss_terms["pretraining"])
    ptx_coef = _of_part("pretraining.coef")
    pretrain_loss = _of_part("pretraining.loss_fn")

    @property
    def args(self) -> Any:
        """The options: ``strategy.args`` of a script, else a namespace of all of them."""
        if self._args is None:
            self._args = script_args(self.strategy, self.config)
        return self._args

    @args.setter
    def args(self, value: Any) -> None:
        self._args = value

    @property
    def micro_rollout_batch_size(self) -> int:
        return rollout_rows(self.config)

    @micro_rollout_batch_size.setter
    def micro_rollout_batch_size(self, value: int) -> None:
        self._set_options(micro_rollout_batch_size=value)
        self.experience_maker.micro_rollout_batch_size = value
        self.experience_maker.micro_batches = {
            call: micro_batch_spec(self.config, call) for call in scoring_calls()
        }
        for part in (self.rollout_engine, self.sampler.sampler.engine):
            if hasattr(part, "micro_rollout_batch_size"):
                part.micro_rollout_batch_size = value

    @property
    def max_norm(self) -> float:
        return self.config.training.max_norm

    @max_norm.setter
    def max_norm(self, value: float) -> None:
        roles = {"actor": self.actor}
        if self.critic is not None:
            roles["critic"] = self.critic
        self._set_options(max_norm=value)
        self.strategy.max_norm = value
        for model in roles.values():
            self.strategy.set_max_norm(model, value)

    @property
    def aux_loss(self) -> bool:
        if self._aux_loss is None:
            return self.config.loss.aux_loss_coef > 0
        return self._aux_loss

    @aux_loss.setter
    def aux_loss(self, value: bool) -> None:
        self._aux_loss = bool(value)
        if not value:
            self._set_options(aux_loss_coef=0.0)

    @property
    def prompts_dataloader(self) -> Any:
        """The prompts; in a subclass with a ``fit`` of its own they are the seed's batches."""
        if self.prompts is None or not self.overrides("fit"):
            return self.prompts
        return SeedLoader(self.prompts)

    @prompts_dataloader.setter
    def prompts_dataloader(self, loader: Any) -> None:
        self.prompts = loader.loader if isinstance(loader, SeedLoader) else loader

    @property
    def pretrain_dataloader(self) -> Any:
        return self.pretraining.batches

    @pretrain_dataloader.setter
    def pretrain_dataloader(self, batches: Any) -> None:
        if isinstance(batches, Iterator):
            self.pretraining.batches = pretrain_batches_of(batches)
        else:
            self.pretraining.batches = batches

    @property
    def recorder(self) -> Any | None:
        """The callback that writes the logs, from the first step on."""
        if not self.started:
            return None
        return next(
            (callback for callback in self.callbacks if hasattr(callback, "tensorboard_writer")),
            None,
        )

    # -- what setting an attribute changes -----------------------------------------------------------------------

    def _set_options(self, **options: Any) -> None:
        """Work with other options from now on."""
        config = self.config.with_options(**options)
        config.validate(self.strategy.world_size, by_hand=True)
        self.use_config(config)

    def use_config(self, config: PPOConfig) -> None:
        """Work with this config from now on."""
        self.use(config)
        self.checkpointer.config = config.checkpoint

    def _resize_training(self) -> None:
        self.replay_buffer.sample_batch_size = self.micro_train_batch_size
        self.strategy.micro_train_batch_size = self.micro_train_batch_size
        self.accumulate_alone()

    def _pin_buffer(self) -> None:
        self.replay_buffer.pin_memory = (
            self.dataloader_pin_memory and self.replay_buffer.device.type == "cuda"
        )

    def _make_kl_controller(self) -> None:
        algorithm = self.config.algorithm
        self.kl_ctl = make_kl_controller(
            self.kl_ctl.value, algorithm.kl_target, algorithm.kl_horizon
        )

    def _checkpoint_gradients(self) -> None:
        for model in filter(None, (self.actor, self.critic)):
            if self.gradient_checkpointing:
                model.gradient_checkpointing_enable()
            else:
                model.gradient_checkpointing_disable()

    def use_given_trackers(self) -> None:
        """Put what a script has set in the place of the recorder's own run or writer."""
        recorder = self.recorder
        if recorder is None or not self.strategy.is_rank_0():
            return
        for name, given in self.trackers.items():
            replaced = [sink for sink in recorder.sinks if _is_tracker(sink, name)]
            for sink in replaced:
                sink.close()
            recorder.sinks = [sink for sink in recorder.sinks if sink not in replaced]
            if given is not None:
                recorder.sinks.append(_GivenTracker(name, given))

    # -- logs and checkpoints ------------------------------------------------------------------------------------

    def save_logs_and_checkpoints(
        self,
        args: Any,
        global_step: int,
        step_bar: Any,
        logs_dict: Mapping[str, float] | None = None,
        client_states: Mapping[str, Any] | None = None,
    ) -> None:
        """Log a finished step with its status ``logs_dict``; evaluate, checkpoint and export if due.

        ``client_states`` goes into the checkpoint, by default the trainer's own. ``args`` may name another
        ``ckpt_path``. ``step_bar`` is not used: it is in the signature for scripts in the seed's style.
        """
        self.start_records()  # a loop of the user's own may come without fit()
        status = dict(logs_dict or {})
        outcomes = list(self.outcomes)
        self.outcomes = ()
        if outcomes:  # of a loop of the script's own
            status = optimizer_status([[outcome] for outcome in outcomes], self.strategy) | status
        if global_step > self.state.global_step:  # of a loop of the user's own
            self.state.global_step = global_step
        before = self.args_of_fit
        self.args_of_fit = args
        self.client_states = client_states
        self._wants_stop = super().finish_step(global_step, status)
        self.args_of_fit = before
        self.client_states = None

    def finish_step_of_script(self, step: int, status: Mapping[str, float]) -> bool:
        """Do what ``finish_step`` does by ``save_logs_and_checkpoints``, which a script may have replaced."""
        self._wants_stop = False
        state = self.client_state() if self.overrides("save_logs_and_checkpoints") else None
        bar = getattr(self, "bar", None)
        self.save_logs_and_checkpoints(self.args_of_fit, step, bar, dict(status), state)
        return self._wants_stop

    def write_checkpoint_of_script(self, step: int) -> None:
        """Write a checkpoint with what a script adds, by its ``_save_checkpoint`` if there is one. Collective."""
        tag = tag_of(step)
        state = self.whole_state()
        own = {name: state[name] for name in (*self.states, *self.states_of_ranks)}
        state = state | dict(self.client_states or {}) | own
        if not self.overrides("_save_checkpoint"):
            return self._save_checkpoint(self.args_of_fit, tag, state)
        state["rng"] = self.strategy.gather_object(rng_state())
        self._save_checkpoint(self.args_of_fit, tag, state)
        self._adopt(tag)

    def _save_checkpoint(
        self, args: Any, tag: str, client_states: Mapping[str, Any] | None = None
    ) -> None:
        """Write the checkpoint ``tag``; the seed's name, so that an override acts. Collective."""
        is_whole = client_states is not None and "trainer" in client_states
        state = client_states if is_whole else self.whole_state() | dict(client_states or {})
        path = getattr(args, "ckpt_path", None) or self.config.checkpoint.ckpt_path
        self.checkpointer.save(path, step_of(tag), state)

    def _adopt(self, tag: str) -> None:
        """Mark a checkpoint that a script has written as the latest, if all parts have it. Collective."""
        root = self.ckpt_path

        def mark() -> None:
            if tag in self.checkpointer.with_all_parts(local_folder(root)):
                mark_latest(root, tag)

        self.strategy.on_rank_0(mark, f"mark {tag} as the latest in {root}")

    # -- loops of a script ---------------------------------------------------------------------------------------

    def start_records(self) -> None:
        """Do what ``fit`` does before the first step, for a loop of a script. Collective."""
        if self.started:
            return
        self.started = True
        self.begin_run()
        for callback in self.callbacks:
            callback.on_start(self)
        self.use_given_trackers()

    def end_records(self) -> None:
        """Do what ``fit`` does after the last step, for a loop of a script. Collective."""
        if self.started:
            for callback in self.callbacks:
                callback.on_end(self, None)

    def options_of_script(self) -> Any:
        """Return the namespace for overrides that read options from ``args``, where ``fit`` gets none."""
        if self.prompts is not None:
            fill_schedule(self.args, self.steps_per_episode())
        return self.args

    def fit_arguments(self) -> dict[str, Any]:
        """Return what a ``fit`` of a subclass gets where its caller leaves it out."""
        arguments = {
            "args": self.options_of_script(),
            "prompts_dataloader": self.prompts,
            "pretrain_dataloader": self.pretrain_dataloader,
        }
        if self.owns_parts and self.prompts is not None:
            rollout = self.config.rollout
            training = self.config.training
            prompts = self.steps_per_episode() * rollout.rollout_batch_size
            samples = prompts * rollout.n_samples_per_prompt * training.max_epochs
            arguments["num_update_steps_per_episodes"] = math.ceil(
                samples / training.train_batch_size
            )
            arguments["consumed_samples"] = self.state.global_step * rollout.rollout_batch_size
        return arguments
