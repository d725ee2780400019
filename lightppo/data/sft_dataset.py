"""Supervised rows (prompt and completion) and plain text, for SFT and for the PTX loss beside PPO."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
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
from lightppo.data.rows import Chat, read_example, resolve_fields
from lightppo.data.templates import PromptTemplate, Rendered
from lightppo.errors import BadRowError, DataError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

IGNORE_INDEX = -100  # labels with this value have no loss
SFTTruncation = Literal["error", "right", "drop"]


class SFTDataset(TorchDataset):
    """Map-style dataset of token ids and labels. All rows are checked and tokenised at construction.

    Labels equal the ids where there is a loss, ``IGNORE_INDEX`` elsewhere (the loss shifts them, not the data). The
    loss is on the completion and on the end-of-text after it, or, with ``pretrain_mode``, on everything.

    Args:
        dataset: a ``datasets.Dataset``, best from :func:`~lightppo.data.loading.blending_datasets`.
        tokenizer: a Hugging Face tokenizer with an end-of-text token.
        max_len: limit of prompt and completion together, in tokens.
        strategy: only for scripts in the seed's style: options not given are looked up in ``strategy.args``.
        pretrain_mode: rows are text to model as a whole.
        input_key: column of the prompt, or of the text; the forms of ``docs/data.md`` are recognised without it.
        output_key: column of the completion; None tries the known names (``pretrain_mode``: the input is all text).
        input_template: text with one ``{}`` where the prompt goes.
        apply_chat_template: render text prompts as a user message of the tokenizer's chat template.
        system_prompt: system message for chats that have none.
        truncation: a row over ``max_len``: ``error`` (a bad row; the default for SFT), cut on the ``right`` (the
            default for ``pretrain_mode``), or ``drop``. A row whose prompt leaves no room for a completion is bad.
        on_bad_row: ``error`` or ``skip`` (counted in ``report``, named in the log).
        padding_side: of ``collate_fn``.
        num_workers: processes that tokenise; 0: this one.

    Raises:
        DataError: no such column, an empty dataset, a bad row, a tokenizer without end-of-text.
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
        padding_side: Literal["left", "right"] = "right",
        num_workers: int | None = None,
    ) -> None:
        check_dataset(dataset)
        self.dataset, self.tokenizer, self.max_len, self.pretrain_mode = dataset, tokenizer, int(max_len), pretrain_mode
        self.truncation = truncation or ("right" if pretrain_mode else "error")
        self.padding_side = padding_side
        if self.max_len < 2:
            raise DataError(f"max_len is {max_len}; at least 2, one token to see and one to predict")
        if self.truncation not in get_args(SFTTruncation):
            raise DataError(f"truncation is {self.truncation!r}; one of {', '.join(get_args(SFTTruncation))}")
        if padding_side not in ("left", "right"):
            raise DataError(f"padding_side is {padding_side!r}; left or right")
        if tokenizer.eos_token_id is None:
            raise DataError("the tokenizer has no end-of-text (eos) token: the model could not learn to stop; set one")
        self.template = PromptTemplate(
            tokenizer,
            apply_chat_template=bool(setting(apply_chat_template, strategy, "apply_chat_template", False)),
            input_template=setting(input_template, strategy, "input_template", None),
            # Documents are not asked anything: a system prompt of the run is for its prompts.
            system_prompt=system_prompt if pretrain_mode else setting(system_prompt, strategy, "system_prompt", None),
        )
        self.fields = resolve_fields(
            dataset.column_names,
            input_key=setting(input_key, strategy, "input_key", "input"),
            output_key=setting(output_key, strategy, "output_key", None),
            supervised=True,
            documents=pretrain_mode,
        )
        logger.info(
            "prompt from %s; completion from %s", self.fields.prompt, self.fields.completion or "the same column"
        )
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

    def __getitem__(self, position: int) -> dict[str, torch.Tensor]:
        """``input_ids`` and ``labels``, both (S,) long."""
        if not -len(self) <= position < len(self):
            raise IndexError(f"row {position} of {len(self)}")
        position = position % len(self)
        input_ids = torch.tensor(self._rows.token_ids(position), dtype=torch.long)
        labels = input_ids.clone()
        labels[: int(self._rows.prompt_lengths[position])] = IGNORE_INDEX
        return {"input_ids": input_ids, "labels": labels}

    def origin(self, position: int) -> str:
        """File and line, or row number, of the row at this position."""
        number = int(self._rows.row_numbers[position])
        return origin_of(self.dataset[number], number)

    def collate_fn(self, rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Pad to the longest row.

        Returns:
            ``input_ids``, ``attention_mask`` (1 = real token) and ``labels``, all (B, S) long.
        """
        pad_id = self.tokenizer.pad_token_id
        if pad_id is None:
            pad_id = self.tokenizer.eos_token_id  # any id does: masked, and without labels
        width = max(len(row["input_ids"]) for row in rows)
        batch = {
            "input_ids": torch.full((len(rows), width), pad_id, dtype=torch.long),
            "attention_mask": torch.zeros((len(rows), width), dtype=torch.long),
            "labels": torch.full((len(rows), width), IGNORE_INDEX, dtype=torch.long),
        }
        for i, row in enumerate(rows):
            length = len(row["input_ids"])
            span = slice(width - length, width) if self.padding_side == "left" else slice(0, length)
            batch["input_ids"][i, span] = row["input_ids"]
            batch["attention_mask"][i, span] = 1
            batch["labels"][i, span] = row["labels"]
        return batch

    def _encode_chunk(self, rows: list[dict[str, Any]]) -> list[Outcome]:
        outcomes: list[Outcome | None] = [None] * len(rows)
        texts: dict[int, tuple[Rendered, Rendered]] = {}  # prompt, prompt with completion
        for i, row in enumerate(rows):
            try:
                texts[i] = self._render(*read_example(row, self.fields))
            except BadRowError as error:
                outcomes[i] = error
        wholes = self.template.encode_rendered([whole for _, whole in texts.values()])
        prompts = wholes
        if not self.pretrain_mode:
            prompts = self.template.encode_rendered([prompt for prompt, _ in texts.values()])
        for (i, (prompt, whole)), prompt_ids, whole_ids in zip(texts.items(), prompts, wholes):
            ids = whole_ids
            if not self.pretrain_mode and whole_ids[: len(prompt_ids)] != prompt_ids:
                # A token would span the boundary. A rollout starts from the prompt's own ids: so does training.
                rest = self.template.encode([whole.text[len(prompt.text) :]], special_tokens=False)[0]
                ids = prompt_ids + rest
            outcomes[i] = self._fit(ids, 0 if self.pretrain_mode else len(prompt_ids))
        return outcomes  # type: ignore[return-value]  # every row has its outcome now

    def _render(self, prompt: str | Chat, completion: str | Chat | None) -> tuple[Rendered, Rendered]:
        """Prompt, and prompt with completion, as text; the first is a prefix of the second."""
        if self.pretrain_mode and isinstance(prompt, str) and not isinstance(completion, list):
            text = Rendered(prompt + (completion or ""), is_chat=False, messages=None)
            return text, text
        if completion is None:
            if not self.pretrain_mode:
                raise BadRowError(
                    "missing", "no completion: set --output_key, or pretrain_mode for text without a prompt"
                )
            whole = self._closed_chat(prompt)  # type: ignore[arg-type]  # text was handled above
            return whole, whole
        if isinstance(completion, str) and isinstance(prompt, str) and not self.template.apply_chat_template:
            start = self.template.render(prompt)
            return start, Rendered(start.text + completion, is_chat=False, messages=None)
        chat = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        answer = completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}]
        start = Rendered(self.template.chat_text(chat, add_generation_prompt=True), is_chat=True, messages=chat)
        whole = self._closed_chat(chat + answer)
        if not self.pretrain_mode and not whole.text.startswith(start.text):
            raise BadRowError(
                "template", "the chat template writes the prompt differently once it is answered; no loss can be placed"
            )
        return start, whole

    def _closed_chat(self, messages: Chat) -> Rendered:
        # The line break that templates put after the last turn is not the answer's.
        return Rendered(self.template.finished_chat_text(messages).rstrip("\n"), is_chat=True, messages=messages)

    def _fit(self, ids: list[int], prompt_length: int) -> Outcome:
        eos_id = self.tokenizer.eos_token_id
        if len(ids) <= prompt_length:
            return BadRowError("empty", "the completion has no tokens" if prompt_length else "the text has no tokens")
        if ids[-1] != eos_id:
            ids = [*ids, eos_id]
        if len(ids) <= self.max_len:
            return Encoded(ids, prompt_length, truncated=False)
        if self.truncation == "drop":
            return Dropped("overlong")
        if self.truncation == "error" or prompt_length >= self.max_len:
            return BadRowError(
                "overlong",
                f"{len(ids)} tokens ({prompt_length} of the prompt), the limit is {self.max_len}: raise it, "
                "or choose truncation right (where the prompt leaves room) or drop",
            )
        return Encoded(ids[: self.max_len], prompt_length, truncated=True)
