"""All options, each declared once, by section; and :class:`PPOConfig`, the options of a run. Docs: docs/flags.md.

The name of an option is unique over all sections: it is the flag, and the key in YAML and in ``PPOConfig.from_flat``.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Self

from lightppo.algorithms.entries import (
    ADVANTAGE_ESTIMATORS,
    CORRECTIONS,
    KL_ESTIMATORS,
    LOSS_AGG_MODES,
    POLICY_LOSSES,
)
from lightppo.config import rules
from lightppo.errors import ConfigError
from lightppo.option import Option, Section, nearest, option

safe = partial(option, resume_safe=True)
vllm = partial(option, only_with="rollout_engine=vllm")
any_vllm = partial(option, only_with="rollout_engine=vllm|vllm_server")
server = partial(option, only_with="rollout_engine=vllm_server")
code = partial(option, only_with="code")
fusion = partial(option, only_with="sandbox_fusion_url")
remote_code = partial(option, only_with="function_call_url")


class FileConfig(Section, resume_safe=True):
    """Options from a file."""

    config: str | None = option(None, "YAML file with options; flags on the command line win.")


class ModelConfig(Section):
    """Models: where they come from and how they are loaded."""

    pretrain: str | None = option(None, "Actor: local path, hub name or fsspec URL of a causal LM.", required=True)
    ref_pretrain: str | None = option(None, "Reference model. None: the actor's own start.", only_with="init_kl_coef>0")
    critic_pretrain: str | None = option(
        None,
        "Critic. None: --reward_pretrain where there is one (its head is kept), else --pretrain.",
        only_with="critic",
    )
    init_critic_from_actor: bool = option(
        False,
        "Start the critic from --pretrain with a new value head, also where there is a reward model.",
        only_with="critic",
    )
    reward_pretrain: tuple[str, ...] = option((), "Reward models. Several are combined by --reward_fn path.py:name.")
    value_head_prefix: str = option("score", "Name of the value head in critic and reward checkpoints.")
    init_from_scratch: bool = option(False, "Random weights from the model's config instead of its checkpoint.")
    override_config: str | None = option(
        None, "JSON object laid over the model's config of actor, reference and critic, e.g. '{\"rope_theta\": 1e6}'."
    )
    external_lib: str | None = option(None, "Module imported before the models, e.g. to register an architecture.")
    trust_remote_code: bool = option(False, "Run Python code that comes with a checkpoint.")
    disable_fast_tokenizer: bool = option(
        False, "Load a tokenizer in Python, not Rust; an error where transformers has none."
    )
    bf16: bool = option(False, "Train and roll out in bfloat16 with an fp32 master copy; without it fp32.")
    attn_implementation: Literal["auto", "eager", "sdpa", "flash_attention_2"] = option(
        "auto", "Attention. auto: flash_attention_2 on a GPU in bf16 where flash-attn is installed, else sdpa."
    )
    flash_attn: bool = option(False, "The same as --attn_implementation flash_attention_2.")
    gradient_checkpointing: bool = safe(
        False, "Recompute activations in the backward pass: less memory, a third more time."
    )
    gradient_checkpointing_use_reentrant: bool = safe(
        False, "torch's reentrant form of gradient checkpointing.", only_with="gradient_checkpointing"
    )
    activation_offload: bool = safe(
        False, "On a GPU: activations wait in CPU memory for the backward pass; less memory, more time."
    )
    torch_compile: bool = safe(
        False, "Compile the layers of actor, critic and reference: minutes at the start, less time per step on a GPU."
    )
    use_liger_kernel: bool = safe(
        False, "On a GPU, with liger-kernel installed: its kernels for norms, rotary embeddings and MLPs."
    )


class AdapterConfig(Section):
    """LoRA: small trained matrices beside frozen weights (arXiv:2106.09685); docs/lora.md."""

    lora_rank: int = option(0, "Rank of the adapters of actor and critic; 0: all weights are trained.", ge=0)
    lora_alpha: float | None = option(
        None, "Adapters are scaled by this / --lora_rank. None: 16.", gt=0, only_with="lora_rank>0"
    )
    lora_dropout: float | None = option(
        None, "Dropout before the adapters, in training forwards only. None: 0.", ge=0, lt=1, only_with="lora_rank>0"
    )
    load_in_4bit: bool = option(
        False,
        "QLoRA: hold the frozen weights of actor, critic and reference in 4 bits (NF4); needs --lora_rank and"
        " bitsandbytes.",
        only_with="lora_rank>0",
    )
    target_modules: tuple[str, ...] = option(
        (),
        "Linear layers with an adapter, by the end of their names, e.g. q_proj v_proj. None given: all but the head.",
        only_with="lora_rank>0",
    )


class DataConfig(Section):
    """Data: prompts, evaluation prompts and pretraining text."""

    prompt_data: str | None = option(
        None, "Prompts: file, folder, hub name or URL; several separated by commas.", required=True
    )
    prompt_data_probs: str | None = option(None, "Sampling probabilities of several --prompt_data, e.g. 0.7,0.3.")
    prompt_split: str = option("train", "Split of --prompt_data.")
    eval_data: str | None = safe(None, "Held-out prompts. Without it there is no evaluation.")
    eval_split: str = safe("test", "Split of --eval_data; files without splits have only one.")
    pretrain_data: str | None = option(None, "Text for the PTX loss.", only_with="ptx_coef>0")
    pretrain_data_probs: str | None = option(
        None, "Sampling probabilities of several --pretrain_data.", only_with="pretrain_data"
    )
    pretrain_split: str = option("train", "Split of --pretrain_data.")
    input_key: str = option("input", "Column with the prompt: text, or a list of chat messages.")
    label_key: str | None = option(None, "Column with the ground truth. None: recognised from the row's form.")
    output_key: str | None = option(
        None, "Column with the answer in --pretrain_data; None: --input_key is all text.", only_with="pretrain_data"
    )
    input_template: str | None = option(None, "Text around the prompt, with {} in its place.")
    apply_chat_template: bool = option(False, "Render prompts with the tokenizer's chat template.")
    system_prompt: str | None = option(None, "System message put before chats that have none.")
    max_samples: int = option(1000000, "Rows taken from --prompt_data.", unit="prompts", ge=1)
    eval_max_samples: int = safe(1000000, "Rows taken from --eval_data.", unit="prompts", ge=1)
    prompt_max_len: int = option(1024, "Longest prompt.", unit="tokens", ge=1)
    truncation: Literal["error", "left", "right", "middle", "drop"] = option(
        "error", "What to do with a longer prompt: stop, cut a side or the middle, or drop it. Counted."
    )
    filter_overlong_prompts: bool = option(False, "Drop and count longer prompts, whatever --truncation says.")
    on_bad_row: Literal["error", "skip"] = option("error", "A row that cannot be used: stop, or skip and count it.")
    data_num_workers: int = safe(0, "Processes that tokenise; 0: this one.", ge=0)
    dataloader_pin_memory: bool = safe(True, "Pin batches in memory on a GPU machine.")


class RolloutConfig(Section):
    """Rollouts: how many responses are sampled, and how."""

    rollout_batch_size: int = option(512, "Prompts per PPO step.", unit="prompts over all ranks", ge=1)
    n_samples_per_prompt: int = option(1, "Responses to each prompt.", unit="samples per prompt", ge=1)
    micro_rollout_batch_size: int = safe(
        8, "Sequences in one generation or scoring pass.", unit="samples per rank", ge=1
    )
    generate_max_len: int = option(1024, "Longest response.", unit="tokens", ge=1)
    min_new_tokens: int = option(0, "No end-of-text before this many tokens.", unit="tokens", ge=0)
    do_sample: bool = option(True, "Sample; --no_do_sample takes the most likely token.")
    temperature: float = option(1.0, "Sampling temperature, also applied in the loss; 0 is greedy.", ge=0)
    top_p: float = option(1.0, "Nucleus sampling: smallest set of tokens with this probability.", gt=0, le=1)
    top_k: int = option(-1, "Only the k most likely tokens; -1: all.", ge=-1)
    repetition_penalty: float = option(1.0, "Divides the logits of tokens already seen; 1: off.", gt=0)
    stop: tuple[str, ...] = option((), "Strings that end a response; they are trimmed from its text.")
    stop_token_ids: tuple[int, ...] = option((), "Token ids that end a response.", ge=0)
    bad_words: tuple[str, ...] = option((), "Words that are never sampled.")
    ignore_eos: bool = option(False, "Go on after end-of-text up to --generate_max_len.")


class EngineConfig(Section, resume_safe=True):
    """Rollout engine: what samples the responses."""

    rollout_engine: Literal["hf", "vllm", "vllm_server"] = option(
        "hf", "What samples: hf (the actor itself), vllm (in the same process) or vllm_server."
    )
    rollout_check: Literal["error", "warn", "off"] = any_vllm(
        "error",
        "When the log probs of the vLLM engine are further from the trainer's than --logp_diff_tolerance at "
        "the first rollouts: stop and name the weights that differ, or warn.",
    )
    logp_diff_tolerance: float | None = any_vllm(
        None,
        "Largest rollout/logp_diff_mean that is no mismatch; a later step above it is warned of. None: 0.001 "
        "in fp32, 0.1 in bf16.",
        unit="nats",
        gt=0,
        only_with=("rollout_engine=vllm|vllm_server", "rollout_check!=off"),
    )
    tensor_parallel_size: int = vllm(
        1, "Ranks that share one engine; their prompts are sampled together.", unit="ranks", ge=1
    )
    vllm_dtype: Literal["auto", "float32", "bfloat16", "float16"] = vllm(
        "auto", "Type of the engine's weights; auto: the actor's."
    )
    load_format: Literal["dummy", "auto"] = vllm(
        "dummy",
        "Weights that the engine starts with, before the actor's are pushed: dummy is random, auto reads --pretrain.",
    )
    gpu_memory_utilization: float = vllm(
        0.4, "Share of a GPU's memory for the engine's weights and KV cache.", gt=0, le=1
    )
    kv_cache_memory_bytes: int | None = vllm(
        None,
        "Size of the KV cache. None: on a GPU by --gpu_memory_utilization; on a CPU room for --max_num_seqs "
        "of the longest sequences, at most 4 GiB.",
        unit="bytes per rank",
        ge=1,
    )
    max_num_seqs: int = vllm(256, "Sequences decoded at once.", unit="sequences", ge=1)
    max_num_batched_tokens: int | None = vllm(
        None,
        "Most tokens of one forward pass; on a GPU longer prompts come in pieces. None: vLLM's choice; on a "
        "CPU 4096, or the longest sequence if that is more.",
        unit="tokens",
        ge=1,
    )
    max_model_len: int | None = vllm(
        None, "Longest prompt and response together. None: --prompt_max_len + --generate_max_len.", unit="tokens", ge=2
    )
    block_size: int | None = vllm(
        None, "Tokens of one block of the KV cache. None: vLLM's choice.", unit="tokens", ge=1
    )
    enable_prefix_caching: bool = vllm(
        True, "Samples of one prompt share its KV cache; emptied at every push of weights."
    )
    enforce_eager: bool | None = vllm(None, "No compilation and no CUDA graphs. None: so on a CPU, compiled on a GPU.")
    free_cache_engine: bool = any_vllm(
        True, "Sleep while the trainer trains, which frees GPU memory; a CPU has nothing to free."
    )
    sleep_level: Literal[1, 2] = any_vllm(
        2,
        "1 keeps the sleeping engine's weights in CPU memory, 2 drops them (the next push brings new ones).",
        only_with=("rollout_engine=vllm|vllm_server", "free_cache_engine"),
    )
    vllm_server_url: tuple[str, ...] = server(
        (), "Addresses of the servers, started by examples/serve_vllm.py; all serve the model of --pretrain."
    )
    vllm_server_api_key_env: str | None = server(None, "Environment variable that holds the API key of the servers.")
    vllm_server_timeout: float = server(
        600.0, "Longest wait for one response, or for one bucket of weights in a push.", unit="seconds", gt=0
    )
    vllm_server_retries: int = server(
        2,
        "Further tries of a request that failed; then the server is lost, and its requests go to the others. "
        "It is tried again at the next push of weights.",
        unit="tries",
        ge=0,
    )
    vllm_server_concurrency: int = server(256, "Requests in flight.", unit="requests per server and rank", ge=1)
    vllm_server_start_timeout: float = server(
        300.0, "How long servers that cannot be reached yet are waited for at the start.", unit="seconds", ge=0
    )
    vllm_server_sync: Literal["auto", "shm", "disk", "collective"] = server(
        "auto",
        "How weights get there: by files in shared memory (servers on this machine) or on disk, or by "
        "torch.distributed (collective: gloo, or NCCL between GPUs). auto: shared memory, or disk where it is"
        " too small.",
    )
    vllm_server_sync_dir: str | None = server(
        None,
        "Folder for --vllm_server_sync disk; servers on other machines must see it under the same path. None:"
        " the one for temporary files.",
        only_with=("rollout_engine=vllm_server", "vllm_server_sync=disk"),
    )
    vllm_server_sync_address: str = server(
        "127.0.0.1",
        "Address of the trainer's machine that servers connect to with --vllm_server_sync collective.",
        only_with=("rollout_engine=vllm_server", "vllm_server_sync=collective"),
    )


class SamplingConfig(Section):
    """Selection: which of the sampled groups are trained on; replay and dumps of rollouts."""

    generation_size: int | None = option(
        None,
        "Responses sampled per prompt; the best --n_samples_per_prompt of them are trained on. None: just those.",
        unit="samples per prompt",
        ge=1,
    )
    best_of_n_tie: Literal["shorter", "longer"] = option(
        "shorter", "Of responses with equal scores, best of n takes the shorter or the longer one."
    )
    gen_batch_size: int | None = option(
        None,
        "Prompts in one generation batch; groups over --rollout_batch_size wait for the next steps. None: "
        "--rollout_batch_size.",
        unit="prompts over all ranks",
        ge=1,
    )
    dynamic_sampling: bool = option(
        False, "Train on groups that can teach something only, and sample further prompts in the place of the others."
    )
    filter_metric: str = option(
        "score",
        "What groups are judged by: score, acc, seq_reward, seq_final_reward, or any number of the rewards.",
        only_with="dynamic_sampling",
    )
    filter_range: tuple[float, float] | None = option(
        None,
        "Keep groups whose mean is inside, ends excluded. None: groups whose samples are not all equal.",
        only_with="dynamic_sampling",
    )
    max_num_gen_batches: int = safe(
        10,
        "Most generation batches of one step of --dynamic_sampling; 0: any number.",
        unit="batches",
        ge=0,
        only_with="dynamic_sampling",
    )
    on_exhausted: Literal["train_short", "raise", "reuse"] = safe(
        "train_short",
        "Too few groups after --max_num_gen_batches: train on those, stop the run, or train on some of them twice.",
        only_with="dynamic_sampling",
    )
    dataset_filter_threshold: float | None = option(
        None, "At the end of an episode, leave out the prompts with a mean score above this from then on."
    )
    dataset_max_filter_percentage: float = option(
        0.1,
        "Largest share of the prompts that one episode leaves out so, the best solved ones.",
        gt=0,
        lt=1,
        only_with="dataset_filter_threshold",
    )
    fire_sampling: bool = option(False, "Sample the first token of each response at --fire_temperature.")
    fire_temperature: float | None = option(
        None, "Temperature of that token. None: 10.", gt=0, only_with="fire_sampling"
    )
    rollout_data_dir: str | None = safe(None, "Folder for stepN.jsonl: every sample that the step trains on.")
    skip_rollout: str | None = safe(
        None, "Debugging: folder where rollouts are saved, and read by the next run instead of sampling."
    )
    skip_rollout_reuse: bool = safe(
        False,
        "Every step gets the first rollout of --skip_rollout, whatever its prompts are.",
        only_with="skip_rollout",
    )


class RewardConfig(Section):
    """Rewards: sources and the shaping of scores."""

    remote_rm_url: tuple[str, ...] = safe(
        (), "http(s) URLs of reward servers, or path.py with reward_func(queries, prompts, labels)."
    )
    reward_fn: str | None = option(
        None, "Reward function, path.py[:name]. With several --reward_pretrain it combines their scores."
    )
    remote_rm_timeout: float = safe(60.0, "Limit of one request.", unit="seconds", gt=0)
    remote_rm_retries: int = safe(3, "Further tries after a failed request.", ge=0)
    remote_rm_token_env: str | None = safe(
        None, "Environment variable that holds the bearer token of the reward servers.", only_with="reward_server"
    )
    reward_input_tokenizer: tuple[str, ...] = option(
        (),
        "Tokenizers of reward models that read other ids: the chat is rendered by their templates; one for "
        "all, or one each. None: the actor's ids.",
        only_with="reward_pretrain",
    )
    reward_max_length: int | None = option(
        None, "Longest input of a reward model. None: no limit.", unit="tokens", ge=2, only_with="reward_pretrain"
    )
    reward_truncation: Literal["error", "left"] = option(
        "error", "What to do with a longer one: stop, or drop its beginning. Counted.", only_with="reward_pretrain"
    )
    normalize_reward: bool = option(
        False, "Reward models subtract mean and divide by std of their config.", only_with="reward_pretrain"
    )
    reward_bias: float = option(0.0, "Subtracted from every score, before --reward_scaling.")
    reward_scaling: float = option(1.0, "Factor on every score.", gt=0)
    max_reward_clip: float | None = option(None, "Scaled scores are clipped to ± this.", gt=0)
    reward_running_norm: bool = option(
        False, "Scaled scores: minus the running mean, divided by the running standard deviation, of all ranks."
    )
    stop_properly_penalty: float | None = option(
        None, "Responses cut by the limit score at most this share of their score (0 to 1), or at most this (below 0)."
    )
    overlong_buffer_len: int | None = option(
        None, "DAPO's soft limit: the last so many tokens before --generate_max_len are punished.", unit="tokens", ge=1
    )
    overlong_penalty_factor: float | None = option(
        None, "Largest such punishment. None: 1.", gt=0, only_with="overlong_buffer_len"
    )
    mask_no_eos_with_zero: bool = option(False, "Responses cut by the limit have score 0; their KL still counts.")
    mask_too_long: bool = option(
        False, "Responses cut by the limit are not trained on and leave all statistics of advantages."
    )
    reward_clip_range: tuple[float, float] | None = option((-10.0, 10.0), "Shaped scores are clipped to this range.")
    use_dense_reward: bool = option(False, "Train on one score per response token, which the reward source gives.")
    reward_delta: bool = option(
        False, "Dense rewards are differences of successive token scores.", only_with="use_dense_reward"
    )


class VerifierConfig(Section):
    """Verifiers: built-in reward sources, reward functions, failures."""

    reward_source: tuple[str, ...] = option(
        (),
        "Sources to add up, NAME or NAME=WEIGHT: math, format, code. And function, server, model for what "
        "--reward_fn, --remote_rm_url and --reward_pretrain name.",
    )
    reward_routes: str | None = option(
        None,
        'Sources by data source, as JSON or a JSON file: \'{"gsm8k": {"math": 1, "format": 0.1}, "*": {"model": 1}}\'.',
    )
    reward_routes_by: Literal["data_source", "label"] = option(
        "data_source", "What the keys of --reward_routes are.", only_with="reward_routes"
    )
    reward_fn_style: Literal["auto", "queries", "verl", "verl_batch", "trl", "areal"] = option(
        "auto", "Signature of --reward_fn. auto: by the names of its parameters.", only_with="reward_function"
    )
    reward_manager: Literal["auto", "naive", "batch", "prime"] = safe(
        "auto",
        "How --reward_fn is called: naive per sample in threads, batch once, prime in processes that are "
        "killed at --reward_timeout. auto: by its signature.",
        only_with="reward_function",
    )
    reward_workers: int | None = safe(
        None,
        "Threads or processes for scoring. None: 16 threads, a process per core.",
        ge=1,
        only_with="reward_function or math",
    )
    reward_timeout: float | None = safe(
        None,
        "Limit of one call of --reward_fn, or of one comparison (None: 5).",
        unit="seconds",
        gt=0,
        only_with="reward_function or math",
    )
    reward_retries: int = safe(0, "Further tries of a call that failed.", ge=0, only_with="reward_function or math")
    on_reward_failure: Literal["error", "unscored"] | None = safe(
        None,
        "What a failed call means after the retries: the end, or an unscored sample that leaves its group. "
        "None: error for functions, unscored for verifiers.",
        only_with="reward_function or reward_server or math or code",
    )
    check_verifier_status: bool = safe(
        False, "Stop where every score of a rollout is at its minimum: more likely a broken verifier."
    )
    reward_minimum: float | None = option(
        None,
        "Lowest score that the source gives, for --check_verifier_status and --check_xml_format. None: it says so.",
        only_with="check_verifier_status or check_xml_format",
    )
    async_rewards: bool = safe(False, "Score finished samples while others are still generated.")
    math_unmarked: bool = option(
        True, "An answer that is not marked counts, the last number or formula.", only_with="math"
    )
    reward_format: Literal["think", "think_answer"] = option(
        "think_answer", "The tags that a response has.", only_with="format"
    )
    check_xml_format: bool = option(
        False, "Wrong answers cost less in the form <think>…</think><answer>…</answer>: -0.8, not -1."
    )
    code_score: Literal["all", "share"] = code("all", "1 if all tests pass, or the share of tests that pass.")
    code_compare: Literal["exact", "lines", "float", "set"] = code(
        "float", "The laxest comparison of outputs that counts."
    )
    code_float_tolerance: float = code(1e-05, "How far numbers may be off, relative.", ge=0, lt=1)
    code_max_tests: int | None = code(None, "Only the first tests of a row. None: all.", ge=1)
    code_timeout: float = code(6.0, "Limit of one test.", unit="seconds", gt=0)
    code_total_timeout: float = code(60.0, "Limit of all tests of a program.", unit="seconds", gt=0)
    code_memory_limit_mb: int = code(1024, "Memory of a program.", unit="MB", ge=1)
    code_file_limit_mb: int = code(16, "Size of a file it writes.", unit="MB", ge=1)
    code_output_limit_mb: int = code(16, "What it may print.", unit="MB", ge=1)
    code_max_processes: int = code(16, "Processes of a program.", ge=1)
    code_processes: int | None = code(
        None, "Sandboxes of a rank. None: one per core of the rank.", ge=1, resume_safe=True
    )
    allow_unsafe_code_execution: bool = code(
        False,
        "Run programs also where this machine offers no isolation. They can do all that you can.",
        resume_safe=True,
    )
    sandbox_fusion_url: str | None = code(None, "Have programs run by SandboxFusion there.", resume_safe=True)
    sandbox_fusion_max_concurrent: int = fusion(64, "Requests at a time.", unit="per rank", ge=1, resume_safe=True)
    sandbox_fusion_memory_limit_mb: int = fusion(1024, "Memory of a program there.", unit="MB", ge=1)
    sandbox_fusion_language: str = fusion("python", "Language of the programs there.")
    sandbox_fusion_retries: int = fusion(3, "Further tries of a failed request.", ge=0, resume_safe=True)
    function_call_url: str | None = code(
        None, "Have programs run by AReaL's function-call service there.", resume_safe=True
    )
    function_call_max_concurrent: int = remote_code(64, "Requests at a time.", unit="per rank", ge=1, resume_safe=True)
    function_call_batch_size: int = remote_code(1, "Tests per request.", ge=1, resume_safe=True)
    function_call_memory_limit_mb: int = remote_code(
        0, "Memory of a program there; 0: the service's own limit.", unit="MB", ge=0
    )
    function_call_retries: int = remote_code(3, "Further tries of a failed request.", ge=0, resume_safe=True)


class AlgorithmConfig(Section, own=ADVANTAGE_ESTIMATORS):
    """Algorithm: advantages, KL, reference."""

    advantage_estimator: str = option(
        "gae",
        "How rewards become advantages, such as gae, reinforce++, rloo, grpo. gae needs a critic; those that compare "
        "the samples of a prompt need --n_samples_per_prompt ≥ 2.",
        names=ADVANTAGE_ESTIMATORS,
    )
    gamma: float = option(
        1.0,
        "Discount per token: gae, reinforce, reinforce++, remax, group_adv_norm.",
        ge=0,
        le=1,
        only_with="discounting",
    )
    lambd: float = option(0.95, "GAE's λ.", ge=0, le=1, only_with="critic")
    bootstrap_truncated: bool = option(
        False, "gae: responses cut by the limit continue with the critic's last value.", only_with="critic"
    )
    group_std_norm: bool = option(
        True,
        "grpo, grpo_passk, cpgd: divide by the standard deviation of the group; --no_group_std_norm does not.",
        only_with="group_deviation",
    )
    grpo_std_eps: float | None = option(
        None,
        "Added to the group's standard deviation. None: 1e-6.",
        ge=0,
        only_with=("group_deviation", "group_std_norm"),
    )
    adv_norm: bool | None = option(None, "Whiten advantages. None: as the estimator is defined.")
    adv_norm_scope: Literal["batch", "group"] = option(
        "batch",
        "Whitening is over the rollout batch of all ranks, or inside each prompt's group of samples.",
        only_with="whitening",
    )
    adv_shift_mean: bool = option(
        True, "Whitening of the batch subtracts the mean.", only_with=("whitening", "adv_norm_scope=batch")
    )
    adv_std_norm: bool = option(
        True,
        "Whitening of the batch divides by the standard deviation.",
        only_with=("whitening", "adv_norm_scope=batch"),
    )
    adv_std_unbiased: bool = option(
        False,
        "The variance in whitening of the batch is divided by n - 1, not n.",
        only_with=("whitening", "adv_norm_scope=batch", "adv_std_norm"),
    )
    adv_norm_eps: float | None = option(
        None,
        "Added to the variance of the batch (None: 1e-8), or to the group's standard deviation (1e-5).",
        ge=0,
        only_with="whitening",
    )
    advantage_clip: float | None = option(None, "Advantages are clipped to ± this.", gt=0)
    init_kl_coef: float = option(0.01, "KL coefficient; 0: no reference model is loaded.", ge=0)
    kl_target: float | None = option(
        None, "Adapt the coefficient towards this KL. None: it stays.", gt=0, only_with="init_kl_coef>0"
    )
    kl_horizon: int = option(10000, "Horizon of the adaptive coefficient.", unit="samples over all ranks", ge=1)
    kl_estimator: str | None = option(
        None, "KL per token (joschu.net/blog/kl-approx). None: k1 in the reward, k2 in the loss.", names=KL_ESTIMATORS
    )
    kl_clip: float | None = option(
        None, "KL estimates are clipped to ± this.", unit="nats", gt=0, only_with="init_kl_coef>0"
    )
    use_kl_loss: bool = option(False, "KL as a term of the loss instead of in the reward.", only_with="init_kl_coef>0")
    use_kl_in_reward: bool | None = option(None, "KL in the reward. None: unless --use_kl_loss.")
    ref_ema_eta: float | None = option(
        None,
        "The reference follows the actor after each step: (1 - η) · reference + η · actor.",
        gt=0,
        le=1,
        only_with="init_kl_coef>0",
    )
    ref_reset_steps: int | None = option(
        None,
        "The reference becomes a copy of the actor every N steps.",
        unit="PPO steps",
        ge=1,
        only_with="init_kl_coef>0",
    )
    ptx_coef: float = option(0.05, "Weight of the language-model loss on --pretrain_data.", ge=0)
    freezing_actor_steps: int = option(
        -1,
        "Train only the critic up to and including this step; -1: never.",
        unit="PPO steps",
        ge=-1,
        only_with="critic",
        off=(0,),
    )
    enable_ema: bool = option(False, "Keep an exponential moving average of the actor and save it at the end.")
    ema_beta: float = option(0.992, "Decay of the moving average.", ge=0, lt=1)


class LossConfig(Section, own=POLICY_LOSSES):
    """Losses: policy, entropy, value; early stop."""

    policy_loss: str | None = option(
        None, "Loss, such as ppo, gspo, cispo. None: what belongs to the estimator, ppo for most.", names=POLICY_LOSSES
    )
    loss_agg_mode: str | None = option(
        None,
        "How token losses become one number; totals are over the whole optimizer step. None: what belongs to "
        "the estimator or the policy loss, token-mean for most.",
        names=LOSS_AGG_MODES,
    )
    eps_clip: float | None = option(
        None,
        "Clip range of the probability ratio. None: as the policy loss is defined, 0.2 for ppo.",
        gt=0,
        le=1,
        only_with="clipping",
    )
    eps_clip_low: float | None = option(None, "Lower clip range. None: --eps_clip.", gt=0, le=1, only_with="clipping")
    eps_clip_high: float | None = option(
        None, "Upper clip range (clip-higher). None: --eps_clip.", gt=0, only_with="clipping"
    )
    entropy_coef: float = option(0.0, "Weight of an entropy bonus in the actor's loss.", ge=0)
    high_entropy_token_ratio: float | None = option(
        None, "Only this share of all tokens, highest entropy first, has a policy loss. None: all.", gt=0, le=1
    )
    aux_loss_coef: float = option(0.0, "Weight of a mixture-of-experts model's load-balancing loss.", ge=0)
    early_stop_imp_ratio: float | None = option(
        5.0, "An optimizer step of the actor is skipped if its mean probability ratio is above this. None: off.", gt=1
    )
    early_stop_kl: float | None = option(
        None, "The same for the mean KL from old to new policy.", unit="nats per token", gt=0
    )
    old_log_probs: Literal["auto", "forward", "rollout"] = option(
        "auto",
        "Log probs before the update: of a forward pass, or recorded in the rollout. auto: no pass where it "
        "would give the same, as with one optimizer step per rollout or float32 rollouts by the actor itself.",
    )
    value_clip: float | None = option(0.2, "Clip range of values around the old ones; None: off.", gt=0)
    value_huber_delta: float | None = option(
        None,
        "Huber instead of squared value error: linear from this error on; None: squared.",
        gt=0,
        only_with="critic",
    )
    value_norm: Literal["exp", "ma"] | None = option(
        None,
        "The critic learns normalised returns: by an exponential or a plain moving average. None: raw returns.",
        only_with="critic",
    )
    value_norm_beta: float | None = option(
        None, "Decay of exp, per rollout batch. None: 0.99995.", gt=0, lt=1, only_with="value_norm=exp"
    )
    value_norm_eps: float | None = option(
        None, "Smallest variance of --value_norm. None: 1e-5.", gt=0, only_with="value_norm"
    )


class CorrectionConfig(Section):
    """Correction: rollout engine against trainer."""

    rollout_correction: str = option(
        "none",
        "Weighs tokens by π_old / π_rollout, where the engine's probabilities differ from the trainer's.",
        names=CORRECTIONS,
    )
    correction_low: float | None = option(
        None,
        "Lower bound of the weight. None: as the correction is defined.",
        gt=0,
        only_with="rollout_correction!=none",
    )
    correction_high: float | None = option(
        None,
        "Upper bound of the weight. None: as the correction is defined.",
        gt=0,
        only_with="rollout_correction!=none",
    )
    correction_veto: float | None = option(
        None,
        "A response with a token weight below this is not trained on; 1e-4 is usual. None: off.",
        gt=0,
        lt=1,
        only_with="rollout_correction!=none",
    )
    correction_batch_norm: bool = option(
        False, "Divide weights by their mean over the rollout batch of all ranks.", only_with="rollout_correction!=none"
    )


class TrainingConfig(Section):
    """Training: batches, epochs, optimizers."""

    num_episodes: int = safe(1, "Passes over the prompts.", unit="episodes", ge=1)
    total_training_steps: int | None = safe(
        None, "Stop after this many PPO steps and stretch the schedules to it. None: all episodes.", ge=1
    )
    benchmark_steps: int | None = safe(None, "Stop early after this many PPO steps; schedules stay as they are.", ge=1)
    train_batch_size: int | None = option(
        None,
        "Samples per optimizer step (None: 128, or what --ppo_n_minibatches gives).",
        unit="samples over all ranks",
        ge=1,
    )
    ppo_n_minibatches: int | None = option(
        None, "Optimizer steps per epoch over a rollout; sets --train_batch_size.", ge=1
    )
    micro_train_batch_size: int = safe(4, "Samples in one forward and backward pass.", unit="samples per rank", ge=1)
    max_tokens_per_micro_batch: int | None = safe(
        None,
        "Tokens in one pass through a model, in training and in scoring, instead of numbers of samples; "
        "padding counts unless --packing_samples drops it.",
        unit="tokens per rank",
        ge=1,
    )
    micro_batch_specs: tuple[str, ...] = safe(
        (),
        "Sizes of single calls, CALL=SAMPLES or CALL=TOKENSt such as reference=64 actor_train=4096t. The "
        "calls: actor, reference, critic, reward (scoring), actor_train, critic_train.",
    )
    balance_ranks: bool = safe(True, "Swap groups of samples between ranks so that all train on about as many tokens.")
    max_epochs: int = option(1, "Passes over each rollout.", unit="epochs", ge=1)
    packing_samples: bool = safe(False, "Forward and backward without padding: sequences in one row.")
    share_prompts: bool = safe(
        True,
        "With --packing_samples and sdpa: a prompt goes through a model once for all its samples of a micro batch.",
        only_with="packing_samples",
    )
    shuffle: Literal["samples", "groups"] = option(
        "samples",
        "What the steps of an epoch draw: single samples, or all samples of a prompt together, which share it then.",
    )
    buffer_limit: int = option(
        0, "Samples kept in the replay buffer, oldest out first; 0: all.", unit="samples per rank", ge=0
    )
    buffer_cpu_offload: bool = safe(True, "Keep the replay buffer in CPU memory.")
    actor_learning_rate: float = option(1e-06, "Peak learning rate of the actor.", ge=0)
    critic_learning_rate: float = option(9e-06, "Peak learning rate of the critic.", ge=0)
    lr_scheduler: Literal["constant", "linear", "cosine", "cosine_with_min_lr"] = option(
        "cosine_with_min_lr", "Schedule over all optimizer steps, after the warm-up."
    )
    lr_warmup_ratio: float = option(0.03, "Share of the optimizer steps with rising rate.", ge=0, le=1)
    lr_warmup_steps: int | None = option(None, "Optimizer steps with rising rate. None: by --lr_warmup_ratio.", ge=0)
    min_lr_ratio: float = option(0.1, "cosine_with_min_lr ends at this share of the peak.", ge=0, le=1)
    l2: float = option(0.0, "AdamW's weight decay.", ge=0)
    adam_betas: tuple[float, float] = option((0.9, 0.95), "AdamW's betas.", ge=0, lt=1)
    max_norm: float = option(1.0, "Gradient norm clipping; 0: off.", ge=0)


class StrategyConfig(Section):
    """Distribution: DeepSpeed ZeRO and the machine."""

    zero_stage: Literal[0, 1, 2, 3] = option(
        2, "ZeRO stage of actor and critic; stage 3 also shards the frozen models."
    )
    critic_zero_stage: Literal[0, 1, 2, 3] | None = option(
        None, "ZeRO stage of the critic. None: --zero_stage.", only_with="critic"
    )
    ref_zero_stage: Literal[0, 3] | None = option(
        None, "ZeRO stage of reference and EMA. None: 3 if --zero_stage 3, else 0."
    )
    reward_zero_stage: Literal[0, 3] | None = option(None, "ZeRO stage of reward models. None: as the reference.")
    adam_offload: bool = safe(False, "Keep the actor's optimizer state in CPU memory.", only_with="zero_stage=1|2|3")
    critic_adam_offload: bool | None = safe(
        None, "The same for the critic. None: --adam_offload, at ZeRO 1 to 3.", only_with="critic"
    )
    param_offload: bool = safe(
        False, "ZeRO-3: keep the actor's parameter shards in CPU memory.", only_with="zero_stage=3"
    )
    critic_param_offload: bool | None = safe(
        None, "The same for the critic. None: --param_offload, at ZeRO 3.", only_with="critic"
    )
    ref_offload: bool = safe(False, "ZeRO-3: keep the reference's shards in CPU memory.", only_with="ref_zero_stage=3")
    reward_offload: bool = safe(
        False, "ZeRO-3: keep the reward models' shards in CPU memory.", only_with="reward_zero_stage=3"
    )
    zpg: int = option(
        1, "ZeRO-3 hpZ: ranks per secondary parameter partition; 1: off.", unit="ranks", ge=1, only_with="zero_stage=3"
    )
    grad_accum_dtype: Literal["fp32", "bf16"] | None = option(None, "Type gradients are accumulated in.")
    overlap_comm: bool = safe(False, "Overlap gradient reduction with the backward pass.", only_with="zero_stage=2|3")
    seed: int = option(42, "Seed of sampling, shuffling and initialisation.", ge=0)
    full_determinism: bool = option(False, "Deterministic kernels; slower.")
    local_rank: int = safe(-1, "Set by the launcher.")
    dist_timeout: float = safe(30.0, "Longest wait for another rank.", unit="minutes", gt=0)


class CheckpointConfig(Section, resume_safe=True):
    """Checkpoints and the final model."""

    save_path: str = option("./ckpt", "Folder of the run: final model, metrics.jsonl, run_config.yaml, eval/.")
    ckpt_path: str = option("./ckpt/checkpoints_ppo", "Folder of the checkpoints: _actor, _critic, global_stepN_hf.")
    save_steps: int = option(-1, "Checkpoint every N steps; -1: never.", unit="PPO steps", ge=-1)
    save_epochs: int | None = option(None, "Checkpoint every N episodes.", unit="episodes", ge=1)
    save_seconds: float | None = option(None, "Checkpoint every N seconds.", unit="seconds", gt=0)
    hf_save_steps: int = option(
        -1, "Export the actor in HF format every N steps, apart from checkpoints.", unit="PPO steps", ge=-1
    )
    hf_save_epochs: int | None = option(None, "Export every N episodes.", unit="episodes", ge=1)
    hf_save_seconds: float | None = option(None, "Export every N seconds.", unit="seconds", gt=0)
    save_hf_ckpt: bool = option(False, "Each checkpoint also holds the actor in HF format.")
    disable_ds_ckpt: bool = option(False, "Checkpoints hold no resumable state.")
    max_ckpt_num: int = option(3, "Checkpoints kept, oldest out first.", ge=1)
    max_ckpt_mem: float = option(100000000.0, "Disk space of all checkpoints, oldest out first.", unit="GB", gt=0)
    resume: str = option("auto", "auto: go on from the last checkpoint if there is one; never; or a checkpoint path.")
    load_checkpoint: bool = option(True, "--no_load_checkpoint is --resume never.")
    save_value_network: bool = option(False, "Save the critic beside the final model.", only_with="critic")


class EvaluationConfig(Section, resume_safe=True):
    """Evaluation on --eval_data."""

    eval_steps: int = option(
        -1,
        "Evaluate every N steps; -1: once per episode; 0: only before and after training.",
        unit="PPO steps",
        ge=-1,
        only_with="eval_data",
        off=(0,),
    )
    eval_epochs: int | None = option(
        None, "Evaluate every N episodes, whatever --eval_steps says.", unit="episodes", ge=1, only_with="eval_data"
    )
    eval_seconds: float | None = option(None, "Evaluate every N seconds.", unit="seconds", gt=0, only_with="eval_data")
    eval_n_samples: int = option(1, "Samples per prompt: mean@n and pass@k.", unit="samples per prompt", ge=1)
    eval_temperature: float = option(1.0, "Sampling temperature; 0: greedy.", ge=0)
    eval_top_p: float = option(1.0, "Nucleus sampling.", gt=0, le=1)
    eval_correct_threshold: float = option(0.5, "A score of at least this counts as correct.")
    best_metric: str | None = option(
        None,
        "Keep the actor with the highest value of this evaluation metric in --ckpt_path/best_hf, e.g. eval/accuracy.",
        only_with="eval_data",
    )
    val_before_train: bool = option(True, "Evaluate before the first step.")
    val_only: bool = option(False, "Evaluate and stop.", only_with="eval_data")


class LoggingConfig(Section, resume_safe=True):
    """Logging."""

    logging_steps: int = option(1, "Log every N steps.", unit="PPO steps", ge=1)
    peak_tflops: float | None = option(
        None, "Peak of one device in the training type, for perf/mfu; None: no MFU.", unit="TFLOP/s", gt=0
    )
    num_examine: int = option(1, "Samples of each data source printed per step.", unit="samples", ge=0)
    use_tensorboard: str | None = option(None, "Folder for TensorBoard.")
    use_wandb: bool = option(False, "Log to Weights & Biases; log in with `wandb login` or WANDB_API_KEY.")
    wandb_org: str | None = option(None, "Entity.")
    wandb_group: str | None = option(None, "Group.")
    wandb_project: str = option("lightppo", "Project.")
    wandb_run_name: str | None = option(None, "Name of the run, also in TensorBoard. None: the name of --save_path.")


@dataclass
class PPOConfig:
    """Everything a PPO run needs: ``config.algorithm.gamma``; ``config.flat()["gamma"]``.

    ``PPOConfig.from_flat(pretrain="...", prompt_data="...")`` builds one in code, ``parse_args`` from the command line.
    """

    file: FileConfig = field(default_factory=FileConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    verifier: VerifierConfig = field(default_factory=VerifierConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    @classmethod
    def from_flat(cls, values: Mapping[str, Any] | None = None, **more: Any) -> Self:
        """Build from flag names and values; errors as :meth:`with_options`."""
        return cls().with_options(**{**(values or {}), **more})

    def with_options(self, **values: Any) -> Self:
        """A copy with some options replaced; lists become tuples, paths text.

        Raises:
            ConfigError: on an unknown name, a value of the wrong type or out of range; one line for each.
        """
        known = {one.name: one for one in all_options()}
        problems: list[str] = []
        changed: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            if name not in known:
                problems.append(f"unknown option {name!r}{nearest(name, known)}")
                continue
            try:
                changed.setdefault(known[name].owner, {})[name] = known[name].conform(value)
            except ValueError as error:
                problems.append(str(error))
        if problems:
            raise ConfigError("\n".join(problems))
        sections = {owner: getattr(self, owner) for owner in changed}
        return dataclasses.replace(self, **{o: type(s)(**vars(s) | changed[o]) for o, s in sections.items()})

    def flat(self) -> dict[str, Any]:
        """All options by flag name."""
        return {one.name: getattr(getattr(self, one.owner), one.name) for one in all_options()}

    def value_problems(self) -> list[str]:
        """One message per option of the wrong type or out of range."""
        try:
            self.with_options(**self.flat())
        except ConfigError as error:
            return str(error).split("\n")
        return []

    def validate(self, world_size: int = 1) -> None:
        """Check values and, where these are all right, combinations of options.

        Args:
            world_size: number of ranks, for the batch sizes.

        Raises:
            ConfigError: with every problem found, one per line, each saying what to set.
        """
        if problems := self.value_problems() or rules.contradictions(self, world_size):
            raise ConfigError("\n".join(problems))

    def resolved(self) -> Self:
        """A copy in which every "None means …" default is replaced by what it means. Idempotent.

        Raises:
            ConfigError: on a value of the wrong type or out of range.
        """
        conformed = self.with_options(**self.flat())
        return conformed.with_options(**rules.resolutions(conformed))


def sections() -> dict[str, type[Section]]:
    """The sections of :class:`PPOConfig` by their names."""
    return {home.name: home.default_factory for home in dataclasses.fields(PPOConfig)}


def all_options() -> Iterator[Option]:
    """Every option, in the order of the sections."""
    for section in sections().values():
        yield from section.options().values()


def unsafe_changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[dict[str, tuple], dict[str, tuple]]:
    """Compare a resumed run's options with those it was started with.

    Returns:
        (refused, safe): for each option that changed, (old, new).
    """
    refused, safe = {}, {}
    for one in all_options():
        if one.name in saved and saved[one.name] != now[one.name]:
            (safe if one.resume_safe else refused)[one.name] = (saved[one.name], now[one.name])
    return refused, safe
