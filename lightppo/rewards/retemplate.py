"""What a reward model reads: the ids of the actor as they are, or the text in the model's own template and ids.

A row ends where the model was taught to score: behind the end of the turn, or end-of-text. An answer that the token
limit cut is left open, without either, as its ids are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from lightppo.data.records import Rollout
from lightppo.data.rows import PromptTemplate, Rendered
from lightppo.errors import BadRowError, DataError, RewardError
from lightppo.rewards.source import describe_sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Truncation = Literal["error", "left"]


class RewardInputs(Protocol):
    """Turns finished samples into rows of ids for one reward model.

    Attributes:
        pad_token_id: fills rows; masked out.
        bos_token_id: stays in front of a row that is cut from the left.
    """

    pad_token_id: int
    bos_token_id: int | None

    def encode(self, rollouts: list[Rollout]) -> list[list[int]]:
        """One row per sample.

        Raises:
            RewardError: a sample that cannot be written in the model's form; names it.
        """
        ...


class SameIds:
    """Prompt and response ids as they are, for a model that shares the actor's tokenizer."""

    def __init__(self, pad_token_id: int, bos_token_id: int | None = None) -> None:
        self.pad_token_id = pad_token_id
        self.bos_token_id = bos_token_id

    def encode(self, rollouts: list[Rollout]) -> list[list[int]]:
        """See :class:`RewardInputs`."""
        return [rollout.prompt.token_ids + rollout.response_ids for rollout in rollouts]


class PlainText:
    """Prompt + response as text, in the ids of another tokenizer; end-of-text behind a finished answer.

    A begin-of-text that the tokenizer puts in front is there once, also where the prompt's text has it already.

    Args:
        tokenizer: the reward model's; it has an end-of-text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.pad_token_id, self.bos_token_id = _special_ids(tokenizer)
        self._eos_token_id = tokenizer.eos_token_id
        self._template = PromptTemplate(tokenizer)

    def encode(self, rollouts: list[Rollout]) -> list[list[int]]:
        """See :class:`RewardInputs`."""
        texts = [Rendered(r.prompt.text + r.response_text, is_chat=False, messages=None) for r in rollouts]
        rows = self._template.encode_rendered(texts)
        for rollout, row in zip(rollouts, rows):
            if not rollout.truncated and row[-1:] != [self._eos_token_id]:
                row.append(self._eos_token_id)
        return rows


class Retemplated:
    """Prompt and response as a chat in the template and the ids of another tokenizer.

    The chat is ``Prompt.messages`` where the data has one, else the prompt's text as a user message; the response is
    the assistant's last message (where the chat ends in the assistant's words, it goes on with them). A tokenizer
    without a chat template gets plain-text prompts as :class:`PlainText` does; chats are then an error.

    Args:
        tokenizer: the reward model's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.pad_token_id, self.bos_token_id = _special_ids(tokenizer)
        self._has_template = bool(getattr(tokenizer, "chat_template", None))
        self._template = PromptTemplate(tokenizer, apply_chat_template=self._has_template)
        self._plain = PlainText(tokenizer)

    def encode(self, rollouts: list[Rollout]) -> list[list[int]]:
        """See :class:`RewardInputs`."""
        if not self._has_template and all(rollout.prompt.messages is None for rollout in rollouts):
            return self._plain.encode(rollouts)
        texts = [self._text(rollouts, i) for i in range(len(rollouts))]
        return self._template.encode(texts, special_tokens=False)

    def _text(self, rollouts: list[Rollout], i: int) -> str:
        rollout = rollouts[i]
        chat = rollout.prompt.messages
        messages: list[dict[str, Any]] = [{"role": "user", "content": rollout.prompt.text}] if chat is None else chat
        try:
            if rollout.truncated:  # no template closes what is not finished
                return self._template.render(messages).text + rollout.response_text
            return self._template.finished_chat_text(_answered(messages, rollout.response_text))
        except (BadRowError, DataError) as error:
            raise RewardError(f"--reward_input_tokenizer: {describe_sample(rollouts, i)}: {error}") from error


def fit_lengths(
    rows: list[list[int]],
    rollouts: list[Rollout],
    *,
    reward_max_length: int | None,
    reward_truncation: Truncation,
    bos_token_id: int | None,
    source_name: str,
) -> tuple[list[list[int]], list[bool]]:
    """Rows of at most ``reward_max_length`` ids, and which of them were cut.

    ``"left"`` cuts the start, as the score is at the end; a begin-of-text stays.

    Raises:
        RewardError: a row without ids, or with ``"error"`` one that is too long.
    """
    cut = [reward_max_length is not None and len(row) > reward_max_length for row in rows]
    if [] in rows:
        raise RewardError(f"{source_name}: {describe_sample(rollouts, rows.index([]))} has no token")
    if reward_max_length is None or not any(cut):
        return rows, cut
    if reward_truncation == "error":
        i = cut.index(True)
        raise RewardError(
            f"{source_name}: {describe_sample(rollouts, i)} has {len(rows[i])} tokens for the reward model, more than "
            f"--reward_max_length {reward_max_length}: raise it, or cut such rows by --reward_truncation left"
        )
    fitted = []
    for row, too_long in zip(rows, cut):
        kept = row[:1] if too_long and row[0] == bos_token_id else []
        fitted.append(kept + row[len(row) - reward_max_length + len(kept) :] if too_long else row)
    return fitted, cut


def check_input_options(reward_max_length: int | None, reward_truncation: str) -> None:
    """Refuses what the flags of these names cannot be.

    Raises:
        ValueError: naming the flag.
    """
    if reward_max_length is not None and reward_max_length < 2:
        raise ValueError(f"--reward_max_length must be at least 2, got {reward_max_length}")
    if reward_truncation not in get_args(Truncation):
        raise ValueError(
            f"--reward_truncation must be one of {', '.join(get_args(Truncation))}, got {reward_truncation!r}"
        )


def check_same_ids(actor: PreTrainedTokenizerBase, reward: PreTrainedTokenizerBase, path: str) -> None:
    """Refuses a reward model that would read the actor's ids as other words. Special tokens may differ.

    Args:
        actor: the actor's tokenizer.
        reward: the one that lies beside the reward model.
        path: the reward model's, for the error.

    Raises:
        ValueError: an id of the actor's is another token there, or none.
    """
    own = {index: token for token, index in reward.get_vocab().items()}
    special = set(actor.all_special_tokens)
    other = [token for token, index in actor.get_vocab().items() if own.get(index) != token and token not in special]
    if other:
        raise ValueError(
            f"--reward_pretrain {path} has another tokenizer than the actor: {len(other)} of the actor's tokens have "
            f"another id there or none ({', '.join(map(repr, sorted(other)[:3]))}, …). Set --reward_input_tokenizer, "
            "which writes prompt and response in its template and ids"
        )


def _answered(messages: list[dict[str, Any]], answer: str) -> list[dict[str, Any]]:
    last = messages[-1]
    if last["role"] != "assistant":
        return [*messages, {"role": "assistant", "content": answer}]
    if not isinstance(last.get("content"), str):
        raise DataError("the chat ends in a message of the assistant that is not text, so the answer cannot follow it")
    return [*messages[:-1], {**last, "content": last["content"] + answer}]


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int | None]:
    eos = tokenizer.eos_token_id
    if eos is None:
        raise ValueError("--reward_input_tokenizer: the tokenizer has no EOS token; set it in tokenizer_config.json")
    pad = tokenizer.pad_token_id
    return (eos if pad is None else pad), tokenizer.bos_token_id
