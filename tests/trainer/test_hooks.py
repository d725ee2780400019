"""What a subclass in the seed's style overrides is what ``fit`` runs; the seed's public attributes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.fakes import FakeEngine
from support.runs import trained_rows
from support.sampled import PROMPTS, sample

from lightppo import PPOTrainer
from lightppo.errors import ConfigError
from lightppo.rewards.reward_source import RewardOutput

# Of the seed's trainer, options and objects alike.
SEED_ATTRIBUTES = (
    *(
        "strategy",
        "args",
        "save_hf_ckpt",
        "disable_ds_ckpt",
        "micro_rollout_batch_size",
        "max_epochs",
        "tokenizer",
    ),
    *(
        "generate_kwargs",
        "dataloader_pin_memory",
        "max_norm",
        "ptx_coef",
        "micro_train_batch_size",
        "kl_target",
    ),
    *(
        "prompt_max_len",
        "ema_beta",
        "gradient_checkpointing",
        "reward_fn",
        "actor",
        "critic",
        "reward_model",
    ),
    *(
        "remote_rm_url",
        "initial_model",
        "ema_model",
        "actor_optim",
        "critic_optim",
        "actor_scheduler",
    ),
    *(
        "critic_scheduler",
        "actor_loss_fn",
        "critic_loss_fn",
        "ptx_loss_fn",
        "freezing_actor_steps",
        "aux_loss",
    ),
    *("kl_ctl", "experience_maker", "replay_buffer", "_wandb", "_tensorboard", "_save_checkpoint"),
    *("prompts_dataloader", "pretrain_dataloader"),
)


def test_fit_runs_every_override_for_every_micro_batch(made):
    """Two episodes of one step: 4 samples in micro batches of 2."""
    calls: list[str] = []

    class Mine(PPOTrainer):
        def ppo_train(self, global_steps=0):
            calls.append("ppo_train")
            return super().ppo_train(global_steps)

        def training_step(self, experience, global_steps, entropy_mask=None):
            calls.append(f"training_step of {len(experience)}")
            return super().training_step(experience, global_steps) | {
                "my_metric": float(len(calls))
            }

        def training_step_actor(self, experience):
            calls.append("actor")
            # though one step per rollout would need none
            assert experience.action_log_probs is not None
            return super().training_step_actor(experience)

        def training_step_critic(self, experience):
            calls.append("critic")
            return super().training_step_critic(experience)

        def save_logs_and_checkpoints(
            self, args, global_step, step_bar, logs_dict=None, client_states=None
        ):
            calls.append("save_logs")
            super().save_logs_and_checkpoints(args, global_step, step_bar, logs_dict, client_states)

        def _save_checkpoint(self, args, tag, client_states=None):
            calls.append(tag)

    trainer = made(Mine)
    schedule = trainer.actor_scheduler.last_epoch
    trainer.fit(trainer.args, [PROMPTS])
    step = ["ppo_train", *["training_step of 2", "actor", "critic"] * 2, "save_logs"]
    assert calls == [*step, *step, "global_step2"]
    assert trainer.actor_scheduler.last_epoch == schedule + 2  # one optimizer step per 4 samples
    logged = trained_rows(_folder(trainer))
    # after each micro batch
    assert [row["train/my_metric"] for row in logged] == [(4 + 7) / 2, (12 + 15) / 2]
    assert trainer.args.save_steps == 2
    assert trainer.args.eval_steps == 1  # once per episode


def _folder(trainer: PPOTrainer) -> Path:
    return Path(trainer.config.checkpoint.save_path)


def test_a_training_step_of_the_users_own_entirely(made):
    """As a script that was written for the seed: backward, step and average per micro batch, and its own status."""

    class Mine(PPOTrainer):
        def training_step_actor(self, experience):
            self.actor.train()
            log_probs = self.actor(
                experience.sequences, experience.action_mask.size(1), experience.attention_mask
            )
            loss = -(log_probs * experience.advantages * experience.action_mask).mean()
            self.strategy.backward(loss, self.actor, self.actor_optim)
            self.strategy.optimizer_step(
                self.actor_optim, self.actor, self.actor_scheduler, name="actor"
            )
            return {"policy_loss": loss.item(), "actor_lr": self.actor_scheduler.get_last_lr()[0]}

    trainer = made(Mine)
    schedule, before = trainer.actor_scheduler.last_epoch, _weights(trainer)
    trainer.fit(trainer.args, [PROMPTS])
    assert trainer.actor_scheduler.last_epoch == schedule + 2
    assert not all(torch.equal(a, b) for a, b in zip(before, _weights(trainer)))
    assert all(
        "train/policy_loss" in row and "train/entropy" not in row
        for row in trained_rows(_folder(trainer))
    )


def _weights(trainer: PPOTrainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in trainer.strategy.unwrap_model(trainer.actor).parameters()]


def test_a_status_that_is_no_number_is_refused(made):
    class Mine(PPOTrainer):
        def training_step_critic(self, experience):
            return {"note": "far"}

    trainer = made(Mine)
    sample(trainer)
    with pytest.raises(TypeError, match="'note'"):
        trainer.ppo_train(1)


def test_one_step_for_both_models_needs_one_micro_batch_for_both(made):
    class Mine(PPOTrainer):
        def training_step(self, experience, global_steps, entropy_mask=None):
            return super().training_step(experience, global_steps)

    trainer = made(Mine, args={"micro_batch_specs": ("critic_train=1",)})
    sample(trainer)
    with pytest.raises(ConfigError, match=r"Mine\.training_step"):
        trainer.ppo_train(1)


def test_a_loss_that_replaces_the_trainers_is_the_one_that_trains(made):
    trainer = made(PPOTrainer)
    seen: list[tuple] = []

    def loss(log_probs, old_log_probs, advantages, action_mask, normalizer, **rest):
        seen.append(log_probs.shape)
        return (log_probs * action_mask).sum() / 100, {
            "ratio": torch.ones(()),
            "approx_kl": torch.zeros(()),
        }

    trainer.actor_loss_fn = loss
    sample(trainer)
    assert trainer.ppo_train(1)["policy_loss"] != 0
    assert len(seen) == 2


def test_the_seeds_attributes_are_there(made):
    trainer = made(PPOTrainer, init_kl_coef=0.05, kl_target=0.1, temperature=0.7)
    missing = [name for name in SEED_ATTRIBUTES if not hasattr(trainer, name)]
    assert not missing
    assert trainer.args is trainer.strategy.args
    assert (trainer.micro_train_batch_size, trainer.prompt_max_len, trainer.kl_target) == (
        2,
        12,
        0.1,
    )
    assert trainer.generate_kwargs["temperature"] == 0.7
    assert trainer._wandb is None


def test_minus_one_save_steps_become_infinite(made):
    trainer = made(PPOTrainer, args={})
    trainer.args.save_steps = -1
    trainer.fit(trainer.args, [PROMPTS])
    assert trainer.args.save_steps == float("inf")


def test_experience_of_texts_with_options_of_generation(made):
    labels: list[Any] = []

    def score(rollouts):
        labels.extend(r.prompt.label for r in rollouts)
        return RewardOutput([1.0] * len(rollouts))

    class Engine(FakeEngine):
        def generate(self, prompts, sampling):
            found = super().generate([replace(p, index=0) for p in prompts], sampling)
            return [
                replace(r, prompt=p)
                for p, r in zip([p for p in prompts for _ in range(sampling.n)], found)
            ]

    source = SimpleNamespace(name="ones", score=score)
    trainer = made(PPOTrainer, reward_source=source, rollout_engine=Engine())
    batches = trainer.experience_maker.make_experience_list(
        ["1+1=", "2+2="], ["2", "4"], temperature=0.5
    )
    assert sum(len(batch) for batch in batches) == 4
    assert labels == ["2", "2", "4", "4"]
    assert trainer.rollout_engine.calls[-1][1].temperature == 0.5
    assert trainer.rollout_engine.calls[-1][1].n == 2
    with pytest.raises(ConfigError, match="temprature"):
        trainer.experience_maker.make_experience_list(["1+1="], None, temprature=0.5)


def test_texts_need_something_to_sample_them_with():
    from lightppo import ExperienceMaker, FixedKLController, PPOConfig
    from lightppo.ranks import Alone

    config = PPOConfig.from_flat(advantage_estimator="reinforce", init_kl_coef=0.0).resolved()
    maker = ExperienceMaker(
        torch.nn.Linear(1, 1), None, None, Alone(), FixedKLController(0.0), config
    )
    with pytest.raises(ValueError, match="scored rollouts"):
        maker.make_experience_list(["1+1="])
