"""What can be known before anything heavy is imported: files, folders, first rows, logins. Looks; changes nothing."""

from __future__ import annotations

import json
import logging
import math
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lightppo.checkpoint import layout
from lightppo.config import PPOConfig
from lightppo.config.cli import exit_on_mistakes
from lightppo.config.evaluation_options import evaluation_config
from lightppo.config.options import OptionSet
from lightppo.config.reward_options import ANY_ROUTE, reward_plan
from lightppo.config.rules import (
    estimator_entry,
    frozen_models,
    generation_batch,
    needs_critic,
    needs_reference,
)
from lightppo.config.supervised_options import SupervisedConfig
from lightppo.data.blends import SPLIT_WORDS, check_data_paths, first_rows, with_metadata
from lightppo.data.chat_templates import PromptTemplate
from lightppo.data.example_rows import (
    ExampleFields,
    read_example,
    read_margin,
    read_pair,
    resolve_example_fields,
)
from lightppo.data.folders import check_model, check_tokenizer
from lightppo.data.prepared_rows import (
    Encoded,
    Outcome,
    origin_of,
    prepare_rows,
)
from lightppo.data.records import Prompt, Rollout
from lightppo.data.rows import (
    RowFields,
    other_columns,
    read_label,
    read_prompt,
    resolve_fields,
    template_options,
)
from lightppo.errors import BadRowError, CheckpointError, ConfigError, DataError, UserError
from lightppo.files import check_writable
from lightppo.logging.run_paths import WORLDS, check_places, file_of_world
from lightppo.logging.trackers import check_trackers
from lightppo.plugin import REWARDS
from lightppo.preflight.advice import check_positions, check_total_steps
from lightppo.rewards.function import NO_LABELS, check_reward_files
from lightppo.rollout.vllm.versions import check_release
from lightppo.table import load
from lightppo.user_code import split_python_spec
from lightppo.version import too_old

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]

NOTHING_KEPT = {  # options of a dry run
    "resume": "never",
    "val_before_train": False,
    "use_wandb": False,
    "use_tensorboard": None,
    "use_trackio": None,
    "use_mlflow": None,
    "best_metric": None,
    "save_steps": -1,
    "hf_save_steps": -1,
    "save_epochs": None,
    "save_seconds": None,
}
SPLITS = {
    "prompt_split": "prompt_data",
    "eval_split": "eval_data",
    "pretrain_split": "pretrain_data",
}
SPLITS_OF_ROWS = {"dataset_split": "dataset", "eval_split": "eval_dataset"}
_DRY_SAMPLES = 4  # of a dry run: at most, per prompt
_DRY_TOKENS = 32  # per response


def preflight(config: PPOConfig) -> None:
    """Refuse what a PPO run would fail at later; a ConfigError has a line for each problem.

    For one rank, which decides for all. The first rows alone are read; all are checked before models load.
    """
    model = config.model
    data = config.data
    options = config.flat()
    models = [("--pretrain", model.pretrain)]
    models += [("--reward_pretrain", model_path) for model_path in model.reward_pretrain]
    if needs_reference(config):
        models.append(("--ref_pretrain", model.ref_pretrain))
    models += [
        (frozen_model.flag, frozen_model.path) for frozen_model in frozen_models(config).values()
    ]
    if needs_critic(config):
        models.append(("--critic_pretrain", model.critic_pretrain))
    # Each is looked at once, by its first flag.
    first_flags = {model_path: flag for flag, model_path in reversed(models) if model_path}
    tokenizers = [("--tokenizer_path", model.tokenizer_path)]
    tokenizers += [
        ("--reward_input_tokenizer", model_path)
        for model_path in config.reward.reward_input_tokenizer
    ]
    folders = ("save_path", "ckpt_path", "use_tensorboard", "rollout_data_dir", "skip_rollout")
    checks = [
        *_path_checks(
            config,
            [(flag, model_path) for model_path, flag in first_flags.items()],
            tokenizers,
            [(f"--{option_name}", options[option_name]) for option_name in folders],
        ),
        partial(check_places, config),
        partial(_check_worlds, config),
        partial(_check_callbacks, config),
        partial(_check_lengths, config),
        partial(_check_resume, config.checkpoint.resume),
        partial(_check_shape, config),
        partial(_check_steps, config),
        partial(_check_splits, config, SPLITS),
    ]
    if not config.evaluation.val_only:
        checks.append(partial(_warn_of_same_rows, config, SPLITS, "prompt_data", "eval_data"))
    if data.prompt_data:
        checks.append(partial(_check_prompts, config, "--prompt_data"))
    if data.eval_data:
        checks.append(partial(_check_prompts, config, "--eval_data"))
    if data.pretrain_data:
        checks.append(partial(_check_pretraining, config))
    if config.engine.rollout_engine == "vllm":
        checks.append(partial(check_release, "--rollout_engine vllm"))
    checks.append(partial(check_trackers, config.logging))
    _run_all(checks, config.logging.debug)


