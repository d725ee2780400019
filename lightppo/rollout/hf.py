"""Rollouts with the trainer's own Hugging Face model: no second copy of the weights, any causal LM, CPU or GPU."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch
from torch import nn

from lightppo.config.rules import rollout_rows
from lightppo.data.records import Prompt, Rollout
from lightppo.models.kernels.layers import packed_weights
from lightppo.rollout.decoding import (
    BatchDecoder,
    CachedForward,
    DecodedBatch,
    Decoder,
    PromptQueue,
    SlotDecoder,
    can_use_slots,
)
from lightppo.rollout.decoding_runners import CUDAGraphs, DecodingRunner, InvariantSteps
from lightppo.rollout.engine import Capabilities, SamplingParams, progress_bar
from lightppo.rollout.recorded_experts import ExpertRecorder
from lightppo.rollout.sampling import (
    StopCriteria,
    TokenSampler,
    end_of_text_ids,
    in_any_order,
    penalties_of,
    token_seeds,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightppo.config import PPOConfig
    from lightppo.distributed.deepspeed import DeepspeedStrategy

# of the slots ended: ``on_finished`` is called then, because reward models like batches
REPORT_SHARE = 1 / 8


@contextmanager
def generation_mode(model: nn.Module) -> Iterator[None]:
    """Enter evaluation mode without gradients, checkpointing or compiled layers; restore each module's mode at the end."""
    training = [module for module in model.modules() if module.training]
    checkpointing: list[Any] = [
        module for module in model.modules() if vars(module).get("gradient_checkpointing")
    ]
    try:
        model.eval()
        for module in checkpointing:
            module.gradient_checkpointing = False
        # Not inference_mode: buffers that a forward makes (rotary caches) must stay usable in training. Layers would be
        # compiled again for every kind of cache.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), packed_weights(model):
            yield
    finally:
        for module in training:
            module.training = True  # not .train(), which would take the children along
        for module in checkpointing:
            module.gradient_checkpointing = True


