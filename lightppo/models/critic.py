"""Models with a one-output head: critics (a value per position) and reward models (a score per sequence)."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from lightppo.errors import ModelLoadError
from lightppo.models.batches import Batch, check_num_actions, on_cpu, refuse_ring
from lightppo.models.heads import value_head
from lightppo.models.loading import load_sequence_classifier
from lightppo.models.wrapper import PretrainedWrapper

ROWS_ENTRY = "reward_rows"  # of a model's config, and of the state in a checkpoint


@dataclass(frozen=True)
class RowForm:
    """How the rows of a reward model were written in its training; its config keeps it."""

    end_id: int  # the last token of every finished answer, at which the score is read
    is_chat: bool  # the rows were chats
    system_prompt: str | None = None  # in front of chats without one
    chat_template_kwargs: str | None = None  # further variables of the chat template, as JSON

    @property
    def template_options(self) -> dict[str, str | None]:
        """Return the options of a :class:`lightppo.data.chat_templates.PromptTemplate`."""
        return {
            "system_prompt": self.system_prompt,
            "chat_template_kwargs": self.chat_template_kwargs,
        }

    @classmethod
    def of(cls, config: PretrainedConfig) -> RowForm | None:
        """Return the form that a config keeps; None: whoever trained the model kept none."""
        saved_form = getattr(config, ROWS_ENTRY, None)
        try:
            return None if saved_form is None else cls(**saved_form)
        except TypeError as error:
            raise ModelLoadError(
                f"{config.name_or_path}: {ROWS_ENTRY} in config.json is {saved_form!r}, which this version does not know: "
                "train the reward model again, or take the entry out"
            ) from error

    def keep(self, config: PretrainedConfig) -> None:
        """Put it into a config."""
        setattr(config, ROWS_ENTRY, asdict(self))


class SequenceRegressor(PretrainedWrapper):
    """A one-output sequence classifier, called position by position."""

    kind: Literal["critic", "reward"]  # which checkpoints a subclass takes
    draws_head: bool  # else a new head is 0

    def __init__(
        self,
        pretrain_or_model: str | PreTrainedModel,
        *,
        normalize_reward: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(
            pretrain_or_model,
            partial(load_sequence_classifier, kind=self.kind, draws_head=self.draws_head),
            **options,
        )
        _, head = value_head(self.model)
        if head.out_features != 1:
            raise ModelLoadError(
                f"a {self.kind} needs one output, the model has {head.out_features}"
            )
        self.mean, self.std = self._statistics() if normalize_reward else (0.0, 1.0)

    def _statistics(self) -> tuple[float, float]:
        """Return mean and standard deviation of the scores, from the config; a critic's config may have none."""
        config = self.hf_model.config
        mean = getattr(config, "mean", None)
        std = getattr(config, "std", None)
        if mean is not None and std is not None:
            if not std > 0:
                raise ModelLoadError(
                    f"--normalize_reward: the config has std {std}; it must be above 0"
                )
            return float(mean), float(std)
        if self.kind == "critic":
            return 0.0, 1.0
        raise ModelLoadError(
            f"--normalize_reward: the config of {config.name_or_path or 'the reward model'} has no mean and std. "
            "Add them to its config.json, or leave --normalize_reward out"
        )

    def _hidden(self, batch: Batch) -> ModelOutput:
        base_model = self.hf_model.base_model
        with self._training_pass(batch):
            return base_model(**batch.inputs(base_model))

    def run_rows(self, batch: Batch) -> Tensor:
        return self._hidden(batch).last_hidden_state

    def _score(self, hidden: Tensor) -> Tensor:
        """Score (..., H) -> (...), float32, normalised."""
        _, head = value_head(self.hf_model)
        return (head(hidden).squeeze(-1).float() - self.mean) / self.std


