"""The options, one dataclass per concern. Names are those of the seed's family where it has one."""

from typing import Literal

from lightppo.config.fields import option, section


@section
class ModelConfig:
    """Models: where they come from and how they are loaded."""

    pretrain: str | None = option(None, "Actor: local path, hub name or fsspec URL of a causal LM. Required.")
    ref_pretrain: str | None = option(None, "Reference model. None: the actor's own start.")
    critic_pretrain: str | None = option(
        None, "Critic. None: --reward_pretrain where there is one (its head is kept), else --pretrain."
    )
    init_critic_from_actor: bool = option(
        False, "Start the critic from --pretrain with a new value head, also where there is a reward model."
    )
    reward_pretrain: tuple[str, ...] = option(
        (), "Reward models: one, or several combined by --reward_fn path.py:name."
    )
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
    gradient_checkpointing: bool = option(
        False, "Recompute activations in the backward pass: less memory, about a third more time.", resume_safe=True
    )
    gradient_checkpointing_use_reentrant: bool = option(
        False, "torch's reentrant form of gradient checkpointing.", resume_safe=True
    )
    activation_offload: bool = option(
        False,
        "On a GPU: activations wait in CPU memory for the backward pass; less memory, more time.",
        resume_safe=True,
    )
    torch_compile: bool = option(
        False,
        "Compile the layers of actor, critic and reference: minutes at the start, less time per step on a GPU.",
        resume_safe=True,
    )
    use_liger_kernel: bool = option(
        False,
        "On a GPU, with liger-kernel installed: its kernels for norms, rotary embeddings and MLPs.",
        resume_safe=True,
    )


@section
class DataConfig:
    """Data: prompts, evaluation prompts and pretraining text."""

    prompt_data: str | None = option(
        None, "Prompts: file, folder, hub name or URL; several separated by commas. Required."
    )
    prompt_data_probs: str | None = option(None, "Sampling probabilities of several --prompt_data, e.g. 0.7,0.3.")
    prompt_split: str = option("train", "Split of --prompt_data.")
    eval_data: str | None = option(None, "Held-out prompts. Without it there is no evaluation.", resume_safe=True)
    eval_split: str = option("test", "Split of --eval_data; files without splits have only one.", resume_safe=True)
    pretrain_data: str | None = option(None, "Text for the PTX loss.")
    pretrain_data_probs: str | None = option(None, "Sampling probabilities of several --pretrain_data.")
    pretrain_split: str = option("train", "Split of --pretrain_data.")
    input_key: str = option("input", "Column with the prompt: text, or a list of chat messages.")
    label_key: str | None = option(None, "Column with the ground truth. None: recognised from the row's form.")
    output_key: str | None = option(None, "Column with the answer in --pretrain_data; None: --input_key is all text.")
    input_template: str | None = option(None, "Text around the prompt, with {} in its place.")
    apply_chat_template: bool = option(False, "Render prompts with the tokenizer's chat template.")
    system_prompt: str | None = option(None, "System message put before chats that have none.")
    max_samples: int = option(1_000_000, "Rows taken from --prompt_data.", unit="prompts", ge=1)
    eval_max_samples: int = option(1_000_000, "Rows taken from --eval_data.", unit="prompts", ge=1, resume_safe=True)
    prompt_max_len: int = option(1024, "Longest prompt.", unit="tokens", ge=1)
    truncation: Literal["error", "left", "right", "middle", "drop"] = option(
        "error", "What to do with a longer prompt: stop, cut a side or the middle, or drop it. Counted."
    )
    filter_overlong_prompts: bool = option(False, "Drop and count longer prompts, whatever --truncation says.")
    on_bad_row: Literal["error", "skip"] = option("error", "A row that cannot be used: stop, or skip and count it.")
    data_num_workers: int = option(0, "Processes that tokenise; 0: this one.", ge=0, resume_safe=True)
    dataloader_pin_memory: bool = option(True, "Pin batches in memory on a GPU machine.", resume_safe=True)


