"""PPO with a critic in one loop, from the parts that the trainer is built from: read it from top to bottom, change it.

    python examples/custom_loop.py MODEL prompts.jsonl reward.py OUT
    torchrun --nproc_per_node 2 examples/custom_loop.py MODEL prompts.jsonl reward.py OUT

It computes what ``lightppo ppo`` computes with these options, to the last bit (tests/examples/test_custom_loop.py).
It leaves out checkpoints, logs, evaluation, scores of None, numbers that are not finite, and all other options.
"""

import sys
from typing import Any

from lightppo import (
    Actor,
    AdaptiveKLController,
    Critic,
    ExperienceMaker,
    PolicyLoss,
    PPOConfig,
    ReplayBuffer,
    ValueLoss,
    get_tokenizer,
)
from lightppo.config.rules import micro_batch_spec
from lightppo.experience.batching import minibatches, pass_generator
from lightppo.logging.step_metrics import merge_summaries, rollout_status, rollout_summaries
from lightppo.rollout.sampler import RolloutSampler
from lightppo.trainer import build

OPTIONS: dict[str, Any] = {
    "advantage_estimator": "gae",
    "kl_target": 0.1,  # the coefficient of the KL in the reward adapts
    "rollout_batch_size": 16,  # prompts per step
    "n_samples_per_prompt": 2,
    "train_batch_size": 16,  # samples per optimizer step
    "micro_train_batch_size": 4,  # samples per forward and backward pass
    "max_epochs": 2,  # passes over the samples of a step
    "prompt_max_len": 128,
    "generate_max_len": 128,
    "actor_learning_rate": 1e-6,
    "critic_learning_rate": 1e-5,
    "lr_scheduler": "constant",
    "lr_warmup_ratio": 0.0,
    "packing_samples": False,  # rows are padded
    "balance_ranks": False,  # samples stay on the rank that made them
    "old_log_probs": "forward",  # by a pass of the actor over the samples
}


def train(config: PPOConfig) -> None:
    """Train for one pass over the prompts and save the actor."""
    strategy = build.build_strategy(config)
    strategy.setup_distributed()
    model = config.model.pretrain
    tokenizer = get_tokenizer(model)
    prompts = build.build_prompts(config, tokenizer, strategy)
    actor = Actor(model, ds_config=strategy.get_ds_train_config(), valid_vocab_size=len(tokenizer))
    critic = Critic(model, ds_config=strategy.get_ds_train_config())
    reference = Actor(
        model, ds_config=strategy.get_ds_eval_config(), valid_vocab_size=len(tokenizer)
    )
    training = config.training
    actor_optim = strategy.create_optimizer(actor, lr=training.actor_learning_rate)
    critic_optim = strategy.create_optimizer(critic, lr=training.critic_learning_rate)
    (actor, *_), (critic, *_), reference = strategy.prepare(
        (actor, actor_optim, None), (critic, critic_optim, None), reference
    )
    engine = build.build_rollout_engine(config, strategy, actor, tokenizer)
    reward = build.build_reward(config, [], tokenizer, strategy)
    sampler = RolloutSampler(engine, reward, build.sampling_params(config))
    algorithm = config.algorithm
    kl_ctl = AdaptiveKLController(algorithm.init_kl_coef, algorithm.kl_target, algorithm.kl_horizon)
    maker = ExperienceMaker(actor, critic, reference, strategy, kl_ctl, config)
    buffer = ReplayBuffer(device=strategy.device)
    policy_loss = PolicyLoss()
    value_loss = ValueLoss()

    for step, batch in enumerate(build.prompts_dataloader(config, prompts, strategy), start=1):
        samples = sampler.score(sampler.generate(batch, step)).rollouts
        # Log probs, values, KL, token rewards, advantages and returns, (B, A) each.
        buffer.extend(maker.make_experience_list(samples))
        maker.normalize(buffer, policy_loss, step)  # advantages, over the samples of all ranks
        actor.train()
        critic.train()
        for epoch in range(training.max_epochs):
            for minibatch in minibatches(
                buffer.items,
                strategy,
                train_batch_size=training.train_batch_size,
                actor=micro_batch_spec(config, "actor_train"),
                generator=pass_generator(config.strategy.seed, step, epoch, strategy.get_rank()),
                collate=buffer.collate_fn,
            ):  # each is one optimizer step
                strategy.accumulate(actor, len(minibatch.micro_batches))
                strategy.accumulate(critic, len(minibatch.micro_batches))
                for exp in minibatch.micro_batches:
                    inputs = (exp.sequences, exp.num_actions, exp.attention_mask)
                    # Each loss is this micro batch's share of the loss of the optimizer step on all ranks.
                    shared = (exp.action_mask, exp.part.normalizer)
                    log_probs = actor(*inputs)  # (B, A)
                    loss, _ = policy_loss(log_probs, exp.action_log_probs, exp.advantages, *shared)
                    strategy.backward(loss, actor, actor_optim)
                    strategy.optimizer_step(actor_optim, actor)  # at the last micro batch
                    values = critic(*inputs)  # (B, A)
                    loss, _ = value_loss(values, exp.values, exp.returns, *shared)
                    strategy.backward(loss, critic, critic_optim)
                    strategy.optimizer_step(critic_optim, critic)
        summaries = strategy.all_gather_object(rollout_summaries(buffer.items))
        numbers = rollout_status(merge_summaries(summaries))
        strategy.print(f"step {step}: reward {numbers['reward']}, KL {numbers['policy_kl']}")
        kl_ctl.update(numbers["policy_kl"], numbers["samples"])
        buffer.clear()
        engine.sync_weights(actor)  # the next samples are on-policy
    strategy.save_model(actor, tokenizer, config.checkpoint.save_path)


def options(pretrain: str, prompt_data: str, reward_fn: str, save_path: str) -> PPOConfig:
    """Return the options of a run on these files."""
    files = {"pretrain": pretrain, "prompt_data": prompt_data, "reward_fn": reward_fn}
    return PPOConfig.from_flat(**files, save_path=save_path, **OPTIONS)


if __name__ == "__main__":
    train(options(*sys.argv[1:]).resolved())
