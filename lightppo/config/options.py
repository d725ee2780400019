"""All options, each declared once, by section; and :class:`Options`, their values in a run. Docs: docs/flags.md.

The name of an option is unique over all sections: it is the flag, and the key in YAML and in ``PPOConfig.from_flat``.
"""

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, Literal, Self, get_type_hints

from lightppo.algorithms.entries import (
    ADVANTAGE_ESTIMATORS,
    KL_ESTIMATORS,
    LOSS_AGG_MODES,
    POLICY_LOSSES,
)
from lightppo.errors import ConfigError
from lightppo.option import SECTIONS, Option, Section, additions_to, option
from lightppo.plugin import ENGINES, HINTS, REWARD_MANAGERS, REWARD_STYLES
from lightppo.suggestions import meant, nearest

safe = partial(option, resume_safe=True)
critic = partial(option, needs="critic")
per_role = partial(option, per_role=True)  # the critic may have another value
kl = partial(option, needs="init_kl_coef>0")


class FileConfig(Section, resume_safe=True):
    """Options from a file."""

    config: str | None = option(
        None,
        "YAML file with options; flags override it. Its own `config` names another file in its folder, which it "
        "overrides.",
    )


class ModelConfig(Section, of="weights"):
    """Models: where they come from and how they are loaded."""

    pretrain: str | None = option(
        None, "Actor: local path, hub name or fsspec URL of a causal LM.", required=True
    )
    ref_pretrain: str | None = kl(None, "Reference model. None: the initial actor.")
    critic_pretrain: str | None = critic(
        None, "Critic. None: the first --reward_pretrain, or --pretrain if there is none."
    )
    init_critic_from_actor: bool = critic(
        False, "Start the critic from --pretrain, even with a reward model."
    )
    reward_pretrain: tuple[str, ...] = option(
        (), "Reward models. --reward_fn path.py:name combines several."
    )
    value_head_prefix: str = option(
        "score", "Name of the value head in critic and reward checkpoints."
    )
    init_from_scratch: bool = option(
        False, "Use random weights with the model's config instead of its checkpoint."
    )
    override_config: str | None = option(
        None,
        'JSON that changes the config of all but reward models: {"rope_theta": 1e6}. Dropout set here acts in '
        "training.",
    )
    external_lib: str | None = option(
        None, "Module to import before the models, e.g. to register an architecture."
    )
    trust_remote_code: bool = option(False, "Run Python code that comes with a checkpoint.")
    tokenizer_path: str | None = option(
        None, "Tokenizer: local path, hub name or fsspec URL. None: --pretrain's."
    )
    disable_fast_tokenizer: bool = option(
        False, "Use the Python tokenizer instead of the Rust one. Fails if transformers has none."
    )
    bf16: bool = option(
        False,
        "Train in bfloat16 with an fp32 master copy. Off: fp32.",
        needs="zero_stage!=0 and critic_zero_stage!=0",
    )
    fp16: bool = option(
        False,
        "GPU only: float16 with an fp32 master copy and dynamic loss scaling. Closer to the rollout engine than bf16.",
        needs="zero_stage!=0 and critic_zero_stage!=0",
    )
    attn_implementation: Literal["auto", "eager", "sdpa", "flash_attention_2"] = option(
        "auto",
        "Attention kernel. auto: sdpa; before torch 2.11 flash_attention_2 if usable (GPU, 16 bits, flash-attn). "
        "Gemma 2: flash_attention_2 or eager.",
        off=("flash_attention_2",),
    )
    flash_attn: bool = option(False, "The same as --attn_implementation flash_attention_2.")
    gradient_checkpointing: bool = per_role(
        False,
        "Recompute activations in the backward pass: less memory, more time.",
        resume_safe=True,
    )
    gradient_checkpointing_use_reentrant: bool = safe(
        False,
        "Use torch's reentrant checkpointing.",
        needs="gradient_checkpointing or critic_gradient_checkpointing",
    )
    activation_offload: bool = safe(
        False, "GPU only: keep activations in CPU memory. They are copied while the GPU computes."
    )
    torch_compile: bool = safe(
        False,
        "Compile the layers of actor, critic and reference: minutes at the start, faster steps on a GPU.",
        needs="zero_stage!=3 and critic_zero_stage!=3 and ref_zero_stage!=3",
    )
    use_liger_kernel: bool | None = safe(
        None,
        "GPU only: use liger-kernel's norms, rotary embeddings and MLPs. None: if it is installed and gives the same "
        "log probs and gradients, without --torch_compile; the log says which.",
    )


