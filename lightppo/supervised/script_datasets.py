"""Data sets of supervised training with the constructors of OpenRLHF's launcher era, for scripts in its style."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from lightppo.data import examples
from lightppo.data.chat_templates import Rendered
from lightppo.data.prepared_rows import Encoded, Outcome
from lightppo.data.rows import lookup
from lightppo.data.script_options import setting
from lightppo.errors import BadRowError, DataError
from lightppo.supervised.pairs import ReferencedPairs

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

LEFT_OUT = ("empty", "equal")  # rows with nothing to learn, which a script's data may have
ROOM = 2  # tokens of an answer that a prompt must leave room for, one of them the end-of-text


class _ScriptRows:
    """Rows as OpenRLHF takes them where the strategy has a script's ``args``; else as the class beneath does.

    A row that is too long is cut on the right and ends with the end-of-text. Rows whose prompt leaves no room, rows
    without an answer and pairs of equal answers are left out. ``report`` counts all of them, and the log tells it.
    """

    of_script = False

    def _encode_chunk(self, rows: list[dict[str, Any]]) -> list[Outcome]:
        outcomes = super()._encode_chunk(rows)
        return [self._left_out(outcome) if self.of_script else outcome for outcome in outcomes]

    @staticmethod
    def _left_out(outcome: Outcome) -> Outcome:
        is_known = isinstance(outcome, BadRowError) and outcome.reason in LEFT_OUT
        return outcome.reason if is_known else outcome

    def _fit_example(self, ids: list[int], prompt_length: int) -> Outcome:
        if self.of_script and self.truncation == "right" and not self.pretrain_mode:
            if prompt_length > self.max_len - ROOM:
                return "overlong"
            fitted = super()._fit_example(ids, prompt_length)
            if isinstance(fitted, Encoded) and fitted.truncated:
                ends = [*fitted.token_ids[:-1], self.tokenizer.eos_token_id]
                return fitted._replace(token_ids=ends)
            return fitted
        return super()._fit_example(ids, prompt_length)

    @property
    def packing_collate_fn(self) -> Any:
        """The same as ``collate_fn``: a model with ``packing_samples`` packs the batch itself."""
        return self.collate_fn


class SFTDataset(_ScriptRows, examples.SFTDataset):
    """:class:`lightppo.data.examples.SFTDataset`, whose options it takes by name, with OpenRLHF's arguments.

    Of a script's ``args`` count ``input_key``, ``output_key``, ``apply_chat_template``, ``tokenizer_chat_template``.
    With ``multiturn`` the loss covers every assistant turn of a chat, else the last one.
    """

    def __init__(
        self,
        dataset: Dataset,
        tokenizer: Any,
        max_length: int | None = None,
        strategy: Any = None,
        input_template: str | bool | None = None,
        pretrain_mode: bool = False,
        num_processors: int | None = None,
        multiple_of: int = 1,
        multiturn: bool = False,
        *,
        max_len: int | None = None,
        **options: Any,
    ) -> None:
        # This is pretrain_mode, in the place that it has in examples.SFTDataset.
        if isinstance(input_template, bool):
            input_template, pretrain_mode = None, input_template
        args = _script_args(strategy, tokenizer, multiple_of)
        self.of_script = args is not None
        if self.of_script:
            options = {"truncation": getattr(args, "truncation", None) or "right"} | options
        chat = setting(
            strategy, "apply_chat_template", options.get("apply_chat_template"), default=False
        )
        template = None if pretrain_mode or chat else input_template
        super().__init__(
            dataset,
            tokenizer,
            _required_length(max_length, max_len),
            _changed(args, input_template=template),
            pretrain_mode,
            input_template=template,
            multiturn=multiturn,
            num_workers=options.pop("num_workers", num_processors),
            **options,
        )


class RewardDataset(_ScriptRows, ReferencedPairs):
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
        args = _script_args(strategy, tokenizer, multiple_of)
        self.of_script, self.is_dpo = args is not None, is_dpo
        if self.of_script:
            options = {"truncation": getattr(args, "truncation", None) or "right"} | options
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
            strategy=_changed(args, input_template=template, input_key=prompt_key),
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
        """As of the class above; a column of padding comes first where no row has a prompt, as models need one."""
        batch = super().collate_fn(rows)
        if batch["sequences"].shape[1] > batch["action_mask"].shape[1]:
            return batch
        padded = {"sequences": self._pad_id(), "attention_mask": 0}
        return batch | {
            name: torch.nn.functional.pad(batch[name], (1, 0), value=x)
            for name, x in padded.items()
        }


def _script_args(strategy: Any, tokenizer: Any, multiple_of: int) -> Any:
    """The script's options, or ``None``; sets the chat template that they name."""
    if multiple_of != 1:
        raise DataError(
            f"multiple_of {multiple_of}: sequences are not split over ranks here; leave out --ring_attn_size"
        )
    args = getattr(strategy, "args", None)
    template = getattr(args, "tokenizer_chat_template", None)
    if template and getattr(args, "apply_chat_template", False):
        tokenizer.chat_template = template
    return args


def _changed(args: Any, **changes: Any) -> Any:
    """A strategy whose ``args`` are the script's with these changes."""
    return None if args is None else SimpleNamespace(args=SimpleNamespace(**vars(args) | changes))


def _required_length(max_length: int | None, max_len: int | None) -> int:
    if (max_length is None) == (max_len is None):
        raise DataError(f"give max_length or max_len, not both: {max_length} and {max_len}")
    return max_len if max_length is None else max_length


def _margin_key(args: Any, dataset: Mapping[str, Any], is_dpo: bool) -> str | None:
    """The column of OpenRLHF's margins, with ``--margin_loss``."""
    if is_dpo or not getattr(args, "margin_loss", False):
        return None
    if "margin" in dataset.column_names:
        return "margin"
    logger.warning("--margin_loss: the rows have no column 'margin', so no pair has a margin")
    return None
