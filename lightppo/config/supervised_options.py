"""The options of training on data: ``lightppo sft``, ``rm``, ``dpo``. Most are those of PPO, in other words."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, Self

from lightppo.algorithms.entries import PREFERENCE_LOSSES
from lightppo.config import options as ppo
from lightppo.config.contradictions import first_of_each, templates, undividable, unmet_needs
from lightppo.config.evaluation_options import EvaluationTimes
from lightppo.config.options import OptionSet
from lightppo.config.rules import attention_implementation
from lightppo.errors import ConfigError
from lightppo.files import join
from lightppo.option import Option, Section, option

WORDS = {
    "critic_zero_stage!=0": "",
    "critic_zero_stage!=3": "",
    "ref_zero_stage!=3": "",
    "eval_data": "eval_dataset",
    "PPO steps": "optimizer steps",
    "episode": "epoch",
    "actor and critic": "the model",
    "the actor": "the model",
    "the config of all but reward models": "the model's config",
    "layers of actor, critic and reference": "layers",
    "; 3 also shards the frozen models": "",
    ", eval/": "",
}


def reworded(declaration: Option, words: Mapping[str, str]) -> Option:
    """Return the declaration with other words in help, unit and needs; a need of no words is none."""

    def in_other_words(text: str) -> str:
        for old, new in words.items():
            text = text.replace(old, new)
        return text

    needs = tuple(filter(None, map(in_other_words, declaration.needs)))
    return replace(
        declaration,
        help=in_other_words(declaration.help),
        unit=declaration.unit and in_other_words(declaration.unit),
        needs=needs,
    )


class Taken:
    """Makes a section of another one's options: those that are named, in other words; ``NAME=VALUE``: other defaults."""

    def __init_subclass__(
        cls, only: str = "", words: Mapping[str, str] = {}, **defaults: Any
    ) -> None:
        options = cls.options()
        declared = {name: reworded(options[name], words) for name in only.split() or options}
        declared |= {name: replace(declared[name], default=defaults[name]) for name in defaults}
        super().__init_subclass__(declared=declared)
        cls._is_open = False


class SupervisedModelConfig(
    Taken,
    ppo.ModelConfig,
    only="init_from_scratch override_config external_lib trust_remote_code tokenizer_path disable_fast_tokenizer bf16 "
    "fp16 attn_implementation flash_attn gradient_checkpointing gradient_checkpointing_use_reentrant "
    "activation_offload torch_compile use_liger_kernel",
    words=WORDS,
):
    """Model: where it comes from and how it is loaded."""

    pretrain: str | None = option(
        None, "Initial model: folder, hub id or fsspec URL.", required=True
    )


class SupervisedAdapterConfig(
    Taken,
    ppo.AdapterConfig,
    only="lora_rank lora_alpha lora_dropout load_in_4bit target_modules",
    words=WORDS,
):
    """LoRA: small trained matrices next to frozen weights (arXiv:2106.09685); docs/lora.md."""


class SupervisedDataConfig(
    Taken,
    ppo.DataConfig,
    only="input_key input_template apply_chat_template system_prompt chat_template_kwargs on_bad_row data_num_workers",
):
    """Data: training and held-out rows; docs/supervised.md."""

    dataset: str | None = option(None, "Training rows: file, folder, hub name or URL; separate several with commas.",
                                 required=True)  # fmt: skip
    dataset_split: str = option("train", "Split of --dataset.")
    eval_dataset: str | None = option(None, "Held-out rows. None: no evaluation.", resume_safe=True)
    eval_split: str = option(
        "test", "Split of --eval_dataset. Files without splits have only one.", resume_safe=True
    )
    max_len: int = option(2048, "Maximum length of prompt and answer.", unit="tokens", ge=2)
    truncation: Literal["error", "right", "drop"] = option(
        "error", "If a row is longer: stop, cut the answer, or drop the row. Counted."
    )
    max_samples: int = option(
        1_000_000, "Maximum number of rows taken from --dataset.", unit="rows", ge=1
    )
    eval_max_samples: int = option(
        1_000_000,
        "Maximum number of rows taken from --eval_dataset.",
        "rows",
        ge=1,
        resume_safe=True,
    )


class SFTDataConfig(SupervisedDataConfig):
    """Data: demonstrations, and held-out ones; docs/supervised.md."""

    output_key: str | None = option(None, "Column with the completion. None: try the usual names.")
    multiturn: bool = option(
        False, "Learn every turn of the assistant in a chat. Off: the last turn alone."
    )


