"""What training reads: prompts for rollouts, and examples for supervised training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset as TorchDataset

from lightppo.algorithms.losses import IGNORE_INDEX
from lightppo.data.records import Prompt
from lightppo.data.rows import (
    BadRowPolicy,
    Chat,
    DatasetReport,
    Encoded,
    Outcome,
    PromptTemplate,
    Rendered,
    as_chat,
    check_choice,
    check_dataset,
    lookup,
    origin_of,
    other_columns,
    prepare_rows,
    read_example,
    read_label,
    read_prompt,
    require_column,
    resolve_fields,
    setting,
)
from lightppo.errors import BadRowError, DataError
from lightppo.ranks import Ranks

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Truncation = Literal["error", "left", "right", "middle", "drop"]
SFTTruncation = Literal["error", "right", "drop"]
PaddingSide = Literal["left", "right"]


class Example(NamedTuple):
    """A prompt and an answer that is trained on; both are empty where a prompt is to be answered."""

    prompt: Prompt
    written: str = ""  # the answer, as the row has it
    answer: str = ""  # after the template
    answer_ids: Sequence[int] = ()


class _PreparedDataset(TorchDataset):
    """Rows that are checked and tokenised at construction, so that bad data shows up then.

    Options that are not given are looked up in ``strategy.args``, for scripts in the seed's style.
    """

    _render_row: Callable[[Mapping[str, Any]], Any]
    _encode: Callable[[list[Any]], Iterable[Outcome]]  # of what _render_row returned

    def __init__(
        self,
        dataset: Dataset,
        tokenizer: PreTrainedTokenizerBase,
        strategy: Any,
        *,
        template: dict[str, Any],
        fields: dict[str, Any],
        on_bad_row: BadRowPolicy | None,
        num_workers: int | None,
        ranks: Ranks | None,
    ) -> None:
        self.dataset, self.tokenizer = dataset, tokenizer
        check_dataset(dataset)
        self.template = PromptTemplate(
            tokenizer, **{name: setting(strategy, name, v) for name, v in template.items()}
        )
        fields = {name: setting(strategy, name, value) for name, value in fields.items()}
        self.fields = resolve_fields(dataset.column_names, **fields)
        read = {
            part: " or ".join(getattr(self.fields, part))
            for part in ("prompt", "completion", "label")
        }
        logger.info(
            "columns that are read: %s",
            ", ".join(f"{part} {keys}" for part, keys in read.items() if keys),
        )
        self._rows = prepare_rows(
            dataset,
            self.fields.columns_in(dataset.column_names),
            self._encode_chunk,
            on_bad_row=setting(strategy, "on_bad_row", on_bad_row, "error"),
            num_workers=setting(strategy, "data_num_workers", num_workers, 0),
            ranks=ranks,
        )

    def _encode_chunk(self, rows: list[dict[str, Any]]) -> list[Outcome]:
        """One outcome per row."""
        outcomes: dict[int, Outcome] = {}
        rendered: dict[int, Any] = {}
        for i, row in enumerate(rows):
            try:
                rendered[i] = self._render_row(row)
            except BadRowError as error:
                outcomes[i] = error
        outcomes |= zip(rendered, self._encode(list(rendered.values())))
        return [outcomes[i] for i in range(len(rows))]

    @property
    def report(self) -> DatasetReport:
        """Counts of rows kept, truncated, and dropped by reason."""
        return self._rows.report

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row. (N,)"""
        return np.diff(self._rows.offsets)

    def origin(self, position: int) -> str:
        """File and line, or row number, of the row at this position."""
        number = int(self._rows.row_numbers[position])
        return origin_of(self.dataset[number], number)

    def ids_of(self, position: int) -> list[int]:
        """Token ids of the row at this position."""
        return self._rows.token_ids(position)

    def prompt_ids_of(self, position: int) -> list[int]:
        """Those of its prompt."""
        return self.ids_of(position)[: self._rows.prompt_lengths[position]]

    def numbers(self, positions: Iterable[int]) -> list[int]:
        """Numbers in ``dataset`` of the rows at these positions."""
        return [int(self._rows.row_numbers[position]) for position in positions]

    def examples(self, position: int) -> list[Example]:
        """The row as texts and ids: its prompt with each of its answers."""
        raise NotImplementedError

    @staticmethod
    def _fit(
        ids: list[int], prompt_length: int, limit: int, truncation: Truncation, overlong: str
    ) -> Outcome:
        """A row within the limit; ``overlong`` is the message where ``truncation`` is ``error``."""
        if len(ids) <= limit:
            return Encoded(ids, prompt_length, truncated=False)
        if truncation == "drop":
            return "overlong"
        if truncation == "error":
            return BadRowError("overlong", overlong)
        return Encoded(
            truncate_ids(ids, limit, truncation), min(prompt_length, limit), truncated=True
        )