@section
class RolloutConfig:
    """Rollouts: how many responses are sampled, and how."""

    rollout_batch_size: int = option(512, "Prompts per PPO step.", unit="prompts over all ranks", ge=1)
    n_samples_per_prompt: int = option(1, "Responses to each prompt.", unit="samples per prompt", ge=1)
    micro_rollout_batch_size: int = option(
        8, "Sequences in one generation or scoring pass.", unit="samples per rank", ge=1, resume_safe=True
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


@section
class RewardConfig:
    """Rewards: sources and the shaping of scores."""

    remote_rm_url: tuple[str, ...] = option(
        (), "http(s) URLs of reward servers, or path.py with reward_func(queries, prompts, labels).", resume_safe=True
    )
    reward_fn: str | None = option(
        None, "path.py[:name]: a reward function; with several --reward_pretrain it combines their scores."
    )
    remote_rm_timeout: float = option(60.0, "Limit of one request.", unit="seconds", gt=0, resume_safe=True)
    remote_rm_retries: int = option(3, "Further tries after a failed request.", ge=0, resume_safe=True)
    remote_rm_token_env: str | None = option(
        None, "Environment variable that holds the bearer token of the reward servers.", resume_safe=True
    )
    reward_input_tokenizer: tuple[str, ...] = option(
        (),
        "Tokenizers of reward models that read other ids: the chat is rendered by their templates; one for all, or one "
        "each. None: the actor's ids.",
    )
    reward_max_length: int | None = option(
        None, "Longest input of a reward model. None: no limit.", unit="tokens", ge=2
    )
    reward_truncation: Literal["error", "left"] = option(
        "error", "What to do with a longer one: stop, or drop its beginning. Counted."
    )
    normalize_reward: bool = option(False, "Reward models subtract mean and divide by std of their config.")
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
    overlong_penalty_factor: float | None = option(None, "Largest such punishment. None: 1.", gt=0)
    mask_no_eos_with_zero: bool = option(False, "Responses cut by the limit have score 0; their KL still counts.")
    mask_too_long: bool = option(
        False, "Responses cut by the limit are not trained on and leave all statistics of advantages."
    )
    reward_clip_range: tuple[float, float] | None = option((-10.0, 10.0), "Shaped scores are clipped to this range.")
    use_dense_reward: bool = option(False, "Train on one score per response token, which the reward source gives.")
    reward_delta: bool = option(False, "Dense rewards are differences of successive token scores.")


@section
class TrainingConfig:
    """Training: batches, epochs, optimizers."""

    num_episodes: int = option(1, "Passes over the prompts.", unit="episodes", ge=1, resume_safe=True)
    total_training_steps: int | None = option(
        None,
        "Stop after this many PPO steps and stretch the schedules to it. None: all episodes.",
        ge=1,
        resume_safe=True,
    )
    benchmark_steps: int | None = option(
        None, "Stop early after this many PPO steps; schedules stay as they are.", ge=1, resume_safe=True
    )
    train_batch_size: int | None = option(
        None,
        "Samples per optimizer step. None: 128, or what --ppo_n_minibatches gives.",
        unit="samples over all ranks",
        ge=1,
    )
    ppo_n_minibatches: int | None = option(
        None, "Optimizer steps per epoch over a rollout; sets --train_batch_size.", ge=1
    )
    micro_train_batch_size: int = option(
        4, "Samples in one forward and backward pass.", unit="samples per rank", ge=1, resume_safe=True
    )
    max_tokens_per_micro_batch: int | None = option(
        None,
        "Tokens in one pass through a model, in training and in scoring, instead of numbers of samples; padding counts "
        "unless --packing_samples drops it.",
        unit="tokens per rank",
        ge=1,
        resume_safe=True,
    )
    micro_batch_specs: tuple[str, ...] = option(
        (),
        "Sizes of single calls, CALL=SAMPLES or CALL=TOKENSt such as reference=64 actor_train=4096t. The calls: actor, "
        "reference, critic, reward (scoring), actor_train, critic_train.",
        resume_safe=True,
    )
    balance_ranks: bool = option(
        True, "Swap groups of samples between ranks so that all train on about as many tokens.", resume_safe=True
    )
    max_epochs: int = option(1, "Passes over each rollout.", unit="epochs", ge=1)
    packing_samples: bool = option(
        False, "Forward and backward without padding: sequences in one row.", resume_safe=True
    )
    share_prompts: bool = option(
        True,
        "With --packing_samples and sdpa: a prompt goes through a model once for all its samples of a micro batch.",
        resume_safe=True,
    )
    shuffle: Literal["samples", "groups"] = option(
        "samples",
        "What the steps of an epoch draw: single samples, or all samples of a prompt together, which share it then.",
    )
    buffer_limit: int = option(
        0, "Samples kept in the replay buffer, oldest out first; 0: all.", unit="samples per rank", ge=0
    )
    buffer_cpu_offload: bool = option(True, "Keep the replay buffer in CPU memory.", resume_safe=True)
    actor_learning_rate: float = option(1e-6, "Peak learning rate of the actor.", ge=0)
    critic_learning_rate: float = option(9e-6, "Peak learning rate of the critic.", ge=0)
    lr_scheduler: Literal["constant", "linear", "cosine", "cosine_with_min_lr"] = option(
        "cosine_with_min_lr", "Schedule over all optimizer steps, after the warm-up."
    )
    lr_warmup_ratio: float = option(0.03, "Share of the optimizer steps with rising rate.", ge=0, le=1)
    lr_warmup_steps: int | None = option(None, "Optimizer steps with rising rate. None: by --lr_warmup_ratio.", ge=0)
    min_lr_ratio: float = option(0.1, "cosine_with_min_lr ends at this share of the peak.", ge=0, le=1)
    l2: float = option(0.0, "AdamW's weight decay.", ge=0)
    adam_betas: tuple[float, float] = option((0.9, 0.95), "AdamW's betas.", ge=0, lt=1)
    max_norm: float = option(1.0, "Gradient norm clipping; 0: off.", ge=0)


@section
class StrategyConfig:
    """Distribution: DeepSpeed ZeRO and the machine."""

    zero_stage: Literal[0, 1, 2, 3] = option(
        2, "ZeRO stage of actor and critic; stage 3 also shards the frozen models."
    )
    critic_zero_stage: Literal[0, 1, 2, 3] | None = option(None, "ZeRO stage of the critic. None: --zero_stage.")
    ref_zero_stage: Literal[0, 3] | None = option(
        None, "ZeRO stage of reference and EMA. None: 3 if --zero_stage 3, else 0."
    )
    reward_zero_stage: Literal[0, 3] | None = option(None, "ZeRO stage of reward models. None: as the reference.")
    adam_offload: bool = option(False, "Keep the actor's optimizer state in CPU memory.", resume_safe=True)
    critic_adam_offload: bool | None = option(
        None, "The same for the critic. None: --adam_offload, at ZeRO 1 to 3.", resume_safe=True
    )
    param_offload: bool = option(False, "ZeRO-3: keep the actor's parameter shards in CPU memory.", resume_safe=True)
    critic_param_offload: bool | None = option(
        None, "The same for the critic. None: --param_offload, at ZeRO 3.", resume_safe=True
    )
    ref_offload: bool = option(False, "ZeRO-3: keep the reference's shards in CPU memory.", resume_safe=True)
    reward_offload: bool = option(False, "ZeRO-3: keep the reward models' shards in CPU memory.", resume_safe=True)
    zpg: int = option(1, "ZeRO-3 hpZ: ranks per secondary parameter partition; 1: off.", unit="ranks", ge=1)
    grad_accum_dtype: Literal["fp32", "bf16"] | None = option(None, "Type gradients are accumulated in.")
    overlap_comm: bool = option(False, "Overlap gradient reduction with the backward pass.", resume_safe=True)
    seed: int = option(42, "Seed of sampling, shuffling and initialisation.", ge=0)
    full_determinism: bool = option(False, "Deterministic kernels; slower.")
    local_rank: int = option(-1, "Set by the launcher.", resume_safe=True)
    dist_timeout: float = option(30.0, "Longest wait for another rank.", unit="minutes", gt=0, resume_safe=True)


@section
class CheckpointConfig:
    """Checkpoints and the final model."""

    save_path: str = option(
        "./ckpt", "Folder of the run: final model, metrics.jsonl, run_config.yaml, eval/.", resume_safe=True
    )
    ckpt_path: str = option(
        "./ckpt/checkpoints_ppo", "Folder of the checkpoints: _actor, _critic, global_stepN_hf.", resume_safe=True
    )
    save_steps: int = option(-1, "Checkpoint every N steps; -1: never.", unit="PPO steps", ge=-1, resume_safe=True)
    save_epochs: int | None = option(None, "Checkpoint every N episodes.", unit="episodes", ge=1, resume_safe=True)
    save_seconds: float | None = option(None, "Checkpoint every N seconds.", unit="seconds", gt=0, resume_safe=True)
    hf_save_steps: int = option(
        -1,
        "Export the actor in HF format every N steps, apart from checkpoints.",
        unit="PPO steps",
        ge=-1,
        resume_safe=True,
    )
    hf_save_epochs: int | None = option(None, "Export every N episodes.", unit="episodes", ge=1, resume_safe=True)
    hf_save_seconds: float | None = option(None, "Export every N seconds.", unit="seconds", gt=0, resume_safe=True)
    save_hf_ckpt: bool = option(False, "Each checkpoint also holds the actor in HF format.", resume_safe=True)
    disable_ds_ckpt: bool = option(False, "Checkpoints hold no resumable state.", resume_safe=True)
    max_ckpt_num: int = option(3, "Checkpoints kept, oldest out first.", ge=1, resume_safe=True)
    max_ckpt_mem: float = option(
        1e8, "Disk space of all checkpoints, oldest out first.", unit="GB", gt=0, resume_safe=True
    )
    resume: str = option(
        "auto", "auto: go on from the last checkpoint if there is one; never; or a checkpoint path.", resume_safe=True
    )
    load_checkpoint: bool = option(True, "--no_load_checkpoint is --resume never.", resume_safe=True)
    save_value_network: bool = option(False, "Save the critic beside the final model.", resume_safe=True)


@section
class EvaluationConfig:
    """Evaluation on --eval_data."""

    eval_steps: int = option(
        -1,
        "Evaluate every N steps; -1: once per episode; 0: only before and after training.",
        unit="PPO steps",
        ge=-1,
        resume_safe=True,
    )
    eval_epochs: int | None = option(
        None, "Evaluate every N episodes, whatever --eval_steps says.", unit="episodes", ge=1, resume_safe=True
    )
    eval_seconds: float | None = option(None, "Evaluate every N seconds.", unit="seconds", gt=0, resume_safe=True)
    eval_n_samples: int = option(
        1, "Samples per prompt: mean@n and pass@k.", unit="samples per prompt", ge=1, resume_safe=True
    )
    eval_temperature: float = option(1.0, "Sampling temperature; 0: greedy.", ge=0, resume_safe=True)
    eval_top_p: float = option(1.0, "Nucleus sampling.", gt=0, le=1, resume_safe=True)
    eval_correct_threshold: float = option(0.5, "A score of at least this counts as correct.", resume_safe=True)
    best_metric: str | None = option(
        None,
        "Keep the actor with the highest value of this evaluation metric in --ckpt_path/best_hf, e.g. eval/accuracy.",
        resume_safe=True,
    )
    val_before_train: bool = option(True, "Evaluate before the first step.", resume_safe=True)
    val_only: bool = option(False, "Evaluate and stop.", resume_safe=True)


@section
class LoggingConfig:
    """Logging."""

    logging_steps: int = option(1, "Log every N steps.", unit="PPO steps", ge=1, resume_safe=True)
    peak_tflops: float | None = option(
        None,
        "Peak of one device in the training type, for perf/mfu; None: no MFU.",
        unit="TFLOP/s",
        gt=0,
        resume_safe=True,
    )
    num_examine: int = option(
        1, "Samples of each data source printed per step.", unit="samples", ge=0, resume_safe=True
    )
    use_tensorboard: str | None = option(None, "Folder for TensorBoard.", resume_safe=True)
    use_wandb: bool = option(
        False, "Log to Weights & Biases; log in with `wandb login` or WANDB_API_KEY.", resume_safe=True
    )
    wandb_org: str | None = option(None, "Entity.", resume_safe=True)
    wandb_group: str | None = option(None, "Group.", resume_safe=True)
    wandb_project: str = option("lightppo", "Project.", resume_safe=True)
    wandb_run_name: str | None = option(
        None, "Name of the run, also in TensorBoard. None: the name of --save_path.", resume_safe=True
    )