class DataConfig(Section):
    """Data: prompts and evaluation prompts."""

    prompt_data: str | None = option(
        None, "Prompts: file, folder, hub name or URL; separate several with commas.", required=True
    )
    prompt_split: str = option("train", "Split of --prompt_data.")
    eval_data: str | None = safe(None, "Held-out prompts. None: no evaluation.")
    eval_split: str = safe("test", "Split of --eval_data. Files without splits have only one.")
    input_key: str = option("input", "Column with the prompt: text, or a list of chat messages.")
    label_key: str | None = option(
        None, "Column with the ground truth. None: detected from the row."
    )
    input_template: str | None = option(None, "Text around the prompt; {} stands for the prompt.")
    apply_chat_template: bool = option(False, "Render prompts with the tokenizer's chat template.")
    system_prompt: str | None = option(None, "System message added to chats that have none.")
    data_source_key: str = option(
        "data_source", "Column that names a row's data source, for evaluation and rewards."
    )
    data_shuffle: bool = option(
        True, "Shuffle the prompts anew in each episode. Off: in the data's order."
    )
    max_samples: int = option(
        1000000, "Maximum number of rows taken from --prompt_data.", "prompts", ge=1
    )
    eval_max_samples: int = safe(
        1000000, "Maximum number of rows taken from --eval_data.", "prompts", ge=1
    )
    prompt_max_len: int = option(1024, "Maximum prompt length.", "tokens", ge=1)
    truncation: Literal["error", "left", "right", "middle", "drop"] = option(
        "error", "If a prompt is longer: stop, cut a side or the middle, or drop it. Counted."
    )
    filter_overlong_prompts: bool = option(
        False, "Drop and count longer prompts, regardless of --truncation."
    )
    on_bad_row: Literal["error", "skip"] = option(
        "error", "If a row cannot be used: stop, or skip and count it."
    )
    data_num_workers: int = safe(0, "Tokenizer processes. 0: tokenize in the main process.", ge=0)
    dataloader_pin_memory: bool = safe(True, "Pin batches in memory on a GPU machine.")


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
    repetition_penalty: float = option(
        1.0, "Divide the logits of tokens that already occurred by this; 1: off.", gt=0
    )
    presence_penalty: float = option(
        0.0, "Subtracted from the logits of tokens that occur in the response; 0: off.", ge=-2, le=2
    )
    frequency_penalty: float = option(
        0.0, "The same for each occurrence of a token in the response.", ge=-2, le=2
    )
    min_p: float = option(
        0.0,
        "Minimum probability of a token, as a share of the most likely token's; 0: off.",
        ge=0,
        le=1,
        needs="sampling",
    )
    stop: tuple[str, ...] = option((), "Strings that end a response and are removed from its text.")
    stop_token_ids: tuple[int, ...] = option((), "Token ids that end a response.", ge=0)
    bad_words: tuple[str, ...] = option((), "Words that are never sampled.")
    ignore_eos: bool = option(False, "Continue after end-of-text up to --generate_max_len.")


class EngineConfig(Section, resume_safe=True, of="trainer"):
    """Rollout engine: what generates the responses."""

    rollout_engine: str = option(
        "hf",
        "What generates responses: hf is the actor itself. Others may be yours.",
        names=ENGINES,
    )


class SamplingConfig(Section, of="training"):
    """Selection: which sampled groups are trained on; replay and dumps of rollouts."""

    fire_sampling: bool = option(
        False,
        "Sample the first token of each response at --fire_temperature.",
        needs="rollout_engine=hf and sampling",
    )
    fire_temperature: float | None = option(
        None, "Temperature of the first token. None: 10.", gt=0, needs="fire_sampling", off=(10,)
    )


reward_model = partial(option, needs="reward_pretrain")
shaping = partial(option, needs="trained_scores")


