"""What is measured, by its names in the logs. Free of torch."""

from __future__ import annotations

ROLLOUT = {
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
    "logp_diff_on_policy": "rollout/logp_diff_mean without stale groups; only if there are any",
}

# The parts of experience and training, whose time is also given per token of prompt and response. A plugin may add to
# it.
TIMED = {
    "old_log_probs": "log probs of the actor before the update",
    "reference": "log probs of the reference",
    "values": "values of the critic",
    "advantages": "rewards of tokens, advantages, whitening",
    "actor_update": "forward and backward passes and optimizer steps of the actor",
    "critic_update": "the same for the critic",
}

PERF = {
    "time_rollout": "seconds of generation",
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
}


def times_of_parts() -> dict[str, str]:
    """The metrics of ``TIMED``."""
    seconds = {
        f"time_{part}": f"seconds of this part: {meaning}" for part, meaning in TIMED.items()
    }
    return seconds | {
        f"{part}_ms_per_token": f"milliseconds of `perf/time_{part}` per prompt and response token"
        for part in TIMED
    }