class Critic(SequenceRegressor):
    """Values of the positions from which actions are predicted; (x - mean) / std with ``normalize_reward``.

    Built from a causal LM, a reward model or another critic, and saved as a plain
    ``AutoModelForSequenceClassification`` checkpoint. The new head of a causal LM is 0, and so are its first values: a
    drawn one makes values as large as hidden states are, far from all returns. ``options`` as for
    :class:`lightppo.models.actor.Actor` and :func:`lightppo.models.loading.load_sequence_classifier`.
    """

    kind = "critic"
    draws_head = False

    def forward(
        self,
        sequences: Tensor,
        num_actions: int | list[int] | None = None,
        attention_mask: Tensor | None = None,
        return_output: bool = False,
        packed_seq_lens: list[int] | None = None,
        include_last: bool = False,
        ring_attn_group: None = None,
        values_allgather: bool = False,
    ) -> Tensor | tuple[Tensor, ModelOutput]:
        """Return values (B, A) float32 before the last A actions: column t is position S - A - 1 + t, 0 at padding.

        Arguments as in :meth:`Actor.forward`. Without ``num_actions``: all positions, (B, S). ``include_last`` adds the
        value after the last position, (B, A + 1), to bootstrap an unfinished response.
        """
        refuse_ring(ring_attn_group)
        if packed_seq_lens is not None:
            batch = self.layout.batch_of_row(
                sequences, packed_seq_lens, cast("list[int] | None", num_actions), include_last
            )
        else:
            if attention_mask is None:
                attention_mask = torch.ones_like(sequences)
            columns = slice(None)
            length = sequences.shape[1]
            actions = cast("int | None", num_actions)
            if actions is not None:
                check_num_actions(actions, length)
                columns = slice(length - actions - 1, length if include_last else length - 1)
            real = on_cpu(attention_mask).bool()[:, columns]
            batch = self.layout.batch(sequences, attention_mask, columns, real, actions)
        reads_all = return_output or packed_seq_lens is not None
        with nullcontext() if reads_all else batch.reading():
            output = self._hidden(batch)
        values = self._score(batch.at_places(output.last_hidden_state))
        values = batch.scatter(batch.of_real(values))  # (B, A)
        return (values, output) if return_output else values


class RewardModel(SequenceRegressor):
    """Scores at the last real token of each sequence; (x - mean) / std of the config with ``normalize_reward``.

    A checkpoint without a head is an error unless ``init_value_head=True`` (to train a new reward model).
    """

    kind: Literal["critic", "reward"] = "reward"
    draws_head = True

    @property
    def row_form(self) -> RowForm | None:
        """Return how rows must be written for it; None: as they are."""
        return RowForm.of(self.hf_model.config)

    def forward(
        self,
        sequences: Tensor,
        attention_mask: Tensor | None = None,
        num_actions: int | None = None,
        ring_attn_group: None = None,
        values_allgather: bool = False,
    ) -> Tensor:
        """Return scores (B,) float32 of sequences (B, S), padded on either side; mask None: no padding.

        With ``num_actions`` A, prompts end before the last A columns, so that equal ones may be shared.
        """
        refuse_ring(ring_attn_group)
        if attention_mask is None:
            attention_mask = torch.ones_like(sequences)
        mask = on_cpu(attention_mask)
        empty_rows = (mask.sum(-1) == 0).nonzero().flatten().tolist()
        if empty_rows:
            raise ValueError(f"rows {empty_rows} have no real token to score (attention_mask is 0)")
        length = sequences.shape[1]
        last_places = length - 1 - mask.long().flip(-1).argmax(-1)  # (B,)
        is_last = torch.arange(length) == last_places[:, None]  # (B, S)
        batch = self.layout.batch(sequences, attention_mask, slice(None), is_last, num_actions)
        with batch.reading():
            hidden = batch.at_places(self._hidden(batch).last_hidden_state)
        return batch.of_rows(self._score(batch.of_real(hidden)))


class NewRewardModel(RewardModel):
    """A reward model to be trained: a checkpoint without a head, such as a causal LM, gets a new one."""

    kind = "critic"
