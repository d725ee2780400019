"""``lightppo sft``: train a causal language model on demonstrations."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from typing import Any, Literal

from lightppo.config.cli import parse_section
from lightppo.errors import StagingError
from lightppo.option import Section, option
from lightppo.storage import check_scheme, is_url


class SFTConfig(Section):
    """Train a causal language model on demonstrations."""

    pretrain: str | None = option(None, "Model to start from: folder or hub id.", required=True)
    dataset: str | None = option(None, "Demonstrations: file, folder or hub name; several with commas.", required=True)
    dataset_split: str = option("train", "Split of the dataset.")
    input_key: str = option("input", "Column of the prompt.")
    output_key: str | None = option(None, "Column of the completion. None: tries the usual names.")
    input_template: str | None = option(None, "Text with one {} where the prompt goes.")
    apply_chat_template: bool = option(False, "Render prompts with the tokenizer's chat template.")
    max_len: int = option(2048, "Longest prompt with completion; a longer row is an error.", unit="tokens", ge=2)
    max_samples: int = option(1_000_000, "The first so many rows are used.", unit="rows", ge=1)

    train_batch_size: int = option(128, "Rows per optimizer step.", unit="rows over all ranks", ge=1)
    micro_train_batch_size: int = option(8, "Rows per forward and backward.", unit="rows per rank", ge=1)
    num_epochs: int | None = option(None, "Passes over the data. None: 1, or as many as --max_steps takes.", ge=1)
    max_steps: int | None = option(None, "In place of --num_epochs.", unit="optimizer steps", ge=1)
    learning_rate: float = option(5e-6, "Peak learning rate of AdamW.", gt=0)
    lr_scheduler: Literal["constant", "linear", "cosine"] = option("cosine", "After the warm-up; the others end at 0.")
    lr_warmup_ratio: float = option(0.03, "Share of the optimizer steps with rising rate.", ge=0, le=1)
    adam_betas: tuple[float, float] = option((0.9, 0.95), "AdamW's betas.", ge=0, lt=1)
    l2: float = option(0.0, "AdamW's weight decay.", ge=0)
    max_norm: float = option(1.0, "Gradient norm clipping; 0: off.", ge=0)

    lora_rank: int = option(0, "Rank of LoRA adapters, which alone are trained; 0: all weights are.", ge=0)
    lora_alpha: float | None = option(None, "Adapters are scaled by this / --lora_rank. None: 16.", gt=0)
    lora_dropout: float | None = option(None, "Dropout before the adapters. None: 0.", ge=0, lt=1)
    target_modules: tuple[str, ...] = option(
        (), "Linear layers with an adapter, by the end of their names. None given: all but the head."
    )
    load_in_4bit: bool = option(False, "QLoRA: hold the frozen weights in 4 bits; needs --lora_rank and bitsandbytes.")

    zero_stage: Literal[0, 1, 2, 3] = option(2, "DeepSpeed ZeRO stage.")
    bf16: bool = option(False, "bfloat16 weights with float32 masters; else float32.")
    gradient_checkpointing: bool = option(False, "Recompute activations in the backward pass: less memory.")
    attn_implementation: Literal["auto", "eager", "sdpa", "flash_attention_2"] = option("auto", "Attention.")
    seed: int = option(42, "Of the data order.")
    local_rank: int = option(-1, "Set by the launcher.")

    save_path: str = option(
        "./ckpt/sft",
        "Folder or URL of the trained model, in Hugging Face format; with --lora_rank merged, and the adapter inside.",
    )
    log_file: str | None = option(None, "JSONL file of the metrics. None: SAVE_PATH/metrics.jsonl.")
    logging_steps: int = option(1, "A row of metrics every so many.", unit="optimizer steps", ge=1)
    dry_run: bool = option(False, "All checks and one small step with the real model; nothing is kept.")
    debug: bool = option(False, "Errors with their whole traceback, not in one line.")


def problems(config: SFTConfig, world_size: int) -> list[str]:
    """What is wrong with the options, one message each."""
    found = []
    if config.num_epochs is not None and config.max_steps is not None:
        found.append("--num_epochs and --max_steps are both given: leave one out")
    for flag in ("lora_alpha", "lora_dropout", "target_modules"):
        if config.lora_rank == 0 and getattr(config, flag) not in (None, ()):
            found.append(f"--{flag} has no effect without adapters: set --lora_rank, or leave it out")
    if config.load_in_4bit and config.lora_rank == 0:
        found.append("--load_in_4bit holds weights that do not train in 4 bits: set --lora_rank, or leave it out")
    try:
        if is_url(config.save_path):
            check_scheme(config.save_path, "--save_path")
    except StagingError as error:
        found.append(str(error))
    per_forward = config.micro_train_batch_size * world_size
    if config.train_batch_size % per_forward:
        found.append(
            f"--train_batch_size {config.train_batch_size} must be a multiple of --micro_train_batch_size "
            f"{config.micro_train_batch_size} × {world_size} ranks: set one to fit the other"
        )
    return found


def parse_args(argv: Sequence[str] | None = None, prog: str = "lightppo sft") -> SFTConfig:
    """The options, checked before anything loads; exit code 2 with one line per problem."""
    return parse_section(SFTConfig, problems, argv, prog)


def train(config: SFTConfig) -> None:
    """Strategy → model → tokenizer → data → fit → save."""
    from lightppo import SFTTrainer, get_strategy, get_tokenizer
    from lightppo.storage import local_folder, stage_to_local
    from lightppo.trainer.run_folder import claim, upload_records
    from lightppo.trainer.supervised import total_steps

    strategy = get_strategy(config)
    strategy.setup_distributed()
    claim({"--save_path": config.save_path}, strategy)

    pretrain = stage_to_local(config.pretrain)
    model = build_model(config, pretrain, strategy)
    tokenizer = get_tokenizer(pretrain, model)
    loader = build_loader(config, tokenizer, strategy)
    steps = total_steps(strategy, loader, config.num_epochs or 1, config.max_steps)
    model, optimizer, scheduler = strategy.prepare((model, *build_optimizer(config, model, steps, strategy)))

    trainer = SFTTrainer(
        *(strategy, model, optimizer, scheduler, loader),
        max_steps=steps,
        log_path=config.log_file or local_folder(config.save_path) / "metrics.jsonl",
        logging_steps=config.logging_steps,
    )
    status = trainer.fit()
    if config.dry_run:
        rows = f"{config.train_batch_size} rows, loss {status['train/loss']:.4f}"
        strategy.report_memory(f"dry run: one step of {rows}; nothing is kept; memory of rank 0")
        return
    strategy.save_model(model, tokenizer, config.save_path)
    strategy.on_rank_0(lambda: upload_records(config.save_path), f"write {config.save_path}")
    strategy.print(f"{steps} steps, loss {status['train/loss']:.4f}; saved to {config.save_path}")
    strategy.print(f"next: lightppo ppo --pretrain {config.save_path} --prompt_data FILE --reward_fn FILE.py")


def build_model(config: SFTConfig, pretrain: str, strategy: Any) -> Any:
    """The model, with adapters if they are asked for."""
    from lightppo import Actor
    from lightppo.models.lora import LoraOptions, add_adapters

    model = Actor(
        pretrain,
        bf16=config.bf16,
        attn_implementation=config.attn_implementation,
        ds_config=strategy.get_ds_train_config(is_actor=True),
        load_in_4bit=config.load_in_4bit,
    )
    if config.lora_rank > 0:
        alpha, dropout = config.lora_alpha or 16.0, config.lora_dropout or 0.0
        add_adapters(model, LoraOptions(config.lora_rank, alpha, dropout, config.target_modules), config.seed)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return model


def build_loader(config: SFTConfig, tokenizer: Any, strategy: Any) -> Any:
    """Micro batches of the demonstrations."""
    from lightppo import SFTDataset, blending_datasets

    split = {"train_split": config.dataset_split, "flag": "--dataset"}
    rows = blending_datasets(config.dataset, None, strategy, config.seed, **split)
    rows = rows.select(range(min(len(rows), config.max_samples)))
    names = ("input_key", "output_key", "input_template", "apply_chat_template")
    form = {name: getattr(config, name) for name in names}
    dataset = SFTDataset(rows, tokenizer, config.max_len, **form)
    strategy.print(f"--dataset {config.dataset}: {dataset.report}")
    size = config.micro_train_batch_size
    return strategy.setup_dataloader(dataset, size, pin_memory=True, collate_fn=dataset.collate_fn)


def build_optimizer(config: SFTConfig, model: Any, steps: int, strategy: Any) -> tuple[Any, Any]:
    """AdamW and its schedule over so many steps."""
    from transformers import get_scheduler

    adam = {"lr": config.learning_rate, "betas": config.adam_betas, "weight_decay": config.l2}
    optimizer = strategy.create_optimizer(model, **adam)
    name = "constant_with_warmup" if config.lr_scheduler == "constant" else config.lr_scheduler
    warm_up = math.ceil(steps * config.lr_warmup_ratio)
    return optimizer, get_scheduler(name, optimizer, num_warmup_steps=warm_up, num_training_steps=steps)


def dry_run(config: SFTConfig) -> None:
    """``train`` for one step of few rows, with its files in a folder that goes at the end."""
    size = min(config.micro_train_batch_size, 2)
    with tempfile.TemporaryDirectory(prefix="lightppo-dry-run-") as folder:
        small = {"micro_train_batch_size": size, "train_batch_size": size * int(os.environ.get("WORLD_SIZE", "1"))}
        small |= {"num_epochs": None, "max_steps": 1, "save_path": folder, "log_file": None}
        train(SFTConfig(**vars(config) | small))


def main(argv: Sequence[str] | None = None, prog: str = "lightppo sft") -> None:
    """Train, as the arguments say; those of this process, if ``None`` are given."""
    config = parse_args(argv, prog)

    from lightppo.trainer import run

    def checked() -> None:
        from lightppo.trainer.preflight import before_imports, preflight_sft

        before_imports(lambda: preflight_sft(config), prog)
        (dry_run if config.dry_run else train)(config)  # its imports take seconds

    run(checked, prog, debug=config.debug)
