"""Gradients of one optimizer step on fixed samples, for every way to cut them up. Usage: gradients.py MODEL OUT.pt

SGD with rate 1 and no clipping: the change of the weights is the gradient.
"""

from __future__ import annotations

import sys

import torch

from lightppo.algorithms.losses import GPTLMLoss
from lightppo.config import PPOConfig
from lightppo.experience.batching import minibatches
from lightppo.experience.experience import Experience
from lightppo.experience.replay_buffer import ReplayBuffer
from lightppo.models.actor import Actor
from lightppo.models.critic import Critic
from lightppo.strategy.deepspeed import DeepspeedStrategy
from lightppo.trainer.update import PPOUpdate

PROMPTS, RESPONSES = [2, 9, 5, 12, 3, 1, 7, 4], [1, 20, 3, 2, 14, 6, 1, 9]  # lengths that differ a lot
TEMPERATURE = 0.7


def make_samples(vocab: int = 43) -> list[Experience]:
    """Eight one-row experiences with random old log probs, advantages, values; one has a hole in its mask."""
    generator = torch.Generator().manual_seed(3)
    samples = []
    for p, r in zip(PROMPTS, RESPONSES):
        normal = lambda: torch.randn(1, r, generator=generator)  # noqa: B023, E731
        sample = Experience(
            sequences=torch.randint(4, vocab, (1, p + r), generator=generator),
            attention_mask=torch.ones(1, p + r, dtype=torch.long),
            action_mask=torch.ones(1, r, dtype=torch.bool),
            action_log_probs=-3 + 0.3 * normal(),
            base_action_log_probs=-3 + 0.3 * normal(),
            advantages=normal(),
            values=normal(),
            returns=normal(),
        )
        samples.append(sample)
    samples[1].action_mask[0, 5:9] = False
    return samples


def pretrain_batches(micro_batch_size: int, rank: int, world_size: int) -> list[dict[str, torch.Tensor]]:
    """The same eight texts in all cases, this rank's share in batches of the micro size."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(4, 43, (8, 11), generator=generator)
    labels = ids.clone()
    for i in range(8):
        labels[i, 2 + i :] = GPTLMLoss.IGNORE_INDEX
    ids, labels = ids[rank::world_size], labels[rank::world_size]
    parts = zip(ids.split(micro_batch_size), labels.split(micro_batch_size))
    return [{"input_ids": i, "attention_mask": torch.ones_like(i), "labels": l} for i, l in parts]  # noqa: E741


def algorithm():
    options = {"use_kl_loss": True, "kl_estimator": "k3", "init_kl_coef": 0.1, "ptx_coef": 0.5, "eps_clip": 0.3}
    return PPOConfig.from_flat(**options).resolved().algorithm


class Coefficient:
    value = 0.1


def gradients(model_path: str, zero_stage: int, cases: list[tuple[int, bool]]) -> dict:
    strategy = DeepspeedStrategy(max_norm=0.0, zero_stage=zero_stage)
    strategy.setup_distributed()
    torch.manual_seed(0)
    ds_config = strategy.get_ds_train_config() | {"zero_allow_untested_optimizer": True}
    actor = Actor(model_path, temperature=TEMPERATURE, ds_config=ds_config)
    critic = Critic(model_path, ds_config=ds_config)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in (actor, critic)]
    actor_parts, critic_parts = strategy.prepare((actor, optimizers[0], None), (critic, optimizers[1], None))
    actor, critic = actor_parts[0], critic_parts[0]
    update = PPOUpdate(strategy, *actor_parts, *critic_parts, None, algorithm(), Coefficient())

    rank, world = strategy.get_rank(), strategy.world_size
    mine = make_samples()[rank::world]
    buffer = ReplayBuffer(1)
    found = {}
    for micro_batch_size, packed in cases:
        actor.packing_samples = packed
        strategy.unwrap_model(critic).packing_samples = packed
        update.pretrain_batches = iter(pretrain_batches(micro_batch_size, rank, world))
        (minibatch,) = minibatches(
            mine,
            strategy,
            train_batch_size=8,
            micro_batch_size=micro_batch_size,
            generator=torch.Generator().manual_seed(micro_batch_size),
            collate=buffer.collate_fn,
            device=strategy.device,
        )
        case = {}
        for name, model, train in (("actor", actor, update.train_actor), ("critic", critic, update.train_critic)):
            with strategy.gathered_parameters(model) as module:
                before = {n: p.detach().clone() for n, p in module.named_parameters()}
            case[f"{name}_status"] = train(minibatch)
            with strategy.gathered_parameters(model) as module:
                case[name] = {n: before[n] - p.detach() for n, p in module.named_parameters()}
            if zero_stage == 0:  # masters of other stages would need refreshing; they run one case
                for n, p in module.named_parameters():
                    p.data.copy_(before[n])
        found[world, zero_stage, micro_batch_size, packed] = case
    return found


def main(model_path: str, out: str) -> None:
    found = gradients(model_path, 0, [(micro, packed) for micro in (1, 2, 4) for packed in (False, True)])
    for stage in (2, 3):
        found |= gradients(model_path, stage, [(2, stage == 3)])
    if torch.distributed.get_rank() == 0:
        torch.save(found, out)


if __name__ == "__main__":
    main(*sys.argv[-2:])  # the launcher puts --local_rank first