class RewardConfig(Section, of="trainer"):
    """Rewards: sources and the shaping of scores."""

    remote_rm_url: tuple[str, ...] = safe(
        (), "Reward servers, or path.py with reward_func(queries, prompts, labels)."
    )
    reward_fn: str | None = option(
        None,
        "Reward function path.py[:name]. With several --reward_pretrain: the function that combines their scores.",
        takes_object=True,
    )
    reward_input_tokenizer: tuple[str, ...] = reward_model(
        (),
        "Tokenizers of the reward models, one for all or one each; they render the chat again. None: the actor's "
        "token ids.",
    )
    reward_max_length: int | None = reward_model(
        None, "Maximum input length of a reward model. None: no limit.", "tokens", ge=2
    )
    reward_truncation: Literal["error", "left"] = reward_model(
        "error", "If an input is longer: stop, or cut its left side. Counted."
    )
    normalize_reward: bool = reward_model(
        False, "Normalise reward model scores by mean and std from the model's config."
    )
    reward_bias: float = shaping(0.0, "Subtracted from every score, before --reward_scaling.")
    reward_scaling: float = shaping(1.0, "Factor on every score; a negative factor flips the sign.")
    max_reward_clip: float | None = shaping(None, "Clip scaled scores to ± this.", gt=0)
    reward_running_norm: bool = shaping(
        False, "Normalise scaled scores by the running mean and deviation over all ranks."
    )
    stop_properly_penalty: float | None = shaping(
        None,
        "Truncated responses score at most this share of their score (0 to 1), or at most this (below 0).",
        le=1,
    )
    overlong_buffer_len: int | None = shaping(
        None,
        "DAPO's soft length limit: responses that reach the last N tokens before --generate_max_len get a penalty.",
        "tokens",
        ge=1,
    )
    overlong_penalty_factor: float | None = option(
        None, "Maximum penalty. None: 1.", gt=0, needs="overlong_buffer_len", off=(1,)
    )
    mask_no_eos_with_zero: bool = shaping(
        False, "Truncated responses score 0; their KL still counts."
    )
    mask_too_long: bool = option(
        False, "Exclude truncated responses from training and advantage statistics."
    )
    reward_clip_range: tuple[float, float] | None = shaping(
        (-10.0, 10.0), "Clip shaped scores to this range. None: off."
    )
    use_dense_reward: bool = shaping(
        False, "Train on one score per response token; the reward source must provide them."
    )
    reward_delta: bool = option(
        False, "Use differences of successive dense scores as rewards.", needs="use_dense_reward"
    )


judged = partial(safe, needs="function or math")


class VerifierConfig(Section):
    """Verifiers: built-in reward sources, reward functions, failures."""

    reward_source: tuple[str, ...] = option(
        (),
        "Built-in sources, NAME[=WEIGHT]: math, format, code; scores are added. Also those set by flags: "
        "function, server, model.",
    )
    reward_routes: str | None = option(
        None,
        'Reward sources per data source, as JSON or a JSON file: {"gsm8k": {"math": 1, "format": 0.1}, "*": '
        '{"model": 1}}.',
    )
    reward_routes_by: str = option(
        "data_source",
        "Column with the keys of --reward_routes: data_source, label, or another such as task.",
        needs="reward_routes",
    )
    reward_fn_style: str = option(
        "auto",
        "Signature of --reward_fn. auto: from its parameter names.",
        needs="function",
        names=REWARD_STYLES,
    )
    reward_manager: str = safe(
        "auto",
        "How --reward_fn is called. naive: in threads; batch: one call; prime: processes killed at "
        "--reward_timeout; auto: by signature; dapo: auto, with --overlong_buffer_len.",
        needs="function",
        names=REWARD_MANAGERS,
    )
    reward_retries: int = judged(0, "Retries of a failed call.", ge=0)
    on_reward_failure: Literal["error", "unscored"] | None = safe(
        None,
        "If all tries of a call fail: stop, or leave the sample out. None: error for functions, unscored for "
        "verifiers.",
        needs="function or server or math or code",
    )


whitens_batch = partial(option, needs="whitening and adv_norm_scope=batch")


