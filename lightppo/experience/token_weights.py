"""Factors of each token's policy loss (:class:`lightppo.plugin.TokenWeight`), and the tokens that are singled out."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightppo.algorithms.correction import (
    correction_weights,
    normalize_weights,
    rejection_mask,
)
from lightppo.algorithms.losses import SelectionFn
from lightppo.algorithms.masking import AllReduceSum
from lightppo.algorithms.option_values import Rejection
from lightppo.algorithms.selection import top_share
from lightppo.config import PPOConfig
from lightppo.experience.experience import Experience
from lightppo.plugin import TOKEN_WEIGHTS, TokenWeight
from lightppo.ranks import Ranks
from lightppo.table import load

Weigh = Callable[..., Tensor]


def token_weights(config: PPOConfig, in_training: bool) -> list[Weigh]:
    """Return the factors that this run needs, those of other packages last: of each micro batch in training, or before."""
    if in_training:
        shipped = (rejection_in_training(config),)
    else:
        shipped = (correction(config), rejection(config), high_entropy(config))
    further = (
        weigh for _, entry, weigh in _of_packages(config) if entry.in_training == in_training
    )
    return [*(weigh for weigh in shipped if weigh is not None), *further]


def first_needing_entropy(config: PPOConfig) -> str | None:
    """Return the name of the first factor that needs the entropy before training; ``None``: none does."""
    if config.loss.high_entropy_token_ratio is not None:
        return "high_entropy"
    further = _of_packages(config)
    readers = (name for name, entry, _ in further if entry.needs_entropy and not entry.in_training)
    return next(readers, None)


def first_needing_engine_log_probs(config: PPOConfig) -> str | None:
    """Return the option, or the factor, that needs the log probs of the rollout engine; ``None``: none does."""
    options = config.correction
    if options.rollout_correction != "none":
        return f"--rollout_correction {options.rollout_correction}"
    if options.rollout_rejection:
        return f"--rollout_rejection {' '.join(options.rollout_rejection)}"
    for name, entry, _ in _of_packages(config):
        if entry.needs_rollout_log_probs:
            if not entry.flag:
                return f"the token weight {name!r}"
            value = config.flat()[entry.flag]
            text = " ".join(value) if isinstance(value, list | tuple) else value
            return f"--{entry.flag} {text}"
    return None


def _of_packages(config: PPOConfig) -> Iterator[tuple[str, TokenWeight, Weigh]]:
    for name, entry in TOKEN_WEIGHTS.items():
        if (weigh := entry.fn(config)) is not None:
            yield name, entry, weigh


def correction(config: PPOConfig) -> Weigh | None:
    """Return the function that weighs off-policy tokens (``--rollout_correction``)."""
    options = config.correction
    if options.rollout_correction == "none":
        return None

    def weigh(
        experience: Experience, *, log_probs: Tensor, all_reduce_sum: AllReduceSum, **_: Any
    ) -> Tensor:
        weights = correction_weights(
            options.rollout_correction,
            log_probs,
            experience.rollout_log_probs,
            experience.action_mask,
            low=options.correction_low,
            high=options.correction_high,
            veto=options.correction_veto,
            agg=options.correction_agg
            if options.rollout_correction in ("geo_tis", "geo_mis")
            else None,
        )
        if options.correction_batch_norm:
            weights = normalize_weights(weights, experience.action_mask, all_reduce_sum)
        return weights

    return weigh


def rejection(config: PPOConfig) -> Weigh | None:
    """Return the function that leaves tokens out before the update (``--rollout_rejection``)."""
    rejections = rejections_of(config, in_training=False)
    if not rejections:
        return None

    def weigh(
        experience: Experience, *, log_probs: Tensor, all_reduce_sum: AllReduceSum, **_: Any
    ) -> Tensor:
        return rejection_mask(
            rejections,
            log_probs,
            experience.rollout_log_probs,
            experience.action_mask,
            all_reduce_sum=all_reduce_sum,
        )

    return weigh


def rejection_in_training(config: PPOConfig) -> Weigh | None:
    """Return the function that leaves tokens out by the policy in training (``--rollout_rejection``)."""
    rejections = rejections_of(config, in_training=True)
    if not rejections:
        return None

    def weigh(experience: Experience, *, log_probs: Tensor, **_: Any) -> Tensor:
        if experience.rollout_log_probs is None:
            if experience.action_mask.any():
                raise ValueError(
                    f"--rollout_rejection {rejections[0].name} needs rollout_log_probs"
                )
            return experience.action_mask  # a placeholder
        return rejection_mask(
            rejections,
            log_probs,
            experience.rollout_log_probs,
            experience.action_mask,
            advantages=experience.advantages,
        )

    return weigh


def rejections_of(config: PPOConfig, in_training: bool) -> list[Rejection]:
    """Return those of ``--rollout_rejection`` that are judged in training, or before it.

    With ``--old_log_probs rollout`` the policy before it is the one that sampled, so all are judged in training.
    """
    rejections = [Rejection.parse(text) for text in config.correction.rollout_rejection]
    bypass = config.loss.old_log_probs == "rollout"
    if bypass:
        return rejections if in_training else []
    return [x for x in rejections if x.entry.in_training == in_training]


def high_entropy(config: PPOConfig) -> Weigh | None:
    """Return the function that keeps the tokens of the highest entropy alone (``--high_entropy_token_ratio``)."""
    ratio = config.loss.high_entropy_token_ratio
    if ratio is None:
        return None

    def weigh(
        experience: Experience, *, entropy: Tensor, all_reduce_sum: AllReduceSum, **_: Any
    ) -> Tensor:
        mask = experience.action_mask
        is_kept = torch.zeros_like(mask)
        is_kept[mask] = top_share(entropy[mask], ratio, all_reduce_sum)
        return is_kept

    return weigh


# -- tokens that a policy loss treats differently, chosen once a rollout: see algorithms/selection.py -----------------


def select_tokens(items: Sequence[Experience], loss: Any, ranks: Ranks, seed: int) -> None:
    """Set ``selected`` of all rows for a loss that selects tokens. Collective.

    A token's random number depends on ``seed``, its row's token ids and its position.
    """
    select: SelectionFn = load(loss.entry.selection)
    items = items or [Experience.placeholder()]  # for the collectives of a rank without samples
    masks = [item.action_mask for item in items]  # (1, A) each

    def trained(rows: Iterable[Tensor]) -> Tensor:
        """Join the rows' trained tokens, (N,)."""
        return torch.cat([row[mask] for row, mask in zip(rows, masks)])

    selected = select(
        trained(item.action_log_probs for item in items),
        trained(item.advantages for item in items),
        trained(_uniforms(item, seed) for item in items),
        options=loss.options,
        all_reduce_sum=partial(ranks.all_reduce, op="sum"),
    )  # (N,)
    rows = selected.split([int(mask.sum()) for mask in masks])
    for item, mask, row in zip(items, masks, rows):
        item.selected = torch.zeros_like(mask).masked_scatter(mask, row)


def _uniforms(item: Experience, seed: int) -> Tensor:
    """Return random numbers of a row (1, A), independent of its rank and of the order of rows."""
    key = zlib.crc32(item.sequences.cpu().numpy().tobytes(), seed & 0xFFFF_FFFF)
    generator = torch.Generator().manual_seed(key)
    return torch.rand(1, item.num_actions, generator=generator).to(item.sequences.device)
