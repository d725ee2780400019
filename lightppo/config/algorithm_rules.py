"""The relations between options of the algorithm: what ``None`` stands for, and what cannot work or does nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightppo.algorithms.entries import ADVANTAGE_ESTIMATORS, CORRECTIONS, POLICY_LOSSES, EstimatorEntry

if TYPE_CHECKING:
    from lightppo.config.ppo import PPOConfig

_EPS_FLAGS = ("eps_clip", "eps_clip_low", "eps_clip_high")


def estimator_traits(config: PPOConfig) -> EstimatorEntry:
    """What the advantage estimator of this run asks for."""
    return ADVANTAGE_ESTIMATORS[config.algorithm.advantage_estimator]


def needs_critic(config: PPOConfig) -> bool:
    """Whether this run trains a critic."""
    return estimator_traits(config).needs_critic


def whitens(config: PPOConfig) -> bool:
    """Whether this run whitens advantages."""
    return _or(config.algorithm.adv_norm, estimator_traits(config).whiten)


def moves_reference(config: PPOConfig) -> bool:
    """Whether the reference changes during the run, and so belongs to its checkpoints."""
    return config.algorithm.ref_ema_eta is not None or config.algorithm.ref_reset_steps is not None


def resolutions(config: PPOConfig) -> dict[str, Any]:
    """What the "None means …" options of the algorithm stand for. Those that do not act stay None."""
    a, o, c, r = config.algorithm, config.loss, config.correction, config.reward
    traits = estimator_traits(config)
    name = _or(o.policy_loss, traits.policy_loss)
    loss = POLICY_LOSSES[name]
    resolved = {
        "adv_norm": whitens(config),
        "use_kl_in_reward": _or(a.use_kl_in_reward, not a.use_kl_loss),
        "kl_estimator": _or(a.kl_estimator, "k2" if a.use_kl_loss else "k1"),
        "policy_loss": name,
        "loss_agg_mode": _or(o.loss_agg_mode, _or(traits.loss_agg_mode, loss.loss_agg_mode)),
        **{option: _or(getattr(o, option), default) for option, default in loss.defaults.items()},
    }
    if traits.divides_by_std and a.group_std_norm:
        resolved["grpo_std_eps"] = _or(a.grpo_std_eps, 1e-6)
    if whitens(config):
        resolved["adv_norm_eps"] = _or(a.adv_norm_eps, 1e-5 if a.adv_norm_scope == "group" else 1e-8)
    if loss.eps_clip is not None:
        low, high = (a_side if o.eps_clip is None else o.eps_clip for a_side in loss.eps_clip)
        resolved |= {"eps_clip_low": _or(o.eps_clip_low, low), "eps_clip_high": _or(o.eps_clip_high, high)}
    if o.value_norm is not None:
        resolved["value_norm_eps"] = _or(o.value_norm_eps, 1e-5)
        if o.value_norm == "exp":
            resolved["value_norm_beta"] = _or(o.value_norm_beta, 0.99995)
    correction = CORRECTIONS[c.rollout_correction]
    resolved |= {
        "correction_low": _or(c.correction_low, correction.low),
        "correction_high": _or(c.correction_high, correction.high),
    }
    if r.overlong_buffer_len is not None:
        resolved["overlong_penalty_factor"] = _or(r.overlong_penalty_factor, 1.0)
    return resolved


def problems(config: PPOConfig) -> list[str]:
    """One message per combination of options of the algorithm that cannot work, or of which one does nothing."""
    return [
        *_estimator(config),
        *_whitening(config),
        *_kl(config),
        *_policy_loss(config),
        *_value_loss(config),
        *_correction(config),
        *_shaping(config),
    ]


def advice(config: PPOConfig) -> list[str]:
    """What works but is seldom meant; of a resolved config."""
    a = config.algorithm
    found = []
    if a.use_kl_loss and a.kl_estimator in ("k1", "abs"):
        what = (
            "has an expected gradient of 0" if a.kl_estimator == "k1" else "pulls by the sign of the difference alone"
        )
        found.append(f"--kl_estimator {a.kl_estimator} as a loss {what}: k2 has the gradient of the KL")
    if a.init_kl_coef > 0 and a.use_kl_in_reward and a.kl_estimator in ("k2", "k3", "k3+"):
        found.append(
            f"--kl_estimator {a.kl_estimator} in the reward hardly pulls near the reference: "
            "k1 has the gradient of the KL"
        )
    return found


def no_critic(flag: str, estimator: str) -> str:
    """The message about an option of the critic in a run that has none."""
    return (
        f"--{flag} needs a critic, which --advantage_estimator {estimator} does not have: "
        "leave it out or use --advantage_estimator gae"
    )


def _estimator(config: PPOConfig) -> list[str]:
    a, r = config.algorithm, config.rollout
    traits, name, n = estimator_traits(config), a.advantage_estimator, r.n_samples_per_prompt
    greedy = r.temperature == 0 or not r.do_sample
    found = []
    if n < traits.min_group_size:
        found.append(
            f"--advantage_estimator {name} compares samples of one prompt: "
            f"set --n_samples_per_prompt to at least {traits.min_group_size}, not {n}"
        )
    if n > 1 and greedy:
        found.append("greedy rollouts give the same answer n times: set --n_samples_per_prompt 1 or a temperature")
    elif traits.needs_greedy_baseline and greedy:
        found.append(
            f"--advantage_estimator {name} compares with the greedy answer, and the rollouts are greedy themselves: "
            "set a --temperature above 0"
        )
    if not traits.needs_critic:
        of_critic = {"bootstrap_truncated": a.bootstrap_truncated, "freezing_actor_steps": a.freezing_actor_steps > 0}
        found += [no_critic(flag, name) for flag, is_set in of_critic.items() if is_set]
    unused = {"lambd": a.lambd != 0.95 and not traits.needs_critic, "gamma": a.gamma != 1.0 and not traits.discounted}
    unused["grpo_std_eps"] = a.grpo_std_eps is not None and not (traits.divides_by_std and a.group_std_norm)
    found += [
        f"--{flag} has no effect on --advantage_estimator {name}: leave it out" for flag in unused if unused[flag]
    ]
    if not a.group_std_norm and not traits.divides_by_std:
        found.append(
            f"--no_group_std_norm: --advantage_estimator {name} does not divide by the standard deviation of a group "
            "anyway; leave it out"
        )
    return found


def _whitening(config: PPOConfig) -> list[str]:
    a = config.algorithm
    by_group = a.adv_norm_scope == "group"
    batch_only = {
        "--no_adv_shift_mean": not a.adv_shift_mean,
        "--no_adv_std_norm": not a.adv_std_norm,
        "--adv_std_unbiased": a.adv_std_unbiased,
    }
    is_set = [flag for flag, on in batch_only.items() if on]
    if by_group:
        found = [
            f"{flag} acts on whitening of the batch, not with --adv_norm_scope group: leave one out" for flag in is_set
        ]
        if config.rollout.n_samples_per_prompt < 2:
            found.append(
                "--adv_norm_scope group compares samples of one prompt: set --n_samples_per_prompt to at least 2"
            )
    else:
        found = []
        if not a.adv_shift_mean and not a.adv_std_norm:
            found.append("--no_adv_shift_mean with --no_adv_std_norm leaves nothing of whitening: set --no_adv_norm")
        if a.adv_std_unbiased and not a.adv_std_norm:
            found.append("--adv_std_unbiased has no effect with --no_adv_std_norm: leave one out")
    if not whitens(config):
        is_set += ["--adv_norm_scope"] if by_group else []
        is_set += ["--adv_norm_eps"] if a.adv_norm_eps is not None else []
        return [
            f"{flag} acts on whitening, which --advantage_estimator {a.advantage_estimator} does not do "
            "here: leave it out or set --adv_norm"
            for flag in is_set
        ]
    return found


def _kl(config: PPOConfig) -> list[str]:
    a = config.algorithm
    found = []
    if a.use_kl_loss and a.use_kl_in_reward:
        found.append("--use_kl_loss and --use_kl_in_reward would count the KL twice: set one of them")
    if a.init_kl_coef > 0 and not a.use_kl_loss and a.use_kl_in_reward is False:
        found.append(
            "--no_use_kl_in_reward without --use_kl_loss leaves --init_kl_coef without effect: set --init_kl_coef 0"
        )
    if a.init_kl_coef == 0:
        of_kl = {
            "use_kl_loss": a.use_kl_loss,
            "kl_target": a.kl_target is not None,
            "kl_clip": a.kl_clip is not None,
            "ref_ema_eta": a.ref_ema_eta is not None,
            "ref_reset_steps": a.ref_reset_steps is not None,
        }
        found += [
            f"--{flag} has no effect with --init_kl_coef 0: set a coefficient above 0"
            for flag, is_set in of_kl.items()
            if is_set
        ]
    if a.ref_ema_eta is not None and a.ref_reset_steps is not None:
        found.append("--ref_ema_eta and --ref_reset_steps both move the reference: set one of them")
    samples = config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt
    if a.kl_target is not None and 0.2 * samples >= a.kl_horizon:
        found.append(
            f"--kl_horizon {a.kl_horizon} is too short for {samples} samples per rollout: the coefficient could change "
            f"sign; set it above {0.2 * samples:g}"
        )
    return found


def _policy_loss(config: PPOConfig) -> list[str]:
    o = config.loss
    name = _or(o.policy_loss, estimator_traits(config).policy_loss)
    loss = POLICY_LOSSES[name]
    owners = {option: owner for owner, traits in POLICY_LOSSES.items() for option in traits.defaults}
    reentrant = config.model.gradient_checkpointing_use_reentrant
    found = ["--aux_loss_coef has no gradient with --gradient_checkpointing_use_reentrant: leave one out"]
    found = found if o.aux_loss_coef > 0 and reentrant else []
    found += [
        f"--{option} belongs to --policy_loss {owner}, and this run's is {name}: leave it out"
        for option, owner in owners.items()
        if getattr(o, option) is not None and option not in loss.defaults
    ]
    if loss.eps_clip is None:
        found += [
            f"--{flag} has no effect: --policy_loss {name} clips nothing"
            for flag in _EPS_FLAGS
            if getattr(o, flag) is not None
        ]
    elif None not in (o.eps_clip_low, o.eps_clip_high) and o.eps_clip not in (None, o.eps_clip_low, o.eps_clip_high):
        found.append("--eps_clip has no effect beside --eps_clip_low and --eps_clip_high: leave it out")
    low, high = (_or(getattr(o, f"clip_cov_{side}"), loss.defaults.get(f"clip_cov_{side}")) for side in ("low", "high"))
    if low is not None and high is not None and low >= high:
        found.append(f"--clip_cov_low {low:g} must be below --clip_cov_high {high:g}")
    return found


def _value_loss(config: PPOConfig) -> list[str]:
    o, estimator = config.loss, config.algorithm.advantage_estimator
    found = []
    if not needs_critic(config):
        of_critic = {"value_huber_delta": o.value_huber_delta, "value_norm": o.value_norm}
        found += [no_critic(flag, estimator) for flag, value in of_critic.items() if value is not None]
    if o.value_norm_beta is not None and o.value_norm != "exp":
        found.append("--value_norm_beta needs --value_norm exp")
    if o.value_norm_eps is not None and o.value_norm is None:
        found.append("--value_norm_eps needs --value_norm exp or ma")
    return found


def _correction(config: PPOConfig) -> list[str]:
    c = config.correction
    traits = CORRECTIONS[c.rollout_correction]
    if c.rollout_correction == "none":
        is_set = {
            "correction_low": c.correction_low is not None,
            "correction_high": c.correction_high is not None,
            "correction_veto": c.correction_veto is not None,
            "correction_batch_norm": c.correction_batch_norm,
        }
        return [f"--{flag} needs a --rollout_correction: set one, e.g. tis" for flag, on in is_set.items() if on]
    found = []
    for side in ("low", "high"):
        if getattr(c, f"correction_{side}") is not None and getattr(traits, side) is None:
            found.append(
                f"--correction_{side}: --rollout_correction {c.rollout_correction} has no such bound; leave it out"
            )
    low, high = _or(c.correction_low, traits.low), _or(c.correction_high, traits.high)
    if low is not None and high is not None and low >= high:
        found.append(f"--correction_low {low:g} must be below --correction_high {high:g}")
    return found


def _shaping(config: PPOConfig) -> list[str]:
    r, limit = config.reward, config.rollout.generate_max_len
    found = []
    clip = r.reward_clip_range
    if clip and clip[0] >= clip[1]:
        found.append(f"--reward_clip_range {clip[0]} {clip[1]}: the first must be below the second")
    if r.stop_properly_penalty is not None and r.stop_properly_penalty > 1:
        found.append(
            f"--stop_properly_penalty {r.stop_properly_penalty:g} would reward truncated responses: set at most 1"
        )
    if r.overlong_buffer_len is None and r.overlong_penalty_factor is not None:
        found.append("--overlong_penalty_factor needs --overlong_buffer_len")
    if r.overlong_buffer_len is not None and r.overlong_buffer_len > limit:
        found.append(
            f"--overlong_buffer_len {r.overlong_buffer_len} exceeds --generate_max_len {limit}: make it smaller"
        )
    truncated = {
        "mask_too_long": r.mask_too_long,
        "mask_no_eos_with_zero": r.mask_no_eos_with_zero,
        "stop_properly_penalty": r.stop_properly_penalty is not None,
    }
    if sum(truncated.values()) > 1:
        names = " and ".join(f"--{flag}" for flag, on in truncated.items() if on)
        found.append(f"{names} each say what becomes of a response cut by the limit: set one of them")
    if r.reward_delta and not r.use_dense_reward:
        found.append("--reward_delta needs --use_dense_reward")
    if r.use_dense_reward:
        of_scalar = {
            "advantage_estimator remax": estimator_traits(config).needs_greedy_baseline,
            "reward_running_norm": r.reward_running_norm,
            "mask_no_eos_with_zero": r.mask_no_eos_with_zero,
            "stop_properly_penalty": r.stop_properly_penalty is not None,
        }
        found += [
            f"--{flag} acts on the one score of a response, not on --use_dense_reward's token scores: leave one out"
            for flag, on in of_scalar.items()
            if on
        ]
    return found


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
