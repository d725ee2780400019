"""The checks of adapters.py for weights in 4 bits; what peft trains beside is the dense model of the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import adapters
import torch
from support import rank_checks
from support.rank_checks import make_strategy, run
from transformers import LlamaConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from lightppo.distributed.deepspeed import DeepspeedStrategy
from lightppo.models.actor import Actor
from lightppo.models.adapters.quantised import dense_weight, quantised_layers
from lightppo.models.critic import Critic
from lightppo.zero3 import is_sharded, parameter_count

PACKED = 4 * 64 * 64 + 3 * 64 * 128  # weights of a layer in 4 bits


def wide_config(tied: bool) -> LlamaConfig:
    config = narrow_config(tied)
    config.hidden_size, config.intermediate_size, config.head_dim = 64, 128, 16
    return config


narrow_config, rank_checks.llama_config = rank_checks.llama_config, wide_config
adapters.LOAD, adapters.DENSE = {"load_in_4bit": True}, "_dense"
adapters.APART_BF16 = 0.05  # the dense model is that of fp32 weights in 4 bits, rounded
adapters.VARIANTS = {
    name: adapters.EVERY_VARIANT[name]
    for name in (
        "0",
        "1, checkpointing",
        "2, packed",
        "3, packed, checkpointing",
        "3, all offloaded",
    )
}
adapters.CKPT = {name: adapters.EVERY_CKPT[name] for name in ("zero2", "zero3", "zero3_bf16")}


def with_dense_twin(saved: Any, kind: type[Actor] | type[Critic]) -> Any:
    """Beside each saved model one with the numbers that its bits stand for, in fp32."""

    def save(work_dir: Path, strategy: DeepspeedStrategy, *args: Any, **kwargs: Any) -> str:
        path = saved(work_dir, strategy, *args, **kwargs)

        def write() -> None:
            unset_hf_deepspeed_config()
            model, dense = kind(path, load_in_4bit=True).hf_model, kind(path).hf_model
            with torch.no_grad():
                for name, layer in quantised_layers(model).items():
                    dense.get_submodule(name).weight.copy_(dense_weight(layer))
            dense.save_pretrained(path + adapters.DENSE)

        strategy.on_rank_0(write, "save the dense model")
        return path

    return save


adapters.saved_model = with_dense_twin(adapters.saved_model, Actor)
adapters.saved_critic = with_dense_twin(adapters.saved_critic, Critic)


def layers_of(actor: Actor) -> dict[str, Any]:
    return {
        key.replace(".base_layer", ""): layer
        for key, layer in quantised_layers(actor.hf_model).items()
    }


def check_the_bits_are_nobodys_business(strategy: DeepspeedStrategy, work_dir: Path) -> None:
    """No engine casts, reduces or trains them; ZeRO-3 shards them."""
    path = adapters.saved_model(work_dir, strategy)
    for name, options in adapters.CKPT.items():
        role = make_strategy(**options)
        bits = {
            key: layer.weight
            for key, layer in layers_of(Actor(path, bf16=role.bf16, load_in_4bit=True)).items()
        }
        actor, optimizer, scheduler = adapters.lora_actor(role, path)
        for step in range(2):
            adapters.train_step(role, actor, optimizer, scheduler, step)
        frozen = [p for p in actor.hf_model.parameters() if not p.requires_grad]
        assert all(is_sharded(p) for p in frozen) == (role.zero_stage == 3), name
        with role.gathered_parameters(actor):
            held = layers_of(actor)
            assert held.keys() == bits.keys(), name
            assert len(bits) == 7
            for key, packed in bits.items():
                assert held[key].weight.dtype == torch.uint8, name
                assert torch.equal(held[key].weight.flatten(), packed.flatten()), name
        adapters_of = parameter_count(actor, trained_only=True)
        assert parameter_count(actor) == PACKED + adapters_of + 2 * 61 * 64 + 3 * 64, name
        role.barrier()


if __name__ == "__main__":
    run([
        check_the_bits_are_nobodys_business, adapters.check_adapters_train_as_in_plain_peft, adapters.check_write,
        adapters.check_resume, adapters.check_export, adapters.check_critic, adapters.check_rollouts,
    ])  # fmt: skip
