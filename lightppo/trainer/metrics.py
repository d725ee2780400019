"""How numbers of many samples, tokens, micro batches and ranks become one; and what every number in the logs means."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from lightppo.algorithms import entries
from lightppo.algorithms.mismatch import Summary, mismatch_metrics, mismatch_terms
from lightppo.experience.experience import Experience
from lightppo.plugins.records import metric_names
from lightppo.plugins.records.alarms import ALARMS
from lightppo.ranks import Ranks, heartbeat

TIMED = {  # the parts of experience and training, whose time is also given per token of prompt and response
    "old_log_probs": "log probs of the actor before the update",
    "reference": "log probs of the reference",
    "teacher": "log probs of the teacher",
    "values": "values of the critic",
    "advantages": "rewards of tokens, advantages, whitening",
    "actor_update": "forward and backward passes and optimizer steps of the actor",
    "critic_update": "the same for the critic",
}

SUPERVISED = {  # names in train/ and, but for those of the optimizer, in eval/
    "loss": "mean loss per labelled token, or per pair",
    "tokens": "labelled tokens in the step",
    "epoch": "passes over the data before this one",
    "lr": "learning rate",
    "grad_norm": "gradient norm before clipping",
    "skipped": "1 if the step was skipped because a gradient or the loss was not finite",
    "overflow": "1 if the step was skipped because the loss scale of --fp16 was too large",
    "loss_scale": "loss scale of --fp16 after the step",
}
PAIRS = {  # the same, of training on pairs
    "pairs": "pairs in the step",
    "accuracy": "share of pairs whose chosen answer has the higher reward",
    "margin": "mean reward difference, chosen minus rejected; with `dpo` the reward is β·log(π / π_reference)",
    "chosen_reward": "mean reward of chosen answers",
    "rejected_reward": "mean reward of rejected answers",
    "chosen_log_prob": "mean log prob of chosen answers; per token for `ipo`",
    "rejected_log_prob": "mean log prob of rejected answers; per token for `ipo`",
}

# Name in the logs → meaning. The part before the first "/" is the namespace; <…> stands for any text.
METRICS: dict[str, str] = {
    "rollout/reward": "mean score per sample, before clipping",
    "rollout/reward_max": "highest score",
    "rollout/reward_min": "lowest score",
    "rollout/reward_std": "standard deviation of the scores",
    "rollout/response_length": "mean tokens per response",
    "rollout/response_length_max": "longest response, tokens",
    "rollout/response_length_min": "shortest response, tokens",
    "rollout/response_clip_ratio": "share of responses truncated by --generate_max_len",
    "rollout/prompt_length": "mean prompt tokens per sample",
    "rollout/prompt_length_max": "longest prompt, tokens",
    "rollout/prompt_length_min": "shortest prompt, tokens",
    "rollout/prompt_clip_ratio": "share of samples whose prompt has --prompt_max_len tokens, truncated or not",
    "rollout/total_length": "mean tokens of prompt and response together",
    "rollout/kl": "mean of --kl_estimator per trained token; k1 if `full` is only in the loss (nats)",
    "rollout/policy_kl": "mean log prob - reference log prob per token: unbiased KL, used for --kl_target (nats)",
    "rollout/teacher_kl": "mean log prob - teacher's log prob per token: unbiased KL; with --distill_by "
    "loss as measured in training (nats)",
    "rollout/teacher_log_prob": "mean log prob per trained token under the teacher",
    "rollout/return": "mean sum of a sample's token rewards, including the KL if it is in the reward",
    "rollout/advantage_mean": "mean advantage per trained token, after whitening and clipping",
    "rollout/advantage_max": "largest advantage",
    "rollout/advantage_min": "smallest advantage",
    "rollout/return_token_mean": "mean critic target per trained token",
    "rollout/return_token_max": "largest critic target",
    "rollout/return_token_min": "smallest critic target",
    "rollout/value_mean": "mean value per trained token, at rollout time",
    "rollout/value_max": "largest value",
    "rollout/value_min": "smallest value",
    "rollout/vf_explained_var": "1 - Var(returns - values) / Var(returns); 1 is a perfect critic, 0 a constant one",
    "rollout/logp_diff_mean": "mean |engine log prob - trainer log prob| per trained token",
    "rollout/logp_diff_max": "largest such difference",
    "rollout/mismatch_kl": "KL from engine to trainer per trained token, k1, may be negative (nats)",
    "rollout/mismatch_k3_kl": "the same with k3, never negative",
    "rollout/mismatch_ppl_ratio": "mean over samples of trainer's perplexity / engine's perplexity",
    "rollout/mismatch_chi2_token": "χ² between trainer and engine, from token ratios",
    "rollout/mismatch_chi2_seq": "the same from ratios of whole samples",
    "rollout/mismatch_ess_token": "effective sample size from token ratios, as a share; 1 is no mismatch",
    "rollout/mismatch_ess_seq": "the same from ratios of whole samples",
    "rollout/loss_weight": "mean factor on a token's policy loss, from --rollout_correction, --rollout_rejection "
    "applied before training and --high_entropy_token_ratio",
    "rollout/loss_weight_zero": "share of trained tokens where this factor is 0",
    "rollout/samples": "samples trained on",
    "rollout/unscored": "samples that the reward source left unscored",
    "rollout/small_group": "samples left out because too few samples of their group were scored",
    "rollout/not_best": "samples left out by best of n (--generation_size)",
    "rollout/generated_samples": "samples generated in this step",
    "rollout/generated_tokens": "response tokens generated in this step",
    "rollout/num_gen_batches": "generation batches in this step (--dynamic_sampling, --gen_batch_size)",
    "rollout/trained_groups": "groups (prompts) trained on",
    "rollout/reused_groups": "trained groups that are repeated (--on_exhausted reuse)",
    "rollout/stale_groups": "trained groups that were generated in an earlier step",
    "rollout/staleness": "mean PPO steps between generating a group and training on it",
    "rollout/logp_diff_on_policy": "rollout/logp_diff_mean without stale groups; only if there are any",
    "rollout/surplus_groups": "accepted groups that wait for the next step",
    "rollout/kept_share": "share of this step's groups that --dynamic_sampling accepted",
    "rollout/rejected_equal": "groups rejected because all samples have the same --filter_metric",
    "rollout/rejected_low": "groups rejected because their mean is at or below the lower bound of --filter_range",
    "rollout/rejected_high": "groups rejected because their mean is at or above the upper bound",
    "rollout/rejected_unmeasured": "groups rejected because a sample lacks --filter_metric",
    "rollout/left_out_prompts": "prompts that --dataset_filter_threshold has left out so far",
    "train/policy_loss": "policy loss",
    "train/kl_loss": "KL term of the loss, before its coefficient (--use_kl_loss)",
    "train/distill_loss": "divergence from the teacher's distributions, before its coefficient (--distill_by loss)",
    "train/ptx_loss": "language-model loss on --pretrain_data",
    "train/clip_ratio": "share of trained tokens without gradient because of clipping",
    "train/ratio": "mean probability ratio of new to old policy",
    "train/approx_kl": "mean KL estimate of old to new policy per trained token, nats",
    "train/entropy": "mean policy entropy per trained token (nats)",
    "train/rejected_ratio": "share of trained tokens that --rollout_rejection leaves out during training",
    **{f"train/{name}": meaning for name, meaning in entries.metric_names().items()},
    "train/aux_loss": "load-balancing loss of a mixture of experts (--aux_loss_coef)",
    "train/actor_stopped": "share of the actor's optimizer steps skipped by --early_stop_imp_ratio or --early_stop_kl",
    "train/actor_lr": "learning rate of the actor",
    "train/actor_grad_norm": "gradient norm of the actor before clipping",
    "train/actor_skipped": "share of the actor's optimizer steps skipped due to a non-finite gradient or loss",
    "train/actor_overflow": "share of the actor's optimizer steps skipped due to too large a loss scale (--fp16)",
    "train/actor_loss_scale": "mean loss scale of the actor after each optimizer step (--fp16)",
    "train/critic_loss": "value loss",
    "train/values": "mean value per trained token during training",
    "train/value_clip_ratio": "share of trained tokens whose clipped value error is larger than the unclipped one",
    "train/critic_lr": "learning rate of the critic",
    "train/critic_grad_norm": "gradient norm of the critic before clipping",
    "train/critic_skipped": "share of the critic's optimizer steps skipped due to a non-finite gradient or loss",
    "train/critic_overflow": "share of the critic's optimizer steps skipped due to too large a loss scale (--fp16)",
    "train/critic_loss_scale": "mean loss scale of the critic after each optimizer step (--fp16)",
    "train/kl_coef": "KL coefficient in this step",
    "train/optimizer_steps": "optimizer steps in this PPO step, including skipped ones",
    **{f"train/{name}": f"`lightppo sft`, `rm`, `dpo`: {meaning}" for name, meaning in SUPERVISED.items()},
    **{f"train/{name}": f"`lightppo rm`, `dpo`, also in eval/: {meaning}" for name, meaning in PAIRS.items()},
    "perf/time_rollout": "seconds of generation",
    "perf/time_greedy": "seconds of generating the greedy answers for `remax`, part of time_rollout",
    "perf/time_reward": "seconds of scoring",
    "perf/time_experience": "seconds of forward passes and advantages",
    "perf/time_train": "seconds of training",
    **{f"perf/time_{part}": f"seconds of this part: {meaning}" for part, meaning in TIMED.items()},
    "perf/time_sync": "seconds of sending weights to the rollout engine",
    "perf/time_step": "seconds of the whole step",
    "perf/time_start_profile": "seconds of starting the profiler, in steps of --profile_steps",
    "perf/time_stop_profile": "seconds of writing the trace",
    "perf/time_eval": "seconds of an evaluation, in the evaluation's row",
    "perf/time_save": "seconds of writing checkpoints and exports since the previous row",
    "perf/rollout_tokens_per_second": "generated tokens per second of generation",
    "perf/train_tokens_per_second": "prompt and response tokens per second of training, over all epochs",
    "perf/train_ms_per_token": "milliseconds of training per prompt and response token",
    "perf/rollout_ms_per_token": "milliseconds of generation per response token",
    **{
        f"perf/{part}_ms_per_token": f"milliseconds of `perf/time_{part}` per prompt and response token"
        for part in TIMED
    },
    "perf/train_tflops": "model TFLOP/s of training per rank: 6 · parameters · tokens (Kaplan et al. 2020)",
    "perf/mfu": "perf/train_tflops as a share of --peak_tflops",
    "eval/accuracy": "mean acc (or accuracy) of the source; without, the share of scores ≥ --eval_correct_threshold",
    "eval/reward": "mean score",
    "eval/response_length": "mean tokens per response",
    "eval/truncated": "share of responses truncated by --generate_max_len",
    "eval/samples": "samples drawn",
    "eval/unscored": "samples that the reward source left unscored; only if there are any",
    "eval/mean@<n>": "mean over prompts of the mean score of their n samples (--eval_n_samples)",
    "eval/pass@<k>": "chance that at least one of k samples is correct (Chen et al. 2021, eq. 1), k = 1, 2, 4, …, n",
    "eval/best@<n>": "mean over prompts of the best score of their n samples",
    "eval/worst@<n>": "mean over prompts of the worst score of their n samples",
    "eval/std@<n>": "mean over prompts of the standard deviation of their n scores",
    "eval/maj@<n>": "share of prompts whose most frequent answer is correct; the source gives answers as `pred`",
    "eval/loss": "`lightppo sft`, `rm`, `dpo`: mean loss per labelled token, or per pair, on --eval_dataset",
    "eval/tokens": "labelled tokens in --eval_dataset",
    "eval/<name>": "mean of an extra metric of the reward source; it cannot replace the names above",
    "eval/<source>/<metric>": "any of the above for one data source, if the evaluation data has several",
    "reward/failures": "failed tries of the reward source; a failure never counts as a score",
    "reward/timeouts": "tries that timed out; for code, tests that timed out",
    "reward/<name>": "mean of an extra metric of the reward source",
    **{f"alarm/{name}": f"{a.metrics[0]}: {a.condition}. Try: {a.remedy}" for name, a in ALARMS.items()},
}

# Evaluation always says its namespace: eval/reward is not the rollout's reward.
_BY_SHORT_NAME = {name.split("/", 1)[1]: name for name in METRICS if not name.startswith(("eval/", "reward/"))}
SEED_INFO = ("kl", "reward", "return", "response_length", "total_length")  # means that the seed's training_step gives


def with_namespace(status: Mapping[str, float]) -> dict[str, float]:
    """Short names of a status → names in the logs.

    A name of the user's own is in ``train/``, or in ``rollout/`` if it begins with ``rollout_``, as LightRFT has it.
    """
    return {_full_name(name): value for name, value in status.items()}


def _full_name(name: str) -> str:
    if "/" in name:
        return name
    if name in _BY_SHORT_NAME:
        return _BY_SHORT_NAME[name]
    if name.startswith("rollout_"):
        return f"rollout/{name.removeprefix('rollout_')}"
    return f"train/{name}"


# -- docs/metrics.md -------------------------------------------------------------------------------------------------

_HEAD = """\
# Metrics

