"""Rollouts by vLLM inside the training processes: one engine per process, or one per group of tensor-parallel ranks."""

from __future__ import annotations

import logging
import os
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from lightppo.config import PPOConfig
from lightppo.data.readers import stage_to_local
from lightppo.data.records import Prompt, Rollout
from lightppo.errors import ConfigError, RolloutError
from lightppo.rollout.engine import SamplingParams
from lightppo.rollout.hf import request_streams
from lightppo.rollout.sampling import request_seed
from lightppo.rollout.vllm_options import (
    ResponseReader,
    check_installed,
    check_request_lengths,
    engine_arguments,
    longest_sequence,
    set_environment,
    vllm_sampling,
    vocabulary_limits,
)
from lightppo.rollout.weight_sync import full_weights
from lightppo.strategy.distributed import on_cuda
from lightppo.strategy.zero3 import find_hf_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_LAUNCHER_ENDINGS = ("RANK", "WORLD_SIZE")


class VLLMRolloutEngine:
    """A :class:`~lightppo.rollout.engine.RolloutEngine` around ``vllm.LLM`` in this process.

    The engine has a copy of the weights, which ``sync_weights`` brings up to date. Every response is a request of its
    own with its own seed, so that in float32 a response depends neither on the batch nor on the number of ranks.
    With ``--tensor_parallel_size`` T, T neighbouring ranks share one engine: each brings its prompts, all sample all
    of them, each gets back the rollouts of its own.

    All ranks build it together, after the process group exists.

    Args:
        config: resolved; read are engine, data, rollout, model and strategy.
        strategy: of the run.
        actor: whose weights to sample with; prepared. They are pushed once here.
        tokenizer: decodes responses; ids beyond it are never sampled.

    Attributes:
        last_stats: of the last ``generate``: ``generated_tokens``, ``prompt_tokens``, ``seconds``; of the last push:
            ``sync_seconds``.

    Raises:
        ConfigError: vLLM is not installed, or cannot run this model with these options.
    """

    reports_finished = True  # takes generate's on_finished
    keeps_weights = True  # a copy, which may differ from the actor's

    def __init__(
        self,
        config: PPOConfig,
        strategy: Any,
        actor: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.on_gpu = on_cuda()
        check_installed(self.on_gpu)
        set_environment()
        self.config, self.strategy, self.actor, self.tokenizer = config, strategy, actor, tokenizer
        self.hf_model, _ = find_hf_model(actor)
        self.model_config = self.hf_model.config
        self.vocab_size = self.model_config.get_text_config(decoder=True).vocab_size
        self.max_model_len = longest_sequence(config)
        self.group = tensor_parallel_group(config.engine.tensor_parallel_size)
        self.last_stats: dict[str, float] = {}
        self._requests = 0
        self._asleep: set[str] = set()  # what vLLM calls tags: weights, kv_cache
        self._sleeps = self.on_gpu and config.engine.free_cache_engine
        if config.engine.free_cache_engine and not self.on_gpu:
            logger.info("no GPU: the rollout engine stays awake while the trainer trains")
        self.llm: Any = self._build()
        from lightppo.rollout.vllm_sampler import install_sampler

        self.llm.collective_rpc(install_sampler, args=vocabulary_limits(tokenizer, actor, self.vocab_size))
        self.sync_weights(actor)
        self._try_out()

    def _build(self) -> Any:
        arguments = engine_arguments(self.config, self.model_config, self.on_gpu)
        arguments["dtype"] = self._dtype()
        with tempfile.TemporaryDirectory(prefix="lightppo-vllm-") as folder, undisturbed_process():
            if arguments["load_format"] == "dummy" and not self.config.model.trust_remote_code:
                # What the actor is, which need not be what --pretrain says (--override_config, new tokens).
                self.model_config.save_pretrained(folder)
                self.tokenizer.save_pretrained(folder)
                arguments["model"] = folder  # read now, and never again
            else:  # with the weights, or the Python code, that come with the checkpoint
                arguments["model"] = stage_to_local(self.config.model.pretrain)
            try:
                from vllm import LLM

                return LLM(**arguments)
            except ValueError as error:
                raise ConfigError(f"--rollout_engine vllm: vLLM cannot run this model so: {error}") from error
            except ImportError as error:
                raise ConfigError(
                    f"--rollout_engine vllm: vLLM is installed but cannot be imported: {error}. On a machine without a "
                    "GPU, pip uninstall -y torchvision torchaudio torchcodec may mend it"
                ) from error

    def _try_out(self) -> None:
        """What vLLM lacks for a model (a size of attention heads, say) often shows in the first forward pass only.

        Raises:
            ConfigError: it lacks something.
        """
        request = (Prompt("", [self.tokenizer.eos_token_id or 0]), 0, (0, 0))
        try:
            for _ in self._run([request], SamplingParams(max_new_tokens=1, temperature=0), []):
                pass
        except (RuntimeError, ValueError, NotImplementedError) as error:
            raise ConfigError(f"--rollout_engine vllm: vLLM cannot run this model here: {error}") from error

    def _dtype(self) -> str:
        name = self.config.engine.vllm_dtype
        return str(next(self.hf_model.parameters()).dtype).removeprefix("torch.") if name == "auto" else name

    def generate(
        self,
        prompts: list[Prompt],
        sampling: SamplingParams,
        on_finished: Callable[[list[Rollout]], object] = lambda rollouts: None,
    ) -> list[Rollout]:
        """Samples ``sampling.n`` responses to each prompt; see ``RolloutEngine.generate``.

        Args:
            prompts: of this rank.
            sampling: how to sample.
            on_finished: gets each rollout of this rank when it is done, while others are still to come.

        Raises:
            ValueError: an empty prompt, one that with ``max_new_tokens`` is longer than the engine takes, a stop id or
                bad word unknown to the model, or a temperature for the first token.
            FloatingPointError: no token could be drawn (NaN weights, or every token banned).
        """
        start = time.perf_counter()
        if sampling.first_token_temperature is not None:
            raise ValueError(
                "vLLM has one temperature for all tokens of a response: first_token_temperature must be None"
            )
        check_request_lengths(prompts, sampling, self.max_model_len)
        reader = ResponseReader(
            self.tokenizer,
            sampling,
            generation_config=getattr(self.hf_model, "generation_config", None),
            vocab_size=self.vocab_size,
        )
        self.wake()
        offset, requests = 0, []
        for rank, (theirs, streams) in enumerate(self._of_group((prompts, request_streams(prompts, sampling)))):
            if rank == self._place_in_group():
                offset = len(requests)
            requests += [(theirs[i // sampling.n], i % sampling.n, stream) for i, stream in enumerate(streams)]
        mine = range(offset, offset + len(prompts) * sampling.n)
        rollouts: list[Rollout | None] = [None] * len(requests)
        for r, output in self._run(requests, sampling, reader.stop.ids):
            if r not in mine:
                continue
            prompt, sample_index, _ = requests[r]
            # The gathered prompt is a copy: this rank's rollouts refer to its own.
            prompt = prompts[(r - offset) // sampling.n]
            rollouts[r] = reader.rollout(
                prompt, sample_index, output.token_ids, output.logprobs.logprobs, output.finish_reason
            )
            on_finished([rollouts[r]])
        own = rollouts[offset : offset + len(mine)]
        self.last_stats |= {
            "generated_tokens": sum(len(rollout.response_ids) for rollout in own),
            "prompt_tokens": sum(len(rollout.prompt.token_ids) for rollout in own),
            "seconds": time.perf_counter() - start,
        }
        return own

    def _run(self, requests: list[tuple], sampling: SamplingParams, stop_ids: list[int]) -> Iterator[tuple[int, Any]]:
        """(request number, vLLM's output) as the responses end."""
        from vllm import SamplingParams as VLLMSamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        engine, running = self.llm.llm_engine, {}
        try:
            for r, (prompt, _, stream) in enumerate(requests):
                parameters = VLLMSamplingParams(
                    **vllm_sampling(sampling, stop_ids, request_seed(sampling.seed, *stream)),
                    output_kind=RequestOutputKind.FINAL_ONLY,
                    detokenize=bool(sampling.stop),
                    flat_logprobs=True,
                )
                self._requests += 1
                name = f"rollout-{self._requests}"
                running[name] = r
                engine.add_request(name, tokens_input(list(prompt.token_ids)), parameters)
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.finished:
                        yield running.pop(output.request_id), output.outputs[0]
            if running:
                raise RolloutError(f"vLLM ended without an answer to {len(running)} of {len(requests)} requests")
        finally:
            if running:
                engine.abort_request(list(running))

    def sync_weights(self, actor: nn.Module) -> None:
        """Pushes the present weights of ``actor`` and forgets all cached prefixes. Collective.

        Raises:
            RolloutError: the engine has weights that the push does not reach, or cannot drop its cache.
        """
        from lightppo.rollout.vllm_weights import push_weights

        start = time.perf_counter()
        self.actor = actor
        self._wake("weights")
        (missing,) = self.llm.collective_rpc(push_weights, args=(full_weights(actor, self.strategy),))
        if missing:
            raise RolloutError(
                f"{len(missing)} weights of the vLLM engine got no value from the actor, first "
                f"{', '.join(missing[:5])}: "
                f"vLLM and transformers disagree on {type(self.hf_model).__name__}; use --rollout_engine hf"
            )
        if not self.llm.reset_prefix_cache():
            raise RolloutError("vLLM could not drop its prefix cache after new weights: requests are still running")
        self.last_stats["sync_seconds"] = time.perf_counter() - start

    def differing_weights(self, tolerance: float = 1e-2) -> tuple[list[str], list[str]]:
        """Weights of the actor that the engine does not have, and those that cannot be compared. Collective.

        Args:
            tolerance: largest difference, relative to the weight's size.
        """
        from lightppo.rollout.vllm_weights import differing_weights, engine_fingerprints, trainer_fingerprints

        self._wake("weights")
        expected = trainer_fingerprints(full_weights(self.actor, self.strategy))
        if self.group is not None:
            return [], list(expected)  # each rank of the engine has a part of every weight
        ((found, packed),) = self.llm.collective_rpc(engine_fingerprints)
        return differing_weights(expected, found, packed, tolerance)

    def sleep(self) -> None:
        """Frees the engine's GPU memory, by ``--sleep_level``; nothing on a CPU."""
        if self._sleeps and not self._asleep:
            self.llm.sleep(level=self.config.engine.sleep_level)
            self._asleep = {"weights", "kv_cache"}

    def wake(self) -> None:
        """Takes back what :meth:`sleep` freed; weights that were dropped are pushed anew."""
        dropped = "weights" in self._asleep and self.config.engine.sleep_level == 2
        self._wake("weights")
        self._wake("kv_cache")
        if dropped:
            self.sync_weights(self.actor)

    def _wake(self, tag: str) -> None:
        if tag in self._asleep:
            torch.cuda.empty_cache()  # what the trainer has freed must be free for the engine
            self.llm.wake_up(tags=[tag])
            self._asleep.discard(tag)

    def close(self) -> None:
        """Ends the engine; the process group stays. It may be called again."""
        llm, self.llm = self.llm, None
        if llm is not None:
            with default_group_kept():
                llm.llm_engine.engine_core.shutdown()

    def _of_group(self, mine: Any) -> list[Any]:
        """What each rank of this engine brings, in rank order. Collective over the ranks of one engine."""
        if self.group is None:
            return [mine]
        everything: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(everything, mine, group=self.group)
        return everything

    def _place_in_group(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)


def tensor_parallel_group(size: int) -> Any | None:
    """The process group of the ranks that share this rank's engine; None where it has one of its own. Collective.

    Raises:
        ConfigError: the ranks cannot be parted so.
    """
    if size == 1:
        return None
    world = dist.get_world_size()
    if world % size:
        raise ConfigError(f"--tensor_parallel_size {size} does not divide the {world} ranks")
    groups = [dist.new_group(list(range(first, first + size)), backend="gloo") for first in range(0, world, size)]
    return groups[dist.get_rank() // size]


@contextmanager
def undisturbed_process() -> Iterator[None]:
    """Brings back what building a vLLM engine changes in a process that has other things to do: random numbers, the
    launcher's variables, thread settings, precision of matmuls, what the garbage collector looks at."""
    import gc

    python, numpy_state, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if on_cuda() else []
    set_threads, threads, precision = (
        torch.set_num_threads,
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
    )
    dtype, launcher = torch.get_default_dtype(), {n: v for n, v in os.environ.items() if n.endswith(_LAUNCHER_ENDINGS)}
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
        torch.set_num_threads = set_threads
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        torch.set_default_dtype(dtype)
        for name in [n for n in os.environ if n.endswith(_LAUNCHER_ENDINGS) and n not in launcher]:
            del os.environ[name]
        os.environ.update(launcher)
        if affinity is not None:
            os.sched_setaffinity(0, affinity)
        gc.unfreeze()


@contextmanager
def default_group_kept() -> Iterator[None]:
    """vLLM destroys the default process group at its end; the trainer still needs it for what comes after."""
    destroy = dist.destroy_process_group

    def destroy_others(group: Any = None) -> None:
        if group is not None and group is not dist.group.WORLD:
            destroy(group)

    dist.destroy_process_group = destroy_others
    try:
        yield
    finally:
        dist.destroy_process_group = destroy