def preflight_supervised(config: SupervisedConfig) -> None:
    """Do the same for training on data."""
    data = config.data
    options = config.flat()
    is_pairs = not hasattr(data, "output_key")
    if is_pairs:
        fields = {
            "input_key": data.input_key,
            "pairs": True,
            "label_key": options.get("margin_key"),
            "chosen_key": data.chosen_key,
            "rejected_key": data.rejected_key,
        }
    else:
        fields = {"input_key": data.input_key, "output_key": data.output_key}

    def check_data(flag: str, paths: str, split: str) -> None:
        check_data_paths(paths, flag=flag)
        template = _template(config)

        def render(row: Row, row_fields: ExampleFields) -> None:
            if is_pairs:
                prompt, *_ = read_pair(row, row_fields)
                read_margin(row, row_fields)
            else:
                prompt, completion = read_example(row, row_fields)
                if completion is None:
                    raise BadRowError("missing", "no completion: set --output_key")
            template.render(prompt, template_options(row))

        _check_rows(
            flag, paths, split, fields, render, data.on_bad_row, resolve=resolve_example_fields
        )

    models = [
        (f"--{option_name}", options.get(option_name))
        for option_name in ("pretrain", "ref_pretrain")
    ]
    folders = [
        (f"--{option_name}", options[option_name])
        for option_name in ("save_path", "ckpt_path", "use_tensorboard")
    ]
    if options["log_file"]:
        folders.append(("--log_file", os.path.dirname(options["log_file"]) or "."))
    checks = [
        *_path_checks(
            config,
            [(flag, model_path) for flag, model_path in models if model_path],
            [("--tokenizer_path", config.model.tokenizer_path)],
            folders,
        ),
        partial(check_places, config.resolved()),
        partial(_check_callbacks, config),
        partial(_check_resume, config.checkpoint.resume),
        partial(_check_shape, config.resolved()),
        partial(_check_splits, config, SPLITS_OF_ROWS),
        partial(_warn_of_same_rows, config, SPLITS_OF_ROWS, "dataset", "eval_dataset"),
        partial(check_trackers, config.logging),
    ]
    if data.dataset:
        checks.append(partial(check_data, "--dataset", data.dataset, data.dataset_split))
    if data.eval_dataset:
        checks.append(partial(check_data, "--eval_dataset", data.eval_dataset, data.eval_split))
    _run_all(checks, config.logging.debug)


def look(config: OptionSet, program: str) -> None:
    """Look at what a command can know before it imports anything heavy."""
    if not isinstance(config, PPOConfig):
        return before_imports(lambda: preflight_supervised(config), program)
    resolved = config.resolved()
    before_imports(lambda: preflight(resolved), program)
    looked_at.append(resolved.flat())


looked_at: list[dict[str, Any]] = []
"""What the command of this process has looked at: the run that it builds need not do it again, nor warn again."""


def before_imports(check: Callable[[], None], program: str) -> None:
    """Run a check on rank 0, which decides: exit code 2, and a line per problem. The launcher ends the other ranks."""
    if os.environ.get("RANK", "0") == "0":
        with exit_on_mistakes(program):
            if outdated := too_old("torch", "transformers", "deepspeed", "datasets"):
                raise ConfigError("\n".join(outdated))
            check()


def dry_run_config(config: PPOConfig, world_size: int, folder: str) -> PPOConfig:
    """Return the config of a dry run: one step of few, short samples, whose files are all in ``folder``."""
    rollout = config.rollout
    samples = max(
        estimator_entry(config).min_group_size, min(rollout.n_samples_per_prompt, _DRY_SAMPLES)
    )
    prompts = min(rollout.rollout_batch_size, 2 * world_size)
    tokens = min(rollout.generate_max_len, _DRY_TOKENS)
    sizes = {
        "rollout_batch_size": prompts,
        "gen_batch_size": prompts,
        "train_batch_size": prompts * samples,
        "n_samples_per_prompt": samples,
        "generation_size": samples,
        "ppo_n_minibatches": None,
        "max_epochs": 1,
        "generate_max_len": tokens,
        "min_new_tokens": min(rollout.min_new_tokens, tokens),
        "benchmark_steps": 1,
        "eval_max_samples": 2 * world_size,
        "eval_n_samples": min(config.evaluation.eval_n_samples, _DRY_SAMPLES),
        # The one step trains the actor on what it has sampled itself, whatever that is worth.
        "freezing_actor_steps": 0,
        "dynamic_sampling": False,
        "skip_rollout": None,
        "buffer_limit": 0,
    }
    if config.reward.overlong_buffer_len is not None:
        sizes["overlong_buffer_len"] = min(config.reward.overlong_buffer_len, tokens)
    folders = {"save_path": folder, "ckpt_path": f"{folder}/checkpoints", "rollout_data_dir": None}
    return config.with_options(**sizes, **folders, **NOTHING_KEPT, num_examine=1)


