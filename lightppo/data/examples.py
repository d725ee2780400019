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
        template_settings: dict[str, Any] = {
            "apply_chat_template": apply_chat_template,
            "input_template": input_template,
            "chat_template_kwargs": chat_template_kwargs,
        }
        # The system prompt of the run is for prompts, and documents have none.
        if not pretrain_mode or system_prompt is not None:
            template_settings["system_prompt"] = system_prompt
        columns: dict[str, Any] = {"input_key": input_key, "output_key": output_key}
        columns |= {"documents": pretrain_mode, **fields}
        if num_workers is None:
            num_workers = num_processors
        super().__init__(
            dataset,
            PromptTemplate(tokenizer, **_settings(strategy, template_settings)),
            resolve_example_fields(columns_of(dataset), **_settings(strategy, columns)),
            on_bad_row=setting(strategy, "on_bad_row", on_bad_row, "error"),
            num_workers=setting(strategy, "data_num_workers", num_workers, 0),
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

        def padded(tensors: list[torch.Tensor], value: int) -> torch.Tensor:
            return torch.nn.utils.rnn.pad_sequence(
                tensors, True, value, padding_side=self.padding_side
            )

        token_ids = [row["input_ids"] for row in rows]
        return {
            "input_ids": padded(token_ids, self._pad_id()),
            "attention_mask": padded(list(map(torch.ones_like, token_ids)), 0),
            "labels": padded([row["labels"] for row in rows], IGNORE_INDEX),
        }

    @property
    def packing_collate_fn(self) -> Any:
        """The same as ``collate_fn``: a model with ``packing_samples`` packs the batch itself."""
        return self.collate_fn

    def examples(self, position: int) -> list[Example]:
        """See :func:`examples_of`."""
        (number,) = self.numbers([position])
        prompt_ids = self.prompt_ids_of(position)
        answer_ids = self.ids_of(position)[len(prompt_ids) :]
        rendered = self._render_row(self.row(number))
        first_length = self._rows.first_answers[position]
        if first_length:  # a pair
            answers = zip(rendered, (answer_ids[:first_length], answer_ids[first_length:]))
        else:
            answers = zip([rendered], [answer_ids])
        examples = []
        for (prompt, example, *_), example_ids in answers:
            answer_text = example.text[len(prompt.text) :]
            written = answer_text
            if example.messages is not None:
                written = example.messages[-1].get("content") or ""
            learned = [True] * len(example_ids)
            if self.multiturn:
                learned = self._rows.learned(position)[len(prompt_ids) :].tolist()
            question = Prompt(prompt.text, prompt_ids, index=number, messages=prompt.messages)
            examples.append(Example(question, written, answer_text, example_ids, learned))
        return examples

    def _pad_id(self) -> int:
        """Return an id for padding. Any will do: it is masked and has no label."""
        tokenizer = self.tokenizer
        if tokenizer.pad_token_id is None:
            return tokenizer.eos_token_id
        return tokenizer.pad_token_id

    def _render_row(self, row: Mapping[str, Any]) -> Sequence[Any]:
        """Return what :meth:`_rendered` does; with ``multiturn`` also where the turns of the assistant are."""
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
        chat_text, spans = assistant_turns(self.template, chat, options)
        question = Rendered(chat_text[: spans[0][0]], is_chat=True, messages=chat[:1])
        return question, Rendered(chat_text, is_chat=True, messages=chat), spans

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
            document = Rendered(f"{prompt}{completion or ''}")
            return document, document
        if is_text and not self.template.apply_chat_template:
            question = self.template.render(prompt, options)
            return question, Rendered(f"{question.text}{completion}")
        chat = as_chat(prompt, "user")
        answer = []
        if completion is not None:
            answer = as_chat(completion, "assistant")
        text = closed(self.template.chat_text(chat + answer, options))
        example = Rendered(text, is_chat=True, messages=chat + answer)
        if self.pretrain_mode:
            check_answer((chat + answer)[-1], text)
            return example, example
        prompt_text = self.template.chat_text(chat, options, add_generation_prompt=True)
        length = shared_length(prompt_text, text)
        for message in answer:
            if message["role"] == "assistant":
                check_answer(message, text[length:])
        if length < len(prompt_text):
            raise BadRowError("template", differs(prompt_text, text, length))
        return Rendered(prompt_text, is_chat=True, messages=chat), example

    def _encode(self, rendered: list[Any]) -> Iterator[Outcome]:
        if not self.multiturn:
            for token_ids, prompt_length in self._ids(rendered):
                yield self._fit_example(token_ids, prompt_length)
            return
        for _, example, spans in rendered:
            token_ids, learned = self._ids_of_turns(example.text, spans)
            outcome = self._fit_example(token_ids, learned.index(True))
            if isinstance(outcome, Encoded):
                outcome = outcome._replace(learned=learned)
            yield outcome

    def _ids_of_turns(self, chat_text: str, spans: Sequence[Span]) -> tuple[list[int], list[bool]]:
        """Return ids of a chat, and which are learned. No token spans the end of a prompt: none does in a rollout."""
        pieces = []
        position = 0
        for begin, end in spans:
            pieces += [(chat_text[position:begin], False), (chat_text[begin:end], True)]
            position = end
        pieces.append((chat_text[position:], False))
        token_ids: list[int] = []
        learned: list[bool] = []
        for piece, is_learned in pieces:
            if token_ids and piece:
                piece_ids = self.template.encode_behind(piece)
            elif piece:
                (piece_ids,) = self.template.encode([piece], special_tokens=False)
            else:
                continue
            token_ids += piece_ids
            learned += [is_learned] * len(piece_ids)
        if token_ids[-1:] != [self.tokenizer.eos_token_id]:
            token_ids.append(self.tokenizer.eos_token_id)
            learned.append(True)
        return token_ids, learned

    def _ids(self, rendered: list[tuple[Rendered, Rendered]]) -> Iterator[tuple[list[int], int]]:
        """Yield ids, which end with the end-of-text, and how many of them are the prompt's."""
        if self.pretrain_mode:
            documents = self.template.encode_rendered([document for _, document in rendered])
            examples: Iterator[tuple[list[int], int]] = ((token_ids, 0) for token_ids in documents)
        else:
            examples = self.template.encode_answered(rendered)
        for token_ids, prompt_length in examples:
            if len(token_ids) > prompt_length:
                token_ids = ended(token_ids, self.tokenizer.eos_token_id)
            yield token_ids, prompt_length

    def _encode_chunk(self, rows: list[dict[str, Any]]) -> list[Outcome]:
        outcomes = super()._encode_chunk(rows)
        if self.of_script:
            return [_left_out(outcome) for outcome in outcomes]
        return outcomes

    def _fit_example(self, token_ids: list[int], prompt_length: int) -> Outcome:
        is_cut_as_in_scripts = (
            self.of_script and self.truncation == "right" and not self.pretrain_mode
        )
        if is_cut_as_in_scripts and prompt_length > self.max_len - _LEAST_ANSWER:
            return "overlong"
        outcome = self._fit(token_ids, prompt_length)
        if is_cut_as_in_scripts and isinstance(outcome, Encoded) and outcome.truncated:
            token_ids = [*outcome.token_ids[:-1], self.tokenizer.eos_token_id]
            return outcome._replace(token_ids=token_ids)
        return outcome

    def _fit(self, token_ids: list[int], prompt_length: int) -> Outcome:
        if len(token_ids) <= prompt_length:
            part_name = "completion" if prompt_length else "text"
            return BadRowError("empty", f"the tokenizer makes no tokens of the {part_name}")
        if len(token_ids) <= self.max_len:
            return Encoded(token_ids, prompt_length, truncated=False)
        overlong = (
            f"{len(token_ids)} tokens ({prompt_length} of the prompt), the limit is {self.max_len}: "
            f"{self.overlong_cure}"
        )
        truncation = self.truncation
        if truncation == "right" and prompt_length >= self.max_len:
            truncation = "error"
        return self._cut(token_ids, prompt_length, self.max_len, truncation, overlong)


def _settings(strategy: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: setting(strategy, name, value) for name, value in arguments.items()}


# -- rows of scripts -------------------------------------------------------------------------------------------------

_LEFT_OUT = ("empty", "equal")  # rows with nothing to learn, which a script's data may have
# tokens of an answer that a prompt must leave room for, one of them the end-of-text
_LEAST_ANSWER = 2


def _left_out(outcome: Outcome) -> Outcome:
    if isinstance(outcome, BadRowError) and outcome.reason in _LEFT_OUT:
        return outcome.reason
    return outcome


def _one_length(max_length: int | None, max_len: int | None) -> int:
    if (max_length is None) == (max_len is None):
        raise DataError(f"give max_length or max_len, not both: {max_length} and {max_len}")
    limit = int(max_length or max_len or 0)
    if limit < 2:
        raise DataError(f"max_len is {limit}; at least 2, one token to see and one to predict")
    return limit


def script_args(strategy: Any, tokenizer: Any, multiple_of: int) -> Any:
    """Return the script's options, or ``None``; set the chat template that they name."""
    if multiple_of != 1:
        raise DataError(
            f"multiple_of {multiple_of}: sequences are not split over ranks here; leave out --ring_attn_size"
        )
    script_options = getattr(strategy, "args", None)
    template = getattr(script_options, "tokenizer_chat_template", None)
    if template and getattr(script_options, "apply_chat_template", False):
        tokenizer.chat_template = template
    return script_options


def with_args(args: Any, **changes: Any) -> Any:
    """Return a strategy whose ``args`` are the script's with these changes."""
    if args is None:
        return None
    return SimpleNamespace(args=SimpleNamespace(**vars(args) | changes))
