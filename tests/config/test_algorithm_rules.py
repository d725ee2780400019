"""Options of the algorithm that contradict each other, that do nothing, and what the unnamed ones come to."""

from __future__ import annotations

import pytest

from lightppo.algorithms.entries import ADVANTAGE_ESTIMATORS, CORRECTIONS, POLICY_LOSSES
from lightppo.config import PPOConfig
from lightppo.config.old_log_probs import takes_old_from_training
from lightppo.errors import ConfigError

GROUP = {"advantage_estimator": "grpo", "n_samples_per_prompt": 4}
DAPO = {"overlong_buffer_len": 128}


def config(**options) -> PPOConfig:
    paths = {"pretrain": "model", "prompt_data": "prompts.jsonl", "reward_fn": "reward.py"}
    return PPOConfig.from_flat(paths | options)


def problems(options: dict) -> list[str]:
    try:
        config(**options).validate()
    except ConfigError as error:
        return str(error).split("\n")
    return []


CONTRADICTIONS = [
    # estimators
    ({"advantage_estimator": "grpo"}, "--advantage_estimator grpo compares samples of one prompt: set --n_samples"),
    ({**GROUP, "temperature": 0}, "greedy rollouts give the same answer n times"),
    ({"advantage_estimator": "remax", "do_sample": False}, "compares with the greedy answer, and the rollouts are"),
    ({"advantage_estimator": "remax", "lambd": 0.9}, "--lambd has no effect on --advantage_estimator remax"),
    ({**GROUP, "gamma": 0.9}, "--gamma has no effect on --advantage_estimator grpo"),
    ({**GROUP, "freezing_actor_steps": 2}, "--freezing_actor_steps needs a critic"),
    ({**GROUP, "bootstrap_truncated": True}, "--bootstrap_truncated needs a critic"),
    ({**GROUP, "advantage_estimator": "rloo", "grpo_std_eps": 1e-4}, "--grpo_std_eps has no effect on --advantage_est"),
    ({**GROUP, "group_std_norm": False, "grpo_std_eps": 1e-4}, "--grpo_std_eps has no effect"),
    ({"group_std_norm": False}, "--no_group_std_norm: --advantage_estimator gae does not divide"),
    # whitening
    (
        {**GROUP, "adv_std_norm": False},
        "--no_adv_std_norm acts on whitening, which --advantage_estimator grpo does not",
    ),
    ({**GROUP, "adv_std_unbiased": True}, "--adv_std_unbiased acts on whitening"),
    ({**GROUP, "adv_norm_scope": "group"}, "--adv_norm_scope acts on whitening"),
    ({**GROUP, "adv_norm_eps": 1e-3}, "--adv_norm_eps acts on whitening"),
    ({"adv_norm_scope": "group"}, "--adv_norm_scope group compares samples of one prompt: set --n_samples_per_prompt"),
    (
        {"adv_norm_scope": "group", "n_samples_per_prompt": 2, "adv_shift_mean": False},
        "not with --adv_norm_scope group",
    ),
    ({"adv_shift_mean": False, "adv_std_norm": False}, "leaves nothing of whitening: set --no_adv_norm"),
    ({"adv_std_unbiased": True, "adv_std_norm": False}, "--adv_std_unbiased has no effect with --no_adv_std_norm"),
    # KL
    ({"use_kl_loss": True, "use_kl_in_reward": True}, "would count the KL twice: set one of them"),
    ({"use_kl_in_reward": False}, "leaves --init_kl_coef without effect: set --init_kl_coef 0"),
    ({"init_kl_coef": 0, "use_kl_loss": True}, "--use_kl_loss has no effect with --init_kl_coef 0"),
    ({"init_kl_coef": 0, "kl_target": 0.1}, "--kl_target has no effect with --init_kl_coef 0"),
    ({"init_kl_coef": 0, "kl_clip": 10}, "--kl_clip has no effect with --init_kl_coef 0"),
    ({"init_kl_coef": 0, "ref_ema_eta": 0.1}, "--ref_ema_eta has no effect with --init_kl_coef 0"),
    ({"init_kl_coef": 0, "ref_reset_steps": 5}, "--ref_reset_steps has no effect with --init_kl_coef 0"),
    ({"ref_reset_steps": 5, "ref_ema_eta": 0.1}, "both move the reference: set one of them"),
    ({"kl_target": 0.1, "kl_horizon": 102}, "--kl_horizon 102 is too short for 512 samples"),
    # policy losses
    (
        {"clip_cov_ratio": 0.1},
        "--clip_cov_ratio belongs to --policy_loss clip_cov, and this run's is ppo: leave it out",
    ),
    ({"policy_loss": "gspo", "dual_clip": 3}, "--dual_clip belongs to --policy_loss ppo, and this run's is gspo"),
    ({"policy_loss": "kl_cov", "eps_clip": 0.1}, "--eps_clip has no effect: --policy_loss kl_cov clips nothing"),
    ({**GROUP, "advantage_estimator": "gpg", "eps_clip_high": 0.1}, "--eps_clip_high has no effect: --policy_loss gpg"),
    ({"eps_clip": 0.1, "eps_clip_low": 0.2, "eps_clip_high": 0.3}, "--eps_clip has no effect beside --eps_clip_low"),
    ({"policy_loss": "clip_cov", "clip_cov_low": 6}, "--clip_cov_low 6 must be below --clip_cov_high 5"),
    # values
    ({**GROUP, "value_huber_delta": 1}, "--value_huber_delta needs a critic"),
    ({**GROUP, "value_norm": "exp"}, "--value_norm needs a critic"),
    ({"value_norm": "ma", "value_norm_beta": 0.9}, "--value_norm_beta needs --value_norm exp"),
    ({"value_norm_eps": 0.9}, "--value_norm_eps needs --value_norm exp or ma"),
    # correction
    ({"correction_low": 0.5}, "--correction_low needs a --rollout_correction: set one, e.g. tis"),
    ({"correction_high": 0.5}, "--correction_high needs a --rollout_correction"),
    ({"correction_veto": 1e-4}, "--correction_veto needs a --rollout_correction"),
    ({"correction_batch_norm": True}, "--correction_batch_norm needs a --rollout_correction"),
    (
        {"rollout_correction": "tis", "correction_low": 0.5},
        "--correction_low: --rollout_correction tis has no such bound",
    ),
    ({"rollout_correction": "icepop", "correction_low": 9}, "--correction_low 9 must be below --correction_high 5"),
    # shaping
    ({"reward_clip_range": [1, 1]}, "--reward_clip_range 1.0 1.0: the first must be below the second"),
    ({"stop_properly_penalty": 1.5}, "--stop_properly_penalty 1.5 would reward truncated responses"),
    ({"overlong_penalty_factor": 1}, "--overlong_penalty_factor needs --overlong_buffer_len"),
    ({**DAPO, "generate_max_len": 64}, "--overlong_buffer_len 128 exceeds --generate_max_len 64: make it smaller"),
    (
        {"mask_too_long": True, "mask_no_eos_with_zero": True},
        "--mask_too_long and --mask_no_eos_with_zero each say what becomes of a response cut by the limit",
    ),
    ({"reward_delta": True}, "--reward_delta needs --use_dense_reward"),
    ({"use_dense_reward": True, "reward_running_norm": True}, "--reward_running_norm acts on the one score of a resp"),
    ({"use_dense_reward": True, "advantage_estimator": "remax"}, "--advantage_estimator remax acts on the one score"),
    ({"use_dense_reward": True, "stop_properly_penalty": 0.5}, "not on --use_dense_reward's token scores"),
]


