"""What training reads: prompts for rollouts, examples for supervised training, and the resumable order of prompts."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import Sampler

from lightppo.algorithms.losses import IGNORE_INDEX
from lightppo.data.records import Prompt
from lightppo.data.rows import (
    ORIGIN_COLUMN,
    BadRowPolicy,
    Chat,
    DatasetReport,
    Dropped,
    Encoded,
    Outcome,
    PromptTemplate,
    Rendered,
    check_dataset,
    origin_of,
    prepare_rows,
    read_example,
    read_label,
    read_prompt,
    resolve_fields,
    setting,
)
from lightppo.errors import BadRowError, DataError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

DATA_SOURCE_KEY = "data_source"
Truncation = Literal["error", "left", "right", "middle", "drop"]
SFTTruncation = Literal["error", "right", "drop"]


class _PreparedDataset(TorchDataset):
    """Rows that are checked and tokenised at construction, so that bad data shows up then."""

    def __init__(self, dataset: Dataset, tokenizer: PreTrainedTokenizerBase) -> None:
        check_dataset(dataset)
        self.dataset = dataset
        self.tokenizer = tokenizer

    def _prepare(
        self,
        strategy: Any,
        on_bad_row: BadRowPolicy | None,
        num_workers: int | None,
        input_key: str | None,
        **fields: Any,
    ) -> None:
        """Decide how rows are read, and tokenise them all; missing options are looked up in ``strategy.args``."""
        columns = self.dataset.column_names
        self.fields = resolve_fields(columns, input_key=setting(input_key, strategy, "input_key", "input"), **fields)
        read = {name: keys for name in ("prompt", "completion", "label") if (keys := getattr(self.fields, name))}
        logger.info("columns that are read: %s", read)
        self._rows = prepare_rows(
            self.dataset,
            self.fields.columns_in(columns),
            self._encode_chunk,
            on_bad_row=setting(on_bad_row, strategy, "on_bad_row", "error"),
            num_workers=int(setting(num_workers, strategy, "data_num_workers", 0)),
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

    def _render_row(self, row: Mapping[str, Any]) -> Any:
        raise NotImplementedError

    def _encode(self, rendered: list[Any]) -> Iterable[Outcome]:
        raise NotImplementedError

    @property
    def report(self) -> DatasetReport:
        """Counts of rows kept, truncated, and dropped by reason."""
        return self._rows.report

    def __len__(self) -> int:
        return len(self._rows)

    def _checked(self, position: int) -> int:
        if not -len(self) <= position < len(self):
            raise IndexError(f"row {position} of {len(self)}")
        return position % len(self)

    def origin(self, position: int) -> str:
        """File and line, or row number, of the row at this position."""
        number = int(self._rows.row_numbers[position])
        return origin_of(self.dataset[number], number)


class PromptDataset(_PreparedDataset):
    """Map-style dataset of prompts. All rows are checked and tokenised at construction; DataError names a bad row.

    ``Prompt.index`` is the row's number in ``dataset``, even if earlier rows were dropped. ``Prompt.extra`` has every
    column except the prompt's, including the label's. Missing options are looked up in ``strategy.args`` (for scripts
    in the seed's style); keys may be dotted.

    Args:
        dataset: best from :func:`~lightppo.data.readers.blending_datasets`, which keeps each row's file and line.
        input_template: text with one ``{}`` for the prompt.
        input_key: column of the prompt; None recognises the forms in ``docs/data.md``.
        label_key: column of the ground truth, which every row must then have.
        prompt_max_len: limit, in tokens.
        truncation: treatment of a longer prompt: ``error`` (a bad row), cut on a side, or ``drop``.
        system_prompt: system message for chats without one.
        on_bad_row: ``error`` or ``skip`` (counted in ``report``, named in the log).
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
        super().__init__(dataset, tokenizer)
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
        label_key = setting(label_key, strategy, "label_key", None)
        self._prepare(strategy, on_bad_row, num_workers, input_key, label_key=label_key)

    def __getitem__(self, position: int) -> Prompt:
        return self.__getitems__([self._checked(position)])[0]

    def __getitems__(self, positions: list[int]) -> list[Prompt]:
        """Several prompts with one access to the table; torch's DataLoader calls it for a batch."""
        if not positions:
            return []
        numbers = [int(self._rows.row_numbers[position]) for position in positions]
        columns = self.dataset[numbers]
        rows = [dict(zip(columns, values)) for values in zip(*columns.values())]
        return [self._prompt(position, number, row) for position, number, row in zip(positions, numbers, rows)]

    def _prompt(self, position: int, number: int, row: Mapping[str, Any]) -> Prompt:
        prompt, key = read_prompt(row, self.fields)
        rendered = self.template.render(prompt)
        token_ids = self._rows.token_ids(position)
        text = rendered.text
        if self._rows.truncated[position]:  # the text shows what the model sees, except plain text's begin-of-text
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
        """The list itself; empty if this rank has no share of the last batch."""
        return prompts

    def positions_of(self, indices: Iterable[int]) -> list[int]:
        """Positions of the prompts with these row numbers (``Prompt.index``); KeyError for unused rows."""
        positions = {int(number): position for position, number in enumerate(self._rows.row_numbers)}
        return [positions[index] for index in indices]

    def _render_row(self, row: Mapping[str, Any]) -> Rendered:
        rendered = self.template.render(read_prompt(row, self.fields)[0])
        read_label(row, self.fields)
        return rendered

    def _encode(self, rendered: list[Rendered]) -> Iterable[Outcome]:
        return map(self._fit, self.template.encode_rendered(rendered))

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


def truncate_ids(token_ids: list[int], max_len: int, side: Literal["left", "right", "middle"]) -> list[int]:
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
        super().__init__(dataset, tokenizer)
        self.max_len, self.pretrain_mode = int(max_len), pretrain_mode
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
        if not pretrain_mode:  # documents ask nothing: the run's system prompt is for its prompts
            system_prompt = setting(system_prompt, strategy, "system_prompt", None)
        self.template = PromptTemplate(
            tokenizer,
            apply_chat_template=bool(setting(apply_chat_template, strategy, "apply_chat_template", False)),
            input_template=setting(input_template, strategy, "input_template", None),
            system_prompt=system_prompt,
        )
        output_key = setting(output_key, strategy, "output_key", None)
        fields = {"output_key": output_key, "supervised": True, "documents": pretrain_mode}
        self._prepare(strategy, on_bad_row, num_workers, input_key, **fields)

    def __getitem__(self, position: int) -> dict[str, torch.Tensor]:
        """``input_ids`` and ``labels``, both (S,) long."""
        position = self._checked(position)
        input_ids = torch.tensor(self._rows.token_ids(position), dtype=torch.long)
        labels = input_ids.clone()
        labels[: int(self._rows.prompt_lengths[position])] = IGNORE_INDEX
        return {"input_ids": input_ids, "labels": labels}

    def collate_fn(self, rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Pad to the longest row: ``input_ids``, ``attention_mask`` (1 = real token), ``labels``, all (B, S) long."""
        pad_id = self.tokenizer.pad_token_id
        if pad_id is None:
            pad_id = self.tokenizer.eos_token_id  # any id will do: it is masked and has no label

        def padded(tensors: list[torch.Tensor], value: int) -> torch.Tensor:
            return torch.nn.utils.rnn.pad_sequence(tensors, True, value, padding_side=self.padding_side)

        ids = [row["input_ids"] for row in rows]
        return {
            "input_ids": padded(ids, pad_id),
            "attention_mask": padded([torch.ones_like(x) for x in ids], 0),
            "labels": padded([row["labels"] for row in rows], IGNORE_INDEX),
        }

    def _render_row(self, row: Mapping[str, Any]) -> tuple[Rendered, Rendered]:
        """Prompt, and prompt with completion, as text; the first is a prefix of the second."""
        prompt, completion = read_example(row, self.fields)
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
        # The line break that templates put after the last turn is not part of the answer.
        return Rendered(self.template.chat_text(messages).rstrip("\n"), is_chat=True, messages=messages)

    def _encode(self, rendered: list[tuple[Rendered, Rendered]]) -> Iterator[Outcome]:
        wholes = self.template.encode_rendered([whole for _, whole in rendered])
        if self.pretrain_mode:
            yield from (self._fit(ids, 0) for ids in wholes)
            return
        prompts = self.template.encode_rendered([prompt for prompt, _ in rendered])
        for (prompt, whole), prompt_ids, ids in zip(rendered, prompts, wholes):
            if ids[: len(prompt_ids)] != prompt_ids:
                # A token would span the boundary. A rollout starts from the prompt's own ids, so training does too.
                rest = self.template.encode([whole.text[len(prompt.text) :]], special_tokens=False)[0]
                ids = prompt_ids + rest
            yield self._fit(ids, len(prompt_ids))

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


class RolloutBatchSampler(Sampler[list[int]]):
    """Batches of prompt positions for one rank; ``batch_size`` is over all ranks.

    An epoch's order and its global batches depend only on seed, epoch and position, not on the number of ranks. Rank r
    gets ``batch[r::world_size]`` of every global batch: all ranks yield equally many batches, and a rank's share of the
    last one may be an EMPTY list. The position (``consumed_samples``) counts prompts over all ranks within the epoch,
    and moves on when a batch is yielded; so use it with ``DataLoader(num_workers=0)``, which does not prefetch.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
        seed: int = 42,
    ) -> None:
        if num_samples < 1:
            raise ValueError(f"num_samples is {num_samples}: the dataset is empty")
        if batch_size < 1:
            raise ValueError(f"--rollout_batch_size is {batch_size}; at least 1")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of {world_size}")
        self.num_samples, self.batch_size = num_samples, batch_size
        self.rank, self.world_size = rank, world_size
        self.shuffle, self.seed = shuffle, seed
        self.epoch = 0
        self.consumed_samples = 0
        self._start = 0
        self._left_out: frozenset[int] = frozenset()

    def leave_out(self, positions: Iterable[int]) -> None:
        """Leave these prompts out of all further passes, in addition to earlier ones; call it alike on every rank."""
        left_out = self._left_out | set(positions)
        if unknown := sorted(p for p in left_out if not 0 <= p < self.num_samples):
            raise ValueError(f"prompt {unknown[0]} of {self.num_samples} cannot be left out")
        if len(left_out) == self.num_samples:
            raise ValueError(f"all {self.num_samples} prompts would be left out")
        self._left_out = frozenset(left_out)

    @property
    def epoch_size(self) -> int:
        """Prompts per epoch."""
        return self.num_samples - len(self._left_out)

    @property
    def batches_per_epoch(self) -> int:
        """Batches in a whole epoch."""
        return -(-self.epoch_size // self.batch_size)

    def order(self) -> list[int]:
        """Positions of all prompts in this epoch's order, the same on every rank."""
        whole: Iterable[int] = range(self.num_samples)
        if self.shuffle:
            # Not seed + epoch: epoch 1 of seed 42 would be epoch 0 of seed 43.
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % 2**63)
            whole = torch.randperm(self.num_samples, generator=generator).tolist()
        return [position for position in whole if position not in self._left_out]

    def __iter__(self) -> Iterator[list[int]]:
        order, start = self.order(), self._start
        self._start = 0  # a resumed position counts once; the next pass is complete
        self.consumed_samples = start
        for begin in range(start, len(order), self.batch_size):
            batch = order[begin : begin + self.batch_size]
            self.consumed_samples = begin + len(batch)
            yield batch[self.rank :: self.world_size]

    def __len__(self) -> int:
        """Batches in the next pass (equal on all ranks); after a resume, fewer than in an epoch."""
        return -(-(self.epoch_size - self._start) // self.batch_size)

    def set_epoch(self, epoch: int, consumed_samples: int = 0) -> None:
        """Choose the next pass's order, and its start: how many prompts of this epoch all ranks have used."""
        if not 0 <= consumed_samples <= self.epoch_size:
            raise ValueError(
                f"consumed_samples is {consumed_samples}, but an epoch has {self.epoch_size} prompts; "
                "it counts within the epoch"
            )
        self.epoch = epoch
        self.consumed_samples = self._start = consumed_samples

    def state_dict(self) -> dict[str, Any]:
        """Epoch, position, and what must stay the same for the position to keep its meaning."""
        names = ("epoch", "consumed_samples", "num_samples", "shuffle", "seed")
        return {name: getattr(self, name) for name in names} | {"left_out": sorted(self._left_out)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the prompts that the saved run had used; world size and batch size may differ."""
        for name in ("num_samples", "shuffle", "seed"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"the checkpoint's sampler has {name} {state[name]}, this run has {getattr(self, name)}: its "
                    "position means nothing in this data; use the same data and --seed, or start anew"
                )
        self._left_out = frozenset(state.get("left_out", ()))
        self.set_epoch(state["epoch"], state["consumed_samples"])
