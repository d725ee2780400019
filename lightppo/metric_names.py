"""What every number in the logs means, by its name there; docs/metrics.md is made of this. Free of torch.

A package adds its names with ``METRICS.register``; algorithms bring theirs with their entries.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

from lightppo.table import load


class MetricTable(Mapping[str, str]):
    """``namespace/name`` → meaning; <…> in a name stands for any text."""

    def __init__(self) -> None:
        self.namespaces: dict[str, str] = {}  # what the numbers of each are
        self._registered: list[tuple[str, Mapping[str, str] | str]] = []

    def register(self, namespace: str, names: Mapping[str, str] | str, about: str = "") -> None:
        """Add names to a namespace.

        Args:
            names: name → meaning, or ``"module:function"`` of what returns them, which is called when they are read.
            about: what the numbers of a new namespace are.
        """
        if about or namespace not in self.namespaces:
            self.namespaces[namespace] = about
        self._registered.append((namespace, names))
        self.__dict__.pop("_descriptions", None)
        self.__dict__.pop("by_short_name", None)

    @functools.cached_property
    def _descriptions(self) -> dict[str, str]:
        meanings: dict[str, str] = {}
        for namespace, names in self._registered:
            for name, meaning in (load(names)() if isinstance(names, str) else names).items():
                if f"{namespace}/{name}" in meanings:
                    raise ValueError(
                        f"METRICS: {namespace}/{name} has two meanings: choose another name"
                    )
                meanings[f"{namespace}/{name}"] = meaning
        return meanings

    @functools.cached_property
    def by_short_name(self) -> dict[str, str]:
        """Name without its namespace → name. Evaluations and rewards always say theirs: eval/reward is another one."""
        named = [name for name in self if not name.startswith(("eval/", "reward/"))]
        return {name.split("/", 1)[1]: name for name in named}

    def __getitem__(self, name: str) -> str:
        return self._descriptions[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._descriptions)

    def __len__(self) -> int:
        return len(self._descriptions)


# The metrics that the line of a step shows, and their names there; the length of responses follows. A package may add
# to it.
SHOWN = {
    "loss": "train/loss",
    "reward": "rollout/reward",
    "kl": "rollout/kl",
    "entropy": "train/entropy",
    "teacher kl": "rollout/teacher_kl",
}

# What progress bars show of a status, by the names that LightRFT and OpenRLHF have there.
ON_BARS = {
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
    "ptx": "ptx_loss",
}


_ROLLOUT = {
    "reward": "mean score per sample, before clipping",
    "reward_clip_ratio": "share of samples whose score, after shaping, is outside of --reward_clip_range",
    "equal_groups": "share of samples all of whose group have the same score, after shaping and clipping: estimators "
    "that compare the samples of a prompt learn nothing from them",
    "response_length": "mean tokens per response",
    "response_clip_ratio": "share of responses truncated by --generate_max_len",
    "prompt_clip_ratio": "share of samples whose prompt has --prompt_max_len tokens, truncated or not",
    "total_length": "mean tokens of prompt and response together",
    "kl": "mean of --kl_estimator per trained token; k1 if `full` is only in the loss (nats)",
    "policy_kl": "mean log prob - reference log prob per token: unbiased KL, used for --kl_target (nats)",
    "return": "mean sum of a sample's token rewards, including the KL if it is in the reward",
    "advantage_mean": "mean advantage per trained token, after whitening and clipping",
    "samples": "samples trained on",
    "unscored": "samples that the reward source left unscored",
    "small_group": "samples left out because too few samples of their group were scored",
    "generated_samples": "samples generated in this step",
    "generated_tokens": "response tokens generated in this step",
    "reward_max": "highest score",
    "reward_min": "lowest score",
    "reward_std": "standard deviation of the scores",
    "response_length_max": "longest response, tokens",
    "response_length_min": "shortest response, tokens",
    "prompt_length": "mean prompt tokens per sample",
    "prompt_length_max": "longest prompt, tokens",
    "prompt_length_min": "shortest prompt, tokens",
    "advantage_max": "largest advantage",
    "advantage_min": "smallest advantage",
    "return_token_mean": "mean critic target per trained token",
    "return_token_max": "largest critic target",
    "return_token_min": "smallest critic target",
    "value_mean": "mean value per trained token, at rollout time",
    "value_max": "largest value",
    "value_min": "smallest value",
    "vf_explained_var": "1 - Var(returns - values) / Var(returns); 1 is a perfect critic, 0 a constant one",
    "logp_diff_mean": "mean |engine log prob - trainer log prob| per trained token",
    "logp_diff_max": "largest such difference",
    "mismatch_kl": "KL from engine to trainer per trained token, k1, may be negative (nats)",
    "mismatch_k3_kl": "the same with k3, never negative",
    "mismatch_ppl_ratio": "mean over samples of trainer's perplexity / engine's perplexity",
    "mismatch_chi2_token": "χ² between trainer and engine, from token ratios",
    "mismatch_chi2_seq": "the same from ratios of whole samples",
    "mismatch_ess_token": "effective sample size from token ratios, as a share; 1 is no mismatch",
    "mismatch_ess_seq": "the same from ratios of whole samples",
    "loss_weight": "mean factor on a token's policy loss, from --rollout_correction, --rollout_rejection applied "
    "before training and --high_entropy_token_ratio",
    "loss_weight_zero": "share of trained tokens where this factor is 0",
    "logp_diff_on_policy": "rollout/logp_diff_mean without stale groups; only if there are some, and others",
}

# Of dynamic sampling, the filter of prompts and distillation, where they are in use.
_SOME_ROLLOUTS = {
    "not_best": "samples left out by best of n (--generation_size)",
    "num_gen_batches": "generation batches in this step (--dynamic_sampling, --gen_batch_size)",
    "trained_groups": "groups (prompts) trained on",
    "reused_groups": "trained groups that are repeated (--on_exhausted reuse)",
    "stale_groups": "trained groups that were generated in an earlier step",
    "staleness": "mean PPO steps between generating a group and training on it",
    "surplus_groups": "accepted groups that wait for the next step",
    "kept_share": "share of this step's groups that --dynamic_sampling accepted",
    "rejected_equal": "groups rejected because all samples have the same --filter_metric",
    "rejected_low": "groups rejected because their mean is at or below the lower bound of --filter_range",
    "rejected_high": "groups rejected because their mean is at or above the upper bound",
    "rejected_unmeasured": "groups rejected because a sample lacks --filter_metric",
    "left_out_prompts": "prompts that --dataset_filter_threshold has left out so far",
    "teacher_kl": "mean log prob - teacher's log prob per token: unbiased KL; with --distill_by loss as measured "
    "in training (nats)",
    "teacher_log_prob": "mean log prob per trained token under the teacher",
}

_TRAIN = {
    "policy_loss": "policy loss",
    "kl_loss": "KL term of the loss, before its coefficient (--use_kl_loss)",
    "clip_ratio": "share of trained tokens without gradient because of clipping",
    "ratio": "mean probability ratio of new to old policy",
    "approx_kl": "mean KL estimate of old to new policy per trained token, nats",
    "entropy": "mean policy entropy per trained token (nats), of one of up to 8 tokens where a large step only logs it",
    "replaced_experts": "share of trained tokens and routers whose experts --router_replay replaced by others",
    "rejected_ratio": "share of trained tokens that --rollout_rejection leaves out during training",
    "aux_loss": "load-balancing loss of a mixture of experts (--aux_loss_coef)",
    "actor_stopped": "share of the actor's optimizer steps skipped by --early_stop_imp_ratio or --early_stop_kl",
    "actor_lr": "learning rate of the actor",
    "actor_grad_norm": "gradient norm of the actor before clipping",
    "actor_skipped": "share of the actor's optimizer steps skipped due to a non-finite gradient or loss",
    "actor_overflow": "share of the actor's optimizer steps skipped due to too large a loss scale (--fp16)",
    "actor_loss_scale": "mean loss scale of the actor after each optimizer step (--fp16)",
    "critic_loss": "value loss",
    "values": "mean value per trained token during training",
    "value_clip_ratio": "share of trained tokens whose clipped value error is larger than the unclipped one",
    "critic_lr": "learning rate of the critic",
    "critic_grad_norm": "gradient norm of the critic before clipping",
    "critic_skipped": "share of the critic's optimizer steps skipped due to a non-finite gradient or loss",
    "critic_overflow": "share of the critic's optimizer steps skipped due to too large a loss scale (--fp16)",
    "critic_loss_scale": "mean loss scale of the critic after each optimizer step (--fp16)",
    "kl_coef": "KL coefficient in this step",
    "optimizer_steps": "optimizer steps in this PPO step, including skipped ones",
    "teacher_top_mass": "mean probability that the teacher gives to its --distill_topk tokens",
    "distill_loss": "divergence from the teacher's distributions, before its coefficient (--distill_by loss)",
    "ptx_loss": "language-model loss on --pretrain_data",
}

_REWARD = {
    "failures": "failed tries of the reward source; a failure never counts as a score",
    "timeouts": "tries that timed out; for code, tests that timed out",
    "<name>": "mean of an extra metric of the reward source",
}

# The parts of experience and training, whose time is also given per token of prompt and response.
TIMED = {
    "old_log_probs": "log probs of the actor before the update",
    "reference": "log probs of the reference",
    "values": "values of the critic",
    "advantages": "rewards of tokens, advantages, whitening",
    "actor_update": "forward and backward passes and optimizer steps of the actor",
    "critic_update": "the same for the critic",
    "teacher": "log probs of the teacher",
}

_PERF = {
    "time_rollout": "seconds of generation; with --max_staleness, of waiting for it",
    "time_greedy": "seconds of generating the greedy answers for `remax`, part of time_rollout",
    "time_reward": "seconds of scoring",
    "time_experience": "seconds of forward passes and advantages",
    "time_train": "seconds of training",
    "time_sync": "seconds of sending weights to the rollout engine",
    "time_step": "seconds of the whole step",
    "time_start_profile": "seconds of starting the profiler, in steps of --profile_steps",
    "time_stop_profile": "seconds of writing the trace",
    "time_save": "seconds of writing checkpoints and exports since the previous row",
    "rollout_tokens_per_second": "generated tokens per second of generation",
    "train_tokens_per_second": "prompt and response tokens per second of training, over all epochs",
    "train_ms_per_token": "milliseconds of training per prompt and response token",
    "rollout_ms_per_token": "milliseconds of generation per response token",
    "train_tflops": "model TFLOP/s of training per rank: 6 · parameters · tokens (Kaplan et al. 2020)",
    "mfu": "perf/train_tflops as a share of --peak_tflops",
    **{f"time_{part}": f"seconds of this part: {meaning}" for part, meaning in TIMED.items()},
    **{
        f"{part}_ms_per_token": f"milliseconds of `perf/time_{part}` per prompt and response token"
        for part in TIMED
    },
    "sync_megabytes": "megabytes of the last push of weights to vLLM",
    "time_eval": "seconds of an evaluation, in the evaluation's row",
    "gpu_memory_gb": "GB of tensors at the step's peak, of the rank that had most; on GPUs",
    "gpu_memory_reserved_gb": "GB that torch held for them",
}

_EVAL = {
    "accuracy": "mean acc (or accuracy) of the source; without, the share of scores ≥ --eval_correct_threshold",
    "reward": "mean score",
    "response_length": "mean tokens per response",
    "truncated": "share of responses truncated by --generate_max_len",
    "samples": "samples drawn",
    "unscored": "samples that the reward source left unscored; only if there are any",
    "mean@<n>": "mean over prompts of the mean score of their n samples (--eval_n_samples)",
    "pass@<k>": "chance that at least one of k samples is correct (Chen et al. 2021, eq. 1), k = 1, 2, 4, …, n",
    "best@<n>": "mean over prompts of the best score of their n samples",
    "worst@<n>": "mean over prompts of the worst score of their n samples",
    "std@<n>": "mean over prompts of the standard deviation of their n scores",
    "maj@<n>": "share of prompts whose most frequent answer is correct; the source gives answers as `pred`",
    "<name>": "mean of an extra metric of the reward source; it cannot replace the names above",
    "loss": "`lightppo sft`, `rm`, `dpo`: mean loss per labelled token, or per pair, on --eval_dataset",
    "tokens": "labelled tokens in --eval_dataset",
    "<source>/<metric>": "any of the above for one data source, if the evaluation data has several",
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

METRICS = MetricTable()
METRICS.register("rollout", _ROLLOUT, about="the samples of this step, before training")
METRICS.register("rollout", _SOME_ROLLOUTS)
METRICS.register(
    "reward",
    _REWARD,
    about="extra metrics of the reward source, over the samples of this step that have them",
)
METRICS.register("train", _TRAIN, about="means over the optimizer steps of this PPO step")
METRICS.register("train", "lightppo.algorithms.entries:metric_names")
METRICS.register(
    "train",
    {name: f"`lightppo sft`, `rm`, `dpo`: {meaning}" for name, meaning in SUPERVISED.items()},
)
METRICS.register(
    "train",
    {name: f"`lightppo rm`, `dpo`, also in eval/: {meaning}" for name, meaning in PAIRS.items()},
)
METRICS.register("perf", _PERF, about="times of rank 0, and speeds of all ranks based on them")
METRICS.register("eval", _EVAL, about="held-out prompts of `--eval_data`")
METRICS.register(
    "alarm",
    "lightppo.logging.alarms:alarm_descriptions",
    about="1 if the metrics show a problem, otherwise 0; the log says when it starts",
)
METRICS.register(
    "episode",
    "lightppo.episodes.episode_metrics:names",
    about="the episodes of this step (`--env`, `--tools`), all that were played; "
    "those of an evaluation are in `eval/episode/`",
)
METRICS.register("perf", "lightppo.episodes.episode_metrics:clocked_names")
