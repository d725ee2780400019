"""Options of training: batches, epochs, optimizers, DeepSpeed ZeRO and the machine."""

from functools import partial
from typing import Literal

from lightppo.option import Section, option

safe = partial(option, resume_safe=True)
critic = partial(option, needs="critic")
FROZEN_MODELS = "own_reference or reward_pretrain or teacher_pretrain or enable_ema"


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
    micro_train_batch_size: int | None = safe(
        None,
        "Samples per forward and backward pass. None: 4, or as --max_tokens_per_micro_batch says.",
        "samples per rank",
        ge=1,
    )
    max_tokens_per_micro_batch: int | None = safe(
        None,
        "Maximum tokens per training or scoring pass, instead of a number of samples; padding counts. None: on a GPU, "
        "if no size of micro batches is given and no --pretrain_data, as many as its memory holds.",
        "tokens per rank",
        ge=1,
    )
    max_epochs: int = option(1, "Passes over each rollout.", "epochs", ge=1)
    shuffle: Literal["samples", "groups"] = option(
        "samples",
        "What the steps of an epoch draw: samples, or all samples of a prompt.",
        needs="n_samples_per_prompt>1",
    )
    buffer_cpu_offload: bool = safe(True, "Keep the replay buffer in CPU memory.")
    actor_learning_rate: float = option(1e-06, "Peak learning rate of the actor.", ge=0)
    critic_learning_rate: float = critic(9e-06, "Peak learning rate of the critic.", ge=0)
    lr_scheduler: Literal["constant", "linear", "cosine", "cosine_with_min_lr"] = option(
        "cosine_with_min_lr", "Learning rate schedule over all optimizer steps, after the warm-up."
    )
    lr_warmup_ratio: float = option(
        0.03,
        "Share of the optimizer steps used for warm-up, rounded up. Step k of W has k/(W+1) of the peak.",
        ge=0,
        le=1,
    )
    lr_warmup_steps: int | None = option(
        None, "Optimizer steps used for warm-up. None: by --lr_warmup_ratio.", ge=0
    )
    min_lr_ratio: float = option(
        0.1, "Final learning rate of cosine_with_min_lr, as a share of the peak.", ge=0, le=1
    )
    l2: float = option(0.0, "AdamW's weight decay.", ge=0)
    adam_betas: tuple[float, float] = option((0.9, 0.95), "AdamW's betas.", ge=0, lt=1)
    max_norm: float = option(1.0, "Gradient norm clipping; 0: off.", ge=0)
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
    balance_ranks: bool = option(
        True,
        "Swap groups of samples between ranks so that all train on about as many tokens.",
        resume_safe=True,
    )
    micro_batch_specs: tuple[str, ...] = safe(
        (),
        "Sizes of single calls, CALL=SAMPLES or CALL=TOKENSt such as reference=64 actor_train=4096t. Calls: "
        "actor, reference, critic, reward (scoring), actor_train, critic_train.",
    )
    max_skipped_steps: int = safe(
        3,
        "End the run and keep the batch after N steps in a row without a finite gradient; 0: never.",
        "PPO steps",
        ge=0,
    )
    buffer_limit: int = safe(
        0,
        "Maximum samples in the buffer, oldest removed first; 0: no limit.",
        "samples per rank",
        ge=0,
    )

    exclusive = (("lr_warmup_ratio", "lr_warmup_steps", "both say how long the warm-up is"),)


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
        None,
        "ZeRO stage of the frozen models, the reference and all others. None: 3 at --zero_stage 3, else 0.",
    )
    adam_offload: bool = safe(
        False, "Keep the optimizer states in CPU memory.", needs="zero_stage=1|2|3"
    )
    param_offload: bool = safe(
        False, "Keep the parameter shards in CPU memory.", needs="zero_stage=3"
    )
    ref_offload: bool = safe(
        False,
        "Keep the shards of the frozen models in CPU memory.",
        needs=f"ref_zero_stage=3 and {FROZEN_MODELS}",
    )
    zpg: int = safe(
        1, "ZeRO-3 hpZ: ranks per secondary partition; 1: off.", "ranks", ge=1, needs="zero_stage=3"
    )
    sequence_parallel_size: int = safe(
        1,
        "Neighbouring ranks that hold each row together, a piece of its tokens each, for answers that one GPU cannot hold.",
        "ranks",
        ge=1,
        needs="packing_samples!=False",
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