def _run_all(checks: Iterable[Callable[[], Any]], debug: bool) -> None:
    problems = []
    for check in checks:
        try:
            check()
        except (UserError, ValueError) as error:
            problems.append(str(error))
            if debug:
                traceback.print_exception(error)
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))


# -- models and folders ----------------------------------------------------------------------------------------------


def _path_checks(
    config: OptionSet,
    models: Iterable[tuple[str, str]],
    tokenizers: Iterable[tuple[str, str | None]],
    folders: Iterable[tuple[str, str | None]],
) -> Iterator[Callable[[], Any]]:
    """Yield the checks of paths, each with its flag. Random weights are in no folder, and the tokenizer is --pretrain's."""
    settings = config.model
    models = list(models)
    if config.strategy.sequence_parallel_size > 1:
        yield partial(_check_heads, config, models)
    for flag, path in models:
        has_tokenizer = flag == "--pretrain" and settings.tokenizer_path is None
        is_random = settings.init_from_scratch and path == settings.pretrain
        yield partial(check_model, path, flag, weights=not is_random, tokenizer=has_tokenizer)
    for flag, path in tokenizers:
        if path:
            yield partial(check_tokenizer, path, flag)
    for flag, path in folders:
        if path:
            yield partial(check_writable, path, flag)


def _check_lengths(config: PPOConfig) -> None:
    """Check a local folder whose config names its positions as most do; others are checked after the imports."""
    config_path = Path(config.model.pretrain).expanduser() / "config.json"
    try:
        settings = json.loads(config_path.read_text(encoding="utf-8"))
        settings |= settings.get("text_config") or {}
        settings |= json.loads(config.model.override_config or "{}")
    except (OSError, ValueError, TypeError, AttributeError):
        # The loader will say what is wrong with it.
        return
    check_positions(config, settings.get("max_position_embeddings"))


def _check_heads(config: OptionSet, models: Iterable[tuple[str, str]]) -> None:
    """Refuse local models whose attention heads the ranks that hold a row together cannot share out evenly."""
    size = config.strategy.sequence_parallel_size
    for flag, path in models:
        if flag.startswith("--reward_pretrain"):  # which is not divided
            continue
        try:
            text = (Path(path).expanduser() / "config.json").read_text(encoding="utf-8")
            settings = json.loads(text)
            settings |= settings.get("text_config") or {}
            remainder = settings.get("num_attention_heads", size) % size
        except (OSError, ValueError, TypeError, AttributeError):
            continue  # the loader will say what is wrong with it
        if remainder:
            raise ConfigError(
                f"--sequence_parallel_size {size} does not divide the {settings['num_attention_heads']} attention heads "
                f"of {flag} {path}"
            )


def _check_worlds(config: PPOConfig) -> None:
    """Refuse files of environments and tools that are not there; a tape answers without them."""
    options = config.flat()
    if options.get("tape_from"):
        return
    for option_name in WORLDS:
        for source_file in filter(None, map(file_of_world, options.get(option_name, ()))):
            if not Path(source_file).expanduser().is_file():
                raise ConfigError(f"--{option_name}: no file {source_file}")


def _check_callbacks(config: OptionSet) -> None:
    """Refuse files of callbacks that are not there; they run when the trainer is built."""
    for spec in config.flat()["callback"]:
        split_python_spec(spec, "callback", option=f"--callback {spec}")


