"""ExperienceMaker: scored rollouts → log probs, reference, values → KL → token rewards → advantages and returns."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal, cast

import torch
from torch import Tensor

from lightppo.algorithms.advantages import advantage_fn, compute_token_rewards
from lightppo.algorithms.entries import ADVANTAGE_ESTIMATORS, KL_ESTIMATORS
from lightppo.algorithms.kl import KLController, KLEstimate
from lightppo.algorithms.logprobs import score_norms
from lightppo.algorithms.masking import masked_mean
from lightppo.config import PPOConfig
from lightppo.config.old_log_probs import old_log_probs_from
from lightppo.config.rules import (
    MicroBatchSpec,
    micro_batch_spec,
    rollout_rows,
    scoring_calls,
)
from lightppo.data.records import Rollout, seed_of_step
from lightppo.errors import ConfigError, NonFiniteError
from lightppo.experience.batching import ReplayBuffer
from lightppo.experience.experience import Experience, non_finite_text
from lightppo.experience.normalisation import (
    ScoreShaper,
    normalize_advantages,
    normalize_scores,
    whiten_and_clip,
)
from lightppo.experience.token_weights import (
    first_needing_engine_log_probs,
    first_needing_entropy,
    select_tokens,
    token_weights,
)
from lightppo.models.batches import layout_of_all, on_cpu, to_device
from lightppo.option import shown_object
from lightppo.ranks import Ranks, heartbeat, level
from lightppo.table import load


@dataclass(frozen=True)
class RolloutPass:
    """What further tensors are made of the samples of a rollout, such as a teacher's log probs."""

    model: Any  # it has ``eval()``, and takes part in ``layout_of_all`` if it has a layout
    # (a micro batch) → tensors (b, a) or (b, a, k) without gradient, by their names in ``Experience.extra``.
    run: Callable[[Experience], Mapping[str, Tensor]]
    # (an experience, the policy's log probs) → numbers (B, A) by name; their means over trained tokens are logged.
    measure: Callable[[Experience, Tensor], Mapping[str, Tensor]] = lambda experience, log_probs: {}
    takes_all: bool = False  # in one call: it shares the samples out by itself


# what the times of passes are called, where not as in --micro_batch_specs
_PHASES = {"actor": "old_log_probs", "critic": "values"}


