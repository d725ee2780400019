"""What is logged, under which name, and how numbers of many samples, tokens, micro batches and ranks become one.

docs/metrics.md is made from this: ``python -m lightppo.trainer.metrics [--write]``.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lightppo.experience.experience import Experience

# Name in the logs → meaning. The part before the first "/" is the namespace; <…> stands for any text.
METRICS: dict[str, str] = {
    "rollout/reward": "mean score of a sample, before clipping",
    "rollout/reward_max": "highest score",
    "rollout/reward_min": "lowest score",
    "rollout/reward_std": "standard deviation of the scores",
    "rollout/response_length": "mean tokens of a response",
    "rollout/response_length_max": "longest response, tokens",
    "rollout/response_length_min": "shortest response, tokens",
    "rollout/response_clip_ratio": "share of responses cut by --generate_max_len",
    "rollout/total_length": "mean tokens of prompt and response",
    "rollout/kl": "mean KL estimate per trained token between policy and reference (nats)",
    "rollout/return": "mean sum of token rewards of a sample, KL included where it is in the reward",
    "rollout/advantage_mean": "mean advantage of a trained token, as trained on",
    "rollout/advantage_max": "largest advantage",
    "rollout/advantage_min": "smallest advantage",
    "rollout/return_token_mean": "mean critic target of a trained token",
    "rollout/return_token_max": "largest critic target",
    "rollout/return_token_min": "smallest critic target",
    "rollout/value_mean": "mean value of a trained token, at rollout time",
    "rollout/value_max": "largest value",
    "rollout/value_min": "smallest value",
    "rollout/vf_explained_var": "1 - Var(returns - values) / Var(returns); 1 is a perfect critic, 0 a constant one",
    "rollout/logp_diff_mean": "mean |log prob of the engine - log prob of the trainer| of a trained token",
    "rollout/logp_diff_max": "largest such difference",
    "rollout/samples": "samples trained on, all ranks",
    "rollout/unscored": "samples that the reward source left unscored, all ranks",
    "rollout/small_group": "samples left out because too little of their group was scored, all ranks",
    "train/policy_loss": "policy loss",
    "train/kl_loss": "KL term of the loss, before its coefficient (--use_kl_loss)",
    "train/ptx_loss": "language-model loss on --pretrain_data",
    "train/clip_ratio": "share of trained tokens whose gradient the clip took away",
    "train/ratio": "mean probability ratio of new to old policy",
    "train/approx_kl": "mean KL estimate of old to new policy per trained token (nats)",
    "train/actor_lr": "learning rate of the actor",
    "train/actor_grad_norm": "gradient norm of the actor before clipping",
    "train/actor_skipped": "share of the actor's optimizer steps skipped for a non-finite gradient",
    "train/critic_loss": "value loss",
    "train/values": "mean value of a trained token during training",
    "train/value_clip_ratio": "share of trained tokens whose clipped value error is the larger one",
    "train/critic_lr": "learning rate of the critic",
    "train/critic_grad_norm": "gradient norm of the critic before clipping",
    "train/critic_skipped": "share of the critic's optimizer steps skipped for a non-finite gradient",
    "train/kl_coef": "KL coefficient in this step",
    "train/optimizer_steps": "optimizer steps taken in this PPO step",
    "perf/time_rollout": "seconds of generation",
    "perf/time_reward": "seconds of scoring",
    "perf/time_experience": "seconds of forward passes and advantages",
    "perf/time_train": "seconds of training",
    "perf/time_sync": "seconds of handing weights to the rollout engine",
    "perf/time_step": "seconds of the whole step",
    "perf/rollout_tokens_per_second": "generated tokens per second of generation, all ranks",
    "perf/train_tokens_per_second": "prompt and response tokens trained per second of training, all ranks and epochs",
    "perf/train_ms_per_token": "milliseconds of training per prompt and response token",
    "perf/train_tflops": "model TFLOP/s of training per rank: 6 · parameters · tokens (Kaplan et al. 2020)",
    "perf/mfu": "the same as a share of --peak_tflops",
    "eval/accuracy": "share of scored samples with a score of at least --eval_correct_threshold",
    "eval/reward": "mean score",
    "eval/response_length": "mean tokens of a response",
    "eval/truncated": "share of responses cut by --generate_max_len",
    "eval/samples": "samples drawn",
    "eval/unscored": "samples that the reward source left unscored; only where there are such",
    "eval/mean@<n>": "mean over prompts of the mean score of their n samples (--eval_n_samples)",
    "eval/pass@<k>": "chance that at least one of k samples is correct, k = 1, 2, 4, … ≤ n (Chen et al. 2021, eq. 1)",
    "eval/best@<n>": "mean over prompts of the best score of their n samples",
    "eval/<source>/<metric>": "any of the above for one data source, where the evaluation data has several",
    "reward/<name>": "mean of a number that the reward source gives beside its score",
}

# Evaluation always says its namespace: eval/reward is not the rollout's reward.
_BY_SHORT_NAME = {name.split("/", 1)[1]: name for name in METRICS if not name.startswith(("eval/", "reward/"))}


def with_namespace(status: Mapping[str, float]) -> dict[str, float]:
    """Short names of a status → names in the logs; a name with a namespace of its own stays."""
    return {name if "/" in name else _BY_SHORT_NAME[name]: value for name, value in status.items()}


@dataclass
class Summary:
    """Count, sum, sum of squares, minimum and maximum of numbers, mergeable over ranks."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    @classmethod
    def of(cls, values: Tensor) -> Summary:
        """Of all entries of a tensor; NaN marks a missing number and is left out."""
        values = values.double()
        values = values[~values.isnan()]
        if values.numel() == 0:
            return cls()
        return cls(
            values.numel(),
            values.sum().item(),
            values.square().sum().item(),
            values.min().item(),
            values.max().item(),
        )

    def __add__(self, other: Summary) -> Summary:
        return Summary(
            self.count + other.count,
            self.total + other.total,
            self.squares + other.squares,
            min(self.low, other.low),
            max(self.high, other.high),
        )

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else math.nan

    @property
    def variance(self) -> float:
        """Biased."""
        return max(0.0, self.squares / self.count - self.mean**2) if self.count else math.nan


