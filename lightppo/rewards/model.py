"""Rewards from models that live in the training processes, and the inputs of these models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from lightppo.config.rules import MicroBatchSpec
from lightppo.data.records import Rollout
from lightppo.data.rows import PromptTemplate, Rendered
from lightppo.errors import BadRowError, DataError, RewardError
from lightppo.models.packing import micro_batches
from lightppo.ranks import Alone, Ranks, level
from lightppo.rewards.source import RewardOutput, describe_sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ScoreModel = Callable[[Tensor, Tensor], Tensor]
Truncation = Literal["error", "left"]


class RewardInputs(Protocol):
    """Turns finished samples into rows of ids for one reward model.

    A row ends as the model was trained to score: with the end of turn or of text. A truncated answer stays open.
    """

    pad_token_id: int  # fills rows; masked out
    bos_token_id: int | None  # stays in front of a row that is cut from the left

    def encode(self, rollouts: list[Rollout]) -> list[list[int]]:
        """One row per sample; a sample that does not fit the model's form raises :class:`RewardError`."""
        ...


class SameIds:
    """Prompt and response ids unchanged, for a model that shares the actor's tokenizer."""

    def __init__(self, pad_token_id: int, bos_token_id: int | None = None) -> None:
        self.pad_token_id = pad_token_id
        self.bos_token_id = bos_token_id

    def encode(self, rollouts: list[Rollout]) -> list[list[int]]:
        return [rollout.prompt.token_ids + rollout.response_ids for rollout in rollouts]


class PlainText:
    """Prompt + response as text, in the ids of another tokenizer, with end-of-text behind a finished answer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.pad_token_id, self.bos_token_id = _special_ids(tokenizer)
        self._eos_token_id = tokenizer.eos_token_id
        self._template = PromptTemplate(tokenizer)

    def encode(self, rollouts: list[Rollout]) -> list[list[int]]:
        texts = [Rendered(r.prompt.text + r.response_text, is_chat=False, messages=None) for r in rollouts]
        rows = self._template.encode_rendered(texts)
        for rollout, row in zip(rollouts, rows):
            if not rollout.truncated and row[-1:] != [self._eos_token_id]:
                row.append(self._eos_token_id)
        return rows


class Retemplated:
    """Prompt and response as a chat, in the template and the ids of another tokenizer.

    The response is the assistant's last message, or continues it. A tokenizer without a chat template reads plain-text
    prompts like :class:`PlainText`; chats are then an error.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.pad_token_id, self.bos_token_id = _special_ids(tokenizer)
        self._has_template = bool(getattr(tokenizer, "chat_template", None))
        self._template = PromptTemplate(tokenizer, apply_chat_template=self._has_template)
        self._plain = PlainText(tokenizer)

    def encode(self, rollouts: list[Rollout]) -> list[list[int]]:
        if not self._has_template and all(rollout.prompt.messages is None for rollout in rollouts):
            return self._plain.encode(rollouts)
        texts = [self._text(rollouts, i) for i in range(len(rollouts))]
        return self._template.encode(texts, special_tokens=False)

    def _text(self, rollouts: list[Rollout], i: int) -> str:
        rollout = rollouts[i]
        chat = rollout.prompt.messages
        messages: list[dict[str, Any]] = [{"role": "user", "content": rollout.prompt.text}] if chat is None else chat
        try:
            if rollout.truncated:  # an unfinished answer must stay open
                return self._template.render(messages).text + rollout.response_text
            return self._template.chat_text(_answered(messages, rollout.response_text))
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
    """Rows of at most ``reward_max_length`` ids, and which were cut; cutting keeps begin-of-text and the scored end."""
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
    """Refuses values out of range, with a ``ValueError`` that names the flag."""
    if reward_max_length is not None and reward_max_length < 2:
        raise ValueError(f"--reward_max_length must be at least 2, got {reward_max_length}")
    if reward_truncation not in get_args(Truncation):
        raise ValueError(
            f"--reward_truncation must be one of {', '.join(get_args(Truncation))}, got {reward_truncation!r}"
        )


def check_same_ids(actor: PreTrainedTokenizerBase, reward: PreTrainedTokenizerBase, path: str) -> None:
    """Refuses a reward model whose tokenizer gives the actor's ids other meanings; special tokens may differ."""
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


