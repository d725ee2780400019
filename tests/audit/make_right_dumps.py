"""Makes the files in ``right/``: dumps by other trainers' own functions, run on a CPU with numbers of ours.

``PYTHONPATH=CHECKOUT python tests/audit/make_right_dumps.py NAME FOLDER``, in an environment with what the checkout
imports. The versions are those of ``lightppo/audit/dumps.py``. Packages that only GPUs use are stood in for by empty
modules; every number of a dump is computed by the trainer.

- verl: ``compute_*_advantage*`` of core_algos, ``kl_penalty``, ``compute_policy_loss_vanilla``, ``compute_value_loss``,
  ``compute_rollout_correction_and_rejection_mask``
- slime: ``RolloutManager._post_process_rewards``, ``compute_advantages_and_returns``, ``_build_dump_payload``
- openrlhf: ``RemoteExperienceMaker.compute_advantages_and_returns``
- prime-rl: ``TokenExporter.export``
- trl: one step of ``GRPOTrainer`` with ``log_completions``, on a random model of 2 layers
"""

from __future__ import annotations

import importlib
import random
import shutil
import sys
from argparse import Namespace
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

LENGTHS = [6, 3, 7, 4, 5, 7, 2, 6]  # two prompts, four samples each
WIDTH = max(LENGTHS)
MASK = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]
HOLES = MASK & ~((torch.arange(WIDTH) == 2) & (torch.tensor(LENGTHS) > 4)[:, None])
GENERATOR = torch.Generator().manual_seed(49)
SCORES = torch.tensor([1.0, 0.0, 0.5, -0.3, 2.0, 0.1, 0.1, 0.7])


def drawn(scale: float = 1.0, mean: float = 0.0) -> torch.Tensor:
    return (torch.randn(len(LENGTHS), WIDTH, generator=GENERATOR) * scale + mean) * MASK


ROLLOUT = drawn(0.4, -1.5).clamp(max=-0.05) * MASK
OLD = ((ROLLOUT + drawn(0.1)) * MASK).clamp(max=-0.01) * MASK
NEW = ((OLD + drawn(0.4)) * MASK).clamp(max=-0.01) * MASK
REFERENCE = ((OLD + drawn(0.3)) * MASK).clamp(max=-0.01) * MASK
VALUES = drawn(0.5)
NEW_VALUES = VALUES + drawn(0.7)


def at_the_end(scores: torch.Tensor, mask: torch.Tensor = MASK) -> torch.Tensor:
    last = torch.arange(WIDTH) == torch.tensor(LENGTHS)[:, None] - 1
    return scores[:, None] * last


class Stub(ModuleType):
    """A package that a CPU cannot import, or need not: it has every name, and every module below it."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Stubs(MetaPathFinder, Loader):
    def __init__(self, *roots: str, **members: Any) -> None:
        self.roots, self.members = roots, members
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        is_below = name.partition(".")[0] in self.roots
        return ModuleSpec(name, self, is_package=True) if is_below else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = Stub(spec.name)
        vars(module).update(self.members)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Leave it empty."""


def remote(*functions: Any, **_: Any) -> Any:
    """Stand for ``ray.remote``: the function or class itself."""
    return functions[0] if functions else remote


def verl(folder: Path) -> None:
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
    from verl.workers.config import ActorConfig, PolicyLossConfig

    uid = ["a"] * 4 + ["b"] * 4
    import numpy as np

    index = np.array(uid, dtype=object)
    config = AlgoConfig(gamma=1.0, lam=0.95)
    estimators = [
        "gae",
        "grpo",
        "rloo",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "opo",
        "gpg",
    ]
    for name in estimators:
        mask = HOLES.float()
        token_scores = at_the_end(SCORES)
        kl = core_algos.kl_penalty(OLD, REFERENCE, "kl") * mask
        batch = {
            "response_mask": mask,
            "token_level_scores": token_scores,
            "token_level_rewards": token_scores - 0.1 * kl,
            "old_log_probs": OLD,
            "ref_log_prob": REFERENCE,
            "rollout_log_probs": ROLLOUT,
            "log_probs": NEW,
        }
        rewards = batch["token_level_rewards"]
        if name == "gae":
            arguments = {"values": VALUES, "gamma": 1.0, "lam": 0.95}
            result = core_algos.compute_gae_advantage_return(
                rewards, response_mask=mask, **arguments
            )
            batch |= {"values": VALUES, "new_values": NEW_VALUES}
        else:
            function = core_algos.get_adv_estimator_fn(name)
            arguments = {"config": config} if name != "grpo" else {}
            result = function(
                token_level_rewards=rewards, response_mask=mask, index=index, **arguments
            )
        batch["advantages"], batch["returns"] = result
        weights, _, _ = compute_rollout_correction_and_rejection_mask(
            OLD, ROLLOUT, mask, rollout_is="token", rollout_is_threshold=1.1
        )
        weights = weights.batch["rollout_is_weights"]
        actor = ActorConfig(
            strategy="fsdp", rollout_n=4, ppo_micro_batch_size_per_gpu=8, policy_loss=PolicyLossConfig(),
            clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=1.5,
        )  # fmt: skip
        loss, metrics = core_algos.compute_policy_loss_vanilla(
            OLD, NEW, batch["advantages"], mask, "token-mean", actor, weights
        )
        batch |= {"rollout_is_weights": weights, "policy_loss": loss}
        batch["dual_clip_ratio"] = torch.tensor(metrics["actor/pg_clipfrac_lower"])
        if name == "gae":
            batch["value_loss"], _ = core_algos.compute_value_loss(
                NEW_VALUES, batch["returns"], VALUES, mask, 0.5
            )
        torch.save({**batch, "uid": uid}, folder / f"verl_{name}.pt")


