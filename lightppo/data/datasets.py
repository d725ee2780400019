"""What training reads: rows that are checked and tokenised, and prompts for rollouts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from torch.utils.data import Dataset as TorchDataset

from lightppo.data.chat_templates import PromptTemplate, Rendered
from lightppo.data.prepared_rows import (
    BadRowPolicy,
    DatasetReport,
    Encoded,
    Outcome,
    check_choice,
    columns_of,
    origin_of,
    prepare_rows,
)
from lightppo.data.records import Prompt
from lightppo.data.rows import (
    TEMPLATE_KEYS,
    chat_without_nulls,
    lookup,
    other_columns,
    read_label,
    read_prompt,
    require_column,
    resolve_fields,
    template_options,
)
from lightppo.errors import BadRowError, DataError
from lightppo.ranks import Ranks

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Truncation = Literal["error", "left", "right", "middle", "drop"]


def setting(strategy: Any, option_name: str, argument: Any, default: Any = None) -> Any:
    """Return the value if given, else ``strategy.args.<name>`` (scripts in the seed's style), else the default."""
    script_value = getattr(getattr(strategy, "args", None), option_name, None)
    if argument is not None:
        return argument
    return default if script_value is None else script_value


class PreparedDataset(TorchDataset):
    """Rows that are checked and tokenised at construction, so that bad data shows up then."""

    _render_row: Callable[[Mapping[str, Any]], Any]
    _encode: Callable[[list[Any]], Iterable[Outcome]]  # of what _render_row returned

    def __init__(
        self, dataset: Dataset, template: PromptTemplate, fields: Any, **options: Any
    ) -> None:
        """Encode the rows; ``options`` are those of :func:`lightppo.data.prepared_rows.prepare_rows`."""
        self.dataset = dataset
        self.template = template
        self.fields = fields
        self.tokenizer = template.tokenizer
        columns = fields.columns_in(dataset.column_names)
        descriptions = []
        for field_name in ("prompt", "completion", "label"):
            if keys := getattr(fields, field_name, ()):
                descriptions.append(f"{field_name} {' or '.join(keys)}")
        descriptions += [column for column in TEMPLATE_KEYS if column in columns]
        logger.info("columns that are read: %s", ", ".join(descriptions))
        features = dataset.features  # a copy at each call
        for column in columns:
            if str(getattr(features[column], "dtype", "")).startswith(("timestamp", "date")):
                logger.warning(
                    "column %s holds dates, no text (datasets makes dates of JSON texts like 2024-01-05): a reward function "
                    "gets datetime objects; if it compares texts, write the column as text in a parquet file",
                    column,
                )
        self._rendered_features = {
            column: features[column] for column in fields.rendered_in(columns)
        }
        self._rows = prepare_rows(dataset, columns, self._encode_chunk, **options)
        self.report: DatasetReport = self._rows.report

    def _encode_chunk(self, rows: list[dict[str, Any]]) -> list[Outcome]:
        """Return one outcome per row."""
        rows = list(map(self._without_nulls, rows))
        outcomes: dict[int, Outcome] = {}
        rendered: dict[int, Any] = {}
        for i, row in enumerate(rows):
            try:
                rendered[i] = self._render_row(row)
            except BadRowError as error:
                outcomes[i] = error
        outcomes |= zip(rendered, self._encode(list(rendered.values())))
        return [outcomes[i] for i in range(len(rows))]

    def _without_nulls(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row as it was written: a table has fields in it that only other rows have."""
        values = {
            column: chat_without_nulls(row[column], feature)
            for column, feature in self._rendered_features.items()
        }
        return {**row, **values}

    def row(self, number: int) -> dict[str, Any]:
        """Return the row with this number in ``dataset``."""
        return self._without_nulls(self.dataset[number])

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row. (N,)"""
        return np.diff(self._rows.offsets)

    def origin(self, position: int) -> str:
        """Return file and line, or row number, of the row at this position."""
        number = int(self._rows.row_numbers[position])
        return origin_of(self.dataset[number], number)

    def ids_of(self, position: int) -> list[int]:
        """Return token ids of the row at this position."""
        return self._rows.token_ids(position)

    def prompt_ids_of(self, position: int) -> list[int]:
        """Return those of its prompt."""
        return self.ids_of(position)[: self._rows.prompt_lengths[position]]

    def numbers(self, positions: Iterable[int]) -> list[int]:
        """Return numbers in ``dataset`` of the rows at these positions."""
        return [int(self._rows.row_numbers[position]) for position in positions]

    @staticmethod
    def _cut(
        token_ids: list[int], prompt_length: int, limit: int, truncation: Truncation, overlong: str
    ) -> Outcome:
        """Cut a row beyond the limit; ``overlong`` is the message where ``truncation`` is ``error``."""
        if truncation == "drop":
            return "overlong"
        if truncation == "error":
            return BadRowError("overlong", overlong)
        return Encoded(
            truncate_ids(token_ids, limit, truncation), min(prompt_length, limit), truncated=True
        )


class PromptDataset(PreparedDataset):
    """Map-style dataset of prompts. All rows are checked and tokenised at construction; DataError names a bad row.

    ``Prompt.index`` is the row's number in ``dataset``, even if earlier rows were dropped. ``Prompt.extra`` has every
    column except the prompt's, including the label's. Options mean what their flags mean.

    Args:
        dataset: best from ``lightppo.blending_datasets``, which keeps each row's file and line.
        input_key: column of the prompt, may be dotted; None recognises the forms in ``docs/data.md``.
        label_key: column of the ground truth, which every row must then have.
        data_source_key: column of the data source, may be dotted; rows without one are of "default".
        truncation: treatment of a longer prompt: ``error`` (a bad row), cut on a side, or ``drop``.
        on_bad_row: ``error`` or ``skip`` (counted in ``report``, named in the log).
        ranks: share out the work, all with the same ``dataset``; the constructor is collective then.
        strategy: of a script; its ``args`` have what is not given here.
    """

    def __init__(
        self,
        dataset: Dataset,
        tokenizer: PreTrainedTokenizerBase,
        strategy: Any = None,
        input_template: str | None = None,
        *,
        input_key: str | None = None,
        label_key: str | None = None,
        data_source_key: str | None = None,
        apply_chat_template: bool | None = None,
        prompt_max_len: int | None = None,
        truncation: Truncation | None = None,
        system_prompt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | str | None = None,
        on_bad_row: BadRowPolicy | None = None,
        filter_overlong: bool | None = None,
        num_workers: int | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        of_script = partial(setting, strategy)
        self.prompt_max_len = int(of_script("prompt_max_len", prompt_max_len, 1024))
        if self.prompt_max_len < 1:
            raise DataError(f"--prompt_max_len is {self.prompt_max_len}; at least 1")
        self.truncation = of_script("truncation", truncation, "error")
        check_choice("--truncation", self.truncation, Truncation)
        if of_script("filter_overlong_prompts", filter_overlong):
            self.truncation = "drop"
        super().__init__(
            dataset,
            PromptTemplate(
                tokenizer,
                of_script("apply_chat_template", apply_chat_template, False),
                of_script("input_template", input_template),
                of_script("system_prompt", system_prompt),
                of_script("chat_template_kwargs", chat_template_kwargs),
            ),
            resolve_fields(
                columns_of(dataset),
                input_key=of_script("input_key", input_key),
                label_key=of_script("label_key", label_key),
            ),
            on_bad_row=of_script("on_bad_row", on_bad_row, "error"),
            num_workers=of_script("data_num_workers", num_workers, 0),
            ranks=ranks,
        )
        self.data_source_key = of_script("data_source_key", data_source_key, "data_source")
        if data_source_key not in (None, "data_source"):
            require_column(data_source_key, dataset.column_names, "--data_source_key")

    def __getitem__(self, position: int) -> Prompt:
        return self.__getitems__([range(len(self))[position]])[0]

    def __getitems__(self, positions: list[int]) -> list[Prompt]:
        """Return several prompts with one access to the table; torch's DataLoader calls it for a batch."""
        numbers = self.numbers(positions)
        rows = self.dataset.__getitems__(numbers) if numbers else []
        return [
            self._prompt(position, number, self._without_nulls(row))
            for position, number, row in zip(positions, numbers, rows)
        ]

    def _prompt(self, position: int, number: int, row: Mapping[str, Any]) -> Prompt:
        prompt, prompt_key = read_prompt(row, self.fields)
        rendered = self.template.render(prompt, template_options(row))
        token_ids = self._rows.token_ids(position)
        prompt_text = rendered.text
        # the text shows what the model sees, except plain text's begin-of-text
        if self._rows.truncated[position]:
            prompt_text = self.tokenizer.decode(token_ids, skip_special_tokens=not rendered.is_chat)
        source = lookup(row, self.data_source_key)
        return Prompt(
            prompt_text,
            token_ids,
            label=read_label(row, self.fields),
            index=number,
            data_source="default" if source is None else str(source),
            extra=other_columns(row, prompt_key),
            messages=rendered.messages,
        )

    @staticmethod
    def collate_fn(prompts: list[Prompt]) -> list[Prompt]:
        """Return the list itself; empty if this rank has no share of the last batch."""
        return prompts

    def positions_of(self, indices: Iterable[int]) -> list[int]:
        """Return positions of the prompts with these row numbers (``Prompt.index``); KeyError for unused rows."""
        positions = {
            int(number): position for position, number in enumerate(self._rows.row_numbers)
        }
        return [positions[index] for index in indices]

    def _render_row(self, row: Mapping[str, Any]) -> Rendered:
        rendered = self.template.render(read_prompt(row, self.fields)[0], template_options(row))
        read_label(row, self.fields)
        return rendered

    def _encode(self, rendered: list[Rendered]) -> Iterator[Outcome]:
        for token_ids in self.template.encode_rendered(rendered):
            if not token_ids:
                yield BadRowError("empty", "the tokenizer makes no tokens of the prompt")
            elif len(token_ids) <= self.prompt_max_len:
                yield Encoded(token_ids, len(token_ids), truncated=False)
            else:
                length = len(token_ids)
                overlong = (
                    f"the prompt has {length} tokens, --prompt_max_len is {self.prompt_max_len}: raise it, or choose "
                    "--truncation left|right|middle|drop or --filter_overlong_prompts"
                )
                yield self._cut(token_ids, length, self.prompt_max_len, self.truncation, overlong)


def truncate_ids(
    token_ids: list[int], max_len: int, side: Literal["left", "right", "middle"]
) -> list[int]:
    """Cut ids to ``max_len``: ``left`` removes the beginning, ``right`` the end, ``middle`` keeps both ends."""
    head_length = {"left": 0, "right": max_len, "middle": max_len // 2}[side]
    if len(token_ids) <= max_len:
        return token_ids
    return token_ids[:head_length] + token_ids[len(token_ids) - (max_len - head_length) :]
