"""Batches of dataloaders in scripts: those of a script's own as prompts, and ours in the form that its ``fit`` reads."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from lightppo.data.records import Prompt
from lightppo.distributed.rank_samples import RankSampler


class PromptText(str):
    """The text of a prompt, which also knows the :class:`Prompt`: its token ids, row number and further columns."""

    prompt: Prompt

    @classmethod
    def of(cls, prompt: Prompt) -> PromptText:
        text = cls(prompt.text)
        text.prompt = prompt
        return text


def as_prompts(batch: Any, tokenizer: Any, prompt_max_len: int) -> list[Prompt]:
    """A batch of a prompts dataloader as prompts.

    Args:
        batch: prompts, strings, or in the seed's style (prompts, labels) or (prompts, labels, references), where
            ``references`` are the ground truth and ``labels`` name the data source.
        tokenizer: for strings.
        prompt_max_len: longest prompt, tokens.

    Raises:
        TypeError: on a batch of another form.
        ValueError: on a string longer than ``prompt_max_len`` tokens, or columns of different lengths.
    """
    if isinstance(batch, list) and all(isinstance(item, Prompt) for item in batch):
        return batch
    texts, labels, references = _columns(batch)
    for name, column in (("labels", labels), ("references", references)):
        if column is not None and len(column) != len(texts):
            raise ValueError(f"a batch of {len(texts)} prompts has {len(column)} {name}")
    prompts = []
    for i, text in enumerate(texts):
        if isinstance(text, PromptText):
            if references is not None:
                label = references[i]
            elif labels is None:
                label = text.prompt.label
            else:
                label = labels[i]
            prompts.append(replace(text.prompt, label=label))
            continue
        token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(token_ids) > prompt_max_len:
            raise ValueError(
                f"the prompt {text[:60]!r}… has {len(token_ids)} tokens, more than prompt_max_len {prompt_max_len}: "
                "raise it, or build the dataset with truncation"
            )
        if references is not None:
            label = references[i]
        elif labels is not None:
            label = labels[i]
        else:
            label = None
        source = str(labels[i]) if references is not None and labels is not None else "default"
        prompts.append(Prompt(text, token_ids, label, _index_of(text), source))
    return prompts


def _columns(batch: Any) -> list:
    """``[prompts, labels, references]``, the last two possibly ``None``."""
    if _is_texts(batch):
        columns = [batch]
    elif isinstance(batch, (list, tuple)):
        columns = list(batch)
    else:
        columns = []
    of_rows = all(c is None or (hasattr(c, "__len__") and not isinstance(c, str)) for c in columns)
    if not 1 <= len(columns) <= 3 or not _is_texts(columns[0]) or not of_rows:
        raise TypeError(
            "a batch of prompts must be a list of Prompt or of strings, or (prompts, labels[, references]); "
            f"got {type(batch).__name__} {str(batch)[:80]}"
        )
    return [*columns, None, None][:3]


def _is_texts(column: Any) -> bool:
    return isinstance(column, (list, tuple)) and all(isinstance(text, str) for text in column)


def _index_of(text: str) -> int:
    """A number for a prompt without row number: equal texts form one group, on any rank."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())


class _Episodes(RankSampler):
    """A sampler of batches, in the place where the seed's ``fit`` looks for its sampler."""

    def __init__(self, sampler: Any) -> None:
        self.set_epoch = sampler.set_epoch


class SeedLoader:
    """A prompts dataloader in the seed's form: each batch is ``[texts, labels]``.

    Batches that are no list of :class:`Prompt` stay as they are, and every other attribute is the dataloader's.
    """

    def __init__(self, loader: Iterable) -> None:
        self.loader = loader

    @property
    def sampler(self) -> Any:
        """With ``set_epoch(epoch, consumed_samples)``, if the dataloader has such a one."""
        batches = getattr(self.loader, "batch_sampler", None)
        if hasattr(batches, "set_epoch"):
            return _Episodes(batches)
        return getattr(self.loader, "sampler", None)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            if isinstance(batch, list) and all(isinstance(prompt, Prompt) for prompt in batch):
                batch = [
                    [PromptText.of(prompt) for prompt in batch],
                    [prompt.label for prompt in batch],
                ]
            yield batch

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["loader"], name)


class PretrainBatch(dict):
    """A batch for the PTX loss; ids and mask also by the places that they have in the seed's, 1 and 2."""

    PLACES = {1: "input_ids", 2: "attention_mask"}

    def __missing__(self, key: Any) -> Any:
        if key not in self.PLACES:
            raise KeyError(key)
        return self[self.PLACES[key]]


def pretrain_batches_of(batches: Iterator) -> Iterator:
    for batch in batches:
        yield PretrainBatch(batch) if isinstance(batch, Mapping) else batch
