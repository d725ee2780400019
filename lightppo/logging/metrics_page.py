"""docs/metrics.md, and ``--metric_names``: what other trainers call a metric, for dashboards that were made for them.

Trackers get these names in place of ours; a metric without another name keeps its own. ``metrics.jsonl``, the log and
everything that reads them (report, watch, diff, replay) have our names in any case.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping

from lightppo.plugin import METRICS

OURS = "lightppo"


def _table(rows: str) -> dict[str, list[str]]:
    return {ours: theirs for ours, *theirs in map(str.split, rows.strip().splitlines())}


# Our name, then theirs; <…> stands for any text, the same on both sides.
VERL = _table(
    """
rollout/reward critic/score/mean
rollout/reward_max critic/score/max
rollout/reward_min critic/score/min
rollout/return critic/rewards/mean
rollout/advantage_mean critic/advantages/mean
rollout/advantage_max critic/advantages/max
rollout/advantage_min critic/advantages/min
rollout/return_token_mean critic/returns/mean
rollout/return_token_max critic/returns/max
rollout/return_token_min critic/returns/min
rollout/value_mean critic/values/mean
rollout/value_max critic/values/max
rollout/value_min critic/values/min
rollout/vf_explained_var critic/vf_explained_var
rollout/response_length response_length/mean
rollout/response_length_max response_length/max
rollout/response_length_min response_length/min
rollout/response_clip_ratio response_length/clip_ratio
rollout/prompt_length prompt_length/mean
rollout/prompt_length_max prompt_length/max
rollout/prompt_length_min prompt_length/min
rollout/prompt_clip_ratio prompt_length/clip_ratio
rollout/kl actor/reward_kl_penalty
rollout/mismatch_kl rollout_corr/kl
rollout/mismatch_k3_kl rollout_corr/k3_kl
rollout/mismatch_ppl_ratio rollout_corr/ppl_ratio
rollout/mismatch_chi2_token rollout_corr/chi2_token
rollout/mismatch_chi2_seq rollout_corr/chi2_seq
rollout/mismatch_ess_token rollout_corr/rollout_is_eff_sample_size
rollout/num_gen_batches train/num_gen_batches
train/kl_coef actor/reward_kl_penalty_coeff actor/kl_coef
train/policy_loss actor/pg_loss
train/clip_ratio actor/pg_clipfrac
train/approx_kl actor/ppo_kl
train/entropy actor/entropy
train/kl_loss actor/kl_loss
train/actor_grad_norm actor/grad_norm
train/actor_lr actor/lr
train/critic_loss critic/vf_loss
train/value_clip_ratio critic/vf_clipfrac
train/values critic/vpred_mean
train/critic_grad_norm critic/grad_norm
train/critic_lr critic/lr
perf/time_rollout timing_s/gen
perf/time_greedy timing_s/gen_max
perf/time_reward timing_s/reward
perf/time_old_log_probs timing_s/old_log_prob
perf/time_reference timing_s/ref
perf/time_values timing_s/values
perf/time_advantages timing_s/adv
perf/time_actor_update timing_s/update_actor
perf/time_critic_update timing_s/update_critic
perf/time_sync timing_s/update_weights
perf/time_eval timing_s/testing
perf/time_save timing_s/save_checkpoint
perf/time_step timing_s/step perf/time_per_step
perf/gpu_memory_gb perf/max_memory_allocated_gb
perf/gpu_memory_reserved_gb perf/max_memory_reserved_gb
perf/time_start_profile timing_s/start_profile
perf/time_stop_profile timing_s/stop_profile
perf/time_<part> timing_s/<part>
perf/rollout_ms_per_token timing_per_token_ms/gen
perf/reference_ms_per_token timing_per_token_ms/ref
perf/values_ms_per_token timing_per_token_ms/values
perf/advantages_ms_per_token timing_per_token_ms/adv
perf/actor_update_ms_per_token timing_per_token_ms/update_actor
perf/critic_update_ms_per_token timing_per_token_ms/update_critic
perf/mfu perf/mfu/actor
eval/<source>/mean@<n> val-core/<source>/reward/mean@<n>
eval/<source>/std@<n> val-aux/<source>/reward/std@<n>
eval/<source>/best@<n> val-core/<source>/reward/best@<n>/mean
eval/<source>/worst@<n> val-aux/<source>/reward/worst@<n>/mean
eval/<source>/maj@<n> val-core/<source>/reward/maj@<n>/mean
"""
)
OPENRLHF = _table(
    """
rollout/reward rollout/reward train/reward
rollout/response_length rollout/response_length train/response_length
rollout/total_length train/total_length
rollout/return train/return
rollout/kl train/kl
rollout/advantage_mean train/advantages_mean
rollout/advantage_max train/advantages_max
rollout/advantage_min train/advantages_min
rollout/return_token_mean train/returns_mean
reward/<name> reward_metrics/<name> rollout/<name>
perf/time_rollout perf/experience_maker/generate_time
perf/time_experience perf/experience_maker/actor_value_rm_time
perf/time_reward perf/experience_maker/wait_time
"""
)
# It tells rewards and lengths once.
LIGHTRFT = _table(
    """