<!-- Generated by `make docs` from lightppo/trainer/metrics.py: edit that, not this. -->

Every PPO step (or every `--logging_steps`-th) writes a row to `SAVE_PATH/metrics.jsonl` and to active trackers, such
as TensorBoard and Weights & Biases. Evaluations and saving write rows of their own. A row has `step`, `time` (Unix
seconds) and the names below, over all ranks. An undefined value is `null`. A metric that a run cannot have (no critic,
no reference) is missing. `PPOTrainer.ppo_train` returns `rollout/` and `train/` metrics without the namespace.
"""

_NAMESPACES = {
    "rollout": "the samples of this step, before training",
    "reward": "extra metrics of the reward source, over the samples of this step that have them",
    "train": "means over the optimizer steps of this PPO step",
    "perf": "times of rank 0, and speeds of all ranks based on them",
    "eval": "held-out prompts of `--eval_data`",
    "alarm": "1 if the metrics show a problem, otherwise 0; the log says when it starts",
}


def metrics_page() -> str:
    """The page: one table per namespace."""
    parts = [_HEAD]
    for namespace, meaning in _NAMESPACES.items():
        of_namespace = {name: text for name, text in METRICS.items() if name.startswith(f"{namespace}/")}
        rows = [f"`{name}` | " + text.replace("|", "\\|") + "\n" for name, text in of_namespace.items()]
        parts.append(f"## {namespace}/: {meaning}\n\nName | Meaning\n---|---\n{''.join(rows)}")
    return "\n".join([*parts, metric_names.page_section()])


# -- of a rollout ----------------------------------------------------------------------------------------------------


def policy_summaries(
    experience: Experience, log_probs: Tensor, sampled_kl: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, Summary]:
    """The policy before the update against reference and rollout engine, per trained token.

    Args:
        experience: with what there is of reference, engine and KL; without a KL, ``sampled_kl`` makes it.
        log_probs: of the policy before the update (B, A).
        sampled_kl: log probs of policy and reference → KL, all of one shape.
    """
    terms: dict[str, Tensor] = {}
    reference, engine = experience.base_action_log_probs, experience.rollout_log_probs
    mask = experience.action_mask & ~log_probs.isnan()  # with NaN the optimizer step is skipped, and counted
    if reference is not None:
        mask = mask & ~reference.isnan()
        terms["policy_kl"] = (log_probs - reference)[mask]
        terms["kl"] = (sampled_kl(log_probs, reference) if experience.kl is None else experience.kl)[mask]
    if (teacher := experience.teacher_log_probs) is not None:
        terms |= {"teacher_kl": (log_probs - teacher)[mask], "teacher_log_prob": teacher[mask]}
    if engine is not None:
        terms |= {f"mismatch_{name}": x for name, x in mismatch_terms(log_probs, engine, mask).items()}
    summaries = {name: Summary.of(x) for name, x in terms.items()}
    if engine is not None:
        summaries["mismatch_on_policy"] = summaries["mismatch_logp_diff"]
        if (stale := experience.info.get("stale")) is not None:
            fresh = (stale == 0)[:, None].expand(mask.shape)[mask]
            summaries["mismatch_on_policy"] = Summary.of(terms["mismatch_logp_diff"][fresh])
    return summaries


def rollout_summaries(
    items: Sequence[Experience], sampled_kl: Callable[[Tensor, Tensor], Tensor] = torch.sub
) -> dict[str, Summary]:
    """Summaries of this rank's samples (one each): per sample for ``info``, per trained token for the rest.

    Samples without ``action_log_probs`` are compared with reference and engine where the training pass makes them.
    """
    if not items:
        return {}
    batch = Experience.collate(items)
    tokens = {"advantage": batch.advantages, "return_token": batch.returns, "value": batch.values}
    tokens = {name: x[batch.action_mask] for name, x in tokens.items() if x is not None}
    if "value" in tokens:
        tokens["residual"] = tokens["return_token"] - tokens["value"]
    if batch.loss_weights is not None:
        weights = batch.loss_weights[batch.action_mask]
        tokens |= {"loss_weight": weights, "loss_weight_zero": weights == 0}
    summaries = {name: Summary.of(x) for name, x in batch.info.items() if name not in ("kl", "stale")}
    if {"total_length", "response_length"} <= batch.info.keys():
        summaries["prompt_length"] = Summary.of(batch.info["total_length"] - batch.info["response_length"])
    if batch.action_log_probs is not None:
        summaries |= policy_summaries(batch, batch.action_log_probs, sampled_kl)
    return summaries | {name: Summary.of(x) for name, x in tokens.items()}


def merge_summaries(per_rank: Iterable[Mapping[str, Summary]]) -> dict[str, Summary]:
    """One summary per name over all ranks; a rank without samples brings none."""
    merged: dict[str, Summary] = {}
    for summaries in per_rank:
        for name, summary in summaries.items():
            merged[name] = merged.get(name, Summary()) + summary
    return merged


_OF_TOKENS = ("advantage", "return_token", "value")
_WITH_RANGE = ("reward", "response_length", "prompt_length", *_OF_TOKENS)
_MEAN_NAMES = {"truncated": "response_clip_ratio"} | {name: f"{name}_mean" for name in _OF_TOKENS}


def rollout_status(summaries: Mapping[str, Summary]) -> dict[str, float]:
    """The flat status of a rollout, by its short names: ``reward``, ``kl``, ``response_length`` …"""
    status: dict[str, float] = {}
    mismatch = {name.removeprefix("mismatch_"): s for name, s in summaries.items() if name.startswith("mismatch_")}
    for name, s in summaries.items():
        if name != "residual" and not name.startswith("mismatch_"):
            status[_MEAN_NAMES.get(name, name)] = s.mean
        if name in _WITH_RANGE:
            status |= {f"{name}_max": s.high, f"{name}_min": s.low}
    if mismatch:
        on_policy = mismatch.pop("on_policy")
        if on_policy.count < mismatch["logp_diff"].count:
            status["logp_diff_on_policy"] = on_policy.mean
        numbers = mismatch_metrics(mismatch)
        status |= {"logp_diff_mean": mismatch["logp_diff"].mean, "logp_diff_max": numbers.pop("logp_diff_max")}
        status |= {f"mismatch_{name}": value for name, value in numbers.items()}
    if "response_length" in summaries:
        status["samples"] = summaries["response_length"].count
    if "reward" in summaries:
        status["reward_std"] = math.sqrt(summaries["reward"].variance)
    if "residual" in summaries:
        spread = summaries["return_token"].variance
        status["vf_explained_var"] = 1 - summaries["residual"].variance / spread if spread > 0 else math.nan
    return status


# -- of training -----------------------------------------------------------------------------------------------------


def micro_batch_status(metrics: Mapping[str, Tensor], experience: Experience, scale: float) -> dict[str, Tensor]:
    """What a micro batch says, on its device: its metrics times ``scale``, and the seed's means over samples.

    Args:
        metrics: shares of the metrics of the optimizer step.
        scale: ``StepPart.status_scale``.
    """
    device = experience.action_mask.device
    known = {name: experience.info[name] for name in SEED_INFO if name in experience.info}
    info = {name: torch.as_tensor(x, device=device).float() for name, x in known.items()}  # the seed puts numbers in
    means = {name: values.mean() for name, values in info.items()}
    if "kl" in info:  # per token, as far as lengths tell
        means["kl"] = (info["kl"] * info["response_length"]).sum() / info["response_length"].sum()
    values = torch.stack([*means.values(), *(x.detach().float() for x in metrics.values())]).double()
    values[len(means) :] *= scale
    return dict(zip([*means, *metrics], values.unbind()))


def checked_status(status: Mapping[str, Any] | None) -> dict[str, float]:
    """A status as numbers; an override may have added some of its own. Raises TypeError for an entry that is none."""
    status, numbers = dict(status or {}), {}
    tensors = {name: x.detach().double() for name, x in status.items() if isinstance(x, Tensor) and x.dim() == 0}
    for device in {x.device for x in tensors.values()}:  # one copy, and one wait for a GPU
        names = [name for name, x in tensors.items() if x.device == device]
        status |= zip(names, torch.stack([tensors[name] for name in names]).tolist())
    for name, value in status.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError) as error:
            raise TypeError(f"training_step returned status[{name!r}] = {value!r}; a status holds numbers") from error
    return numbers


def optimizer_status(steps: Sequence[Sequence[Mapping[str, float]]], ranks: Ranks) -> dict[str, float]:
    """The status of all optimizer steps of a PPO step: means over micro batches and ranks, then over steps. Collective.

    A name counts where a status has it. A step in which it is NaN is left out.

    Args:
        steps: for each optimizer step what ``training_step`` returned for this rank's micro batches with samples; all
            ranks have as many steps.
    """
    own = {name for step in steps for status in step for name in status}
    names = sorted(set().union(*ranks.all_gather_object(own)))
    values = [[[status[name] for status in step if name in status] for step in steps] for name in names]
    totals = torch.tensor([[(sum(v), len(v)) for v in of] for of in values], dtype=torch.float64)  # (names, steps, 2)
    of_names = ranks.all_reduce(totals, "sum").tolist() if names else []
    return {name: _mean_of_numbers([x / n for x, n in of if n]) for name, of in zip(names, of_names)}


def _mean_of_numbers(values: Sequence[float]) -> float:
    """NaN marks a missing number and is left out."""
    numbers = [x for x in values if not math.isnan(x)]
    return sum(numbers) / len(numbers) if numbers else math.nan


_SHOWN = {"loss": "train/loss", "reward": "rollout/reward", "kl": "rollout/kl", "entropy": "train/entropy"}
_SHOWN["teacher kl"] = "rollout/teacher_kl"
_SHOWN |= {"len": "rollout/response_length"}


def shown_status(status: Mapping[str, float]) -> str:
    """What a line of the log and the progress bar show: ``reward 0.61 · kl 0.04 · entropy 1.3 · len 3.4``."""
    status = with_namespace(status)
    return " · ".join(f"{short} {round(status[name], 4) + 0.0:.3g}" for short, name in _SHOWN.items() if name in status)


# -- of time ---------------------------------------------------------------------------------------------------------


class Pace:
    """One line per step, with the time that the last steps took and that the others will."""

    def __init__(self, start_step: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.ends = deque([(start_step, clock())], maxlen=21)  # number and end of the last steps

    def line(self, step: int, total: int | None, status: Mapping[str, float]) -> str:
        """``step 12/100 · reward 0.61 · … · 0.9 s · ETA 1:20``; the time left counts evaluations and saving too."""
        (last, before), now = self.ends[-1], self.clock()
        self.ends.append((step, now))
        first, start = self.ends[0]
        parts = [f"step {step}" if total is None else f"step {step}/{total}", shown_status(status)]
        parts.append(f"{status.get('perf/time_step', (now - before) / max(step - last, 1)):.1f} s")
        if total is not None and step > first:
            minutes, seconds = divmod(round((now - start) / (step - first) * (total - step)), 60)
            hours, minutes = divmod(minutes, 60)
            parts.append(f"ETA {hours}:{minutes:02}:{seconds:02}" if hours else f"ETA {minutes}:{seconds:02}")
        return " · ".join(filter(None, parts))


class PhaseTimer:
    """Seconds per phase of a step; on a GPU between two marks in its stream, so that no phase waits for it."""

    def __init__(self) -> None:
        self.passed: list[tuple[str, Any, Any]] = []  # phase, start and end

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        # no marks where a run on the CPU of a GPU machine would only take its memory
        now = _mark if torch.cuda.is_initialized() else time.perf_counter
        start = now()
        with torch.profiler.record_function(phase), heartbeat.during(phase):  # its name in a trace
            yield
        self.passed.append((phase, start, now()))

    def reset(self) -> dict[str, float]:
        """The seconds since the last reset, as ``time_<phase>``. Waits for a GPU."""
        passed, self.passed, seconds = self.passed, [], Counter()
        for phase, start, end in passed:
            if not isinstance(end, float):
                end.synchronize()
            seconds[f"time_{phase}"] += end - start if isinstance(end, float) else start.elapsed_time(end) / 1000
        return dict(seconds)


def _mark() -> torch.cuda.Event:
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark


def progress_bar(items: Iterable | None, desc: str, *, shown: bool = True, **options: Any) -> tqdm:
    """A bar of at most 80 columns on a terminal; silent elsewhere."""
    layout = "{desc} {n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}"
    return tqdm(items, desc=desc, ncols=80, bar_format=layout, disable=None if shown else True, **options)


@contextmanager
def profile(path: Path, timer: PhaseTimer) -> Iterator[None]:
    """A context whose operators torch's profiler writes to ``path``, a trace for chrome://tracing or Perfetto."""
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler = torch.profiler.profile(on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)))
    with timer("start_profile"):
        profiler.start()
    try:
        yield
    finally:
        with timer("stop_profile"):
            profiler.stop()


