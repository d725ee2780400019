"""What can be known before anything heavy is imported: files, folders, first rows, logins. Looks; changes nothing."""

from __future__ import annotations

import json
import logging
import math
import os
import traceback
from collections.abc import Callable, Iterable, Mapping
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
from lightppo.table import load

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]

NOTHING_KEPT = {  # options of a dry run
    "resume": "never",
    "val_before_train": False,
    **{"use_wandb": False, "use_tensorboard": None, "use_trackio": None, "use_mlflow": None},
    **{"best_metric": None, "save_steps": -1, "hf_save_steps": -1},
    **dict.fromkeys(("save_epochs", "save_seconds")),
}
SPLITS = {
    "prompt_split": "prompt_data",
    "eval_split": "eval_data",
    "pretrain_split": "pretrain_data",
}
SPLITS_OF_ROWS = {"dataset_split": "dataset", "eval_split": "eval_dataset"}
_DRY_SAMPLES, _DRY_TOKENS = 4, 32  # of a dry run: at most, per prompt and per response


def preflight(config: PPOConfig) -> None:
    """Refuse what a PPO run would fail at later; a ConfigError has a line for each problem.

    For one rank, which decides for all. The first rows alone are read; all are checked before models load.
    """
    model = config.model
    checkpoint = config.checkpoint
    data = config.data
    models = [("pretrain", model.pretrain)] + [
        ("reward_pretrain", path) for path in model.reward_pretrain
    ]
    models += [("ref_pretrain", model.ref_pretrain)] * needs_reference(config)
    models += [
        (frozen_model.flag.removeprefix("--"), frozen_model.path)
        for frozen_model in frozen_models(config).values()
    ]
    models += [("critic_pretrain", model.critic_pretrain)] * needs_critic(config)
    first_flags = {path: flag for flag, path in reversed(models) if path}
    folders = {
        "save_path": checkpoint.save_path,
        "ckpt_path": checkpoint.ckpt_path,
        "use_tensorboard": config.logging.use_tensorboard,
        "rollout_data_dir": config.sampling.rollout_data_dir,
        "skip_rollout": config.sampling.skip_rollout,
    }
    checks = [_model_check(config, path, flag) for path, flag in first_flags.items()]
    tokenizers = [("--tokenizer_path", path) for path in (model.tokenizer_path,) if path]
    tokenizers += [
        ("--reward_input_tokenizer", path) for path in config.reward.reward_input_tokenizer
    ]
    checks += [partial(check_tokenizer, path, flag) for flag, path in tokenizers]
    checks += [
        partial(check_writable, folder, f"--{flag}") for flag, folder in folders.items() if folder
    ]
    checks += [
        partial(check_places, config),
        partial(_check_worlds, config),
        partial(_check_lengths, config),
        partial(_check_resume, checkpoint.resume),
        partial(_check_shape, config),
        partial(_check_steps, config),
        partial(_check_splits, config, SPLITS),
    ]
    if not config.evaluation.val_only:
        checks.append(partial(_warn_of_same_rows, config, "prompt_data", "eval_data"))
    for flag, paths in {"--prompt_data": data.prompt_data, "--eval_data": data.eval_data}.items():
        if paths:
            checks.append(partial(_check_prompts, config, flag))
    if data.pretrain_data:
        checks.append(partial(_check_pretraining, config))
    checks.append(partial(check_trackers, config.logging))
    _run_all(checks, config.logging.debug)


