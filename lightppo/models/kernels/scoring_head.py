"""The head of a model that returns log probs in place of logits, so that memory does not grow with tokens × vocabulary.

This needs a plain linear head with nothing after it. The first forward of any other model (Gemma 2's soft capping, the
scaling of Cohere and Granite, adapters or 4 bits in the head) detects this and runs again; from then on all logits are
made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn, stack
from transformers import PreTrainedModel

from lightppo.models.batches import Batch, on_cpu, to_device
from lightppo.models.inspection import is_plain_linear, takes
from lightppo.models.kernels.linear_log_probs import TokenPlaces, linear_log_probs


def scores_by_head(
    actor: Any,
    batch: Batch,
    actions: Tensor,
    *,
    entropy: bool | Tensor,
    entropy_grad: bool,
    router_logits: bool,
) -> tuple[Any, Tensor, Tensor | None, None] | None:
    """Make one forward of an :class:`~lightppo.models.actor.Actor`, as its ``_predict`` does, without logits.

    None if this model's log probs do not come from its head alone. All ranks agree on it.
    """
    # False once the model was seen to change what its head returns
    head = scoring_head(actor.hf_model) if getattr(actor, "head_is_last", True) else None
    if head is None:
        return None
    in_model = takes(actor.hf_model, "logits_to_keep")

    def select(hidden: Tensor) -> Tensor:
        return batch.of_real(hidden if in_model else batch.at_places(hidden))

    if isinstance(entropy, Tensor):
        index = entropy[on_cpu(batch.real)].nonzero().squeeze(1)
        entropy = TokenPlaces(to_device(index, batch.kept.device), on_cpu=index)
    options = {
        "valid_vocab_size": actor.valid_vocab_size,
        "entropy": entropy,
        "entropy_grad": entropy_grad,
    }
    with scores_from_head(head, select, actions, actor.temperature, **options) as returned:
        output = actor._run(batch, batch.places if in_model else None, router_logits)
    actor.head_is_last = is_untouched(returned, output.logits)
    if not actor.head_is_last:
        return None
    scores = output.logits[0]  # (K, 1 or 2), behind the hooks of the whole model
    entropies = scores[:, 1] if entropy else None
    return (
        output,
        scores[:, 0],
        entropies.detach() if entropy and not entropy_grad else entropies,
        None,
    )


def scoring_head(model: PreTrainedModel) -> nn.Linear | None:
    """The head, if it is an unmodified linear layer over the vocabulary; else None."""
    head = model.get_output_embeddings()
    if not is_plain_linear(head):
        return None
    return head if head.out_features == model.config.get_text_config().vocab_size else None


@contextmanager
def scores_from_head(
    head: nn.Linear,
    select: Callable[[Tensor], Tensor],
    labels: Tensor,
    temperature: float,
    **options: Any,
) -> Iterator[list[Tensor]]:
    """Makes the :func:`scoring_head` return (1, K, 1) float32 log probs of ``labels``, or (1, K, 2) with the entropy.

    ``select`` picks the scored positions, (B, S, H) -> (K, H). Yields the head's results, for :func:`is_untouched`.
    """
    returned: list[Tensor] = []

    def forward(hidden: Tensor) -> Tensor:
        log_probs, entropy = linear_log_probs(
            select(hidden), head.weight, labels, head.bias, temperature, **options
        )
        scores = log_probs.unsqueeze(-1) if entropy is None else stack([log_probs, entropy], dim=-1)
        returned.append(scores.unsqueeze(0))
        return returned[-1]

    head.forward = forward  # on the instance: module calls, and hooks around them, find it there
    try:
        yield returned
    finally:
        del head.forward


def is_untouched(returned: list[Tensor], logits: Tensor) -> bool:
    """Whether the model called its head once and returned its result unchanged; by storage, so that all ranks agree."""
    if len(returned) != 1 or not isinstance(logits, Tensor):
        return False
    (scores,) = returned
    same_place = scores.untyped_storage()._cdata == logits.untyped_storage()._cdata
    return same_place and logits.shape == scores.shape and logits._version == scores._version == 0
