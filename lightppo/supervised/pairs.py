"""Data sets of pairs: ids of a prompt with a chosen and a rejected answer; also with OpenRLHF's arguments."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lightppo.data.chat_templates import Rendered
from lightppo.data.datasets import setting
from lightppo.data.example_rows import read_margin, read_pair
from lightppo.data.examples import SFTDataset, script_args, with_args
from lightppo.data.prepared_rows import Encoded, Outcome
from lightppo.data.rows import lookup, template_options
from lightppo.errors import BadRowError
from lightppo.models.critic import RowForm

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)


class PairDataset(SFTDataset):
    """Map-style dataset of pairs: a prompt with a chosen and a rejected answer, both to their end-of-text.

    Rows have the forms of ``docs/supervised.md``. Arguments and errors as of :class:`SFTDataset`; each answer fits into
    ``max_len`` with the prompt.

    Args:
        chosen_key, rejected_key: columns of the answers.
        margin_key: column of the margin, a number that every row must then have.
    """

    reference: torch.Tensor | None = (
        None  # (N, 2), once it is set: the reference's log probs of both answers
    )

    def __init__(
        self,
        dataset: Dataset,
        tokenizer: PreTrainedTokenizerBase,
        max_len: int,
        margin_key: str | None = None,
        chosen_key: str | None = None,
        rejected_key: str | None = None,
        **options: Any,
    ) -> None:
        fields = {
            "pairs": True,
            "label_key": margin_key,
            "chosen_key": chosen_key,
            "rejected_key": rejected_key,
        }
        super().__init__(dataset, tokenizer, max_len, fields=fields, **options)

    @property
    def lengths(self) -> np.ndarray:
        """Return tokens of the prompt with the longer answer. (N,)"""
        prompts = self._rows.prompt_lengths
        chosen_lengths = self._rows.first_answers
        return prompts + np.maximum(chosen_lengths, super().lengths - prompts - chosen_lengths)

    @property
    def row_form(self) -> RowForm:
        """Return how the rows are written, for whoever scores answers by a model that was trained on them."""
        (number,) = self.numbers([0])
        _, rendered = self._render_row(self.row(number))[0]
        template = self.template
        if template.chat_template_kwargs:
            kwargs = json.dumps(template.chat_template_kwargs)
        else:
            kwargs = None
        return RowForm(
            self.tokenizer.eos_token_id, rendered.is_chat, template.system_prompt, kwargs
        )

    def __getitem__(self, position: int) -> dict[str, Any]:
        """Return ``prompt``, ``chosen`` and ``rejected``, ids (S,) long; ``margin`` where there are margins."""
        position = range(len(self))[position]
        ids = torch.tensor(self._rows.token_ids(position), dtype=torch.long)
        rows = self._rows
        lengths = int(rows.prompt_lengths[position]), int(rows.first_answers[position])
        parts = ids.split([*lengths, len(ids) - sum(lengths)])
        margin = read_margin(self.dataset[int(rows.row_numbers[position])], self.fields)
        row: dict[str, Any] = dict(zip(("prompt", "chosen", "rejected"), parts))
        if margin is not None:
            row["margin"] = margin
        if self.reference is not None:
            row["reference"] = self.reference[position]
        return row

    def collate_fn(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Write ``[left padding | prompt | answer | right padding]``, so that a packed pass has a prompt once for both.

        Of B pairs the rows 0 … B - 1 are chosen, B … 2B - 1 the rejected ones: ``sequences`` and ``attention_mask``
        (2B, S) long, ``action_mask`` (2B, A) True on the answers, which are in the last A columns, ``margin`` (B,),
        ``reference`` (B, 2).
        """
        pad = torch.nn.utils.rnn.pad_sequence
        prompts = [row["prompt"] for row in rows] * 2
        answers = [row[name] for name in ("chosen", "rejected") for row in rows]
        sides = {"left": prompts, "right": answers}
        ids = [pad(parts, True, self._pad_id(), padding_side=side) for side, parts in sides.items()]
        masks = [
            pad([torch.ones_like(x) for x in parts], True, 0, padding_side=s)
            for s, parts in sides.items()
        ]
        batch = {
            "sequences": torch.cat(ids, 1),
            "attention_mask": torch.cat(masks, 1),
            "action_mask": masks[1].bool(),
        }
        if margins := [row["margin"] for row in rows if "margin" in row]:
            batch["margin"] = torch.tensor(margins)
        if references := [row["reference"] for row in rows if "reference" in row]:
            batch["reference"] = torch.stack(references)
        return batch

    def _render_row(self, row: Mapping[str, Any]) -> list[tuple[Rendered, Rendered]]:
        prompt, *answers = read_pair(row, self.fields)
        read_margin(row, self.fields)
        options = template_options(row)
        return [self._rendered(prompt, answer, options) for answer in answers]

    def _encode(self, rendered: list[Any]) -> Iterator[Outcome]:
        examples = self._ids([example for pair in rendered for example in pair])
        for (chosen, start), (rejected, _) in zip(examples, examples):  # two at a time
            outcomes = self._fit_example(chosen, start), self._fit_example(rejected, start)
            encoded = [outcome for outcome in outcomes if isinstance(outcome, Encoded)]
            answers = [list(outcome.token_ids[start:]) for outcome in encoded]
            if len(encoded) < 2:
                yield next(outcome for outcome in outcomes if not isinstance(outcome, Encoded))
            elif answers[0] == answers[1]:
                yield BadRowError("equal", "both answers have the same tokens, after a cut perhaps")
            else:
                ids = chosen[:start] + answers[0] + answers[1]
                truncated = any(outcome.truncated for outcome in encoded)
                yield Encoded(ids, start, truncated, len(answers[0]))