class AlgorithmConfig(Section, own=ADVANTAGE_ESTIMATORS, of="training"):
    """Algorithm: advantages, KL, reference."""

    advantage_estimator: str = option(
        "gae",
        "How rewards become advantages: gae with a critic, rloo, grpo and others.",
        names=ADVANTAGE_ESTIMATORS,
    )
    gamma: float = option(1.0, "Discount per token.", ge=0, le=1, needs="discounting")
    lambd: float = critic(0.95, "GAE's λ.", ge=0, le=1)
    bootstrap_truncated: bool = critic(
        False, "gae: continue truncated responses with the critic's last value."
    )
    group_std_norm: bool = option(
        True, "Divide by the group's standard deviation.", needs="group_deviation"
    )
    grpo_std_eps: float | None = option(
        None,
        "Added to the group's standard deviation. None: 1e-6.",
        ge=0,
        needs="group_deviation and group_std_norm",
    )
    grpo_std_scope: Literal["group", "batch"] = option(
        "group",
        "Standard deviation to divide by: of the group, or of all scores.",
        needs="group_deviation and group_std_norm",
    )
    adv_norm: bool | None = option(None, "Whiten advantages. None: as the estimator defines it.")
    adv_norm_scope: Literal["batch", "group"] = option(
        "batch",
        "Whiten over the batch of all ranks, or within each group.",
        needs="whitening and n_samples_per_prompt>1",
    )
    adv_shift_mean: bool = whitens_batch(True, "Subtract the mean when whitening the batch.")
    adv_std_norm: bool = whitens_batch(
        True, "Divide by the standard deviation when whitening the batch."
    )
    adv_std_unbiased: bool = whitens_batch(
        False, "Divide the variance by n - 1 instead of n.", also="adv_std_norm"
    )
    adv_norm_eps: float | None = option(
        None,
        "Added to the batch's variance (None: 1e-8) or the group's deviation (None: 1e-5).",
        ge=0,
        needs="whitening",
    )
    advantage_clip: float | None = option(None, "Clip advantages to ± this.", gt=0, off=(0,))
    init_kl_coef: float = option(0.01, "KL coefficient. 0: no reference model is loaded.", ge=0)
    kl_target: float | None = kl(
        None, "Adapt the coefficient towards this KL. None: constant.", gt=0
    )
    kl_horizon: int = option(
        10000,
        "Horizon of the adaptive coefficient.",
        "samples over all ranks",
        ge=1,
        needs="kl_target",
    )
    kl_estimator: str | None = option(
        None,
        "KL estimator per token (joschu.net/blog/kl-approx). None: k1 in the reward, k2 in the loss.",
        names=KL_ESTIMATORS,
    )
    kl_clip: float | None = kl(None, "Clip KL estimates to ± this.", "nats", gt=0)
    use_kl_loss: bool | None = kl(
        None,
        "Put the KL in the loss instead of the reward. None: on for estimators that divide by a group's deviation.",
        off=(False,),
    )
    use_kl_in_reward: bool | None = shaping(
        None, "Put the KL in the reward. None: on unless it is in the loss.", off=(False,)
    )
    ref_ema_eta: float | None = kl(
        None,
        "After each step set the reference to (1 - η)·reference + η·actor.",
        gt=0,
        le=1,
        off=(0,),
    )
    ref_reset_steps: int | None = kl(
        None, "Copy the actor to the reference every N steps.", "PPO steps", ge=1
    )
    freezing_actor_steps: int = critic(
        -1,
        "Train only the critic up to and including this step; -1: never.",
        "PPO steps",
        ge=-1,
        off=(0,),
    )
    enable_ema: bool = option(
        False, "Keep an exponential moving average of the actor and save it at the end."
    )
    ema_beta: float = option(0.992, "Decay of the moving average.", ge=0, lt=1, needs="enable_ema")


clips = partial(option, needs="clipping")


class LossConfig(Section, own=POLICY_LOSSES, of="training"):
    """Losses: policy, entropy, value; early stop."""

    policy_loss: str | None = option(
        None,
        "Policy loss, such as ppo, gspo, cispo. None: the estimator's default, ppo for most.",
        names=POLICY_LOSSES,
    )
    loss_agg_mode: str | None = option(
        None,
        "How token losses are combined. None: default of the estimator or loss, mostly token-mean.",
        names=LOSS_AGG_MODES,
    )
    eps_clip: float | None = clips(
        None, "Clip range of the ratio. None: the loss's default, 0.2 for ppo.", gt=0, le=1
    )
    eps_clip_low: float | None = clips(None, "Lower clip range. None: --eps_clip.", gt=0, le=1)
    eps_clip_high: float | None = clips(
        None, "Upper clip range (clip-higher). None: --eps_clip.", gt=0
    )
    entropy_coef: float = option(0.0, "Weight of the entropy bonus in the actor's loss.", ge=0)
    aux_loss_coef: float = option(
        0.0, "Weight of the load-balancing loss of a mixture of experts.", ge=0
    )
    old_log_probs: Literal["auto", "forward", "rollout"] = option(
        "auto",
        "Log probs before the update: from a forward pass, or from the rollout. auto: skip the pass if the "
        "result would be the same, as with one optimizer step per rollout or float32 rollouts by the actor.",
    )
    value_clip: float | None = critic(
        0.2, "Clip range of values around the old ones. None: off.", gt=0, off=(None,)
    )
    value_huber_delta: float | None = critic(
        None, "Use a linear (Huber) value loss for errors above this. None: squared.", gt=0
    )
    value_norm: Literal["exp", "ma"] | None = critic(
        None,
        "Train the critic on returns normalised by an exponential or plain moving average. None: raw returns.",
    )
    value_norm_beta: float | None = option(
        None, "Decay of exp. None: 0.99995.", gt=0, lt=1, needs="value_norm=exp"
    )
    value_norm_eps: float | None = option(
        None, "Minimum variance. None: 1e-5.", gt=0, needs="value_norm"
    )


