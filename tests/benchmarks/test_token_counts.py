"""Positions that go through the models on the benchmark's workloads: the real tokens, not the padding, and on the
second a prompt once for all its samples."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from support.fakes import FakeStrategy
from support.tiny import tiny_config
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from lightppo.algorithms.kl import FixedKLController
from lightppo.config import parse_args
from lightppo.config.rules import micro_batch_spec, old_log_probs_from
from lightppo.data.records import Prompt, Rollout
from lightppo.experience.batching import ReplayBuffer, minibatches
from lightppo.experience.experience import Experience
from lightppo.experience.maker import ExperienceMaker
from lightppo.models.actor import Actor
from lightppo.models.batches import layout_of_all
from lightppo.models.critic import Critic


def rollouts_of(workload: Any, workloads: ModuleType) -> list[Rollout]:
    """Samples as long as the workload's: its prompts, and end-of-text as likely at every token."""
    scale, draw = workloads.SCALES["cpu"], random.Random(3)
    rollouts = []
    for index, text in enumerate(workloads.prompt_texts(workload, scale)):
        prompt = Prompt(text, [5 + int(word[1:]) % 30 for word in text.split()], index=index)
        for sample in range(workload.samples_per_prompt):
            length = 1
            while length < scale.new_tokens and draw.random() > scale.end_probability:
                length += 1
            reward = float(sample % 2)
            rollouts.append(
                Rollout(prompt, sample, [7] * length, "", "stop", [-1.0] * length, reward=reward)
            )
    return rollouts


def positions_of(
    workloads: ModuleType, changes: list[str], tmp_path, name: str = "W1"
) -> tuple[int, int]:
    """(positions through all models in one iteration but generation, real tokens times passes)."""
    workload = workloads.WORKLOADS[name]
    flags = workloads.lightppo_flags(workload, workloads.SCALES["cpu"], tmp_path, tmp_path, 1)
    config = parse_args([*map(str, flags), *changes]).resolved()
    model = tiny_config(max_position_embeddings=256)
    rows = {
        "packing_samples": config.training.packing_samples,
        "share_prompts": config.training.share_prompts,
    }
    actor, reference = (Actor(LlamaForCausalLM(model), **rows) for _ in range(2))
    critic = None
    if workload.critic:
        one_output = tiny_config(max_position_embeddings=256, num_labels=1)
        critic = Critic(LlamaForSequenceClassification(one_output), **rows)
    models = [some for some in (actor, reference, critic) if some is not None]
    strategy, count = FakeStrategy(), 0
    for some in models:  # each compares packed with alone at its first forward: not counted
        some(torch.tensor([[1, 2, 3]]), 1, torch.ones(1, 3, dtype=torch.long))

    def note(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> None:
        nonlocal count
        count += args[0].numel()

    for some in models:
        some.hf_model.get_input_embeddings().register_forward_hook(note)
    maker = ExperienceMaker(
        actor,
        critic,
        reference,
        strategy,
        FixedKLController(0.05),
        config,
        old_log_probs=old_log_probs_from(config, exact_rollout=True),
    )
    rollouts, buffer = rollouts_of(workload, workloads), ReplayBuffer()
    buffer.fill(maker.make_experience_list(rollouts))
    for _ in range(config.training.max_epochs):
        for minibatch in minibatches(
            buffer.items,
            strategy,
            train_batch_size=config.training.train_batch_size,
            actor=micro_batch_spec(config, "actor_train"),
            critic=micro_batch_spec(config, "critic_train"),
            layout=layout_of_all(models),
            shuffle=config.training.shuffle,
            generator=torch.Generator().manual_seed(0),
            collate=Experience.collate,
        ):
            for some, parts in (
                (actor, minibatch.micro_batches),
                (critic, (minibatch.critic_micro_batches or minibatch.micro_batches)),
            ):
                for part in parts if some is not None else ():
                    some(part.sequences, part.num_actions, part.attention_mask)
    tokens = sum(len(r.prompt.token_ids) + len(r.response_ids) for r in rollouts)
    # reference and values once; actor and critic in each epoch
    passes = (1 + config.training.max_epochs) * (2 if workload.critic else 1)
    return count, passes * tokens


def shared_tokens(workloads: ModuleType) -> int:
    """Of W2's samples, each prompt once."""
    rollouts = rollouts_of(workloads.WORKLOADS["W2"], workloads)
    prompts = {r.prompt.index: len(r.prompt.token_ids) for r in rollouts}
    return sum(prompts.values()) + sum(len(r.response_ids) for r in rollouts)


def test_within_a_tenth_of_the_real_tokens(
    benchmark_script: Callable[[str], ModuleType], tmp_path
) -> None:
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


def test_a_prompt_goes_through_once_for_all_its_samples(
    benchmark_script: Callable[[str], ModuleType], tmp_path
) -> None:
    """In scoring, and in training too: groups of 8 in optimizer steps of 16."""
    workloads = benchmark_script("workloads")
    positions, real = positions_of(workloads, [], tmp_path, "W2")
    shared = 3 * shared_tokens(workloads)  # the reference once, the actor in two epochs
    assert shared == positions < 0.7 * real
    by_sample, _ = positions_of(workloads, ["--shuffle", "samples"], tmp_path, "W2")
    assert shared < by_sample < real
    alone, _ = positions_of(workloads, ["--no_share_prompts"], tmp_path, "W2")
    assert alone == real
