"""The relations between the options of LoRA and all others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightppo.config.ppo import PPOConfig

ALPHA = 16.0  # of --lora_alpha where none is given


def uses_adapters(config: PPOConfig) -> bool:
    """Whether actor and critic train adapters."""
    return config.adapter.lora_rank > 0


def reference_is_actor(config: PPOConfig) -> bool:
    """Whether the reference is the actor with its adapters off, and no model of its own."""
    m = config.model
    return uses_adapters(config) and config.algorithm.init_kl_coef > 0 and m.ref_pretrain in (None, m.pretrain)


def resolutions(config: PPOConfig) -> dict[str, Any]:
    """What the "None means …" options of LoRA stand for; without LoRA they stay None."""
    a = config.adapter
    if not uses_adapters(config):
        return {}
    return {
        "lora_alpha": ALPHA if a.lora_alpha is None else a.lora_alpha,
        "lora_dropout": 0.0 if a.lora_dropout is None else a.lora_dropout,
    }


def problems(config: PPOConfig) -> list[str]:
    """One message per option of LoRA without LoRA, and per option that cannot be had with it."""
    a, o, s = config.adapter, config.algorithm, config.strategy
    if not uses_adapters(config):
        of_lora = {
            "lora_alpha": a.lora_alpha is not None,
            "lora_dropout": a.lora_dropout is not None,
            "target_modules": bool(a.target_modules),
        }
        found = [
            f"--{flag} has no effect without adapters: set --lora_rank, or leave it out"
            for flag, is_set in of_lora.items()
            if is_set
        ]
        if a.load_in_4bit:
            found.append(
                "--load_in_4bit holds weights that do not train in 4 bits, and without adapters all train: set "
                "--lora_rank, or leave it out"
            )
        return found
    found = []
    if o.enable_ema:
        found.append("--enable_ema averages all weights, and --lora_rank trains adapters: leave one out")
    moves = {"ref_ema_eta": o.ref_ema_eta is not None, "ref_reset_steps": o.ref_reset_steps is not None}
    found += [
        f"--{flag} moves the reference, which with --lora_rank is the actor without its adapters and stays: "
        "leave one out"
        for flag, is_set in moves.items()
        if is_set
    ]
    if reference_is_actor(config):
        usual = 3 if s.zero_stage == 3 else 0
        of_reference = {"ref_offload": s.ref_offload, "ref_zero_stage": s.ref_zero_stage not in (None, usual)}
        found += [
            f"--{flag} has no effect: with --lora_rank the reference is the actor without its adapters, no model of "
            "its own; leave it out, or set another --ref_pretrain"
            for flag, is_set in of_reference.items()
            if is_set
        ]
    return found