class TrainingConfig(Section, of="training"):
    """Training: batches, epochs, optimizers."""

    num_episodes: int = safe(1, "Passes over the prompts.", "episodes", ge=1)
    total_training_steps: int | None = safe(
        None,
        "Stop after this many PPO steps and fit the schedules to it. None: all episodes.",
        ge=1,
    )
    dry_run: bool = safe(
        False,
        "Check everything and run one step on a few short samples with the real models; nothing is kept.",
    )
    callback: tuple[str, ...] = safe(
        (),
        "Callbacks of your own, path.py:NAME: what happens beside training; docs/extending.md has examples.",
    )
    benchmark_steps: int | None = safe(
        None, "Stop after this many PPO steps without changing the schedules.", ge=1
    )
    train_batch_size: int | None = option(
        None,
        "Samples per optimizer step. None: 128, or set by --ppo_n_minibatches.",
        "samples over all ranks",
        ge=1,
    )
    ppo_n_minibatches: int | None = option(
        None, "Optimizer steps per epoch; sets --train_batch_size.", ge=1
    )
    micro_train_batch_size: int = safe(
        4, "Samples per forward and backward pass.", "samples per rank", ge=1
    )
    max_epochs: int = per_role(1, "Passes over each rollout.", "epochs", ge=1)
    packing_samples: bool | None = safe(
        None,
        "Put several sequences in one row, without padding. None: with sdpa or flash_attention_2, if all models "
        "keep the sequences apart exactly; the log says if not.",
    )
    share_prompts: bool = safe(
        True,
        "With sdpa: compute a prompt once for all its samples.",
        needs="packing_samples!=False",
    )
    shuffle: Literal["samples", "groups"] = option(
        "samples",
        "What the steps of an epoch draw: samples, or all samples of a prompt.",
        needs="n_samples_per_prompt>1",
    )
    buffer_cpu_offload: bool = safe(True, "Keep the replay buffer in CPU memory.")
    actor_learning_rate: float = option(1e-06, "Peak learning rate of the actor.", ge=0)
    critic_learning_rate: float = critic(9e-06, "Peak learning rate of the critic.", ge=0)
    lr_scheduler: Literal["constant", "linear", "cosine", "cosine_with_min_lr"] = per_role(
        "cosine_with_min_lr", "Learning rate schedule over all optimizer steps, after the warm-up."
    )
    lr_warmup_ratio: float = per_role(
        0.03, "Share of the optimizer steps used for warm-up.", ge=0, le=1
    )
    lr_warmup_steps: int | None = per_role(
        None, "Optimizer steps used for warm-up. None: by --lr_warmup_ratio.", ge=0
    )
    min_lr_ratio: float = per_role(
        0.1, "Final learning rate of cosine_with_min_lr, as a share of the peak.", ge=0, le=1
    )
    l2: float = per_role(0.0, "AdamW's weight decay.", ge=0)
    adam_betas: tuple[float, float] = per_role((0.9, 0.95), "AdamW's betas.", ge=0, lt=1)
    max_norm: float = per_role(1.0, "Gradient norm clipping; 0: off.", ge=0)