def preflight_supervised(config: SupervisedConfig) -> None:
    """Do the same for training on data."""
    checkpoint = config.checkpoint
    data = config.data
    flat = config.flat()
    is_pairs = not hasattr(data, "output_key")
    fields = {"input_key": data.input_key}
    if is_pairs:
        fields |= {
            "pairs": True,
            "label_key": flat.get("margin_key"),
            "chosen_key": data.chosen_key,
            "rejected_key": data.rejected_key,
        }
    else:
        fields["output_key"] = data.output_key
    rendering = partial(
        PromptTemplate, apply_chat_template=data.apply_chat_template, input_template=data.input_template,
        system_prompt=data.system_prompt, chat_template_kwargs=data.chat_template_kwargs,
    )  # fmt: skip

    def check_data(flag: str, paths: str, split: str) -> None:
        check_data_paths(paths, flag=flag)
        template = rendering(_tokenizer(config.model.tokenizer_path or config.model.pretrain))

        def render(row: Row, fields: ExampleFields) -> None:
            if is_pairs:
                prompt, *_ = read_pair(row, fields)
                read_margin(row, fields)
            else:
                prompt, completion = read_example(row, fields)
                if completion is None:
                    raise BadRowError("missing", "no completion: set --output_key")
            template.render(prompt, template_options(row))

        _check_rows(
            flag, paths, split, fields, render, data.on_bad_row, resolve=resolve_example_fields
        )

    models = {name: flat[name] for name in ("pretrain", "ref_pretrain") if flat.get(name)}
    folders = {
        name: flat[name] for name in ("save_path", "ckpt_path", "use_tensorboard") if flat[name]
    }
    if flat["log_file"]:
        folders["log_file"] = os.path.dirname(flat["log_file"]) or "."
    data_paths = {
        "--dataset": (data.dataset, data.dataset_split),
        "--eval_dataset": (data.eval_dataset, data.eval_split),
    }
    checks = [_model_check(config, path, name) for name, path in models.items()]
    if config.model.tokenizer_path:
        checks.append(partial(check_tokenizer, config.model.tokenizer_path, "--tokenizer_path"))
    checks += [partial(check_writable, folder, f"--{name}") for name, folder in folders.items()]
    checks += [
        partial(check_places, config.resolved()),
        partial(_check_resume, checkpoint.resume),
        partial(_check_shape, config.resolved()),
        partial(_check_splits, config, SPLITS_OF_ROWS),
        partial(_warn_of_same_rows, config, "dataset", "eval_dataset"),
        partial(check_trackers, config.logging),
    ]
    checks += [
        partial(check_data, flag, *source) for flag, source in data_paths.items() if source[0]
    ]
    _run_all(checks, config.logging.debug)


def look(config: OptionSet, prog: str) -> None:
    """Look at what a command can know before it imports anything heavy: exit code 2, and a line per problem.

    Rank 0 decides; the launcher ends the other ranks.
    """
    check: Callable[[Any], None] = preflight_supervised
    if isinstance(config, PPOConfig):
        config = config.resolved()
        check = preflight
    if os.environ.get("RANK", "0") == "0":
        with exit_on_mistakes(prog):
            check(config)
    if isinstance(config, PPOConfig):
        looked_at.append(config.flat())


looked_at: list[dict[str, Any]] = []
"""What the command of this process has looked at: the run that it builds need not do it again, nor warn again."""


def dry_run_config(config: PPOConfig, world_size: int, folder: str) -> PPOConfig:
    """Return the config of a dry run: one step of few, short samples, whose files are all in ``folder``."""
    rollout = config.rollout
    evaluation = config.evaluation
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
        "eval_n_samples": min(evaluation.eval_n_samples, _DRY_SAMPLES),
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


def _model_check(config: OptionSet, path: str, flag: str) -> Callable[[], Any]:
    """Return the check of a model's folder: random weights are in none, and the tokenizer is --pretrain's."""
    model = config.model
    has_tokenizer = flag == "pretrain" and model.tokenizer_path is None
    is_random = model.init_from_scratch and path == model.pretrain
    return partial(check_model, path, f"--{flag}", weights=not is_random, tokenizer=has_tokenizer)


def _check_lengths(config: PPOConfig) -> None:
    """Check a local folder whose config names its positions as most do; others are checked after the imports."""
    try:
        model = json.loads(
            (Path(config.model.pretrain).expanduser() / "config.json").read_text(encoding="utf-8")
        )
        model |= model.get("text_config") or {}
        model |= json.loads(config.model.override_config or "{}")
    except (OSError, ValueError, TypeError, AttributeError):
        # The loader will say what is wrong with it.
        return
    check_positions(config, model.get("max_position_embeddings"))


def _check_worlds(config: PPOConfig) -> None:
    """Refuse files of environments and tools that are not there; a tape answers without them."""
    flat = config.flat()
    for flag in () if flat.get("tape_from") else WORLDS:
        for file in filter(None, map(file_of_world, flat.get(flag, ()))):
            if not Path(file).expanduser().is_file():
                raise ConfigError(f"--{flag}: no file {file}")


