"""The seed's maker of experience, as a script with a loop of its own uses it."""

from __future__ import annotations

import argparse

import torch


def test_a_maker_with_the_seeds_arguments(world, tiny_model, tmp_path):
    from lightppo import Actor, FixedKLController, NaiveExperienceMaker, get_strategy, get_tokenizer

    args = argparse.Namespace(
        advantage_estimator="reinforce_baseline", n_samples_per_prompt=2, train_batch_size=4, rollout_batch_size=2,
        micro_train_batch_size=2, generate_max_len=4, zero_stage=0, seed=1, save_path=str(tmp_path), num_examine=0,
    )  # fmt: skip
    strategy = get_strategy(args)
    strategy.setup_distributed()
    actor, reference = strategy.prepare(Actor(tiny_model)), strategy.prepare(Actor(tiny_model))
    tokenizer, controller = (
        get_tokenizer(tiny_model, actor.model, "left", strategy),
        FixedKLController(0.1),
    )

    def reward_fn(queries, prompts, labels):
        return [float(len(query) + len(label)) for query, label in zip(queries, labels)]

    class Mine(NaiveExperienceMaker):
        def make_experience_list(self, all_prompts, *labels, **options):
            found = super().make_experience_list(all_prompts, *labels, **options)
            for experience in found:
                experience.info["mine"] = torch.ones(len(experience))
            return found

    maker = Mine(actor, None, None, reference, tokenizer, 16, controller, strategy, None, reward_fn)
    found = maker.make_experience_list(["1+1=", "2+2="], ["a", "bb"], max_new_tokens=3)
    assert sum(len(experience) for experience in found) == 4
    assert all(experience.sequences.shape[1] <= 16 + 3 for experience in found)
    assert all(set(experience.info["mine"].tolist()) == {1.0} for experience in found)
    assert {"reward", "kl", "response_length"} <= found[0].info.keys()
    assert maker.kl_ctl is controller
    assert maker.actor is actor  # what only the inner maker has