rollout/kl train/kl
reward/<name> rollout/<name>
perf/time_rollout perf/experience_maker/generate_time
perf/time_experience perf/experience_maker/actor_value_rm_time
perf/time_reward perf/experience_maker/wait_time
"""
)
# Of sft, rm and dpo; a row of pairs has other names for the loss.
OF_EXAMPLES = {
    "train/loss": ["train/gpt_loss", "train/loss_mean"],
    "eval/loss": ["eval/eval gpt_loss"],
}
OF_PAIRS = _table(
    """
train/loss train/loss train/loss_mean
train/accuracy train/acc train/acc_mean
train/rejected_reward train/reject_reward
eval/loss eval/eval_loss
eval/accuracy eval/acc_mean
"""
)
NAMES = {"verl": VERL, "openrlhf": OPENRLHF, "lightrft": LIGHTRFT}
# that log a global_step of their own
STEPS = {
    "verl": ("training",),
    "openrlhf": ("rollout", "train", "eval"),
    "lightrft": ("rollout", "train"),
}
OWN_AXES = ("openrlhf", "lightrft")  # of each namespace


def renamed(metrics: Mapping[str, float], names: str) -> dict[str, float]:
    """Return a row for trackers under ``--metric_names``."""
    if names == OURS:
        return dict(metrics)
    names_by_metric = NAMES[names]
    if names in OWN_AXES:
        if "train/pairs" in metrics or "eval/pairs" in metrics:
            names_by_metric = names_by_metric | OF_PAIRS
        elif "train/tokens" in metrics or "eval/tokens" in metrics:
            names_by_metric = names_by_metric | OF_EXAMPLES
    return {
        other_name: number
        for metric, number in metrics.items()
        for other_name in names_of(metric, names_by_metric)
    }


def names_of(metric: str, table: Mapping[str, list[str]]) -> list[str]:
    """Return what a table calls a metric: by its name, else by the first pattern that fits, else as it is called here."""
    if metric in table:
        return table[metric]
    for pattern, names in table.items():
        expression = re.sub(r"<(\w+)>", r"(?P<\1>.+)", pattern)
        if match := re.fullmatch(expression, metric):
            return [
                re.sub(r"<(\w+)>", lambda part: match[part[1]], other_name) for other_name in names
            ]
    return [metric]


def global_steps(row: Mapping[str, float], step: int, trainer: str) -> dict[str, float]:
    """Return the step under the names that ``--metric_names`` has for it, for Weights & Biases."""
    return {
        f"{namespace}/global_step": float(step)
        for namespace in STEPS.get(trainer, ())
        if trainer not in OWN_AXES or any(metric.startswith(f"{namespace}/") for metric in row)
    }


def page_section() -> str:
    """Return the tables for docs/metrics.md."""
    page_parts = [
        "## Names of other trainers\n\n`--metric_names verl`, `openrlhf` or `lightrft` gives trackers these "
        "names in place of ours; a metric that is not in the table keeps its name. Where the other trainer counts a "
        "little differently, the number is ours. `metrics.jsonl` keeps our names, so that `lightppo report`, `watch`, "
        "`diff` and `replay` read every run. Weights & Biases also gets the step as `training/global_step` (verl), or "
        "as `rollout/global_step`, `train/global_step` and `eval/global_step`, which are the x axes (openrlhf; lightrft "
        "without the last).\n"
    ]
    tables = NAMES | {
        "openrlhf and lightrft, of `lightppo sft`": OF_EXAMPLES,
        "openrlhf and lightrft, of `lightppo rm` and `dpo`": OF_PAIRS,
    }
    for title, table in tables.items():
        rows = "".join(
            f"`{metric}` | {', '.join(f'`{other_name}`' for other_name in other_names)}\n"
            for metric, other_names in table.items()
        )
        page_parts.append(f"Ours | {title}\n---|---\n{rows}")
    return "\n".join(page_parts)


_HEAD = """\
# Metrics

<!-- Generated by `make docs` from lightppo/metric_names.py and the names that packages register: edit those, not this. -->

Every PPO step (or every `--logging_steps`-th) writes a row to `SAVE_PATH/metrics.jsonl` and to active trackers, such
as TensorBoard and Weights & Biases. Evaluations and saving write rows of their own. A row has `step`, `time` (Unix
seconds) and the names below, over all ranks. An undefined value is `null`. A metric that a run cannot have (no critic,
no reference) is missing. `PPOTrainer.ppo_train` returns `rollout/` and `train/` metrics without the namespace.
"""


def metrics_page() -> str:
    """Return the page: one table per namespace, and the names of other trainers."""
    page_parts = [_HEAD]
    for namespace, about in METRICS.namespaces.items():
        table_rows = [
            f"`{metric}` | " + meaning.replace("|", "\\|") + "\n"
            for metric, meaning in METRICS.items()
            if metric.startswith(f"{namespace}/")
        ]
        page_parts.append(
            f"## {namespace}/{': ' if about else ''}{about}\n\nName | Meaning\n---|---\n{''.join(table_rows)}"
        )
    return "\n".join([*page_parts, page_section()])


if __name__ == "__main__":
    sys.stdout.write(metrics_page())