@pytest.mark.parametrize(("options", "fragment"), CONTRADICTIONS)
def test_contradictions(options, fragment):
    (message,) = problems(options)
    assert fragment in message


@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        ({"advantage_estimator": "gea"}, "--advantage_estimator must be one of gae, reinforce, reinforce++"),
        ({"policy_loss": "pppo"}, "--policy_loss must be one of ppo, gspo, cispo"),
        ({"kl_estimator": "k4"}, "--kl_estimator must be one of k1, abs, k2, k3, full, k1+, k3+"),
        ({"rollout_correction": "is"}, "--rollout_correction must be one of none, tis"),
        ({"eps_clip_low": 1.01}, "--eps_clip_low 1.01 is out of range: it must be >0 ≤1"),
        ({"dual_clip": 1}, "--dual_clip 1.0 is out of range: it must be >1"),
        ({"high_entropy_token_ratio": 1.2}, "--high_entropy_token_ratio 1.2 is out of range"),
        ({"ref_ema_eta": 0}, "--ref_ema_eta 0.0 is out of range"),
        ({"early_stop_imp_ratio": 1}, "--early_stop_imp_ratio 1.0 is out of range"),
    ],
)
def test_unknown_names_and_numbers_out_of_range(options, fragment):
    with pytest.raises(ConfigError) as error:
        config(**options)
    assert fragment in str(error.value)


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
def test_every_estimator_is_accepted_with_what_it_needs(name):
    resolved = config(
        advantage_estimator=name, n_samples_per_prompt=ADVANTAGE_ESTIMATORS[name].min_group_size
    ).resolved()
    resolved.validate()
    assert resolved.loss.policy_loss == ADVANTAGE_ESTIMATORS[name].policy_loss
    assert resolved.algorithm.adv_norm == ADVANTAGE_ESTIMATORS[name].whiten


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_policy_loss_brings_its_own_numbers(name):
    traits = POLICY_LOSSES[name]
    loss = config(policy_loss=name).resolved().loss
    assert (loss.eps_clip_low, loss.eps_clip_high) == (traits.eps_clip or (None, None))
    assert loss.loss_agg_mode == traits.loss_agg_mode
    others = {option for other in POLICY_LOSSES.values() for option in other.defaults} - traits.defaults.keys()
    assert {option: getattr(loss, option) for option in traits.defaults} == traits.defaults
    assert all(getattr(loss, option) is None for option in others)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_every_correction_brings_its_own_bounds(name):
    correction = config(rollout_correction=name).resolved().correction
    traits = CORRECTIONS[name]
    assert (correction.correction_low, correction.correction_high) == (traits.low, traits.high)