class PairDataConfig(SupervisedDataConfig):
    """Data: prompts with a chosen and a rejected answer, and held-out ones; docs/supervised.md."""

    chosen_key: str = option("chosen", "Column with the better answer: text, or chat messages.")
    rejected_key: str = option("rejected", "Column with the worse answer.")


class RewardDataConfig(PairDataConfig):
    """Data: prompts with a chosen and a rejected answer, and held-out ones; docs/supervised.md."""

    margin_key: str | None = option(
        None,
        "Column with the margin (≥ 0) by which the chosen answer should lead. None: no margin.",
    )


class RewardModelConfig(SupervisedModelConfig):
    """Model: where it comes from and how it is loaded."""

    value_head_prefix: str = option(
        "score", "Name of the value head in --pretrain, if it is a reward model."
    )


class DPOModelConfig(SupervisedModelConfig):
    """Model: where it comes from and how it is loaded."""

    ref_pretrain: str | None = option(
        None, "Reference model; its log probs are computed once before training. None: --pretrain."
    )


class SupervisedTrainingConfig(
    Taken,
    ppo.TrainingConfig,
    only="dry_run callback benchmark_steps packing_samples lr_scheduler lr_warmup_ratio lr_warmup_steps "
    "min_lr_ratio l2 adam_betas max_norm max_skipped_steps",
    words=WORDS,
    lr_scheduler="cosine",
):
    """Training: batches, epochs, optimizer."""

    train_batch_size: int = option(
        128, "Rows per optimizer step.", unit="rows over all ranks", ge=1
    )
    micro_train_batch_size: int = option(
        8,
        "Rows per forward and backward pass.",
        unit="rows per rank",
        ge=1,
        resume_safe=True,
    )
    num_epochs: int | None = option(
        None,
        "Passes over the data. None: 1, or as many as --max_steps needs.",
        ge=1,
        resume_safe=True,
    )
    max_steps: int | None = option(
        None,
        "Number of steps, instead of --num_epochs.",
        unit="optimizer steps",
        ge=1,
        resume_safe=True,
    )
    learning_rate: float = option(5e-6, "Peak learning rate of AdamW.", gt=0)


class SupervisedStrategyConfig(
    Taken,
    ppo.StrategyConfig,
    only="zero_stage adam_offload param_offload zpg sequence_parallel_size grad_accum_dtype overlap_comm seed "
    "full_determinism local_rank dist_timeout",
    words=WORDS,
):
    """Distribution: DeepSpeed ZeRO and the machine."""


class SupervisedCheckpointConfig(
    Taken,
    ppo.CheckpointConfig,
    only="save_path save_steps save_epochs save_seconds hf_save_steps save_hf_ckpt "
    "disable_ds_ckpt max_ckpt_num max_ckpt_mem resume resume_changes reshape_ckpt push_to_hub hub_private signal_grace",
    words=WORDS,
    save_path="./ckpt/sft",
):
    """Checkpoints and the final model."""

    ckpt_path: str | None = option(
        None,
        "Folder or URL of the checkpoints: _actor (the model), global_stepN_hf. None: SAVE_PATH/checkpoints.",
        resume_safe=True,
    )


class RewardCheckpointConfig(SupervisedCheckpointConfig, save_path="./ckpt/rm"):
    """Checkpoints and the final model."""


class SupervisedEvaluationConfig(
    Taken,
    EvaluationTimes,
    only="eval_steps val_before_train",
    words=WORDS,
):
    """Evaluation on --eval_dataset."""

    best_metric: str | None = option(
        None,
        "Keep the model with the best value of this metric in --ckpt_path/best_hf: the lowest for eval/loss, the "
        "highest for others.",
        needs="eval_dataset",
        resume_safe=True,
    )


class SupervisedLoggingConfig(
    Taken,
    ppo.LoggingConfig,
    only="logging_steps peak_tflops debug profile_steps use_tensorboard use_wandb wandb_org wandb_group wandb_project "
    "wandb_run_name use_trackio use_mlflow metric_names",
    words=WORDS,
):
    """Logging."""

    log_file: str | None = option(
        None, "JSONL file of the metrics. None: SAVE_PATH/metrics.jsonl.", resume_safe=True
    )


