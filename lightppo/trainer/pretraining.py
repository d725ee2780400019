"""PTX: the loss of the language model on pretraining text, beside the policy loss (arXiv:2203.02155)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightppo.algorithms.losses import IGNORE_INDEX, GPTLMLoss, pretrain_loss
from lightppo.config import PPOConfig
from lightppo.data.blends import read_rows
from lightppo.data.examples import SFTDataset
from lightppo.distributed.deepspeed import DeepspeedStrategy
from lightppo.models.batches import on_cpu, to_device
from lightppo.trainer.training_losses import LossTerm, TermLoss


class Pretraining(LossTerm):
    """``--pretrain_data``: a batch of text for each micro batch of the actor.

    Args:
        batches: endless; ``None``: there is no term.
    """

    metrics = ("ptx_loss",)

    def __init__(
        self, coef: float, strategy: DeepspeedStrategy, batches: Iterator | None = None
    ) -> None:
        self.coef = coef
        self.strategy = strategy
        self.batches = batches
        self.loss_fn = GPTLMLoss()
        self.taken = 0  # batches on each rank
        self.read = 0  # of them, since the process began

    def losses(self, micro_batches: int) -> list[TermLoss]:
        if self.batches is None or self.coef == 0:
            return []
        self.catch_up()
        device = self.strategy.device
        batches = [as_lm_batch(next(self.batches), device) for _ in range(micro_batches)]
        self.taken += micro_batches
        self.read = self.taken
        tokens = sum(self.loss_fn.num_tokens(on_cpu(batch["labels"])) for batch in batches)
        tokens = self.strategy.all_reduce(tokens, "sum")
        return [partial(self._loss, batch, tokens, micro_batches) for batch in batches]

    def _loss(
        self, batch: dict[str, Tensor], tokens: float, batches: int, actor: Any
    ) -> tuple[float, Tensor, dict[str, Tensor]]:
        loss = pretrain_loss(actor, batch, self.loss_fn, tokens, self.strategy.world_size)
        return self.coef, loss, {"ptx_loss": loss.detach().double() * batches}

    def catch_up(self) -> None:
        """Go on where a resumed run has left the text."""
        for _ in range(self.taken - self.read):
            next(self.batches)
        self.read = self.taken

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.taken * self.strategy.world_size}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken = math.ceil(state["batches"] / self.strategy.world_size)


def pretraining(building: Any) -> Pretraining:
    """Return the term of a run, whose rows are checked then."""
    config = building.config
    strategy = building.strategy
    loader = build_pretrain(config, building.tokenizer, strategy)
    building.rows["pretrain_data"] = loader.dataset
    return Pretraining(config.algorithm.ptx_coef, strategy, endless(loader))


def build_pretrain(config: PPOConfig, tokenizer: Any, strategy: DeepspeedStrategy) -> DataLoader:
    """Return batches for the PTX loss."""
    data = config.data
    rows = read_rows(config, "pretrain_data", data.pretrain_split, strategy)
    dataset = SFTDataset(
        rows,
        tokenizer,
        data.prompt_max_len + config.rollout.generate_max_len,
        pretrain_mode=data.output_key is None,
        input_key=data.input_key,
        output_key=data.output_key,
        # With a completion they are rows of another kind than the prompts, perhaps of plain text.
        chat_template_kwargs=None if data.output_key else data.chat_template_kwargs,
        on_bad_row=data.on_bad_row,
        num_workers=data.data_num_workers,
        ranks=strategy,
        overlong_cure="raise --prompt_max_len or --generate_max_len, whose sum it is",
    )
    size = config.training.micro_train_batch_size
    pin = data.dataloader_pin_memory
    return strategy.setup_dataloader(dataset, size, pin_memory=pin, collate_fn=dataset.collate_fn)


def as_lm_batch(batch: Any, device: torch.device) -> dict[str, Tensor]:
    """Return ``input_ids``, ``attention_mask`` and ``labels``, each (B, S), of a pretraining dataloader's batch.

    Args:
        batch: a mapping, perhaps without ``labels``; or in the seed's style a tuple whose second and third entries are
            ids and mask, (B, S) or (B, 1, S).
        device: where it goes.
    """
    if isinstance(batch, (tuple, list)):
        batch = {"input_ids": batch[1], "attention_mask": batch[2]}
    ids = batch["input_ids"]
    mask = batch["attention_mask"]
    ids = ids.reshape(-1, ids.size(-1))
    mask = mask.reshape(-1, mask.size(-1))
    labels = batch.get("labels")
    labels = ids.masked_fill(mask == 0, IGNORE_INDEX) if labels is None else labels
    tensors = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return {name: to_device(tensor, device) for name, tensor in tensors.items()}


def endless(dataloader: Iterable) -> Iterator:
    """Yield the batches again and again, reshuffled each time round where the sampler can."""
    if isinstance(dataloader, Iterator):
        yield from dataloader
        raise ValueError(
            "the iterator over the pretraining data came to its end: pass the dataloader itself"
        )
    sampler = getattr(dataloader, "sampler", None)
    for round_ in itertools.count():
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(round_)
        batch = None
        for batch in dataloader:
            yield batch
        if batch is None:
            raise ValueError(
                "the pretraining dataloader gave no batch: it has less data than one batch"
            )
