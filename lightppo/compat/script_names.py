"""Classes and functions by the names that scripts of LightRFT and OpenRLHF import."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Literal

import torch
from torch import Tensor

from lightppo.algorithms.kl import approx_kl
from lightppo.config import PPOConfig
from lightppo.distributed.deepspeed import DeepspeedStrategy
from lightppo.distributed.distributed import RankSampler as DistributedSampler
from lightppo.errors import ConfigError
from lightppo.experience.batching import ReplayBuffer
from lightppo.models.actor import Actor
from lightppo.models.critic import Critic, RewardModel
from lightppo.models.preparation import adapter_options, prepare_alone

__all__ = ["DistributedSampler"]


def get_llm_for_sequence_regression(
    path: str,
    model_type: Literal["critic", "reward"],
    *,
    lora_rank: int = 0,
    lora_alpha: float = 16,
    lora_dropout: float = 0.0,
    target_modules: str | Sequence[str] | None = "all-linear",
    **options: Any,
) -> Critic | RewardModel:
    """Load a critic or a reward model, by the seed's name and arguments; see their classes and :class:`Actor`."""
    classes: dict[str, type[Critic | RewardModel]] = {"critic": Critic, "reward": RewardModel}
    if model_type not in classes:
        raise ValueError(f"model_type must be 'critic' or 'reward', not {model_type!r}")
    model = classes[model_type](path, **options)
    adapters = adapter_options(lora_rank, lora_alpha, lora_dropout, target_modules)
    prepare_alone(model, "critic", **adapters)
    return model


class ActorLanguage(Actor):
    """LightRFT's name of the actor.

    ``high_entropy_token_ratio`` is an option of the loss, read from ``strategy.args``; :class:`PPOTrainer` refuses an
    actor that was given another one than that.
    """

    def __init__(
        self,
        pretrain_or_model: Any,
        use_flash_attention_2: bool = False,
        bf16: bool = True,
        *,
        device_map: None = None,
        high_entropy_token_ratio: float = 0.0,
        **options: Any,
    ) -> None:
        if device_map is not None:
            raise ConfigError(
                f"device_map {device_map!r}: leave it out, the launcher gives each process its device"
            )
        kinds: dict[str, Any] = {"use_flash_attention_2": use_flash_attention_2, "bf16": bf16}
        if not isinstance(pretrain_or_model, str):  # a model that is built already has its type
            kinds = {name: value for name, value in kinds.items() if value and name != "bf16"}
        super().__init__(pretrain_or_model, **kinds, **options)
        self.high_entropy_token_ratio = high_entropy_token_ratio


def check_actor(config: PPOConfig, actor: Any) -> None:
    """Raise ConfigError for an actor with a share of tokens that the loss does not have."""
    of_actor = getattr(actor, "high_entropy_token_ratio", 0.0)
    of_loss = config.loss.high_entropy_token_ratio
    if of_actor and of_actor != of_loss:
        name = "high_entropy_token_ratio"
        raise ConfigError(
            f"ActorLanguage has {name} {of_actor}, strategy.args {of_loss}: set args.{name} to {of_actor}"
        )


def unpacking_samples(values: Tensor, packed_seqlens: Sequence[int]) -> list[Tensor]:
    """Split (1, T) or (T,) into one tensor per length; what stands after the last one is left out."""
    lengths = [int(length) for length in packed_seqlens]
    values = values.squeeze(0)
    if sum(lengths) > len(values):
        raise ValueError(
            f"packed_seqlens sum to {sum(lengths)}, but there are {len(values)} values"
        )
    return list(values[: sum(lengths)].split(lengths))


def compute_approx_kl(
    log_probs: Tensor,
    log_probs_base: Tensor,
    action_mask: Tensor | None = None,
    kl_estimator: str | bool = "k1",
    use_kl_estimator_k3: bool = False,
) -> Tensor:
    """Return ``k1``, ``k2`` or ``k3`` of each token, 0 where it is masked: :func:`lightppo.algorithms.kl.approx_kl`.

    OpenRLHF until 0.5 has ``use_kl_estimator_k3`` in the place of ``kl_estimator``.
    """
    if isinstance(kl_estimator, bool):
        estimator = "k3" if kl_estimator else "k1"
    else:
        estimator = "k3" if use_kl_estimator_k3 else kl_estimator
    return approx_kl(log_probs, log_probs_base, estimator, action_mask=action_mask)


def get_strategy(args: Any) -> DeepspeedStrategy:
    """Make a strategy of attributes that are named like its arguments; ``dist_timeout`` is ``timeout_minutes``."""
    names = {f.name for f in fields(DeepspeedStrategy) if f.init} - {"args"}
    options = {name: getattr(args, name) for name in names if hasattr(args, name)}
    if hasattr(args, "dist_timeout"):
        options["timeout_minutes"] = args.dist_timeout
    return DeepspeedStrategy(args=args, **options)


class NaiveReplayBuffer(ReplayBuffer):
    """The seed's name and arguments; batches go to this process's device.

    ``packing_samples`` changes nothing here: rows are kept without padding and packed where a model runs.
    """

    def __init__(
        self,
        sample_batch_size: int,
        limit: int = 0,
        cpu_offload: bool = True,
        packing_samples: bool = False,
    ) -> None:
        device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
        super().__init__(sample_batch_size, limit, cpu_offload, device)
        self.packing_samples = packing_samples
        self.target_device = self.device
