"""PPOTrainer: the PPO loop. ``fit`` is the schedule; docs/dataflow.md follows the data through its numbered stages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

from lightppo.callbacks import Callback
from lightppo.config import PPOConfig
from lightppo.config.rules import trains
from lightppo.config.run_length import steps_per_episode
from lightppo.errors import NonFiniteError
from lightppo.rewards.reward_source import RewardSource, close_source
from lightppo.rollout.sampler import CollectedStep
from lightppo.trainer.build import PPOInputs, PPOParts, assemble, build
from lightppo.trainer.loop import TrainingLoop
from lightppo.trainer.prompts import EpisodePrompts


class PPOTrainer(TrainingLoop):
    """Trains an actor, and a critic where the estimator needs one: ``PPOTrainer.from_config(config).fit()``.

    Args:
        parts: all that it works with, finished.
        callbacks: of yours, beside those of every run.
    """

    samples_tokens = True

    def __init__(self, parts: PPOParts, callbacks: Iterable[Callback] = ()) -> None:
        self.actor, self.critic, self.initial_model = parts.actor, parts.critic, parts.initial_model
        self.reward_model, self.frozen = parts.reward_model, parts.frozen
        self.followers, self.exported = parts.followers, parts.actor
        self.rollout_engine = parts.rollout_engine
        self.sampler, self.experience_maker = parts.sampler, parts.experience_maker
        self.replay_buffer, self.update, self.kl_ctl = (
            parts.replay_buffer,
            parts.update,
            parts.kl_ctl,
        )
        self.prompts = parts.prompts_dataloader
        super().__init__(
            parts.config,
            parts.strategy,
            parts.tokenizer,
            parts.checkpointer,
            parts.skipped,
            state=parts.state,
            timer=parts.timer,
            callbacks=callbacks,
            evaluator=parts.evaluator,
            content=parts.origin.content,
            keeps=parts.origin.keeps,
            asked=parts.origin.asked,
        )
        self.why_untrained = self.sampler.why_untrained
        states = {
            "kl_ctl": self.kl_ctl,
            **self.experience_maker.shaper.states,
            "value_statistics": self.update.value_norm,
            **self.update.loss_terms,
        }
        for name, part in states.items():
            if part is not None:
                self.register_state(name, part)
        self.update.observe = partial(self.callbacks.on_micro_batch, self)
        self.update.entropy_rows = partial(self.callbacks.entropy_rows, self)
        self.update.stepped = partial(self.callbacks.on_optimizer_step, self)

    @classmethod
    def from_inputs(cls, inputs: PPOInputs, callbacks: Iterable[Callback] = ()) -> Self:
        """Of what ``build`` has made."""
        return cls(assemble(inputs), callbacks)

    @classmethod
    def from_config(cls, config: PPOConfig, callbacks: Iterable[Callback] = ()) -> Self:
        """Build strategy, models, data and everything else, and resume if there is something to resume. Collective."""
        trainer = build(config, cls, callbacks)
        trainer.resume()
        return trainer

    @property
    def reward_source(self) -> RewardSource:
        """What scores the samples."""
        return self.sampler.sampler.reward_source

    # -- the loop ------------------------------------------------------------------------------------------------

    def fit(self) -> None:
        """Train until the prompts or a limit end the run. Collective."""
        if self.is_complete():
            self.tell_complete()
            return self.close()
        with self.running():
            for step, prompts in self.steps():
                taken = prompts.taken
                with self.timer("step"), self.callbacks.around_step(self, step):
                    # 1 prompts → responses, scored and selected
                    collected = self.sampler.collect(prompts, step)
                    self.callbacks.on_rollouts(self, step, collected)
                    # 2 log probs, values, rewards → 3 advantages in the buffer
                    self.make_experience(collected, step)
                    self.callbacks.on_experience(self, step, self.replay_buffer.items)
                    # 4 → training_step per micro batch
                    status = collected.counts | self.train(step)
                    self.replay_buffer.clear()
                    with self.timer("sync"):
                        # 5 the next rollouts are on-policy
                        self.rollout_engine.sync_weights(self.actor)
                    self.control_kl(status)  # 6
                self.count_step(prompts, taken, collected)
                if self.finish_step(step, status):  # 7 logged, evaluated, saved
                    break
            self.finish()

    def make_experience(self, collected: CollectedStep, step: int) -> None:
        """Fill the replay buffer with the step's rollouts; advantages are whitened over all ranks. Collective."""
        if collected.not_finite is not None:
            self.leave_out(step, NonFiniteError(collected.not_finite, collected.rollouts))
        elif collected.groups > 0:
            with self.timer("experience"):
                try:
                    experience = self.experience_maker.make_experience_list(collected.rollouts)
                    self.replay_buffer.fill(experience, collected.repeated)
                    self.experience_maker.normalize(
                        self.replay_buffer, self.update.policy_loss, step
                    )
                except NonFiniteError as error:
                    self.leave_out(step, error)

    def leave_out(self, step: int, error: NonFiniteError) -> None:
        """Train nothing on rollouts whose numbers are not finite, on any rank."""
        self.skipped.leave_out(step, self.update.trained_models(step), error)

    def train(self, step: int) -> dict[str, float]:
        """The update of a step; its numbers. Collective."""
        return self.update.train(step)

    def control_kl(self, status: Mapping[str, float]) -> None:
        """Adapt the coefficient to the step's KL, if a token was trained."""
        if not math.isnan(status.get("advantage_mean", 0.0)):
            self.kl_ctl.update(status.get("policy_kl", 0.0), int(status.get("samples", 0)))

    def count_step(self, prompts: EpisodePrompts, taken: int, collected: CollectedStep) -> None:
        """Bring the state up to date after a step. Collective."""
        ended = prompts.exhausted and collected.surplus == 0
        self.state.finish_step(self.strategy.all_reduce(prompts.taken - taken, "sum"), ended)

    # -- limits and prompts --------------------------------------------------------------------------------------

    @property
    def only_evaluates(self) -> bool:
        return not trains(self.config)

    def limits(self) -> dict[str, tuple[int, int | None]]:
        training, state = self.config.training, self.state
        return {
            "num_episodes": (state.episode, training.num_episodes),
            "total_training_steps": (state.global_step, training.total_training_steps),
            "benchmark_steps": (state.global_step, training.benchmark_steps),
        }

    def count_steps(self) -> int:
        """Steps of the whole run, those that are done included; rejected groups may leave fewer."""
        training, state, per_episode = self.config.training, self.state, self.steps_per_episode()
        done = state.consumed_prompts // self.config.rollout.rollout_batch_size  # of this episode
        total = state.global_step + (training.num_episodes - state.episode) * per_episode - done
        limits = (total, training.total_training_steps, training.benchmark_steps)
        return min(limit for limit in limits if limit is not None)

    def steps_per_episode(self) -> int:
        return steps_per_episode(self.config, self.prompts)

    def episode_steps(self) -> Iterator[EpisodePrompts]:
        """The prompts of the episode, once for each step that takes some of them."""
        prompts = self.episode_prompts()
        while True:
            yield prompts

    def episode_prompts(self) -> EpisodePrompts:
        """From where the run is."""
        return EpisodePrompts(self.prompts, self.state.episode, self.state.consumed_prompts)

    # -- state and the end ---------------------------------------------------------------------------------------

    def client_state(self) -> dict[str, Any]:
        samples = self.state.global_step * self.config.rollout.rollout_batch_size
        return super().client_state() | {"consumed_samples": samples}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        if self.only_evaluates:  # another training's statistics and samples are not its own
            saved = {name: saved[name] for name in ("trainer", "world_size")}
        super().load_state(saved)
        self.rollout_engine.sync_weights(self.actor)

    def check_trained(self) -> None:
        super().check_trained()
        training, step = self.config.training, self.state.global_step
        wanted = training.total_training_steps
        if wanted is not None and step < wanted and training.benchmark_steps is None:
            self.strategy.print(
                f"note: the prompts held {step} steps; the schedules were stretched over "
                f"--total_training_steps {wanted}"
            )

    def saved_models(self) -> list[str]:
        checkpoint = self.config.checkpoint
        critic = (
            [f"{checkpoint.save_path.rstrip('/')}_critic"] if checkpoint.save_value_network else []
        )
        return [checkpoint.save_path, *critic]

    def save_model(self, path: str | Path | None = None) -> None:
        """Save the actor, or what a callback has ``exported`` in its place, for transformers; the critic if asked for."""
        path = path or self.config.checkpoint.save_path
        self.checkpointer.require_finite(self.state.global_step)
        models = [(self.exported, path)]
        if self.config.checkpoint.save_value_network:
            models.insert(0, (self.critic, f"{str(path).rstrip('/')}_critic"))
        for model, folder in models:
            self.strategy.save_model(model, self.tokenizer, folder, step=self.state.global_step)

    def close(self) -> None:
        """End the rollout engine; of a run that was built the reward sources, too: a script ends its own."""
        self.rollout_engine.close()
        if not self.owns_parts:
            return
        for source in {id(source): source for source in self.sources()}.values():
            close_source(source)

    def sources(self) -> list[RewardSource]:
        """Those that end with the run."""
        return [
            self.reward_source,
            getattr(self.evaluator, "reward_source", self.reward_source),
        ]
