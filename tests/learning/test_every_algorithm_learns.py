"""Every algorithm learns: short runs on two-digit addition, in each of which the reward must rise.

Each run is the real trainer in this process, from the same warm start, with the options of one case: 16 PPO steps of 64
prompts with 4 samples each, 4 optimizer steps per rollout. A case for every estimator and every policy loss comes from
the tables by itself; a new one fails until its rise is measured and written into ``MEASURED``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.addition import rise, score_in_parts, train

from lightppo.algorithms.entries import ADVANTAGE_ESTIMATORS, POLICY_LOSSES

GAE: dict[str, Any] = {"advantage_estimator": "gae", "critic_learning_rate": 2e-3}
GRPO: dict[str, Any] = {"advantage_estimator": "grpo"}
# its folder is known in the test
TEACHER = {"teacher_pretrain": "a better model", "distill_coef": 0.3}
ALONE = {"teacher_pretrain": "a better model", "advantage_estimator": "on_policy_distill"}
KL_LOSS = GRPO | {"use_kl_loss": True, "init_kl_coef": 0.05}
# Two names of one estimator are one case, under the first.
ESTIMATORS = list(
    {entry.fn: name for name, entry in reversed(ADVANTAGE_ESTIMATORS.items())}.values()
)[::-1]

CASES: dict[str, dict[str, Any]] = {
    **{name: {"advantage_estimator": name} for name in ESTIMATORS},
    "gae": GAE,
    "gdpo": {
        "advantage_estimator": "gdpo",
        "reward_fn": score_in_parts,
        "gdpo_rewards": ("right", "digits=0.5"),
    },
    "on_policy_distill": ALONE,
    "distill_by-loss": ALONE | {"distill_by": "loss"},
    "distill_beta-0.5": ALONE | {"distill_by": "loss", "distill_beta": 0.5},
    "distill_beta-0": ALONE | {"distill_by": "loss", "distill_beta": 0.0},
    "distill_topk-3": ALONE | {"distill_by": "loss", "distill_topk": 3},
    "distill_topk-drop": ALONE
    | {"distill_by": "loss", "distill_topk": 3, "distill_beta": 0.0, "distill_tail": "drop"},
    "grpo-and-teacher": GRPO | TEACHER,
    # ppo: grpo's own
    **{f"loss-{name}": GRPO | {"policy_loss": name} for name in POLICY_LOSSES if name != "ppo"},
    "gspo-dual_clip": GRPO | {"policy_loss": "gspo", "dual_clip": 3.0},
    "kl_in_reward": GAE | {"init_kl_coef": 0.01},
    "kl_loss-k2": KL_LOSS,
    "kl_loss-k3": KL_LOSS | {"kl_estimator": "k3"},
    "kl_loss-k3_ratio": KL_LOSS | {"kl_estimator": "k3_ratio"},
    "kl_loss-full": KL_LOSS | {"kl_estimator": "full"},
    "ref_ema": KL_LOSS | {"ref_ema_eta": 0.1},
    "value_norm-exp": GAE | {"value_norm": "exp"},
    "value_norm-ma": GAE | {"value_norm": "ma"},
    "reward_running_norm": GAE | {"reward_running_norm": True},
    "adv_norm_scope-group": GAE | {"adv_norm_scope": "group"},
    "reward_norm_by": {
        "advantage_estimator": "reinforce",
        "adv_norm": False,
        "reward_norm_by": ("mean=group", "std=batch", "leave_one_out"),
    },
    "adv_norm_by": {
        "advantage_estimator": "reinforce",
        "adv_norm_by": ("mean=batch", "std=group", "unbiased"),
    },
    "lora": GRPO | {"lora_rank": 8, "init_kl_coef": 0.01, "actor_learning_rate": 5e-3},
}

# Mean rise over the seeds 1, 2 and 42. Single seeds were at most 0.04 away from it, runs with a learning rate of 0 at
# most 0.03 from 0. Half of it is asked for.
MEASURED = {
    "gae": 0.30,
    "reinforce": 0.30,
    "reinforce++_baseline": 0.28,
    "rloo": 0.29,
    "grpo": 0.29,
    "dr_grpo": 0.28,
    "remax": 0.23,
    "opo": 0.29,
    "gpg": 0.22,
    "grpo_passk": 0.21,
    "cpgd": 0.28,
    "group_adv_norm": 0.27,
    "optimal_token_baseline": 0.30,
    "gdpo": 0.26,
    "on_policy_distill": 0.25,
    "distill_by-loss": 0.28,
    "distill_beta-0.5": 0.26,
    "distill_beta-0": 0.21,
    "distill_topk-3": 0.29,
    "distill_topk-drop": 0.19,
    "grpo-and-teacher": 0.26,
    "loss-gspo": 0.22,
    "gspo-dual_clip": 0.21,
    "loss-cispo": 0.27,
    "loss-gmpo": 0.28,
    "loss-sapo": 0.28,
    "loss-clip_cov": 0.28,
    "loss-kl_cov": 0.27,
    "loss-gpg": 0.26,
    "loss-cpgd": 0.28,
    "loss-dppo_tv": 0.26,
    "loss-dppo_kl": 0.26,
    "kl_in_reward": 0.30,
    "kl_loss-k2": 0.27,
    "kl_loss-k3": 0.28,
    "kl_loss-k3_ratio": 0.25,
    "kl_loss-full": 0.27,
    "ref_ema": 0.28,
    "value_norm-exp": 0.30,
    "value_norm-ma": 0.30,
    "reward_running_norm": 0.29,
    "adv_norm_scope-group": 0.27,
    "reward_norm_by": 0.26,
    "adv_norm_by": 0.28,
    "lora": 0.12,
    "tis": 0.27,
}

ALWAYS = "gae"  # in `make test`: a critic learns, too

pytestmark = pytest.mark.usefixtures("world")


@pytest.mark.parametrize(
    "name", [n if n == ALWAYS else pytest.param(n, marks=pytest.mark.learning) for n in CASES]
)
def test_the_reward_rises(name, warm, tmp_path, request):
    options = dict(CASES[name])
    if "teacher_pretrain" in options:
        options["teacher_pretrain"] = request.getfixturevalue("better")
    rows = train(warm, tmp_path, **options)
    assert name in MEASURED, f"write the mean rise over a few seeds into MEASURED: {rise(rows):.2f}"
    assert rise(rows) > MEASURED[name] / 2
    if "teacher_pretrain" in options:
        assert rows[-1]["rollout/teacher_kl"] < rows[0]["rollout/teacher_kl"] / 2


@pytest.mark.learning
def test_without_a_learning_rate_it_does_not(warm, tmp_path):
    rows = train(warm, tmp_path, **GRPO, actor_learning_rate=0.0)
    assert abs(rise(rows)) < min(MEASURED.values()) / 2


class Hotter:
    """An engine that samples at a higher temperature than the trainer's, and says so in its log probs."""

    def __init__(self, engine):
        self.engine = engine

    def generate(self, prompts, sampling):
        return self.engine.generate(prompts, replace(sampling, temperature=1.3))


@pytest.mark.learning
def test_a_correction_learns_from_an_engine_that_is_not_the_trainer(warm, tmp_path):
    rows = train(
        warm, tmp_path, engine=Hotter, **GRPO, rollout_correction="tis", old_log_probs="forward"
    )
    assert all(row["rollout/mismatch_k3_kl"] > 0.01 for row in rows)
    assert all(row["rollout/loss_weight"] != 1 for row in rows)
    assert rise(rows) > MEASURED["tis"] / 2


@pytest.mark.learning
@pytest.mark.parametrize("value_norm", [None, "exp", "ma"])
def test_the_critic_learns_which_answers_have_gone_wrong(warm, tmp_path, value_norm):
    """The policy stays as it is. Measured: 0.08 to 0.15 without normalisation, 0.12 to 0.16 with either."""
    rows = train(
        warm,
        tmp_path,
        **GAE,
        value_norm=value_norm,
        freezing_actor_steps=48,
        total_training_steps=48,
        num_episodes=3,
    )
    explained = [row["rollout/vf_explained_var"] for row in rows]
    assert explained[0] < 0
    assert sum(explained[-12:]) / 12 > 0.04
    assert abs(rise(rows)) < 0.05
