"""Gradients of one optimizer step on fixed samples, for every way to cut them up. Usage: gradients.py MODEL OUT.pt

SGD with rate 1 and no clipping: the change of the weights is the gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch

from lightppo import PPOTrainer
from lightppo.algorithms.entries import POLICY_LOSSES
from lightppo.algorithms.losses import GPTLMLoss
from lightppo.config import PPOConfig
from lightppo.config.rules import MicroBatchSpec
from lightppo.distributed.deepspeed import DeepspeedStrategy
from lightppo.experience.batching import Minibatch, ReplayBuffer, minibatches
from lightppo.experience.experience import Experience
from lightppo.logging import step_metrics as m
from lightppo.models.actor import Actor
from lightppo.models.batches import PaddedLayout
from lightppo.models.critic import Critic
from lightppo.zero3 import get_engine

# lengths that differ a lot
PROMPTS, RESPONSES = [2, 9, 5, 12, 3, 1, 7, 4], [1, 20, 3, 2, 14, 6, 1, 9]
# row → an earlier row with its prompt; also with the samples shared out to two ranks
SAME_PROMPT = {5: 1, 6: 0, 7: 1}
SHARED = "shared"  # packed, a prompt once for all its samples
TEMPERATURE = 0.7


def make_samples(vocab: int = 43) -> list[Experience]:
    """Eight one-row experiences with random old log probs, advantages, values; one has a hole in its mask."""
    generator = torch.Generator().manual_seed(3)
    samples, prompts = [], []
    for i, (p, r) in enumerate(zip(PROMPTS, RESPONSES)):
        prompt = torch.randint(4, vocab, (1, p), generator=generator)
        prompts.append(prompts[SAME_PROMPT[i]] if i in SAME_PROMPT else prompt)
        sequences = torch.cat([prompts[i], torch.randint(4, vocab, (1, r), generator=generator)], 1)
        normal = lambda: torch.randn(1, r, generator=generator)  # noqa: B023, E731
        sample = Experience(
            sequences=sequences,
            attention_mask=torch.ones_like(sequences),
            action_mask=torch.ones(1, r, dtype=torch.bool),
            action_log_probs=-3 + 0.3 * normal(),
            base_action_log_probs=-3 + 0.3 * normal(),
            advantages=normal(),
            values=normal(),
            returns=normal(),
            loss_weights=normal().abs(),
            selected=normal() > 0,
        )
        sample.rollout_log_probs = sample.action_log_probs  # as with --old_log_probs rollout
        samples.append(sample)
    samples[1].action_mask[0, 5:9] = False
    return samples


def pretrain_batches(count: int, rank: int, world_size: int) -> list[dict[str, torch.Tensor]]:
    """The same eight texts in all cases, this rank's share in so many batches."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(4, 43, (8, 11), generator=generator)
    labels = ids.clone()
    for i in range(8):
        labels[i, 2 + i :] = GPTLMLoss.IGNORE_INDEX
    ids, labels = ids[rank::world_size], labels[rank::world_size]
    parts = zip(ids.tensor_split(count), labels.tensor_split(count))
    return [{"input_ids": i, "attention_mask": torch.ones_like(i), "labels": l} for i, l in parts]  # noqa: E741


OPTIONS = {
    "use_kl_loss": True,
    "kl_estimator": "k3",
    "init_kl_coef": 0.1,
    "ptx_coef": 0.5,
    "eps_clip": 0.3,
}
WIDE = {"eps_clip_low": 0.6, "eps_clip_high": 0.9}  # so that only some tokens are clipped
# Further ways to train, each cut up as WAYS says.
VARIANTS: dict[str, dict] = {
    **{f"loss {name}": {"policy_loss": name} for name in POLICY_LOSSES},
    **{f"loss {name}": {"policy_loss": name, **WIDE} for name in ("gspo", "gmpo", "cispo", "cpgd")},
    **{
        f"kl {name}": {"use_kl_loss": True, "kl_estimator": name}
        for name in ("k2", "full", "k1+", "k3+", "k3_ratio")
    },
    "entropy": {"entropy_coef": 0.3, "loss_agg_mode": "seq-mean-token-mean"},
    "rejections": {"rollout_rejection": ["opsm=0.05", "token_k2=0.2"], "old_log_probs": "rollout"},
    "sum norm": {"loss_agg_mode": "seq-mean-token-sum-norm", "use_kl_loss": True},
}
# By the number of ranks: micro batch and rows of each way.
WAYS = {1: ((4, False), (2, True), (4, SHARED)), 2: ((1, False), (4, SHARED))}


class Tokenizer:
    """As much of one as a trainer that gets token ids asks for."""

    pad_token_id = 0

    def __len__(self) -> int:
        return 64

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def build_trainer(
    strategy, actor_parts: tuple, critic_parts: tuple, reference: Actor, **options
) -> PPOTrainer:
    """Trains the actor alone; with ``freezing_actor_steps`` the critic alone."""
    actor, actor_optim, _ = actor_parts
    trains_critic = options.get("freezing_actor_steps", 0) > 0
    critic, critic_optim = critic_parts[:2] if trains_critic else (None, None)
    config = PPOConfig.from_flat(
        advantage_estimator="gae" if trains_critic else "reinforce", **options
    )
    models, trained = (
        (actor, critic, None, reference, None),
        (actor_optim, critic_optim, None, None),
    )
    parts = {
        "rollout_engine": SimpleNamespace(),
        "reward_source": SimpleNamespace(name="none", score=len),
    }
    return PPOTrainer(strategy, *models, *trained, config=config, tokenizer=Tokenizer(), **parts)