def _check_steps(config: PPOConfig) -> None:
    """Refuse JSONL files whose rows do not hold ``--total_training_steps``. What is dropped is seen later."""
    training = config.training
    data = config.data
    files = [Path(path).expanduser() for path in _sources(data.prompt_data)]
    if (
        training.total_training_steps is None
        or training.dry_run
        or config.evaluation.val_only
        or data.prompt_data_probs
        or not all(file.suffix == ".jsonl" and file.is_file() for file in files)
    ):
        return
    rows = 0
    for file in files:
        with file.open("rb") as lines:
            rows += sum(1 for line in lines if line.strip())
    sampled = generation_batch(config)
    batch = config.rollout.rollout_batch_size
    # the last prompts of an episode count as many as are sampled at once
    check_total_steps(config, math.ceil(math.ceil(rows / sampled) * sampled / batch), rows)


def _check_resume(resume: str) -> None:
    if (
        resume not in ("auto", "never")
        and "://" not in resume
        and not layout.has_checkpoints(Path(resume))
    ):
        raise CheckpointError(layout.no_checkpoints(resume, "one"))


def _check_shape(config: PPOConfig) -> None:
    """Refuse a last checkpoint of other ranks or another ZeRO stage; what else may be wrong is seen at the resume."""
    checkpoint = config.checkpoint
    root = checkpoint.ckpt_path if checkpoint.resume == "auto" else checkpoint.resume
    if (
        checkpoint.resume == "never"
        or checkpoint.reshape_ckpt
        or config.training.dry_run
        or "://" in root
    ):
        return
    if (saved_shape := layout.last_shape(root)) is None:
        return
    tag, saved = saved_shape
    now = {
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "zero_stage": config.strategy.zero_stage,
    }
    if others := [
        f"{name}={saved.get(name)}, not {value}"
        for name, value in now.items()
        if saved.get(name) != value
    ]:
        raise CheckpointError(
            f"{root}/{tag} was saved with {'; '.join(others)}: set --reshape_ckpt to go on with it here, or take the "
            "same number of processes and --zero_stage"
        )


# -- sources of rows -------------------------------------------------------------------------------------------------


def _check_splits(config: OptionSet, splits: Mapping[str, str]) -> None:
    """Refuse a split that no source has, and whose name is none of the usual ones: files have no splits."""
    flat = config.flat()
    usual = type(config)().flat()
    for name, source in splits.items():
        paths = _sources(flat[source])
        is_named = flat[name] != usual[name] and flat[name].lower() not in SPLIT_WORDS
        if is_named and paths and all(Path(path).expanduser().is_file() for path in paths):
            raise ConfigError(
                f"--{name} {flat[name]}: files have no splits, as --{source} {flat[source]}: leave it out"
            )


def _warn_of_same_rows(config: OptionSet, training: str, evaluation: str) -> None:
    """Say where evaluations are of rows that are trained on."""
    flat = config.flat()
    split_of = {
        source: flat.get(name)
        for table in (SPLITS, SPLITS_OF_ROWS)
        for name, source in table.items()
    }
    shared_rows = {_place(path, split_of[training]) for path in _sources(flat[training])}
    shared_rows &= {_place(path, split_of[evaluation]) for path in _sources(flat[evaluation])}
    if shared_rows:
        path, _ = sorted(shared_rows)[0]
        advice = "evaluations measure what was learned by heart: hold some rows out"
        logger.warning(
            "--%s and --%s both have the rows of %s: %s", training, evaluation, path, advice
        )


def _sources(paths: str | None) -> list[str]:
    return [path.strip() for path in (paths or "").split(",") if path.strip()]


def _place(path: str, split: str) -> tuple[str, str]:
    """Return a source, whichever way it is written, and the split where it has some."""
    local = Path(path).expanduser()
    if not local.exists():
        return path, split
    return str(local.resolve()), "" if local.is_file() else split


# -- rewards and data ------------------------------------------------------------------------------------------------


