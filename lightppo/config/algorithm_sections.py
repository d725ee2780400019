"""The options of the algorithm: advantages and KL, losses, off-policy correction."""

from typing import Literal

from lightppo.algorithms.entries import (
    ADVANTAGE_ESTIMATORS,
    CORRECTIONS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
)
from lightppo.config.fields import option, section


@section
class AlgorithmConfig:
    """Algorithm: advantages, KL, reference."""

    advantage_estimator: Literal[*ADVANTAGE_ESTIMATORS] = option(
        "gae", "gae needs a critic; those that compare the samples of a prompt need --n_samples_per_prompt ≥ 2."
    )
    gamma: float = option(1.0, "Discount per token: gae, reinforce, reinforce++, remax, group_adv_norm.", ge=0, le=1)
    lambd: float = option(0.95, "GAE's λ.", ge=0, le=1)
    bootstrap_truncated: bool = option(False, "gae: responses cut by the limit continue with the critic's last value.")
    group_std_norm: bool = option(
        True, "grpo, grpo_passk, cpgd: divide by the standard deviation of the group; --no_group_std_norm does not."
    )
    grpo_std_eps: float | None = option(None, "Added to the group's standard deviation. None: 1e-6.", ge=0)
    adv_norm: bool | None = option(None, "Whiten advantages. None: as the estimator is defined.")
    adv_norm_scope: Literal["batch", "group"] = option(
        "batch", "Whitening is over the rollout batch of all ranks, or inside each prompt's group of samples."
    )
    adv_shift_mean: bool = option(True, "Whitening of the batch subtracts the mean.")
    adv_std_norm: bool = option(True, "Whitening of the batch divides by the standard deviation.")
    adv_std_unbiased: bool = option(False, "The variance in whitening of the batch is divided by n - 1, not n.")
    adv_norm_eps: float | None = option(
        None, "Added to the variance of the batch (None: 1e-8), or to the group's standard deviation (1e-5).", ge=0
    )
    advantage_clip: float | None = option(None, "Advantages are clipped to ± this.", gt=0)
    init_kl_coef: float = option(0.01, "KL coefficient; 0: no reference model is loaded.", ge=0)
    kl_target: float | None = option(None, "Adapt the coefficient towards this KL. None: it stays.", gt=0)
    kl_horizon: int = option(10_000, "Horizon of the adaptive coefficient.", unit="samples over all ranks", ge=1)
    kl_estimator: Literal[*KL_ESTIMATORS] | None = option(
        None, "KL per token (joschu.net/blog/kl-approx). None: k1 in the reward, k2 in the loss."
    )
    kl_clip: float | None = option(None, "KL estimates are clipped to ± this.", unit="nats", gt=0)
    use_kl_loss: bool = option(False, "KL as a term of the loss instead of in the reward.")
    use_kl_in_reward: bool | None = option(None, "KL in the reward. None: unless --use_kl_loss.")
    ref_ema_eta: float | None = option(
        None, "The reference follows the actor after each step: (1 - η) · reference + η · actor.", gt=0, le=1
    )
    ref_reset_steps: int | None = option(
        None, "The reference becomes a copy of the actor every N steps.", unit="PPO steps", ge=1
    )
    ptx_coef: float = option(0.05, "Weight of the language-model loss on --pretrain_data.", ge=0)
    freezing_actor_steps: int = option(
        -1, "Train only the critic up to and including this step; -1: never.", unit="PPO steps", ge=-1
    )
    enable_ema: bool = option(False, "Keep an exponential moving average of the actor and save it at the end.")
    ema_beta: float = option(0.992, "Decay of the moving average.", ge=0, lt=1)


