"""Attributes and methods of ``PPOTrainer`` that scripts of LightRFT's and OpenRLHF's launcher era read, set and call."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from operator import attrgetter
from typing import Any

from lightppo.algorithms.kl import make_kl_controller
from lightppo.checkpoint.engine_state import rng_state
from lightppo.checkpoint.layout import mark_latest, step_of, tag_of
from lightppo.compat.constructor_options import fill_schedule, script_args
from lightppo.compat.script_losses import policy_loss_of, pretrain_loss_of, value_loss_of
from lightppo.config import PPOConfig
from lightppo.config.rules import micro_batch_spec, rollout_rows, scoring_calls
from lightppo.data.records import Prompt
from lightppo.distributed.distributed import RankSampler
from lightppo.files import local_folder
from lightppo.logging.step_metrics import optimizer_status


class KLState:
    """The state of a ``kl_ctl`` that has only ``value`` and ``update``."""

    def __init__(self, controller: Any) -> None:
        self.controller = controller

    def state_dict(self) -> dict[str, Any]:
        return {"kind": type(self.controller).__name__, "value": float(self.controller.value)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["kind"] != (controller_kind := type(self.controller).__name__):
            raise ValueError(
                f"the checkpoint's kl_ctl is {state['kind']}, here {controller_kind}: set the one that it was made with"
            )
        self.controller.value = float(state["value"])


class _GivenTracker:
    """A Weights & Biases run (or module), or a TensorBoard writer, that a script has set; the script ends it."""

    def __init__(self, name: str, tracker: Any) -> None:
        self.replaces = name
        self.given = tracker

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


def _setting(path: str, method_name: str | None = None) -> property:
    """Make an attribute of an option; when it is set, the trainer works with it."""
    name = path.rpartition(".")[2]
    read = attrgetter(f"config.{path}")

    def write(trainer: Any, value: Any) -> None:
        trainer._set_options(**{name: value})
        if method_name is not None:
            getattr(trainer, method_name)()

    return property(read, write)


def _of_part(path: str) -> property:
    """Make an attribute that is here an attribute of a part of the trainer."""
    part_path, _, name = path.rpartition(".")

    def write(trainer: Any, value: Any) -> None:
        setattr(attrgetter(part_path)(trainer), name, value)

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


def _replaceable_loss(name: str, adapt: Callable[[Any], Any]) -> property:
    """Make an attribute of the loss ``name``, which a script may set in the seed's form, too."""
    attribute_name = f"_given_{name}"

    def read(trainer: Any) -> Any:
        return vars(trainer).get(attribute_name) or getattr(trainer, name)

    def write(trainer: Any, loss_function: Callable[..., Any]) -> None:
        vars(trainer)[attribute_name] = loss_function
        setattr(trainer, name, adapt(loss_function))

    return property(read, write)


def recorder_of(trainer: Any) -> Any | None:
    """Return the callback that writes the logs."""
    recorders = (
        callback for callback in trainer.callbacks if hasattr(callback, "tensorboard_writer")
    )
    return next(recorders, None)


def own_fit(fit: Callable[..., None]) -> Callable[..., None]:
    """Wrap the ``fit`` of a subclass: its loader gives the seed's batches, and the records end with it.

    What its caller leaves out comes from the trainer.
    """
    signature = inspect.signature(fit)
    parameter_defaults = {
        parameter_name: parameter.default
        for parameter_name, parameter in signature.parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    }

    @wraps(fit)
    def run(self: Any, *values: Any, **keyword_arguments: Any) -> None:
        if self.is_complete():
            self.tell_complete()
            return self.close()
        bound_arguments = signature.bind_partial(self, *values, **keyword_arguments)
        for name, value in self.fit_arguments().items():
            is_missing = name not in bound_arguments.arguments and (
                self.owns_parts or parameter_defaults.get(name) is inspect.Parameter.empty
            )
            if name in parameter_defaults and (
                is_missing or bound_arguments.arguments.get(name, ...) is None
            ):
                bound_arguments.arguments[name] = value
        prompts_loader = bound_arguments.arguments.get("prompts_dataloader")
        if prompts_loader is not None and not isinstance(prompts_loader, SeedLoader):
            bound_arguments.arguments["prompts_dataloader"] = SeedLoader(prompts_loader)
        fit(*bound_arguments.args, **bound_arguments.kwargs)
        self.end_callbacks()

    return run


