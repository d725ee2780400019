"""``lightppo data``: rows as the model will see them, lengths and problems of all; public data sets → rows."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from lightppo.config.cli import exit_on_mistakes, parse_section
from lightppo.config.options import all_options
from lightppo.config.supervised_options import COMMANDS
from lightppo.errors import ConfigError, DataError, UserError
from lightppo.option import Option, Section, option
from lightppo.redaction import plain

_PPO_NAMES = (
    "pretrain tokenizer_path trust_remote_code prompt_data prompt_data_probs prompt_split prompt_metadata input_key "
    "label_key input_template apply_chat_template system_prompt chat_template_kwargs data_source_key max_samples "
    "prompt_max_len truncation filter_overlong_prompts seed"
)
_OTHER_OPTIONS = [
    option
    for kind in COMMANDS.values()
    for option in type(kind().data).options().values()
    if not option.name.startswith(("eval_", "on_", "data_"))
]
_OPTIONS = {option.name: option for option in (*_OTHER_OPTIONS, *all_options())}
_SHARED = {
    name: replace(_OPTIONS[name], required=False)
    for name in (*_PPO_NAMES.split(), *(option.name for option in _OTHER_OPTIONS))
}
_SHARED["for"] = Option(
    "for", Literal[("ppo", *COMMANDS)], "ppo", "The command that will train on the rows."
)


class _RowsConfig(Section):
    config: str | None = option(
        None, "YAML file of a run; only the options that this command has are read."
    )
    row: tuple[int, ...] = option((), "Numbers of the rows to show, starting at 1.", ge=1)
    rows: int = option(1, "Number of rows to show from the start, without --row.", ge=0)
    write: str | None = option(
        None, "Write all rows to this new JSONL file in lightppo's row format."
    )
    form: Literal["auto", "gsm8k", "math", "ultrafeedback"] = option(
        "auto", "With --write: the source format. auto: by its columns."
    )


class RowsConfig(_RowsConfig, declared=_RowsConfig.options() | _SHARED):
    """Show rows as a model will see them, and the lengths and problems of all; exit code 1 if a row has a problem."""


def main(arguments: Sequence[str], program: str = "lightppo data") -> None:
    """Show rows, or write them in our form; exit code 2 if the data cannot be read."""

    def problems(config: RowsConfig, _: int) -> list[str]:
        option_names = [rows_option(config)]
        if not config.write:
            option_names.append("pretrain")
        return [
            f"--{option_name} is required"
            for option_name in option_names
            if not getattr(config, option_name)
        ]

    config = parse_section(RowsConfig, problems, arguments, program)
    logger = logging.getLogger("lightppo")
    level = logger.level
    logger.setLevel(logging.ERROR)  # what it would warn of is printed
    try:
        with exit_on_mistakes(program, UserError):
            check(config)
            bad_rows = write(config) if config.write else show(config)
    finally:
        logger.setLevel(level)
    if bad_rows:
        raise SystemExit(1)


def command_of(config: RowsConfig) -> str:
    """Return the command that will train on the rows."""
    return getattr(config, "for")


def rows_option(config: RowsConfig) -> str:
    """Return the option that names the rows."""
    return {"ppo": "prompt_data"}.get(command_of(config), "dataset")


def check(config: RowsConfig) -> None:
    """Refuse what is not there, before anything heavy is imported."""
    from lightppo.data.blends import check_data_paths
    from lightppo.data.folders import check_tokenizer

    flag = rows_option(config)
    check_data_paths(getattr(config, flag), flag=f"--{flag}")
    if not config.write:
        option_name = "tokenizer_path" if config.tokenizer_path else "pretrain"
        check_tokenizer(getattr(config, option_name), f"--{option_name}")


def read(config: RowsConfig) -> Any:
    """Return the rows."""
    from lightppo.data.blends import blending_datasets, with_metadata

    rows_flag = rows_option(config)
    probabilities = None
    data_split = config.dataset_split
    if rows_flag == "prompt_data":
        probabilities = config.prompt_data_probs
        data_split = config.prompt_split
    data_paths = getattr(config, rows_flag)
    data_rows = blending_datasets(
        data_paths, probabilities, None, config.seed, train_split=data_split, flag=f"--{rows_flag}"
    )
    data_rows = with_metadata(data_rows, config.prompt_metadata)
    return data_rows.select(range(min(len(data_rows), config.max_samples)))


# -- show ------------------------------------------------------------------------------------------------------------


def show(config: RowsConfig) -> int:
    """Print rows, lengths and problems; return the number of rows with a problem."""
    from lightppo.data.rows import ORIGIN_COLUMN
    from lightppo.files import stage_to_local
    from lightppo.models.loading import get_tokenizer
    from lightppo.preflight.dry_run_report import described, lengths

    rows = read(config)
    tokenizer_path = stage_to_local(config.tokenizer_path or config.pretrain)
    tokenizer = get_tokenizer(tokenizer_path, trust_remote_code=config.trust_remote_code)
    for number in config.row:
        if number > len(rows):
            raise DataError(f"--row {number}: there are {len(rows)} rows")
    for number in config.row or range(1, min(config.rows, len(rows)) + 1):
        print(plain(f"-- row {number}: {rows[number - 1][ORIGIN_COLUMN]}"))
        try:
            print(*described(prepare(config, rows.select([number - 1]), tokenizer)), "", sep="\n")
        except DataError as error:
            print(plain(f"cannot be used: {error}\n"))
    dataset = prepare(config, rows, tokenizer, limited=False)
    limit_name = limit_option(config)
    truncation = config.truncation
    if config.filter_overlong_prompts:
        truncation = "drop"
    overlong_rows = int((dataset.lengths > getattr(config, limit_name)).sum())
    print(plain(f"-- --{rows_option(config)}: {dataset.report}"))
    print(lengths(dataset))
    print(
        f"over --{limit_name} {getattr(config, limit_name)}: {overlong_rows} (--truncation {truncation})"
    )
    for bad_row in dataset.report.bad:
        print(plain(bad_row))
    problems = len(dataset.report.bad)
    if truncation == "error":
        problems += overlong_rows
    return problems


def limit_option(config: RowsConfig) -> str:
    """Return the option that limits the tokens of a row."""
    return {"ppo": "prompt_max_len"}.get(command_of(config), "max_len")


def prepare(config: RowsConfig, rows: Any, tokenizer: Any, limited: bool = True) -> Any:
    """Return the data set that training makes; without its limit, bad rows are counted."""
    options = {option_name: getattr(config, option_name) for option_name in _SHARED} | {
        "on_bad_row": "error"
    }
    if not limited:
        options |= {
            "on_bad_row": "skip",
            limit_option(config): 2**31 - 1,
            "truncation": "error",
            "filter_overlong_prompts": False,
        }
    if command_of(config) == "ppo":
        from lightppo.data.datasets import PromptDataset

        option_names = (
            "input_key label_key data_source_key input_template apply_chat_template system_prompt "
            "chat_template_kwargs prompt_max_len truncation on_bad_row"
        )
        return PromptDataset(
            rows,
            tokenizer,
            filter_overlong=options["filter_overlong_prompts"],
            **{option_name: options[option_name] for option_name in option_names.split()},
        )
    from lightppo.supervised.objectives import OBJECTIVES

    config_class = COMMANDS[command_of(config)]
    objective = next(
        objective for objective in OBJECTIVES if objective.config_class is config_class
    )
    option_values = {
        option_name: options[option_name]
        for option_name in type(config_class().data).options()
        if option_name in options
    }
    return objective(config_class().with_options(**option_values), None).build_dataset(
        rows, tokenizer
    )


# -- write -----------------------------------------------------------------------------------------------------------


def gsm8k(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Read ``question``, ``answer`` with the number behind ####: input, output, label."""
    return _worked(row["question"], row["answer"], "####", "openai/gsm8k")


