"""``NaiveExperienceMaker``: the seed's maker of experience, for scripts that have a loop of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightppo.distributed.deepspeed import DeepspeedStrategy
from lightppo.trainer.ppo_trainer import PPOTrainer


class NaiveExperienceMaker:
    """The seed's maker of experience, with its arguments: samples prompts, scores and prepares them for training.

    Options of sampling and of the algorithm come from ``strategy.args``. It may take the place of
    ``trainer.experience_maker``; an override of ``make_experience_list`` acts in ``fit``, which hands it rollouts.
    """

    def __init__(
        self,
        actor: Any,
        critic: Any,
        reward_model: Any,
        initial_model: Any,
        tokenizer: Any,
        prompt_max_len: int,
        kl_controller: Any,
        strategy: DeepspeedStrategy,
        remote_rm_url: str | Sequence[str] | None = None,
        reward_fn: Any = None,
    ) -> None:
        parts = PPOTrainer(
            strategy,
            actor,
            critic,
            reward_model,
            initial_model,
            ema_model=None,
            actor_optim=None,
            critic_optim=None,
            actor_scheduler=None,
            critic_scheduler=None,
            tokenizer=tokenizer,
            prompt_max_len=prompt_max_len,
            remote_rm_url=remote_rm_url,
            reward_fn=reward_fn,
            init_kl_coef=kl_controller.value,
        )
        self.maker = parts.experience_maker
        self.kl_ctl = kl_controller
        self.perf_stats: dict[str, float] | None = None

    def make_experience_list(self, all_prompts: Any, *labels: Any, **options: Any) -> list[Any]:
        """Experiences of prompts as texts, with their labels and generation options; or of rollouts. Collective."""
        return self.maker.make_experience_list(all_prompts, *labels, **options)

    @property
    def kl_ctl(self) -> Any:
        return self.maker.kl_ctl

    @kl_ctl.setter
    def kl_ctl(self, controller: Any) -> None:
        self.maker.kl_ctl = controller

    def __getattr__(self, name: str) -> Any:
        if name == "maker":
            raise AttributeError(name)  # before the constructor has set it
        return getattr(self.maker, name)