RESOLUTIONS = [
    ({}, {"policy_loss": "ppo", "loss_agg_mode": "token-mean", "kl_estimator": "k1", "grpo_std_eps": None}),
    ({"use_kl_loss": True}, {"kl_estimator": "k2", "use_kl_in_reward": False}),
    ({"use_kl_loss": True, "kl_estimator": "k3"}, {"kl_estimator": "k3"}),
    (GROUP, {"grpo_std_eps": 1e-6, "adv_norm_eps": None}),
    ({**GROUP, "advantage_estimator": "dr_grpo"}, {"loss_agg_mode": "seq-mean-token-sum-norm"}),
    ({**GROUP, "advantage_estimator": "dr_grpo", "loss_agg_mode": "token-mean"}, {"loss_agg_mode": "token-mean"}),
    ({**GROUP, "advantage_estimator": "gpg"}, {"policy_loss": "gpg", "eps_clip_low": None}),
    ({**GROUP, "advantage_estimator": "gpg", "policy_loss": "ppo"}, {"policy_loss": "ppo", "eps_clip_low": 0.2}),
    ({**GROUP, "policy_loss": "gspo"}, {"loss_agg_mode": "seq-mean-token-mean", "eps_clip_high": 4e-4}),
    ({"policy_loss": "gspo", "eps_clip": 0.1}, {"eps_clip_low": 0.1, "eps_clip_high": 0.1}),
    ({}, {"adv_norm_eps": 1e-8}),
    ({"adv_norm_scope": "group", "n_samples_per_prompt": 2}, {"adv_norm_eps": 1e-5}),
    ({"value_norm": "exp"}, {"value_norm_beta": 0.99995, "value_norm_eps": 1e-5}),
    ({"value_norm": "ma"}, {"value_norm_beta": None, "value_norm_eps": 1e-5}),
    ({"rollout_correction": "icepop", "correction_high": 3}, {"correction_low": 0.5, "correction_high": 3}),
    (DAPO, {"overlong_penalty_factor": 1.0}),
]


@pytest.mark.parametrize(("options", "expected"), RESOLUTIONS)
def test_resolutions(options, expected):
    resolved = config(**options).resolved()
    flat = resolved.flat()
    assert {name: flat[name] for name in expected} == expected
    resolved.validate()
    assert resolved.resolved() == resolved


SHORTCUT = {"train_batch_size": 512, "init_kl_coef": 0}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (SHORTCUT, True),
        ({"train_batch_size": 512, "use_kl_loss": True}, True),
        ({"train_batch_size": 512}, False),  # the token rewards need the KL before
        ({**SHORTCUT, "train_batch_size": 256}, False),
        ({**SHORTCUT, "max_epochs": 2}, False),
        ({**SHORTCUT, "rollout_correction": "tis"}, False),
        ({**SHORTCUT, "high_entropy_token_ratio": 0.2}, False),
        ({**SHORTCUT, "policy_loss": "kl_cov"}, False),
        ({**SHORTCUT, "freezing_actor_steps": 3}, False),
        ({**SHORTCUT, "old_log_probs": "forward"}, False),
    ],
)
def test_when_the_training_pass_gives_the_old_log_probs(options, expected):
    assert takes_old_from_training(config(**options).resolved()) is expected
