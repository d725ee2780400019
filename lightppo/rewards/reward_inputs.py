"""What reward models read: the actor's ids, or the samples in the template and the ids of another tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lightppo.config import PPOConfig
from lightppo.data.chat_templates import (
    PromptTemplate,
    Rendered,
    closed,
    ended,
)
from lightppo.data.records import Rollout
from lightppo.data.rows import template_options
from lightppo.errors import BadRowError, ConfigError, DataError, RewardError
from lightppo.files import files_in_use
from lightppo.rewards.model import rows_of_ids
from lightppo.rewards.reward_source import describe_sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightppo.models.critic import RowForm
    from lightppo.trainer.building import Building

Rows = list[list[int]]


class RewardInputs(Protocol):
    """Turns finished samples into rows of ids for one reward model.

    A row ends as the model was trained to score: with the end of turn or of text. A truncated answer stays open.
    """

    pad_token_id: int  # fills rows; masked out
    bos_token_id: int | None  # stays in front of a row that is cut from the left

    def encode(self, rollouts: list[Rollout]) -> Rows:
        """One row per sample; a sample that does not fit the model's form raises :class:`RewardError`."""
        ...


@dataclass
class SameIds:
    """Prompt and response ids, for a model that shares the actor's tokenizer."""

    pad_token_id: int
    bos_token_id: int | None = None
    form: RowForm | None = None

    def encode(self, rollouts: list[Rollout]) -> Rows:
        return rows_of_ids(rollouts, self.form)


class PlainText:
    """Prompt + response as text, in the ids of another tokenizer, with end-of-text behind a finished answer.

    For a model that was trained on chats the text is one, written by its template up to the answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, form: RowForm | None = None) -> None:
        if tokenizer.eos_token_id is None:
            raise ValueError(
                "--reward_input_tokenizer: set the tokenizer's EOS token in tokenizer_config.json"
            )
        self._form = form
        self._end = tokenizer.eos_token_id if form is None else form.end_id
        self.pad_token_id: int = (
            self._end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        )
        self.bos_token_id = tokenizer.bos_token_id
        self._has_chats = bool(getattr(tokenizer, "chat_template", None))
        told = {} if form is None else form.template_options
        self._template = PromptTemplate(tokenizer, **told)

    def encode(self, rollouts: list[Rollout]) -> Rows:
        is_chat = self._form is not None and self._form.is_chat
        end = self._turn_end() if is_chat else ""
        texts = []
        for rollout in rollouts:
            text = rollout.prompt.text + rollout.response_text
            if not rollout.truncated and not text.endswith(end):
                text += end
            texts.append(Rendered(text, is_chat=is_chat, messages=None))
        return self._ended(rollouts, self._template.encode_rendered(texts))

    def _turn_end(self) -> str:
        """What the chat template writes behind an answer, of which texts of finished answers have nothing."""
        if not self._has_chats:
            return ""
        answer = "qzprobe"
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
        return closed(self._template.chat_text(chat)).rpartition(answer)[2]

    def _ended(self, rollouts: list[Rollout], rows: Iterable[list[int]]) -> Rows:
        return [
            row if rollout.truncated else ended(row, self._end)
            for rollout, row in zip(rollouts, rows)
        ]


class Retemplated(PlainText):
    """Prompt and response as a chat, in the template and the ids of another tokenizer.

    The response is the assistant's last message, or continues it. Rows are written as in the model's training, if it
    says so, else as the template does. Plain-text prompts stay text for a tokenizer without a chat template and for a
    model that was trained on text; chats are then an error.
    """

    def encode(self, rollouts: list[Rollout]) -> Rows:
        is_chat = self._has_chats and (self._form is None or self._form.is_chat)
        if not is_chat and all(rollout.prompt.messages is None for rollout in rollouts):
            return super().encode(rollouts)
        if self._form is not None and not self._form.is_chat:
            raise RewardError(
                "--reward_input_tokenizer: the prompts are chats, and the reward model was trained on text, as reward_rows "
                "in its config.json says: train it with --apply_chat_template, or, if its texts were written by the chat "
                "template already, set is_chat there to true"
            )
        pairs = [self._texts(rollouts, i) for i in range(len(rollouts))]
        if self._form is None:
            return self._template.encode_rendered([whole for _, whole in pairs])
        try:
            rows = [ids for ids, _ in self._template.encode_answered(pairs)]
        except BadRowError as error:
            raise RewardError(f"--reward_input_tokenizer: {error}") from error
        return self._ended(rollouts, rows)

    def _texts(self, rollouts: list[Rollout], i: int) -> tuple[Rendered | None, Rendered]:
        """The prompt, where rows are written as in training, and the prompt with its answer."""
        rollout = rollouts[i]
        messages = rollout.prompt.messages or [{"role": "user", "content": rollout.prompt.text}]
        try:
            # What the row says to the actor's template, as far as this one reads it, too.
            given = template_options(rollout.prompt.extra)
            options = {name: value for name, value in given.items() if self._template.reads(name)}
            reads_prompt = rollout.truncated or self._form is not None
            start = self._template.render(messages, options) if reads_prompt else None
            if rollout.truncated:  # an unfinished answer must stay open
                whole = start.text + rollout.response_text
            else:
                answered = _answered(messages, rollout.response_text)
                whole = self._template.chat_text(answered, options)
                whole = whole if self._form is None else closed(whole)
        except (BadRowError, DataError) as error:
            raise RewardError(
                f"--reward_input_tokenizer: {describe_sample(rollouts, i)}: {error}"
            ) from error
        return start, Rendered(whole, is_chat=True, messages=messages)


def check_same_ids(
    actor: PreTrainedTokenizerBase, reward: PreTrainedTokenizerBase, path: str
) -> None:
    """Refuses a reward model whose tokenizer gives the actor's ids other meanings; special tokens may differ."""
    own = {index: token for token, index in reward.get_vocab().items()}
    special = set(actor.all_special_tokens)
    other = [
        token
        for token, index in actor.get_vocab().items()
        if own.get(index) != token and token not in special
    ]
    if other:
        raise ValueError(
            f"--reward_pretrain {path} has another tokenizer than the actor: {len(other)} of the actor's tokens have "
            f"no id there or another one ({', '.join(map(repr, sorted(other)[:3]))}, …). Set --reward_input_tokenizer"
        )


