"""Training steps of a script: methods of a trainer's subclass, and loops that call its ``training_step``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightppo.algorithms.masking import LossNormalizer, masked_mean
from lightppo.experience.batching import StepPart, normalizer_of
from lightppo.experience.experience import Experience
from lightppo.logging.step_metrics import checked_status
from lightppo.models.actor import Actor
from lightppo.ranks import Ranks

SEED_INFO = ("kl", "reward", "return", "response_length", "total_length")
# What only a micro batch that ends an optimizer step can say.
OUTCOMES = {
    f"{model}_{name}"
    for model in ("actor", "critic")
    for name in ("grad_norm", "skipped", "overflow", "loss_scale", "stopped")
}


def seed_means(experience: Experience) -> dict[str, Tensor]:
    """Return the means over samples that the seed's ``training_step`` gives."""
    device = experience.action_mask.device
    info_tensors = {name: experience.info[name] for name in SEED_INFO if name in experience.info}
    # The seed puts plain numbers in.
    info = {
        name: torch.as_tensor(numbers, device=device).float()
        for name, numbers in info_tensors.items()
    }
    means = {name: values.mean() for name, values in info.items()}
    if "kl" in info:  # per token, as far as lengths tell
        means["kl"] = (info["kl"] * info["response_length"]).sum() / info["response_length"].sum()
    return means


def sample_share(mask: Tensor, normalizer: LossNormalizer) -> Tensor:
    """Return a micro batch's share of the samples of its optimizer step, times the number of ranks."""
    return mask.bool().any(dim=1).sum() * (normalizer.dp_size / max(normalizer.sequences, 1.0))


def lone_part(
    experience: Experience, ranks: Ranks, *, scale: float = 1.0, accumulation: int = 1
) -> StepPart:
    """Return the part of a micro batch outside a planned step, one of ``accumulation`` of equal weight. Collective."""
    return StepPart(normalizer_of([experience], ranks, scale), loss_scale=1 / accumulation)


def weighed_by_samples(trainer: Any, micro_batches: Iterable[Experience]) -> Iterator[Experience]:
    """Yield the micro batches of a step; what a script does with one counts by its share of the step's samples."""
    for experience in micro_batches:
        trainer.weigh(sample_share(experience.action_mask, experience.part.normalizer))
        # The seed's status is read from a placeholder, too.
        if not experience.part.has_samples:
            ones = torch.ones(1, device=experience.action_mask.device)
            experience = replace(experience, info=dict.fromkeys(SEED_INFO, ones))
        yield experience


def with_kl(trainer: Any, experience: Experience, log_probs: Tensor) -> Experience:
    """Add the KL of the trained policy's log probs, which nobody else gives a loop of a script."""
    reference = experience.base_action_log_probs
    if reference is None:
        return experience
    kl = trainer.experience_maker.sampled_kl(log_probs, reference)  # (B, A)
    of_samples = masked_mean(kl, experience.action_mask, dim=1)
    return replace(experience, info=experience.info | {"kl": of_samples})


def script_status(
    trainer: Any, status: Mapping[str, Any], experience: Experience
) -> dict[str, float]:
    """Return the numbers of a micro batch, with the seed's means over its samples.

    In a loop of a script every micro batch has the same names: what only the last one of an optimizer step can say is
    kept for ``save_logs_and_checkpoints``.
    """
    trainer.samples.read()
    numbers = checked_status(seed_means(experience) | status)
    if experience.part is not None:
        return numbers
    step_outcome = {name: number for name, number in numbers.items() if name in OUTCOMES}
    if step_outcome:
        trainer.outcomes = [*trainer.outcomes, step_outcome]
    return {name: number for name, number in numbers.items() if name not in step_outcome}


def without_means(status: Mapping[str, float]) -> dict[str, float]:
    """Leave out the seed's means over samples: those over the whole rollout take their place."""
    return {name: value for name, value in status.items() if name not in SEED_INFO}


def give_router_loss(actor: Actor) -> None:
    """Let a pass with ``return_output`` also give ``output.aux_loss`` from now on."""

    def switch(enabled: bool) -> None:
        actor.hf_model.config.output_router_logits = enabled

    router_logits_before = actor.hf_model.config.output_router_logits
    actor.register_forward_pre_hook(
        lambda _, arguments, keyword_arguments: switch(
            bool(keyword_arguments.get("return_output"))
        ),
        with_kwargs=True,
    )
    actor.register_forward_hook(lambda *_: switch(router_logits_before), always_call=True)