class PromptDataset(_PreparedDataset):
    """Map-style dataset of prompts. All rows are checked and tokenised at construction; DataError names a bad row.

    ``Prompt.index`` is the row's number in ``dataset``, even if earlier rows were dropped. ``Prompt.extra`` has every
    column except the prompt's, including the label's. Options mean what their flags mean, and missing ones are looked
    up in ``strategy.args`` (for scripts in the seed's style).

    Args:
        dataset: best from :func:`~lightppo.data.readers.blending_datasets`, which keeps each row's file and line.
        input_key: column of the prompt, may be dotted; None recognises the forms in ``docs/data.md``.
        label_key: column of the ground truth, which every row must then have.
        data_source_key: column of the data source, may be dotted; rows without one are of "default".
        truncation: treatment of a longer prompt: ``error`` (a bad row), cut on a side, or ``drop``.
        on_bad_row: ``error`` or ``skip`` (counted in ``report``, named in the log).
        ranks: share out the work, all with the same ``dataset``; the constructor is collective then.
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
        on_bad_row: BadRowPolicy | None = None,
        filter_overlong: bool | None = None,
        num_workers: int | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.prompt_max_len = int(setting(strategy, "prompt_max_len", prompt_max_len, 1024))
        self.truncation = setting(strategy, "truncation", truncation, "error")
        if self.prompt_max_len < 1:
            raise DataError(f"--prompt_max_len is {self.prompt_max_len}; at least 1")
        check_choice("--truncation", self.truncation, Truncation)
        if setting(strategy, "filter_overlong_prompts", filter_overlong):
            self.truncation = "drop"
        template = {"apply_chat_template": apply_chat_template, "input_template": input_template}
        super().__init__(
            dataset,
            tokenizer,
            strategy,
            template=template | {"system_prompt": system_prompt},
            fields={"input_key": input_key, "label_key": label_key},
            on_bad_row=on_bad_row,
            num_workers=num_workers,
            ranks=ranks,
        )
        self.data_source_key = setting(strategy, "data_source_key", data_source_key, "data_source")
        if data_source_key not in (None, "data_source"):
            require_column(data_source_key, dataset.column_names, "--data_source_key")

    def __getitem__(self, position: int) -> Prompt:
        return self.__getitems__([range(len(self))[position]])[0]

    def __getitems__(self, positions: list[int]) -> list[Prompt]:
        """Several prompts with one access to the table; torch's DataLoader calls it for a batch."""
        numbers = self.numbers(positions)
        rows = self.dataset.__getitems__(numbers) if numbers else []
        return [
            self._prompt(position, number, row)
            for position, number, row in zip(positions, numbers, rows)
        ]

    def examples(self, position: int) -> list[Example]:
        return [Example(self[position])]

    def _prompt(self, position: int, number: int, row: Mapping[str, Any]) -> Prompt:
        prompt, key = read_prompt(row, self.fields)
        rendered, token_ids = self.template.render(prompt), self._rows.token_ids(position)
        text = rendered.text
        # the text shows what the model sees, except plain text's begin-of-text
        if self._rows.truncated[position]:
            text = self.tokenizer.decode(token_ids, skip_special_tokens=not rendered.is_chat)
        source = lookup(row, self.data_source_key)
        return Prompt(
            text,
            token_ids,
            label=read_label(row, self.fields),
            index=number,
            data_source="default" if source is None else str(source),
            extra=other_columns(row, key),
            messages=rendered.messages,
        )

    @staticmethod
    def collate_fn(prompts: list[Prompt]) -> list[Prompt]:
        """The list itself; empty if this rank has no share of the last batch."""
        return prompts

    def positions_of(self, indices: Iterable[int]) -> list[int]:
        """Positions of the prompts with these row numbers (``Prompt.index``); KeyError for unused rows."""
        positions = {
            int(number): position for position, number in enumerate(self._rows.row_numbers)
        }
        return [positions[index] for index in indices]

    def _render_row(self, row: Mapping[str, Any]) -> Rendered:
        rendered = self.template.render(read_prompt(row, self.fields)[0])
        read_label(row, self.fields)
        return rendered

    def _encode(self, rendered: list[Rendered]) -> Iterator[Outcome]:
        for ids in self.template.encode_rendered(rendered):
            overlong = (
                f"the prompt has {len(ids)} tokens, --prompt_max_len is {self.prompt_max_len}: raise it, or choose "
                "--truncation left|right|middle|drop or --filter_overlong_prompts"
            )
            fitted = self._fit(ids, len(ids), self.prompt_max_len, self.truncation, overlong)
            yield (
                fitted
                if ids
                else BadRowError("empty", "the tokenizer makes no tokens of the prompt")
            )