class ExperienceMaker:
    """Turns the scored rollouts of one rank into experience.

    Forward passes run in evaluation mode, in micro batches of rows of similar length; every rank runs the same number.
    Advantages are computed over all rows of the rank at once, because groups may span micro batches.

    Args:
        critic, initial_model: ``None`` if the estimator needs no values, and without KL.
        passes: further passes over the rollout, after those of actor and reference, by the names of their calls.
        advantage_terms: functions of an experience with ``action_log_probs`` and what passes have made in ``extra``; what
            they return (B, A) is added to the estimator's advantages before these are normalised.
        rewarded: whether scores are numbers of a reward source, to be logged.
        old_log_probs: the source of the log probs before the update; ``None``: as ``old_log_probs_from`` says.
        progress: wraps the micro batches in a progress bar.
        timer: times the parts, by their names in ``perf/time_<part>``.

    Attributes:
        sample: gets prompts as texts, their labels and generation options of a script, and returns scored rollouts.
    """

    sample: Callable[..., Sequence[Rollout]] | None = None
    # Scripts of LightRFT read this attribute. Here it stays empty: times are in the logs, under perf/.
    perf_stats: dict[str, float] | None = None

    def __init__(
        self,
        actor: Any,
        critic: Any,
        initial_model: Any,
        strategy: Ranks,
        kl_ctl: KLController,
        config: PPOConfig,
        *,
        passes: Mapping[str, RolloutPass] = {},
        advantage_terms: Sequence[Callable[[Experience], Tensor]] = (),
        rewarded: bool = True,
        value_norm: Any | None = None,
        old_log_probs: Literal["training", "rollout", "forward"] | None = None,
        progress: Callable[[Sequence], Any] = iter,
        timer: Callable[[str], AbstractContextManager] = lambda phase: nullcontext(),
    ) -> None:
        self.actor = actor
        self.critic = critic
        self.initial_model = initial_model
        self.passes = dict(passes)
        self.measures = [one.measure for one in self.passes.values()]
        self.advantage_terms = list(advantage_terms)
        self.rewarded = rewarded
        self.strategy = strategy
        self.kl_ctl = kl_ctl
        self.value_norm = value_norm
        self.progress = progress
        self.timer = timer
        self.config = config
        self.algorithm = config.algorithm
        self.token_weights = token_weights(config, in_training=False)
        self.estimator = ADVANTAGE_ESTIMATORS.find(self.algorithm.advantage_estimator)
        self.advantages_of = partial(
            advantage_fn(self.estimator),
            **{name: getattr(self.algorithm, name) for name in self.estimator.defaults},
        )
        self.estimator_inputs = None
        if self.estimator.inputs is not None:
            self.estimator_inputs = load(self.estimator.inputs)(config)
        kl_name: Any = self.algorithm.kl_estimator  # a name, as the config is resolved
        kl_clip = self.algorithm.kl_clip
        kl_entry = KL_ESTIMATORS.find(kl_name)
        self.kl_of_models: Callable[..., tuple[Tensor, Tensor]] | None = None
        if kl_entry.over_vocabulary:
            self.kl_of_models = partial(kl_entry.fn, clip=kl_clip)
            kl_name = "k1"
        self.kl_of_samples = KLEstimate(kl_name, kl_clip)
        self.micro_rollout_batch_size = rollout_rows(config)
        self.micro_batches = {
            call: micro_batch_spec(config, call) for call in (*scoring_calls(), *self.passes)
        }
        self.layout = layout_of_all(self.models())
        self.old_log_probs = old_log_probs or old_log_probs_from(config, exact_rollout=False)
        self.wants_entropy = self._needs_entropy()
        self.compared_with_engine = first_needing_engine_log_probs(config)
        if self.old_log_probs == "rollout":
            self.compared_with_engine = self.compared_with_engine or "--old_log_probs rollout"
        self.has_kl = initial_model is not None and self.old_log_probs != "training"
        # Whole distributions are compared only if the reward needs it: the KL loss compares its own.
        self.full_kl = (
            self.has_kl and self.kl_of_models is not None and self.algorithm.use_kl_in_reward
        )
        self.shaper = ScoreShaper(config, strategy)
        self._all_reduce_sum = partial(strategy.all_reduce, op="sum")

    def models(self) -> list[Any]:
        """Return the models of all passes."""
        own = (self.actor, self.critic, self.initial_model)
        models = (*own, *(one.model for one in self.passes.values()))
        return [model for model in models if model is not None]

    @torch.no_grad()
    def make_experience_list(
        self,
        rollouts: Sequence[Any],  # scored rollouts, or prompts as texts
        all_labels: Sequence[Any] | None = None,
        **generate_kwargs: Any,
    ) -> list[Experience]:
        """Experience of all rollouts of this rank, in order, in parts of the micro batch size. Collective.

        Ranks may have no rollouts. A script may give prompts as texts, with labels and generation options: they are
        sampled and scored first.

        Raises:
            ValueError: a rollout has no reward, or a group is smaller than the estimator allows.
            NonFiniteError: a model or the engine gave numbers that are not finite, on some rank.
        """
        as_texts = any(isinstance(rollout, str) for rollout in rollouts)
        if as_texts or (not rollouts and (all_labels is not None or generate_kwargs)):
            if self.sample is None:
                raise ValueError(
                    "this ExperienceMaker has nothing to sample prompts with: pass scored rollouts"
                )
            rollouts = self.sample(rollouts, all_labels, **generate_kwargs)
        self._check(rollouts)
        # A rank without samples joins in everything, because there are collectives on the way: in the models with a
        # placeholder row, from then on without rows.
        batch = Experience.from_rollouts(rollouts) if rollouts else Experience.placeholder()
        batch.to_device(self.strategy.device)
        made = self.run_models(batch)
        self._require_finite(batch)
        if not rollouts:
            batch = batch.without_rows()
            made = {name: values[:0] for name, values in made.items()}
        truncated = torch.tensor(
            [rollout.truncated for rollout in rollouts],
            dtype=torch.bool,
            device=self.strategy.device,
        )  # (B,)
        if self.config.reward.mask_too_long:
            batch.action_mask &= ~truncated[:, None]
        bootstraps = self.algorithm.bootstrap_truncated and self.critic is not None
        last_values = made["last_values"][:, 0] * truncated if bootstraps else None
        with self.timer("advantages"):
            self._add_advantages(batch, rollouts, last_values, made.get("score_norms"))
            self._add_info(batch, rollouts)
            self._add_loss_weights(batch, made.get("entropy"))
        if rollouts:
            return batch.split(self.micro_rollout_batch_size)
        return []

    def _require_finite(self, batch: Experience) -> None:
        """Raise NonFiniteError on all ranks, before any statistics have seen the numbers. Collective."""
        rows = batch.non_finite()
        # Its KL is checked instead: an infinite log prob may give a clipped KL, which is finite.
        rows.pop("base_action_log_probs", None)
        if self.strategy.all_reduce(len(rows), "max"):
            raise NonFiniteError(
                f"not finite: {non_finite_text(self.strategy.all_gather_object(rows))}", batch
            )

    def normalize(self, buffer: ReplayBuffer, loss: Any, step: int) -> None:
        """Whiten and clip the buffer's advantages, then select the tokens that the loss singles out. Collective."""
        with self.timer("advantages"):
            whiten_and_clip(self.config, buffer, self.strategy)
            seed = seed_of_step(self.config.strategy.seed, step)
            select_tokens(buffer.items, loss, self.strategy, seed)

    def _needs_entropy(self) -> bool:
        """Return whether a token weight needs the entropy of a pass of the actor over the rollout."""
        reader = first_needing_entropy(self.config)
        if reader is not None and self.old_log_probs != "forward":
            raise ConfigError(
                f"--old_log_probs {self.old_log_probs}: the token weight {reader!r} needs the entropy of a pass; "
                "set auto or forward"
            )
        return reader is not None

    def _check(self, rollouts: Sequence[Rollout]) -> None:
        sizes = Counter(rollout.prompt.index for rollout in rollouts)
        for rollout in rollouts:
            index = rollout.prompt.index
            needed = self.estimator.min_group_size
            if rollout.reward is None:
                raise ValueError(
                    f"prompt {index}, sample {rollout.sample_index} has no reward: score it first"
                )
            if sizes[index] < needed:
                name = shown_object(self.algorithm.advantage_estimator)
                raise ValueError(
                    f"prompt {index} has {sizes[index]} sample, but --advantage_estimator {name} "
                    f"needs at least {needed}: raise --n_samples_per_prompt"
                )
        if self.compared_with_engine and any(rollout.log_probs is None for rollout in rollouts):
            raise ValueError(
                f"{self.compared_with_engine} needs the log probs of the rollout engine, and this engine gives none: "
                "leave it out, or use another engine"
            )

    def run_models(self, batch: Experience) -> dict[str, Tensor]:
        """Fill in log probs, KL and values; each model runs all rows in its own micro batches. Collective.

        Returns:
            what the passes made, each (B, A): also ``last_values``, in the first column, and ``entropy``.
        """
        calls: dict[str, Callable[[Experience], Mapping[str, Tensor]]]
        calls = {"actor": self._run_actor} if self.old_log_probs == "forward" else {}
        if self.initial_model is not None and not self.full_kl:
            calls["reference"] = self._run_reference
        calls |= {name: one.run for name, one in self.passes.items()}
        if self.critic is not None:
            calls["critic"] = self._run_critic
        for model in self.models():
            model.eval()

        lengths = batch.row_lengths()
        device = self.strategy.device
        prompts = batch.prompts() if self.layout.shares_prompts else ()
        near = Experience(
            sequences=on_cpu(batch.sequences),
            attention_mask=on_cpu(batch.attention_mask),
            action_mask=on_cpu(batch.action_mask),
        )
        plan = []
        for name in calls:
            spec = self.micro_batches[name]
            if name in self.passes and self.passes[name].takes_all:
                spec = MicroBatchSpec(len(lengths))
            parts = self.layout.split(lengths, spec, self.strategy, prompts)
            filled = level(parts, self.strategy, partial(itemgetter(-1), parts))
            plan += [(name, rows) for rows in filled]
        made: dict[str, Tensor] = {}
        for name, of_call in groupby(self.progress(plan), key=itemgetter(0)):
            into = batch.extra if name in self.passes else made
            with self.timer(_PHASES.get(name, name)):
                for _, rows in of_call:
                    places = to_device(torch.tensor(rows), device)
                    tensors = calls[name](near.select(rows).to_device(device))
                    for key, values in tensors.items():  # (b, a), the first a actions
                        if key not in into:
                            shape = *batch.action_mask.shape, *values.shape[2:]
                            into[key] = torch.zeros(shape, device=device)
                        into[key][places, : values.size(1)] = values.float()
                    heartbeat.beat()
        if self.old_log_probs == "rollout":
            made["action_log_probs"] = cast(Tensor, batch.rollout_log_probs).clone()
        if self.has_kl and not self.full_kl:
            made["kl"] = self.sampled_kl(made["action_log_probs"], made["base_action_log_probs"])
        for name in ("action_log_probs", "base_action_log_probs", "values", "kl"):
            setattr(batch, name, made.get(name))
        return made

    def sampled_kl(self, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
        """Return ``--kl_estimator`` of each sampled token, k1 for one over the vocabulary; float32, without gradient."""
        return self.kl_of_samples(log_probs.detach(), ref_log_probs).float()

    def _run_actor(self, part: Experience) -> dict[str, Tensor]:
        """Return log probs of the actor, and of the reference beside it if whole distributions are compared."""
        inputs = (part.sequences, part.num_actions, part.attention_mask)
        wants_norms = self.estimator.needs_score_norms
        actor = self.actor.score_actions(
            *inputs, entropy=self.wants_entropy, logits=self.full_kl or wants_norms
        )
        made = {"action_log_probs": actor.log_probs}
        if self.wants_entropy:
            made["entropy"] = actor.entropy
        if wants_norms:
            made["score_norms"] = torch.zeros_like(actor.log_probs)  # (b, a)
            norms = score_norms(actor.logits, actor.log_probs[actor.real], self.actor.temperature)
            made["score_norms"][actor.real] = norms.to(actor.log_probs.dtype)
        if self.full_kl and self.kl_of_models is not None:
            made["kl"], made["base_action_log_probs"] = self.kl_of_models(
                self.actor, self.initial_model, actor, part
            )
        return made

    def _run_reference(self, part: Experience) -> dict[str, Tensor]:
        reference = self.initial_model.score_actions(
            part.sequences, part.num_actions, part.attention_mask
        )
        return {"base_action_log_probs": reference.log_probs}

    def _run_critic(self, part: Experience) -> dict[str, Tensor]:
        options = {
            "num_actions": part.num_actions,
            "attention_mask": part.attention_mask,
            "include_last": True,
        }
        values = self.critic(part.sequences, **options).float()  # (b, a + 1)
        if self.value_norm is not None:
            values = self.value_norm.denormalize(values)
        return {
            "values": values[:, :-1],
            "last_values": values.gather(1, part.response_lengths[:, None]),
        }

    def _add_advantages(
        self,
        batch: Experience,
        rollouts: Sequence[Rollout],
        bootstrap: Tensor | None,
        norms: Tensor | None,
    ) -> None:
        """Make token rewards, then advantages and returns; update the statistics of ``--value_norm``."""
        config = self.algorithm
        device = self.strategy.device
        mask = batch.action_mask
        if batch.kl is not None:
            batch.kl = batch.kl.masked_fill(~mask, 0.0)
        groups = torch.tensor(
            [rollout.prompt.index for rollout in rollouts], dtype=torch.long, device=device
        )
        scores = self.shaper.shape(rollouts, learn=True)[:, None]  # (B, 1)
        scores = normalize_scores(
            self.config, scores, mask.any(1, keepdim=True), groups, self._all_reduce_sum
        )
        token_rewards = compute_token_rewards(
            scores[:, 0],
            mask,
            kl=batch.kl if config.use_kl_in_reward else None,
            kl_coef=self.kl_ctl.value if config.use_kl_in_reward and batch.kl is not None else 0.0,
            token_scores=self.shaper.token_scores(rollouts, mask),
        )  # (B, A)
        greedy: list[Any] | None = None
        if self.estimator.needs_greedy_baseline:
            greedy = [rollout.baseline for rollout in rollouts]
        inputs = self.estimator_inputs(rollouts, device) if self.estimator_inputs else {}
        batch.advantages, batch.returns = self.advantages_of(
            token_rewards=token_rewards,
            action_mask=mask,
            scores=token_rewards.sum(-1),
            values=batch.values,
            bootstrap_values=bootstrap,
            group_ids=groups,
            baseline_scores=None if greedy is None else self.shaper.shape(greedy),
            gamma=config.gamma,
            lambd=config.lambd,
            std_eps=config.grpo_std_eps or 0.0,
            divide_std=config.group_std_norm,
            batch_std=config.grpo_std_scope == "batch",
            score_norms=norms,
            all_reduce_sum=self._all_reduce_sum,
            **inputs,
        )
        for term in self.advantage_terms:
            batch.advantages = batch.advantages + term(batch)
        batch.advantages = normalize_advantages(
            self.config, batch.advantages, mask, groups, self._all_reduce_sum
        )
        if self.value_norm is not None:
            self.value_norm.update(batch.returns, mask, all_reduce_sum=self._all_reduce_sum)
        batch.info["return"] = token_rewards.sum(-1)

    def _add_loss_weights(self, batch: Experience, entropy: Tensor | None) -> None:
        """Multiply the token weights: constant factors of the policy loss."""
        if not self.token_weights:
            return
        weights = batch.action_mask.float()  # (B, A)
        for weigh in self.token_weights:
            weights = weights * weigh(
                batch,
                log_probs=batch.action_log_probs,
                entropy=entropy,
                all_reduce_sum=self._all_reduce_sum,
            )
        batch.loss_weights = weights

    def _add_info(self, batch: Experience, rollouts: Sequence[Rollout]) -> None:
        """Add the numbers of each sample that are logged."""
        numbers: dict[str, Sequence[float | None]] = {}
        if self.rewarded:
            numbers["reward"] = [rollout.reward for rollout in rollouts]
        if any(rollout.stale for rollout in rollouts):
            numbers["stale"] = [rollout.stale for rollout in rollouts]
        lengths = [len(rollout.prompt.token_ids) for rollout in rollouts]
        longest = self.config.data.prompt_max_len
        numbers["prompt_clip_ratio"] = [length >= longest for length in lengths]
        if self.estimator.needs_greedy_baseline:
            greedy: list[Any] = [rollout.baseline for rollout in rollouts]
            numbers["reward/greedy_baseline"] = [rollout.reward for rollout in greedy]
        for name in sorted({name for rollout in rollouts for name in rollout.extras}):
            numbers[f"reward/{name}"] = [rollout.extras.get(name, math.nan) for rollout in rollouts]
        for name, values in numbers.items():
            batch.info[name] = torch.tensor(
                values, dtype=torch.float32, device=self.strategy.device
            )
        batch.info |= self.shaper.penalties(rollouts)
        if self.rewarded:
            batch.info |= self.shaper.numbers(rollouts)
        kl = torch.zeros_like(batch.action_mask) if batch.kl is None else batch.kl
        batch.info["kl"] = masked_mean(kl, batch.action_mask, dim=1)
