"""Data sets of examples: ids of a prompt with its answer, or of a whole text, and labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from lightppo.algorithms.losses import IGNORE_INDEX
from lightppo.data.chat_templates import (
    PromptTemplate,
    Rendered,
    Span,
    assistant_turns,
    check_answer,
    closed,
    differs,
    ended,
)
from lightppo.data.datasets import PreparedDataset, setting
from lightppo.data.example_rows import read_example, resolve_example_fields
from lightppo.data.prepared_rows import (
    BadRowPolicy,
    Encoded,
    Outcome,
    check_choice,
    columns_of,
)
from lightppo.data.records import Prompt
from lightppo.data.rows import Chat, as_chat, shared_length, template_options
from lightppo.errors import BadRowError, DataError
from lightppo.ranks import Ranks

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

SFTTruncation = Literal["error", "right", "drop"]
PaddingSide = Literal["left", "right"]


class Example(NamedTuple):
    """A prompt and an answer that is trained on; both are empty where a prompt is to be answered."""

    prompt: Prompt
    written: str = ""  # the answer, as the row has it
    answer: str = ""  # after the template
    answer_ids: Sequence[int] = ()
    learned: Sequence[bool] = ()  # which of them


def examples_of(rows: PreparedDataset, position: int) -> list[Example]:
    """Return a row as texts and ids: its prompt with each of its answers, of which a prompt for rollouts has none."""
    if isinstance(rows, SFTDataset):
        return rows.examples(position)
    return [Example(rows[position])]


class SFTDataset(PreparedDataset):
    """Map-style dataset of token ids and labels. All rows are checked and tokenised at construction.

    Labels equal the ids, not shifted, or ``IGNORE_INDEX`` for no loss. The loss covers the completion and the
    end-of-text after it, or everything with ``pretrain_mode``. Other arguments and errors as in
    :class:`~lightppo.data.datasets.PromptDataset`.

    The first nine arguments have OpenRLHF's places. Of a script's ``strategy.args`` count ``input_key``, ``output_key``,
    ``apply_chat_template`` and ``tokenizer_chat_template``, and its rows are taken as OpenRLHF takes them: one that is
    too long is cut on the right and ends with the end-of-text; rows whose prompt leaves no room, rows without an answer
    and pairs of equal answers are left out. ``report`` counts all of them, and the log tells it.

    Args:
        max_length, max_len: limit of prompt and completion together, in tokens; one of the two.
        pretrain_mode: rows are text to model as a whole; ``input_key`` is then the column of the text.
        output_key: column of the completion; None tries the known names.
        truncation: ``error`` (default), cut on the ``right`` (default with ``pretrain_mode``) or ``drop``.
        multiturn: learn every turn of the assistant in a chat, not the last alone.
        overlong_cure: what the message about a longer row says to do.
    """

    def __init__(
        self,
        dataset: Dataset,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int | None = None,
        strategy: Any = None,
        input_template: str | bool | None = None,
        pretrain_mode: bool = False,
        num_processors: int | None = None,
        multiple_of: int = 1,
        multiturn: bool = False,
        *,
        max_len: int | None = None,
        input_key: str | None = None,
        output_key: str | None = None,
        apply_chat_template: bool | None = None,
        system_prompt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | str | None = None,
        truncation: SFTTruncation | None = None,
        on_bad_row: BadRowPolicy | None = None,
        padding_side: PaddingSide = "right",
        num_workers: int | None = None,
        ranks: Ranks | None = None,
        fields: Mapping[str, Any] = {},
        overlong_cure: str = "raise --max_len, or set --truncation right (where the prompt leaves room) or drop",
    ) -> None:
        if isinstance(input_template, bool):  # older calls have pretrain_mode in this place
            pretrain_mode = input_template
            input_template = None
        if multiturn and pretrain_mode:
            raise DataError("multiturn needs chats, so no pretrain_mode")
        args = script_args(strategy, tokenizer, multiple_of)
        self.of_script = args is not None
        if self.of_script:
            truncation = truncation or getattr(args, "truncation", None) or "right"
            if pretrain_mode or setting(strategy, "apply_chat_template", apply_chat_template):
                input_template = None
            strategy = with_args(args, input_template=input_template)
        self.overlong_cure = overlong_cure
        self.multiturn = multiturn
        self.max_len = _one_length(max_length, max_len)
        self.pretrain_mode = pretrain_mode
        self.padding_side = padding_side
        self.truncation = truncation or ("right" if pretrain_mode else "error")
        check_choice("truncation", self.truncation, SFTTruncation)
        check_choice("padding_side", padding_side, PaddingSide)
        if tokenizer.eos_token_id is None:
            raise DataError(
                "the tokenizer has no end-of-text (eos) token: the model could not learn to stop; set one"
            )
        form: dict[str, Any] = {
            "apply_chat_template": apply_chat_template,
            "input_template": input_template,
            "chat_template_kwargs": chat_template_kwargs,
        }
        # The system prompt of the run is for prompts, and documents have none.
        if not pretrain_mode or system_prompt is not None:
            form["system_prompt"] = system_prompt
        of_row = {"input_key": input_key, "output_key": output_key, "documents": pretrain_mode}
        of_row |= fields
        workers = num_processors if num_workers is None else num_workers
        super().__init__(
            dataset,
            PromptTemplate(tokenizer, **_settings(strategy, form)),
            resolve_example_fields(columns_of(dataset), **_settings(strategy, of_row)),
            on_bad_row=setting(strategy, "on_bad_row", on_bad_row, "error"),
            num_workers=setting(strategy, "data_num_workers", workers, 0),
            ranks=ranks,
        )

    def __getitem__(self, position: int) -> dict[str, torch.Tensor]:
        """Return ``input_ids`` and ``labels``, both (S,) long."""
        position = range(len(self))[position]
        input_ids = torch.tensor(self._rows.token_ids(position), dtype=torch.long)
        labels = input_ids.clone()
        labels[~torch.from_numpy(self._rows.learned(position))] = IGNORE_INDEX
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

    @property
    def packing_collate_fn(self) -> Any:
        """The same as ``collate_fn``: a model with ``packing_samples`` packs the batch itself."""
        return self.collate_fn

    def examples(self, position: int) -> list[Example]:
        """See :func:`examples_of`."""
        (number,), ids, first = (
            self.numbers([position]),
            self.ids_of(position),
            self._rows.first_answers[position],
        )
        rendered = self._render_row(self.row(number))
        prompt = self.prompt_ids_of(position)
        rest = ids[len(prompt) :]
        examples = []
        answers = [rest[:first], rest[first:]] if first else [rest]
        learned = self._rows.learned(position)[len(prompt) :]
        for (start, whole, *_), answer in zip(rendered if first else [rendered], answers):
            text = whole.text[len(start.text) :]
            last = text if whole.messages is None else whole.messages[-1].get("content") or ""
            question = Prompt(start.text, prompt, index=number, messages=start.messages)
            flags = learned.tolist() if self.multiturn else [True] * len(answer)
            examples.append(Example(question, last, text, answer, flags))
        return examples

    def _pad_id(self) -> int:
        """Return an id for padding. Any will do: it is masked and has no label."""
        tokenizer = self.tokenizer
        if tokenizer.pad_token_id is None:
            return tokenizer.eos_token_id
        return tokenizer.pad_token_id

    def _render_row(self, row: Mapping[str, Any]) -> Sequence[Any]:
        """Return prompt and whole, as of :meth:`_rendered`; with ``multiturn`` also where its turns are."""
        prompt, completion = read_example(row, self.fields)
        options = template_options(row)
        if not self.multiturn:
            return self._rendered(prompt, completion, options)
        if completion is None:
            raise BadRowError("missing", "no completion: the chat ends without an answer")
        chat = as_chat(prompt, "user") + as_chat(completion, "assistant")
        is_text = isinstance(prompt, str) and isinstance(completion, str)
        if is_text and not self.template.apply_chat_template:
            raise BadRowError(
                "wrong_type", "--multiturn: the row is no chat; set --apply_chat_template for texts"
            )
        text, spans = assistant_turns(self.template, chat, options)
        start = Rendered(text[: spans[0][0]], is_chat=True, messages=chat[:1])
        return start, Rendered(text, is_chat=True, messages=chat), spans

    def _rendered(
        self,
        prompt: str | Chat,
        completion: str | Chat | None,
        options: Mapping[str, Any] = {},
    ) -> tuple[Rendered, Rendered]:
        """Return prompt, and prompt with completion, as text; the first is a prefix of the second."""
        is_text = isinstance(prompt, str) and not isinstance(completion, list)
        if completion is None and not self.pretrain_mode:
            raise BadRowError(
                "missing",
                "no completion: set --output_key, or pretrain_mode for text without a prompt",
            )
        if is_text and self.pretrain_mode:
            document = Rendered(f"{prompt}{completion or ''}", is_chat=False, messages=None)
            return document, document
        if is_text and not self.template.apply_chat_template:
            start = self.template.render(prompt, options)
            return start, Rendered(f"{start.text}{completion}", is_chat=False, messages=None)
        chat = as_chat(prompt, "user")
        answer = [] if completion is None else as_chat(completion, "assistant")
        text = closed(self.template.chat_text(chat + answer, options))
        whole = Rendered(text, is_chat=True, messages=chat + answer)
        if self.pretrain_mode:
            check_answer((chat + answer)[-1], whole.text)
            return whole, whole
        start = Rendered(
            self.template.chat_text(chat, options, add_generation_prompt=True),
            is_chat=True,
            messages=chat,
        )
        shared = shared_length(start.text, whole.text)
        for message in answer:
            if message["role"] == "assistant":
                check_answer(message, whole.text[shared:])
        if shared < len(start.text):
            raise BadRowError("template", differs(start.text, whole.text, shared))
        return start, whole

    def _encode(self, rendered: list[Any]) -> Iterator[Outcome]:
        if not self.multiturn:
            for ids, prompt_length in self._ids(rendered):
                yield self._fit_example(ids, prompt_length)
            return
        for _, whole, spans in rendered:
            ids, learned = self._ids_of_turns(whole.text, spans)
            fitted = self._fit_example(ids, learned.index(True))
            yield fitted._replace(learned=learned) if isinstance(fitted, Encoded) else fitted

    def _ids_of_turns(self, text: str, spans: Sequence[Span]) -> tuple[list[int], list[bool]]:
        """Return ids of a chat, and which are learned. No token spans the end of a prompt: none does in a rollout."""
        ids: list[int] = []
        learned: list[bool] = []
        place = 0
        for begin, end in spans:
            for piece, is_learned in ((text[place:begin], False), (text[begin:end], True)):
                new = self._ids_of_piece(piece, is_first=not ids)
                ids += new
                learned += [is_learned] * len(new)
            place = end
        rest = self._ids_of_piece(text[place:], is_first=False)
        ids = ids + rest
        learned = learned + [False] * len(rest)
        ends = ids[-1:] != [self.tokenizer.eos_token_id]
        return ids + [self.tokenizer.eos_token_id] * ends, learned + [True] * ends

    def _ids_of_piece(self, text: str, is_first: bool) -> list[int]:
        if not text:
            return []
        if is_first:
            return self.template.encode([text], special_tokens=False)[0]
        return self.template.encode_behind(text)

    def _ids(self, rendered: list[tuple[Rendered, Rendered]]) -> Iterator[tuple[list[int], int]]:
        """Yield ids, which end with the end-of-text, and how many of them are the prompt's."""
        if self.pretrain_mode:
            wholes = self.template.encode_rendered([whole for _, whole in rendered])
            answered: Iterator[tuple[list[int], int]] = ((ids, 0) for ids in wholes)
        else:
            answered = self.template.encode_answered(rendered)
        for ids, start in answered:
            yield ended(ids, self.tokenizer.eos_token_id) if len(ids) > start else ids, start

    def _encode_chunk(self, rows: list[dict[str, Any]]) -> list[Outcome]:
        outcomes = super()._encode_chunk(rows)
        if self.of_script:
            return [_left_out(outcome) for outcome in outcomes]
        return outcomes

    def _fit_example(self, ids: list[int], prompt_length: int) -> Outcome:
        if not (self.of_script and self.truncation == "right" and not self.pretrain_mode):
            return self._fit(ids, prompt_length)
        if prompt_length > self.max_len - _ROOM:
            return "overlong"
        fitted = self._fit(ids, prompt_length)
        if not (isinstance(fitted, Encoded) and fitted.truncated):
            return fitted
        return fitted._replace(token_ids=[*fitted.token_ids[:-1], self.tokenizer.eos_token_id])

    def _fit(self, ids: list[int], prompt_length: int) -> Outcome:
        if len(ids) <= prompt_length:
            what = "completion" if prompt_length else "text"
            return BadRowError("empty", f"the tokenizer makes no tokens of the {what}")
        if len(ids) <= self.max_len:
            return Encoded(ids, prompt_length, truncated=False)
        overlong = f"{len(ids)} tokens ({prompt_length} of the prompt), the limit is {self.max_len}: {self.overlong_cure}"
        no_room = self.truncation == "right" and prompt_length >= self.max_len
        return self._cut(
            ids, prompt_length, self.max_len, "error" if no_room else self.truncation, overlong
        )


