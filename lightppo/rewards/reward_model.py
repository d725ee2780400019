"""Rewards from one or several models that live in the training processes, and what these read.

A model reads the actor's ids, or the samples in the template and the ids of another tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from lightppo.config import PPOConfig
from lightppo.config.rules import MicroBatchSpec, micro_batch_spec
from lightppo.data.chat_templates import PromptTemplate, Rendered, closed, ended
from lightppo.data.records import Rollout
from lightppo.data.rows import template_options
from lightppo.errors import BadRowError, ConfigError, DataError, RewardError
from lightppo.files import files_in_use
from lightppo.models.batches import micro_batches, to_device
from lightppo.ranks import Alone, Ranks, heartbeat, level
from lightppo.rewards.function import COMBINE_NAME
from lightppo.rewards.reward_source import (
    RewardOutput,
    RewardRequest,
    RewardSource,
    describe_sample,
)
from lightppo.user_code import load_python_function

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightppo.models.critic import RowForm

# model(sequences (B, S), attention_mask (B, S)) -> (B,), for right-padded rows
ScoreModel = Callable[[Tensor, Tensor], Tensor]
Rows = list[list[int]]
Truncation = Literal["error", "left"]


@dataclass(eq=False)
class RewardModelSource:
    """Score prompt + response with one or several reward models, longest rows first (for little padding).

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
    # With ZeRO-3 every rank must join every forward: a rank with fewer batches adds empty ones.
    ranks: Ranks | None = None
    # One for all models, or one for each. None: models read the actor's ids.
    inputs: Sequence[RewardInputs] | None = None
    reward_max_length: int | None = None  # most tokens per row
    reward_truncation: Truncation = "error"  # or cut a longer row on the left
    name: str = "reward_model"

    def __post_init__(self) -> None:
        model_count = len(self.models)
        max_length = self.reward_max_length
        micro_batch_size = self.micro_batch_size
        if model_count == 0 or (model_count > 1 and self.reward_fn is None):
            raise ValueError(
                f"{model_count} reward models: give one, or several with --reward_fn to combine them"
            )
        if max_length is not None and max_length < 2:
            raise ValueError(f"--reward_max_length must be at least 2, got {max_length}")
        if self.reward_truncation not in get_args(Truncation):
            raise ValueError(
                f"--reward_truncation must be error or left, got {self.reward_truncation!r}"
            )
        self._micro_batch = (
            MicroBatchSpec(micro_batch_size)
            if isinstance(micro_batch_size, int)
            else micro_batch_size
        )
        if self._micro_batch.size < 1:
            raise ValueError(f"micro_batch_size must be at least 1, got {self._micro_batch.size}")
        if self.inputs is None:
            if self.pad_token_id is None:
                raise ValueError("RewardModelSource needs pad_token_id or inputs")
            self.inputs = [
                SameIds(self.pad_token_id, form=form) for form in map(form_of, self.models)
            ]
        if len(self.inputs) not in (1, model_count):
            raise ValueError(
                f"{len(self.inputs)} inputs for {model_count} reward models: give one for all, or one for each"
            )
        self.inputs = list(self.inputs) * (model_count if len(self.inputs) == 1 else 1)
        self.ranks = self.ranks or Alone(self.device)

    @torch.no_grad()
    def score(self, rollouts: list[Rollout]) -> RewardOutput:
        """Score the samples. Collective: a rank without samples takes part too."""
        sample_count = len(rollouts)
        # models may share their inputs
        rows_of_inputs = {
            id(model_inputs): self._rows(model_inputs, rollouts) for model_inputs in self.inputs
        }
        scores = [
            score_rows(
                model,
                rows_of_inputs[id(model_inputs)][0],
                pad_token_id=model_inputs.pad_token_id,
                micro_batch=self._micro_batch,
                ranks=self.ranks,
                device=self.device,
                model_name=f"{self.name}: model {i}",
            )  # (n,)
            for i, (model, model_inputs) in enumerate(zip(self.models, self.inputs))
        ]
        metrics: dict[str, list[float | None]] = {}
        if self.reward_max_length is not None:
            metrics["input_truncated"] = [
                float(any(was_cut))
                for was_cut in zip(*(was_cut for _, was_cut in rows_of_inputs.values()))
            ]
        if self.reward_fn is None or sample_count == 0:
            return RewardOutput(scores[0].tolist(), metrics)
        metrics |= {
            f"{self.name}_{i}": model_scores.tolist() for i, model_scores in enumerate(scores)
        }
        combined = checked_scores(self.reward_fn(scores), sample_count, f"{self.name}: --reward_fn")
        return RewardOutput(combined.float().tolist(), metrics)

    def _rows(self, model_inputs: RewardInputs, rollouts: list[Rollout]) -> tuple[Rows, list[bool]]:
        """Return a model's rows, cut where they are too long, and which were cut; begin-of-text and the scored end stay."""
        model_rows = list(model_inputs.encode(rollouts)) if rollouts else []
        max_length = self.reward_max_length
        is_cut = [
            max_length is not None and len(model_row) > max_length for model_row in model_rows
        ]
        for i, model_row in enumerate(model_rows):
            if not model_row:
                raise RewardError(f"{self.name}: {describe_sample(rollouts, i)} has no token")
            if is_cut[i] and self.reward_truncation == "error":
                raise RewardError(
                    f"{self.name}: {describe_sample(rollouts, i)} has {len(model_row)} tokens for the reward model, more "
                    f"than --reward_max_length {max_length}: raise it, or set --reward_truncation left"
                )
            if is_cut[i]:
                kept_start = model_row[:1] if model_row[0] == model_inputs.bos_token_id else []
                model_rows[i] = (
                    kept_start + model_row[len(model_row) - max_length + len(kept_start) :]
                )
        return model_rows, is_cut