class RewardDataset(PairDataset):
    """Pairs of a chosen and a rejected answer, with OpenRLHF's arguments: for reward models, and for DPO.

    Of a script's ``args`` count ``prompt_key``, ``chosen_key``, ``rejected_key``, ``apply_chat_template``,
    ``tokenizer_chat_template`` and ``margin_loss``. Without ``prompt_key`` no ``input_template`` is applied, and the
    prompt is a column with a usual name, else the common beginning of both answers (chats, texts in the form of
    hh-rlhf); other texts have none, so that all their tokens count as the answer's.
    """

    def __init__(
        self,
        dataset: Dataset,
        tokenizer: Any,
        max_length: int,
        strategy: Any = None,
        input_template: str | None = None,
        is_dpo: bool = False,
        num_processors: int | None = None,
        multiple_of: int = 1,
        **options: Any,
    ) -> None:
        args = script_args(strategy, tokenizer, multiple_of)
        self.is_dpo = is_dpo
        prompt_key = getattr(args, "prompt_key", None)
        chat = setting(
            strategy, "apply_chat_template", options.get("apply_chat_template"), default=False
        )
        template = None if chat or not prompt_key else input_template
        super().__init__(
            dataset,
            tokenizer,
            max_length,
            _margin_key(args, dataset, is_dpo),
            strategy=with_args(args, input_template=template, input_key=prompt_key),
            input_template=template,
            num_workers=options.pop("num_workers", num_processors),
            **options,
        )

    def _render_row(self, row: Mapping[str, Any]) -> list[tuple[Rendered, Rendered]]:
        try:
            return super()._render_row(row)
        except BadRowError as error:
            texts = [lookup(row, key) for key in self.fields.pair]
            no_prompt = error.reason == "missing" and all(isinstance(text, str) for text in texts)
            if not (self.of_script and no_prompt and not self.fields.prompt):
                raise
        return [self._rendered("", text) for text in texts]

    def collate_fn(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Collate as the class above; a column of padding comes first where no row has a prompt, as models need one."""
        batch = super().collate_fn(rows)
        if batch["sequences"].shape[1] > batch["action_mask"].shape[1]:
            return batch
        padded = {"sequences": self._pad_id(), "attention_mask": 0}
        return batch | {
            name: torch.nn.functional.pad(batch[name], (1, 0), value=value)
            for name, value in padded.items()
        }


def _margin_key(args: Any, dataset: Dataset, is_dpo: bool) -> str | None:
    """Return the column of OpenRLHF's margins, with ``--margin_loss``."""
    if is_dpo or not getattr(args, "margin_loss", False):
        return None
    if "margin" in dataset.column_names:
        return "margin"
    logger.warning("--margin_loss: the rows have no column 'margin', so no pair has a margin")
    return None
