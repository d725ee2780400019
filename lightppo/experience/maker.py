"""ExperienceMaker: scored rollouts → log probs, reference, values → KL → token rewards → advantages and returns."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightppo.algorithms.advantages import group_normalize
from lightppo.algorithms.entries import ADVANTAGE_ESTIMATORS, load
from lightppo.algorithms.kl import KLController, KLEstimate, full_kl
from lightppo.algorithms.logprobs import score_norms
from lightppo.algorithms.masking import masked_mean
from lightppo.algorithms.shaping import (
    RunningMeanStd,
    ValueNorm,
    clip_scores,
    compute_token_rewards,
    dense_rewards,
    overlong_penalty,
    scale_scores,
    stop_properly,
    zero_truncated,
)
from lightppo.config import PPOConfig, RewardConfig
from lightppo.config.rules import (
    MicroBatchSpec,
    advantage_terms,
    micro_batch_spec,
    old_log_probs_from,
    rollout_rows,
    scoring_calls,
    token_weights,
)
from lightppo.data.records import Rollout
from lightppo.errors import ConfigError, NonFiniteError
from lightppo.experience.batching import MicroBatching, ReplayBuffer
from lightppo.experience.experience import Experience, non_finite_text
from lightppo.models.packing import all_pack, all_share_prompts, on_cpu, to_device
from lightppo.option import shown_object
from lightppo.plugin import NORMALISATIONS, ROLLOUT_PASSES, TOKEN_WEIGHTS
from lightppo.ranks import Ranks, heartbeat, level


class ScoreShaper:
    """Shapes the scores of one rank's samples, in the order of the flags in ``--help``."""

    def __init__(self, config: RewardConfig, max_len: int, ranks: Ranks) -> None:
        self.config, self.max_len = config, max_len
        self.all_reduce_sum, self.device = partial(ranks.all_reduce, op="sum"), ranks.device
        self.scale = partial(
            scale_scores,
            bias=config.reward_bias,
            scaling=config.reward_scaling,
            max_clip=config.max_reward_clip,
        )
        self.running = RunningMeanStd() if config.reward_running_norm else None

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        """Adds the samples of this rollout to the running statistics. Collective."""
        if self.running is not None:
            self.running.update(self._scaled(rollouts), all_reduce_sum=self.all_reduce_sum)

    def shape(self, rollouts: Sequence[Rollout]) -> Tensor:
        """The score of each response (B,); with dense rewards, the reward added at its end."""
        config, scores = self.config, self._scaled(rollouts)  # (B,)
        truncated = truncated_of(rollouts, self.device)
        if self.running is not None:
            scores = self.running.normalize(scores)
        if config.use_dense_reward:
            scores = torch.zeros_like(scores)
        if config.stop_properly_penalty is not None:
            scores = stop_properly(scores, truncated, config.stop_properly_penalty)
        if config.overlong_buffer_len is not None:
            scores = scores + self.overlong(rollouts)
        if config.mask_no_eos_with_zero:
            scores = zero_truncated(scores, truncated)
        return clip_scores(scores, config.reward_clip_range)

    def token_scores(self, rollouts: Sequence[Rollout], action_mask: Tensor) -> Tensor | None:
        """Dense rewards (B, A), scaled like scores; ``None`` without ``--use_dense_reward``."""
        if not self.config.use_dense_reward:
            return None
        rows = torch.zeros(action_mask.shape, device=self.device)  # (B, A)
        for row, rollout in zip(rows, rollouts):
            row[: len(rollout.token_rewards)] = torch.tensor(
                rollout.token_rewards, device=self.device
            )
        return dense_rewards(self.scale(rows), action_mask, self.config.reward_delta)

    def final_scores(self, rollouts: Sequence[Rollout]) -> Tensor:
        """What training maximises for each sample before KL (B,): shaped scores plus the sum of dense rewards."""
        scores = self.shape(rollouts)
        if not self.config.use_dense_reward:
            return scores
        lengths = self._lengths(rollouts)
        mask = torch.arange(int(lengths.max()), device=self.device) < lengths[:, None]  # (B, A)
        return scores + self.token_scores(rollouts, mask).sum(-1)

    def overlong(self, rollouts: Sequence[Rollout]) -> Tensor:
        """The penalty for the length of each response, at most 0 (B,)."""
        return overlong_penalty(
            self._lengths(rollouts),
            self.max_len,
            self.config.overlong_buffer_len,
            self.config.overlong_penalty_factor,
        )

    def state_dict(self) -> dict[str, Any] | None:
        """The running statistics."""
        return self.running.state_dict() if self.running is not None else None

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restores ``state_dict``."""
        if self.running is not None and state is not None:
            self.running.load_state_dict(state)

    def _scaled(self, rollouts: Sequence[Rollout]) -> Tensor:
        scores = [rollout.reward for rollout in rollouts]
        return self.scale(torch.tensor(scores, dtype=torch.float32, device=self.device))

    def _lengths(self, rollouts: Sequence[Rollout]) -> Tensor:
        lengths = [rollout.trained_length for rollout in rollouts]
        return torch.tensor(lengths, dtype=torch.float32, device=self.device)


def truncated_of(rollouts: Sequence[Rollout], device: Any) -> Tensor:
    """Whether each response was truncated (B,)."""
    truncated = [rollout.truncated for rollout in rollouts]
    return torch.tensor(truncated, dtype=torch.bool, device=device)


@dataclass(frozen=True)
class RolloutPass:
    """What further tensors are made of the samples of a rollout, see :data:`lightppo.plugin.ROLLOUT_PASSES`."""

    model: Any  # it has ``eval()``, and takes part in what all models must agree on: packing, shared prompts
    # of a micro batch: (b, a) or (b, a, k) each, by their names in ``Experience.extra``; without gradient
    run: Callable[[Experience], Mapping[str, Tensor]]
    # of an experience and the policy's log probs: numbers (B, A) whose means over trained tokens are logged
    measure: Callable[[Experience, Tensor], Mapping[str, Tensor]] = lambda experience, log_probs: {}
    takes_all: bool = False  # in one call: it shares the samples out by itself


def rollout_passes(config: PPOConfig, frozen: Mapping[str, Any]) -> dict[str, RolloutPass]:
    """Those that this run makes, by name; ``frozen`` are its further models."""
    passes = {name: entry.fn(config, frozen) for name, entry in ROLLOUT_PASSES.items()}
    return {name: made for name, made in passes.items() if made is not None}


class ExperienceMaker:
    """Turns the scored rollouts of one rank into experience.

    Forward passes run in evaluation mode, in micro batches of rows of similar length; every rank runs the same number.
    Advantages are computed over all rows of the rank at once, because groups may span micro batches.

    Args:
        critic, initial_model: ``None`` if the estimator needs no values, and without KL.
        frozen: the further models of the run by name, for passes over the rollout.
        rewarded: whether scores are numbers of a reward source, to be logged.
        old_log_probs: the source of the log probs before the update; ``None``: as ``old_log_probs_from`` says.
        sample: (prompts, labels, generation options) → scored rollouts, for scripts in the seed's style.
        progress: wraps the micro batches in a progress bar.
        timer: times the parts, by the names of ``trainer.metrics.TIMED``.
    """

    def __init__(
        self,
        actor: nn.Module,
        critic: nn.Module | None,
        initial_model: nn.Module | None,
        strategy: Ranks,
        kl_ctl: KLController,
        config: PPOConfig,
        *,
        frozen: Mapping[str, Any] = {},
        rewarded: bool = True,
        value_norm: ValueNorm | None = None,
        old_log_probs: Literal["training", "rollout", "forward"] | None = None,
        sample: Callable[..., list[Rollout]] | None = None,
        progress: Callable[[Sequence], Any] = iter,
        timer: Callable[[str], AbstractContextManager] = lambda phase: nullcontext(),
    ) -> None:
        self.actor, self.critic, self.initial_model = actor, critic, initial_model
        self.passes = rollout_passes(config, frozen)
        self.measures = [one.measure for one in self.passes.values()]
        self.advantage_terms, self.rewarded = advantage_terms(config), rewarded
        self.strategy, self.kl_ctl, self.value_norm = strategy, kl_ctl, value_norm
        self.sample, self.progress, self.timer = sample, progress, timer
        # the seed's: nothing here, times are in perf/ of the logs
        self.perf_stats: dict[str, float] | None = None
        self.algorithm = config.algorithm
        self.token_weights = token_weights(config, in_training=False)
        self.estimator = ADVANTAGE_ESTIMATORS.find(self.algorithm.advantage_estimator)
        self.advantages_of = partial(
            self.estimator.fn,
            **{name: getattr(self.algorithm, name) for name in self.estimator.defaults},
        )
        self.estimator_inputs = None
        if self.estimator.inputs is not None:
            self.estimator_inputs = load(self.estimator.inputs)(config)
        self.normalisations = {
            of: list(filter(None, (entry.fn(config, of) for entry in NORMALISATIONS.values())))
            for of in ("scores", "advantages")
        }
        is_full = self.algorithm.kl_estimator == "full"
        self.kl_of_samples = KLEstimate(
            "k1" if is_full else self.algorithm.kl_estimator, self.algorithm.kl_clip
        )
        self.mask_too_long, self.prompt_max_len = (
            config.reward.mask_too_long,
            config.data.prompt_max_len,
        )
        self.micro_rollout_batch_size = rollout_rows(config)
        self.micro_batches = {call: micro_batch_spec(config, call) for call in scoring_calls()}
        models = (actor, critic, initial_model, *(one.model for one in self.passes.values()))
        shares = config.training.share_prompts and all_share_prompts(models)
        packs = all_pack(config.training.packing_samples, models)
        self.batching = MicroBatching(strategy, packs, shares)
        self.old_log_probs = old_log_probs or old_log_probs_from(config, exact_rollout=False)
        self.wants_entropy = self._needs_entropy()
        self.compared_with_engine = self._compared_with_engine(config)
        self.has_kl = initial_model is not None and self.old_log_probs != "training"
        # Whole distributions are compared only if the reward needs it: the KL loss compares its own.
        self.full_kl = self.has_kl and is_full and self.algorithm.use_kl_in_reward
        self.shaper = ScoreShaper(config.reward, config.rollout.generate_max_len, strategy)
        self._all_reduce_sum = partial(strategy.all_reduce, op="sum")

    @torch.no_grad()
    def make_experience_list(
        self,
        rollouts: Sequence[Rollout] | Sequence[str],
        all_labels: Sequence[Any] | None = None,
        **generate_kwargs: Any,
    ) -> list[Experience]:
        """Experience of all rollouts of this rank, in order, in parts of the micro batch size. Collective.

        Ranks may have no rollouts. Scripts in the seed's style pass prompts as texts, their labels and sampling
        options; these are sampled and scored first.

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
            batch, made = batch.without_rows(), {name: values[:0] for name, values in made.items()}
        truncated = truncated_of(rollouts, self.strategy.device)
        if self.mask_too_long:
            batch.action_mask &= ~truncated[:, None]
        bootstraps = self.algorithm.bootstrap_truncated and self.critic is not None
        last_values = made["last_values"][:, 0] * truncated if bootstraps else None
        with self.timer("advantages"):
            self.shaper.observe(rollouts)
            self._add_advantages(batch, rollouts, last_values, made.get("score_norms"))
            self._add_info(batch, rollouts)
            self._add_loss_weights(batch, made.get("entropy"))
        return batch.split(self.micro_rollout_batch_size) if rollouts else []

    def _require_finite(self, batch: Experience) -> None:
        """Raises NonFiniteError on all ranks, before any statistics have seen the numbers. Collective."""
        found = batch.non_finite()
        # what it does to the KL counts, which may be clipped
        found.pop("base_action_log_probs", None)
        if self.strategy.all_reduce(len(found), "max"):
            raise NonFiniteError(
                f"not finite: {non_finite_text(self.strategy.all_gather_object(found))}", batch
            )

    def normalize(self, buffer: ReplayBuffer) -> None:
        """Whitens and clips the advantages over all ranks. Collective."""
        algorithm, limit = self.algorithm, self.algorithm.advantage_clip
        with self.timer("advantages"):
            if algorithm.adv_norm and algorithm.adv_norm_scope == "batch":
                buffer.whiten(
                    self.strategy,
                    divide_std=algorithm.adv_std_norm,
                    shift_mean=algorithm.adv_shift_mean,
                    unbiased=algorithm.adv_std_unbiased,
                    eps=algorithm.adv_norm_eps,
                )
            if limit is not None:
                for item in buffer.items:
                    item.advantages = item.advantages.clamp(-limit, limit)

    def _needs_entropy(self) -> bool:
        """Whether a token weight needs the entropy of a pass of the actor over the rollout."""
        needing = [name for name in self.token_weights if TOKEN_WEIGHTS[name].needs_entropy]
        if needing and self.old_log_probs != "forward":
            raise ConfigError(
                f"--old_log_probs {self.old_log_probs}: the token weight {needing[0]!r} needs the entropy of a pass; "
                "set auto or forward"
            )
        return bool(needing)

    def _compared_with_engine(self, config: PPOConfig) -> str | None:
        """The first option that needs the log probs of the rollout engine; ``None``: no option does."""
        for name in [*self.token_weights, *token_weights(config, in_training=True)]:
            entry = TOKEN_WEIGHTS[name]
            if entry.needs_rollout_log_probs and not entry.flag:
                return f"the token weight {name!r}"
            if entry.needs_rollout_log_probs:
                value = config.flat()[entry.flag]
                return f"--{entry.flag} {' '.join(value) if isinstance(value, list | tuple) else value}"
        return "--old_log_probs rollout" if self.old_log_probs == "rollout" else None

    def _check(self, rollouts: Sequence[Rollout]) -> None:
        sizes = Counter(rollout.prompt.index for rollout in rollouts)
        for rollout in rollouts:
            index, needed = rollout.prompt.index, self.estimator.min_group_size
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
        """Fills in log probs, KL and values; each model runs all rows in its own micro batches. Collective.

        Returns:
            what the passes made, each (B, A): also ``last_values``, in the first column, and ``entropy``.
        """
        calls = [
            ("actor", "old_log_probs", self._run_actor, self.old_log_probs == "forward"),
            (
                "reference",
                "reference",
                self._run_reference,
                self.initial_model is not None and not self.full_kl,
            ),
            *((name, name, one.run, True) for name, one in self.passes.items()),
            ("critic", "values", self._run_critic, self.critic is not None),
        ]
        models = [self.actor, self.critic, self.initial_model]
        for model in [*models, *(one.model for one in self.passes.values())]:
            if model is not None:
                model.eval()

        lengths, prompts, device = batch.row_lengths(), batch.prompts(), self.strategy.device
        near = Experience(
            sequences=on_cpu(batch.sequences),
            attention_mask=on_cpu(batch.attention_mask),
            action_mask=on_cpu(batch.action_mask),
        )
        plan = []
        for name, phase, run, needed in calls:
            if needed:
                spec = self.micro_batches[name]
                if name in self.passes and self.passes[name].takes_all:
                    spec = MicroBatchSpec(len(lengths))
                parts = self.batching.split(lengths, spec, prompts)
                parts = level(parts, self.strategy, lambda parts=parts: parts[-1])
                plan += [(phase, run, rows) for rows in parts]
        made: dict[str, Tensor] = defaultdict(
            lambda: torch.zeros(batch.action_mask.shape, device=device)
        )
        for phase, calls in groupby(self.progress(plan), key=itemgetter(0)):
            into = batch.extra if phase in self.passes else made
            with self.timer(phase):
                for _, run, rows in calls:
                    places = to_device(torch.tensor(rows), device)
                    # (b, a), the first a actions
                    for name, values in run(near.select(rows).to_device(device)).items():
                        if name not in into:
                            shape = *batch.action_mask.shape, *values.shape[2:]
                            into[name] = torch.zeros(shape, device=device)
                        into[name][places, : values.size(1)] = values.float()
                    heartbeat.beat()
        if self.old_log_probs == "rollout":
            made["action_log_probs"] = batch.rollout_log_probs.clone()
        if self.has_kl and not self.full_kl:
            made["kl"] = self.sampled_kl(made["action_log_probs"], made["base_action_log_probs"])
        for name in ("action_log_probs", "base_action_log_probs", "values", "kl"):
            setattr(batch, name, made.get(name))
        return made

    def sampled_kl(self, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
        """``--kl_estimator`` of each sampled token, k1 in place of ``full``; float32, in nats, without gradient."""
        return self.kl_of_samples(log_probs.detach(), ref_log_probs).float()

    def with_kl(self, experience: Experience, log_probs: Tensor) -> Experience:
        """With the KL of each sample in ``info``, of log probs that only the training pass has made."""
        if experience.base_action_log_probs is None:
            return experience
        kl = masked_mean(
            self.sampled_kl(log_probs, experience.base_action_log_probs), experience.action_mask
        )
        return replace(experience, info=experience.info | {"kl": kl})

    def _run_actor(self, part: Experience) -> dict[str, Tensor]:
        """Log probs of the actor, and of the reference beside it if whole distributions are compared."""
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
        if self.full_kl:
            reference = self.initial_model.score_actions(*inputs, logits=True)
            kl, clip = torch.zeros_like(actor.log_probs), self.algorithm.kl_clip  # (b, a)
            kl[actor.real] = full_kl(actor.logits, reference.logits, self.actor.temperature).to(
                kl.dtype
            )
            made["kl"] = kl if clip is None else kl.clamp(-clip, clip)
            made["base_action_log_probs"] = reference.log_probs
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
        """Token rewards → advantages and returns; updates the statistics of ``--value_norm``."""
        config, device, mask = self.algorithm, self.strategy.device, batch.action_mask
        if batch.kl is not None:
            batch.kl = batch.kl.masked_fill(~mask, 0.0)
        groups = [rollout.prompt.index for rollout in rollouts]
        groups = torch.tensor(groups, dtype=torch.long, device=device)
        scores = self.shaper.shape(rollouts)[:, None]  # (B, 1)
        scores = self._normalised("scores", scores, mask.any(1, keepdim=True), groups)
        token_rewards = compute_token_rewards(
            scores[:, 0],
            mask,
            kl=batch.kl if config.use_kl_in_reward else None,
            kl_coef=self.kl_ctl.value if config.use_kl_in_reward and batch.kl is not None else 0.0,
            token_scores=self.shaper.token_scores(rollouts, mask),
        )  # (B, A)
        greedy = None
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
        batch.advantages = self._normalised("advantages", batch.advantages, mask, groups)
        if config.adv_norm and config.adv_norm_scope == "group":
            batch.advantages = group_normalize(batch.advantages, mask, groups, config.adv_norm_eps)
        if self.value_norm is not None:
            self.value_norm.update(batch.returns, mask, all_reduce_sum=self._all_reduce_sum)
        batch.info["return"] = token_rewards.sum(-1)

    def _normalised(self, of: str, values: Tensor, mask: Tensor, groups: Tensor) -> Tensor:
        """Scores (B, 1) or advantages (B, A) after the ``NORMALISATIONS``. Collective."""
        for normalise in self.normalisations[of]:
            values = normalise(values, mask, groups, all_reduce_sum=self._all_reduce_sum)
        return values

    def _add_loss_weights(self, batch: Experience, entropy: Tensor | None) -> None:
        """The product of the token weights: constant factors of the policy loss."""
        if not self.token_weights:
            return
        weights = batch.action_mask.float()  # (B, A)
        for weigh in self.token_weights.values():
            weights = weights * weigh(
                batch,
                log_probs=batch.action_log_probs,
                entropy=entropy,
                all_reduce_sum=self._all_reduce_sum,
            )
        batch.loss_weights = weights

    def _add_info(self, batch: Experience, rollouts: Sequence[Rollout]) -> None:
        """One number per sample, for the logs."""

        def of_rollouts(number: Callable[[Rollout], float | None]) -> Tensor:
            """(B,)."""
            numbers = [number(rollout) for rollout in rollouts]
            return torch.tensor(numbers, dtype=torch.float32, device=self.strategy.device)

        if self.rewarded:
            batch.info["reward"] = of_rollouts(lambda rollout: rollout.reward)
        if any(rollout.stale for rollout in rollouts):
            batch.info["stale"] = of_rollouts(lambda rollout: rollout.stale)
        kl = torch.zeros_like(batch.action_mask) if batch.kl is None else batch.kl
        batch.info["kl"] = masked_mean(kl, batch.action_mask)
        batch.info["prompt_clip_ratio"] = of_rollouts(
            lambda rollout: len(rollout.prompt.token_ids) >= self.prompt_max_len
        )
        if self.shaper.config.overlong_buffer_len is not None:
            penalty = self.shaper.overlong(rollouts)
            batch.info |= {
                "reward/overlong": (penalty < 0).float(),
                "reward/overlong_reward": penalty,
            }
        if self.estimator.needs_greedy_baseline:
            batch.info["reward/greedy_baseline"] = of_rollouts(
                lambda rollout: rollout.baseline.reward
            )
        for name in sorted({name for rollout in rollouts for name in rollout.extras}):
            batch.info[f"reward/{name}"] = of_rollouts(
                lambda rollout, name=name: rollout.extras.get(name, math.nan)
            )
