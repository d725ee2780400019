"""The models of a run: each loaded under the ZeRO configuration of its role, and its tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from lightppo.config import PPOConfig
from lightppo.config.options import OptionSet
from lightppo.config.rules import (
    FrozenModel,
    critic_offloads,
    frozen_models,
    moves_reference,
    moving_models,
    needs_critic,
    needs_reference,
)
from lightppo.distributed.deepspeed import DeepspeedStrategy
from lightppo.errors import ConfigError, as_config_error
from lightppo.files import stage_to_local
from lightppo.models import loading
from lightppo.models.actor import Actor
from lightppo.models.critic import Critic, RewardModel
from lightppo.models.pretrained import loading_options
from lightppo.models.wrapper import Role, prepare_model

if TYPE_CHECKING:
    from lightppo.trainer.building import Building


@dataclass
class Models:
    """The models of a run. No reference also where the actor itself is it, adapters off."""

    actor: Actor
    critic: Any | None  # these are in their engines, if they were prepared
    reference: Actor | None
    reward_models: list[Any]
    # By the names of their parts in checkpoints.
    followers: dict[str, Actor] = field(default_factory=dict)
    frozen: dict[str, Actor] = field(default_factory=dict)  # further models by name
    # Models that score or train, by the flag that names each.
    by_flag: dict[str, Any] = field(default_factory=dict)


def build_models(
    config: PPOConfig,
    strategy: DeepspeedStrategy,
    into_engine: Callable[[Any, Role], Any] = lambda model, role: model,
) -> Models:
    """Load all models, each under the ZeRO configuration of its role.

    ``into_engine(model, role)`` takes each to its place before the next one loads: below ZeRO-3 a host holds one whole
    model per rank, not four.
    """
    loader = ModelLoader(config, strategy, into_engine)
    actor = loader.actor()
    return Models(
        actor=actor,
        critic=loader.critic() if needs_critic(config) else None,
        reference=loader.reference(actor) if needs_reference(config) else None,
        reward_models=[loader.reward_model(path) for path in config.model.reward_pretrain],
        followers={
            name: loader.follower(name) for name in moving_models(config) if name != "reference"
        },
        frozen={
            name: loader.frozen(name, frozen_model)
            for name, frozen_model in frozen_models(config).items()
        },
        by_flag=loader.by_flag,
    )


class ModelLoader:
    """Loads, prepares and places the models of a run, one by one."""

    def __init__(
        self,
        config: PPOConfig,
        strategy: DeepspeedStrategy,
        into_engine: Callable[[Any, Role], Any],
    ) -> None:
        self.config = config
        self.strategy = strategy
        self.into_engine = into_engine
        self.by_flag: dict[str, Any] = {}
        self.options = loading_options(config)
        shared_names = ("attn_implementation", "trust_remote_code", "external_lib", "seed")
        self.options_of_frozen = {name: self.options[name] for name in shared_names}
        self.temperature = config.rollout.temperature or 1.0

    def actor(self) -> Actor:
        """Load the policy that trains."""
        path = self.config.model.pretrain
        model = Actor(
            stage_to_local(path),
            dtype=self.strategy.dtype,
            ds_config=self.strategy.get_ds_train_config(),
            temperature=self.temperature,
            **self._options_of(path),
        )
        if self.config.loss.aux_loss_coef > 0:
            with as_config_error():
                model.check_router()
        if self.config.evaluation.val_only:
            model.hf_model.untrainable = None  # it only answers, and nothing of it is saved
        return self._placed(model, "actor", "--pretrain")

    def critic(self) -> Any:
        """Load ``--critic_pretrain``, in its engine."""
        model_options = self.config.model
        adam_offload, param_offload = critic_offloads(self.config)
        ds_config = self.strategy.get_ds_train_config(
            zero_stage=self.config.strategy.critic_zero_stage,
            max_norm=self.config.training.max_norm,
            adam_offload=adam_offload,
            param_offload=param_offload,
        )
        model = Critic(
            stage_to_local(model_options.critic_pretrain),
            dtype=self.strategy.dtype,
            ds_config=ds_config,
            value_head_prefix=model_options.value_head_prefix,
            init_value_head=True if model_options.init_critic_from_actor else None,
            **self._options_of(model_options.critic_pretrain),
        )
        return self._placed(model, "critic", "--critic_pretrain")

    def reference(self, actor: Actor) -> Actor | None:
        """Load ``--ref_pretrain``; None where the actor itself can say what it was, see ``Actor.as_loaded``."""
        path = self.config.model.ref_pretrain
        if actor.as_loaded is not None and path in (None, self.config.model.pretrain):
            return None
        reference = FrozenModel(path, "--ref_pretrain")
        # A reference that moves, like an average, is fp32: small steps would vanish in 16 bits.
        dtype = torch.float32 if moves_reference(self.config) else self.strategy.dtype
        return self._frozen("reference", reference, dtype, self._options_of(path))

    def reward_model(self, path: str) -> Any:
        """Load one of ``--reward_pretrain``, in its engine."""
        model = RewardModel(
            stage_to_local(path),
            dtype=self.strategy.dtype,
            ds_config=self._frozen_engine(self.strategy.dtype),
            normalize_reward=self.config.reward.normalize_reward,
            value_head_prefix=self.config.model.value_head_prefix,
            **self.options_of_frozen,
        )
        return self._placed(model, "reward", f"--reward_pretrain {path}")

    def follower(self, name: str) -> Actor:
        """Load what the actor is, in float32."""
        path = self.config.model.pretrain
        ds_config = self._frozen_engine(torch.float32)
        model = Actor(stage_to_local(path), ds_config=ds_config, **self._options_of(path))
        return self._placed(model, name)

    def frozen(self, name: str, frozen_model: FrozenModel) -> Actor:
        """Load a further model, as it is: neither 4 bits nor ``--override_config`` are its."""
        return self._frozen(name, frozen_model, self.strategy.dtype, self.options_of_frozen)

    def _frozen(
        self, role: Role, frozen_model: FrozenModel, dtype: torch.dtype, options: dict[str, Any]
    ) -> Actor:
        model = Actor(
            stage_to_local(frozen_model.path),
            dtype=dtype,
            ds_config=self._frozen_engine(dtype),
            flag=frozen_model.flag,
            temperature=self.temperature,
            **options,
        )
        return self._placed(model, role, frozen_model.flag)

    def _frozen_engine(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return the DeepSpeed configuration of a model that does not train."""
        options = self.config.strategy
        return self.strategy.get_ds_eval_config(
            options.ref_offload, zero_stage=options.ref_zero_stage, dtype=dtype
        )

    def _options_of(self, path: str | None) -> dict[str, Any]:
        """Return how the actor, or a model that may have a checkpoint of its own, is loaded."""
        from_scratch = self.config.model.init_from_scratch and path == self.config.model.pretrain
        return self.options | {"init_from_scratch": from_scratch}

    def _placed(self, model: Any, role: Role, flag: str | None = None) -> Any:
        prepare_model(model, role, self.config, self.strategy.device)
        model = self.into_engine(model, role)
        if flag is not None:
            self.by_flag[flag] = model
        return model