def _check_steps(config: PPOConfig) -> None:
    """Refuse JSONL files whose rows do not hold ``--total_training_steps``. What is dropped is seen later."""
    data_files = [Path(data_path).expanduser() for data_path in _sources(config.data.prompt_data)]
    if (
        config.training.total_training_steps is None
        or config.training.dry_run
        or config.evaluation.val_only
        or config.data.prompt_data_probs
        or not all(data_file.suffix == ".jsonl" and data_file.is_file() for data_file in data_files)
    ):
        return
    row_count = 0
    for data_file in data_files:
        with data_file.open("rb") as stream:
            row_count += sum(1 for line in stream if line.strip())
    prompts_per_batch = generation_batch(config)
    batch_size = config.rollout.rollout_batch_size
    # the last prompts of an episode count as many as are sampled at once
    check_total_steps(
        config,
        math.ceil(math.ceil(row_count / prompts_per_batch) * prompts_per_batch / batch_size),
        row_count,
    )


def _check_resume(resume: str) -> None:
    is_folder = resume not in ("auto", "never") and "://" not in resume
    if is_folder and not layout.has_checkpoints(Path(resume)):
        raise CheckpointError(layout.no_checkpoints(resume, "one"))


def _check_shape(config: PPOConfig) -> None:
    """Refuse a last checkpoint of other ranks or another ZeRO stage; what else may be wrong is seen at the resume."""
    checkpoint = config.checkpoint
    checkpoint_root = checkpoint.ckpt_path if checkpoint.resume == "auto" else checkpoint.resume
    if (
        checkpoint.resume == "never"
        or checkpoint.reshape_ckpt
        or config.training.dry_run
        or "://" in checkpoint_root
    ):
        return
    if (last_shape := layout.last_shape(checkpoint_root)) is None:
        return
    last_tag, saved_shape = last_shape
    shape = {
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "zero_stage": config.strategy.zero_stage,
    }
    differences = [
        f"{setting}={saved_shape.get(setting)}, not {current}"
        for setting, current in shape.items()
        if saved_shape.get(setting) != current
    ]
    if differences:
        raise CheckpointError(
            f"{checkpoint_root}/{last_tag} was saved with {'; '.join(differences)}: set --reshape_ckpt to go on with "
            "it here, or take the same number of processes and --zero_stage"
        )


# -- sources of rows -------------------------------------------------------------------------------------------------


def _check_splits(config: OptionSet, splits: Mapping[str, str]) -> None:
    """Refuse a split that no source has, and whose name is none of the usual ones: files have no splits."""
    options = config.flat()
    defaults = type(config)().flat()
    for split_option, data_option in splits.items():
        split = options[split_option]
        data_paths = _sources(options[data_option])
        is_unusual = split != defaults[split_option] and split.lower() not in SPLIT_WORDS
        if (
            is_unusual
            and data_paths
            and all(Path(data_path).expanduser().is_file() for data_path in data_paths)
        ):
            raise ConfigError(
                f"--{split_option} {split}: files have no splits, as --{data_option} {options[data_option]}: leave it out"
            )


def _warn_of_same_rows(
    config: OptionSet, splits: Mapping[str, str], training: str, evaluation: str
) -> None:
    """Say where evaluations are of rows that are trained on."""
    options = config.flat()
    split_options = {data_option: split_option for split_option, data_option in splits.items()}

    def places(data_option: str) -> set[tuple[str, str]]:
        split = options[split_options[data_option]]
        return {_place(shared_path, split) for shared_path in _sources(options[data_option])}

    if shared_rows := places(training) & places(evaluation):
        shared_path, _ = min(shared_rows)
        logger.warning(
            "--%s and --%s both have the rows of %s: %s",
            training,
            evaluation,
            shared_path,
            "evaluations measure what was learned by heart: hold some rows out",
        )


def _sources(paths: str | None) -> list[str]:
    return [data_path.strip() for data_path in (paths or "").split(",") if data_path.strip()]


def _place(data_path: str, split: str) -> tuple[str, str]:
    """Return a source, whichever way it is written, and the split where it has some."""
    local_path = Path(data_path).expanduser()
    if not local_path.exists():
        return data_path, split
    return str(local_path.resolve()), "" if local_path.is_file() else split


# -- rewards and data ------------------------------------------------------------------------------------------------