def perf_metrics(
    seconds: Mapping[str, float],
    status: Mapping[str, float],
    *,
    epochs: Mapping[str, int],
    world_size: int,
    parameters: float,
    peak_tflops: float | None,
) -> dict[str, float]:
    """Speed of one step, beside the ``time_<phase>`` in ``seconds``.

    ``status`` is of the rollout (samples, generated_tokens, total_length), ``parameters`` of all models that an epoch
    trains, ``peak_tflops`` of one device; ``epochs`` by the part in ``TIMED``.
    """
    perf = dict(seconds)
    generated = status.get("generated_tokens", 0.0)
    tokens = status.get("samples", 0.0) * status.get("total_length", 0.0)
    trained = tokens * max(epochs.values())
    if generated and seconds.get("time_rollout"):
        perf["rollout_tokens_per_second"] = generated / seconds["time_rollout"]
        perf["rollout_ms_per_token"] = 1000 * seconds["time_rollout"] / generated
    for part in [part for part in TIMED if tokens and f"time_{part}" in seconds]:
        perf[f"{part}_ms_per_token"] = 1000 * seconds[f"time_{part}"] / (tokens * epochs.get(part, 1))
    if trained and (train := seconds.get("time_train")):
        perf["train_tokens_per_second"] = trained / train
        perf["train_ms_per_token"] = 1000 * train / trained
        perf["train_tflops"] = 6 * parameters * trained / train / world_size / 1e12
        if peak_tflops is not None:
            perf["mfu"] = perf["train_tflops"] / peak_tflops
    return perf


if __name__ == "__main__":
    sys.stdout.write(metrics_page())
