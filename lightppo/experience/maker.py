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

from lightppo.algorithms.advantages import advantage_fn, compute_token_rewards, group_normalize
from lightppo.algorithms.entries import ADVANTAGE_ESTIMATORS, KL_ESTIMATORS
from lightppo.algorithms.kl import KLController, KLEstimate
from lightppo.algorithms.logprobs import score_norms
from lightppo.algorithms.masking import masked_mean
from lightppo.algorithms.option_values import Norm
from lightppo.config import PPOConfig
from lightppo.config.rules import (
    MicroBatchSpec,
    micro_batch_spec,
    old_log_probs_from,
    rollout_rows,
    scoring_calls,
)
from lightppo.data.records import Rollout, seed_of_step
from lightppo.errors import ConfigError, NonFiniteError
from lightppo.experience.batching import ReplayBuffer
from lightppo.experience.experience import Experience, non_finite_text
from lightppo.experience.normalisation import ScoreShaper, normalize_by
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
    """A further pass over the samples of a rollout, such as a teacher's for its log probs."""

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

    """

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
        self.measures = [rollout_pass.measure for rollout_pass in self.passes.values()]
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
        self.router_replay = config.loss.router_replay
        if self.router_replay == "old" and self.old_log_probs != "forward":
            raise ConfigError(
                f"--router_replay old records experts in a pass: it cannot take log probs from the {self.old_log_probs}"
            )
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
        models = [self.actor, self.critic, self.initial_model]
        models += [rollout_pass.model for rollout_pass in self.passes.values()]
        return [model for model in models if model is not None]

    def sample(
        self, prompts: Sequence[str], labels: Sequence[Any] | None = None, **options: Any
    ) -> list[Rollout]:
        """Return scored rollouts of a script's prompts; a trainer puts its own function in the place of this one."""
        raise ValueError(
            "this ExperienceMaker has nothing to sample prompts with: pass scored rollouts"
        )

    @torch.no_grad()
    def make_experience_list(
        self,
        rollouts: Sequence[Any],  # scored rollouts, or prompts as texts
        all_labels: Sequence[Any] | None = None,
        **generate_kwargs: Any,
    ) -> list[Experience]:
        """Make the experience of this rank's rollouts, in order, in parts of the micro batch size. Collective.

        Ranks may have no rollouts. A script may give prompts as texts, with labels and generation options: they are
        sampled and scored first.

        Raises:
            ValueError: a rollout has no reward, or a group is smaller than the estimator allows.
            NonFiniteError: a model or the engine gave numbers that are not finite, on some rank.
        """
        device = self.strategy.device
        as_texts = any(isinstance(rollout, str) for rollout in rollouts)
        if as_texts or (not rollouts and (all_labels is not None or generate_kwargs)):
            rollouts = self.sample(rollouts, all_labels, **generate_kwargs)
        self._check(rollouts)
        # A rank without samples joins in everything, because there are collectives on the way: in the models with a
        # placeholder row, from then on without rows.
        batch = Experience.from_rollouts(rollouts) if rollouts else Experience.placeholder()
        batch.to_device(device)
        outputs = self.run_models(batch)
        self._require_finite(batch)
        if not rollouts:
            batch = batch.without_rows()
            outputs = {name: values[:0] for name, values in outputs.items()}
        is_truncated = [rollout.truncated for rollout in rollouts]
        truncated = torch.tensor(is_truncated, dtype=torch.bool, device=device)  # (B,)
        if self.config.reward.mask_too_long:
            batch.action_mask &= ~truncated[:, None]
        bootstrap_values = None
        if self.algorithm.bootstrap_truncated and self.critic is not None:
            bootstrap_values = outputs["last_values"][:, 0] * truncated
        with self.timer("advantages"):
            self._add_advantages(batch, rollouts, bootstrap_values, outputs.get("score_norms"))
            self._add_info(batch, rollouts)
            if self.token_weights:
                self._add_loss_weights(batch, outputs.get("entropy"))
        if rollouts:
            return batch.split(self.micro_rollout_batch_size)
        return []

    def _require_finite(self, batch: Experience) -> None:
        """Raise NonFiniteError on all ranks, before any statistics have seen the numbers. Collective."""
        bad_row_counts = batch.non_finite()
        # Its KL is checked instead: an infinite log prob may give a clipped KL, which is finite.
        bad_row_counts.pop("base_action_log_probs", None)
        if self.strategy.all_reduce(len(bad_row_counts), "max"):
            raise NonFiniteError(
                f"not finite: {non_finite_text(self.strategy.all_gather_object(bad_row_counts))}",
                batch,
            )

    def normalize(self, buffer: ReplayBuffer, loss: Any, step: int) -> None:
        """Whiten and clip the buffer's advantages, then select the tokens that the loss singles out. Collective."""
        algorithm = self.algorithm
        with self.timer("advantages"):
            if algorithm.adv_norm and algorithm.adv_norm_scope == "batch":
                buffer.whiten(self.strategy, unbiased=algorithm.adv_std_unbiased)
            if (limit := algorithm.advantage_clip) is not None:
                for item in buffer.items:
                    item.advantages = cast(Tensor, item.advantages).clamp(-limit, limit)
            if getattr(loss, "selects_tokens", False):  # a loss of a script selects none
                seed = seed_of_step(self.config.strategy.seed, step)
                select_tokens(buffer.items, loss, self.strategy, seed)

    def _needs_entropy(self) -> bool:
        """Tell whether a token weight needs the entropy of a pass of the actor over the rollout."""
        weight_name = first_needing_entropy(self.config)
        if weight_name is not None and self.old_log_probs != "forward":
            raise ConfigError(
                f"--old_log_probs {self.old_log_probs}: the token weight {weight_name!r} needs the entropy of a pass; "
                "set auto or forward"
            )
        return weight_name is not None

    def _check(self, rollouts: Sequence[Rollout]) -> None:
        group_sizes = Counter(rollout.prompt.index for rollout in rollouts)
        min_group_size = self.estimator.min_group_size
        for rollout in rollouts:
            prompt_index = rollout.prompt.index
            if rollout.reward is None:
                raise ValueError(
                    f"prompt {prompt_index}, sample {rollout.sample_index} has no reward: score it first"
                )
            if group_sizes[prompt_index] < min_group_size:
                name = shown_object(self.algorithm.advantage_estimator)
                raise ValueError(
                    f"prompt {prompt_index} has {group_sizes[prompt_index]} sample, but --advantage_estimator {name} "
                    f"needs at least {min_group_size}: raise --n_samples_per_prompt"
                )
        if self.router_replay == "rollout" and any(rollout.experts is None for rollout in rollouts):
            raise ValueError(
                "--router_replay rollout needs the experts of the rollout engine, and some responses came without: leave "
                "it out, or use another engine"
            )
        if self.compared_with_engine and any(rollout.log_probs is None for rollout in rollouts):
            raise ValueError(
                f"{self.compared_with_engine} needs the log probs of the rollout engine, and this engine gives none: "
                "leave it out, or use another engine"
            )

    def run_models(self, batch: Experience) -> dict[str, Tensor]:
        """Fill in log probs, KL and values; each model runs all rows in its own micro batches. Collective.

        Returns:
            what the models gave, each (B, A): also ``last_values``, in the first column, and ``entropy``.
        """
        calls: dict[str, Callable[[Experience], Mapping[str, Tensor]]]
        calls = {"actor": self._run_actor} if self.old_log_probs == "forward" else {}
        if self.initial_model is not None and not self.full_kl:
            calls["reference"] = self._run_reference
        calls |= {name: rollout_pass.run for name, rollout_pass in self.passes.items()}
        if self.critic is not None:
            calls["critic"] = self._run_critic
        for model in self.models():
            model.eval()

        lengths = batch.row_lengths()
        device = self.strategy.device
        prompts = batch.prompts() if self.layout.shares_prompts else ()
        batch_on_cpu = Experience(
            sequences=on_cpu(batch.sequences),
            attention_mask=on_cpu(batch.attention_mask),
            action_mask=on_cpu(batch.action_mask),
            experts=None if batch.experts is None else on_cpu(batch.experts),
        )
        plan = []
        for name in calls:
            batch_spec = self.micro_batches[name]
            if name in self.passes and self.passes[name].takes_all:
                batch_spec = MicroBatchSpec(len(lengths))
            parts = self.layout.split(lengths, batch_spec, self.strategy, prompts)
            parts = level(parts, self.strategy, partial(itemgetter(-1), parts))
            plan += [(name, rows) for rows in parts]
        outputs: dict[str, Tensor] = {}
        for name, micro_batches in groupby(self.progress(plan), key=itemgetter(0)):
            tensors = batch.extra if name in self.passes else outputs
            with self.timer(_PHASES.get(name, name)):
                for _, rows in micro_batches:
                    positions = to_device(torch.tensor(rows), device)
                    micro_batch = batch_on_cpu.select(rows).to_device(device)
                    for tensor_name, values in calls[name](micro_batch).items():  # (b, a)
                        if tensor_name not in tensors:
                            shape = *batch.action_mask.shape, *values.shape[2:]
                            tensors[tensor_name] = torch.zeros(shape, device=device)
                        tensors[tensor_name][positions, : values.size(1)] = values.float()
                    if name == "actor" and self.router_replay == "old":
                        batch.put_experts(rows, micro_batch)
                    heartbeat.beat()
        if self.old_log_probs == "rollout":
            outputs["action_log_probs"] = cast(Tensor, batch.rollout_log_probs).clone()
        if self.has_kl and not self.full_kl:
            log_probs = outputs["action_log_probs"]
            outputs["kl"] = self.sampled_kl(log_probs, outputs["base_action_log_probs"])
        for name in ("action_log_probs", "base_action_log_probs", "values", "kl"):
            setattr(batch, name, outputs.get(name))
        return outputs

    def sampled_kl(self, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
        """Return ``--kl_estimator`` of each sampled token, k1 for one over the vocabulary; float32, without gradient."""
        return self.kl_of_samples(log_probs.detach(), ref_log_probs).float()

    def _run_actor(self, micro_batch: Experience) -> dict[str, Tensor]:
        """Return log probs of the actor, and of the reference beside it if whole distributions are compared."""
        wants_norms = self.estimator.needs_score_norms
        replayed: dict[str, Any] = {}
        if self.router_replay == "old":
            replayed["record_experts"] = True
        elif micro_batch.experts is not None:
            replayed["experts"] = micro_batch.experts
        scores = self.actor.score_actions(
            micro_batch.sequences,
            micro_batch.num_actions,
            micro_batch.attention_mask,
            entropy=self.wants_entropy,
            logits=self.full_kl or wants_norms,
            **replayed,
        )
        if self.router_replay == "old":
            micro_batch.experts = scores.experts
        outputs = {"action_log_probs": scores.log_probs}
        if self.wants_entropy:
            outputs["entropy"] = scores.entropy
        if wants_norms:
            token_norms = score_norms(
                scores.logits, scores.log_probs[scores.real], self.actor.temperature
            )
            norms = torch.zeros_like(scores.log_probs)  # (b, a)
            norms[scores.real] = token_norms.to(scores.log_probs.dtype)
            outputs["score_norms"] = scores.whole(norms)
        if self.full_kl and self.kl_of_models is not None:
            outputs["kl"], outputs["base_action_log_probs"] = self.kl_of_models(
                self.actor, self.initial_model, scores, micro_batch
            )
        return outputs

    def _run_reference(self, micro_batch: Experience) -> dict[str, Tensor]:
        scores = self.initial_model.score_actions(
            micro_batch.sequences, micro_batch.num_actions, micro_batch.attention_mask
        )
        return {"base_action_log_probs": scores.log_probs}

    def _run_critic(self, micro_batch: Experience) -> dict[str, Tensor]:
        options = {
            "num_actions": micro_batch.num_actions,
            "attention_mask": micro_batch.attention_mask,
            "include_last": True,
        }
        values = self.critic(micro_batch.sequences, **options).float()  # (b, a + 1)
        if self.value_norm is not None:
            values = self.value_norm.denormalize(values)
        return {
            "values": values[:, :-1],
            "last_values": values.gather(1, micro_batch.response_lengths[:, None]),
        }

    def _add_advantages(
        self,
        batch: Experience,
        rollouts: Sequence[Rollout],
        bootstrap_values: Tensor | None,
        token_norms: Tensor | None,
    ) -> None:
        """Make token rewards, then advantages and returns; update the statistics of ``--value_norm``."""
        algorithm = self.algorithm
        reward = self.config.reward
        device = self.strategy.device
        mask = batch.action_mask
        if batch.kl is not None:
            batch.kl = batch.kl.masked_fill(~mask, 0.0)
        prompts = [rollout.prompt.index for rollout in rollouts]
        groups = torch.tensor(prompts, dtype=torch.long, device=device)
        scores = self.shaper.shape(rollouts, learn=True)  # (B,)
        if reward.reward_norm_by:
            rows = mask.any(1, keepdim=True)
            norm = Norm.parse(reward.reward_norm_by)
            scores = normalize_by(scores[:, None], rows, groups, norm, self._all_reduce_sum)[:, 0]
        kl = None
        kl_coef = 0.0
        if algorithm.use_kl_in_reward and batch.kl is not None:
            kl = batch.kl
            kl_coef = self.kl_ctl.value
        token_scores = None
        if reward.use_dense_reward:
            token_scores = self.shaper.token_scores(rollouts, mask)
        token_rewards = compute_token_rewards(
            scores, mask, kl=kl, kl_coef=kl_coef, token_scores=token_scores
        )  # (B, A)
        returns = token_rewards.sum(-1)
        baseline_scores = None
        if self.estimator.needs_greedy_baseline:
            baselines = [cast(Rollout, rollout.baseline) for rollout in rollouts]
            baseline_scores = self.shaper.shape(baselines)
        inputs = self.estimator_inputs(rollouts, device) if self.estimator_inputs else {}
        advantages, batch.returns = self.advantages_of(
            token_rewards=token_rewards,
            action_mask=mask,
            scores=returns,
            values=batch.values,
            bootstrap_values=bootstrap_values,
            group_ids=groups,
            baseline_scores=baseline_scores,
            gamma=algorithm.gamma,
            lambd=algorithm.lambd,
            std_eps=algorithm.grpo_std_eps or 0.0,
            divide_std=algorithm.group_std_norm,
            batch_std=algorithm.grpo_std_scope == "batch",
            score_norms=token_norms,
            all_reduce_sum=self._all_reduce_sum,
            **inputs,
        )
        for term in self.advantage_terms:
            advantages = advantages + term(batch)
        if algorithm.adv_norm_by:
            norm = Norm.parse(algorithm.adv_norm_by)
            advantages = normalize_by(advantages, mask, groups, norm, self._all_reduce_sum)
        if algorithm.adv_norm and algorithm.adv_norm_scope == "group":
            advantages = group_normalize(advantages, mask, groups)
        batch.advantages = advantages
        if self.value_norm is not None:
            self.value_norm.update(batch.returns, mask, all_reduce_sum=self._all_reduce_sum)
        batch.info["return"] = returns

    def _add_loss_weights(self, batch: Experience, entropy: Tensor | None) -> None:
        """Multiply the token weights: constant factors of the policy loss."""
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
        max_length = self.config.data.prompt_max_len
        numbers["prompt_clip_ratio"] = [length >= max_length for length in lengths]
        if self.estimator.needs_greedy_baseline:
            greedy: list[Any] = [rollout.baseline for rollout in rollouts]
            numbers["reward/greedy_baseline"] = [rollout.reward for rollout in greedy]
        for name in sorted({name for rollout in rollouts for name in rollout.extras}):
            numbers[f"reward/{name}"] = [rollout.extras.get(name, math.nan) for rollout in rollouts]
        device = self.strategy.device
        for name, values in numbers.items():
            batch.info[name] = torch.tensor(values, dtype=torch.float32, device=device)
        if self.config.reward.overlong_buffer_len is not None:
            batch.info |= self.shaper.penalties(rollouts)
        if self.rewarded:
            batch.info |= self.shaper.numbers(rollouts)
        token_kl = torch.zeros_like(batch.action_mask) if batch.kl is None else batch.kl
        batch.info["kl"] = masked_mean(token_kl, batch.action_mask, dim=1)
