"""Positions that go through the models on the benchmark's first workload: the real tokens, not the padding."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from support.fakes import FakeStrategy
from support.tiny import tiny_config
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from lightppo.algorithms.kl import FixedKLController
from lightppo.config import parse_args
from lightppo.config.micro_batches import micro_batch_spec
from lightppo.data.records import Prompt, Rollout
from lightppo.experience.batching import minibatches
from lightppo.experience.experience import Experience
from lightppo.experience.experience_maker import ExperienceMaker
from lightppo.experience.replay_buffer import ReplayBuffer
from lightppo.models.actor import Actor
from lightppo.models.critic import Critic


def rollouts_of(workloads: ModuleType) -> list[Rollout]:
    """Samples as long as W1's: its prompts, and end-of-text as likely at every token."""
    scale, draw = workloads.SCALES["cpu"], random.Random(3)
    rollouts = []
    for index, text in enumerate(workloads.prompt_texts(workloads.WORKLOADS["W1"], scale)):
        length = 1
        while length < scale.new_tokens and draw.random() > scale.end_probability:
            length += 1
        prompt = Prompt(text, [5] * len(text.split()), index=index)
        rollouts.append(Rollout(prompt, 0, [7] * length, "", "stop", [-1.0] * length, reward=1.0))
    return rollouts


def positions_of(workloads: ModuleType, changes: list[str], tmp_path) -> tuple[int, int]:
    """(positions through all models in one iteration but generation, real tokens times passes)."""
    flags = workloads.lightppo_flags(workloads.WORKLOADS["W1"], workloads.SCALES["cpu"], tmp_path, tmp_path, 1)
    config = parse_args([*map(str, flags), *changes]).resolved()
    model = tiny_config(max_position_embeddings=256)
    packing = config.training.packing_samples
    actor, reference = (Actor(LlamaForCausalLM(model), packing_samples=packing) for _ in range(2))
    critic = Critic(LlamaForSequenceClassification(tiny_config(max_position_embeddings=256, num_labels=1)),
                    packing_samples=packing)  # fmt: skip
    strategy, count = FakeStrategy(), 0
    for some in (actor, reference, critic):  # each compares packed with alone at its first forward: not counted
        some(torch.tensor([[1, 2, 3]]), 1, torch.ones(1, 3, dtype=torch.long))

    def note(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> None:
        nonlocal count
        count += args[0].numel()

    for some in (actor, reference, critic):
        some.hf_model.get_input_embeddings().register_forward_hook(note)
    maker = ExperienceMaker(
        actor, critic, reference, strategy, FixedKLController(0.05), config, exact_rollout_log_probs=True
    )
    rollouts, buffer = rollouts_of(workloads), ReplayBuffer(1)
    buffer.extend(maker.make_experience_list(rollouts))
    for _ in range(config.training.max_epochs):
        for minibatch in minibatches(
            buffer.items,
            strategy,
            train_batch_size=config.training.train_batch_size,
            actor=micro_batch_spec(config, "actor_train"),
            critic=micro_batch_spec(config, "critic_train"),
            packed=packing,
            generator=torch.Generator().manual_seed(0),
            collate=Experience.collate,
            device=strategy.device,
        ):
            for some, parts in ((actor, minibatch.micro_batches), (critic, minibatch.of_critic)):
                for part in parts:
                    some(part.sequences, part.num_actions, part.attention_mask)
    tokens = sum(len(r.prompt.token_ids) + len(r.response_ids) for r in rollouts)
    passes = 2 + 2 * config.training.max_epochs  # reference and values once; actor and critic in each epoch
    return count, passes * tokens


def test_within_a_tenth_of_the_real_tokens(benchmark_script: Callable[[str], ModuleType], tmp_path) -> None:
    workloads = benchmark_script("workloads")
    positions, real = positions_of(workloads, [], tmp_path)
    assert real <= positions <= 1.1 * real
    positions, real = positions_of(workloads, ["--no_packing_samples"], tmp_path)
    assert positions > 1.2 * real  # what padding costs even in micro batches of like lengths


def test_no_pass_without_a_reason(benchmark_script: Callable[[str], ModuleType], tmp_path) -> None:
    """A pass of the actor before training is one more of all tokens: not made where the rollout says the same."""
    workloads = benchmark_script("workloads")
    positions, real = positions_of(workloads, [], tmp_path)
    with_pass, _ = positions_of(workloads, ["--old_log_probs", "forward"], tmp_path)
    assert with_pass - positions == pytest.approx(real / 6, rel=0.01)