class StrategyConfig(Section):
    """Distribution: DeepSpeed ZeRO and the machine."""

    zero_stage: Literal[0, 1, 2, 3] = safe(
        2,
        "ZeRO stage of actor and critic; 3 also shards the frozen models. Changing it on resume needs --reshape_ckpt.",
    )
    critic_zero_stage: Literal[0, 1, 2, 3] | None = safe(
        None, "ZeRO stage of the critic. None: --zero_stage.", needs="critic"
    )
    ref_zero_stage: Literal[0, 3] | None = safe(
        None, "ZeRO stage of reference and EMA. None: 3 at --zero_stage 3, else 0."
    )
    reward_zero_stage: Literal[0, 3] | None = safe(
        None, "ZeRO stage of reward models. None: as the reference."
    )
    adam_offload: bool = safe(
        False, "Keep the actor's optimizer state in CPU memory.", needs="zero_stage=1|2|3"
    )
    critic_adam_offload: bool | None = safe(
        None, "The critic's. None: --adam_offload, at ZeRO 1 to 3.", needs="critic"
    )
    param_offload: bool = safe(
        False, "Keep the actor's parameter shards in CPU memory.", needs="zero_stage=3"
    )
    critic_param_offload: bool | None = safe(
        None, "The critic's. None: --param_offload, at ZeRO 3.", needs="critic"
    )
    ref_offload: bool = safe(
        False,
        "Keep the reference's shards in CPU memory.",
        needs="ref_zero_stage=3 and own_reference",
    )
    reward_offload: bool = safe(
        False, "Keep the reward models' shards in CPU memory.", needs="reward_zero_stage=3"
    )
    zpg: int = safe(
        1, "ZeRO-3 hpZ: ranks per secondary partition; 1: off.", "ranks", ge=1, needs="zero_stage=3"
    )
    grad_accum_dtype: Literal["fp32", "bf16"] | None = option(
        None, "Type in which gradients are accumulated.", needs="bf16", off=("fp32",)
    )
    overlap_comm: bool | None = safe(
        None,
        "Send gradients, and at ZeRO 3 weights, while the GPU computes. None: on at ZeRO 3 on a GPU.",
        needs="zero_stage=2|3",
        off=(False,),
    )
    seed: int = option(42, "Seed of sampling, shuffling and initialisation.", ge=0, lt=2**63)
    full_determinism: bool = option(False, "Use deterministic kernels, which are slower.")
    local_rank: int = safe(-1, "Set by the launcher.")
    dist_timeout: float = safe(
        30.0, "Maximum wait for another rank or for a sign of life.", "minutes", gt=0
    )


saved = partial(option, needs="save_steps>0 or save_epochs or save_seconds")


class CheckpointConfig(Section, resume_safe=True):
    """Checkpoints and the final model."""

    save_path: str = option(
        "./ckpt",
        "Folder or fsspec URL of the run: final model, metrics.jsonl, run_config.yaml, eval/.",
        resume_safe=False,
    )
    ckpt_path: str | None = option(
        None,
        "Folder or URL of the checkpoints: _actor, _critic, global_stepN_hf. None: SAVE_PATH/checkpoints_ppo.",
    )
    save_steps: int = option(-1, "Save a checkpoint every N steps; -1: never.", "PPO steps", ge=-1)
    save_epochs: int | None = option(None, "Save a checkpoint every N episodes.", "episodes", ge=1)
    save_seconds: float | None = option(None, "Save a checkpoint every N seconds.", "seconds", gt=0)
    disable_ds_ckpt: bool = saved(False, "Leave the resumable state out of checkpoints.")
    max_ckpt_num: int = option(
        3, "Maximum number of checkpoints; the oldest is removed first.", ge=1
    )
    max_ckpt_mem: float = option(
        100000000.0,
        "Maximum disk space of all checkpoints; the oldest is removed first.",
        "GB",
        gt=0,
    )
    resume: str = option(
        "auto",
        "auto: continue from the last checkpoint; never; or a checkpoint path.",
        off=("never",),
    )
    load_checkpoint: bool = option(True, "--no_load_checkpoint means --resume never.")
    reshape_ckpt: bool = option(
        False, "Also resume a checkpoint from a different number of processes or ZeRO stage."
    )
    save_value_network: bool = critic(False, "Also save the critic with the final model.")


evaluated = partial(option, needs="eval_data")


