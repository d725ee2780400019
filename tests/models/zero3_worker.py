"""One rank of test_loading.py: loads models under ZeRO-3 and writes what it saw."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import deepspeed
import torch
from torch import nn
from transformers.integrations import is_deepspeed_zero3_enabled

from lightppo.models.actor import Actor
from lightppo.models.critic import Critic, RewardModel

DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "reduce_bucket_size": 1_000_000,
    },
    "zero_allow_untested_optimizer": True,
}


def look(model: nn.Module) -> dict[str, object]:
    """Which share of the model this rank holds, and the full weights, gathered one by one."""
    params = dict(model.named_parameters())
    full = {}
    for name, param in params.items():
        with deepspeed.zero.GatheredParameters([param]):
            full[name] = param.detach().clone()
    return {
        "held": sum(p.numel() for p in params.values()),
        "shards": sum(p.ds_tensor.numel() for p in params.values()),
        "total": sum(p.ds_numel for p in params.values()),
        "weights": full,
    }


def main(folder: Path, rank: int) -> None:
    # No kernel is compiled for two CPU ranks on one machine (see FACTS of DeepSpeed's shared-memory op).
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    deepspeed.init_distributed("gloo")
    torch.manual_seed(1000 + rank)  # ranks whose generators disagree must still load the same
    seen: dict[str, object] = {}

    actor = Actor(f"{folder}/llama", ds_config=DS_CONFIG, packing_samples=True)
    seen["zero3_while_alive"] = is_deepspeed_zero3_enabled()
    seen["llama"] = look(actor.model)
    for name in ("qwen2", "mixtral"):  # tied embeddings; experts that are merged while loading
        seen[name] = look(Actor(f"{folder}/{name}", ds_config=DS_CONFIG).model)
    rough = Actor(
        f"{folder}/llama", dtype=torch.bfloat16, ds_config=DS_CONFIG | {"bf16": {"enabled": True}}
    )
    seen["bf16_buffers"] = {
        "embedding": next(rough.parameters()).dtype,
        **dict(rough.hf_model.named_buffers()),
    }
    seen["scratch"] = look(
        Actor(f"{folder}/llama", ds_config=DS_CONFIG, init_from_scratch=True).model
    )
    critic = Critic(
        f"{folder}/llama", ds_config=DS_CONFIG, seed=7, packing_samples=True, draws_head=True
    )
    seen["critic"] = look(critic.model)
    seen["reward"] = look(
        RewardModel(f"{folder}/reward", ds_config=DS_CONFIG, value_head_prefix="value_head").model
    )
    plain = Critic(f"{folder}/llama", seed=7, draws_head=True)
    seen["zero3_after_plain"] = is_deepspeed_zero3_enabled()
    seen["plain_head"] = plain.model.score.weight.detach().clone()

    batch = torch.load(folder / "batch.pt")
    for wrapper, inner in ((actor, True), (critic, False)):
        module = wrapper.model if inner else wrapper
        engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=torch.optim.AdamW(module.parameters(), lr=1e-3),
            config=DS_CONFIG,
        )
        if inner:
            actor.model, run = engine, actor
        else:
            run = engine
        wrapper.gradient_checkpointing_enable()
        engine.train()
        out = run(batch["sequences"], batch["num_actions"], batch["mask"])
        engine.backward((out * batch["weights"]).sum())
        names = (
            "lm_head.weight",
            "score.weight",
            "layers.0.input_layernorm.weight",
            "layers.1.mlp.up_proj.weight",
        )
        seen[f"{type(wrapper).__name__}_out"] = out.detach()
        seen[f"{type(wrapper).__name__}_grads"] = {
            name: deepspeed.utils.safe_get_full_grad(parameter)
            for name, parameter in wrapper.hf_model.named_parameters()
            if name.endswith(names)
        }
    torch.save(seen, folder / f"rank{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(os.environ["RANK"]))
