"""``lightppo data``: rows as the model will see them, lengths and problems of all; public data sets → rows."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from lightppo.config.arguments import parse_section
from lightppo.config.cli import exit_on_mistakes
from lightppo.config.options import all_options
from lightppo.config.supervised_options import COMMANDS
from lightppo.errors import ConfigError, DataError, UserError
from lightppo.option import Option, Section, option
from lightppo.redaction import plain

_NAMES = (
    "pretrain",
    "tokenizer_path",
    "trust_remote_code",
    "prompt_data",
    "prompt_data_probs",
    "prompt_split",
)
_NAMES += (
    "prompt_metadata",
    "input_key",
    "label_key",
    "input_template",
    "apply_chat_template",
    "system_prompt",
    "chat_template_kwargs",
)
_NAMES += (
    "data_source_key",
    "max_samples",
    "prompt_max_len",
    "truncation",
    "filter_overlong_prompts",
    "seed",
)
_OF_OTHERS = [
    option for kind in COMMANDS.values() for option in type(kind().data).options().values()
]
_OF_OTHERS = [
    option for option in _OF_OTHERS if not option.name.startswith(("eval_", "on_", "data_"))
]
_SHARED = {option.name: replace(option, required=False) for option in (*_OF_OTHERS, *all_options())}
_SHARED = {name: _SHARED[name] for name in (*_NAMES, *(option.name for option in _OF_OTHERS))}
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


def main(argv: Sequence[str], prog: str = "lightppo data") -> None:
    """Show rows, or write them in our form; exit code 2 if the data cannot be read."""

    def problems(config: RowsConfig, _: int) -> list[str]:
        source = "prompt_data" if kind_of(config) == "ppo" else "dataset"
        needed = [source] if config.write else [source, "pretrain"]
        return [f"--{name} is required" for name in needed if not getattr(config, name)]

    config = parse_section(RowsConfig, problems, argv, prog)
    logger = logging.getLogger("lightppo")
    level = logger.level
    logger.setLevel(logging.ERROR)  # what it would warn of is printed
    try:
        with exit_on_mistakes(prog, UserError):
            check(config)
            found = write(config) if config.write else show(config)
    finally:
        logger.setLevel(level)
    if found:
        raise SystemExit(1)


def kind_of(config: RowsConfig) -> str:
    """The command that will train on the rows."""
    return getattr(config, "for")


def check(config: RowsConfig) -> None:
    """Refuses what is not there, before anything heavy is imported."""
    from lightppo.data.blends import check_data_paths
    from lightppo.data.folders import check_tokenizer

    flag = "prompt_data" if kind_of(config) == "ppo" else "dataset"
    check_data_paths(getattr(config, flag), flag=f"--{flag}")
    if not config.write:
        name = "tokenizer_path" if config.tokenizer_path else "pretrain"
        check_tokenizer(getattr(config, name), f"--{name}")


def read(config: RowsConfig) -> tuple[Any, str]:
    """The rows, and the flag that names them."""
    from lightppo.data.blends import blending_datasets, with_metadata

    paths = config.prompt_data
    probs = config.prompt_data_probs
    split = config.prompt_split
    flag = "--prompt_data"
    if kind_of(config) != "ppo":
        paths = config.dataset
        probs = None
        split = config.dataset_split
        flag = "--dataset"
    rows = blending_datasets(paths, probs, None, config.seed, train_split=split, flag=flag)
    rows = with_metadata(rows, config.prompt_metadata)
    return rows.select(range(min(len(rows), config.max_samples))), flag


# -- show ------------------------------------------------------------------------------------------------------------


def show(config: RowsConfig) -> int:
    """Print rows, lengths and problems; the number of rows with a problem."""
    from lightppo.data.rows import ORIGIN_COLUMN
    from lightppo.files import stage_to_local
    from lightppo.models.loading import get_tokenizer
    from lightppo.preflight.dry_run_report import described, lengths

    rows, flag = read(config)
    path = stage_to_local(config.tokenizer_path or config.pretrain)
    tokenizer = get_tokenizer(path, trust_remote_code=config.trust_remote_code)
    if late := [n for n in config.row if n > len(rows)]:
        raise DataError(f"--row {late[0]}: there are {len(rows)} rows")
    for number in config.row or range(1, min(config.rows, len(rows)) + 1):
        print(plain(f"-- row {number}: {rows[number - 1][ORIGIN_COLUMN]}"))
        try:
            print(*described(prepare(config, rows.select([number - 1]), tokenizer)), "", sep="\n")
        except DataError as error:
            print(plain(f"cannot be used: {error}\n"))
    whole = prepare(config, rows, tokenizer, limited=False)
    limit = limit_of(config)
    kind = "drop" if config.filter_overlong_prompts else config.truncation
    over = int((whole.lengths > getattr(config, limit)).sum())
    print(plain(f"-- {flag}: {whole.report}"))
    print(lengths(whole))
    print(f"over --{limit} {getattr(config, limit)}: {over} (--truncation {kind})")
    for text in whole.report.bad:
        print(plain(text))
    return len(whole.report.bad) + (over if kind == "error" else 0)


def limit_of(config: RowsConfig) -> str:
    """The option that limits the tokens of a row."""
    if kind_of(config) == "ppo":
        return "prompt_max_len"
    return "max_len"


def prepare(config: RowsConfig, rows: Any, tokenizer: Any, limited: bool = True) -> Any:
    """The data set that training makes; without its limit, bad rows are counted."""
    options = {name: getattr(config, name) for name in _SHARED} | {
        "on_bad_row": "error" if limited else "skip"
    }
    if not limited:
        options |= {
            limit_of(config): 2**31 - 1,
            "truncation": "error",
            "filter_overlong_prompts": False,
        }
    if kind_of(config) == "ppo":
        from lightppo.data.datasets import PromptDataset

        names = (
            "input_key",
            "label_key",
            "data_source_key",
            "input_template",
            "apply_chat_template",
            "system_prompt",
            "chat_template_kwargs",
        )
        names += ("prompt_max_len", "truncation", "on_bad_row")
        given = {name: options[name] for name in names}
        return PromptDataset(
            rows, tokenizer, filter_overlong=options["filter_overlong_prompts"], **given
        )
    from lightppo.supervised.objectives import OBJECTIVES

    kind = COMMANDS[kind_of(config)]
    objective = next(one for one in OBJECTIVES if one.config_class is kind)
    given = {name: options[name] for name in type(kind().data).options() if name in options}
    return objective(kind().with_options(**given), None).build_dataset(rows, tokenizer)


# -- write -----------------------------------------------------------------------------------------------------------


def gsm8k(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """``question``, ``answer`` with the number behind ####: input, output, label."""
    return _worked(row["question"], row["answer"], "####", "openai/gsm8k")