class SupervisedConfig(OptionSet):
    """What the commands have in common: a subclass has the data, and sections of its own."""

    words = WORDS

    file: ppo.FileConfig
    model: SupervisedModelConfig
    adapter: SupervisedAdapterConfig
    data: SupervisedDataConfig
    training: SupervisedTrainingConfig
    strategy: SupervisedStrategyConfig
    checkpoint: SupervisedCheckpointConfig
    evaluation: SupervisedEvaluationConfig
    logging: SupervisedLoggingConfig

    # What --help shows: title → names.
    screen: ClassVar[dict[str, str]] = {
        "Run": "config save_path save_steps eval_steps use_wandb",
        "Model": "pretrain bf16 lora_rank gradient_checkpointing zero_stage",
        "Data": "dataset eval_dataset input_key apply_chat_template max_len truncation",
        "Training": "train_batch_size micro_train_batch_size num_epochs learning_rate lr_scheduler packing_samples",
    }

    def validate(self, world_size: int = 1) -> None:
        """Check values, then combinations; ConfigError with a line for each option that has a problem."""
        self.with_options(**self.flat())
        if problems := first_of_each(self.problems(world_size)):
            raise ConfigError("\n".join(problems))

    def problems(self, ranks: int) -> Iterator[str]:
        """Return what cannot work, for so many ranks; a subclass may add to it."""
        options = SimpleNamespace(**self.known() | {"config": self, "by_hand": False})
        yield from self.missing()
        yield from unmet_needs(options)
        yield from templates(options)
        for section in self.parts():
            yield from section.problems(options)
        if options.num_epochs is not None and options.max_steps is not None:
            yield "--num_epochs and --max_steps are both given: leave one out"
        yield from undividable(options, ranks)
        groups = max(1, ranks // options.sequence_parallel_size)
        if options.train_batch_size % (options.micro_train_batch_size * groups):
            yield (
                f"--train_batch_size {options.train_batch_size} must be a multiple of --micro_train_batch_size "
                f"{options.micro_train_batch_size} × {groups} {'ranks' if groups == ranks else 'groups of ranks'}: set "
                "one to fit the other"
            )
        if ranks % options.zpg:
            yield f"--zpg {options.zpg} does not divide the {ranks} ranks"

    def known(self) -> dict[str, Any]:
        """Return values by flag name, with what None stands for."""
        values = self.flat()
        meaning_of_none = {"ckpt_path": str(join(self.checkpoint.save_path, "checkpoints"))}
        for section in self.parts():
            meaning_of_none |= section.meant(self)
        values |= {name: value for name, value in meaning_of_none.items() if values[name] is None}
        return values | {"attn_implementation": attention_implementation(self)}

    def resolved(self) -> Self:
        """Return a copy with every "None means …" replaced by what it means. ConfigError for a value out of range."""
        return self.with_options(**self.with_options(**self.flat()).known())


class SFTConfig(SupervisedConfig):
    """Train a causal language model on demonstrations."""

    command = "sft"

    data: SFTDataConfig


class RMConfig(SupervisedConfig):
    """Train a reward model on pairs of a chosen and a rejected answer."""

    command = "rm"

    model: RewardModelConfig
    data: RewardDataConfig
    checkpoint: RewardCheckpointConfig


class PreferenceConfig(Section, own=PREFERENCE_LOSSES):
    """Loss on pairs, without a reward model; docs/supervised.md."""

    preference_loss: str = option("dpo", "Loss of a pair.", names=PREFERENCE_LOSSES)
    beta: float = option(
        0.1, "β of the loss: how strongly the model is held to the reference.", gt=0
    )
    average_log_probs: bool | None = option(
        None,
        "Use the mean of an answer's token log probs instead of the sum. None: as the loss defines it; ipo: true.",
    )


class DPOTrainingConfig(SupervisedTrainingConfig, learning_rate=1e-6):
    """Training: batches, epochs, optimizer."""


class DPOCheckpointConfig(SupervisedCheckpointConfig, save_path="./ckpt/dpo"):
    """Checkpoints and the final model."""


class DPOConfig(SupervisedConfig):
    """Train a causal language model on pairs of answers, without a reward model: DPO, cDPO, IPO."""

    command = "dpo"

    model: DPOModelConfig
    data: PairDataConfig
    preference: PreferenceConfig
    training: DPOTrainingConfig
    checkpoint: DPOCheckpointConfig

    screen: ClassVar[dict[str, str]] = SupervisedConfig.screen | {
        "Loss": "preference_loss beta label_smoothing"
    }

    def known(self) -> dict[str, Any]:
        values = super().known()
        entry = PREFERENCE_LOSSES.find(values["preference_loss"])
        averages = values["average_log_probs"]
        loss_options = entry.completed(
            {name: values[name] for name in entry.defaults}, values["preference_loss"]
        )
        return (
            values
            | loss_options
            | {"average_log_probs": entry.of_means if averages is None else averages}
        )


COMMANDS: dict[str, type[SupervisedConfig]] = {"sft": SFTConfig, "rm": RMConfig, "dpo": DPOConfig}
"""Name of the command → its options."""
