"""All options, each declared once, by section; and :class:`Options`, their values in a run. Docs: docs/flags.md.

The name of an option is unique over all sections: it is the flag, and the key in YAML and in ``PPOConfig.from_flat``.
"""

import types
from collections.abc import Iterator, Mapping
from functools import cache, partial
from typing import Any, ClassVar, Literal, Self, get_type_hints

from lightppo.algorithms.entries import (
    ADVANTAGE_ESTIMATORS,
    KL_ESTIMATORS,
    LOSS_AGG_MODES,
    POLICY_LOSSES,
)
from lightppo.errors import ConfigError
from lightppo.option import SECTIONS, Option, Section, SectionPlace, additions_to, option
from lightppo.plugin import ENGINES
from lightppo.redaction import shown_value
from lightppo.suggestions import nearest

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

    exclusive = (
        ("flash_attn", "attn_implementation", "contradict each other"),
        ("bf16", "fp16", "contradict each other"),
        (
            "gradient_checkpointing_use_reentrant",
            "aux_loss_coef torch_compile",
            "do not work together",
        ),
    )


class DataConfig(Section):
    """Data: prompts."""

    prompt_data: str | None = option(
        None, "Prompts: file, folder, hub name or URL; separate several with commas.", required=True
    )
    prompt_split: str = option("train", "Split of --prompt_data.")
    input_key: str = option("input", "Column with the prompt: text, or a list of chat messages.")
    label_key: str | None = option(
        None, "Column with the ground truth. None: detected from the row."
    )
    input_template: str | None = option(None, "Text around the prompt; {} stands for the prompt.")
    apply_chat_template: bool = option(False, "Render prompts with the tokenizer's chat template.")
    system_prompt: str | None = option(None, "System message added to chats that have none.")
    chat_template_kwargs: str | None = option(
        None,
        "Variables of the chat template as a JSON object, such as '{\"enable_thinking\": false}'.",
    )
    data_source_key: str = option(
        "data_source", "Column that names a row's data source, for evaluation and rewards."
    )
    data_shuffle: bool = option(
        True, "Shuffle the prompts anew in each episode. Off: in the data's order."
    )
    max_samples: int = option(
        1000000, "Maximum number of rows taken from --prompt_data.", "prompts", ge=1
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

    exclusive = (("input_template", "apply_chat_template", "both render the prompt"),)


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
    normalize_reward: bool = option(
        False,
        "Normalise reward model scores by mean and std from the model's config.",
        needs="reward_pretrain",
    )
    mask_too_long: bool = option(
        False, "Exclude truncated responses from training and advantage statistics."
    )
    reward_clip_range: tuple[float, float] | None = shaping(
        (-10.0, 10.0), "Clip shaped scores to this range. None: off."
    )


class VerifierConfig(Section):
    """Verifiers: built-in reward sources, reward functions, failures."""  # plugins bring the options


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
    freezing_actor_steps: int = critic(
        -1,
        "Train only the critic up to and including this step; -1: never. The actor's schedule begins behind it.",
        "PPO steps",
        ge=-1,
        off=(0,),
    )

    exclusive = (("use_kl_loss", "use_kl_in_reward", "would count the KL twice"),)


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
    max_tokens_per_micro_batch: int | None = safe(
        None,
        "Maximum tokens per training or scoring pass, instead of a number of samples; padding counts.",
        "tokens per rank",
        ge=1,
    )
    max_epochs: int = per_role(1, "Passes over each rollout.", "epochs", ge=1)
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
        0.03,
        "Share of the optimizer steps used for warm-up, rounded up. Step k of W has k/(W+1) of the peak.",
        ge=0,
        le=1,
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

    exclusive = (("resume", "no_load_checkpoint", "contradict each other"),)


class LoggingConfig(Section, resume_safe=True):
    """Logging."""

    logging_steps: int = option(1, "Log every N steps.", "PPO steps", ge=1)
    debug: bool = option(False, "Show errors with the full traceback instead of one line.")


class OptionSet(types.SimpleNamespace):
    """The options of a command by section: its annotations name the sections, and plugins add theirs."""

    command: ClassVar[str] = ""
    words: ClassVar[Mapping[str, str]] = {}  # those of PPO's options → its own

    def __init__(self, **sections: Section) -> None:
        kinds = self.sections()
        if unknown := sections.keys() - kinds.keys():
            raise TypeError(
                f"{type(self).__name__} has no section {min(unknown)!r}{nearest(min(unknown), kinds)}"
            )
        super().__init__(**{name: sections.get(name) or kind() for name, kind in kinds.items()})

    @classmethod
    def sections(cls) -> dict[str, type[Section]]:
        """The sections by their names."""
        return dict(_sections_of(cls, tuple(SECTIONS.items())))

    @classmethod
    def of_trainer(cls) -> set[str]:
        """The sections that matter to a trainer whose models and data a script has made."""
        return {name for name, kind in cls.sections().items() if kind.of in ("trainer", "training")}

    @classmethod
    def parts(cls) -> list[type[Section]]:
        """The sections, and what plugins add to each: who knows what of the options."""
        return list(_parts_of(cls, tuple(SECTIONS.items())))

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
                meant = nearest(f"--{name}", [f"--{one}" for one in known], "key")
                quoted = meant.replace("'--", "'")
                problems.append(f"unknown option {name!r}{quoted}")
                continue
            try:
                changed.setdefault(known[name].owner, {})[name] = known[name].conform(value)
            except ValueError as error:
                problems.append(str(error))
        if problems:
            raise ConfigError("\n".join(problems))
        replaced = {
            owner: type(section)(**vars(section) | changed[owner])
            for owner, section in vars(self).items()
            if owner in changed
        }
        return type(self)(**vars(self) | replaced)

    def flat(self) -> dict[str, Any]:
        """All options by flag name."""
        values: dict[str, Any] = {}
        for owner, kind in self.sections().items():
            section = getattr(self, owner)
            values |= {name: getattr(section, name) for name in kind.options()}
        return values

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
    logging: LoggingConfig


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


@cache
def _sections_of(
    options: type[OptionSet], places: tuple[tuple[str, SectionPlace], ...]
) -> dict[str, type[Section]]:
    kinds = {name: kind for name, kind in get_type_hints(options).items() if _is_section(kind)}
    own = {
        name: place.kind
        for name, place in places
        if options.command in place.commands and not place.adds_to and name not in kinds
    }
    return kinds | own


@cache
def _parts_of(
    options: type[OptionSet], places: tuple[tuple[str, SectionPlace], ...]
) -> list[type[Section]]:
    return [
        part
        for name, kind in _sections_of(options, places).items()
        for part in (kind, *_additions(name, kind))
    ]


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


def public_options(config: OptionSet) -> dict[str, Any]:
    """Return all options by flag name, for logs, files, trackers and checkpoints: of URLs neither login nor query."""
    return {name: shown_value(value) for name, value in config.flat().items()}
