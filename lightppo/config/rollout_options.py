"""Options of rollouts: how responses are sampled, by which engine, and which are trained on; docs/rollouts.md."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal
from urllib.parse import urlsplit

from lightppo.config.reward_options import names_rewards
from lightppo.config.rules import estimator_entry
from lightppo.http_client import check_url, is_loopback
from lightppo.option import Section, option
from lightppo.plugin import ENGINES
from lightppo.redaction import shown_url

safe = partial(option, resume_safe=True)


class RolloutConfig(Section, of="trainer"):
    """Rollouts: how many responses are sampled, and how."""

    rollout_batch_size: int = option(512, "Prompts per PPO step.", "prompts over all ranks", ge=1)
    n_samples_per_prompt: int = option(
        1, "Responses per prompt.", "samples per prompt", ge=1, needs="sampling"
    )
    micro_rollout_batch_size: int | None = safe(
        None,
        "Sequences per generation or scoring pass. None: 8; hf generation on a GPU: as many as fit in its memory.",
        "samples per rank",
        ge=1,
    )
    generate_max_len: int = option(1024, "Maximum response length.", "tokens", ge=1)
    min_new_tokens: int = option(
        0, "Do not allow end-of-text before this many tokens.", "tokens", ge=0
    )
    do_sample: bool = option(True, "Sample; --no_do_sample always takes the most likely token.")
    temperature: float = option(
        1.0, "Sampling temperature, also applied in the loss; 0: greedy.", ge=0
    )
    top_p: float = option(
        1.0, "Nucleus sampling: use the smallest set of tokens with this probability.", gt=0, le=1
    )
    top_k: int = option(-1, "Sample only from the k most likely tokens; -1: all.", ge=-1)
    min_p: float = option(
        0.0,
        "Minimum probability of a token, as a share of the most likely token's; 0: off.",
        ge=0,
        le=1,
        needs="sampling",
    )
    stop_token_ids: tuple[int, ...] = option((), "Token ids that end a response.", ge=0)
    ignore_eos: bool = option(False, "Continue after end-of-text up to --generate_max_len.")
    repetition_penalty: float = option(
        1.0, "Divide the logits of tokens that already occurred by this; 1: off.", gt=0
    )
    presence_penalty: float = option(
        0.0, "Subtracted from the logits of tokens that occur in the response; 0: off.", ge=-2, le=2
    )
    frequency_penalty: float = option(
        0.0, "The same for each occurrence of a token in the response.", ge=-2, le=2
    )
    stop: tuple[str, ...] = option(
        (), "Strings or special tokens that end a response and are removed from its text."
    )
    bad_words: tuple[str, ...] = option((), "Words that are never sampled.")
    max_staleness: int = option(
        0,
        "1: sample the next step's responses while a step trains, so by weights that are one step older; 0: by the newest.",
        "PPO steps",
        ge=0,
    )

    @staticmethod
    def is_stale(config: Any) -> bool:
        """Tell whether a step may train on samples of older weights."""
        return config.rollout.max_staleness > 0

    @staticmethod
    def problems(options: Any) -> Iterator[str]:
        yield from _ahead(options)
        if "" in options.stop:
            yield "--stop has an empty text: leave it out"
        if not all(map(str.strip, options.bad_words)):
            yield "--bad_words has an empty text: leave it out"


def _ahead(options: Any) -> Iterator[str]:
    """Refuse what cannot sample while a step trains."""
    requested = f"--max_staleness {options.max_staleness}"
    if options.max_staleness == 0:
        return
    if options.max_staleness > 1:
        yield f"{requested}: 1 is the most, as weights do not change under responses that are being sampled; set 0 or 1"
    sharing = {
        "hf": "samples with the weights that are trained",
        "vllm": "samples in the process that trains",
    }
    if reason := sharing.get(options.rollout_engine):
        yield f"{requested}: --rollout_engine {options.rollout_engine} {reason}, one after the other: set vllm_server, or 0"
    if options.skip_rollout is not None:
        yield f"{requested}: --skip_rollout reads what others sampled: leave one out"


# -- the engine --------------------------------------------------------------------------------------------------------

hf = partial(option, needs="rollout_engine=hf")
vllm = partial(option, needs="rollout_engine=vllm")
any_vllm = partial(option, needs="rollout_engine=vllm|vllm_server")
server = partial(option, needs="rollout_engine=vllm_server")


class EngineConfig(Section, resume_safe=True, of="trainer"):
    """Rollout engine: what generates the responses."""

    rollout_engine: str = option(
        "hf",
        "What generates responses: hf is the actor itself. Others may be yours.",
        names=ENGINES,
    )
    batch_invariant: bool = option(
        False,
        "CPU only: sum in one order, so that sampling and training give the same log probs to the bit, whatever time "
        "environments take. Takes time.",
        needs="rollout_engine=hf",
    )
    hf_cuda_graphs: bool = option(
        False,
        "GPU only: capture decoding steps as CUDA graphs. Needs full attention in every layer.",
        needs="rollout_engine=hf",
    )
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
    enable_prefix_caching: bool = vllm(
        True,
        "Share the KV cache of a prompt among its samples. Each push of weights empties it. Off without a GPU for models "
        "with recurrent layers.",
    )
    enforce_eager: bool | None = vllm(
        None, "No compilation, no CUDA graphs. None: on for a CPU, off for a GPU."
    )
    free_cache_engine: bool = any_vllm(
        True, "Put the engine to sleep during training, which frees GPU memory."
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
    def problems(options: Any) -> Iterator[str]:
        yield from _other_orders_of_sums(options)
        yield from _vllm(options)


def _other_orders_of_sums(options: Any) -> Iterator[str]:
    if not options.batch_invariant:
        return
    others = {
        "--torch_compile": options.torch_compile,
        "--use_liger_kernel": options.use_liger_kernel,
        "--flash_attn": options.flash_attn,
        "--hf_cuda_graphs": options.hf_cuda_graphs,
        "--load_in_4bit": getattr(options, "load_in_4bit", False),
        f"--attn_implementation {options.attn_implementation}": (
            options.attn_implementation not in ("auto", "sdpa")
        ),
    }
    for name in (name for name, is_on in others.items() if is_on):
        yield f"--batch_invariant does not know the order of sums with {name}: leave one out"


_COLDEST = 0.01  # vLLM raises a lower temperature to this without an error


def _vllm(options: Any) -> Iterator[str]:
    """Refuse what vLLM cannot sample, and what an engine in the training processes cannot do."""
    if options.rollout_engine not in ("vllm", "vllm_server"):
        return
    for name in ("temperature", "eval_temperature"):
        if 0 < getattr(options, name) < _COLDEST:
            requested = f"--{name} {getattr(options, name):g}"
            yield f"{requested}: vLLM samples at {_COLDEST} or above; set 0 (greedy) or at least that"
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
    """Check addresses of vLLM servers, how weights get there, and how long they may take."""
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
    wait = 2 * options.vllm_server_timeout + 90
    if wait >= 60 * options.dist_timeout:
        yield (
            f"--vllm_server_timeout {options.vllm_server_timeout:g}: others wait up to {wait:g} s for the rank that asks "
            f"servers, but only --dist_timeout {options.dist_timeout:g} minutes: lower it, or raise --dist_timeout"
        )


# -- selection ---------------------------------------------------------------------------------------------------------

dynamic = partial(option, needs="dynamic_sampling")


class SamplingConfig(Section, of="training"):
    """Selection: which sampled groups are trained on; replay and dumps of rollouts."""

    fire_sampling: bool = option(
        False,
        "Sample the first token of each response at temperature 10.",
        needs="rollout_engine=hf and sampling",
    )
    dataset_filter_threshold: float | None = option(
        None,
        "After an episode, drop prompts whose mean score is above this.",
        needs="dataset_max_filter_percentage>0",
    )
    dataset_max_filter_percentage: float = option(
        0.1,
        "Maximum share of the prompts to drop per episode.",
        ge=0,
        lt=1,
        needs="dataset_filter_threshold",
        off=(0,),
    )
    generation_size: int | None = option(
        None,
        "Responses generated per prompt; only the best are trained on. None: --n_samples_per_prompt.",
        "samples per prompt",
        ge=1,
    )
    best_of_n_tie: Literal["shorter", "longer"] = option(
        "shorter", "Which response best of n takes if scores are equal."
    )
    gen_batch_size: int | None = option(
        None,
        "Prompts sampled at once; the surplus waits for the next step. None: --rollout_batch_size.",
        "prompts over all ranks",
        ge=1,
    )
    dynamic_sampling: bool = option(
        False,
        "Replace groups without a learning signal with new prompts.",
        needs="n_samples_per_prompt>1 or filter_range",
    )
    filter_metric: str = dynamic(
        "score",
        "Metric that groups are selected by: score, acc, seq_reward, seq_final_reward or a metric of the reward "
        "source.",
    )
    filter_range: tuple[float, float] | None = dynamic(
        None,
        "Keep groups whose mean is inside, bounds excluded. None: groups whose samples are not all equal.",
    )
    max_num_gen_batches: int = dynamic(
        10,
        "Maximum number of generation batches per step; 0: no limit.",
        "batches",
        ge=0,
        resume_safe=True,
    )
    on_exhausted: Literal["train_short", "raise", "reuse"] = option(
        "train_short",
        "If groups are missing after --max_num_gen_batches: train on fewer, stop the run, or train on some twice.",
        needs="dynamic_sampling and max_num_gen_batches>0",
        resume_safe=True,
    )
    record_samples: int = safe(
        16,
        "Samples kept in SAVE_PATH/rollouts with numbers per token, in whole groups; 0: none.",
        "samples per step",
        ge=0,
    )
    rollout_data_dir: str | None = safe(
        None, "Folder for stepN.jsonl, with every sample that the step trains on."
    )
    skip_rollout: str | None = safe(
        None,
        "Debugging: save rollouts in this folder; the next run reads them instead of sampling.",
    )

    @staticmethod
    def meant(config: Any) -> Mapping[str, Any]:
        return {
            "generation_size": config.rollout.n_samples_per_prompt,
            "gen_batch_size": config.rollout.rollout_batch_size,
        }

    @staticmethod
    def is_stale(config: Any) -> bool:
        """Tell whether a step may train on groups that an earlier step sampled, or on those of another run."""
        sampling = config.sampling
        is_surplus = (sampling.gen_batch_size or 0) > config.rollout.rollout_batch_size
        return sampling.dynamic_sampling or is_surplus or sampling.skip_rollout is not None

    @staticmethod
    def problems(options: Any) -> Iterator[str]:
        yield from _prompt_filter(options)
        yield from _selection(options)


def _prompt_filter(options: Any) -> Iterator[str]:
    scores_count = not estimator_entry(options.config).ignores_scores
    if options.by_hand or options.dataset_filter_threshold is None or scores_count:
        return
    if not names_rewards(options):
        yield "--dataset_filter_threshold chooses by scores, and this run has no reward: leave it out"


def _selection(options: Any) -> Iterator[str]:
    samples = options.n_samples_per_prompt
    size = options.generation_size
    batch = options.gen_batch_size
    if size < samples:
        yield f"--generation_size {size} is below --n_samples_per_prompt {samples}: raise it, or leave it out"
    if size == samples and options.best_of_n_tie != "shorter":
        yield f"--best_of_n_tie chooses nothing unless --generation_size is above --n_samples_per_prompt {samples}"
    if size > samples and not (options.do_sample and options.temperature > 0):
        yield f"--generation_size {size}: greedy samples are all the same; leave it out, or set a --temperature"
    if batch != options.rollout_batch_size and batch % options.ranks:
        yield f"--gen_batch_size {batch} is not divisible by the {options.ranks} ranks"
    if batch < options.rollout_batch_size and not options.dynamic_sampling:
        few = f"--gen_batch_size {batch} is below --rollout_batch_size {options.rollout_batch_size}"
        yield f"{few}, and only --dynamic_sampling samples several batches: raise it, or leave it out"
    if (ends := options.filter_range) is not None and ends[0] >= ends[1]:
        yield f"--filter_range {ends[0]:g} {ends[1]:g} is empty: give the lower end first"
    if not options.filter_metric.strip():
        yield "--filter_metric has an empty text: leave it out"
    has_reward = options.by_hand or names_rewards(options)
    if not has_reward and estimator_entry(options.config).ignores_scores:
        picks = {
            "dynamic_sampling": options.dynamic_sampling,
            "generation_size": size > samples,
        }
        for name in filter(picks.get, picks):
            yield f"--{name} chooses by scores, and this run has no reward: leave it out"