def source_of_models(
    models: Sequence[Any], combine: Any, options: Mapping[str, Any]
) -> RewardSource:
    """Return the source of models, and of what combines their scores: a function, a file with one, or None."""
    if isinstance(combine, str):
        combine = load_python_function(combine, COMBINE_NAME, option="--reward_fn")
    if combine is not None and not callable(combine):
        raise ValueError(
            f"--reward_fn must combine the scores of --reward_pretrain, got {combine!r}"
        )
    return RewardModelSource(models, combine, **options)


def model_reward(request: RewardRequest) -> RewardSource:
    """Return the source of ``--reward_pretrain``."""
    reward_options = request.config.reward
    options = {
        "device": request.ranks.device,
        "ranks": request.ranks,
        "micro_batch_size": micro_batch_spec(request.config, "reward"),
        "reward_max_length": reward_options.reward_max_length,
        "reward_truncation": reward_options.reward_truncation,
        "inputs": reward_inputs(
            request.config, request.tokenizer, [*map(form_of, request.reward_models)]
        ),
    }
    combine = None if "function" in request.names else reward_options.reward_fn
    return source_of_models(request.reward_models, combine, options)


# -- passes ------------------------------------------------------------------------------------------------------------


def form_of(model: ScoreModel) -> RowForm | None:
    """Return how rows must be written for a model; None: it is no :class:`RewardModel`, or its config does not say it."""
    return getattr(model, "row_form", None)


def rows_of_ids(rollouts: list[Rollout], form: RowForm | None) -> Rows:
    """Return the actor's ids; a finished answer ends as the model's rows in its training: at the turn's end or behind it."""
    rows = [rollout.prompt.token_ids + rollout.response_ids for rollout in rollouts]
    return rows if form is None else with_ends(rollouts, rows, form.end_id)


def with_ends(rollouts: list[Rollout], rows: Rows, end_id: int) -> Rows:
    """Return the rows, those of finished answers with the end that the model was trained to score."""
    return [
        row if rollout.truncated else ended(row, end_id) for rollout, row in zip(rollouts, rows)
    ]


@torch.no_grad()
def score_rows(
    model: ScoreModel,
    model_rows: Rows,
    *,
    pad_token_id: int,
    micro_batch: MicroBatchSpec,
    ranks: Ranks,
    device: torch.device | str,
    model_name: str,
) -> Tensor:
    """Return scores of rows of ids, (n,) float32 on the CPU; the longest rows go first, for little padding. Collective.

    Every rank makes the same number of passes: under ZeRO-3 each must join every pass.
    """
    if isinstance(model, nn.Module):
        model.eval()
    row_batches = micro_batches([(len(row), 0) for row in model_rows], micro_batch)
    scores = torch.empty(len(model_rows))
    for row_indices in level(row_batches, ranks, list):
        # a rank without rows scores padding
        batch_rows = [torch.tensor(model_rows[i]) for i in row_indices] or [
            torch.tensor([pad_token_id])
        ]
        sequences = pad_sequence(batch_rows, batch_first=True, padding_value=pad_token_id)  # (B, S)
        attention_mask = pad_sequence(
            [torch.ones_like(row) for row in batch_rows], batch_first=True
        )
        batch_scores = model(to_device(sequences, device), to_device(attention_mask, device))
        batch_scores = checked_scores(batch_scores, len(batch_rows), model_name).float().cpu()
        heartbeat.beat()
        if row_indices:
            scores[row_indices] = batch_scores
    return scores


