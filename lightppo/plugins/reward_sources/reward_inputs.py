"""What reward models read: the actor's ids, or the samples in the template and the ids of another tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lightppo.config import PPOConfig
from lightppo.data.records import Rollout
from lightppo.data.rows import PromptTemplate, Rendered, template_options
from lightppo.errors import BadRowError, ConfigError, DataError, RewardError
from lightppo.files import files_in_use
from lightppo.rewards.source import describe_sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightppo.trainer.build import Building

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
    """Prompt and response ids unchanged, for a model that shares the actor's tokenizer."""

    pad_token_id: int
    bos_token_id: int | None = None

    def encode(self, rollouts: list[Rollout]) -> Rows:
        return [rollout.prompt.token_ids + rollout.response_ids for rollout in rollouts]


class PlainText:
    """Prompt + response as text, in the ids of another tokenizer, with end-of-text behind a finished answer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._eos = tokenizer.eos_token_id
        if self._eos is None:
            raise ValueError(
                "--reward_input_tokenizer: set the tokenizer's EOS token in tokenizer_config.json"
            )
        self.pad_token_id: int = (
            self._eos if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        )
        self.bos_token_id = tokenizer.bos_token_id
        self._has_chats = bool(getattr(tokenizer, "chat_template", None))
        self._template = PromptTemplate(tokenizer)

    def encode(self, rollouts: list[Rollout]) -> Rows:
        texts = [
            Rendered(r.prompt.text + r.response_text, is_chat=False, messages=None)
            for r in rollouts
        ]
        rows = self._template.encode_rendered(texts)
        for rollout, row in zip(rollouts, rows):
            if not rollout.truncated and row[-1:] != [self._eos]:
                row.append(self._eos)
        return rows


class Retemplated(PlainText):
    """Prompt and response as a chat, in the template and the ids of another tokenizer.

    The response is the assistant's last message, or continues it. A tokenizer without a chat template reads plain-text
    prompts like :class:`PlainText`; chats are then an error.
    """

    def encode(self, rollouts: list[Rollout]) -> Rows:
        if not self._has_chats and all(rollout.prompt.messages is None for rollout in rollouts):
            return super().encode(rollouts)
        texts = [self._text(rollouts, i) for i in range(len(rollouts))]
        return self._template.encode(texts, special_tokens=False)

    def _text(self, rollouts: list[Rollout], i: int) -> str:
        rollout = rollouts[i]
        messages = rollout.prompt.messages or [{"role": "user", "content": rollout.prompt.text}]
        try:
            # What the row says to the actor's template, as far as this one reads it, too.
            given = template_options(rollout.prompt.extra)
            options = {name: value for name, value in given.items() if self._template.reads(name)}
            if rollout.truncated:  # an unfinished answer must stay open
                return self._template.render(messages, options).text + rollout.response_text
            return self._template.chat_text(_answered(messages, rollout.response_text), options)
        except (BadRowError, DataError) as error:
            raise RewardError(
                f"--reward_input_tokenizer: {describe_sample(rollouts, i)}: {error}"
            ) from error


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


def reward_inputs(config: PPOConfig, tokenizer: Any) -> list[RewardInputs]:
    """What reward models read: the actor's ids, or the chat in the template and ids of their own tokenizers."""
    from transformers import AutoTokenizer

    model, files = config.model, files_in_use()
    load_tokenizer = partial(
        AutoTokenizer.from_pretrained,
        trust_remote_code=model.trust_remote_code,
        use_fast=not model.disable_fast_tokenizer,
    )
    if config.reward.reward_input_tokenizer:
        return [
            Retemplated(load_tokenizer(files.bring(path)))
            for path in config.reward.reward_input_tokenizer
        ]
    for path in model.reward_pretrain:
        folder = files.bring(path)
        if Path(folder, "tokenizer_config.json").is_file():
            check_same_ids(tokenizer, load_tokenizer(folder), path)
    return [SameIds(tokenizer.pad_token_id, tokenizer.bos_token_id)]


def check_reward_tokenizers(building: Building) -> None:
    """Refuses reward models that would read other texts, before any model is loaded."""
    if building.config.flat().get("reward_pretrain"):
        try:
            reward_inputs(building.config, building.tokenizer)
        except ValueError as error:
            raise ConfigError(str(error)) from error