def competition_math(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """``problem``, ``solution`` with a boxed answer: input, output, label, level, type."""
    more = {name: row[name] for name in ("level", "type") if row.get(name) is not None}
    return _worked(row["problem"], row["solution"], "\\boxed", "math") | more


def _worked(problem: str, solution: str, mark: str, source: str) -> dict[str, Any]:
    from lightppo.verifiers.math import gold_answers

    if mark not in solution:
        raise ValueError(f"the solution has no {mark}")
    return {
        "input": problem,
        "output": solution,
        "label": gold_answers(solution)[0],
        "data_source": source,
    }


def ultrafeedback(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """``instruction`` and scored ``completions``, or a ``prompt`` with ``chosen`` and ``rejected``: a pair with the
    margin of the scores; None where best and worst have the same score."""
    if "completions" in row:
        by_score = sorted(row["completions"], key=lambda one: float(one["overall_score"]))
        worst, *_, best = [(one["response"], float(one["overall_score"])) for one in by_score]
        prompt = row["instruction"]
    else:
        best, worst = ((row[name], row.get(f"score_{name}")) for name in ("chosen", "rejected"))
        prompt = row["prompt"]
    answers = [text if isinstance(text, str) else text[-1]["content"] for text, _ in (best, worst)]
    pair = {
        "input": prompt,
        "chosen": answers[0],
        "rejected": answers[1],
        "data_source": "ultrafeedback",
    }
    if best[1] is not None and worst[1] is not None:
        pair["margin"] = best[1] - worst[1]
    if pair.get("margin") == 0 or answers[0] == answers[1]:
        return None
    return pair


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
    rows, flag = read(config)
    fits = [
        name
        for name, (_, known) in FORMS.items()
        if any(set(rows.column_names) >= one for one in known)
    ]
    form = fits[0] if config.form == "auto" and fits else config.form
    if form not in fits:
        columns = ", ".join(name for name in rows.column_names if name != ORIGIN_COLUMN)
        raise DataError(
            f"{flag}: its columns, {columns}, are not those of --form {'|'.join(FORMS)}"
        )
    lines = []
    for number, row in enumerate(rows):
        try:
            lines.append(FORMS[form][0](row))
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise DataError(
                f"{origin_of(row, number)}: no row of {form}: {type(error).__name__}: {error}"
            ) from error
    kept = [json.dumps(line, ensure_ascii=False) + "\n" for line in lines if line is not None]
    files_in_use().write_text(Path(config.write), "".join(kept))
    left_out = f"; {len(lines) - len(kept)} pairs without a difference left out" * (
        len(kept) < len(lines)
    )
    print(f"{config.write}: {len(kept)} rows of {form}{left_out}")