@dataclass(eq=False, repr=False)
class HFRolloutEngine:
    """A :class:`~lightppo.rollout.engine.RolloutEngine` that decodes with ``actor.model`` itself.

    Requests take ``micro_rollout_batch_size`` slots; when a response ends, the next request takes its slot. A prompt
    goes through the model once for all its samples. The random numbers of a response depend only on (``sampling.seed``,
    ``prompt.index``, sample number), and decide between tokens as ``draw_tokens`` says. So in float32 a response does
    not depend on the micro batch size, the other prompts, their order or the number of ranks, unless rounding decides
    between two tokens that arrive together. ``last_stats`` counts tokens, forward passes, positions computed in them
    (padding included) and seconds.
    """

    capabilities: ClassVar = Capabilities(
        exact_log_probs=True,
        reports_finished=True,
        heats_first_token=True,
        records_experts=True,
    )

    # Has .model, a Hugging Face model or the DeepSpeed engine around it; log probs are over its first valid_vocab_size
    # ids if it has this attribute, else over the whole embedding.
    actor: nn.Module
    tokenizer: PreTrainedTokenizerBase
    _: KW_ONLY
    micro_rollout_batch_size: int = 8
    # Makes the context around generate; under ZeRO-3 it holds the full parameters. There are no collectives inside, so
    # ranks may bring different numbers of prompts, or none.
    gather_parameters: Callable[[], AbstractContextManager] = nullcontext
    # ids from here on are never sampled; None: the tokenizer's length
    valid_vocab_size: int | None = None
    progress: bool = False
    runner: DecodingRunner | None = None  # None: steps run as they are
    records_experts: bool = False  # rollouts say which experts their tokens went to
    last_stats: dict[str, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.micro_rollout_batch_size < 1:
            raise ValueError(
                f"micro_rollout_batch_size must be at least 1; got {self.micro_rollout_batch_size}"
            )

    @property
    def model(self) -> nn.Module:
        """Return the Hugging Face model without its DeepSpeed engine."""
        model: Any = self.actor.model
        return getattr(model, "module", model)

    def generate(
        self,
        prompts: list[Prompt],
        sampling: SamplingParams,
        on_finished: Callable[[list[Rollout]], object] = lambda rollouts: None,
    ) -> list[Rollout]:
        """Sample ``sampling.n`` responses to each prompt; ``on_finished`` gets each rollout once, soon after its end.

        Raises:
            ValueError: a prompt is empty or too long for the model, or a stop id or bad word is unknown to it.
            FloatingPointError: no token could be drawn (NaN weights, or every token banned).
        """
        start = time.perf_counter()
        forward = CachedForward(self.model)
        if self.records_experts:
            forward.recorder = ExpertRecorder(cast(Any, self.actor).router_replay)
        check_lengths(prompts, sampling, self.positions)
        requests = [(prompt, i) for prompt in prompts for i in range(sampling.n)]
        streams = request_streams(prompts, sampling)
        # Longest first: little padding, and a lack of memory shows at once.
        order = sorted(range(len(requests)), key=lambda number: -len(requests[number][0].token_ids))
        rollouts: list[Any] = [None] * len(requests)
        bar = progress_bar(len(order), shown=self.progress)
        with bar, self.decoding(forward, sampling) as decoder:
            max_new_tokens = sampling.max_new_tokens

            def seeds(request_numbers: list[int]) -> torch.Tensor:  # (B, max_new_tokens)
                seed_rows = [
                    token_seeds(sampling.seed, *streams[order[i]], max_new_tokens)
                    for i in request_numbers
                ]
                return torch.from_numpy(np.stack(seed_rows)).to(decoder.device)

            finished: list[Rollout] = []
            ordered_prompts = [requests[number][0].token_ids for number in order]
            queue = PromptQueue(forward, ordered_prompts, max_new_tokens, decoder.device)
            for request_numbers, decoded in decoder.run(queue, seeds):
                samples = [requests[order[i]] for i in request_numbers]
                ended_rollouts = self.to_rollouts(samples, decoded, decoder.stop)
                for i, rollout in zip(request_numbers, ended_rollouts):
                    rollouts[order[i]] = rollout
                    if forward.recorder is not None:
                        rollout.experts = forward.recorder.take(i, len(rollout.response_ids))
                finished += ended_rollouts
                if len(finished) >= REPORT_SHARE * self.micro_rollout_batch_size:
                    on_finished(finished)
                    finished = []
                bar.update(len(ended_rollouts))
            if finished:
                on_finished(finished)
        self.last_stats = {
            "generated_tokens": sum(len(rollout.response_ids) for rollout in rollouts),
            "prompt_tokens": sum(len(prompt.token_ids) for prompt, _ in requests),
            "decode_steps": forward.calls,
            "decode_positions": forward.positions,
            "seconds": time.perf_counter() - start,
        }
        return rollouts

    @property
    def positions(self) -> int | None:
        """Return the longest sequence that the model takes; None: any."""
        config: Any = self.model.config
        text_config = config.get_text_config(decoder=True)
        return getattr(text_config, "max_position_embeddings", None)

    @contextmanager
    def decoding(self, forward: CachedForward, sampling: SamplingParams) -> Iterator[Decoder]:
        """Enter what decodes with the model's full weights. Collective."""
        vocab_size = forward.config.get_text_config(decoder=True).vocab_size
        eos_ids = end_of_text_ids(self.tokenizer, getattr(self.model, "generation_config", None))
        stop = StopCriteria(self.tokenizer, sampling, eos_ids=eos_ids, vocab_size=vocab_size)
        trained = min(getattr(self.actor, "valid_vocab_size", None) or vocab_size, vocab_size)
        tokenizer_size = self.valid_vocab_size
        if tokenizer_size is None:
            tokenizer_size = len(self.tokenizer)
        penalties = penalties_of(sampling, self.tokenizer, min(tokenizer_size, trained))
        sampler = TokenSampler(
            sampling,
            valid_vocab_size=min(tokenizer_size, trained),
            log_prob_vocab_size=trained,
            suppressed_ids=stop.ids,
            logits_processors=() if penalties is None else (penalties,),
        )
        with (
            in_any_order() if torch.are_deterministic_algorithms_enabled() else nullcontext(),
            self.gather_parameters(),
            generation_mode(self.model),
            self.runner or nullcontext(),
        ):
            device = next(self.model.parameters()).device  # offloaded parameters are on it now
            decoder_class: type[Decoder] = BatchDecoder
            if can_use_slots(forward.config):
                decoder_class = SlotDecoder
            make_decoder: Callable[..., Decoder] = decoder_class
            if self.runner is not None:
                make_decoder = self.runner.decoder(decoder_class)
            slots = self.micro_rollout_batch_size
            stop.is_stop = stop.is_stop.to(device)
            yield make_decoder(forward, sampler, stop, slots, sampling.max_new_tokens, device)

    def sync_weights(self, actor: nn.Module) -> None:
        """Decode with ``actor`` from now on; its weights are used in place."""
        self.actor = actor

    def sleep(self) -> None:
        """Do nothing: the weights are the trainer's, and the cache ends with each call."""

    def wake(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def to_rollouts(
        self,
        requests: list[tuple[Prompt, int]],
        decoded: DecodedBatch,
        stop: StopCriteria,
        with_text: bool = True,
    ) -> list[Rollout]:
        """Make the rollouts of requests, (prompt, sample number) each. FloatingPointError: see :func:`check_drawn`."""
        lengths = decoded.lengths.tolist()
        stopped = decoded.stopped.tolist()
        ids, log_probs = (
            [row_values[:length] for row_values, length in zip(values.tolist(), lengths)]
            for values in (decoded.tokens, decoded.log_probs)
        )
        for (prompt, _), row_values in zip(requests, log_probs):
            check_drawn(prompt, row_values)
        texts = [""] * len(ids)
        if with_text:
            texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        if stop.strings:
            texts = [stop.trim(row_ids, text) for row_ids, text in zip(ids, texts)]
        return [
            Rollout(
                prompt=prompt,
                sample_index=sample_index,
                response_ids=ids[row_index],
                response_text=texts[row_index],
                finish_reason="stop" if stopped[row_index] else "length",
                log_probs=log_probs[row_index],
            )
            for row_index, (prompt, sample_index) in enumerate(requests)
        ]


def build(
    config: PPOConfig,
    strategy: DeepspeedStrategy,
    actor: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
) -> HFRolloutEngine:
    """Make the engine of ``--rollout_engine hf``. Collective."""
    runner: DecodingRunner | None = None
    if config.engine.batch_invariant:
        runner = InvariantSteps()
    elif config.engine.hf_cuda_graphs:
        runner = CUDAGraphs()
    gather_parameters: Callable[[], AbstractContextManager] = nullcontext
    if strategy.zero_stage == 3:
        gather_parameters = partial(strategy.gathered_parameters, actor)
    return HFRolloutEngine(
        actor,
        tokenizer,
        micro_rollout_batch_size=rollout_rows(config),
        gather_parameters=gather_parameters,
        progress=strategy.is_rank_0() and sys.stderr.isatty(),
        runner=runner,
        records_experts=config.loss.router_replay == "rollout",
    )


def check_lengths(
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    limit: int | None,
    owner: str = "the model has",
) -> None:
    """Raise ValueError for the first prompt that is empty or, with its response, longer than ``limit``."""
    for prompt in prompts:
        check_length(prompt.index, len(prompt.token_ids), sampling.max_new_tokens, limit, owner)


def check_length(
    prompt_index: int,
    prompt_length: int,
    new_tokens: int,
    limit: int | None,
    owner: str = "the model has",
) -> None:
    """Raise ValueError if a prompt of so many tokens is empty or, with its response, longer than ``limit``."""
    if prompt_length == 0:
        raise ValueError(
            f"prompt {prompt_index} has no tokens; there is nothing to predict the first token from"
        )
    if limit is not None and prompt_length + new_tokens > limit:
        raise ValueError(
            f"prompt {prompt_index} has {prompt_length} tokens, with the response {prompt_length + new_tokens}, but "
            f"{owner} {limit} positions: lower --prompt_max_len or --generate_max_len"
        )


def check_drawn(prompt: Prompt, log_probs: Sequence[float]) -> None:
    """Raise FloatingPointError if a token of a response has no finite log prob (see ``TokenSampler``)."""
    if not math.isfinite(sum(log_probs)):
        raise FloatingPointError(
            f"prompt {prompt.index}, response token {[*map(math.isfinite, log_probs)].index(False)}: no token can be "
            "drawn. The logits are NaN or infinite (have the weights diverged?), or bad_words and min_new_tokens ban "
            "every id"
        )


def request_streams(prompts: list[Prompt], sampling: SamplingParams) -> list[tuple[int, int]]:
    """Return (prompt index, sample number) of each request; the k-th prompt with an index gets numbers k·n … k·n + n-1."""
    used_numbers: Counter[int] = Counter()
    streams = []
    for prompt in prompts:
        streams += [(prompt.index, used_numbers[prompt.index] + i) for i in range(sampling.n)]
        used_numbers[prompt.index] += sampling.n
    return streams