class RewardModelSource:
    """Scores prompt + response with one or several reward models, longest rows first (for little padding).

    Metric ``input_truncated``: 1 for a sample that was cut for any model; only with ``reward_max_length``.

    Args:
        models: callables ``model(sequences (B, S), attention_mask (B, S)) -> (B,)``, for right-padded rows.
        reward_fn: ``reward_fn([scores (B,), …]) -> (B,)``, one float32 CPU tensor per model, B = all samples of this
            rank. Needed with several models; each model's own score is then metric ``<name>_<i>``.
        ranks: with ZeRO-3 every rank must join every forward, so a rank with fewer batches adds empty ones.
        micro_batch_size: rows per forward, or a budget of tokens.
        pad_token_id: fills rows with the actor's ids; masked out.
        inputs: one :class:`RewardInputs` for all models, or one each; ``None``: the actor's ids unchanged.
        reward_max_length: most tokens per row; ``None``: no limit.
        reward_truncation: ``"error"``, or cut a longer row on the ``"left"``.
    """

    needs_all_ranks = True

    def __init__(
        self,
        models: Sequence[ScoreModel],
        reward_fn: Callable[[list[Tensor]], Tensor] | None = None,
        *,
        device: torch.device | str,
        pad_token_id: int | None = None,
        micro_batch_size: int | MicroBatchSpec,
        ranks: Ranks | None = None,
        inputs: Sequence[RewardInputs] | None = None,
        reward_max_length: int | None = None,
        reward_truncation: Truncation = "error",
        name: str = "reward_model",
    ) -> None:
        if not models:
            raise ValueError("RewardModelSource needs at least one model")
        if len(models) > 1 and reward_fn is None:
            raise ValueError(f"{len(models)} reward models need --reward_fn, which makes one score of theirs")
        if isinstance(micro_batch_size, int):
            micro_batch_size = MicroBatchSpec(micro_batch_size)
        if micro_batch_size.size < 1:
            raise ValueError(f"micro_batch_size must be at least 1, got {micro_batch_size.size}")
        check_input_options(reward_max_length, reward_truncation)
        if inputs is None:
            if pad_token_id is None:
                raise ValueError("RewardModelSource needs pad_token_id or inputs")
            inputs = [SameIds(pad_token_id)]
        if len(inputs) not in (1, len(models)):
            raise ValueError(f"{len(inputs)} inputs for {len(models)} reward models: give one for all, or one for each")
        self.models = list(models)
        self.inputs = list(inputs) * (len(models) if len(inputs) == 1 else 1)
        self.reward_fn = reward_fn
        self.device = torch.device(device)
        self.micro_batch = micro_batch_size
        self.ranks = ranks or Alone(device)
        self.reward_max_length = reward_max_length
        self.reward_truncation: Truncation = reward_truncation
        self.name = name

    @torch.no_grad()
    def score(self, rollouts: list[Rollout]) -> RewardOutput:
        """Scores the samples. Collective: a rank without samples takes part too."""
        n = len(rollouts)
        rows_of, truncated = self._rows(rollouts)
        scores = []
        for i, model in enumerate(self.models):
            if isinstance(model, nn.Module):
                model.eval()
            scores.append(self._score_rows(i, rows_of[i]))  # (n,)
        metrics: dict[str, list[float | None]] = {}
        if self.reward_max_length is not None:
            metrics["input_truncated"] = [float(cut) for cut in truncated]
        if self.reward_fn is None or n == 0:
            return RewardOutput(scores[0].tolist(), metrics)
        metrics |= {f"{self.name}_{i}": values.tolist() for i, values in enumerate(scores)}
        combined = self.reward_fn(scores)
        if not isinstance(combined, Tensor) or combined.shape != (n,):
            raise RewardError(f"{self.name}: --reward_fn must return a tensor of shape ({n},), got {_what(combined)}")
        return RewardOutput(combined.float().tolist(), metrics)

    def _rows(self, rollouts: list[Rollout]) -> tuple[list[list[list[int]]], list[bool]]:
        """Each model's rows, and which samples were cut for any model."""
        encoded: dict[int, list[list[int]]] = {}  # models with the same inputs share the work
        truncated = [False] * len(rollouts)
        for reads in self.inputs:
            if id(reads) in encoded:
                continue
            encoded[id(reads)], cut = fit_lengths(
                reads.encode(rollouts) if rollouts else [],
                rollouts,
                reward_max_length=self.reward_max_length,
                reward_truncation=self.reward_truncation,
                bos_token_id=reads.bos_token_id,
                source_name=self.name,
            )
            truncated = [a or b for a, b in zip(truncated, cut)]
        return [encoded[id(reads)] for reads in self.inputs], truncated

    def _score_rows(self, model_index: int, rows: list[list[int]]) -> Tensor:
        """(n,) scores in the order of the rows; every rank runs the same number of forwards."""
        parts = micro_batches([(len(row), 0) for row in rows], self.micro_batch, packed=False)
        filler = [[self.inputs[model_index].pad_token_id]]
        scores = torch.empty(len(rows))
        for places in level(parts, self.ranks, list):
            batch = self._forward(model_index, [rows[i] for i in places] or filler)
            if places:
                scores[places] = batch
        return scores

    def _forward(self, model_index: int, batch: list[list[int]]) -> Tensor:
        width = max(len(row) for row in batch)
        pad_token_id = self.inputs[model_index].pad_token_id
        sequences = torch.full((len(batch), width), pad_token_id, dtype=torch.long)  # (B, S)
        attention_mask = torch.zeros_like(sequences)  # (B, S)
        for i, row in enumerate(batch):
            sequences[i, : len(row)] = torch.tensor(row)
            attention_mask[i, : len(row)] = 1
        scores = self.models[model_index](sequences.to(self.device), attention_mask.to(self.device))
        if not isinstance(scores, Tensor) or scores.shape != (len(batch),):
            raise RewardError(f"{self.name}: model {model_index} must return a tensor of shape ({len(batch)},), "
                              f"got {_what(scores)}")  # fmt: skip
        return scores.float().cpu()


def _what(value: object) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