def _check_prompts(config: PPOConfig, flag: str) -> None:
    """Check the reward file, and the first rows of each source: keys, template, labels that the rewards need."""
    data = config.data
    paths = data.prompt_data
    probs = data.prompt_data_probs
    split = data.prompt_split
    scoring = None
    if flag == "--eval_data":
        paths = data.eval_data
        probs = None
        split = data.eval_split
        scoring = evaluation_config(config)
    reward_arguments = (config,) if scoring is None else (scoring, "--eval_reward_fn")
    function = None
    reads_labels = None
    if not config.flat().get("tape_from"):  # which answers for reward files that may be gone
        function, reads_labels = check_reward_files(*reward_arguments)
    check_data_paths(paths, probs, flag=flag)
    template = PromptTemplate(
        _tokenizer(config.model.tokenizer_path or config.model.pretrain),
        data.apply_chat_template,
        data.input_template,
        data.system_prompt,
        data.chat_template_kwargs,
    )

    def render(row: Row, fields: RowFields) -> None:
        template.render(read_prompt(row, fields)[0], template_options(row))
        read_label(row, fields)

    prompts: list[Prompt] = []
    fields = {"input_key": data.input_key, "label_key": data.label_key}
    for rows, row_fields in _check_rows(
        flag, paths, split, fields, render, data.on_bad_row, data.prompt_metadata
    ):
        for number, row in enumerate(rows):
            chat, key = read_prompt(row, row_fields)
            columns = {
                "extra": other_columns(row, key),
                "messages": chat if isinstance(chat, list) else None,
            }
            prompts.append(Prompt("", [], label=read_label(row, row_fields), **columns))
            try:
                check_label(scoring or config, prompts[-1])
            except ValueError as error:
                raise DataError(f"{origin_of(row, number)}: {error}") from error
    if function and prompts:  # only made: refused where an argument is missing
        function.calls([Rollout(prompt, 0, [], "", "stop") for prompt in prompts])
    if reads_labels and prompts and all(prompt.label is None for prompt in prompts):
        logger.warning(
            "%s %s: %s; the reward function reads %s", flag, paths, NO_LABELS, reads_labels
        )


def check_label(config: PPOConfig, prompt: Prompt) -> None:
    """Refuse a row that a source of all rows cannot judge, with a ``ValueError``."""
    plan = reward_plan(config) or {}
    for name in plan[ANY_ROUTE] if list(plan) == [ANY_ROUTE] else ():
        check = REWARDS.find(name).check_prompt
        if check is not None:
            load(check)(prompt)


def _check_pretraining(config: PPOConfig) -> None:
    data = config.data
    fields = {"input_key": data.input_key, "output_key": data.output_key}
    check_data_paths(data.pretrain_data, data.pretrain_data_probs, flag="--pretrain_data")
    source = (
        "--pretrain_data",
        data.pretrain_data,
        data.pretrain_split,
        fields | {"documents": data.output_key is None},
    )
    _check_rows(*source, read_example, data.on_bad_row, resolve=resolve_example_fields)


def _check_rows(
    flag: str,
    paths: str,
    split: str,
    fields: dict[str, Any],
    render: Callable[[Row, RowFields], Any],
    on_bad_row: str = "error",
    metadata: str | None = None,
    resolve: Callable[..., RowFields] = resolve_fields,
) -> list[tuple[Any, RowFields]]:
    """Return the first rows of each local source, and their keys. With ``skip`` it is only seen that sources can be read."""

    def outcome(row: Row, fields: RowFields) -> Outcome:
        try:
            render(row, fields)
        except BadRowError as error:
            return error
        return Encoded([], 0, truncated=False)

    checked_rows = []
    for source in map(str.strip, paths.split(",")):
        rows = first_rows(source, split, flag)
        if rows is not None and on_bad_row == "error":
            rows = with_metadata(rows, metadata)
            try:
                row_fields = resolve(rows.column_names, **fields)
            except DataError as error:
                raise DataError(f"{flag} {source}: {error}") from error
            read = row_fields.columns_in(rows.column_names)
            prepare_rows(
                rows,
                read,
                lambda chunk, row_fields=row_fields: [outcome(row, row_fields) for row in chunk],
            )
            checked_rows.append((rows, row_fields))
    return checked_rows


def _tokenizer(folder: str) -> Any:
    """Stand for the tokenizer: it has a chat template unless files of this machine show none, and renders nothing."""
    settings = Path(folder).expanduser() / "tokenizer_config.json"
    may_have_template = not settings.is_file() or '"chat_template"' in settings.read_text(
        encoding="utf-8"
    )
    has_template = may_have_template or any(settings.parent.glob("*chat_template*"))
    return SimpleNamespace(
        name_or_path=folder,
        chat_template=has_template,
        apply_chat_template=lambda *arguments, **options: "",
    )