def slime(folder: Path) -> None:
    mpu = {
        "is_pipeline_last_stage": lambda *_, **__: True,
        "get_context_parallel_world_size": lambda: 1,
        "get_context_parallel_rank": lambda: 0,
        "get_data_parallel_group": lambda **_: None,
    }
    Stubs("megatron", **mpu)
    importlib.import_module("megatron.core").mpu = importlib.import_module("megatron.core.mpu")
    Stubs("ray", "sglang", "sglang_router", "wandb", "httpx", remote=remote)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/.gloo", rank=0, world_size=1
    )
    losses = importlib.import_module("slime.backends.megatron_utils.loss")
    dump = importlib.import_module("slime.observability.train_data_utils")
    manager = importlib.import_module("slime.ray.rollout").RolloutManager
    for name, normalize, kl_coef in (
        ("grpo", False, 0.0), ("ppo", True, 0.1), ("reinforce_plus_plus", True, 0.1),
        ("reinforce_plus_plus_baseline", True, 0.0),
    ):  # fmt: skip
        args = Namespace(
            advantage_estimator=name, normalize_advantages=normalize, kl_coef=kl_coef, kl_loss_type="k1",
            use_rollout_logprobs=False, use_opd=False, custom_advantage_function_path=None, gamma=1.0, lambd=0.95,
            rewards_normalization=True, grpo_std_normalization=True, n_samples_per_prompt=4, rollout_batch_size=2,
        )  # fmt: skip
        this = SimpleNamespace(args=args, custom_reward_post_process_func=None)
        samples = [SimpleNamespace(get_reward_value=lambda _, r=r: r) for r in SCORES.tolist()]
        raw, rewards = manager._post_process_rewards(this, samples)
        rows = {
            "log_probs": OLD,
            "ref_log_probs": REFERENCE,
            "rollout_log_probs": ROLLOUT,
            "values": VALUES,
        }
        data = {
            key: [row[:n].clone() for row, n in zip(value, LENGTHS)] for key, value in rows.items()
        }
        data |= {
            "rewards": rewards,
            "response_lengths": LENGTHS,
            "total_lengths": [n + 3 for n in LENGTHS],
            "loss_masks": [
                row[:n].int() for row, n in zip(MASK if name == "ppo" else HOLES, LENGTHS)
            ],
            "raw_reward": raw,
            "partition": list(range(8)),
            "sample_indices": list(range(8)),
            "micro_batch_indices": [[0, 1, 2], [3, 4, 5, 6, 7]],
        }
        losses.compute_advantages_and_returns(args, data)
        shard = {"rank": 0, "data_parallel_rank": 0, "rollout_data": data}
        payload = dump._build_dump_payload([shard], rollout_id=0, writer_rank=0)
        torch.save(payload, folder / f"slime_{name}.pt")
    (folder / ".gloo").unlink(missing_ok=True)


