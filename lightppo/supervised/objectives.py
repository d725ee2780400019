"""What ``trainer.supervised`` learns: demonstrations (``sft``), a reward (``rm``), or a policy (``dpo``) from pairs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightppo.algorithms.entries import PREFERENCE_LOSSES
from lightppo.algorithms.losses import (
    GPTLMLoss,
    answer_log_probs,
    bradley_terry_loss,
    pair_mean,
    pretrain_loss,
)
from lightppo.config.supervised_options import DPOConfig, RMConfig, SFTConfig, SupervisedConfig
from lightppo.data.examples import SFTDataset
from lightppo.distributed.deepspeed import DeepspeedStrategy
from lightppo.files import stage_to_local
from lightppo.models.actor import Actor
from lightppo.models.batches import to_device
from lightppo.models.critic import ROWS_ENTRY, NewRewardModel
from lightppo.models.heads import value_head
from lightppo.models.pretrained import loading_options
from lightppo.ranks import Ranks, heartbeat, level
from lightppo.supervised.pairs import PairDataset
from lightppo.trainer.training_losses import packed_lm_loss
from lightppo.zero3 import find_hf_model

FULL = 0.9  # of padded rows: attention over each row alone takes longer than so little padding
Batch = dict[str, Tensor]
Metrics = dict[str, Tensor]


class Objective:
    """Base of the objectives: a model, a data set, and the loss of a micro batch. To add one, override all of these.

    The loop calls, in this order: ``build_dataset`` for training and held-out rows; ``build_model``; after
    ``strategy.prepare``, ``attach``; for each micro batch ``count`` and ``loss``; before a model is saved, ``finish``.

    Args:
        config: resolved.
        strategy: with the process group up.
    """

    config_class: ClassVar[type[SupervisedConfig]]
    unit: ClassVar[str]  # what the loss is a mean over, as the metric that counts it: tokens, pairs
    next: ClassVar[str]  # what to do with the saved model, with {path} in it
    shares_prompts = True  # packed rows with equal prompts run it once

    def __init__(self, config: Any, strategy: DeepspeedStrategy) -> None:
        self.config = config
        self.strategy = strategy

    @property
    def ranks(self) -> Ranks:
        """Return the ranks that share out the rows."""
        return self.strategy.data_parallel

    def build_dataset(self, rows: Any, tokenizer: Any) -> Any:
        """Return the rows, checked and tokenised, with ``collate_fn`` for micro batches and a ``report``."""
        raise NotImplementedError

    def build_model(self) -> Any:
        """Load the model that trains, without adapters, not yet in an engine; by default an actor."""
        return Actor(stage_to_local(self.config.model.pretrain), **self._loading())

    def attach(self, model: Any) -> list[Any]:
        """Take the prepared model, make further, frozen ones, and return all, which pack together or not."""
        return [model]

    def gains_by_packing(self, rows: Any) -> bool:
        """Tell whether ``--packing_samples`` None tries it: it spares padding, and prompts that rows share."""
        return True

    def begin(self, model: Any, datasets: Iterable[Any]) -> None:
        """Prepare the first step, while the prepared model is as --pretrain and no checkpoint is loaded. Collective.

        ``datasets``: those of :meth:`build_dataset` that the run uses.
        """

    def count(self, batch: Batch) -> int:
        """Return how many the loss of this micro batch is a sum over, in ``unit``."""
        raise NotImplementedError

    def loss(self, model: Any, batch: Batch, total: float, dp_size: int) -> tuple[Tensor, Metrics]:
        """Return this micro batch's share of the mean over the ``total`` of the optimizer step on ``dp_size`` ranks.

        With it come shares of further means over the same, without gradient. See
        :func:`~lightppo.algorithms.masking.aggregate_loss`. They are ``train/<name>``, and ``eval/<name>`` in evaluation.
        """
        raise NotImplementedError

    def saved_settings(self, model: Any) -> dict[str, Any]:
        """Return what a checkpoint must have of the model's config: it has weights, and no config."""
        return {}

    def finish(self, model: Any, batches: Iterator[tuple[Batch, bool]]) -> None:
        """Look at all rows after an evaluation, and of training at the end; see ``HeldOut.batches``. Collective."""

    def _loading(self) -> dict[str, Any]:
        """Return options of the model that trains."""
        return loading_options(self.config) | {
            "ds_config": self.strategy.get_ds_train_config(),
            "dtype": self.strategy.dtype,
        }

    def _dataset_options(self) -> dict[str, Any]:
        data = self.config.data
        names = (
            "input_key",
            "input_template",
            "apply_chat_template",
            "system_prompt",
            "chat_template_kwargs",
            "truncation",
            "on_bad_row",
            "output_key",
            "multiturn",
            "chosen_key",
            "rejected_key",
        )
        options = {name: getattr(data, name) for name in names if hasattr(data, name)}
        return options | {"num_workers": data.data_num_workers, "ranks": self.strategy}