def rollout_summaries(items: Sequence[Experience]) -> dict[str, Summary]:
    """Summaries of this rank's samples: per sample for ``info``, per trained token for the rest."""
    if not items:
        return {}
    mask = torch.cat([item.action_mask[0] for item in items])  # (ΣA,)

    def tokens(name: str) -> Tensor | None:
        """Trained tokens of all rows."""
        if getattr(items[0], name) is None:
            return None
        return torch.cat([getattr(item, name)[0] for item in items])[mask]

    values, returns, engine = tokens("values"), tokens("returns"), tokens("rollout_log_probs")
    per_token = {"kl": tokens("kl"), "advantage": tokens("advantages"), "return_token": returns, "value": values}
    if values is not None:
        per_token["residual"] = returns - values
    if engine is not None:
        per_token["logp_diff"] = (engine - tokens("action_log_probs")).abs()
    per_sample = {name: torch.cat([item.info[name] for item in items]) for name in items[0].info if name != "kl"}
    return {name: Summary.of(x) for name, x in (per_sample | per_token).items() if x is not None}


def merge_summaries(per_rank: Iterable[Mapping[str, Summary]]) -> dict[str, Summary]:
    """One summary per name over all ranks; a rank without samples brings none."""
    merged: dict[str, Summary] = {}
    for summaries in per_rank:
        for name, summary in summaries.items():
            merged[name] = merged.get(name, Summary()) + summary
    return merged


def rollout_status(summaries: Mapping[str, Summary]) -> dict[str, float]:
    """The flat status of a rollout, by the short names of ``METRICS`` (``reward``, ``kl``, ``response_length`` …)."""
    with_range = {"reward", "response_length", "advantage", "return_token", "value"}
    status: dict[str, float] = {}
    for name, s in summaries.items():
        if name == "residual":
            continue
        mean_name = {"advantage": "advantage_mean", "return_token": "return_token_mean", "value": "value_mean"}
        mean_name |= {"truncated": "response_clip_ratio", "logp_diff": "logp_diff_mean"}
        status[mean_name.get(name, name)] = s.mean
        if name in with_range:
            status |= {f"{name}_max": s.high, f"{name}_min": s.low}
    if "logp_diff" in summaries:
        status["logp_diff_max"] = summaries["logp_diff"].high
    if "reward" in summaries:
        status["reward_std"] = math.sqrt(summaries["reward"].variance)
        status["samples"] = summaries["reward"].count
    if "residual" in summaries:
        spread = summaries["return_token"].variance
        status["vf_explained_var"] = 1 - summaries["residual"].variance / spread if spread > 0 else math.nan
    return status


class StepMetrics:
    """Sums of scalar tensors over the micro batches of one optimizer step."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Add one micro batch's share."""
        for name, value in values.items():
            value = value.detach().float()
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def reduce(self, strategy) -> dict[str, float]:
        """Mean over ranks of the sums: with shares scaled as losses are, the value over the whole step."""
        if not self.sums:
            return {}
        names = sorted(self.sums)
        reduced = strategy.all_reduce(torch.stack([self.sums[name] for name in names]), "mean")
        return dict(zip(names, reduced.tolist()))


