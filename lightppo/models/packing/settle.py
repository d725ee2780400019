"""``--packing_samples``: whether the models of a run pack, all together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightppo.config import PPOConfig
from lightppo.config.options import OptionSet
from lightppo.distributed.deepspeed import DeepspeedStrategy
from lightppo.errors import PackingNotSupportedError


def settle_models(run: Any) -> None:
    """A check of ``models``: those of a PPO run pack, or all are padded. Collective.

    Training on data settles it by itself, because it knows whether its rows gain by packing.
    """
    if not isinstance(run.config, PPOConfig):
        return
    models = [model for flag, model in run.models.items() if "--reward_pretrain" not in flag]
    shares = run.config.training.share_prompts and run.config.rollout.n_samples_per_prompt > 1
    settle_packing(run.config, run.strategy, models, shares)


def settle_packing(
    config: OptionSet,
    strategy: DeepspeedStrategy,
    models: Iterable[Any],
    share_prompts: bool = True,
) -> None:
    """``--packing_samples`` None: all models pack, if each does it exactly on every rank; True: they must. Collective."""
    asked = config.training.packing_samples
    if asked is False:
        return
    # A critic has its engine around it.
    wrappers = [getattr(model, "module", model) for model in models if model is not None]
    layouts = [one.layout for one in wrappers]
    for layout in layouts:
        layout.share_prompts = share_prompts
    obstacles = [
        layout.obstacle(strategy.device) if asked else layout.try_packing(strategy.device)
        for layout in layouts
    ]
    obstacle = next(filter(None, obstacles), None)
    if reason := next(filter(None, strategy.all_gather_object(obstacle)), None):
        if asked:
            raise PackingNotSupportedError(reason)
        for layout in layouts:
            layout.stop_packing()
        strategy.print(f"note: batches are padded: {reason}")
    elif asked:
        for layout in layouts:
            layout.pack()