class EvaluationConfig(Section, resume_safe=True):
    """Evaluation on --eval_data."""

    eval_steps: int = evaluated(
        -1,
        "Evaluate every N steps; -1: once per episode; 0: before and after training.",
        "PPO steps",
        ge=-1,
        off=(0,),
    )
    eval_epochs: int | None = evaluated(
        None, "Evaluate every N episodes, regardless of --eval_steps.", "episodes", ge=1
    )
    eval_seconds: float | None = evaluated(None, "Evaluate every N seconds.", "seconds", gt=0)
    eval_n_samples: int = evaluated(
        1,
        "Samples per prompt, for mean@n and pass@k.",
        "samples per prompt",
        ge=1,
        also="eval_temperature>0",
    )
    eval_temperature: float | None = evaluated(
        None,
        "Sampling temperature; 0: greedy. None: 0, or 1 if --eval_n_samples is above 1.",
        ge=0,
        off=(0, 1),
    )
    eval_top_p: float = evaluated(1.0, "Nucleus sampling.", gt=0, le=1, also="eval_temperature>0")
    eval_top_k: int = evaluated(
        -1, "Sample only from the k most likely tokens; -1: all.", ge=-1, also="eval_temperature>0"
    )
    eval_correct_threshold: float = evaluated(
        0.5, "Scores of at least this are correct, if the source gives no acc."
    )
    eval_reward_source: tuple[str, ...] = evaluated(
        (),
        "Scorers for evaluation, as --reward_source. None: the training scorer, or --eval_reward_fn.",
    )
    eval_reward_fn: str | None = evaluated(
        None, "Reward function for evaluation, path.py[:name].", takes_object=True
    )
    val_before_train: bool = evaluated(True, "Evaluate before the first step.")
    val_only: bool = safe(False, "Evaluate and stop; needs no prompts, critic or reference.")


class LoggingConfig(Section, resume_safe=True):
    """Logging."""

    logging_steps: int = option(1, "Log every N steps.", "PPO steps", ge=1)
    peak_tflops: float | None = option(
        None, "Peak speed of one device in the training type, for perf/mfu.", "TFLOP/s", gt=0
    )
    debug: bool = option(False, "Show errors with the full traceback instead of one line.")


class OptionSet:
    """The options of a command by section: its annotations name the sections, and plugins add theirs."""

    command: ClassVar[str] = ""
    words: ClassVar[Mapping[str, str]] = {}  # those of PPO's options → its own

    def __init__(self, **sections: Section) -> None:
        kinds = self.sections()
        if unknown := sections.keys() - kinds.keys():
            raise TypeError(
                f"{type(self).__name__} has no section {min(unknown)!r}{nearest(min(unknown), kinds)}"
            )
        vars(self).update({name: sections.get(name) or kind() for name, kind in kinds.items()})

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    __hash__ = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={section!r}' for name, section in vars(self).items())})"

    @classmethod
    def sections(cls) -> dict[str, type[Section]]:
        """The sections by their names."""
        kinds = {name: kind for name, kind in get_type_hints(cls).items() if _is_section(kind)}
        own = {
            name: place.kind
            for name, place in SECTIONS.items()
            if cls.command in place.commands and not place.adds_to and name not in kinds
        }
        return kinds | own

    @classmethod
    def parts(cls) -> list[type[Section]]:
        """The sections, and what plugins add to each: who knows what of the options."""
        return [
            part
            for name, kind in cls.sections().items()
            for part in (kind, *_additions(name, kind))
        ]

    @classmethod
    def all_options(cls) -> Iterator[Option]:
        """Every option, in the order of the sections."""
        for section in cls.sections().values():
            yield from section.options().values()

    @classmethod
    def from_flat(cls, values: Mapping[str, Any] | None = None, **more: Any) -> Self:
        """Build from flag names and values; errors as :meth:`with_options`."""
        return cls().with_options(**{**(values or {}), **more})

    def with_options(self, **values: Any) -> Self:
        """A copy with some options replaced; lists become tuples, paths text.

        Raises:
            ConfigError: on an unknown name, a value of the wrong type or out of range; one line for each.
        """
        known = {one.name: one for one in self.all_options()}
        problems: list[str] = []
        changed: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            if name not in known:
                flags = [f"--{one}" for one in known]
                meant_by = told_of(f"--{name}", flags) or nearest(f"--{name}", flags)
                problems.append(f"unknown option {name!r}{_without_dashes(meant_by)}")
                continue
            try:
                changed.setdefault(known[name].owner, {})[name] = conform(known[name], value)
            except ValueError as error:
                problems.append(str(error))
        if problems:
            raise ConfigError("\n".join(problems))
        sections = {owner: getattr(self, owner) for owner in changed}
        replaced = {
            owner: type(section)(**vars(section) | changed[owner])
            for owner, section in sections.items()
        }
        return type(self)(**vars(self) | replaced)

    def flat(self) -> dict[str, Any]:
        """All options by flag name."""
        return {one.name: getattr(getattr(self, one.owner), one.name) for one in self.all_options()}

    def missing(self) -> Iterator[str]:
        """One message per required option without a value."""
        for section in vars(self).values():
            yield from section.missing()