def checked_scores(scores: Any, rows: int, model_name: str) -> Tensor:
    """Return the scores (rows,); raise :class:`RewardError` for another shape or type."""
    description = type(scores).__name__
    if isinstance(scores, Tensor):
        if scores.shape == (rows,):
            return scores
        description = f"shape {tuple(scores.shape)}"
    raise RewardError(f"{model_name} must return a tensor of shape ({rows},), got {description}")


# -- what a model reads --------------------------------------------------------------------------------------------------


class RewardInputs(Protocol):
    """Turn finished samples into rows of ids for one reward model.

    A row ends as the model was trained to score: with the end of turn or of text. A truncated answer stays open.
    """

    pad_token_id: int  # fills rows; masked out
    bos_token_id: int | None  # stays in front of a row that is cut from the left

    def encode(self, rollouts: list[Rollout]) -> Rows:
        """Return one row per sample; a sample that does not fit the model's form raises :class:`RewardError`."""
        ...


@dataclass
class SameIds:
    """Read prompt and response ids, for a model that shares the actor's tokenizer."""

    pad_token_id: int
    bos_token_id: int | None = None
    form: RowForm | None = None

    def encode(self, rollouts: list[Rollout]) -> Rows:
        return rows_of_ids(rollouts, self.form)


class Retokenized:
    """Read prompt + response as text, in the ids of another tokenizer, with end-of-text behind a finished answer.

    For a model that was trained on chats the text is one, written by its template up to the answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, form: RowForm | None = None) -> None:
        if tokenizer.eos_token_id is None:
            raise ValueError(
                "--reward_input_tokenizer: set the tokenizer's EOS token in tokenizer_config.json"
            )
        self._form = form
        self._end = tokenizer.eos_token_id
        template_options = {}
        if form is not None:
            self._end = form.end_id
            template_options = form.template_options
        self.pad_token_id: int = tokenizer.pad_token_id
        if tokenizer.pad_token_id is None:
            self.pad_token_id = self._end
        self.bos_token_id = tokenizer.bos_token_id
        self._has_chats = bool(getattr(tokenizer, "chat_template", None))
        self._template = PromptTemplate(tokenizer, **template_options)

    def encode(self, rollouts: list[Rollout]) -> Rows:
        is_chat = self._form is not None and self._form.is_chat
        turn_end = self._turn_end() if is_chat else ""
        rendered_texts = []
        for rollout in rollouts:
            sample_text = rollout.prompt.text + rollout.response_text
            if not rollout.truncated and not sample_text.endswith(turn_end):
                sample_text += turn_end
            rendered_texts.append(Rendered(sample_text, is_chat=is_chat, messages=None))
        return with_ends(rollouts, self._template.encode_rendered(rendered_texts), self._end)

    def _turn_end(self) -> str:
        """Return what the chat template writes behind an answer; texts of finished answers have nothing of it."""
        if not self._has_chats:
            return ""
        probe_answer = "qzprobe"
        messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": probe_answer},
        ]
        return closed(self._template.chat_text(messages)).rpartition(probe_answer)[2]


class Retemplated(Retokenized):
    """Read prompt and response as a chat, in the template and the ids of another tokenizer.

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
        prompts_and_answers = [self._texts(rollouts, i) for i in range(len(rollouts))]
        if self._form is None:
            return self._template.encode_rendered([answered for _, answered in prompts_and_answers])
        try:
            rows = [ids for ids, _ in self._template.encode_answered(prompts_and_answers)]
        except BadRowError as error:
            raise RewardError(f"--reward_input_tokenizer: {error}") from error
        return with_ends(rollouts, rows, self._end)

    def _texts(self, rollouts: list[Rollout], i: int) -> tuple[Rendered | None, Rendered]:
        """Return the prompt, where rows are written as in training, and the prompt with its answer."""
        rollout = rollouts[i]
        messages = rollout.prompt.messages or [{"role": "user", "content": rollout.prompt.text}]
        try:
            # What the row says to the actor's template, as far as this one reads it, too.
            options = {
                option_name: value
                for option_name, value in template_options(rollout.prompt.extra).items()
                if self._template.reads(option_name)
            }
            rendered_prompt = None
            if rollout.truncated or self._form is not None:
                rendered_prompt = self._template.render(messages, options)
            if rollout.truncated:  # an unfinished answer must stay open
                answered_text = rendered_prompt.text + rollout.response_text
            else:
                answered = _answered(messages, rollout.response_text)
                answered_text = self._template.chat_text(answered, options)
                if self._form is not None:
                    answered_text = closed(answered_text)
        except (BadRowError, DataError) as error:
            raise RewardError(
                f"--reward_input_tokenizer: {describe_sample(rollouts, i)}: {error}"
            ) from error
        return rendered_prompt, Rendered(answered_text, is_chat=True, messages=messages)