class ScriptMembers:
    """What ``PPOTrainer`` has for scripts alone: ``fit`` enters none of it unless a script uses it."""

    loss_terms: dict[str, Any]  # further terms of the actor's loss
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
    ptx_coef = _of_part("pretraining.coef")
    pretrain_loss = _of_part("pretraining.loss_fn")

    @property
    def args(self) -> Any:
        """Return the options: ``strategy.args`` of a script, else a namespace of all of them."""
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
        for engine in (self.rollout_engine, self.sampler.sampler.engine):
            if hasattr(engine, "micro_rollout_batch_size"):
                engine.micro_rollout_batch_size = value

    @property
    def max_norm(self) -> float:
        return self.config.training.max_norm

    @max_norm.setter
    def max_norm(self, value: float) -> None:
        self._set_options(max_norm=value)
        self.strategy.max_norm = value
        for model in filter(None, (self.actor, self.critic)):
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
        """Return the prompts; in a subclass with a ``fit`` of its own they are the seed's batches."""
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
        self.loss_terms.pop("pretraining", None)
        if batches is not None:
            self.loss_terms = {"pretraining": self.pretraining} | self.loss_terms

    @property
    def recorder(self) -> Any | None:
        """Return the callback that writes the logs, from the first step on."""
        return recorder_of(self) if self.started else None

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
        if self.options is not None and self.options.training.max_tokens_per_micro_batch is None:
            self._set_options(max_tokens_per_micro_batch=None)  # the GPU's memory had decided
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
        for name, tracker in self.trackers.items():
            replaced_sinks = [sink for sink in recorder.sinks if _is_tracker(sink, name)]
            for sink in replaced_sinks:
                sink.close()
            recorder.sinks = [sink for sink in recorder.sinks if sink not in replaced_sinks]
            if tracker is not None:
                recorder.sinks.append(_GivenTracker(name, tracker))

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
        self.start_callbacks()  # a loop of the user's own may come without fit()
        status = dict(logs_dict or {})
        outcomes = list(self.outcomes)
        self.outcomes = ()
        if outcomes:  # of a loop of the script's own
            status = optimizer_status([[outcome] for outcome in outcomes], self.strategy) | status
        if global_step > self.state.global_step:  # of a loop of the user's own
            self.state.global_step = global_step
        previous_args = self.args_of_fit
        self.args_of_fit = args
        self.client_states = client_states
        self._wants_stop = super().finish_step(global_step, status)
        self.args_of_fit = previous_args
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
        registered_states = {name: state[name] for name in (*self.states, *self.states_of_ranks)}
        state = state | dict(self.client_states or {}) | registered_states
        if not self.overrides("_save_checkpoint"):
            return self._save_checkpoint(self.args_of_fit, tag, state)
        state["rng"] = self.strategy.gather_object(rng_state())
        self._save_checkpoint(self.args_of_fit, tag, state)
        self._adopt(tag)

    def _save_checkpoint(
        self, args: Any, tag: str, client_states: Mapping[str, Any] | None = None
    ) -> None:
        """Write the checkpoint ``tag``; the seed's name, so that an override acts. Collective."""
        is_complete = client_states is not None and "trainer" in client_states
        state = client_states if is_complete else self.whole_state() | dict(client_states or {})
        checkpoint_folder = getattr(args, "ckpt_path", None) or self.config.checkpoint.ckpt_path
        self.checkpointer.save(checkpoint_folder, step_of(tag), state)

    def _adopt(self, tag: str) -> None:
        """Mark a checkpoint that a script has written as the latest, if all parts have it. Collective."""
        root = self.ckpt_path

        def mark() -> None:
            if tag in self.checkpointer.with_all_parts(local_folder(root)):
                mark_latest(root, tag)

        self.strategy.on_rank_0(mark, f"mark {tag} as the latest in {root}")

    # -- loops of a script ---------------------------------------------------------------------------------------

    def start_callbacks(self) -> None:
        """Do what ``fit`` does before the first step, for a loop of a script. Collective."""
        if self.started:
            return
        self.started = True
        self.begin_run()
        for callback in self.callbacks:
            callback.on_start(self)
        self.use_given_trackers()

    def end_callbacks(self) -> None:
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


class PromptText(str):
    """The text of a prompt, which also knows the :class:`Prompt`: its token ids, row number and further columns."""

    prompt: Prompt

    @classmethod
    def of(cls, prompt: Prompt) -> PromptText:
        text = cls(prompt.text)
        text.prompt = prompt
        return text


