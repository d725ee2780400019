"""Options of vLLM: in the training processes, and on servers; docs/rollouts.md."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal
from urllib.parse import urlsplit

from lightppo.http_client import check_url, is_loopback
from lightppo.option import Section, option
from lightppo.redaction import shown_url

vllm = partial(option, needs="rollout_engine=vllm")
any_vllm = partial(option, needs="rollout_engine=vllm|vllm_server")
server = partial(option, needs="rollout_engine=vllm_server")


_COLDEST = 0.01  # vLLM raises a lower temperature to this without an error


class VLLMConfig(Section, adds_to="engine", resume_safe=True):
    """vLLM as rollout engine."""

    rollout_check: Literal["error", "warn", "off"] = any_vllm(
        "error",
        "If the first log probs differ by more than --logp_diff_tolerance: stop and list the differing weights, "
        "or warn.",
    )
    logp_diff_tolerance: float | None = any_vllm(
        None,
        "Largest accepted mean difference of log probs. None: by the coarser type: float32 0.001 (0.01 on GPUs, "
        "where attention may use TF32), float16 0.02, bfloat16 0.1.",
        "nats",
        gt=0,
        also="rollout_check!=off",
    )
    tensor_parallel_size: int = vllm(
        1, "Ranks that share one engine and generate their samples together.", "ranks", ge=1
    )
    vllm_dtype: Literal["auto", "float32", "bfloat16", "float16"] = vllm(
        "auto", "Type of the weights. auto: the actor's."
    )
    load_format: Literal["dummy", "auto"] = vllm(
        "dummy", "Weights before the first push: random (dummy), or --pretrain (auto)."
    )
    gpu_memory_utilization: float = vllm(
        0.4, "Share of a GPU's memory for weights and KV cache.", gt=0, le=1
    )
    kv_cache_memory_bytes: int | None = vllm(
        None,
        "Size of the KV cache. None: by --gpu_memory_utilization; on a CPU for --max_num_seqs, at most 4 GiB.",
        "bytes per rank",
        ge=1,
    )
    max_num_seqs: int = vllm(256, "Maximum number of sequences decoded at once.", "sequences", ge=1)
    max_num_batched_tokens: int | None = vllm(
        None,
        "Maximum tokens per forward pass. None: vLLM's choice; CPU: 4096 or the longest sequence.",
        "tokens",
        ge=1,
    )
    max_model_len: int | None = vllm(
        None,
        "Maximum length of prompt and response together. None: --prompt_max_len + --generate_max_len.",
        "tokens",
        ge=2,
    )
    block_size: int | None = vllm(
        None, "Tokens per block of the KV cache. None: vLLM's choice.", "tokens", ge=1
    )
    enable_prefix_caching: bool = vllm(
        True,
        "Share the KV cache of a prompt among its samples. Each push of weights empties it. Off without a GPU for models "
        "with recurrent layers.",
    )
    vllm_request_seeds: bool | None = vllm(
        None,
        "One seed per response, so that responses do not depend on each other. Off: one per call, which is faster on a "
        "GPU. None: on for a CPU, off for a GPU.",
    )
    enforce_eager: bool | None = vllm(
        None, "No compilation, no CUDA graphs. None: on for a CPU, off for a GPU."
    )
    free_cache_engine: bool = any_vllm(
        True, "Put the engine to sleep during training, which frees GPU memory."
    )
    sleep_level: Literal[1, 2] | None = any_vllm(
        None,
        "While asleep, 1 keeps the weights in CPU memory, 2 drops them. None: 2; 1 if adapters travel alone.",
        also="free_cache_engine",
        off=(2,),
    )
    vllm_lora_push: Literal["auto", "adapter", "merged"] = any_vllm(
        "auto",
        "What a push sends with --lora_rank: the adapter alone, or all weights with the adapter merged. auto: the "
        "adapter; merged, with the reason, where vLLM cannot take it.",
        also="lora_rank>0",
    )
    offload_during_rollout: bool = vllm(
        False,
        "Optimizer states and fp32 masters are in CPU memory while vLLM samples, which gives it their GPU memory.",
        also="free_cache_engine",
    )
    vllm_server_url: tuple[str, ...] = server(
        (), "Addresses of servers that run --pretrain with `lightppo serve-vllm`."
    )
    vllm_server_api_key_env: str | None = server(
        None, "Environment variable with the servers' API key."
    )
    vllm_server_timeout: float = server(
        600.0, "Maximum wait for a response or a bucket of weights.", "seconds", gt=0
    )
    vllm_server_retries: int = server(
        2,
        "Retries per request. Then other servers take over, until the next push of weights.",
        "tries",
        ge=0,
    )
    vllm_server_concurrency: int = server(
        1024,
        "Maximum requests in flight, over all ranks. Each rank may have at least one.",
        "requests per server",
        ge=1,
    )
    vllm_server_start_timeout: float = server(
        300.0, "Maximum wait for the servers at the start.", "seconds", ge=0
    )
    vllm_server_sync: Literal["auto", "shm", "disk", "collective"] = server(
        "auto",
        "How weights get to the servers: shared memory (shm), disk or torch.distributed (collective: gloo, or "
        "NCCL between GPUs). auto: shm, or disk if shm is too small.",
    )
    vllm_server_sync_dir: str | None = server(
        None,
        "Folder that trainer and servers see under the same path. None: the temporary folder.",
        also="vllm_server_sync=disk",
    )
    vllm_server_sync_address: str = server(
        "127.0.0.1",
        "Address of the trainer that the servers connect to.",
        also="vllm_server_sync=collective",
    )

    @staticmethod
    def meant(config: Any) -> Mapping[str, Any]:
        """Weights that are not sent again must outlast the sleep."""
        asked = config.engine
        if asked.rollout_engine == "hf" or not asked.free_cache_engine:
            return {}
        stays = config.adapter.lora_rank > 0 and asked.vllm_lora_push != "merged"
        return {"sleep_level": 1 if stays else 2}

    @staticmethod
    def problems(options: Any) -> Iterator[str]:
        """What vLLM cannot sample, and what an engine in the training processes needs."""
        if options.rollout_engine not in ("vllm", "vllm_server"):
            return
        for name in ("temperature", "eval_temperature"):
            if 0 < getattr(options, name) < _COLDEST:
                asked = f"--{name} {getattr(options, name):g}"
                yield f"{asked}: vLLM samples at {_COLDEST} or above; set 0 (greedy) or at least that"
        if options.rollout_engine == "vllm_server":
            yield from _servers(options)
            return
        if options.ranks % options.tensor_parallel_size:
            yield f"--tensor_parallel_size {options.tensor_parallel_size} does not divide the {options.ranks} ranks"
        longest = options.prompt_max_len + options.generate_max_len
        if options.max_model_len is not None and options.max_model_len < longest:
            sum_of = "--prompt_max_len + --generate_max_len"
            yield f"--max_model_len {options.max_model_len} is below {sum_of}: set {longest} or more"
        is_auto = options.load_format == "auto"
        for flag, reads_pretrain in {
            "--load_format auto": is_auto,
            "--trust_remote_code": options.trust_remote_code,
        }.items():
            if reads_pretrain and options.override_config is not None:
                yield f"{flag} has --rollout_engine vllm read --pretrain without --override_config: leave one out"
            if reads_pretrain and options.pretrain is None:
                yield f"{flag} has --rollout_engine vllm read --pretrain, which is not set"
        if is_auto and options.init_from_scratch:
            yield "--load_format auto reads weights that --init_from_scratch does not have: leave it out"


def _servers(options: Any) -> Iterator[str]:
    """Addresses of vLLM servers, how weights get there, and how long they may take."""
    if not options.vllm_server_url:
        yield "--rollout_engine vllm_server needs --vllm_server_url: start a server by `lightppo serve-vllm`"
    try:
        for url in options.vllm_server_url:
            check_url(url, "--vllm_server_url", "--vllm_server_api_key_env")
            if "?" in url or "#" in url:
                raise ValueError(
                    f"--vllm_server_url {shown_url(url)}: give http://HOST:PORT without ? or #"
                )
    except ValueError as error:
        yield str(error)
        return
    addresses = [url.rstrip("/") for url in options.vllm_server_url]
    for url in addresses:
        if addresses.count(url) > 1:
            yield f"--vllm_server_url has {url} twice"
    remote = [url for url in addresses if not is_loopback(urlsplit(url).hostname or "")]
    by_files = options.vllm_server_sync == "disk" and options.vllm_server_sync_dir is not None
    by_broadcast = options.vllm_server_sync == "collective" and not is_loopback(
        options.vllm_server_sync_address
    )
    if remote and not by_files and not by_broadcast:
        # On the host itself, its name often leads to 127.0.1.1.
        wrong = (
            f", and --vllm_server_sync_address {options.vllm_server_sync_address} leads here alone"
        )
        yield (
            f"--vllm_server_url {remote[0]} is on another machine"
            f"{wrong if options.vllm_server_sync == 'collective' else ''}: set --vllm_server_sync collective and "
            "--vllm_server_sync_address to this machine's address there, or --vllm_server_sync disk and "
            "--vllm_server_sync_dir to a folder that both see under the same path"
        )
    if options.vllm_server_sync_address in ("", "0.0.0.0", "::"):
        yield f"--vllm_server_sync_address {options.vllm_server_sync_address!r}: give an address that servers can connect to"
    waits = {
        "vllm_server_timeout": 2 * options.vllm_server_timeout + 90,
        "vllm_server_start_timeout": options.vllm_server_start_timeout,
    }
    for name, wait in waits.items():
        if wait >= 60 * options.dist_timeout:
            yield (
                f"--{name} {getattr(options, name):g}: others wait up to {wait:g} s for the rank that asks servers, "
                f"but only --dist_timeout {options.dist_timeout:g} minutes: lower it, or raise --dist_timeout"
            )