def _answered(messages: list[dict[str, Any]], answer: str) -> list[dict[str, Any]]:
    last = messages[-1]
    if last["role"] != "assistant":
        return [*messages, {"role": "assistant", "content": answer}]
    if not isinstance(last.get("content"), str):
        raise DataError(
            "the chat ends in a message of the assistant that is not text, so the answer cannot follow it"
        )
    return [*messages[:-1], {**last, "content": last["content"] + answer}]


def reward_inputs(
    config: PPOConfig, tokenizer: Any, forms: Sequence[RowForm | None] = ()
) -> list[RewardInputs]:
    """What each reward model reads: the actor's ids, or the chat in the template and ids of a tokenizer of its own.

    ``forms``: of the models, once they are loaded. Models that read the same have the same inputs.
    """
    from transformers import AutoTokenizer

    model, files = config.model, files_in_use()
    forms = forms or [None] * len(model.reward_pretrain)
    load_tokenizer = partial(
        AutoTokenizer.from_pretrained,
        trust_remote_code=model.trust_remote_code,
        use_fast=not model.disable_fast_tokenizer,
    )
    if paths := config.reward.reward_input_tokenizer:
        paths = list(paths) * (len(forms) if len(paths) == 1 else 1)
        reads = cache(lambda path, form: Retemplated(load_tokenizer(files.bring(path)), form))
        return [reads(path, form) for path, form in zip(paths, forms, strict=True)]
    for path in model.reward_pretrain:
        folder = files.bring(path)
        if Path(folder, "tokenizer_config.json").is_file():
            check_same_ids(tokenizer, load_tokenizer(folder), path)
    reads = cache(lambda form: SameIds(tokenizer.pad_token_id, tokenizer.bos_token_id, form))
    return [reads(form) for form in forms]


def check_reward_tokenizers(building: Building) -> None:
    """Refuses reward models that would read other texts, before any model is loaded."""
    if building.config.flat().get("reward_pretrain"):
        try:
            reward_inputs(building.config, building.tokenizer)
        except ValueError as error:
            raise ConfigError(str(error)) from error
