"""The plain decode loop: one micro batch of prompts after the other through any causal LM with a ``DynamicCache``.

Knows logits and token ids; no text, no records, no collectives.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from lightppo.rollout.sampling import NO_TOKEN, TokenSampler
from lightppo.rollout.stopping import StopCriteria

# Finished rows leave the batch when at most this share of it still runs: copying the cache is then worth it.
COMPACT_BELOW = 0.75


@dataclass
class DecodedBatch:
    """Responses of one micro batch, in the order of its prompts.

    Attributes:
        tokens: (B, max_new_tokens) long; behind ``lengths`` they mean nothing.
        log_probs: (B, max_new_tokens) float32, same.
        lengths: (B,) tokens of each response, the stop id included.
        stopped: (B,) bool: ended by a stop id or string, not by the token limit.
        steps: forward passes made.
        positions: positions computed in them.
    """

    tokens: Tensor
    log_probs: Tensor
    lengths: Tensor
    stopped: Tensor
    steps: int = 0
    positions: int = 0


class CachedForward:
    """The model's forward, one step at a time: last-position logits from new ids and a growing cache.

    Args:
        model: the Hugging Face model (PEFT-wrapped or not), on its device.

    Raises:
        ValueError: the model cannot decode with a ``DynamicCache``.
    """

    def __init__(self, model: nn.Module) -> None:
        base = model.get_base_model() if hasattr(model, "get_base_model") else model  # peft hides the signature
        name, parameters = type(base).__name__, inspect.signature(base.forward).parameters
        if getattr(base.config, "is_encoder_decoder", False):
            raise ValueError(f"HF rollouts need a decoder-only model; {name} is an encoder-decoder")
        if "past_key_values" not in parameters or not base._supports_default_dynamic_cache():
            raise ValueError(f"HF rollouts need a model that takes a DynamicCache; {name} does not")
        self.model = model
        self.base = base
        self.config = base.config
        self.takes_position_ids = "position_ids" in parameters
        self._keep = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}

    def new_cache(self) -> Cache:
        return DynamicCache(config=self.config)

    def __call__(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, cache: Cache) -> Tensor:
        """Logits (B, V) of the position behind the last of ``input_ids`` (B, L); the mask covers the cache too."""
        positions = {"position_ids": position_ids} if self.takes_position_ids else {}
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=cache,
            use_cache=True,
            return_dict=True,
            **positions,
            **self._keep,
        )
        return output.logits[:, -1]


def left_pad(prompts: list[list[int]], device: torch.device) -> Tensor:
    """Token ids (B, P) with ``NO_TOKEN`` on the left of shorter prompts."""
    width = max(len(prompt) for prompt in prompts)
    return torch.tensor([[NO_TOKEN] * (width - len(prompt)) + prompt for prompt in prompts], device=device)


def can_drop_rows(cache: Cache) -> bool:
    """Whether rows can be taken out of the cache: not where layers hold recurrent states, which would stay behind."""
    recurrent = any(hasattr(layer, "update_recurrent_state") for layer in cache.layers)
    return not recurrent and all(hasattr(layer, "batch_select_indices") for layer in cache.layers)


@torch.no_grad()
def decode(
    forward: CachedForward,
    prompts: list[list[int]],
    uniforms: Tensor,
    sampler: TokenSampler,
    stop: StopCriteria,
) -> DecodedBatch:
    """Decodes one micro batch until every row has ended or has ``max_new_tokens``.

    Args:
        forward: the model.
        prompts: B non-empty lists of token ids.
        uniforms: (B, max_new_tokens) float64 on the model's device, row b for prompt b.
        sampler: draws the tokens.
        stop: tells which rows have ended.
    """
    device, (batch_size, max_new_tokens) = uniforms.device, uniforms.shape
    prompt_ids = left_pad(prompts, device)  # (B, P)
    prompt_width = prompt_ids.shape[1]
    ids = torch.cat([prompt_ids, prompt_ids.new_zeros(batch_size, max_new_tokens)], dim=1)  # (B, P + max_new)
    responses = ids[:, prompt_width:]  # a view: what is written here is seen in ids
    log_probs = torch.zeros(batch_size, max_new_tokens, device=device)
    lengths = torch.full((batch_size,), max_new_tokens, device=device)
    stopped = torch.zeros(batch_size, dtype=torch.bool, device=device)

    # What follows has b rows: those still in the batch, of which `done` have ended but have not left it yet.
    rows = torch.arange(batch_size, device=device)
    done = stopped.clone()
    mask = (ids != NO_TOKEN).long()  # (b, P + max_new)
    inputs = prompt_ids.clamp(min=0)  # (b, P), later (b, 1)
    positions = (mask[:, :prompt_width].cumsum(dim=1) - 1).clamp_(min=0)
    cache = forward.new_cache()
    step = computed = 0
    for step in range(max_new_tokens):
        width = prompt_width + step
        logits = forward(inputs, mask[:, :width], positions, cache)  # (b, V)
        computed += inputs.numel()
        history = ids[rows, :width] if sampler.needs_history else None
        tokens, token_log_probs = sampler(logits, uniforms[:, step], step, history)
        responses[rows, step] = tokens
        log_probs[rows, step] = token_log_probs

        ended = stop.ended(responses, rows, step + 1) & ~done
        lengths[rows] = torch.where(ended, step + 1, lengths[rows])
        stopped[rows] |= ended
        done |= ended
        running = len(rows) - int(done.sum())
        if running == 0:
            break
        inputs, positions = tokens.unsqueeze(1), positions[:, -1:] + 1
        if running <= COMPACT_BELOW * len(rows) and can_drop_rows(cache):
            kept = (~done).nonzero().squeeze(1)
            cache.batch_select_indices(kept)
            rows, mask, inputs, positions, uniforms = (x[kept] for x in (rows, mask, inputs, positions, uniforms))
            done = done.new_zeros(running)
    return DecodedBatch(responses, log_probs, lengths, stopped, steps=step + 1, positions=computed)


class BatchDecoder:
    """:func:`decode`, one micro batch after the other: for models whose cache has more than keys and values.

    Arguments, attributes and :meth:`run` as of :class:`~lightppo.rollout.slots.SlotDecoder`.
    """

    def __init__(
        self,
        forward: CachedForward,
        sampler: TokenSampler,
        stop: StopCriteria,
        *,
        slots: int,
        max_new_tokens: int,
        device: torch.device,
    ) -> None:
        self.forward = forward
        self.sampler = sampler
        self.stop = stop
        self.slots = slots
        self.device = device
        self.steps = 0
        self.positions = 0

    def run(
        self, prompts: list[list[int]], uniforms: Callable[[list[int]], Tensor]
    ) -> Iterator[tuple[list[int], DecodedBatch]]:
        """Decodes all requests; see ``SlotDecoder.run``."""
        for first in range(0, len(prompts), self.slots):
            numbers = list(range(first, min(first + self.slots, len(prompts))))
            batch = decode(self.forward, [prompts[i] for i in numbers], uniforms(numbers), self.sampler, self.stop)
            self.steps += batch.steps
            self.positions += batch.positions
            yield numbers, batch
