"""Rewards from models that live in the training processes, and the inputs of these models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from lightppo.config.rules import MicroBatchSpec
from lightppo.data.records import Rollout
from lightppo.data.rows import PromptTemplate, Rendered
from lightppo.errors import BadRowError, DataError, RewardError
from lightppo.models.wrapper import micro_batches, to_device
from lightppo.ranks import Alone, Ranks, heartbeat, level
from lightppo.rewards.source import RewardOutput, describe_sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ScoreModel = Callable[[Tensor, Tensor], Tensor]
Truncation = Literal["error", "left"]
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
            if rollout.truncated:  # an unfinished answer must stay open
                return self._template.render(messages).text + rollout.response_text
            return self._template.chat_text(_answered(messages, rollout.response_text))
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


@dataclass(eq=False)
class RewardModelSource:
    """Scores prompt + response with one or several reward models, longest rows first (for little padding).

    Metric ``input_truncated``: 1 for a sample that was cut for any model; only with ``reward_max_length``.
    """

    needs_all_ranks: ClassVar[bool] = True

    # model(sequences (B, S), attention_mask (B, S)) -> (B,), for right-padded rows
    models: Sequence[ScoreModel]
    # reward_fn([scores (B,), …]) -> (B,): one float32 CPU tensor per model, B = all samples of this rank. Needed with
    # several models; each model's own score is then metric <name>_<i>.
    reward_fn: Callable[[list[Tensor]], Tensor] | None = None
    _: KW_ONLY
    device: torch.device | str = "cpu"
    pad_token_id: int | None = None  # fills rows with the actor's ids; masked out
    micro_batch_size: int | MicroBatchSpec = 8  # rows per forward, or a budget of tokens
    # with ZeRO-3 every rank must join every forward: one with fewer batches adds empty ones
    ranks: Ranks | None = None
    # one for all models, or one each; None: the actor's ids unchanged
    inputs: Sequence[RewardInputs] | None = None
    reward_max_length: int | None = None  # most tokens per row
    reward_truncation: Truncation = "error"  # or cut a longer row on the left
    name: str = "reward_model"

    def __post_init__(self) -> None:
        count, longest, size = len(self.models), self.reward_max_length, self.micro_batch_size
        if count == 0 or (count > 1 and self.reward_fn is None):
            raise ValueError(
                f"{count} reward models: give one, or several with --reward_fn to combine them"
            )
        if longest is not None and longest < 2:
            raise ValueError(f"--reward_max_length must be at least 2, got {longest}")
        if self.reward_truncation not in get_args(Truncation):
            raise ValueError(
                f"--reward_truncation must be error or left, got {self.reward_truncation!r}"
            )
        self._micro_batch = MicroBatchSpec(size) if isinstance(size, int) else size
        if self._micro_batch.size < 1:
            raise ValueError(f"micro_batch_size must be at least 1, got {self._micro_batch.size}")
        if self.inputs is None:
            if self.pad_token_id is None:
                raise ValueError("RewardModelSource needs pad_token_id or inputs")
            self.inputs = [SameIds(self.pad_token_id)]
        if len(self.inputs) not in (1, count):
            raise ValueError(
                f"{len(self.inputs)} inputs for {count} reward models: give one for all, or one for each"
            )
        self.inputs = list(self.inputs) * (count if len(self.inputs) == 1 else 1)
        self.ranks = self.ranks or Alone(self.device)

    @torch.no_grad()
    def score(self, rollouts: list[Rollout]) -> RewardOutput:
        """Scores the samples. Collective: a rank without samples takes part too."""
        count = len(rollouts)
        # models may share their inputs
        rows = {id(reads): self._rows(reads, rollouts) for reads in self.inputs}
        scores = []
        for i, model in enumerate(self.models):
            if isinstance(model, nn.Module):
                model.eval()
            scores.append(self._score_rows(i, rows[id(self.inputs[i])][0]))  # (n,)
        metrics: dict[str, list[float | None]] = {}
        if self.reward_max_length is not None:
            metrics["input_truncated"] = [
                float(any(cut)) for cut in zip(*(cut for _, cut in rows.values()))
            ]
        if self.reward_fn is None or count == 0:
            return RewardOutput(scores[0].tolist(), metrics)
        metrics |= {f"{self.name}_{i}": values.tolist() for i, values in enumerate(scores)}
        combined = _checked(self.reward_fn(scores), count, f"{self.name}: --reward_fn")
        return RewardOutput(combined.float().tolist(), metrics)

    def _rows(self, reads: RewardInputs, rollouts: list[Rollout]) -> tuple[Rows, list[bool]]:
        """A model's rows, cut where they are too long, and which were cut; begin-of-text and the scored end stay."""
        rows = list(reads.encode(rollouts)) if rollouts else []
        longest = self.reward_max_length
        cut = [longest is not None and len(row) > longest for row in rows]
        for i, row in enumerate(rows):
            if not row:
                raise RewardError(f"{self.name}: {describe_sample(rollouts, i)} has no token")
            if cut[i] and self.reward_truncation == "error":
                raise RewardError(
                    f"{self.name}: {describe_sample(rollouts, i)} has {len(row)} tokens for the reward model, more "
                    f"than --reward_max_length {longest}: raise it, or set --reward_truncation left"
                )
            if cut[i]:
                kept = row[:1] if row[0] == reads.bos_token_id else []
                rows[i] = kept + row[len(row) - longest + len(kept) :]
        return rows, cut

    def _score_rows(self, model_index: int, rows: Rows) -> Tensor:
        """(n,) scores in the order of the rows; every rank runs the same number of forwards."""
        parts = micro_batches([(len(row), 0) for row in rows], self._micro_batch)
        filler = [[self.inputs[model_index].pad_token_id]]
        scores = torch.empty(len(rows))
        for places in level(parts, self.ranks, list):
            batch = self._forward(model_index, [rows[i] for i in places] or filler)
            heartbeat.beat()
            if places:
                scores[places] = batch
        return scores

    def _forward(self, model_index: int, batch: Rows) -> Tensor:
        rows = [torch.tensor(row) for row in batch]
        # (B, S)
        sequences = pad_sequence(
            rows, batch_first=True, padding_value=self.inputs[model_index].pad_token_id
        )
        # (B, S)
        attention_mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        model = self.models[model_index]
        scores = model(to_device(sequences, self.device), to_device(attention_mask, self.device))
        return _checked(scores, len(batch), f"{self.name}: model {model_index}").float().cpu()


def _checked(scores: Any, rows: int, whose: str) -> Tensor:
    if isinstance(scores, Tensor) and scores.shape == (rows,):
        return scores
    got = f"shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
    raise RewardError(f"{whose} must return a tensor of shape ({rows},), got {got}")