def check_same_ids(
    actor: PreTrainedTokenizerBase, reward: PreTrainedTokenizerBase, path: str
) -> None:
    """Refuse a reward model whose tokenizer gives the actor's ids other meanings; special tokens may differ."""
    token_of_id = {index: token for token, index in reward.get_vocab().items()}
    special = set(actor.all_special_tokens)
    differing = [
        token
        for token, index in actor.get_vocab().items()
        if token_of_id.get(index) != token and token not in special
    ]
    if differing:
        raise ValueError(
            f"--reward_pretrain {path} has another tokenizer than the actor: {len(differing)} of the actor's tokens have "
            f"no id there or another one ({', '.join(map(repr, sorted(differing)[:3]))}, …). Set --reward_input_tokenizer"
        )


def _answered(messages: list[dict[str, Any]], answer: str) -> list[dict[str, Any]]:
    last_message = messages[-1]
    if last_message["role"] != "assistant":
        return [*messages, {"role": "assistant", "content": answer}]
    if not isinstance(last_message.get("content"), str):
        raise DataError(
            "the chat ends in a message of the assistant that is not text, so the answer cannot follow it"
        )
    return [*messages[:-1], {**last_message, "content": last_message["content"] + answer}]


def reward_inputs(
    config: PPOConfig, tokenizer: Any, forms: Sequence[RowForm | None] = ()
) -> list[RewardInputs]:
    """Return what each reward model reads: the actor's ids, or the chat in the template and ids of a tokenizer of its own.

    ``forms``: of the models, once they are loaded. Models that read the same have the same inputs.
    """
    from transformers import AutoTokenizer

    model_options = config.model
    files_of_run = files_in_use()
    forms = forms or [None] * len(model_options.reward_pretrain)
    load_tokenizer = partial(
        AutoTokenizer.from_pretrained,
        trust_remote_code=model_options.trust_remote_code,
        use_fast=not model_options.disable_fast_tokenizer,
    )
    if tokenizer_paths := config.reward.reward_input_tokenizer:
        tokenizer_paths = list(tokenizer_paths) * (len(forms) if len(tokenizer_paths) == 1 else 1)
        inputs_of = cache(
            lambda model_path, form: Retemplated(
                load_tokenizer(files_of_run.bring(model_path)), form
            )
        )
        return [
            inputs_of(model_path, form)
            for model_path, form in zip(tokenizer_paths, forms, strict=True)
        ]
    for model_path in model_options.reward_pretrain:
        model_folder = files_of_run.bring(model_path)
        if Path(model_folder, "tokenizer_config.json").is_file():
            check_same_ids(tokenizer, load_tokenizer(model_folder), model_path)
    inputs_of = cache(lambda form: SameIds(tokenizer.pad_token_id, tokenizer.bos_token_id, form))
    return [inputs_of(form) for form in forms]


def check_reward_tokenizers(building: Any) -> None:
    """Refuse reward models that would read other texts, before any model is loaded."""
    try:
        reward_inputs(building.config, building.tokenizer)
    except ValueError as error:
        raise ConfigError(str(error)) from error