def truncate_ids(
    token_ids: list[int], max_len: int, side: Literal["left", "right", "middle"]
) -> list[int]:
    """Cut ids to ``max_len``: ``left`` removes the beginning, ``right`` the end, ``middle`` keeps both ends."""
    begin = {"left": 0, "right": max_len, "middle": max_len // 2}[side]
    if len(token_ids) <= max_len:
        return token_ids
    return token_ids[:begin] + token_ids[len(token_ids) - (max_len - begin) :]


class SFTDataset(_PreparedDataset):
    """Map-style dataset of token ids and labels. All rows are checked and tokenised at construction.

    Labels equal the ids, not shifted, or ``IGNORE_INDEX`` for no loss. The loss covers the completion and the
    end-of-text after it, or everything with ``pretrain_mode``. Other arguments and errors as in :class:`PromptDataset`.

    Args:
        max_len: limit of prompt and completion together, in tokens.
        pretrain_mode: rows are text to model as a whole; ``input_key`` is then the column of the text.
        output_key: column of the completion; None tries the known names.
        truncation: ``error`` (default), cut on the ``right`` (default with ``pretrain_mode``) or ``drop``.
        overlong_cure: what the message about a longer row says to do.
    """

    def __init__(
        self,
        dataset: Dataset,
        tokenizer: PreTrainedTokenizerBase,
        max_len: int,
        strategy: Any = None,
        pretrain_mode: bool = False,
        *,
        input_key: str | None = None,
        output_key: str | None = None,
        input_template: str | None = None,
        apply_chat_template: bool | None = None,
        system_prompt: str | None = None,
        truncation: SFTTruncation | None = None,
        on_bad_row: BadRowPolicy | None = None,
        padding_side: PaddingSide = "right",
        num_workers: int | None = None,
        ranks: Ranks | None = None,
        fields: Mapping[str, Any] = {"supervised": True},
        overlong_cure: str = "raise --max_len, or set --truncation right (where the prompt leaves room) or drop",
    ) -> None:
        self.overlong_cure = overlong_cure
        self.max_len, self.pretrain_mode, self.padding_side = (
            int(max_len),
            pretrain_mode,
            padding_side,
        )
        self.truncation = truncation or ("right" if pretrain_mode else "error")
        if self.max_len < 2:
            raise DataError(
                f"max_len is {max_len}; at least 2, one token to see and one to predict"
            )
        check_choice("truncation", self.truncation, SFTTruncation)
        check_choice("padding_side", padding_side, PaddingSide)
        if tokenizer.eos_token_id is None:
            raise DataError(
                "the tokenizer has no end-of-text (eos) token: the model could not learn to stop; set one"
            )
        template = {"apply_chat_template": apply_chat_template, "input_template": input_template}
        # the run's own is for its prompts; documents ask nothing
        if not pretrain_mode or system_prompt is not None:
            template["system_prompt"] = system_prompt
        super().__init__(
            dataset,
            tokenizer,
            strategy,
            template=template,
            fields={
                "input_key": input_key,
                "output_key": output_key,
                "documents": pretrain_mode,
                **fields,
            },
            on_bad_row=on_bad_row,
            num_workers=num_workers,
            ranks=ranks,
        )

    def __getitem__(self, position: int) -> dict[str, torch.Tensor]:
        """``input_ids`` and ``labels``, both (S,) long."""
        position = range(len(self))[position]
        input_ids = torch.tensor(self._rows.token_ids(position), dtype=torch.long)
        labels = input_ids.clone()
        labels[: int(self._rows.prompt_lengths[position])] = IGNORE_INDEX
        return {"input_ids": input_ids, "labels": labels}

    def collate_fn(self, rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Pad to the longest row: ``input_ids``, ``attention_mask`` (1 = real token), ``labels``, all (B, S) long."""
        pad_id = self._pad_id()

        def padded(tensors: list[torch.Tensor], value: int) -> torch.Tensor:
            return torch.nn.utils.rnn.pad_sequence(
                tensors, True, value, padding_side=self.padding_side
            )

        ids = [row["input_ids"] for row in rows]
        return {
            "input_ids": padded(ids, pad_id),
            "attention_mask": padded([torch.ones_like(x) for x in ids], 0),
            "labels": padded([row["labels"] for row in rows], IGNORE_INDEX),
        }

    def examples(self, position: int) -> list[Example]:
        (number,), ids, first = (
            self.numbers([position]),
            self.ids_of(position),
            self._rows.first_answers[position],
        )
        rendered, prompt = self._render_row(self.dataset[number]), self.prompt_ids_of(position)
        rest, found = ids[len(prompt) :], []
        answers = [rest[:first], rest[first:]] if first else [rest]
        for (start, whole), answer in zip(rendered if first else [rendered], answers):
            text = whole.text[len(start.text) :]
            last = text if whole.messages is None else whole.messages[-1].get("content") or ""
            asked = Prompt(start.text, prompt, index=number, messages=start.messages)
            found.append(Example(asked, last, text, answer))
        return found

    def _pad_id(self) -> int:
        """Any id will do for padding: it is masked and has no label."""
        tokenizer = self.tokenizer
        return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    def _render_row(self, row: Mapping[str, Any]) -> tuple[Rendered, Rendered]:
        return self._rendered(*read_example(row, self.fields))

    def _rendered(
        self, prompt: str | Chat, completion: str | Chat | None
    ) -> tuple[Rendered, Rendered]:
        """Prompt, and prompt with completion, as text; the first is a prefix of the second."""
        is_text = isinstance(prompt, str) and not isinstance(completion, list)
        if completion is None and not self.pretrain_mode:
            raise BadRowError(
                "missing",
                "no completion: set --output_key, or pretrain_mode for text without a prompt",
            )
        if is_text and self.pretrain_mode:
            text = Rendered(prompt + (completion or ""), is_chat=False, messages=None)
            return text, text
        if is_text and not self.template.apply_chat_template:
            start = self.template.render(prompt)
            return start, Rendered(start.text + completion, is_chat=False, messages=None)
        chat = as_chat(prompt, "user")
        messages = chat if completion is None else chat + as_chat(completion, "assistant")
        # The line break that templates put after the last turn is not part of the answer.
        whole = Rendered(
            self.template.chat_text(messages).rstrip("\n"), is_chat=True, messages=messages
        )
        if self.pretrain_mode:
            return whole, whole
        start = Rendered(
            self.template.chat_text(chat, add_generation_prompt=True), is_chat=True, messages=chat
        )
        if not whole.text.startswith(start.text):
            message = "the chat template writes the prompt differently once it is answered; no loss can be placed"
            raise BadRowError("template", message)
        return start, whole

    def _encode(self, rendered: list[tuple[Rendered, Rendered]]) -> Iterator[Outcome]:
        return (self._fit_example(ids, prompt_length) for ids, prompt_length in self._ids(rendered))

    def _ids(self, rendered: list[tuple[Rendered, Rendered]]) -> Iterator[tuple[list[int], int]]:
        """Ids, which end with the end-of-text, and how many of them are the prompt's."""
        wholes = self.template.encode_rendered([whole for _, whole in rendered])
        prompts: Iterable[list[int]] = repeat([])
        if not self.pretrain_mode:
            prompts = self.template.encode_rendered([prompt for prompt, _ in rendered])
        for (prompt, whole), prompt_ids, ids in zip(rendered, prompts, wholes):
            if ids[: len(prompt_ids)] != prompt_ids:
                # A token would span the boundary. A rollout starts from the prompt's own ids, so training does too.
                ids = (
                    prompt_ids
                    + self.template.encode([whole.text[len(prompt.text) :]], special_tokens=False)[
                        0
                    ]
                )
            ends = [self.tokenizer.eos_token_id] * (ids[-1:] != [self.tokenizer.eos_token_id])
            yield (ids + ends if len(ids) > len(prompt_ids) else ids), len(prompt_ids)

    def _fit_example(self, ids: list[int], prompt_length: int) -> Outcome:
        if len(ids) <= prompt_length:
            what = "completion" if prompt_length else "text"
            return BadRowError("empty", f"the tokenizer makes no tokens of the {what}")
        overlong = f"{len(ids)} tokens ({prompt_length} of the prompt), the limit is {self.max_len}: {self.overlong_cure}"
        no_room = self.truncation == "right" and prompt_length >= self.max_len
        return self._fit(
            ids, prompt_length, self.max_len, "error" if no_room else self.truncation, overlong
        )