def gradients(model_path: str, zero_stage: int, cases: list[tuple[int, bool | str]]) -> dict:
    strategy = DeepspeedStrategy(max_norm=0.0, zero_stage=zero_stage)
    strategy.setup_distributed()
    torch.manual_seed(0)
    ds_config = strategy.get_ds_train_config() | {"zero_allow_untested_optimizer": True}
    actor = Actor(model_path, temperature=TEMPERATURE, ds_config=ds_config, packing_samples=True)
    critic = Critic(model_path, ds_config=ds_config, packing_samples=True, draws_head=True)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in (actor, critic)]
    actor_parts, critic_parts = strategy.prepare(
        (actor, optimizers[0], None), (critic, optimizers[1], None)
    )
    actor, critic = actor_parts[0], critic_parts[0]
    torch.manual_seed(1)
    reference = Actor(model_path, temperature=TEMPERATURE, packing_samples=True).requires_grad_(
        False
    )
    for p in reference.parameters():
        p.add_(0.05 * torch.randn_like(p))
    trainers = {
        "actor": build_trainer(strategy, actor_parts, critic_parts, reference, **OPTIONS),
        "critic": build_trainer(
            strategy, actor_parts, critic_parts, reference, init_kl_coef=0.1, freezing_actor_steps=9
        ),
    }

    rank, world = strategy.get_rank(), strategy.world_size
    mine = make_samples()[rank::world]
    found = {}
    for micro, packed in cases:
        set_rows((actor, strategy.unwrap_model(critic)), packed)
        case = {}
        for name, model in (("actor", actor), ("critic", critic)):
            for item in mine:
                item.loss_weights = None
            minibatch = minibatch_of(strategy, mine, micro, actor.layout)
            trainers["actor"].pretrain_dataloader = iter(
                pretrain_batches(len(minibatch.micro_batches), rank, world)
            )
            with counted_tokens(strategy.unwrap_model(model)) as tokens:
                change, status = one_step(trainers[name], model, minibatch)
            case |= {name: change, f"{name}_status": status, f"{name}_tokens": sum(tokens)}
        found[world, zero_stage, micro, packed] = case
    if zero_stage == 0:
        for name, options in VARIANTS.items():
            trainer = build_trainer(
                strategy, actor_parts, critic_parts, reference, init_kl_coef=0.1, **options
            )
            mine = make_samples()[rank::world]
            for micro, packed in WAYS[world]:
                set_rows((actor, reference), packed)
                minibatch = minibatch_of(strategy, mine, micro, actor.layout)
                change, status = one_step(trainer, actor, minibatch)
                found[name, world, micro, packed] = {"actor": change, "actor_status": status}
    return found


@contextmanager
def counted_tokens(model: torch.nn.Module) -> Iterator[list[int]]:
    """Of each forward."""
    tokens: list[int] = []
    module = model.hf_model if hasattr(model, "hf_model") else model
    note = lambda module, args, output: tokens.append(args[0].numel())  # noqa: E731
    hook = module.get_input_embeddings().register_forward_hook(note)
    try:
        yield tokens
    finally:
        hook.remove()


def set_rows(models: tuple, packed: bool | str) -> None:
    for model in models:
        model.layout.packs, model.layout.share_prompts = bool(packed), packed == SHARED


def minibatch_of(
    strategy, mine: list[Experience], micro: int | str, layout: PaddedLayout
) -> Minibatch:
    """By so many samples; "40t": by so many tokens, and the critic by half of them."""
    actor = critic = (
        MicroBatchSpec(micro)
        if isinstance(micro, int)
        else MicroBatchSpec(int(micro[:-1]), "tokens")
    )
    if actor.unit == "tokens":
        critic = MicroBatchSpec(actor.size // 2, "tokens")
    (minibatch,) = minibatches(
        mine,
        strategy,
        train_batch_size=8,
        actor=actor,
        critic=critic,
        layout=layout,
        generator=torch.Generator().manual_seed(actor.size),
        collate=ReplayBuffer().collate_fn,
        loss_scale=9.0,
    )
    return minibatch


def zero_stage_is_0(model) -> bool:
    return get_engine(model, "the test").zero_optimization_stage() == 0


def one_step(trainer: PPOTrainer, model, minibatch: Minibatch) -> tuple[dict, dict]:
    """The change of the weights, and the status. At stage 0 the weights are put back; others run one step only."""
    strategy = trainer.strategy
    with strategy.gathered_parameters(model) as module:
        before = {n: p.detach().clone() for n, p in module.named_parameters()}
    status = m.optimizer_status([trainer.train_minibatch(minibatch, 1)], strategy)
    with strategy.gathered_parameters(model) as module:
        change = {n: before[n] - p.detach() for n, p in module.named_parameters()}
        if zero_stage_is_0(model):  # masters of other stages would need refreshing
            for n, p in module.named_parameters():
                p.data.copy_(before[n])
    return change, status


def main(model_path: str, out: str) -> None:
    rows = (False, True, SHARED)
    found = gradients(
        model_path, 0, [(micro, packed) for micro in (1, 2, 4, "40t") for packed in rows]
    )
    for stage, packed in ((2, False), (3, True), (3, SHARED)):
        found |= gradients(model_path, stage, [(2, packed)])
    if torch.distributed.get_rank() == 0:
        torch.save(found, out)


if __name__ == "__main__":
    main(*sys.argv[-2:])  # the launcher puts --local_rank first