def as_prompts(batch: Any, tokenizer: Any, prompt_max_len: int) -> list[Prompt]:
    """Return the prompts of a batch of a prompts dataloader.

    Args:
        batch: prompts, strings, or in the seed's style (prompts, labels) or (prompts, labels, references), where
            ``references`` are the ground truth and ``labels`` name the data source.
        tokenizer: for strings.
        prompt_max_len: longest prompt, tokens.

    Raises:
        TypeError: on a batch of another form.
        ValueError: on a string longer than ``prompt_max_len`` tokens, or columns of different lengths.
    """
    if isinstance(batch, list) and all(isinstance(item, Prompt) for item in batch):
        return batch
    texts, labels, references = _columns(batch)
    for name, column in (("labels", labels), ("references", references)):
        if column is not None and len(column) != len(texts):
            raise ValueError(f"a batch of {len(texts)} prompts has {len(column)} {name}")
    truths = labels if references is None else references
    prompts = []
    for row, text in enumerate(texts):
        if isinstance(text, PromptText):
            label = text.prompt.label if truths is None else truths[row]
            prompts.append(replace(text.prompt, label=label))
            continue
        token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(token_ids) > prompt_max_len:
            raise ValueError(
                f"the prompt {text[:60]!r}… has {len(token_ids)} tokens, more than prompt_max_len {prompt_max_len}: "
                "raise it, or build the dataset with truncation"
            )
        label = None if truths is None else truths[row]
        data_source = (
            str(labels[row]) if references is not None and labels is not None else "default"
        )
        prompts.append(Prompt(text, token_ids, label, _index_of(text), data_source))
    return prompts


def _columns(batch: Any) -> list:
    """Return ``[prompts, labels, references]``, the last two possibly ``None``."""
    if _is_texts(batch):
        columns = [batch]
    elif isinstance(batch, (list, tuple)):
        columns = list(batch)
    else:
        columns = []
    all_have_rows = all(
        column is None or (hasattr(column, "__len__") and not isinstance(column, str))
        for column in columns
    )
    if not 1 <= len(columns) <= 3 or not _is_texts(columns[0]) or not all_have_rows:
        raise TypeError(
            "a batch of prompts must be a list of Prompt or of strings, or (prompts, labels[, references]); "
            f"got {type(batch).__name__} {str(batch)[:80]}"
        )
    return [*columns, None, None][:3]


def _is_texts(column: Any) -> bool:
    return isinstance(column, (list, tuple)) and all(isinstance(text, str) for text in column)


def _index_of(text: str) -> int:
    """Return a number for a prompt without row number: equal texts form one group, on any rank."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())


class _Episodes(RankSampler):
    """A sampler of batches, in the place where the seed's ``fit`` looks for its sampler."""

    def __init__(self, sampler: Any) -> None:
        self.set_epoch = sampler.set_epoch


class SeedLoader:
    """A prompts dataloader in the seed's form: each batch is ``[texts, labels]``.

    Batches that are no list of :class:`Prompt` stay as they are, and every other attribute is the dataloader's.
    """

    def __init__(self, loader: Iterable) -> None:
        self.loader = loader

    @property
    def sampler(self) -> Any:
        """Return a sampler with ``set_epoch(epoch, consumed_samples)``, if the dataloader has such a one."""
        batch_sampler = getattr(self.loader, "batch_sampler", None)
        if hasattr(batch_sampler, "set_epoch"):
            return _Episodes(batch_sampler)
        return getattr(self.loader, "sampler", None)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            if isinstance(batch, list) and all(isinstance(prompt, Prompt) for prompt in batch):
                batch = [
                    [PromptText.of(prompt) for prompt in batch],
                    [prompt.label for prompt in batch],
                ]
            yield batch

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["loader"], name)


class PretrainBatch(dict):
    """A batch for the PTX loss; ids and mask also by the places that they have in the seed's, 1 and 2."""

    PLACES = {1: "input_ids", 2: "attention_mask"}

    def __missing__(self, key: Any) -> Any:
        if key not in self.PLACES:
            raise KeyError(key)
        return self[self.PLACES[key]]


def pretrain_batches_of(batches: Iterator) -> Iterator:
    for batch in batches:
        yield PretrainBatch(batch) if isinstance(batch, Mapping) else batch