def _check_prompts(config: PPOConfig, flag: str) -> None:
    """Check the reward file, and the first rows of each source: keys, template, labels that the rewards need."""
    data = config.data
    data_paths = data.prompt_data
    probabilities = data.prompt_data_probs
    split = data.prompt_split
    reward_config = config
    reward_flag = "--reward_fn"
    if flag == "--eval_data":
        data_paths = data.eval_data
        probabilities = None
        split = data.eval_split
        if (judge_config := evaluation_config(config)) is not None:
            reward_config = judge_config
            reward_flag = "--eval_reward_fn"
    function = None
    label_parameter = None
    if not config.flat().get("tape_from"):  # which answers for reward files that may be gone
        function, label_parameter = check_reward_files(reward_config, reward_flag)
    check_data_paths(data_paths, probabilities, flag=flag)
    template = _template(config)

    def render(row: Row, row_fields: RowFields) -> None:
        template.render(read_prompt(row, row_fields)[0], template_options(row))
        read_label(row, row_fields)

    prompts: list[Prompt] = []
    fields = {"input_key": data.input_key, "label_key": data.label_key}
    for rows, row_fields in _check_rows(
        flag, data_paths, split, fields, render, data.on_bad_row, data.prompt_metadata
    ):
        for row_number, row in enumerate(rows):
            chat, prompt_key = read_prompt(row, row_fields)
            prompt = Prompt(
                "",
                [],
                label=read_label(row, row_fields),
                extra=other_columns(row, prompt_key),
                messages=chat if isinstance(chat, list) else None,
            )
            try:
                check_label(reward_config, prompt)
            except ValueError as error:
                raise DataError(f"{origin_of(row, row_number)}: {error}") from error
            prompts.append(prompt)
    if function and prompts:  # only made: refused where an argument is missing
        function.calls([Rollout(prompt, 0, [], "", "stop") for prompt in prompts])
    if label_parameter and prompts and all(prompt.label is None for prompt in prompts):
        logger.warning(
            "%s %s: %s; the reward function reads %s", flag, data_paths, NO_LABELS, label_parameter
        )


def check_label(config: PPOConfig, prompt: Prompt) -> None:
    """Refuse a row that a source of all rows cannot judge, with a ``ValueError``."""
    plan = reward_plan(config) or {}
    if list(plan) != [ANY_ROUTE]:
        return
    for source_name in plan[ANY_ROUTE]:
        if check_prompt := REWARDS.find(source_name).check_prompt:
            load(check_prompt)(prompt)


def _check_pretraining(config: PPOConfig) -> None:
    data = config.data
    flag = "--pretrain_data"
    data_paths = data.pretrain_data
    check_data_paths(data_paths, data.pretrain_data_probs, flag=flag)
    fields = {
        "input_key": data.input_key,
        "output_key": data.output_key,
        "documents": data.output_key is None,
    }
    _check_rows(
        flag,
        data_paths,
        data.pretrain_split,
        fields,
        read_example,
        data.on_bad_row,
        resolve=resolve_example_fields,
    )


def _check_rows(
    flag: str,
    data_paths: str,
    split: str,
    fields: dict[str, Any],
    check_row: Callable[[Row, RowFields], Any],
    on_bad_row: str,
    metadata: str | None = None,
    resolve: Callable[..., RowFields] = resolve_fields,
) -> list[tuple[Any, RowFields]]:
    """Return the first rows of each local source, and their keys. With ``skip`` it is only seen that sources can be read."""

    def outcome(row: Row, row_fields: RowFields) -> Outcome:
        try:
            check_row(row, row_fields)
        except BadRowError as error:
            return error
        return Encoded([], 0, truncated=False)

    checked_rows = []
    for data_path in _sources(data_paths):
        rows = first_rows(data_path, split, flag)
        if rows is None or on_bad_row != "error":
            continue
        rows = with_metadata(rows, metadata)
        try:
            row_fields = resolve(rows.column_names, **fields)
        except DataError as error:
            raise DataError(f"{flag} {data_path}: {error}") from error
        columns = row_fields.columns_in(rows.column_names)
        prepare_rows(
            rows,
            columns,
            lambda chunk, row_fields=row_fields: [outcome(row, row_fields) for row in chunk],
        )
        checked_rows.append((rows, row_fields))
    return checked_rows


def _template(config: OptionSet) -> PromptTemplate:
    data = config.data
    return PromptTemplate(
        _tokenizer(config.model.tokenizer_path or config.model.pretrain),
        data.apply_chat_template,
        data.input_template,
        data.system_prompt,
        data.chat_template_kwargs,
    )


def _tokenizer(model_folder: str) -> Any:
    """Stand for the tokenizer: it has a chat template unless files of this machine show none, and renders nothing."""
    settings = Path(model_folder).expanduser() / "tokenizer_config.json"
    has_template = (
        not settings.is_file()
        or '"chat_template"' in settings.read_text(encoding="utf-8")
        or any(settings.parent.glob("*chat_template*"))
    )
    return SimpleNamespace(
        name_or_path=model_folder,
        chat_template=has_template,
        apply_chat_template=lambda *arguments, **options: "",
    )
