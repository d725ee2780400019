"""What works but is seldom meant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightppo.config import PPOConfig
from lightppo.config.options import Options


def tell_advice(building: Any) -> Iterator[str]:
    """What is printed of it."""
    if "\\n" in (getattr(building.config.data, "input_template", None) or ""):
        yield "note: --input_template has a backslash and an n, not a line break: in bash write $'\\n'"
    if isinstance(building.config, PPOConfig):
        yield from (f"note: {line}" for line in advice(building.config))


def advice(config: Options) -> list[str]:
    """What works but is seldom meant; of a resolved config."""
    algorithm, found = config.algorithm, []
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