def mean_status(statuses: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each name over the statuses that have it; NaN entries are left out."""
    means: dict[str, float] = {}
    for name in dict.fromkeys(name for status in statuses for name in status):
        values = [s[name] for s in statuses if name in s and not math.isnan(s[name])]
        means[name] = sum(values) / len(values) if values else math.nan
    return means


def short_status(status: Mapping[str, float]) -> dict[str, float]:
    """What the progress bar shows."""
    names = {
        "pg": "policy_loss",
        "rm": "reward",
        "ret": "return",
        "glen": "response_length",
        "tlen": "total_length",
        "kl": "kl",
        "act_lr": "actor_lr",
        "cri": "critic_loss",
        "vals": "values",
        "cri_lr": "critic_lr",
    }
    return {short: status[name] for short, name in names.items() if name in status}


class PhaseTimer:
    """Seconds per phase of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def reset(self) -> dict[str, float]:
        """The seconds since the last reset, as ``time_<phase>``."""
        seconds, self.seconds = self.seconds, {}
        return {f"time_{phase}": value for phase, value in seconds.items()}


def perf_metrics(
    seconds: Mapping[str, float],
    status: Mapping[str, float],
    *,
    epochs: int,
    world_size: int,
    parameters: int,
    peak_tflops: float | None,
) -> dict[str, float]:
    """Speed of one step.

    Args:
        seconds: ``time_<phase>`` of :class:`PhaseTimer`.
        status: of the rollout: samples, response_length, total_length.
        epochs: passes over the rollout.
        world_size: ranks.
        parameters: of all models trained.
        peak_tflops: peak of one device; ``None``: no MFU.
    """
    perf = dict(seconds)
    generated = status.get("samples", 0.0) * status.get("response_length", 0.0)
    trained = status.get("samples", 0.0) * status.get("total_length", 0.0) * epochs
    if generated and seconds.get("time_rollout"):
        perf["rollout_tokens_per_second"] = generated / seconds["time_rollout"]
    if trained and seconds.get("time_train"):
        train = seconds["time_train"]
        perf["train_tokens_per_second"] = trained / train
        perf["train_ms_per_token"] = 1000 * train / trained
        perf["train_tflops"] = 6 * parameters * trained / train / world_size / 1e12
        if peak_tflops is not None:
            perf["mfu"] = perf["train_tflops"] / peak_tflops
    return perf


# -- docs/metrics.md -------------------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"

_HEAD = """\
# Metrics

<!-- Generated by `make docs` from lightppo/trainer/metrics.py: edit that, not this. -->

Every PPO step writes one row to `SAVE_PATH/metrics.jsonl` (every `--logging_steps` steps), and the same numbers to
TensorBoard and Weights & Biases where these are on. An evaluation writes a row of its own. A row has `step`, `time`
(Unix seconds) and the names below; `<…>` stands for any text. A number that is not defined is `null`. A name is missing
where its part is: no `rollout/kl` without a reference model, no `train/critic_loss` without a critic.

All numbers are over all ranks. `PPOTrainer.ppo_train` returns those of `rollout/` and `train/` without the namespace.
"""

_NAMESPACES = {
    "rollout": "the samples of this step, before they were trained on",
    "reward": "what the reward source says beside the score, over the samples of this step that have it",
    "train": "means over the optimizer steps of this PPO step",
    "perf": "times of rank 0, and speeds of all ranks from them",
    "eval": "held-out prompts of `--eval_data`",
}


def metrics_page() -> str:
    """The page: one table per namespace."""
    parts = [_HEAD]
    for namespace, meaning in _NAMESPACES.items():
        rows = [(f"`{name}`", text) for name, text in METRICS.items() if name.startswith(f"{namespace}/")]
        table = [("Name", "Meaning"), ("---", "---"), *((name, text.replace("|", "\\|")) for name, text in rows)]
        lines = "\n".join("| " + " | ".join(cells) + " |" for cells in table)
        parts.append(f"## {namespace}/: {meaning}\n\n{lines}\n")
    return "\n".join(parts)


def main(arguments: Sequence[str]) -> None:
    """Write the page to docs/metrics.md with ``--write``, else to standard output."""
    if list(arguments) == ["--write"]:
        PAGE.write_text(metrics_page(), encoding="utf-8")
    elif arguments:
        raise SystemExit(f"usage: python -m lightppo.trainer.metrics [--write], not {' '.join(arguments)}")
    else:
        sys.stdout.write(metrics_page())


if __name__ == "__main__":
    main(sys.argv[1:])