def competition_math(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Read ``problem``, ``solution`` with a boxed answer: input, output, label, level, type."""
    columns = {
        column_name: row[column_name]
        for column_name in ("level", "type")
        if row.get(column_name) is not None
    }
    return _worked(row["problem"], row["solution"], "\\boxed", "math") | columns


def _worked(problem: str, solution: str, answer_mark: str, source: str) -> dict[str, Any]:
    from lightppo.verifiers.math import gold_answers

    if answer_mark not in solution:
        raise ValueError(f"the solution has no {answer_mark}")
    return {
        "input": problem,
        "output": solution,
        "label": gold_answers(solution)[0],
        "data_source": source,
    }


def ultrafeedback(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Read ``instruction`` and scored ``completions``, or a ``prompt`` with ``chosen`` and ``rejected``: a pair with the
    margin of the scores; None where best and worst have the same score."""

    def answer_text(answer: Any) -> str:
        return answer if isinstance(answer, str) else answer[-1]["content"]

    if "completions" in row:
        by_score = sorted(row["completions"], key=lambda answer: float(answer["overall_score"]))
        worst_answer, *_, best_answer = by_score
        scores = (float(best_answer["overall_score"]), float(worst_answer["overall_score"]))
        prompt = row["instruction"]
        chosen = best_answer["response"]
        rejected = worst_answer["response"]
    else:
        scores = (row.get("score_chosen"), row.get("score_rejected"))
        prompt = row["prompt"]
        chosen = row["chosen"]
        rejected = row["rejected"]
    answer_pair = {
        "input": prompt,
        "chosen": answer_text(chosen),
        "rejected": answer_text(rejected),
        "data_source": "ultrafeedback",
    }
    if None not in scores:
        answer_pair["margin"] = scores[0] - scores[1]
    if answer_pair.get("margin") == 0 or answer_pair["chosen"] == answer_pair["rejected"]:
        return None
    return answer_pair


FORMS = {  # name → conversion of a row, and the columns that tell it
    "gsm8k": (gsm8k, ({"question", "answer"},)),
    "math": (competition_math, ({"problem", "solution"},)),
    "ultrafeedback": (
        ultrafeedback,
        ({"instruction", "completions"}, {"prompt", "chosen", "rejected"}),
    ),
}


def write(config: RowsConfig) -> None:
    """Write the rows of a public data set in the form that training reads."""
    from lightppo.data.prepared_rows import origin_of
    from lightppo.data.rows import ORIGIN_COLUMN
    from lightppo.files import files_in_use

    if Path(config.write).exists():
        raise ConfigError(f"--write {config.write}: is there already")
    source_rows = read(config)
    matching_forms = [
        row_form
        for row_form, (_, column_sets) in FORMS.items()
        if any(set(source_rows.column_names) >= columns for columns in column_sets)
    ]
    row_form = matching_forms[0] if config.form == "auto" and matching_forms else config.form
    if row_form not in matching_forms:
        columns = ", ".join(
            column_name for column_name in source_rows.column_names if column_name != ORIGIN_COLUMN
        )
        raise DataError(
            f"--{rows_option(config)}: its columns, {columns}, are not those of --form {'|'.join(FORMS)}"
        )
    convert, _ = FORMS[row_form]
    json_lines = []
    for number, source_row in enumerate(source_rows):
        try:
            converted = convert(source_row)
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise DataError(
                f"{origin_of(source_row, number)}: no row of {row_form}: {type(error).__name__}: {error}"
            ) from error
        if converted is not None:
            json_lines.append(json.dumps(converted, ensure_ascii=False) + "\n")
    files_in_use().write_text(Path(config.write), "".join(json_lines))
    result_line = f"{config.write}: {len(json_lines)} rows of {row_form}"
    if len(json_lines) < len(source_rows):
        result_line += f"; {len(source_rows) - len(json_lines)} pairs without a difference left out"
    print(result_line)
