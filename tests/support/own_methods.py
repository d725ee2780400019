"""A trainer's methods in the form that the seed's have: overrides that must run, with the trainer's own numbers."""

from __future__ import annotations

import os

from torch.utils.data import DataLoader

from lightppo import DistributedSampler, PPOTrainer, compute_approx_kl, masked_mean

KL_LOSS = {
    "use_kl_loss": True,
    "use_kl_in_reward": False,
    "init_kl_coef": 0.3,
    "kl_estimator": "k3",
}


class OwnSteps(PPOTrainer):
    """Both halves of the training step, in the form that OpenRLHF's have."""

    def training_step_actor(self, experience):
        self.actor.train()
        num_actions = experience.action_mask.size(1)
        ring = self.strategy.ring_attn_group
        log_probs, output = self.actor(
            experience.sequences,
            num_actions,
            attention_mask=experience.attention_mask,
            return_output=True,
            ring_attn_group=ring,
            logps_allgather=True,
            packed_seq_lens=None,
        )
        old, advantages, mask = (
            experience.action_log_probs,
            experience.advantages,
            experience.action_mask,
        )
        loss = actor_loss = self.actor_loss_fn(log_probs, old, advantages, action_mask=mask)
        if self.args.use_kl_loss:
            base = experience.base_action_log_probs
            kl = compute_approx_kl(log_probs, base, mask, kl_estimator=self.args.kl_estimator)
            kl_loss = masked_mean(kl, mask, dim=-1).mean()
            experience.info["kl"] = kl_loss.item()
            loss = actor_loss + kl_loss * self.kl_ctl.value
        if self.aux_loss:
            loss = loss + output.aux_loss * self.args.aux_loss_coef
        self.strategy.backward(loss, self.actor, self.actor_optim)
        done = self.strategy.optimizer_step(
            self.actor_optim, self.actor, self.actor_scheduler, name="actor"
        )
        status = {"policy_loss": actor_loss.item()} | (
            {} if done is None else {"actor_norm": done.grad_norm}
        )
        lengths = experience.info["response_length"]
        for name, values in experience.info.items():
            if name == "kl":
                status[name] = ((values * lengths).sum() / lengths.sum()).item()
            else:
                status[name] = values.mean().item()
        return status

    def training_step_critic(self, experience):
        self.critic.train()
        values, _ = self.critic(
            experience.sequences,
            num_actions=experience.action_mask.size(1),
            attention_mask=experience.attention_mask,
            return_output=True,
            ring_attn_group=self.strategy.ring_attn_group,
            values_allgather=True,
            packed_seq_lens=None,
        )
        old, returns, mask = experience.values, experience.returns, experience.action_mask
        loss = self.critic_loss_fn(values, old, returns, action_mask=mask)
        self.strategy.backward(loss, self.critic, self.critic_optim)
        done = self.strategy.optimizer_step(
            self.critic_optim, self.critic, self.critic_scheduler, name="critic"
        )
        return {"critic_loss": loss.item()} | (
            {} if done is None else {"critic_norm": done.grad_norm}
        )


class OwnTraining(PPOTrainer):
    """The seed's passes over the buffer: each number is summed over micro batches under the names of the first."""

    def ppo_train(self, global_steps=0):
        buffer, found = self.replay_buffer, []
        loader = DataLoader(
            buffer, buffer.sample_batch_size, drop_last=True, collate_fn=buffer.collate_fn
        )
        for _ in range(self.max_epochs):
            for experience in loader:
                status = self.training_step(experience, global_steps)
                status["kl"] *= status["response_length"]
                status = self.strategy.all_reduce(status)
                status["kl"] /= status["response_length"]
                found.append(status)
        mean = found[0]
        for status in found[1:]:
            for name, value in status.items():
                mean[name] += value
        return {name: value / len(found) for name, value in mean.items()}


class OwnCheckpoints(PPOTrainer):
    """The seed's checkpoints: its three arguments, and six by position for the strategy."""

    def _save_checkpoint(self, args, tag, client_states):
        limits = (args.max_ckpt_num, args.max_ckpt_mem)
        actor, critic = (
            os.path.join(args.ckpt_path, "_actor"),
            os.path.join(args.ckpt_path, "_critic"),
        )
        self.strategy.save_ckpt(self.actor.model, actor, tag, *limits, client_states)
        self.strategy.save_ckpt(self.critic, critic, tag, *limits)


class OwnFit(PPOTrainer):
    """The seed's loop over prompts."""

    def fit(
        self,
        args,
        prompts_dataloader,
        pretrain_dataloader,
        consumed_samples=0,
        num_update_steps_per_episodes=1,
    ):
        self.prompts_dataloader, self.pretrain_dataloader = prompts_dataloader, pretrain_dataloader
        batch, updates = args.rollout_batch_size, num_update_steps_per_episodes
        per_episode = (
            updates * args.train_batch_size // self.max_epochs // batch // args.n_samples_per_prompt
        )
        steps = consumed_samples // batch + 1
        first, consumed_samples = (
            consumed_samples // batch // per_episode,
            consumed_samples % (per_episode * batch),
        )
        for episode in range(first, args.num_episodes):
            assert isinstance(self.prompts_dataloader.sampler, DistributedSampler)
            self.prompts_dataloader.sampler.set_epoch(episode, consumed_samples=consumed_samples)
            consumed_samples = 0
            for texts, labels in self.prompts_dataloader:
                made = self.experience_maker.make_experience_list(
                    texts, labels, **self.generate_kwargs
                )
                for experience in made:
                    self.replay_buffer.append(experience)
                self.replay_buffer.normalize("advantages", self.strategy)
                status = self.ppo_train(steps)
                self.replay_buffer.clear()
                self.kl_ctl.update(
                    status["kl"], args.rollout_batch_size * args.n_samples_per_prompt
                )
                states = {"consumed_samples": steps * args.rollout_batch_size}
                self.save_logs_and_checkpoints(args, steps, None, status, states)
                steps += 1
