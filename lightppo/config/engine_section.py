"""The options of rollout engines: which one samples, and how vLLM is set up. Names are vLLM's where it has one."""

from typing import Literal

from lightppo.config.fields import option, section


@section
class EngineConfig:
    """Rollout engine: what samples the responses."""

    rollout_engine: Literal["hf", "vllm", "vllm_server"] = option(
        "hf",
        "hf: the actor itself, by transformers; vllm: vLLM in the training processes; vllm_server: vLLM servers.",
        resume_safe=True,
    )
    rollout_check: Literal["error", "warn", "off"] = option(
        "error",
        "When the log probs of the vLLM engine are further from the trainer's than --logp_diff_tolerance at the first "
        "rollouts: stop and name the weights that differ, or warn.",
        resume_safe=True,
    )
    logp_diff_tolerance: float | None = option(
        None,
        "Largest rollout/logp_diff_mean that is no mismatch; a later step above it is warned of. None: 0.001 in fp32, "
        "0.1 in bf16.",
        unit="nats",
        gt=0,
        resume_safe=True,
    )
    tensor_parallel_size: int = option(
        1,
        "vllm: ranks that share one engine; their prompts are sampled together.",
        unit="ranks",
        ge=1,
        resume_safe=True,
    )
    vllm_dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "vllm: type of the engine's weights; auto: the actor's.", resume_safe=True
    )
    load_format: Literal["dummy", "auto"] = option(
        "dummy",
        "vllm: weights that the engine starts with, before the actor's are pushed: dummy is random, auto reads "
        "--pretrain.",
        resume_safe=True,
    )
    gpu_memory_utilization: float = option(
        0.4, "vllm: share of a GPU's memory for the engine's weights and KV cache.", gt=0, le=1, resume_safe=True
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "vllm: size of the KV cache. None: on a GPU by --gpu_memory_utilization; on a CPU room for --max_num_seqs of "
        "the longest sequences, at most 4 GiB.",
        unit="bytes per rank",
        ge=1,
        resume_safe=True,
    )
    max_num_seqs: int = option(256, "vllm: sequences decoded at once.", unit="sequences", ge=1, resume_safe=True)
    max_num_batched_tokens: int | None = option(
        None,
        "vllm: most tokens of one forward pass; on a GPU longer prompts come in pieces. None: vLLM's choice; on a CPU "
        "4096, or the longest sequence if that is more.",
        unit="tokens",
        ge=1,
        resume_safe=True,
    )
    max_model_len: int | None = option(
        None,
        "vllm: longest prompt and response together. None: --prompt_max_len + --generate_max_len.",
        unit="tokens",
        ge=2,
        resume_safe=True,
    )
    block_size: int | None = option(
        None, "vllm: tokens of one block of the KV cache. None: vLLM's choice.", unit="tokens", ge=1, resume_safe=True
    )
    enable_prefix_caching: bool = option(
        True, "vllm: samples of one prompt share its KV cache; emptied at every push of weights.", resume_safe=True
    )
    enforce_eager: bool | None = option(
        None, "vllm: no compilation and no CUDA graphs. None: so on a CPU, compiled on a GPU.", resume_safe=True
    )
    free_cache_engine: bool = option(
        True,
        "vllm, vllm_server: sleep while the trainer trains, which frees GPU memory; a CPU has nothing to free.",
        resume_safe=True,
    )
    sleep_level: Literal[1, 2] = option(
        2,
        "vllm, vllm_server: 1 keeps the sleeping engine's weights in CPU memory, 2 drops them (the next push brings "
        "new ones).",
        resume_safe=True,
    )
    vllm_server_url: tuple[str, ...] = option(
        (),
        "vllm_server: addresses of the servers, started by examples/serve_vllm.py; all serve the model of --pretrain.",
        resume_safe=True,
    )
    vllm_server_api_key_env: str | None = option(
        None, "vllm_server: environment variable that holds the API key of the servers.", resume_safe=True
    )
    vllm_server_timeout: float = option(
        600.0,
        "vllm_server: longest wait for one response or one load of weights.",
        unit="seconds",
        gt=0,
        resume_safe=True,
    )
    vllm_server_retries: int = option(
        2,
        "vllm_server: further tries of a request that failed; then the server is lost, and its requests go to the "
        "others. It is tried again at the next push of weights.",
        unit="tries",
        ge=0,
        resume_safe=True,
    )
    vllm_server_concurrency: int = option(
        256, "vllm_server: requests in flight.", unit="requests per server and rank", ge=1, resume_safe=True
    )
    vllm_server_start_timeout: float = option(
        300.0,
        "vllm_server: how long servers that cannot be reached yet are waited for at the start.",
        unit="seconds",
        ge=0,
        resume_safe=True,
    )
    vllm_server_sync: Literal["auto", "shm", "disk", "collective"] = option(
        "auto",
        "vllm_server: how weights get there: by files in shared memory (servers on this machine) or on disk, or by "
        "torch.distributed (collective: gloo, or NCCL between GPUs). auto: shared memory, or disk where it is too "
        "small.",
        resume_safe=True,
    )
    vllm_server_sync_dir: str | None = option(
        None,
        "vllm_server: folder for --vllm_server_sync disk; servers on other machines must see it under the same path. "
        "None: the one for temporary files.",
        resume_safe=True,
    )
    vllm_server_sync_address: str = option(
        "127.0.0.1",
        "vllm_server: address of the trainer's machine that servers connect to with --vllm_server_sync collective.",
        resume_safe=True,
    )
