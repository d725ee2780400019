"""Decoding with the trainer's own model: what decodes, and one that takes a micro batch after the other."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache, DynamicCache, PreTrainedModel

from lightppo.models.inspection import cache_argument
from lightppo.ranks import heartbeat
from lightppo.rollout.sampling import NO_TOKEN, TokenSampler
from lightppo.rollout.stop_criteria import StopCriteria

# share of rows that still run at which finished ones leave a BatchDecoder's cache, by a copy
COMPACT_BELOW = 0.75


class CachedForward:
    """One decoding step of a Hugging Face model: last-position logits from new ids and a growing cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        name = type(model).__name__
        parameters = inspect.signature(model.forward).parameters
        if getattr(model.config, "is_encoder_decoder", False):
            raise ValueError(f"HF rollouts need a decoder-only model; {name} is an encoder-decoder")
        self._cache = cache_argument(model)
        if self._cache is None or not model._supports_default_dynamic_cache():
            raise ValueError(f"HF rollouts need a model that takes a DynamicCache; {name} does not")
        self.model = model
        self.config = model.config
        self.takes_position_ids = "position_ids" in parameters
        self.calls = 0
        self.positions = 0  # computed in them, with the padding of prompts
        self._keep = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}

    def __call__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        cache: Cache,
    ) -> Tensor:
        """Return logits (B, V) behind the last of ``input_ids`` (B, L); the mask covers the cache too."""
        self.calls += 1
        self.positions += input_ids.numel()
        return self.logits(input_ids, attention_mask, position_ids, cache)

    def logits(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        cache: Cache,
    ) -> Tensor:
        """Return the same, not counted."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, **self._keep}
        if self.takes_position_ids:
            inputs["position_ids"] = position_ids
        inputs |= {self._cache: cache, "use_cache": True, "return_dict": True}
        return self.model(**inputs).logits[:, -1]


def left_pad(prompts: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return token ids (B, P) with ``NO_TOKEN`` on the left of shorter prompts, their mask and position ids."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor(
        [[NO_TOKEN] * (width - len(prompt)) + prompt for prompt in prompts], device=device
    )
    mask = (ids != NO_TOKEN).long()
    return ids, mask, (mask.cumsum(dim=1) - 1).clamp_(min=0)


@dataclass
class DecodedBatch:
    """Decoded responses; entries beyond ``lengths`` mean nothing."""

    tokens: Tensor  # (B, max_new_tokens) long
    log_probs: Tensor  # (B, max_new_tokens) float32
    lengths: Tensor  # (B,) tokens of each response, the stop id included
    stopped: Tensor  # (B,) bool: ended by a stop id or string, not by the token limit


Seeds = Callable[[list[int]], Tensor]  # numbers of requests -> (k, max_new_tokens) long
Decoded = Iterator[tuple[list[int], DecodedBatch]]  # numbers of requests and their responses


class RequestQueue:
    """The requests of one call by their numbers; the longest prompts come first.

    Decoders ask it for all that concerns requests. A subclass may bring more of them while others decode.
    """

    def __init__(
        self,
        forward: CachedForward,
        prompts: list[list[int]],
        max_new_tokens: int,
        device: torch.device,
    ) -> None:
        self.forward = forward
        self.device = device
        self.max_new_tokens = max_new_tokens
        self.prompts: list[list[int]] = []  # of all requests so far
        self.waiting = 0  # requests that nobody decodes yet
        self.prompt_columns = max(map(len, prompts), default=0)  # most tokens of a prompt
        self.columns = self.prompt_columns + max_new_tokens  # and of its response
        self.add(prompts)

    def add(self, prompts: list[list[int]]) -> None:
        """Add requests behind those that are there."""
        self.prompts += prompts
        self.waiting += len(prompts)

    def look(self, idle: bool) -> bool:
        """Return whether further requests may come; those that are there are added. ``idle``: nothing decodes."""
        return False

    def limits(self, numbers: list[int]) -> list[int]:
        """Return the most new tokens of each request."""
        return [self.max_new_tokens] * len(numbers)

    def take_in_order(self, count: int) -> list[int]:
        """Return numbers of the next requests, at most ``count``."""
        first = len(self.prompts) - self.waiting
        self.waiting -= min(count, self.waiting)
        return list(range(first, len(self.prompts) - self.waiting))


@dataclass
class Decoder:
    """Decodes many requests with one model, at most ``slots`` at a time.

    ``run(queue, seeds)`` yields the numbers of some requests and their responses, until all of a queue of
    ``queue_kind`` are done.
    """

    queue_kind: ClassVar[type[RequestQueue]] = RequestQueue

    forward: CachedForward
    sampler: TokenSampler
    stop: StopCriteria
    slots: int
    max_new_tokens: int
    device: torch.device


class BatchDecoder(Decoder):
    """Decodes one micro batch after the other, with the cache that transformers makes for the model."""

    @torch.no_grad()
    def run(self, queue: RequestQueue, seeds: Seeds) -> Decoded:
        """See :class:`Decoder`."""
        while queue.look(idle=True) or queue.waiting:
            if not queue.waiting:
                continue
            numbers = queue.take_in_order(self.slots)
            prompts = [queue.prompts[number] for number in numbers]
            limits = torch.tensor(queue.limits(numbers), device=self.device)
            yield numbers, self._decode(prompts, seeds(numbers), limits)

    def _decode(self, prompts: list[list[int]], seeds: Tensor, limits: Tensor) -> DecodedBatch:
        """Decode until every row has ended or has its limit of new tokens, ``limits`` (B,)."""
        batch_size, most = seeds.shape
        prompt_ids, mask, positions = left_pad(prompts, self.device)  # (B, P)
        prompt_width = prompt_ids.shape[1]
        ids = pad(prompt_ids, (0, most))  # (B, P + max_new)
        responses = ids[:, prompt_width:]  # a view: what is written here is seen in ids
        log_probs = torch.zeros(batch_size, most, device=self.device)
        lengths = limits.clone()
        stopped = torch.zeros(batch_size, dtype=torch.bool, device=self.device)

        # What follows has b rows: those still in the batch, of which `done` have ended but have not left it yet.
        rows = torch.arange(batch_size, device=self.device)
        done = stopped.clone()
        mask = pad(mask, (0, most), value=1)  # (b, P + max_new)
        inputs = prompt_ids.clamp(min=0)  # (b, P), later (b, 1)
        cache = DynamicCache(config=self.forward.config)
        for step in range(most):
            heartbeat.beat()
            width = prompt_width + step
            logits = self.forward(inputs, mask[:, :width], positions, cache)  # (b, V)
            history = ids[rows, :width] if self.sampler.needs_history else None
            tokens, log_probs[rows, step] = self.sampler(logits, seeds[:, step], step, history)
            responses[rows, step] = tokens

            ended = self.stop.ended(responses, rows, step + 1) & ~done
            lengths[rows] = torch.where(ended, step + 1, lengths[rows])
            stopped[rows] |= ended
            done |= ended | (limits[rows] == step + 1)
            running = len(rows) - int(done.sum())
            if running == 0:
                break
            inputs = tokens.unsqueeze(1)
            positions = positions[:, -1:] + 1
            if running <= COMPACT_BELOW * len(rows) and _can_drop_rows(cache):
                left = (~done).nonzero().squeeze(1)
                cache.batch_select_indices(left)
                rows, mask, inputs, positions, seeds = (
                    x[left] for x in (rows, mask, inputs, positions, seeds)
                )
                done = done.new_zeros(running)
        return DecodedBatch(responses, log_probs, lengths, stopped)


def _can_drop_rows(cache: Cache) -> bool:
    """Return whether the cache can drop rows: not with recurrent states, which would stay behind."""
    recurrent = any(hasattr(layer, "update_recurrent_state") for layer in cache.layers)
    return not recurrent and all(hasattr(layer, "batch_select_indices") for layer in cache.layers)


class DecodingRunner(AbstractContextManager, Protocol):
    """Has decoding steps run in another way; entered around the steps of one ``generate``."""

    def decoder(self, kind: type[Decoder]) -> Callable[..., Decoder]:
        """Return what makes the decoder, in place of ``kind`` and with its arguments; ``kind`` itself changes nothing."""