def fit_vocabulary(models: Models, tokenizer: Any, config: PPOConfig) -> None:
    """Let policies give log probs over the tokenizer's ids; ModelLoadError where it has more."""
    loading.fit_to_model(tokenizer, models.actor.hf_model, config.model.pretrain, "--pretrain")
    for name, frozen_model in frozen_models(config).items():
        loading.fit_to_model(
            tokenizer, models.frozen[name].hf_model, frozen_model.path, frozen_model.flag
        )
    for model in filter(None, (models.actor, models.reference, *models.frozen.values())):
        model.valid_vocab_size = loading.valid_vocab_size(tokenizer)


def build_tokenizer(config: OptionSet, actor: Actor | None = None) -> Any:
    """Return the actor's tokenizer; if the actor is there, checked against its embedding."""
    model_options = config.model
    path = model_options.pretrain
    flag = "--pretrain"
    if model_options.tokenizer_path is not None:
        path = model_options.tokenizer_path
        flag = "--tokenizer_path"
    return loading.get_tokenizer(
        stage_to_local(path),
        actor,
        use_fast=not model_options.disable_fast_tokenizer,
        trust_remote_code=model_options.trust_remote_code,
        flag=flag,
    )


def check_vocabularies(building: Building) -> None:
    """Refuse further models of a run, or a reference of preferences, with other tokens than the model that trains."""
    config = building.config
    for path, flag in _compared(config):
        check_vocabulary(config, path, flag, building.tokenizer)


def _compared(config: OptionSet) -> Iterator[tuple[str, str]]:
    if isinstance(config, PPOConfig):
        yield from (
            (frozen_model.path, frozen_model.flag)
            for frozen_model in frozen_models(config).values()
        )
    elif (reference := config.flat().get("ref_pretrain")) is not None:
        yield reference, "--ref_pretrain"


def check_vocabulary(config: OptionSet, path: str, flag: str, tokenizer: Any) -> None:
    """Raise ConfigError where log probs of this model are of other tokens than those of the model that trains."""
    tokenizer_of_path = loading.get_tokenizer(
        stage_to_local(path),
        use_fast=not config.model.disable_fast_tokenizer,
        trust_remote_code=config.model.trust_remote_code,
        flag=flag,
    )
    other_ids = tokenizer_of_path.get_vocab()
    different_tokens = [
        token
        for token, token_id in tokenizer.get_vocab().items()
        if other_ids.get(token) != token_id
    ]
    if different_tokens:
        raise ConfigError(
            f"{flag} {path} has another vocabulary than the model that trains: {len(different_tokens)} of its "
            f"tokens have no id there or another one ({', '.join(map(repr, sorted(different_tokens)[:3]))}, …): take a "
            "model of the same family"
        )