def _settings(strategy: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: setting(strategy, name, value) for name, value in given.items()}


# -- rows of scripts -------------------------------------------------------------------------------------------------

_LEFT_OUT = ("empty", "equal")  # rows with nothing to learn, which a script's data may have
_ROOM = 2  # tokens of an answer that a prompt must leave room for, one of them the end-of-text


def _left_out(outcome: Outcome) -> Outcome:
    if isinstance(outcome, BadRowError) and outcome.reason in _LEFT_OUT:
        return outcome.reason
    return outcome


def _one_length(max_length: int | None, max_len: int | None) -> int:
    given = [limit for limit in (max_length, max_len) if limit is not None]
    if len(given) != 1:
        raise DataError(f"give max_length or max_len, not both: {max_length} and {max_len}")
    limit = int(given[0])
    if limit < 2:
        raise DataError(f"max_len is {limit}; at least 2, one token to see and one to predict")
    return limit


def script_args(strategy: Any, tokenizer: Any, multiple_of: int) -> Any:
    """Return the script's options, or ``None``; set the chat template that they name."""
    if multiple_of != 1:
        raise DataError(
            f"multiple_of {multiple_of}: sequences are not split over ranks here; leave out --ring_attn_size"
        )
    args = getattr(strategy, "args", None)
    template = getattr(args, "tokenizer_chat_template", None)
    if template and getattr(args, "apply_chat_template", False):
        tokenizer.chat_template = template
    return args


def with_args(args: Any, **changes: Any) -> Any:
    """Return a strategy whose ``args`` are the script's with these changes."""
    if args is None:
        return None
    return SimpleNamespace(args=SimpleNamespace(**vars(args) | changes))
