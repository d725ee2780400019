"""Data sets of pairs: ids of a prompt with a chosen and a rejected answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lightppo.data.chat_templates import Rendered
from lightppo.data.example_rows import read_margin, read_pair
from lightppo.data.examples import SFTDataset
from lightppo.data.prepared_rows import Encoded, Outcome
from lightppo.data.rows import template_options
from lightppo.errors import BadRowError
from lightppo.models.critic import RowForm

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase


class PairDataset(SFTDataset):
    """Map-style dataset of pairs: a prompt with a chosen and a rejected answer, both to their end-of-text.

    Rows have the forms of ``docs/supervised.md``. Arguments and errors as of :class:`SFTDataset`; each answer fits into
    ``max_len`` with the prompt.

    Args:
        chosen_key, rejected_key: columns of the answers.
        margin_key: column of the margin, a number that every row must then have.
    """

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
        """Of the prompt with the longer answer. (N,)"""
        prompts, first = self._rows.prompt_lengths, self._rows.first_answers
        return prompts + np.maximum(first, super().lengths - prompts - first)

    @property
    def row_form(self) -> RowForm:
        """How the rows are written, for whoever scores answers by a model that was trained on them."""
        (number,) = self.numbers([0])
        _, whole = self._render_row(self.row(number))[0]
        template = self.template
        kwargs = (
            json.dumps(template.chat_template_kwargs) if template.chat_template_kwargs else None
        )
        return RowForm(self.tokenizer.eos_token_id, whole.is_chat, template.system_prompt, kwargs)

    def __getitem__(self, position: int) -> dict[str, Any]:
        """``prompt``, ``chosen`` and ``rejected``, ids (S,) long; ``margin`` where there are margins."""
        position = range(len(self))[position]
        ids, rows = torch.tensor(self._rows.token_ids(position), dtype=torch.long), self._rows
        lengths = int(rows.prompt_lengths[position]), int(rows.first_answers[position])
        parts = ids.split([*lengths, len(ids) - sum(lengths)])
        margin = read_margin(self.dataset[int(rows.row_numbers[position])], self.fields)
        return dict(zip(("prompt", "chosen", "rejected"), parts)) | (
            {} if margin is None else {"margin": margin}
        )

    def collate_fn(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """``[left padding | prompt | answer | right padding]``, so that a packed pass has a prompt once for both.

        Of B pairs the rows 0 … B - 1 are chosen, B … 2B - 1 the rejected ones: ``sequences`` and ``attention_mask``
        (2B, S) long, ``action_mask`` (2B, A) True on the answers, which are in the last A columns, ``margin`` (B,).
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
        margins = [row["margin"] for row in rows if "margin" in row]
        return batch | ({"margin": torch.tensor(margins)} if margins else {})

    def _render_row(self, row: Mapping[str, Any]) -> list[tuple[Rendered, Rendered]]:
        prompt, *answers = read_pair(row, self.fields)
        read_margin(row, self.fields)
        options = template_options(row)
        return [self._rendered(prompt, answer, options) for answer in answers]

    def _encode(self, rendered: list[list[tuple[Rendered, Rendered]]]) -> Iterator[Outcome]:
        examples = self._ids([example for pair in rendered for example in pair])
        for (chosen, start), (rejected, _) in zip(examples, examples):  # two at a time
            fitted = self._fit_example(chosen, start), self._fit_example(rejected, start)
            odd = [one for one in fitted if not isinstance(one, Encoded)]
            answers = [] if odd else [list(one.token_ids[start:]) for one in fitted]
            if odd:
                yield odd[0]
            elif answers[0] == answers[1]:
                yield BadRowError("equal", "both answers have the same tokens, after a cut perhaps")
            else:
                ids = chosen[:start] + answers[0] + answers[1]
                yield Encoded(ids, start, any(one.truncated for one in fitted), len(answers[0]))


class ReferencedPairs(PairDataset):
    """Pairs whose batches also have ``reference`` (B, 2), once it is set: the reference's log probs of both answers."""

    reference: torch.Tensor | None = None  # (N, 2)

    def __getitem__(self, position: int) -> dict[str, Any]:
        row = super().__getitem__(position)
        return row if self.reference is None else row | {"reference": self.reference[position]}

    def collate_fn(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        references = [row["reference"] for row in rows if "reference" in row]
        return super().collate_fn(rows) | (
            {"reference": torch.stack(references)} if references else {}
        )
