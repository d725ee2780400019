"""What works but is seldom meant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightppo.config import PPOConfig
from lightppo.config.options import Options


def tell_advice(building: Any) -> Iterator[str]:
    """What is printed of it."""
    if isinstance(building.config, PPOConfig):
        yield from (f"note: {line}" for line in advice(building.config))


def advice(config: Options) -> list[str]:
    """What works but is seldom meant; of a resolved config."""
    a, found = config.algorithm, []
    if not config.evaluation.val_only and not (
        config.rollout.do_sample and config.rollout.temperature > 0
    ):
        what = "--temperature 0" if config.rollout.do_sample else "--no_do_sample"
        found.append(
            f"{what}: rollouts are the most likely answers alone, and a policy learns by trying others: set 1"
        )
    name = f"--kl_estimator {a.kl_estimator}"
    if a.use_kl_loss and a.kl_estimator in ("k1", "abs"):
        what = {
            "k1": "has an expected gradient of 0",
            "abs": "pulls by the sign of the difference alone",
        }
        found.append(f"{name} as a loss {what[a.kl_estimator]}: k2 has the gradient of the KL")
    if a.init_kl_coef > 0 and a.use_kl_in_reward and a.kl_estimator in ("k2", "k3", "k3+"):
        found.append(
            f"{name} in the reward hardly pulls near the reference: k1 has the gradient of the KL"
        )
    return found
