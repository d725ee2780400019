"""The formula that a dump is held against: options of lightppo, with each trainer's defaults (docs/conformance.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from lightppo.algorithms.entries import ADVANTAGE_ESTIMATORS, LOSS_AGG_MODES, POLICY_LOSSES
from lightppo.config.options import all_options
from lightppo.option import Option

_NAMES = (
    "advantage_estimator gamma lambd group_std_norm grpo_std_eps grpo_std_scope adv_norm adv_std_unbiased "
    "reward_clip_range init_kl_coef use_kl_loss kl_estimator kl_clip policy_loss eps_clip eps_clip_low eps_clip_high "
    "dual_clip dppo_ratio_max dppo_drift_coef loss_agg_mode value_clip rollout_correction correction_low "
    "correction_high correction_veto generate_max_len n_samples_per_prompt"
)


# Options of a run of lightppo that change its advantages, or its weights, in ways that no check follows.
_CHANGE_ADVANTAGES = (
    "bootstrap_truncated adv_norm_by adv_norm_scope advantage_clip kl_target value_norm reward_bias reward_scaling "
    "max_reward_clip reward_running_norm stop_properly_penalty mask_no_eos_with_zero use_dense_reward check_xml_format "
    "reward_norm_by teacher_pretrain teacher_url"
)
_CHANGE_WEIGHTS = "rollout_rejection correction_batch_norm correction_agg high_entropy_token_ratio"


def formula_options() -> dict[str, Option]:
    """Return the options of a formula: those of lightppo, where None means the default of the dump's trainer."""
    options = {each.name: each for each in all_options()}
    return {
        name: replace(options[name], type=options[name].type | None, default=None, needs=(), off=())
        for name in _NAMES.split()
    }


_OURS: dict[str, Any] = {
    "advantage_estimator": "gae", "gamma": 1.0, "lambd": 0.95, "group_std_norm": True, "grpo_std_eps": 1e-6,
    "grpo_std_scope": "group", "adv_std_unbiased": False, "reward_clip_range": (-10.0, 10.0), "init_kl_coef": 0.01,
    "value_clip": 0.2, "rollout_correction": "none", "generate_max_len": 1024, "masked_rows": "leave_out",
}  # fmt: skip
_OF_OTHERS = {
    "lambd": 1.0, "reward_clip_range": None, "init_kl_coef": 0.0, "use_kl_loss": False, "masked_rows": "count",
}  # fmt: skip

DEFAULTS: dict[str, dict[str, Any]] = {
    "lightppo": _OURS,
    "verl": _OURS | _OF_OTHERS | {"adv_std_unbiased": True, "dual_clip": 3.0, "value_clip": 0.5},
    "slime": _OURS | _OF_OTHERS | {
        "advantage_estimator": "grpo", "adv_norm": False, "adv_std_unbiased": True, "rollout_correction": "tis",
        "loss_agg_mode": "seq-mean-token-mean",
    },
    "trl": _OURS | _OF_OTHERS | {
        "advantage_estimator": "grpo", "grpo_std_eps": 1e-4, "masked_rows": "leave_out",
    },
    "openrlhf": _OURS | _OF_OTHERS | {
        "grpo_std_eps": 1e-9, "reward_clip_range": (-10.0, 10.0), "init_kl_coef": 0.01, "value_clip": 0.5,
    },
    "prime-rl": _OURS | _OF_OTHERS | {
        "advantage_estimator": "grpo", "policy_loss": "dppo_tv", "eps_clip": 0.2, "dppo_drift_coef": 1e-3,
        "dppo_ratio_max": 1e4,
    },
}  # fmt: skip
"""By form of dump; what is not here is None: what the estimator or the loss says."""


def formula_of(form: str, given: Mapping[str, Any]) -> SimpleNamespace:
    """Return the formula of a dump, with what None stands for.

    Args:
        given: options on the command line, or of the run, by name; None counts as not given, others are ignored.
    """
    names = (*_NAMES.split(), "masked_rows")
    said = {name: given[name] for name in names if given.get(name) is not None}
    values = dict.fromkeys(names) | DEFAULTS[form] | said
    estimator = ADVANTAGE_ESTIMATORS.find(values["advantage_estimator"])
    meant = {
        "adv_norm": estimator.whiten,
        "use_kl_loss": estimator.kl_in_loss,
        "policy_loss": estimator.policy_loss,
    }
    values |= {name: value for name, value in meant.items() if values[name] is None}
    loss = POLICY_LOSSES.find(values["policy_loss"])
    if values["policy_loss"] != "ppo" and "dual_clip" not in said:
        values["dual_clip"] = None
    if values["loss_agg_mode"] is None:
        values["loss_agg_mode"] = estimator.loss_agg_mode or loss.loss_agg_mode
    if values["kl_estimator"] is None:
        values["kl_estimator"] = "k2" if values["use_kl_loss"] and form == "lightppo" else "k1"
    return SimpleNamespace(
        form=form,
        estimator=estimator,
        per_micro_batch=None,
        beyond_advantages=_first_set(_CHANGE_ADVANTAGES.split(), given),
        beyond_weights=_first_set(_CHANGE_WEIGHTS.split(), given),
        **values,
    )


def _first_set(names: Sequence[str], given: Mapping[str, Any]) -> str | None:
    """Return the first option that a run has and that asks for something; None: no option does."""
    options = {each.name: each for each in all_options()}
    return next(
        (n for n in names if n in given and options[n].is_set(options[n].conform(given[n]))), None
    )


def neighbours(formula: SimpleNamespace) -> Iterator[tuple[str, SimpleNamespace]]:
    """Yield formulas that differ in one option, with its flag: what a trainer may have computed instead."""
    changes: list[tuple[str, Any]] = [
        (name, not getattr(formula, name))
        for name in ("group_std_norm", "adv_norm", "adv_std_unbiased", "use_kl_loss")
    ]
    changes += [("grpo_std_eps", eps) for eps in (1e-4, 1e-5, 1e-6, 1e-8, 1e-9)]
    changes += [("grpo_std_scope", scope) for scope in ("group", "batch")]
    changes += [("masked_rows", choice) for choice in ("count", "leave_out")]
    changes += [("kl_estimator", name) for name in ("k1", "k2", "k3")]
    changes += [("dual_clip", None), ("value_clip", None), ("reward_clip_range", None)]
    changes += [("loss_agg_mode", name) for name in LOSS_AGG_MODES]
    for name, value in changes:
        if getattr(formula, name) != value:
            flag = f"--{name} {value}"
            if value is None:
                flag = f"no --{name}"
            elif isinstance(value, bool):
                flag = f"--{name}" if value else f"--no_{name}"
            yield flag, SimpleNamespace(**vars(formula) | {name: value})
    for how in ("mean", "sum"):
        faulty = SimpleNamespace(**vars(formula) | {"per_micro_batch": how})
        yield f"the {how} over micro batches of their own losses", faulty