def openrlhf(folder: Path) -> None:
    Stubs("flash_attn", "ring_flash_attn", "ray", "vllm", "torchdata", remote=remote)
    maker = importlib.import_module("openrlhf.trainer.ppo_utils.experience_maker")
    utils = importlib.import_module("openrlhf.models.utils")
    maker.apply_length_penalties = lambda *_: None  # both are off
    for name in ("gae", "reinforce", "reinforce_baseline", "rloo", "group_norm", "dr_grpo"):
        args = SimpleNamespace(
            rollout=SimpleNamespace(n_samples_per_prompt=4),
            reward=SimpleNamespace(clip_range=(-10, 10)),
            algo=SimpleNamespace(
                advantage=SimpleNamespace(estimator=name, gamma=1.0, lambd=0.95, no_std_norm=False)
            ),
        )
        this = object.__new__(maker.RemoteExperienceMaker)
        this.strategy, this.advantage_estimator = SimpleNamespace(args=args), name
        this.kl_ctl = SimpleNamespace(value=0.1)
        experiences = []
        for rows in ([0, 2, 4], [1, 3, 5, 6, 7]):  # balanced over micro batches
            mask = MASK[rows]
            experience = maker.Experience(
                sequences=torch.ones(len(rows), WIDTH + 2, dtype=torch.long),
                action_mask=mask, action_log_probs=OLD[rows], base_action_log_probs=REFERENCE[rows],
                rollout_log_probs=ROLLOUT[rows], values=VALUES[rows] if name == "gae" else None,
                rewards=SCORES[rows], scores=(SCORES[rows] > 0.5).float(), index=list(rows),
                kl=utils.compute_approx_kl(OLD[rows], REFERENCE[rows], "k1"),
            )  # fmt: skip
            experiences.append(experience)
        this.compute_advantages_and_returns(experiences)
        torch.save([vars(e) for e in experiences], folder / f"openrlhf_{name}.pt")


def prime_rl(folder: Path) -> None:
    class DefaultLossConfig(SimpleNamespace):
        dppo_mask_low = dppo_mask_high = 0.2

    configs = Stub("prime_rl.configs.trainer")
    configs.DefaultLossConfig = DefaultLossConfig
    sys.modules |= {
        "prime_rl.configs": Stub("prime_rl.configs"),
        "prime_rl.configs.trainer": configs,
    }
    module = importlib.import_module("prime_rl.trainer.rl.token_export")
    exporter = module.TokenExporter(folder, 0)
    flat = {name: torch.cat([row[:n] for row, n in zip(tensor, LENGTHS)]) for name, tensor in
            {"new": NEW, "old": ROLLOUT, "mask": HOLES}.items()}  # fmt: skip
    counts = torch.tensor(LENGTHS)
    centred = SCORES.view(2, 4) - SCORES.view(2, 4).mean(1, keepdim=True)
    advantages = torch.repeat_interleave(centred.flatten(), counts)
    batch = {
        "input_ids": torch.arange(len(flat["new"]))[None],
        "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None],
        "loss_mask": flat["mask"][None],
        "advantages": advantages[None],
        "inference_logprobs": flat["old"][None],
        "env_names": ["sums"] * len(advantages),
    }
    output = {"logprobs": flat["new"][None], "entropy": flat["new"][None].abs()}
    exporter.export(0, 0, batch, output, LENGTHS, DefaultLossConfig())
    (folder / "token_exports" / "step_0" / "rank_0.jsonl").rename(folder / "prime_rl.jsonl")
    for each in (folder / "token_exports" / "step_0", folder / "token_exports"):
        each.rmdir()


def trl(folder: Path) -> None:
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    torch.manual_seed(0)
    words = ["<pad>", "<eos>", *"0123456789"]
    backend = Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>"
    )
    config = LlamaConfig(vocab_size=12, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
                         num_attention_heads=2, pad_token_id=0, eos_token_id=1, bos_token_id=None)  # fmt: skip
    judge = random.Random(7)

    def luck(completions: Any, **_: Any) -> list[float]:
        return [judge.choice([0.0, 0.25, 0.1, 1.0]) for _ in completions]

    def length(completions: Any, **_: Any) -> list[float]:
        return [len(completion) / 10 for completion in completions]

    for scale in ("group", "batch", "none"):
        settings = GRPOConfig(
            output_dir=str(folder / "trl_run"), per_device_train_batch_size=8, num_generations=4, max_steps=1,
            max_completion_length=6, log_completions=True, logging_steps=1, report_to=[], use_cpu=True, bf16=False,
            scale_rewards=scale, save_strategy="no", reward_weights=[1.0, 0.5],
        )  # fmt: skip
        trainer = GRPOTrainer(
            LlamaForCausalLM(config), reward_funcs=[luck, length], args=settings, processing_class=tokenizer,
            train_dataset=Dataset.from_dict({"prompt": ["1 2", "3 4"]}),
        )  # fmt: skip
        trainer.train()
        made = next((folder / "trl_run" / "completions").glob("*.parquet"))
        made.rename(folder / f"trl_{scale}.parquet")
        shutil.rmtree(folder / "trl_run")


if __name__ == "__main__":
    target = Path(sys.argv[2]).absolute()
    target.mkdir(parents=True, exist_ok=True)
    {"verl": verl, "slime": slime, "openrlhf": openrlhf, "prime-rl": prime_rl, "trl": trl}[
        sys.argv[1]
    ](target)