@section
class LossConfig:
    """Losses: policy, entropy, value; early stop."""

    policy_loss: Literal[*POLICY_LOSSES] | None = option(None, "None: what belongs to the estimator, ppo for most.")
    loss_agg_mode: (
        Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] | None
    ) = option(
        None,
        "How token losses become one number; totals are over the whole optimizer step. None: what belongs to the "
        "estimator or the policy loss, token-mean for most.",
    )
    eps_clip: float | None = option(
        None, "Clip range of the probability ratio. None: as the policy loss is defined, 0.2 for ppo.", gt=0, le=1
    )
    eps_clip_low: float | None = option(None, "Lower clip range. None: --eps_clip.", gt=0, le=1)
    eps_clip_high: float | None = option(None, "Upper clip range (clip-higher). None: --eps_clip.", gt=0)
    dual_clip: float | None = option(
        None, "ppo: where A < 0, the loss is at most -this·A. None: off; 3 is usual.", gt=1
    )
    clip_cov_ratio: float | None = option(None, "clip_cov: share of tokens without gradient. None: 2e-4.", gt=0, le=1)
    clip_cov_low: float | None = option(None, "clip_cov: only tokens of a covariance above this. None: 1.")
    clip_cov_high: float | None = option(None, "clip_cov: only tokens of a covariance below this. None: 5.")
    kl_cov_ratio: float | None = option(
        None, "kl_cov: share of tokens, highest covariance first, with a KL penalty. None: 2e-3.", gt=0, le=1
    )
    kl_cov_coef: float | None = option(None, "kl_cov: weight of that penalty. None: 1.", ge=0)
    sapo_tau_pos: float | None = option(None, "sapo: temperature where A > 0. None: 1.", gt=0)
    sapo_tau_neg: float | None = option(None, "sapo: temperature elsewhere. None: 1.05.", gt=0)
    cpgd_drift_coef: float | None = option(None, "cpgd: weight of the policy drift. None: 0.01.", ge=0)
    entropy_coef: float = option(0.0, "Weight of an entropy bonus in the actor's loss.", ge=0)
    high_entropy_token_ratio: float | None = option(
        None, "Only this share of all tokens, highest entropy first, has a policy loss. None: all.", gt=0, le=1
    )
    aux_loss_coef: float = option(0.0, "Weight of a mixture-of-experts model's load-balancing loss.", ge=0)
    early_stop_imp_ratio: float | None = option(
        5.0, "An optimizer step of the actor is skipped if its mean probability ratio is above this. None: off.", gt=1
    )
    early_stop_kl: float | None = option(
        None, "The same for the mean KL from old to new policy.", unit="nats per token", gt=0
    )
    old_log_probs: Literal["auto", "forward", "rollout"] = option(
        "auto",
        "Log probs before the update: of a forward pass, or recorded in the rollout. auto: no pass where it would give "
        "the same, as with one optimizer step per rollout or float32 rollouts by the actor itself.",
    )
    value_clip: float | None = option(0.2, "Clip range of values around the old ones; None: off.", gt=0)
    value_huber_delta: float | None = option(
        None, "Huber instead of squared value error: linear from this error on; None: squared.", gt=0
    )
    value_norm: Literal["exp", "ma"] | None = option(
        None, "The critic learns normalised returns: by an exponential or a plain moving average. None: raw returns."
    )
    value_norm_beta: float | None = option(None, "Decay of exp, per rollout batch. None: 0.99995.", gt=0, lt=1)
    value_norm_eps: float | None = option(None, "Smallest variance of --value_norm. None: 1e-5.", gt=0)


@section
class CorrectionConfig:
    """Correction: rollout engine against trainer."""

    rollout_correction: Literal[*CORRECTIONS] = option(
        "none", "Weighs tokens by π_old / π_rollout, where the engine's probabilities differ from the trainer's."
    )
    correction_low: float | None = option(None, "Lower bound of the weight. None: as the correction is defined.", gt=0)
    correction_high: float | None = option(None, "Upper bound of the weight. None: as the correction is defined.", gt=0)
    correction_veto: float | None = option(
        None, "A response with a token weight below this is not trained on; 1e-4 is usual. None: off.", gt=0, lt=1
    )
    correction_batch_norm: bool = option(False, "Divide weights by their mean over the rollout batch of all ranks.")