class Options(OptionSet):
    """The options of a PPO run by section: ``options.algorithm.gamma``; ``options.flat()["gamma"]``."""

    command = "ppo"

    file: FileConfig
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig
    engine: EngineConfig
    sampling: SamplingConfig
    reward: RewardConfig
    verifier: VerifierConfig
    algorithm: AlgorithmConfig
    loss: LossConfig
    training: TrainingConfig
    strategy: StrategyConfig
    checkpoint: CheckpointConfig
    evaluation: EvaluationConfig
    logging: LoggingConfig


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def _additions(name: str, kind: type[Section]) -> list[type[Section]]:
    return [
        addition
        for addition in additions_to(name)
        if addition.options().keys() <= kind.options().keys()
    ]


def sections() -> dict[str, type[Section]]:
    """The sections of :class:`Options` by their names."""
    return Options.sections()


def all_options() -> Iterator[Option]:
    """Every option of :class:`Options`, in the order of the sections."""
    return Options.all_options()


def _without_dashes(text: str) -> str:
    """Quoted flags as keys of a file."""
    return text.replace("'--", "'")


def hint(name: str, value: Any = None) -> str:
    """What plugins say of a name that is no option, or of a value that an option does not take: ends a message."""
    texts = (entry.fn(name) if value is None else entry.fn(name, value) for entry in HINTS.values())
    return next(filter(None, texts), "")


def told_of(flag: str, flags: Container[str]) -> str:
    """What the tables say of an unknown flag: other trainers' names, and what people mean; as the end of a message."""
    told = hint(flag.removeprefix("--"))
    named = re.findall(r"--(?:no_)?(\w+)", told)
    return (
        told if told and all(f"--{name}" in flags for name in named) else meant(flag, flags, "flag")
    )


def conform(one: Option, value: Any) -> Any:
    """The value in the option's type; a ConfigError names the flag, and our name for another trainer's value."""
    try:
        return one.conform(value)
    except ValueError as error:
        told = hint(one.name, value)
        if told:
            raise ConfigError(f"--{one.name} {value}{told}") from None
        other = (
            None
            if one.names is None or meant(str(value), one.names, one.name)
            else _option_that_takes(value)
        )
        raise ConfigError(
            f"--{one.name} {value}: it is a value of --{other}" if other else str(error)
        ) from None


def _option_that_takes(name: Any) -> str | None:
    """The option whose table of algorithms has this name."""
    tables = ((other, other.names) for other in all_options() if other.names is not None)
    return next(
        (other.name for other, names in tables if str(name) in names and name != other.default),
        None,
    )


def unsafe_changes(
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    idle: Container[str] = (),
    options: Iterable[Option] | None = None,
) -> tuple[dict[str, tuple], dict[str, tuple]]:
    """Compare a resumed run's options with those it was started with; an evaluation's only in what makes the weights.

    Args:
        idle: options that do nothing in this run.
        options: those of the command; ``None``: of PPO.

    Returns:
        (refused, safe): for each option that changed, (old, new).
    """
    refused, safe, evaluates = {}, {}, now.get("val_only", False)
    read_by = {name: kind.of for name, kind in sections().items()}
    for one in all_options() if options is None else options:
        unread = evaluates and (
            read_by.get(one.owner) == "training" or (one.required and now[one.name] is None)
        )
        if one.name not in saved or saved[one.name] == now[one.name] or unread or one.name in idle:
            continue
        other_part = read_by.get(one.owner) != "weights" or one.name.startswith(
            ("critic_", "ref_", "reward_")
        )
        (safe if one.resume_safe or (evaluates and other_part) else refused)[one.name] = (
            saved[one.name],
            now[one.name],
        )
    return refused, safe
