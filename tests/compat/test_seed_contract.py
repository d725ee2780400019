"""A user script in the seed's style, run against lightppo with nothing but its imports changed.

As a script it builds strategy, models, optimizers, schedulers and dataloaders by hand, with every argument that the
last train_ppo.py of OpenRLHF's launcher era gives them, and calls the trainer with 10 positional arguments and the
seed's options. As a test it runs itself: as one process, and as two ranks with ZeRO-3.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
from pathlib import Path

import pytest


def reward_fn(scores):
    """Combines the tensors of several reward models."""
    return 0.5 * scores[0] + 2.0 * scores[1]


def train(args: argparse.Namespace) -> None:
    from torch.utils.data import DataLoader
    from transformers import get_scheduler

    from lightppo import (
        Actor,
        PPOTrainer,
        PromptDataset,
        SFTDataset,
        blending_datasets,
        get_llm_for_sequence_regression,
        get_strategy,
        get_tokenizer,
    )

    strategy = get_strategy(args)
    strategy.setup_distributed()

    lora = {"lora_rank": 0, "lora_alpha": 16, "target_modules": "all-linear", "lora_dropout": 0}
    kinds = {"use_flash_attention_2": False, "bf16": args.bf16, "load_in_4bit": False}
    actor = Actor(
        args.pretrain, **kinds, **lora, ds_config=strategy.get_ds_train_config(is_actor=True), packing_samples=False,
        use_liger_kernel=False,
    )  # fmt: skip
    critic = get_llm_for_sequence_regression(
        args.critic_pretrain,
        "critic",
        normalize_reward=args.normalize_reward,
        **kinds,
        **lora,
        ds_config=strategy.get_ds_train_config(is_actor=False),
        value_head_prefix=args.value_head_prefix,
        init_value_head=args.pretrain == args.critic_pretrain,
    )
    reward_models = [
        get_llm_for_sequence_regression(
            path,
            "reward",
            normalize_reward=args.normalize_reward,
            **kinds,
            ds_config=strategy.get_ds_train_config(is_actor=False),
            value_head_prefix=args.value_head_prefix,
        )
        for path in args.reward_pretrain.split(",")
    ]
    strategy.print(f"mean: {reward_models[0].mean}, std {reward_models[0].std}")
    strategy.print(actor)
    tokenizer = get_tokenizer(args.pretrain, actor.model, "left", strategy, use_fast=True)
    initial_model = Actor(
        args.pretrain, **kinds, ds_config=strategy.get_ds_eval_config(offload=False)
    )
    ema_model = Actor(args.pretrain, **kinds, ds_config=strategy.get_ds_eval_config(offload=True))
    actor.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    critic.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    actor_optim = strategy.create_optimizer(
        actor, lr=args.actor_learning_rate, betas=(0.9, 0.95), weight_decay=args.l2
    )
    critic_optim = strategy.create_optimizer(
        critic, lr=args.critic_learning_rate, betas=(0.9, 0.95), weight_decay=args.l2
    )

    prompts_data = blending_datasets(
        args.prompt_data,
        None,
        strategy,
        args.seed,
        max_count=1000,
        return_eval=False,
        train_split="train",
    )
    prompts_data = prompts_data.select(range(min(1000, len(prompts_data))))
    prompts_dataset = PromptDataset(prompts_data, tokenizer, strategy, input_template=None)
    prompts_dataloader = strategy.setup_dataloader(
        prompts_dataset, args.rollout_batch_size // strategy.world_size, True, True
    )
    pretrain_data = blending_datasets(
        args.pretrain_data, None, strategy, args.seed, train_split="train"
    )
    pretrain_dataset = SFTDataset(pretrain_data, tokenizer, 32, strategy, pretrain_mode=True)
    pretrain_dataloader = itertools.cycle(
        iter(
            strategy.setup_dataloader(
                pretrain_dataset,
                args.micro_train_batch_size,
                True,
                True,
                pretrain_dataset.collate_fn,
            )
        )
    )

    num_update_steps_per_episodes = (
        len(prompts_dataset) * args.n_samples_per_prompt // args.train_batch_size * args.max_epochs
    )
    max_steps = math.ceil(args.num_episodes * num_update_steps_per_episodes)
    actor_scheduler = get_scheduler(
        "cosine_with_min_lr",
        actor_optim,
        num_warmup_steps=math.ceil(max_steps * args.lr_warmup_ratio),
        num_training_steps=max_steps,
        scheduler_specific_kwargs={"min_lr": args.actor_learning_rate * 0.1},
    )
    critic_scheduler = get_scheduler("constant", critic_optim)

    (
        (actor, actor_optim, actor_scheduler),
        (critic, critic_optim, critic_scheduler),
        reward_models[0],
        initial_model,
    ) = strategy.prepare(
        (actor, actor_optim, actor_scheduler),
        (critic, critic_optim, critic_scheduler),
        reward_models[0],
        initial_model,
        is_rlhf=True,
    )
    reward_models[1] = strategy.prepare(reward_models[1], is_rlhf=True)
    ema_model._offload = True
    ema_model = strategy.prepare(ema_model, is_rlhf=True)

    consumed_samples = 0
    if args.load_checkpoint and os.path.exists(os.path.join(args.ckpt_path, "_actor")):
        _, states = strategy.load_ckpt(actor.model, os.path.join(args.ckpt_path, "_actor"))
        strategy.load_ckpt(critic, os.path.join(args.ckpt_path, "_critic"))
        consumed_samples = states["consumed_samples"]
        strategy.print(
            f"Loaded the checkpoint: {args.ckpt_path}, consumed_samples: {consumed_samples}"
        )

    trainer = PPOTrainer(
        strategy,
        actor,
        critic,
        reward_models,
        initial_model,
        ema_model,
        actor_optim,
        critic_optim,
        actor_scheduler,
        critic_scheduler,
        max_epochs=args.max_epochs,
        micro_train_batch_size=args.micro_train_batch_size,
        micro_rollout_batch_size=args.micro_rollout_batch_size,
        gradient_checkpointing=True,
        tokenizer=tokenizer,
        prompt_max_len=args.prompt_max_len,
        value_clip=0.2,
        eps_clip=0.2,
        gamma=1.0,
        lambd=0.95,
        init_kl_coef=0.05,
        kl_target=0.1,
        kl_horizon=1000,
        ema_beta=0.5,
        ptx_coef=0.05,
        max_norm=1.0,
        do_sample=True,
        max_new_tokens=args.generate_max_len,
        max_length=args.max_len,
        temperature=1.0,
        top_p=1.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        reward_fn=reward_fn,
        save_hf_ckpt=args.save_hf_ckpt,
        disable_ds_ckpt=args.disable_ds_ckpt,
    )
    trainer.fit(
        args,
        prompts_dataloader,
        pretrain_dataloader,
        consumed_samples,
        num_update_steps_per_episodes,
    )

    # A loop of the script's own, as the seed's ppo_train: it takes as many optimizer steps as the seed's.
    for prompts in itertools.islice(prompts_dataloader, 1):
        texts, labels = [p.text for p in prompts], [p.label for p in prompts]
        for experience in trainer.experience_maker.make_experience_list(
            texts, labels, **trainer.generate_kwargs
        ):
            trainer.replay_buffer.append(experience)
    steps, statuses = [trainer.actor_scheduler.last_epoch], []
    dataloader = DataLoader(
        trainer.replay_buffer,
        batch_size=trainer.replay_buffer.sample_batch_size,
        shuffle=True,
        drop_last=True,
        pin_memory=False,
        collate_fn=trainer.replay_buffer.collate_fn,
    )
    for global_steps in (args.freezing_actor_steps, 99):  # the actor is frozen, and then is not
        for experience in dataloader:
            status = trainer.training_step(experience, global_steps)
            if "kl" in status:  # as the seed weighs it
                status["kl"] *= status["response_length"]
                status = strategy.all_reduce(status)
                status["kl"] /= status["response_length"]
            statuses.append(status)
        steps.append(trainer.actor_scheduler.last_epoch)
    strategy.save_model(ema_model if args.enable_ema else actor, tokenizer, args.save_path)
    strategy.save_model(critic, tokenizer, args.save_path + "_critic")
    if strategy.is_rank_0():
        found = {
            "statuses": statuses,
            "steps": steps,
            "save_steps": str(args.save_steps),
            "samples": len(dataloader),
        }
        Path(args.save_path, "loop.json").write_text(json.dumps(found))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pretrain")
    parser.add_argument("--critic_pretrain")
    parser.add_argument("--reward_pretrain")
    parser.add_argument("--prompt_data")
    parser.add_argument("--pretrain_data")
    parser.add_argument("--save_path")
    parser.add_argument("--ckpt_path")
    parser.add_argument("--num_episodes", type=int, default=1)
    parser.add_argument("--zero_stage", type=int, default=2)
    parser.add_argument("--local_rank", type=int, default=-1)
    for name, default in {
        "rollout_batch_size": 8,
        "micro_rollout_batch_size": 4,
        "train_batch_size": 8,
        "micro_train_batch_size": 2,
        "n_samples_per_prompt": 1,
        "max_epochs": 1,
        "prompt_max_len": 16,
        "generate_max_len": 6,
        "seed": 42,
        "save_steps": 2,
        "eval_steps": -1,
        "logging_steps": 1,
        "max_ckpt_num": 3,
        "freezing_actor_steps": 1,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in {
        "actor_learning_rate": 1e-3,
        "critic_learning_rate": 1e-3,
        "lr_warmup_ratio": 0.03,
        "l2": 0.0,
        "max_ckpt_mem": 1e8,
        "aux_loss_coef": 0.0,
    }.items():
        parser.add_argument(f"--{name}", type=float, default=default)
    parser.add_argument("--advantage_estimator", default="gae")
    parser.add_argument("--value_head_prefix", default="score")
    parser.add_argument("--kl_estimator", default="k1")
    parser.add_argument("--max_len", type=int, default=None)
    for name in (
        "bf16",
        "normalize_reward",
        "use_kl_loss",
        "save_hf_ckpt",
        "disable_ds_ckpt",
        "load_checkpoint",
        "enable_ema",
    ):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--reward_clip_range", type=float, nargs=2, default=(-10, 10))
    parser.add_argument("--use_wandb", default=None)
    parser.add_argument("--use_tensorboard", default=None)
    parser.add_argument("--wandb_run_name", default="seed")
    return parser.parse_args(argv)


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    from support.tiny import save_causal_lm, save_reward_model, sums, write_jsonl

    root = tmp_path_factory.mktemp("seed")
    model = save_causal_lm(root / "model")
    return {
        "pretrain": model,
        "critic_pretrain": model,
        "reward_pretrain": f"{save_reward_model(root / 'rm1', seed=1)},{save_reward_model(root / 'rm2', seed=2)}",
        "prompt_data": write_jsonl(root / "prompts.jsonl", sums(20)),
        "pretrain_data": write_jsonl(
            root / "text.jsonl", [{"input": f"{i}+{i}={2 * i}"} for i in range(10)]
        ),
    }


def run_script(assets: dict[str, str], out: Path, *flags: str, **options):
    from support.ranks import run_ranks

    arguments = [f"--{name}={value}" for name, value in assets.items()]
    paths = [f"--save_path={out / 'model'}", f"--ckpt_path={out / 'ckpt'}"]
    return run_ranks(Path(__file__), *arguments, *paths, *flags, **options)


def logged(out: Path) -> list[dict]:
    """Rows of the training steps."""
    from support.tiny import read_jsonl

    rows = read_jsonl(out / "model" / "metrics.jsonl")
    return [row for row in rows if "rollout/reward" in row]


@pytest.mark.slow
def test_one_process_trains_and_resumes(assets, tmp_path):
    run_script(assets, tmp_path, "--enable_ema", "--save_hf_ckpt", world_size=1)
    rows = logged(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3]  # 20 prompts in batches of 8: 8 + 8 + 4
    assert [row["rollout/samples"] for row in rows] == [8, 8, 4]
    # freezing_actor_steps 1: the first step trains the critic only
    assert "train/policy_loss" not in rows[0]
    assert "train/critic_loss" in rows[0]
    assert all("train/policy_loss" in row and "train/ptx_loss" in row for row in rows[1:])
    assert rows[0]["train/kl_coef"] == 0.05
    assert rows[2]["train/kl_coef"] != 0.05  # kl_target: adaptive

    loop = json.loads((tmp_path / "model" / "loop.json").read_text())
    # 8 samples in micro batches of 2, twice
    frozen, trained = loop["statuses"][:4], loop["statuses"][4:]
    assert all("policy_loss" not in status and status["critic_loss"] > 0 for status in frozen)
    seeds = {"policy_loss", "actor_lr", "critic_loss", "values", "critic_lr", "kl", "reward", "return",
             "response_length", "total_length", "ptx_loss"}  # fmt: skip
    assert all(seeds <= status.keys() for status in trained)
    # two of fit, none while frozen, one for train_batch_size samples
    assert loop["steps"] == [2, 2, 3]
    assert loop["save_steps"] == "2"

    checkpoints = tmp_path / "ckpt"
    assert (checkpoints / "_actor" / "global_step2").is_dir()
    assert (checkpoints / "_critic" / "global_step2").is_dir()
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    AutoModelForCausalLM.from_pretrained(checkpoints / "global_step2_hf")
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "model_critic")

    # The script's own resume: consumed_samples from the checkpoint, then only what is left.
    resumed = run_script(assets, tmp_path, "--num_episodes=2", "--load_checkpoint", world_size=1)
    assert "consumed_samples: 24" in resumed.output
    assert [row["step"] for row in logged(tmp_path)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_two_ranks_with_zero_3(assets, tmp_path):
    run_script(assets, tmp_path, "--zero_stage=3", "--save_steps=-1", world_size=2)
    assert json.loads((tmp_path / "model" / "loop.json").read_text())["save_steps"] == "inf"
    rows = logged(tmp_path)
    assert [row["rollout/samples"] for row in rows] == [8, 8, 4]
    assert all(row["train/critic_grad_norm"] > 0 for row in rows)


if __name__ == "__main__":
    train(parse())