class SFT(Objective):
    """Cross entropy of completions."""

    config_class = SFTConfig
    unit = "tokens"
    shares_prompts = False
    next = "lightppo ppo --pretrain {path} --prompt_data FILE --reward_fn FILE.py"

    def __init__(self, config: SFTConfig, strategy: DeepspeedStrategy) -> None:
        super().__init__(config, strategy)
        self.loss_fn = GPTLMLoss()

    def build_dataset(self, rows: Any, tokenizer: Any) -> SFTDataset:
        return SFTDataset(rows, tokenizer, self.config.data.max_len, **self._dataset_options())

    def gains_by_packing(self, rows: SFTDataset) -> bool:
        return rows.lengths.mean() < FULL * rows.lengths.max()

    def count(self, batch: Batch) -> int:
        return self.loss_fn.num_tokens(batch["labels"])

    def loss(self, model: Any, batch: Batch, total: float, dp_size: int) -> tuple[Tensor, Metrics]:
        if not model.layout.packs:
            return pretrain_loss(model, batch, self.loss_fn, total, dp_size), {}
        return packed_lm_loss(model, batch, total, dp_size), {}


class PairObjective(Objective):
    """Base of what is learnt from pairs of a chosen and a rejected answer."""

    unit = "pairs"

    def count(self, batch: Batch) -> int:
        return len(batch["sequences"]) // 2


