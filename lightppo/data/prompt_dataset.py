"""Prompts for rollouts: rows -> :class:`~lightppo.data.records.Prompt`, checked and tokenised before training."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch.utils.data import Dataset as TorchDataset

from lightppo.data.preparation import (
    BadRowPolicy,
    DatasetReport,
    Dropped,
    Encoded,
    Outcome,
    check_dataset,
    origin_of,
    prepare_rows,
    setting,
)
from lightppo.data.records import Prompt
from lightppo.data.rows import ORIGIN_COLUMN, read_label, read_prompt, resolve_fields
from lightppo.data.templates import PromptTemplate, Rendered
from lightppo.errors import BadRowError, DataError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Truncation = Literal["error", "left", "right", "middle", "drop"]
DATA_SOURCE_KEY = "data_source"


def truncate_ids(token_ids: list[int], max_len: int, side: Literal["left", "right", "middle"]) -> list[int]:
    """Cut ids to ``max_len``: ``left`` takes off the beginning, ``right`` the end, ``middle`` keeps both ends.

    An odd budget gives ``middle`` one id more of the end than of the beginning.
    """
    if len(token_ids) <= max_len:
        return token_ids
    if side == "left":
        return token_ids[-max_len:]
    if side == "right":
        return token_ids[:max_len]
    if side == "middle":
        begin = max_len // 2
        return token_ids[:begin] + token_ids[len(token_ids) - (max_len - begin) :]
    raise ValueError(f"side {side!r}; left, right or middle")


class PromptDataset(TorchDataset):
    """Map-style dataset of prompts. All rows are checked and tokenised at construction, so that bad data shows then.

    ``Prompt.index`` is the row's number in ``dataset``, also where rows before it were dropped.
    ``Prompt.extra`` has every column but the prompt's own, the label's included.

    Args:
        dataset: a ``datasets.Dataset``, best from :func:`~lightppo.data.loading.blending_datasets`, which keeps the
            file and line of each row.
        tokenizer: a Hugging Face tokenizer.
        strategy: only for scripts in the seed's style: options not given are looked up in ``strategy.args``.
        input_template: text with one ``{}`` where the prompt goes.
        input_key: column (or dotted key) of the prompt; the forms of ``docs/data.md`` are recognised without it.
        label_key: column (or dotted key) of the ground truth; a row without a value is then bad.
        apply_chat_template: render text prompts as a user message of the tokenizer's chat template.
        prompt_max_len: limit, in tokens.
        truncation: what becomes of a longer prompt: ``error`` (a bad row), cut on a side, or ``drop``.
        system_prompt: system message for chats that have none.
        on_bad_row: ``error`` or ``skip`` (counted in ``report``, named in the log).
        filter_overlong: drop prompts over the limit, whatever ``truncation`` says.
        num_workers: processes that tokenise; 0: this one.

    Raises:
        DataError: no such column, an empty dataset, a bad row, options that do not fit the data.
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
        apply_chat_template: bool | None = None,
        prompt_max_len: int | None = None,
        truncation: Truncation | None = None,
        system_prompt: str | None = None,
        on_bad_row: BadRowPolicy | None = None,
        filter_overlong: bool | None = None,
        num_workers: int | None = None,
    ) -> None:
        check_dataset(dataset)
        self.dataset = dataset
        self.tokenizer = tokenizer
        self.prompt_max_len = int(setting(prompt_max_len, strategy, "prompt_max_len", 1024))
        self.truncation = setting(truncation, strategy, "truncation", "error")
        self.filter_overlong = bool(setting(filter_overlong, strategy, "filter_overlong_prompts", False))
        if self.prompt_max_len < 1:
            raise DataError(f"--prompt_max_len is {self.prompt_max_len}; at least 1")
        if self.truncation not in get_args(Truncation):
            raise DataError(f"--truncation is {self.truncation!r}; one of {', '.join(get_args(Truncation))}")
        self.template = PromptTemplate(
            tokenizer,
            apply_chat_template=bool(setting(apply_chat_template, strategy, "apply_chat_template", False)),
            input_template=setting(input_template, strategy, "input_template", None),
            system_prompt=setting(system_prompt, strategy, "system_prompt", None),
        )
        self.fields = resolve_fields(
            dataset.column_names,
            input_key=setting(input_key, strategy, "input_key", "input"),
            label_key=setting(label_key, strategy, "label_key", None),
        )
        logger.info("prompt from %s; label from %s", self.fields.prompt, self.fields.label or "nothing")
        self._rows = prepare_rows(
            dataset,
            self.fields.columns_in(dataset.column_names),
            self._encode_chunk,
            on_bad_row=setting(on_bad_row, strategy, "on_bad_row", "error"),
            num_workers=int(setting(num_workers, strategy, "data_num_workers", 0)),
        )

    @property
    def report(self) -> DatasetReport:
        """Counts of rows kept, truncated and dropped by reason."""
        return self._rows.report

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, position: int) -> Prompt:
        if not -len(self) <= position < len(self):
            raise IndexError(f"prompt {position} of {len(self)}")
        return self.__getitems__([position % len(self)])[0]

    def __getitems__(self, positions: list[int]) -> list[Prompt]:
        """Several prompts with one access to the table, as torch's DataLoader asks for a batch."""
        if not positions:
            return []
        numbers = [int(self._rows.row_numbers[position]) for position in positions]
        columns = self.dataset[numbers]
        rows = [dict(zip(columns, values)) for values in zip(*columns.values())]
        return [self._prompt(position, number, row) for position, number, row in zip(positions, numbers, rows)]

    def _prompt(self, position: int, number: int, row: Mapping[str, Any]) -> Prompt:
        rendered, key = self._render(row)
        token_ids = self._rows.token_ids(position)
        text = rendered.text
        if self._rows.truncated[position]:  # the text is what the model sees, begin-of-text of plain text aside
            text = self.tokenizer.decode(token_ids, skip_special_tokens=not rendered.is_chat)
        source = row.get(DATA_SOURCE_KEY)
        # A conversation's own column stays: its last turn is not in the prompt.
        hidden = {ORIGIN_COLUMN} if key in (None, "messages") else {ORIGIN_COLUMN, key}
        return Prompt(
            text=text,
            token_ids=token_ids,
            label=read_label(row, self.fields),
            index=number,
            data_source="default" if source is None else str(source),
            extra={k: v for k, v in row.items() if k not in hidden},
            messages=rendered.messages,
        )

    @staticmethod
    def collate_fn(prompts: list[Prompt]) -> list[Prompt]:
        """A batch is the list itself (possibly empty: a rank's share of the last batch)."""
        return prompts

    def positions_of(self, indices: Iterable[int]) -> list[int]:
        """Where the prompts of these row numbers (``Prompt.index``) are in this dataset.

        Raises:
            KeyError: no prompt was made of such a row.
        """
        positions = {int(number): position for position, number in enumerate(self._rows.row_numbers)}
        return [positions[index] for index in indices]

    def origin(self, position: int) -> str:
        """File and line, or row number, of the prompt at this position."""
        number = int(self._rows.row_numbers[position])
        return origin_of(self.dataset[number], number)

    def _render(self, row: Mapping[str, Any]) -> tuple[Rendered, str | None]:
        prompt, key = read_prompt(row, self.fields)
        return self.template.render(prompt), key

    def _encode_chunk(self, rows: list[dict[str, Any]]) -> list[Outcome]:
        outcomes: list[Outcome | None] = [None] * len(rows)
        rendered: dict[int, Rendered] = {}
        for i, row in enumerate(rows):
            try:
                rendered[i] = self._render(row)[0]
                read_label(row, self.fields)
            except BadRowError as error:
                outcomes[i] = error
                rendered.pop(i, None)
        for i, token_ids in zip(rendered, self.template.encode_rendered(list(rendered.values()))):
            outcomes[i] = self._fit(token_ids)
        return outcomes  # type: ignore[return-value]  # every row has its outcome now

    def _fit(self, token_ids: list[int]) -> Outcome:
        if not token_ids:
            return BadRowError("empty", "the prompt has no tokens")
        length, limit = len(token_ids), self.prompt_max_len
        if length <= limit:
            return Encoded(token_ids, length, truncated=False)
        if self.filter_overlong or self.truncation == "drop":
            return Dropped("overlong")
        if self.truncation == "error":
            return BadRowError(
                "overlong",
                f"the prompt has {length} tokens, --prompt_max_len is {limit}: raise it, or choose "
                "--truncation left|right|middle|drop or --filter_overlong_prompts",
            )
        return Encoded(truncate_ids(token_ids, limit, self.truncation), limit, truncated=True)
