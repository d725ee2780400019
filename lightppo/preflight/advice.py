"""What works but is seldom meant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightppo.config import PPOConfig
from lightppo.config.rules import needs_critic
from lightppo.config.run_length import optimizer_steps, steps_per_episode

SPARED = 100_000_000  # bytes that are worth a note


def tell_advice(building: Any) -> Iterator[str]:
    """Yield what is printed of it."""
    if "\\n" in (getattr(building.config.data, "input_template", None) or ""):
        yield "note: --input_template has a backslash and an n, not a line break: in bash write $'\\n'"
    if isinstance(building.config, PPOConfig):
        yield from (f"note: {line}" for line in advice(building.config))


def tell_second_masters(building: Any) -> Iterator[str]:
    """Say where ZeRO keeps masters that one rank does not need: by the sizes of the models."""
    roles = with_second_masters(building.config, building.strategy.world_size)
    spared = 4 * sum(building.sizes.get(role, 0) for role in roles)
    if spared >= SPARED:
        yield f"note: {second_masters(building.config)} about {spared / 1e9:.1f} GB less"


def tell_frozen(building: Any) -> Iterator[str]:
    """Say where the whole run trains the critic alone."""
    config = building.config
    if not isinstance(config, PPOConfig) or config.evaluation.val_only:
        return
    frozen = config.algorithm.freezing_actor_steps
    steps = steps_per_episode(config, building.prompts_dataloader)
    if frozen > 0 and not optimizer_steps(config, steps):
        yield f"note: --freezing_actor_steps {frozen}: all steps of this run train the critic alone, the actor stays"


def second_masters(config: PPOConfig) -> str:
    """Return the note, up to how much it is."""
    return (
        f"--zero_stage {config.strategy.zero_stage} with one rank in float32 shards nothing, and keeps the weights that "
        "train twice: --zero_stage 0 needs"
    )


def with_second_masters(config: PPOConfig, ranks: int) -> list[str]:
    """Return the models that train with weights in float32, which DeepSpeed's ZeRO 1 and 2 copy, on one rank."""
    given = config.flat()
    if ranks > 1 or given["bf16"] or given["fp16"] or given["overlap_comm"]:
        return []
    stages = {"actor": given["zero_stage"]}
    if isinstance(config, PPOConfig):
        if config.evaluation.val_only:
            return []
        if needs_critic(config):
            stages["critic"] = given["critic_zero_stage"]
    if given["adam_offload"]:
        return []
    return [role for role, stage in stages.items() if stage in (1, 2)]


def advice(config: PPOConfig) -> list[str]:
    """Return what works but is seldom meant; of a resolved config."""
    algorithm = config.algorithm
    found = []
    if not config.evaluation.val_only and not (
        config.rollout.do_sample and config.rollout.temperature > 0
    ):
        what = "--temperature 0" if config.rollout.do_sample else "--no_do_sample"
        found.append(
            f"{what}: rollouts are the most likely answers alone, and a policy learns by trying others: set 1"
        )
    name = f"--kl_estimator {algorithm.kl_estimator}"
    if algorithm.use_kl_loss and algorithm.kl_estimator in ("k1", "abs"):
        what = {
            "k1": "has an expected gradient of 0",
            "abs": "pulls by the sign of the difference alone",
        }
        found.append(
            f"{name} as a loss {what[algorithm.kl_estimator]}: k2 has the gradient of the KL"
        )
    if (
        algorithm.init_kl_coef > 0
        and algorithm.use_kl_in_reward
        and algorithm.kl_estimator in ("k2", "k3", "k3+")
    ):
        found.append(
            f"{name} in the reward hardly pulls near the reference: k1 has the gradient of the KL"
        )
    return found