class RewardModelling(PairObjective):
    """The Bradley-Terry loss of pairs; accuracy, margin and rewards are of scores, without the rows' own margins."""

    config_class = RMConfig
    next = "lightppo ppo --reward_pretrain {path} --normalize_reward --pretrain MODEL --prompt_data FILE"
    uses_margins = True  # where the rows have some

    def build_dataset(self, rows: Any, tokenizer: Any) -> PairDataset:
        data = self.config.data
        return PairDataset(
            rows, tokenizer, data.max_len, data.margin_key, **self._dataset_options()
        )

    def build_model(self) -> NewRewardModel:
        model = self.config.model
        return NewRewardModel(
            stage_to_local(model.pretrain),
            value_head_prefix=model.value_head_prefix,
            flag="--pretrain",
            **self._loading(),
        )

    def attach(self, model: Any) -> list[Any]:
        head, _ = value_head(find_hf_model(model)[0])
        self.next += f" --value_head_prefix {head}" * (head != "score")
        return [model]

    def begin(self, model: Any, datasets: Iterable[PairDataset]) -> None:
        """Write into the model's config how its rows are written: scores of other rows would be of another kind."""
        rows = next(iter(datasets))
        rows.row_form.keep(find_hf_model(model)[0].config)

    def saved_settings(self, model: Any) -> dict[str, Any]:
        return {ROWS_ENTRY: getattr(find_hf_model(model)[0].config, ROWS_ENTRY, None)}

    def loss(self, model: Any, batch: Batch, total: float, dp_size: int) -> tuple[Tensor, Metrics]:
        mean = partial(pair_mean, pairs=total, dp_size=dp_size)
        chosen, rejected = self._scores(model, batch)
        margin = batch.get("margin") if self.uses_margins else None
        loss = bradley_terry_loss(chosen, rejected, margin)
        margin_of_scores = chosen - rejected
        metrics = {"accuracy": (margin_of_scores > 0).float(), "margin": margin_of_scores}
        metrics |= {"chosen_reward": chosen, "rejected_reward": rejected}
        return mean(loss), {name: mean(values.detach()) for name, values in metrics.items()}

    @torch.no_grad()
    def finish(self, model: Any, batches: Iterator[tuple[Batch, bool]]) -> None:
        """Put mean and standard deviation of all scores into the model's config, for ``--normalize_reward``."""
        with self.strategy.together:
            scored_batches = [
                (torch.cat(self._scores(model, batch)), is_counted) for batch, is_counted in batches
            ]
        scores = self.ranks.all_gather(
            torch.cat(
                [
                    batch_scores if is_counted else batch_scores[:0]
                    for batch_scores, is_counted in scored_batches
                ]
            ).double()
        )
        config = find_hf_model(model)[0].config
        std = scores.std(unbiased=False).item()
        if std > 0:  # else the model tells no answer from another
            config.mean = scores.mean().item()
            config.std = std

    @staticmethod
    def _scores(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return scores of the chosen and the rejected answers, (B,) each, from one pass."""
        return model(
            batch["sequences"], batch["attention_mask"], batch["action_mask"].shape[1]
        ).chunk(2)


class DPO(PairObjective):
    """Pairs without a reward model: the model shall prefer the chosen answers by more than it did at its start.

    What it thought of them at its start, the reference's log probs, is computed once, before the first step: no second
    model is in memory, whatever the ZeRO stage, and fresh adapters change nothing. A resumed run computes it again.
    ``--ref_pretrain`` is a second model, until then.
    """

    config_class = DPOConfig
    next = "lightppo eval --pretrain {path} --eval_data FILE --reward_fn FILE.py"
    # The weight of the chosen answers' mean negative log prob per token in the loss.
    nll_loss_coef = 0.0

    def __init__(self, config: DPOConfig, strategy: DeepspeedStrategy) -> None:
        super().__init__(config, strategy)
        preference = config.preference
        entry = PREFERENCE_LOSSES.find(preference.preference_loss)
        self.loss_fn = partial(
            entry.fn,
            beta=preference.beta,
            **{name: getattr(preference, name) for name in entry.defaults},
        )
        self.reference: Actor | None = None

    def build_dataset(self, rows: Any, tokenizer: Any) -> PairDataset:
        return PairDataset(rows, tokenizer, self.config.data.max_len, **self._dataset_options())

    def attach(self, model: Any) -> list[Any]:
        model_options = self.config.model
        if model_options.ref_pretrain in (None, model_options.pretrain):
            return [model]
        options = self._loading() | {
            "ds_config": self.strategy.get_ds_eval_config(),
            "init_from_scratch": False,
        }
        self.reference = self.strategy.prepare(
            Actor(stage_to_local(model_options.ref_pretrain), flag="--ref_pretrain", **options)
        )
        return [model, self.reference]

    @torch.no_grad()
    def begin(self, model: Any, datasets: Iterable[Any]) -> None:
        ranks = self.ranks
        size = self.config.training.micro_train_batch_size
        model = self.reference or model
        self.reference = None
        model.eval()
        for dataset in datasets:
            log_probs_of_rows = torch.zeros(len(dataset), 2, device=ranks.device)
            with heartbeat.during("reference"), self.strategy.together:
                for rows, batch in shared_rows(dataset, ranks, size):
                    log_probs = self._token_log_probs(model, batch)
                    log_probs_of_rows[rows] = self._of_answers(log_probs, batch)[: len(rows)]
                    heartbeat.beat()
            dataset.reference = ranks.all_reduce(log_probs_of_rows, op="sum").cpu()

    def loss(self, model: Any, batch: Batch, total: float, dp_size: int) -> tuple[Tensor, Metrics]:
        mean = partial(pair_mean, pairs=total, dp_size=dp_size)
        of_tokens = self._token_log_probs(model, batch)  # (2B, A)
        log_probs = self._of_answers(of_tokens, batch)  # (B, 2)
        change = log_probs - batch.get("reference", log_probs.detach())  # (B, 2)
        margin = change[:, 0] - change[:, 1]  # (B,)
        rewards = self.config.preference.beta * change.detach()
        metrics = {"accuracy": (margin > 0).float(), "margin": rewards[:, 0] - rewards[:, 1]}
        for column, name in enumerate(("chosen", "rejected")):
            metrics |= {
                f"{name}_reward": rewards[:, column],
                f"{name}_log_prob": log_probs[:, column].detach(),
            }
        pair_loss = self.loss_fn(margin)
        if self.nll_loss_coef:
            # (B,), of the chosen
            nll = -answer_log_probs(of_tokens, batch["action_mask"], mean=True)[: len(margin)]
            pair_loss = pair_loss + self.nll_loss_coef * nll
            metrics["nll_loss"] = nll.detach()
        return mean(pair_loss), {name: mean(values) for name, values in metrics.items()}

    @staticmethod
    def _token_log_probs(model: Any, batch: Batch) -> Tensor:
        # (2B, A)
        return model(batch["sequences"], batch["action_mask"].shape[1], batch["attention_mask"])

    def _of_answers(self, log_probs: Tensor, batch: Batch) -> Tensor:
        """Return log probs of the chosen and the rejected answer of each pair, (B, 2)."""
        mean = self.config.preference.average_log_probs
        return answer_log_probs(log_probs, batch["action_mask"], mean).view(2, -1).T


def shared_rows(dataset: Any, ranks: Ranks, size: int) -> Iterator[tuple]:
    """Yield this rank's micro batches, each row once over all ranks: positions, batch.

    Ranks take equally many: a filler has no positions.
    """
    own_rows = range(ranks.get_rank(), len(dataset), ranks.world_size)
    parts = [list(own_rows[i : i + size]) for i in range(0, len(own_rows), size)]
    for positions in level(parts, ranks, list):
        batch = dataset.collate_fn([dataset[i] for i in positions or [0]])
        yield positions, {name: to_device(tensor, ranks.device) for name, tensor in batch.items()}


OBJECTIVES: tuple[type[Objective], ...] = (SFT, RewardModelling, DPO)
